"""Datasets of Hugging Face's `datasets`, as far as they can be had without the hub: folders, files, a local server."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import tiny
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Translation, Value
from pages import commands

from t2t import cli
from t2t.data import hub, sources
from t2t.data.sources import Reader
from t2t.data.tables import begins_document
from t2t.data.tasks import Task, is_chat
from t2t.data.tokens import Bytes
from t2t.errors import InputError
from t2t.models import load as models

COUNT = 600  # more than two batches

Fields = dict[str, Any]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", folder / "downloads")
    hub._of_hub.cache_clear()
    datasets.disable_progress_bars()
    return folder


def news(count: int, first: int = 0) -> list[Fields]:
    return [{"article": f"Un text lung despre {i} oameni.", "highlights": f"{i} oameni"} for i in range(first, count)]


def write_jsonl(file: Path, rows: list[Fields]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def saved_splits(folder: Path) -> str:
    splits = {"train": Dataset.from_list(news(COUNT)), "validation": Dataset.from_list(news(30, first=10))}
    DatasetDict(splits).save_to_disk(folder / "news")
    return f"dataset:{folder}/news@train"


def saved_dataset(folder: Path) -> str:
    Dataset.from_list(news(COUNT)).save_to_disk(folder / "one", num_shards=3)
    return f"dataset:{folder}/one@train"


def arrow_file(folder: Path) -> str:
    Dataset.from_list(news(COUNT)).save_to_disk(folder / "one")
    return f"dataset:{folder}/one/data-00000-of-00001.arrow@train"


def parquet_folder(folder: Path) -> str:
    for part in range(2):
        rows = news(300 * (part + 1), first=300 * part)
        Dataset.from_list(rows).to_parquet(folder / "parquet" / f"train-{part}.parquet", batch_size=100)
    return f"dataset:{folder}/parquet@train"


def json_folder(folder: Path) -> str:
    write_jsonl(folder / "json" / "train.jsonl", news(COUNT))
    write_jsonl(folder / "json" / "validation.jsonl", news(7))
    return f"dataset:{folder}/json@train"


def json_files(folder: Path) -> str:
    for part in range(2):
        write_jsonl(folder / "files" / f"{part}.jsonl", news(300 * (part + 1), first=300 * part))
    return f"dataset:json:{folder}/files/*.jsonl@train"


KINDS = (saved_splits, saved_dataset, arrow_file, parquet_folder, json_folder, json_files)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def save(folder: Path, rows: list[Fields], features: dict[str, Any] | None = None) -> str:
    Dataset.from_list(rows, features=Features(features) if features else None).save_to_disk(folder / "saved")
    return f"dataset:{folder}/saved@train"


def pairs(entry: str, **settings: str) -> list[tuple[str, str]]:
    task = Task(**settings)
    reader = Reader(sources.resolve([entry]), columns=(task.source, task.target))
    return [(example.source, example.target) for example in task.examples(reader)]


class TestRows:
    @every_kind
    @pytest.mark.parametrize("streaming", [False, True])
    def test_every_row_once_and_in_order(self, kind: Callable[[Path], str], streaming: bool, tmp_path: Path) -> None:
        entry = hub.resolve(kind(tmp_path), "data.train")
        expected = list(enumerate(news(COUNT), 1))
        assert list(hub.rows(entry, streaming=streaming)) == expected
        for start in (1, hub.ROWS, 299, 300, COUNT - 1, COUNT):
            assert list(hub.rows(entry, start, streaming)) == expected[start:]
        assert hub.count(entry) == COUNT

    def test_streaming_stores_nothing(self, tmp_path: Path, cache: Path) -> None:
        entry = parquet_folder(tmp_path)
        next(hub.rows(entry, streaming=True))
        assert not list(cache.rglob("*.arrow"))
        next(hub.rows(entry))
        assert list(cache.rglob("*.arrow"))

    @pytest.mark.parametrize(
        ("split", "numbers"),
        [
            ("train[:1%]", [*range(6)]),
            ("train[100:103]", [100, 101, 102]),
            ("train[-2:]", [598, 599]),
            ("validation[:1]+train[:2]", [10, 0, 1]),
        ],
    )
    def test_slices_and_sums(self, split: str, numbers: list[int], tmp_path: Path) -> None:
        saved_splits(tmp_path)
        entry = hub.resolve(f"dataset:{tmp_path}/news@{split}", "data.train")
        expected = [news(i + 1, first=i)[0] for i in numbers]
        assert list(hub.rows(entry)) == list(enumerate(expected, 1))
        assert hub.count(entry) == len(numbers)
        json_folder(tmp_path)
        with pytest.raises(InputError, match="slices and sums of splits cannot be streamed"):
            list(hub.rows(f"dataset:{tmp_path}/json@{split}", streaming=True))

    def test_records_know_their_place(self, tmp_path: Path) -> None:
        entry = saved_splits(tmp_path)
        records = list(Reader([entry]))
        assert [record.where for record in records[:2]] == [f"{entry}:1", f"{entry}:2"]
        assert sources.format_of(entry, "txt") == "dataset"
        assert begins_document(records[1].where, records[0].where, "auto"), "every row is a document"

    def test_rows_without_a_word_are_passed_over(self, tmp_path: Path) -> None:
        entry = save(tmp_path, [{"text": text} for text in ("", "one", " \n", None, "two")])
        assert list(hub.rows(entry)) == [(2, {"text": "one"}), (5, {"text": "two"})]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_text_that_is_not_utf8_is_a_bad_line(self, streaming: bool, tmp_path: Path) -> None:
        text = pyarrow.array([b"one", b"\xff", b"three"]).view("string")
        from pyarrow import parquet

        (tmp_path / "broken").mkdir()
        parquet.write_table(pyarrow.table({"text": text}), tmp_path / "broken" / "train.parquet")
        entry = f"dataset:{tmp_path}/broken@train"
        assert list(hub.rows(entry, streaming=streaming)) == [(1, {"text": "one"}), (2, None), (3, {"text": "three"})]
        reader = Reader([entry], on_bad_line="skip")
        assert [record.line for record in reader] == [1, 3]
        assert reader.bad == [f"{entry}:2: invalid UTF-8"]

    def test_memory_stays_flat(self, tmp_path: Path) -> None:
        size = 40_000_000
        Dataset.from_dict({"text": ["x" * 1000] * (size // 1000)}).save_to_disk(tmp_path / "big")
        tracemalloc.start()
        try:
            most = 0
            for _ in hub.rows(f"dataset:{tmp_path}/big@train"):
                most = max(most, pyarrow.total_allocated_bytes())
            assert tracemalloc.get_traced_memory()[1] + most < size / 10
        finally:
            tracemalloc.stop()


class TestNames:
    @pytest.mark.parametrize(
        ("kind", "entry", "key", "split"),
        [
            (saved_splits, "news", "data.train", "train"),
            (saved_splits, "news", "data.validation", "validation"),
            (parquet_folder, "parquet", "data", "train"),  # the only one
            (saved_dataset, "one", "data.validation", "train"),  # one that is not split
            (arrow_file, "one/data-00000-of-00001.arrow", "data", "train"),
            (json_folder, "json@validation", "data.train", "validation"),
        ],
    )
    def test_split_that_is_meant(
        self, kind: Callable[[Path], str], entry: str, key: str, split: str, tmp_path: Path
    ) -> None:
        kind(tmp_path)
        assert sources.resolve([f"dataset:{tmp_path}/{entry}"], key) == [
            f"dataset:{tmp_path}/{entry.partition('@')[0]}@{split}"
        ]

    def test_data_files_have_one_split(self, tmp_path: Path) -> None:
        entry = json_files(tmp_path)
        assert sources.resolve([entry.removesuffix("@train")], "data.validation") == [entry]

    @pytest.mark.parametrize(
        ("kind", "entry", "key", "message"),
        [
            (
                saved_splits,
                "news@trian",
                "data.train",
                "no split 'trian' (did you mean train?); found: train, validation",
            ),
            (json_folder, "json@tset", "data.train", "no split 'tset'; found: train, validation"),
            (json_folder, "json@train+tset[:5]", "data.train", "no split 'tset'; found: train, validation"),
            (parquet_folder, "parquet", "data.validation", "no split 'validation'; found: train"),
            (saved_dataset, "one@test", "doctor", "no split 'test': it has none, and is read whole without a name"),
            (saved_splits, "news", "doctor", "name one of its splits, as FOLDER/news@train; found: train, validation"),
            (saved_splits, "news:en", "data.train", "what was saved as Arrow has no configurations: leave out :en"),
            (saved_dataset, "one:en", "data.train", "what was saved as Arrow has no configurations: leave out :en"),
            (json_folder, "json:en", "data.train", "no configuration 'en'; found: default"),
            (json_folder, "jsn", "data.train", "no such folder, and no name of the hub either (did you mean json?)"),
            (json_folder, "json/train.jsonl", "--input", "is a file: leave out 'dataset:', or name its format, as "),
        ],
    )
    def test_what_there_is_not(
        self, kind: Callable[[Path], str], entry: str, key: str, message: str, tmp_path: Path
    ) -> None:
        kind(tmp_path)
        with pytest.raises(InputError) as error:
            sources.resolve([f"dataset:{tmp_path}/{entry}"], key)
        assert str(error.value).startswith(f"{key}: dataset:{tmp_path}/{entry}".partition("@")[0])
        assert message.replace("FOLDER", f"dataset:{tmp_path}") in str(error.value)

    def test_configurations(self, tmp_path: Path) -> None:
        with_configurations(tmp_path / "mc", "en", "ro")
        assert pairs(f"dataset:{tmp_path}/mc:ro@train")[0] == ("ro 0", "RO 0")
        for entry, message in (
            (":rr", "no configuration 'rr' (did you mean ro?); found: en, ro"),
            ("", f"name one of its configurations, as dataset:{tmp_path}/mc:en; found: en, ro"),
        ):
            with pytest.raises(InputError, match=re.escape(f"data.train: dataset:{tmp_path}/mc{entry}: {message}")):
                sources.resolve([f"dataset:{tmp_path}/mc{entry}@train"])

    @pytest.mark.parametrize("split", ["train[:1%", "train[a:b]", "train[:200%]"])
    def test_a_slice_that_is_none(self, split: str, tmp_path: Path) -> None:
        saved_splits(tmp_path)
        with pytest.raises(
            InputError, match=r"^data.train: dataset:.*/news@train\[.*: cannot be read: (Unrecognized|Percent)"
        ):
            sources.resolve([f"dataset:{tmp_path}/news@{split}"])

    def test_a_url_with_an_at_sign_has_no_split(self) -> None:
        name = hub._Name.parse("dataset:parquet:http://me@here/x.parquet")
        assert name == ("parquet", "http://me@here/x.parquet", "")
        assert str(name) == "dataset:parquet:http://me@here/x.parquet"

    def test_files_of_a_format_must_be_named(self) -> None:
        with pytest.raises(
            InputError, match="data.train: dataset:parquet: name the data files, as dataset:parquet:http"
        ):
            sources.resolve(["dataset:parquet"])


def with_configurations(folder: Path, *names: str) -> None:
    card = "".join(f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in names)
    for name in names:
        write_jsonl(folder / name / "train.jsonl", [{"src": f"{name} 0", "tgt": f"{name.upper()} 0"}])
    (folder / "README.md").write_text(f"---\nconfigs:\n{card}---\n")


class TestLayouts:
    @pytest.mark.parametrize(
        "names",
        [("article", "highlights"), ("document", "summary"), ("dialogue", "summary"), ("question", "answer")],
    )
    def test_known_pairs(self, names: tuple[str, str], tmp_path: Path) -> None:
        row = {"id": "7", names[0]: "lung", names[1]: "scurt", "title": "T"}
        assert pairs(save(tmp_path, [row])) == [("lung", "scurt")]

    def test_plain_text(self, tmp_path: Path) -> None:
        assert pairs(save(tmp_path, [{"text": "Bună", "id": 3}])) == [("Bună", "Bună")]

    def test_translation(self, tmp_path: Path) -> None:
        rows = [{"translation": {"en": "bread", "ro": "pâine"}}]
        entry = save(tmp_path, rows, {"translation": Translation(languages=["en", "ro"])})
        assert pairs(entry, source="ro", target="en") == [("pâine", "bread")]
        with pytest.raises(InputError, match=r'translation\.en, translation\.ro .*data\.source.*as "en" and "ro"'):
            pairs(entry)

    def test_answers_inside(self, tmp_path: Path) -> None:
        rows = [{"question": "Cât?", "answers": {"text": ["doi", "2"], "answer_start": [1, 5]}}]
        assert pairs(save(tmp_path, rows), source="question", target="answers.text") == [("Cât?", "doi")]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_messages(self, streaming: bool, tmp_path: Path) -> None:
        """Keys that are not always there make JSON of them, for `datasets`."""
        chat = [{"role": "user", "content": "Salut"}, {"role": "assistant", "content": "Bună", "score": 3}]
        other = [{"role": "user", "content": "Salut", "score": "none"}, {"role": "assistant", "content": "Bună"}]
        write_jsonl(tmp_path / "chat" / "train.jsonl", [{"messages": chat}, {"messages": other}])
        entry = f"dataset:{tmp_path}/chat@train"
        found = [fields for _, fields in hub.rows(entry, streaming=streaming)]
        assert found == [{"messages": chat}, {"messages": other}]
        assert all(fields is not None and is_chat(fields) for fields in found)

    def test_class_labels(self, tmp_path: Path) -> None:
        rows = [{"text": "bun", "label": 1}, {"text": "rău", "label": 0}, {"text": "?", "label": -1}]
        entry = save(tmp_path, rows, {"text": Value("string"), "label": ClassLabel(names=["minus", "plus"])})
        assert pairs(f"{entry}[:2]", source="text", target="label") == [("bun", "plus"), ("rău", "minus")]
        assert pairs(entry)[0] == ("bun", "bun"), "a label nobody asks for is no text"
        with pytest.raises(InputError, match=":3: field 'label' is null, expected text"):
            pairs(entry, source="text", target="label")

    @pytest.mark.parametrize("streaming", [False, True])
    def test_what_is_not_text_is_never_decoded(
        self, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        image = {"bytes": b"no image", "path": None}
        rows = [
            {"picture": image, "text": "o casă", "more": [image], "sizes": [[1, 2]]},
            {"picture": image, "text": "", "more": [image], "sizes": None},  # nothing to read here
        ]
        features = {
            "picture": Image(),
            "text": Value("string"),
            "more": List(Image()),
            "sizes": List(List(Value("int64"))),
        }
        (tmp_path / "seen").mkdir()
        Dataset.from_list(rows, features=Features(features)).to_parquet(tmp_path / "seen" / "train.parquet")
        entry = f"dataset:{tmp_path}/seen@train"

        def decode(*arguments: Any, **settings: Any) -> None:
            raise AssertionError("decoded")

        monkeypatch.setattr(Image, "decode_example", decode)
        ((_, fields),) = hub.rows(entry, streaming=streaming)
        assert fields is not None and fields["text"] == "o casă"
        assert pairs(entry) == [("o casă", "o casă")]
        for column, what in (
            ("picture", "field 'picture' is of the type Image, expected text"),
            ("more", "field 'more' is of the type Image, expected text"),
            ("sizes", "field 'sizes' is an array that holds an array, expected strings"),
        ):
            with pytest.raises(InputError, match=f"{re.escape(entry)}:1: {what}"):
                pairs(entry, source="text", target=column)


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """Answers a request for some bytes of a file with just these, as servers of data do."""

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return super().do_GET()
        body = Path(self.translate_path(self.path)).read_bytes()
        first, last = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        self.wfile.write(body[first : last + 1])
        return None

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address at which the test's folder is served."""
    handler = functools.partial(_Ranges, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


class TestRemote:
    @pytest.mark.parametrize("format", ["parquet", "json", "csv", "text"])
    @pytest.mark.parametrize("streaming", [False, True])
    def test_files_of_a_server(self, format: str, streaming: bool, server: str, online: None, tmp_path: Path) -> None:
        rows = news(COUNT)
        if format == "text":
            rows = [{"text": row["article"]} for row in rows]
            (tmp_path / "news.text").write_text("".join(row["text"] + "\n" for row in rows))
        else:
            getattr(Dataset.from_list(rows), f"to_{format}")(tmp_path / f"news.{format}")
        (entry,) = sources.resolve([f"dataset:{format}:{server}/news.{format}"])
        assert entry == f"dataset:{format}:{server}/news.{format}@train"
        if format == "text" and streaming:
            with pytest.raises(InputError, match=f"without dataset:text: name {server}/news.text itself"):
                list(hub.rows(entry, streaming=True))
            return
        assert list(hub.rows(entry, streaming=streaming)) == list(enumerate(rows, 1))
        assert list(hub.rows(entry, 555, streaming)) == list(enumerate(rows, 1))[555:]
        assert len(hub.fingerprint(entry)) == 16

    def test_a_file_that_is_not_there(self, server: str, online: None) -> None:
        with pytest.raises(
            InputError, match=f"data.train: dataset:json:{server}/no.jsonl: cannot be read: Unable to find"
        ):
            sources.resolve([f"dataset:json:{server}/no.jsonl"])

    def test_fingerprint_follows_a_file(self, server: str, online: None, tmp_path: Path) -> None:
        prints = []
        for count in (5, 5, 6):
            write_jsonl(tmp_path / "news.jsonl", news(count))
            prints.append(hub.fingerprint(f"dataset:json:{server}/news.jsonl@train"))
        assert prints[0] == prints[1] != prints[2]


def keep_in_cache(name: str, cache: Path, folder: Path) -> None:
    """As if the dataset in a folder had been fetched from the hub before, with all its configurations."""
    for config in datasets.get_dataset_config_names(str(folder)):
        datasets.load_dataset(str(folder), config)
    shutil.move(cache / folder.name, cache / name.replace("/", "___"))


class TestOffline:
    def test_unknown_to_the_cache(self) -> None:
        with pytest.raises(InputError) as error:
            sources.resolve(["dataset:owner/name:de@train"])
        message = "data.train: dataset:owner/name:de@train: cannot be reached, and is not in the cache: fetch it once"
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)

    def test_cache(self, cache: Path, tmp_path: Path) -> None:
        with_configurations(tmp_path / "mc", "en", "ro")
        keep_in_cache("owner/mc", cache, tmp_path / "mc")
        assert pairs("dataset:owner/mc:ro") == [("ro 0", "RO 0")]
        assert list(hub.rows("dataset:owner/mc:en@train", streaming=True)) == [(1, {"src": "en 0", "tgt": "EN 0"})]
        assert hub.fingerprint("dataset:owner/mc:en@train") != hub.fingerprint("dataset:owner/mc:ro@train")
        with pytest.raises(InputError, match=r"no configuration 'rr' \(did you mean ro\?\); found: en, ro"):
            sources.resolve(["dataset:owner/mc:rr"])

    def test_scripts_are_not_run(self, tmp_path: Path) -> None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        with pytest.raises(InputError, match="own: is made by a script, which is never run: look for a copy of it in"):
            sources.resolve([f"dataset:{tmp_path}/own"])
        assert not (tmp_path / "ran").exists()

    def test_a_broken_file_is_named_in_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
        with pytest.raises(InputError, match=r"bad@train: cannot be read: JSON parse error: [^\n]*$"):
            list(hub.rows(f"dataset:{tmp_path}/bad@train"))
        (tmp_path / "bad.arrow").write_bytes(b"no arrow")
        with pytest.raises(InputError, match=r"^data.train: dataset:.*/bad.arrow: cannot be read: \S[^\n]*$"):
            sources.resolve([f"dataset:{tmp_path}/bad.arrow"])

    def test_without_the_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = saved_splits(tmp_path)
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(
            InputError, match=re.escape(f"data.train: {entry}: needs the datasets package: pip install 't2t[hub]'")
        ):
            sources.resolve([entry])

    def test_imported_only_when_used(self) -> None:
        code = "import sys, t2t.data.sources, t2t.data.loader; assert not {'datasets', 'pyarrow'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


