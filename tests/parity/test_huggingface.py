"""Wrapped models against themselves in transformers: loss, gradients, generated tokens, saved folders, whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import gradients
from torch import Tensor, nn

import t2t
from t2t import config
from t2t import device as devices
from t2t.cli import main
from t2t.config import Generate, Optim
from t2t.data.packing import IGNORE, Batch, Feature, collate
from t2t.errors import InputError
from t2t.generate.decode import decode
from t2t.models import huggingface, load
from t2t.models.base import Rows
from t2t.models.huggingface import Wrapped
from t2t.optim.build import Optimizer
from t2t.train import run
from t2t.train.step import batch_loss, train_step

Raw = dict[str, Any]

IDS: Raw = {"vocab_size": 48, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
STACK: Raw = IDS | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BOTH: Raw = IDS | {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
# Windows shorter than the examples, and heads that are not width / number, show what equal sizes would hide.
LOCAL: Raw = STACK | {"head_dim": 6, "sliding_window": 4}
SEQ2SEQ: dict[str, Raw] = {
    "bart": BOTH | {"model_type": "bart"},
    "pegasus": BOTH | {"model_type": "pegasus"},
    "marian": BOTH | {"model_type": "marian", "decoder_start_token_id": 0},
    "t5gemma": IDS
    | {
        "model_type": "t5gemma",
        "encoder": LOCAL | {"model_type": "t5_gemma_module"},
        "decoder": LOCAL | {"model_type": "t5_gemma_module", "cross_attention_hidden_size": 16},
    },
}
CAUSAL: dict[str, Raw] = {
    "llama": STACK | {"model_type": "llama"},
    "qwen3": STACK | {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma2": LOCAL | {"model_type": "gemma2"},
    "gemma3": LOCAL | {"model_type": "gemma3_text"},
    "opt": IDS
    | {"model_type": "opt", "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 64, "word_embed_proj_dim": 16},
    "pythia": STACK | {"model_type": "gpt_neox"},
    "bloom": IDS | {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "mixtral": STACK | {"model_type": "mixtral", "num_local_experts": 4},
}
MASKED: dict[str, Raw] = {
    "modernbert": STACK
    | {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "local_attention": 4}
    | {"global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
    # It counts positions from the padding's id + 1.
    "roberta": STACK | {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "pad_token_id": 1},
}
ALL = SEQ2SEQ | CAUSAL | MASKED
every = pytest.mark.parametrize("raw", [pytest.param(raw, id=name) for name, raw in ALL.items()])


def peer_of(raw: Raw) -> Any:
    """The model of transformers, far from zero so that biases and masks show; buffers too."""
    import transformers

    torch.manual_seed(0)
    auto = getattr(transformers, huggingface.family(raw).auto)
    inner = auto.from_config(transformers.AutoConfig.for_model(**raw)).eval()
    for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]:
        if tensor.requires_grad or name == "final_logits_bias":
            nn.init.normal_(tensor, std=0.3)
    return inner


@pytest.fixture
def both(tmp_path: Path) -> Callable[[Raw], tuple[Wrapped, Any]]:
    """The same weights in ours, through a folder, and in transformers."""

    def make(raw: Raw) -> tuple[Wrapped, Any]:
        peer = peer_of(raw)
        peer.save_pretrained(tmp_path / "peer")
        model = load.load(tmp_path / "peer")[0].eval()
        assert isinstance(model, Wrapped)
        return model, peer

    return make


def features(kind: str, start: int = 2) -> list[Feature]:
    """Examples of several lengths, one of a single token."""
    rng = np.random.default_rng(1)
    found = []
    for n, m in [(11, 7), (5, 9), (1, 1)]:
        source, target = rng.integers(3, 48, n), rng.integers(3, 48, m)
        if kind == "seq2seq":
            found.append(Feature(source, np.append(start, target[:-1]), target))
        elif kind == "causal":
            labels = np.append(source[1:], target)
            labels[: n // 2] = IGNORE
            found.append(Feature(source[:0], np.append(source, target[:-1]), labels))
        else:
            labels = np.where(rng.random(n) < 0.5, rng.integers(3, 48, n), IGNORE)
            labels[0] = 5
            found.append(Feature(source[:0], source, labels))
    return found


def batch_of(examples: list[Feature], model: Wrapped, rows: list[list[int]]) -> Batch:
    longest = (max(feature.size[side] for feature in examples) for side in (0, 1))
    return collate(examples, list(range(len(examples))), rows, *longest, model.config.pad_id)


def own_loss(peer: Any, kind: str, feature: Feature) -> Tensor:
    """The sum that an example's own forward(labels=...) gives, without any padding."""
    labels = torch.from_numpy(feature.labels.astype(np.int64))[None]
    inputs = torch.from_numpy(feature.inputs)[None]
    if kind == "seq2seq":
        output = peer(input_ids=torch.from_numpy(feature.source)[None], labels=labels)
    elif kind == "masked":
        output = peer(input_ids=inputs, labels=labels)
    else:  # it moves the labels itself
        tokens = torch.cat([inputs, labels[:, -1:]], 1)
        moved = torch.cat([torch.full((1, 1), IGNORE), labels], 1)
        output = peer(input_ids=tokens, labels=moved)
    return output.loss * (labels != IGNORE).sum()


