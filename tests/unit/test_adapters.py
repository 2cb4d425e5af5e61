"""Light-weight tuning from command to folder: what moves, what is kept, what resumes, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import t2t
from t2t import cli, config
from t2t.checkpoint import store
from t2t.config import Config, Generate, Optim
from t2t.data.tokens import Bytes
from t2t.errors import InputError
from t2t.generate import batching, merge
from t2t.generate.decode import Output
from t2t.models import adapters, load
from t2t.models.base import Model, Rows
from t2t.optim.build import Optimizer, default_lr
from t2t.train import evaluate, run
from t2t.train.run import train
from t2t.train.summary import model_summary

T5 = {
    "model_type": "t5", "vocab_size": 384, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
}  # fmt: skip
GPT = {
    "model_type": "gpt2", "vocab_size": 384, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3,
    "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
BERT = {
    "model_type": "bert", "vocab_size": 48, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 20, "max_position_embeddings": 40,
}  # fmt: skip
BASES = {"t5": T5, "gpt2": GPT}
METHODS = {"prompt": {"tune__tokens": "4"}, "lora": {"tune__r": "2"}}
Make = Callable[..., Config]


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_base(tmp_path / "base", BASES[request.param])


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def write_base(folder: Path, raw: dict[str, Any]) -> Path:
    """Weights far from zero: an adapter steers what the model does, and a model that does nothing cannot be steered."""
    model = load.create(raw, seed=0)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.3)
    load.save(model.state_dict(), raw, folder)
    Bytes().save(folder)
    return folder


@pytest.fixture
def make(base: Path, method: str, tmp_path: Path) -> Make:
    """A config of 6 steps that tunes the base by the method under test."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=rng.randint(2, 8))) for _ in range(20)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))

    def make(name: str = "run", /, **overrides: str | list[str]) -> Config:
        given = {
            "run.dir": str(tmp_path / name),
            "run.threads": "1",
            "run.device": "cpu",
            "model.path": str(base),
            "model.dropout": "0.1",
            "data.train": str(tmp_path / "pairs.tsv"),
            "data.max_source_length": "16",
            "data.max_target_length": "12",
            "tune.method": method,
            "train.batch": "8",
            "train.steps": "6",
            "train.micro_rows": "4",
            "train.log_every": "1",
            "checkpoint.every": "2",
            "optim.weight_decay": "0.1",
            "optim.lr": "0.05",
        }
        more = METHODS[method] | overrides
        return config.load(overrides=given | {key.replace("__", "."): value for key, value in more.items()})

    return make


def quiet(line: str) -> None:
    pass


def saved(chosen: Config, step: int) -> store.Checkpoint:
    return store.load(chosen.run_dir / "checkpoints" / f"step-{step:06d}")


def tiny(raw: dict[str, Any]) -> Model:
    return load.create(raw | {"vocab_size": 48}, seed=0)


# A run


def test_training_moves_the_adapter_alone(make: Make, base: Path) -> None:
    chosen = make()
    before = load_file(base / "model.safetensors")
    built = run.build(chosen, quiet)
    started = {name: p.detach().clone() for name, p in built.model.named_parameters() if p.requires_grad}
    train(chosen, quiet)
    kept = saved(chosen, 6)
    assert kept.model.keys() == started.keys()
    assert all(not torch.equal(kept.model[name], tensor) for name, tensor in started.items())
    assert {name.partition("/")[2] for name in kept.optim} == started.keys()
    after = load_file(base / "model.safetensors")
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_the_base_does_not_move_in_memory(make: Make, base: Path) -> None:
    built = run.build(make(), quiet)
    base_weights = {id(p): p.detach().clone() for p in built.model.parameters() if not p.requires_grad}
    count = sum(p.numel() for p in load.load(base)[0].parameters())
    assert sum(p.numel() for p in base_weights.values()) == count
    for step in range(3):
        run._step(built, built.loader.step(step))
        built.step += 1
    for p in built.model.parameters():
        assert p.requires_grad or torch.equal(p, base_weights[id(p)])


def test_the_model_folder_is_an_adapter_of_kilobytes(make: Make, base: Path, method: str) -> None:
    chosen = make()
    train(chosen, quiet)
    folder = chosen.run_dir / "model"
    files = {file.name for file in folder.iterdir()}
    assert files == {
        adapters.CONFIG, adapters.WEIGHTS, "generation_config.json", "t2t.json", "tokenizer_config.json",
    }  # fmt: skip
    told = json.loads((folder / adapters.CONFIG).read_text())
    assert told["base_model_name_or_path"] == str(base.resolve())
    assert told["peft_type"] == {"prompt": "PROMPT_TUNING", "lora": "LORA"}[method]
    stored = load_file(folder / adapters.WEIGHTS)
    assert sum(t.numel() for t in stored.values()) == sum(t.numel() for t in saved(chosen, 6).model.values())


