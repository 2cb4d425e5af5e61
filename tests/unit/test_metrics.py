"""Text metrics against their standard implementations and against plain tables."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from t2t import metrics
from t2t.errors import InputError

# (prediction, reference)
SENTENCES = [
    ("The committee approved the budget on Monday.", "The committee approved the budget for 2024 on Monday."),
    ("It's raining; we'll stay at home.", "It is raining, so we will stay home."),
    ("", "Nothing was said about the price of $3,500.50."),
    ("He paid 12.5% more than last year - a record!", "He paid 12.5% more than last year, a record."),
    ("Și-a amintit că fata își uitase cărțile în mașină.", "Şi-a amintit că fata îşi uitase cărţile în maşină."),
    ("word", "word"),
    ("Die Straße ist wegen Bauarbeiten gesperrt .", "Die Straße ist wegen der Bauarbeiten gesperrt."),
    ("the the the the the the", "the cat is on the mat"),
    ("   \t ", "A line of white space was predicted."),
    ("彼は昨日東京へ行った。", "彼は昨日、東京に行きました。"),
    ("Completely unrelated output &quot;here&quot;", "No token of this one is shared by it"),
    ("an answer to nothing", ""),
    ("", ""),
]

SUMMARIES = [
    (
        "We propose a sparse attention. It is 3.2x faster than the baseline, and loses no accuracy.",
        "A sparse attention mechanism is proposed. It runs 3x faster than the baseline without loss of accuracy.",
    ),
    (
        "The mayor resigned on Friday. Elections will follow in May, officials said.",
        "Officials said the mayor resigned on Friday; new elections will be held in May.",
    ),
    (
        "Storm kills 14, injures 200 in coastal towns. Power is out. Power is out everywhere.",
        "A storm killed 14 people and injured more than 200 in coastal towns. Power is out.",
    ),
    (
        "Le café de l'été ouvre à 8h30; naïve résumé.",
        "Le café de l’été ouvrira à 8 h 30. Un résumé naïf, en somme.",
    ),
    ("İstanbul'da ÇOK güzel BİR gün. Σίσυφος! №5", "istanbul'da çok güzel bir gün. σίσυφος? No. 5"),
    ("", "A reference without a prediction. Two sentences long."),
    ("A prediction without a reference.", ""),
    ("...!?", "— – …"),
    ("GDP grew 2.1% in Q3\nwhile inflation_rate fell to 1.9%", "GDP grew by 2.1% in Q3.\n\nInflation rate: 1.9%"),
    ("identical summaries score one", "Identical summaries score one."),
    ("yes", "Yes, indeed."),
    ("d c b a", "a b c d"),
]


def random_texts(seed: int, count: int, longest: int = 12) -> list[tuple[str, str]]:
    generator = random.Random(seed)

    def text() -> str:
        return " ".join(generator.choices("abcdef", k=generator.randint(0, longest)))

    return [(text(), text()) for _ in range(count)]


def plain_table(prediction: Sequence[str], reference: Sequence[str]) -> tuple[int, int]:
    """Fewest edits, and then the most matches, by the textbook table."""
    row = [(j, 0) for j in range(len(reference) + 1)]
    for i, word in enumerate(prediction, 1):
        above, row = row, [(i, 0)]
        for j, other in enumerate(reference, 1):
            edits, kept = above[j - 1]
            aligned = (edits, kept - 1) if word == other else (edits + 1, kept)
            row.append(min(aligned, (above[j][0] + 1, above[j][1]), (row[j - 1][0] + 1, row[j - 1][1])))
    return row[-1][0], -row[-1][1]


@pytest.mark.parametrize(
    "pairs",
    [SENTENCES, SENTENCES[2:3], SENTENCES[5:6], SENTENCES[7:8], SUMMARIES, random_texts(0, 200)],
    ids=["corpus", "empty", "one word", "smoothed", "summaries", "random"],
)
def test_bleu_and_chrf_equal_sacrebleu(pairs: list[tuple[str, str]]) -> None:
    predictions, references = (list(side) for side in zip(*pairs, strict=True))
    result = metrics.evaluate(["bleu", "chrf"], predictions, references)
    assert result["bleu"] == sacrebleu.corpus_bleu(predictions, [references]).score
    assert result["chrf"] == pytest.approx(sacrebleu.corpus_chrf(predictions, [references]).score, abs=1e-12)


def test_bleu_of_sentences_is_not_averaged() -> None:
    predictions, references = (list(side) for side in zip(*SENTENCES, strict=True))
    parts = [metrics.evaluate(["bleu"], [p], [r])["bleu"] for p, r in SENTENCES]
    assert metrics.evaluate(["bleu"], predictions, references)["bleu"] != pytest.approx(sum(parts) / len(parts))


@pytest.mark.parametrize("pairs", [SUMMARIES, SENTENCES, random_texts(1, 400), random_texts(2, 30, longest=150)])
def test_rouge_equals_rouge_score(pairs: list[tuple[str, str]]) -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    total = metrics.build(["rouge"])[0]
    sums = dict.fromkeys(("rouge1", "rouge2", "rougeL"), 0.0)
    for prediction, reference in pairs:
        total.add(prediction, reference)
        expected = {name: score.fmeasure for name, score in scorer.score(reference, prediction).items()}
        assert metrics.evaluate(["rouge"], [prediction], [reference]) == pytest.approx(expected, abs=1e-12)
        sums = {name: value + expected[name] for name, value in sums.items()}
    assert total.result() == pytest.approx({name: value / len(pairs) for name, value in sums.items()}, abs=1e-12)


def test_edit_distance_equals_plain_table() -> None:
    for prediction, reference in random_texts(3, 300, longest=80):
        for a, b in ((prediction, reference), (prediction.split(), reference.split())):
            assert metrics.edit_distance(a, b) == plain_table(a, b)[0]


def test_edit_distance_of_long_texts() -> None:
    generator = random.Random(4)
    text = "".join(generator.choices("abcdefgh ", k=4000))
    changed = "x" + text[:1000] + text[1001:2000] + "Z" + text[2001:]
    assert metrics.edit_distance(text, changed) == 3
    assert metrics.edit_distance(text, "") == metrics.edit_distance("", text) == 4000


def test_word_accuracy_takes_most_matches_of_fewest_edits() -> None:
    for prediction, reference in random_texts(5, 400):
        kept, words = metrics.RATIOS["word_accuracy"](prediction, reference)
        assert kept == plain_table(prediction.split(), reference.split())[1]
        assert words == len(reference.split())
    # Two edits either way: two substitutions keep nothing, leaving a word out and adding one keeps "b".
    assert metrics.RATIOS["word_accuracy"]("b c", "a b") == (1, 2)


def test_word_accuracy_is_position_wise_where_only_spelling_differs() -> None:
    generator = random.Random(6)
    for _ in range(200):
        reference = generator.choices(["fată", "și", "în", "mașină", "cărți"], k=generator.randint(1, 30))
        prediction = [word if generator.random() < 0.7 else word + "x" for word in reference]
        same = sum(a == b for a, b in zip(prediction, reference, strict=True))
        assert metrics.RATIOS["word_accuracy"](" ".join(prediction), " ".join(reference)) == (same, len(reference))


def test_ratios_are_of_the_whole_set() -> None:
    predictions, references = ["a b c x", "y", ""], ["a b c d", "a", "e f"]
    result = metrics.evaluate(["exact_match", "wer", "cer", "word_accuracy"], predictions, references)
    assert result == {"exact_match": 0.0, "wer": 4 / 7, "cer": 5 / 11, "word_accuracy": 3 / 7}
    assert metrics.evaluate(["exact_match"], ["a", "b", "c "], ["a", "b", "c"]) == {"exact_match": 2 / 3}


def test_empty_references_give_finite_figures() -> None:
    result = metrics.evaluate(metrics.NAMES, ["two words"], [""])
    assert result["wer"] == 2.0 and result["cer"] == 9.0
    assert result["bleu"] == result["chrf"] == result["rougeL"] == result["word_accuracy"] == 0.0


def test_only_custom_metrics_keep_texts() -> None:
    for name in metrics.NAMES:
        metric = metrics.build([name])[0]
        metric.add("first unheard", "second unseen")
        # BLEU's scorer is sacrebleu's, with settings of its own.
        state = {key: value for key, value in vars(metric).items() if key != "scorer"}
        assert "unheard" not in repr(state) and "unseen" not in repr(state)


def test_unknown_metric() -> None:
    with pytest.raises(InputError, match=r"'rougeL' is unknown \(did you mean rouge\?\): bleu, chrf, rouge, exact"):
        metrics.build(["bleu", "rougeL"])
    with pytest.raises(InputError, match="':score' is unknown"):
        metrics.build([":score"])


def test_uneven_or_no_pairs() -> None:
    with pytest.raises(InputError, match="2 predictions for 1 references"):
        metrics.evaluate(["wer"], ["a", "b"], ["a"])
    with pytest.raises(InputError, match="nothing to evaluate"):
        metrics.evaluate(["wer"], [], [])


def test_custom_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metric.py").write_text(
        "import numpy\n"
        "def length(predictions, references): return numpy.float32(len(predictions[0]) / len(references[1]))\n"
        "def both(predictions, references): return {'pairs': len(predictions), 'same': predictions == references}\n"
        "def wrong(predictions, references): return 'good'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = metrics.evaluate(["own_metric:length", "own_metric:both", "wer"], ["ab", "c"], ["ab", "abcd"])
    assert result == {"length": 0.5, "pairs": 2.0, "same": 0.0, "wer": 0.5}
    assert all(type(value) is float for value in result.values())
    with pytest.raises(InputError, match="own_metric:wrong: must return a number or a dict of numbers, got 'good'"):
        metrics.evaluate(["own_metric:wrong"], ["a"], ["a"])
    with pytest.raises(InputError, match=r"no function 'lenght' in own_metric \(did you mean length\?\)"):
        metrics.build(["own_metric:lenght"])
    with pytest.raises(InputError, match="absent_metric:f: No module named 'absent_metric'"):
        metrics.build(["absent_metric:f"])


def test_better() -> None:
    assert all(metrics.better(name, 0.1, 0.2) for name in ("loss", "perplexity", "wer", "cer"))
    assert all(metrics.better(name, 0.2, 0.1) for name in ("bleu", "chrf", "rougeL", "exact_match", "own"))
    assert not any(metrics.better(name, 0.1, 0.1) for name in ("loss", "bleu"))


def test_bootstrap_interval_covers_the_known_error() -> None:
    generator = random.Random(7)
    counts = [(int(generator.random() < 0.8), 1) for _ in range(1000)]
    share = sum(hit for hit, _ in counts) / 1000
    error = 1.96 * (share * (1 - share) / 1000) ** 0.5
    assert metrics.bootstrap_interval(counts) == pytest.approx((share - error, share + error), abs=0.0025)
    assert metrics.bootstrap_interval(counts) == metrics.bootstrap_interval(counts)


def test_sacrebleu_is_imported_for_bleu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from t2t import metrics; metrics.build([n for n in metrics.NAMES if n != 'bleu']);"
        "assert 'sacrebleu' not in sys.modules; metrics.build(['bleu']); assert 'sacrebleu' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(InputError, match="'bleu' needs the package sacrebleu"):
        metrics.build(["bleu"])