@every
@pytest.mark.parametrize("rows", [[[0]], [[0], [], [2], [1]]], ids=["alone", "padded"])
def test_loss_and_every_gradient_match_its_own_forward(raw: Raw, rows: list[list[int]], both: Any) -> None:
    model, peer = both(raw)
    examples = features(model.kind, model.config.start_id)
    taken = [i for row in rows for i in row]
    batch = batch_of([examples[i] for i in taken], model, [[taken.index(i) for i in row] for row in rows])
    sums, each = batch_loss(model, batch)
    theirs = sum(own_loss(peer, model.kind, examples[i]) for i in taken)
    torch.testing.assert_close(sums[0], theirs, rtol=1e-5, atol=0)
    torch.testing.assert_close(each.sum(), sums[0].detach())
    assert each.shape == batch.labels.shape and (each[torch.from_numpy(batch.labels) == IGNORE] == 0).all()
    ours, expected = gradients(model, sums[0]), gradients(peer, theirs)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-5, name


def test_smoothing_is_ours(both: Any) -> None:
    model, peer = both(CAUSAL["llama"])
    batch = batch_of(features("causal"), model, [[0], [1], [2]])
    ids, labels = torch.from_numpy(batch.target_ids), torch.from_numpy(batch.labels)
    logits = peer(ids, attention_mask=torch.from_numpy(batch.target_segments)).logits.flatten(0, 1)
    theirs = nn.functional.cross_entropy(logits, labels.flatten(), label_smoothing=0.2, reduction="sum")
    torch.testing.assert_close(batch_loss(model, batch, 0.2)[0][0], theirs, rtol=1e-5, atol=0)


@every
def test_a_short_run_lowers_the_loss(raw: Raw) -> None:
    model = load.create(raw, seed=0).train()
    examples = features(model.kind)
    batches = [batch_of(examples[:2], model, [[0], [1]]), batch_of(examples[2:], model, [[0], []])]
    optimizer = Optimizer(dict(model.named_parameters()), Optim(), 0.01, lambda n: 1.0)
    losses = [train_step(model, optimizer, batches, n, 0, 1.0, 0.0).loss for n in range(30)]
    assert np.mean(losses[-3:]) < 0.7 * losses[0]


