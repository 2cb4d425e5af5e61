"""From files to the micro-batches of a step. What step n holds is a pure function of seed, data and n."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np

from t2t.config import Data, tasks
from t2t.data import hdf5, order
from t2t.data.chat import Conversation
from t2t.data.masked import SHARE, MaskedLM, Masking, NextSentence, most_predictions
from t2t.data.mixture import Mixture, weights
from t2t.data.objectives import CausalPairs, CharacterNoise, Objective, Seq2Seq
from t2t.data.packing import (
    ROUND,
    Batch,
    Cost,
    Feature,
    RowShape,
    collate,
    cut_flat,
    cut_padded,
    cut_static,
    measure,
    pick_rows,
    slots,
    up,
)
from t2t.data.ragged import Ragged
from t2t.data.sources import Reader, format_of, resolve
from t2t.data.tasks import Example, Task, is_chat, join
from t2t.data.text import BlockLM, DocumentLM, Documents, PrefixLM, SpanCorruption
from t2t.data.tokens import Pairs, Tokenizer, tokenize
from t2t.errors import InputError

SAMPLED_EXAMPLES = 2048  # how many examples the row lengths are picked from


@dataclass(frozen=True)
class Splits:
    """What is learned from and what is held out, the latter's texts too, and what was found on the way.

    Those of a mixture hold those of its tasks by name, and the texts are there.
    """

    train: Objective
    validation: Objective | None
    validation_examples: Sequence[Example | Conversation]
    notes: tuple[str, ...]
    mixed: Mapping[str, Splits] = field(default_factory=dict)

    @property
    def tasks(self) -> Mapping[str, Splits]:
        """Every task by name; where there is no mixture this is the only one, and has no name."""
        return self.mixed or {"": self}


def read_examples(patterns: Sequence[str], key: str, data: Data, limit: int) -> tuple[list[Example], list[str]]:
    """The examples of files, at most ``limit`` of them (0: all), and a line on bad ones."""
    reader = _open(patterns, key, data)
    examples = list(islice(Task.from_config(data).examples(reader), limit or None))
    return examples, _bad(reader, key)


def _bad(reader: Reader, key: str) -> list[str]:
    return [f"{key}: {reader.bad_count} bad lines skipped, the first: {reader.bad[0]}"] if reader.bad_count else []


def _open(patterns: Sequence[str], key: str, data: Data) -> Reader:
    columns = data.source, data.target
    return Reader(resolve(patterns, key), data.format, data.on_bad_line, data.max_bad_lines, columns, data.retries)


KINDS = {
    "pairs": ("seq2seq", "causal"),
    "character_noise": ("seq2seq",),
    "span_corruption": ("seq2seq",),
    "prefix_lm": ("seq2seq",),
    "chat": ("causal",),
    "lm": ("causal",),
    "blocks": ("causal",),
    "masked_lm": ("masked",),
    "masked_lm_nsp": ("masked",),
}  # which kinds of models can learn what
PLAIN = {"causal": "lm", "masked": "masked_lm"}  # what each learns from plain text unless told otherwise


def chosen_objective(data: Data, kind: str) -> str:
    """What the data section says is learned by a model of this kind, or what its first record suggests."""
    name: str = data.objective
    if name == "auto":
        if kind == "masked" and _are_shards(data.train, "data.train", data):
            return "masked_lm_nsp"
        name = "pairs"
        record = next(iter(_open(data.train, "data.train", data)), None)
        if record is not None and is_chat(record.fields) and not data.source:
            name = "chat"
        elif record is not None and kind in PLAIN:
            columns = Task.from_config(data).columns(record)
            name = PLAIN[kind] if columns.source == columns.target else "pairs"
    if kind not in KINDS[name]:
        raise InputError(f"data.objective: {name} is for {' and '.join(KINDS[name])} models, this one is {kind}")
    return name


def read_splits(
    data: Data,
    tokenizer: Tokenizer,
    seed: int,
    kind: str = "seq2seq",
    start_id: int = 0,
    tell: Callable[[int, int, int, int], None] = lambda *_: None,
) -> Splits:
    """Training and validation examples by the data section; a share is split off by a keyed permutation.

    Large files are tokenized into a store (`t2t.data.prepare`), or found in one; ``tell`` hears how far that is.
    """
    if data.mix:
        return _mixed_splits(data, tokenizer, seed, kind, start_id, tell)
    if not data.train:
        raise InputError("data.train: no training files given, as --data.train pairs.jsonl")
    if data.objective == "character_noise" and tokenizer.fingerprint != "bytes":
        raise InputError('data.objective: character_noise needs model.tokenizer = "bytes"')
    name = chosen_objective(data, kind)
    if kind == "masked" and _are_shards(data.train, "data.train", data):
        return _shard_splits(data, tokenizer, seed, name)
    from t2t.data import prepare  # it stands on this file

    if name == "chat":
        check_chat(data)
    maker = prepare.Maker(data, tokenizer, name, kind, start_id)
    return prepare.splits(maker, [str(file) for file in resolve(data.train, "data.train")], seed, tell)


def _mixed_splits(
    data: Data, tokenizer: Tokenizer, seed: int, kind: str, start_id: int, tell: Callable[[int, int, int, int], None]
) -> Splits:
    found, objectives = {}, set()
    for name, task in tasks(data).items():
        try:
            found[name] = read_splits(task, tokenizer, seed, kind, start_id, tell)
            objectives.add(chosen_objective(task, kind))
        except InputError as error:
            raise InputError(f"data.mix.{name}: {error}") from None
    if kind == "masked" and len(objectives) > 1:
        raise InputError(f"data.mix: a masked model's tasks must be alike, found {' and '.join(sorted(objectives))}")
    rates = weights(data, {name: len(own.train) for name, own in found.items()})
    learned = Mixture({name: own.train for name, own in found.items()}, rates)
    held = {name: own.validation for name, own in found.items() if own.validation is not None}
    notes = tuple(f"{name}: {note}" for name, own in found.items() for note in own.notes)
    return Splits(learned, Mixture(held) if held else None, (), notes, found)


def _shares(count: int, data: Data, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of ``count`` examples are trained on, and which are held out."""
    held = held_out(count, data, seed)
    return np.setdiff1d(np.arange(count), held, assume_unique=True), held[: data.max_validation_samples or None]


