"""What is learned from plain text: the next token, corrupted spans, the rest of a passage.

Each objective is a pure function of tokens and seed; no token of a document is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from t2t.data.packing import Feature
from t2t.data.ragged import Ragged

NOTHING = np.zeros(0, dtype=np.int64)
GROUP = 16
"""Documents of which one number is kept, to find a piece of theirs."""


@dataclass(frozen=True)
class Documents:
    """Tokenized documents, where each begins in the files, and the words of all.

    Here each ends with the end token; those of masked models have none (`t2t.data.masked`).

    >>> Documents(Ragged.of([[5, 6, 1], [7, 1]], vocab_size=384), ("a.txt:1", "a.txt:4"), words=2).tokens[1]
    array([7, 1], dtype=uint16)
    """

    tokens: Ragged
    where: Sequence[str]
    words: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        """A digest of every token: two sets of documents are equal when theirs are."""
        return self.tokens.digest


class DocumentLM:
    """The next token, of documents that never see one another: each begins after the start token and ends with the end.

    A document longer than ``block`` is cut into pieces; a piece begins with the last token of the one before, so that
    every token is predicted once. A number is kept for every `GROUP` documents, to find their pieces.

    >>> documents = Documents(Ragged.of([[5, 6, 7, 1], [8, 1]], vocab_size=384), ("a.txt:1", "a.txt:2"), words=2)
    >>> examples = DocumentLM(documents, start_id=2, block=3)
    >>> [(f.inputs.tolist(), f.labels.tolist()) for f in (examples.feature(i, seed=0) for i in range(len(examples)))]
    [([2, 5, 6], [5, 6, 7]), ([7], [1]), ([2, 8], [8, 1])]
    """

    def __init__(self, documents: Documents, start_id: int, block: int) -> None:
        self.documents, self.start_id, self.block = documents, start_id, block
        self.words = documents.words
        self.fingerprint = f"{documents.fingerprint}-lm-{block}"
        self.longest = 0, min(block, documents.tokens.longest)
        parts = [self._pieces(start, start + 1024 * GROUP) for start in range(0, len(documents), 1024 * GROUP)]
        groups = [np.add.reduceat(part, np.arange(0, len(part), GROUP)) for part in parts]
        self._ends = np.cumsum(np.concatenate([NOTHING, *groups]))  # of the groups, in pieces

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots that each piece takes in both streams."""
        places = np.array([self._place(i) for i in index.tolist()], dtype=np.int64).reshape(-1, 2)
        left = self.documents.tokens.sizes(places[:, 0]) - places[:, 1]
        return np.zeros(len(index), dtype=np.int64), np.minimum(left, self.block)

    def feature(self, i: int, seed: int) -> Feature:
        """Piece ``i``."""
        document, start = self._place(i)
        whole = self.documents.tokens[document]
        labels = whole[start : start + self.block].astype(np.int64)
        before = self.start_id if start == 0 else whole[start - 1]
        return Feature(NOTHING, np.append(before, labels[:-1]), labels)

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where piece ``i`` came from, and its tokens."""
        document, start = self._place(i)
        text = self.documents.tokens[document][start : start + self.block].tolist()
        return {"where": f"{self.documents.where[document]}, from token {start}", "text": text}

    def _place(self, i: int) -> tuple[int, int]:
        """The document that piece ``i`` is of, and where in it the piece begins."""
        group = int(np.searchsorted(self._ends, i, side="right"))
        within = i - (int(self._ends[group - 1]) if group else 0)
        ends = np.cumsum(self._pieces(group * GROUP, (group + 1) * GROUP))
        document = int(np.searchsorted(ends, within, side="right"))
        first = int(ends[document - 1]) if document else 0
        return group * GROUP + document, (within - first) * self.block

    def _pieces(self, start: int, stop: int) -> np.ndarray:
        """How many pieces each of some documents has."""
        return -(-lengths(self.documents.tokens, start, min(stop, len(self.documents))) // self.block)


def lengths(tokens: Ragged, start: int, stop: int) -> np.ndarray:
    """How long sequences ``start`` to ``stop`` are, by one reading where they lie side by side.

    >>> lengths(Ragged.of([[5, 6, 1], [7], [8, 1]], vocab_size=384), 1, 3)
    array([1, 2])
    """
    (shard, first), (other, last) = tokens.place(start), tokens.place(stop - 1)
    if shard == other and last - first == stop - 1 - start:
        return np.diff(tokens.shards[shard].offsets(first, last + 1))
    return tokens.sizes(np.arange(start, stop))


class Windows:
    """All documents one after the other, cut into windows of ``size`` tokens."""

    def __init__(self, documents: Documents, size: int) -> None:
        self.documents, self.tokens, self.size = documents, documents.tokens, size

    def __len__(self) -> int:
        return -(-self.tokens.total // self.size)

    def __getitem__(self, i: int) -> np.ndarray:
        window = self.tokens.tokens(i * self.size, min((i + 1) * self.size, self.tokens.total))
        return window.astype(np.int64)

    def sizes(self, index: np.ndarray) -> np.ndarray:
        """How long each of these is: all alike but the last."""
        return np.minimum(self.tokens.total - index * self.size, self.size)

    @property
    def longest(self) -> int:
        """How long the longest is."""
        return min(self.tokens.total, self.size)

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where window ``i`` came from, and its tokens."""
        document, _ = self.tokens.locate(i * self.size)
        return {"where": self.documents.where[document], "text": self[i].tolist()}


