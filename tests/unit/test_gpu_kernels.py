"""The kernels written in Triton against the reference: on a GPU if there is one, else by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from t2t.kernels import reference
from t2t.kernels.reference import Sight

pytest.importorskip("triton", reason="Triton is for Linux")
BUCKETS, HEADS = 8, 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The module; conftest has its kernels interpreted where there is no GPU."""
    from t2t.kernels.gpu import spans

    return spans


def segments(rows: Sequence[Sequence[int]], slots: int) -> Tensor:
    """Rows of segments of these lengths; a negative length is so much padding."""
    found = torch.zeros(len(rows), slots, dtype=torch.long)
    for row, lengths in zip(found, rows, strict=True):
        at = number = 0
        for length in lengths:
            if length > 0:
                number += 1
                row[at : at + length] = number
            at += abs(length)
    return found.to(DEVICE)


ROWS = [[40, 1, 20], [5, 64]]
CASES = {
    "self": {"queries": ROWS},
    "causal": {"queries": ROWS, "causal": True},
    "far beyond the last bucket": {"queries": [[80, 1, 20], [5, 102]], "slots": 107},
    "causal, far": {"queries": [[80, 1, 20], [5, 102]], "slots": 107, "causal": True},
    "no bias, scaled": {"queries": ROWS, "biased": False, "scale": 0.3},
    "window": {"queries": ROWS, "causal": True, "biased": False, "window": 7},
    "cross": {"queries": [[4, 1, 20], [5, 64]], "keys": [[30, 7, 3], [50, 9]], "biased": False},
    "more rows, empty ones": {"queries": [[], [3], [70], []], "causal": True},
    "padding first and between": {"queries": [[-9, 20], [5, -3, 40]], "causal": True},
    "one slot each": {"queries": [[1] * 33], "slots": 33},
    "many channels": {"queries": ROWS, "channels": 40},
}


def run(module: ModuleType, case: dict, packed: list[Tensor], table: Tensor | None, upstream: Tensor) -> list[Tensor]:
    """The output in slots that hold a token, and every gradient."""
    queries, keys = sides(case)
    causal, window = case.get("causal", False), case.get("window", 0)
    bias = module.attention_bias(Sight(queries, keys, causal, table, 16, packed[0].dtype, window))
    live = (queries > 0)[:, :, None, None]
    out = torch.where(live, module.attention(packed, bias, 0.0, case.get("scale", 1.0)), 0.0)
    trained = [*packed, *([] if table is None else [table])]
    return [out.detach(), *torch.autograd.grad((out * upstream).sum(), trained)]


def sides(case: dict) -> tuple[Tensor, Tensor]:
    slots = case.get("slots", 70)
    queries = segments(case["queries"], slots)
    return queries, segments(case["keys"], 64) if "keys" in case else queries