def held_out(count: int, data: Data, seed: int) -> np.ndarray:
    """Which of ``count`` examples are not trained on, in order."""
    held = max(1, round(count * data.validation_split))
    if held >= count:
        raise InputError(f"data.validation_split: {count} examples leave none to train on")
    return np.sort(order.permuted(np.arange(held), count, order.key(seed, "split")))


def tokenized(
    examples: Sequence[Example], tokenizer: Tokenizer, data: Data, kind: str, start_id: int
) -> tuple[Pairs, list[str]]:
    """Pairs for a model of this kind, and a line on what was cut.

    A decoder reads ``start_id`` first, so that its texts begin with the tokenizer's own start only where that differs.
    """
    if kind == "causal":
        before, between, after = join(data.template)
        examples = [Example(before + e.source + between, e.target + after, e.where) for e in examples]
    decodes = kind == "seq2seq"
    begins = decodes and list(tokenizer.starts) != [start_id]
    table = tokenize(examples, tokenizer, data.max_source_length, data.max_target_length, decodes, begins)
    return table, cut_notes(table.cut_sources, table.cut_targets, len(table), data)


def cut_notes(sources: int, targets: int, count: int, data: Data) -> list[str]:
    """A line on each side of which texts were cut."""
    return [
        f"{cut:,} {side}s ({cut / count:.1%}) cut at data.max_{side}_length = {getattr(data, f'max_{side}_length')}"
        for side, cut in (("source", sources), ("target", targets))
        if cut
    ]


def objective(pairs: Pairs, data: Data, kind: str, start_id: int) -> Objective:
    """What is learned from pairs by a model of this kind."""
    if data.objective == "character_noise":
        return CharacterNoise(pairs, start_id, data.max_source_length)
    return Seq2Seq(pairs, start_id) if kind == "seq2seq" else CausalPairs(pairs, data.loss_on == "both")


def check_chat(data: Data) -> None:
    """Refuse what has no meaning for conversations."""
    for key in ("source", "target", "prefix", "source_transforms", "target_transforms", "piece", "template", "loss_on"):
        if getattr(data, key) != getattr(Data, key):
            raise InputError(f"data.{key}: is for pairs; the tokenizer's chat template shows chat records as they are")


def _are_shards(patterns: Sequence[str], key: str, data: Data) -> bool:
    formats = {format_of(file, data.format) for file in resolve(patterns, key)}
    if "hdf5" in formats and len(formats) > 1:
        raise InputError(f"{key}: HDF5 shards and other files cannot be mixed")
    return formats == {"hdf5"}


