"""The keyed permutation."""

from __future__ import annotations

import numpy as np
import pytest

from t2t.data import order


@pytest.mark.parametrize("size", [*range(1, 201), 1000])
def test_it_is_a_permutation_of_any_size(size: int) -> None:
    for seed in (0, 1, 2**64 - 1):
        assert sorted(order.permuted(np.arange(size), size, seed)) == list(range(size))


def test_a_large_one_is_found_position_by_position() -> None:
    size = 10**12
    positions = np.array([0, 1, size // 2, size - 1])
    found = order.permuted(positions, size, seed=7)
    assert len(set(found.tolist())) == 4
    assert found.min() >= 0
    assert found.max() < size
    assert [int(order.permuted(np.array([p]), size, seed=7)[0]) for p in positions] == found.tolist()


def test_seeds_give_different_orders_that_look_random() -> None:
    size = 1000
    orders = [order.permuted(np.arange(size), size, seed) for seed in range(20)]
    assert len({tuple(o.tolist()) for o in orders}) == 20
    for one in orders:
        assert (one == np.arange(size)).mean() < 0.01
        assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < 0.12
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.12


def test_every_example_comes_to_every_place() -> None:
    counts = np.zeros((7, 7))
    for seed in range(1400):
        counts[np.arange(7), order.permuted(np.arange(7), 7, seed)] += 1
    # 200 a cell; five standard deviations on each side.
    assert counts.min() > 134
    assert counts.max() < 266


@pytest.mark.parametrize("size", [1, order.BLOCK, 3 * order.BLOCK - 7])
def test_a_window_is_a_part_of_the_permutation(size: int) -> None:
    whole = order.permuted(np.arange(size), size, seed=3)
    for start in (0, 5, order.BLOCK - 1, order.BLOCK, 2 * order.BLOCK + 9):
        for stop in (start + 1, order.BLOCK, order.BLOCK + 2, size):
            if start < stop <= size:
                found = order.window(start, stop, size, seed=3)
                assert np.array_equal(found, whole[start:stop])
                found[:] = -1  # nobody else's


def test_positions_are_left_as_they_are() -> None:
    positions = np.arange(5)
    order.permuted(positions, 5, seed=3)
    assert positions.tolist() == [0, 1, 2, 3, 4]


def test_keys_tell_their_parts_apart() -> None:
    parts = [(1, 23), (12, 3), ("1", 23), (1, 23, 0), (123,), ("a", "b"), ("ab",), ("a, b",)]
    keys = {order.key(*part) for part in parts}
    assert len(keys) == len(parts)
    assert all(0 <= key < 2**64 for key in keys)


def test_orders_stay_the_same_in_later_versions() -> None:
    assert order.key(1, "train", 0) == 0xBD8C8E85E3A98C2B
    assert order.permuted(np.arange(10), 10, seed=1).tolist() == [3, 8, 5, 2, 1, 0, 7, 9, 6, 4]
