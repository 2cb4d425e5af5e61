"""Packing into rows: what holds for any lengths, and how full the rows come out."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from t2t.data import packing
from t2t.data.loader import step_examples
from t2t.data.packing import (
    IGNORE,
    Cut,
    Feature,
    RowShape,
    collate,
    cut_flat,
    cut_static,
    gather,
    measure,
    pack,
    pick_rows,
)
from t2t.models.t5 import T5Config

Lengths = tuple[np.ndarray, np.ndarray]


def random_lengths(rng: np.random.Generator) -> tuple[Lengths, tuple[int, int]]:
    rows = int(rng.integers(1, 80)), int(rng.integers(1, 40))
    count = int(rng.integers(1, 120))
    longest = [max(1, int(row * rng.uniform(0.05, 1))) for row in rows]
    source, target = (rng.integers(1, most + 1, count) for most in longest)
    return (source, target), rows


@pytest.mark.parametrize("seed", range(60))
def test_every_example_is_in_one_row_and_every_row_has_room(seed: int) -> None:
    (source, target), (source_row, target_row) = random_lengths(np.random.default_rng(seed))
    rows = pack(source, target, source_row, target_row)
    assert sorted(i for row in rows for i in row) == list(range(len(source)))
    assert all(rows)
    assert len(rows) <= len(source)
    for row in rows:
        assert source[row].sum() <= source_row
        assert target[row].sum() <= target_row
    least = max(math.ceil(source.sum() / source_row), math.ceil(target.sum() / target_row))
    assert least <= len(rows) <= 2 * least + 1
    assert pack(source, target, source_row, target_row) == rows


def test_rows_are_hardly_more_than_their_tokens_need() -> None:
    found = least = 0
    for seed in range(60):
        (source, target), rows = random_lengths(np.random.default_rng(seed))
        found += len(pack(source, target, *rows))
        least += max(math.ceil(source.sum() / rows[0]), math.ceil(target.sum() / rows[1]))
    assert found <= 1.03 * least


def test_whole_rows_and_no_examples() -> None:
    full = np.full(5, 7)
    assert len(pack(full, full, 7, 7)) == 5
    assert pack(np.array([], dtype=int), np.array([], dtype=int), 7, 7) == []
    # Sums of thirds are not exact in floating point.
    assert len(pack(np.full(9, 1), np.full(9, 1), 3, 3)) == 3
    assert len(pack(np.full(9, 10**6), np.full(9, 10**6), 3 * 10**6, 3 * 10**6 + 1)) == 3


def test_an_example_longer_than_its_row_is_our_own_error() -> None:
    with pytest.raises(AssertionError, match="longer than its row"):
        pack(np.array([3, 9]), np.array([1, 1]), 8, 8)


@pytest.mark.parametrize("seed", range(10))
def test_collate_writes_every_token_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    (source, target), (source_row, target_row) = random_lengths(rng)
    sources = [rng.integers(3, 300, n) for n in source]
    targets = [rng.integers(3, 300, n) for n in target]
    rows = [*pack(source, target, source_row, target_row), []]
    ids = rng.permutation(1000)[: len(source)]
    features = [Feature(s, np.append(2, t[:-1]), t) for s, t in zip(sources, targets, strict=True)]
    batch = collate(features, ids, rows, source_row, target_row, pad_id=0)
    assert batch.source_ids.shape == batch.source_segments.shape == (len(rows), source_row)
    assert batch.target_ids.shape == batch.labels.shape == batch.target_segments.shape == (len(rows), target_row)
    for r, row in enumerate(rows):
        assert [i for i in batch.example_ids[r] if i >= 0] == [ids[i] for i in row]
        for segment, i in enumerate(row, 1):
            here, there = batch.source_segments[r] == segment, batch.target_segments[r] == segment
            assert batch.source_ids[r, here].tolist() == sources[i].tolist()
            assert batch.labels[r, there].tolist() == targets[i].tolist()
            assert batch.target_ids[r, there].tolist() == [2, *targets[i][:-1]]
            assert batch.target_positions[r, there].tolist() == [*range(len(targets[i]))]
    for ids_, segments in ((batch.source_ids, batch.source_segments), (batch.target_ids, batch.target_segments)):
        assert (ids_[segments == 0] == 0).all()
    assert (batch.labels[batch.target_segments == 0] == IGNORE).all()
    assert batch.counts.tolist() == [target.sum()]
    assert batch.target_types is batch.pair_labels is None
    assert batch.tokens == source.sum() + target.sum()
    assert not batch.source_segments[-1].any()
    assert (batch.example_ids[-1] == -1).all()


def test_a_micro_batch_travels_without_padding() -> None:
    none, ids = np.zeros(0, dtype=np.uint16), np.arange(10, dtype=np.uint16)
    features = [Feature(none, ids, ids), Feature(none, ids[:4], ids[:4], types=ids[:4], pair=1)]
    packed = gather(features, [3, 4], Cut([[1], [], [0]], 0, 10**4), pad_id=0, predictions=None)
    sent = pickle.dumps(packed)
    assert len(sent) < 2000
    expected = collate(features, [3, 4], [[1], [], [0]], source_row=0, target_row=10**4, pad_id=0)
    np.testing.assert_equal(vars(pickle.loads(sent).batch()), vars(expected))
    assert expected.target_types is not None and expected.target_types[:, :5].tolist() == [
        [0, 1, 2, 3, 0],
        *[[0] * 5] * 2,
    ]


def test_collate_tells_the_sentences_of_pairs_apart() -> None:
    none, ids = np.zeros(0, dtype=np.int64), np.array([5, 6, 7])
    features = [
        Feature(none, ids, np.array([IGNORE, 6, IGNORE]), types=np.array([0, 0, 1]), pair=1),
        Feature(none, ids, np.array([IGNORE, IGNORE, 9]), types=np.array([0, 1, 1]), pair=0),
    ]
    batch = collate(features, [3, 4], [[0, 1], []], source_row=0, target_row=7, pad_id=0)
    assert batch.target_types is not None and batch.pair_labels is not None
    assert batch.target_types.tolist() == [[0, 0, 1, 0, 1, 1, 0], [0] * 7]
    assert batch.pair_labels.tolist() == [[1, 0], [IGNORE, IGNORE]]
    assert batch.counts.tolist() == [2, 2]
    assert batch.source_ids.shape == (2, 0)


@pytest.mark.parametrize("seed", range(40))
def test_static_cuts_have_one_shape(seed: int) -> None:
    (source, target), (source_row, target_row) = random_lengths(np.random.default_rng(seed))
    cuts = cut_static(source, target, source_row, target_row, micro_rows=3)
    assert [row for cut in cuts for row in cut.rows if row] == pack(source, target, source_row, target_row)
    assert {(len(cut.rows), cut.source_row, cut.target_row) for cut in cuts} == {(3, source_row, target_row)}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_flat_cuts_hold_every_example_once_and_no_padding(seed: int, workers: int) -> None:
    (source, target), rows = random_lengths(np.random.default_rng(seed))
    cuts = cut_flat(source, target, most=2 * sum(rows), workers=workers)
    assert sorted(i for cut in cuts for row in cut.rows for i in row) == list(range(len(source)))
    for cut in cuts:
        (row,) = cut.rows
        assert (cut.source_row, cut.target_row) == (source[row].sum(), target[row].sum())
        assert row
    total = (source + target).sum()
    assert len(cuts) >= min(len(source), total / (2 * sum(rows)))
    assert len(cuts) % workers == 0 or len(cuts) == len(source)
    assert max(cut.source_row + cut.target_row for cut in cuts) <= total / len(cuts) + (source + target).max()


def test_flat_cuts_cost_the_same() -> None:
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 200, 64), rng.integers(1, 100, 64)

    def cost(s: int, t: int) -> float:
        return s**2 + 3 * t

    costs = [
        sum(cost(source[i], target[i]) for i in cut.rows[0]) for cut in cut_flat(source, target, 10**9, cost, workers=4)
    ]
    assert len(costs) == 4
    assert max(costs) < 1.02 * min(costs)


def test_fills_are_real_tokens_over_slots() -> None:
    source, target, steps = np.array([4, 4, 6]), np.array([2, 1, 2]), [np.array([0, 1]), np.array([2])]
    assert measure(source, target, steps, 8, 4) == RowShape(8, 4, 14 / 16, 5 / 8, 19 / 24, 1.0)


def test_picked_rows_hold_the_longest_example_and_given_ones_are_kept() -> None:
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 50, 100), rng.integers(1, 30, 100)
    steps = [np.arange(0, 50), np.arange(50, 100)]

    def cost(s: int, t: int) -> float:
        return s + t

    shape = pick_rows(source, target, steps, cost)
    assert shape.source_row % packing.ROUND == shape.target_row % packing.ROUND == 0
    assert shape.source_row >= source.max()
    assert shape.target_row >= target.max()
    assert pick_rows(source, target, steps, cost, source_row=93).source_row == 93
    both = pick_rows(source, target, steps, cost, source_row=93, target_row=51)
    assert both == measure(source, target, steps, 93, 51)


def test_dear_attention_makes_shorter_rows() -> None:
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 50, 256), rng.integers(1, 30, 256)
    steps = [np.arange(i, i + 64) for i in range(0, 256, 64)]
    cheap = pick_rows(source, target, steps, lambda s, t: s + t)
    dear = pick_rows(source, target, steps, lambda s, t: (s + t) ** 2)
    assert dear.source_row < cheap.source_row


def like_ro_sts(count: int = 4000) -> Lengths:
    """Sentence pairs: means of 15 and 22 tokens, at most 87 and 113, both long together."""
    rng = np.random.default_rng(1)
    common = rng.normal(size=count)
    return tuple(  # type: ignore[return-value]
        np.clip(np.exp(math.log(mean) - 0.18 + 0.6 * (0.95 * common + 0.31 * rng.normal(size=count))), 4, most)
        .round()
        .astype(int)
        for mean, most in ((15, 87), (22, 113))
    )


def like_scitldr(count: int = 3000) -> Lengths:
    """Abstracts and their one sentence: means of 230 (cut at 512) and 29.5 tokens (cut at 128), hardly related."""
    rng = np.random.default_rng(2)
    source = np.clip(np.exp(rng.normal(math.log(220), 0.35, count)), 30, 512)
    target = np.clip(np.exp(rng.normal(math.log(27), 0.42, count)), 5, 128)
    return source.round().astype(int), target.round().astype(int)


@pytest.mark.parametrize(("batch", "least"), [(64, 0.88), (512, 0.92)])
@pytest.mark.parametrize("lengths", [like_ro_sts, like_scitldr])
def test_rows_of_a_t5_small_come_out_full(lengths: type[Lengths], batch: int, least: float) -> None:
    source, target = lengths()
    with torch.device("meta"):
        cost = T5Config().row_cost
    picked_on = [step_examples(len(source), batch, n, seed=5) for n in range(2048 // batch)]
    shape = pick_rows(source, target, picked_on, cost)
    # What counts is the data not yet seen by the picking.
    others = [step_examples(len(source), batch, n, seed=6) for n in range(2048 // batch)]
    assert measure(source, target, others, shape.source_row, shape.target_row).fill >= least
