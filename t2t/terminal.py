"""What a person sees: tables, a live progress line, marked changes. The one file that knows about terminals.

The same text comes out on a terminal and in a log file; only the live line and the colours need a terminal.

>>> print(table([["copy", 0.7], ["after", 0.9312]], header=["system", "words"]))
system   words
──────  ──────
copy    0.7000
after   0.9312
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Self, TextIO

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CLEAR = "\x1b[K"  # erases from the cursor to the end of the line
_GREEN, _RED, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"
# A figure as this file writes one (8.0M, 15.2 MiB, 1:15, 3.00e-05, 93%), or its absence.
_FIGURE = re.compile(r"[-+]?\d[\d.,:]*(e[-+]?\d+|%|x|[KMBT]| ([KMGTP]i)?B)?|[-+]?(nan|inf)|-|–|n/a|")


def is_terminal(stream: TextIO) -> bool:
    """Whether lines on this stream can be redrawn.

    >>> import io
    >>> is_terminal(io.StringIO())
    False
    """
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colours(stream: TextIO) -> bool:
    """Whether to colour text on this stream: a terminal, and NO_COLOR is not set.

    >>> import io
    >>> colours(io.StringIO())
    False
    """
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Rows as aligned columns: columns of figures to the right, others to the left.

    >>> print(table([["parameters", 7968768], ["rows", 64]]))
    parameters  7,968,768
    rows               64
    """
    cells = [[_text(cell) for cell in row] for row in rows]
    right = [all(_FIGURE.fullmatch(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = [list(header), *cells] if header else cells
    widths = [max(map(_columns, column)) for column in zip(*lines, strict=True)]
    if header:
        lines.insert(1, ["─" * width for width in widths])
        right = right or [False] * len(header)
    padded = (
        "  ".join(_pad(cell, width, to_right) for cell, width, to_right in zip(line, widths, right, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def human_count(count: float) -> str:
    """A count in thousands, millions, billions.

    >>> human_count(7968768), human_count(999), human_count(999_999)
    ('8.0M', '999', '1.0M')
    """
    return _scaled(count, 1000, ("", "K", "M", "B", "T"))


def human_bytes(size: float) -> str:
    """A size in binary units.

    >>> human_bytes(7968768 * 2), human_bytes(100)
    ('15.2 MiB', '100 B')
    """
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def human_seconds(seconds: float) -> str:
    """A duration as minutes and seconds, with hours and days where there are any.

    >>> human_seconds(75), human_seconds(3675), human_seconds(90061)
    ('1:15', '1:01:15', '1d 1:01:01')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return f"{days}d " * bool(days) + f"{hour}:{minute:02}:{second:02}"


def bar(share: float, width: int) -> str:
    """A bar that takes this share of the width, drawn in eighths of a column; anything above nothing is seen.

    >>> bar(0.5, 4), bar(0.3, 4), bar(1e-6, 4), bar(0.0, 4)
    ('██', '█▎', '▏', '')
    """
    full, eighths = divmod(math.ceil(share * width * 8), 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()


def mark_changes(source: str, prediction: str, reference: str, colour: bool) -> str:
    """The prediction with its words marked: rightly changed from the source, or wrong, changed or not.

    >>> mark_changes("o fata si", "o față și", "o fată și", colour=False)
    'o ~față~(fată) *și*'
    """
    before = iter([theirs for ours, theirs in _aligned(prediction.split(), source.split()) if ours])
    marked = []
    for word, right in _aligned(prediction.split(), reference.split()):
        changed = bool(word) and next(before) != word
        if word == right:
            marked.append(_mark_right(word, colour) if changed else word)
        else:
            marked.append(_mark_wrong(word, right, colour))
    return " ".join(marked)


class Progress:
    """A progress line: redrawn in place on a terminal, now and then a full line elsewhere.

    ``start`` is the step a resumed run goes on from; the time left is judged by the steps done since.

    >>> import io
    >>> log = io.StringIO()
    >>> with Progress(total=100, label="train", stream=log, clock=iter([0.0, 2.0, 2.0]).__next__) as progress:
    ...     progress.update(10, loss=1.25, tokens_per_s=5123.4)
    >>> log.getvalue()
    'train  10/100  loss 1.2500  tokens/s 5,123  0:02, 0:18 left\\n'
    """

    def __init__(
        self,
        total: int,
        label: str = "",
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "",
    ) -> None:
        self._total, self._label, self._step, self._unit = total, label, start, unit
        self._stream = sys.stderr if stream is None else stream
        self._live = is_terminal(self._stream)
        self._pause = 0.1 if self._live else 10.0
        self._glyphs = "━─" if _can_encode(self._stream, "━─") else "#-"
        self._clock = clock
        self._began = self._updated = clock()
        self._drawn = -math.inf
        self._stale = False
        self._recent_steps = self._recent_seconds = 0.0
        self._figures: dict[str, float | str] = {}

    def update(self, step: int, /, **figures: float | str) -> None:
        """Say that ``step`` is done; figures not given stay as they were."""
        now = self._clock()
        if step > self._step:
            # Both sums fade alike, so that their ratio is the speed of about the last twenty steps.
            fade = 0.95 ** (step - self._step)
            self._recent_steps = fade * self._recent_steps + step - self._step
            self._recent_seconds = fade * self._recent_seconds + now - self._updated
        self._step, self._updated = step, now
        self._figures |= figures
        self._stale = True
        if step >= self._total or now - self._drawn >= self._pause:
            self._draw()

    def line(self, text: str) -> None:
        """Print a full line above the live one."""
        if self._live and self._drawn > -math.inf:
            self._stream.write(f"\r{_CLEAR}{text}\n")
            self._draw()
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Show the last state and leave the line."""
        if self._stale:
            self._draw()
        if self._live and self._drawn > -math.inf:
            self._stream.write("\n")
            self._stream.flush()
        self._live = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self) -> None:
        self._drawn, self._stale = self._clock(), False
        figures = [f"{name.replace('_per_', '/').replace('_', ' ')} {_text(v)}" for name, v in self._figures.items()]
        head = [self._label] if self._label else []
        tail = [f"{self._step:,}/{self._total:,}{self._unit}", *figures, self._times()]
        if self._live:
            # The last column stays free: writing there makes some terminals wrap.
            room = _terminal_width(self._stream) - 1
            bar = self._bar(room - _columns("  ".join([*head, "", *tail])))
            self._stream.write(f"\r{_cut('  '.join([*head, *bar, *tail]), room)}{_CLEAR}")
        else:
            self._stream.write("  ".join([*head, *tail]) + "\n")
        self._stream.flush()

    def _times(self) -> str:
        elapsed = human_seconds(self._drawn - self._began)
        if self._step >= self._total or not self._recent_steps:
            return elapsed
        left = (self._total - self._step) * self._recent_seconds / self._recent_steps
        return f"{elapsed}, {human_seconds(left)} left"

    def _bar(self, room: int) -> list[str]:
        width = min(room, 30)
        if width < 8:
            return []
        full = min(width, width * self._step // max(self._total, 1))
        return [self._glyphs[0] * full + self._glyphs[1] * (width - full)]


class Preparing:
    """A progress line for the making of a store, which begins once there is something to tell.

    >>> import io
    >>> log = io.StringIO()
    >>> with Preparing(log) as tell:
    ...     tell(3 * 2**20, 3 * 2**20, 40_000, 3_000_000)
    >>> log.getvalue()
    'prepare  3/3 MiB  records 40,000  tokens 3,000,000  0:00\\n'
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._progress: Progress | None = None

    def __enter__(self) -> Callable[[int, int, int, int], None]:
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.close()

    def _tell(self, done: int, total: int, records: int, tokens: int) -> None:
        if self._progress is None:
            self._progress = Progress(max(1, total >> 20), "prepare", stream=self._stream, unit=" MiB")
        self._progress.update(done >> 20, records=records, tokens=tokens)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    size = abs(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(size):
        return str(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    return f"{value:.4f}" if size >= 0.001 or size == 0 else f"{value:.2e}"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    # Rounded before it is compared, so that 999,999 becomes 1.0M and not 1000.0K.
    power = 0
    while round(value / base**power, 1 if power else 0) >= base and power < len(units) - 1:
        power += 1
    return f"{value / base**power:.{1 if power else 0}f}{units[power]}"


def _char_columns(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _columns(text: str) -> int:
    """Columns that a text takes on a terminal: marks take none, wide characters two, colours none."""
    return sum(map(_char_columns, _ANSI.sub("", text)))


def _pad(text: str, width: int, to_right: bool) -> str:
    space = " " * (width - _columns(text))
    return space + text if to_right else text + space


def _cut(text: str, width: int) -> str:
    ends = itertools.accumulate(map(_char_columns, text))
    return "".join(char for char, end in zip(text, ends, strict=True) if end <= width)


def _terminal_width(stream: TextIO) -> int:
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no file behind the stream, or no terminal behind the file
        width = 0
    return width or shutil.get_terminal_size().columns


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _aligned(ours: list[str], theirs: list[str]) -> list[tuple[str, str]]:
    """Words side by side, "" where one side has none: by position when the counts agree."""
    if len(ours) == len(theirs):
        return list(zip(ours, theirs, strict=True))
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    return [pair for _, i, j, k, m in blocks for pair in itertools.zip_longest(ours[i:j], theirs[k:m], fillvalue="")]


def _mark_right(word: str, colour: bool) -> str:
    return f"{_GREEN}{word}{_PLAIN}" if colour else f"*{word}*"


def _mark_wrong(word: str, right: str, colour: bool) -> str:
    if not colour:
        return f"~{word}~({right})"
    wrong = f"{_RED}[-{word}-]{_PLAIN}" if word else ""
    return wrong + (f"{_GREEN}{{+{right}+}}{_PLAIN}" if right else "")