class TestFingerprint:
    @every_kind
    def test_same_rows_same_fingerprint(self, kind: Callable[[Path], str], tmp_path: Path, cache: Path) -> None:
        """In another process too, or a store would never be found again."""
        entry = kind(tmp_path)
        code = "import sys; from t2t.data import hub; print(hub.fingerprint(sys.argv[1])); hub.count(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", code, entry],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"HF_DATASETS_CACHE": str(cache)},
        )
        assert not done.stderr, "no progress bars where there is no terminal"
        assert hub.fingerprint(entry) == done.stdout.strip()
        assert hub.fingerprint(f"{entry}[:5]") != done.stdout.strip()

    @pytest.mark.parametrize("kind", [saved_dataset, json_folder], ids=lambda kind: kind.__name__)
    def test_other_rows(self, kind: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = hub.fingerprint(kind(tmp_path))
        monkeypatch.setattr(
            f"{__name__}.news", lambda count, first=0: [{"article": "altul", "highlights": "x"}] * count
        )
        assert hub.fingerprint(kind(tmp_path)) != before


@pytest.fixture
def workplace(tmp_path: Path, cache: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the documentation speaks of, and a tiny model."""
    monkeypatch.chdir(tmp_path)
    saved_splits(tmp_path)
    Dataset.from_list(news(40)).to_parquet(tmp_path / "news.parquet")
    card = "---\nconfigs:\n- config_name: 3.0.0\n  data_files:\n"
    for split in ("train", "validation"):
        write_jsonl(tmp_path / "cnn_dailymail" / f"{split}.jsonl", news(40))
        card += f"  - split: {split}\n    path: {split}.jsonl\n"
    (tmp_path / "cnn_dailymail" / "README.md").write_text(f"{card}---\n")
    keep_in_cache("abisee/cnn_dailymail", cache, tmp_path / "cnn_dailymail")
    models.save(models.create(tiny.RAW, seed=1).state_dict(), tiny.RAW, tmp_path / "tiny")
    Bytes().save(tmp_path / "tiny")
    return tmp_path


TOY = [
    *("--model.path", "tiny", "--run.threads", "1", "--data.max_samples", "16", "--data.max_validation_samples", "4"),
    *("--data.max_source_length", "64", "--train.steps", "2", "--train.batch", "4", "--train.log_every", "1"),
    *("--generate.max_length", "8"),
]


class TestCommands:
    def test_documented(
        self, workplace: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """All of them, in the order of the page: a server of our own stands for the web, the cache for the hub."""
        printed = {}
        for line in commands("data.md", "Datasets of the hub"):
            monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", "://" not in line)
            words = [word.replace("https://example.org", server) for word in shlex.split(line)]
            toy = TOY if words[1] == "train" else TOY[-2:] if words[1] in ("evaluate", "generate") else []
            assert cli.main([*words[1:], *toy]) == 0, f"{line}\n{capsys.readouterr().err}"
            printed[words[1]] = capsys.readouterr().out
        assert {folder.name for folder in workplace.glob("runs/*") if (folder / "model").is_dir()} == {
            *("news", "cnn", "url"),
        }
        log = [json.loads(line) for line in (workplace / "runs" / "news" / "log.jsonl").read_text().splitlines()]
        assert "validation_rougeL" in log[-1]
        assert re.search(r"dataset:news@train +dataset +600 +600 +0 +article highlights", printed["doctor"])
        assert [json.loads(line)["input"] for line in printed["generate"].splitlines()] == [
            row["article"] for row in news(12, first=10)
        ]

    @pytest.mark.parametrize("verb", [["doctor"], ["evaluate", "tiny"], ["generate", "tiny", "--input"]])
    def test_exit_code(self, verb: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*verb, "dataset:news@tarin"]) == 2
        assert "dataset:news@tarin: no split 'tarin' (did you mean train?)" in capsys.readouterr().err

    def test_exit_code_of_train(self, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--data.train", "dataset:news", "--data.validation", "dataset:news@test"]
        assert cli.main(["train", "t5-summarize", *flags, *TOY]) == 2
        assert "error: data.validation: dataset:news@test: no split 'test'" in capsys.readouterr().err
