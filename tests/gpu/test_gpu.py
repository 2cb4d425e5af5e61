"""The T5 family and the trainer on a GPU: what the other tests hold on a CPU holds there too.

Machines without pytest run it as ``PYTHONPATH=. python tests/gpu/test_gpu.py``, so that nothing here imports it.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2t import config, kernels
from t2t.checkpoint import store
from t2t.config import Config, Generate, Optim
from t2t.data.loader import Loader
from t2t.data.objectives import Seq2Seq
from t2t.data.packing import Batch, RowShape, collate
from t2t.data.tasks import Example
from t2t.data.tokens import Bytes, Pairs, tokenize
from t2t.generate import load
from t2t.generate.decode import decode
from t2t.models import load as models
from t2t.models.t5 import T5
from t2t.optim.build import Optimizer
from t2t.train.run import train
from t2t.train.step import batch_loss, train_step

torch.set_float32_matmul_precision("highest")  # no TF32

DEVICE = torch.device("cuda")
Raw = dict[str, Any]
TINY: Raw = {
    "model_type": "t5", "vocab_size": 48, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "decoder_start_token_id": 0,
}  # fmt: skip
UNTIED: Raw = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
VARIANTS: dict[str, Raw] = {
    "t5": TINY,
    "flan": TINY | UNTIED,
    "mt5": TINY | UNTIED | {"model_type": "mt5"},
    "umt5": TINY | UNTIED | {"model_type": "umt5"},
    "byt5": TINY | UNTIED | {"vocab_size": 384, "num_layers": 4, "num_decoder_layers": 1},
    "deep-decoder": TINY | {"num_layers": 1, "num_decoder_layers": 3, "feed_forward_proj": "gated-silu"},
}
WIDER: Raw = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}


# Parity with transformers.


class Rows(NamedTuple):
    """One example a row, padded on the right."""

    source_ids: Tensor
    source_segments: Tensor
    target_ids: Tensor
    target_segments: Tensor
    labels: Tensor


def ragged(vocab: int) -> Rows:
    generator = torch.Generator().manual_seed(1)
    sources, targets = torch.tensor([24, 7, 1]), torch.tensor([5, 14, 2])
    source_segments = (torch.arange(24) < sources[:, None]).long()
    target_segments = (torch.arange(14) < targets[:, None]).long()
    source_ids = torch.randint(2, vocab, (3, 24), generator=generator) * source_segments
    labels = torch.randint(2, vocab, (3, 14), generator=generator)
    target_ids = F.pad(labels, (1, -1)) * target_segments
    labels = labels.masked_fill(target_segments == 0, -100)
    return Rows(*(part.to(DEVICE) for part in (source_ids, source_segments, target_ids, target_segments, labels)))


def peer_of(raw: Raw) -> Any:
    """The transformers model of a config, on the CPU, with norms and tables that show when misused."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    settings = {key: value for key, value in raw.items() if key != "model_type"}
    architecture = AutoConfig.for_model(raw["model_type"], **settings)
    peer = AutoModelForSeq2SeqLM.from_config(architecture, attn_implementation="eager").eval()
    if raw.get("tie_word_embeddings") is False:  # transformers ties all T5 that it makes itself
        peer.lm_head.weight = nn.Parameter(torch.randn_like(peer.shared.weight))
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if "norm" in name or "relative_attention_bias" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return peer


def native_of(peer: Any, folder: Path) -> T5:
    peer.save_pretrained(folder)
    return models.load(folder, DEVICE)[0].eval()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_loss_and_every_gradient_match_transformers(tmp_path: Path) -> None:
    for variant, raw in VARIANTS.items():
        peer = peer_of(raw).to(DEVICE)
        model, rows = native_of(peer, tmp_path / variant), ragged(raw["vocab_size"])
        hidden = model(*rows[:4])
        assert hidden.device.type == DEVICE.type and hidden.dtype == torch.float32
        ours, _ = kernels.linear_cross_entropy(hidden.flatten(0, 1), model.head, rows.labels.flatten())
        logits = peer(rows.source_ids, rows.source_segments, decoder_input_ids=rows.target_ids).logits
        theirs = F.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), reduction="sum")
        assert abs((ours / theirs).item() - 1) < 1e-5, f"{variant}: {ours.item()} is not {theirs.item()}"
        own, expected = gradients(model, ours), gradients(peer, theirs)
        assert own.keys() == expected.keys(), variant
        for name, gradient in expected.items():
            off = (own[name] - gradient).norm() / gradient.norm().clamp(min=1e-30)
            assert off < 1e-4, f"{variant}: {name}: off by {off:.2e} of its norm"


