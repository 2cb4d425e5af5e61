"""The reference kernels against torch's and transformers' own, and the CPU's against them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from t2t import kernels
from t2t.kernels import cpu, reference
from t2t.kernels.cpu import native
from t2t.kernels.cpu.dropout import dropped
from t2t.kernels.reference import Sight


@pytest.fixture(autouse=True, params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test twice: with the compiled kernels, where there is a compiler, and with torch's."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)


def problem(tokens: int = 10, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels (two of them ignored) of a small loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 6, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(11, 6, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(11, (tokens,), generator=generator)
    labels[[0, 4]] = kernels.IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 1024])
def test_linear_cross_entropy_matches_torch(smoothing: float, chunk: int) -> None:
    hidden, weight, labels = problem()
    total, each = kernels.linear_cross_entropy(hidden, weight, labels, smoothing, chunk)
    expected = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(total, expected.sum())
    assert not each.requires_grad
    # An upstream scale, as the division by the count of tokens gives it.
    ours = torch.autograd.grad(total / 7, (hidden, weight))
    theirs = torch.autograd.grad(expected.sum() / 7, (hidden, weight))
    torch.testing.assert_close(ours, theirs)
    assert (ours[0][labels == kernels.IGNORE] == 0).all()


def test_linear_cross_entropy_is_exact_in_float64() -> None:
    hidden, weight, labels = problem(dtype=torch.float64)
    total, _ = kernels.linear_cross_entropy(hidden, weight, labels, 0.2, chunk=4)
    expected = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=0.2, reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    ours, theirs = (torch.autograd.grad(loss, (hidden, weight)) for loss in (total, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_linear_cross_entropy_picks_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reference.LOGITS, "cpu", 11 * 130)
    hidden, weight, labels = problem(tokens=300)
    total, _ = kernels.linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(total, F.cross_entropy(hidden @ weight.T, labels, reduction="sum"))


def test_linear_cross_entropy_of_ignored_labels_is_zero() -> None:
    hidden, weight, labels = problem()
    total, each = kernels.linear_cross_entropy(hidden, weight, torch.full_like(labels, kernels.IGNORE), 0.1, 4)
    gradients = torch.autograd.grad(total, (hidden, weight))
    assert total == 0 and not each.any()
    assert not gradients[0].any() and not gradients[1].any()


def test_linear_cross_entropy_refuses_labels_outside_the_vocabulary() -> None:
    hidden, weight, labels = problem()
    for wrong in (-1, 11):
        labels[1] = wrong
        with pytest.raises((IndexError, RuntimeError)):
            kernels.linear_cross_entropy(hidden, weight, labels)


def test_linear_cross_entropy_in_bfloat16_is_close() -> None:
    hidden, weight, labels = problem(dtype=torch.bfloat16)
    total, each = kernels.linear_cross_entropy(hidden, weight, labels, 0.1, 4)
    gradients = torch.autograd.grad(total, (hidden, weight))
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, labels, label_smoothing=0.1, reduction="sum")
    assert total.dtype == each.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-2, atol=0)
    for ours, theirs in zip(gradients, torch.autograd.grad(exact, (exact_hidden, exact_weight)), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_linear_cross_entropy_with_one_side_frozen(frozen: int) -> None:
    hidden, weight, labels = problem()
    inputs = [hidden, weight]
    both = torch.autograd.grad(kernels.linear_cross_entropy(hidden, weight, labels)[0], inputs)
    inputs[frozen] = inputs[frozen].detach()
    total, _ = kernels.linear_cross_entropy(inputs[0], inputs[1], labels)
    total.backward()
    assert inputs[frozen].grad is None
    torch.testing.assert_close(inputs[1 - frozen].grad, both[1 - frozen])


def test_linear_cross_entropy_without_gradients() -> None:
    hidden, weight, labels = problem()
    with torch.no_grad():
        total, _ = kernels.linear_cross_entropy(hidden, weight, labels)
    assert not total.requires_grad
    torch.testing.assert_close(total, F.cross_entropy(hidden @ weight.T, labels, reduction="sum").detach())


@pytest.mark.parametrize("implementation", [reference, cpu])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_linear_cross_entropy_with_a_bias_matches_torch(implementation: Any, smoothing: float) -> None:
    hidden, weight, labels = problem(dtype=torch.float64)
    bias = torch.randn(len(weight), dtype=torch.float64, requires_grad=True)
    ours, _ = implementation.linear_cross_entropy(hidden, weight, labels, smoothing, 4, bias)
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), labels, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(ours, theirs)
    inputs = (hidden, weight, bias)
    for a, b in zip(torch.autograd.grad(ours * 3, inputs), torch.autograd.grad(theirs * 3, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("shape", [(1,), (3, 7, 5), (64, 1003)])
def test_dropout_drops_its_share_and_scales_the_rest(dtype: torch.dtype, rate: float, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    torch.manual_seed(3)
    dropped = kernels.dropout(x, rate)
    assert dropped.dtype == dtype and dropped.shape == x.shape
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / (1 - rate)))
    spread = math.sqrt(rate * (1 - rate) / x.numel())
    assert abs(kept.float().mean() - (1 - rate)) < 5 * spread
    # The gradient goes where the values went, with the same scale.
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient, dropped)


def test_dropout_replays_from_the_seed_and_moves_on() -> None:
    x = torch.ones(1001)
    torch.manual_seed(5)
    first, second = kernels.dropout(x, 0.5), kernels.dropout(x, 0.5)
    torch.manual_seed(5)
    assert torch.equal(kernels.dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_dropout_entries_are_independent() -> None:
    """What is dropped is drawn by its gaps: neighbours, and any place, must not show it."""
    torch.manual_seed(6)
    kept = (kernels.dropout(torch.ones(400_000), 0.5) != 0).double()
    for lag in range(1, 9):
        assert abs((kept[lag:] - 0.5).mul(kept[:-lag] - 0.5).mean() * 4) < 5 / math.sqrt(len(kept))
    for place in range(4):
        assert abs(kept[place::4].mean() - 0.5) < 5 * 0.5 / math.sqrt(len(kept) / 4)


def test_dropout_of_nothing_and_at_rate_zero() -> None:
    assert kernels.dropout(torch.ones(0, 4), 0.1).shape == (0, 4)
    x = torch.ones(3)
    assert kernels.dropout(x, 0.0) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_matches_transformers(dtype: torch.dtype) -> None:
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    torch.manual_seed(0)
    peer = T5LayerNorm(33, eps=1e-6).to(dtype)
    torch.nn.init.normal_(peer.weight)
    # From tiny to large: the small ones show eps, the large ones overflow a square that is not taken in fp32.
    x = (torch.randn(5, 33) * torch.tensor([1e-4, 1e-2, 1.0, 1e2, 1e4])[:, None]).to(dtype).requires_grad_()
    upstream = torch.randn(5, 33).to(dtype)
    ours, theirs = kernels.rms_norm(x, peer.weight, 1e-6), peer(x)
    assert ours.dtype == dtype
    # transformers keeps its statistics in fp32 even for fp64; in bf16 both round in the same places.
    value, slope = (0.0, 1e-2) if dtype == torch.bfloat16 else (1e-6, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=value, atol=value)
    for a, b in zip(
        torch.autograd.grad(ours, (x, peer.weight), upstream),
        torch.autograd.grad(theirs, (x, peer.weight), upstream),
        strict=True,
    ):
        assert (a - b).norm() <= slope * b.norm()


def test_rms_norm_is_exact_in_float64() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    expected = x / torch.tensor(12.5, dtype=torch.float64).sqrt()
    torch.testing.assert_close(
        kernels.rms_norm(x, torch.ones(2, dtype=torch.float64), 0.0), expected, rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (300, 300), (3, 700), (700, 3)])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 10), (64, 512)])
def test_relative_buckets_match_transformers(
    bidirectional: bool, queries: int, keys: int, buckets: int, max_distance: int
) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    expected = T5Attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    ours = reference.relative_buckets(queries, keys, buckets, max_distance, bidirectional, torch.device("cpu"))
    assert torch.equal(ours, expected)


def test_relative_bias_made_in_generation_serves_training() -> None:
    table = torch.randn(32, 2, requires_grad=True)
    reference.relative_buckets.cache_clear()
    with torch.inference_mode():
        seen = kernels.relative_bias(table, 5, 9, 128, False)
    bias = kernels.relative_bias(table, 5, 9, 128, False)
    bias.sum().backward()
    assert torch.equal(bias, seen)
    assert table.grad is not None and table.grad.sum() == bias.numel()
    assert bias.shape == (1, 2, 5, 9)


@pytest.mark.parametrize("causal", [True, False])
def test_segment_mask_says_who_sees_whom(causal: bool) -> None:
    queries, keys = torch.tensor([[1, 1, 2, 3, 0], [0, 0, 0, 0, 0]]), torch.tensor([[1, 1, 2, 2, 0], [1, 1, 0, 0, 0]])
    mask = reference.segment_mask(queries, keys, causal)
    assert mask.shape == (2, 1, 5, 5)
    for row in range(2):
        for q in range(5):
            for k in range(5):
                same = queries[row, q] == keys[row, k] != 0
                assert mask[row, 0, q, k] == (same and (k <= q or not causal))


def test_segment_mask_of_other_lengths() -> None:
    mask = reference.segment_mask(torch.tensor([[1, 2]]), torch.tensor([[1, 1, 2, 0]]), causal=False)
    assert mask[0, 0].tolist() == [[True, True, False, False], [False, False, True, False]]


def packed_rows(causal: bool, self_attention: bool) -> tuple[Tensor, Tensor]:
    """Segments of queries and keys: long and short, alone in a row or not, with padding, and one that has no keys."""
    queries = torch.zeros(3, 70, dtype=torch.long)
    keys = torch.zeros(3, 90, dtype=torch.long)
    lengths = {(0, 1): (40, 11), (0, 2): (1, 70), (0, 3): (22, 5), (1, 1): (70, 90), (2, 1): (9, 9), (2, 2): (10, 9)}
    for segments, side in ((queries, 0), (keys, 1)):
        filled = [0, 0, 0]
        for (row, number), both in lengths.items():
            segments[row, filled[row] : filled[row] + both[side]] = number
            filled[row] += both[side]
    queries[2, 30:33] = 7
    return queries, queries if self_attention else keys


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("self_attention", "causal", "with_table"),
    [(True, True, True), (True, False, True), (True, True, False), (True, False, False), (False, False, False)],
)
@pytest.mark.parametrize(("scale", "window"), [(1.0, 0), (0.3, 7)])
@pytest.mark.parametrize("implementation", [reference, cpu])
def test_attention_matches_torch(
    implementation: Any,
    self_attention: bool,
    causal: bool,
    with_table: bool,
    dtype: torch.dtype,
    scale: float,
    window: int,
) -> None:
    torch.manual_seed(0)
    heads, channels = 3, 4
    query_segments, key_segments = packed_rows(causal, self_attention)
    shapes = [(query_segments, 3)] if self_attention else [(query_segments, 1), (key_segments, 2)]
    packed = [
        torch.randn(*segments.shape, parts, heads, channels).to(dtype).requires_grad_() for segments, parts in shapes
    ]
    table = torch.randn(8, heads).to(dtype).requires_grad_()
    inputs = [*packed, table] if with_table else packed
    sight = Sight(query_segments, key_segments, causal, table if with_table else None, 10, dtype, window)
    bias = implementation.attention_bias(sight)
    ours = implementation.attention(packed, bias, 0.0, scale)
    assert ours.dtype == dtype and ours.shape == (*query_segments.shape, heads, channels)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for several in exact[: len(packed)] for x in several.unbind(2))
    mask = reference.segment_mask(query_segments, key_segments, causal)
    if window and causal:
        distance = torch.arange(mask.shape[2])[:, None] - torch.arange(mask.shape[3])
        mask = mask & (distance < window)
    hidden = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    if with_table:
        hidden = hidden + reference.relative_bias(exact[-1], *mask.shape[2:], 10, not causal)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=hidden, scale=scale).transpose(1, 2)
    seen = mask.any(-1)[:, 0]  # what sees nothing is padding, and nobody's business but that it is finite
    assert 0 < seen.sum() < seen.numel()
    assert ours.isfinite().all()

    off = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert (ours - theirs)[seen].norm() < off * theirs[seen].norm()
    upstream = torch.randn(theirs.shape).to(dtype) * seen[..., None, None]
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(theirs.where(seen[..., None, None], 0), exact, upstream.double()),
        strict=True,
    ):
        assert (a - b).norm() < off * b.norm()


def test_segments_share_a_block_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same result from blocks of one segment each as from one or a few large ones, also across rows."""
    torch.manual_seed(0)
    lengths = torch.tensor([9, 8, 9, 3, 8, 8, 1, 9, 7, 8, 2, 9])
    segments = torch.repeat_interleave(torch.arange(1, 7).repeat(2), lengths)
    segments = torch.stack([segments[:45], torch.cat([segments[45:], torch.zeros(9, dtype=torch.long)])])
    packed = [torch.randn(*segments.shape, 3, 2, 4, dtype=torch.float64, requires_grad=True)]
    table = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    results, counts = [], []
    for scores in (1, 20**2, 30**2, 10**6):
        monkeypatch.setattr(cpu.blocks, "SCORES", scores)
        bias = cpu.attention_bias(Sight(segments, segments, True, table, 10, torch.float64))
        out = cpu.attention(packed, bias, 0.0)
        counts.append(len(bias.biases))
        results.append([out, *torch.autograd.grad(out.square().sum(), [*packed, table])])
    assert counts[0] == 12 > counts[1] > counts[2] > counts[3] == 1
    for result in results[1:]:
        for ours, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", [reference, cpu])
