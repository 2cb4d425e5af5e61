"""Errors that a user caused and can mend: one clear message, exit code 2.

>>> raise InputError("data.train: no such file: pairs.csv")
Traceback (most recent call last):
t2t.errors.InputError: data.train: no such file: pairs.csv
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: a config key, a file, a line. Says what, where, and what would be right.

    >>> str(InputError("pairs.tsv:3: no field 'target'"))
    "pairs.tsv:3: no field 'target'"
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to a message, or nothing.

    >>> did_you_mean("ste", ["steps", "epochs"])
    ' (did you mean steps?)'
    >>> did_you_mean("zzz", ["steps"])
    ''
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""
