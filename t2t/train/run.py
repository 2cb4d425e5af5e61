"""A run: everything is built once, then a short loop.

The folder of a run holds all it knows: config.toml, log.jsonl, checkpoints/, model/, and crash/ when it diverged.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from t2t import device as devices
from t2t import files, kernels, metrics
from t2t.checkpoint import store
from t2t.config import Config, Data, figure_name, flat, load, tasks, to_toml
from t2t.data import chat, order, tokens
from t2t.data.chat import Chat
from t2t.data.loader import Loader, pick_shape
from t2t.data.mixture import Mixture
from t2t.data.objectives import CausalPairs, Objective, Prompted
from t2t.data.packing import Batch, RowShape
from t2t.data.splits import read_splits
from t2t.data.stream import Sample, Source, Stream
from t2t.data.stream import check as check_stream
from t2t.data.tables import Splits
from t2t.data.tokens import Tokenizer
from t2t.errors import InputError, did_you_mean
from t2t.generate import Settings, save_settings
from t2t.models import adapters
from t2t.models import load as models
from t2t.models.base import Model
from t2t.optim.build import Optimizer, default_lr, schedule, state_bytes
from t2t.parallel import ALONE, Ranks, joined
from t2t.terminal import Preparing, Progress, human_bytes, human_count, table
from t2t.train import evaluate, trackers
from t2t.train.prepare import read_model_config, tokenizer_name
from t2t.train.signals import StopRequest
from t2t.train.step import Diverged, Map, StepResult, train_step
from t2t.train.step import workers as worker_map
from t2t.train.summary import model_summary

# Keys that may differ between a run and its resumption: where, how fast and what is told, never what is learned.
# The data's files may move; their content is checked by its fingerprint.
FREE_KEYS = (
    *(
        "run.dir",
        "run.name",
        "run.device",
        "run.threads",
        "data.train",
        "data.validation",
        "data.readers",
        "data.retries",
    ),
    *("train.stop_at", "train.micro_rows", "train.log_every", "train.evaluate_every", "train.metrics"),
    *("data.mix.*.train", "data.mix.*.validation", "data.mix.*.metrics"),
    *("parallel.*", "checkpoint.*", "generate.*", "track.*"),
)


class Interrupted(Exception):
    """A signal ended the run after its current step; the state is saved and the same command goes on."""


@dataclass
class Window:
    """Sums since the last log line, over training alone: neither evaluations nor checkpoints slow its tokens/s.

    >>> window = Window()
    >>> window.add(StepResult(loss=2.0, grad_norm=1.0, lr=0.1, tokens=30, target_tokens=10), seconds=0.5)
    >>> window.add(StepResult(loss=1.0, grad_norm=0.5, lr=0.1, tokens=90, target_tokens=30), seconds=0.5)
    >>> window.figures()
    {'loss': 1.25, 'tokens': 120, 'tokens_per_s': 120.0, 'lr': 0.1, 'grad_norm': 0.5}
    """

    loss: float = 0.0
    targets: int = 0
    tokens: int = 0
    seconds: float = 0.0
    lr: float = 0.0
    grad_norm: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        """Count one step in."""
        self.loss += result.loss * result.target_tokens
        self.targets += result.target_tokens
        self.tokens += result.tokens
        self.seconds += seconds
        self.lr, self.grad_norm = result.lr, result.grad_norm

    def figures(self) -> dict[str, float]:
        """Mean loss and speed of the steps so far, rate and gradient norm of the last."""
        speed = self.tokens / self.seconds
        means = {"loss": self.loss / self.targets, "tokens": self.tokens, "tokens_per_s": speed}
        return {**means, "lr": self.lr, "grad_norm": self.grad_norm}


@dataclass
class Run:
    """The parts of a run, built, and where it stands."""

    config: Config
    folder: Path
    device: torch.device
    tokenizer: Tokenizer
    model: Model
    raw: dict[str, Any]
    splits: Splits
    loader: Loader
    validation: dict[str, Loader]  # by task; what is not a mixture has one without a name, or none
    optimizer: Optimizer
    over: Map
    total_steps: int
    report: Callable[[str], None]
    ranks: Ranks = ALONE
    step: int = 0
    window: Window = dataclasses.field(default_factory=Window)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # the newest that were logged
    best: dict[str, float] = dataclasses.field(default_factory=dict)  # {"step", "value"} of the best evaluation
    stale: int = 0  # evaluations since the best one
    owes: bool = False  # a signal came before what was due after this step was logged and evaluated
    base: str = ""  # digest of the weights that an adapter is trained on

    @property
    def last(self) -> int:
        """The step to end at, unless patience ends it earlier."""
        return min(self.total_steps, self.config.train.stop_at or self.total_steps)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train."""
        patience = self.config.train.patience
        return self.step >= self.last or 0 < patience <= self.stale

    def due(self, every: int | Literal["epoch"]) -> bool:
        """Whether the present step is the last, or one after which something is done every so many steps."""
        steps = self.loader.steps_per_epoch if every == "epoch" else every
        return self.step == self.last or (steps > 0 and self.step % steps == 0)


