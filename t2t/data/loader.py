"""From files to the micro-batches of a step. What step n holds is a pure function of seed, data and n."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np

from t2t.config import Data
from t2t.data import order
from t2t.data.objectives import OBJECTIVES
from t2t.data.packing import Batch, Cost, RowShape, collate, cut_flat, cut_static, measure, pick_rows, slots
from t2t.data.sources import Reader, resolve
from t2t.data.tasks import Example, Task
from t2t.data.tokens import Pairs, Tokenizer, tokenize
from t2t.errors import InputError

SAMPLED_EXAMPLES = 2048  # how many examples the row lengths are picked from


@dataclass(frozen=True)
class Splits:
    """Tokenized training and validation examples, the latter's texts, and what was found on the way."""

    train: Pairs
    validation: Pairs
    validation_examples: Sequence[Example]
    notes: tuple[str, ...]


def read_examples(patterns: Sequence[str], key: str, data: Data, limit: int) -> tuple[list[Example], list[str]]:
    """The examples of files, at most ``limit`` of them (0: all), and a line on bad ones."""
    task = Task.from_config(data)
    reader = Reader(
        resolve(patterns, key), data.format, data.on_bad_line, data.max_bad_lines, (data.source, data.target)
    )
    examples = list(islice(task.examples(reader), limit or None))
    bad = [f"{key}: {reader.bad_count} bad lines skipped, the first: {reader.bad[0]}"] if reader.bad_count else []
    return examples, bad


def read_splits(data: Data, tokenizer: Tokenizer, seed: int) -> Splits:
    """Training and validation examples by the data section; a share is split off by a keyed permutation."""
    if not data.train:
        raise InputError("data.train: no training files given, as --data.train pairs.jsonl")
    if data.objective == "character_noise" and tokenizer.fingerprint != "bytes":
        raise InputError('data.objective: character_noise needs model.tokenizer = "bytes"')
    train, notes = read_examples(data.train, "data.train", data, data.max_samples)
    validation: list[Example] = []
    if data.validation:
        validation, more = read_examples(data.validation, "data.validation", data, data.max_validation_samples)
        notes += more
    elif data.validation_split:
        held = max(1, round(len(train) * data.validation_split))
        if held >= len(train):
            raise InputError(f"data.validation_split: {len(train)} examples leave none to train on")
        shuffled = order.permuted(np.arange(len(train)), len(train), order.key(seed, "split"))
        validation = [train[i] for i in np.sort(shuffled[:held])][: data.max_validation_samples or None]
        train = [train[i] for i in np.sort(shuffled[held:])]
    tables = {}
    for key, examples in (("training", train), ("validation", validation)):
        table = tokenize(examples, tokenizer, data.max_source_length, data.max_target_length)
        for side, cut in (("source", table.cut_sources), ("target", table.cut_targets)):
            if cut:
                limit = f"data.max_{side}_length = {getattr(data, f'max_{side}_length')}"
                notes.append(f"{key}: {cut:,} {side}s ({cut / len(table):.1%}) cut at {limit}")
        tables[key] = table
    return Splits(tables["training"], tables["validation"], validation, tuple(notes))


