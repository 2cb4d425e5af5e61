"""Training files read as they come: nothing of them is stored, and every record comes once an epoch.

A *member* is one reader of one rank: rank r of R with W readers has members r·W to r·W + W - 1 of R·W. Each has an
endless stream of its own, epoch after epoch. An epoch takes the files in an order of its own, and of these a member's:

| files | a member's |
|---|---|
| as many as members, or more | whole files: the j-th of the epoch's order is member j mod members' |
| fewer | from each file every so-manieth record (document, in .txt files of plain text), beginning elsewhere in each |

What is a member's is read in blocks of ``data.shuffle`` records, in an order that seed, epoch, file and block give.
Step n takes a rank's share of the batch from its reader n mod W, across the borders of blocks and epochs. Where a
member stands is a `Cursor`: from the cursors of all members, as many as before, a run goes on with the very next step.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from t2t.config import Config, Data
from t2t.data import chat, hub, order
from t2t.data.blocks import WHOLE, Block, BlockReader, Place, Share, blocks
from t2t.data.chat import Chat, Conversation, Template
from t2t.data.loader import SAMPLED_EXAMPLES, Loader, become_reader, in_advance, read_step
from t2t.data.objectives import Objective, Prompted
from t2t.data.packing import Batch, Feature, Packed
from t2t.data.remote import is_remote
from t2t.data.sources import Reader, format_of, parsed, resolve
from t2t.data.splits import chosen_objective
from t2t.data.tables import (
    Splits,
    check_objective,
    columns_of,
    grouped,
    objective,
    reader,
    text_objective,
    tokenized,
    tokenized_texts,
)
from t2t.data.tasks import Columns, Example, Task
from t2t.data.text import SpanCorruption, span_lengths
from t2t.data.tokens import Tokenizer
from t2t.errors import InputError

CHUNK = 256  # records that are tokenized at once
_LINES = 40  # bits of an example's number that tell its line; those above tell its file

Text = Example | Conversation | tuple[str, str]
"""What a record becomes: a pair, a conversation, or a document with where it begins."""


class Cursor(NamedTuple):
    """Where a member stands.

    In which epoch, at which file of its order, in which block of that and where the block begins; how many units of the
    shuffled block are done with, how many examples were taken of those that are at hand, and how many bad lines the
    epoch had before these.
    """

    epoch: int = 0
    file: int = 0
    block: int = 0
    line: int = 0
    byte: int = 0
    unit: int = 0
    taken: int = 0
    bad: int = 0


def check(config: Config) -> None:
    """Refuse what cannot be had of a stream.

    >>> from t2t.config import load
    >>> check(load(overrides={"data.streaming": "true"}))
    Traceback (most recent call last):
    t2t.errors.InputError: train.steps: must be given with data.streaming: nobody knows how long an epoch is
    """
    if not config.train.steps:
        raise InputError("train.steps: must be given with data.streaming: nobody knows how long an epoch is")
    for key in ("train.log_every", "train.evaluate_every", "checkpoint.every"):
        section, _, name = key.partition(".")
        if getattr(getattr(config, section), name) == "epoch":
            raise InputError(f"{key}: give steps with data.streaming: nobody knows how long an epoch is")
    if config.data.validation_split:
        raise InputError("data.validation_split: a stream has no share to hold out: give data.validation")
    if config.data.max_samples:
        raise InputError("data.max_samples: a stream has no end: give train.steps")


class Source:
    """The training files, and how their records become examples: the same for every member."""

    def __init__(self, data: Data, tokenizer: Tokenizer, seed: int, kind: str, start_id: int) -> None:
        if not data.train:
            raise InputError("data.train: no training files given, as --data.train pairs.jsonl")
        self.files = resolve(data.train, "data.train")
        if any(format_of(file, data.format) == "hdf5" for file in self.files):
            raise InputError("data.streaming: HDF5 shards are read where they lie: leave it out")
        self.data, self.tokenizer, self.seed, self.kind, self.start_id = data, tokenizer, seed, kind, start_id
        self.name = chosen_objective(data, kind)
        if self.name == "masked_lm_nsp":
            raise InputError("data.streaming: masked_lm_nsp draws texts from all documents: leave one of them out")
        self.documents = self.name not in ("pairs", "character_noise", "chat")
        self.template = None
        check_objective(self.name, data, tokenizer)
        if self.name == "chat":
            self.template = Template(tokenizer)
        self._wanted = [column for column in (data.source, data.target) if column]
        self._columns: dict[str, Columns | None] = {}

    @property
    def fingerprint(self) -> str:
        """What tells the files from others without reading them: their names and sizes."""
        sets = [hub.fingerprint(file) for file in self.files if hub.is_dataset(file)]
        sizes = [0 if is_remote(file) or hub.is_dataset(file) else os.stat(file).st_size for file in self.files]
        told = order.key([(Path(file).name, size) for file, size in zip(self.files, sizes, strict=True)], *sets)
        return f"{len(self.files)} files, {sum(sizes)} bytes, {told:016x}"

    def longest(self, sample: Objective) -> tuple[int, int]:
        """The most slots that any example may take in both streams, seen in the files or not."""
        source, target = self.data.max_source_length, self.data.max_target_length
        if self.name == "chat":
            return 0, chat.lengths(self.data)[0] - 1
        if isinstance(sample, SpanCorruption):
            noise, spans, source = span_lengths(sample.windows.size, sample.density, sample.mean_span)
            return source, noise + spans + 1
        if self.kind == "seq2seq":
            return source, target
        return 0, (self.data.block or source) if self.documents else source + target - 1

    def epoch(self, number: int) -> list[int]:
        """The files in the order of an epoch."""
        count = len(self.files)
        return order.permuted(np.arange(count), count, order.key(self.seed, "files", number)).tolist()

    def read(self, file: int, records: int, start: Place, share: Share) -> Generator[Block, None, None]:
        """The blocks of a file from a place on."""
        name, data = self.files[file], self.data
        return blocks(name, data.format, self._wanted, records, start, self.documents, share, data.retries, True)

    def texts(self, reader: Reader, columns: Columns | None = None) -> Sequence[Text]:
        """What records become."""
        if self.template:
            return chat.read(reader, self.template, chat.lengths(self.data)[0])[0]
        examples = Task.from_config(self.data).examples(reader, columns)
        return [*grouped(examples, self.data.format)] if self.documents else [*examples]

    def learned(self, texts: Sequence[Any]) -> tuple[Objective, list[str]]:
        """What is learned from texts, and a line on what was cut."""
        if self.template:
            return Chat.of(texts, self.tokenizer.vocab_size, self.template.end_id), []
        if self.documents:
            found = tokenized_texts(self.name, texts, self.tokenizer)
            return text_objective(self.name, found, self.tokenizer, self.data, self.start_id), []
        pairs, notes = tokenized(texts, self.tokenizer, self.data, self.kind, self.start_id)
        return objective(pairs, self.data, self.kind, self.start_id), notes

    def reader(self, block: Block, bad_before: int = 0) -> BlockReader:
        """The records of a block."""
        return BlockReader(block, self.data.on_bad_line, self.data.max_bad_lines, bad_before)

    def columns(self, file: str) -> Columns | None:
        """The columns of a file, as its first record tells them."""
        if file not in self._columns:
            self._columns[file] = None if self.template else columns_of(file, self.data, streaming=True)
        return self._columns[file]

    def splits(self) -> Splits:
        """The first examples of the stream, in the place of all, and all that are held out."""
        texts: list[Text] = []
        for file in self.epoch(0):
            columns = self.columns(self.files[file])
            with closing(self.read(file, SAMPLED_EXAMPLES, Place(), WHOLE)) as found:
                for block in found:
                    texts += self.texts(self.reader(block), columns)
                    if len(texts) >= SAMPLED_EXAMPLES:
                        break
            if len(texts) >= SAMPLED_EXAMPLES:
                break
        if not texts:
            raise InputError(f"{self.files[0]}: no examples in it, nor in the other files")
        train, notes = self.learned(texts[:SAMPLED_EXAMPLES])
        notes = [f"training, in the first {len(train):,} examples: {line}" for line in notes]
        if not self.data.validation:
            return Splits(train, None, (), tuple(notes))
        whole = reader(resolve(self.data.validation, "data.validation"), self.data, streaming=True)
        held = self.texts(whole)[: self.data.max_validation_samples or None]
        if whole.bad_count:
            notes.append(f"data.validation: {whole.bad_count} bad lines skipped, the first: {whole.bad[0]}")
        validation, cut = self.learned(held)
        notes += [f"validation: {line}" for line in cut]
        examples = [text for text in held if not isinstance(text, tuple)]
        return Splits(train, validation, examples, tuple(notes))

    def tell(self, example: int) -> dict[str, str | list[int]]:
        """Where an example came from, and its record."""
        file, line = self.files[example >> _LINES], example & ((1 << _LINES) - 1)
        told: dict[str, str | list[int]] = {"where": f"{file}:{line}"}
        with suppress(InputError), closing(parsed(file, self.data.format, self._wanted, line - 1)) as items:
            told["record"] = json.dumps(next(items).value, ensure_ascii=False)
        return told


class Sample:
    """The first examples of a stream, of which any other takes at most ``longest`` slots."""

    def __init__(self, inner: Objective, longest: tuple[int, int]) -> None:
        self.inner, self.longest = inner, longest
        self.fingerprint, self.words, self.tell = inner.fingerprint, 0, inner.tell
        self.sizes, self.feature = inner.sizes, inner.feature
        if hasattr(inner, "predictions"):
            self.predictions: int = inner.predictions

    def __len__(self) -> int:
        return len(self.inner)


class Made(NamedTuple):
    """A member's step: its micro-batches, where the member stands after it, and the bad lines met on the way."""

    packed: list[Packed]
    cursor: Cursor
    bad: list[str]

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches laid out."""
        return [packed.batch() for packed in self.packed]


class Member:
    """One endless stream of examples: that of reader ``number`` among ``members``, from a cursor on."""

    def __init__(
        self, source: Source, number: int, members: int, cursor: Cursor, prompt: np.ndarray | None = None
    ) -> None:
        self.source, self.number, self.members, self.cursor, self.prompt = source, number, members, cursor, prompt
        self.bad: list[str] = []
        self._examples: Generator[tuple[int, Feature], None, None] | None = None

    def take(self, count: int) -> tuple[list[int], list[Feature]]:
        """The numbers of the next examples, and what they ask of a model."""
        if self._examples is None:
            self._examples = self._endless()
        taken = list(islice(self._examples, count))
        return [number for number, _ in taken], [feature for _, feature in taken]

    def close(self) -> None:
        """Close the file that is being read."""
        if self._examples is not None:
            self._examples.close()

    def _endless(self) -> Generator[tuple[int, Feature], None, None]:
        while True:
            epoch, begun, found = self.cursor.epoch, self.cursor != Cursor(self.cursor.epoch), False
            for example in self._epoch():
                found = True
                yield example
            if not (begun or found):
                advice = "give fewer ranks or data.readers, or more records"
                who = f"reader {self.number} of {self.members} (ranks x data.readers)"
                raise InputError(f"data.train: nothing in {len(self.source.files)} files for {who}: {advice}")
            self.cursor = Cursor(epoch + 1)

    def _epoch(self) -> Iterator[tuple[int, Feature]]:
        files = self.source.epoch(self.cursor.epoch)
        share = len(files) < self.members
        for j in range(self.cursor.file, len(files)):
            if share:
                yield from self._file(j, files[j], Share((self.number - j) % self.members, self.members))
            elif j % self.members == self.number:
                yield from self._file(j, files[j], WHOLE)
            self.cursor = Cursor(self.cursor.epoch, j + 1, bad=self.cursor.bad)

    def _file(self, j: int, file: int, share: Share) -> Iterator[tuple[int, Feature]]:
        at = self.cursor
        columns = self.source.columns(self.source.files[file])
        with closing(self.source.read(file, self.source.data.shuffle, Place(at.line, at.byte), share)) as found:
            for number, block in enumerate(found, at.block):
                yield from self._block(file, columns, block)
                self.cursor = Cursor(at.epoch, j, number + 1, *block.end, bad=self.cursor.bad)

    def _block(self, file: int, columns: Columns | None, block: Block) -> Iterator[tuple[int, Feature]]:
        units = block.units(self.source.documents)
        key = order.key(self.source.seed, self.number, self.cursor.epoch, file, self.cursor.block)
        shuffled = order.permuted(np.arange(len(units)), len(units), key).tolist() if units else []
        for start in range(self.cursor.unit, len(units), CHUNK):
            part = block.part([units[i] for i in shuffled[start : start + CHUNK]])
            reader = self.source.reader(part, self.cursor.bad)
            texts = self.source.texts(reader, columns)
            self.bad += reader.bad
            if texts:
                yield from self._chunk(file, texts, order.key(key, start))
            self.cursor = self.cursor._replace(unit=start + CHUNK, taken=0, bad=reader.bad_count)

    def _chunk(self, file: int, texts: Sequence[Text], key: int) -> Iterator[tuple[int, Feature]]:
        examples, _ = self.source.learned(texts)
        if self.prompt is not None:
            examples = Prompted(examples, self.prompt, self.source.kind)
        count, name = len(examples), self.source.files[file]
        for i in order.permuted(np.arange(count), count, key).tolist()[self.cursor.taken :] if count else ():
            line = str(examples.tell(i)["where"])[len(name) + 1 :].partition(",")[0]
            self.cursor = self.cursor._replace(taken=self.cursor.taken + 1)
            yield (file << _LINES) + int(line), examples.feature(i, order.key(key, i))


class Maker:
    """What a reader's process does: takes a share of each of its steps and packs it."""

    def __init__(self, member: Member, share: int, pack: Callable[[Sequence[Feature], Sequence[int]], list[Packed]]):
        self.member, self.share, self.pack = member, share, pack

    def read(self, step: int) -> Made:
        """The next step, whatever its number: a reader's steps come in their order."""
        numbers, features = self.member.take(self.share)
        bad, self.member.bad = self.member.bad, []
        return Made(self.pack(features, numbers) if features else [], self.member.cursor, bad)