class BlockLM:
    """The next token, over blocks of one length cut from all documents joined, as the classic scripts have it.

    >>> documents = Documents(Ragged.of([[5, 6, 7, 1], [8, 1]], vocab_size=384), ("a.txt:1", "a.txt:2"), words=2)
    >>> examples = BlockLM(documents, start_id=2, block=4)
    >>> [(f.inputs.tolist(), f.labels.tolist()) for f in (examples.feature(i, seed=0) for i in range(len(examples)))]
    [([2, 5, 6, 7], [5, 6, 7, 1]), ([1, 8], [8, 1])]
    """

    def __init__(self, documents: Documents, start_id: int, block: int) -> None:
        self.documents, self.windows, self.start_id = documents, Windows(documents, block), start_id
        self.fingerprint = f"{documents.fingerprint}-blocks-{block}"
        self.tell, self.words = self.windows.tell, documents.words
        self.longest = 0, self.windows.longest

    def __len__(self) -> int:
        return len(self.windows)

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots that each block takes in both streams."""
        return np.zeros(len(index), dtype=np.int64), self.windows.sizes(index)

    def feature(self, i: int, seed: int) -> Feature:
        """Block ``i``; it begins after the last token of the one before."""
        labels = self.windows[i]
        before = self.documents.tokens.tokens(i * self.windows.size - 1, i * self.windows.size) if i else self.start_id
        return Feature(NOTHING, np.append(before, labels[:-1]), labels)


def span_lengths(tokens: int, density: float, mean_span: float) -> tuple[int, int, int]:
    """How many of ``tokens`` are noise, in how many spans, and how long that makes the source with its end token.

    >>> span_lengths(568, 0.15, 3.0)
    (85, 28, 512)
    """
    noise = min(max(round(tokens * density), 1), max(tokens - 1, 1))
    spans = min(max(round(noise / mean_span), 1), noise, max(tokens - noise, 1))
    return noise, spans, tokens - noise + spans + 1


def span_window(source_length: int, density: float, mean_span: float) -> int:
    """The most tokens that, once corrupted, fit into a source of this length with its end token.

    >>> span_window(512, 0.15, 3.0)
    568
    """
    tokens = source_length - 1
    while span_lengths(tokens + 1, density, mean_span)[2] <= source_length:
        tokens += 1
    return tokens


class SpanCorruption:
    """T5's pretraining: spans of a window give way to sentinels, and the target says what they were.

    Windows are as long as makes the source exactly ``longest`` tokens.

    >>> documents = Documents(Ragged.of([[*range(10, 19), 1]], vocab_size=384), ("a.txt:1",), words=9)
    >>> examples = SpanCorruption(documents, 0, 1, sentinels=[259, 260], longest=9, density=0.3, mean_span=1.5)
    >>> feature = examples.feature(0, seed=3)
    >>> feature.source.tolist(), feature.labels.tolist()
    ([10, 11, 12, 13, 14, 259, 16, 260, 1], [259, 15, 260, 17, 18, 1])
    """

    def __init__(
        self,
        documents: Documents,
        start_id: int,
        eos_id: int,
        sentinels: Sequence[int],
        longest: int,
        density: float = 0.15,
        mean_span: float = 3.0,
    ) -> None:
        self.documents, self.start_id, self.eos_id, self.sentinels = documents, start_id, eos_id, np.array(sentinels)
        self.density, self.mean_span = density, mean_span
        size = span_window(longest, density, mean_span)
        # Sentinels are few: a window may not need more of them than there are.
        while span_lengths(size, density, mean_span)[1] > len(sentinels):
            size -= 1
        self.windows = Windows(documents, size)
        self.fingerprint = f"{documents.fingerprint}-spans-{size}-{density:g}-{mean_span:g}"
        self.tell, self.words = self.windows.tell, documents.words

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def longest(self) -> tuple[int, int]:
        source, target = self.sizes(np.zeros(1, dtype=np.int64))
        return int(source[0]), int(target[0])

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots that each window takes in both streams."""
        told = [span_lengths(size, self.density, self.mean_span) for size in self.windows.sizes(index).tolist()]
        noise, spans, source = np.array(told, dtype=np.int64).reshape(-1, 3).T
        return source, noise + spans + 1

    def feature(self, i: int, seed: int) -> Feature:
        """Window ``i``, its spans drawn by the seed."""
        window = self.windows[i]
        noise, spans, _ = span_lengths(len(window), self.density, self.mean_span)
        mask = noise_mask(len(window), noise, spans, np.random.default_rng(seed))
        source = np.append(corrupted(window, mask, self.sentinels), self.eos_id)
        target = np.append(corrupted(window, ~mask, self.sentinels), self.eos_id)
        return Feature(source, np.append(self.start_id, target[:-1]), target)


