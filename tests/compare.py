"""What the parity tests of all families share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of a loss for every parameter, by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
