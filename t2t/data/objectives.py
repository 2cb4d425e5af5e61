"""What is learned from an example: pure functions of its tokens and a random generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from t2t.data.tokens import Bytes

Objective = Callable[[np.ndarray, np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]

_BYTES = Bytes()
MASK = 259  # the first sentinel of the byte vocabulary
_MASK_CHARACTER = "\0"  # never in the text: sources refuse it


def seq2seq(source: np.ndarray, target: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The pair as it is.

    >>> seq2seq(np.array([5, 1]), np.array([6, 1]), np.random.default_rng(0))
    (array([5, 1]), array([6, 1]))
    """
    return source, target


def character_noise(source: np.ndarray, target: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Byte tokens in which letters were spoilt, to be restored: from none up to half of them, every letter alike.

    A spoilt letter becomes a mask or, as often, a letter drawn from the same text. ``source`` is not used.

    >>> clean = np.array([*Bytes().encode("o casă mică"), 1])
    >>> noisy, target = character_noise(clean, clean, np.random.default_rng(7))
    >>> Bytes().decode(noisy), int((noisy == MASK).sum()), Bytes().decode(target)
    ('o caă mccă', 1, 'o casă mică')
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
    return np.append(noisy, target[-1:]), target


OBJECTIVES: dict[str, Objective] = {"seq2seq": seq2seq, "character_noise": character_noise}
