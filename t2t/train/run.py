"""A run: everything is built once, then a short loop.

The folder of a run holds all it knows: config.toml, log.jsonl, checkpoints/, model/, and crash/ when it diverged.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as recompute

from t2t import device as devices
from t2t import metrics
from t2t.checkpoint import store
from t2t.config import Config, flat, load, to_toml
from t2t.data import tokens
from t2t.data.loader import Loader, Splits, pick_shape, read_splits
from t2t.data.tokens import Tokenizer
from t2t.errors import InputError, did_you_mean
from t2t.generate import Settings, save_settings
from t2t.models import load as models
from t2t.models.t5 import T5
from t2t.optim.build import Optimizer, default_lr, schedule, state_bytes
from t2t.terminal import Progress, human_bytes, human_count, table
from t2t.train import evaluate, trackers
from t2t.train.signals import StopRequest
from t2t.train.step import Diverged, train_step

MICRO_TOKENS = {"cpu": 4096}  # slots in a micro-batch when train.micro_rows is "auto"
MICRO_TOKENS_ACCELERATOR = 65536
# Keys that may differ between a run and its resumption: where, how fast and what is told, never what is learned.
# The data's files may move; their content is checked by its fingerprint.
FREE_KEYS = """run.dir run.name run.device run.threads data.train data.validation data.readers train.stop_at train.micro_rows
    train.log_every train.evaluate_every train.metrics checkpoint.* generate.* track.*""".split()


class Interrupted(Exception):
    """A signal ended the run after its current step; the state is saved and the same command goes on."""


@dataclass
class Run:
    """The parts of a run, built."""

    config: Config
    folder: Path
    device: torch.device
    tokenizer: Tokenizer
    model: T5
    raw: dict[str, Any]
    splits: Splits
    loader: Loader
    validation: Loader | None
    optimizer: Optimizer
    total_steps: int
    report: Callable[[str], None]
    step: int = 0
    best: dict[str, float] = dataclasses.field(default_factory=dict)  # {"step", "value"} of the best evaluation
    stale: int = 0  # evaluations since the best one


def train(config: Config, report: Callable[[str], None] = print) -> dict[str, float]:
    """Train as the config says, or go on where the run's folder left off; gives back the last figures.

    >>> train(load(overrides={"model.path": "no-model/here/x", "data.train": "x"}))
    Traceback (most recent call last):
    t2t.errors.InputError: model.path: no such folder: no-model/here/x
    """
    if not config.model.path and not config.model.config:
        raise InputError("model.path: no model given, as --model.path google-t5/t5-small, or asset:byt5-ro")
    metrics.build(config.train.metrics)  # a misspelt name should not wait for the first evaluation
    folder = config.run_dir
    models.find(config.model.path) if config.model.path else models.read_config(Path(config.model.config))
    folder.mkdir(parents=True, exist_ok=True)
    with store.RunLock(folder):
        _check_same_config(config, folder)
        run = build(config, report)
        _resume(run)
        store.atomic_write(folder / "config.toml", to_toml(config))
        report(summary(run))
        return _loop(run)


def build(config: Config, report: Callable[[str], None] = print) -> Run:
    """Load or make every part of a run; nothing is written."""
    device = devices.resolve(config.run.device)
    devices.use_threads(config.run.threads)
    dtype = devices.compute_dtype(config.train.precision, device)
    tokenizer = load_tokenizer(config)
    splits = read_splits(config.data, tokenizer, config.run.seed)
    for note in splits.notes:
        report(f"note: {note}")
    model, raw = load_model(config, device, dtype)
    if tokenizer.vocab_size > model.config.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} tokens, the model {model.config.vocab_size:,}"
        raise InputError(f"model.tokenizer: does not fit the model: it has {sizes}")
    _freeze(model, config.model.freeze)
    if config.train.gradient_checkpointing:
        for block in [*model.encoder.block, *model.decoder.block]:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    shape = pick_shape(splits.train, config.data, config.train.batch, model.row_cost, config.run.seed)
    given = config.train.micro_rows
    slots = MICRO_TOKENS.get(device.type, MICRO_TOKENS_ACCELERATOR)
    micro_rows = given if given != "auto" else max(1, slots // (shape.source_row + shape.target_row))
    ids = {"start_id": model.config.start_id, "pad_id": model.config.pad_id}
    static = devices.static_shapes(device)
    loader = Loader(
        splits.train, config.train.batch, shape, micro_rows, config.run.seed, **ids, objective=config.data.objective, static=static
    )
    validation = None
    if len(splits.validation):
        held_shape = pick_shape(splits.validation, config.data, config.train.batch, model.row_cost, config.run.seed)
        validation = Loader(
            splits.validation, config.train.batch, held_shape, micro_rows, config.run.seed, **ids,
            objective=config.data.objective, static=static, shuffle=False,
        )  # fmt: skip
    total = config.train.steps or max(1, math.ceil(config.train.epochs * loader.steps_per_epoch))
    lr = config.optim.lr
    if lr is None:
        lr = default_lr(config.optim.name, model.family, from_scratch=not config.model.path)
    optimizer = Optimizer(dict(model.named_parameters()), config.optim, lr, schedule(config.optim, total))
    model.train()
    return Run(
        config, config.run_dir, device, tokenizer, model, raw, splits, loader, validation, optimizer, total, report
    )


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that the config names, or the model folder's own."""
    if config.model.tokenizer:
        return tokens.load(config.model.tokenizer)
    if not config.model.path:
        raise InputError('model.tokenizer: training from scratch needs one: "bytes", a folder, a SentencePiece file')
    return tokens.load(str(models.find(config.model.path)))


