"""Dropout by drawing what is dropped."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_thread = threading.local()


@contextmanager
def random_from(seed: int) -> Iterator[None]:
    """In this thread, draw from a generator of its own: what torch's would give after ``torch.manual_seed(seed)``.

    >>> with random_from(1):
    ...     first = dropout(torch.ones(4), 0.5)
    >>> _ = torch.manual_seed(1)
    >>> torch.equal(first, dropout(torch.ones(4), 0.5))
    True
    """
    _thread.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        _thread.generator = None


def dropped(count: int, rate: float) -> Tensor:
    """Which of ``count`` entries dropout zeroes, in order.

    The gaps between them are geometric, so that one random number an entry dropped says it all: ten times fewer than
    one an entry, and zeroing so few of them is cheaper than multiplying all by a mask.

    >>> _ = torch.manual_seed(1)
    >>> len(dropped(1_000_000, 0.1))
    99900
    """
    seed = int(torch.randint(2**62, (), generator=getattr(_thread, "generator", None)))
    bits, expected = np.random.SFC64(seed), count * rate
    found, last = [], -1
    while last < count:
        raw = bits.random_raw(int(expected + 5 * math.sqrt(expected) + 9) // 4 + 1).view(np.uint16)
        places = torch.from_numpy(_gaps(rate).take(raw)).cumsum_(0).add_(last)
        found.append(places)
        last = int(places[-1])
    places = torch.cat(found) if len(found) > 1 else found[0]
    return places[: np.searchsorted(places.numpy(), count)]


@lru_cache(maxsize=16)
def _gaps(rate: float) -> np.ndarray:
    """The gap of each of 2^16 equally likely draws. Whole numbers from here on: the same places on every machine.

    >>> np.bincount(_gaps(0.5))[:5] / 2**16
    array([0.    , 0.5   , 0.25  , 0.125 , 0.0625])
    """
    assert 0 < rate < 1, f"dropout of {rate} leaves nothing"
    uniform = (np.arange(2**16) + 0.5) / 2**16
    return np.ceil(np.log(uniform) / np.log1p(-rate)).astype(np.int64)


def dropout(x: Tensor, rate: float) -> Tensor:
    """See `reference.dropout`.

    >>> dropout(torch.ones(3), 0.0)
    tensor([1., 1., 1.])
    """
    return _Dropout.apply(x, rate) if rate else x


class _Dropout(Function):
    @staticmethod
    def forward(ctx, x, rate):  # type: ignore[no-untyped-def]
        ctx.rate, index = rate, dropped(x.numel(), rate)
        ctx.save_for_backward(index)
        return _scaled_without(x, index, rate)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (index,) = ctx.saved_tensors
        return _scaled_without(grad, index, ctx.rate), None


def _scaled_without(x: Tensor, index: Tensor, rate: float) -> Tensor:
    y = torch.mul(x, 1.0 / (1.0 - rate)).contiguous()
    y.view(-1).index_fill_(0, index, 0.0)
    return y
