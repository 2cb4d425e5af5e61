"""The native T5 against transformers, variant by variant, and packed rows against the same examples alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from compare import gradients
from safetensors.torch import load_file, save_file
from torch import Tensor

from t2t import kernels
from t2t.models import load
from t2t.models.t5 import T5

Raw = dict[str, Any]
Build = Callable[[Raw], Any]


class Rows(NamedTuple):
    source_ids: Tensor
    source_segments: Tensor
    target_ids: Tensor
    target_segments: Tensor
    labels: Tensor


def ragged(vocab: int) -> Rows:
    """One example a row, padded on the right, some labels ignored within."""
    generator = torch.Generator().manual_seed(1)
    sources, targets = torch.tensor([24, 7, 1]), torch.tensor([5, 14, 2])
    source_segments = (torch.arange(24) < sources[:, None]).long()
    target_segments = (torch.arange(14) < targets[:, None]).long()
    source_ids = torch.randint(2, vocab, (3, 24), generator=generator) * source_segments
    labels = torch.randint(2, vocab, (3, 14), generator=generator)
    target_ids = F.pad(labels, (1, -1)) * target_segments
    labels = labels.masked_fill(target_segments == 0, -100)
    labels[1, 3:5] = -100
    return Rows(source_ids, source_segments, target_ids, target_segments, labels)


def loss_of(model: T5, rows: Rows, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The summed loss, and each token's [R, T]."""
    hidden = model(rows.source_ids, rows.source_segments, rows.target_ids, rows.target_segments)
    total, each = kernels.linear_cross_entropy(hidden.flatten(0, 1), model.head, rows.labels.flatten(), smoothing, 16)
    return total, each.view(rows.labels.shape)


def peer_loss(peer: Any, rows: Rows, smoothing: float = 0.0) -> Tensor:
    logits = peer(rows.source_ids, rows.source_segments, decoder_input_ids=rows.target_ids).logits
    return F.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), label_smoothing=smoothing, reduction="sum")


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        off = (ours[name] - expected).norm() / expected.norm().clamp(min=1e-30)
        assert off < tolerance, f"{name}: off by {off:.2e} of its norm"


@pytest.fixture
def pair(raw: Raw, huggingface: Build, tmp_path: Path) -> tuple[T5, Any]:
    """The same weights in the native model and in transformers."""
    peer = huggingface(raw)
    peer.save_pretrained(tmp_path / "peer")
    return load.load(tmp_path / "peer")[0].eval(), peer