def load_model(config: Config, device: torch.device, dtype: torch.dtype) -> tuple[T5, dict[str, Any]]:
    """The model to start from, and its Hugging Face config."""
    if config.model.path:
        model, raw = models.load(models.find(config.model.path), device, dtype, config.model.dropout)
    else:
        raw = models.read_config(Path(config.model.config))
        model = models.create(raw, config.run.seed, config.model.dropout).to(device, dtype)
    return model, raw


def summary(run: Run) -> str:
    """What the run is about to do, as a table."""
    config, shape = run.config, run.loader.shape
    parameters = dict(run.model.named_parameters())
    count = sum(p.numel() for p in parameters.values())
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    weights = sum(p.nbytes for p in parameters.values())
    per_step = min(config.train.batch, len(run.splits.train))
    lengths = run.splits.train.source.lengths.mean() + run.splits.train.target.lengths.mean()
    dtype = str(run.model.head.dtype).removeprefix("torch.")
    memory = weights + state_bytes(parameters, config.optim) + activation_bytes(run)
    have = devices.total_memory(run.device)
    rows = [
        ("model", f"{config.model.path or config.model.config} ({run.raw['model_type']}, {dtype})"),
        ("parameters", f"{human_count(count)}, {human_count(trained)} trained, {human_bytes(weights)}"),
        ("data", f"{len(run.splits.train):,} examples, {len(run.splits.validation):,} held out"),
        ("rows", f"{shape.source_row} + {shape.target_row} slots, filled {shape.source_fill:.2f} / {shape.target_fill:.2f}"),
        ("batch", f"{per_step:,} examples, about {per_step * lengths:,.0f} tokens, {run.loader.micro_rows} rows at once"),
        ("steps", f"{run.total_steps:,} ({run.total_steps / run.loader.steps_per_epoch:.2f} epochs), at step {run.step:,}"),
        ("optimizer", f"{config.optim.name}, {config.optim.schedule}, peak rate {run.optimizer.lr:g}"),
        ("device", devices.describe(run.device)),
        ("memory", f"about {human_bytes(memory)}" + (f" of {human_bytes(have)}" if have else "")),
        ("folder", str(run.folder)),
    ]  # fmt: skip
    return table(rows)


