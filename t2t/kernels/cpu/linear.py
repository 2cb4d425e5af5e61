"""Products, norm and loss with fewer passes over memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from t2t.kernels import reference
from t2t.kernels.cpu import native
from t2t.kernels.cpu.dropout import dropped
from t2t.kernels.reference import IGNORE


def embedding(ids: Tensor, weight: Tensor, tied: bool) -> Tensor:
    """See `reference.embedding`: added to the head's gradient are the rows that were looked up, not all of them.

    >>> embedding(torch.tensor([1]), torch.tensor([[1.0], [2.0]]), tied=True)
    tensor([[2.]])
    """
    return F.embedding(ids, weight, sparse=tied)


def linear_dropout_add(residual: Tensor, x: Tensor, weight: Tensor, rate: float, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear_dropout_add`: the product adds itself to the residual, and what is dropped is put back.

    >>> linear_dropout_add(torch.ones(2), torch.ones(1), torch.tensor([[-1.0], [2.0]]), 0.0)
    tensor([0., 3.])
    """
    return _LinearDropoutAdd.apply(residual, x, weight, rate, bias)


class _LinearDropoutAdd(Function):
    @staticmethod
    def forward(ctx, residual, x, weight, rate, bias):  # type: ignore[no-untyped-def]
        rows = x.reshape(-1, x.shape[-1])
        y, index = _product_dropout_add(residual, rows, weight, rate, bias)
        ctx.rate = rate
        ctx.save_for_backward(rows, weight, index)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, index = ctx.saved_tensors
        live, scale, needed = _without(grad, index), 1.0 / (1.0 - ctx.rate), ctx.needs_input_grad
        grad_x, grad_weight = _linear_grads(needed[1:], live, x, weight, scale)
        grad_bias = live.sum(0).mul_(scale) if needed[4] else None
        return grad, grad_x if grad_x is None else grad_x.view(*grad.shape[:-1], -1), grad_weight, None, grad_bias


def relu_feed_forward(residual: Tensor, x: Tensor, wide: Tensor, narrow: Tensor, rate: float) -> Tensor:
    """See `reference.relu_feed_forward`: what is between the products is kept once, and tells what was dropped.

    >>> wide, narrow = torch.tensor([[-1.0], [2.0]]), torch.tensor([[1.0, 1.5]])
    >>> relu_feed_forward(torch.ones(1), torch.ones(1), wide, narrow, 0.0)
    tensor([4.])
    """
    return _ReluFeedForward.apply(residual, x, wide, narrow, rate)


class _ReluFeedForward(Function):
    @staticmethod
    def forward(ctx, residual, x, wide, narrow, rate):  # type: ignore[no-untyped-def]
        ctx.scale = 1.0 / (1.0 - rate)
        rows = x.reshape(-1, x.shape[-1])
        between = _scaled_product(rows, wide.T, ctx.scale).relu_()
        if rate:
            between.view(-1).index_fill_(0, dropped(between.numel(), rate), 0.0)
        y, index = _product_dropout_add(residual, between, narrow, rate)
        ctx.save_for_backward(rows, wide, narrow, between, index)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, wide, narrow, between, index = ctx.saved_tensors
        needed = ctx.needs_input_grad
        live = _without(grad, index)
        slope, grad_narrow = _linear_grads((True, needed[3]), live, between, narrow, ctx.scale)
        torch.ops.aten.threshold_backward.grad_input(slope, between, 0, grad_input=slope)
        grad_x, grad_wide = _linear_grads(needed[1:3], slope, x, wide, ctx.scale)
        return grad, grad_x if grad_x is None else grad_x.view(*grad.shape[:-1], -1), grad_wide, grad_narrow, None