def test_a_run_that_was_stopped_ends_as_if_it_never_was(make: Make) -> None:
    whole, parts = make("whole"), make("parts")
    train(whole, quiet)
    for stop in ("3", "4", "0"):
        train(make("parts", train__stop_at=stop), quiet)
    one, two = saved(whole, 6), saved(parts, 6)
    for part in ("model", "optim"):
        tensors, others = getattr(one, part), getattr(two, part)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    files = [load_file(c.run_dir / "model" / adapters.WEIGHTS) for c in (whole, parts)]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


def test_a_base_that_changed_is_refused(make: Make, base: Path) -> None:
    train(make(train__stop_at="2"), quiet)
    weights = load_file(base / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="belongs to other base model"):
        train(make(), quiet)


def test_what_is_evaluated_in_training_is_what_the_folder_gives(make: Make, tmp_path: Path) -> None:
    chosen = make(data__validation=str(tmp_path / "pairs.tsv"), train__metrics=["exact_match", "chrf"])
    figures = train(chosen, quiet)
    again = evaluate.evaluate(str(chosen.run_dir / "model"), [str(tmp_path / "pairs.tsv")], ["exact_match", "chrf"])
    assert again["loss"] == pytest.approx(figures["validation_loss"], rel=1e-5)
    assert again["chrf"] == pytest.approx(figures["validation_chrf"], abs=1e-6)
    lines = (chosen.run_dir / "predictions" / "step-000006.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    loaded = t2t.load(chosen.run_dir / "model")
    assert loaded.generate([row["source"] for row in rows]) == [row["prediction"] for row in rows]


def test_the_adapter_lowers_the_loss(make: Make, base: Path, tmp_path: Path) -> None:
    chosen = make(train__steps="40", checkpoint__every="0")
    train(chosen, quiet)
    files = [str(tmp_path / "pairs.tsv")]
    lengths = {"data.max_source_length": "16", "data.max_target_length": "12"}
    tuned = evaluate.evaluate(str(chosen.run_dir / "model"), files, ["chrf"])
    assert tuned["loss"] < evaluate.evaluate(str(base), files, ["chrf"], lengths)["loss"] - 0.03


def test_low_precision_keeps_the_adapter_in_fp32(make: Make, method: str) -> None:
    built = run.build(make(train__precision="mixed"), quiet)
    assert built.model.head.dtype == torch.bfloat16
    assert {p.dtype for p in built.model.parameters() if p.requires_grad} == {torch.float32}
    run._step(built, built.loader.step(0))


def test_gradient_checkpointing_changes_nothing(make: Make) -> None:
    one, two = (
        run.build(make(train__gradient_checkpointing=v, model__dropout="0.0"), quiet) for v in ("false", "true")
    )
    for built in (one, two):
        run._step(built, built.loader.step(0))
    for name, tensor in one.optimizer.weights().items():
        torch.testing.assert_close(two.optimizer.weights()[name], tensor)


def test_generation_puts_the_soft_prompt_before_every_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load.create(T5, seed=0)
    adapters.add_prompt(model, torch.zeros(3, 16))
    given: list[list[int]] = []

    def decode(model: Model, ids: Tensor, segments: Tensor, *rest: Any) -> Output:
        given.extend(row[real == 1].tolist() for row, real in zip(ids, segments, strict=True))
        return Output(ids[:, :1], None)

    monkeypatch.setattr(batching, "decode", decode)
    list(batching.texts(model, Bytes(), ["abc", "a"], Generate(), 16, max_length=4))
    assert given == [[384, 385, 386, 100, 101, 102, 1], [384, 385, 386, 100, 1]]


# Starts, rates and words


@pytest.mark.parametrize("init", ["vocabulary", "random", "text"])
def test_what_a_soft_prompt_starts_from(tmp_path: Path, init: str) -> None:
    base = write_base(tmp_path / "base", T5)
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    overrides = {
        "run.dir": str(tmp_path / "run"), "model.path": str(base), "data.train": str(tmp_path / "pairs.tsv"),
        "tune.method": "prompt", "tune.tokens": "5", "tune.init": init, "tune.text": "ab" if init == "text" else "",
    }  # fmt: skip
    model = run.build(config.load(overrides=overrides), quiet).model
    rows, table = model.get_parameter("shared.prompt").detach(), model.get_parameter("shared.weight").detach()
    known = (rows[:, None] == table[None]).all(-1)
    if init == "random":
        assert not known.any()
        assert rows.std().item() == pytest.approx(table.std().item(), rel=0.3)
    else:
        found = known.float().argmax(1)
        assert known.any(1).all()
        assert found.tolist() == [100, 101, 100, 101, 100] if init == "text" else len(set(found.tolist())) > 3


def test_default_rates_are_the_adapters() -> None:
    assert default_lr("adamw", "t5", False, "prompt") > default_lr("adamw", "gpt", False, "prompt")
    for family in ("t5", "gpt", "bert", "llama"):
        assert default_lr("adamw", family, False, "lora") > default_lr("adamw", family, False)


def test_the_plan_says_what_is_tuned(make: Make, method: str) -> None:
    text = run.summary(run.build(make(), quiet))
    expected = {"prompt": "a soft prompt of 4 tokens alone", "lora": "LoRA alone, r 2, alpha 16, on "}
    assert expected[method] in text
    assert "trainable" in text


# Merging


def test_merge_on_the_command_line(make: Make, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = make(data__prefix="x: ")
    train(chosen, quiet)
    adapter, out = chosen.run_dir / "model", tmp_path / "merged"
    code = cli.main(["merge", str(adapter), "--out", str(out)])
    told = capsys.readouterr().err
    if method == "prompt":
        assert code == 2
        assert "a soft prompt is part of the input and cannot be folded into weights" in told
        assert not out.exists()
        return
    assert code == 0
    assert not (out / adapters.CONFIG).exists()
    one, two = t2t.load(adapter), t2t.load(out)
    assert one.settings == two.settings
    for name, weight in one.model.named_parameters():
        torch.testing.assert_close(two.model.get_parameter(name), weight, rtol=0, atol=0)
    assert (out / "generation_config.json").read_bytes() == (adapter / "generation_config.json").read_bytes()
    assert cli.main(["merge", str(adapter), "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert cli.main(["merge", str(out), "--out", str(tmp_path / "again")]) == 2
    assert "holds no adapter" in capsys.readouterr().err


# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tune.method": "lora", "tune.dropout": "0.1"}, "--tune.dropout: must be 0 (LoRA adapts weights"),
        ({"tune.method": "lora"}, "--tune.method: an adapter belongs to a trained model: give model.path"),
        ({"tune.method": "lora", "model.path": "x", "model.freeze": "encoder"}, "--model.freeze: tune.method = "),
        ({"tune.init": "text"}, "tune.text: is what tune.init"),
        ({"tune.text": "a"}, "--tune.text: is what tune.init"),
        (
            {"tune.method": "lora", "model.path": "x", "model.new_tokens": "a"},
            "--model.new_tokens: changes the model, ",
        ),
        (
            {"tune.method": "lora", "model.path": "x", "model.vocab_size": "9"},
            "--model.vocab_size: changes the model, ",
        ),
        ({"tune.method": "lorra"}, "--tune.method: 'lorra' is not one of none, prompt, lora (did you mean lora?)"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        config.load(overrides=given)
    assert str(caught.value).startswith(message)


def test_targets_and_kinds_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"tune.targets: no linear layer's name ends with 'qq' .*: k, o, q, v, wi, wo"):
        adapters.add_lora(tiny(T5), 2, 4, ["q", "qq"])
    with pytest.raises(InputError, match=r"tune.targets: no linear layer's name ends with 'shared'"):
        adapters.add_lora(tiny(T5), 2, 4, ["shared"])
    with pytest.raises(InputError, match=r"tune.method: a soft prompt is for models that answer"):
        adapters.add_prompt(tiny(BERT), torch.zeros(2, 12))


def test_more_slots_and_positions_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    overrides = {
        "run.dir": str(tmp_path / "run"), "model.path": str(write_base(tmp_path / "base", GPT)),
        "data.train": str(tmp_path / "pairs.tsv"), "tune.method": "prompt", "tune.tokens": "63",
    }  # fmt: skip
    with pytest.raises(InputError, match="takes 66 positions, 63 of them a soft prompt's; the model has 64"):
        run.build(config.load(overrides=overrides), quiet)
    small = {"tune.tokens": "20", "data.target_row": "16", "data.max_target_length": "4"}
    with pytest.raises(InputError, match=r"data.target_row: must hold the longest example, of 23 slots"):
        run.build(config.load(overrides=overrides | small), quiet)


def broken(folder: Path, **changes: Any) -> None:
    file = folder / adapters.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not supported; supported: LORA, PROMPT_TUNING"),
        ({"use_dora": True}, "use_dora: is more than plain LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' changed the base weights"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path: names no base model"),
        ({"base_model_name_or_path": "/no/such"}, "base_model_name_or_path: no such folder: /no/such; write there"),
    ],
)
def test_adapters_that_cannot_be_opened(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = lora_folder(tmp_path)
    broken(folder, **changes)
    with pytest.raises(InputError) as caught:
        adapters.load(folder)
    assert message in str(caught.value)


def lora_folder(tmp_path: Path) -> Path:
    base = write_base(tmp_path / "base", T5)
    model = load.load(base)[0]
    adapters.add_lora(model, 2, 4)
    adapters.save(model, dict(model.named_parameters()), str(base), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, key: t.update({"x.lora_magnitude_vector": torch.zeros(1)}), "is no tensor of plain LoRA"),
        (lambda t, key: t.pop(key), "lora_A and lora_B do not fit a weight of (12, 16)"),
        (lambda t, key: t.update({key: torch.zeros(2, 17)}), "lora_A and lora_B do not fit a weight of (12, 16)"),
        (lambda t, key: t.update({key: torch.zeros(3, 16)}), "lora_A and lora_B do not fit a weight of (12, 16)"),
        (
            lambda t, key: t.update({key.replace(".q.", ".zz."): torch.zeros(2, 16)}),
            "has no linear layer encoder.block.0",
        ),
    ],
)
def test_adapter_weights_that_do_not_fit(tmp_path: Path, change: Any, message: str) -> None:
    file = lora_folder(tmp_path) / adapters.WEIGHTS
    tensors = load_file(file)
    change(tensors, "base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight")
    save_file(tensors, file)
    with pytest.raises(InputError) as caught:
        adapters.load(file.parent)
    assert message in str(caught.value)
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(InputError, match="damaged safetensors file"):
        adapters.load(file.parent)
    file.unlink()
    with pytest.raises(InputError, match="no adapter_model.safetensors there"):
        adapters.load(file.parent)


def test_a_soft_prompt_of_another_width(tmp_path: Path) -> None:
    folder = lora_folder(tmp_path)
    broken(folder, peft_type="PROMPT_TUNING", num_virtual_tokens=2)
    save_file({"prompt_embeddings": torch.zeros(2, 17)}, folder / adapters.WEIGHTS)
    with pytest.raises(InputError, match="no prompt_embeddings of 16 numbers a token"):
        adapters.load(folder)


def test_an_adapter_is_no_model_to_train(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds an adapter: give its base model, or what `t2t merge` makes of both"):
        load.load(lora_folder(tmp_path))


def test_an_adapter_of_another_tool_takes_what_it_lacks_from_its_base(tmp_path: Path) -> None:
    folder = lora_folder(tmp_path)
    (tmp_path / "base" / "t2t.json").write_text('{"prefix": "restore: "}')
    loaded = t2t.load(folder)
    assert (loaded.settings.prefix, loaded.tokenizer.fingerprint) == ("restore: ", "bytes")
    assert (tmp_path / "merged").exists() is False
    merge(folder, tmp_path / "merged")
    assert t2t.load(tmp_path / "merged").settings.prefix == "restore: "


# Freezing


@pytest.mark.parametrize(
    ("raw", "part", "prefixes"),
    [
        (T5, "encoder", ("encoder.",)),
        (T5, "decoder", ("decoder.",)),
        (T5, "embeddings", ("shared.",)),
        (T5 | {"tie_word_embeddings": False}, "embeddings", ("shared.",)),
        (GPT, "decoder", ("transformer.h.", "transformer.ln_f.")),
        (GPT, "embeddings", ("transformer.wte.", "transformer.wpe.")),
        (BERT, "encoder", ("bert.encoder.",)),
        (BERT, "embeddings", ("bert.embeddings.",)),
    ],
)
def test_parts_of_every_family(raw: dict[str, Any], part: str, prefixes: tuple[str, ...]) -> None:
    model = tiny(raw)
    adapters.freeze(model, [part])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(prefixes)}
    assert frozen


def test_parts_of_families_that_are_not_ours() -> None:
    """By the usual names; a shared embedding is in no stack even where its name is."""

    class Wrapped(nn.Module):
        kind, family = "seq2seq", "bart"

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            shared = nn.Embedding(4, 2)
            for name in ("encoder", "decoder"):
                stack = nn.Module()
                stack.embed_tokens = shared
                stack.layers = nn.ModuleList([nn.Linear(2, 2)])
                self.model.add_module(name, stack)

    model: Any = Wrapped()
    assert adapters.group(model, "encoder") == ["model.encoder.layers.0.weight", "model.encoder.layers.0.bias"]
    assert adapters.group(model, "decoder") == ["model.decoder.layers.0.weight", "model.decoder.layers.0.bias"]
    assert adapters.group(model, "embeddings") == ["model.encoder.embed_tokens.weight"]


def test_parts_that_are_not_there() -> None:
    with pytest.raises(InputError, match=r"model.freeze: 'encoder': no such part is known of a gpt model"):
        adapters.freeze(tiny(GPT), ["encoder"])
    with pytest.raises(InputError, match=r"model.freeze: 'encodr' matches no parameter \(did you mean encoder\?\)"):
        adapters.freeze(tiny(T5), ["encodr"])


def rows(model: Model) -> Rows:
    ids, ones = torch.arange(3, 15).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    none = ids.new_zeros(2, 0)
    source = (ids, ones) if model.kind == "seq2seq" else (none, none)
    return Rows(*source, ids, ones, torch.arange(6).expand(2, -1), ids)


def test_frozen_tensors_take_no_state_and_do_not_decay() -> None:
    model = tiny(T5)
    adapters.freeze(model, ["encoder", "embeddings"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = Optim(weight_decay=0.5, schedule="constant")
    optimizer = Optimizer(dict(model.named_parameters()), settings, lr=0.1, schedule=lambda n: 1.0)
    for step in range(2):
        model.loss(rows(model), 0.0)[0].sum().backward()
        optimizer.step(step)
    frozen = {name for name in before if name.startswith(("encoder.", "shared."))}
    assert {name.partition("/")[2] for name in optimizer.state()} == before.keys() - frozen
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in frozen), name


@pytest.mark.parametrize(
    ("raw", "names", "stopped", "reached"),
    [
        (T5, ["encoder", "embeddings"], "encoder.block", "decoder.block"),
        (GPT, ["embeddings", "transformer.h.0.*"], "transformer.h.0", "transformer.h.1"),
    ],
)
def test_backward_stops_where_nothing_before_is_trained(
    raw: dict[str, Any], names: list[str], stopped: str, reached: str
) -> None:
    """A hook on what every block gives out tells whether a gradient came by."""
    model = tiny(raw)
    seen: set[str] = set()

    def watch(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: seen.add(name))

        return hook

    blocks = {name: module for name, module in model.named_modules() if module in model.blocks()}
    for name, block in blocks.items():
        block.register_forward_hook(watch(name))
    model.loss(rows(model), 0.0)[0].sum().backward()
    assert seen == blocks.keys()
    seen.clear()
    adapters.freeze(model, names)
    model.zero_grad()
    model.loss(rows(model), 0.0)[0].sum().backward()
    assert seen == {name for name in blocks if name.startswith(reached)} != set()
    assert all(p.grad is None for name, p in model.named_parameters() if name.startswith(stopped))


# The summary


def test_the_summary_counts_every_parameter_and_joins_like_layers() -> None:
    model = tiny(T5)
    adapters.freeze(model, ["encoder.block.0.*", "embeddings"])
    lines = model_summary(model).splitlines()
    rows = [line.split("  ") for line in lines]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    named = {row[0]: row[1:] for row in cells[2:]}
    assert named["shared.weight"] == ["48 x 16", "768", "no", "float32"]
    assert named["encoder.block.0.layer.0.SelfAttention.q.weight"] == ["12 x 16", "192", "no", "float32"]
    assert named["encoder.block.1.layer.0.SelfAttention.q.weight"] == ["12 x 16", "192", "yes", "float32"]
    assert named["decoder.block.0-1.layer.0.SelfAttention.q.weight"] == ["12 x 16", "384", "yes", "float32"]
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert named["total"] == [f"{total:,}", f"{trained:,}", "float32"]
    sizes = [int(row[1].replace(",", "")) for name, row in named.items() if name != "total"]
    assert sum(sizes) == total
    adapters.add_lora(model, r=2, alpha=4, targets=["q"])
    text = model_summary(model)
    assert re.search(r"^decoder\.block\.0-1\.layer\.0\.SelfAttention\.q\.lora_A +2 x 16 +64 +yes", text, re.MULTILINE)
    assert "parametrizations" not in text
