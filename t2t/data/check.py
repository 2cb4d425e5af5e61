"""What one pass over examples can tell in little memory: lengths, repeats, what a tokenizer cannot say, rows and steps.

Lengths are counted by value. An example is remembered by 24 bytes: digests of its source and of the pair, and its
place; once there are more than `MOST`, only those whose source has a digest divisible by 2, by 4 and so on, and counts
are estimates. Of pairs of lengths a sample of `SAMPLE` is kept.
"""

from __future__ import annotations

import math
import random
import re
import struct
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from t2t.config import Data
from t2t.data import chat, order
from t2t.data.loader import SAMPLED_EXAMPLES, step_examples
from t2t.data.packing import Cost, RowShape, measure, pick_rows, up
from t2t.data.sources import shown
from t2t.data.text import span_lengths, span_window
from t2t.data.tokens import HuggingFace, Tokenizer
from t2t.errors import InputError

MOST = 2**23
"""Examples of a split that are remembered, of 24 bytes each."""

SAMPLE = 2**16
"""Pairs of lengths that rows are picked from."""

FIRST = 3
"""How many places are told of anything; all are counted."""

_RECORD = np.dtype([("source", "u8"), ("pair", "u8"), ("place", "u8")])
_PACKED = struct.Struct("=QQQ")
_LINE_BITS = 40  # of a place; the rest names the file
_EDGES = np.array([1, 2, 3, 4, *(step << n for n in range(1, 24) for step in (3, 4))])  # 6, 8, 12, 16, 24, ...
_MARKS = "\u0300-\u036f"  # combining ones, which belong to the letter before them
_MARKED = re.compile(f"[{_MARKS}]")
_UNITS = re.compile(f"[^{_MARKS}]?[{_MARKS}]+|.", re.DOTALL)