def _product_dropout_add(
    residual: Tensor, x: Tensor, weight: Tensor, rate: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``residual`` plus what dropout leaves of ``x @ weight.T + bias``, and what it dropped."""
    base, scale = residual.reshape(-1, residual.shape[-1]), 1.0 / (1.0 - rate)
    start = base if bias is None else torch.add(base, bias, alpha=scale)
    y = torch.addmm(start, x, weight.T, alpha=scale)
    index = dropped(y.numel(), rate) if rate else None
    if index is not None:
        y.view(-1).index_copy_(0, index, base.reshape(-1).index_select(0, index))
    return y.view(residual.shape), index


def _without(grad: Tensor, index: Tensor | None) -> Tensor:
    """Rows of the gradient of what dropout left."""
    live = grad.reshape(-1, grad.shape[-1])
    if index is not None:
        live = live.clone(memory_format=torch.contiguous_format)
        live.view(-1).index_fill_(0, index, 0.0)
    return live


def _linear_grads(needed, grad, x, weight, scale):  # type: ignore[no-untyped-def]
    """Gradients of ``scale * x @ weight.T`` for both, as far as they are needed."""
    return (
        _scaled_product(grad, weight, scale) if needed[0] else None,
        _scaled_product(grad.T, x, scale) if needed[1] else None,
    )


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale * a @ b``, the scaling done by the product."""
    out = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(out, a, b, beta=0.0, alpha=scale, out=out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`: what passes over memory remain are few, in backward above all.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
    tensor([[0.8485, 1.1314]])
    """
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
        return reference.rms_norm(x, weight, eps)
    return (_NativeNorm if native.serves(x.dtype) else _RmsNorm).apply(x, weight, eps)


class _NativeNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        x, weight = x.contiguous(), weight.contiguous()
        y, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1])
        native.call("norm_forward", x, weight, y, inverse, inverse.numel(), len(weight), eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        grad, grad_x, grad_weight = grad.contiguous(), torch.empty_like(x), torch.zeros_like(weight)
        native.call("norm_backward", x, weight, inverse, grad, grad_x, grad_weight, inverse.numel(), len(weight))
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        rows = x.reshape(-1, x.shape[-1])
        inverse = torch.linalg.vector_norm(rows, dim=-1).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, weight, inverse)
        return torch.mul(rows, inverse[:, None]).mul_(weight).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        rows = grad.reshape(x.shape)
        product = rows * x
        # Of y = x * inverse * weight: one term through x, one through inverse, which has a sum over the row in it.
        slope = torch.mv(product, weight).mul_(inverse).mul_(inverse).mul_(inverse).div_(-x.shape[1])
        grad_weight = torch.mv(product.T, inverse) if ctx.needs_input_grad[1] else None
        grad_x = torch.mul(rows, weight, out=product).mul_(inverse[:, None]).addcmul_(x, slope[:, None])
        return grad_x.view(grad.shape), grad_weight, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.linear_cross_entropy`: positions without a label are left out before the matrix product.

    >>> total, each = linear_cross_entropy(torch.zeros(2, 4), torch.ones(8, 4), torch.tensor([3, -100]))
    >>> round(total.item(), 4), [round(x, 4) for x in each.tolist()]
    (2.0794, [2.0794, 0.0])
    """
    index = (labels != IGNORE).nonzero()[:, 0]
    if len(index) == len(labels):
        return reference.linear_cross_entropy(hidden, weight, labels, smoothing, chunk, bias, turn_into_gradient)
    total, each = reference.linear_cross_entropy(
        hidden.index_select(0, index), weight, labels[index], smoothing, chunk, bias, turn_into_gradient
    )
    return total, each.new_zeros(labels.shape).index_copy_(0, index, each)


def turn_into_gradient(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """See `reference.turn_into_gradient`."""
    if not native.serves(logits.dtype):
        return reference.turn_into_gradient(logits, target, smoothing)
    if not ((target >= 0) & (target < logits.shape[1])).all():
        raise IndexError(f"a label is outside the vocabulary of {logits.shape[1]}")
    loss = logits.new_empty(len(target))
    native.call("cross_entropy", logits, target.contiguous(), loss, *logits.shape, smoothing)
    return loss
