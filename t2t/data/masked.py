"""What BERT learns from plain text: tokens that were masked, and whether one text follows another.

An example is a pure function of its number and a seed: another seed masks other tokens and draws other partners.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from t2t.data import order
from t2t.data.packing import IGNORE, Feature
from t2t.data.text import NOTHING, Documents
from t2t.data.tokens import Marks
from t2t.errors import InputError

SHARE = 0.15  # of the tokens are to be guessed
SHORT = 0.1  # of the pairs are shorter than they might be


@dataclass(frozen=True)
class Masking:
    """BERT's masking: 15% of the tokens, at most ``most`` of an example, are to be guessed; no special token is.

    Of these 80% become the mask, 10% another token, and 10% stay as they are. With ``whole_words`` all pieces of a word
    are taken or none.

    >>> marks = Marks(cls=2, sep=3, mask=4, ordinary=np.arange(20) > 4, continues=None)
    >>> tokens = np.array([2, 10, 11, 12, 13, 14, 15, 16, 17, 18, 3])
    >>> inputs, labels = Masking(marks, most=20)(tokens, np.random.default_rng(2))
    >>> inputs.tolist()
    [2, 10, 11, 4, 13, 14, 15, 16, 4, 18, 3]
    >>> labels.tolist()
    [-100, -100, -100, 12, -100, -100, -100, -100, 17, -100, -100]
    """

    marks: Marks
    most: int
    whole_words: bool = False

    def __post_init__(self) -> None:
        if self.whole_words and self.marks.continues is None:
            raise InputError("data.whole_words: this tokenizer's tokens do not tell where a word begins")

    def __call__(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels."""
        ordinary = self.marks.ordinary[tokens]
        begins = ordinary
        if self.whole_words:
            assert self.marks.continues is not None
            begins = ordinary & ~(self.marks.continues[tokens] & np.append(False, ordinary[:-1]))
        places = np.flatnonzero(ordinary)
        word = np.cumsum(begins)[places] - 1
        sizes = np.bincount(word).tolist()
        left = predictions(len(tokens), self.most)
        taken = np.zeros(len(sizes), dtype=bool)
        for w in rng.permutation(len(sizes)).tolist():
            if sizes[w] <= left:
                taken[w] = True
                left -= sizes[w]
            if not left:
                break
        chosen = places[taken[word]]
        inputs, labels = tokens.copy(), np.full(len(tokens), IGNORE)
        labels[chosen] = tokens[chosen]
        draw = rng.random(len(chosen))
        other = chosen[draw >= 0.9]
        inputs[chosen[draw < 0.8]] = self.marks.mask
        inputs[other] = rng.choice(self._ordinary_ids, len(other))
        return inputs, labels

    @cached_property
    def _ordinary_ids(self) -> np.ndarray:
        return np.flatnonzero(self.marks.ordinary)


def predictions(tokens: int, most: int) -> int:
    """How many of ``tokens``, special ones counted, are to be guessed.

    >>> predictions(128, most=20), predictions(512, most=77), predictions(3, most=20)
    (19, 77, 1)
    """
    return min(most, max(1, round(SHARE * tokens)))


def most_predictions(longest: int) -> int:
    """The most that examples of this length ask for, where nobody says.

    >>> most_predictions(128), most_predictions(512)
    (20, 77)
    """
    return math.ceil(SHARE * longest)


class Masked:
    """What the objectives of masked models have in common: there is no source, and an example has few labels."""

    words = 0
    predictions: int  # the most labels of one example