def sources() -> Tensor:
    rng = torch.Generator().manual_seed(1)
    source = torch.randint(2, 40, (12, 17), generator=rng)
    lengths = torch.randint(3, 18, (12, 1), generator=rng)
    places = torch.arange(17)
    return source.masked_fill(places == lengths - 1, 1).masked_fill(places >= lengths, 0)


def half_trained(raw: Raw) -> Any:
    """A peer that has half learned to answer each source with its start: rows differ, and end at many places."""
    peer, source = peer_of(raw).train(), sources()
    optimizer = torch.optim.Adam(peer.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        labels = source.masked_fill(source == 0, -100)
        peer(input_ids=source, attention_mask=(source != 0).long(), labels=labels).loss.backward()
        optimizer.step()
    return peer.eval()


def test_greedy_and_beam_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    source, length = sources().to(DEVICE), 40
    segments = (source != 0).long()
    for variant in ("t5", "flan", "mt5", "umt5", "byt5"):
        peer = half_trained(VARIANTS[variant] | WIDER).to(DEVICE)
        model = native_of(peer, tmp_path / variant)
        for beams in (1, 4):
            asked: Raw = {"do_sample": False, "num_beams": beams, "max_new_tokens": length}
            theirs = peer.generate(input_ids=source, attention_mask=segments, **asked)[:, 1:].tolist()
            ours = decode(model, source, segments, Generate(beams=beams), length).tokens.tolist()
            expected = [row[: row.index(1) + 1] if 1 in row else row for row in theirs]
            padded = [row + [0] * (length - len(row)) for row in expected]
            assert ours == padded, f"{variant}, {beams} beams"
            assert len(set(map(tuple, expected))) > 4, "outputs that are all alike say little"


def test_samples_are_repeatable() -> None:
    model = models.create(TINY, seed=0).to(DEVICE).eval()
    source = torch.randint(2, 48, (8, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    settings = Generate(temperature=1.0, top_k=20, top_p=0.9)
    first, again, other = (
        decode(model, source, torch.ones_like(source), settings, 20, seed).tokens for seed in (3, 3, 4)
    )
    assert first.equal(again) and not first.equal(other)


# Packing, steps and optimizers, in double precision where sums in another order must agree.

BYTES: Raw = TINY | {"vocab_size": 384, "num_decoder_layers": 1}
SHAPE = RowShape(source_row=18, target_row=14, source_fill=1.0, target_fill=1.0, fill=1.0, rows_per_step=16.0)


def pairs_of(count: int) -> Pairs:
    """Four examples a row: sources of 3 to 5 tokens and targets of 2 to 4, end tokens counted."""
    rng = random.Random(0)

    def word(length: int) -> str:
        return "".join(rng.choices("abcdefgh", k=length))

    examples = [Example(word(2 + i % 3), word(1 + (i // 3) % 3), f"x:{i}") for i in range(count)]
    return tokenize(examples, Bytes(), 16, 12)


def batches(pairs: Pairs, micro_rows: int) -> list[Batch]:
    return Loader(Seq2Seq(pairs, start_id=0), len(pairs), SHAPE, micro_rows, 1, pad_id=0).step(0)


def double() -> T5:
    return models.create(BYTES, seed=0, dropout=0.0).to(DEVICE, torch.float64).train()


def test_packed_examples_have_the_losses_they_have_alone() -> None:
    pairs, model = pairs_of(64), double()
    (batch,) = batches(pairs, 16)
    packed = batch_loss(model, batch)[1]
    for i in range(0, 64, 7):
        alone = collate([Seq2Seq(pairs, start_id=0).feature(i, seed=0)], [i], [[0]], 18, 14, pad_id=0)
        row, segment = (int(place[0]) for place in (batch.example_ids == i).nonzero())
        own = packed[row][torch.from_numpy(batch.target_segments[row] == segment + 1).to(DEVICE)]
        expected = batch_loss(model, alone)[1][0, : len(own)]
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_any_cut_into_micro_batches_gives_the_same() -> None:
    pairs = pairs_of(64)
    for name in ("adamw", "adafactor"):
        results = []
        for micro_rows, count in ((16, 1), (4, 4), (1, 16)):
            model, micro = double(), batches(pairs, micro_rows)
            assert len(micro) == count
            settings = Optim(name=name, weight_decay=0.1)
            optimizer = Optimizer(dict(model.named_parameters()), settings, lr=0.01, schedule=lambda n: 1.0)
            results.append((train_step(model, optimizer, micro, 0, 1, 0.05, 0.1), dict(model.named_parameters())))
        (first, first_weights), *others = results
        assert first.grad_norm > 0.05, "clipping bites"
        for result, weights in others:
            assert abs(result.loss / first.loss - 1) < 1e-12, name
            assert abs(result.grad_norm / first.grad_norm - 1) < 1e-10, name
            for key, weight in weights.items():
                torch.testing.assert_close(weight, first_weights[key], rtol=1e-7, atol=1e-9)


def updates(optimizer: Optimizer, parameters: dict[str, nn.Parameter], start: int, stop: int) -> None:
    for step in range(start, stop):
        for i, p in enumerate(parameters.values()):
            gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            p.grad = gradient.to(p.device, p.dtype)
        optimizer.accumulate()
        optimizer.clip(1.0)
        optimizer.step(step)


def test_optimizer_states_live_on_the_gpu_and_come_back() -> None:
    def make(device: torch.device, dtype: torch.dtype, name: str) -> tuple[Optimizer, dict[str, nn.Parameter]]:
        torch.manual_seed(0)
        made = {"layer.weight": torch.randn(24, 16), "layer_norm.weight": torch.randn(16)}
        parameters = {key: nn.Parameter(value.to(device, dtype)) for key, value in made.items()}
        settings = Optim(name=name, weight_decay=0.1)  # type: ignore[arg-type]
        return Optimizer(parameters, settings, lr=0.01, schedule=lambda n: 1.0), parameters

    for name in ("adamw", "adafactor"):
        for dtype in (torch.float32, torch.bfloat16):
            whole, parameters = make(DEVICE, dtype, name)
            updates(whole, parameters, 0, 3)
            kept = [{key: t.cpu().clone() for key, t in part.items()} for part in (whole.weights(), whole.state())]
            updates(whole, parameters, 3, 6)
            held = [*whole.weights().values(), *whole.state().values()]
            assert {(t.device.type, t.dtype) for t in held} == {(DEVICE.type, torch.float32)}
            resumed, others = make(DEVICE, dtype, name)
            resumed.load(kept[0], kept[1], 3)
            updates(resumed, others, 3, 6)
            on_cpu, copies = make(torch.device("cpu"), dtype, name)
            updates(on_cpu, copies, 0, 6)
            for part in ("weights", "state"):
                first, second, third = (getattr(optimizer, part)() for optimizer in (whole, resumed, on_cpu))
                for key, tensor in first.items():
                    assert tensor.equal(second[key]), f"{name}, {dtype}: {key} is not as it was"
                    torch.testing.assert_close(tensor.cpu(), third[key], rtol=1e-4, atol=1e-5)


def test_linear_cross_entropy_in_bf16_is_close_to_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(500, 64, generator=generator) / 4).to(DEVICE, torch.bfloat16)
    weight = torch.randn(1000, 64, generator=generator).to(DEVICE, torch.bfloat16)
    labels = torch.randint(0, 1000, (500,), generator=generator).to(DEVICE)
    labels[::9] = -100
    for smoothing in (0.0, 0.1):
        results = []
        for dtype in (torch.bfloat16, torch.float32):
            own_hidden, own_weight = (t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
            total, each = kernels.linear_cross_entropy(own_hidden, own_weight, labels, smoothing, chunk=128)
            assert each.dtype == torch.float32
            results.append((total, each, *torch.autograd.grad(total / 400, (own_hidden, own_weight))))
        (low_total, low_each, *low), (total, each, *exact) = results
        torch.testing.assert_close(low_total, total, rtol=5e-3, atol=0)
        torch.testing.assert_close(low_each, each, rtol=0, atol=0.1)
        assert (low_each[::9] == 0).all()
        for ours, expected in zip(low, exact, strict=True):
            assert (ours.float() - expected).norm() < 0.02 * expected.norm()


# Whole runs.


def run_config(folder: Path, name: str, **changes: str) -> Config:
    """A run that turns words round, in a folder that holds its data."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeăș", k=rng.randint(2, 8))) for _ in range(200)]
    (folder / "pairs.tsv").write_text("".join(f"{w}\t{w[::-1]}\n" for w in words), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(BYTES | {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4}))
    overrides = {
        "run.dir": str(folder / name),
        "run.device": DEVICE.type,
        "model.config": str(folder / "config.json"),
        "model.tokenizer": "bytes",
        "model.dropout": "0.1",
        "data.train": str(folder / "pairs.tsv"),
        "data.max_source_length": "24",
        "data.max_target_length": "24",
        "train.precision": "mixed",
        "train.batch": "32",
        "train.steps": "60",
        "train.log_every": "10",
        "optim.lr": "0.003",
    }
    return config.load(overrides=overrides | {key.replace("__", "."): value for key, value in changes.items()})


def losses(chosen: Config) -> list[float]:
    return [json.loads(line)["loss"] for line in (chosen.run_dir / "log.jsonl").read_text().splitlines()]


def test_a_short_run_learns(tmp_path: Path) -> None:
    lines: list[str] = []
    chosen = run_config(tmp_path, "run", data__validation_split="0.1", train__metrics="exact_match")
    figures = train(chosen, report=lines.append)
    course = losses(chosen)
    assert course[-1] < 0.6 * course[0], course
    assert figures["validation_loss"] < 0.6 * course[0]
    assert 0 <= figures["validation_exact_match"] <= 1
    assert any("bfloat16" in line and "cuda" in line for line in lines), lines
    kept = store.load(chosen.run_dir / "checkpoints" / "step-000060")
    assert {tensor.dtype for tensor in (*kept.model.values(), *kept.optim.values())} == {torch.float32}
    loaded = load(chosen.run_dir / "model", DEVICE.type)
    assert loaded.model.head.device.type == DEVICE.type
    assert len(loaded.generate(["abc", "dea"], beams=2)) == 2


def differences(one: Config, two: Config, step: int) -> Iterator[str]:
    first, second = (store.load(c.run_dir / "checkpoints" / f"step-{step:06d}") for c in (one, two))
    for part in ("model", "optim"):
        tensors, others = getattr(first, part), getattr(second, part)
        assert tensors.keys() == others.keys()
        yield from (f"{part}: {name}" for name, tensor in tensors.items() if not tensor.equal(others[name]))


def test_a_resumed_run_is_equal_to_the_last_bit(tmp_path: Path) -> None:
    """With dropout, in the middle of the second epoch, with several micro-batches a step, by both optimizers.

    No deterministic mode of torch is needed: nothing in the step adds in an order of chance.
    """
    for name in ("adamw", "adafactor"):
        for precision in ("mixed", "fp32"):
            folder = tmp_path / f"{name}-{precision}"
            settings = {
                "optim__name": name,
                "train__precision": precision,
                "train__steps": "12",
                "train__log_every": "3",
            }
            settings |= {"data__source_row": "24", "data__target_row": "24", "train__micro_rows": "3"}
            whole = run_config(folder, "whole", **settings)
            train(whole, report=lambda line: None)
            train(run_config(folder, "parts", **settings, train__stop_at="9"), report=lambda line: None)
            parts = run_config(folder, "parts", **settings)
            lines: list[str] = []
            train(parts, report=lines.append)
            assert any(line.startswith("resumed from") and "step-000009" in line for line in lines)
            assert list(differences(whole, parts, 12)) == [], f"{name}, {precision}"
            assert losses(whole) == losses(parts)


def main() -> int:
    """Run every test, and say which failed."""
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 0
    tests = {name: test for name, test in globals().items() if name.startswith("test_")}
    failed = []
    for name, test in tests.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                test(*[Path(folder)] * len(inspect.signature(test).parameters))
                print(f"passed  {name}", flush=True)
            except Exception:
                failed.append(name)
                print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    print(f"{len(tests) - len(failed)} passed, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
