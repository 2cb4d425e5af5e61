"""The compiled kernels against exact results in fp64, of the reference where it has them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from t2t.kernels import cpu, reference
from t2t.kernels.cpu import blocks, by_segment, native
from t2t.kernels.reference import Sight

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
HEADS = 3
EXACT = 2e-6  # of a gradient's norm; what fp32 leaves

# Lengths of each row's segments, queries and keys; None: no such segment on that side. Tiles of a product are 4 rows by
# 16 or 64 columns: one slot, fewer than a tile, exactly one or a few, one more.
ROWS: dict[str, list[list[tuple[int | None, int | None]]]] = {
    "short": [[(1, 1), (3, 3), (4, 4)], [(5, 5), (1, 1)]],
    "tiles": [[(16, 16), (64, 64), (17, 17)], [(65, 65)], [(128, 128)]],
    "long": [[(150, 150), (2, 2)], [(201, 201)]],
    "cross": [[(1, 9), (7, 1), (None, 4), (20, 33), (3, None)], [(70, 5), (2, 130)], [(None, 3), (6, None)]],
}


def numbers(rows: list[list[tuple[int | None, int | None]]], side: int) -> Tensor:
    """Segment ids [R, S] of queries or keys, with padding after each row's last."""
    lines = [torch.cat([torch.full((pair[side] or 0,), i) for i, pair in enumerate(row, 1)]).long() for row in rows]
    return torch.nn.utils.rnn.pad_sequence([*lines, torch.zeros(max(map(len, lines)) + 2).long()], True)[:-1]


class Case:
    """Inputs of an attention and what upstream sends back."""

    def __init__(self, name: str, channels: int, causal: bool, window: int, scale: float, with_table: bool) -> None:
        torch.manual_seed(0)
        self.queries, self.keys = (numbers(ROWS[name], side) for side in (0, 1))
        self.settings = causal, window, scale
        shapes = [(self.queries, 1), (self.keys, 2)] if name == "cross" else [(self.queries, 3)]
        self.packed = [torch.randn(*ids.shape, parts, HEADS, channels) for ids, parts in shapes]
        self.table = torch.randn(8, HEADS) if with_table else None
        self.mask = reference.segment_mask(self.queries, self.keys, causal, window)
        # Slots that see nothing are padding, and nobody's business.
        self.seen = self.mask.any(-1)[:, 0, :, None, None]
        self.upstream = torch.randn(*self.queries.shape, HEADS, channels) * self.seen

    def results(self, out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return [out.detach() * self.seen, *torch.autograd.grad(out, inputs, self.upstream.to(out.dtype))]

    def found(self, way: object, rate: float = 0.0, seed: int = 3) -> list[Tensor]:
        """Output and gradients of an implementation, in fp32."""
        causal, window, scale = self.settings
        packed = [x.clone().requires_grad_() for x in self.packed]
        table = None if self.table is None else self.table.clone().requires_grad_()
        with cpu.random_from(seed):
            bias = way.attention_bias(Sight(self.queries, self.keys, causal, table, 10, torch.float32, window))  # type: ignore[attr-defined]
            out = way.attention(packed, bias, rate, scale)  # type: ignore[attr-defined]
        return self.results(out, packed if table is None else [*packed, table])

    def exact(self, left: Tensor | None = None) -> list[Tensor]:
        """The same in fp64 by the reference; ``left`` [R, H, Q, K] multiplies the weights."""
        causal, window, scale = self.settings
        packed = [x.double().requires_grad_() for x in self.packed]
        table = None if self.table is None else self.table.double().requires_grad_()
        bias = reference.attention_bias(Sight(self.queries, self.keys, causal, table, 10, torch.float64, window))
        q, k, v = (x.transpose(1, 2) for several in packed for x in several.unbind(2))
        weights = reference.attention_weights(q, k, bias, scale)
        out = ((weights if left is None else weights * left) @ v).transpose(1, 2)
        return self.results(out, packed if table is None else [*packed, table])

    def left(self, rate: float, seed: int = 3) -> Tensor:
        """What dropout multiplies the weights by, from the places that the seed draws."""
        segments = by_segment.Segments.of(self.queries.numpy(), self.keys.numpy())
        with cpu.random_from(seed):
            drop = segments.drop(HEADS, rate)
        assert drop is not None
        left = torch.full((*self.mask.shape[:1], HEADS, *self.mask.shape[2:]), 1 / (1 - rate), dtype=torch.float64)
        start = 0
        for q, queries, k, keys in segments.places.tolist():
            own = torch.ones(HEADS * queries * keys, dtype=torch.float64)
            own[drop[(drop >= start) & (drop < start + len(own))] - start] = 0
            row, q, k = q // self.queries.shape[1], q % self.queries.shape[1], k % self.keys.shape[1]
            left[row, :, q : q + queries, k : k + keys] *= own.view(HEADS, queries, keys)
            start += len(own)
        assert start == 0 or int(drop[-1]) < start
        share = len(drop) / start
        assert abs(share - rate) < 5 * math.sqrt(rate * (1 - rate) / start)
        return left


def close(ours: list[Tensor], exact: list[Tensor]) -> None:
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a - b).norm() <= EXACT * b.norm()
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


CASES = [
    *((name, *kind, table) for name in ("short", "tiles", "long") for kind in ((False, 0), (True, 0), (True, 7))
      for table in (True, False)),
    ("cross", False, 0, False),
]  # fmt: skip


