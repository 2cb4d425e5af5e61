"""Streams: every record once an epoch over any ranks, readers and files, and a resumed one goes on to the byte."""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import random
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from pages import commands

from t2t import cli
from t2t.config import Config, Data
from t2t.data import blocks as blocks_module
from t2t.data import stream as stream_module
from t2t.data.loader import pick_shape
from t2t.data.masked import MaskedLM
from t2t.data.objectives import Prompted, Seq2Seq
from t2t.data.packing import Batch
from t2t.data.stream import Cursor, Made, Member, Sample, Source, Stream, check
from t2t.data.tables import reader
from t2t.data.tokens import Bytes
from t2t.errors import InputError
from t2t.train import run

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def write_pairs(folder: Path, counts: Sequence[int], suffix: str = "", blank: int = 0) -> tuple[str, ...]:
    """Files of so many pairs each; every ``blank``-th line is an empty one."""
    files = []
    for f, count in enumerate(counts):
        lines = [json.dumps({"s": f"source {f}.{i}", "t": f"{i}.{f}"}) + "\n" * (1 + (blank > 0 and i % blank == 0))
                 for i in range(count)]  # fmt: skip
        file = folder / f"part-{f}.jsonl{suffix}"
        file.write_bytes(PACK[suffix]("".join(lines).encode()))
        files.append(str(file))
    return tuple(files)


def make_source(
    files: Sequence[str], seed: int = 1, kind: str = "seq2seq", tokenizer: Any = None, **data: Any
) -> Source:
    given = {"max_source_length": 32, "max_target_length": 16, "shuffle": 7, **data}
    return Source(Data(train=tuple(files), **given), tokenizer or Bytes(), seed, kind, 0)


def make_stream(source: Source, batch: int, rank: int = 0, size: int = 1, readers: int = 0, **more: Any) -> Stream:
    learned = source.splits().train
    examples = Sample(learned, source.longest(learned))
    shape = pick_shape(examples, source.data, batch, lambda s, t: s + t, source.seed)
    return Stream(
        examples, batch, shape, 2, source.seed, 0, source=source, rank=rank, size=size, readers=readers, **more
    )


def epochs(member: Member, count: int = 2) -> list[list[int]]:
    """The numbers of the examples of a member's first epochs."""
    found: list[list[int]] = [[] for _ in range(count)]
    while True:
        numbers, _ = member.take(1)
        if member.cursor.epoch == count:
            return found
        found[member.cursor.epoch] += numbers


def records(source: Source) -> list[int]:
    """The numbers of all records, by reading the files whole."""
    lines = ((f, record.line) for f, file in enumerate(source.files) for record in reader([file], source.data))
    return [(f << 40) + line for f, line in lines]


def same(one: list[Batch], two: list[Batch]) -> bool:
    names = [field.name for field in dataclasses.fields(Batch)]
    return len(one) == len(two) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for a, b in zip(one, two, strict=True) for name in names
    )


def numbers_of(batches: list[Batch]) -> list[int]:
    return sorted(int(i) for batch in batches for i in batch.example_ids.flatten() if i >= 0)


def in_turn(stream: Stream, cursors: Sequence[Cursor], start: int, stop: int) -> list[Made]:
    """A rank's steps made here, by its readers in their turn."""
    makers = [stream._maker(w, cursor) for w, cursor in enumerate(cursors)]
    found = [makers[n % len(makers)].read(n) for n in range(start, stop)]
    for maker in makers:
        maker.member.close()
    return found


# Sharing


@pytest.mark.parametrize("shuffle", [1, 4, 1000])
@pytest.mark.parametrize("counts", [(23,), (30, 30), (9, 1, 14), (5, 12, 8, 1, 6, 7, 11, 30)])
def test_every_record_comes_once_an_epoch_for_any_ranks_and_readers(
    counts: tuple[int, ...], shuffle: int, tmp_path: Path
) -> None:
    source = make_source(write_pairs(tmp_path, counts, blank=5), shuffle=shuffle)
    everything = Counter(records(source))
    assert len(everything) == sum(counts)
    for members in (1, 2, 3, 4, 8):
        found = [epochs(Member(source, number, members, Cursor())) for number in range(members)]
        for epoch in range(2):
            assert Counter(i for member in found for i in member[epoch]) == everything
            assert all(member[epoch] for member in found)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("kind", ["tsv", "headed.tsv", "csv", "txt"])