@every
def test_what_we_save_opens_in_transformers(raw: Raw, both: Any, tmp_path: Path) -> None:
    import transformers

    model, peer = both(raw)
    load.save(model.state_dict(), raw, tmp_path / "ours")
    auto = getattr(transformers, model.auto)
    again, info = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    batch = batch_of(features(model.kind), model, [[0], [1], [2]])
    tensors = (getattr(batch, name) for name in Rows._fields)
    rows = Rows(*(None if x is None else torch.from_numpy(x) for x in tensors))  # type: ignore[arg-type]
    for inner in (again.eval(), peer):
        torch.testing.assert_close(type(model)(model.config, inner).logits(rows), model.logits(rows))


def prompts() -> tuple[Tensor, Tensor]:
    """Inputs of one example a row, padded on the right, one of a single token."""
    lengths = torch.tensor([9, 4, 1])
    segments = (torch.arange(9) < lengths[:, None]).long()
    return torch.randint(3, 48, (3, 9), generator=torch.Generator().manual_seed(1)) * segments, segments


@pytest.mark.parametrize("raw", [pytest.param(raw, id=name) for name, raw in (SEQ2SEQ | CAUSAL).items()])
@pytest.mark.parametrize("beams", [1, 3])
def test_generated_tokens_match_its_own(raw: Raw, beams: int, both: Any) -> None:
    model, peer = both(raw)
    ids, segments = prompts()
    settings = {"do_sample": False, "num_beams": beams, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 1}
    ours = decode(model, ids, segments, Generate(beams=beams), max_length=12).tokens
    if model.kind == "seq2seq":
        theirs = peer.generate(ids, attention_mask=segments, decoder_start_token_id=model.config.start_id, **settings)
        theirs = theirs[:, 1:]
    else:
        moved, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        for i, n in enumerate(segments.sum(1).tolist()):
            moved[i, 9 - n :], mask[i, 9 - n :] = ids[i, :n], 1
        theirs = peer.generate(moved, attention_mask=mask, **settings)[:, 9:]
    assert [until_end(row) for row in ours.tolist()] == [until_end(row) for row in theirs.tolist()]


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(1)] if 1 in tokens else tokens


def test_prompts_of_one_token_and_tokens_that_are_never_said(both: Any) -> None:
    model, peer = both(CAUSAL["llama"])
    ids = torch.tensor([[5], [9]])
    said = decode(model, ids, torch.ones_like(ids), Generate(), max_length=6).tokens
    mask = torch.ones_like(ids)
    settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    assert said.tolist() == peer.generate(ids, attention_mask=mask, **settings)[:, 1:].tolist()
    words = [[int(token)] for token in said[:, 0]]
    model.inner.generation_config.bad_words_ids = words
    other = decode(model, ids, mask, Generate(), max_length=6).tokens
    assert other.tolist() == peer.generate(ids, attention_mask=mask, bad_words_ids=words, **settings)[:, 1:].tolist()
    assert other.tolist() != said.tolist()


@every
def test_parameters_are_found_by_the_names_of_transformers(raw: Raw) -> None:
    model = load.create(raw, seed=0)
    named = dict(model.named_parameters())
    assert list(named) == [name for name, _ in model.inner.named_parameters()]
    assert all(model.get_parameter(name) is parameter for name, parameter in named.items())
    other = load.create(raw, seed=1)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(other.get_parameter(name), parameter) for name, parameter in named.items())
    assert len({tensor.data_ptr() for tensor in model.state_dict().values()}) == len(model.state_dict())
    assert model.eval().inner.training is False and model.train().inner.training is True


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ({"model_type": "bart"}, "seq2seq"),
        ({"model_type": "bart", "is_encoder_decoder": False, "architectures": ["BartForCausalLM"]}, "causal"),
        ({"model_type": "roberta"}, "causal"),
        ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, "masked"),
        ({"model_type": "roberta", "architectures": ["RobertaForCausalLM"]}, "causal"),
        ({"model_type": "modernbert"}, "masked"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "causal"),
    ],
)
def test_the_kind_is_what_the_config_says(raw: Raw, kind: str) -> None:
    assert load.architecture(raw)[0].kind == kind