class _Passages(Masked):
    """Documents cut into passages ``ids[start:stop]``, each the heart of one example."""

    def __init__(self, documents: Documents, masking: Masking, longest: int, starts: np.ndarray, stops: np.ndarray):
        self.documents, self.masking = documents, masking
        self.starts, self.stops = starts, stops
        self.predictions = predictions(longest, masking.most)
        self.offsets = _offsets(documents)

    @property
    def longest(self) -> tuple[int, int]:
        """The most slots that any example takes in both streams."""
        return 0, int(self.sizes(np.arange(len(self)))[1].max(initial=0))

    @abstractmethod
    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most slots that each of these examples takes in both streams."""

    def __len__(self) -> int:
        return len(self.starts)

    def passage(self, i: int) -> np.ndarray:
        """The tokens of passage ``i``."""
        return self.documents.tokens.tokens(int(self.starts[i]), int(self.stops[i])).astype(np.int64)

    def document(self, i: int) -> int:
        """The document that passage ``i`` is of."""
        return int(np.searchsorted(self.offsets, self.starts[i], side="right")) - 1

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where passage ``i`` came from, and its tokens."""
        document = self.document(i)
        start = int(self.starts[i] - self.offsets[document])
        where = f"{self.documents.where[document]}, from token {start}"
        return {"where": where, "text": self.passage(i).tolist()}


