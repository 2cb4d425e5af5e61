"""A short run must lose as it lost when it was checked in: whatever changes the learning shows here.

After a change that is meant, remove tiny_t5.json: the test writes it anew; say why in the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import quiet

from t2t.config import Config
from t2t.train.run import train

CURVE = Path(__file__).parent / "tiny_t5.json"
RAW = {
    "model_type": "t5", "vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_decoder_layers": 1, "num_heads": 4, "relative_attention_num_buckets": 8,
}  # fmt: skip
TEXT = "casa mare si alba pe deal la marginea satului unde cad ploile verii peste campuri verzi fara sfarsit"


def run(make: Callable[..., Config], folder: Path) -> list[dict[str, float]]:
    """The log of 30 steps, four and a half epochs, in fp32 and without dropout."""
    (folder / "config.json").write_text(json.dumps(RAW))
    words = TEXT.split()
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 2 + i % 5)) for i in range(1, 101)]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line.title()}\n" for line in lines))
    chosen = make(
        model__dropout="0",
        data__validation_split="0.05",
        data__prefix="titlu: ",
        data__max_source_length="48",
        data__max_target_length="48",
        train__steps="30",
        train__batch="16",
        train__micro_rows="auto",
        train__log_every="3",
        train__label_smoothing="0.05",
        train__evaluate_every="15",
        optim__lr="0.01",
        optim__warmup="3",
        optim__schedule="cosine",
        optim__weight_decay="0.01",
    )
    train(chosen, quiet)
    kept = ("step", "loss", "tokens", "lr", "grad_norm", "validation_loss")
    entries = (json.loads(line) for line in (chosen.run_dir / "log.jsonl").read_text().splitlines())
    return [{name: entry[name] for name in kept if name in entry} for entry in entries]


def test_the_loss_curve_is_the_one_checked_in(make: Callable[..., Config], tmp_path: Path) -> None:
    found = run(make, tmp_path)
    if not CURVE.exists():
        CURVE.write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in found) + "\n]\n")
        pytest.fail(f"{CURVE} was missing and is written anew: look at it, and check it in")
    expected = json.loads(CURVE.read_text())
    assert [list(entry) for entry in found] == [list(entry) for entry in expected]
    for now, then in zip(found, expected, strict=True):
        assert (now["step"], now["tokens"]) == (then["step"], then["tokens"])
        assert now["lr"] == pytest.approx(then["lr"])
        # Other machines add up in other orders; a change in the learning is far larger.
        for name in ("loss", "validation_loss", "grad_norm"):
            if name in then:
                assert now[name] == pytest.approx(then[name], rel=2e-3 if name == "grad_norm" else 2e-4), now["step"]
    assert found[-1]["loss"] < found[0]["loss"] / 1.5
