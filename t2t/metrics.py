"""How good generated texts are: BLEU, chrF, ROUGE, exact match, word and character errors, word accuracy.

A metric takes pairs one by one and keeps sums, never the texts, so a set of any size fits. BLEU and chrF run from
0 to 100, all others from 0 to 1 (error rates may pass 1). A metric of your own, ``package.module:function``, is called
once with all predictions and all references, which are kept for it, and returns a number or a dict of numbers.

>>> evaluate(["exact_match", "wer"], ["o casă mare", "un om"], ["o casă mare", "un pom"])
{'exact_match': 0.5, 'wer': 0.2}
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Protocol

import numpy as np

from t2t.errors import InputError, did_you_mean


class Metric(Protocol):
    """What takes pairs and gives figures.

    >>> metric = build(["exact_match"])[0]
    >>> metric.add("da", "da")
    >>> metric.result()
    {'exact_match': 1.0}
    """

    def add(self, prediction: str, reference: str) -> None:
        """Take one pair."""

    def result(self) -> dict[str, float]:
        """The figures over all pairs so far, by name."""


def build(names: Sequence[str]) -> list[Metric]:
    """A fresh metric for each name.

    >>> build(["blue"])
    Traceback (most recent call last):
    t2t.errors.InputError: metric 'blue' is unknown (did you mean bleu?): bleu, chrf, rouge, exact_match, wer, cer, \
word_accuracy, or package.module:function
    """
    for name in names:
        if name not in _METRICS and not all(name.partition(":")):
            known = f"{', '.join(NAMES)}, or package.module:function"
            raise InputError(f"metric {name!r} is unknown{did_you_mean(name, NAMES)}: {known}")
    return [_METRICS[name]() if name in _METRICS else _Custom(name) for name in names]


def evaluate(names: Sequence[str], predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """All figures of all named metrics.

    >>> evaluate(["rouge"], ["the cat sat"], ["the cat sat down"])["rouge1"]
    0.8571428571428571
    """
    if len(predictions) != len(references):
        raise InputError(f"{len(predictions)} predictions for {len(references)} references: there must be one for each")
    if not references:
        raise InputError("nothing to evaluate: there are no references")
    metrics = build(names)
    for prediction, reference in zip(predictions, references, strict=True):
        for metric in metrics:
            metric.add(prediction, reference)
    return {key: value for metric in metrics for key, value in metric.result().items()}


def better(name: str, new: float, old: float) -> bool:
    """Whether a figure improved: losses and error rates fall, all else (custom metrics too) rises.

    >>> better("loss", 1.5, 2.0), better("bleu", 30.0, 30.0)
    (True, False)
    """
    return new < old if name in _FALL else new > old


_FALL = ("loss", "masked_loss", "next_sentence_loss", "perplexity", "word_perplexity", "wer", "cer")


def bootstrap_interval(
    counts: Sequence[tuple[float, float]], samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """The 95% interval of a ratio over a set, by drawing its (part, whole) pairs, one a text, anew with replacement.

    >>> counts = [RATIOS["word_accuracy"](prediction, "a b c d") for prediction in ("a b c d", "a b c x", "a x x d")]
    >>> bootstrap_interval(counts)
    (0.5, 1.0)
    """
    table, random = np.array(counts, dtype=float), np.random.default_rng(seed)
    sums = [table[random.integers(len(table), size=len(table))].sum(axis=0) for _ in range(samples)]
    low, high = np.quantile([part / max(whole, 1) for part, whole in sums], (0.025, 0.975))
    return float(low), float(high)


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions that turn one into the other.

    Bit-parallel (Myers 1999, in the form of Hyyrö 2003): a column of the table is two integers, its +1 and -1 steps.

    >>> edit_distance("kitten", "sitting"), edit_distance(["un", "pom"], ["un", "om"])
    (3, 1)
    """
    if len(a) < len(b):
        a, b = b, a  # long integers are cheap, rounds of the loop are not
    masks, full = _masks(a)
    distance, plus, minus = len(a), full, 0
    for item in b:
        match = masks.get(item, 0)
        diagonal = (((match & plus) + plus) ^ plus) | match | minus
        up, down = minus | ~(diagonal | plus), plus & diagonal
        distance += bool(up & (full + 1) >> 1) - bool(down & (full + 1) >> 1)
        up, down = up << 1 | 1, down << 1
        plus, minus = (down | ~(diagonal | up)) & full, up & diagonal & full
    return distance


