"""Attention over packed rows in Triton: tiles in which no segment lies are never looked at, T5's bias is added tile by
tile, and weights are dropped on the way.

What a query may see is one stretch of keys: its segment, cut at itself where attention is causal and at the window
before it where there is one. So two numbers a query are the whole mask, and two numbers a key the mask seen from there.

T5's bias depends on the distance of key and query alone, so that all square tiles that lie equally far from the
diagonal have the same one, and beyond a distance all of them: a handful of tiles a head serves rows of any length.

Shapes: R rows, Q query slots, K key slots, H heads, C channels of a head, N tiles from far before to far after the
diagonal, T slots a side of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from t2t.kernels import reference
from t2t.kernels.reference import Sight

LOG2E = 1.4426950408889634


class Spans(NamedTuple):
    """Where each query looks and by which queries each key is seen, [from, to), and what distances add."""

    start: Tensor  # [R, Q]
    end: Tensor
    first: Tensor  # [R, K]
    last: Tensor
    tiles: Tensor | None  # [H, N, T, T]


def attention_bias(sight: Sight) -> Spans | Tensor:
    """See `reference.attention_bias`: stretches instead of a mask, tiles instead of a square of biases.

    Segments are numbered upwards along a row, in both streams. fp64, which tiles cannot be multiplied in, stays with
    the reference.
    """
    if sight.dtype == torch.float64:
        return reference.attention_bias(sight)
    queries, keys = _codes(sight.queries), _codes(sight.keys)
    start, end = (torch.searchsorted(keys, queries, right=right, out_int32=True) for right in (False, True))
    first, last = (torch.searchsorted(queries, keys, right=right, out_int32=True) for right in (False, True))
    if sight.causal:
        slots = torch.arange(queries.shape[1], dtype=torch.int32, device=queries.device)
        end, first = torch.minimum(end, slots + 1), torch.maximum(first, slots)
        if sight.window:
            start, last = torch.maximum(start, slots + 1 - sight.window), torch.minimum(last, slots + sight.window)
    end, last = end.masked_fill(sight.queries == 0, 0), last.masked_fill(sight.keys == 0, 0)
    tiles = None if sight.table is None else _Tiles.apply(sight.table, sight.max_distance, not sight.causal)
    return Spans(start, end, first, last, tiles)


def _codes(segments: Tensor) -> Tensor:
    """Numbers that rise along a row: even ones for segments, odd ones for the padding after each.

    >>> _codes(torch.tensor([[1, 1, 0, 2, 0]]))
    tensor([[2, 2, 3, 4, 5]])
    """
    return 2 * segments.cummax(1).values + (segments == 0)


def _side(dtype: torch.dtype) -> int:
    """Of a tile: what fits a multiprocessor's memory."""
    return 32 if dtype == torch.float32 else 64


class _Tiles(Function):
    """A table [buckets, H] as tiles; on the way back, what tiles have in a bucket is summed by one product."""

    @staticmethod
    def forward(ctx, table, max_distance, bidirectional):
        side = _side(table.dtype)
        ctx.index = _tile_buckets(side, len(table), max_distance, bidirectional, table.device)
        ctx.buckets, ctx.dtype = table.shape[0], table.dtype
        return table.T[:, ctx.index].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        members = torch.nn.functional.one_hot(ctx.index.flatten(), ctx.buckets).to(grad.dtype)
        return (members.T @ grad.flatten(1).T).to(ctx.dtype), None, None


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # what generation caches must serve training too
def _tile_buckets(side: int, buckets: int, most: int, bidirectional: bool, device: torch.device) -> Tensor:
    """The bucket of every slot of every tile, [N, T, T]."""
    around = 1 + triton.cdiv(most, side)  # tiles on each side of the diagonal's; the last has distances of `most` alone
    length = (2 * around + 1) * side
    # One long row of tiles: a query of the middle tile against keys of all of them.
    square = reference.relative_buckets(length, length, buckets, most, bidirectional, device)
    return square[around * side :][:side].view(side, -1, side).transpose(0, 1).contiguous()