def test_dropout_reaches_the_model() -> None:
    original = load.architecture(SEQ2SEQ["bart"])[0].read(SEQ2SEQ["bart"], 0.3).original
    assert (original.dropout, original.attention_dropout, original.activation_dropout) == (0.3, 0.3, 0.3)
    assert original.classifier_dropout == 0.0 and original.encoder_layerdrop == 0.0
    nested = load.architecture(SEQ2SEQ["t5gemma"])[0].read(SEQ2SEQ["t5gemma"], 0.3).original
    assert nested.decoder.attention_dropout == nested.encoder.dropout_rate == 0.3
    model = load.create(CAUSAL["llama"], seed=0, dropout=0.5).train()
    batch = batch_of(features("causal"), model, [[0], [1], [2]])
    losses = [batch_loss(model, batch)[1].sum() for _ in range(2)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "model_type: transformers knows no 'lama' \\(did you mean llama\\?\\)"),
        ({"model_type": "whisper"}, "model_type: 'whisper' is no seq2seq, causal or masked language model"),
        ({"num_attention_heads": 5}, "config.json: The hidden size \\(16\\) is not a multiple"),
        ({"eos_token_id": None}, "config.json: eos_token_id: is missing"),
    ],
)
def test_a_config_that_cannot_be(change: Raw, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load.create(CAUSAL["llama"] | change, seed=0)


def test_what_a_model_cannot_do() -> None:
    raw = IDS | {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    ids, segments = prompts()
    with pytest.raises(InputError, match="generate: mamba models keep no keys and values"):
        decode(load.create(raw, seed=0), ids, segments, Generate(), max_length=4)
    with pytest.raises(InputError, match="model.dropout: mamba models have no dropout to set"):
        load.create(raw, seed=0, dropout=0.1)
    model = load.create(MASKED["modernbert"], seed=0)
    with pytest.raises(NotImplementedError, match="do not generate"):
        decode(model, ids, segments, Generate(), max_length=4)


def test_folders_that_cannot_be_opened(tmp_path: Path) -> None:
    peer = peer_of(CAUSAL["llama"])
    peer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    evil = settings | {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code was run')")
    (tmp_path / "config.json").write_text(json.dumps(evil))
    assert torch.equal(load.load(tmp_path)[0].head, peer.lm_head.weight)
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(InputError, match="the weights lack model.layers.2.*and 6 more"):
        load.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings | {"intermediate_size": 32}))
    with pytest.raises(InputError, match=f"{tmp_path}: "):
        load.load(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="only pickled weights"):
        load.load(tmp_path)


def test_a_head_that_was_not_trained_starts_afresh(tmp_path: Path) -> None:
    peer = peer_of(CAUSAL["llama"])
    peer.model.save_pretrained(tmp_path)
    model = load.load(tmp_path)[0]
    assert model.fresh == ("lm_head.weight",)
    assert torch.equal(model.get_parameter("model.norm.weight"), peer.model.norm.weight)


# Whole runs.

MEMORIZE = {"train__steps": "80", "train__batch": "16", "model__dropout": "0", "data__validation_split": "0"}


@pytest.fixture
def flags(tmp_path: Path) -> Callable[..., list[str]]:
    """A command line for a tiny model of bytes, on plain text or on pairs."""
    verse = ["one two three four", "two three four five", "three four five six"]
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(verse[i % 3 :]) for i in range(24)) + "\n")
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}{b}\t{b}{a}\n" for a in "abcd" for b in "uvwx"))

    def flags(raw: Raw, name: str = "run", data: str = "text.txt", **changes: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(raw | {"vocab_size": 384}))
        values = {
            "run.dir": str(tmp_path / name),
            "run.device": "cpu",
            "run.threads": "1",
            "model.config": str(tmp_path / "config.json"),
            "model.tokenizer": "bytes",
            "model.dropout": "0.1",
            "data.train": str(tmp_path / data),
            "data.validation_split": "0.1",
            "data.block": "48",
            "data.max_source_length": "24",
            "data.max_target_length": "16",
            "train.batch": "6",
            "train.steps": "8",
            "train.log_every": "1",
            "checkpoint.every": "4",
            "optim.lr": "0.01",
        }
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        return [part for key, value in values.items() for part in (f"--{key}", value)]

    return flags


