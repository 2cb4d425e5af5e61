"""The one step: any cut into micro-batches gives the same, and nothing is updated where a number is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from t2t.config import Optim
from t2t.data.loader import Loader
from t2t.data.objectives import Seq2Seq
from t2t.data.packing import IGNORE, Batch, RowShape, collate
from t2t.data.tasks import Example
from t2t.data.tokens import Bytes, Pairs, tokenize
from t2t.models import load as models
from t2t.models.t5 import T5
from t2t.optim.build import Optimizer
from t2t.train.step import Diverged, StepResult, batch_loss, train_step, workers

RAW = {
    "model_type": "t5", "vocab_size": 384, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2,
    "num_decoder_layers": 1, "num_heads": 3, "relative_attention_num_buckets": 8,
}  # fmt: skip
SHAPE = RowShape(source_row=18, target_row=14, source_fill=1.0, target_fill=1.0, fill=1.0, rows_per_step=16.0)


def make_pairs(count: int = 64) -> Pairs:
    """Four examples a row: sources of 3 to 5 tokens and targets of 2 to 4, end tokens counted."""
    rng = np.random.default_rng(0)
    letters = [chr(c) for c in range(97, 123)]
    examples = [
        Example("".join(rng.choice(letters, 2 + i % 3)), "".join(rng.choice(letters, 1 + (i // 3) % 3)), f"x:{i}")
        for i in range(count)
    ]
    return tokenize(examples, Bytes(), 16, 12)


def batches(micro_rows: int) -> list[Batch]:
    return Loader(Seq2Seq(make_pairs(), start_id=0), 64, SHAPE, micro_rows, 1, pad_id=0).step(0)


def make_model(dropout: float = 0.0, **raw: Any) -> T5:
    return models.create(RAW | raw, seed=0, dropout=dropout).double().train()


def make_optimizer(model: T5, **settings: Any) -> Optimizer:
    return Optimizer(dict(model.named_parameters()), Optim(**settings), lr=0.01, schedule=lambda n: 1.0)


def step(model: T5, micro: list[Batch], number: int = 0, clip: float = 1.0, smoothing: float = 0.0) -> StepResult:
    optimizer = make_optimizer(model, weight_decay=0.1)
    optimizer.updates = number
    return train_step(model, optimizer, micro, number, seed=1, clip=clip, smoothing=smoothing)


def weights(model: T5) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_threads_change_nothing_not_even_dropout() -> None:
    results = []
    for over in (map, workers(2), workers(3)):
        model = make_model(dropout=0.3)
        made = make_optimizer(model)
        figures = [train_step(model, made, batches(2), n, 1, 0.05, 0.0, over) for n in range(3)]
        results.append((figures, weights(model)))
    (first, first_weights), *others = results
    for figures, moved in others:
        assert figures == first
        assert all(torch.equal(moved[name], first_weights[name]) for name in moved)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_any_cut_into_micro_batches_gives_the_same(optimizer: str, smoothing: float) -> None:
    results = []
    for micro_rows, count in ((16, 1), (4, 4), (1, 16)):
        model, micro = make_model(), batches(micro_rows)
        assert len(micro) == count
        assert sum((batch.example_ids >= 0).sum() for batch in micro) == 64
        made = make_optimizer(model, name=optimizer, weight_decay=0.1)
        # Clipping is on and bites, so that it must see the whole gradient.
        results.append((train_step(model, made, micro, 0, 1, 0.05, smoothing), weights(model)))
    (first, first_weights), *others = results
    assert first.grad_norm > 0.05
    for result, moved in others:
        assert result.loss == pytest.approx(first.loss, rel=1e-12)
        assert result.grad_norm == pytest.approx(first.grad_norm, rel=1e-10)
        assert (result.tokens, result.target_tokens, result.lr) == (first.tokens, first.target_tokens, first.lr)
        for name, weight in moved.items():
            # AdamW divides by gradients that are zero but for rounding: its eps of 1e-8 is what is left of them.
            torch.testing.assert_close(weight, first_weights[name], rtol=1e-7, atol=1e-9, msg=name)
    assert not torch.equal(first_weights["shared.weight"], make_model().shared.weight)


def test_the_loss_is_the_mean_over_target_tokens_of_examples_alone() -> None:
    pairs, model = make_pairs(), make_model()
    alone = []
    for i in range(64):
        batch = collate([Seq2Seq(pairs, start_id=0).feature(i, seed=0)], [i], [[0]], 18, 14, pad_id=0)
        total, each = batch_loss(model, batch)
        assert each.sum().item() == pytest.approx(total.item())
        alone.append(total.item())
    result = step(model, batches(16))
    assert result.target_tokens == pairs.target.lengths.sum()
    assert result.tokens == pairs.target.lengths.sum() + pairs.source.lengths.sum()
    assert result.loss == pytest.approx(sum(alone) / result.target_tokens, rel=1e-10)


def test_empty_rows_change_nothing() -> None:
    tight, padded = batches(1), batches(5)
    assert sum((batch.example_ids == -1).all(1).sum() for batch in tight) == 0
    assert sum((batch.example_ids == -1).all(1).sum() for batch in padded) == 4
    one, two = make_model(), make_model()
    first, second = step(one, tight), step(two, padded)
    assert second.loss == pytest.approx(first.loss, rel=1e-12)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-10)
    for name, weight in weights(two).items():
        torch.testing.assert_close(weight, one.get_parameter(name).detach(), rtol=1e-7, atol=1e-9, msg=name)
    # With dropout other shapes draw other numbers; a row of nothing must still give no nan.
    assert np.isfinite(step(make_model(0.1), padded).grad_norm)


def test_label_smoothing_is_that_of_torch() -> None:
    model, (batch,) = make_model(), batches(16)
    inputs = batch.source_ids, batch.source_segments, batch.target_ids, batch.target_segments
    hidden = model(*map(torch.from_numpy, inputs))
    logits, labels = (hidden @ model.head.T).flatten(0, 1), torch.from_numpy(batch.labels).flatten()
    for smoothing in (0.0, 0.2):
        settings: dict[str, Any] = {"ignore_index": IGNORE, "reduction": "sum", "label_smoothing": smoothing}
        expected = F.cross_entropy(logits, labels, **settings)
        assert batch_loss(model, batch, smoothing)[0].item() == pytest.approx(expected.item())


def test_random_numbers_come_from_seed_step_and_micro_batch_alone() -> None:
    def dropped(number: int, seed_before: int) -> float:
        torch.manual_seed(seed_before)
        return step(make_model(0.3), batches(4), number).loss

    assert dropped(3, 0) == dropped(3, 1) != dropped(4, 0)
    same = batches(4)[0]
    once, twice = step(make_model(0.3), [same]), step(make_model(0.3), [same, same])
    assert once.loss != twice.loss  # the second of two equal batches drops other units


def test_the_norm_is_that_before_clipping_and_the_rate_that_of_the_schedule() -> None:
    free, clipped = step(make_model(), batches(16), clip=0.0), step(make_model(), batches(16), clip=1e-3)
    assert free.grad_norm == clipped.grad_norm > 1e-3
    model = make_model()
    optimizer = Optimizer(dict(model.named_parameters()), Optim(), lr=0.5, schedule=lambda n: 1 / (n + 2))
    rates = [train_step(model, optimizer, batches(16), n, 1, 1.0, 0.0).lr for n in range(2)]
    assert rates == [0.25, 0.5 / 3]


# What is not finite


def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_examples() -> None:
    pairs = make_pairs()
    model = make_model(tie_word_embeddings=False)
    marked = next(i for i in range(64) if Bytes().encode("q")[0] in pairs.source[i])
    with torch.no_grad():
        model.shared.weight[Bytes().encode("q")[0]] = float("nan")
    before = weights(model)
    micro = batches(4)
    with pytest.raises(Diverged, match="step 1: the loss is not finite") as caught:
        step(model, micro)
    # Not those that share a row with such an example, though nan times nothing is nan.
    q = Bytes().encode("q")[0]
    expected = [i for i in range(64) if q in pairs.source[i] or q in pairs.target[i][:-1]]
    assert marked in expected and len(expected) < 64
    assert caught.value.examples == expected
    assert all(torch.equal(p.nan_to_num(), model.get_parameter(n).nan_to_num()) for n, p in before.items())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_stops_before_the_update(value: float, clip: float) -> None:
    model = make_model()
    model.decoder.final_layer_norm.weight.register_hook(lambda grad: torch.full_like(grad, value))
    before = weights(model)
    with pytest.raises(Diverged, match="step 1: the gradient is not finite") as caught:
        step(model, batches(4), clip=clip)
    assert sorted(caught.value.examples) == list(range(64))
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in before.items())
