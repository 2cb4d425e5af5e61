"""From examples to the micro-batches of a step. What step n holds is a pure function of seed, data and n."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from t2t.config import Data
from t2t.data import order
from t2t.data.masked import SHARE
from t2t.data.mixture import Mixture
from t2t.data.objectives import Objective, features_of
from t2t.data.packing import (
    ROUND,
    Batch,
    Cost,
    Feature,
    Packed,
    RowShape,
    cut_flat,
    cut_padded,
    cut_static,
    gather,
    measure,
    pick_rows,
    slots,
    up,
)
from t2t.errors import InputError

SAMPLED_EXAMPLES = 2048  # how many examples the row lengths are picked from


class Loader:
    """The micro-batches of every step.

    Step n of an epoch takes examples n·batch … (n+1)·batch of that epoch's permutation and packs them among
    themselves; the last step of an epoch takes what is left. With ``static`` every micro-batch has one shape
    (`packing.cut_static`); without, each is one row without padding, and there is a multiple of ``workers`` of them,
    about as large as ``micro_rows`` rows and equal by ``cost`` (`packing.cut_flat`). Where rows are not ``packed`` each
    holds one example, padded (`packing.cut_padded`).

    Of ``size`` ranks this is number ``rank``: it makes every ``size``-th of a step's examples, maybe none, and all
    ranks together make each example once.

    Batches of a masked model tell the few slots that it is asked at: a fixed number of a row's, so that it packs by
    both, or without ``static`` just those that have labels.
    """

    def __init__(
        self,
        examples: Objective,
        batch: int,
        shape: RowShape,
        micro_rows: int,
        seed: int,
        pad_id: int,
        static: bool = True,
        shuffle: bool = True,
        cost: Cost = slots,
        workers: int = 1,
        packed: bool = True,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.rank, self.size = rank, size
        self.examples, self.batch, self.shape, self.micro_rows, self.seed = examples, batch, shape, micro_rows, seed
        self.pad_id, self.static, self.shuffle, self.cost, self.workers = pad_id, static, shuffle, cost, workers
        self.packed, self.fingerprint = packed, examples.fingerprint
        self.steps_per_epoch = math.ceil(len(examples) / batch)
        self.predictions = None
        most = getattr(examples, "predictions", 0)  # labels of one example, told by objectives of masked models
        if most:
            self.predictions = prediction_slots(most, shape.target_row) if static else 0

    @cached_property
    def mean_sizes(self) -> tuple[float, float]:
        """The slots that an example takes on average in both streams, by a sample."""
        index, _ = drawn(self.examples, min(SAMPLED_EXAMPLES, len(self.examples)), 0, order.key("sizes"))
        source, target = self.examples.sizes(index)
        return float(source.mean()), float(target.mean())

    def taken(self, step: int) -> np.ndarray:
        """The examples of a step over all ranks, counted from the start of training."""
        return self._drawn(step)[0]

    def _drawn(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return drawn(self.examples, self.batch, step, order.key(self.seed, self.fingerprint), self.shuffle)

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step."""
        return [packed.batch() for packed in self.read(step)]

    def read(self, step: int) -> list[Packed]:
        """The same, before they are laid out."""
        index, rounds = (part[self.rank :: self.size] for part in self._drawn(step))
        if not len(index):
            return []
        named = zip(rounds.tolist(), index.tolist(), strict=True)
        seeds = (order.key(self.seed, *name) for name in named)  # made for those alone who ask
        return self.pack(features_of(self.examples, index, seeds), index)

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where an example of a batch came from, and its tokens."""
        return self.examples.tell(i)

    def pack(self, features: Sequence[Feature], index: Sequence[int] | np.ndarray) -> list[Packed]:
        """Micro-batches of a step's examples, whose numbers are given."""
        source, target = np.array([feature.size for feature in features]).T
        rows = self.shape.source_row, self.shape.target_row
        if self.predictions:
            labels = np.array([feature.predicted for feature in features])
            cuts = cut_static(labels, target, self.predictions, rows[1], self.micro_rows, self.packed)
            cuts = [cut._replace(source_row=rows[0]) for cut in cuts]
        elif self.static:
            cuts = cut_static(source, target, *rows, self.micro_rows, self.packed)
        elif self.packed:
            cuts = cut_flat(source, target, self.micro_rows * sum(rows), self.cost, self.workers)
        else:
            cuts = cut_padded(source, target, self.micro_rows * sum(rows))
        return [gather(features, index, cut, self.pad_id, self.predictions) for cut in cuts]

    def steps(self, start: int, stop: int, readers: int = 0) -> Generator[list[Batch], None, None]:
        """Steps ``start`` to ``stop``, the next ones made in the background: by a thread, or by reader processes."""
        if not readers:
            pool: Executor = ThreadPoolExecutor(1)
            found = in_advance(lambda n: pool.submit(self.step, n), start, stop, 2)
        else:
            context = multiprocessing.get_context("forkserver")
            pool = ProcessPoolExecutor(readers, context, become_reader, (self,))
            read = in_advance(lambda n: pool.submit(read_step, n), start, stop, 2 * readers + 2)
            found = ([packed.batch() for packed in step] for step in read)
        try:
            yield from found
        finally:
            pool.shutdown(cancel_futures=True)


