"""Attention of one segment and head at a time, by native.c: nothing is padded, masked or made for whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from t2t.kernels import reference
from t2t.kernels.cpu import native
from t2t.kernels.cpu.segments import Segments
from t2t.kernels.reference import Sight

T = TypeVar("T", int, np.ndarray)


@dataclass(frozen=True)
class SegmentBias:
    """Which scores attention makes, and what it adds to them."""

    segments: Segments
    reach: int
    relative: Tensor | None  # [H, 2 * reach - 1] by the distance key - query, from 1 - reach on; differentiable
    causal: bool
    window: int


def attention_bias(sight: Sight) -> SegmentBias:
    """See `reference.attention_bias`: a bias for every distance instead of one for every pair of slots.

    >>> segments = torch.tensor([[1, 1, 2, 0]])
    >>> bias = attention_bias(Sight(segments, segments, table=torch.arange(32.0)[:, None], max_distance=128))
    >>> bias.reach, bias.relative[0, 14:17]
    (16, tensor([ 1.,  0., 17.]))
    """
    segments = Segments.of(sight.queries.numpy(), sight.keys.numpy())
    reach, relative = _padded(int(segments.places[:, 1::2].max(initial=1))), None
    table = sight.table
    if table is not None:
        cpu = torch.device("cpu")
        before, after = (
            reference.relative_buckets(*sizes, len(table), sight.max_distance, not sight.causal, cpu).flatten()
            for sizes in ((reach, 1), (1, reach))
        )
        relative = F.embedding(torch.cat([before.flip(0), after[1:]]), table).T.to(sight.dtype).contiguous()
    return SegmentBias(segments, reach, relative, sight.causal, sight.window)


def _padded(count: T) -> T:
    """Rounded up to what native.c pads rows of weights to, and reads biases by."""
    return -(-count // native.PAD) * native.PAD


def attention(packed: Sequence[Tensor], bias: SegmentBias, rate: float, scale: float = 1.0) -> Tensor:
    """See `reference.attention`."""
    return _Attention.apply(bias.relative, bias, rate, scale, *packed)


class _Attention(Function):
    @staticmethod
    def forward(ctx, relative, bias, rate, scale, *given):  # type: ignore[no-untyped-def]
        if any(x.dtype != torch.float32 for x in given):
            raise TypeError("attention: queries, keys and values must be fp32, as the bias is")
        packed = [x.contiguous() for x in given]
        rows, slots, _, heads, channels = packed[0].shape
        _, queries, _, keys = bias.segments.places.T
        weights = packed[0].new_empty(heads * int((queries * _padded(keys)).sum()))
        drop = bias.segments.drop(heads, rate)
        room = packed[0].new_empty if bias.segments.full_queries else packed[0].new_zeros
        out = room((rows, slots, heads, channels))
        ctx.bias, ctx.rate, ctx.scale = bias, rate, scale
        ctx.save_for_backward(weights, *packed)
        call = _call(bias, rate, scale, weights, drop, packed)
        native.call("attention_forward", byref(call), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        bias, (weights, *packed) = ctx.bias, ctx.saved_tensors
        full = bias.segments.full_queries and bias.segments.full_keys
        grads = [(torch.empty_like if full else torch.zeros_like)(x) for x in packed]
        grad_relative = None if bias.relative is None else torch.zeros_like(bias.relative)
        call, grad = _call(bias, ctx.rate, ctx.scale, weights, None, packed), grad.contiguous()
        native.call("attention_backward", byref(call), grad, *_addresses(grads), grad_relative)
        return grad_relative, None, None, None, *grads


def _addresses(packed: Sequence[Tensor]) -> list[int]:
    """Where queries, keys and values begin in ``packed``."""
    return [part.data_ptr() for x in packed for part in x.unbind(2)]


def _call(
    bias: SegmentBias, rate: float, scale: float, weights: Tensor, drop: Tensor | None, packed: Sequence[Tensor]
) -> native.Attention:
    relative, places = bias.relative, bias.segments.places
    heads, channels = packed[0].shape[3:]
    q, k, v = _addresses(packed)
    q_slot, k_slot = (x.shape[2] * heads * channels for x in (packed[0], packed[-1]))
    return native.Attention(
        *(q, k, v, None if relative is None else relative.data_ptr(), weights.data_ptr(), places.ctypes.data),
        *(None if drop is None else drop.data_ptr(), q_slot, k_slot, len(places), heads, channels, bias.reach),
        *(0 if drop is None else len(drop), bias.causal, bias.window, scale, 1.0 / (1.0 - rate)),
    )