def made(case: dict) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Random queries, keys and values, a table, and a gradient of the output."""
    torch.manual_seed(0)
    queries, keys = sides(case)
    channels = case.get("channels", 16)
    shapes = [(1, queries), (2, keys)] if "keys" in case else [(3, queries)]
    packed = [torch.randn(*x.shape, n, HEADS, channels, device=DEVICE) for n, x in shapes]
    table = torch.randn(BUCKETS, HEADS, device=DEVICE) if case.get("biased", True) else None
    return packed, table, torch.randn(*queries.shape, HEADS, channels, device=DEVICE)


def learned(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_the_reference(gpu: ModuleType, case: dict) -> None:
    packed, table, upstream = made(case)
    found, expected = (
        run(module, case, [learned(x) for x in packed], None if table is None else learned(table), upstream)
        for module in (gpu, reference)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["self", "causal, far", "cross", "window", "many channels"])
def test_attention_of_low_precision_is_the_reference_of_fp32(gpu: ModuleType, name: str) -> None:
    """To what half the bits can tell: larger tiles, weights and slopes rounded before they are multiplied."""
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bf16
    case, (packed, table, upstream) = CASES[name], made(CASES[name])
    low = [x.to(half) for x in packed], None if table is None else table.to(half)
    found, expected = (
        run(module, case, [learned(x, t) for x in low[0]], None if low[1] is None else learned(low[1], t), upstream)
        for module, t in ((gpu, half), (reference, torch.float32))
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs).norm() < 0.01 * theirs.norm()


def test_a_query_without_keys_gives_nothing(gpu: ModuleType) -> None:
    queries, keys = segments([[3, 4]], 8), segments([[5]], 8)
    packed = [torch.randn(1, 8, n, HEADS, 16, device=DEVICE, requires_grad=True) for n in (1, 2)]
    out = gpu.attention(packed, gpu.attention_bias(Sight(queries, keys)), 0.0)
    assert not out[:, 3:].any()
    assert out[:, :3].all()
    for grad in torch.autograd.grad(out.sum(), packed):
        assert grad.isfinite().all()


def test_dropout_is_the_same_on_the_way_back(gpu: ModuleType) -> None:
    """What is dropped is read off values that are unit vectors; with that mask the reference gives the gradients."""
    torch.manual_seed(0)
    rate, slots = 0.25, 70
    places = segments(ROWS, slots)
    table = torch.randn(BUCKETS, HEADS, device=DEVICE, requires_grad=True)
    spans = gpu.attention_bias(Sight(places, places, False, table, 16))
    units = torch.randn(2, slots, 3, HEADS, 128, device=DEVICE)
    units[:, :, 2] = torch.eye(slots, 128, device=DEVICE)[None, :, None]
    seed = torch.tensor([5], dtype=torch.int32, device=DEVICE)

    def attend(packed: Tensor, share: float) -> Tensor:
        return gpu._attention([packed], *spans, seed if share else None, share, 1.0)[0]

    whole, dropped = attend(units, 0.0)[..., :slots].detach(), attend(units, rate)[..., :slots].detach()
    kept = (dropped != 0).float()
    torch.testing.assert_close(dropped, whole * kept / (1 - rate), rtol=1e-5, atol=1e-6)
    share = 1 - kept[whole > 0].mean().item()
    assert abs(share - rate) < 4 * (rate * (1 - rate) / (whole > 0).sum().item()) ** 0.5

    packed = torch.randn(2, slots, 3, HEADS, 16, device=DEVICE, requires_grad=True)
    upstream = torch.randn(2, slots, HEADS, 16, device=DEVICE) * (places > 0)[:, :, None, None]
    bias = reference.attention_bias(Sight(places, places, False, table, 16))
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    weights = reference.attention_weights(q, k, bias) * kept.transpose(1, 2) / (1 - rate)
    expected = torch.autograd.grad(((weights @ v).transpose(1, 2) * upstream).sum(), [packed, table])
    found = torch.autograd.grad((attend(packed, rate) * upstream).sum(), [packed, table])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_dropped_does_not_repeat(gpu: ModuleType) -> None:
    """Rows, heads, neighbouring queries and keys drop different weights: as often the same as by chance."""
    slots, rate = 64, 0.5
    places = segments([[slots]] * 2, slots)
    spans = gpu.attention_bias(Sight(places, places))
    units = torch.zeros(2, slots, 3, HEADS, slots, device=DEVICE)
    units[:, :, 2] = torch.eye(slots, device=DEVICE)[None, :, None]
    masks = [
        gpu._attention([units], *spans, torch.tensor([seed], dtype=torch.int32, device=DEVICE), rate, 1.0)[0] != 0
        for seed in (1, 2)
    ]
    mask = masks[0]
    pairs = {
        "seeds": (masks[0], masks[1]),
        "rows": (mask[0], mask[1]),
        "heads": (mask[:, :, 0], mask[:, :, 1]),
        "queries": (mask[:, 1:], mask[:, :-1]),
        "keys": (mask[..., 1:], mask[..., :-1]),
        "two by two": (mask[:, 1:, :, 1:] ^ mask[:, :-1, :, 1:], mask[:, 1:, :, :-1] ^ mask[:, :-1, :, :-1]),
    }
    for name, (a, b) in pairs.items():
        together = (a == b).float().mean().item()
        assert abs(together - 0.5) < 5 * 0.5 / a.numel() ** 0.5, name
