"""Examples into rows: several share one, told apart by segment ids.

Shapes: R rows, S slots of a source row, T slots of a target row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

IGNORE = -100
ROUND = 8  # row lengths are multiples of this


class Feature(NamedTuple):
    """What one example asks of a model: at each of its inputs, to say the label there.

    A model with a decoder reads ``source`` first; others have none. ``types`` tells the two sentences of a pair apart,
    and ``pair`` whether the second follows the first (0) or comes from elsewhere (1), as BERT's labels have it.

    >>> Feature(np.array([5, 1]), np.array([0, 6]), np.array([6, 1])).size
    (2, 2)
    """

    source: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray
    types: np.ndarray | None = None
    pair: int = IGNORE

    @property
    def size(self) -> tuple[int, int]:
        """Slots that it takes in both streams."""
        return len(self.source), len(self.inputs)

    @property
    def predicted(self) -> int:
        """How many labels it has."""
        return int((self.labels != IGNORE).sum())


@dataclass(frozen=True)
class Batch:
    """One micro-batch of packed rows, as numpy arrays. Segment 0 is padding; labels are -100 there.

    ``example_ids[r]`` names the examples of row r in segment order, -1 where there is none.
    """

    source_ids: np.ndarray  # [R, S]
    source_segments: np.ndarray  # [R, S]
    target_ids: np.ndarray  # [R, T]
    target_segments: np.ndarray  # [R, T]
    target_positions: np.ndarray  # [R, T], from 0 in every segment
    labels: np.ndarray  # [R, T]
    example_ids: np.ndarray  # [R, most segments]
    target_types: np.ndarray | None = None  # [R, T]
    pair_labels: np.ndarray | None = None  # [R, most segments]
    predicted: np.ndarray | None = None  # [R, P]: the slots that hold all labels of the row, and others up to P

    @property
    def counts(self) -> np.ndarray:
        """How many labels there are, [1], and where there are pairs how many of them, [2]."""
        kinds = [self.labels] if self.pair_labels is None else [self.labels, self.pair_labels]
        return np.array([(labels != IGNORE).sum() for labels in kinds])

    @property
    def tokens(self) -> int:
        """Real tokens, source and target."""
        return int((self.source_segments != 0).sum() + (self.target_segments != 0).sum())

    def alone(self, row: int, segment: int) -> Batch:
        """One row as it is with nothing but one of its segments in it: the rest is padding, of its own tokens.

        >>> one = Feature(np.array([5, 1]), np.array([0, 8]), np.array([8, 1]))
        >>> two = Feature(np.array([6, 7, 1]), np.array([0, 9]), np.array([9, 1]))
        >>> batch = collate([one, two], [40, 41], [[0, 1]], source_row=6, target_row=4, pad_id=0).alone(0, 2)
        >>> batch.source_ids, batch.labels, batch.example_ids
        (array([[6, 6, 6, 7, 1, 6]]), array([[-100, -100,    9,    1]]), array([[-1, 41]]))
        """
        source, target = (x[[row]] == segment for x in (self.source_segments, self.target_segments))
        named = np.arange(1, self.example_ids.shape[1] + 1)[None] == segment

        def keep(x: np.ndarray, mine: np.ndarray, other: int | None = None) -> np.ndarray:
            if other is None:
                other = x[row][mine[0]][0] if mine.any() else 0
            return np.where(mine, x[[row]], other)

        return replace(
            self,
            source_ids=keep(self.source_ids, source),
            source_segments=keep(self.source_segments, source, 0),
            target_ids=keep(self.target_ids, target),
            target_segments=keep(self.target_segments, target, 0),
            target_positions=self.target_positions[[row]],
            labels=keep(self.labels, target, IGNORE),
            example_ids=keep(self.example_ids, named, -1),
            target_types=None if self.target_types is None else self.target_types[[row]],
            pair_labels=None if self.pair_labels is None else keep(self.pair_labels, named, IGNORE),
        )


def pack(source: np.ndarray, target: np.ndarray, source_row: int, target_row: int) -> list[list[int]]:
    """Put examples of these lengths into as few rows as we can find, each row holding both its streams.

    Long examples go first. Once each goes to the row that it leaves least and most evenly free, a new row being opened
    when none has room; then, while it works, into one row less, each to the row whose free space points most in its
    direction, so that both streams fill up together.

    >>> pack(np.array([5, 3, 4, 2]), np.array([2, 2, 1, 1]), source_row=8, target_row=4)
    [[0, 1], [2, 3]]
    """
    if not len(source):
        return []
    room = max(source_row, 1) * target_row  # in a unit in which rows of both streams are equally long
    a, b = source * target_row, target * max(source_row, 1)
    assert max(a.max(), b.max()) <= room, "an example is longer than its row"
    least = -(-max(int(a.sum()), int(b.sum())) // room)
    order = np.argsort(-(10 * np.maximum(a, b) + a + b), kind="stable")
    sizes = [*zip(order.tolist(), *(side[order].astype(np.uint64) for side in (a, b)), strict=True)]
    best = _place(sizes, room, len(sizes), tight=True)
    assert best is not None, "one row an example always suffices"
    while len(best) > least:
        fewer = _place(sizes, room, len(best) - 1, tight=False)
        if fewer is None:
            break
        best = fewer
    return best


def _place(
    sizes: Sequence[tuple[int, np.uint64, np.uint64]], room: int, most: int, tight: bool
) -> list[list[int]] | None:
    """Rows of examples, at most so many: opened one by one where the tightest is sought, or all at once."""
    opened = 1 if tight else most
    free_a, free_b = np.full((2, most), room, dtype=np.uint64)
    rows: list[list[int]] = [[] for _ in range(most)]
    for i, a, b in sizes:
        space_a, space_b = free_a[:opened], free_b[:opened]
        left = np.maximum(space_a - a, space_b - b)  # of the emptier stream; huge where there is no room
        if tight:
            row = int(left.argmin())
        else:
            row = int(np.where(left <= room, space_a * float(a) + space_b * float(b), -1.0).argmax())
        if left[row] > room:
            if opened == most:
                return None
            row, opened = opened, opened + 1
        free_a[row] -= a
        free_b[row] -= b
        rows[row].append(i)
    return [row for row in rows if row]


def collate(
    features: Sequence[Feature],
    ids: Sequence[int] | np.ndarray,
    rows: Sequence[Sequence[int]],
    source_row: int,
    target_row: int,
    pad_id: int,
    predictions: int | None = None,
) -> Batch:
    """Packed examples as arrays. An empty list in ``rows`` is an empty row.

    With ``predictions`` the batch tells so many slots of each row, its labelled ones first, for a head that looks at
    these alone; 0: as many as the row with most labels has.

    >>> one = Feature(np.array([5, 1]), np.array([0, 8]), np.array([8, 1]))
    >>> two = Feature(np.array([6, 7, 1]), np.array([0, 9]), np.array([9, 1]))
    >>> batch = collate([one, two], [40, 41], [[0, 1]], source_row=6, target_row=4, pad_id=0)
    >>> batch.source_ids, batch.source_segments
    (array([[5, 1, 6, 7, 1, 0]]), array([[1, 1, 2, 2, 2, 0]]))
    >>> batch.target_ids, batch.labels, batch.target_positions, batch.example_ids
    (array([[0, 8, 0, 9]]), array([[8, 1, 9, 1]]), array([[0, 1, 0, 1]]), array([[40, 41]]))
    """
    return gather(features, ids, Cut(rows, source_row, target_row), pad_id, predictions).batch()


def gather(
    features: Sequence[Feature], ids: Sequence[int] | np.ndarray, cut: Cut, pad_id: int, predictions: int | None
) -> Packed:
    """What `collate` lays out: the examples of one micro-batch out of those of a step."""
    order = [i for row in cut.rows for i in row]
    source, inputs, labels, types, pairs = zip(*(features[i] for i in order), strict=True)
    typed = any(feature.types is not None for feature in features)
    paired = any(feature.pair != IGNORE for feature in features)
    every = (np.zeros(len(x), np.int64) if t is None else t for x, t in zip(inputs, types, strict=True))
    return Packed(
        np.array([len(row) for row in cut.rows]),
        np.array([[len(x) for x in source], [len(x) for x in inputs]]),
        (cut.source_row, cut.target_row),
        np.asarray(ids)[order],
        np.concatenate(source),
        np.concatenate(inputs),
        np.concatenate(labels),
        np.concatenate([*every]) if typed else None,
        np.array(pairs) if paired else None,
        pad_id,
        predictions,
    )


class Packed(NamedTuple):
    """A micro-batch as it travels, without padding: what its examples hold, one after the other, row by row."""

    counts: np.ndarray  # [R], the examples of each row
    sizes: np.ndarray  # [2, examples], the slots of each in both streams
    widths: tuple[int, int]  # of the rows, S and T
    ids: np.ndarray
    source: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray
    types: np.ndarray | None
    pairs: np.ndarray | None
    pad_id: int
    predictions: int | None

    def batch(self) -> Batch:
        """The rows laid out."""
        rows, segments = np.repeat(np.arange(len(self.counts)), self.counts), 1 + _within(self.counts)
        taken = (np.bincount(rows, sizes, len(self.counts)).astype(int) for sizes in self.sizes)
        in_source, in_target = (np.arange(s) < full[:, None] for full, s in zip(taken, self.widths, strict=True))
        in_examples = np.arange(max(1, self.counts.max())) < self.counts[:, None]
        source, target = self.sizes
        labels = _laid(self.labels, in_target, IGNORE)
        return Batch(
            _laid(self.source, in_source, self.pad_id),
            _laid(np.repeat(segments, source), in_source, 0),
            _laid(self.inputs, in_target, self.pad_id),
            _laid(np.repeat(segments, target), in_target, 0),
            _laid(_within(target), in_target, 0),
            labels,
            _laid(self.ids, in_examples, -1),
            None if self.types is None else _laid(self.types, in_target, 0),
            None if self.pairs is None else _laid(self.pairs, in_examples, IGNORE),
            None if self.predictions is None else _labelled(labels, self.predictions),
        )


def _within(counts: np.ndarray) -> np.ndarray:
    """Numbers from 0, anew for each of the counts.

    >>> _within(np.array([2, 3]))
    array([0, 1, 0, 1, 2])
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _laid(values: np.ndarray, where: np.ndarray, empty: int) -> np.ndarray:
    """An array of what is empty but where the values are, row by row."""
    found = np.full(where.shape, empty)
    found[where] = values
    return found


