"""Stores hold what memory holds, are made by many, go on after an interruption, and are never stale."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocabularies import CHATML, chatting, letters

from t2t.cli import main
from t2t.config import Data
from t2t.config import load as load_config
from t2t.data import prepare, store
from t2t.data.loader import Loader, pick_shape
from t2t.data.objectives import Objective, features_of
from t2t.data.packing import slots
from t2t.data.splits import read_splits
from t2t.data.tables import Splits
from t2t.data.tokens import Bytes, Tokenizer, load
from t2t.errors import InputError

PAIRS = "".join(f"{'ab' * (i % 7)} {i}\t{'ș' * (1 + i % 5)}{i}\n" for i in range(97))
DOCUMENTS = "\n\n".join("\n".join(f"line {j} of text {i}" for j in range(1 + i % 4)) for i in range(60)) + "\n"
TALKS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}) + "\n"
    for i in range(40)
)
CASES = {
    "pairs": ("seq2seq", PAIRS, "pairs.tsv"),
    "causal pairs": ("causal", PAIRS, "pairs.tsv"),
    "character_noise": ("seq2seq", DOCUMENTS, "text.txt"),
    "span_corruption": ("seq2seq", DOCUMENTS, "text.txt"),
    "prefix_lm": ("seq2seq", DOCUMENTS, "text.txt"),
    "lm": ("causal", DOCUMENTS, "text.txt"),
    "blocks": ("causal", DOCUMENTS, "text.txt"),
    "masked_lm": ("masked", DOCUMENTS, "text.txt"),
    "masked_lm_nsp": ("masked", DOCUMENTS, "text.txt"),
    "chat": ("causal", TALKS, "talks.jsonl"),
}


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few lines, shards of few bytes, and no store outside of the test's folder."""
    monkeypatch.setenv("T2T_STORE", str(tmp_path / "stores"))
    monkeypatch.setattr(prepare, "RECORDS", 7)
    monkeypatch.setattr(store, "SHARD_BYTES", 600)


def case(name: str, folder: Path, **settings: Any) -> tuple[Data, Tokenizer, str]:
    kind, text, file = CASES[name]
    (folder / file).write_text(text)
    tokenizer: Tokenizer = Bytes()
    if name == "chat":
        tokenizer = chatting(CHATML)
    if kind == "masked":
        tokenizer = load(str(letters(folder / "letters")))
    given = {"train": (str(folder / file),), "objective": name.split()[-1], "max_source_length": 24, "block": 48}
    return Data(**(given | {"max_target_length": 16} | settings)), tokenizer, kind


def splits(data: Data, tokenizer: Tokenizer, kind: str) -> Splits:
    return read_splits(data, tokenizer, seed=1, kind=kind, start_id=2)


def made(data: Data, tokenizer: Tokenizer, kind: str, processes: int = 0) -> store.Store:
    maker = prepare.Maker(data, tokenizer, data.objective, kind, start_id=2)
    return prepare.prepare(maker, list(data.train), processes)


def told(examples: Objective | None) -> list[Any]:
    """All that an objective says."""
    if examples is None:
        return []
    features = [examples.feature(i, seed=i) for i in range(len(examples))]
    shuffled = np.random.default_rng(0).integers(len(examples), size=2 * len(examples))
    for i, feature in zip(shuffled, features_of(examples, shuffled, iter(shuffled.tolist())), strict=True):
        np.testing.assert_equal(tuple(feature), tuple(features[i]))
    whole = [[None if part is None else np.asarray(part).tolist() for part in feature] for feature in features]
    sizes = [side.tolist() for side in examples.sizes(np.arange(len(examples)))]
    return [whole, sizes, examples.longest, examples.fingerprint, examples.words, examples.tell(len(examples) - 1)]


@pytest.mark.parametrize("split", [0.0, 0.2])
@pytest.mark.parametrize("name", CASES)
def test_a_store_holds_what_memory_holds(name: str, split: float, tmp_path: Path) -> None:
    data, tokenizer, kind = case(name, tmp_path, validation_split=split, max_validation_samples=9)
    memory = splits(data, tokenizer, kind)
    found = made(data, tokenizer, kind)
    assert len(found.manifest["shards"]) > 1
    stored = splits(data, tokenizer, kind)
    assert stored.notes[0] == f"data.train: {len(found):,} records are in the store {found.folder}"
    assert stored.notes[1:] == memory.notes
    for one, other in ((stored.train, memory.train), (stored.validation, memory.validation)):
        assert told(one) == told(other)
    assert list(stored.validation_examples) == list(memory.validation_examples)
    again = pickle.loads(pickle.dumps(stored.train))  # as a reader process gets it
    assert told(again) == told(memory.train)
    assert len(pickle.dumps(stored.train)) < 20_000 + len(pickle.dumps(tokenizer))


