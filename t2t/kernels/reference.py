"""The kernels in plain torch: the oracle that faster ones are tested against, and the fallback everywhere.

Shapes: R rows, Q query slots, K key slots, H heads, C channels of a head, N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
LOGITS = {"cpu": 2**25, "gpu": 2**28}  # most logits held at once


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (T5's layer norm: no mean, no bias), statistics in fp32 at least.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
    tensor([[0.8485, 1.1314]])
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(weight.dtype)


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zero a share ``rate`` of the entries and scale up the others.

    >>> dropout(torch.ones(3), 0.0)
    tensor([1., 1., 1.])
    """
    return F.dropout(x, rate) if rate else x


def linear_dropout_add(residual: Tensor, x: Tensor, weight: Tensor, rate: float, bias: Tensor | None = None) -> Tensor:
    """The residual connection: ``residual`` plus what dropout leaves of ``x @ weight.T + bias``.

    >>> linear_dropout_add(torch.ones(2), torch.ones(1), torch.tensor([[-1.0], [2.0]]), 0.0)
    tensor([0., 3.])
    """
    return residual + dropout(F.linear(x, weight, bias), rate)


def relu_feed_forward(residual: Tensor, x: Tensor, wide: Tensor, narrow: Tensor, rate: float) -> Tensor:
    """The MLP with ReLU and its residual connection: ``x @ wide.T``, ReLU, dropout, ``@ narrow.T``, dropout, sum.

    >>> wide, narrow = torch.tensor([[-1.0], [2.0]]), torch.tensor([[1.0, 1.5]])
    >>> relu_feed_forward(torch.ones(1), torch.ones(1), wide, narrow, 0.0)
    tensor([4.])
    """
    return linear_dropout_add(residual, dropout(F.relu(F.linear(x, wide)), rate), narrow, rate)


class Sight(NamedTuple):
    """Who sees whom in attention: the segments of queries [R, Q] and of keys [R, K], and what limits them further.

    With a ``window``, causal attention sees only the last so many keys. A ``table`` [buckets, H] gives T5's relative
    biases; scores are made in ``dtype``.
    """

    queries: Tensor
    keys: Tensor
    causal: bool = False
    table: Tensor | None = None
    max_distance: int = 0
    dtype: torch.dtype = torch.float32
    window: int = 0