def _masks(items: Sequence[Hashable]) -> tuple[dict[Hashable, int], int]:
    """For each distinct item the positions that hold it, as bits; and the bits of all positions."""
    masks: dict[Hashable, int] = {}
    for i, item in enumerate(items):
        masks[item] = masks.get(item, 0) | 1 << i
    return masks, (1 << len(items)) - 1


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, bit-parallel as above (Hyyrö 2004)."""
    masks, full = _masks(a)
    open_ = full
    for item in b:
        taken = open_ & masks.get(item, 0)
        open_ = ((open_ + taken) | (open_ - taken)) & full
    return len(a) - open_.bit_count()


def _kept_words(prediction: Sequence[str], reference: Sequence[str]) -> int:
    """Reference words matched by an alignment of the fewest edits; where several have the fewest, by the best of them.

    The usual table, row by row, with the cost of an edit above that of all matches together: edits * cost - matches.
    """
    ids: dict[str, int] = {}
    words = np.array([ids.setdefault(word, len(ids)) for word in reference], dtype=np.int64)
    edit = len(reference) + 1
    ramp = edit * np.arange(len(reference) + 1)
    row = ramp
    for word in prediction:
        aligned = row[:-1] + np.where(words == ids.get(word, -1), -1, edit)
        row = np.append(row[0] + edit, np.minimum(aligned, row[1:] + edit))
        # A reference word left out costs one edit more than its left neighbour: a running minimum along the ramp.
        row = np.minimum.accumulate(row - ramp) + ramp
    return int(-row[-1] % edit)


def _exact_match(prediction: str, reference: str) -> tuple[int, int]:
    return int(prediction == reference), 1


def _word_errors(prediction: str, reference: str) -> tuple[int, int]:
    words = reference.split()
    return edit_distance(prediction.split(), words), len(words)


def _character_errors(prediction: str, reference: str) -> tuple[int, int]:
    return edit_distance(prediction, reference), len(reference)


def _word_accuracy(prediction: str, reference: str) -> tuple[int, int]:
    words = reference.split()
    return _kept_words(prediction.split(), words), len(words)


# Metrics that are a ratio over the whole set: the (part, whole) that one pair adds. Words are split at white space;
# nothing is normalised, so case, punctuation and the composition of accents count.
RATIOS: Mapping[str, Callable[[str, str], tuple[int, int]]] = {
    "exact_match": _exact_match,
    "wer": _word_errors,
    "cer": _character_errors,
    "word_accuracy": _word_accuracy,
}


class _Ratio:
    def __init__(self, name: str) -> None:
        self.name, self.part, self.whole = name, 0, 0

    def add(self, prediction: str, reference: str) -> None:
        part, whole = RATIOS[self.name](prediction, reference)
        self.part, self.whole = self.part + part, self.whole + whole

    def result(self) -> dict[str, float]:
        return {self.name: self.part / max(self.whole, 1)}


class _Bleu:
    """sacrebleu's corpus BLEU with its defaults: a pair's score carries the counts, their sums make the score."""

    def __init__(self) -> None:
        try:
            from sacrebleu.metrics import BLEU
        except ModuleNotFoundError as error:
            raise InputError(f"metric 'bleu' needs the package sacrebleu ({error}): pip install sacrebleu") from None
        self.scorer = BLEU()
        self.correct, self.total = np.zeros((2, self.scorer.max_ngram_order), dtype=np.int64)
        self.prediction_words = self.reference_words = 0

    def add(self, prediction: str, reference: str) -> None:
        score = self.scorer.corpus_score([prediction], [[reference]])
        self.correct += score.counts
        self.total += score.totals
        self.prediction_words += score.sys_len
        self.reference_words += score.ref_len

    def result(self) -> dict[str, float]:
        counts = self.correct.tolist(), self.total.tolist(), self.prediction_words, self.reference_words
        return {"bleu": self.scorer.compute_bleu(*counts, smooth_method=self.scorer.smooth_method).score}


class _Chrf:
    """Corpus chrF2 as sacrebleu computes it by default; ours, for sacrebleu does not give out the counts of a pair."""

    orders = range(1, 7)

    def __init__(self) -> None:
        self.counts = np.zeros((len(self.orders), 3), dtype=np.int64)  # predicted, in the reference, in both

    def add(self, prediction: str, reference: str) -> None:
        prediction, reference = "".join(prediction.split()), "".join(reference.split())
        for n, counts in zip(self.orders, self.counts, strict=True):
            ours, theirs = _ngrams(prediction, n), _ngrams(reference, n)
            # A reference too short for this order holds nothing against the prediction.
            counts += (ours.total() if theirs else 0, theirs.total(), (ours & theirs).total())

    def result(self) -> dict[str, float]:
        used = [(both / ours, both / theirs) for ours, theirs, both in self.counts.tolist() if ours and theirs]
        precision, recall = (sum(side) / len(used) for side in zip(*used, strict=True)) if used else (0.0, 0.0)
        return {"chrf": 100 * (5 * precision * recall / (4 * precision + recall)) if precision + recall else 0.0}


class _Rouge:
    """Mean F1 of unigrams, bigrams and the longest common subsequence, as rouge-score gives them without stemming.

    Its words are runs of a-z and 0-9 after lower-casing: other letters part words, so it fits English best.
    """

    def __init__(self) -> None:
        self.pairs, self.sums = 0, dict.fromkeys(("rouge1", "rouge2", "rougeL"), 0.0)

    def add(self, prediction: str, reference: str) -> None:
        ours, theirs = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, reference))
        self.pairs += 1
        for n in (1, 2):
            overlap = (_ngrams(ours, n) & _ngrams(theirs, n)).total()
            self.sums[f"rouge{n}"] += _f1(overlap, len(ours) - n + 1, len(theirs) - n + 1)
        self.sums["rougeL"] += _f1(_common_subsequence(ours, theirs), len(ours), len(theirs))

    def result(self) -> dict[str, float]:
        return {name: value / max(self.pairs, 1) for name, value in self.sums.items()}


class _Custom:
    """A function of all predictions and all references: the one metric that must keep the texts until the end."""

    def __init__(self, name: str) -> None:
        self.name, self.function = name, _import(name)
        self.predictions: list[str] = []
        self.references: list[str] = []

    def add(self, prediction: str, reference: str) -> None:
        self.predictions.append(prediction)
        self.references.append(reference)

    def result(self) -> dict[str, float]:
        value = self.function(self.predictions, self.references)
        figures = value if isinstance(value, Mapping) else {self.name.partition(":")[2]: value}
        for figure in figures.values():
            if not isinstance(figure, Real):
                raise InputError(f"metric {self.name}: must return a number or a dict of numbers, got {value!r}")
        return {str(key): float(figure) for key, figure in figures.items()}


def _import(name: str) -> Callable[[list[str], list[str]], Any]:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"metric {name}: {error} (is its folder in PYTHONPATH?)") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        raise InputError(f"metric {name}: no function {attribute!r} in {module}{did_you_mean(attribute, vars(found))}")
    return function


def _ngrams(items: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(items[i:] for i in range(n)), strict=False))


def _f1(overlap: int, predicted: int, expected: int) -> float:
    if overlap == 0:
        return 0.0
    precision, recall = overlap / predicted, overlap / expected
    return 2 * precision * recall / (precision + recall)


_METRICS: Mapping[str, Callable[[], Metric]] = {
    "bleu": _Bleu,
    "chrf": _Chrf,
    "rouge": _Rouge,
    **{name: partial(_Ratio, name) for name in RATIOS},
}
NAMES = tuple(_METRICS)