def weights_of(folder: Path) -> bytes:
    return (folder / "model/model.safetensors").read_bytes()


def test_llama_is_trained_killed_resumed_evaluated_and_generates(
    flags: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, real = CAUSAL["llama"], run.train_step

    def dies(model: Any, optimizer: Any, batches: Any, step: int, *rest: Any) -> Any:
        if step == 6:
            raise KeyboardInterrupt
        return real(model, optimizer, batches, step, *rest)

    assert main(["train", *flags(raw, "whole")]) == 0
    monkeypatch.setattr(run, "train_step", dies)
    with pytest.raises(KeyboardInterrupt):
        main(["train", *flags(raw, "parts")])
    monkeypatch.setattr(run, "train_step", real)
    assert main(["train", *flags(raw, "parts")]) == 0
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "parts")
    assert "resumed from" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "parts/log.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]

    wide = raw | {"hidden_size": 32, "num_hidden_layers": 1}
    assert main(["train", *flags(wide, "pairs", "pairs.tsv", **MEMORIZE)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "pairs/model"), str(tmp_path / "pairs.tsv"), "--run.device", "cpu"]) == 0
    assert "exact_match" in capsys.readouterr().out
    loaded = t2t.load(tmp_path / "pairs/model", "cpu")
    assert loaded.generate(["au", "bv", "cw"]) == ["ua", "vb", "wc"]
    assert loaded.generate(["au", "bv"], beams=3) == ["ua", "vb"]


def test_bart_learns_pairs(flags: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    raw = SEQ2SEQ["bart"] | {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    assert main(["train", *flags(raw, data="pairs.tsv", **MEMORIZE)]) == 0
    loaded = t2t.load(tmp_path / "run/model", "cpu")
    assert loaded.generate(["au", "bv", "cw"]) == ["ua", "vb", "wc"]
    peer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/model").eval()
    source = torch.tensor([[*loaded.tokenizer.encode("au"), loaded.tokenizer.eos_id]])
    assert loaded.tokenizer.decode(peer.generate(source)[0].tolist()) == "ua"


def test_how_rows_are_cut_and_what_is_recomputed_changes_nothing(
    flags: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(name: str, **changes: str) -> dict[str, float]:
        given = flags(CAUSAL["llama"], name, train__steps="3", model__dropout="0", **changes)
        pairs = zip(given[::2], given[1::2], strict=True)
        return run.train(config.load(overrides={key.removeprefix("--"): value for key, value in pairs}), lambda _: None)

    seen: list[tuple[int, ...]] = []
    real = batch_loss
    monkeypatch.setattr("t2t.train.step.batch_loss", lambda m, b, s=0.0: seen.append(b.labels.shape) or real(m, b, s))
    plain = trained("plain")
    one_by_one = trained("one by one", train__micro_rows="1")
    recomputed = trained("recomputed", train__gradient_checkpointing="true")
    assert len(set(seen)) > 1
    seen.clear()
    monkeypatch.setattr(devices, "static_shapes", lambda device: True)
    static = trained("static", train__micro_rows="4")
    assert len(set(seen)) == 1, "one shape for all"
    for other in (one_by_one, recomputed, static):
        assert other["validation_loss"] == pytest.approx(plain["validation_loss"], rel=1e-4)


def test_examples_longer_than_the_positions(flags: Any) -> None:
    raw = CAUSAL["opt"] | {"max_position_embeddings": 40}
    assert main(["train", *flags(raw)]) == 2