def test_every_format_and_compression_is_shared(kind: str, suffix: str, tmp_path: Path) -> None:
    comma = "," if kind == "csv" else "\t"
    lines = [f"s{i}{comma}t{i}" if kind != "txt" else f"text {i}" for i in range(25)]
    header = [f"source{comma}target"] if kind in ("headed.tsv", "csv") else []
    file = tmp_path / f"data.{kind}{suffix}"
    file.write_bytes(PACK[suffix]("\n".join(["", *header, *lines]).encode()))
    source = make_source([str(file)], shuffle=3)
    found = [epochs(Member(source, number, 4, Cursor()), 1)[0] for number in range(4)]
    assert sorted(i for member in found for i in member) == records(source)
    assert len(records(source)) == 25


def test_parquet_is_shared(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"source": [*map(str, range(25))], "target": ["x"] * 25}), tmp_path / "a.parquet")
    source = make_source([str(tmp_path / "a.parquet")], shuffle=3)
    found = [epochs(Member(source, number, 4, Cursor()), 1)[0] for number in range(4)]
    assert sorted(i for member in found for i in member) == records(source) == [*range(1, 26)]


def test_with_files_enough_each_is_one_members_whole(tmp_path: Path) -> None:
    source = make_source(write_pairs(tmp_path, (5, 6, 7, 8, 9)))
    for epoch, files in ((0, source.epoch(0)), (1, source.epoch(1))):
        for number in range(3):
            own = {i >> 40 for i in epochs(Member(source, number, 3, Cursor()))[epoch]}
            assert own == {file for j, file in enumerate(files) if j % 3 == number}
    assert source.epoch(0) != source.epoch(1) or source.epoch(1) != source.epoch(2)


def test_small_files_do_not_all_begin_with_the_same_member(tmp_path: Path) -> None:
    source = make_source(write_pairs(tmp_path, (3, 3, 3)))
    found = [epochs(Member(source, number, 4, Cursor()), 1)[0] for number in range(4)]
    assert sorted(i for member in found for i in member) == records(source)


def test_a_member_for_whom_there_is_nothing_is_told_so(tmp_path: Path) -> None:
    source = make_source(write_pairs(tmp_path, (2,)))
    members = [Member(source, number, 3, Cursor()) for number in range(3)]
    assert sorted(i for member in members[:2] for i in epochs(member, 1)[0]) == [1, 2]
    with pytest.raises(InputError, match=r"data.train: nothing in 1 files for reader 2 of 3 \(ranks x data.readers\)"):
        members[2].take(1)


def test_documents_are_shared_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    documents = [[f"{d} line {i}" for i in range(1 + d % 3)] for d in range(13)]
    file.write_text("\n\n".join("\n".join(lines) for lines in documents))
    source = make_source([str(file)], kind="causal", objective="lm", shuffle=3)
    seen = []
    for number in range(4):
        member = Member(source, number, 4, Cursor())
        while True:
            _, features = member.take(1)
            if member.cursor.epoch:
                break
            seen.append(Bytes().decode(features[0].labels.tolist()))
    assert sorted(seen) == sorted("\n".join(lines) for lines in documents)


def test_a_document_that_has_no_end_is_parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MOST_BYTES", 40)
    monkeypatch.setattr(blocks_module, "LARGEST", 80)
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {i}\n" for i in range(50)))
    sizes = [len(block) for block in blocks_module.blocks(str(file), records=1000, documents=True)]
    assert sum(sizes) == 50 and max(sizes) < 15


# Order


def test_epochs_files_blocks_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, (40, 40))
    one, two = epochs(Member(make_source(files, shuffle=20), 0, 1, Cursor()))
    other, _ = epochs(Member(make_source(files, shuffle=20, seed=2), 0, 1, Cursor()))
    assert one != sorted(one) and one != two and one != other
    parts = [one[i : i + 20] for i in range(0, 80, 20)]
    places = [[(i & 0xFFFF) - min(j & 0xFFFF for j in part) for i in part] for part in parts]
    assert len({tuple(place) for place in places}) == 4
    assert all(sorted(place) == [*range(20)] for place in places)
    straight, _ = epochs(Member(make_source(files, shuffle=1), 0, 1, Cursor()))
    assert [i & 0xFFFF for i in straight] == [*range(1, 41)] * 2


