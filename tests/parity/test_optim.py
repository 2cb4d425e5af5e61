"""Adafactor against transformers' and a float64 reference; AdamW and clipping against torch's own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor as ReferenceAdafactor

from t2t.config import Optim
from t2t.optim.adafactor import Adafactor
from t2t.optim.build import Optimizer, schedule

SHAPES = {"matrix.weight": (6, 5), "wide.weight": (3, 40), "vector": (7,), "cube.weight": (2, 3, 4), "scalar": ()}
SHAPES["zeros"] = (9,)  # starts at nothing, below the least scale of scale_parameter


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    made = {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(tensor.zero_() if name == "zeros" else tensor) for name, tensor in made.items()}


def gradients(steps: int) -> list[list[Tensor]]:
    """Sizes that vary by step and by element, so that clipping and every decay matter."""
    torch.manual_seed(2)
    return [[torch.randn(shape) * torch.randn(shape).exp() * 3.0**n for shape in SHAPES.values()] for n in range(steps)]


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 20) -> None:
    for grads in gradients(steps):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.to(p.dtype, copy=True)
        optimizer.step()


def assert_near(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Within a few roundings of the tensor's largest value, however small that is."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item(), msg=name)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    "setting",
    [
        {"relative_step": True, "scale_parameter": True},
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
        {"lr": 1e-3, "relative_step": False, "scale_parameter": True},
    ],
)
def test_adafactor_equals_transformers(setting: dict, decay: float) -> None:
    ours, theirs = list(parameters().values()), list(parameters().values())
    run(Adafactor(ours, weight_decay=decay, **setting), ours)
    run(ReferenceAdafactor(theirs, weight_decay=decay, warmup_init=False, **setting), theirs)
    for name, a, b, start in zip(SHAPES, ours, theirs, parameters().values(), strict=True):
        assert (b - start).abs().max() > 1e-6, name
        assert_near(a, b, name)


@pytest.mark.parametrize("relative", [False, True])
def test_adafactor_of_the_settings_equals_transformers(relative: bool) -> None:
    settings = Optim(name="adafactor", relative_step=relative, scale_parameter=relative)
    named, theirs = parameters(), list(parameters().values())
    ours = Optimizer(named, settings, lr=1e-3, schedule=lambda n: 1.0)
    for n, grads in enumerate(gradients(20)):
        for p, grad in zip(named.values(), grads, strict=True):
            p.grad = grad.clone()
        ours.step(n)
    rate = None if relative else 1e-3
    run(ReferenceAdafactor(theirs, lr=rate, relative_step=relative, scale_parameter=relative), theirs)
    for (name, p), t in zip(named.items(), theirs, strict=True):
        assert_near(p, t, name)


def test_adafactor_equals_the_paper_in_float64() -> None:
    """Algorithms 4 and 5 with section 8's step size and section 6's update clipping, written element by element."""
    torch.manual_seed(3)
    weight = torch.randn(3, 4, dtype=torch.float64)
    ours = nn.Parameter(weight.clone())
    optimizer = Adafactor([ours], relative_step=True, scale_parameter=True)
    row, column = [0.0] * 3, [0.0] * 4
    for step in range(1, 21):
        grad = torch.randn(3, 4, dtype=torch.float64) * step
        ours.grad = grad
        optimizer.step()
        beta = 1 - step**-0.8
        row = [beta * row[i] + (1 - beta) * sum(grad[i, j].item() ** 2 + 1e-30 for j in range(4)) for i in range(3)]
        column = [
            beta * c + (1 - beta) * sum(grad[i, j].item() ** 2 + 1e-30 for i in range(3)) for j, c in enumerate(column)
        ]
        update = [[grad[i, j].item() / math.sqrt(row[i] * column[j] / sum(row)) for j in range(4)] for i in range(3)]
        size = math.sqrt(sum(u * u for line in update for u in line) / 12)
        rate = max(1e-3, math.sqrt(weight.square().sum().item() / 12)) * min(1e-2, 1 / math.sqrt(step))
        weight = weight - rate / max(1.0, size) * torch.tensor(update, dtype=torch.float64)
    torch.testing.assert_close(ours.detach(), weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lamb_equals_the_paper_written_out(dtype: torch.dtype, decay: float) -> None:
    """Through the schedule, the decay groups and the masters, number by number in Python's floats."""
    named = parameters(dtype)
    settings = Optim(name="lamb", warmup=3, weight_decay=decay, beta2=0.99, eps=1e-6)
    factor = schedule(settings, 12)
    ours = Optimizer(named, settings, lr=0.01, schedule=factor)
    theirs = {name: p.detach().double().flatten().tolist() for name, p in parameters(dtype).items()}
    first = {name: [0.0] * len(w) for name, w in theirs.items()}
    second = {name: [0.0] * len(w) for name, w in theirs.items()}
    for n, grads in enumerate(gradients(12)):
        for (name, p), grad in zip(named.items(), grads, strict=True):
            p.grad = grad.to(dtype)
            w, g = theirs[name], p.grad.double().flatten().tolist()
            first[name] = m = [0.9 * a + 0.1 * x for a, x in zip(first[name], g, strict=True)]
            second[name] = v = [0.99 * b + 0.01 * x * x for b, x in zip(second[name], g, strict=True)]
            matrix = p.ndim > 1
            update = [
                (a / (1 - 0.9 ** (n + 1))) / (math.sqrt(b / (1 - 0.99 ** (n + 1))) + 1e-6)
                + (decay * x if matrix else 0)
                for a, b, x in zip(m, v, w, strict=True)
            ]
            own, step = (math.sqrt(sum(x * x for x in xs)) for xs in (w, update))
            trust = own / step if matrix and own and step else 1.0
            theirs[name] = [x - 0.01 * factor(n) * trust * u for x, u in zip(w, update, strict=True)]
        ours.accumulate()
        assert ours.step(n) == 0.01 * factor(n)
    assert {p.ndim for p in named.values()} >= {1, 2}
    for name, weight in ours.weights().items():
        expected = torch.tensor(theirs[name], dtype=torch.float64).view(weight.shape)
        torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(named[name], weight.to(dtype)), name


