"""Soft prompts and LoRA against peft: logits, losses, gradients and generated tokens, and each other's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor, nn

from t2t import generate
from t2t.config import Generate
from t2t.data.objectives import CausalPairs, Prompted, Seq2Seq
from t2t.data.packing import collate
from t2t.data.ragged import Ragged
from t2t.data.tokens import Pairs
from t2t.generate.decode import decode
from t2t.models import adapters, load
from t2t.models.base import Model, Rows
from t2t.models.huggingface import Wrapped

Raw = dict[str, Any]
T5: Raw = {
    "model_type": "t5", "vocab_size": 48, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "decoder_start_token_id": 0,
}  # fmt: skip
GPT2: Raw = {
    "model_type": "gpt2", "vocab_size": 48, "n_positions": 40, "n_embd": 12, "n_layer": 2, "n_head": 3,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
NEO: Raw = {
    "model_type": "gpt_neo", "vocab_size": 48, "max_position_embeddings": 40, "hidden_size": 12, "num_layers": 2,
    "num_heads": 3, "attention_types": [[["local", "global"], 1]], "window_size": 4, "bos_token_id": 1,
    "eos_token_id": 1,
}  # fmt: skip
LLAMA: Raw = {
    "model_type": "llama", "vocab_size": 48, "max_position_embeddings": 40, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 20, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS = {"t5": T5, "gated t5": T5 | {"feed_forward_proj": "gated-gelu"}, "gpt2": GPT2, "neo": NEO, "llama": LLAMA}
EVERYWHERE = {
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "gated t5": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "neo": ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"],
}
TOKENS = 5


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def base(name: str, tmp_path: Path) -> Path:
    """A folder of transformers with weights far from zero."""
    make_peer(MODELS[name]).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def make_peer(raw: Raw) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    kind = AutoModelForSeq2SeqLM if raw["model_type"] == "t5" else AutoModelForCausalLM
    peer = kind.from_config(AutoConfig.for_model(**raw), attn_implementation="eager").eval()
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return peer


def open_peer(base: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if (load.read_config(base)["model_type"] == "t5") else AutoModelForCausalLM
    return kind.from_pretrained(base, attn_implementation="eager").eval()


def task(model: Model) -> str:
    return str(adapters.TASKS[model.kind])


def fill(module: nn.Module) -> None:
    """Numbers that show, also where an adapter starts from nothing; the same under our names and under peft's."""
    generator = torch.Generator().manual_seed(7)
    for _, p in sorted(((stored(name), p) for name, p in named_trained(module)), key=lambda item: item[0]):
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)


def stored(name: str) -> str:
    """The name in a file of a parameter of ours or of peft's."""
    return name.replace(".default", "") if ".default" in name else adapters.stored_name(name)