def test_what_chance_decides_differs_between_epochs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("o casă mare și albă\n")
    member = Member(make_source([str(tmp_path / "a.txt")], objective="character_noise"), 0, 1, Cursor())
    sources = {feature.source.tobytes() for _, features in (member.take(1) for _ in range(12)) for feature in features}
    assert len(sources) > 6


# Steps, and going on from them


@pytest.mark.parametrize(
    ("counts", "batch", "shuffle"), [((30, 25), 7, 6), ((3, 9, 4, 8, 5, 6), 4, 1000), ((11,), 5, 2)]
)
def test_steps_hold_their_share_and_go_on_from_anywhere(
    counts: tuple[int, ...], batch: int, shuffle: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "CHUNK", 4)
    source = make_source(write_pairs(tmp_path, counts, blank=4), shuffle=shuffle)
    for size, readers in product((1, 3), (0, 2)):
        for rank in range(size):
            stream = make_stream(source, batch, rank, size, readers)
            begin = [Cursor()] * max(1, readers)
            whole = in_turn(stream, begin, 0, 14)
            share = batch // size + (rank < batch % size)
            assert [len(numbers_of(made.batches)) for made in whole] == [share] * 14
            for step in range(1, 14):
                done = [*enumerate(made.cursor for made in whole[:step])]
                cursors = [[Cursor(), *(c for n, c in done if n % len(begin) == w)][-1] for w in range(len(begin))]
                told = [Cursor(*json.loads(json.dumps(cursor))) for cursor in cursors]
                again = in_turn(stream, told, step, 14)
                assert all(same(a.batches, b.batches) for a, b in zip(again, whole[step:], strict=True))
                assert [made.cursor for made in again] == [made.cursor for made in whole[step:]]


def test_all_ranks_and_readers_together_take_every_record_once(tmp_path: Path) -> None:
    source = make_source(write_pairs(tmp_path, (40, 20)))
    seen: Counter[int] = Counter()
    for rank in range(2):
        stream = make_stream(source, 6, rank, 2, readers=2)
        for made in in_turn(stream, [Cursor()] * 2, 0, 10):  # 2 ranks x 10 steps x 3 examples: one epoch
            seen.update(numbers_of(made.batches))
    assert seen == Counter(records(source))


@pytest.mark.parametrize("readers", [0, 2])
def test_background_steps_are_the_steps_and_leave_their_cursors(readers: int, tmp_path: Path) -> None:
    source = make_source(write_pairs(tmp_path, (20, 17)))
    stream = make_stream(source, 5, readers=readers)
    expected = in_turn(stream, [Cursor()] * max(1, readers), 0, 12)
    steps = stream.steps(0, 12, readers)
    for n, batches in enumerate(islice(steps, 8)):
        assert same(batches, expected[n].batches)
        assert stream.cursors(n + 1)[n % max(1, readers)] == expected[n].cursor
        if n:  # a step that was handed out and not trained is not told of
            assert stream.cursors(n)[(n - 1) % max(1, readers)] == expected[n - 1].cursor
    cursors = stream.cursors(7)
    steps.close()
    resumed = make_stream(source, 5, readers=readers)
    resumed.restore([json.loads(json.dumps(cursors))])
    found = list(resumed.steps(7, 12, readers))
    assert all(same(batches, made.batches) for batches, made in zip(found, expected[7:], strict=True))


def test_another_number_of_ranks_or_readers_is_refused(tmp_path: Path) -> None:
    stream = make_stream(make_source(write_pairs(tmp_path, (20,))), 5, readers=3)
    told = r"data.readers: the run was streamed by 2 ranks x 1 readers, and these are 1 x 3: only the same can go on"
    with pytest.raises(InputError, match=told):
        stream.restore([[Cursor()], [Cursor()]])


