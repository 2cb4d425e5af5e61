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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from t2t.data.ragged import Digest, Ragged
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
        with self._lock:
            handle = self._handles.pop(file, None)
            if handle is None:
                if len(self._handles) >= MOST_OPEN:
                    os.close(self._handles.pop(next(iter(self._handles))))
                handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._handles[file] = handle
            found = os.pread(handle, count, start)
        while len(found) < count:  # a signal, or more than the system gives at once
            with self._lock:
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
        width = np.dtype(self.dtype).itemsize
        return np.frombuffer(_files.read(f"{self.name}.ids", width * start, width * (stop - start)), self.dtype)


@dataclass(frozen=True)
class Store:
    """A finished store."""

    folder: Path
    manifest: Mapping[str, Any]

    def column(self, name: str) -> Ragged:
        """All sequences of a column."""
        told = self.manifest["columns"][name]
        shards = [
            FileShard(str(self.folder / f"{i:05d}.{name}"), shard["records"], told["longest"], told["dtype"])
            for i, shard in enumerate(self.manifest["shards"])
        ]
        return Ragged(shards, digest=told["digest"])

    def __len__(self) -> int:
        return int(sum(shard["records"] for shard in self.manifest["shards"]))

    @property
    def counts(self) -> Mapping[str, int]:
        """What was counted on the way."""
        return self.manifest["counts"]

    def places(self, taken: Ragged) -> Places:
        """Where the records of a column, or of some of it, came from."""
        return Places(self.folder, tuple(self.manifest["files"]), taken)


@dataclass(frozen=True)
class Places(Sequence[str]):
    """Where records came from: ``file:line``."""

    folder: Path
    files: tuple[str, ...]
    taken: Ragged

    def __len__(self) -> int:
        return len(self.taken)

    def __getitem__(self, i: Any) -> Any:
        shard, local = self.taken.place(i)
        (place,) = np.frombuffer(self._read(shard, local, 1), _PLACE)
        return f"{self.files[int(place['file'])]}:{int(place['line'])}"

    def words(self) -> int:
        """The words of all."""
        rows = self.taken.runs.tolist()
        return sum(int(np.frombuffer(self._read(s, a, b - a), _PLACE)["words"].sum()) for s, a, b in rows)

    def _read(self, shard: int, start: int, count: int) -> bytes:
        return _files.read(str(self.folder / f"{shard:05d}.places"), start * _PLACE.itemsize, count * _PLACE.itemsize)


@dataclass(frozen=True)
class Part:
    """Some records on their way into a store: sequences by column, place, words of each, and counts by name."""

    columns: Mapping[str, Ragged]
    file: int
    lines: np.ndarray
    words: np.ndarray
    counts: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.lines)

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
    shard_bytes: int = SHARD_BYTES
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
    def records(self) -> int:
        """How many records there are so far."""
        return sum(shard["records"] for shard in self.shards) + self._now.get("records", 0)

    @property
    def counts(self) -> dict[str, int]:
        """What was counted so far."""
        found: dict[str, int] = {}
        for shard in [*self.shards, self._now]:
            for name, count in shard.get("counts", {}).items():
                found[name] = found.get(name, 0) + count
        return found

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
        places = np.empty(len(part), dtype=_PLACE)
        places["file"], places["line"], places["words"] = part.file, part.lines, part.words
        self._open["places"].write(places.tobytes())
        together = sum((column.lengths for column in part.columns.values()), np.zeros(len(part), np.int64))
        now["longest"] = max(now["longest"], int(together.max(initial=0)))
        now["records"] += len(part)
        now["counts"] = {k: now["counts"].get(k, 0) + part.counts.get(k, 0) for k in {**now["counts"], **part.counts}}
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

    def finish(self, made_from: Mapping[str, Any]) -> Store:
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