def train(config: Config, report: Callable[[str], None] = print) -> dict[str, float]:
    """Train as the config says, or go on where the run's folder left off; gives back the last figures.

    Under torchrun each process is a rank: all train together, and rank 0 alone writes and reports.

    >>> train(load(overrides={"model.path": "no-model/here/x", "data.train": "x"}))
    Traceback (most recent call last):
    t2t.errors.InputError: model.path: no such folder: no-model/here/x
    """
    with joined(config.parallel.dp) as ranks, ExitStack() as held:
        if not ranks.first:
            report = _silent
        with ranks.together():
            if ranks.first and (config.run_dir / "lock").is_file():
                with store.RunLock(config.run_dir):  # what would refuse a run in this folder need not wait for the data
                    _check_folder(config)
            run = build(config, report, ranks)
        with ranks.together():
            found = _take_folder(run, held) if ranks.first else None
        found = ranks.share(found)
        with ranks.together():
            if found is not None:
                _resume(run, Path(found))
        _check_equal(run)
        with ranks.together():
            if ranks.first:
                files.atomic_write(run.folder / "config.toml", to_toml(config))
                report(summary(run))
        return _loop(run)


def _silent(line: str) -> None:
    """What ranks other than the first report."""


def _take_folder(run: Run, held: ExitStack) -> str | None:
    """Lock the run's folder, and find the checkpoint to go on from."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir: {run.folder}: {error.strerror}") from None
    held.enter_context(store.RunLock(run.folder))
    _check_folder(run.config)
    root = run.folder / "checkpoints"
    found = store.newest(root, run.report)
    if found is None and store.steps(root):
        raise InputError(f"{root}: every checkpoint is damaged; give another run.dir to start anew")
    return None if found is None else str(found)


@torch.no_grad()
def _check_equal(run: Run) -> None:
    """Ranks that would train apart are refused."""
    if run.ranks.size == 1:
        return
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    sums = [p.contiguous().view(whole[p.element_size()]).sum().item() for p in run.model.parameters()]
    told = {"config": to_toml(run.config), **_fingerprints(run), "step": run.step, "weights": sums}
    digests = run.ranks.gather({name: order.key(value) for name, value in told.items()})
    with run.ranks.together():
        for rank, digest in enumerate(digests):
            for name in told:
                if digest[name] != digests[0][name]:
                    raise InputError(f"{name}: rank {rank} has another than rank 0; all must see the same files")


def build(config: Config, report: Callable[[str], None] = print, ranks: Ranks = ALONE) -> Run:
    """Load or make every part of a run; nothing is written."""
    if not config.model.path and not config.model.config:
        raise InputError("model.path: no model given, as --model.path google-t5/t5-small, or asset:byt5-ro")
    # What is misspelt should neither wait for the data nor for the first evaluation.
    for task in tasks(config.data):
        metrics.build(config.metrics(task))
    if config.data.streaming:
        check_stream(config)
    tokenizer = load_tokenizer(config)
    family, architecture = models.architecture(read_model_config(config, tokenizer))
    device = devices.resolve(config.run.device, ranks.local if ranks.size > 1 else None)
    devices.use_threads(config.run.threads, ranks.local_size)
    devices.keep_memory(device)
    dtype = devices.compute_dtype(config.train.precision, device)
    parts = config.data, tokenizer, config.run.seed, family.kind, architecture.start_id
    source = Source(*parts) if config.data.streaming else None
    with Preparing() as tell:
        splits = source.splits() if source else read_splits(*parts, tell)
    for note in splits.notes:
        report(f"note: {note}")
    model, raw = load_model(config, device, dtype, tokenizer)
    if model.fresh:
        report(f"note: the weights lack {', '.join(model.fresh[:3])} ({len(model.fresh)} in all): these start afresh")
    chats = [own.train for own in splits.tasks.values() if isinstance(own.train, Chat)]
    if chats:
        model.stops = (chats[0].end_id,)
    _check_targets(config, splits)
    if config.train.torch_ort:
        devices.use_torch_ort(model)
    if config.train.gradient_checkpointing:
        for block in model.blocks():
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    # Recomputing, like a wrapped model, draws from torch's own generator, which threads would have to share.
    alone = config.train.gradient_checkpointing or not model.packs
    workers = 1 if alone else devices.workers(device)
    loader = _loader(config, model, device, splits.train, workers, ranks, source=source, report=report)
    validation = {
        task: _loader(config, model, device, own.validation, 1, ranks, shuffle=False)
        for task, own in splits.tasks.items()
        if own.validation is not None
    }
    if not validation:
        _check_nothing_evaluated(config)
    total = config.train.steps or max(1, math.ceil(config.train.epochs * loader.steps_per_epoch))
    lr = config.optim.lr
    if lr is None:
        lr = default_lr(config.optim.name, model.family, not config.model.path, config.tune.method)
    optimizer = Optimizer(dict(model.named_parameters()), config.optim, lr, schedule(config.optim, total))
    model.train()
    built = (config, config.run_dir, device, tokenizer, model, raw, splits, loader, validation, optimizer)
    base = models.digest(models.find(config.model.path)) if model.adapter else ""
    over = worker_map(workers) if workers > 1 else map
    return Run(*built, over=over, total_steps=total, report=report, ranks=ranks, base=base)


def _tune(config: Config, model: Model, tokenizer: Tokenizer) -> None:
    """Put the adapter that is to be trained on the model."""
    tune, seed = config.tune, config.run.seed
    if tune.method == "lora":
        adapters.add_lora(model, tune.r, tune.alpha, tune.targets, seed)
    elif tune.method == "prompt":
        ids: Sequence[int] = tokenizer.encode(tune.text) if tune.init == "text" else range(tokenizer.vocab_size)
        if not ids:
            raise InputError(f"tune.text: {tune.text!r} has no tokens to start from")
        embedding = model.get_parameter(model.embeddings[0])
        adapters.add_prompt(model, adapters.prompt_rows(embedding, tune.tokens, tune.init, ids, seed))


def _loader(
    config: Config,
    model: Model,
    device: torch.device,
    examples: Objective,
    workers: int,
    ranks: Ranks,
    shuffle: bool = True,
    source: Source | None = None,
    report: Callable[[str], None] = print,
) -> Loader:
    static, given = devices.static_shapes(device), config.train.micro_rows
    make: Callable[..., Loader] = Loader
    if source:
        examples = Sample(examples, source.longest(examples))
        make = functools.partial(Stream, source=source, readers=config.data.readers, report=report)
    if model.prompt:
        prompted = functools.partial(Prompted, ids=model.prompt, kind=model.kind)
        examples = examples.map(prompted) if isinstance(examples, Mixture) else prompted(examples)
    _check_positions(model, examples)
    cost = model.config.row_cost
    shape = pick_shape(examples, config.data, config.train.batch, cost, config.run.seed, static, model.packs)
    return make(
        examples,
        config.train.batch,
        shape,
        _auto_micro_rows(shape, device, ranks.size) if given == "auto" else given,
        config.run.seed,
        pad_id=model.config.pad_id,
        static=static,
        shuffle=shuffle,
        cost=cost,
        workers=workers,
        packed=model.packs,
        rank=ranks.rank,
        size=ranks.size,
    )


def _check_positions(model: Model, examples: Objective) -> None:
    longest = max(examples.longest)
    room = getattr(model.config, "positions", 0)  # 0: any number
    if 0 < room < longest:
        own = f", {len(model.prompt)} of them a soft prompt's" if model.prompt else ""
        advice = "lower data.max_source_length, data.max_target_length or data.block"
        raise InputError(f"data: an example takes {longest} positions{own}; the model has {room}: {advice}")


def _check_targets(config: Config, splits: Splits) -> None:
    """Refuse metrics of plain text; those that all tasks of a mixture share are for the ones that have targets."""
    for task, own in splits.tasks.items():
        plain = own.validation is not None and not own.validation_examples
        if plain and config.metrics(task) and (not task or "metrics" in config.data.mix[task]):
            key = f"data.mix.{task}.metrics" if task else "train.metrics"
            raise InputError(f"{key}: compares generated text with targets, which plain text has none of")


def _check_nothing_evaluated(config: Config) -> None:
    for key in ("evaluate_every", "metrics", "patience"):
        if getattr(config.train, key):
            reason = "needs examples to evaluate on: give data.validation or data.validation_split"
            raise InputError(f"train.{key}: {reason}")


def _auto_micro_rows(shape: RowShape, device: torch.device, ranks: int = 1) -> int:
    """As many rows as the device likes at once, in even parts of a rank's step with a little room: few stay empty."""
    most = max(1, devices.micro_slots(device) // (shape.source_row + shape.target_row))
    rows = 1.03 * shape.rows_per_step / ranks + 1
    return math.ceil(rows / math.ceil(rows / most))


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that the config names, or the model folder's own."""
    tokenizer = tokens.load(tokenizer_name(config))
    return tokens.extended(tokenizer, config.model.new_tokens)


def load_model(
    config: Config, device: torch.device, dtype: torch.dtype, tokenizer: Tokenizer
) -> tuple[Model, dict[str, Any]]:
    """The model to start from, with rows for all tokens, frozen parts and adapter, and its Hugging Face config."""
    if config.model.path:
        model, raw = models.load(models.find(config.model.path), device, dtype, config.model.dropout)
    else:
        raw = read_model_config(config, tokenizer)
        model = models.create(raw, config.run.seed, config.model.dropout, device, dtype)
    _grow(model, raw, config, tokenizer)
    adapters.freeze(model, config.model.freeze)
    _tune(config, model, tokenizer)
    return model, raw


def _grow(model: Model, raw: dict[str, Any], config: Config, tokenizer: Tokenizer) -> None:
    """Rows for new tokens, in eights as kernels like them, or as many as are asked for."""
    have, wanted, new = model.config.vocab_size, config.model.vocab_size, config.model.new_tokens
    needed = tokenizer.vocab_size
    rows = wanted or (max(have, -(-needed // 8) * 8) if new else have)
    if rows < have:
        raise InputError(f"model.vocab_size: the model has {have:,} rows already, and none are taken away")
    if needed > rows:
        sizes = f"{needed:,} tokens, the model {rows:,}"
        raise InputError(f"model.tokenizer: does not fit the model: it has {sizes} (model.vocab_size can add rows)")
    if new or rows > have:
        models.grow(model, raw, rows, range(min(have, needed - len(new)), needed))


def summary(run: Run) -> str:
    """What the run is about to do, as a table."""
    config, shape = run.config, run.loader.shape
    parameters = dict(run.model.named_parameters())
    count = sum(p.numel() for p in parameters.values())
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    weights = sum(p.nbytes for p in parameters.values())
    stream = run.loader.source if isinstance(run.loader, Stream) else None
    per_step = config.train.batch if stream else min(config.train.batch, len(run.splits.train))
    lengths = sum(run.loader.mean_sizes)
    dtype = str(run.model.head.dtype).removeprefix("torch.")
    memory = weights + state_bytes(parameters, config.optim) + activation_bytes(run)
    have = devices.total_memory(run.device)
    rate = f"{config.optim.schedule}, peak rate {run.optimizer.lr:g}"
    if config.optim.relative_step:
        rate = "rate by the step number"
    epochs = run.total_steps / run.loader.steps_per_epoch if run.loader.steps_per_epoch else 0.0
    data, length = f"{len(run.splits.train):,} examples", f" ({epochs:.2f} epochs)"
    if stream:
        data, length = f"streamed from {len(stream.files):,} files", ""
    micro_rows = run.loader.micro_rows
    fills = f"filled {shape.source_fill:.2f} / {shape.target_fill:.2f}"
    packed, at_once = f"{shape.source_row} + {shape.target_row} slots, {fills}", f"{micro_rows} rows at once"
    if not run.loader.static:
        packed = (
            "as long as their examples, without padding" if run.loader.packed else "an example each, of like lengths"
        )
        at_once = f"at most {micro_rows * (shape.source_row + shape.target_row):,} a micro-batch"
    rows = [
        ("model", f"{config.model.path or config.model.config} ({run.raw['model_type']}, {dtype})"),
        ("parameters", f"{human_count(count)}, {human_count(trained)} trained, {human_bytes(weights)}"),
        *([("tuned", _tuned(run.model))] if run.model.adapter else []),
        ("data", f"{data}, {len(run.splits.validation or ()):,} held out"),
        *_task_rows(run, epochs),
        ("rows", packed),
        ("batch", f"{per_step:,} examples, about {per_step * lengths:,.0f} tokens, {at_once}"),
        ("steps", f"{run.total_steps:,}{length}, at step {run.step:,}"),
        ("optimizer", f"{config.optim.name}, {rate}"),
        ("device", devices.describe(run.device) + (f", {run.ranks.size} ranks" if run.ranks.size > 1 else "")),
        ("memory", f"about {human_bytes(memory)}" + (f" of {human_bytes(have)}" if have else "")),
        ("folder", str(run.folder)),
    ]  # fmt: skip
    plan = table(rows)
    return plan if trained == count else f"{model_summary(run.model)}\n{plan}"  # where all is trained, one line says it


def _task_rows(run: Run, epochs: float) -> list[tuple[str, str]]:
    """Of each task of a mixture: how much there is of it, and how much of that the run will see."""
    mixture, rows = run.splits.train, []
    if isinstance(mixture, Mixture):
        for (task, own), quota in zip(run.splits.tasks.items(), mixture.quotas, strict=True):
            size = f"{len(own.train):,} examples, {len(own.validation or ()):,} held out"
            seen = f"{quota / len(mixture):.1%} of the batches, {epochs * quota / len(own.train):.2f} epochs"
            rows.append((f"  {task}", f"{size}, {seen}"))
    return rows


def _tuned(model: Model) -> str:
    if model.prompt:
        return f"a soft prompt of {len(model.prompt)} tokens alone"
    told = model.adapter
    return f"LoRA alone, r {told['r']}, alpha {told['lora_alpha']:g}, on {', '.join(told['target_modules'])}"


def activation_bytes(run: Run) -> int:
    """A rough figure of what forward keeps for backward of what is computed at once."""
    shape, loader = run.loader.shape, run.loader
    rows, seen = float(loader.micro_rows), (float(shape.source_row), float(shape.target_row))
    if not loader.static:  # rows of their own length, of which every segment sees itself
        most = loader.workers * rows * sum(seen)
        seen = loader.mean_sizes
        rows = min(math.ceil(min(run.config.train.batch, len(loader.examples)) / run.ranks.size), most / sum(seen))
    kept = run.model.config.activations(*seen, loader.static, run.config.train.gradient_checkpointing)
    return int(rows * run.model.head.element_size() * kept)


def _loop(run: Run) -> dict[str, float]:
    config = run.config
    if run.ended and not run.owes:
        run.report(f"step {run.step:,}: nothing left to train")
    with (
        StopRequest() as stop,
        closing(_trackers(run)) as tracker,
        nullcontext(sys.stderr) if run.ranks.first else open(os.devnull, "w") as stream,
        Progress(run.total_steps, "train", start=run.step, stream=stream) as progress,
        closing(_steps(run, stop)) as steps,
    ):
        if run.owes:
            _conclude(run, stop, tracker, progress)
        for result, seconds in steps:
            run.step += 1
            run.window.add(result, seconds)
            seen = run.window.figures()
            progress.update(run.step, loss=seen["loss"], **{"tokens/s": seen["tokens_per_s"]})
            _conclude(run, stop, tracker, progress)
            if run.ended or run.best.get("step") == run.step or run.due(config.checkpoint.every):
                _save(run)
    if stopped := _stopped(run, stop):
        _save(run)
        raise Interrupted(f"{stopped}: saved at step {run.step}; the same command goes on from there")
    with run.ranks.together():
        if run.ranks.first:
            export(run)
    return run.ranks.share(run.figures)


def _trackers(run: Run) -> trackers.Trackers:
    with run.ranks.together():
        if run.ranks.first:
            return trackers.build(run.config, run.folder, run.step - run.owes)
    return trackers.Trackers([])


def _stopped(run: Run, stop: StopRequest) -> str | None:
    """The name of a signal that came to any rank; all ranks get the same answer."""
    if not run.ranks.any(stop.requested):
        return None
    return next(filter(None, run.ranks.gather(stop.requested)))


def _steps(run: Run, stop: StopRequest) -> Generator[tuple[StepResult, float], None, None]:
    """Every step that is left, made when it is asked for, and the seconds it took."""
    config = run.config
    with closing(run.loader.steps(run.step, run.last, config.data.readers)) as steps:
        while not run.ended:
            began = time.perf_counter()
            batches: list[Batch] = []
            try:
                batches = next(steps)
            except BrokenProcessPool:
                if not stop.requested:  # else the signal reached the readers too
                    raise
            if _stopped(run, stop):
                return
            yield _step(run, batches), time.perf_counter() - began


def _step(run: Run, batches: list[Batch]) -> StepResult:
    config = run.config
    smoothing = config.train.label_smoothing
    try:
        return train_step(
            run.model, run.optimizer, batches, run.step, config.run.seed, config.optim.clip, smoothing, run.over,
            run.ranks,
        )  # fmt: skip
    except Diverged as error:
        with run.ranks.together():
            if run.ranks.first:
                _write_crash(run, error)
        raise


def _conclude(run: Run, stop: StopRequest, tracker: trackers.Tracker, progress: Progress) -> None:
    """What is due after a step: held-out figures, and one line in the log; a signal puts both off to the resumption."""
    config = run.config
    figures: dict[str, float] = {}
    run.owes = False
    if run.validation and run.due(config.train.evaluate_every):
        try:
            held_out = _evaluate(run, lambda: bool(stop.requested))
        except evaluate.Stopped:
            run.owes = True
            return
        progress.line("  ".join([f"step {run.step}: held out:", *(f"{k} {v:.4f}" for k, v in held_out.items())]))
        figures = {f"validation_{name}": value for name, value in held_out.items()}
    if run.due(config.train.log_every) or run.ended:
        figures = {**run.window.figures(), **figures}
        run.window = Window()
    if figures:
        tracker.log(run.step, figures)
        run.figures |= figures


def _evaluate(run: Run, stopped: Callable[[], bool]) -> dict[str, float]:
    """Held-out figures, those of a task with its name before them; keeps track of the best."""
    config = run.config
    if "" in run.validation:
        told = {"": evaluate.loss(run.model, run.validation[""], stopped, run.ranks)}
    else:
        told = evaluate.task_losses(run.model, run.validation, stopped, run.ranks)
    for task, own in tasks(config.data).items():
        examples = run.splits.tasks[task].validation_examples
        if config.metrics(task) and examples:
            name = f"step-{run.step:06d}-{task}.jsonl" if task else f"step-{run.step:06d}.jsonl"
            file = run.folder / "predictions" / name
            if run.ranks.first:
                file.parent.mkdir(exist_ok=True)
            told[task] |= evaluate.score(
                config.metrics(task), run.model, run.tokenizer, examples, config.generate,
                _max_source_length(run, task), own.max_target_length, file, stopped, own.template, run.ranks,
            )  # fmt: skip
    places = {figure_name(task, figure): (task, figure) for task, own in told.items() for figure in own}
    figures = {name: told[task][figure] for name, (task, figure) in places.items()}
    figures = run.ranks.share(figures)  # a metric of one's own may not give the same twice
    best = config.train.best
    if best not in figures:
        raise InputError(f"train.best: no figure {best!r}{did_you_mean(best, figures)}")
    value = figures[best]
    if math.isfinite(value) and (not run.best or metrics.better(places[best][1], value, run.best["value"])):
        run.best, run.stale = {"step": run.step, "value": value}, 0
    else:
        run.stale += 1
    return figures


def _max_source_length(run: Run, task: str) -> int:
    """The most tokens that are generated from."""
    data, learned = tasks(run.config.data)[task], run.splits.tasks[task].train
    return chat.lengths(data)[1] if isinstance(learned, Chat) else data.max_source_length


def _save(run: Run) -> None:
    root = run.folder / "checkpoints"
    kept = {"figures": run.figures, "best": run.best, "stale": run.stale, "owes": run.owes}
    state: dict[str, Any] = {**_fingerprints(run), "window": dataclasses.asdict(run.window), **kept}
    state["kernels"] = kernels.ways(run.device)
    if isinstance(run.loader, Stream):
        state["cursors"] = run.ranks.gather(run.loader.cursors(run.step))
    with run.ranks.together():
        if run.ranks.first:
            store.save(root, run.step, _weights(run), run.optimizer.state(), state)
            store.prune(root, run.config.checkpoint.keep, {int(run.best["step"])} if run.best else set())


def _kept(run: Run) -> dict[str, nn.Parameter]:
    """The parameters that a checkpoint holds: all, or where an adapter is trained, it alone."""
    return {n: p for n, p in run.model.named_parameters() if p.requires_grad or not run.model.adapter}


def _weights(run: Run) -> dict[str, torch.Tensor]:
    """What is kept, in the precision that it is trained in."""
    return {n: p.detach() for n, p in _kept(run).items()} | run.optimizer.weights()


def _fingerprints(run: Run) -> dict[str, str | None]:
    """What a resumed run must find unchanged."""
    return {
        "training data": run.loader.fingerprint,
        "validation data": "-".join(loader.fingerprint for loader in run.validation.values()) or None,
        "tokenizer": run.tokenizer.fingerprint,
        **({"base model": run.base} if run.base else {}),
    }


def _resume(run: Run, found: Path) -> None:
    """Go on from a checkpoint; refuse one of other data."""
    saved = store.load(found)
    for name, now in _fingerprints(run).items():
        if saved.state[name] != now:
            raise InputError(
                f"{found}: belongs to other {name} (fingerprint {saved.state[name]}, now {now}): "
                "give the same files and settings, or another run.dir"
            )
    if isinstance(run.loader, Stream):
        run.loader.restore(saved.state["cursors"])
    _put_weights(run, saved.model)
    trained = {n for n, p in run.model.named_parameters() if p.requires_grad}
    run.optimizer.load({n: t for n, t in saved.model.items() if n in trained}, saved.optim, saved.step)
    run.step, run.window = saved.step, Window(**saved.state["window"])
    run.figures, run.best = saved.state["figures"], saved.state["best"]
    run.stale, run.owes = saved.state["stale"], saved.state["owes"]
    run.report(f"resumed from {found}")
    before, now = saved.state.get("kernels"), kernels.ways(run.device)
    if before not in (None, now):
        run.report(f"note: {before} kernels computed it and {now} ones go on: equal up to rounding, not bit for bit")


@torch.no_grad()
def _put_weights(run: Run, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in _kept(run).items():
        parameter.copy_(weights[name])


def _check_folder(config: Config) -> None:
    """A run that has checkpoints goes on if it may, and under the config it began with."""
    folder = config.run_dir
    file = folder / "config.toml"
    if not store.steps(folder / "checkpoints"):
        return
    if not config.checkpoint.resume:
        raise InputError(f"{folder}: holds a run already; resume it or give another run.dir")
    if not file.is_file():
        raise InputError(f"{file}: is missing, so that nobody can tell whether the run goes on as it began")
    before, now = flat(load(file, validate=False)), flat(config)
    differ = [
        f"{key}: {_told(before, key)} before, {_told(now, key)} now"
        for key in now | before
        if before.get(key) != now.get(key) and not any(fnmatch.fnmatch(key, free) for free in FREE_KEYS)
    ]
    if differ:
        advice = "give another run.dir, or undo"
        raise InputError(f"{folder}: holds a run with another config; {advice}: {'; '.join(differ)}")


def _told(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"


def _write_crash(run: Run, error: Diverged) -> None:
    """Keep what it takes to see why: the examples with their text, and where they came from."""
    folder = run.folder / "crash" / f"step-{run.step + 1:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in error.examples:
        told = run.loader.tell(i)
        texts = {key: x if isinstance(x, str) else run.tokenizer.decode(x) for key, x in told.items()}
        rows.append({"example": i, **texts})
    files.atomic_write(folder / "examples.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    files.atomic_write(folder / "error.json", json.dumps({"step": run.step + 1, "error": str(error)}) + "\n")
    run.report(f"{error}; nothing was updated; {len(rows)} examples are in {folder}")


def export(run: Run) -> Path:
    """Write ``model/``: a Hugging Face folder of the best weights, or of the last where nothing was evaluated.

    Where an adapter was trained it holds that alone, and names its base.

    It is made under a hidden name; a kill at any point leaves the old folder or the new one, and what else it leaves
    the next export removes.
    """
    folder, fresh, old = (run.folder / name for name in ("model", ".model.new", ".model.old"))
    step, weights = _best_weights(run)
    shutil.rmtree(fresh, ignore_errors=True)
    ids = _special_ids(run)
    if run.model.adapter:
        adapters.save(run.model, weights, _absolute(run.config.model.path), fresh)
    else:  # a model may have buffers to keep
        models.save({**run.model.state_dict(), **weights}, {**run.raw, **ids}, fresh)
    run.tokenizer.save(fresh)
    if run.model.kind != "masked":
        generation = {**ids, **_generation(run.config)}
        if run.model.stops:
            generation["eos_token_id"] = [ids["eos_token_id"], *run.model.stops]
        files.atomic_write(fresh / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    save_settings(fresh, _settings(run))
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    run.report(f"model of step {step:,}: {folder}")
    return folder


def _settings(run: Run) -> Settings:
    """What generation has to know; of a mixture also what it has to know of each task."""
    told = {task: _task_settings(run, task, own) for task, own in tasks(run.config.data).items()}
    if "" in told:
        return told[""]
    longest = {
        side: max(getattr(own, side) for own in told.values()) for side in ("max_source_length", "max_target_length")
    }
    return Settings(**longest, generate=run.config.generate, tasks=told)


def _task_settings(run: Run, task: str, data: Data) -> Settings:
    learned = run.splits.tasks[task].train
    return Settings(
        prefix=data.prefix,
        max_source_length=(run.model.kind == "masked" and data.block) or _max_source_length(run, task),
        max_target_length=data.max_target_length,
        source_transforms=data.source_transforms,
        template=data.template if isinstance(learned, CausalPairs) else "",
        chat=isinstance(learned, Chat),
        generate=run.config.generate,
    )


def _absolute(path: str) -> str:
    """A model's folder or file as any process finds it; a hub name stays."""
    here = path.startswith("asset:") or Path(path).exists()
    return str(models.find(path).resolve()) if here else path


def _special_ids(run: Run) -> dict[str, int]:
    """What transformers must be told to begin and end a text; a config may leave it out."""
    c = run.model.config
    if run.model.kind == "masked":
        return {"pad_token_id": c.pad_id}
    ids = {"eos_token_id": c.eos_id, "pad_token_id": c.pad_id}
    return ids | {"decoder_start_token_id": c.start_id} if run.model.kind == "seq2seq" else ids


def _generation(config: Config) -> dict[str, Any]:
    """Our way of generating in the words of transformers, which would stop at 20 tokens."""
    own = config.generate
    longest = max(task.max_target_length for task in tasks(config.data).values())
    settings: dict[str, Any] = {"max_new_tokens": own.max_length or longest}
    if own.beams > 1:
        settings |= {"num_beams": own.beams, "length_penalty": own.length_penalty}
    if own.temperature > 0:
        settings |= {"do_sample": True, "temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p}
    return settings


def _best_weights(run: Run) -> tuple[int, dict[str, torch.Tensor]]:
    """The step whose weights are the run's result, and those weights."""
    best = int(run.best.get("step", run.step))
    if best != run.step:
        try:
            return best, dict(store.tensors(run.folder / "checkpoints" / f"step-{best:06d}", "model"))
        except store.CorruptCheckpoint as error:
            run.report(f"the best checkpoint cannot be read, so the last weights are taken: {error}")
    return run.step, _weights(run)