def test_the_fingerprint_tells_names_and_sizes_and_not_folders(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    files, moved = write_pairs(tmp_path, (5, 6)), write_pairs(tmp_path / "moved", (5, 6))
    told = make_source(files).fingerprint
    assert told == make_source(moved).fingerprint
    assert told.startswith("2 files, ")
    assert told != make_source(files[:1]).fingerprint
    Path(files[0]).write_text(Path(files[0]).read_text() + "\n")
    assert told != make_source(files).fingerprint


# What is learned


class Marked(Bytes):
    """Bytes with the marks that masked models need."""

    @property
    def marks(self) -> Any:
        from t2t.data.tokens import Marks

        return Marks(cls=0, sep=1, mask=2, ordinary=np.arange(384) > 2, continues=None)


@pytest.mark.parametrize(
    ("kind", "objective", "tokenizer"),
    [("seq2seq", "span_corruption", Bytes()), ("seq2seq", "prefix_lm", Bytes()), ("causal", "auto", Bytes()),
     ("causal", "blocks", Bytes()), ("masked", "auto", Marked())],
)  # fmt: skip
def test_plain_text_gives_all_its_tokens_in_rows_that_hold_them(
    kind: str, objective: str, tokenizer: Any, tmp_path: Path
) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=rng.randint(5, 90))).strip() or "x" for _ in range(60)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    source = make_source([str(tmp_path / "a.txt")], kind=kind, tokenizer=tokenizer, objective=objective, shuffle=8)
    stream = make_stream(source, 4)
    row = stream.shape.source_row, stream.shape.target_row
    longest = source.longest(source.splits().train)
    assert row[0] >= longest[0] and row[1] >= longest[1]
    lengths: list[tuple[int, int]] = []
    tokens = 0
    member = Member(source, 0, 1, Cursor())
    while True:
        _, features = member.take(1)
        if member.cursor.epoch:
            break
        lengths.append(features[0].size)
        tokens += features[0].size[1] if kind == "causal" else 0
    assert max(s for s, _ in lengths) <= longest[0] and max(t for _, t in lengths) == longest[1]
    if kind == "causal":
        assert tokens == sum(len(text) + 1 for text in texts)
    assert all(in_turn(stream, [Cursor()], 0, 5))


def test_a_masked_stream_packs_by_its_predictions(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join("some words to guess" for _ in range(30)))
    source = make_source([str(tmp_path / "a.txt")], kind="masked", tokenizer=Marked())
    assert isinstance(source.splits().train, MaskedLM)
    stream = make_stream(source, 8)
    assert stream.predictions
    assert all(b.predicted is not None and b.predicted.shape[1] == stream.predictions
               for made in in_turn(stream, [Cursor()], 0, 3) for b in made.batches)  # fmt: skip


class Chatty(Bytes):
    """Bytes that show conversations, and end every turn with a special token."""

    specials = {"\x03": 6}  # what the byte 3 is

    def render(self, messages: Any, prompt: bool) -> str:
        return "".join(f"{m['role'][0]}:{m['content']}\x03" for m in messages) + ("a:" if prompt else "")


def test_chats_are_streamed(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"answer {i}"}] for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    source = make_source([str(tmp_path / "a.jsonl")], kind="causal", tokenizer=Chatty())
    assert source.name == "chat"
    found = [epochs(Member(source, number, 3, Cursor()), 1)[0] for number in range(3)]
    assert sorted(i for member in found for i in member) == [*range(1, 21)]
    assert make_stream(source, 4).shape.target_row >= 47
    with pytest.raises(InputError, match="data.prefix: is for pairs"):
        make_source([str(tmp_path / "a.jsonl")], kind="causal", tokenizer=Chatty(), prefix="x")


