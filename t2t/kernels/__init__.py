"""One façade over the kernels: models call these names and never ask which implementation answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from t2t.kernels import cpu, reference
from t2t.kernels.reference import IGNORE, Sight, additive, attention_weights, relative_bias

__all__ = [
    "IGNORE",
    "Sight",
    "additive",
    "attention",
    "attention_bias",
    "attention_weights",
    "dropout",
    "linear_cross_entropy",
    "linear_dropout_add",
    "random_from",
    "relative_bias",
    "relu_feed_forward",
    "rms_norm",
    "ways",
]


TRITON = find_spec("triton") is not None  # it comes with torch where torch comes with CUDA


def _on(x: Tensor) -> Any:
    if x.device.type == "cpu":
        return cpu
    if x.device.type == "cuda" and TRITON:
        from t2t.kernels import gpu

        return gpu
    return reference


def ways(device: torch.device) -> str:
    """Which kernels compute on a device; others give the same but for rounding.

    >>> ways(torch.device("cpu")) in ("compiled", "torch")
    True
    """
    if device.type == "cpu":
        return "compiled" if cpu.native.library() is not None else "torch"
    return "triton" if device.type == "cuda" and TRITON else "torch"


def random_from(seed: int, device: torch.device, alone: bool) -> AbstractContextManager[None]:
    """Seed what dropout draws: torch's own generator, or where others run beside us, one of this thread's own."""
    if device.type == "cpu" and not alone:
        return cpu.random_from(seed)
    torch.manual_seed(seed)
    return nullcontext()


def embedding(ids: Tensor, weight: Tensor, tied: bool) -> Tensor:
    """See `reference.embedding`."""
    return _on(weight).embedding(ids, weight, tied)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    return _on(x).rms_norm(x, weight, eps)


def dropout(x: Tensor, rate: float) -> Tensor:
    """See `reference.dropout`."""
    return _on(x).dropout(x, rate)


def linear_dropout_add(residual: Tensor, x: Tensor, weight: Tensor, rate: float, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear_dropout_add`."""
    return _on(x).linear_dropout_add(residual, x, weight, rate, bias)


def relu_feed_forward(residual: Tensor, x: Tensor, wide: Tensor, narrow: Tensor, rate: float) -> Tensor:
    """See `reference.relu_feed_forward`."""
    return _on(x).relu_feed_forward(residual, x, wide, narrow, rate)


def attention_bias(sight: Sight) -> Any:
    """See `reference.attention_bias`; what it gives is for `attention` on the same device."""
    return _on(sight.queries).attention_bias(sight)


def attention(packed: Sequence[Tensor], bias: Any, rate: float, scale: float = 1.0) -> Tensor:
    """See `reference.attention`."""
    return _on(packed[0]).attention(packed, bias, rate, scale)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.linear_cross_entropy`."""
    return _on(hidden).linear_cross_entropy(hidden, weight, labels, smoothing, chunk, bias)