def _labelled(labels: np.ndarray, count: int) -> np.ndarray:
    most = int((labels != IGNORE).sum(1).max(initial=0))
    assert count == 0 or most <= count, "a row has more labels than slots for them"
    return np.argsort(labels == IGNORE, axis=1, kind="stable")[:, : count or most]


class Cut(NamedTuple):
    """One micro-batch: its rows of examples, and how long both streams' rows are."""

    rows: Sequence[Sequence[int]]
    source_row: int
    target_row: int


Cost = Callable[[int, int], float]


def slots(source_row: int, target_row: int) -> float:
    """The plainest cost of a row.

    >>> slots(8, 4)
    12
    """
    return source_row + target_row


def cut_static(
    source: np.ndarray, target: np.ndarray, source_row: int, target_row: int, micro_rows: int, packed: bool = True
) -> list[Cut]:
    """Micro-batches of one shape, the last one filled up with empty rows; unpacked, each row holds one example.

    >>> cut_static(np.array([5, 3, 4]), np.array([2, 2, 1]), source_row=8, target_row=4, micro_rows=3)
    [Cut(rows=[[0, 1], [2], []], source_row=8, target_row=4)]
    >>> cut_static(np.array([5, 3]), np.array([2, 2]), source_row=8, target_row=4, micro_rows=3, packed=False)
    [Cut(rows=[[0], [1], []], source_row=8, target_row=4)]
    """
    rows = pack(source, target, source_row, target_row) if packed else [[i] for i in range(len(source))]
    rows += [[]] * (-len(rows) % micro_rows)
    return [Cut(rows[i : i + micro_rows], source_row, target_row) for i in range(0, len(rows), micro_rows)]


