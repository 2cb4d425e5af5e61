"""From files to a store of tokens, by several processes; what was interrupted goes on where it ended."""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from t2t.config import Data
from t2t.data import chat, hub, store
from t2t.data.blocks import Block, BlockReader, Place, blocks
from t2t.data.chat import Chat, Template
from t2t.data.loader import end_with_parent
from t2t.data.objectives import Objective
from t2t.data.ragged import Ragged, id_type
from t2t.data.remote import is_remote
from t2t.data.sources import compression_of
from t2t.data.store import Kept, Part, Places, Store, Table
from t2t.data.tables import (
    KINDS,
    Texts,
    check_objective,
    columns_of,
    grouped,
    objective,
    text_objective,
    tokenized,
    tokenized_texts,
)
from t2t.data.tasks import Columns, Task, transform
from t2t.data.text import Documents
from t2t.data.tokens import HuggingFace, Pairs, Tokenizer
from t2t.errors import InputError

RECORDS = 5000
"""Lines or rows that a process takes at once, at most."""

MOST_THREADS = 4
"""So many threads can share an interpreter that fast tokenizers leave while they encode; more workers are processes."""

STORED_FROM = 64 * 2**20
"""Files with more bytes of text than this are stored without being asked; fewer are tokenized anew in no time."""

# What of the data section decides which tokens come out.
_SETTINGS = (
    *("format", "source", "target", "prefix", "source_transforms", "target_transforms", "piece", "template", "block"),
    *("max_source_length", "max_target_length", "max_samples", "on_bad_line", "max_bad_lines"),
)
Tell = Callable[[int, int, int, int], None]
"""Called with bytes read, bytes of all, records and tokens so far."""


@dataclass(frozen=True)
class Maker:
    """Makes records of a store out of blocks of lines, for one objective; it travels to other processes."""

    data: Data
    tokenizer: Tokenizer
    name: str  # of the objective
    kind: str  # of the model
    start_id: int

    @property
    def columns(self) -> dict[str, np.dtype[Any]]:
        """The columns of the store."""
        ids = np.dtype(id_type(self.tokenizer.vocab_size)).newbyteorder("<")
        if self.paired:
            return {"source": ids, "target": ids}
        if self.name == "chat":
            return {"tokens": ids, "said": np.dtype("<u2")}
        return {"tokens": ids, "sentences": np.dtype("<u4")} if KINDS[self.name] == ("masked",) else {"tokens": ids}

    @property
    def paired(self) -> bool:
        """Whether a record is a source and a target."""
        return self.name in ("pairs", "character_noise")

    @property
    def mostly_encodes(self) -> bool:
        """Whether nearly all of the work is done by a tokenizer that lets other threads run meanwhile."""
        own = self.data.source_transforms or self.data.target_transforms or self.name == "chat"
        return isinstance(self.tokenizer, HuggingFace) and self.tokenizer.fast and not own

    @property
    def whole_documents(self) -> bool:
        """Whether the lines of a .txt file's document must stay together."""
        return not self.paired and self.name != "chat"

    @cached_property
    def template(self) -> Template:
        """How conversations are shown."""
        return Template(self.tokenizer)

    def __post_init__(self) -> None:
        check_objective(self.name, self.data, self.tokenizer)

    def part(self, block: Block, file: int, told: Columns | None) -> tuple[Part, str]:
        """The records of a block, whose file has these columns, and the first of its bad lines."""
        task = Task.from_config(self.data)
        reader = BlockReader(block, self.data.on_bad_line, self.data.max_bad_lines)
        words = np.zeros(0, dtype=np.int64)
        counts: dict[str, int] = {}
        if self.paired:
            pairs, _ = tokenized(list(task.examples(reader, told)), self.tokenizer, self.data, self.kind, self.start_id)
            columns, where = {"source": pairs.source, "target": pairs.target}, pairs.where
            counts = {"cut_sources": pairs.cut_sources, "cut_targets": pairs.cut_targets}
        elif self.name == "chat":
            found, cut = chat.read_counted(reader, self.template, chat.lengths(self.data)[0])
            made = Chat.of(found, self.tokenizer.vocab_size, self.template.end_id)
            columns, where, counts = {"tokens": made.tokens, "said": made.said}, made.where, dict(cut._asdict())
        else:
            texts = list(grouped(task.examples(reader, told), self.data.format))
            found_texts = tokenized_texts(self.name, texts, self.tokenizer)
            columns = {"tokens": found_texts.documents.tokens}
            if found_texts.sentences is not None:
                columns["sentences"] = found_texts.sentences
            where = found_texts.documents.where
            words = np.array([len(text.split()) for _, text in texts], dtype=np.int64)
        lines = np.array([int(place.rpartition(":")[2]) for place in where], dtype=np.int64)
        counts["bad"] = reader.bad_count
        words = words if len(words) else np.zeros(len(lines), dtype=np.int64)
        return Part(columns, file, lines, words, counts), reader.bad[0] if reader.bad else ""

    def made_from(self, files: Sequence[str]) -> dict[str, Any]:
        """All that decides what the store holds."""
        settings = {name: getattr(self.data, name) for name in _SETTINGS}
        own = [spec for spec in (*self.data.source_transforms, *self.data.target_transforms) if ":" in spec]
        return {
            "files": [_identity(file) for file in files],
            "tokenizer": [self.tokenizer.fingerprint, self.tokenizer.eos_id],
            "objective": self.name,
            "model": [self.kind, self.start_id],
            "settings": settings,
            "code": {spec: _source_digest(spec) for spec in own},
        }

    def objective(self, made: Table, held: np.ndarray | None = None) -> tuple[Objective, Objective | None]:
        """What is learned from a table, and from the records that are ``held`` out of it."""
        columns = {name: made.column(name) for name in self.columns}
        if held is None:
            return self._objective(made, columns), None
        parted = {name: column.parted(held) for name, column in columns.items()}
        rest, own = ({name: parts[i] for name, parts in parted.items()} for i in (0, 1))
        return self._objective(made, rest), self._objective(made, own)

    def _objective(self, made: Table, columns: Mapping[str, Ragged]) -> Objective:
        taken = next(iter(columns.values()))
        where = Places(made, taken)
        if self.paired:
            counts = made.counts["cut_sources"], made.counts["cut_targets"]
            pairs = Pairs(columns["source"], columns["target"], where, *counts, made.longest)
            return objective(pairs, self.data, self.kind, self.start_id)
        if self.name == "chat":
            return Chat(columns["tokens"], columns["said"], where, self.template.end_id)
        documents = Documents(columns["tokens"], where, made.words(taken))
        texts = Texts(documents, columns.get("sentences"))
        return text_objective(self.name, texts, self.tokenizer, self.data, self.start_id)


