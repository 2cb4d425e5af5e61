"""The smallest run that learns something: words turned round by a T5 on one CPU thread, in about a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

RAW: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 384, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2,
    "num_decoder_layers": 1, "num_heads": 3, "relative_attention_num_buckets": 8,
}  # fmt: skip


def write_pairs(file: Path, count: int, seed: int = 0) -> None:
    """Words and the same words backwards."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdeăș", k=rng.randint(2, 10))) for _ in range(count)]
    file.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words), encoding="utf-8")


def settings(folder: Path, name: str = "run", /, **overrides: str | list[str]) -> dict[str, str | list[str]]:
    """The config keys of 7 steps on ``config.json`` and 20 pairs in ``pairs.tsv``: 3 an epoch, the last of them short.

    Every step is logged, every second one saved; overrides are keys with two underscores for the dot.
    """
    base: dict[str, str | list[str]] = {
        "run.dir": str(folder / name),
        "run.device": "cpu",
        "run.threads": "1",
        "model.config": str(folder / "config.json"),
        "model.tokenizer": "bytes",
        "model.dropout": "0.1",
        "data.train": str(folder / "pairs.tsv"),
        "data.max_source_length": "24",
        "data.max_target_length": "24",
        "train.batch": "8",
        "train.steps": "7",
        "train.micro_rows": "4",
        "train.log_every": "1",
        "checkpoint.every": "2",
        "optim.lr": "0.01",
    }
    return base | {key.replace("__", "."): value for key, value in overrides.items()}


def quiet(line: str) -> None:
    """Takes what a run reports."""
