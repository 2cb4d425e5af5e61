"""Held-out figures: the loss, and text metrics of generated output."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from t2t import device as devices
from t2t import generate, metrics
from t2t.config import Config, Data, Generate, load
from t2t.data.chat import Conversation, Prompt, Template
from t2t.data.loader import Loader, pick_shape
from t2t.data.objectives import Objective, Prompted
from t2t.data.prepare import Maker
from t2t.data.splits import chosen_objective, read, read_splits
from t2t.data.tasks import Example
from t2t.data.tokens import Tokenizer
from t2t.errors import InputError
from t2t.files import atomic_write
from t2t.generate import batching
from t2t.models.base import Model
from t2t.parallel import ALONE, Ranks
from t2t.train.step import on_device

METRICS = ("bleu", "chrf", "rouge", "exact_match", "wer", "cer", "word_accuracy")


class Stopped(Exception):
    """An evaluation was given up on its way, as its ``stopped`` asked."""


def _never() -> bool:
    return False


def loss(model: Model, loader: Loader, stopped: Callable[[], bool] = _never, ranks: Ranks = ALONE) -> dict[str, float]:
    """Mean loss over the labels of all examples, and what else a model of its kind can tell without generating.

    Of several ranks each has its share of the examples in its ``loader``; all get the same figures.
    """
    return task_losses(model, {"": loader}, stopped, ranks)[""]


def task_losses(
    model: Model, loaders: Mapping[str, Loader], stopped: Callable[[], bool] = _never, ranks: Ranks = ALONE
) -> dict[str, dict[str, float]]:
    """The figures of `loss` for all tasks together, every label counted alike, under no name; then for each by name."""
    sums = {task: _sums(model, loader, stopped, ranks) for task, loader in loaders.items()}
    words = {task: loader.examples.words for task, loader in loaders.items()}
    whole = _figures(model, sum(sums.values(), np.zeros((3, 2))), sum(words.values()) if all(words.values()) else 0)
    return {"": whole} | {task: _figures(model, own, words[task]) for task, own in sums.items()}


@torch.no_grad()
def _sums(model: Model, loader: Loader, stopped: Callable[[], bool], ranks: Ranks) -> np.ndarray:
    """Losses, labels, and labels guessed right: of tokens and, where there are any, of pairs, [3, 2]."""
    training = model.training
    model.eval()
    found, given_up = np.zeros((3, 2)), False
    try:
        for batch in chain.from_iterable(loader.steps(0, loader.steps_per_epoch)):
            if given_up := stopped():
                break
            losses, hits = model.judge(on_device(batch, model.head.device))
            own = slice(len(losses))
            found[0, own] += losses.double().cpu().numpy()
            found[1, own] += batch.counts
            found[2, own] += np.nan if hits is None else hits.cpu().numpy()
    finally:
        model.train(training)
    if ranks.any(given_up):
        raise Stopped
    return ranks.sum(found)


def _figures(model: Model, found: np.ndarray, words: int) -> dict[str, float]:
    sums, counts, right = found[:, : 1 + bool(found[1, 1])]
    means = sums / np.maximum(counts, 1)
    mean = float(means.sum())
    figures = {"loss": mean}
    if model.kind == "masked":
        shares = right / np.maximum(counts, 1)  # nan: the model does not tell
        for name, own, share in zip(("masked", "next_sentence"), means.tolist(), shares.tolist(), strict=False):
            figures |= {f"{name}_loss": own} | ({} if math.isnan(share) else {f"{name}_accuracy": share})
    if model.kind == "causal":
        figures["perplexity"] = _exp(mean)
        if words:
            figures["word_perplexity"] = _exp(float(sums[0]) / words)
    return figures


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def score(
    names: Sequence[str],
    model: Model,
    tokenizer: Tokenizer,
    examples: Sequence[Example | Conversation],
    settings: Generate,
    max_source_length: int,
    max_length: int,
    file: Path | None = None,
    stopped: Callable[[], bool] = _never,
    template: str = "",
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Text metrics of generated output against the targets; predictions go to ``file`` beside their references.

    Of a conversation the last answer is the target. Ranks generate a share of the texts each.
    """
    measures = metrics.build(names)
    rows = []
    sources = _sources(examples[ranks.rank :: ranks.size], tokenizer, max_source_length)
    lengths = max_source_length, settings.max_length or max_length
    own: list[str] = []
    given_up = False
    for text in batching.texts(model, tokenizer, sources, settings, *lengths, template=template):
        if given_up := stopped():
            break
        own.append(text)
    if ranks.any(given_up):
        raise Stopped
    shares = ranks.gather(own)
    for i, example in enumerate(examples):
        prediction = shares[i % ranks.size][i // ranks.size]
        if isinstance(example, Conversation):
            prediction = prediction.strip()
        for measure in measures:
            measure.add(prediction, example.target)
        row = {"where": example.where, "source": example.source, "prediction": prediction, "reference": example.target}
        rows.append(json.dumps(row, ensure_ascii=False) + "\n")
    if file is not None and ranks.first:
        atomic_write(file, "".join(rows))
    return {name: figure for measure in measures for name, figure in measure.result().items()}


def _sources(examples: Sequence[Example | Conversation], tokenizer: Tokenizer, longest: int) -> Iterator[str | Prompt]:
    template: Template | None = None
    for example in examples:
        if isinstance(example, Conversation):
            template = template or Template(tokenizer)
            yield template.prompt(example.source, longest)
        else:
            yield example.source


def evaluate(
    model: str,
    files: Sequence[str],
    names: Sequence[str] | None = None,
    overrides: Mapping[str, str | list[str]] | None = None,
    output: Path | None = None,
    task: str = "",
) -> dict[str, float]:
    """Loss and text metrics of a model folder on files, with the prefix, lengths and transforms it was trained with.

    Of plain text a causal model tells its perplexity, a masked one how much it guesses right; there are no targets to
    compare texts with. All metrics are computed where none are named.

    ``overrides`` are config keys as on the command line: ``{"data.source": "article", "generate.beams": "4"}``.
    A model of several tasks is to be told the ``task``, whose settings then count.
    """
    loaded = generate.load(model, load(None, overrides).run.device).task(task)
    own = loaded.settings
    travelled = Config(
        data=Data(
            prefix=own.prefix,
            max_source_length=own.max_source_length,
            max_target_length=own.max_target_length,
            source_transforms=own.source_transforms,
            template=own.template or Data.template,
        ),
        generate=own.generate,
    )
    config = load(None, overrides, base=travelled)
    data = dataclasses.replace(config.data, train=tuple(files), max_samples=config.data.max_validation_samples)
    devices.use_threads(config.run.threads)
    own_config, batch = loaded.model.config, config.generate.batch
    examples, learned, notes = _read(loaded, data, config.run.seed)
    if not examples and (names or output):
        raise InputError("--metrics, --output: compare generated text with targets, which plain text has none of")
    metrics.build(names or METRICS)
    for note in (*own.notes, *notes):
        print(f"note: {note}", file=sys.stderr)
    if loaded.model.prompt:
        learned = Prompted(learned, loaded.model.prompt, loaded.model.kind)
    static = devices.static_shapes(loaded.model.head.device)
    packed = loaded.model.packs
    shape = pick_shape(learned, data, batch, own_config.row_cost, config.run.seed, static, packed)
    rows = math.ceil(shape.rows_per_step)
    loader = Loader(learned, batch, shape, rows, 0, own_config.pad_id, static=static, shuffle=False, packed=packed)
    figures = loss(loaded.model, loader)
    if not examples:
        return figures
    lengths = data.max_source_length, data.max_target_length
    return figures | score(
        names or METRICS,
        loaded.model,
        loaded.tokenizer,
        examples,
        config.generate,
        *lengths,
        output,
        template=data.template,
    )


def _read(
    loaded: generate.Loaded, data: Data, seed: int
) -> tuple[Sequence[Example | Conversation], Objective, Sequence[str]]:
    """What the model is to say of files, as texts (of plain text there are none) and as its objective, and notes."""
    kind, start_id = loaded.model.kind, loaded.model.config.start_id
    name = "chat" if loaded.settings.chat else chosen_objective(data, kind)
    if name in ("masked_lm", "masked_lm_nsp"):  # of which there may be shards
        splits = read_splits(data, loaded.tokenizer, seed, kind, start_id)
        return (), splits.train, splits.notes
    learned, examples, notes = read(Maker(data, loaded.tokenizer, name, kind, start_id), "data")
    return examples, learned, notes
