"""GPT-2 and GPT-Neo against transformers: loss, gradients, generated tokens, and packed rows against alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import gradients
from torch import Tensor, nn

from t2t import kernels
from t2t.config import Generate
from t2t.errors import InputError
from t2t.generate.decode import decode
from t2t.models import load
from t2t.models.base import Rows
from t2t.models.gpt import GPT

Raw = dict[str, Any]

GPT2: Raw = {
    "model_type": "gpt2",
    "vocab_size": 48,
    "n_positions": 40,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
NEO: Raw = {
    "model_type": "gpt_neo",
    "vocab_size": 48,
    "max_position_embeddings": 40,
    "hidden_size": 12,
    "num_layers": 3,
    "num_heads": 3,
    "attention_types": [[["local", "global", "local"], 1]],
    "window_size": 4,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
VARIANTS: dict[str, Raw] = {
    "gpt2": GPT2,
    "narrow": GPT2 | {"n_inner": 20, "activation_function": "relu"},
    "by layer": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "unscaled": GPT2 | {"scale_attn_weights": False},
    "untied": GPT2 | {"tie_word_embeddings": False},
    "neo": NEO,
    "neo, global": NEO | {"attention_types": [[["global"], 3]], "intermediate_size": 20},
}


@pytest.fixture(params=VARIANTS)
def raw(request: pytest.FixtureRequest) -> Raw:
    return dict(VARIANTS[request.param])


@pytest.fixture
def pair(raw: Raw, tmp_path: Path) -> tuple[GPT, Any]:
    """The same weights in the native model and in transformers, far from zero so that biases and masks show."""
    peer = make_peer(raw)
    peer.save_pretrained(tmp_path / "peer")
    model = load.load(tmp_path / "peer")[0].eval()
    assert isinstance(model, GPT)
    return model, peer


def make_peer(raw: Raw) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), attn_implementation="eager").eval()
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return peer


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, lengths and labels of one example a row, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([17, 5, 1])
    segments = (torch.arange(17) < lengths[:, None]).long()
    ids = torch.randint(2, 48, (3, 17), generator=generator) * segments
    labels = torch.randint(2, 48, (3, 17), generator=generator).masked_fill(segments == 0, -100)
    labels[0, 3:5] = -100
    return ids, segments, labels


def rows(ids: Tensor, segments: Tensor, labels: Tensor, positions: Tensor | None = None) -> Rows:
    none = ids.new_zeros(len(ids), 0)
    places = torch.arange(ids.shape[1]).expand_as(ids) if positions is None else positions
    return Rows(none, none, ids, segments, places, labels)


@pytest.mark.parametrize("implementation", [kernels.cpu, kernels.reference])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_every_gradient_match_transformers(
    pair: tuple[GPT, Any], smoothing: float, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_on", lambda x: implementation)
    model, peer = (m.double() for m in pair)
    ids, segments, labels = ragged()
    sums, each = model.loss(rows(ids, segments, labels), smoothing)
    logits = peer(ids, attention_mask=segments).logits
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(sums[0], theirs, rtol=1e-6, atol=0)  # GPT-Neo's scores are in fp32 there
    assert (each[labels == -100] == 0).all()
    ours, expected = gradients(model, sums[0]), gradients(peer, theirs)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_fp32_losses_match_transformers(pair: tuple[GPT, Any]) -> None:
    model, peer = pair
    ids, segments, labels = ragged()
    theirs = F.cross_entropy(peer(ids, attention_mask=segments).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model.loss(rows(ids, segments, labels), 0.0)[0][0], theirs, rtol=1e-5, atol=0)


def test_a_packed_segment_is_as_if_it_were_alone(raw: Raw) -> None:
    model = load.create(raw, seed=0).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids, segments, labels = ragged()
    lengths = segments.sum(1).tolist()
    row = torch.cat([ids[i, :n] for i, n in enumerate(lengths)])[None]
    numbers = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(lengths)])[None]
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    said = torch.cat([labels[i, :n] for i, n in enumerate(lengths)])[None]
    alone, packed = model.loss(rows(ids, segments, labels), 0.0), model.loss(rows(row, numbers, said, places), 0.0)
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-12, atol=0)
    expected = torch.cat([alone[1][i, :n] for i, n in enumerate(lengths)])
    torch.testing.assert_close(packed[1][0], expected, rtol=1e-10, atol=1e-12)
    one, two = gradients(model, alone[0][0]), gradients(model, packed[0][0])
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("beams", [1, 4])
def test_generated_tokens_match_transformers(pair: tuple[GPT, Any], beams: int) -> None:
    model, peer = (m.double() for m in pair)
    ids, segments, _ = ragged()
    ours = decode(model, ids, segments, Generate(beams=beams), max_length=12).tokens
    width, lengths = ids.shape[1], segments.sum(1)
    moved = torch.zeros_like(ids)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(lengths.tolist()):
        moved[i, width - n :], mask[i, width - n :] = ids[i, :n], 1
    settings = {"do_sample": False, "num_beams": beams, "max_new_tokens": 12, "pad_token_id": 1, "eos_token_id": 1}
    theirs = peer.generate(moved, attention_mask=mask, **settings)[:, width:]
    for mine, other in zip(ours.tolist(), theirs.tolist(), strict=True):
        assert until_end(mine) == until_end(other)


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(1)] if 1 in tokens else tokens


def test_decoding_with_the_cache_gives_the_logits_of_one_pass(pair: tuple[GPT, Any]) -> None:
    model = pair[0].double()
    ids, segments, _ = ragged()
    prompts = segments * (torch.arange(17) < torch.tensor([[6], [3], [1]]))
    cache = model.start(ids, prompts, 8, copies=2)
    starts = prompts.sum(1) - 1
    hidden = model(ids, segments, torch.arange(17).expand_as(ids))
    with torch.no_grad():
        for step in range(8):
            at = (starts + step).clamp(max=16)
            logits = model.decode(ids.gather(1, at[:, None])[:, 0].repeat_interleave(2), cache)
            cache.reorder(torch.tensor([1, 0, 3, 2, 5, 4]))
            for i in range(3):
                if segments[i, at[i]]:
                    expected = F.linear(hidden[i, at[i]], model.head)
                    for copy in (0, 1):
                        torch.testing.assert_close(logits[2 * i + copy], expected, rtol=1e-9, atol=1e-9)


def test_what_we_save_opens_in_transformers(raw: Raw, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load.create(raw, seed=3).eval()
    load.save(model.state_dict(), raw, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(2, 48, (2, 9), generator=torch.Generator().manual_seed(0))
    hidden = model(ids, torch.ones_like(ids), torch.arange(9).expand_as(ids))
    torch.testing.assert_close(F.linear(hidden, model.head), peer(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_base_model_without_prefix_and_with_old_masks_loads(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    peer = make_peer(GPT2)
    peer.transformer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith("transformer.") for name in weights)
    weights["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load.load(tmp_path)[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, peer.get_parameter(name)), name


def test_fresh_weights_have_the_papers_scales() -> None:
    raw = GPT2 | {"n_embd": 96, "n_layer": 8, "vocab_size": 3000}
    weights = dict(load.create(raw, seed=0).named_parameters())
    assert weights["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["transformer.h.3.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["transformer.h.3.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert (weights["transformer.h.0.ln_1.weight"] == 1).all() and (weights["transformer.ln_f.bias"] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": 5}, "n_head: 5 heads do not divide n_embd 12"),
        ({"activation_function": "swishh"}, "activation_function: 'swishh' is not one of"),
    ],
)
def test_a_config_that_cannot_be(change: Raw, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load.create(GPT2 | change, seed=0)
    with pytest.raises(InputError, match="attention_types"):
        load.create(NEO | {"num_layers": 2}, seed=0)


def test_more_tokens_than_positions() -> None:
    model = load.create(GPT2, seed=0)
    ids = torch.full((1, 20), 5)
    with pytest.raises(InputError, match="20 prompt and 30 new tokens do not fit into the model's 40 positions"):
        decode(model, ids, torch.ones_like(ids), Generate(), max_length=30)
