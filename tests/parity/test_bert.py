"""BERT against transformers: both losses, every gradient, packed rows against alone, checkpoints of several classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import gradients
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from t2t import kernels
from t2t.errors import InputError
from t2t.models import load
from t2t.models.base import Rows
from t2t.models.bert import Bert

Raw = dict[str, Any]

TINY: Raw = {
    "model_type": "bert",
    "vocab_size": 48,
    "max_position_embeddings": 32,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
}
VARIANTS: dict[str, Raw] = {
    "bert": TINY,
    "other": TINY | {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-5},
}


@pytest.fixture(params=VARIANTS)
def raw(request: pytest.FixtureRequest) -> Raw:
    return dict(VARIANTS[request.param])


def make_peer(raw: Raw) -> Any:
    from transformers import AutoConfig, BertForPreTraining

    torch.manual_seed(0)
    peer = BertForPreTraining._from_config(AutoConfig.for_model(**raw), attn_implementation="eager").eval()
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return peer


@pytest.fixture
def pair(raw: Raw, tmp_path: Path) -> tuple[Bert, Any]:
    """The same weights in the native model and in transformers, far from zero so that biases show."""
    peer = make_peer(raw)
    peer.save_pretrained(tmp_path / "peer")
    model = load.load(tmp_path / "peer")[0].eval()
    assert isinstance(model, Bert) and not model.fresh
    return model, peer


def ragged() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Ids, segments, types and labels of a pair a row, padded on the right, and whether the second follows."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([[17], [6], [3]])
    segments = (torch.arange(17) < lengths).long()
    ids = torch.randint(2, 48, (3, 17), generator=generator) * segments
    types = (torch.arange(17) >= lengths // 2).long() * segments
    labels = torch.randint(2, 48, (3, 17), generator=generator)
    chosen = (torch.rand(3, 17, generator=generator) < 0.4) & (segments == 1)
    return ids, segments, types, labels.masked_fill(~chosen, -100), torch.tensor([[1], [0], [1]])


def rows(ids: Tensor, segments: Tensor, positions: Tensor, labels: Tensor, types: Tensor, pairs: Tensor | None) -> Rows:
    none = ids.new_zeros(len(ids), 0)
    return Rows(none, none, ids, segments, positions, labels, types, pairs)


@pytest.mark.parametrize("implementation", [kernels.cpu, kernels.reference])
def test_both_losses_and_every_gradient_match_transformers(
    pair: tuple[Bert, Any], implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_on", lambda x: implementation)
    model, peer = (m.double() for m in pair)
    ids, segments, types, labels, pairs = ragged()
    places = torch.arange(17).expand_as(ids)
    sums, each = model.loss(rows(ids, segments, places, labels, types, pairs), 0.0)
    out = peer(ids, attention_mask=segments, token_type_ids=types)
    masked = F.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    follows = F.cross_entropy(out.seq_relationship_logits, pairs.flatten(), reduction="sum")
    torch.testing.assert_close(sums, torch.stack([masked, follows]), rtol=1e-9, atol=0)
    assert each.sum().item() == pytest.approx(masked.item())
    weights = torch.tensor([0.7, 1.3], dtype=torch.float64)
    ours, theirs = gradients(model, (sums * weights).sum()), gradients(peer, 0.7 * masked + 1.3 * follows)
    theirs = {name: g for name, g in theirs.items() if name != "cls.predictions.decoder.bias"}
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert (ours[name] - expected).norm() <= 1e-9 * expected.norm() + 1e-12, name


def test_without_pairs_there_is_one_loss_in_fp32_too(pair: tuple[Bert, Any]) -> None:
    model, peer = pair
    ids, segments, types, labels, _ = ragged()
    sums, _ = model.loss(rows(ids, segments, torch.arange(17).expand_as(ids), labels, types, None), 0.0)
    logits = peer(ids, attention_mask=segments, token_type_ids=types).prediction_logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(sums, expected[None], rtol=1e-5, atol=0)


def test_a_packed_segment_is_as_if_it_were_alone(raw: Raw) -> None:
    model = load.create(raw, seed=0).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids, segments, types, labels, pairs = ragged()
    lengths = segments.sum(1).tolist()

    def packed(x: Tensor) -> Tensor:
        return torch.cat([x[i, :n] for i, n in enumerate(lengths)])[None]

    numbers = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(lengths)])[None]
    places = torch.arange(17).expand_as(ids)
    alone = model.loss(rows(ids, segments, places, labels, types, pairs), 0.0)[0]
    row = rows(packed(ids), numbers, packed(places), packed(labels), packed(types), pairs.T)
    together = model.loss(row, 0.0)[0]
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=0)
    one, two = gradients(model, alone.sum()), gradients(model, together.sum())
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-8, atol=1e-10, msg=name)


def test_what_we_save_opens_in_transformers(raw: Raw, tmp_path: Path) -> None:
    from transformers import BertForPreTraining

    model = load.create(raw, seed=3).eval()
    load.save(model.state_dict(), raw, tmp_path)
    peer = BertForPreTraining.from_pretrained(tmp_path).eval()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, peer.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM"])
def test_checkpoints_without_heads_start_them_afresh(kind: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    peer = getattr(transformers, kind)(transformers.AutoConfig.for_model(**TINY))
    peer.save_pretrained(tmp_path)
    model = load.load(tmp_path)[0]
    lacks = {"BertModel": "cls.predictions.transform.dense.weight", "BertForMaskedLM": "cls.seq_relationship.weight"}
    assert lacks[kind] in model.fresh
    stored = load_file(tmp_path / "model.safetensors")
    filled = [name for name, _ in model.named_parameters() if name not in model.fresh]
    for name in filled:
        own = stored[name] if name in stored else stored[name.removeprefix("bert.")]
        assert torch.equal(model.get_parameter(name), own), name
    assert len(filled) > 30


def test_old_names_of_norms_load(tmp_path: Path) -> None:
    peer = make_peer(TINY)
    peer.save_pretrained(tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]
    assert any(name.endswith("gamma") for name in old)
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load.load(tmp_path)[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, peer.get_parameter(name)), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads: 5 heads do not divide hidden_size 12"),
        ({"hidden_act": "swishh"}, "hidden_act: 'swishh' is not one of"),
        ({"position_embedding_type": "relative_key"}, "only absolute positions"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: BERT's head is its embedding"),
    ],
)
def test_a_config_that_cannot_be(change: Raw, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load.create(TINY | change, seed=0)