def _identity(file: str) -> list[Any]:
    if hub.is_dataset(file):
        return [file, hub.fingerprint(file)]
    if is_remote(file):
        raise InputError(f"data.train: {file}: addresses are streamed: set data.streaming and train.steps")
    told = os.stat(file)
    return [os.path.abspath(file), told.st_size, told.st_mtime_ns]


def _source_digest(spec: str) -> str:
    """Of the file that a function of the user's own stands in: another text there makes other tokens."""
    file = inspect.getsourcefile(inspect.unwrap(transform(spec, "data.source_transforms")))
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


class Stored(NamedTuple):
    """Where a store is or would be, and what it is made from."""

    folder: Path
    made_from: dict[str, Any]


def place(maker: Maker, files: Sequence[str]) -> Stored:
    """Where the store of these files is, made or not."""
    made_from = maker.made_from(files)
    name = hashlib.sha256(json.dumps([store.VERSION, made_from], sort_keys=True).encode()).hexdigest()[:24]
    return Stored(Path(maker.data.store or store.default_folder()) / name, made_from)


def worth_storing(files: Sequence[str]) -> bool:
    """Whether files are so large that their tokens should not be in memory, and not be made for every run."""
    return sum(_size(file) * (4 if compression_of(file) else 1) for file in files) >= STORED_FROM


def _size(file: str) -> int:
    """Bytes, guessed for a dataset by the number of its rows; of an address nobody knows."""
    if is_remote(file):
        return 0
    return 512 * hub.count(file) if hub.is_dataset(file) else os.path.getsize(file)


def is_stored(maker: Maker, files: Sequence[str]) -> bool:
    """Whether the store of these files is there."""
    return (place(maker, files).folder / "manifest.json").is_file()


def prepare(maker: Maker, files: Sequence[str], processes: int, tell: Tell = lambda *_: None) -> Store:
    """The store of these files: found, or made, by so many processes or threads besides this one (0: by this one)."""
    folder, made_from = place(maker, files)
    if found := store.opened(folder):
        return found
    with store.locked(folder):
        if found := store.opened(folder):  # another process made it meanwhile
            return found
        return _make(maker, files, folder, made_from, processes, tell)


class _Cursor(NamedTuple):
    """Where reading goes on: the file, how far in it, how many of its records were good; and the first bad line."""

    file: int = 0
    line: int = 0
    byte: int = 0
    good: int = 0
    bad: str = ""