class Stream(Loader):
    """The micro-batches of every step of a rank's members.

    Step n takes this rank's share of the batch from its reader n mod ``readers``. What the `Loader` knows of examples
    it knows by a sample; the rest of its settings are a loader's.
    """

    def __init__(
        self,
        examples: Objective,
        batch: int,
        *settings: Any,
        source: Source,
        readers: int = 0,
        rank: int = 0,
        size: int = 1,
        report: Callable[[str], None] = print,
        **more: Any,
    ) -> None:
        super().__init__(examples, batch, *settings, **more)
        self.source, self.readers, self.rank, self.size, self.report = source, readers, rank, size, report
        self.fingerprint, self.steps_per_epoch = source.fingerprint, 0
        self.share = batch // size + (rank < batch % size)
        self.bad_count = 0
        self._cursors = self._standing([Cursor()] * max(1, readers))

    def steps(self, start: int, stop: int, readers: int = 0) -> Generator[list[Batch], None, None]:
        """Steps ``start`` to ``stop`` of where the cursors stand, the next ones made in the background."""
        makers = [self._maker(w, cursor) for w, cursor in enumerate(self.cursors(start))]
        pools: list[Executor] = []
        if self.readers:
            context = multiprocessing.get_context("forkserver")
            pools += [ProcessPoolExecutor(1, context, become_reader, (maker,)) for maker in makers]
        else:
            pools.append(ThreadPoolExecutor(1))

        def submit(n: int) -> Future[Made]:
            pool = pools[n % len(pools)]
            return pool.submit(read_step, n) if self.readers else pool.submit(makers[0].read, n)

        try:
            for n, made in enumerate(in_advance(submit, start, stop, 2 * self.readers + 2), start):
                self._cursors[n % len(pools)].append((n, made.cursor))
                self._count(made.bad)
                yield made.batches
        finally:
            for pool in pools:
                pool.shutdown(cancel_futures=True)
            for maker in makers:
                maker.member.close()

    def cursors(self, step: int) -> list[Cursor]:
        """Where each of this rank's members stood when so many steps were done: now, or one step ago."""
        return [next(cursor for n, cursor in reversed(kept) if n < step) for kept in self._cursors]

    def restore(self, cursors: Sequence[Sequence[Sequence[int]]]) -> None:
        """Go on from the cursors of all ranks: there must be as many ranks and readers as there were."""
        before, now = (len(cursors), len(cursors[0])), (self.size, max(1, self.readers))
        if before != now:
            told = "was streamed by {} ranks x {} readers, and these are {} x {}".format(*before, *now)
            raise InputError(f"data.readers: the run {told}: only the same can go on, or another run.dir begin anew")
        self._cursors = self._standing([Cursor(*cursor) for cursor in cursors[self.rank]])

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where an example of a batch came from, and its record."""
        return self.source.tell(i)

    def __getstate__(self) -> dict[str, Any]:
        """For readers' processes, which pack and leave reporting to the one that trains."""
        return self.__dict__ | {"report": None}

    @staticmethod
    def _standing(cursors: Sequence[Cursor]) -> list[deque[tuple[int, Cursor]]]:
        return [deque([(-1, cursor)], maxlen=2) for cursor in cursors]

    def _maker(self, reader: int, cursor: Cursor) -> Maker:
        readers = max(1, self.readers)
        prompt = self.examples.ids if isinstance(self.examples, Prompted) else None
        member = Member(self.source, self.rank * readers + reader, self.size * readers, cursor, prompt)
        return Maker(member, self.share, self.pack)

    def _count(self, bad: Sequence[str]) -> None:
        """Tell of bad lines when there are 1, 10, 100 and so on."""
        for message in bad:
            self.bad_count += 1
            if math.log10(self.bad_count).is_integer():
                self.report(f"note: data.train: {self.bad_count:,} bad lines skipped, the latest: {message}")