def test_attention_with_nothing_to_look_at_stays_finite(implementation: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = (torch.randn(1, 4, 3, 2, 4) * 3).to(dtype).requires_grad_()
    empty = torch.zeros(1, 4, dtype=torch.long)
    out = implementation.attention(
        [packed], implementation.attention_bias(Sight(empty, empty, causal=True, dtype=dtype)), 0.0
    )
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), packed)[0].isfinite().all()


@pytest.mark.parametrize("implementation", [reference, cpu])
def test_attention_drops_weights_not_values(implementation: Any) -> None:
    torch.manual_seed(3)
    packed = torch.zeros(1, 3, 3, 1, 4)
    packed[0, :, 2, 0] = torch.eye(3, 4)
    segments = torch.ones(1, 3, dtype=torch.long)
    out = implementation.attention([packed], implementation.attention_bias(Sight(segments, segments)), 0.5)
    # Equal weights of a third over unit values: an entry shows its own weight, dropped or doubled.
    shown = {round(x, 4) for x in out[..., :3].flatten().tolist()}
    assert shown == {0.0, 0.6667}


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_gradients_follow_what_attention_dropped(rate: float) -> None:
    """Against differences of two values, what is dropped staying the same."""
    segments = torch.repeat_interleave(torch.arange(1, 5), torch.tensor([3, 2, 3, 1]))[None]
    torch.manual_seed(0)
    packed = torch.randn(1, 9, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    table = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)

    def out(packed: Tensor, table: Tensor) -> Tensor:
        torch.manual_seed(4)
        return cpu.attention(
            [packed], cpu.attention_bias(Sight(segments, segments, False, table, 10, torch.float64)), rate
        )

    assert not torch.equal(out(packed, table), out(packed, table) * 0)
    assert torch.autograd.gradcheck(out, (packed, table))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2, 3])
