"""Where segments lie, and what dropout takes of their scores."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from t2t.kernels.cpu.dropout import dropped


@dataclass(frozen=True)
class Segments:
    """The segments that queries and keys both have, in order; slots are counted over all rows.

    >>> found = Segments.of(np.array([[1, 1, 2], [1, 3, 0]]), np.array([[1, 2, 2], [1, 0, 0]]))
    >>> found.places.tolist()
    [[0, 2, 0, 1], [2, 1, 1, 2], [3, 1, 3, 1]]
    >>> found.full_queries, found.full_keys
    (False, False)
    """

    places: np.ndarray  # [segments, 4]: first query, queries, first key, keys
    queries: int  # slots in all, those of no segment too
    keys: int

    @classmethod
    def of(cls, queries: np.ndarray, keys: np.ndarray) -> Segments:
        """From the numbers of segments in rows of queries and of keys; 0 is padding."""
        numbers = int(max(queries.max(), keys.max())) + 1 if queries.size else 1
        found = _stretches(_named(keys, numbers))
        both = [(*q, *found[name]) for name, q in _stretches(_named(queries, numbers)).items() if name in found]
        return cls(np.array(both, dtype=np.int64).reshape(-1, 4), queries.size, keys.size)

    @property
    def full_queries(self) -> bool:
        """Whether every query is in one of them."""
        return int(self.places[:, 1].sum()) == self.queries

    @property
    def full_keys(self) -> bool:
        """Whether every key is in one of them."""
        return int(self.places[:, 3].sum()) == self.keys

    def drop(self, heads: int, rate: float) -> Tensor | None:
        """What is dropped of the scores [H, queries, keys] of all segments, one after the other."""
        scores = heads * int((self.places[:, 1] * self.places[:, 3]).sum())
        return dropped(scores, rate) if rate and scores else None


def _named(segments: np.ndarray, numbers: int) -> np.ndarray:
    """The rows one after another, every segment with a number of its own; 0 stays padding.

    >>> _named(np.array([[1, 1, 2], [1, 2, 0]]), 3)
    array([1, 1, 2, 4, 5, 0])
    """
    first = numbers * np.arange(len(segments))[:, None]
    return np.where(segments, segments + first, 0).reshape(-1)


def _stretches(named: np.ndarray) -> dict[int, tuple[int, int]]:
    """The first slot of every segment and how many it has. Each lies in one piece.

    >>> _stretches(np.array([1, 1, 2, 4, 5, 0]))
    {1: (0, 2), 2: (2, 1), 4: (3, 1), 5: (4, 1)}
    """
    edges = np.flatnonzero(np.diff(named, prepend=-1, append=-1)).tolist()
    return {int(named[a]): (a, b - a) for a, b in pairwise(edges) if named[a]}
