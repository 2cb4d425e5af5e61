"""A short run must lose as it lost when it was checked in: whatever changes the learning shows here.

After a change that is meant, ``python tests/golden/test_loss_curve.py`` writes the curve anew; say why in the commit.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from t2t import config
from t2t.train.run import train

CURVE = Path(__file__).parent / "tiny_t5.json"
RAW = {
    "model_type": "t5", "vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_decoder_layers": 1, "num_heads": 4, "relative_attention_num_buckets": 8,
}  # fmt: skip
TEXT = "casa mare si alba pe deal la marginea satului unde cad ploile verii peste campuri verzi fara sfarsit"


def run(folder: Path) -> list[dict[str, float]]:
    """The log of 30 steps, four and a half epochs, in fp32 and without dropout."""
    (folder / "config.json").write_text(json.dumps(RAW))
    words = TEXT.split()
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 2 + i % 5)) for i in range(1, 101)]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line.title()}\n" for line in lines))
    settings = {
        "run.dir": str(folder / "run"),
        "run.threads": "1",
        "run.device": "cpu",
        "model.config": str(folder / "config.json"),
        "model.tokenizer": "bytes",
        "model.dropout": "0",
        "data.train": str(folder / "pairs.tsv"),
        "data.validation_split": "0.05",
        "data.prefix": "titlu: ",
        "data.max_source_length": "48",
        "data.max_target_length": "48",
        "train.steps": "30",
        "train.batch": "16",
        "train.log_every": "3",
        "train.label_smoothing": "0.05",
        "train.evaluate_every": "15",
        "optim.lr": "0.01",
        "optim.warmup": "3",
        "optim.schedule": "cosine",
        "optim.weight_decay": "0.01",
    }
    train(config.load(overrides=settings), report=lambda line: None)
    kept = ("step", "loss", "tokens", "lr", "grad_norm", "validation_loss")
    entries = (json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines())
    return [{name: entry[name] for name in kept if name in entry} for entry in entries]


def test_the_loss_curve_is_the_one_checked_in(tmp_path: Path) -> None:
    expected, found = json.loads(CURVE.read_text()), run(tmp_path)
    assert [list(entry) for entry in found] == [list(entry) for entry in expected]
    for now, then in zip(found, expected, strict=True):
        assert (now["step"], now["tokens"]) == (then["step"], then["tokens"])
        assert now["lr"] == pytest.approx(then["lr"])
        # Other machines add up in other orders; a change in the learning is far larger.
        for name in ("loss", "validation_loss", "grad_norm"):
            if name in then:
                assert now[name] == pytest.approx(then[name], rel=2e-3 if name == "grad_norm" else 2e-4), now["step"]
    assert found[-1]["loss"] < found[0]["loss"] / 1.5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        entries = run(Path(name))
    CURVE.write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]\n")
