"""Attention in blocks of a few segments: no scores of whole rows are made, and those of a block stay in a core's cache.

A block is a stretch of slots that holds whole segments, of queries and of keys. Those that are short share one, behind
a mask: a product of a few dozen slots is as fast as one of half as many, and nothing is copied to bring them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from t2t.kernels import reference
from t2t.kernels.cpu.segments import Segments
from t2t.kernels.reference import Sight

SCORES = 64 * 64  # of a head: segments that make no more of them together share a block
STEP = 64  # relative biases are made for lengths in such steps, so that few different ones are


class Block(NamedTuple):
    """Where queries and keys of a block begin and end in the flattened rows, and which segments these are."""

    queries: slice
    keys: slice
    first: int  # of its segments
    end: int


class Side:
    """The queries, or the keys, of all blocks."""

    def __init__(self, stretches: list[slice], slots: int) -> None:
        """Stretches in order; the rest of ``slots`` is in no block."""
        edges = [0, *(edge for stretch in stretches for edge in (stretch.start, stretch.stop)), slots]
        self._sizes = [b - a for a, b in pairwise(edges)]  # between blocks and in them, in turn
        self._full = not any(self._sizes[::2])

    def cut(self, x: Tensor) -> Sequence[Tensor]:
        """What [H, slots, C] has in each block."""
        return x.split(self._sizes, 1)[1::2]

    def room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """For what is computed block by block; 0 in slots that are in none."""
        return torch.empty(shape, dtype=dtype) if self._full else torch.zeros(shape, dtype=dtype)


@dataclass(frozen=True)
class Blocks:
    """Which scores attention makes, and what it adds to them."""

    segments: Segments
    blocks: list[Block]
    queries: Side
    keys: Side
    biases: list[Tensor | None]  # [H or 1, Q, K] of each block
    relative: Tensor | None  # [H, Q, K], differentiable, of which they were made

    def cut(self, packed: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Blocks [H, slots, C] of what is in ``packed``: of queries alone, or of queries, keys and values."""
        parts = (part.transpose(0, 1) for x in packed for part in x.flatten(0, 1).unbind(1))
        return [side.cut(part) for side, part in zip((self.queries, self.keys, self.keys), parts, strict=False)]

    def join(self, blocks: Sequence[Sequence[Tensor]], like: Sequence[Tensor]) -> list[Tensor]:
        """The way back from `cut`, into tensors of such shapes."""
        packed = [(self.keys if x.shape[2] == 2 else self.queries).room(x.shape, x.dtype) for x in like]
        if self.biases:
            torch._foreach_copy_(list(chain.from_iterable(self.cut(packed))), list(chain.from_iterable(blocks)))
        return packed


def attention_bias(sight: Sight) -> Blocks:
    """See `reference.attention_bias`: the biases of blocks instead of one of whole rows.

    >>> segments = torch.tensor([[1, 1, 2, 0]])
    >>> bias = attention_bias(Sight(segments, segments, table=torch.arange(32.0)[:, None], max_distance=128))
    >>> len(bias.biases), bias.biases[0][0, :2, :2]
    (1, tensor([[ 0., 17.],
            [ 1.,  0.]]))
    """
    segments = Segments.of(sight.queries.numpy(), sight.keys.numpy())
    blocks = list(_blocks(segments.places))
    masks = [_mask(block, segments.places, sight.causal, sight.window) for block in blocks]
    relative = None
    if sight.table is not None and masks:
        q, k = (STEP * math.ceil(max(mask.shape[side] for mask in masks) / STEP) for side in (1, 2))
        relative = reference.relative_bias(sight.table, q, k, sight.max_distance, not sight.causal)[0]
        relative = relative.to(sight.dtype).contiguous()
    fixed = None if relative is None else relative.detach()
    biases = [_bias(mask, fixed, sight.dtype) for mask in masks]
    queries = Side([block.queries for block in blocks], segments.queries)
    keys = Side([block.keys for block in blocks], segments.keys)
    return Blocks(segments, blocks, queries, keys, biases, relative)


def _blocks(places: np.ndarray) -> Iterator[Block]:
    """Segments that follow one another on both sides may share a block.

    >>> [block.keys for block in _blocks(np.array([[0, 2, 0, 2], [2, 1, 2, 1], [4, 2, 4, 2]]))]
    [slice(0, 3, None), slice(4, 6, None)]
    """
    block = None
    for i, (q, queries, k, keys) in enumerate(places.tolist()):
        if block is not None:
            joined = block._replace(
                queries=slice(block.queries.start, q + queries), keys=slice(block.keys.start, k + keys), end=i + 1
            )
            follows = (block.queries.stop, block.keys.stop) == (q, k)
            if follows and _length(joined.queries) * _length(joined.keys) <= SCORES:
                block = joined
                continue
            yield block
        block = Block(slice(q, q + queries), slice(k, k + keys), i, i + 1)
    if block is not None:
        yield block


def _length(stretch: slice) -> int:
    return int(stretch.stop - stretch.start)


