"""The Trainer people know: every name has its meaning or its reason, and the page that lists them is the code's.

After a change of the arguments, ``python tests/unit/test_trainer.py`` writes the table of docs/trainer.md anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import t2t
from t2t.config import Config, flat
from t2t.data import tokens
from t2t.errors import InputError
from t2t.generate.decode import diverse
from t2t.models import load
from t2t.trainer import Trainer, TrainerArguments

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
WORDS = [
    "unu",
    "doi",
    "trei",
    "patru",
    "cinci",
    "sase",
    "sapte",
    "opt",
    "noua",
    "zece",
    "summarize:",
    "alba",
    "mare",
    "casa",
]
VOCABULARY = ["<pad>", "</s>", "<unk>", *WORDS]
T5 = {
    "model_type": "t5", "vocab_size": 24, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3,
    "num_decoder_layers": 1, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
UNTIED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
GPT = {
    "model_type": "gpt2", "vocab_size": 24, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64,
    "eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
ISSUE = """
import t2t
args = t2t.TrainerArguments(model_name_or_path="t5-small", train_file="data.json")
trainer = t2t.Trainer(arguments=args)
trainer.freeze(embeddings=True)
trainer.train(valid=False)
trainer.generate_single("summarize: ...")
"""


def write_model(folder: Path, raw: dict[str, Any]) -> Path:
    load.save(load.create(raw, seed=0).state_dict(), raw, folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    specials = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **specials).save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with data in t2t-tuner's form and models of both kinds."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "t5-small", T5)
    write_model(tmp_path / "gpt2", GPT)
    pairs = [(" ".join(WORDS[i % 9 : i % 9 + 3]), WORDS[(i + 4) % 9]) for i in range(20)]
    lines = [json.dumps({"translation": {"s": s, "t": t}}) + "\n" for s, t in pairs]
    (tmp_path / "data.json").write_text("".join(lines))
    (tmp_path / "valid.json").write_text("".join(lines[:5]))
    (tmp_path / "text.txt").write_text("\n\n".join(f"{s} {t}" for s, t in pairs) + "\n")
    return tmp_path


def make(**arguments: Any) -> Trainer:
    shared: dict[str, Any] = {"model_name_or_path": "t5-small", "train_file": "data.json", "max_steps": 2}
    return Trainer(TrainerArguments(**shared | {"use_cpu": True, "learning_rate": 0.01} | arguments))


def log(folder: str = "saved_model") -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


# The names


def config(**arguments: Any) -> Config:
    return TrainerArguments(**{"train_file": "data.json", "validation_file": "valid.json"} | arguments).config()


PROBES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model_name_or_path": ({"model_name_or_path": "m"}, {"model.path": "m"}),
    "dropout_rate": ({"dropout_rate": 0.3}, {"model.dropout": 0.3}),
    "train_file": ({"train_file": ["a", Path("b")]}, {"data.train": ("a", "b")}),
    "validation_file": ({"validation_file": "v"}, {"data.validation": ("v",)}),
    "validation_split": ({"validation_split": 0.2, "validation_file": None}, {"data.validation_split": 0.2}),
    "source_id": ({"source_id": "en"}, {"data.source": "en"}),
    "target_id": ({"target_id": "ro"}, {"data.target": "ro"}),
    "prefix": ({"prefix": "x: "}, {"data.prefix": "x: "}),
    "max_source_length": ({"max_source_length": 77}, {"data.max_source_length": 77}),
    "max_target_length": ({"max_target_length": 77}, {"data.max_target_length": 77}),
    "output_dir": ({"output_dir": "o"}, {"run.dir": "o"}),
    "run_name": ({"run_name": "n"}, {"run.name": "n"}),
    "seed": ({"seed": 7}, {"run.seed": 7}),
    "per_device_train_batch_size": ({"per_device_train_batch_size": 3}, {"train.batch": 3}),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 3}, {"train.batch": 24}),
    "per_device_eval_batch_size": ({"per_device_eval_batch_size": 3}, {"generate.batch": 3}),
    "num_train_epochs": ({"num_train_epochs": 5}, {"train.epochs": 5.0}),
    "max_steps": ({"max_steps": 5}, {"train.steps": 5}),
    "bf16": ({"bf16": True}, {"train.precision": "mixed"}),
    "gradient_checkpointing": ({"gradient_checkpointing": True}, {"train.gradient_checkpointing": True}),
    "label_smoothing_factor": ({"label_smoothing_factor": 0.1}, {"train.label_smoothing": 0.1}),
    "dataloader_num_workers": ({"dataloader_num_workers": 2}, {"data.readers": 2}),
    "use_cpu": ({"use_cpu": True}, {"run.device": "cpu"}),
    "no_cuda": ({"no_cuda": True}, {"run.device": "cpu"}),
    "optim": ({"optim": "adafactor"}, {"optim.name": "adafactor"}),
    "optimizer": ({"optimizer": "lamb"}, {"optim.name": "lamb"}),
    "adafactor": ({"adafactor": True}, {"optim.name": "adafactor"}),
    "learning_rate": ({"learning_rate": 1e-3}, {"optim.lr": 1e-3}),
    "lr_scheduler_type": ({"lr_scheduler_type": "constant_with_warmup"}, {"optim.schedule": "constant"}),
    "warmup_steps": ({"warmup_steps": 100}, {"optim.warmup": 100.0}),
    "warmup_ratio": ({"warmup_ratio": 0.1}, {"optim.warmup": 0.1}),
    "weight_decay": ({"weight_decay": 0.1}, {"optim.weight_decay": 0.1}),
    "adam_beta1": ({"adam_beta1": 0.8}, {"optim.beta1": 0.8}),
    "adam_beta2": ({"adam_beta2": 0.8}, {"optim.beta2": 0.8}),
    "adam_epsilon": ({"adam_epsilon": 1e-6}, {"optim.eps": 1e-6}),
    "max_grad_norm": ({"max_grad_norm": 0.5}, {"optim.clip": 0.5}),
    "logging_strategy": ({"logging_strategy": "epoch"}, {"train.log_every": "epoch"}),
    "logging_steps": ({"logging_steps": 3}, {"train.log_every": 3}),
    "report_to": ({"report_to": ["tensorboard"]}, {"track.to": ("tensorboard",)}),
    "project": ({"project": "p"}, {"track.project": "p"}),
    "eval_strategy": ({"eval_strategy": "epoch"}, {"train.evaluate_every": "epoch"}),
    "evaluation_strategy": ({"evaluation_strategy": "epoch"}, {"train.evaluate_every": "epoch"}),
    "eval_steps": ({"eval_steps": 3, "eval_strategy": "steps"}, {"train.evaluate_every": 3}),
    "metric": ({"metric": ["rouge", "sacrebleu"]}, {"train.metrics": ("rouge", "bleu")}),
    "predict_with_generate": ({"predict_with_generate": False}, {"train.metrics": ()}),
    "generation_num_beams": ({"generation_num_beams": 2}, {"generate.beams": 2}),
    "generation_max_length": ({"generation_max_length": 9}, {"generate.max_length": 9}),
    "metric_for_best_model": ({"metric_for_best_model": "eval_bleu"}, {"train.best": "bleu"}),
    "save_strategy": ({"save_strategy": "no"}, {"checkpoint.every": 0}),
    "save_steps": ({"save_steps": 3}, {"checkpoint.every": 3}),
    "save_total_limit": ({"save_total_limit": 5}, {"checkpoint.keep": 5}),
    "resume_from_checkpoint": ({"resume_from_checkpoint": False}, {"checkpoint.resume": False}),
    "torch_ort": ({"torch_ort": True}, {"train.torch_ort": True}),
    "overrides": ({"overrides": {"data.on_bad_line": "skip"}}, {"data.on_bad_line": "skip"}),
}  # argument → what is given, and which keys of the Config it changes
ELSEWHERE = {"mode", "block_size", "greater_is_better", "test_file", "local_rank"}  # have tests of their own below


def test_every_name_changes_the_config_or_is_refused() -> None:
    base = flat(config())
    for f in dataclasses.fields(TrainerArguments):
        if "refused" in f.metadata:
            for value in f.metadata["harmless"]:
                assert flat(config(**{f.name: value})) == base
            with pytest.raises(InputError, match=f"^{f.name}: ") as caught:
                config(**{f.name: "something else"})
            assert str(caught.value) == f"{f.name}: {f.metadata['refused']}"
        elif f.name not in ELSEWHERE:
            given, expected = PROBES[f.name]
            assert f.name in given
            changed = {key: value for key, value in flat(config(**given)).items() if value != base[key]}
            assert {**expected, **changed} == changed, f.name
            assert set(changed) <= {*expected, "data.validation"}


def test_a_batch_is_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    assert config(**given).train.batch == 6
    with pytest.raises(InputError, match="^local_rank: torchrun tells it"):
        config(local_rank=1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert config(**given, local_rank=1) == config(**given)
    assert config(**given).train.batch == 24


def test_the_names_of_both_origins_are_known() -> None:
    ours = {f.name for f in dataclasses.fields(TrainerArguments)}
    theirs = {f.name for f in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert theirs - ours == set()
    tuner = """metric dataset_name dataset_config_name block_size train_file validation_file validation_split test_file
    cache_dir model_name_or_path pad_to_max_length max_source_length max_target_length ignore_pad_token_for_loss tf32
    preprocessing_num_workers overwrite_cache pad_to_multiple_of predict_with_generate generation_num_beams source_id
    target_id prefix gradient_checkpointing dropout_rate model_parallel_gpus logging_strategy save_strategy mode
    optimizer torch_ort embedding_on_cpu deepspeed dataset_cache output_dir fp16 bf16 save_total_limit"""
    assert set(tuner.split()) - ours == set()


def test_enums_of_transformers_are_words() -> None:
    from transformers.trainer_utils import IntervalStrategy, SchedulerType

    chosen = config(eval_strategy=IntervalStrategy.EPOCH, lr_scheduler_type=SchedulerType.COSINE)
    assert (chosen.train.evaluate_every, chosen.optim.schedule) == ("epoch", "cosine")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rat": 1}, "learning_rat: unknown argument (did you mean learning_rate?)"),
        ({"learning_rate": -1.0}, "learning_rate: must be 0 or more, got -1.0"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number, got 'fast'"),
        ({"max_steps": 2.5}, "max_steps: expected a whole number, got 2.5"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: must be a whole number, 1 or more, got 0"),
        ({"optim": "adamw_8bit"}, "optim: 'adamw_8bit' is not one of adamw, "),
        ({"optim": "lamb", "adafactor": True}, "optim and adafactor: contradict each other"),
        ({"optimizer": object()}, "optimizer: is built by the run"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type: 'polynomial' is not one of linear, cosine, "),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_ratio: and warmup_steps say the same"),
        ({"warmup_ratio": 1}, "warmup_ratio: must be at least 0 and below 1, got 1"),
        ({"eval_strategy": "steps"}, "eval_strategy: 'steps' needs eval_steps"),
        ({"eval_strategy": "epoch", "eval_steps": 5}, "eval_steps: is for eval_strategy='steps', not 'epoch'"),
        ({"eval_strategy": "epoch", "evaluation_strategy": "no"}, "evaluation_strategy: contradicts eval_strategy"),
        ({"save_strategy": "sometimes"}, "save_strategy: 'sometimes' is not one of steps, epoch, no"),
        ({"logging_strategy": "no"}, "logging_strategy: log.jsonl is always written"),
        ({"metric_for_best_model": "rouge9"}, "metric_for_best_model: 'rouge9' is not computed"),
        ({"greater_is_better": True}, "greater_is_better: True is not so of loss"),
        ({"report_to": "all"}, "report_to: no tracker 'all'"),
        ({"resume_from_checkpoint": "a/folder"}, "resume_from_checkpoint: a run goes on from the newest"),
        ({"mode": "t6"}, "mode: 't6' is not one of seq2seq, t5, clm, gpt, causal (did you mean t5?)"),
        ({"block_size": 8, "mode": "t5"}, "block_size: is for causal models, this one is seq2seq"),
        ({"overrides": {"train.bach": "3"}}, "--train.bach: unknown key (did you mean train.batch?)"),
    ],
)
def test_what_is_wrong_is_told_by_its_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        config(**given)
    assert str(caught.value).startswith(message)


def test_arguments_may_be_changed_afterwards(here: Path) -> None:
    trainer = make()
    trainer.arguments.learning_rate = 0.5
    assert trainer.config.optim.lr == 0.5
    with pytest.raises(InputError, match="unknown argument .did you mean learning_rate"):
        trainer.arguments.learning_rat = 0.5


def test_the_kind_is_the_models(here: Path) -> None:
    assert make(mode="t5").config == make(mode="seq2seq").config == make().config
    with pytest.raises(InputError, match="mode: 'clm' is for causal models, and the model's config says seq2seq"):
        make(mode="clm")
    with pytest.raises(InputError, match="mode: 'gpt' is for causal"):
        make().train(mode="gpt")
    chosen = make(model_name_or_path="gpt2", train_file="text.txt", mode="clm", block_size=16).config
    assert (chosen.data.objective, chosen.data.block) == ("blocks", 16)
    with pytest.raises(InputError, match="block_size: is for causal models, this one is seq2seq"):
        make(block_size=16)


def test_torch_ort(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="torch_ort: the package torch-ort is not installed; torch.compile is its"):
        make(torch_ort=True).train()
    calls = []

    class ORTModule:
        def __init__(self, module: torch.nn.Module) -> None:
            self.module = module

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            calls.append(len(inputs))
            return self.module(*inputs)

    monkeypatch.setitem(sys.modules, "torch_ort", types.SimpleNamespace(ORTModule=ORTModule))
    figures = make(torch_ort=True).train()
    assert calls and set(calls) == {4}
    monkeypatch.delitem(sys.modules, "torch_ort")
    assert make(output_dir="plain").train()["loss"] == figures["loss"]


# Training


def test_the_snippet_runs_as_written(here: Path) -> None:
    exec(ISSUE, names := {})
    trainer = names["trainer"]
    assert isinstance(trainer, t2t.Trainer)
    assert trainer.config.model.freeze == ("embeddings",)
    assert not trainer.model.training
    base = load.load(Path("t5-small"))[0]
    assert torch.equal(trainer.model.shared.weight, base.shared.weight)
    trained, before = (next(m.encoder.parameters()) for m in (trainer.model, base))
    assert not torch.equal(trained, before)
    opened = transformers.AutoModelForSeq2SeqLM.from_pretrained("saved_model/model")
    ids = torch.tensor([[3, 4, 1]])
    ours = trainer.model.encode(ids, torch.ones_like(ids))
    torch.testing.assert_close(opened.get_encoder()(ids).last_hidden_state, ours)


def test_validation_is_what_was_asked_for(here: Path) -> None:
    figures = make(validation_file="valid.json", output_dir="a").train()
    assert {"validation_loss", "validation_bleu"} <= set(figures)
    assert "validation_loss" not in make(validation_file="valid.json", eval_strategy="epoch", output_dir="b").train(
        False
    )
    split = make(validation_split=0.2, predict_with_generate=False, output_dir="c").train(valid=True)
    assert "validation_loss" in split and "validation_bleu" not in split
    with pytest.raises(InputError, match="valid=True needs validation_file or validation_split"):
        make().train(valid=True)
    with pytest.raises(InputError, match="no such file"):
        make(train_file="nowhere.json", output_dir="d").train()


def test_by_epochs(here: Path) -> None:
    """20 pairs in steps of 8: three steps an epoch."""
    strategies = dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch")
    make(validation_file="valid.json", max_steps=7, predict_with_generate=False, **strategies).train()
    assert [entry["step"] for entry in log()] == [3, 6, 7]
    assert all("validation_loss" in entry for entry in log())
    assert [path.name for path in sorted(Path("saved_model/checkpoints").iterdir())][-1] == "step-000007"
    make(max_steps=7, save_total_limit=9, output_dir="all").train()
    assert [path.name[-1] for path in sorted(Path("all/checkpoints").iterdir())] == ["3", "6", "7"]


def test_what_train_is_given_replaces_the_arguments(here: Path) -> None:
    trainer = make(max_steps=-1)
    trainer.train(batch_size=5, max_source_length=9, max_target_length=7, dev_mode=True, tensorboard=True)
    written = trainer.config
    assert (written.train.batch, written.generate.batch, written.train.steps) == (5, 5, 10)
    assert (written.data.max_source_length, written.data.max_target_length) == (9, 7)
    assert log()[-1]["step"] == 10
    assert any(path.name.startswith("events") for path in Path("saved_model").rglob("*"))


def test_plain_text_trains_a_causal_model(here: Path) -> None:
    trainer = make(model_name_or_path="gpt2", train_file="text.txt", block_size=16, validation_split=0.2)
    assert "validation_perplexity" in trainer.train()
    assert isinstance(trainer.generate_single("unu doi", max_length=4), str)
    assert len(trainer.generate_diverse("unu doi", output_count=2, max_length=4)) == 2


def test_evaluate(here: Path) -> None:
    trainer = make(validation_file="valid.json", test_file="data.json", metric="chrf")
    before = trainer.evaluate()
    trainer.train(valid=False)
    after = trainer.evaluate()
    assert set(before) == set(after) == {"loss", "chrf"}
    assert after["loss"] != before["loss"]
    assert trainer.evaluate("valid.json")["loss"] != after["loss"]
    with pytest.raises(InputError, match="evaluate: no file given"):
        make().evaluate()


# Changing the model


def test_freezing(here: Path) -> None:
    trainer = make(weight_decay=0.5)
    everything = trainer.count_parameters()
    assert everything == trainer.count_parameters(trainable_only=True)
    assert trainer.count_parameters(return_M=True) == round(everything / 1e6, 1)
    trainer.freeze(encoder=True, decoder=True)
    assert trainer.count_parameters(trainable_only=True) == trainer.model.shared.weight.numel()
    trainer.freeze(decoder=False)
    assert trainer.config.model.freeze == ("encoder",)
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, base[name])}
    assert moved == {name for name in base if not name.startswith("encoder.")}
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == moved
    with pytest.raises(InputError, match="freeze: this model was trained: make a Trainer with"):
        trainer.freeze(encoder=False)
    causal = make(model_name_or_path="gpt2")
    causal.freeze(embeddings=True)
    assert {n for n, p in causal.model.named_parameters() if not p.requires_grad} == {
        "transformer.wte.weight", "transformer.wpe.weight",
    }  # fmt: skip
    with pytest.raises(InputError, match="freeze: a gpt model has no encoder of its own"):
        causal.freeze(encoder=True)


@pytest.mark.parametrize(("raw", "count"), [(T5, 3), (T5, 9), (T5 | UNTIED, 9), (GPT, 9)])
def test_new_tokens_are_trained_saved_and_open_elsewhere(here: Path, raw: dict[str, Any], count: int) -> None:
    write_model(here / "m", raw)
    new = [f"<nou{i}>" for i in range(count)]
    trainer = make(model_name_or_path="m", source_id="s", target_id="t", dropout_rate=0.0, learning_rate=0.03)
    old = dict(trainer.model.named_parameters())
    trainer.add_new_tokens(new[:1])
    trainer.add_new_tokens(new[1:])
    known, model = len(VOCABULARY), trainer.model
    rows = model.config.vocab_size
    assert rows == max(24, -(-(known + count) // 8) * 8)
    names = {model.embeddings[0], model.output} & set(old)
    for name in names:
        grown = model.get_parameter(name)
        assert len(grown) == rows
        assert torch.equal(grown[:known], old[name][:known])
        torch.testing.assert_close(grown[known : known + count], old[name][:known].mean(0).expand(count, -1))
        assert torch.equal(grown[known + count : 24], old[name][known + count : 24])
    lines = [{"s": f"unu {new[-1]}", "t": f"{new[0]} doi"}] * 10
    (here / "data.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trainer.arguments.max_steps, trainer.arguments.save_strategy = 30, "no"
    trainer.train()
    assert trainer.generate_single(f"unu {new[-1]}", max_length=4) == f"{new[0]} doi"
    tokenizer = transformers.AutoTokenizer.from_pretrained("saved_model/model")
    assert tokenizer(f"unu {new[-1]}", add_special_tokens=False)["input_ids"] == [3, known + count - 1]
    auto = transformers.AutoModelForCausalLM if raw is GPT else transformers.AutoModelForSeq2SeqLM
    opened, told = auto.from_pretrained("saved_model/model", output_loading_info=True)
    assert not any(told.values())
    assert opened.get_input_embeddings().weight.shape[0] == opened.config.vocab_size == rows


def test_new_tokens_that_are_none(here: Path) -> None:
    for token, reason in (("unu", "'unu' is a token already"), ("", "'' is no token")):
        trainer = make()
        trainer.add_new_tokens([token])
        with pytest.raises(InputError, match=f"model.new_tokens: {reason}"):
            trainer.train()
    trainer = make(model_name_or_path="asset:byt5-ro")
    trainer.add_new_tokens(["<nou>"])
    with pytest.raises(InputError, match="model.new_tokens: a tokenizer of bytes takes no new tokens"):
        trainer.count_parameters()


def test_resizing_only_adds(here: Path) -> None:
    trainer = make()
    trainer.resize_token_embeddings_layer()
    assert trainer.model.config.vocab_size == 24
    trainer.add_new_tokens([f"<{i}>" for i in range(9)])
    trainer.resize_token_embeddings_layer(round_up=False)
    assert trainer.model.config.vocab_size == len(VOCABULARY) + 9
    fewer = make(overrides={"model.vocab_size": "20"})
    with pytest.raises(InputError, match="model.vocab_size: the model has 24 rows already"):
        fewer.train()


def test_a_model_changed_by_hand_is_not_lost_without_a_word(here: Path) -> None:
    for change in (lambda m: m.requires_grad_(False), lambda m: torch.nn.init.zeros_(m.shared.weight)):
        trainer = make()
        change(trainer.model)
        with pytest.raises(InputError, match="model: was changed by hand"):
            trainer.train()


def test_prompt_tuning_trains_a_vector_for_each_word_alone(here: Path) -> None:
    trainer = make()
    trainer.convert_to_prompt_tuning(["restore", "the diacritics"])
    width = trainer.model.head.shape[1]
    assert trainer.count_parameters(trainable_only=True) == 3 * width
    trainer.train()
    assert (trainer.config.run_dir / "model" / "adapter_model.safetensors").stat().st_size < 4096
    assert isinstance(trainer.generate_single("abc"), str)


def test_summary(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make()
    trainer.freeze(embeddings=True)
    text = trainer.model_summary(no_print=True)
    assert text is not None
    assert re.search(r"shared.weight .* no ", text)
    assert trainer.model_summary() is None
    assert capsys.readouterr().out == text + "\n"


# Generating


def test_generating(here: Path) -> None:
    write_model(here / "t5-small", T5 | UNTIED)  # which says more, untrained, than one that repeats what it reads
    trainer = make(prefix="summarize: ")
    assert trainer.generate_single("unu doi", max_length=6) == trainer.generate_single("summarize: unu doi", 6)
    assert trainer.generate_single("unu doi", 6) != make().generate_single("unu doi", 6)
    found = trainer.generate_diverse("unu doi", 4, max_length=6, beam_width=2, diversity_penalty=5.0)
    assert len(found) == len(set(found)) == 4
    ids = torch.tensor([[*tokens.load("t5-small").encode("summarize: unu doi"), 1]])
    searched = diverse(trainer.model, ids, torch.ones_like(ids), 6, beams=8, groups=2, diversity_penalty=5.0).tokens[0]
    assert found[:2] == [tokens.load("t5-small").decode(searched[i].tolist()).strip() for i in (0, 4)]
    with pytest.raises(InputError, match="3 beams cannot be shared out among 2 groups"):
        trainer.generate_diverse("unu", output_count=3, beam_width=1)
    with pytest.raises(InputError, match="run.device: 'cuda' is not here"):
        trainer.generate_single("unu", device="cuda")


# The page


def table() -> str:
    lines = ["| argument | default | becomes |", "|---|---|---|"]
    for f in dataclasses.fields(TrainerArguments):
        becomes = f.metadata.get("becomes") or f"refused: {f.metadata['refused']}"
        lines.append(f"| `{f.name}` | `{f.default!r}` | {becomes} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_every_argument_and_method() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page
    methods = [name for name, _ in inspect.getmembers(Trainer, callable) if not name.startswith("_")]
    assert [name for name in methods if f"`{name}(" not in page] == []


def test_the_keys_of_the_page_are_the_configs() -> None:
    named = set(re.findall(r"`((?:run|model|data|train|optim|checkpoint|generate|track)\.\w+)`", table()))
    assert named and named <= set(flat(Config()))


def test_the_code_of_the_page_runs(here: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block.replace("max_steps=20", "max_steps=2"), {})


if __name__ == "__main__":
    old = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"\| argument .*?\n(?!\|)", lambda _: table(), old + "\n", flags=re.DOTALL).rstrip() + "\n")
