"""Text to token ids: tokenizers under one small face, and the table of tokenized examples."""

from __future__ import annotations

import hashlib
import json
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from t2t.data import fast
from t2t.data.ragged import Memory, Ragged, id_type
from t2t.data.tasks import Example, Messages
from t2t.errors import InputError

NO_TEMPLATE = "has no chat template, by which to show conversations"


@dataclass(frozen=True)
class Marks:
    """What a masked model has to know of a vocabulary: its tokens around texts and in a text's place, and all others.

    ``ordinary[i]`` says whether id i is text rather than a special token, ``continues[i]`` whether it goes on with the
    word before it; where the tokens do not tell, that is None.
    """

    cls: int
    sep: int
    mask: int
    ordinary: np.ndarray  # [V]
    continues: np.ndarray | None  # [V]


class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer. ``encode`` adds no end token; ``decode`` drops special ones."""

    eos_id: int
    pad_id: int
    vocab_size: int
    fingerprint: str

    @property
    def sentinels(self) -> Sequence[int]:
        """Ids of <extra_id_0>, <extra_id_1> and so on; empty where there are none."""

    @property
    def starts(self) -> Sequence[int]:
        """What its models are used to before every text, as <s>; for many it is nothing."""

    @property
    def marks(self) -> Marks | None:
        """What masked models need; None where the tokenizer has no [CLS], [SEP] and [MASK] of any name."""

    @property
    def specials(self) -> Mapping[str, int]:
        """The special tokens that `encode` finds in a text."""

    def render(self, messages: Messages, prompt: bool) -> str:
        """A conversation by the tokenizer's chat template, with or without the beginning of an answer."""

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The same in as few bytes as ids fit into, made as fast as can be."""

    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class Bytes:
    """UTF-8 bytes with ByT5's ids: pad 0, end 1, unknown 2, byte b is b + 3, then 125 sentinels.

    >>> Bytes().encode("aș")
    [100, 203, 156]
    >>> Bytes().decode([100, 203, 156, 1, 0])
    'aș'
    """

    eos_id, pad_id, vocab_size, fingerprint = 1, 0, 384, "bytes"

    sentinels = range(259, 384)
    starts: Sequence[int] = ()
    marks = None
    specials: Mapping[str, int] = {}

    def render(self, messages: Messages, prompt: bool) -> str:
        raise InputError(f"model.tokenizer: {NO_TEMPLATE}")

    def encode(self, text: str) -> list[int]:
        return [b + 3 for b in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) + np.uint16(3) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors="ignore")

    def save(self, folder: Path) -> None:
        """Write what makes `transformers` open the folder with its ByT5 tokenizer."""
        settings = {
            "tokenizer_class": "ByT5Tokenizer",
            "extra_ids": 125,
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class HuggingFace:
    """A tokenizer of `transformers`, from a folder, a hub name or a bare SentencePiece file.

    ``inner`` is made by ``opens`` when it is asked for, where ``tokenizer`` is only what encoding needs (`fast.Fast`).
    """

    def __init__(self, tokenizer: Any, name: str, opens: Callable[[], Any] | None = None) -> None:
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id  # BERT has [SEP]
        if end is None:
            raise InputError(f"{name}: the tokenizer has no end token")
        if opens is None:
            self.inner = tokenizer
        self._opens = opens
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self.fast = self._fast is not None
        self.eos_id: int = end
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
        self._marks = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
        self._special_ids = tokenizer.all_special_ids
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
            content, whole = self._fast.to_str(), self._fast.encode("a").ids
            added, find = self._fast.get_added_tokens_decoder(), self._fast.token_to_id
        else:
            vocabulary = tokenizer.get_vocab()
            content, whole = json.dumps(sorted(vocabulary.items())), tokenizer("a")["input_ids"]
            added, find = tokenizer.added_tokens_decoder, vocabulary.get
        self.vocab_size = self._fast.get_vocab_size() if self._fast is not None else len(tokenizer)
        self.sentinels = [i for n in range(1000) if (i := find(f"<extra_id_{n}>")) is not None]
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        self.specials = {str(token): i for i, token in added.items() if token.special}
        self.starts: Sequence[int] = _before(whole, self.encode("a"))

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which makes ``inner`` when it is asked for, as importing transformers is slow."""
        state = dict(self.__dict__)
        if self._fast is not None and "inner" in state:
            state["_opens"] = partial(pickle.loads, pickle.dumps(state.pop("inner")))
        return state

    def __getattr__(self, name: str) -> Any:
        opens = self.__dict__.get("_opens")
        if name != "inner" or opens is None:
            raise AttributeError(name)
        self.inner = opens()
        return self.inner

    def render(self, messages: Messages, prompt: bool) -> str:
        if not self.inner.chat_template:
            raise InputError(f"model.tokenizer: {NO_TEMPLATE}")
        return self.inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)

    @cached_property
    def marks(self) -> Marks | None:
        if None in self._marks:
            return None
        ordinary = np.ones(self.vocab_size, dtype=bool)
        ordinary[self._special_ids] = False
        name = self._fast.id_to_token if self._fast is not None else self.inner.convert_ids_to_tokens
        return Marks(*self._marks, ordinary, _continues([name(i) for i in range(self.vocab_size)]))

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._fast is not None:  # without the masks that transformers makes beside the ids
            return [found.ids for found in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        return self.inner(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        dtype = id_type(self.vocab_size)
        return [np.array(ids, dtype=dtype) for ids in self.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(folder)


def _before(whole: Sequence[int], part: Sequence[int]) -> list[int]:
    """What stands before a part in the whole.

    >>> _before([0, 7, 8, 2], [7, 8]), _before([7, 8], [7, 8])
    ([0], [])
    """
    places = (i for i in range(len(whole)) if list(whole[i : i + len(part)]) == list(part))
    return list(whole[: next(places, 0)])


def _continues(pieces: Sequence[str]) -> np.ndarray | None:
    """Which pieces go on with a word: those marked so (WordPiece), or not marked as its beginning."""
    for mark, begins in (("##", False), ("▁", True), ("Ġ", True)):
        marked = np.array([piece.startswith(mark) for piece in pieces])
        if marked.any():
            return marked ^ begins
    return None


def extended(tokenizer: Tokenizer, new: Sequence[str]) -> Tokenizer:
    """The tokenizer with more tokens, which are matched as they are written and stay in decoded text.

    >>> extended(Bytes(), ["<person>"])
    Traceback (most recent call last):
    t2t.errors.InputError: model.new_tokens: a tokenizer of bytes takes no new tokens
    """
    if not new:
        return tokenizer
    if not isinstance(tokenizer, HuggingFace):
        raise InputError("model.new_tokens: a tokenizer of bytes takes no new tokens")
    from tokenizers import AddedToken

    known = set(tokenizer.inner.get_vocab())
    for i, token in enumerate(new):
        if not token or token in known or token in new[:i]:
            raise InputError(f"model.new_tokens: {token!r} is {'a token already' if token else 'no token'}")
    tokenizer.inner.add_tokens([AddedToken(token, normalized=False) for token in new])
    return HuggingFace(tokenizer.inner, "model.new_tokens")


def load(spec: str) -> Tokenizer:
    """The tokenizer that ``spec`` names: ``bytes``, a SentencePiece or GGUF file, a tokenizer folder, or a hub name.

    >>> load("bytes").vocab_size
    384
    """
    return Bytes() if _is_bytes(spec) else HuggingFace(_opened(spec), spec)


def light(spec: str) -> Tokenizer:
    """The same tokenizer, which leaves `transformers` out until something besides encoding is asked of it.

    Where only `transformers` can tell what its files make (`t2t.data.fast`), it is there from the beginning.
    """
    found = None if _is_bytes(spec) else fast.read(Path(spec))
    return load(spec) if found is None else HuggingFace(found, spec, partial(_opened, spec))


def _is_bytes(spec: str) -> bool:
    return spec == "bytes" or _class_in(Path(spec)) == "ByT5Tokenizer"


def _opened(spec: str) -> Any:
    """The tokenizer of `transformers`."""
    path = Path(spec)
    if path.suffix == ".gguf":
        return _auto(str(path.parent), spec, gguf_file=path.name)
    if path.is_file():
        return _sentencepiece(path)
    if path.is_dir() and not any(any(path.glob(name)) for name in ("tokenizer*", "*.model", "vocab.txt")):
        raise InputError(f"model.tokenizer: no tokenizer files in {spec}")
    return _auto(spec, spec)


def _class_in(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    return settings.get("tokenizer_class") if isinstance(settings, dict) else None


def _sentencepiece(path: Path) -> Any:
    # transformers reads such a file only inside a folder that names the class; T5's has the ids that T5 models want.
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "spiece.model").write_bytes(path.read_bytes())
        settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": fast.SENTINELS}
        (Path(name) / "tokenizer_config.json").write_text(json.dumps(settings))
        return _auto(name, str(path))


def _auto(source: str, name: str, **where: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except (OSError, ValueError, RuntimeError, ImportError, TypeError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"model.tokenizer: cannot load {name}: {reason}") from error


@dataclass(frozen=True)
class Pairs:
    """Tokenized examples, end tokens included, with the place in the files that each came from."""

    source: Ragged
    target: Ragged
    where: Sequence[str]
    cut_sources: int
    cut_targets: int
    longest_known: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where pair ``i`` came from, and its tokens."""
        return {"where": self.where[i], "source": self.source[i].tolist(), "target": self.target[i].tolist()}

    @property
    def longest(self) -> int:
        """The most tokens that a pair has on both sides."""
        return self.longest_known or int((self.source.lengths + self.target.lengths).max(initial=0))

    @property
    def fingerprint(self) -> str:
        """A digest of every token: two tables are equal when theirs are."""
        return f"{self.source.digest}-{self.target.digest}"


def tokenize(
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    max_source_length: int,
    max_target_length: int,
    end_sources: bool = True,
    begin_targets: bool = False,
) -> Pairs:
    """Token ids of all examples, each cut to its length with the end token kept; sources may go without one.

    Sources begin with what the tokenizer's models are used to, and targets if asked.

    >>> pairs = tokenize([Example("abcd", "b", "x:1")], Bytes(), max_source_length=3, max_target_length=3)
    >>> pairs.source[0], pairs.target[0], pairs.cut_sources
    (array([100, 101,   1], dtype=uint16), array([101,   1], dtype=uint16), 1)
    """
    where: list[str] = []
    dtype, cut = id_type(tokenizer.vocab_size), [0, 0]
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    lengths: tuple[list[int], list[int]] = ([], [])
    for block in _blocks(examples, 1000):
        where.extend(e.where for e in block)
        for side, texts, longest in (
            (0, [e.source for e in block], max_source_length),
            (1, [e.target for e in block], max_target_length),
        ):
            start = np.array(tokenizer.starts if side == 0 or begin_targets else [], dtype=dtype)
            end = np.array([tokenizer.eos_id] if side == 1 or end_sources else [], dtype=dtype)
            room = max(longest - len(start) - len(end), 0)
            encoded = tokenizer.encode_arrays(texts)
            cut[side] += sum(len(ids) > room for ids in encoded)
            parts[side].append(np.concatenate([part for ids in encoded for part in (start, ids[:room], end)]))
            lengths[side].extend(len(start) + min(len(ids), room) + len(end) for ids in encoded)
    nothing = np.zeros(0, dtype)
    source, target = (
        Ragged([Memory(np.concatenate([nothing, *flat]), np.append(0, np.cumsum(many, dtype=np.int64)))])
        for flat, many in zip(parts, lengths, strict=True)
    )
    return Pairs(source, target, tuple(where), *cut)


def _blocks(examples: Iterable[Example], size: int) -> Iterator[list[Example]]:
    it = iter(examples)
    while block := list(islice(it, size)):
        yield block