def test_columns_are_told_by_the_first_record_of_the_file_not_of_the_block(tmp_path: Path) -> None:
    rows = [{"id": "1", "src": "a", "tgt": "b"}, {"src": "c", "tgt": "d", "source": "e", "target": "f"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    member = Member(make_source([str(tmp_path / "a.jsonl")], shuffle=1), 0, 1, Cursor())
    _, features = member.take(2)
    assert [Bytes().decode(feature.source.tolist()) for feature in features] == ["a", "c"]


def test_a_soft_prompt_stands_before_every_example(tmp_path: Path) -> None:
    source = make_source(write_pairs(tmp_path, (9,)))
    learned = source.splits().train
    examples = Prompted(Sample(learned, source.longest(learned)), range(384, 387), "seq2seq")
    assert examples.longest == (35, 16)
    shape = pick_shape(examples, source.data, 3, lambda s, t: s + t, 1)
    stream = Stream(examples, 3, shape, 1, 1, 0, source=source)
    (made,) = in_turn(stream, [Cursor()], 0, 1)
    assert sum(int((batch.source_ids == 384).sum()) for batch in made.batches) == 3


def test_rows_hold_the_longest_that_may_come(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, (stream_module.SAMPLED_EXAMPLES,))
    with Path(files[0]).open("a") as file:
        file.write(json.dumps({"s": "x" * 100, "t": "y" * 100}) + "\n")
    source = make_source(files, max_source_length=64, max_target_length=48, shuffle=100000)
    stream = make_stream(source, 64)
    found = in_turn(stream, [Cursor()], 0, 33)
    assert max(int((b.labels != -100).sum(1).max()) for made in found for b in made.batches) >= 48
    assert isinstance(source.splits().train, Seq2Seq) and len(source.splits().train) == stream_module.SAMPLED_EXAMPLES
    assert make_stream(changed(source, source_row=200, target_row=99), 64).shape.source_row == 200


def changed(source: Source, **data: Any) -> Source:
    return Source(dataclasses.replace(source.data, **data), source.tokenizer, source.seed, source.kind, source.start_id)


# Bad lines and refusals


def test_bad_lines_stop_or_are_counted_and_capped(tmp_path: Path) -> None:
    lines = ["nonsense" if i % 5 == 3 else json.dumps({"s": str(i), "t": "x"}) for i in range(40)]
    lines[7] = json.dumps({"s": "no target", "t": None})
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"a.jsonl:4: invalid JSON"):
        make_source([str(file)]).splits()
    said: list[str] = []
    source = make_source([str(file)], on_bad_line="skip", shuffle=6)
    stream = make_stream(source, 31, report=said.append)
    found = list(stream.steps(0, 2))  # two epochs
    good = [i for i in records(source) if i != 8]
    assert len(good) == 31 and all(numbers_of(batches) == good for batches in found)
    assert stream.bad_count == 18
    assert [line.partition(" skipped")[0] for line in said] == [
        "note: data.train: 1 bad lines", "note: data.train: 10 bad lines",
    ]  # fmt: skip
    member = Member(changed(source, max_bad_lines=8), 0, 1, Cursor())
    with pytest.raises(InputError, match=r"more than data.max_bad_lines = 8 bad lines"):
        member.take(31)


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, (3, 3))
    Path(files[1]).write_text("")
    with pytest.raises(InputError, match=r"part-1.jsonl: no records: the file is empty"):
        epochs(Member(make_source(files), 0, 1, Cursor()))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.steps", 0, "train.steps: must be given"),
        ("train.log_every", "epoch", "train.log_every: give steps"),
        ("train.evaluate_every", "epoch", "train.evaluate_every: give steps"),
        ("checkpoint.every", "epoch", "checkpoint.every: give steps"),
        ("data.validation_split", 0.1, "data.validation_split: a stream has no share"),
        ("data.max_samples", 9, "data.max_samples: a stream has no end"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(key: str, value: Any, message: str) -> None:
    config = Config()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5))
    check(config)
    section, _, name = key.partition(".")
    with pytest.raises(InputError, match=message):
        check(dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}))


def test_objectives_and_files_that_cannot_be_streamed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    with pytest.raises(InputError, match="masked_lm_nsp draws texts from all documents"):
        make_source([str(tmp_path / "a.txt")], kind="masked", tokenizer=Marked(), objective="masked_lm_nsp")
    (tmp_path / "a.hdf5").write_text("x")
    with pytest.raises(InputError, match="data.streaming: HDF5 shards"):
        make_source([str(tmp_path / "a.hdf5")], kind="masked", tokenizer=Marked())
    with pytest.raises(InputError, match="data.train: no training files given"):
        make_source([])


