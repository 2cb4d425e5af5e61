"""Tokenized data in files: made once, read by position, so that memory does not grow with it.

A store is a folder, named by a digest of all that it was made from::

    manifest.json       written last: a folder without it is not finished
    00000.json          one a shard that is finished: its sizes, and where reading goes on after it
    00000.source.ids    token ids of all its sequences, two or four bytes each
    00000.source.ends   where each sequence ends, eight bytes each
    00000.places        of every record the number of its file, its line, and how many words it has

Files are read by `os.pread` and not mapped: mapped pages count as memory of the process, and reading in random order
would map all of them in time.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from t2t.data.ragged import Digest, Memory, Ragged
from t2t.errors import InputError
from t2t.files import atomic_write, sync

VERSION = 1
SHARD_BYTES = 2**30
MOST_OPEN = 128
_END = np.dtype("<i8")
_NOTHING = np.zeros(0, dtype=np.int64)
_PLACE = np.dtype([("file", "<u4"), ("line", "<u8"), ("words", "<u4")])


def default_folder() -> Path:
    """Where stores are unless `data.store` says otherwise.

    >>> os.environ["T2T_STORE"] = "stores"
    >>> default_folder().as_posix()
    'stores'
    >>> del os.environ["T2T_STORE"]
    """
    given = os.environ.get("T2T_STORE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t2t"


class _Files:
    """Open files of this process, the one used longest ago closed when there are many."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, file: str, start: int, count: int) -> bytes:
        return self.read_many(file, [start], [count])[0]

    def read_many(self, file: str, starts: Sequence[int], counts: Sequence[int]) -> list[bytes]:
        with self._lock:
            handle = self._handles.pop(file, None)
            if handle is None:
                if len(self._handles) >= MOST_OPEN:
                    os.close(self._handles.pop(next(iter(self._handles))))
                handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._handles[file] = handle
            found = [*map(os.pread, repeat(handle), counts, starts)]
            if sum(map(len, found)) < sum(counts):  # a signal, or more than the system gives at once
                found = [self._rest(handle, file, *part) for part in zip(found, starts, counts, strict=True)]
        return found

    def _rest(self, handle: int, file: str, found: bytes, start: int, count: int) -> bytes:
        while len(found) < count:
            more = os.pread(handle, count - len(found), start + len(found))
            if not more:
                raise InputError(f"{file}: is shorter than its manifest says: remove {Path(file).parent}")
            found += more
        return found


_files = _Files()


