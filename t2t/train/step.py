"""The one step: micro-batches in, one update out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from t2t import kernels
from t2t.data import order
from t2t.data.packing import Batch
from t2t.models.base import Model, Rows
from t2t.optim.build import Optimizer


@dataclass(frozen=True)
class StepResult:
    """What one step did: mean loss over target tokens, gradient norm before clipping, rate, tokens."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    target_tokens: int


class Diverged(ArithmeticError):
    """The loss or the gradient is no longer finite; nothing was updated. Names the examples it happened on."""

    def __init__(self, message: str, examples: list[int]) -> None:
        super().__init__(message)
        self.examples = examples


def batch_loss(model: Model, batch: Batch, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sums of losses, one for each of the batch's ``counts``, and each label's loss, [R, T]."""
    return model.loss(on_device(batch, model.head.device), smoothing)


def on_device(batch: Batch, device: torch.device) -> Rows:
    """The batch as a model takes it."""
    arrays = (getattr(batch, name) for name in Rows._fields)
    tensors = (None if x is None else torch.from_numpy(x).to(device, non_blocking=True) for x in arrays)
    return Rows(*tensors)  # type: ignore[arg-type]


Map = Callable[[Callable[..., Any], Iterable[Any], Iterable[Any]], Iterable[Any]]


def workers(count: int) -> Map:
    """A ``map`` that computes micro-batches at once on so many CPU threads, one core each, and gives them in order.

    Two small products on one core each are faster than one on both: nothing waits for the slower core, and what runs
    on one core anyway, random bits above all, runs twice.

    >>> list(workers(2)(lambda i, x: (i, x), range(2), "ab"))
    [(0, 'a'), (1, 'b')]
    """
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)).map


def train_step(
    model: Model,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    step: int,
    seed: int,
    clip: float,
    smoothing: float,
    over: Map = map,
) -> StepResult:
    """Forward and backward over the step's micro-batches, then one update.

    Each loss is a sum over the count of its labels in the whole step, so that any cut into micro-batches gives the
    same gradient; gradients are summed in order, so that ``over`` (`map` or `workers`) changes nothing either. Random
    numbers come from (seed, step, micro-batch) and leave no state behind.
    """
    counts = np.maximum(sum(batch.counts for batch in batches), 1)
    shares = (1.0 / counts).tolist()
    trained = [p for p in model.parameters() if p.requires_grad]

    def micro(i: int, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        with kernels.random_from(order.key(seed, step, i), model.head.device, alone=over is map):
            sums, each = batch_loss(model, batch, smoothing)
            total = (sums * sums.new_tensor(shares)).sum()
            return total.detach(), each, torch.autograd.grad(total, trained, allow_unused=True)

    totals, losses = [], []
    for total, each, gradients in over(micro, range(len(batches)), batches):
        totals.append(total)
        losses.append(each)
        for p, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                # Fused optimizers read memory in order: a transposed gradient would reach the wrong weights.
                p.grad = gradient.contiguous() if p.grad is None else p.grad.add_(gradient)
        optimizer.accumulate()
    loss = float(sum(totals))
    if not math.isfinite(loss):
        offenders = sorted(
            {i for batch, each in zip(batches, losses, strict=True) for i in _offenders(model, batch, each)}
        )
        raise Diverged(f"step {step + 1}: the loss is not finite", offenders)
    norm = float(optimizer.clip(clip))
    if not math.isfinite(norm):
        raise Diverged(f"step {step + 1}: the gradient is not finite", [i for b in batches for i in _examples(b)])
    lr = optimizer.step(step)
    return StepResult(loss, norm, lr, sum(b.tokens for b in batches), int(counts[0]))


def _examples(batch: Batch) -> list[int]:
    return [int(i) for i in batch.example_ids.flatten() if i >= 0]


def _offenders(model: Model, batch: Batch, losses: Tensor) -> list[int]:
    """The examples whose own loss is not finite. Their row-mates may be spoilt by them: each is tried alone."""
    bad = ~torch.isfinite(losses).cpu().numpy() & (batch.target_segments > 0)
    rows, slots = np.nonzero(bad)
    suspects = sorted({(int(r), int(batch.target_segments[r, t])) for r, t in zip(rows, slots, strict=True)})
    with torch.no_grad():
        guilty = [place for place in suspects if not batch_loss(model, batch.alone(*place))[0].isfinite().all()]
    return [int(batch.example_ids[r, segment - 1]) for r, segment in guilty or suspects]
