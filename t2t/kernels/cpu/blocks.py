"""Attention of segments in blocks: only the scores of a segment with itself are made, and they stay in a core's cache.

Segments of about one length lie side by side in a block, each padded to the longest: G segments of Q query and K key
slots. One gather reads a tensor's heads into the blocks, [G, H, slots, C] of each in turn, another writes them back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from t2t.kernels import reference
from t2t.kernels.cpu.dropout import dropped

SCORES = 2**17  # a block has at most so many, which a core's cache holds a few times
WASTE = 0.25  # of a block's scores, the share that may be padding
CALLS = 2**13  # the scores that take as long as the calls for one more block: so many may be padding in any case
STEP = 64  # relative biases are made for lengths in such steps, so that few different ones are


class Side:
    """Where the queries, or the keys, of all blocks lie in the flattened rows."""

    def __init__(self, blocks: list[np.ndarray], slots: int) -> None:
        """A block is [G, 2]: where each segment starts, and its length; ``slots`` are those of all rows."""
        self.slots = slots
        self.longest = [int(block[:, 1].max()) for block in blocks]
        places = [np.minimum(np.arange(n), block[:, 1:] - 1) for n, block in zip(self.longest, blocks, strict=True)]
        self.pads = [np.arange(n) >= block[:, 1:] for n, block in zip(self.longest, blocks, strict=True)]
        self._places = [block[:, :1] + place for block, place in zip(blocks, places, strict=True)]  # [G, slots]
        self._gathers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def gathers(self, parts: int, heads: int) -> tuple[Tensor, Tensor]:
        """Of a tensor's rows of C, [slots, parts, H] of them: which make the blocks, part by part, and the way back.

        A slot that is in no block gets the row after the last one.
        """
        if (parts, heads) not in self._gathers:
            head = np.arange(heads)[:, None]
            rows = [(place[:, None] * (parts * heads) + head).reshape(-1) for place in self._places]
            real = [np.repeat(~pads[:, None], heads, 1).reshape(-1) for pads in self.pads]
            there = (np.arange(parts)[:, None] * heads + np.concatenate([np.empty(0, np.int64), *rows])).reshape(-1)
            kept = np.flatnonzero(np.tile(np.concatenate([np.empty(0, bool), *real]), parts))
            back = np.full(self.slots * parts * heads, len(there))
            back[there[kept]] = kept
            self._gathers[parts, heads] = torch.from_numpy(there), torch.from_numpy(back)
        return self._gathers[parts, heads]

    def blocks(self, x: Tensor, heads: int) -> list[Tensor]:
        """Each block [G * H, slots, C] of what was gathered."""
        counts = [len(place) * heads for place in self._places]
        sizes = [count * n for count, n in zip(counts, self.longest, strict=True)]
        parts = x[: sum(sizes)].split(sizes) if sizes else ()
        return [part.view(count, n, -1) for part, count, n in zip(parts, counts, self.longest, strict=True)]


@dataclass(frozen=True)
class Blocks:
    """Which scores attention makes, and what it adds to them."""

    queries: Side
    keys: Side
    biases: list[Tensor | None]  # [G, H or 1, Q or 1, K] of each block
    relative: Tensor | None  # [H, Q, K], differentiable, of which they were made

    def side(self, packed: Tensor) -> Side:
        """Of keys and values alone, or of what has queries in it."""
        return self.keys if packed.shape[2] == 2 else self.queries


def attention_bias(
    query_segments: Tensor,
    key_segments: Tensor,
    causal: bool,
    heads: int,
    table: Tensor | None,
    max_distance: int,
    dtype: torch.dtype,
    window: int = 0,
) -> Blocks:
    """See `reference.attention_bias`: segments side by side in blocks instead of a mask over whole rows.

    >>> segments = torch.tensor([[1, 1, 2, 2, 0]])
    >>> blocks = attention_bias(segments, segments, False, 1, torch.arange(32.0)[:, None], 128, torch.float32)
    >>> blocks.queries.longest, blocks.biases[0][0]
    ([2], tensor([[[ 0., 17.],
             [ 1.,  0.]]]))
    """
    queries, keys = _segments(query_segments.numpy()), _segments(key_segments.numpy())
    common = sorted(queries.keys() & keys.keys(), key=lambda c: (-queries[c][1] * keys[c][1], c))
    ends = _cut([(queries[c][1], keys[c][1]) for c in common], SCORES // heads, CALLS // heads)
    cut = [common[i:j] for i, j in zip([0, *ends], ends, strict=False)]
    sides = [
        Side([np.array([found[c] for c in block]) for block in cut], segments.numel())
        for found, segments in ((queries, query_segments), (keys, key_segments))
    ]
    relative = None
    if table is not None and cut:
        q, k = (STEP * math.ceil(max(side.longest) / STEP) for side in sides)
        relative = reference.relative_bias(table, q, k, max_distance, not causal)[0].to(dtype).contiguous()
    fixed = None if relative is None else relative.detach()
    biases = [
        _bias(fixed, pads, q, causal, window, dtype) for q, pads in zip(sides[0].longest, sides[1].pads, strict=True)
    ]
    return Blocks(sides[0], sides[1], biases, relative)


def _segments(segments: np.ndarray) -> dict[tuple[int, int], tuple[int, int]]:
    """Start in the flattened rows and length of every segment, by row and number. Each lies in one piece."""
    flat, width = segments.reshape(-1), segments.shape[1]
    if not len(flat):
        return {}
    first = np.append(True, flat[1:] != flat[:-1])
    first[::width] = True
    starts = np.flatnonzero(first)
    lengths = np.diff(starts, append=len(flat))
    found = zip((starts // width).tolist(), flat[starts].tolist(), starts.tolist(), lengths.tolist(), strict=True)
    return {(row, number): (start, length) for row, number, start, length in found if number}


def _cut(sizes: list[tuple[int, int]], most: int, calls: int) -> list[int]:
    """Where blocks end: each holds segments that follow one another, at most so many scores, and little padding.

    >>> _cut([(4, 4), (4, 4), (4, 4), (2, 2)], most=32, calls=0), _cut([(4, 4), (2, 2)], most=32, calls=12)
    ([2, 3, 4], [2])
    """
    ends, start, real, longest = [], 0, 0, (0, 0)
    for i, (q, k) in enumerate(sizes):
        wider = max(longest[0], q), max(longest[1], k)
        padded, wanted = (i - start + 1) * wider[0] * wider[1], real + q * k
        if i > start and (padded > most or padded - wanted > max(WASTE * padded, calls)):
            ends.append(i)
            start, real, wider = i, 0, (q, k)
        longest, real = wider, real + q * k
    return [*ends, len(sizes)] if sizes else []


def _bias(
    relative: Tensor | None, pads: np.ndarray, queries: int, causal: bool, window: int, dtype: torch.dtype
) -> Tensor | None:
    """Relative bias and mask of a block as one tensor; None where there is neither."""
    hidden = torch.from_numpy(pads)[:, None, None]
    if causal:
        everywhere = torch.ones(queries, pads.shape[1], dtype=torch.bool)
        hidden = hidden | everywhere.triu(1)
        if window:
            hidden = hidden | everywhere.tril(-window)
    if relative is None:
        return reference.additive(~hidden, None, dtype) if hidden.any() else None
    return relative[:, :queries, : pads.shape[1]].masked_fill(hidden, torch.finfo(dtype).min)


def attention(packed: Sequence[Tensor], bias: Blocks, rate: float, scale: float = 1.0) -> Tensor:
    """See `reference.attention`.

    >>> one = torch.ones(1, 1, dtype=torch.long)
    >>> blocks = attention_bias(one, one, False, 1, None, 0, torch.float32)
    >>> attention([torch.tensor([1.0, 1.0, 3.0]).view(1, 1, 3, 1, 1)], blocks, 0.0)
    tensor([[[[3.]]]])
    """
    return _Attention.apply(bias.relative, bias, rate, scale, *packed)


class _Attention(Function):
    @staticmethod
    def forward(ctx, relative, bias, rate, scale, *packed):  # type: ignore[no-untyped-def]
        shape, (heads, channels) = packed[0].shape, packed[0].shape[3:]
        parts = []
        for x in packed:
            there, _ = bias.side(x).gathers(x.shape[2], heads)
            parts += x.reshape(-1, channels).index_select(0, there).view(x.shape[2], -1, channels).unbind()
        mixed = _empty(parts[0], len(parts[0]))
        sides = bias.queries, bias.keys, bias.keys, bias.queries
        blocks = [side.blocks(x, heads) for side, x in zip(sides, (*parts, mixed), strict=True)]
        drops = _drops([len(q) * q.shape[1] * k.shape[1] for q, k in zip(*blocks[:2], strict=True)], rate)
        weights = []
        for q, k, v, out, added, pads, drop in zip(*blocks, bias.biases, bias.queries.pads, drops, strict=True):
            weights.append(_weights(q, k, added, heads, pads, scale))
            _product(_without(weights[-1], drop), v, 1.0 / (1.0 - rate), out)
        ctx.bias, ctx.rate, ctx.scale, ctx.packed = bias, rate, scale, [x.shape for x in packed]
        ctx.save_for_backward(*parts, *weights, *drops)
        return mixed.index_select(0, bias.queries.gathers(1, heads)[1]).view(*shape[:2], heads, channels)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        bias, kept, (heads, channels) = ctx.bias, 1.0 / (1.0 - ctx.rate), grad.shape[2:]
        q, k, v, *rest = ctx.saved_tensors
        weights, drops = rest[: len(bias.biases)], rest[len(bias.biases) :]
        own = grad.reshape(-1, channels).index_select(0, bias.queries.gathers(1, heads)[0])
        # The gradients of queries, keys and values are parts of one tensor, or of two, as they were in forward.
        tensors = [_empty(q, shape[2] * len(q if shape[2] != 2 else k)) for shape in ctx.packed]
        parts = [
            part
            for x, shape in zip(tensors, ctx.packed, strict=True)
            for part in x[:-1].view(shape[2], -1, channels).unbind()
        ]
        queries, keys = bias.queries, bias.keys
        sides = queries, keys, keys, queries, queries, keys, keys
        blocks = [side.blocks(x, heads) for side, x in zip(sides, (q, k, v, own, *parts), strict=True)]
        grad_relative = None if bias.relative is None else torch.zeros_like(bias.relative)
        for q, k, v, own, grad_q, grad_k, grad_v, weight, drop in zip(*blocks, weights, drops, strict=True):
            _product(_without(weight, drop).mT, own, kept, grad_v)
            slope = _product(own, v.mT, kept, own.new_empty(weight.shape))
            if drop is not None:
                slope.view(-1).index_fill_(0, drop, 0.0)
            slope = torch._softmax_backward_data(slope, weight, -1, weight.dtype)
            _product(slope, k, ctx.scale, grad_q)
            _product(slope.mT, q, ctx.scale, grad_k)
            if grad_relative is not None:
                grad_relative[:, : slope.shape[1], : slope.shape[2]] += slope.unflatten(0, (-1, heads)).sum(0)
        grads = []
        for x, shape in zip(tensors, ctx.packed, strict=True):
            _, back = (keys if shape[2] == 2 else queries).gathers(shape[2], heads)
            grads.append(x.index_select(0, back).view(shape))
        return grad_relative, None, None, None, *grads


def _empty(like: Tensor, rows: int) -> Tensor:
    """So many rows to fill, and one of zeros after them for the slots that are in no block."""
    x = like.new_empty(rows + 1, like.shape[1])
    x[-1] = 0.0
    return x


def _weights(q: Tensor, k: Tensor, added: Tensor | None, heads: int, pads: np.ndarray, scale: float) -> Tensor:
    """Softmax of the scores of a block; 0 where the query is padding, so that it has no part in any gradient."""
    if added is not None and added.shape[1:3] == (heads, q.shape[1]):
        scores = torch.baddbmm(added.flatten(0, 1), q, k.mT, alpha=scale)
    else:
        scores = _product(q, k.mT, scale, q.new_empty(*q.shape[:2], k.shape[1]))
        if added is not None:
            scores.unflatten(0, (-1, heads)).add_(added)
    weights = scores.softmax(-1, dtype=reference.wide(q.dtype)).to(q.dtype)
    if pads.any():
        padded = np.flatnonzero(np.repeat(pads[:, None], heads, 1))
        weights.view(-1, k.shape[1]).index_fill_(0, torch.from_numpy(padded), 0.0)
    return weights


def _drops(sizes: list[int], rate: float) -> list[Tensor | None]:
    """What is dropped of several tensors of these sizes, drawn at once."""
    if not rate or not sizes:
        return [None] * len(sizes)
    ends = np.cumsum(sizes)
    places = dropped(int(ends[-1]), rate)
    parts = places.tensor_split(torch.from_numpy(np.searchsorted(places.numpy(), ends[:-1])))
    return [part - start for part, start in zip(parts, [0, *ends[:-1].tolist()], strict=True)]


def _without(weights: Tensor, drop: Tensor | None) -> Tensor:
    if drop is None:
        return weights
    left = weights.clone()
    left.view(-1).index_fill_(0, drop, 0.0)
    return left


def _product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    return torch.baddbmm(out, a, b, beta=0.0, alpha=scale, out=out)