def _shard_splits(data: Data, tokenizer: Tokenizer, seed: int, name: str) -> Splits:
    def read(patterns: Sequence[str], key: str, limit: int) -> hdf5.Shards:
        return hdf5.Shards(resolve(patterns, key), tokenizer.vocab_size, pairs=name == "masked_lm_nsp").first(limit)

    train = read(data.train, "data.train", data.max_samples)
    if data.validation:
        return Splits(train, read(data.validation, "data.validation", data.max_validation_samples), (), ())
    if not data.validation_split:
        return Splits(train, None, (), ())
    kept, held = _shares(len(train), data, seed)
    return Splits(train.subset(kept), train.subset(held), (), ())


def grouped(examples: Iterable[Example], format: str) -> Iterator[tuple[str, str]]:
    """Documents out of plain texts, each with where it begins."""
    where, before, lines = "", "", list[str]()
    for example in examples:
        if lines and begins_document(example.where, before, format):
            yield where, "\n".join(lines)
            lines = []
        where = where if lines else example.where
        lines.append(example.target)
        before = example.where
    if lines:
        yield where, "\n".join(lines)


def begins_document(where: str, before: str, format: str) -> bool:
    """Whether a document begins at a text, ``before`` being where the text before it stands.

    >>> begins_document("a.txt:4", "a.txt:3", "auto"), begins_document("a.txt:5", "a.txt:3", "auto")
    (False, True)
    """
    file, _, line = where.rpartition(":")
    return format_of(file, format) != "txt" or before != f"{file}:{int(line) - 1}"


@dataclass(frozen=True)
class Texts:
    """Documents, and for masked models how many tokens each of their sentences has."""

    documents: Documents
    sentences: Ragged | None = None