class LengthCounts:
    """How many examples have each length.

    >>> counts = LengthCounts([4, 5, 5, 9])
    >>> counts.quantile(0.5), counts.quantile(0.99), counts.share_above(8), counts.total(limit=5)
    (5, 9, 0.25, 19)
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        self._counts = Counter(lengths)

    def add(self, lengths: Iterable[int]) -> None:
        """Count these too.

        >>> counts = LengthCounts()
        >>> counts.add([7, 7])
        >>> len(counts)
        2
        """
        self._counts.update(lengths)

    def merge(self, other: LengthCounts) -> None:
        """Count those of another too.

        >>> counts = LengthCounts([1])
        >>> counts.merge(LengthCounts([1, 3]))
        >>> counts.histogram()
        [(1, 2), (2, 0), (3, 1)]
        """
        self._counts.update(other._counts)

    def __len__(self) -> int:
        return self._counts.total()

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The lengths that occur, ascending, and how often each does.

        >>> LengthCounts([5, 4, 5]).arrays()
        (array([4, 5]), array([1, 2]))
        """
        lengths = sorted(self._counts)
        return np.array(lengths, dtype=np.int64), np.array([self._counts[n] for n in lengths], dtype=np.int64)

    def quantile(self, share: float) -> int:
        """The least length that this share of the examples does not exceed; with 1 it is the greatest.

        >>> LengthCounts([1, 2, 3, 100]).quantile(0.75)
        3
        """
        lengths, counts = self.arrays()
        reached = np.cumsum(counts) >= share * counts.sum() - 1e-9
        return int(lengths[reached.argmax()])

    def share_above(self, limit: int) -> float:
        """The share of examples that are longer.

        >>> LengthCounts([1, 2, 3, 4]).share_above(2)
        0.5
        """
        lengths, counts = self.arrays()
        return float(counts[lengths > limit].sum() / counts.sum())

    def total(self, limit: int | None = None) -> int:
        """The sum of all lengths, each cut at the limit.

        >>> LengthCounts([1, 2, 9]).total(), LengthCounts([1, 2, 9]).total(4)
        (12, 7)
        """
        lengths, counts = self.arrays()
        return int((np.minimum(lengths, limit or lengths.max(initial=0)) * counts).sum())

    def histogram(self) -> list[tuple[int, int]]:
        """How many are up to each length, the ones before not counted: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 and so on.

        >>> LengthCounts([5, 6, 11, 12, 13]).histogram()
        [(6, 2), (8, 0), (12, 2), (16, 1)]
        """
        lengths, counts = self.arrays()
        bins = np.bincount(np.searchsorted(_EDGES, np.maximum(lengths, 1)), counts, len(_EDGES)).astype(int)
        used = np.flatnonzero(bins)
        every = range(used[0], used[-1] + 1) if len(used) else range(0)
        return [(int(_EDGES[i]), int(bins[i])) for i in every]

    def longer(self, by: int) -> LengthCounts:
        """The same, each longer by so much.

        >>> LengthCounts([3, 8]).longer(1).arrays()
        (array([4, 9]), array([1, 1]))
        """
        found = LengthCounts()
        found._counts.update({length + by: count for length, count in self._counts.items()})
        return found

    def pieces(self, size: int) -> LengthCounts:
        """The same once each is cut into pieces of at most ``size``.

        >>> LengthCounts([3, 8, 9]).pieces(4).arrays()
        (array([1, 3, 4]), array([1, 1, 4]))
        """
        found = LengthCounts()
        for length, count in self._counts.items():
            found._counts[size] += count * (length // size)
            found._counts[length % size] += count
        del found._counts[0]
        return found

    def drawn(self, most: int, seed: int) -> np.ndarray:
        """Lengths in these shares: all, or where there are more ``most`` of them, drawn at random.

        >>> LengthCounts([3, 3, 7]).drawn(8, seed=0)
        array([3, 3, 7])
        """
        lengths, counts = self.arrays()
        if counts.sum() <= most:
            return np.repeat(lengths, counts)
        return np.random.default_rng(seed).choice(lengths, most, p=counts / counts.sum())


class Sample:
    """At most so many pairs of numbers out of a stream, each as likely to be kept as any other; the same each time.

    >>> sample = Sample(most=2)
    >>> for pair in [(1, 10), (2, 20), (3, 30), (4, 40)]:
    ...     sample.add(*pair)
    >>> sample.arrays(), sample.seen
    ((array([1, 3]), array([10, 30])), 4)
    """

    def __init__(self, most: int = SAMPLE) -> None:
        self.most, self.seen = most, 0
        self._kept = array("q"), array("q")
        self._random = random.Random(0)

    def add(self, first: int, second: int) -> None:
        """Take another pair into account."""
        self.seen += 1
        if self.seen <= self.most:
            self._kept[0].append(first)
            self._kept[1].append(second)
        elif (place := self._random.randrange(self.seen)) < self.most:
            self._kept[0][place], self._kept[1][place] = first, second

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What was kept."""
        return np.array(self._kept[0], dtype=np.int64), np.array(self._kept[1], dtype=np.int64)


@dataclass(frozen=True)
class Match:
    """Two places that hold the same: source and target, or the source alone.

    >>> Match("a.tsv:9", "a.tsv:2", pair=True).where
    'a.tsv:9'
    """

    where: str
    same_as: str
    pair: bool


@dataclass(frozen=True)
class Repeated:
    """How many examples repeat an earlier pair, how many sources have several targets, and the first of both.

    Where not all examples could be remembered, counts are estimates from every ``every``-th source.

    >>> Repeated(pairs=0, sources=0, first=(), every=1).pairs
    0
    """

    pairs: int
    sources: int
    first: tuple[Match, ...]
    every: int


@dataclass(frozen=True)
class Overlap:
    """How many validation examples are training examples too, by their sources and as pairs, and the first of them.

    >>> Overlap(sources=3, pairs=1, first=(), every=1).sources
    3
    """

    sources: int
    pairs: int
    first: tuple[Match, ...]
    every: int


class Seen:
    """The examples of a split, remembered by digests of 8 bytes.

    >>> train, held_out = Seen(), Seen()
    >>> for line, (source, target) in enumerate([("a", "b"), ("c", "d"), ("a", "b"), ("a", "x")], 1):
    ...     train.add(source, target, f"train.tsv:{line}")
    >>> held_out.add("c", "y", "dev.tsv:1")
    >>> train.repeated()  # doctest: +NORMALIZE_WHITESPACE
    Repeated(pairs=1, sources=1, first=(Match(where='train.tsv:3', same_as='train.tsv:1', pair=True),
        Match(where='train.tsv:4', same_as='train.tsv:1', pair=False)), every=1)
    >>> held_out.overlap(train)
    Overlap(sources=1, pairs=0, first=(Match(where='dev.tsv:1', same_as='train.tsv:2', pair=False),), every=1)
    """

    def __init__(self, most: int = MOST) -> None:
        self.most, self.every = most, 1
        self._files: dict[str, int] = {}
        self._bytes = bytearray()

    def add(self, source: str, target: str, where: str) -> None:
        """Remember an example."""
        head = blake2b(source.encode(), digest_size=8).digest()
        number = int.from_bytes(head, "little")
        if number % self.every:
            return
        pair = int.from_bytes(blake2b(head + target.encode(), digest_size=8).digest(), "little")
        file, _, line = where.rpartition(":")
        place = self._files.setdefault(file, len(self._files)) << _LINE_BITS | int(line)
        self._bytes += _PACKED.pack(number, pair, place)
        while len(self._bytes) > self.most * _RECORD.itemsize:
            self._bytes = bytearray(self._rows(2 * self.every).tobytes())
            self.every *= 2

    def repeated(self) -> Repeated:
        """What repeats within the split."""
        rows = self._rows(self.every)
        first = np.sort(np.unique(rows["pair"], return_index=True)[1])
        again = np.setdiff1d(np.arange(len(rows)), first, assume_unique=True)
        _, earliest, targets = np.unique(rows["source"][first], return_index=True, return_counts=True)
        others = np.setdiff1d(first, first[earliest], assume_unique=True)
        matches = [*self._matches(rows[again[:FIRST]], self, True), *self._matches(rows[others[:FIRST]], self, False)]
        return Repeated(len(again) * self.every, int((targets > 1).sum()) * self.every, tuple(matches), self.every)

    def overlap(self, other: Seen) -> Overlap:
        """What of this split is in another one too."""
        every = max(self.every, other.every)
        mine, theirs = self._rows(every), other._rows(every)
        by_source, by_pair = (np.isin(mine[name], theirs[name]) for name in ("source", "pair"))
        first = np.flatnonzero(by_source)[:FIRST]
        matches = tuple(match for i in first for match in self._matches(mine[[i]], other, bool(by_pair[i])))
        return Overlap(int(by_source.sum()) * every, int(by_pair.sum()) * every, matches, every)

    def _rows(self, every: int) -> np.ndarray:
        rows = np.frombuffer(self._bytes, _RECORD)
        return rows[rows["source"] % np.uint64(every) == 0] if every > self.every else rows

    def _matches(self, rows: np.ndarray, other: Seen, pair: bool) -> list[Match]:
        among, name = other._rows(other.every), "pair" if pair else "source"
        return [Match(self._where(row), other._where(among[(among[name] == row[name]).argmax()]), pair) for row in rows]

    def _where(self, row: np.void) -> str:
        file, line = divmod(int(row["place"]), 1 << _LINE_BITS)
        return f"{shown(list(self._files)[file])}:{line}"


@dataclass(frozen=True)
class Lost:
    """A character that a tokenizer gives back as another or not at all: how often it occurs, and where first.

    ``unknown`` says that the tokenizer has no token for it; else its normalizer makes ``becomes`` of it.

    >>> Lost("Ș", "U+0218", unknown=True, becomes="", count=3, examples=2, first="ro.txt:1").code
    'U+0218'
    """

    character: str
    code: str
    unknown: bool
    becomes: str
    count: int
    examples: int
    first: str


class Letters:
    """Which characters of a text come back from a tokenizer, each looked at once, and the unknown tokens in all of it.

    A letter and the marks that combine with it are one. White space is tried between letters.

    >>> from t2t.data.tokens import Bytes
    >>> letters = Letters(Bytes())
    >>> letters.add(["Țară"], [[203, 157, 100, 117, 199, 134]], "ro.txt:1")
    >>> letters.lost(), letters.unknown_tokens
    ((), 0)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.unknown_id = tokenizer, _unknown_id(tokenizer)
        self.unknown_tokens = self.unknown_examples = 0
        self.first_unknown = ""
        self._said: set[str] = set()
        self._lost: dict[str, Lost] = {}

    def add(self, texts: Iterable[str], ids: Iterable[Sequence[int]], where: str) -> None:
        """Look at the texts of an example and at their tokens."""
        texts = list(texts)
        for unit in set().union(*map(_units, texts)) - self._said:
            found = self._lost.get(unit) or self._tried(unit, where)
            if found is None:
                self._said.add(unit)
                continue
            count = found.count + sum(text.count(unit) for text in texts)
            self._lost[unit] = replace(found, count=count, examples=found.examples + 1)
        if self.unknown_id is not None and (unknown := sum(list(side).count(self.unknown_id) for side in ids)):
            self.unknown_tokens += unknown
            self.unknown_examples += 1
            self.first_unknown = self.first_unknown or shown(where)

    def lost(self) -> tuple[Lost, ...]:
        """Every character that is lost, unknown ones first, then by how often they occur."""
        return tuple(sorted(self._lost.values(), key=lambda lost: (not lost.unknown, -lost.count, lost.character)))

    def _tried(self, unit: str, where: str) -> Lost | None:
        around = "a" if unit.isspace() else ""
        ids = self.tokenizer.encode(f"{around}{unit}{around}")
        back = self.tokenizer.decode(ids)
        if unicodedata.normalize("NFC", unit) in unicodedata.normalize("NFC", back):
            return None
        code = " ".join(f"U+{ord(character):04X}" for character in unit)
        unknown = self.unknown_id is not None and self.unknown_id in ids
        return Lost(unit, code, unknown, back.strip(around) if around else back, 0, 0, shown(where))


def _units(text: str) -> set[str]:
    return set(_UNITS.findall(text)) if _MARKED.search(text) else set(text)


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    found = tokenizer.inner.unk_token_id if isinstance(tokenizer, HuggingFace) else None
    return None if found == tokenizer.eos_id else found  # GPT-2 names its end token, and knows every byte


def expected(
    name: str, kind: str, data: Data, pairs: Sample, documents: LengthCounts, sentinels: int, seed: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """How many examples an objective makes of data, and the slots that some of them take in both streams.

    ``pairs`` are lengths of both sides (of a conversation: 0 and its length), ``documents`` those of plain text.

    >>> expected("blocks", "causal", Data(block=4), Sample(), LengthCounts([9, 1]), 0, seed=0)
    (3, array([0, 0, 0]), array([4, 4, 4]))
    """
    longest = data.block or data.max_source_length
    if name in ("lm", "masked_lm"):
        marks = 2 if name == "masked_lm" else 0  # [CLS] and [SEP]; else an end token follows the text
        pieces = (documents if marks else documents.longer(1)).pieces(longest - marks)
        target = pieces.drawn(SAMPLE, seed) + marks
        return len(pieces), np.zeros_like(target), target
    if name in ("pairs", "character_noise", "chat"):
        source, target = pairs.arrays()
        target = np.minimum(target, chat.lengths(data)[0] if name == "chat" else data.max_target_length)
        source = np.minimum(target + 8 if name == "character_noise" else source, data.max_source_length)
        if kind == "causal":
            source, target = np.zeros_like(source), source + target - 1
        return pairs.seen, source, target
    size, slots = _window(name, data, longest, sentinels)
    count = math.ceil(documents.longer(1).total() / size)
    source, target = (np.full(min(count, SAMPLE), side) for side in slots)
    return count, source, target


def _window(name: str, data: Data, longest: int, sentinels: int) -> tuple[int, tuple[int, int]]:
    """The tokens that an objective takes of joined documents at a time, and the slots that these make."""
    if name == "blocks":
        return longest, (0, longest)
    if name == "masked_lm_nsp":  # half of an example is its own
        return max(1, (longest - 3) // 2), (0, longest)
    if name == "prefix_lm":
        size = max(data.max_source_length, data.max_target_length) - 1
        return size, (min(size + 1, data.max_source_length), min(size + 1, data.max_target_length))
    size = span_window(data.max_source_length, 0.15, 3.0)
    while sentinels and span_lengths(size, 0.15, 3.0)[1] > sentinels:
        size -= 1
    noise, spans, source = span_lengths(size, 0.15, 3.0)
    return size, (source, noise + spans + 1)


def rows_for(
    source: np.ndarray, target: np.ndarray, data: Data, batch: int, cost: Cost, seed: int, packed: bool = True
) -> RowShape:
    """The row lengths that a device of static shapes would get, given or picked, and how full these examples make them.

    >>> rows_for(np.array([5, 3, 6, 2]), np.array([2, 2, 4, 1]), Data(), 4, lambda s, t: s + t, seed=0).target_row
    8
    """
    rows = data.source_row, data.target_row
    for key, given, longest in (("source", rows[0], source.max()), ("target", rows[1], target.max())):
        if 0 < given < longest:
            raise InputError(f"data.{key}_row: must hold the longest example, of {longest} slots, or be 0")
    if not packed:
        rows = rows[0] or up(source.max()), rows[1] or up(target.max())
        s, t = float(source.mean()), float(target.mean())
        return RowShape(*rows, s / max(rows[0], 1), t / rows[1], (s + t) / sum(rows), float(batch))
    taken = min(batch, SAMPLED_EXAMPLES, len(source))  # of a larger step the fill is no other
    sampled = max(1, min(SAMPLED_EXAMPLES, len(source)) // taken)
    steps = [step_examples(len(source), taken, n, order.key(seed, "sample")) for n in range(sampled)]
    shape = measure(source, target, steps, *rows) if all(rows) else pick_rows(source, target, steps, cost, *rows)
    return replace(shape, rows_per_step=shape.rows_per_step * batch / taken)


def store_bytes(tokens: int, sequences: int, records: int, vocab_size: int) -> int:
    """What tokens take on a disk, with an offset for each sequence and a place for each record.

    >>> store_bytes(1000, 20, 10, vocab_size=384), store_bytes(1000, 20, 10, vocab_size=250_112)
    (2280, 4280)
    """
    return tokens * (2 if vocab_size <= 65536 else 4) + 8 * sequences + 12 * records