@pytest.mark.parametrize("channels", [64, 4, 20, 80])
@pytest.mark.parametrize(("name", "causal", "window", "with_table"), CASES)
def test_attention_is_the_reference(name: str, causal: bool, window: int, with_table: bool, channels: int) -> None:
    case = Case(name, channels, causal, window, 0.3 if causal else channels**-0.5, with_table)
    close(case.found(cpu), case.exact())


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(("name", "causal", "window", "with_table"), CASES)
def test_dropout_takes_the_drawn_weights_forward_and_backward(
    name: str, causal: bool, window: int, with_table: bool, rate: float
) -> None:
    case = Case(name, 20, causal, window, 0.3, with_table)
    ours = case.found(cpu, rate)
    close(ours, case.exact(case.left(rate)))
    # Torch's way draws the same.
    for a, b in zip(ours, case.found(blocks, rate), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert (case.found(cpu, rate, seed=4)[0] - ours[0]).norm() > 0.1 * ours[0].norm()


def test_values_of_ones_show_the_weights_that_are_left() -> None:
    case = Case("tiles", 128, False, 0, 0.1, True)
    case.packed[0][:, :, 2] = 0
    for row, ids in enumerate(case.queries):
        for number in ids.unique():
            slots = (ids == number).nonzero()[:, 0]
            case.packed[0][row, slots, 2] = torch.eye(len(slots), 128)[:, None]
    shown, whole = case.found(cpu, 0.3)[0], case.found(cpu)[0]
    kept = shown[whole > 0] != 0
    assert abs(kept.double().mean() - 0.7) < 5 * math.sqrt(0.21 / len(kept))
    torch.testing.assert_close(shown[shown != 0], (whole / 0.7)[shown != 0])


def test_scores_far_apart_are_finite_and_right() -> None:
    case = Case("tiles", 64, True, 0, 40.0, True)
    for a, b in zip(case.found(cpu), case.exact(), strict=True):
        assert a.isfinite().all()
        assert (a - b).norm() < 1e-3 * b.norm()  # scores of thousands have few digits left behind the point


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_is_not_finite_shows_in_its_segment_alone(bad: float, part: int) -> None:
    case = Case("short", 20, False, 0, 1.0, True)
    case.packed[0][0, 2, part, 1, 3] = bad
    out, *gradients = case.found(cpu)
    assert not out[0, 1:4, 1].isfinite().all()
    assert out[0, 1:4, [0, 2]].isfinite().all() and out[0, 4:].isfinite().all() and out[1].isfinite().all()
    assert not gradients[0][0, 1:4].isfinite().all()


def test_a_gradient_that_is_not_finite_is_passed_on() -> None:
    case = Case("short", 20, True, 0, 1.0, True)
    case.upstream[0, 3, 1, 2] = math.nan
    _, gradient, table = case.found(cpu, 0.1)
    assert gradient[0, 1:4, :, 1].isnan().any() and table.isnan().any()
    assert gradient[0, 4:].isfinite().all() and gradient[1].isfinite().all()


def test_threads_compute_at_once() -> None:
    cases = [Case("tiles", 64, True, 0, 1.0, True), Case("cross", 20, False, 0, 0.3, False)]
    alone = [case.found(cpu, 0.1, seed) for seed in range(8) for case in cases]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda job: job[1].found(cpu, 0.1, job[0]), [(s, c) for s in range(8) for c in cases]))
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 512])
def test_norm_is_the_reference(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, width) * torch.tensor([1e-4, 1e-2, 1.0, 1e2, 1e4])[:, None]
    weight, upstream = torch.randn(width), torch.randn(2, 5, width)
    results = []
    for function, dtype in ((cpu.rms_norm, torch.float32), (reference.rms_norm, torch.float64)):
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = function(*inputs, 1e-6)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, upstream.to(dtype))])
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norm_and_loss_do_not_hide_what_is_not_finite(bad: float) -> None:
    for width in (5, 40):
        for place in (0, width - 1):
            x = torch.ones(3, width)
            x[1, place] = bad
            y = cpu.rms_norm(x, torch.ones(width), 1e-6)
            assert not y[1].isfinite().all() and y[[0, 2]].isfinite().all()
            hidden, head = torch.ones(3, 1), torch.ones(width, 1)
            head[place] = bad
            total, each = cpu.linear_cross_entropy(hidden, head, torch.tensor([1, -100, 2]))
            assert not total.isfinite() and not each[0].isfinite() and each[1] == 0


@pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_the_loss_is_torchs(width: int, smoothing: float, size: float) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(7, width) * size, torch.randint(width, (7,))
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, label_smoothing=smoothing, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    found = logits.clone()
    loss = cpu.linear.turn_into_gradient(found, target, smoothing)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=1e-6 * size)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-5, atol=1e-6)


def test_a_small_loss_beside_large_logits_is_exact() -> None:
    logits = torch.tensor([[300.0, 294.0, 292.0]])
    expected = F.cross_entropy(logits.double(), torch.tensor([0]))
    loss = cpu.linear.turn_into_gradient(logits.clone(), torch.tensor([0]), 0.0)
    assert 0 < expected < 1e-2
    torch.testing.assert_close(loss.double()[0], expected, rtol=1e-3, atol=0.0)