def named_trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def batch() -> dict[str, Tensor]:
    """Ids, mask and labels of one example a row, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(11) < torch.tensor([[11], [4], [1]])).long()
    ids = torch.randint(2, 48, (3, 11), generator=generator) * mask
    said = (torch.arange(7) < torch.tensor([[7], [3], [5]])).long()
    targets = torch.randint(2, 48, (3, 7), generator=generator)
    return {"ids": ids, "mask": mask, "targets": targets, "said": said}


def our_rows(model: Model) -> Rows:
    """The batch as the native model takes it, behind the ids of its soft prompt."""
    b = batch()
    prompt = torch.tensor(list(model.prompt), dtype=torch.long).expand(3, -1)
    ids, mask = torch.cat([prompt, b["ids"]], 1), torch.cat([torch.ones_like(prompt), b["mask"]], 1)
    if model.kind == "seq2seq":
        labels = b["targets"].masked_fill(b["said"] == 0, -100)
        shifted = F.pad(b["targets"], (1, 0))[:, :-1]
        return Rows(ids, mask, shifted, b["said"], torch.arange(7).expand(3, -1), labels)
    none = ids.new_zeros(3, 0)
    # The next token is the label, and no example's last slot has one.
    labels = F.pad(ids[:, 1:], (0, 1)).masked_fill(F.pad(mask[:, 1:], (0, 1)) == 0, -100)
    labels[:, : len(model.prompt)] = -100
    return Rows(none, none, ids, mask, torch.arange(ids.shape[1]).expand_as(ids), labels)


def our_logits(model: Model) -> Tensor:
    rows = our_rows(model)
    if isinstance(model, Wrapped):
        return model.logits(rows)
    if model.kind == "seq2seq":
        hidden = model(rows.source_ids, rows.source_segments, rows.target_ids, rows.target_segments)
        return F.linear(hidden, model.head)
    return F.linear(model(rows.target_ids, rows.target_segments, rows.target_positions), model.head)


def their_logits(peer: Any, seq2seq: bool) -> Tensor:
    b = batch()
    if seq2seq:
        shifted = F.pad(b["targets"], (1, 0))[:, :-1]
        given = {"decoder_input_ids": shifted, "decoder_attention_mask": b["said"]}
        return peer(input_ids=b["ids"], attention_mask=b["mask"], **given).logits
    return peer(input_ids=b["ids"], attention_mask=b["mask"]).logits


def assert_same_logits(model: Model, peer: Any) -> None:
    """Where there is a token; elsewhere nothing is said."""
    rows = our_rows(model)
    with torch.no_grad():
        ours, theirs = our_logits(model.eval()), their_logits(peer.eval(), model.kind == "seq2seq")
    real = rows.target_segments > 0
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-4)


def their_loss(peer: Any, model: Model) -> Tensor:
    """Summed over the labels that the native model has."""
    logits = their_logits(peer, model.kind == "seq2seq")
    return F.cross_entropy(logits.flatten(0, 1), our_rows(model).labels.flatten(), reduction="sum")


def trained_gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*named_trained(module), strict=True)
    found = torch.autograd.grad(loss, parameters)
    return dict(zip(map(stored, names), found, strict=True))


# Soft prompts


def with_prompt(base: Path) -> Model:
    model = load.load(base)[0].eval()
    adapters.add_prompt(model, torch.randn(TOKENS, model.head.shape[1], generator=torch.Generator().manual_seed(3)))
    return model


def test_a_soft_prompt_that_we_save_opens_in_peft(base: Path, tmp_path: Path) -> None:
    model = with_prompt(base)
    adapters.save(model, dict(model.named_parameters()), str(base), tmp_path / "adapter")
    assert (tmp_path / "adapter" / adapters.WEIGHTS).stat().st_size < 1024
    peer = PeftModel.from_pretrained(open_peer(base), tmp_path / "adapter")
    assert_same_logits(model, peer)
    for _, prompt in named_trained(model):
        prompt.data[0, 0] += 1
    with pytest.raises(AssertionError):
        assert_same_logits(model, peer)


@pytest.mark.parametrize("submodules", [None, 1])
def test_a_soft_prompt_that_peft_saves_opens_here(base: Path, tmp_path: Path, submodules: int | None) -> None:
    plain = load.load(base)[0]
    settings = PromptTuningConfig(
        task_type=task(plain), num_virtual_tokens=TOKENS, num_transformer_submodules=submodules
    )
    peer = get_peft_model(open_peer(base), settings)
    peer.save_pretrained(tmp_path / "adapter")
    model = adapters.load(tmp_path / "adapter")[0]
    assert len(model.prompt) == TOKENS
    assert_same_logits(model, peer)


def test_loss_and_gradient_of_a_soft_prompt_match_peft(base: Path, tmp_path: Path) -> None:
    model = with_prompt(base)
    adapters.save(model, dict(model.named_parameters()), str(base), tmp_path / "adapter")
    peer = PeftModel.from_pretrained(open_peer(base), tmp_path / "adapter").double().eval()
    peer.prompt_encoder.requires_grad_(True)
    model.double()
    sums, _ = model.loss(our_rows(model), 0.0)
    theirs = their_loss(peer, model)
    torch.testing.assert_close(sums[0], theirs, rtol=1e-6, atol=0)
    ((name, ours),) = trained_gradients(model, sums[0]).items()
    (expected,) = trained_gradients(peer, theirs).values()
    assert name == "prompt_embeddings"
    assert ours.norm() > 0
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"], indirect=True)
def test_every_segment_of_a_packed_row_has_its_own_soft_prompt(base: Path) -> None:
    model = with_prompt(base).double()
    lists = ([[5, 6, 7, 1], [8, 1], [9, 10, 11]], [[12, 13, 1], [14, 1], [15, 16, 17, 1]])
    pairs = Pairs(*(Ragged.of(side, 48) for side in lists), ("a:1", "a:2", "a:3"), 0, 0)
    inner = Seq2Seq(pairs, start_id=0) if model.kind == "seq2seq" else CausalPairs(pairs)
    examples = Prompted(inner, model.prompt, model.kind)
    features = [examples.feature(i, 0) for i in range(3)]
    sizes = (side.tolist() for side in examples.sizes(np.arange(3)))
    assert [f.size for f in features] == list(zip(*sizes, strict=True))
    widths = [sum(f.size[side] for f in features) for side in (0, 1)]

    def loss(rows: list[list[int]], side: list[int]) -> Tensor:
        made = collate(features, [0, 1, 2], rows, *side, pad_id=0)
        tensors = (getattr(made, field) for field in Rows._fields)
        return model.loss(Rows(*(x if x is None else torch.from_numpy(x) for x in tensors)), 0.0)[0][0]  # type: ignore[arg-type]

    alone, packed = loss([[0], [1], [2]], widths), loss([[0, 1, 2]], widths)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0)
    one, two = trained_gradients(model, alone), trained_gradients(model, packed)
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


def test_generation_behind_a_soft_prompt_matches_peft(base: Path, tmp_path: Path) -> None:
    model = with_prompt(base)
    adapters.save(model, dict(model.named_parameters()), str(base), tmp_path / "adapter")
    peer = PeftModel.from_pretrained(open_peer(base), tmp_path / "adapter")
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": 1}
    said = set()
    for ids, mask in zip(batch()["ids"], batch()["mask"], strict=True):
        alone = ids[None, mask == 1]
        theirs = peer.generate(input_ids=alone, attention_mask=torch.ones_like(alone), **settings)[0].tolist()
        theirs = theirs[1 if model.kind == "seq2seq" else alone.shape[1] :]
        behind = torch.cat([torch.tensor([list(model.prompt)]), alone], 1)
        ours = decode(model, behind, torch.ones_like(behind), Generate(), max_length=9).tokens[0].tolist()
        assert until_end(ours) == until_end(theirs)
        said |= set(ours)
    assert len(said) > 1


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(1)] if 1 in tokens else tokens


# LoRA


@pytest.mark.parametrize("everywhere", [False, True])
def test_loss_and_gradients_of_lora_match_peft(base: Path, name: str, everywhere: bool) -> None:
    model = load.load(base)[0].eval()
    targets = EVERYWHERE[name] if everywhere else []
    adapters.add_lora(model, r=3, alpha=5, targets=targets)
    settings = LoraConfig(task_type=task(model), r=3, lora_alpha=5, target_modules=targets or None)
    peer = get_peft_model(open_peer(base), settings).double().eval()
    model.double()
    fill(model), fill(peer)
    sums, theirs = model.loss(our_rows(model), 0.0)[0][0], their_loss(peer, model)
    torch.testing.assert_close(sums, theirs, rtol=1e-6, atol=0)
    ours, expected = trained_gradients(model, sums), trained_gradients(peer, theirs)
    assert ours.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.norm() > 0
        assert (ours[key] - gradient).norm() <= 1e-5 * gradient.norm(), key


def test_lora_starts_as_peft_does(base: Path) -> None:
    model = load.load(base)[0]
    before = our_logits(model.eval())
    adapters.add_lora(model, r=4, alpha=8, seed=1)
    assert torch.equal(our_logits(model), before)
    for key, p in named_trained(model):
        if key.endswith("lora_A"):  # uniform within 1 / sqrt(inputs)
            assert 0.5 / p.shape[1] ** 0.5 < p.abs().max() <= 1 / p.shape[1] ** 0.5
        else:
            assert not p.any()


def test_lora_that_we_save_opens_in_peft(base: Path, name: str, tmp_path: Path) -> None:
    model = load.load(base)[0].eval()
    adapters.add_lora(model, r=3, alpha=5, targets=EVERYWHERE[name])
    fill(model)
    adapters.save(model, dict(model.named_parameters()), str(base), tmp_path / "adapter")
    assert_same_logits(model, PeftModel.from_pretrained(open_peer(base), tmp_path / "adapter"))
    folded = adapters.load(tmp_path / "adapter")[0]
    torch.testing.assert_close(our_logits(folded.eval()), our_logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["plain", "rslora", "patterns", "regex"])
def test_lora_that_peft_saves_opens_here(base: Path, name: str, tmp_path: Path, how: str) -> None:
    plain = load.load(base)[0]
    targets: list[str] | str = EVERYWHERE[name]
    more: dict[str, Any] = {}
    if how == "rslora":
        more = {"use_rslora": True}
    elif how == "patterns":
        more = {"rank_pattern": {targets[0]: 2}, "alpha_pattern": {targets[0]: 11, f".*0.*.{targets[-1]}": 2}}
    elif how == "regex":
        targets = rf".*\.({'|'.join(targets[:2])})"
    settings = LoraConfig(task_type=task(plain), r=3, lora_alpha=5, lora_dropout=0.3, target_modules=targets, **more)
    peer = get_peft_model(open_peer(base), settings)
    fill(peer)
    peer.save_pretrained(tmp_path / "adapter")
    assert_same_logits(adapters.load(tmp_path / "adapter")[0], peer)


def test_lora_adapts_modules_of_transformers_too(base: Path, name: str) -> None:
    """By module names alone: what a wrapped model needs, Conv1D among it."""
    model, native = open_peer(base), load.load(base)[0]
    model.kind, model.family = native.kind, "another"
    adapters.add_lora(model, r=3, alpha=5, targets=EVERYWHERE[name])
    peer = get_peft_model(
        open_peer(base), LoraConfig(task_type=task(native), r=3, lora_alpha=5, target_modules=EVERYWHERE[name])
    ).eval()
    fill(model), fill(peer)
    ours, theirs = their_loss(model, native), their_loss(peer, native)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    expected = trained_gradients(peer, theirs)
    for key, gradient in trained_gradients(model, ours).items():
        assert (gradient - expected[key]).norm() <= 1e-4 * expected[key].norm(), key


def test_a_merged_folder_opens_in_transformers(base: Path, name: str, tmp_path: Path) -> None:
    model = load.load(base)[0].eval()
    adapters.add_lora(model, r=3, alpha=5, targets=EVERYWHERE[name])
    fill(model)
    adapters.save(model, dict(model.named_parameters()), str(base), tmp_path / "adapter")
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    generate.merge(tmp_path / "adapter", tmp_path / "merged")
    merged = open_peer(tmp_path / "merged")
    assert_same_logits(model, merged)
    peer = PeftModel.from_pretrained(open_peer(base), tmp_path / "adapter").merge_and_unload()
    for key, weight in peer.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[key], weight, rtol=1e-5, atol=1e-6, msg=key)
