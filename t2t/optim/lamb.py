"""LAMB (You et al. 2019, arXiv:1904.00962): Adam's step of each matrix, as long as the matrix itself times the rate.

>>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
>>> weight.grad = torch.tensor([[2.0, 2.0]])
>>> optimizer = Lamb([{"params": [weight], "adapt": True}], lr=0.1, weight_decay=0.0)
>>> optimizer.step()
>>> round((weight - torch.tensor([[3.0, 4.0]])).norm().item(), 4)  # a tenth of the norm, 5
0.5
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """LAMB over fp32 parameters; updates made so far are counted in each group's ``step``.

    Moments are corrected for their start at zero. Weight decay is part of the step that is measured. Groups whose
    ``adapt`` is false (norms, biases) take Adam's step as it is.

    >>> bias = torch.nn.Parameter(torch.zeros(4))
    >>> optimizer = Lamb([{"params": [bias], "adapt": False}], lr=0.1)
    >>> bias.grad = torch.ones(4)
    >>> optimizer.step()
    >>> optimizer.param_groups[0]["step"], [round(x, 4) for x in bias.tolist()]
    (1, [-0.1, -0.1, -0.1, -0.1])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True, "step": 0}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one update."""
        for group in self.param_groups:
            group["step"] += 1
            ps: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if not ps:
                continue
            grads = [p.grad for p in ps if p.grad is not None]
            firsts, seconds = ([self.state[p][kind] for p in ps] for kind in ("exp_avg", "exp_avg_sq"))
            beta1, beta2 = group["betas"]
            torch._foreach_lerp_(firsts, grads, 1 - beta1)
            torch._foreach_mul_(seconds, beta2)
            torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
            denominators = torch._foreach_sqrt(torch._foreach_div(seconds, 1 - beta2 ** group["step"]))
            torch._foreach_add_(denominators, group["eps"])
            updates = torch._foreach_div(torch._foreach_div(firsts, 1 - beta1 ** group["step"]), denominators)
            if group["weight_decay"]:
                torch._foreach_add_(updates, ps, alpha=group["weight_decay"])
            if group["adapt"]:
                torch._foreach_mul_(updates, [_trust(p, update) for p, update in zip(ps, updates, strict=True)])
            torch._foreach_add_(ps, updates, alpha=-group["lr"])


def _trust(p: Tensor, update: Tensor) -> Tensor:
    """How many times longer the tensor is than its update; 1 where either is zero."""
    own, step = torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
    return torch.where((own > 0) & (step > 0), own / step, torch.ones_like(own))