def activation_bytes(run: Run) -> int:
    """A rough figure of what forward keeps for backward, of one micro-batch."""
    c, shape, rows = run.model.config, run.loader.shape, run.loader.micro_rows
    size = run.model.head.element_size()
    inner = c.num_heads * c.d_kv
    token = 8 * c.d_model + 4 * inner + (6 if c.gated else 4) * c.d_ff
    scores = c.num_heads * (2 if c.dropout else 1)
    source = shape.source_row * (token + scores * shape.source_row)
    target = shape.target_row * (token + 4 * inner + scores * (shape.source_row + shape.target_row))
    if run.config.train.gradient_checkpointing:
        kept = c.num_layers * shape.source_row * c.d_model + c.num_decoder_layers * shape.target_row * c.d_model
        return rows * size * (kept + max(source, target))
    return rows * size * (c.num_layers * source + c.num_decoder_layers * target)


def _loop(run: Run) -> dict[str, float]:
    config = run.config
    last = min(run.total_steps, config.train.stop_at or run.total_steps)
    tracker = trackers.build(config, run.folder, run.step)
    figures: dict[str, float] = {}
    window = _Window()
    with StopRequest() as stop, Progress(run.total_steps, "train", start=run.step) as progress:
        for batches in run.loader.steps(run.step, last, config.data.readers):
            try:
                result = train_step(
                    run.model, run.optimizer, batches, run.step, config.run.seed, config.optim.clip, config.train.label_smoothing
                )  # fmt: skip
            except Diverged as error:
                _write_crash(run, error)
                raise
            run.step += 1
            window.add(result.loss, result.target_tokens, result.tokens)
            ended = run.step == last or bool(stop.requested)
            if run.step % config.train.log_every == 0 or ended:
                figures = {**window.figures(), "lr": result.lr, "grad_norm": result.grad_norm}
                tracker.log(run.step, figures)
                progress.update(run.step, loss=figures["loss"], **{"tokens/s": figures["tokens_per_s"]})
                window = _Window()
            if run.validation and not stop.requested and _due(run.step, config.train.evaluate_every, last):
                held_out = _evaluate(run)
                tracker.log(run.step, {f"validation_{k}": v for k, v in held_out.items()})
                figures |= {f"validation_{k}": v for k, v in held_out.items()}
                progress.line("  ".join([f"step {run.step}: held out:", *(f"{k} {v:.4f}" for k, v in held_out.items())]))
                ended = ended or bool(config.train.patience and run.stale >= config.train.patience)
            if ended or run.best.get("step") == run.step or _due(run.step, config.checkpoint.every, last):
                _save(run)
            if ended:
                break
    tracker.close()
    if stop.requested:
        raise Interrupted(f"{stop.requested}: saved at step {run.step}; the same command goes on from there")
    export(run)
    return figures


