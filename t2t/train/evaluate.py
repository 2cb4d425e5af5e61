"""Held-out figures: the loss, and text metrics of generated output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from t2t import metrics
from t2t.checkpoint.store import atomic_write
from t2t.config import Generate
from t2t.data.loader import Loader
from t2t.data.tasks import Example
from t2t.data.tokens import Tokenizer
from t2t.generate import batching
from t2t.models.t5 import T5
from t2t.train.step import batch_loss


@torch.no_grad()
def loss(model: T5, loader: Loader) -> dict[str, float]:
    """Mean loss over the target tokens of all examples."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for batches in loader.steps(0, loader.steps_per_epoch):
        for batch in batches:
            total += float(batch_loss(model, batch)[0])
            count += batch.target_tokens
    model.train(training)
    return {"loss": total / count}


def score(
    names: Sequence[str],
    model: T5,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    settings: Generate,
    max_source_length: int,
    max_length: int,
    file: Path | None = None,
) -> dict[str, float]:
    """Text metrics of generated output against the targets; predictions go to ``file`` beside their references."""
    measures = metrics.build(names)
    rows = []
    sources = (example.source for example in examples)
    outputs = batching.texts(model, tokenizer, sources, settings, max_source_length, settings.max_length or max_length)
    for example, prediction in zip(examples, outputs, strict=True):
        for measure in measures:
            measure.add(prediction, example.target)
        row = {"where": example.where, "source": example.source, "prediction": prediction, "reference": example.target}
        rows.append(json.dumps(row, ensure_ascii=False) + "\n")
    if file is not None:
        atomic_write(file, "".join(rows))
    return {name: figure for measure in measures for name, figure in measure.result().items()}
