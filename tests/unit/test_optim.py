"""Groups, rates, schedules, and an optimizer that sums in fp32 and comes back exactly."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from t2t.config import Optim
from t2t.errors import InputError
from t2t.optim.build import Optimizer, decay_groups, default_lr, schedule, state_bytes

SHAPES = {"shared.weight": (11, 6), "block.0.wi.weight": (8, 6), "norm.weight": (6,), "cube": (2, 3, 4), "scale": ()}
ADAMW = Optim(weight_decay=0.1, schedule="cosine", warmup=3)
ADAFACTOR = Optim(name="adafactor", weight_decay=0.1, schedule="inverse_sqrt", warmup=3)
LAMB = Optim(name="lamb", weight_decay=0.1, warmup=3)
RELATIVE = Optim(name="adafactor", relative_step=True, scale_parameter=True)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


def make(named: dict[str, nn.Parameter], settings: Optim) -> Optimizer:
    return Optimizer(named, settings, lr=0.05, schedule=schedule(settings, 20))


def train(optimizer: Optimizer, named: dict[str, nn.Parameter], first: int, last: int, skip: str = "") -> None:
    """Updates first..last-1 of two micro-batches each, gradients a function of the step; ``skip`` misses odd ones."""
    for n in range(first, last):
        for micro in range(2):
            torch.manual_seed(100 + 2 * n + micro)
            for name, p in named.items():
                grad = torch.randn(p.shape).to(p.dtype)
                if p.requires_grad and not (name == skip and n % 2):
                    p.grad = grad if p.grad is None else p.grad + grad
            optimizer.accumulate()
        optimizer.clip(1.0)
        optimizer.step(n)


def test_decay_leaves_out_norms_biases_and_relative_tables() -> None:
    decayed = {
        "shared.weight": (10, 4),
        "encoder.block.0.layer.0.SelfAttention.q.weight": (4, 4),
        "bert.embeddings.word_embeddings.weight": (10, 4),
        "bert.encoder.layer.0.output.dense.weight": (4, 8),
        "transformer.h.0.attn.c_attn.weight": (4, 12),
        "transformer.wpe.weight": (16, 4),
    }
    kept = {
        "encoder.block.0.layer.0.layer_norm.weight": (4,),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (32, 4),
        "decoder.final_layer_norm.weight": (4,),
        "bert.encoder.layer.0.output.LayerNorm.weight": (4,),
        "bert.encoder.layer.0.output.dense.bias": (4,),
        "transformer.h.0.ln_1.bias": (4,),
        "odd.bias": (1, 4),
        "temperature": (),
    }
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in (decayed | kept).items()}
    names = {id(p): name for name, p in named.items()}
    groups = decay_groups(named, 0.01)
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert [[names[id(p)] for p in group["params"]] for group in groups] == [list(decayed), list(kept)]


def test_decay_groups_are_never_empty() -> None:
    assert [group["weight_decay"] for group in decay_groups({"q.weight": torch.zeros(2, 2)}, 0.1)] == [0.1]


def test_default_rates() -> None:
    assert default_lr("adamw", "t5", from_scratch=False) == 3e-4
    assert default_lr("adafactor", "t5", from_scratch=False) == 1e-3
    assert default_lr("adamw", "bert", from_scratch=True) == 1e-4
    for optimizer in ("adamw", "adafactor", "lamb"):
        for scratch in (False, True):
            cautious = default_lr(optimizer, "unheard-of", scratch)
            assert 0 < cautious <= min(default_lr(optimizer, family, scratch) for family in ("t5", "gpt", "bert"))


@pytest.mark.parametrize(
    ("settings", "points"),
    [
        (Optim(schedule="constant"), {0: 1, 9: 1, 500: 1}),
        (Optim(schedule="constant", warmup=4), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1}),
        (Optim(schedule="linear"), {0: 1, 1: 0.9, 5: 0.5, 9: 0.1, 10: 0, 11: 0}),
        (Optim(schedule="linear", warmup=2), {0: 0.5, 1: 1, 2: 8 / 9, 9: 1 / 9, 10: 0}),
        (Optim(schedule="linear", warmup=0.5), {0: 0.2, 4: 1, 5: 5 / 6, 10: 0}),
        (Optim(schedule="cosine", warmup=1), {0: 1, 5: 0.5, 9: (1 + math.cos(0.9 * math.pi)) / 2, 10: 0, 12: 0}),
        (Optim(schedule="inverse_sqrt", warmup=4), {0: 0.25, 3: 1, 15: 0.5, 63: 0.25}),
        (Optim(schedule="inverse_sqrt"), {0: 1, 3: 0.5, 99: 0.1}),
        (Optim(schedule="linear", warmup=20), {0: 0.05, 9: 0.5, 19: 1, 20: 0}),
    ],
)
def test_schedule_at_points(settings: Optim, points: dict[int, float]) -> None:
    factor = schedule(settings, total_steps=10)
    assert {n: factor(n) for n in points} == pytest.approx(points, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [ADAMW, ADAFACTOR, RELATIVE, LAMB], ids=["adamw", "adafactor", "relative", "lamb"])
def test_restored_run_is_bitwise_equal(settings: Optim, dtype: torch.dtype) -> None:
    straight = parameters(dtype)
    whole = make(straight, settings)
    train(whole, straight, 0, 12, skip="cube")

    first = parameters(dtype)
    half = make(first, settings)
    train(half, first, 0, 5, skip="cube")
    weights, state = load(save(half.weights())), load(save(half.state()))

    second = {name: nn.Parameter(torch.full_like(p, 7.0)) for name, p in first.items()}
    resumed = make(second, settings)
    second["scale"].grad = torch.ones_like(second["scale"])  # what a run left behind must not be added to the next step
    resumed.load(weights, state, step=5)
    for name in SHAPES:
        assert torch.equal(second[name], first[name]), name
    train(resumed, second, 5, 12, skip="cube")

    for name in SHAPES:
        assert torch.equal(second[name], straight[name]), name
    for ours, theirs in ((resumed.weights(), whole.weights()), (resumed.state(), whole.state())):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].dtype == torch.float32 and torch.equal(ours[key], theirs[key]), key


def test_low_precision_gradients_are_summed_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = make({"weight": weight}, ADAMW)
    # One bf16 step at 256 is 2: small gradients after a large one would be lost in a bf16 sum.
    micro = [torch.tensor(values, dtype=torch.bfloat16) for values in ([256.0, 1, 2, 3], *[[0.5, 1e-3, 2, -3]] * 3)]
    for grad in micro:
        weight.grad = grad.clone()
        optimizer.accumulate()
        assert weight.grad is None
    total = optimizer._masters["weight"].grad
    assert total is not None and total.dtype == torch.float32
    assert torch.equal(total.double(), torch.stack(micro).double().sum(0))
    assert total[0] == 257.5


def test_fp32_gradients_are_left_to_autograd() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = make({"weight": weight}, ADAMW)
    for _ in range(3):
        weight.sum().backward()
        optimizer.accumulate()
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0, 3.0]
    assert optimizer.weights()["weight"].data_ptr() == weight.data_ptr()


def test_small_updates_of_bf16_parameters_add_up_in_the_master() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer({"weight": weight}, Optim(), lr=1e-3, schedule=lambda n: 1.0)
    for n in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.accumulate()
        optimizer.step(n)
    assert optimizer.weights()["weight"].item() == pytest.approx(0.99, abs=1e-5)
    assert weight.item() == pytest.approx(0.99, abs=2**-8)


@pytest.mark.parametrize("settings", [ADAMW, ADAFACTOR, RELATIVE, LAMB], ids=["adamw", "adafactor", "relative", "lamb"])
def test_frozen_parameters_have_no_state_and_never_move(settings: Optim) -> None:
    named = parameters()
    named["shared.weight"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = make(named, dataclasses.replace(settings, weight_decay=0.5))
    train(optimizer, named, 0, 3)
    assert [name for name, p in named.items() if torch.equal(p, before[name])] == ["shared.weight"]
    assert "shared.weight" not in optimizer.weights()
    assert not [key for key in optimizer.state() if key.endswith("/shared.weight")]


@pytest.mark.parametrize("settings", [ADAMW, ADAFACTOR, LAMB], ids=["adamw", "adafactor", "lamb"])
def test_a_parameter_without_gradient_is_left_alone(settings: Optim) -> None:
    named = parameters()
    optimizer = make(named, settings)
    train(optimizer, named, 0, 1, skip="cube")
    before = {key: tensor.clone() for key, tensor in (optimizer.weights() | optimizer.state()).items()}
    train(optimizer, named, 1, 2, skip="cube")
    after = optimizer.weights() | optimizer.state()
    unmoved = {key for key in before if torch.equal(before[key], after[key])}
    assert unmoved == {key for key in before if key.split("/")[-1] == "cube"}


def test_step_returns_the_rate_and_drops_gradients() -> None:
    for settings, rates in ((ADAMW, [0.05 / 3, 0.1 / 3]), (RELATIVE, [0.01, 0.01])):
        for dtype in (torch.float32, torch.bfloat16):
            named = parameters(dtype)
            optimizer = make(named, settings)
            for n, rate in enumerate(rates):
                for p in named.values():
                    p.grad = torch.ones_like(p)
                optimizer.accumulate()
                assert optimizer.step(n) == pytest.approx(rate)
                assert all(p.grad is None for p in named.values())
                assert optimizer.clip(1.0) == 0


def test_relative_rate_falls_after_ten_thousand_updates() -> None:
    named = parameters()
    optimizer = make(named, RELATIVE)
    optimizer.load(optimizer.weights(), optimizer.state(), step=39_999)
    assert optimizer.step(39_999) == pytest.approx(1 / 200)


def test_updates_come_in_order() -> None:
    optimizer = make(parameters(), ADAMW)
    with pytest.raises(AssertionError, match="update 0 is next, not 1"):
        optimizer.step(1)


def test_load_refuses_what_does_not_fit_and_changes_nothing() -> None:
    named = parameters()
    optimizer = make(named, ADAMW)
    train(optimizer, named, 0, 2)
    before = {name: p.detach().clone() for name, p in named.items()}
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state = {key: torch.zeros_like(tensor) for key, tensor in optimizer.state().items()}

    with pytest.raises(
        InputError, match=r"missing shared.weight, block.0.wi.weight, norm.weight and 2 more; unexpected x"
    ):
        optimizer.load({"x": torch.zeros(1)}, state, step=2)
    with pytest.raises(InputError, match=r"of another shape norm.weight \(5,\) instead of \(6,\)"):
        optimizer.load(weights | {"norm.weight": torch.zeros(5)}, state, step=2)
    with pytest.raises(
        InputError, match=r"optimizer state .*: missing exp_avg/shared.weight, .*unexpected row/shared.weight"
    ):
        optimizer.load(weights, make(parameters(), ADAFACTOR).state(), step=2)
    assert optimizer.updates == 2
    assert all(torch.equal(p, before[name]) for name, p in named.items())


def test_nothing_to_train_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"model\.freeze"):
        make({"weight": nn.Parameter(torch.zeros(2), requires_grad=False)}, ADAMW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [ADAMW, ADAFACTOR, LAMB], ids=["adamw", "adafactor", "lamb"])
def test_state_bytes_counts_what_is_held(settings: Optim, dtype: torch.dtype) -> None:
    named = parameters(dtype)
    named["norm.weight"].requires_grad_(False)
    optimizer = make(named, settings)
    held = list(optimizer.state().values())
    for p in named.values():
        if p.requires_grad:
            held.append(torch.ones_like(p))  # the gradient
            held += [torch.ones_like(p, dtype=torch.float32)] * 2 * (dtype == torch.bfloat16)  # master and its gradient
    assert state_bytes(named, settings) == sum(t.numel() * t.element_size() for t in held)
    per_number = state_bytes({"w": nn.Parameter(torch.zeros(64, 64, dtype=dtype))}, settings) / 64**2
    assert (
        per_number
        == {"adamw": 8, "adafactor": 0.125, "lamb": 8}[settings.name] + {torch.float32: 4, torch.bfloat16: 10}[dtype]
    )
