"""Character noise: what it may touch, how much of it, and that a generator decides all of it."""

from __future__ import annotations

import numpy as np
import pytest

from t2t.data.objectives import MASK, CausalPairs, CharacterNoise, Seq2Seq, character_noise
from t2t.data.ragged import Ragged
from t2t.data.tokens import Bytes, Pairs

BYTES = Bytes()
TEXT = "Țara de jos, 1925: «ploaia» cade încet peste sate și câmpuri; nu mai e nimeni — doar vântul."


def ids(text: str) -> np.ndarray:
    return np.array([*BYTES.encode(text), 1], dtype=np.uint16)


def characters(noisy: np.ndarray) -> list[str]:
    """The characters of noisy tokens, ``?`` for a mask."""
    marked = [BYTES.encode("\0")[0] if token == MASK else int(token) for token in noisy[:-1]]
    return ["?" if c == "\0" else c for c in BYTES.decode(marked)]


@pytest.mark.parametrize("seed", range(50))
def test_only_letters_are_spoilt_and_the_target_is_untouched(seed: int) -> None:
    clean = ids(TEXT)
    before = clean.copy()
    noisy = character_noise(clean, np.random.default_rng(seed))
    assert np.array_equal(clean, before)
    assert noisy.dtype == clean.dtype
    assert noisy[-1] == 1
    got = characters(noisy)
    assert len(got) == len(TEXT)
    for before, after in zip(TEXT, got, strict=True):
        assert after == before or (before.isalpha() and (after == "?" or after in TEXT))


def test_rates_run_from_none_to_half_and_half_of_the_spoilt_are_masks() -> None:
    letters = [i for i, c in enumerate(TEXT) if c.isalpha()]
    changed, masked = [], []
    for seed in range(800):
        got = characters(character_noise(ids(TEXT), np.random.default_rng(seed)))
        masked.append(np.mean([got[i] == "?" for i in letters]))
        changed.append(np.mean([got[i] != TEXT[i] for i in letters]))
    assert np.mean(masked) == pytest.approx(0.125, abs=0.01)
    # A drawn letter is the same letter now and then.
    assert 0.22 < np.mean(changed) < 0.25
    assert min(changed) < 0.02
    # At most half in expectation; five standard deviations more in one of 800 texts.
    assert 0.4 < max(changed) < 0.5 + 5 * (0.25 / len(letters)) ** 0.5


def test_every_letter_is_spoilt_alike() -> None:
    text = "așbț" * 25
    spoilt = dict.fromkeys("așbț", 0)
    for seed in range(300):
        got = characters(character_noise(ids(text), np.random.default_rng(seed)))
        for before, after in zip(text, got, strict=True):
            spoilt[before] += after == "?"
    assert max(spoilt.values()) < 1.15 * min(spoilt.values())


def test_a_generator_decides_it() -> None:
    def noise(seed: int) -> list[int]:
        return character_noise(ids(TEXT), np.random.default_rng(seed)).tolist()

    assert noise(3) == noise(3)
    assert len({tuple(noise(seed)) for seed in range(20)}) > 15  # now and then nothing is spoilt


@pytest.mark.parametrize("text", ["", "123 — ?!", "a"])
def test_text_with_hardly_a_letter(text: str) -> None:
    for seed in range(20):
        noisy = character_noise(ids(text), np.random.default_rng(seed))
        assert len(characters(noisy)) == len(text)
        if text != "a":
            assert noisy.tolist() == ids(text).tolist()


def test_a_target_cut_within_a_letter_stays_as_it_is() -> None:
    cut = np.array([*BYTES.encode("aș")[:-1], 1], dtype=np.uint16)
    pairs = Pairs(Ragged.of([cut], 384), Ragged.of([cut], 384), ("x:1",), 0, 0)
    feature = CharacterNoise(pairs, start_id=0, longest=9).feature(0, seed=0)
    assert feature.labels.tolist() == cut.tolist()


def test_seq2seq_is_the_pair_shifted_by_the_start_token() -> None:
    pairs = Pairs(Ragged.of([ids("a")], 384), Ragged.of([ids("bc")], 384), ("x:7",), 0, 0)
    examples = Seq2Seq(pairs, start_id=2)
    feature = examples.feature(0, seed=0)
    assert feature.source.tolist() == ids("a").tolist()
    assert feature.inputs.tolist() == [2, *BYTES.encode("bc")]
    assert feature.labels.tolist() == ids("bc").tolist()
    assert examples.tell(0) == {"where": "x:7", "source": ids("a").tolist(), "target": ids("bc").tolist()}


@pytest.mark.parametrize("both", [False, True])
def test_a_causal_model_is_to_say_the_target_or_both(both: bool) -> None:
    pairs = Pairs(Ragged.of([[7, 8, 9]], 384), Ragged.of([[5, 6, 1]], 384), ("x:7",), 0, 0)
    examples = CausalPairs(pairs, both)
    feature = examples.feature(0, seed=0)
    assert feature.inputs.tolist() == [7, 8, 9, 5, 6]
    assert feature.labels.tolist() == ([8, 9, 5, 6, 1] if both else [-100, -100, 5, 6, 1])
    assert [side.tolist() for side in examples.sizes(np.arange(1))] == [[0], [5]]
    assert examples.tell(0)["where"] == "x:7"