def attention(packed: Sequence[Tensor], spans: Spans | Tensor, rate: float, scale: float = 1.0) -> Tensor:
    """See `reference.attention`."""
    if isinstance(spans, Tensor):
        return reference.attention(packed, spans, rate, scale)
    seed = torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=packed[0].device) if rate else None
    out, _ = _attention([x.contiguous() for x in packed], *spans, seed, rate, scale)
    return cast(Tensor, out)


SPANS = "Tensor start, Tensor end, Tensor first, Tensor last, Tensor? tiles"
REST = "Tensor? seed, float rate, float scale"


@torch.library.custom_op(
    "t2t::attention", mutates_args=(), schema=f"(Tensor[] packed, {SPANS}, {REST}) -> (Tensor, Tensor)"
)
def _attention(packed, start, end, first, last, tiles, seed, rate, scale):
    """What is attended to, and the logarithm of each query's sum of weights [R, H, Q]."""
    q, k, v = _parts(packed)
    out, total = _results(q)
    shape = _shape("forward", q, tiles)
    _forward[_grid(q, shape["TILE_Q"])](
        q, k, v, out, total, start, end, tiles, seed, *_sizes(q, k), **_settings(q, tiles, rate, scale), **shape
    )
    return out, total


@_attention.register_fake
def _(packed, start, end, first, last, tiles, seed, rate, scale):
    return _results(_parts(packed)[0])


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(rows, heads, queries, dtype=torch.float32)


@torch.library.custom_op(
    "t2t::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor total, Tensor[] packed, {SPANS}, {REST}, bool learn_tiles) -> Tensor[]",
)
def _attention_backward(grad, out, total, packed, start, end, first, last, tiles, seed, rate, scale, learn_tiles):
    """The gradients of ``packed``, and of the tiles if these learn."""
    q, k, v = _parts(packed)
    rows, queries, heads, channels = q.shape
    grads = _slopes_of(packed, tiles, learn_tiles)
    dq, dk, dv = _parts(grads[: len(packed)])
    sizes, settings = _sizes(q, k), _settings(q, tiles, rate, scale)
    # What softmax takes away from every slope of a query: the sum of its gradient times its output.
    taken, count = torch.empty_like(total), rows * queries * heads
    _taken[(triton.cdiv(count, 64),)](
        grad, out, taken, queries, heads, count, CHANNELS=channels, WIDTH=settings["WIDTH"], TILE=64
    )
    given = q, k, v, grad, total, taken, start, end
    shape = _shape("keys", q, tiles)
    _backward_keys[_grid(k, shape["TILE_K"])](*given, first, last, dk, dv, tiles, seed, *sizes, **settings, **shape)
    shape = _shape("queries", q, tiles)
    _backward_queries[_grid(q, shape["TILE_Q"])](*given, dq, tiles, seed, *sizes, **settings, **shape)
    if learn_tiles:
        parts = min(rows, PARTS)
        partial = total.new_empty(parts, *tiles.shape)
        shape = _shape("tiles", q, tiles)
        _backward_tiles[(tiles.shape[1], heads, parts)](*given, partial, tiles, seed, rows, *sizes, **settings, **shape)
        torch.sum(partial, 0, out=grads[-1])
    return grads


@_attention_backward.register_fake
def _(grad, out, total, packed, start, end, first, last, tiles, seed, rate, scale, learn_tiles):
    return _slopes_of(packed, tiles, learn_tiles)


def _slopes_of(packed: Sequence[Tensor], tiles: Tensor | None, learn_tiles: bool) -> list[Tensor]:
    learned = [torch.empty_like(tiles, dtype=torch.float32)] if learn_tiles and tiles is not None else []
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in packed] + learned


def _remember(ctx, inputs, output):
    packed, *spans, seed, ctx.rate, ctx.scale = inputs
    ctx.learn_tiles = spans[-1] is not None and spans[-1].requires_grad
    ctx.save_for_backward(*output, *spans, seed, *packed)


def _differentiate(ctx, grad, _):
    out, total, start, end, first, last, tiles, seed, *packed = ctx.saved_tensors
    spans = start, end, first, last, tiles
    grads = _attention_backward(
        grad.contiguous(), out, total, packed, *spans, seed, ctx.rate, ctx.scale, ctx.learn_tiles
    )
    learned = grads.pop() if ctx.learn_tiles else None
    return grads, None, None, None, None, learned, None, None, None