def test_a_tensor_of_zeros_takes_adams_step() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = Optimizer({"weight": weight}, Optim(name="lamb"), lr=0.1, schedule=lambda n: 1.0)
    weight.grad = torch.ones(2, 2)
    optimizer.step(0)
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), -0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_equals_torch(dtype: torch.dtype) -> None:
    """Through the schedule, the decay groups and the masters: bf16 parameters follow AdamW over fp32 weights."""
    named = parameters(dtype)
    settings = Optim(warmup=4, weight_decay=0.1, beta2=0.99, eps=1e-6)
    factor = schedule(settings, 20)
    ours = Optimizer(named, settings, lr=0.01, schedule=factor)
    theirs = [p.detach().float().clone() for p in parameters(dtype).values()]
    groups = [{"params": [t], "weight_decay": 0.1 if t.ndim > 1 else 0.0} for t in theirs]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-6, foreach=False)
    for n, grads in enumerate(gradients(20)):
        for p, t, grad in zip(named.values(), theirs, grads, strict=True):
            p.grad = grad.to(dtype)
            t.grad = p.grad.float().clone()
        for group in reference.param_groups:
            group["lr"] = 0.01 * factor(n)
        reference.step()
        ours.accumulate()
        assert ours.step(n) == 0.01 * factor(n)
    for (name, weight), t in zip(ours.weights().items(), theirs, strict=True):
        assert_near(weight, t, name)
        assert torch.equal(named[name], weight.to(dtype)), name


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clip_equals_torch(dtype: torch.dtype, max_norm: float) -> None:
    named = parameters(dtype)
    optimizer = Optimizer(named, Optim(name="adafactor"), lr=0.1, schedule=lambda n: 1.0)
    for p, grad in zip(named.values(), gradients(1)[0], strict=True):
        p.grad = grad.to(dtype)
    reference = [nn.Parameter(torch.zeros_like(p, dtype=torch.float32)) for p in named.values()]
    for t, p in zip(reference, named.values(), strict=True):
        t.grad = copy.deepcopy(p.grad).float()
    optimizer.accumulate()
    norm = optimizer.clip(max_norm)
    expected = nn.utils.clip_grad_norm_(reference, max_norm or math.inf)
    assert norm.ndim == 0 and norm > 1
    assert torch.equal(norm, expected)
    for master, t in zip(optimizer._masters.values(), reference, strict=True):
        assert torch.equal(master.grad, t.grad)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adamw_clips_while_it_updates(dtype: torch.dtype, max_norm: float) -> None:
    named = parameters(dtype)
    optimizer = Optimizer(named, Optim(schedule="constant"), lr=0.1, schedule=lambda n: 1.0)
    reference = [nn.Parameter(master.detach().clone()) for master in optimizer._masters.values()]
    settings = Optim()
    plain = torch.optim.AdamW(
        reference, lr=0.1, betas=(settings.beta1, settings.beta2), eps=settings.eps, weight_decay=0.0
    )
    assert optimizer._inner.defaults["fused"]
    for step, grads in enumerate(gradients(3)):
        for p, t, grad in zip(named.values(), reference, grads, strict=True):
            p.grad = grad.to(dtype)
            t.grad = p.grad.to(t.dtype)
        optimizer.accumulate()
        assert torch.equal(optimizer.clip(max_norm), nn.utils.clip_grad_norm_(reference, max_norm or math.inf))
        optimizer.step(step)
        plain.step()
    for master, t in zip(optimizer._masters.values(), reference, strict=True):
        torch.testing.assert_close(master.detach(), t.detach(), rtol=1e-5, atol=1e-6)
