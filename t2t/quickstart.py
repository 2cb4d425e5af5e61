"""The first run: tune the package's small T5 to restore Romanian diacritics, and show what it learned."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence

from t2t import device as devices
from t2t import metrics
from t2t.config import Config
from t2t.data.splits import read_examples
from t2t.data.tasks import Example
from t2t.files import atomic_write
from t2t.generate import Loaded, load
from t2t.terminal import colours, human_seconds, mark_changes, table
from t2t.train.run import train

SHOWN = 6  # sample lines


def quickstart(config: Config) -> dict[str, float]:
    """Evaluate, train, evaluate again; prints a table and writes ``result.json`` into the run's folder.

    >>> from t2t.config import load
    >>> load("quickstart").data.source_transforms
    ('strip_diacritics',)
    """
    result_file, checkpoints = config.run_dir / "result.json", config.run_dir / "checkpoints"
    if result_file.exists() and checkpoints.exists():  # a finished quickstart begins anew; an interrupted one goes on
        shutil.rmtree(checkpoints)
        result_file.unlink()
    devices.use_threads(config.run.threads)
    examples, _ = read_examples(
        config.data.validation, "data.validation", config.data, config.data.max_validation_samples
    )
    copied = [example.source for example in examples]
    print(f"Before training: {len(examples)} held-out sentences ...", flush=True)
    before = _generate(load(config.model.path, config.run.device), config, examples)
    started = time.perf_counter()
    train(config)
    seconds = time.perf_counter() - started
    print(f"After training: the same {len(examples)} sentences ...\n", flush=True)
    after = _generate(load(config.run_dir / "model", config.run.device), config, examples)
    result = {
        "copy": _words_right(copied, examples),
        "before": _words_right(before, examples),
        "after": _words_right(after, examples),
        "train_seconds": round(seconds, 1),
    }
    print(_report(result, before, after, examples))
    atomic_write(result_file, json.dumps(result, indent=2) + "\n")
    print(f"\n{config.run_dir}: model/ opens in transformers; log.jsonl, checkpoints/ and result.json lie beside it.")
    return result


def _generate(loaded: Loaded, config: Config, examples: Sequence[Example]) -> list[str]:
    return loaded.generate([example.source for example in examples], max_length=config.data.max_target_length)


def _words_right(predictions: Sequence[str], examples: Sequence[Example]) -> float:
    targets = [example.target for example in examples]
    return round(metrics.evaluate(["word_accuracy"], predictions, targets)["word_accuracy"], 4)


def _report(result: dict[str, float], before: Sequence[str], after: Sequence[str], examples: Sequence[Example]) -> str:
    rows = [
        ("copying the input", result["copy"]),
        ("before training", result["before"]),
        (f"after {human_seconds(result['train_seconds'])} of training", result["after"]),
    ]
    text = table([(name, f"{share:.1%}") for name, share in rows], header=("held-out sentences", "words right"))
    colour = colours(sys.stdout)
    key = "green: restored; red: wrong, with the right word after it" if colour else "*restored*, ~wrong~(right)"
    changed = [i for i, example in enumerate(examples) if before[i] != example.target][:SHOWN]
    lines = [mark_changes(examples[i].source, after[i], examples[i].target, colour) for i in changed]
    return "\n".join([text, "", f"What it makes of text without diacritics ({key}):", *(f"  {line}" for line in lines)])