def _make(
    maker: Maker, files: Sequence[str], folder: Path, made_from: dict[str, Any], processes: int, tell: Tell
) -> Store:
    writer = store.Writer(folder, maker.columns, files)
    at = _fill(writer, maker, files, processes, tell)
    if maker.made_from(files) != made_from:
        raise InputError(f"data.train: files changed while they were read; {folder} was not finished")
    return writer.finish(made_from, at.bad)


def in_memory(maker: Maker, files: Sequence[str]) -> Kept:
    """The tokens of files that are not large."""
    kept = Kept(files)
    kept.first_bad = _fill(kept, maker, files, 0, lambda *_: None).bad
    return kept


def _fill(into: store.Writer | Kept, maker: Maker, files: Sequence[str], processes: int, tell: Tell) -> _Cursor:
    """Read the files from where the table ends."""
    at = _Cursor(*into.cursor) if into.cursor else _Cursor()
    limit = maker.data.max_samples
    sizes = [_size(file) for file in files]
    for (part, first_bad), block, number in _parts(maker, files, at, processes):
        if number != at.file:
            _check_any(files[at.file], at)
            at = _Cursor(number, bad=at.bad)
        bad = at.bad or first_bad
        if limit and len(into) + len(part) > limit:
            part = part.first(limit - len(into))
        at = _Cursor(number, *block.end, at.good + len(part) + part.counts.get("left_out", 0), bad)
        into.add(part, at)
        _check_bad(into.counts["bad"], maker.data.max_bad_lines, bad)
        inside = min(block.end.byte, sizes[number]) if not compression_of(files[number]) else 0
        tell(sum(sizes[:number]) + inside, sum(sizes), len(into), into.tokens)
        if limit and len(into) >= limit:
            return at
    _check_any(files[at.file], at)
    if not len(into):
        why = f"{into.counts['left_out']} are longer than {chat.lengths(maker.data)[0]} tokens: set data.block"
        raise InputError(f"{files[0]}: no conversations; {why}")
    return at


def _check_any(file: str, at: _Cursor) -> None:
    if not at.good:
        raise InputError(f"{file}: no records" + (f"; bad lines, the first: {at.bad}" if at.bad else ""))


def _check_bad(count: int, most: int, first: str) -> None:
    if count > most:
        raise InputError(f"more than data.max_bad_lines = {most} bad lines, the first: {first}")


def _parts(
    maker: Maker, files: Sequence[str], at: _Cursor, processes: int
) -> Iterator[tuple[tuple[Part, str], Block, int]]:
    """The records of every block from a place on, in order, made ahead by other processes, or by threads."""
    work = _blocks(maker, files, at)
    if not processes:
        yield from ((maker.part(block, number, told), block, number) for block, number, told in work)
        return
    pool, make = _workers(maker, processes)
    with pool:
        ahead: deque[tuple[Future[tuple[Part, str]], Block, int]] = deque()
        try:
            while True:
                for block, number, told in islice(work, 2 * processes + 1 - len(ahead)):
                    ahead.append((pool.submit(make, block, number, told), block, number))
                if not ahead:
                    return
                made, block, number = ahead.popleft()
                yield made.result(), block, number
        finally:
            pool.shutdown(cancel_futures=True)


def _workers(maker: Maker, count: int) -> tuple[Executor, Callable[[Block, int, Columns | None], tuple[Part, str]]]:
    """Threads where they do: they start at once and share the tokenizer."""
    if maker.mostly_encodes and count <= MOST_THREADS:
        return ThreadPoolExecutor(count), maker.part
    context = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(count, context, _become_maker, (maker,)), _make_part


def _blocks(maker: Maker, files: Sequence[str], at: _Cursor) -> Iterator[tuple[Block, int, Columns | None]]:
    for number, file in enumerate(files[at.file :], at.file):
        start = Place(at.line, at.byte) if number == at.file else Place()
        told = None if maker.name == "chat" else columns_of(file, maker.data)
        given = tuple(name for name in (maker.data.source, maker.data.target) if name)
        for block in blocks(file, maker.data.format, given, RECORDS, start, maker.whole_documents):
            yield block, number, told


_maker: Maker | None = None  # of a process that makes parts


def _become_maker(maker: Maker) -> None:
    global _maker
    _maker = maker
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already


def _make_part(block: Block, number: int, told: Columns | None) -> tuple[Part, str]:
    assert _maker is not None
    return _maker.part(block, number, told)


def processes() -> int:
    """How many processes make a store: as many as there are cores, or none besides this one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores > 1 else 0
