"""The first run at toy size, and what the package carries for it."""

from __future__ import annotations

import json
import lzma
import re
import unicodedata
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from t2t import config, metrics
from t2t.cli import main
from t2t.data.splits import read_examples
from t2t.generate import load

ASSETS = Path(str(resources.files("t2t") / "assets"))
TOY = (
    *("--train.steps", "2", "--data.max_samples", "32", "--data.max_validation_samples", "4", "--train.batch", "4"),
    *("--data.piece", "30", "--data.max_source_length", "40", "--data.max_target_length", "40", "--run.threads", "1"),
)
SHINGLE = 40


def test_quickstart_shows_and_keeps_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", *TOY]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "quickstart"
    result = json.loads((folder / "result.json").read_text())
    assert list(result) == ["copy", "before", "after", "train_seconds"]
    assert 0 < result["copy"] < 1 and result["train_seconds"] > 0

    table = [line.split() for line in out.splitlines() if line.endswith("%")]
    assert [row[0] for row in table] == ["copying", "before", "after"]
    assert [row[-1] for row in table] == [f"{result[name]:.1%}" for name in ("copy", "before", "after")]
    samples = out.partition("What it makes of text without diacritics")[2].splitlines()[1:]
    assert any(line.startswith("  ") and ("*" in line or "~" in line) for line in samples)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 2
    assert 0 < log[-1]["validation_loss"] < 1
    assert load(folder / "model").settings.source_transforms == ("strip_diacritics",)

    # Cut off before its result was written, it goes on; finished, it begins anew.
    (folder / "result.json").unlink()
    assert main(["quickstart", *TOY]) == 0
    assert "nothing left to train" in capsys.readouterr().out
    (folder / "notes.txt").write_text("mine")
    assert main(["quickstart", *TOY]) == 0
    out = capsys.readouterr().out
    assert "at step 0" in out and "resumed" not in out
    again = json.loads((folder / "result.json").read_text())
    assert again["after"] == result["after"]
    assert (folder / "notes.txt").read_text() == "mine"


def lines(name: str) -> list[str]:
    raw = (ASSETS / name).read_bytes()
    return (lzma.decompress(raw) if name.endswith(".xz") else raw).decode().splitlines()


def letters(line: str) -> str:
    """What two copies of a sentence share: letters alone, without case and marks."""
    plain = "".join(c for c in unicodedata.normalize("NFD", line.lower()) if not unicodedata.combining(c))
    return re.sub("[^a-z]", "", plain)


def shingles(text: str) -> set[str]:
    return {text[i : i + SHINGLE] for i in range(len(text) - SHINGLE + 1)}


def test_held_out_sentences_are_not_trained_on() -> None:
    train, held_out = lines("ro-train.txt.xz"), lines("ro-held-out.txt")
    assert len(train) > 3000 and len(held_out) >= 300
    seen, unseen = {letters(line) for line in train}, {letters(line) for line in held_out}
    assert not seen & unseen
    parts = set().union(*map(shingles, unseen))
    assert len(parts) > 5000
    assert [line for line in seen if not parts.isdisjoint(shingles(line))] == []


def test_copying_the_input_leaves_three_words_in_ten_wrong() -> None:
    data = config.load("quickstart").data
    examples, _ = read_examples(data.validation, "data.validation", data, 0)
    sources, targets = [e.source for e in examples], [e.target for e in examples]
    assert metrics.evaluate(["word_accuracy"], sources, targets)["word_accuracy"] == pytest.approx(0.70, abs=0.05)


def test_the_asset_is_small_and_opens_in_transformers() -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = ASSETS / "byt5-ro"
    file = folder / "model.safetensors"
    assert file.stat().st_size <= 16_000_000
    with safe_open(file, "pt") as tensors:
        found = [tensors.get_slice(name) for name in tensors.keys()]
        assert {tensor.get_dtype() for tensor in found} == {"BF16"}
        count = sum(torch.Size(tensor.get_shape()).numel() for tensor in found)
    assert 7.5e6 < count < 8.5e6

    text = "Ieri am fost la piata si am cumparat paine."
    loaded = load("asset:byt5-ro", "cpu")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer([text], return_tensors="pt")
    assert ids["input_ids"][0].tolist() == [*loaded.tokenizer.encode(text), loaded.tokenizer.eos_id]
    theirs = model.generate(**ids, do_sample=False, max_new_tokens=24)
    assert tokenizer.decode(theirs[0], skip_special_tokens=True) == loaded.generate([text], max_length=24)[0]
