"""The kernels where a CPU gains by another way than the reference's: fewer passes over memory, cheaper random bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from t2t.kernels import reference
from t2t.kernels.reference import IGNORE

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


def dropout(x: Tensor, rate: float) -> Tensor:
    """See `reference.dropout`.

    >>> dropout(torch.ones(3), 0.0)
    tensor([1., 1., 1.])
    """
    return x * _mask(x, rate) if rate else x


def dropout_add(x: Tensor, y: Tensor, rate: float) -> Tensor:
    """See `reference.dropout_add`: one pass over both.

    >>> dropout_add(torch.ones(3), torch.ones(3), 0.0)
    tensor([2., 2., 2.])
    """
    return torch.addcmul(x, y, _mask(y, rate)) if rate else x + y


def relu_dropout(x: Tensor, rate: float) -> Tensor:
    """See `reference.relu_dropout`: only the result is kept for backward, which tells what was dropped.

    >>> relu_dropout(torch.tensor([-1.0, 2.0]), 0.0)
    tensor([0., 2.])
    """
    return _ReluDropout.apply(x, rate) if rate else F.relu(x)


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rate):  # type: ignore[no-untyped-def]
        ctx.rate = rate
        y = F.relu(x).mul_(_mask(x, rate))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, y, 0).mul_(1.0 / (1.0 - ctx.rate)), None


def _mask(x: Tensor, rate: float) -> Tensor:
    """What dropout multiplies by, 0 or 1 / (1 - rate).

    torch's own bernoulli costs more than the matmul beside it; four 16-bit draws out of one 64-bit number of a fast
    generator, seeded by one draw of torch's, do not.
    """
    n = x.numel()
    seed = int(torch.randint(2**62, (), generator=getattr(_thread, "generator", None)))
    bits = torch.from_numpy(np.random.SFC64(seed).random_raw((n + 3) // 4).view(np.int16)[:n]).view(x.shape)
    kept = torch.tensor(1.0 / (1.0 - rate), dtype=x.dtype)
    return torch.where(bits >= round(rate * 65536) - 32768, kept, torch.zeros((), dtype=x.dtype))


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout_rate: float) -> Tensor:
    """See `reference.attention`: the same, with this file's dropout.

    >>> one = torch.ones(1, 1, 1, 2)
    >>> attention(one, one, one * 3, torch.zeros(1, 1, 1, 1), 0.0)
    tensor([[[[3., 3.]]]])
    """
    weights = reference.attention_weights(q, k, bias)
    return dropout(weights, dropout_rate) @ v


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.linear_cross_entropy`: positions without a label are left out before the matrix product.

    >>> total, each = linear_cross_entropy(torch.zeros(2, 4), torch.ones(8, 4), torch.tensor([3, -100]))
    >>> round(total.item(), 4), [round(x, 4) for x in each.tolist()]
    (2.0794, [2.0794, 0.0])
    """
    index = (labels != IGNORE).nonzero()[:, 0]
    total, each = reference.linear_cross_entropy(hidden.index_select(0, index), weight, labels[index], smoothing, chunk)
    return total, each.new_zeros(labels.shape).index_copy_(0, index, each)
