"""One pass over training and validation data, as a run would read them, past every bad line."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from t2t.config import Config
from t2t.data import chat, sources
from t2t.data.chat import Template
from t2t.data.check import LengthCounts, Letters, Sample, Seen, expected, rows_for, store_bytes
from t2t.data.packing import Cost, slots
from t2t.data.sources import Reader, Record
from t2t.data.tables import KINDS, PLAIN, begins_document
from t2t.data.tasks import BadField, Columns, Example, Task, is_chat, join
from t2t.data.tokens import Tokenizer
from t2t.doctor.report import FileReport, Lengths, Plan, Report, Split, Unknown
from t2t.errors import InputError

SHOWN = 5
"""How many bad lines of a file are shown; all are counted."""

PAIRED = ("pairs", "character_noise")
"""What is learned from a source and its target, of which too long ones are cut."""

_BLOCK_CHARACTERS = 2**20  # tokenized at once, so that memory does not follow the length of lines

T = TypeVar("T")


def check(patterns: Sequence[str], config: Config, tokens_per_s: float = 0.0) -> Report:
    """Read files to their ends, as training with this config would, past every bad line.

    The patterns name the training data, or else data.train does; data.validation is looked at beside it. Tokens are
    told where the config names a tokenizer or a model, and how long an epoch takes where ``tokens_per_s`` is given.

    >>> check(["no/such/pairs.tsv"], Config())
    Traceback (most recent call last):
    t2t.errors.InputError: doctor: no such file: no/such/pairs.tsv
    """
    named = {
        "train": sources.resolve(patterns, "doctor") if patterns else sources.resolve(config.data.train),
        "validation": sources.resolve(config.data.validation, "data.validation"),
    }
    reading = _Pass(config, tokens=any(named.values()))
    splits = {split: _Found() for split in named}
    files = [reading.file(split, str(file), splits[split]) for split, paths in named.items() for file in paths]
    train, held = (splits[split] if splits[split].examples else None for split in named)
    return Report(
        tuple(files),
        (config.model.tokenizer or config.model.path) if reading.tokenizer else "",
        tuple(found.report(split) for split, found in splits.items() if found.examples),
        held.seen.overlap(train.seen) if train and held else None,
        reading.unknown(),
        _plan(reading, train, list(splits.values()), tokens_per_s) if reading.tokenizer and train else None,
    )


class _Tally(Reader):
    """A reader that goes on past every bad line, counts them all and keeps the first few."""

    def __init__(self, file: str, config: Config) -> None:
        super().__init__([file], config.data.format, columns=(config.data.source, config.data.target))
        self.first: Record | None = None
        self.records = 0

    def __iter__(self) -> Iterator[Record]:
        self.records = 0
        for record in super().__iter__():
            self.first = self.first or record
            self.records += 1
            yield record

    def _count(self, message: str) -> None:
        self.bad_count += 1
        if len(self.bad) < SHOWN:
            self.bad.append(message)


@dataclass
class _Found:
    """What was measured of a split so far."""

    seen: Seen = field(default_factory=Seen)
    sample: Sample = field(default_factory=Sample)
    lengths: defaultdict[tuple[str, str], LengthCounts] = field(default_factory=lambda: defaultdict(LengthCounts))
    limits: dict[str, int] = field(default_factory=dict)
    documents: LengthCounts = field(default_factory=LengthCounts)
    examples: int = 0
    objective: str = ""

    @property
    def tokens(self) -> dict[str, LengthCounts]:
        """The lengths of each side in tokens."""
        return {side: counts for (side, unit), counts in self.lengths.items() if unit == "tokens"}

    @property
    def records(self) -> int:
        """How many things are stored: pairs, conversations, documents."""
        return self.examples if self.objective in (*PAIRED, "chat") else len(self.documents)

    def report(self, split: str) -> Split:
        rows = [
            Lengths.of(side, unit, counts, self.limits.get(side) if unit == "tokens" else None)
            for (side, unit), counts in self.lengths.items()
        ]
        histogram = {side: counts.histogram() for side, counts in self.tokens.items()}
        return Split(split, self.examples, tuple(rows), histogram, self.seen.repeated())


@dataclass(frozen=True)
class _Model:
    """What lengths and rows depend on, of the model that the config names; without one, a T5 is thought of."""

    kind: str = ""
    start_id: int | None = None
    cost: Cost = slots
    packs: bool = True


class _Pass:
    """One pass over all files, and what all of them share."""

    def __init__(self, config: Config, tokens: bool) -> None:
        self.config, self.task = config, Task.from_config(config.data)
        self.tokenizer: Tokenizer | None = None
        self.model = _Model()
        if tokens and (config.model.tokenizer or config.model.path):
            self.tokenizer, self.model = _model(config)
        self.letters = Letters(self.tokenizer) if self.tokenizer else None
        self.reading = self.encoding = 0.0  # seconds
        self.encoded = 0  # tokens

    def file(self, split: str, file: str, found: _Found) -> FileReport:
        """Read a file to its end."""
        reader = _Tally(file, self.config)
        examples, documents = found.examples, len(found.documents)
        error = ""
        try:
            first = next(iter(reader))
            if self.config.data.objective == "chat" or (is_chat(first.fields) and not self.task.source):
                self._chat(reader, found)
            else:
                self._texts(reader, self.task.columns(first), found)
        except InputError as problem:
            error = str(problem)
        if reader.bad and not reader.records:
            error = f"{file}: no records; {reader.bad_count:,} bad lines, the first: {reader.bad[0]}"
        name = sources.shown(file)
        source, target, why = _columns(self.task, reader.first)
        return FileReport(
            split,
            name,
            sources.format_of(file, self.config.data.format) or "unknown",
            sources.compression_of(file),
            reader.records,
            found.examples - examples,
            reader.bad_count,
            tuple(line.replace(file, name) for line in reader.bad),
            tuple(reader.first.fields) if reader.first else (),
            source,
            target,
            why,
            error.replace(file, name),
            len(found.documents) - documents,
        )

    def unknown(self) -> Unknown | None:
        """What the tokenizer could not say of all that was read."""
        if self.letters is None:
            return None
        tokens = self.letters.unknown_tokens
        # A character may be unknown alone and known inside words, as WordPiece has it.
        lost = tuple(character for character in self.letters.lost() if tokens or not character.unknown)
        return Unknown(tokens, self.letters.unknown_examples, self.letters.first_unknown, lost)

    def _texts(self, reader: Reader, columns: Columns, found: _Found) -> None:
        data, plain = self.config.data, columns.source == columns.target
        name = self._objective(plain)
        found.objective = found.objective or name
        if name in PAIRED:
            found.limits = {"source": data.max_source_length, "target": data.max_target_length}
        elif self.tokenizer is not None:
            found.lengths["document", "tokens"] = found.documents
        documents = _Lines(found.documents, data.format)
        try:
            for block in self._timed(_blocks(self.task.examples(reader))):
                found.examples += len(block)
                sides = self._sides(block) if name in PAIRED else {"text": [example.target for example in block]}
                for side, texts in sides.items():
                    found.lengths[side, "characters"].add(map(len, texts))
                ids = self._encode(list(sides.values()))
                if name in PAIRED and self.tokenizer is not None:
                    self._count(ids, found)
                for i, example in enumerate(block):
                    found.seen.add(example.source, example.target, example.where)
                    if plain:
                        documents.add(example.where, len(ids[-1][i]) if ids else 0)
                    if self.letters is not None:
                        texts, tokens = [side[i] for side in sides.values()], [side[i] for side in ids]
                        self.letters.add(texts, tokens, example.where)
        finally:
            documents.close()

    def _chat(self, reader: Reader, found: _Found) -> None:
        template = Template(self.tokenizer) if self.tokenizer is not None else None
        found.objective = found.objective or "chat"
        found.limits = {"conversation": chat.lengths(self.config.data)[0]}
        for record in self._timed(reader):
            try:
                messages = chat.checked_conversation(record.fields.get("messages"))
                began = time.perf_counter()
                shown = template.show(messages) if template is not None else None
                self.encoding += time.perf_counter() - began
            except BadField as error:
                reader.reject(record, str(error))
                continue
            found.examples += 1
            contents = [message["content"] for message in messages]
            found.lengths["conversation", "messages"].add([len(messages)])
            found.lengths["conversation", "characters"].add([sum(map(len, contents))])
            found.seen.add(json.dumps(messages[:-1]), contents[-1], record.where)
            if shown is not None and self.letters is not None:
                self.encoded += len(shown.ids)
                found.lengths["conversation", "tokens"].add([len(shown.ids)])
                found.sample.add(0, len(shown.ids))
                self.letters.add(contents, [shown.ids], record.where)
        if not found.examples:
            raise InputError(
                f"{reader.files[0]}: no conversations; {reader.bad_count:,} bad lines, the first: {reader.bad[0]}"
            )

    def _objective(self, plain: bool) -> str:
        """What would be learned; with no model named, of plain text that nothing is done to, how it goes on."""
        data, kind = self.config.data, self.model.kind
        name: str = data.objective
        if name == "auto":
            done = data.prefix or data.source_transforms or data.target_transforms or data.piece
            name = PLAIN.get(kind or ("" if done else "causal"), "pairs") if plain else "pairs"
        if kind and kind not in KINDS[name]:
            raise InputError(f"data.objective: {name} is for {' and '.join(KINDS[name])} models, this one is {kind}")
        return name

    def _sides(self, block: Sequence[Example]) -> dict[str, list[str]]:
        before, between, after = join(self.config.data.template) if self.model.kind == "causal" else ("", "", "")
        return {
            "source": [before + example.source + between for example in block],
            "target": [example.target + after for example in block],
        }

    def _encode(self, sides: Sequence[list[str]]) -> list[list[list[int]]]:
        """The tokens of each side, or of none; texts that are the same on both are tokenized once."""
        if self.tokenizer is None:
            return []
        began = time.perf_counter()
        ids = [self.tokenizer.encode_batch(texts) for texts in (sides[:1] if sides[0] == sides[-1] else sides)]
        self.encoding += time.perf_counter() - began
        self.encoded += sum(len(text) for side in ids for text in side)
        return ids if len(ids) == len(sides) else ids * len(sides)

    def _count(self, ids: Sequence[Sequence[Sequence[int]]], found: _Found) -> None:
        """Lengths of pairs with what stands before and after their texts, as `tokens.tokenize` has it."""
        assert self.tokenizer is not None
        starts, causal = self.tokenizer.starts, self.model.kind == "causal"
        more = len(starts) + (not causal), 1 + (0 if causal or list(starts) == [self.model.start_id] else len(starts))
        source, target = ([len(text) + n for text in side] for side, n in zip(ids, more, strict=True))
        found.lengths["source", "tokens"].add(source)
        found.lengths["target", "tokens"].add(target)
        for pair in zip(source, target, strict=True):
            found.sample.add(*pair)

    def _timed(self, items: Iterable[T]) -> Iterator[T]:
        began = time.perf_counter()
        for item in items:
            self.reading += time.perf_counter() - began
            yield item
            began = time.perf_counter()


class _Lines:
    """Lines of plain text, which make documents."""

    def __init__(self, documents: LengthCounts, format: str) -> None:
        self.documents, self.format = documents, format
        self.before, self.tokens = "", 0

    def add(self, where: str, tokens: int) -> None:
        if begins_document(where, self.before, self.format):
            self.close()
            self.tokens = tokens
        else:
            self.tokens += 1 + tokens  # with the line's end
        self.before = where

    def close(self) -> None:
        if self.before:
            self.documents.add([self.tokens])


def _model(config: Config) -> tuple[Tokenizer, _Model]:
    from t2t.models import load as models  # both bring torch along
    from t2t.train.run import load_tokenizer

    own, tokenizer = config.model, load_tokenizer(config)
    if own.path:
        raw = models.read_config(models.find(own.path))
    elif own.config:
        ids = tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id
        raw = models.scratch_config(own.config, own.overrides, *ids)
    else:
        return tokenizer, _Model()
    family, architecture = models.architecture(raw)
    return tokenizer, _Model(family.kind, architecture.start_id, architecture.row_cost, family.packs)


def _plan(reading: _Pass, train: _Found, splits: Sequence[_Found], tokens_per_s: float) -> Plan | None:
    assert reading.tokenizer is not None
    data, batch, seed = reading.config.data, reading.config.train.batch, reading.config.run.seed
    name, model = train.objective, reading.model
    kind = model.kind or KINDS[name][0]
    sentinels = len(reading.tokenizer.sentinels)
    count, source, target = expected(name, kind, data, train.sample, train.documents, sentinels, seed)
    if not target.any():
        return None  # the tokenizer makes nothing of these texts
    used = min(train.records, data.max_samples or train.records)
    used -= max(1, round(used * data.validation_split)) if data.validation_split else 0
    examples = max(1, round(count * used / train.records))
    tokens = round(float(source.mean()) * examples), round(float(target.mean()) * examples)
    records = sum(found.records for found in splits)
    stored = [(found.limits.get(side), counts) for found in splits for side, counts in found.tokens.items()]
    kept, sequences = sum(counts.total(limit) for limit, counts in stored), sum(len(counts) for _, counts in stored)
    return Plan(
        name,
        kind,
        examples,
        batch,
        math.ceil(examples / batch),
        *tokens,
        rows_for(source, target, data, min(batch, examples), model.cost, seed, model.packs),
        store_bytes(kept, sequences, records, reading.tokenizer.vocab_size),
        reading.encoded / max(reading.encoding, 1e-9),
        reading.reading + reading.encoding,
        sum(tokens) / tokens_per_s if tokens_per_s else None,
    )


def _columns(task: Task, record: Record | None) -> tuple[str, str, str]:
    """Source, target, and how they were told apart; nothing where they could not be."""
    if record is None:
        return "", "", ""
    if is_chat(record.fields) and not task.source:
        return "", "", "chat"
    try:
        columns = task.columns(record)
    except InputError:
        return "", "", ""  # the same error ended the file's reading and stands in its report
    return ".".join(columns.source), ".".join(columns.target), _why(task, columns)


def _why(task: Task, columns: Columns) -> str:
    if task.source:
        return "given"
    if columns.source == columns.target:
        return "plain text"
    names = columns.source[-1].lower(), columns.target[-1].lower()
    return "known names" if names in sources.PAIRS else "the only two text fields"


def _blocks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Examples in blocks; an error comes after the examples that were read before it."""
    block: list[Example] = []
    size, problem = 0, None
    try:
        for example in examples:
            block.append(example)
            size += len(example.source) + len(example.target)
            if size >= _BLOCK_CHARACTERS:
                yield block
                block, size = [], 0
    except InputError as error:
        problem = error
    yield block
    if problem:
        raise problem