class _Window:
    """Figures since the last log line."""

    def __init__(self) -> None:
        self.start, self.loss, self.targets, self.tokens = time.perf_counter(), 0.0, 0, 0

    def add(self, loss: float, targets: int, tokens: int) -> None:
        self.loss, self.targets, self.tokens = self.loss + loss * targets, self.targets + targets, self.tokens + tokens

    def figures(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.start
        return {"loss": self.loss / self.targets, "tokens": self.tokens, "tokens_per_s": self.tokens / seconds}


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _evaluate(run: Run) -> dict[str, float]:
    """Held-out figures; keeps track of the best."""
    config = run.config
    assert run.validation is not None
    figures = evaluate.loss(run.model, run.validation)
    if config.train.metrics:
        file = run.folder / "predictions" / f"step-{run.step:06d}.jsonl"
        file.parent.mkdir(exist_ok=True)
        figures |= evaluate.score(
            config.train.metrics, run.model, run.tokenizer, run.splits.validation_examples, config.generate,
            config.data.max_source_length, config.data.max_target_length, file,
        )  # fmt: skip
    if config.train.best not in figures:
        raise InputError(f"train.best: no figure {config.train.best!r}{did_you_mean(config.train.best, figures)}")
    value = figures[config.train.best]
    if not run.best or metrics.better(config.train.best, value, run.best["value"]):
        run.best, run.stale = {"step": run.step, "value": value}, 0
    else:
        run.stale += 1
    return figures


def _save(run: Run) -> None:
    root = run.folder / "checkpoints"
    frozen = {n: p.detach() for n, p in run.model.named_parameters() if not p.requires_grad}
    state = {
        "step": run.step,
        "data": run.loader.fingerprint,
        "tokenizer": run.tokenizer.fingerprint,
        "best": run.best,
        "stale": run.stale,
    }
    store.save(root, run.step, {**frozen, **run.optimizer.weights()}, run.optimizer.state(), state)
    store.prune(root, run.config.checkpoint.keep, {int(run.best["step"])} if run.best else set())


def _resume(run: Run) -> None:
    """Go on from the newest checkpoint that verifies; refuse one of other data."""
    root = run.folder / "checkpoints"
    found = store.newest(root, run.report)
    if found is None:
        return
    if not run.config.checkpoint.resume:
        raise InputError(f"{run.folder}: holds a run already; resume it or give another run.dir")
    saved = store.load(found)
    for name, now in (("data", run.loader.fingerprint), ("tokenizer", run.tokenizer.fingerprint)):
        if saved.state[name] != now:
            raise InputError(
                f"{found}: was trained on other {name} (fingerprint {saved.state[name]}, now {now}): "
                "give the same files and settings, or another run.dir"
            )
    _put_weights(run, saved.model)
    trained = {n for n, p in run.model.named_parameters() if p.requires_grad}
    run.optimizer.load({n: t for n, t in saved.model.items() if n in trained}, saved.optim, saved.step)
    run.step, run.best, run.stale = saved.step, saved.state["best"], saved.state["stale"]
    run.report(f"resumed from {found}")


@torch.no_grad()
def _put_weights(run: Run, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in run.model.named_parameters():
        parameter.copy_(weights[name])


def _check_same_config(config: Config, folder: Path) -> None:
    """A run that has checkpoints goes on under the config it began with."""
    file = folder / "config.toml"
    if not file.is_file() or not store.steps(folder / "checkpoints"):
        return
    before, now = flat(load(file, validate=False)), flat(config)
    differ = [
        f"{key}: {before[key]!r} before, {now[key]!r} now"
        for key in now
        if before[key] != now[key] and not any(fnmatch.fnmatch(key, free) for free in FREE_KEYS)
    ]
    if differ:
        raise InputError(f"{folder}: holds a run with another config; give another run.dir, or undo: {'; '.join(differ)}")


def _freeze(model: T5, globs: tuple[str, ...]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for glob in globs:
        hit = fnmatch.filter(names, glob)
        if not hit:
            raise InputError(f"model.freeze: {glob!r} matches no parameter{did_you_mean(glob, names)}")
        for name in hit:
            model.get_parameter(name).requires_grad_(False)


def _write_crash(run: Run, error: Diverged) -> None:
    """Keep what it takes to see why: the examples with their text, and where they came from."""
    folder = run.folder / "crash" / f"step-{run.step + 1:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    pairs, decode = run.splits.train, run.tokenizer.decode
    rows = [
        {"example": i, "where": pairs.where[i], "source": decode(pairs.source[i].tolist()), "target": decode(pairs.target[i].tolist())}
        for i in error.examples
    ]  # fmt: skip
    store.atomic_write(folder / "examples.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    store.atomic_write(folder / "error.json", json.dumps({"step": run.step + 1, "error": str(error)}) + "\n")
    run.report(f"{error}; nothing was updated; {len(rows)} examples are in {folder}")


def export(run: Run) -> Path:
    """Write ``model/``: a Hugging Face folder of the best weights, or of the last where nothing was evaluated."""
    folder = run.folder / "model"
    weights = {**dict(run.model.named_parameters()), **run.optimizer.weights()}
    step = run.step
    root = run.folder / "checkpoints"
    if run.best and run.best["step"] != run.step and int(run.best["step"]) in store.steps(root):
        step = int(run.best["step"])
        weights = store.load(root / f"step-{step:06d}").model
    fresh = run.folder / ".model"
    models.save(weights, run.raw, fresh)
    run.tokenizer.save(fresh)
    data = run.config.data
    settings = Settings(
        prefix=data.prefix,
        max_source_length=data.max_source_length,
        max_target_length=data.max_target_length,
        source_transforms=data.source_transforms,
        generate=run.config.generate,
    )
    save_settings(fresh, settings)
    if folder.exists():
        shutil.rmtree(folder)
    fresh.rename(folder)
    run.report(f"model of step {step:,}: {folder}")
    return folder