def cut_flat(source: np.ndarray, target: np.ndarray, most: int, cost: Cost = slots, workers: int = 1) -> list[Cut]:
    """Micro-batches of one row each, exactly as long as its examples, for a device that takes any shape.

    There are as few as hold about ``most`` slots each, a multiple of ``workers`` of them, and they cost about the same.

    >>> cut_flat(np.array([5, 3, 4, 2]), np.array([2, 2, 1, 1]), most=10)
    [Cut(rows=[[0, 3]], source_row=7, target_row=3), Cut(rows=[[1, 2]], source_row=7, target_row=3)]
    """
    count = math.ceil((source.sum() + target.sum()) / most)
    count = min(len(source), math.ceil(count / workers) * workers)
    costs = [cost(s, t) for s, t in zip(source.tolist(), target.tolist(), strict=True)]
    parts: list[list[int]] = [[] for _ in range(count)]
    load = [0.0] * count
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lightest = load.index(min(load))
        parts[lightest].append(i)
        load[lightest] += costs[i]
    return [Cut([part], int(source[part].sum()), int(target[part].sum())) for part in parts]


def cut_padded(source: np.ndarray, target: np.ndarray, most: int) -> list[Cut]:
    """Micro-batches of one example a row, for a model that cannot tell segments apart on a device that takes any shape.

    Examples of like lengths lie together, padded to the longest of them, as many as fit into ``most`` slots.

    >>> cut_padded(np.array([5, 3, 4, 2]), np.array([2, 2, 1, 1]), most=14)
    [Cut(rows=[[0], [1]], source_row=5, target_row=2), Cut(rows=[[2], [3]], source_row=4, target_row=1)]
    """
    cuts: list[Cut] = []
    for i in np.argsort(-(source + target), kind="stable").tolist():
        alone = Cut([[i]], int(source[i]), int(target[i]))
        if cuts:
            rows, s, t = cuts[-1]
            wider = Cut([*rows, [i]], max(s, alone.source_row), max(t, alone.target_row))
            if len(wider.rows) * (wider.source_row + wider.target_row) <= most:
                cuts[-1] = wider
                continue
        cuts.append(alone)
    return cuts