def test_an_example_tells_its_place_and_its_record(tmp_path: Path) -> None:
    source = make_source(write_pairs(tmp_path, (3, 4)))
    assert source.tell((1 << 40) + 3) == {
        "where": f"{source.files[1]}:3", "record": '{"s": "source 1.2", "t": "2.1"}'
    }  # fmt: skip
    Path(source.files[1]).unlink()
    assert source.tell((1 << 40) + 3) == {"where": f"{source.files[1]}:3"}


def test_validation_is_read_whole(tmp_path: Path) -> None:
    files = write_pairs(tmp_path, (12,))
    (tmp_path / "held.tsv").write_text("a\tb\nc\td\n")
    splits = make_source(files, validation=(str(tmp_path / "held.tsv"),), max_validation_samples=1).splits()
    assert splits.validation is not None and len(splits.validation) == 1
    assert [example.source for example in splits.validation_examples] == ["a"]


# Runs

Make = Callable[..., Config]
STREAMED = {"data__streaming": "true", "data__shuffle": "6"}


def test_a_run_is_streamed_and_says_so(make: Make, tmp_path: Path) -> None:
    tiny.write_pairs(tmp_path / "held.tsv", 5, seed=3)
    said: list[str] = []
    settings = STREAMED | {"data__validation": str(tmp_path / "held.tsv"), "train__evaluate_every": "3"}
    figures = run.train(make(**settings), said.append)
    assert {"loss", "validation_loss"} <= figures.keys()
    (summary,) = (line for line in said if "optimizer" in line)
    assert "streamed from 1 files, 5 held out" in summary
    assert "7, at step 0" in summary and "epochs" not in summary


def test_a_streamed_run_goes_on_with_the_same_files_and_readers_alone(make: Make, tmp_path: Path) -> None:
    run.train(make(train__stop_at="3", **STREAMED), tiny.quiet)
    for key, value in (("run.seed", "5"), ("data.shuffle", "7"), ("train.batch", "9"), ("data.streaming", "false")):
        with pytest.raises(InputError, match=f"{key}: .* before, .* now"):
            run.train(make(**STREAMED | {key.replace(".", "__"): value}), tiny.quiet)
    with pytest.raises(
        InputError, match=r"data.readers: the run was streamed by 1 ranks x 1 readers, and these are 1 x 2"
    ):
        run.train(make(**STREAMED, data__readers="2"), tiny.quiet)
    pairs = (tmp_path / "pairs.tsv").read_text()
    (tmp_path / "pairs.tsv").write_text(pairs + "a\tb\n")
    with pytest.raises(
        InputError, match=r"belongs to other training data \(fingerprint 1 files, \d+ bytes, \w+, now 1 files"
    ):
        run.train(make(**STREAMED), tiny.quiet)
    (tmp_path / "pairs.tsv").write_text(pairs)
    run.train(make(**STREAMED, data__retries="1"), tiny.quiet)
    run.train(make("whole", **STREAMED), tiny.quiet)
    logs = [[json.loads(line) for line in (tmp_path / name / "log.jsonl").open()] for name in ("run", "whole")]
    assert [line["loss"] for line in logs[0]] == [line["loss"] for line in logs[1]]
    assert len(logs[0]) == 7


def test_the_documented_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").mkdir()
    write_pairs(tmp_path / "corpus", (9, 9), ".gz")
    monkeypatch.chdir(tmp_path)
    (command,) = commands("data.md", "Streaming")
    small = {"train.steps": "1", "train.batch": "2", "run.device": "cpu", "run.threads": "1"}
    assert cli.main([*shlex.split(command)[1:], *(word for k, v in small.items() for word in (f"--{k}", v))]) == 0


def test_a_streamed_run_that_diverges_tells_the_records(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        run.train(make(optim__lr="1e38", **STREAMED), tiny.quiet)
    (folder,) = (tmp_path / "run" / "crash").iterdir()
    rows = [json.loads(line) for line in (folder / "examples.jsonl").open()]
    lines = (tmp_path / "pairs.tsv").read_text().splitlines()
    assert rows
    for row in rows:
        line = int(row["where"].removeprefix(f"{tmp_path / 'pairs.tsv'}:"))
        assert [*json.loads(row["record"]).values()] == lines[line - 1].split("\t")
