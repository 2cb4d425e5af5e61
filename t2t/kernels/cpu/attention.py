"""Attention by segment, natively or in torch's products of a few segments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from t2t.kernels.cpu import blocks, by_segment, native
from t2t.kernels.cpu.blocks import Blocks
from t2t.kernels.cpu.by_segment import SegmentBias
from t2t.kernels.reference import Sight


def attention_bias(sight: Sight) -> SegmentBias | Blocks:
    """See `reference.attention_bias`."""
    way = by_segment if native.serves(sight.dtype) else blocks
    return way.attention_bias(sight)


def attention(packed: Sequence[Tensor], bias: SegmentBias | Blocks, rate: float, scale: float = 1.0) -> Tensor:
    """See `reference.attention`.

    >>> import torch
    >>> one = torch.ones(1, 1, dtype=torch.long)
    >>> bias = attention_bias(Sight(one, one))
    >>> attention([torch.tensor([1.0, 1.0, 3.0]).view(1, 1, 3, 1, 1)], bias, 0.0)
    tensor([[[[3.]]]])
    """
    if isinstance(bias, SegmentBias):
        return by_segment.attention(packed, bias, rate, scale)
    return blocks.attention(packed, bias, rate, scale)
