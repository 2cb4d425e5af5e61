"""Published sizes by name: their parameters, how they follow a tokenizer, and what overrides may change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from t2t import config
from t2t.errors import InputError
from t2t.models import load, sizes
from t2t.train.run import build

# As their pages and papers give them: to the parameter, or in millions where they are rounded.
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-small": 76_961_152,
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-large": 783_150_080,
    "t5-v1_1-xl": 2_849_757_184,
    "t5-v1_1-xxl": 11_135_332_352,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "byt5-small": 299_637_760,
    "byt5-base": 581_653_248,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
}
ROUNDED = {
    "byt5-large": 1_230, "byt5-xl": 3_740, "byt5-xxl": 12_900, "umt5-small": 306.6, "umt5-base": 592.9,
    "umt5-xl": 3_770, "umt5-xxl": 13_000, "bert-tiny": 4.4, "bert-mini": 11.3, "bert-small": 29.1, "bert-medium": 41.7,
    "bert-base-uncased": 110, "bert-base-cased": 109, "bert-large-uncased": 336, "bert-large-cased": 334,
}  # fmt: skip


def count(raw: dict[str, Any]) -> int:
    family, architecture = load.architecture(raw)
    with torch.device("meta"):
        return sum(p.numel() for p in family(architecture).parameters())


@pytest.mark.parametrize("name", sizes.SIZES)
def test_parameters_are_as_published(name: str) -> None:
    published = PUBLISHED.get(name.replace("flan-t5", "t5-v1_1"))
    if published is not None:
        assert count(sizes.named(name)) == published
    else:
        assert count(sizes.named(name)) / 1e6 == pytest.approx(ROUNDED[name], rel=0.012)  # with BERT's two heads


SMALLEST = (
    *("t5-small", "t5-v1_1-small", "mt5-small", "umt5-small", "byt5-small"),
    *("gpt2", "gpt-neo-125m", "bert-tiny"),
)


@pytest.mark.parametrize("name", SMALLEST)
def test_transformers_makes_the_same_of_the_config(name: str, tmp_path: Path) -> None:
    import transformers

    raw = load.scratch_config(name, ["vocab_size=64"])
    family = load.NATIVE[raw["model_type"]]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs_config = transformers.AutoConfig.from_pretrained(tmp_path)
    told = {key: value for key, value in raw.items() if value is not None and key != "tie_word_embeddings"}
    assert {key: getattr(theirs_config, key) for key in told} == told
    with torch.device("meta"):
        theirs = getattr(transformers, family.classes[raw["model_type"]])(theirs_config)
    # It ties the head of every T5 that it makes itself.
    tied_there_alone = raw.get("tie_word_embeddings") is False and theirs_config.tie_word_embeddings
    head = 64 * raw["d_model"] if tied_there_alone else 0
    assert count(raw) == sum(p.numel() for p in theirs.parameters()) + head


SHALLOW = {
    "t5": ("num_layers=2", "num_decoder_layers=2"),
    "gpt2": ("n_layer=2", "n_embd=128", "n_head=2"),
    "gpt_neo": ("num_layers=2", "hidden_size=128", "num_heads=2"),
    "bert": (),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_new_weights_have_the_scales_of_transformers_but_for_the_head_of_t5(name: str, tmp_path: Path) -> None:
    import transformers

    kind = sizes.named(name)["model_type"]
    layers = SHALLOW["t5" if "t5" in kind else kind]
    raw = load.scratch_config(name, ["vocab_size=512", *layers])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    family, architecture = load.architecture(raw)
    ours = family(architecture)
    ours.initialize()
    theirs = getattr(transformers, family.classes[kind])(transformers.AutoConfig.from_pretrained(tmp_path))
    others = dict(theirs.named_parameters())
    for key, value in ours.named_parameters():
        if value.numel() < 4096:
            continue
        scale = raw["d_model"] ** -0.5 if key == "lm_head.weight" else others[key].std().item()
        assert value.std().item() == pytest.approx(scale, rel=0.05), key


@pytest.mark.parametrize(
    ("name", "vocab_size", "rows"),
    [
        *(("t5-base", 32100, 32128), ("mt5-small", 250100, 250112), ("umt5-small", 256300, 256384)),
        *(("gpt2", 50257, 50257), ("bert-tiny", 30522, 30522), ("byt5-small", 384, 384)),  # each with its own
        *(("gpt2", 384, 384), ("t5-base", 16001, 16064), ("t5-base", 32000, 32000), ("t5-base", 32129, 32192)),
    ],
)
def test_vocabulary_follows_the_tokenizer(name: str, vocab_size: int, rows: int) -> None:
    assert load.scratch_config(name, (), vocab_size)["vocab_size"] == rows
    assert load.scratch_config(name, ["vocab_size=70000"], vocab_size)["vocab_size"] == 70000


def test_special_ids_follow_the_tokenizer() -> None:
    gpt = load.architecture(load.scratch_config("gpt2", (), 300, eos_id=299, pad_id=7))[1]
    assert (gpt.start_id, gpt.eos_id, gpt.pad_id) == (299, 299, 7)
    t5 = load.architecture(load.scratch_config("t5-small", (), 300, eos_id=5, pad_id=3))[1]
    assert (t5.start_id, t5.eos_id, t5.pad_id) == (3, 5, 3)


def test_a_file_or_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = sizes.named("t5-small") | {"d_model": 24, "vocab_size": 1000}
    Path("t5-base").mkdir()
    Path("t5-base/config.json").write_text(json.dumps(raw))
    Path("gpt2").write_text(json.dumps(raw))
    for name in ("t5-base", "gpt2"):
        found = load.scratch_config(name, ["d_ff=32"], vocab_size=384, eos_id=9)
        assert found == raw | {"d_ff": 32}, "as it stands, but for what the user changes"
    assert load.scratch_config("t5-large")["d_model"] == 1024


def test_depth_overrides_keep_what_belongs_together() -> None:
    deep = load.architecture(load.scratch_config("t5-base", ["num_layers=3"]))[1]
    assert (deep.num_layers, deep.num_decoder_layers) == (3, 3)
    written = sizes.named("t5-base") | {"num_decoder_layers": 12}  # as transformers writes it
    assert sizes.changed(written, ["num_layers=3"])["num_decoder_layers"] == 3
    assert sizes.changed(written, ["num_layers=3", "num_decoder_layers=1"])["num_decoder_layers"] == 1
    assert sizes.changed(sizes.named("byt5-small"), ["num_layers=3"])["num_decoder_layers"] == 4
    neo = load.architecture(load.scratch_config("gpt-neo-125m", ["num_layers=4", "window_size=16"]))[1]
    assert neo.windows == (0, 16, 0, 16)
    one_kind = ["num_layers=3", 'attention_types=[[["global"], 3]]']
    assert load.architecture(load.scratch_config("gpt-neo-125m", one_kind))[1].windows == (0, 0, 0)


def test_overrides_keep_types() -> None:
    changes = ["dropout_rate=0", "tie_word_embeddings=true", "feed_forward_proj=gated-silu", " d_ff = 32 "]
    raw = load.scratch_config("t5-v1_1-base", changes)
    assert [raw["dropout_rate"], raw["tie_word_embeddings"], raw["feed_forward_proj"], raw["d_ff"]] == [
        0.0, True, "gated-silu", 32,
    ]  # fmt: skip
    assert isinstance(raw["dropout_rate"], float)
    assert sizes.named("t5-v1_1-base")["d_ff"] == 2048, "the table itself stays"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "t5-bsae",
            "",
            "model.config: t5-bsae is neither a file or folder here nor a known size (did you mean t5-base?)",
        ),
        ("zzz", "", "; sizes: t5-small, t5-base"),
        ("gone/t5-base", "", "gone/t5-base: no config.json there"),
        ("t5-base.json", "", "t5-base.json: no config.json there"),
        ("t5-base", "num_layer=2", "model.overrides: num_layer: no key of a t5 config (did you mean num_layers?)"),
        ("t5-base", "model_type=gpt2", "model.overrides: model_type: no key"),
        ("t5-base", "num_layers", "model.overrides: 'num_layers': expected key=value"),
        ("t5-base", "num_layers=two", "model.overrides: num_layers: expected a whole number as 12, got 'two'"),
        ("t5-base", "num_layers=2.5", "expected a whole number"),
        ("t5-base", "num_layers=true", "expected a whole number"),
        ("t5-base", "num_layers=0", "model.overrides: num_layers: must be 1 or more, got 0"),
        ("t5-base", "pad_token_id=-1", "model.overrides: pad_token_id: must be 0 or more"),
        ("t5-base", "dropout_rate=-0.1", "model.overrides: dropout_rate: must be 0 or more"),
        ("t5-base", "tie_word_embeddings=1", "expected true or false"),
        ("t5-base", "feed_forward_proj=gated", "model.overrides: feed_forward_proj: 'gated' is not one of"),
        ("gpt2", "n_head=7", "model.overrides: "),
        ("bert-tiny", "hidden_size=129", "model.overrides: num_attention_heads: 2 heads do not divide hidden_size 129"),
        ("gpt-neo-125m", "num_layers=5", "model.overrides: attention_types: "),
    ],
)
def test_what_cannot_be_is_refused(name: str, change: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load.scratch_config(name, [change] if change else [])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bert-tiny", ["vocab_size=2000"]),
        ("gpt-neo-125m", ["num_layers=2", "hidden_size=128", "num_heads=2", "vocab_size=2000"]),
    ],
)
def test_fresh_weights_have_the_papers_scale(name: str, changes: list[str]) -> None:
    """BERT's and GPT-Neo's, the same for all matrices; T5's and GPT-2's are with their parity tests."""
    model = load.create(load.scratch_config(name, changes), seed=0)
    for key, weight in model.named_parameters():
        if key.endswith("bias"):
            assert (weight == 0).all(), key
        elif weight.ndim == 1:
            assert (weight == 1).all(), key
        elif weight.numel() > 10_000:
            assert weight.std().item() == pytest.approx(0.02, rel=0.03), key


def test_overrides_without_a_config_are_refused() -> None:
    with pytest.raises(InputError, match="--model.overrides: changes model.config"):
        config.load(overrides={"model.path": "x", "model.overrides": ["d_model=8"]})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("t5-base", ["num_layers=1", "d_model=16", "d_ff=24", "num_heads=2", "d_kv=4"]),
        ("gpt2", ["n_layer=1", "n_embd=16", "n_head=2"]),
    ],
)
def test_a_run_builds_what_is_named(name: str, changes: list[str], tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("source\ttarget\nunu\tdoi\ntrei\tpatru\n")
    overrides: dict[str, str | list[str]] = {
        "model.config": name, "model.overrides": changes, "model.tokenizer": "bytes", "run.threads": "1",
        "data.train": str(tmp_path / "pairs.tsv"), "run.dir": str(tmp_path / "run"),
    }  # fmt: skip
    run = build(config.load(overrides=overrides), report=lambda line: None)
    assert (run.model.config.vocab_size, run.model.config.eos_id, run.model.config.pad_id) == (384, 1, 0)
    assert run.model.config.num_layers == 1
    assert run.model.head.shape == (384, 16)
