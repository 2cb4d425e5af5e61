"""What a run learns from and what is held out, by the data section."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from t2t.config import Data, tasks
from t2t.data import chat, hdf5
from t2t.data.chat import Conversation, Cut
from t2t.data.mixture import Mixture, weights
from t2t.data.objectives import Objective
from t2t.data.prepare import Maker, Tell, in_memory, is_stored, prepare, processes, worth_storing
from t2t.data.sources import format_of, resolve
from t2t.data.store import Store, Table
from t2t.data.tables import KINDS, PLAIN, Splits, cut_notes, held_out, reader
from t2t.data.tasks import Example, Task, is_chat
from t2t.data.tokens import Tokenizer
from t2t.errors import InputError


def read_examples(patterns: Sequence[str], key: str, data: Data, limit: int) -> tuple[list[Example], list[str]]:
    """The examples of files, at most ``limit`` of them (0: all), and a line on bad ones."""
    found = reader(resolve(patterns, key), data)
    examples = list(islice(Task.from_config(data).examples(found), limit or None))
    bad = f"{key}: {found.bad_count} bad lines skipped, the first: {found.bad[0]}" if found.bad_count else ""
    return examples, [bad] if bad else []


def chosen_objective(data: Data, kind: str) -> str:
    """What the data section says is learned by a model of this kind, or what its first record suggests."""
    name: str = data.objective
    if name == "auto":
        if kind == "masked" and _are_shards(data.train, "data.train", data):
            return "masked_lm_nsp"
        name = "pairs"
        record = next(iter(reader(resolve(data.train, "data.train"), data)), None)
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
    tell: Tell = lambda *_: None,
) -> Splits:
    """Training and validation examples by the data section; a share is split off by a keyed permutation.

    Large files are tokenized into a store (`t2t.data.prepare`), or found in one; ``tell`` hears how far that is.
    """
    if data.mix:
        return _mixed_splits(data, tokenizer, seed, kind, start_id, tell)
    if not data.train:
        raise InputError("data.train: no training files given, as --data.train pairs.jsonl")
    name = chosen_objective(data, kind)
    if kind == "masked" and _are_shards(data.train, "data.train", data):
        return _shard_splits(data, tokenizer, seed, name)
    maker = Maker(data, tokenizer, name, kind, start_id)
    return _splits(maker, resolve(data.train, "data.train"), seed, tell)


def _splits(maker: Maker, files: Sequence[str], seed: int, tell: Tell) -> Splits:
    """What is learned from files, and what is held out: other files, or a share by a keyed permutation.

    The tokens of large files are in a store, which is made where it is not there yet.
    """
    data = maker.data
    stored = is_stored(maker, files) or worth_storing(files)
    made = prepare(maker, files, processes(), tell) if stored else in_memory(maker, files)
    notes = _notes(made, maker, "data.train")
    if data.validation:
        own = dataclasses.replace(data, train=data.validation, max_samples=data.max_validation_samples)
        held, texts, more = read(dataclasses.replace(maker, data=own), "data.validation")
        return Splits(maker.objective(made)[0], held, texts, (*notes, *more))
    if not data.validation_split:
        return Splits(maker.objective(made)[0], None, (), tuple(notes))
    taken = held_out(len(made), data, seed)
    learned, _ = maker.objective(made, taken)
    taken = taken[: data.max_validation_samples or None]
    _, validation = maker.objective(made, taken)
    return Splits(learned, validation, _texts(maker, files, taken), tuple(notes))


def read(maker: Maker, key: str) -> tuple[Objective, Sequence[Example | Conversation], list[str]]:
    """What is learned from all of the maker's files, in memory, its texts if it has any, and what was found."""
    files = resolve(maker.data.train, key)
    made = in_memory(maker, files)
    return maker.objective(made)[0], _texts(maker, files, np.arange(len(made))), _notes(made, maker, key)


def _texts(maker: Maker, files: Sequence[str], taken: np.ndarray) -> Sequence[Example | Conversation]:
    """The texts of some records, where records are something to be said."""
    return HeldOut(maker, files, taken) if maker.paired or maker.name == "chat" else ()


class HeldOut(Sequence[Example | Conversation]):
    """The texts of some records, by their numbers, read when they are asked for: tables have tokens alone."""

    def __init__(self, maker: Maker, files: Sequence[str], taken: np.ndarray) -> None:
        self.maker, self.files, self.taken = maker, files, taken

    def __len__(self) -> int:
        return len(self.taken)

    def __getitem__(self, i: Any) -> Any:
        return self._texts[i]

    @cached_property
    def _texts(self) -> list[Example | Conversation]:
        maker, data, wanted = self.maker, self.maker.data, set(self.taken.tolist())
        found, last = reader(self.files, data), int(self.taken[-1]) + 1
        texts: Iterator[Example | Conversation] = Task.from_config(data).examples(found)
        if maker.name == "chat":
            texts = iter(chat.read(found, maker.template, chat.lengths(data)[0], last)[0])
        return [text for i, text in enumerate(islice(texts, last)) if i in wanted]


def _notes(made: Table, maker: Maker, key: str) -> list[str]:
    counts, bad = made.counts, made.counts["bad"]
    notes = [f"{len(made):,} records are in the store {made.folder}"] if isinstance(made, Store) else []
    if bad:
        notes.append(f"{bad} bad lines skipped, the first: {made.first_bad}")
    if maker.paired:
        notes += cut_notes(counts["cut_sources"], counts["cut_targets"], len(made), maker.data)
    elif maker.name == "chat":
        told = Cut(counts["cut"], counts["answers"], counts["left_out"])
        notes += told.told(len(made), chat.lengths(maker.data)[0])
    return [f"{key}: {line}" for line in notes]


def _mixed_splits(data: Data, tokenizer: Tokenizer, seed: int, kind: str, start_id: int, tell: Tell) -> Splits:
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