def _mask(block: Block, places: np.ndarray, causal: bool, window: int) -> Tensor:
    """Who sees whom in a block, [1, Q, K]."""
    numbers = torch.arange(1, block.end - block.first + 1)
    own = torch.from_numpy(places[block.first : block.end])
    queries, keys = (torch.repeat_interleave(numbers, own[:, side])[None] for side in (1, 3))
    return reference.segment_mask(queries, keys, causal, window)[0]


def _bias(mask: Tensor, relative: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Relative bias and mask [1, Q, K] of a block as one tensor; None where there is neither.

    Two slots of a segment are as far from each other in the block as in the segment.
    """
    if relative is not None:
        return relative[:, : mask.shape[1], : mask.shape[2]].masked_fill(~mask, torch.finfo(dtype).min)
    return None if mask.all() else reference.additive(mask, None, dtype)


def attention(packed: Sequence[Tensor], bias: Blocks, rate: float, scale: float = 1.0) -> Tensor:
    """See `reference.attention`.

    >>> one = torch.ones(1, 1, dtype=torch.long)
    >>> blocks = attention_bias(Sight(one, one))
    >>> attention([torch.tensor([1.0, 1.0, 3.0]).view(1, 1, 3, 1, 1)], blocks, 0.0)
    tensor([[[[3.]]]])
    """
    return _Attention.apply(bias.relative, bias, rate, scale, *packed)


class _Attention(Function):
    @staticmethod
    def forward(ctx, relative, bias, rate, scale, *packed):  # type: ignore[no-untyped-def]
        queries, keys, values = bias.cut(packed)
        drops = _drops(bias, packed[0].shape[3], rate)
        weights, mixed = [], []
        for q, k, v, added, drop in zip(queries, keys, values, bias.biases, drops, strict=True):
            scores = _product(q, k.mT, scale) if added is None else torch.baddbmm(added, q, k.mT, alpha=scale)
            weights.append(scores.softmax(-1, dtype=reference.wide(q.dtype)).to(q.dtype))
            mixed.append(torch.bmm(_without(weights[-1], drop, 1.0 / (1.0 - rate)), v))
        ctx.bias, ctx.rate, ctx.scale = bias, rate, scale
        ctx.save_for_backward(*packed, *weights, *drops)
        (out,) = bias.join([mixed], [packed[0][:, :, :1]])
        return out[:, :, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        bias, saved, count = ctx.bias, ctx.saved_tensors, len(ctx.bias.biases)
        packed = saved[: len(saved) - 2 * count]
        weights, drops = saved[len(packed) : len(packed) + count], saved[len(packed) + count :]
        (outs,) = bias.cut([torch.mul(grad, 1.0 / (1.0 - ctx.rate))[:, :, None]])
        grad_relative = None if bias.relative is None else torch.zeros_like(bias.relative)
        grads: list[list[Tensor]] = [[], [], []]
        for q, k, v, out, weight, drop in zip(*bias.cut(packed), outs, weights, drops, strict=True):
            slope = torch.bmm(out, v.mT)
            if drop is not None:
                slope.view(-1).index_fill_(0, drop, 0.0)
            slope = torch._softmax_backward_data(slope, weight, -1, weight.dtype)
            if grad_relative is not None:
                grad_relative[:, : slope.shape[1], : slope.shape[2]] += slope
            grads[0].append(_product(slope, k, ctx.scale))
            grads[1].append(_product(slope.mT, q, ctx.scale))
            grads[2].append(torch.bmm(_without(weight, drop, 1.0).mT, out))
        return grad_relative, None, None, None, *bias.join(grads, packed)


def _drops(bias: Blocks, heads: int, rate: float) -> list[Tensor | None]:
    """What is dropped of the scores of each block: that of its segments, where they lie in it."""
    found = bias.segments.drop(heads, rate)
    if found is None:
        return [None] * len(bias.blocks)
    places = bias.segments.places
    ends = heads * np.cumsum(places[:, 1] * places[:, 3])
    drop = found.numpy()
    segment = np.searchsorted(ends, drop, "right")
    q, queries, k, keys = places[segment].T
    pair, j = np.divmod(drop - (ends[segment] - heads * queries * keys), keys)
    head, i = np.divmod(pair, queries)
    drops: list[Tensor | None] = []
    last = 0
    for block in bias.blocks:
        own = slice(last, last := int(np.searchsorted(drop, ends[block.end - 1])))
        line = head[own] * _length(block.queries) + q[own] - block.queries.start + i[own]
        drops.append(torch.from_numpy(line * _length(block.keys) + k[own] - block.keys.start + j[own]))
    return drops


def _without(weights: Tensor, drop: Tensor | None, scale: float) -> Tensor:
    if drop is None:
        return weights
    left = torch.mul(weights, scale)
    left.view(-1).index_fill_(0, drop, 0.0)
    return left


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale * a @ b``, the scaling done by the product."""
    if scale == 1.0:
        return torch.bmm(a, b)
    out = a.new_empty(*a.shape[:2], b.shape[2])
    return torch.baddbmm(out, a, b, beta=0.0, alpha=scale, out=out)
