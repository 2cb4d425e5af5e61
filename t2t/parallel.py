"""The processes that train together. One process is the case where their number is one, and nothing is sent.

Every rank has the whole model, takes its share of a step's examples, and sums its gradients with the others', so that
all make the same update. Small things (counts, figures, wishes) travel as CPU tensors, gradients from where they lie.

>>> with joined() as ranks:
...     ranks.sum(np.array([3, 4])), ranks.gather("mine"), ranks.any(False)
(array([3, 4]), ['mine'], False)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from t2t import device as devices
from t2t.errors import InputError

BUCKET = 1 << 24  # gradients sent at once: 64 MiB of fp32
# A rank that ends is noticed at once, by its closed connections. This is for one that hangs: the others may well have
# to wait while rank 0 writes a large checkpoint.
TIMEOUT = timedelta(minutes=30)


class Elsewhere(Exception):
    """Another rank failed, and tells why."""

    def __init__(self, rank: int, bad_input: bool) -> None:
        super().__init__(f"rank {rank} failed")
        self.bad_input = bad_input


class Lost(Exception):
    """Another rank ended or cannot be reached."""


@dataclass(frozen=True)
class Ranks:
    """All ranks, seen from one of them. Every rank must call the same methods in the same order.

    >>> Ranks().first, Ranks(rank=1, size=2).first
    (True, False)
    """

    rank: int = 0
    size: int = 1
    local: int = 0  # the rank among those on this machine
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and tells."""
        return self.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum over ranks of a few numbers, the same on each to the last bit."""
        if self.size == 1:
            return values
        total = torch.from_numpy(values.copy())
        with _reaching():
            dist.all_reduce(total)
        return total.numpy()

    def any(self, wish: object) -> bool:
        """Whether it is true on some rank."""
        return bool(self.sum(np.array([bool(wish)], dtype=np.int64))[0])

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, in their order; anything that JSON holds, and small."""
        if self.size == 1:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(text)
        ends = np.cumsum(self.sum(lengths))
        texts = np.zeros(ends[-1], np.uint8)
        texts[ends[self.rank] - len(text) : ends[self.rank]] = text
        return [json.loads(part.tobytes()) for part in np.split(self.sum(texts), ends[:-1])]

    def share(self, value: Any) -> Any:
        """What rank 0 gives, which others may leave None; anything that JSON holds."""
        return self.gather(value if self.first else None)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails on one rank fails on all, and no rank goes on before all are through.

        The first rank that failed raises its own error, the others `Elsewhere`. Nothing within may talk to others.

        >>> with Ranks().together():
        ...     raise InputError("data.train: no such file: x")
        Traceback (most recent call last):
        t2t.errors.InputError: data.train: no such file: x
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = self.gather(None if failure is None else isinstance(failure, InputError))
        failed = [rank for rank, bad_input in enumerate(told) if bad_input is not None]
        if failed and failed[0] != self.rank:
            raise Elsewhere(failed[0], told[failed[0]])
        if failure is not None:
            raise failure

    def sum_gradients(self, weights: Iterable[Tensor]) -> None:
        """Sum gradients over ranks, in flat buckets whose parts then are the gradients.

        A rank that has none of a weight counts as zero; where no rank has one there is none.
        """
        if self.size == 1:
            return
        weights = list(weights)
        held = self.sum(np.array([w.grad is not None for w in weights], dtype=np.int64))
        for bucket in _buckets([w for w, count in zip(weights, held.tolist(), strict=True) if count]):
            flat = torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in bucket])
            with _reaching():
                dist.all_reduce(flat)
            for w, part in zip(bucket, flat.split([w.numel() for w in bucket]), strict=True):
                w.grad = part.view_as(w)


ALONE = Ranks()


@contextmanager
def joined(dp: int = 0) -> Iterator[Ranks]:
    """The ranks that torchrun's environment tells of, connected; ``dp`` is how many there should be, 0: any number.

    A process group that is there already is used and stays.

    >>> with joined(dp=4):
    ...     pass
    Traceback (most recent call last):
    t2t.errors.InputError: parallel.dp: 4 ranks are asked for, and the processes are 1: start 4 by --launch or torchrun
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, local_size = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    ranks = Ranks(rank, size, local, local_size)
    connects = size > 1 and not dist.is_initialized()
    if connects:
        with _reaching():
            dist.init_process_group(devices.backend(), timeout=TIMEOUT)
    try:
        with ranks.together():
            if dp not in (0, size):
                advice = f"start {dp} by --launch or torchrun"
                raise InputError(f"parallel.dp: {dp} ranks are asked for, and the processes are {size}: {advice}")
        yield ranks
        ranks.any(False)  # nobody leaves while another still needs it
    except BaseException:
        if connects:
            # A sum that others take no part in any more would never end.
            dist.distributed_c10d._get_default_group().abort()
        raise
    finally:
        if connects:
            dist.destroy_process_group()


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Lost(f"another rank is gone: {str(error).partition('. ')[0]}") from error


def _buckets(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Weights in their order, together at most `BUCKET` numbers, or one that is larger.

    >>> [len(bucket) for bucket in _buckets([torch.zeros(BUCKET - 1), torch.zeros(1), torch.zeros(1)])]
    [2, 1]
    """
    bucket: list[Tensor] = []
    size = 0
    for weight in weights:
        if bucket and size + weight.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight.numel()
    if bucket:
        yield bucket