def test_linear_kernels_are_the_reference_with_the_same_entries_dropped(rate: float, frozen: int | None) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in ((2, 7, 33), (2, 7, 5), (40, 5), (33, 40))]
    grad = torch.randn(2, 7, 33, dtype=torch.float64)

    def mask(*shapes: int) -> list[Tensor]:
        """What the same seed draws for tensors of these widths, one after the other."""
        torch.manual_seed(5)
        return [kernels.dropout(torch.ones(2, 7, width, dtype=torch.float64), rate) for width in shapes]

    (one,), (first, second) = mask(33), mask(40, 33)
    for made, expected in (
        (
            lambda residual, x, wide, narrow: kernels.linear_dropout_add(
                residual, x @ wide.T, narrow, rate, narrow[:, 0]
            ),
            lambda residual, x, wide, narrow: residual + F.linear(x @ wide.T, narrow, narrow[:, 0]) * one,
        ),
        (
            lambda residual, x, wide, narrow: kernels.relu_feed_forward(residual, x, wide, narrow, rate),
            lambda residual, x, wide, narrow: residual + F.linear(F.relu(F.linear(x, wide)) * first, narrow) * second,
        ),
    ):
        results = []
        for function in (made, expected):
            own = [x.clone().requires_grad_(i != frozen) for i, x in enumerate(inputs)]
            torch.manual_seed(5)
            out = function(*own)
            results.append([out, *torch.autograd.grad(out, [x for x in own if x.requires_grad], grad)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_rms_norm_on_a_cpu_has_the_gradients_of_the_reference() -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 4, 17, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(17, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    ours, theirs = cpu.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), grad) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.5, 0.9])
def test_gaps_between_dropped_entries_are_geometric(rate: float) -> None:
    torch.manual_seed(7)
    places = dropped(2_000_000, rate)
    assert places.dtype == torch.int64 and (places.diff() > 0).all() and places[0] >= 0 and places[-1] < 2_000_000
    gaps = places.diff()
    for gap in (1, 2, 3, 7):
        share = rate * (1 - rate) ** (gap - 1)
        assert abs((gaps == gap).double().mean() - share) < 5 * math.sqrt(share * (1 - share) / len(gaps))


def test_few_draws_are_followed_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "sqrt", lambda x: -x / 5 * 0.9)  # draw a tenth of what is needed at a time
    torch.manual_seed(8)
    places = dropped(100_000, 0.2)
    assert abs(len(places) / 100_000 - 0.2) < 0.01
    assert (places.diff() > 0).all() and places[-1] < 100_000
