"""Many token sequences, one after the other, in memory or in files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np


class Shard(Protocol):
    """Some of the sequences: where each begins and ends, and what they hold."""

    @property
    def longest(self) -> int:
        """How many tokens the longest has."""

    def __len__(self) -> int: ...

    def offsets(self, start: int, stop: int) -> np.ndarray:
        """Where sequences ``start`` to ``stop`` begin, the first of the shard at 0; ``stop`` may be their number."""

    def ids(self, start: int, stop: int) -> np.ndarray:
        """What stands from one place to another."""

    def spans(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each of these sequences begins, and where it ends."""

    def many(self, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """What stands from each of these places to another."""


class Memory:
    """A shard that is two arrays."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        self._ids, self._offsets = ids, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @cached_property
    def longest(self) -> int:
        return int(np.diff(self._offsets).max(initial=0))

    def offsets(self, start: int, stop: int) -> np.ndarray:
        return self._offsets[start : stop + 1]

    def ids(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]

    def spans(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._offsets[index], self._offsets[index + 1]

    def many(self, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return [self._ids[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


class Digest:
    """What tells sequences from others, however they are shared out.

    >>> one, two = Digest(), Digest()
    >>> one.add(np.array([2, 1]), np.array([5, 6, 7]))
    >>> two.add(np.array([2]), np.array([5, 6])); two.add(np.array([1]), np.array([7]))
    >>> one.told() == two.told(), one.told() == Digest().told()
    (True, False)
    """

    def __init__(self) -> None:
        self._lengths, self._ids = hashlib.sha256(), hashlib.sha256()

    def add(self, lengths: np.ndarray, ids: np.ndarray) -> None:
        """The next sequences."""
        self._lengths.update(lengths.astype("<i8").tobytes())
        self._ids.update(np.ascontiguousarray(ids).tobytes())

    def told(self) -> str:
        """The digest of all so far."""
        return hashlib.sha256(self._lengths.digest() + self._ids.digest()).hexdigest()[:16]


class Ragged:
    """Sequences by their number, and all of them as one long sequence.

    ``runs`` are the sequences taken, in order: [K, 3] with the shard, and from which of its sequences to which;
    ``digest`` is what tells them from others, where that is known.

    >>> lists = Ragged.of([[5, 6, 1], [7, 1]], vocab_size=384)
    >>> lists[1], lists.sizes(np.array([1, 0])), lists[1].dtype, lists.longest
    (array([7, 1], dtype=uint16), array([2, 3]), dtype('uint16'), 3)
    >>> lists.many(np.array([1, 0]))
    [array([7, 1], dtype=uint16), array([5, 6, 1], dtype=uint16)]
    >>> lists.tokens(2, 4), lists.locate(3), len(lists), lists.total
    (array([1, 7], dtype=uint16), (1, 0), 2, 5)
    >>> [part[0].tolist() for part in lists.parted(np.array([0]))]
    [[7, 1], [5, 6, 1]]
    """

    def __init__(self, shards: Sequence[Shard], runs: np.ndarray | None = None, digest: str = "") -> None:
        if runs is None:
            runs = np.array([(i, 0, len(shard)) for i, shard in enumerate(shards)], dtype=np.int64).reshape(-1, 3)
        self.shards, self.runs, self._digest = shards, runs[runs[:, 1] < runs[:, 2]], digest
        self._ends = np.cumsum(self.runs[:, 2] - self.runs[:, 1])  # of the runs, in sequences
        self._starts = np.array([self._offset(s, a) for s, a, _ in self.runs.tolist()], dtype=np.int64)
        stops = np.array([self._offset(s, b) for s, _, b in self.runs.tolist()], dtype=np.int64)
        self._token_ends = np.cumsum(stops - self._starts)
        self._only = (int(self.runs[0, 0]), int(self.runs[0, 1])) if len(self.runs) == 1 else None

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int] | np.ndarray], vocab_size: int) -> Ragged:
        """Gather sequences, each id in two bytes where the vocabulary allows."""
        parts = [np.asarray(s, dtype=id_type(vocab_size)) for s in sequences]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(p) for p in parts], out=offsets[1:])
        return cls([Memory(np.concatenate(parts) if parts else np.zeros(0, id_type(vocab_size)), offsets)])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def total(self) -> int:
        """How many tokens all have."""
        return int(self._token_ends[-1]) if len(self._token_ends) else 0

    @cached_property
    def longest(self) -> int:
        """How many tokens the longest has, or may have: of the whole shards, where a part is taken."""
        return max((self.shards[s].longest for s in np.unique(self.runs[:, 0]).tolist()), default=0)

    @cached_property
    def digest(self) -> str:
        """What tells these sequences from others."""
        if self._digest:
            return self._digest
        found = Digest()
        for shard, first, last in self.runs.tolist():
            offsets = self.shards[shard].offsets(first, last)
            found.add(np.diff(offsets), self.shards[shard].ids(*offsets[[0, -1]].tolist()))
        return found.told()

    def __getitem__(self, i: int) -> np.ndarray:
        shard, local = self.place(i)
        return self.shards[shard].ids(*self.shards[shard].offsets(local, local + 1).tolist())

    def many(self, index: np.ndarray) -> list[np.ndarray]:
        """The sequences of these numbers, read together."""
        found: dict[int, np.ndarray] = {}
        for shard, mine, local in self._by_shard(index):
            found |= zip(mine.tolist(), shard.many(*shard.spans(local)), strict=True)
        return [found[k] for k in range(len(index))]

    def sizes(self, index: np.ndarray) -> np.ndarray:
        """How many tokens each of these has."""
        found = np.zeros(len(index), dtype=np.int64)
        for shard, mine, local in self._by_shard(index):
            starts, stops = shard.spans(local)
            found[mine] = stops - starts
        return found

    def _by_shard(self, index: np.ndarray) -> Iterator[tuple[Shard, np.ndarray, np.ndarray]]:
        """Of each shard that has some of these sequences: which of them, and their numbers there."""
        shards, local = self.places(index)
        for shard in np.unique(shards).tolist():
            mine = np.flatnonzero(shards == shard)
            yield self.shards[shard], mine, local[mine]

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each of all has."""
        parts = [np.diff(self.shards[s].offsets(a, b)) for s, a, b in self.runs.tolist()]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """What stands from one place of the long sequence to another."""
        first, last = np.searchsorted(self._token_ends, (start, stop - 1), side="right").tolist()
        parts = []
        for run in range(first, min(last, len(self.runs) - 1) + 1):
            before = int(self._token_ends[run - 1]) if run else 0
            shift = int(self._starts[run]) - before
            end = min(stop, int(self._token_ends[run]))
            parts.append(self.shards[int(self.runs[run, 0])].ids(max(start, before) + shift, end + shift))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def locate(self, place: int) -> tuple[int, int]:
        """The sequence that a place of the long one is in, and where it is in there."""
        run = int(np.searchsorted(self._token_ends, place, side="right"))
        shard, low, high = self.runs[run].tolist()
        sought = place - (int(self._token_ends[run - 1]) if run else 0) + int(self._starts[run])
        first = low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._offset(shard, middle) <= sought else (low, middle)
        number = low - first + (int(self._ends[run - 1]) if run else 0)
        return number, sought - self._offset(shard, low)

    def parted(self, held: np.ndarray) -> tuple[Ragged, Ragged]:
        """The sequences without some of them, whose numbers are given in order, and these."""
        places = np.stack(self.places(held), axis=1)
        rest = []
        for shard, first, last in self.runs.tolist():
            inside = places[(places[:, 0] == shard) & (places[:, 1] >= first) & (places[:, 1] < last), 1]
            starts, stops = np.append(first, inside + 1), np.append(inside, last)
            rest.append(np.stack([np.full(len(starts), shard), starts, stops], axis=1))
        taken = np.stack([places[:, 0], places[:, 1], places[:, 1] + 1], axis=1)
        name = hashlib.sha256(self.digest.encode() + held.astype("<i8").tobytes()).hexdigest()[:15]
        return Ragged(self.shards, np.concatenate(rest), f"{name}t"), Ragged(self.shards, taken, f"{name}h")

    def place(self, i: int) -> tuple[int, int]:
        """The shard that sequence ``i`` is in, and its number there."""
        if self._only:
            return self._only[0], self._only[1] + i
        run = int(np.searchsorted(self._ends, i, side="right"))
        shard, _, last = self.runs[run].tolist()
        return shard, i - int(self._ends[run]) + last

    def places(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard that each of these sequences is in, and its number there."""
        run = np.searchsorted(self._ends, index, side="right")
        return self.runs[run, 0], index - self._ends[run] + self.runs[run, 2]

    def _offset(self, shard: int, local: int) -> int:
        return int(self.shards[shard].offsets(local, local)[0])


def id_type(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type of whole numbers that ids of this vocabulary fit into: two bytes, or four.

    >>> id_type(384).__name__, id_type(250112).__name__
    ('uint16', 'uint32')
    """
    return np.uint16 if vocab_size <= 65536 else np.uint32