@pytest.mark.parametrize("implementation", [kernels.cpu, kernels.reference])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_every_gradient_match_transformers(
    pair: tuple[T5, Any], smoothing: float, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_on", lambda x: implementation)
    model, peer = pair
    rows = ragged(model.config.vocab_size)
    ours, theirs = loss_of(model, rows, smoothing)[0], peer_loss(peer, rows, smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert_same_gradients(gradients(model, ours), gradients(peer, theirs), 1e-5)


def test_loss_is_the_one_transformers_reports(pair: tuple[T5, Any]) -> None:
    model, peer = pair
    rows = ragged(model.config.vocab_size)
    rows.labels[1, 3:5] = 7  # transformers makes its own target ids, out of whole labels
    target_ids = F.pad(rows.labels, (1, -1)).clamp(min=0)
    theirs = peer(rows.source_ids, rows.source_segments, labels=rows.labels).loss
    ours = loss_of(model, rows._replace(target_ids=target_ids))[0] / (rows.labels != -100).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("step", [0, 4])
def test_decoding_with_the_cache_gives_the_logits_of_one_pass(pair: tuple[T5, Any], step: int) -> None:
    """With the whole cache in use, and with as much of it as the position needs, in steps of four slots."""
    model = pair[0].double()
    rows = ragged(model.config.vocab_size)
    hidden = model(*rows[:4])
    cache = model.start(rows.source_ids, rows.source_segments, rows.target_ids.shape[1], copies=2)
    # Both copies of a row decode the same here, so that exchanging them must change nothing.
    swap = torch.tensor([1, 0, 3, 2, 5, 4])
    for position in range(rows.target_ids.shape[1]):
        if step:
            cache.use(position // step * step + step)
        logits = model.decode(rows.target_ids[:, position].repeat_interleave(2), cache)
        cache.reorder(swap)
        here = rows.target_segments[:, position] != 0
        expected = F.linear(hidden[:, position], model.head)[here]
        for copy in (0, 1):
            torch.testing.assert_close(logits[copy::2][here], expected, rtol=1e-9, atol=1e-9)


def test_reordered_cache_goes_on_from_another_row(tiny: Raw) -> None:
    model = load.create(tiny, seed=3).double().eval()
    source = torch.tensor([[5, 6, 7, 1]])
    segments = torch.ones_like(source)
    beams = torch.tensor([[0, 9, 4], [0, 11, 4]])
    cache = model.start(source, segments, 3, copies=2)
    for position in (0, 1):
        model.decode(beams[:, position], cache)
    cache.reorder(torch.tensor([1, 1]))
    after = model.decode(beams[:, 2], cache)
    hidden = model(source, segments, beams[1:], torch.ones(1, 3, dtype=torch.long))
    expected = F.linear(hidden[:, -1], model.head).expand(2, -1)
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)


def assert_same_model(model: T5, peer: Any) -> None:
    ours, theirs = dict(model.named_parameters()), dict(peer.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = ragged(model.config.vocab_size)
    torch.testing.assert_close(loss_of(model, rows)[0], peer_loss(peer, rows), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shard_bytes", [10**9, 4000])
def test_our_folder_opens_in_transformers(
    raw: Raw, huggingface: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    monkeypatch.setattr(load, "SHARD_BYTES", shard_bytes)
    huggingface(raw).save_pretrained(tmp_path / "peer")
    model, config = load.load(tmp_path / "peer")
    load.save(model.state_dict(), config, tmp_path / "ours")
    assert (tmp_path / "ours" / load.INDEX).exists() == (shard_bytes == 4000)
    peer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    assert_same_model(model.eval(), peer)
    assert_same_model(load.load(tmp_path / "ours")[0].eval(), peer)


def test_fresh_model_opens_in_transformers(raw: Raw, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = load.create(raw, seed=5).eval()
    load.save(model.state_dict(), raw, tmp_path)
    assert_same_model(model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval())


def test_sharded_folder_of_transformers_opens_here(raw: Raw, huggingface: Build, tmp_path: Path) -> None:
    peer = huggingface(raw)
    peer.save_pretrained(tmp_path, max_shard_size=4000)
    assert (tmp_path / load.INDEX).exists()
    assert_same_model(load.load(tmp_path)[0].eval(), peer)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("stored", ["embedding", "both", "equal", "head", "encoder", "encoder and head"])
def test_head_is_tied_and_scaled_as_in_transformers(
    tiny: Raw, huggingface: Build, tmp_path: Path, declared: bool, stored: str
) -> None:
    """Whatever the checkpoint holds and the config says, and again after a round through our own folder."""
    from transformers import AutoModelForSeq2SeqLM

    huggingface(tiny).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights.pop("shared.weight")
    weights |= {
        "embedding": {"shared.weight": embedding},
        "both": {"shared.weight": embedding, "lm_head.weight": embedding.flip(0)},
        "equal": {"shared.weight": embedding, "lm_head.weight": embedding.clone()},
        "head": {"lm_head.weight": embedding},
        "encoder": {"encoder.embed_tokens.weight": embedding, "decoder.embed_tokens.weight": embedding.clone()},
        "encoder and head": {"encoder.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()},
    }[stored]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(tiny | {"tie_word_embeddings": declared}))

    peer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    model, config = load.load(tmp_path)
    rows = ragged(48)
    torch.testing.assert_close(loss_of(model.eval(), rows)[0], peer_loss(peer, rows), rtol=1e-5, atol=0)
    load.save(model.state_dict(), config, tmp_path / "ours")
    for again in (load.load(tmp_path / "ours")[0].eval(), AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")):
        loss = loss_of(again, rows)[0] if isinstance(again, T5) else peer_loss(again.eval(), rows)
        torch.testing.assert_close(loss, peer_loss(peer, rows), rtol=1e-5, atol=0)


def test_bfloat16_weights_load_close_to_transformers(huggingface: Build, tiny: Raw, tmp_path: Path) -> None:
    peer = huggingface(tiny)
    peer.to(torch.bfloat16).save_pretrained(tmp_path)
    model = load.load(tmp_path, dtype=torch.bfloat16)[0].eval()
    rows = ragged(48)
    assert model.shared.weight.dtype == torch.bfloat16
    torch.testing.assert_close(loss_of(model, rows)[0], peer_loss(peer, rows).float(), rtol=2e-2, atol=0)


# Packing. Examples as (source length, target length); rows as lists of examples, one of them empty.
EXAMPLES = [(5, 3), (1, 1), (12, 6), (3, 2), (1, 4), (6, 1)]
LAYOUT = [[0, 1, 2], [], [3], [4, 5]]
SOURCE_ROW, TARGET_ROW = 20, 11


def example(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Source ids, target ids and labels of one example."""
    generator = torch.Generator().manual_seed(number)
    source, labels = (torch.randint(2, 48, (length,), generator=generator) for length in EXAMPLES[number])
    return source, F.pad(labels, (1, -1)), labels


def alone(number: int) -> Rows:
    source, target, labels = (part[None] for part in example(number))
    return Rows(source, torch.ones_like(source), target, torch.ones_like(target), labels)


def packed() -> tuple[Rows, Tensor]:
    """The examples laid out in rows, and whose each target slot is [R, T] (-1: nobody's)."""
    source_ids, source_segments = torch.zeros(2, len(LAYOUT), SOURCE_ROW, dtype=torch.long)
    target_ids, target_segments = torch.zeros(2, len(LAYOUT), TARGET_ROW, dtype=torch.long)
    labels, owner = torch.full_like(target_ids, -100), torch.full_like(target_ids, -1)
    for row, members in enumerate(LAYOUT):
        s = t = 0
        for segment, number in enumerate(members, 1):
            source, target, label = example(number)
            here, there = slice(s, s + len(source)), slice(t, t + len(target))
            s, t = here.stop, there.stop
            source_ids[row, here], source_segments[row, here] = source, segment
            target_ids[row, there], target_segments[row, there] = target, segment
            labels[row, there], owner[row, there] = label, number
    return Rows(source_ids, source_segments, target_ids, target_segments, labels), owner


@pytest.fixture
def double(raw: Raw) -> T5:
    """A native model in float64 whose relative biases matter."""
    model = load.create(raw, seed=7).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_()
    return model


def test_packed_example_has_the_loss_and_gradient_it_has_alone(double: T5) -> None:
    rows, owner = packed()
    _, each = loss_of(double, rows)
    assert each.dtype == torch.float64
    assert (each[owner == -1] == 0).all()
    for number in range(len(EXAMPLES)):
        own_loss, own_each = loss_of(double, alone(number))
        torch.testing.assert_close(each[owner == number], own_each[0], rtol=1e-10, atol=1e-10)
        only = rows._replace(labels=rows.labels.masked_fill(owner != number, -100))
        packed_loss = loss_of(double, only)[0]
        torch.testing.assert_close(packed_loss, own_loss, rtol=1e-10, atol=0)
        assert_same_gradients(gradients(double, packed_loss), gradients(double, own_loss), 1e-10)


def test_packed_batch_has_the_summed_gradient(double: T5) -> None:
    rows, _ = packed()
    parts = [gradients(double, loss_of(double, alone(number))[0]) for number in range(len(EXAMPLES))]
    summed = {name: sum((part[name] for part in parts), torch.zeros(())) for name in parts[0]}
    assert_same_gradients(gradients(double, loss_of(double, rows)[0]), summed, 1e-10)


def test_nothing_leaks_across_segments(double: T5) -> None:
    """A source token reaches the memory and the outputs of its own segment; padding's reach nothing real."""
    rows, _ = packed()
    memory, hidden = double.encode(*rows[:2]), double(*rows[:4])
    assert memory.isfinite().all() and hidden.isfinite().all()
    for row, members in enumerate(LAYOUT):
        for segment in range(len(members) + 1):
            slot = int((rows.source_segments[row] == segment).nonzero()[0])
            source_ids = rows.source_ids.clone()
            source_ids[row, slot] = (source_ids[row, slot] + 1) % 48
            changed = double.encode(source_ids, rows.source_segments), double(source_ids, *rows[1:4])
            for before, after, segments in zip(
                (memory, hidden), changed, (rows.source_segments, rows.target_segments), strict=True
            ):
                own = torch.zeros_like(segments, dtype=torch.bool)
                own[row] = segments[row] == segment
                moved = (before != after).any(-1)
                assert torch.equal(moved & (segments != 0), own & (segments != 0))


def test_decoder_sees_only_earlier_tokens_of_its_segment(double: T5) -> None:
    rows, owner = packed()
    hidden = double(*rows[:4])
    start, end = (int(i) for i in (owner[0] == 2).nonzero()[[0, -1], 0])
    target_ids = rows.target_ids.clone()
    target_ids[0, start + 2] = (target_ids[0, start + 2] + 1) % 48
    changed = double(*rows[:2], target_ids, rows.target_segments)
    moved = (changed != hidden).any(-1)
    expected = torch.zeros_like(moved)
    expected[0, start + 2 : end + 1] = True
    real = rows.target_segments != 0
    assert torch.equal(moved & real, expected)


def test_checkpointed_blocks_give_the_same_gradients_with_dropout(raw: Raw) -> None:
    rows, _ = packed()
    model = load.create(raw, seed=2, dropout=0.3).train()

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(11)
        loss = loss_of(model, rows)[0]
        return loss.detach(), gradients(model, loss)

    loss, expected = run()
    model.eval()
    assert not torch.equal(run()[0], loss), "dropout is on"
    model.train()
    for block in [*model.encoder.block, *model.decoder.block]:
        block.forward = functools.partial(  # type: ignore[method-assign]
            torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
        )
    again, recomputed = run()
    assert torch.equal(again, loss)
    assert_same_gradients(recomputed, expected, 1e-6)


def test_fresh_weights_have_the_scales_of_transformers(raw: Raw) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    wide = raw | {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1}
    settings = {key: value for key, value in wide.items() if key not in ("model_type", "tie_word_embeddings")}
    torch.manual_seed(0)
    peer = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(raw["model_type"], **settings))
    ours = dict(load.create(wide, seed=0).named_parameters())
    for name, theirs in peer.named_parameters():
        loose = 0.5 if "relative_attention_bias" in name else 0.12  # a table has 32 entries
        torch.testing.assert_close(ours[name].square().mean(), theirs.square().mean(), rtol=2 * loose, atol=0)


def test_same_seed_makes_the_same_model(tiny: Raw) -> None:
    first, second, other = (load.create(tiny, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["shared.weight"], other["shared.weight"])
