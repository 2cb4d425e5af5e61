"""What the parity tests of all families share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of a loss for every parameter that has a part in it, by name."""
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True)
    found = zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True)
    return {name: gradient for name, gradient in found if gradient is not None}
