"""Several tasks in one run: how often each has its turn, and which of its examples then comes.

An epoch of a mixture has as many places as all tasks have examples together, and every task its quota of them by its
rate. A task goes through its examples in an order of its own, on and on: where its quota is smaller than it is, an
epoch takes up where the one before stopped; where it is larger, the task begins anew, in another order. So after any
epoch no example of a task was taken more than once more often than another, and which one a place takes is a pure
function of seed, epoch and place.

Two tasks of 4 and 2 examples, the second with twice the rate of the first, have quotas of 2 and 4:

    epoch 0   places  0 1 | 2 3 4 5      a3 a1 | b0 b1 b1 b0
    epoch 1           0 1 | 2 3 4 5      a0 a2 | b1 b0 b0 b1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from t2t.config import Data, tasks
from t2t.data import order
from t2t.data.objectives import Objective, features_of
from t2t.data.packing import Feature
from t2t.errors import InputError


def weights(data: Data, sizes: Mapping[str, int]) -> Sequence[float]:
    """How often each task of the data section comes against the others, given how many examples it has.

    >>> data = Data(mixing="temperature", temperature=2.0, mixing_limit=900, mix={"a": {}, "b": {}})
    >>> weights(data, {"a": 4000, "b": 100})
    [30.0, 10.0]
    """
    rates = [task.rate for task in tasks(data).values()]
    if any(rates):
        return rates
    if data.mixing == "equal":
        return [1] * len(sizes)
    counted = [min(size, data.mixing_limit or size) for size in sizes.values()]
    return counted if data.mixing == "size" else [count ** (1 / data.temperature) for count in counted]


def quotas(weights: Sequence[float], total: int) -> list[int]:
    """``total`` places shared out by weight, rounded by largest remainders; nobody goes without.

    >>> quotas([2, 1, 1], total=10), quotas([1000, 1], total=10)
    ([5, 3, 2], [9, 1])
    """
    whole = sum(map(Fraction, weights))  # exact: by size, every task has just as many places as examples
    shares = [Fraction(weight) * total / whole for weight in weights]
    found = [int(share) for share in shares]
    by_remainder = sorted(range(len(found)), key=lambda k: found[k] - shares[k])
    for k in by_remainder[: total - sum(found)]:
        found[k] += 1
    while 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] = 1
    return found


class Mixture:
    """The examples of several tasks, those of the first, then those of the second, ...; `drawn` is their order.

    >>> from t2t.data.objectives import Seq2Seq
    >>> from t2t.data.tasks import Example
    >>> from t2t.data.tokens import Bytes, tokenize
    >>> pairs = [tokenize([Example(text, "x", text) for text in texts], Bytes(), 8, 8) for texts in ("abcd", "ef")]
    >>> mixture = Mixture({name: Seq2Seq(own, 0) for name, own in zip(("a", "b"), pairs)}, weights=[1, 2])
    >>> len(mixture), mixture.quotas, mixture.tell(4)["where"]
    (6, [2, 4], 'e')
    >>> [mixture.drawn(np.arange(6), epoch, seed=1)[0].tolist() for epoch in range(2)]
    [[3, 1, 4, 5, 5, 4], [0, 2, 5, 4, 4, 5]]
    """

    def __init__(self, tasks: Mapping[str, Objective], weights: Sequence[float] = ()) -> None:
        self.tasks, self.counts = dict(tasks), [len(task) for task in tasks.values()]
        for name, size in zip(tasks, self.counts, strict=True):
            if not size:
                raise InputError(f"data.mix.{name}: has no examples")
        self.weights = list(weights or self.counts)
        self.quotas = quotas(self.weights, sum(self.counts))
        told = [(name, quota, task.fingerprint) for (name, task), quota in zip(tasks.items(), self.quotas, strict=True)]
        self.fingerprint = f"mixture-{order.key(*told):016x}"
        words = [task.words for task in tasks.values()]
        self.words = sum(words) if all(words) else 0
        self.predictions = max(getattr(task, "predictions", 0) for task in tasks.values())  # see `masked.Masked`
        self._tasks = list(self.tasks.values())
        self._ends = np.cumsum(self.counts).tolist()
        self._quota_ends = np.cumsum(self.quotas)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def longest(self) -> tuple[int, int]:
        source, target = zip(*(task.longest for task in self._tasks), strict=True)
        return max(source), max(target)

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = np.zeros((2, len(index)), dtype=np.int64)
        of = np.searchsorted(self._ends, index, side="right")
        for k in np.unique(of).tolist():
            found[:, of == k] = self._tasks[k].sizes(index[of == k] - self._start(k))
        return found[0], found[1]

    def feature(self, i: int, seed: int) -> Feature:
        k = bisect_right(self._ends, i)
        return self._tasks[k].feature(i - self._start(k), seed)

    def features(self, index: np.ndarray, seeds: Iterable[int]) -> list[Feature]:
        found: dict[int, Feature] = {}
        of, seeds = np.searchsorted(self._ends, index, side="right"), [*seeds]
        for k in np.unique(of).tolist():
            mine = np.flatnonzero(of == k)
            own = features_of(self._tasks[k], index[mine] - self._start(k), (seeds[j] for j in mine))
            found |= zip(mine.tolist(), own, strict=True)
        return [found[j] for j in range(len(index))]

    def tell(self, i: int) -> dict[str, str | list[int]]:
        k = bisect_right(self._ends, i)
        return {"task": list(self.tasks)[k], **self._tasks[k].tell(i - self._start(k))}

    def drawn(self, places: np.ndarray, epoch: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples at places of an epoch, and for each how often its whole task had been gone through before."""
        of = np.searchsorted(self._quota_ends, places, side="right")
        quota, size = np.array(self.quotas)[of], np.array(self.counts)[of]
        rounds, within = np.divmod(epoch * quota + places - (self._quota_ends[of] - quota), size)
        examples = np.empty_like(places)
        for k, name in enumerate(self.tasks):
            for turn in np.unique(rounds[of == k]).tolist():
                mine = (of == k) & (rounds == turn)
                own = order.permuted(within[mine], self.counts[k], order.key(seed, name, turn))
                examples[mine] = self._start(k) + own
        return examples, rounds

    def map(self, change: Callable[[Objective], Objective]) -> Mixture:
        """The same mixture of changed tasks."""
        return Mixture({name: change(task) for name, task in self.tasks.items()}, self.weights)

    def _start(self, k: int) -> int:
        return self._ends[k] - self.counts[k]
