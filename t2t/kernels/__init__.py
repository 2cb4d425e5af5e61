"""One façade over the kernels: models call these names and never ask which implementation answers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from t2t.kernels import cpu, reference
from t2t.kernels.reference import IGNORE, additive, relative_bias, rms_norm, segment_mask

__all__ = [
    "IGNORE",
    "additive",
    "attention",
    "dropout",
    "dropout_add",
    "linear_cross_entropy",
    "random_from",
    "relative_bias",
    "relu_dropout",
    "rms_norm",
    "segment_mask",
]


def _on(x: Tensor) -> Any:
    return cpu if x.device.type == "cpu" else reference


def random_from(seed: int, device: torch.device, alone: bool) -> AbstractContextManager[None]:
    """Seed what dropout draws: torch's own generator, or where others run beside us, one of this thread's own."""
    if device.type == "cpu" and not alone:
        return cpu.random_from(seed)
    torch.manual_seed(seed)
    return nullcontext()


def dropout(x: Tensor, rate: float) -> Tensor:
    """See `reference.dropout`."""
    return _on(x).dropout(x, rate)


def dropout_add(x: Tensor, y: Tensor, rate: float) -> Tensor:
    """See `reference.dropout_add`."""
    return _on(x).dropout_add(x, y, rate)


def relu_dropout(x: Tensor, rate: float) -> Tensor:
    """See `reference.relu_dropout`."""
    return _on(x).relu_dropout(x, rate)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout_rate: float) -> Tensor:
    """See `reference.attention`."""
    return _on(q).attention(q, k, v, bias, dropout_rate)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.linear_cross_entropy`."""
    return _on(hidden).linear_cross_entropy(hidden, weight, labels, smoothing, chunk)
