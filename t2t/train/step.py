"""The one step: micro-batches in, one update out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from t2t import kernels
from t2t.data import order
from t2t.data.packing import Batch
from t2t.models.base import Model, Rows
from t2t.optim.build import Optimizer
from t2t.parallel import ALONE, Ranks


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
    ranks: Ranks = ALONE,
) -> StepResult:
    """Forward and backward over this rank's micro-batches of the step, then one update, the same on every rank.

    Each loss is a sum over the count of its labels in the whole step, so that any cut into ranks and micro-batches
    gives the same gradient; gradients are summed in order, so that ``over`` (`map` or `workers`) changes nothing
    either. Random numbers come from (seed, step, micro-batch of all ranks) and leave no state behind.
    """
    *counts, tokens = ranks.sum(count(batches)).tolist()
    shares = [1.0 / max(labels, 1) for labels in counts]
    trained = [p for p in model.parameters() if p.requires_grad]

    def micro(i: int, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        key = order.key(seed, step, i * ranks.size + ranks.rank)
        with kernels.random_from(key, model.head.device, alone=over is map):
            sums, each = batch_loss(model, batch, smoothing)
            total = (sums * sums.new_tensor(shares[: len(sums)])).sum()
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
    loss = float(ranks.sum(np.array([float(sum(totals))]))[0])
    if not math.isfinite(loss):
        offenders = sorted(
            {i for batch, each in zip(batches, losses, strict=True) for i in _offenders(model, batch, each)}
        )
        raise Diverged(f"step {step + 1}: the loss is not finite", sorted(chain(*ranks.gather(offenders))))
    optimizer.reduce(ranks)
    norm = float(optimizer.clip(clip))
    if not math.isfinite(norm):
        everyone = chain(*ranks.gather([i for batch in batches for i in _examples(batch)]))
        raise Diverged(f"step {step + 1}: the gradient is not finite", [*everyone])
    lr = optimizer.step(step)
    return StepResult(loss, norm, lr, tokens, max(counts[0], 1))


def count(batches: Sequence[Batch]) -> np.ndarray:
    """The labels of each of the at most two kinds, and the tokens, [3]: of a rank without examples, zeros."""
    found = np.zeros(3, dtype=np.int64)
    for batch in batches:
        labels = batch.counts
        found[: len(labels)] += labels
        found[2] += batch.tokens
    return found


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