_attention.register_autograd(_differentiate, setup_context=_remember)


def _grid(x: Tensor, tile: int) -> tuple[int]:
    """One program a tile of slots of each head of each row; those of a head follow each other."""
    rows, slots, heads, _ = x.shape
    return (triton.cdiv(slots, tile) * rows * heads,)


def _parts(packed: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys and values [R, S, H, C], views of what they are packed in."""
    return [part for x in packed for part in x.unbind(2)]


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """From row to row, slot to slot and head to head, channels lying side by side; how many slots and heads."""
    return *q.stride()[:3], *k.stride()[:3], q.shape[1], k.shape[1], q.shape[2]


def _settings(q: Tensor, tiles: Tensor | None, rate: float, scale: float) -> dict[str, Any]:
    return {
        "scale": scale * LOG2E,
        "grow": 1.0 / (1.0 - rate),
        "CHANNELS": q.shape[3],
        "WIDTH": max(16, triton.next_power_of_2(q.shape[3])),
        "TILES": 0 if tiles is None else tiles.shape[1],
        "DROP": int(rate * 2**32),
        "EXACT": q.dtype == torch.float32,
    }


PARTS = 16  # the rows of a batch are summed in so many parts
SHAPES = {  # tile of queries, tile of keys, warps, stages
    "forward": (64, 64, 4, 3),
    "keys": (64, 64, 4, 2),
    "queries": (64, 64, 4, 2),
    "tiles": (64, 64, 4, 2),
}


def _shape(which: str, q: Tensor, tiles: Tensor | None) -> dict[str, int]:
    tile_q, tile_k, warps, stages = SHAPES[which]
    if tiles is not None:
        tile_q = tile_k = tiles.shape[2]
    elif q.dtype == torch.float32:
        tile_q = tile_k = _side(q.dtype)
    if q.dtype == torch.float32:
        stages = 1
    return {"TILE_Q": tile_q, "TILE_K": tile_k, "num_warps": warps, "num_stages": stages}


@triton.jit
def _mixed(x):
    """A 32-bit number whose every bit depends on every bit of the given one."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(by_query, by_key, DROP: tl.constexpr):
    """Which of a tile's weights stay: one random number each, out of one of its query and one of its key."""
    x = (by_query[:, None] ^ by_key[None, :]) * 0x9E3779B1
    return (x ^ (x >> 15)) * 0x85EBCA77 >= DROP


@triton.jit
def _scores(q, k, tiles_ptr, slots, others, start, end, head, scale,
            TILES: tl.constexpr, EXACT: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """Of a tile, times log2(e); minus infinity where a query may not look."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
    if TILES:
        away = (tl.min(others) - tl.min(slots)) // TILE_K
        away = tl.minimum(tl.maximum(away, -(TILES // 2)), TILES // 2) + TILES // 2
        inner = tl.arange(0, TILE_Q)[:, None] * TILE_K + tl.arange(0, TILE_K)[None, :]
        scores += (
            tl.load(tiles_ptr + (head * TILES + away) * TILE_Q * TILE_K + inner).to(tl.float32) * 1.4426950408889634
        )
    seen = (others[None, :] >= start[:, None]) & (others[None, :] < end[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _taken(
    grad_ptr, out_ptr, taken_ptr, queries, heads, count, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """The sum over channels of gradient times output, [R, H, Q] out of [R, Q, H, C]."""
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channels = tl.arange(0, WIDTH)
    there = (places < count)[:, None] & (channels < CHANNELS)[None, :]
    at = places[:, None].to(tl.int64) * CHANNELS + channels[None, :]
    grad = tl.load(grad_ptr + at, mask=there, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=there, other=0.0).to(tl.float32)
    row, slot, head = places // (queries * heads), places // heads % queries, places % heads
    tl.store(taken_ptr + (row * heads + head).to(tl.int64) * queries + slot, tl.sum(grad * out, 1), mask=places < count)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, total_ptr, start_ptr, end_ptr, tiles_ptr, seed_ptr,
    q_row, q_slot, q_head, k_row, k_slot, k_head, queries, keys, heads, scale, grow,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(queries, TILE_Q)
    which, tile = tl.program_id(0) // across, tl.program_id(0) % across
    row, head = (which // heads).to(tl.int64), which % heads
    slots = tile * TILE_Q + tl.arange(0, TILE_Q)
    channels = tl.arange(0, WIDTH)
    inside, real = slots < queries, channels < CHANNELS
    there = inside[:, None] & real[None, :]
    q = tl.load(
        q_ptr + row * q_row + slots[:, None].to(tl.int64) * q_slot + head * q_head + channels[None, :],
        mask=there,
        other=0.0,
    )
    start = tl.load(start_ptr + row * queries + slots, mask=inside, other=keys)
    end = tl.load(end_ptr + row * queries + slots, mask=inside, other=0)
    looks = end > start
    low = tl.min(tl.where(looks, start, keys)) // TILE_K * TILE_K
    high = tl.max(tl.where(looks, end, 0))
    by_query = slots.to(tl.uint32)
    if DROP:
        by_query = _mixed(_mixed(tl.load(seed_ptr) + which) + slots)
    most = tl.full([TILE_Q], float("-inf"), tl.float32)
    sums = tl.zeros([TILE_Q], tl.float32)
    mixed = tl.zeros([TILE_Q, WIDTH], tl.float32)
    for first in range(low, high, TILE_K):
        others = first + tl.arange(0, TILE_K)
        places = row * k_row + others[:, None].to(tl.int64) * k_slot + head * k_head + channels[None, :]
        known = (others < keys)[:, None] & real[None, :]
        k = tl.load(k_ptr + places, mask=known, other=0.0)
        v = tl.load(v_ptr + places, mask=known, other=0.0)
        scores = _scores(q, k, tiles_ptr, slots, others, start, end, head, scale, TILES, EXACT, TILE_Q, TILE_K)
        higher = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(most - shift)
        sums = sums * shrink + tl.sum(weights, 1)
        if DROP:
            weights = tl.where(_kept(by_query, _mixed(others), DROP), weights, 0.0)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee" if EXACT else "tf32")
        most = higher
    total = tl.where(sums > 0.0, most + tl.log2(sums), float("inf"))
    mixed = mixed * (grow / tl.where(sums > 0.0, sums, 1.0))[:, None]
    out_at = ((row * queries + slots[:, None]) * heads + head) * CHANNELS + channels[None, :]
    tl.store(out_ptr + out_at, mixed.to(out_ptr.dtype.element_ty), mask=there)
    tl.store(total_ptr + which.to(tl.int64) * queries + slots, total, mask=inside)


@triton.jit
def _slopes(
    q, k, v, grad, total_ptr, taken_ptr, start_ptr, end_ptr, tiles_ptr, by_row, row, head, slots, others, queries, keys,
    heads, scale, grow, TILES: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
):  # fmt: skip
    """Of a tile: the weights that dropout left, and the gradient of the scores."""
    inside = slots < queries
    start = tl.load(start_ptr + row * queries + slots, mask=inside, other=keys)
    end = tl.load(end_ptr + row * queries + slots, mask=inside, other=0)
    statistics = (row * heads + head) * queries + slots
    total = tl.load(total_ptr + statistics, mask=inside, other=float("inf"))
    taken = tl.load(taken_ptr + statistics, mask=inside, other=0.0)
    scores = _scores(q, k, tiles_ptr, slots, others, start, end, head, scale, TILES, EXACT, TILE_Q, TILE_K)
    weights = tl.exp2(scores - total[:, None])
    slopes = tl.dot(grad, tl.trans(v), input_precision="ieee" if EXACT else "tf32")
    left = weights
    if DROP:
        kept = _kept(_mixed(by_row + slots), _mixed(others), DROP)
        left = tl.where(kept, weights * grow, 0.0)
        slopes = tl.where(kept, slopes * grow, 0.0)
    return left, weights * (slopes - taken[:, None])


@triton.jit
def _backward_keys(
    q_ptr, k_ptr, v_ptr, grad_ptr, total_ptr, taken_ptr, start_ptr, end_ptr, first_ptr, last_ptr, dk_ptr, dv_ptr,
    tiles_ptr, seed_ptr, q_row, q_slot, q_head, k_row, k_slot, k_head, queries, keys, heads, scale, grow,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Of the keys and values of a tile, over all queries that see them."""
    across = tl.cdiv(keys, TILE_K)
    which, tile = tl.program_id(0) // across, tl.program_id(0) % across
    row, head = (which // heads).to(tl.int64), which % heads
    others = tile * TILE_K + tl.arange(0, TILE_K)
    channels = tl.arange(0, WIDTH)
    inside, real = others < keys, channels < CHANNELS
    at = row * k_row + others[:, None].to(tl.int64) * k_slot + head * k_head + channels[None, :]
    there = inside[:, None] & real[None, :]
    k = tl.load(k_ptr + at, mask=there, other=0.0)
    v = tl.load(v_ptr + at, mask=there, other=0.0)
    first = tl.load(first_ptr + row * keys + others, mask=inside, other=queries)
    last = tl.load(last_ptr + row * keys + others, mask=inside, other=0)
    seen = last > first
    low = tl.min(tl.where(seen, first, queries)) // TILE_Q * TILE_Q
    high = tl.max(tl.where(seen, last, 0))
    by_row = which.to(tl.uint32)
    if DROP:
        by_row = _mixed(tl.load(seed_ptr) + which)
    dk = tl.zeros([TILE_K, WIDTH], tl.float32)
    dv = tl.zeros([TILE_K, WIDTH], tl.float32)
    for beginning in range(low, high, TILE_Q):
        slots = beginning + tl.arange(0, TILE_Q)
        known = (slots < queries)[:, None] & real[None, :]
        q = tl.load(
            q_ptr + row * q_row + slots[:, None].to(tl.int64) * q_slot + head * q_head + channels[None, :],
            mask=known,
            other=0.0,
        )
        out_at = ((row * queries + slots[:, None]) * heads + head) * CHANNELS + channels[None, :]
        grad = tl.load(grad_ptr + out_at, mask=known, other=0.0)
        left, slopes = _slopes(
            q, k, v, grad, total_ptr, taken_ptr, start_ptr, end_ptr, tiles_ptr, by_row, row, head, slots, others,
            queries, keys, heads, scale, grow, TILES, DROP, EXACT, TILE_Q, TILE_K,
        )  # fmt: skip
        dv = tl.dot(tl.trans(left.to(grad.dtype)), grad, dv, input_precision="ieee" if EXACT else "tf32")
        dk = tl.dot(tl.trans(slopes.to(q.dtype)), q, dk, input_precision="ieee" if EXACT else "tf32")
    tl.store(dk_ptr + at, (dk * (scale / 1.4426950408889634)).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=there)


@triton.jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, grad_ptr, total_ptr, taken_ptr, start_ptr, end_ptr, dq_ptr,
    tiles_ptr, seed_ptr, q_row, q_slot, q_head, k_row, k_slot, k_head, queries, keys, heads, scale, grow,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Of the queries of a tile, over all keys that they see."""
    across = tl.cdiv(queries, TILE_Q)
    which, tile = tl.program_id(0) // across, tl.program_id(0) % across
    row, head = (which // heads).to(tl.int64), which % heads
    slots = tile * TILE_Q + tl.arange(0, TILE_Q)
    channels = tl.arange(0, WIDTH)
    inside, real = slots < queries, channels < CHANNELS
    there = inside[:, None] & real[None, :]
    at = row * q_row + slots[:, None].to(tl.int64) * q_slot + head * q_head + channels[None, :]
    q = tl.load(q_ptr + at, mask=there, other=0.0)
    out_at = ((row * queries + slots[:, None]) * heads + head) * CHANNELS + channels[None, :]
    grad = tl.load(grad_ptr + out_at, mask=there, other=0.0)
    start = tl.load(start_ptr + row * queries + slots, mask=inside, other=keys)
    end = tl.load(end_ptr + row * queries + slots, mask=inside, other=0)
    looks = end > start
    low = tl.min(tl.where(looks, start, keys)) // TILE_K * TILE_K
    high = tl.max(tl.where(looks, end, 0))
    by_row = which.to(tl.uint32)
    if DROP:
        by_row = _mixed(tl.load(seed_ptr) + which)
    dq = tl.zeros([TILE_Q, WIDTH], tl.float32)
    for first in range(low, high, TILE_K):
        others = first + tl.arange(0, TILE_K)
        places = row * k_row + others[:, None].to(tl.int64) * k_slot + head * k_head + channels[None, :]
        known = (others < keys)[:, None] & real[None, :]
        k = tl.load(k_ptr + places, mask=known, other=0.0)
        v = tl.load(v_ptr + places, mask=known, other=0.0)
        _, slopes = _slopes(
            q, k, v, grad, total_ptr, taken_ptr, start_ptr, end_ptr, tiles_ptr, by_row, row, head, slots, others,
            queries, keys, heads, scale, grow, TILES, DROP, EXACT, TILE_Q, TILE_K,
        )  # fmt: skip
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision="ieee" if EXACT else "tf32")
    tl.store(dq_ptr + at, (dq * (scale / 1.4426950408889634)).to(dq_ptr.dtype.element_ty), mask=there)


@triton.jit
def _backward_tiles(
    q_ptr, k_ptr, v_ptr, grad_ptr, total_ptr, taken_ptr, start_ptr, end_ptr, partial_ptr,
    tiles_ptr, seed_ptr, rows, q_row, q_slot, q_head, k_row, k_slot, k_head, queries, keys, heads, scale, grow,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Of one tile of the bias, over some of the rows: the sum of the slopes of all tiles at its distance."""
    away, head, part = tl.program_id(0) - TILES // 2, tl.program_id(1), tl.program_id(2)
    channels = tl.arange(0, WIDTH)
    real = channels < CHANNELS
    sums = tl.zeros([TILE_Q, TILE_K], tl.float32)
    across, down = tl.cdiv(keys, TILE_K), tl.cdiv(queries, TILE_Q)
    for each in range(part * down, rows * down, tl.num_programs(2) * down):
        row = (each // down).to(tl.int64)
        for tile in range(down):
            slots = tile * TILE_Q + tl.arange(0, TILE_Q)
            inside = slots < queries
            start = tl.load(start_ptr + row * queries + slots, mask=inside, other=keys)
            end = tl.load(end_ptr + row * queries + slots, mask=inside, other=0)
            looks = end > start
            low = tl.min(tl.where(looks, start, keys)) // TILE_K
            high = tl.cdiv(tl.max(tl.where(looks, end, 0)), TILE_K)
            # All keys farther than the last tile belong to it.
            low = tl.maximum(low, tl.where(away == -(TILES // 2), 0, tile + away))
            high = tl.minimum(high, tl.where(away == TILES // 2, across, tile + away + 1))
            if low < high:
                there = inside[:, None] & real[None, :]
                at = row * q_row + slots[:, None].to(tl.int64) * q_slot + head * q_head + channels[None, :]
                q = tl.load(q_ptr + at, mask=there, other=0.0)
                out_at = ((row * queries + slots[:, None]) * heads + head) * CHANNELS + channels[None, :]
                grad = tl.load(grad_ptr + out_at, mask=there, other=0.0)
                by_row = (row * heads + head).to(tl.uint32)
                if DROP:
                    by_row = _mixed(tl.load(seed_ptr) + (row * heads + head).to(tl.int32))
                for other in range(low, high):
                    others = other * TILE_K + tl.arange(0, TILE_K)
                    places = row * k_row + others[:, None].to(tl.int64) * k_slot + head * k_head + channels[None, :]
                    known = (others < keys)[:, None] & real[None, :]
                    k = tl.load(k_ptr + places, mask=known, other=0.0)
                    v = tl.load(v_ptr + places, mask=known, other=0.0)
                    _, slopes = _slopes(
                        q, k, v, grad, total_ptr, taken_ptr, start_ptr, end_ptr, tiles_ptr, by_row, row, head, slots,
                        others, queries, keys, heads, scale, grow, TILES, DROP, EXACT, TILE_Q, TILE_K,
                    )  # fmt: skip
                    sums += slopes
    inner = tl.arange(0, TILE_Q)[:, None] * TILE_K + tl.arange(0, TILE_K)[None, :]
    at = ((part * heads + head) * TILES + tl.program_id(0)) * TILE_Q * TILE_K
    tl.store(partial_ptr + at + inner, sums)