def tokenized_texts(name: str, texts: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> Texts:
    """The tokens of documents, as their objective wants them."""
    where = tuple(where for where, _ in texts)
    if KINDS[name] != ("masked",):
        encoded = tokenizer.encode_arrays([text for _, text in texts])
        tokens = Ragged.of((np.append(ids, tokenizer.eos_id) for ids in encoded), tokenizer.vocab_size)
        return Texts(Documents(tokens, where, sum(len(text.split()) for _, text in texts)))
    lines = [[line for line in text.split("\n") if line.strip()] for _, text in texts]
    sentences = iter(tokenizer.encode_batch([line for text in lines for line in text]))
    found = [[next(sentences) for _ in text] for text in lines]
    tokens = Ragged.of((list(chain.from_iterable(text)) for text in found), tokenizer.vocab_size)
    return Texts(Documents(tokens, where, words=0), Ragged.of(([len(s) for s in text] for text in found), 2**32))


def text_objective(name: str, texts: Texts, tokenizer: Tokenizer, data: Data, start_id: int) -> Objective:
    """What is learned from documents."""
    documents = texts.documents
    if KINDS[name] == ("masked",):
        return _masked_objective(name, texts, tokenizer, data)
    block = data.block or data.max_source_length
    if name == "lm":
        return DocumentLM(documents, start_id, block)
    if name == "blocks":
        return BlockLM(documents, start_id, block)
    ids = start_id, tokenizer.eos_id
    if name == "prefix_lm":
        return PrefixLM(documents, *ids, data.max_source_length, data.max_target_length)
    if not tokenizer.sentinels:
        raise InputError("data.objective: span_corruption needs a tokenizer with sentinels (<extra_id_0> ...)")
    return SpanCorruption(documents, *ids, tokenizer.sentinels, data.max_source_length)


def _masked_objective(name: str, texts: Texts, tokenizer: Tokenizer, data: Data) -> Objective:
    if tokenizer.marks is None:
        raise InputError(f"data.objective: {name} needs a tokenizer with the special tokens [CLS], [SEP] and [MASK]")
    key, longest = ("block", data.block) if data.block else ("max_source_length", data.max_source_length)
    if longest < 8:
        raise InputError(f"data.{key}: must be 8 or more for {name}, got {longest}")
    documents = texts.documents
    if not documents.tokens.total:
        raise InputError(f"{documents.where[0]}: the tokenizer makes no tokens of this text")
    masking = Masking(tokenizer.marks, data.max_predictions or most_predictions(longest), data.whole_words)
    if name == "masked_lm":
        return MaskedLM(documents, masking, longest)
    assert texts.sentences is not None
    ends = np.cumsum(texts.sentences.tokens(0, texts.sentences.total).astype(np.int64))
    return NextSentence(documents, ends, masking, longest)


class Loader:
    """The micro-batches of every step.

    Step n of an epoch takes examples n·batch … (n+1)·batch of that epoch's permutation and packs them among
    themselves; the last step of an epoch takes what is left. With ``static`` every micro-batch has one shape
    (`packing.cut_static`); without, each is one row without padding, and there is a multiple of ``workers`` of them,
    about as large as ``micro_rows`` rows and equal by ``cost`` (`packing.cut_flat`). Where rows are not ``packed`` each
    holds one example, padded (`packing.cut_padded`).

    Of ``size`` ranks this is number ``rank``: it makes every ``size``-th of a step's examples, maybe none, and all
    ranks together make each example once.

    Batches of a masked model tell the few slots that it is asked at: a fixed number of a row's, so that it packs by
    both, or without ``static`` just those that have labels.
    """

    def __init__(
        self,
        examples: Objective,
        batch: int,
        shape: RowShape,
        micro_rows: int,
        seed: int,
        pad_id: int,
        static: bool = True,
        shuffle: bool = True,
        cost: Cost = slots,
        workers: int = 1,
        packed: bool = True,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.rank, self.size = rank, size
        self.examples, self.batch, self.shape, self.micro_rows, self.seed = examples, batch, shape, micro_rows, seed
        self.pad_id, self.static, self.shuffle, self.cost, self.workers = pad_id, static, shuffle, cost, workers
        self.packed, self.fingerprint = packed, examples.fingerprint
        self.steps_per_epoch = math.ceil(len(examples) / batch)
        self.predictions = None
        most = getattr(examples, "predictions", 0)  # labels of one example, told by objectives of masked models
        if most:
            self.predictions = prediction_slots(most, shape.target_row) if static else 0

    @cached_property
    def mean_sizes(self) -> tuple[float, float]:
        """The slots that an example takes on average in both streams, by a sample."""
        index, _ = drawn(self.examples, min(SAMPLED_EXAMPLES, len(self.examples)), 0, order.key("sizes"))
        source, target = self.examples.sizes(index)
        return float(source.mean()), float(target.mean())

    def taken(self, step: int) -> np.ndarray:
        """The examples of a step over all ranks, counted from the start of training."""
        return self._drawn(step)[0]

    def _drawn(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return drawn(self.examples, self.batch, step, order.key(self.seed, self.fingerprint), self.shuffle)

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step."""
        index, rounds = (part[self.rank :: self.size] for part in self._drawn(step))
        if not len(index):
            return []
        features = [
            self.examples.feature(i, order.key(self.seed, turn, i))
            for i, turn in zip(index.tolist(), rounds.tolist(), strict=True)
        ]
        return self.pack(features, index)

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where an example of a batch came from, and its tokens."""
        return self.examples.tell(i)

    def pack(self, features: Sequence[Feature], index: Sequence[int] | np.ndarray) -> list[Batch]:
        """Micro-batches of a step's examples, whose numbers are given."""
        source, target = (np.array(side) for side in zip(*(feature.size for feature in features), strict=True))
        rows = self.shape.source_row, self.shape.target_row
        if self.predictions:
            labels = np.array([feature.predicted for feature in features])
            cuts = cut_static(labels, target, self.predictions, rows[1], self.micro_rows, self.packed)
            cuts = [cut._replace(source_row=rows[0]) for cut in cuts]
        elif self.static:
            cuts = cut_static(source, target, *rows, self.micro_rows, self.packed)
        elif self.packed:
            cuts = cut_flat(source, target, self.micro_rows * sum(rows), self.cost, self.workers)
        else:
            cuts = cut_padded(source, target, self.micro_rows * sum(rows))
        return [collate(features, index, *cut, self.pad_id, self.predictions) for cut in cuts]

    def steps(self, start: int, stop: int, readers: int = 0) -> Generator[list[Batch], None, None]:
        """Steps ``start`` to ``stop``, the next ones made in the background: by a thread, or by reader processes."""
        if readers:
            context = multiprocessing.get_context("forkserver")
            pool: Executor = ProcessPoolExecutor(readers, context, become_reader, (self,))
            make: Callable[[int], list[Batch]] = read_step
        else:
            pool, make = ThreadPoolExecutor(1), self.step
        try:
            yield from in_advance(lambda n: pool.submit(make, n), start, stop, 2 * readers + 2)
        finally:
            pool.shutdown(cancel_futures=True)


T = TypeVar("T")


def in_advance(submit: Callable[[int], Future[T]], start: int, stop: int, ahead: int) -> Generator[T, None, None]:
    """What is made of the numbers ``start`` to ``stop``, in their order, so many of them asked for at once."""
    asked: deque[Future[T]] = deque()
    unasked = iter(range(start, stop))
    for _ in range(start, stop):
        asked.extend(submit(n) for n in islice(unasked, ahead - len(asked)))
        yield asked.popleft().result()


def prediction_slots(most: int, row: int) -> int:
    """How many slots of a row a masked model's head sees: room for one example's labels, and for as many as rows have.

    >>> prediction_slots(20, 128), prediction_slots(80, 512), prediction_slots(2, 8)
    (24, 80, 8)
    """
    return min(row, ROUND * math.ceil(max(most, SHARE * row) / ROUND))


_reader: Any = None  # of a reader process: what makes its steps


def become_reader(maker: Any) -> None:
    """In a fresh process: make the steps of a loader, or of anything that has a ``step``, and end with the parent."""
    global _reader
    _reader = maker
    os.setsid()  # a Ctrl-C is for the process that trains: it still needs the step that is being made
    end_with_parent()


def end_with_parent() -> None:
    """Let this process end when its parent does: one that was killed could not stop it, and it would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def read_step(step: int) -> Any:
    """In a reader process: its step."""
    return _reader.step(step)


def step_examples(count: int, batch: int, step: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """Which of ``count`` examples step ``step`` takes.

    >>> step_examples(5, 2, step=2, seed=0, shuffle=False), step_examples(5, 2, step=3, seed=0, shuffle=False)
    (array([4]), array([0, 1]))
    """
    epoch, within = divmod(step, math.ceil(count / batch))
    positions = np.arange(within * batch, min((within + 1) * batch, count))
    return order.permuted(positions, count, order.key(seed, epoch)) if shuffle else positions


def drawn(examples: Objective, batch: int, step: int, seed: int, shuffle: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Which examples step ``step`` takes, and for each how often all of its kind were taken before: epochs of its own.

    Where a task of a mixture comes more often than it has examples, one step may take an example of it twice.
    """
    epoch, places = step // math.ceil(len(examples) / batch), step_examples(len(examples), batch, step, seed, shuffle)
    if shuffle and isinstance(examples, Mixture):
        return examples.drawn(places, epoch, seed)
    return places, np.full_like(places, epoch)


def pick_shape(
    examples: Objective, data: Data, batch: int, cost: Cost, seed: int, static: bool = True, packed: bool = True
) -> RowShape:
    """Row lengths for a run: the given ones, or those that sampled steps cost least at.

    Where rows may have any length none is picked, nor where each holds one example: the longest example's stands.
    """
    longest = examples.longest
    for key, most in zip(("source_row", "target_row"), longest, strict=True):
        if 0 < getattr(data, key) < most:
            raise InputError(f"data.{key}: must hold the longest example, of {most} slots, or be 0")
    sampled = max(1, min(SAMPLED_EXAMPLES // batch, math.ceil(len(examples) / batch)))
    steps = [drawn(examples, batch, n, order.key(seed, "sample"))[0] for n in range(sampled)]
    source, target = examples.sizes(np.concatenate(steps))
    s, t = float(source.mean()), float(target.mean())
    if not static:
        rows = data.source_row or longest[0], data.target_row or longest[1]
        return RowShape(*rows, 1.0, 1.0, 1.0, min(batch, len(examples)) * (s + t) / sum(rows))
    if not packed:
        rows = data.source_row or (up(longest[0]) if longest[0] else 0), data.target_row or up(longest[1])
        fills = s / max(rows[0], 1), t / rows[1], (s + t) / sum(rows)
        return RowShape(*rows, *fills, float(min(batch, len(examples))))
    places = np.split(np.arange(len(source)), np.cumsum([len(step) for step in steps])[:-1])
    if data.source_row and data.target_row:
        return measure(source, target, places, data.source_row, data.target_row)
    return pick_rows(source, target, places, cost, data.source_row, data.target_row, longest)
