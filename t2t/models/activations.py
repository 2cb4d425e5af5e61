"""Activation functions by the names of Hugging Face configs."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from t2t.models import architectures


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation.

    >>> import torch
    >>> gelu_tanh(torch.tensor([1.0]))
    tensor([0.8412])
    """
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = dict(
    zip(architectures.ACTIVATIONS, (F.relu, F.gelu, gelu_tanh, gelu_tanh, F.silu), strict=True)
)
