"""Activation functions by the names of Hugging Face configs."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation.

    >>> import torch
    >>> gelu_tanh(torch.tensor([1.0]))
    tensor([0.8412])
    """
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": F.silu,
}
"""The functions of `t2t.models.architectures.ACTIVATIONS`."""
