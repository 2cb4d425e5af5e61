"""A causal model from files to text: plain text and pairs, trained, resumed, evaluated, opened by transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import quiet

import t2t
from t2t.config import Config
from t2t.errors import InputError
from t2t.train import evaluate
from t2t.train.run import train

Make = Callable[..., Config]

TINY = {
    "model_type": "gpt2",
    "vocab_size": 384,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture
def make(make: Make, tmp_path: Path) -> Make:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    verse = ["one two three four", "two three four five", "three four five six"]
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(verse) for _ in range(12)) + "\n")
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}{b}\t{b}{a}\n" for a in "abcdef" for b in "uvwxyz"))

    defaults = {
        "data__validation_split": "0.1",
        "data__block": "48",
        "data__max_target_length": "16",
        "train__batch": "6",
        "train__steps": "8",
        "train__micro_rows": "auto",
        "checkpoint__every": "4",
    }

    def causal(name: str = "run", data: str = "text.txt", **overrides: str) -> Config:
        return make(name, **{**defaults, "data__train": str(tmp_path / data), **overrides})

    return causal


@pytest.mark.parametrize("objective", ["auto", "blocks"])
def test_plain_text_is_learned_and_perplexity_told(make: Make, objective: str) -> None:
    start = train(make("start", train__steps="1", data__objective=objective), quiet)
    figures = train(make("whole", train__steps="60", data__objective=objective), quiet)
    assert figures["validation_loss"] < 0.6 * start["validation_loss"]
    assert figures["validation_perplexity"] == pytest.approx(math.exp(figures["validation_loss"]))
    assert figures["validation_word_perplexity"] > figures["validation_perplexity"]


def test_plain_text_is_evaluated_by_perplexity(make: Make) -> None:
    chosen = make(train__steps="2", data__validation_split="0", data__block="24")
    train(chosen, quiet)
    found = evaluate.evaluate(str(chosen.run_dir / "model"), list(chosen.data.train), None, {"run.device": "cpu"})
    assert list(found) == ["loss", "perplexity", "word_perplexity"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    with pytest.raises(InputError, match="plain text has none"):
        evaluate.evaluate(str(chosen.run_dir / "model"), list(chosen.data.train), ["bleu"], {"run.device": "cpu"})


def test_stopped_and_resumed_is_the_uninterrupted_run(make: Make) -> None:
    whole, parts = make("whole"), make("parts")
    figures = train(whole, quiet)
    train(make("parts", train__stop_at="4"), quiet)
    assert train(parts, quiet)["loss"] == figures["loss"]
    assert (whole.run_dir / "model/model.safetensors").read_bytes() == (
        parts.run_dir / "model/model.safetensors"
    ).read_bytes()


def test_pairs_are_learned_and_generation_stops(make: Make) -> None:
    from transformers import AutoModelForCausalLM

    chosen = make(
        data="pairs.tsv", train__steps="150", optim__lr="0.005", model__dropout="0", train__metrics="exact_match"
    )
    figures = train(chosen, quiet)
    assert figures["loss"] < 0.5
    loaded = t2t.load(chosen.run_dir / "model", "cpu")
    outputs = loaded.generate(["au", "bv", "cw", "dx"])
    assert outputs == ["ua", "vb", "wc", "xd"]
    assert loaded.generate(["au", "bv"], beams=3) == ["ua", "vb"]
    found = evaluate.evaluate(
        str(chosen.run_dir / "model"), list(chosen.data.train), ["exact_match"], {"run.device": "cpu"}
    )
    assert found["exact_match"] > 0.8
    peer = AutoModelForCausalLM.from_pretrained(chosen.run_dir / "model").eval()
    prompt = torch.tensor([loaded.tokenizer.encode("au\n")])
    said = peer.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert loaded.tokenizer.decode(said) == "ua"


def test_an_objective_for_another_kind_of_model(make: Make) -> None:
    with pytest.raises(InputError, match="data.objective: span_corruption is for seq2seq models, this one is causal"):
        train(make(data__objective="span_corruption"), quiet)
    with pytest.raises(InputError, match="data.template: 'nothing' must have {source} in it"):
        train(make(data="pairs.tsv", data__template="nothing"), quiet)
    with pytest.raises(InputError, match="train.metrics: compares generated text with targets"):
        train(make(train__metrics="bleu"), quiet)
