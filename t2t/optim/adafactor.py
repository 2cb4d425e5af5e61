"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) as T5 uses it: no momentum, a factored second moment.

A matrix of n x m weights keeps n + m numbers of state instead of Adam's 2nm.

>>> weight = torch.nn.Parameter(torch.ones(2, 3))
>>> weight.grad = torch.full((2, 3), 0.5)
>>> optimizer = Adafactor([weight], lr=0.1)
>>> optimizer.step()
>>> weight[0].tolist() == [0.8999999761581421] * 3  # a constant gradient moves each weight by lr
True
>>> {kind: tuple(tensor.shape) for kind, tensor in optimizer.state[weight].items()}
{'row': (2,), 'column': (3,)}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Adafactor(torch.optim.Optimizer):
    """Adafactor over fp32 parameters; updates made so far are counted in each group's ``step``.

    ``relative_step`` takes the rate from the step number, min(0.01, 1/sqrt(step)), and leaves the one used in the
    group's ``lr``; ``scale_parameter`` multiplies the rate by each tensor's root mean square, at least ``eps[1]``.
    ``decay_rate`` makes the second moment's decay 1 - step**decay_rate; ``clip_threshold`` bounds the root mean
    square of an update. Weight decay is decoupled and uses the scaled rate.

    >>> bias = torch.nn.Parameter(torch.zeros(4))
    >>> optimizer = Adafactor([bias], relative_step=True)
    >>> bias.grad = torch.ones(4)
    >>> optimizer.step()
    >>> optimizer.param_groups[0]["step"], optimizer.param_groups[0]["lr"], list(optimizer.state[bias])
    (1, 0.01, ['square'])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        weight_decay: float = 0.0,
        scale_parameter: bool = False,
        relative_step: bool = False,
    ) -> None:
        if (lr is None) != relative_step:
            raise ValueError("Adafactor takes either lr or relative_step")
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "step": 0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state exists from here on, so that memory does not grow at the first step.

        >>> optimizer = Adafactor([torch.zeros(2)], lr=0.1)
        >>> optimizer.add_param_group({"params": [torch.zeros(3, 4, 5)]})
        >>> [tuple(tensor.shape) for state in optimizer.state.values() for tensor in state.values()]
        [(2,), (3, 4), (3, 5)]
        """
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.ndim >= 2:
                column = p.shape[:-2] + p.shape[-1:]
                self.state[p] = {"row": p.new_zeros(p.shape[:-1]), "column": p.new_zeros(column)}
            else:
                self.state[p] = {"square": p.new_zeros(p.shape)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        >>> weight = torch.ones(2)
        >>> weight.grad = torch.tensor([1.0, -3.0])
        >>> Adafactor([weight], lr=0.5).step()
        >>> weight
        tensor([0.5000, 1.5000])
        """
        for group in self.param_groups:
            group["step"] += 1
            if group["relative_step"]:
                group["lr"] = min(1e-2, group["step"] ** -0.5)
            for p in group["params"]:
                if p.grad is not None:
                    _update(p, p.grad, self.state[p], group)


def _update(p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """One parameter's update: state is replaced, only ``p`` changes in place, nothing is read back from the device."""
    fresh = group["step"] ** group["decay_rate"]  # weight of this gradient in the second moment: 1 at the first step
    tiny, least_scale = group["eps"]
    square = grad.square()
    if "row" in state:
        row = state["row"] = torch.lerp(state["row"], square.mean(-1) + tiny, fresh)
        column = state["column"] = torch.lerp(state["column"], square.mean(-2) + tiny, fresh)
        row_factor = (row / row.mean(-1, keepdim=True)).rsqrt()
        update = grad * row_factor.unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
    else:
        state["square"] = torch.lerp(state["square"], square + tiny, fresh)
        update = grad * state["square"].rsqrt()
    rate = group["lr"] * (_rms(p).clamp(min=least_scale) if group["scale_parameter"] else 1.0)
    clipped = rate / (_rms(update) / group["clip_threshold"]).clamp(min=1.0)
    if group["weight_decay"]:
        p.mul_(1 - group["weight_decay"] * rate)
    p.addcmul_(update, clipped, value=-1)


def _rms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5