@dataclass(frozen=True)
class FileShard:
    """A shard (`t2t.data.ragged.Shard`) that lies in two files."""

    name: str  # folder/00000.source
    count: int
    longest: int
    dtype: str

    def __len__(self) -> int:
        return self.count

    def offsets(self, start: int, stop: int) -> np.ndarray:
        """Where sequences ``start`` to ``stop`` begin, the first of the shard at 0."""
        first = max(start - 1, 0)
        ends = np.frombuffer(_files.read(f"{self.name}.ends", 8 * first, 8 * (stop - first)), _END)
        return np.append(0, ends) if start == 0 else ends

    def ids(self, start: int, stop: int) -> np.ndarray:
        """What stands from one place to another."""
        (found,) = self.many(np.array([start]), np.array([stop]))
        return found

    def spans(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each of these sequences begins, and where it ends."""
        firsts = np.maximum(index - 1, 0)
        counts = index + 1 - firsts  # of the first of all, its end alone
        found = _files.read_many(f"{self.name}.ends", (8 * firsts).tolist(), (8 * counts).tolist())
        ends, last = np.frombuffer(b"".join(found), _END), np.cumsum(counts) - 1
        return np.where(index > 0, ends[last - 1], 0), ends[last]

    def many(self, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """What stands from each of these places to another."""
        width = 2 if self.dtype == "<u2" else 4
        found = _files.read_many(f"{self.name}.ids", (width * starts).tolist(), (width * (stops - starts)).tolist())
        return [np.frombuffer(part, self.dtype) for part in found]


class Table(ABC):
    """Records that were made: their sequences by column, and where each came from."""

    files: Sequence[str]
    counts: Mapping[str, int]  # of what was found on the way
    longest: int  # tokens that a record has at most, in all columns
    first_bad: str  # the first bad line

    @abstractmethod
    def column(self, name: str) -> Ragged:
        """All sequences of a column."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def place_rows(self, shard: int, start: int, stop: int) -> np.ndarray:
        """File, line and words of a shard's records."""

    def words(self, taken: Ragged) -> int:
        """The words of a column's records, or of some of them."""
        runs = ((s, start, min(start + 2**16, b)) for s, a, b in taken.runs.tolist() for start in range(a, b, 2**16))
        return sum(int(self.place_rows(*run)["words"].sum()) for run in runs)


class Store(Table):
    """A finished store; what travels to another process is its name."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.files, self.counts, self.longest = manifest["files"], manifest["counts"], manifest["longest"]
        self.first_bad = manifest["first_bad"]

    def column(self, name: str) -> Ragged:
        told = self.manifest["columns"][name]
        shards = [
            FileShard(str(self.folder / f"{i:05d}.{name}"), shard["records"], told["longest"], told["dtype"])
            for i, shard in enumerate(self.manifest["shards"])
        ]
        return Ragged(shards, digest=told["digest"])

    def __len__(self) -> int:
        return int(sum(shard["records"] for shard in self.manifest["shards"]))

    def place_rows(self, shard: int, start: int, stop: int) -> np.ndarray:
        file, width = str(self.folder / f"{shard:05d}.places"), _PLACE.itemsize
        return np.frombuffer(_files.read(file, start * width, (stop - start) * width), _PLACE)


class Kept(Table):
    """A table in memory, and how it is made: part after part."""

    cursor: Any = None

    def __init__(self, files: Sequence[str]) -> None:
        self.files, self.first_bad, self.counts = files, "", {}
        self.tokens, self.longest = 0, 0
        self._parts, self._count = list[Part](), 0

    def add(self, part: Part, cursor: Any) -> None:
        """Keep some records."""
        self._parts.append(part)
        self._count += len(part)
        self.counts = _sums([self.counts, part.counts])
        self.tokens += sum(column.total for column in part.columns.values())
        self.longest = max(self.longest, int(part.lengths.max(initial=0)))

    def __len__(self) -> int:
        return self._count

    def column(self, name: str) -> Ragged:
        columns = [part.columns[name] for part in self._parts]
        ids = np.concatenate([column.tokens(0, column.total) for column in columns])
        return Ragged([Memory(ids, np.append(0, np.cumsum(np.concatenate([column.lengths for column in columns]))))])

    @cached_property
    def _places(self) -> np.ndarray:
        return np.concatenate([part.places for part in self._parts])

    def place_rows(self, shard: int, start: int, stop: int) -> np.ndarray:
        return self._places[start:stop]


def _sums(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for counts in several:
        for name, count in counts.items():
            found[name] = found.get(name, 0) + count
    return found


@dataclass(frozen=True)
class Places(Sequence[str]):
    """Where the records of a column, or of some of it, came from: ``file:line``."""

    table: Table
    taken: Ragged

    def __len__(self) -> int:
        return len(self.taken)

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self.taken):
            raise IndexError(i)
        shard, local = self.taken.place(i)
        (place,) = self.table.place_rows(shard, local, local + 1)
        return f"{self.table.files[int(place['file'])]}:{int(place['line'])}"


@dataclass(frozen=True)
class Part:
    """Some records on their way into a table: sequences by column, place, words of each, and counts by name."""

    columns: Mapping[str, Ragged]
    file: int
    lines: np.ndarray
    words: np.ndarray
    counts: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each record has, in all columns."""
        return sum((column.lengths for column in self.columns.values()), np.zeros(len(self), np.int64))

    @property
    def places(self) -> np.ndarray:
        """File, line and words of each."""
        places = np.empty(len(self), dtype=_PLACE)
        places["file"], places["line"], places["words"] = self.file, self.lines, self.words
        return places

    def first(self, count: int) -> Part:
        """The first records."""
        kept = {name: column.parted(np.arange(count))[1] for name, column in self.columns.items()}
        return Part(kept, self.file, self.lines[:count], self.words[:count], self.counts)


def opened(folder: Path) -> Store | None:
    """The store in a folder, if it is finished and of this version."""
    file = folder / "manifest.json"
    if not file.is_file():
        return None
    manifest = json.loads(file.read_text(encoding="utf-8"))
    return Store(folder, manifest) if manifest["version"] == VERSION else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Held while a store is made; whoever else wants to make it waits. It ends with the process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass
class Writer:
    """Makes a store, shard after shard; what an earlier attempt finished stays, and ``cursor`` says where it ended."""

    folder: Path
    columns: Mapping[str, np.dtype[Any]]
    files: Sequence[str]
    shard_bytes: int = field(default_factory=lambda: SHARD_BYTES)
    cursor: Any = None
    shards: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, BinaryIO] = field(default_factory=dict)
    _now: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        while (told := self.folder / f"{len(self.shards):05d}.json").is_file():
            self.shards.append(json.loads(told.read_text(encoding="utf-8")))
        if self.shards:
            self.cursor = self.shards[-1]["cursor"]
        for left in self.folder.glob(f"{len(self.shards):05d}.*"):
            left.unlink()

    @property
    def all_shards(self) -> list[dict[str, Any]]:
        """Every shard, the one that is being written too."""
        return [*self.shards, self._now] if self._now else self.shards

    def __len__(self) -> int:
        return sum(shard["records"] for shard in self.all_shards)

    @property
    def tokens(self) -> int:
        """How many tokens there are so far."""
        return sum(told["tokens"] for shard in self.all_shards for told in shard["columns"].values())

    @property
    def counts(self) -> dict[str, int]:
        """What was counted so far."""
        return _sums(shard["counts"] for shard in self.all_shards)

    def add(self, part: Part, cursor: Any) -> None:
        """Write some records; ``cursor`` is where reading goes on after them."""
        if not self._now:
            self._begin()
        now = self._now
        for name, column in part.columns.items():
            told = now["columns"][name]
            lengths = column.lengths
            self._open[f"{name}.ids"].write(column.tokens(0, column.total).astype(self.columns[name]).tobytes())
            self._open[f"{name}.ends"].write((told["tokens"] + np.cumsum(lengths)).astype(_END).tobytes())
            told["tokens"] += column.total
            told["longest"] = max(told["longest"], int(lengths.max(initial=0)))
        self._open["places"].write(part.places.tobytes())
        now["longest"] = max(now["longest"], int(part.lengths.max(initial=0)))
        now["records"] += len(part)
        now["counts"] = _sums([now["counts"], part.counts])
        self.cursor = now["cursor"] = cursor
        width = {name: np.dtype(dtype).itemsize for name, dtype in self.columns.items()}
        if sum(width[name] * told["tokens"] for name, told in now["columns"].items()) >= self.shard_bytes:
            self.end_shard()

    def end_shard(self) -> None:
        """Finish the shard that is being written."""
        if not self._now:
            return
        for stream in self._open.values():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        atomic_write(self.folder / f"{len(self.shards):05d}.json", json.dumps(self._now) + "\n")
        self.shards.append(self._now)
        self._open, self._now = {}, {}

    def finish(self, made_from: Mapping[str, Any], first_bad: str) -> Store:
        """Write the manifest."""
        self.end_shard()
        columns: dict[str, Any] = {}
        for name, dtype in self.columns.items():
            longest = max((shard["columns"][name]["longest"] for shard in self.shards), default=0)
            columns[name] = {"dtype": np.dtype(dtype).str, "longest": longest, "digest": self._digest(name, dtype)}
        kept = [
            {"records": s["records"], "tokens": {k: c["tokens"] for k, c in s["columns"].items()}} for s in self.shards
        ]
        manifest = {
            "version": VERSION,
            "made_from": dict(made_from),
            "first_bad": first_bad,
            "files": list(self.files),
            "columns": columns,
            "longest": max((shard["longest"] for shard in self.shards), default=0),
            "counts": self.counts,
            "shards": kept,
        }
        atomic_write(self.folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
        found = opened(self.folder)
        assert found is not None
        return found

    def _begin(self) -> None:
        names = [f"{name}.{kind}" for name in self.columns for kind in ("ids", "ends")]
        self._open = {
            name: open(self.folder / f"{len(self.shards):05d}.{name}", "wb", buffering=2**20)  # noqa: SIM115
            for name in [*names, "places"]
        }
        empty = {name: {"tokens": 0, "longest": 0} for name in self.columns}
        self._now = {"records": 0, "longest": 0, "columns": empty, "counts": {}, "cursor": None}
        sync(self.folder)

    def _digest(self, name: str, dtype: np.dtype[Any]) -> str:
        """Of all sequences of a column, read back: what is on the disk is what it tells."""
        found = Digest()
        for i, shard in enumerate(self.shards):
            told = FileShard(str(self.folder / f"{i:05d}.{name}"), shard["records"], 0, np.dtype(dtype).str)
            for start in range(0, len(told), 2**16):
                found.add(np.diff(told.offsets(start, min(start + 2**16, len(told)))), _NOTHING)
            for start in range(0, shard["columns"][name]["tokens"], 2**22):
                found.add(_NOTHING, told.ids(start, min(start + 2**22, shard["columns"][name]["tokens"])))
        return found.told()