@dataclass(frozen=True)
class RowShape:
    """The row lengths of a run and how full they come out: real tokens over slots, of each stream and together."""

    source_row: int
    target_row: int
    source_fill: float
    target_fill: float
    fill: float
    rows_per_step: float


def measure(
    source: np.ndarray, target: np.ndarray, steps: Sequence[np.ndarray], source_row: int, target_row: int
) -> RowShape:
    """Pack each step's examples at these row lengths and see how full they come out.

    >>> measure(np.array([4, 4]), np.array([2, 1]), [np.array([0, 1])], 8, 4)
    RowShape(source_row=8, target_row=4, source_fill=1.0, target_fill=0.75, fill=0.9166666666666666, rows_per_step=1.0)
    """
    rows = sum(len(pack(source[step], target[step], source_row, target_row)) for step in steps)
    taken = np.concatenate(steps)
    real = int(source[taken].sum()), int(target[taken].sum())
    fills = (
        real[0] / (rows * source_row) if source_row else 1.0,
        real[1] / (rows * target_row),
        sum(real) / (rows * (source_row + target_row)),
    )
    return RowShape(source_row, target_row, *fills, rows / len(steps))


def pick_rows(
    source: np.ndarray,
    target: np.ndarray,
    steps: Sequence[np.ndarray],
    cost: Cost,
    source_row: int = 0,
    target_row: int = 0,
    longest: tuple[int, int] = (0, 0),
) -> RowShape:
    """The row lengths at which the sampled steps cost least, ``cost`` being that of one row; given ones are kept.

    Rows hold the ``longest`` example, sampled or not.

    Longer rows pack better and attend more. Sources from the longest example upwards are tried, each with targets
    around the data's own ratio; then the neighbours of the best. Among shapes within 2% of the least cost, the one
    whose emptier stream is fullest wins.

    >>> pick_rows(np.array([5, 3, 6, 2]), np.array([2, 2, 4, 1]), [np.arange(4)], cost=slots).source_row
    8
    """
    longest_s, longest_t = up(max(source.max(), longest[0])), up(max(target.max(), longest[1]))
    tried: dict[tuple[int, int], tuple[RowShape, float]] = {}

    def attempt(s: float, t: float) -> None:
        shape = (source_row or max(up(s), longest_s), target_row or max(up(t), longest_t))
        if shape not in tried:
            found = measure(source, target, steps, *shape)
            tried[shape] = found, found.rows_per_step * cost(*shape)

    def best() -> RowShape:
        least = min(price for _, price in tried.values())
        near = [shape for shape, price in tried.values() if price <= 1.02 * least]
        return max(near, key=lambda shape: min(shape.source_fill, shape.target_fill))

    if source.any():
        ratio = target.mean() / source.mean()
        for s in np.geomspace(longest_s, max(2.0 * longest_s, 2.0 * longest_t / ratio, 16.0 * source.mean()), 10):
            for lean in (0.9, 1.0, 1.1):
                attempt(s, s * ratio * lean)
    else:  # a model without a decoder
        for t in np.geomspace(longest_t, max(2.0 * longest_t, 16.0 * target.mean()), 20):
            attempt(0, t)
    for _ in range(2):
        center = best()
        for s in (0.92, 0.96, 1.0, 1.04, 1.08):
            for t in (0.92, 0.96, 1.0, 1.04, 1.08):
                attempt(center.source_row * s, center.target_row * t)
    return best()


def up(length: float) -> int:
    """A row length that holds ``length`` slots.

    >>> up(0), up(8), up(9)
    (0, 8, 16)
    """
    return ROUND * math.ceil(length / ROUND)