@pytest.mark.parametrize(("name", "threads", "most"), [("pairs", False, 4), ("lm", True, 4), ("lm", False, 1)])
def test_several_processes_or_threads_make_the_same_store(
    name: str, threads: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, tokenizer, kind = case(name, tmp_path)
    tokenizer = chatting(CHATML) if name == "lm" else tokenizer
    monkeypatch.setattr(prepare, "MOST_THREADS", most)
    pool, _ = prepare._workers(prepare.Maker(data, tokenizer, name, kind, start_id=2), 2)
    assert isinstance(pool, ThreadPoolExecutor) == threads
    one = made(data, tokenizer, kind)
    other = made(dataclasses.replace(data, store=str(tmp_path / "other")), tokenizer, kind, processes=2)
    assert one.folder != other.folder and one.manifest == other.manifest
    names = sorted(file.name for file in one.folder.iterdir())
    assert all((one.folder / name).read_bytes() == (other.folder / name).read_bytes() for name in names)


@pytest.mark.parametrize("name", ["pairs", "masked_lm_nsp", "chat"])
@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_what_was_interrupted_goes_on(name: str, blocks: int, tmp_path: Path) -> None:
    data, tokenizer, kind = case(name, tmp_path)
    whole = made(dataclasses.replace(data, store=str(tmp_path / "whole")), tokenizer, kind).manifest
    maker = prepare.Maker(data, tokenizer, data.objective, kind, start_id=2)
    seen: list[int] = []

    def stop(*figures: int) -> None:
        seen.append(figures[2])
        if len(seen) == blocks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(maker, list(data.train), 0, stop)
    folder = prepare.place(maker, list(data.train)).folder
    assert not prepare.is_stored(maker, list(data.train))
    finished = {file: file.stat().st_mtime_ns for file in folder.glob("*.json")}
    begun: list[int] = []
    found = prepare.prepare(maker, list(data.train), 0, lambda *figures: begun.append(figures[2]))
    assert found.manifest == whole
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    if finished:
        assert begun[0] > seen[0]  # it did not begin anew


def test_a_killed_process_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pairs.tsv").write_text(PAIRS * 800)
    command = [sys.executable, "-m", "t2t", "prepare", "--data.train", str(tmp_path / "pairs.tsv"), "--model.tokenizer"]
    command += ["bytes", "--model.config", "t5-small", "--processes", "1", "--data.store", str(tmp_path / "stores")]
    cut = (
        "import t2t.data.store as s; s.SHARD_BYTES = 40_000; import sys, t2t.cli; sys.exit(t2t.cli.main(sys.argv[1:]))"
    )
    command[1:3] = ["-c", cut]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    while len(list(tmp_path.glob("stores/*/*.json"))) < 2 and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[0].decode()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (folder,) = (folder for folder in (tmp_path / "stores").iterdir() if folder.is_dir())
    finished = {file: file.stat().st_mtime_ns for file in folder.glob("*.json")}
    assert folder / "manifest.json" not in finished
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    assert f"{97 * 800:,}" in done.stdout and str(folder) in done.stdout
    data = Data(train=(str(tmp_path / "pairs.tsv"),), store=str(tmp_path / "stores"))
    found = store.opened(folder)
    assert found is not None
    monkeypatch.setattr(prepare, "RECORDS", 5000)
    whole = prepare.in_memory(prepare.Maker(data, Bytes(), "pairs", "seq2seq", 0), list(data.train))
    assert found.column("target").digest == whole.column("target").digest


def test_another_text_setting_or_tokenizer_is_another_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_transform.py").write_text("def up(text):\n    return text.upper()\n")
    data, tokenizer, kind = case("pairs", tmp_path)

    def folder(**settings: Any) -> Path:
        maker = prepare.Maker(dataclasses.replace(data, **settings), tokenizer, "pairs", kind, 2)
        return prepare.place(maker, list(data.train)).folder

    own = {"target_transforms": ("own_transform:up",)}
    several = [folder(), folder(prefix="x"), folder(max_source_length=9), folder(max_samples=5), folder(**own)]
    (tmp_path / "own_transform.py").write_text("def up(text):\n    return text.lower()\n")
    several.append(folder(**own))
    file = tmp_path / "pairs.tsv"
    before = file.stat()
    file.write_text(PAIRS.replace("a", "c"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    several.append(folder())
    assert len(set(several)) == len(several)
    assert folder(readers=3, shuffle=7) == folder()


def test_files_that_change_meanwhile_make_no_store(tmp_path: Path) -> None:
    data, tokenizer, kind = case("pairs", tmp_path)
    maker = prepare.Maker(data, tokenizer, "pairs", kind, 2)
    file = tmp_path / "pairs.tsv"
    with pytest.raises(InputError, match="files changed while they were read"):
        prepare.prepare(maker, list(data.train), 0, lambda *_: os.utime(file))
    assert not prepare.is_stored(maker, list(data.train))


@pytest.mark.parametrize("stored", [False, True])
def test_bad_lines_are_counted_over_all_blocks(stored: bool, tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("".join("bad\n" if i % 10 == 9 else f"a{i}\tb\n" for i in range(60)))
    data = Data(train=(str(file),), objective="pairs", on_bad_line="skip")
    make = made if stored else lambda data, *rest: read_splits(data, rest[0], 1, rest[1], 2)
    with pytest.raises(InputError, match=rf"{file}:10: 1 columns"):
        make(dataclasses.replace(data, on_bad_line="error"), Bytes(), "seq2seq")
    with pytest.raises(InputError, match=rf"more than data.max_bad_lines = 5 bad lines, the first: {file}:10: "):
        make(dataclasses.replace(data, max_bad_lines=5), Bytes(), "seq2seq")
    make(data, Bytes(), "seq2seq")
    found = splits(data, Bytes(), "seq2seq")
    assert len(found.train) == 54
    assert f"data.train: 6 bad lines skipped, the first: {file}:10: 1 columns" in found.notes[-1]


def test_a_cut_store_is_named(tmp_path: Path) -> None:
    data, tokenizer, kind = case("pairs", tmp_path)
    found = made(data, tokenizer, kind)
    for file in found.folder.glob("*.source.ids"):
        os.truncate(file, 3)
    with pytest.raises(InputError, match="shorter than its manifest says: remove"):
        splits(data, tokenizer, kind).train.feature(5, seed=0)


def test_large_files_are_stored_and_steps_far_on_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "STORED_FROM", 100)
    data, tokenizer, kind = case("pairs", tmp_path)
    found = splits(data, tokenizer, kind)
    assert "are in the store" in found.notes[0]
    loader = Loader(found.train, 16, pick_shape(found.train, data, 16, slots, 1), 4, 1, pad_id=0)
    ids = [i for n in range(loader.steps_per_epoch) for i in loader.taken(1_000_006 + n).tolist()]
    assert 1_000_006 % loader.steps_per_epoch == 0 and sorted(ids) == list(range(97))
    assert loader.step(1_000_000)


def test_the_command_tells_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, _, _ = case("pairs", tmp_path)
    words = ["prepare", "--data.train", *data.train, "--model.config", "t5-small", "--model.tokenizer", "bytes"]
    assert main([*words, "--processes", "0"]) == 0
    shown = capsys.readouterr().out
    assert "records" in shown and "97" in shown and str(tmp_path / "stores") in shown
    assert main([*words, "--processes", "0"]) == 0  # found at once
    assert capsys.readouterr().out == shown


def test_every_task_of_a_mixture_is_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, _, _ = case("pairs", tmp_path)
    (tmp_path / "more.tsv").write_text("unu\tdoi\n" * 9)
    words = ["--data.mix.there.train", *data.train, "--data.mix.back.train", str(tmp_path / "more.tsv")]
    words += ["--data.mix.back.source", "1", "--data.mix.back.target", "0"]
    words += ["--model.config", "t5-small", "--model.tokenizer", "bytes"]
    assert main(["prepare", *words, "--processes", "0"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [value for name, value in rows if name in ("task", "records")] == ["back", "9", "there", "97"]
    mixed = load_config(overrides=dict(zip([word[2:] for word in words[::2]], words[1::2], strict=True)))
    notes = read_splits(mixed.data, Bytes(), seed=1).notes
    folders = [value for name, value in rows if name == "store"]
    assert [note.rpartition(" ")[2] for note in notes] == folders


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.train", "x.hdf5"], "data.train: HDF5 shards hold tokens already and are read where they lie"),
        (["--data.mix.a.train", "x.hdf5"], "data.mix.a.train: HDF5 shards hold tokens already"),
        (["--data.mix.a.prefix", "a: "], "data.mix.a.train: no training files given"),
        (["--data.train", "pairs.tsv", "--data.streaming", "true"], "data.streaming: what is streamed is not stored"),
        (["--data.train", "http://127.0.0.1/x.tsv", "--data.objective", "pairs"], "/x.tsv: addresses are streamed"),
    ],
)
def test_what_needs_no_store_is_told(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    case("pairs", tmp_path)
    (tmp_path / "x.hdf5").touch()
    assert main(["prepare", *words, "--model.config", "t5-small", "--model.tokenizer", "bytes"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "stores").exists()
