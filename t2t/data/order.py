"""The order of examples: a keyed permutation, computed index by index, so that any position is found at once.

A Feistel network permutes the smallest power of four that holds all indices; values outside walk on until inside.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

ROUNDS = 6
BLOCK = 4096  # positions that `window` computes at once: that takes little longer than a few
_U64 = np.uint64


def key(*parts: object) -> int:
    """A 64-bit key out of anything that has a text form: the seed of everything random here.

    >>> key(1, "train", 0) == key(1, "train", 0), key(1, "train", 0) == key(1, "train", 1)
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permuted(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The examples at the given positions of the permutation of ``range(size)`` that ``seed`` names.

    >>> permuted(np.arange(5), 5, seed=3)
    array([3, 4, 0, 1, 2])
    >>> permuted(np.array([3]), 5, seed=3)
    array([1])
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [_U64(key(seed, size, i)) for i in range(ROUNDS)]
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = values >= size
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= size
    return values.astype(np.int64)


def window(start: int, stop: int, size: int, seed: int) -> np.ndarray:
    """The examples from one position to another, for those who will ask for the next ones too.

    >>> window(1, 4, 5, seed=3)
    array([4, 0, 1])
    """
    first = start // BLOCK
    blocks = [_block(number, size, seed) for number in range(first, -(-stop // BLOCK))]
    return np.concatenate(blocks)[start - first * BLOCK : stop - first * BLOCK]


@lru_cache(maxsize=8)
def _block(number: int, size: int, seed: int) -> np.ndarray:
    return permuted(np.arange(number * BLOCK, min((number + 1) * BLOCK, size)), size, seed)


def _feistel(values: np.ndarray, half_bits: int, keys: list[np.uint64]) -> np.ndarray:
    bits, mask = _U64(half_bits), _U64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for round_key in keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    # SplitMix64's finalizer; unsigned overflow is meant.
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))