T = TypeVar("T")


def in_advance(submit: Callable[[int], Future[T]], start: int, stop: int, ahead: int) -> Generator[T, None, None]:
    """What is made of the numbers ``start`` to ``stop``, in their order, so many of them asked for at once."""
    asked: deque[Future[T]] = deque()
    unasked = iter(range(start, stop))
    for _ in range(start, stop):
        asked.extend(submit(n) for n in islice(unasked, ahead - len(asked)))
        yield asked.popleft().result()


def prediction_slots(most: int, row: int) -> int:
    """How many slots of a row a masked model's head sees: room for one example's labels, and for as many as rows have.

    >>> prediction_slots(20, 128), prediction_slots(80, 512), prediction_slots(2, 8)
    (24, 80, 8)
    """
    return min(row, ROUND * math.ceil(max(most, SHARE * row) / ROUND))


_reader: Any = None  # of a reader process: what makes its steps


def become_reader(maker: Any) -> None:
    """In a fresh process: read the steps of a loader, or of anything that can ``read``, and end with the parent."""
    global _reader
    _reader = maker
    os.setsid()  # a Ctrl-C is for the process that trains: it still needs the step that is being made
    end_with_parent()


def end_with_parent() -> None:
    """Let this process end when its parent does: one that was killed could not stop it, and it would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def read_step(step: int) -> Any:
    """In a reader process: its step."""
    return _reader.read(step)


def step_examples(count: int, batch: int, step: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """Which of ``count`` examples step ``step`` takes.

    >>> step_examples(5, 2, step=2, seed=0, shuffle=False), step_examples(5, 2, step=3, seed=0, shuffle=False)
    (array([4]), array([0, 1]))
    """
    epoch, within = divmod(step, math.ceil(count / batch))
    start, stop = within * batch, min((within + 1) * batch, count)
    return order.window(start, stop, count, order.key(seed, epoch)) if shuffle else np.arange(start, stop)


def drawn(examples: Objective, batch: int, step: int, seed: int, shuffle: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Which examples step ``step`` takes, and for each how often all of its kind were taken before: epochs of its own.

    Where a task of a mixture comes more often than it has examples, one step may take an example of it twice.
    """
    epoch, places = step // math.ceil(len(examples) / batch), step_examples(len(examples), batch, step, seed, shuffle)
    if shuffle and isinstance(examples, Mixture):
        return examples.drawn(places, epoch, seed)
    return places, np.full_like(places, epoch)


def pick_shape(
    examples: Objective, data: Data, batch: int, cost: Cost, seed: int, static: bool = True, packed: bool = True
) -> RowShape:
    """Row lengths for a run: the given ones, or those that sampled steps cost least at.

    Where rows may have any length none is picked, nor where each holds one example: the longest example's stands.
    """
    longest = examples.longest
    for key, most in zip(("source_row", "target_row"), longest, strict=True):
        if 0 < getattr(data, key) < most:
            raise InputError(f"data.{key}: must hold the longest example, of {most} slots, or be 0")
    sampled = max(1, min(SAMPLED_EXAMPLES // batch, math.ceil(len(examples) / batch)))
    steps = [drawn(examples, batch, n, order.key(seed, "sample"))[0] for n in range(sampled)]
    source, target = examples.sizes(np.concatenate(steps))
    s, t = float(source.mean()), float(target.mean())
    if not static:
        rows = data.source_row or longest[0], data.target_row or longest[1]
        return RowShape(*rows, 1.0, 1.0, 1.0, min(batch, len(examples)) * (s + t) / sum(rows))
    if not packed:
        rows = data.source_row or (up(longest[0]) if longest[0] else 0), data.target_row or up(longest[1])
        fills = s / max(rows[0], 1), t / rows[1], (s + t) / sum(rows)
        return RowShape(*rows, *fills, float(min(batch, len(examples))))
    places = np.split(np.arange(len(source)), np.cumsum([len(step) for step in steps])[:-1])
    if data.source_row and data.target_row:
        return measure(source, target, places, data.source_row, data.target_row)
    return pick_rows(source, target, places, cost, data.source_row, data.target_row, longest)