class Loader:
    """The micro-batches of every step.

    Step n of an epoch takes examples n·batch … (n+1)·batch of that epoch's permutation and packs them among
    themselves; the last step of an epoch takes what is left. With ``static`` every micro-batch has one shape
    (`packing.cut_static`); without, each is one row without padding, and there is a multiple of ``workers`` of them,
    about as large as ``micro_rows`` rows and equal by ``cost`` (`packing.cut_flat`).
    """

    def __init__(
        self,
        pairs: Pairs,
        batch: int,
        shape: RowShape,
        micro_rows: int,
        seed: int,
        start_id: int,
        pad_id: int,
        objective: str = "seq2seq",
        static: bool = True,
        shuffle: bool = True,
        cost: Cost = slots,
        workers: int = 1,
    ) -> None:
        self.pairs, self.batch, self.shape, self.micro_rows, self.seed = pairs, batch, shape, micro_rows, seed
        self.start_id, self.pad_id, self.static, self.shuffle = start_id, pad_id, static, shuffle
        self.cost, self.workers = cost, workers
        self.objective, self.fingerprint = objective, pairs.fingerprint
        self.steps_per_epoch = math.ceil(len(pairs) / batch)

    def examples(self, step: int) -> np.ndarray:
        """The examples of a step, counted from the start of training."""
        return step_examples(len(self.pairs), self.batch, step, order.key(self.seed, self.fingerprint), self.shuffle)

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        index = self.examples(step)
        make = OBJECTIVES[self.objective]
        epoch = step // self.steps_per_epoch
        sources, targets = [], []
        for i in index:
            rng = None if self.objective == "seq2seq" else np.random.default_rng(order.key(self.seed, epoch, int(i)))
            source, target = make(self.pairs.source[i], self.pairs.target[i], rng)  # type: ignore[arg-type]
            if len(source) > self.shape.source_row:  # noise may lengthen it; the end token stays
                source = np.append(source[: self.shape.source_row - 1], source[-1:])
            sources.append(source)
            targets.append(target)
        lengths = np.array([len(s) for s in sources]), np.array([len(t) for t in targets])
        rows = self.shape.source_row, self.shape.target_row
        if self.static:
            cuts = cut_static(*lengths, *rows, self.micro_rows)
        else:
            cuts = cut_flat(*lengths, self.micro_rows * sum(rows), self.cost, self.workers)
        return [collate(sources, targets, index, *cut, self.start_id, self.pad_id) for cut in cuts]

    def steps(self, start: int, stop: int, readers: int = 0) -> Generator[list[Batch], None, None]:
        """Steps ``start`` to ``stop``, the next ones made in the background: by a thread, or by reader processes."""
        if readers:
            context = multiprocessing.get_context("forkserver")
            pool: Executor = ProcessPoolExecutor(readers, context, _become_reader, (self,))
            make: Callable[[int], list[Batch]] = _read_step
        else:
            pool, make = ThreadPoolExecutor(1), self.step
        ahead: deque[Future[list[Batch]]] = deque()
        unmade = iter(range(start, stop))
        try:
            for _ in range(start, stop):
                ahead.extend(pool.submit(make, n) for n in islice(unmade, 2 * readers + 2 - len(ahead)))
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


_reader: Loader | None = None  # the loader of a reader process


def _become_reader(loader: Loader) -> None:
    global _reader
    _reader = loader
    os.setsid()  # a Ctrl-C is for the process that trains: it still needs the step that is being made
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that was killed could not stop its readers, who would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _read_step(step: int) -> list[Batch]:
    assert _reader is not None
    return _reader.step(step)


def step_examples(count: int, batch: int, step: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """Which of ``count`` examples step ``step`` takes.

    >>> step_examples(5, 2, step=2, seed=0, shuffle=False), step_examples(5, 2, step=3, seed=0, shuffle=False)
    (array([4]), array([0, 1]))
    """
    epoch, within = divmod(step, math.ceil(count / batch))
    positions = np.arange(within * batch, min((within + 1) * batch, count))
    return order.permuted(positions, count, order.key(seed, epoch)) if shuffle else positions


def pick_shape(pairs: Pairs, data: Data, batch: int, cost: Cost, seed: int, static: bool = True) -> RowShape:
    """Row lengths for a run: the given ones, or those that sampled steps cost least at.

    Where rows may have any length none is picked: the longest example's stands for them.
    """
    source, target = pairs.source.lengths, pairs.target.lengths
    if data.objective == "character_noise":
        source = np.minimum(target + 8, data.max_source_length)  # a two-byte letter may replace a one-byte one
    if not static:
        rows = data.source_row or int(source.max()), data.target_row or int(target.max())
        per_step = min(batch, len(pairs)) * (source.mean() + target.mean()) / sum(rows)
        return RowShape(*rows, 1.0, 1.0, 1.0, float(per_step))
    sampled = max(1, min(SAMPLED_EXAMPLES // batch, math.ceil(len(pairs) / batch)))
    steps = [step_examples(len(pairs), batch, n, order.key(seed, "sample")) for n in range(sampled)]
    if data.source_row and data.target_row:
        return measure(source, target, steps, data.source_row, data.target_row)
    return pick_rows(source, target, steps, cost, data.source_row, data.target_row)