def segment_mask(query_segments: Tensor, key_segments: Tensor, causal: bool, window: int = 0) -> Tensor:
    """Where a query may look, [R, 1, Q, K]: keys of its own segment, not later ones if causal, and with a window only
    the last so many of those. Segment 0 is padding.

    >>> segment_mask(torch.tensor([[1, 1, 2, 0]]), torch.tensor([[1, 1, 2, 0]]), causal=True)[0, 0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 0, 0]], dtype=torch.int32)
    """
    same = (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments != 0)[:, None, :]
    if causal:
        before = torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()
        same = same & (before.triu(1 - window) if window else before)
    return same[:, None]


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # what generation caches must serve training too
def relative_buckets(
    queries: int, keys: int, buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    """T5's bucket of the distance key - query for every pair, [Q, K]: exact when near, logarithmic beyond.

    >>> relative_buckets(3, 3, 32, 128, True, torch.device("cpu"))
    tensor([[ 0, 17, 18],
            [ 1,  0, 17],
            [ 2,  1,  0]])
    """
    distance = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = buckets // 2
    log = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (log * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


def relative_bias(table: Tensor, queries: int, keys: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bias [1, H, Q, K] that a table [buckets, H] gives. Segments lie contiguously in a row, so that one matrix
    of index differences serves every segment of every row.

    >>> relative_bias(torch.arange(32.0)[:, None], 2, 2, 128, True)
    tensor([[[[ 0., 17.],
              [ 1.,  0.]]]])
    """
    index = relative_buckets(queries, keys, table.shape[0], max_distance, bidirectional, table.device)
    return F.embedding(index, table).permute(2, 0, 1)[None]


def embedding(ids: Tensor, weight: Tensor, tied: bool) -> Tensor:
    """Rows of ``weight``; ``tied``: it is the head's matrix too, so that its gradient has every row anyway.

    >>> embedding(torch.tensor([1]), torch.tensor([[1.0], [2.0]]), tied=False)
    tensor([[2.]])
    """
    return F.embedding(ids, weight)


def additive(mask: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Mask and bias as one tensor to add to the scores. The lowest finite number, not -inf, hides a slot, so that a
    row with nothing to look at stays finite.

    >>> additive(torch.tensor([True, False]), torch.tensor([0.5, 0.5]), torch.float32)[0]
    tensor(0.5000)
    """
    hidden = torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    return hidden if bias is None else torch.where(mask, bias.to(dtype), hidden)


def attention_bias(sight: Sight) -> Tensor:
    """What `attention` adds to its scores: nothing but the mask, or a table's `relative_bias` where the mask lets see.

    >>> segments = torch.tensor([[1, 1, 2]])
    >>> bias = attention_bias(Sight(segments, segments, table=torch.arange(32.0)[:, None], max_distance=128))
    >>> bias[0, 0, 0, :2], bias[0, 0, 2, 2]
    (tensor([ 0., 17.]), tensor(0.))
    """
    mask = segment_mask(sight.queries, sight.keys, sight.causal, sight.window)
    if sight.table is None:
        return additive(mask, None, sight.dtype)
    relative = relative_bias(sight.table, mask.shape[2], mask.shape[3], sight.max_distance, not sight.causal)
    return additive(mask, relative, sight.dtype)


def attention_weights(q: Tensor, k: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of the scores of q [R, H, Q, C] against k [R, H, K, C], scaled, and ``bias`` (see `additive`) added.

    >>> attention_weights(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 1, 2))
    tensor([[[[0.5000, 0.5000]]]])
    """
    return (q * scale @ k.mT if scale != 1.0 else q @ k.mT).add_(bias).softmax(-1, dtype=wide(q.dtype)).to(q.dtype)


def attention(packed: Sequence[Tensor], bias: Tensor, rate: float, scale: float = 1.0) -> Tensor:
    """Attention [R, Q, H, C] with `attention_weights`, a share ``rate`` of the weights dropped.

    ``packed`` are queries, keys and values [R, S, 3, H, C] as one product gives them, or queries [R, Q, 1, H, C] and
    keys with values [R, K, 2, H, C]; ``bias`` comes from `attention_bias`.

    >>> attention([torch.tensor([1.0, 1.0, 3.0]).view(1, 1, 3, 1, 1)], torch.zeros(1, 1, 1, 1), 0.0)
    tensor([[[[3.]]]])
    """
    q, k, v = (x.transpose(1, 2) for several in packed for x in several.unbind(2))
    return (dropout(attention_weights(q, k, bias, scale), rate) @ v).transpose(1, 2)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: fp32, or fp64 where the tensors are."""
    return torch.promote_types(dtype, torch.float32)


def turn_into_gradient(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Each row's cross-entropy against its target; the logits become its gradient in place."""
    likelihood = torch.log_softmax(logits, -1, out=logits)
    loss = likelihood.gather(1, target[:, None])[:, 0] * (smoothing - 1)
    if smoothing:
        loss -= likelihood.mean(-1) * smoothing
    gradient = likelihood.exp_()
    if smoothing:
        gradient.sub_(smoothing / logits.shape[1])
    gradient.scatter_add_(1, target[:, None], gradient.new_full((len(target), 1), smoothing - 1))
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in forward, chunk by chunk, from logits that are then dropped."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, smoothing, chunk, turn, need_hidden, need_weight):  # type: ignore[no-untyped-def]
        precise = wide(hidden.dtype)
        valid = labels != IGNORE
        # Rows without a label are left out of everything but their own row of logits.
        target, count, live = labels.masked_fill(~valid, 0), valid.to(precise), hidden * valid[:, None]
        losses = hidden.new_zeros(labels.shape[0], dtype=precise)
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight: Any = None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=precise)
        for start in range(0, labels.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows] @ weight.T if bias is None else torch.addmm(bias, hidden[rows], weight.T)
            grad = logits.to(precise)
            losses[rows] = turn(grad, target[rows], smoothing) * count[rows]
            if not (need_hidden or need_weight):
                continue
            if grad_bias is not None:
                grad_bias += count[rows] @ grad
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight).mul_(valid[rows, None])
            if need_weight and grad_weight is None:
                grad_weight = (grad.T @ live[rows]).to(precise)
            elif need_weight and grad.dtype == precise:
                grad_weight.addmm_(grad.T, live[rows])
            elif need_weight:
                grad_weight.add_(grad.T @ live[rows])
        if need_weight and grad_weight is None:  # not a single position
            grad_weight = torch.zeros_like(weight, dtype=precise)
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        grads = ctx.grads
        ctx.grads = None
        for own in grads:
            if own is not None:
                own.mul_(grad)  # autograd casts it to the dtype of what it belongs to
        return *grads, None, None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
    turn: Callable[[Tensor, Tensor, float], Tensor] = turn_into_gradient,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T + bias`` (hidden [N, D], weight [V, D]) against labels [N], -100 ignored.

    Gives the differentiable sum, and each token's loss (detached, 0 where ignored). Never holds more than a chunk of
    logits.

    >>> total, each = linear_cross_entropy(torch.zeros(2, 4), torch.ones(8, 4), torch.tensor([3, -100]))
    >>> round(total.item(), 4), [round(x, 4) for x in each.tolist()]
    (2.0794, [2.0794, 0.0])
    """
    if chunk is None:
        chunk = max(128, LOGITS["cpu" if hidden.device.type == "cpu" else "gpu"] // weight.shape[0])
    needs = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, smoothing, chunk, turn, *needs)
