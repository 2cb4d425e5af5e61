"""What is learned from an example: pure functions of its tokens and a random generator.

An objective holds the tokenized examples and makes a `Feature` of each when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from t2t.data.packing import IGNORE, Feature
from t2t.data.tokens import Bytes, Pairs

_BYTES = Bytes()
MASK = 259  # the first sentinel of the byte vocabulary
_MASK_CHARACTER = "\0"  # never in the text: sources refuse it


class Objective(Protocol):
    """What a loader takes its examples from."""

    words: int  # of the text, where perplexity is told by the word; else 0

    @property
    def fingerprint(self) -> str:
        """A digest of every token: two are equal when theirs are."""

    @property
    def longest(self) -> tuple[int, int]:
        """The most slots that any example takes in both streams."""

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most slots that each of these examples takes in both streams."""

    def __len__(self) -> int: ...

    def feature(self, i: int, seed: int) -> Feature:
        """Example ``i``; the seed, another one in every epoch, decides what chance has a part in."""

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where example ``i`` came from, and its tokens, for a person to look into."""


def features_of(examples: Objective, index: np.ndarray, seeds: Iterable[int]) -> list[Feature]:
    """Several examples and their seeds: read together by objectives that have ``features``, one by one by others."""
    if hasattr(examples, "features"):
        found: list[Feature] = examples.features(index, seeds)
        return found
    return [examples.feature(i, seed) for i, seed in zip(index.tolist(), seeds, strict=True)]


class Seq2Seq:
    """Pairs as they are, for a model with a decoder, which begins after ``start_id``.

    >>> from t2t.data.tasks import Example
    >>> from t2t.data.tokens import tokenize
    >>> pairs = tokenize([Example("ab", "c", "x:1")], Bytes(), 8, 8)
    >>> Seq2Seq(pairs, start_id=0).feature(0, seed=0)
    Feature(source=array([100, 101,   1], dtype=uint16), inputs=array([  0, 102], dtype=uint16), \
labels=array([102,   1], dtype=uint16), types=None, pair=-100)
    """

    words = 0

    def __init__(self, pairs: Pairs, start_id: int) -> None:
        self.pairs, self.start_id = pairs, start_id
        self.fingerprint, self.tell = pairs.fingerprint, pairs.tell

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def longest(self) -> tuple[int, int]:
        return self.pairs.source.longest, self.pairs.target.longest

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.pairs.source.sizes(index), self.pairs.target.sizes(index)

    def feature(self, i: int, seed: int) -> Feature:
        return self._feature(self.pairs.source[i], self.pairs.target[i])

    def features(self, index: np.ndarray, seeds: Iterable[int]) -> list[Feature]:
        return [*map(self._feature, self.pairs.source.many(index), self.pairs.target.many(index))]

    def _feature(self, source: np.ndarray, target: np.ndarray) -> Feature:
        inputs = np.empty(len(target), np.promote_types(target.dtype, np.min_scalar_type(self.start_id)))
        inputs[:1], inputs[1:] = self.start_id, target[:-1]
        return Feature(source, inputs, target)


class CausalPairs:
    """Pairs for a model that only goes on: the source, then the target and the end token, which it is to say.

    Sources have no end token, and at least one token. With ``both`` it is to say the source too.

    >>> from t2t.data.ragged import Ragged
    >>> pairs = Pairs(Ragged.of([[7, 8]], 384), Ragged.of([[9, 1]], 384), ("x:1",), 0, 0)
    >>> feature = CausalPairs(pairs).feature(0, seed=0)
    >>> feature.inputs, feature.labels
    (array([7, 8, 9], dtype=uint16), array([-100,    9,    1]))
    """

    words = 0

    def __init__(self, pairs: Pairs, both: bool = False) -> None:
        self.pairs, self.both = pairs, both
        self.fingerprint, self.tell = f"{pairs.fingerprint}-causal", pairs.tell

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def longest(self) -> tuple[int, int]:
        return 0, self.pairs.longest - 1

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots that each pair takes in both streams: the source's has none."""
        both = self.pairs.source.sizes(index) + self.pairs.target.sizes(index) - 1
        return np.zeros_like(both), both

    def feature(self, i: int, seed: int) -> Feature:
        """Pair ``i``."""
        return self._feature(self.pairs.source[i], self.pairs.target[i])

    def features(self, index: np.ndarray, seeds: Iterable[int]) -> list[Feature]:
        """Several pairs."""
        return [*map(self._feature, self.pairs.source.many(index), self.pairs.target.many(index))]

    def _feature(self, source: np.ndarray, target: np.ndarray) -> Feature:
        tokens = np.concatenate([source, target])
        labels = tokens[1:] if self.both else np.concatenate([np.full(len(source) - 1, IGNORE), target])
        return Feature(tokens[:0], tokens[:-1], labels)