class MaskedLM(_Passages):
    """Masked tokens of documents that never see one another; one longer than ``longest`` is cut into pieces.

    >>> from t2t.data.ragged import Ragged
    >>> documents = Documents(Ragged.of([[5, 6, 7], [8]], vocab_size=20), ("a.txt:1", "a.txt:3"), words=4)
    >>> marks = Marks(cls=2, sep=3, mask=4, ordinary=np.arange(20) > 4, continues=None)
    >>> examples = MaskedLM(documents, Masking(marks, most=1), longest=4)
    >>> [examples.feature(i, seed=3).inputs.tolist() for i in range(3)]
    [[2, 5, 4, 3], [2, 4, 3], [2, 4, 3]]
    """

    def __init__(self, documents: Documents, masking: Masking, longest: int) -> None:
        size, offsets = longest - 2, _offsets(documents)
        parts = [np.arange(start, stop, size) for start, stop in pairwise(offsets.tolist())]
        starts = np.concatenate([NOTHING, *parts])
        ends = np.repeat(offsets[1:], [len(part) for part in parts])
        super().__init__(documents, masking, longest, starts, np.minimum(starts + size, ends))
        self.fingerprint = f"{documents.fingerprint}-masked-{longest}-{masking.most}-{masking.whole_words:d}"

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots that each piece takes in both streams."""
        return np.zeros(len(index), dtype=np.int64), self.stops[index] - self.starts[index] + 2

    def feature(self, i: int, seed: int) -> Feature:
        """Piece ``i`` between its marks, masked as the seed says."""
        marks = self.masking.marks
        tokens = np.concatenate([[marks.cls], self.passage(i), [marks.sep]])
        return Feature(NOTHING, *self.masking(tokens, np.random.default_rng(seed)))


class NextSentence(_Passages):
    """Masked tokens of two texts, and whether the second follows the first.

    Documents are cut into passages of whole sentences (of a part, where one is too long), so that every token is in
    just one. An example is a passage beside what follows or precedes it in its document, or, half the time, beside what
    follows or precedes a passage of another document; this fills it up to the length that was drawn for it, ``longest``
    but for every tenth. Its own passage has from a quarter to three quarters of that. A document of one sentence has
    neighbours in other documents alone.

    ``sentences`` are the places in ``documents.tokens.ids`` where sentences end.

    >>> from t2t.data.ragged import Ragged
    >>> documents = Documents(Ragged.of([[5, 6, 7], [8, 9]], vocab_size=20), ("a.txt:1", "a.txt:4"), words=5)
    >>> marks = Marks(cls=2, sep=3, mask=4, ordinary=np.arange(20) > 4, continues=None)
    >>> examples = NextSentence(documents, np.array([2, 3, 4, 5]), Masking(marks, most=1), longest=16)
    >>> [examples.passage(i).tolist() for i in range(len(examples))]
    [[5, 6], [7], [8], [9]]
    >>> [(f.inputs.tolist(), f.types.tolist(), f.pair) for f in (examples.feature(0, seed) for seed in (0, 3))]
    [([2, 5, 6, 3, 4, 3], [0, 0, 0, 0, 1, 1], 0), ([2, 5, 6, 3, 9, 3], [0, 0, 0, 0, 1, 1], 1)]
    """

    def __init__(self, documents: Documents, sentences: np.ndarray, masking: Masking, longest: int) -> None:
        if np.count_nonzero(documents.tokens.lengths) < 2:
            reason = "needs two documents or more, to draw texts from another (a blank line parts those of .txt files)"
            raise InputError(f"data.objective: masked_lm_nsp {reason}")
        offsets = _offsets(documents)
        plan = list(_plan(offsets, sentences, longest - 3, order.key(documents.fingerprint, longest)))
        starts, stops, self.most = np.array(plan, dtype=np.int64).reshape(-1, 3).T
        super().__init__(documents, masking, longest, starts, stops)
        self.fingerprint = f"{documents.fingerprint}-pairs-{longest}-{masking.most}-{masking.whole_words:d}"
        self._edges = np.searchsorted(starts, offsets)  # the passages of document d are edges[d] to edges[d + 1]
        self._begun = np.flatnonzero(~np.isin(starts, offsets))  # passages that something precedes
        self._followed = np.flatnonzero(~np.isin(stops, offsets))  # passages that something follows

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most slots that each pair takes in both streams."""
        return np.zeros(len(index), dtype=np.int64), self.most[index] + 3

    def feature(self, i: int, seed: int) -> Feature:
        """Passage ``i`` and its partner of this seed, masked."""
        rng = np.random.default_rng(seed)
        document = self.document(i)
        first, last = self._edges[document : document + 2].tolist()
        alone = last - first == 1
        leads = i == first if not alone and i in (first, last - 1) else bool(rng.random() < 0.5)
        drawn = bool(alone or rng.random() < 0.5)
        partner = self._elsewhere(first, last, leads, rng) if drawn else i + 1 if leads else i - 1
        own, other = self.passage(i), self._beside(partner, int(self.most[i] - self.stops[i] + self.starts[i]), leads)
        one, two = (own, other) if leads else (other, own)
        marks = self.masking.marks
        tokens = np.concatenate([[marks.cls], one, [marks.sep], two, [marks.sep]])
        types = np.repeat([0, 1], [len(one) + 2, len(two) + 1])
        return Feature(NOTHING, *self.masking(tokens, rng), types, int(drawn))

    def _elsewhere(self, first: int, last: int, leads: bool, rng: np.random.Generator) -> int:
        """A passage outside ``first`` to ``last``, such as would stand there in its own document if there is one."""
        for passages in (self._begun if leads else self._followed, np.arange(len(self))):
            low, high = np.searchsorted(passages, (first, last))
            others = len(passages) - int(high - low)
            if others:
                break
        k = int(rng.integers(others))
        return int(passages[k if k < low else k + high - low])

    def _beside(self, partner: int, room: int, follows: bool) -> np.ndarray:
        """So many tokens of the partner's document, from the partner's first on, or up to its last."""
        document, tokens = self.document(partner), self.documents.tokens
        if follows:
            start = self.starts[partner]
            stop = min(start + room, self.offsets[document + 1])
        else:
            stop = self.stops[partner]
            start = max(stop - room, self.offsets[document])
        return tokens.tokens(int(start), int(stop)).astype(np.int64)


def _offsets(documents: Documents) -> np.ndarray:
    return np.append(0, np.cumsum(documents.tokens.lengths))


def _plan(offsets: np.ndarray, sentences: np.ndarray, longest: int, seed: int) -> Iterator[tuple[int, int, int]]:
    """Where passages start and stop, and how long each may get with its partner."""
    rng = np.random.default_rng(seed)
    for begin, end in pairwise(offsets.tolist()):
        inside = sentences[np.searchsorted(sentences, begin, "right") : np.searchsorted(sentences, end)]
        at = begin
        while at < end:
            most = longest if rng.random() >= SHORT else int(rng.integers(2, longest + 1))
            least = max(1, most // 4)
            cap = min(end, at + int(rng.integers(least, max(least, most - least) + 1)))
            if at == begin and len(inside):  # something is left for the second passage
                cap = min(cap, int(inside[-1]))
            whole = inside[np.searchsorted(inside, at, "right") : np.searchsorted(inside, cap, "right")]
            stop = int(whole[-1]) if len(whole) and cap < end else cap
            yield at, stop, most
            at = stop
