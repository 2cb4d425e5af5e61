"""Vocabularies trained on text, saved as Hugging Face tokenizer folders with the ids that their models expect.

| style | kind | special tokens |
|---|---|---|
| t5 | unigram or bpe, by sentencepiece | ``<pad>`` 0, ``</s>`` 1, ``<unk>`` 2; sentinels, ``<extra_id_0>`` last |
| gpt2 | bpe of bytes, by tokenizers | ``<|endoftext|>`` last |
| bert | wordpiece, by tokenizers | ``[PAD]`` 0, ``[UNK]`` 1, ``[CLS]`` 2, ``[SEP]`` 3, ``[MASK]`` 4 |

A size counts all of them but the sentinels, as T5's 32,000 does.
The same text and settings always make the same vocabulary. Text is streamed: of more than `SAMPLE` pieces a t5 one is
learned from a sample, the others count the words of all of it.
"""

from __future__ import annotations

import io
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from t2t.config import Data
from t2t.data import tokens
from t2t.data.fast import SENTINELS
from t2t.data.sources import Reader, resolve
from t2t.data.tasks import Task, pieces
from t2t.errors import InputError, did_you_mean

STYLES = {"t5": ("unigram", "bpe"), "gpt2": ("bpe",), "bert": ("wordpiece",)}
"""The kinds that each style can have, its own first."""

PIECE = 1000  # characters; sentencepiece passes over longer lines
SAMPLE = 2_000_000  # pieces that sentencepiece holds in memory
COVERAGE = 0.9999  # of all characters, the share that is in the alphabet
_END, _MARKS = "<|endoftext|>", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_OF_KIND = {"unigram": "t5", "bpe": "gpt2", "wordpiece": "bert"}

Texts = Callable[[], Iterator[str]]  # a new pass over all of them


def train(
    files: Sequence[str],
    folder: Path,
    size: int = 32000,
    kind: str = "",
    style: str = "",
    sentinels: int | None = None,
    lowercase: bool = False,
    data: Data | None = None,
    report: Callable[[str], None] = print,
) -> tokens.Tokenizer:
    """Train a tokenizer on both columns of files of pairs, or on plain text, and save it to a new folder.

    >>> with tempfile.TemporaryDirectory() as name:
    ...     tokenizer = train(["asset:ro-held-out.txt"], Path(name, "own"), 300, style="gpt2")
    ...     tokenizer.decode(tokenizer.encode("pâine și  sare")), tokenizer.eos_id
    ('pâine și  sare', 299)
    """
    kind, style = _choice(kind, style)
    if size < 1:
        raise InputError(f"--size: must be 1 or more, got {size}")
    if sentinels is not None and (style != "t5" or not 0 <= sentinels <= 1000):
        raise InputError(f"--sentinels: are T5's, from 0 to 1000 of them, got {sentinels} for style {style}")
    if lowercase and style == "gpt2":
        raise InputError("--lowercase: byte-level BPE gives every text back as it was; leave one of them out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--out: {folder} is there already, and not empty")
    chosen = data or Data()
    columns = (chosen.source, chosen.target)
    reader = Reader(resolve(files, "FILE"), chosen.format, chosen.on_bad_line, chosen.max_bad_lines, columns)

    def texts() -> Iterator[str]:
        for example in Task(*columns).examples(reader):
            yield from {example.source: None, example.target: None}  # one, where both columns are the same

    if style == "t5":
        trained = _t5(texts, kind, size, SENTINELS if sentinels is None else sentinels, lowercase)
    elif style == "gpt2":
        trained = _gpt2(texts, size)
    else:
        trained = _bert(texts, size, lowercase)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: {folder}: {error.strerror}") from None
    trained.save(folder)
    if reader.bad_count:
        report(f"note: {reader.bad_count} bad lines skipped, the first: {reader.bad[0]}")
    return tokens.load(str(folder))


def sample(texts: Iterable[str], most: int) -> list[str]:
    """At most so many of the texts, every one as likely to be among them as any other; the same ones each time.

    >>> sample("abcdefgh", 3)
    ['f', 'b', 'g']
    """
    rng = random.Random(0)
    kept: list[str] = []
    for count, text in enumerate(texts):
        if count < most:
            kept.append(text)
        elif (place := rng.randrange(count + 1)) < most:
            kept[place] = text
    return kept


def _choice(kind: str, style: str) -> tuple[str, str]:
    for flag, given, known in (("--kind", kind, _OF_KIND), ("--style", style, STYLES)):
        if given and given not in known:
            raise InputError(f"{flag}: {given!r} is not one of {', '.join(known)}{did_you_mean(given, known)}")
    style = style or _OF_KIND.get(kind, "t5")
    kind = kind or STYLES[style][0]
    if kind not in STYLES[style]:
        raise InputError(f"--kind: {kind} is not for style {style}, which can be {' or '.join(STYLES[style])}")
    return kind, style