class Prompted:
    """Another objective's examples with the ids of a soft prompt before each: before its source where it has one.

    >>> from t2t.data.ragged import Ragged
    >>> pairs = Pairs(Ragged.of([[7, 8]], 384), Ragged.of([[9, 1]], 384), ("x:1",), 0, 0)
    >>> Prompted(Seq2Seq(pairs, start_id=0), range(384, 387), "seq2seq").feature(0, seed=0).source
    array([384, 385, 386,   7,   8])
    >>> feature = Prompted(CausalPairs(pairs), range(384, 387), "causal").feature(0, seed=0)
    >>> feature.inputs, feature.labels
    (array([384, 385, 386,   7,   8,   9]), array([-100, -100, -100, -100,    9,    1]))
    """

    def __init__(self, inner: Objective, ids: range | np.ndarray, kind: str) -> None:
        self.inner, self.ids, self.kind = inner, np.array(ids, dtype=np.int64), kind
        self.fingerprint, self.tell, self.words = f"{inner.fingerprint}-prompt-{len(ids)}", inner.tell, inner.words

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def longest(self) -> tuple[int, int]:
        source, target = self.inner.longest
        return (source + len(self.ids), target) if self.kind == "seq2seq" else (source, target + len(self.ids))

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        source, target = self.inner.sizes(index)
        return (source + len(self.ids), target) if self.kind == "seq2seq" else (source, target + len(self.ids))

    def feature(self, i: int, seed: int) -> Feature:
        return self._prompted(self.inner.feature(i, seed))

    def features(self, index: np.ndarray, seeds: Iterable[int]) -> list[Feature]:
        return [self._prompted(feature) for feature in features_of(self.inner, index, seeds)]

    def _prompted(self, feature: Feature) -> Feature:
        if self.kind == "seq2seq":
            return feature._replace(source=np.append(self.ids, feature.source))
        unsaid = np.full(len(self.ids), IGNORE)
        return feature._replace(inputs=np.append(self.ids, feature.inputs), labels=np.append(unsaid, feature.labels))


class CharacterNoise(Seq2Seq):
    """Targets of byte tokens, to be restored from what `character_noise` makes of them; the end token stays."""

    def __init__(self, pairs: Pairs, start_id: int, longest: int) -> None:
        super().__init__(pairs, start_id)
        self.most = longest

    @property
    def longest(self) -> tuple[int, int]:
        target = self.pairs.target.longest
        return min(target + 8, self.most), target  # a two-byte letter may replace a one-byte one

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        target = self.pairs.target.sizes(index)
        return np.minimum(target + 8, self.most), target

    def feature(self, i: int, seed: int) -> Feature:
        return self._noisy(self.pairs.target[i], seed)

    def features(self, index: np.ndarray, seeds: Iterable[int]) -> list[Feature]:
        return [*map(self._noisy, self.pairs.target.many(index), seeds)]

    def _noisy(self, target: np.ndarray, seed: int) -> Feature:
        noisy, most = character_noise(target, np.random.default_rng(seed)), min(len(target) + 8, self.most)
        if len(noisy) > most:
            noisy = np.append(noisy[: most - 1], noisy[-1:])
        return self._feature(noisy, target)


def character_noise(target: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Byte tokens in which letters were spoilt, to be restored: from none up to half of them, every letter alike.

    A spoilt letter becomes a mask or, as often, a letter drawn from the same text.

    >>> clean = np.array([*Bytes().encode("o casă mică"), 1])
    >>> noisy = character_noise(clean, np.random.default_rng(7))
    >>> Bytes().decode(noisy), int((noisy == MASK).sum())
    ('o caă mccă', 1)
    """
    characters = list(_BYTES.decode(target.tolist()))
    letters = [i for i, c in enumerate(characters) if c.isalpha()]
    spoilt = rng.random(len(letters)) < rng.uniform(0.0, 0.5)
    masked = rng.random(len(letters)) < 0.5
    drawn = rng.integers(0, max(1, len(letters)), len(letters))
    spoilt_letters = [_MASK_CHARACTER if m else characters[letters[d]] for m, d in zip(masked, drawn, strict=True)]
    for i, letter, spoil in zip(letters, spoilt_letters, spoilt, strict=True):
        if spoil:
            characters[i] = letter
    noisy = np.asarray(_BYTES.encode("".join(characters)), dtype=target.dtype)
    noisy[noisy == 3] = MASK
    return np.append(noisy, target[-1:])