def noise_mask(tokens: int, noise: int, spans: int, rng: np.random.Generator) -> np.ndarray:
    """Which tokens are noise: ``noise`` of them in ``spans`` spans, kept text first, every division equally likely.

    >>> noise_mask(10, 3, 2, np.random.default_rng(0)).astype(int)
    array([0, 0, 0, 0, 0, 0, 1, 1, 0, 1])
    """
    if tokens < 2:
        return np.ones(tokens, dtype=bool)
    runs = np.empty(2 * spans, dtype=np.int64)
    runs[0::2], runs[1::2] = _parts(tokens - noise, spans, rng), _parts(noise, spans, rng)
    return np.repeat(np.arange(2 * spans) % 2 == 1, runs)


def _parts(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """``total`` as a sum of ``count`` positive numbers."""
    cuts = np.sort(rng.choice(total - 1, count - 1, replace=False) + 1) if count > 1 else np.zeros(0, np.int64)
    return np.diff(cuts, prepend=0, append=total)


def corrupted(tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """Tokens of which each run in ``mask`` gave way to a sentinel, the next one each time.

    >>> corrupted(np.array([5, 6, 7, 8]), np.array([False, True, True, False]), np.array([99, 98]))
    array([ 5, 99,  8])
    """
    begins = mask & ~np.append(False, mask[:-1])
    replaced = np.where(begins, sentinels[np.minimum(np.cumsum(begins), len(sentinels)) - 1], tokens)
    return replaced[~mask | begins]


class PrefixLM:
    """The rest of a passage from its beginning: windows as long as the longer side, cut where the seed says.

    >>> documents = Documents(Ragged.of([[5, 6, 7, 8, 1]], vocab_size=384), ("a.txt:1",), words=4)
    >>> feature = PrefixLM(documents, start_id=0, eos_id=1, max_source=6, max_target=6).feature(0, seed=1)
    >>> feature.source.tolist(), feature.labels.tolist()
    ([5, 6, 1], [7, 8, 1, 1])
    """

    def __init__(self, documents: Documents, start_id: int, eos_id: int, max_source: int, max_target: int) -> None:
        self.documents, self.start_id, self.eos_id = documents, start_id, eos_id
        self.max_source, self.max_target = max_source, max_target
        self.windows = Windows(documents, max(max_source, max_target) - 1)  # an end token on either side
        self.fingerprint = f"{documents.fingerprint}-prefix-{max_source}-{max_target}"
        self.tell, self.words = self.windows.tell, documents.words

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def longest(self) -> tuple[int, int]:
        longest = self.windows.longest + 1
        return min(longest, self.max_source), min(longest, self.max_target)

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most slots that each window may take in both streams."""
        lengths = self.windows.sizes(index) + 1
        return np.minimum(lengths, self.max_source), np.minimum(lengths, self.max_target)

    def feature(self, i: int, seed: int) -> Feature:
        """Window ``i``, cut anywhere that leaves neither side longer than it may be."""
        window = self.windows[i]
        least, most = max(0, len(window) - self.max_target + 1), min(len(window), self.max_source - 1)
        least, most = min(max(1, least), most), max(min(len(window) - 1, most), least)  # something on either side
        cut = int(np.random.default_rng(seed).integers(least, max(least, most) + 1))
        source, target = np.append(window[:cut], self.eos_id), np.append(window[cut:], self.eos_id)
        return Feature(source, np.append(self.start_id, target[:-1]), target)