def _opened(files: Mapping[str, bytes | str], settings: Mapping[str, Any]) -> tokens.HuggingFace:
    """The tokenizer of the files that a published model of its kind has."""
    with tempfile.TemporaryDirectory() as name:
        for file, content in {**files, "tokenizer_config.json": json.dumps(settings)}.items():
            Path(name, file).write_bytes(content if isinstance(content, bytes) else content.encode())
        opened = tokens.load(name)
    assert isinstance(opened, tokens.HuggingFace)
    return opened


def _too_large(size: int, most: int) -> InputError:
    return InputError(
        f"--size: {size:,} tokens are more than this text gives, which is {most:,}: give more text or less"
    )


def _too_small(size: int, least: int) -> InputError:
    return InputError(f"--size: {size:,} tokens are fewer than the {least:,} that the characters of this text need")


def _t5(texts: Texts, kind: str, size: int, sentinels: int, lowercase: bool) -> tokens.HuggingFace:
    opened = _opened(
        {"spiece.model": _sentencepiece(texts, kind, size, lowercase)},
        {"tokenizer_class": "T5Tokenizer", "extra_ids": sentinels},
    )
    return opened if kind == "unigram" else _as_bpe(opened)


def _sentencepiece(texts: Texts, kind: str, size: int, lowercase: bool) -> bytes:
    import sentencepiece

    cut = sample((piece for text in texts() for piece in pieces(text, PIECE)), SAMPLE)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(cut),
            model_writer=model,
            model_type=kind,
            vocab_size=size,
            character_coverage=COVERAGE,
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            max_sentence_length=8 * PIECE,  # bytes
            minloglevel=2,
        )
    except RuntimeError as error:
        if most := re.search(r"set it to a value <= (\d+)", str(error)):
            raise _too_large(size, int(most[1])) from None
        if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise _too_small(size, int(least[1])) from None
        raise InputError(f"--size: sentencepiece cannot make {size:,} tokens of this text: {error}") from None
    return model.getvalue()


def _as_bpe(opened: tokens.HuggingFace) -> tokens.HuggingFace:
    """T5's tokenizer, which knows unigram alone, with its pieces merged in their order instead."""
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    inner = opened.inner
    vocabulary = inner.get_vocab()
    merges = [
        (piece[:i], piece[i:])
        for piece in sorted(vocabulary, key=vocabulary.__getitem__)
        for i in range(1, len(piece))
        if piece[:i] in vocabulary and piece[i:] in vocabulary
    ]
    backend = inner.backend_tokenizer
    backend.model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True)
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    sentinels = inner.convert_ids_to_tokens(opened.sentinels)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=sentinels, **special)
    return tokens.HuggingFace(wrapped, "--out")


def _gpt2(texts: Texts, size: int) -> tokens.HuggingFace:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size <= len(alphabet):
        raise _too_small(size, len(alphabet) + 1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    if len(model["vocab"]) < size - 1:
        raise _too_large(size, len(model["vocab"]) + 1)
    files = {
        "vocab.json": json.dumps({**model["vocab"], _END: size - 1}),
        "merges.txt": "".join(f"{' '.join(pair)}\n" for pair in model["merges"]),
    }
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)
    return _opened(files, {"tokenizer_class": "GPT2Tokenizer", **special})


def _bert(texts: Texts, size: int, lowercase: bool) -> tokens.HuggingFace:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    # BERT's own lower-casing also strips diacritics, which most languages need.
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=False)
    alphabet = _alphabet(normalizer.normalize_str(text) for text in texts())
    # The trainer numbers letters as it meets them, in any order: given as special tokens they have their places.
    fixed = [*_MARKS, *alphabet, *(f"##{letter}" for letter in alphabet)]
    if size < len(fixed):
        raise _too_small(size, len(fixed))
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=fixed, limit_alphabet=0, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) < size:
        raise _too_large(size, len(vocabulary))
    lines = "".join(f"{piece}\n" for piece in sorted(vocabulary, key=vocabulary.__getitem__))
    casing = {"do_lower_case": lowercase, "strip_accents": False}
    # The end of a text is [SEP], said in the words that all models understand.
    return _opened({"vocab.txt": lines}, {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", **casing})


def _alphabet(texts: Iterable[str]) -> list[str]:
    """The commonest characters that make up `COVERAGE` of all, in the order of Unicode."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    ranked = sorted(
        ((count, c) for c, count in counts.items() if not c.isspace()), key=lambda item: (-item[0], item[1])
    )
    before = accumulate((count for count, _ in ranked), initial=0)
    enough = COVERAGE * sum(count for count, _ in ranked)
    return sorted(c for (_, c), seen in zip(ranked, before, strict=False) if seen < enough)
