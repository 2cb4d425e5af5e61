"""From texts to tables of tokens, and from these to what is learned: one place that knows every objective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from t2t.config import Data
from t2t.data import order
from t2t.data.chat import Conversation
from t2t.data.masked import MaskedLM, Masking, NextSentence, most_predictions
from t2t.data.objectives import CausalPairs, CharacterNoise, Objective, Seq2Seq
from t2t.data.ragged import Ragged
from t2t.data.sources import Reader, format_of
from t2t.data.tasks import Columns, Example, Task, join
from t2t.data.text import BlockLM, DocumentLM, Documents, PrefixLM, SpanCorruption
from t2t.data.tokens import Pairs, Tokenizer, tokenize
from t2t.errors import InputError


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


def reader(files: Sequence[str], data: Data, streaming: bool = False) -> Reader:
    """The records of files, under the data section's policy."""
    columns = data.source, data.target
    return Reader(files, data.format, data.on_bad_line, data.max_bad_lines, columns, data.retries, streaming)


def columns_of(file: str, data: Data, streaming: bool = False) -> Columns:
    """The columns of a file: those given, or as its first record tells them."""
    return Task.from_config(data).columns(next(iter(reader([file], data, streaming))))


def check_objective(name: str, data: Data, tokenizer: Tokenizer) -> None:
    """Refuse what an objective cannot do, and what has no meaning for it."""
    if name == "character_noise" and tokenizer.fingerprint != "bytes":
        raise InputError('data.objective: character_noise needs model.tokenizer = "bytes"')
    if name != "chat":
        return
    for key in ("source", "target", "prefix", "source_transforms", "target_transforms", "piece", "template", "loss_on"):
        if getattr(data, key) != getattr(Data, key):
            raise InputError(f"data.{key}: is for pairs; the tokenizer's chat template shows chat records as they are")


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
