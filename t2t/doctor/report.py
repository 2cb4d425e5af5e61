"""What `t2t doctor` found, as plain data: the keys of its JSON, and what of it is to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from t2t.data.check import LengthCounts, Lost, Overlap, Repeated
from t2t.data.packing import RowShape

CHARACTERS = 12
"""How many lost characters are shown; JSON has them all."""

REPEATS, CUT = 0.01, 0.05
"""Shares of examples that may repeat an earlier one, and be cut, before that is something to look at."""

LIMITS = {
    "source": "data.max_source_length",
    "target": "data.max_target_length",
    "conversation": "data.block, or both maximal lengths,",
}
"""What cuts each side."""


@dataclass(frozen=True)
class Lengths:
    """How long one side of the examples is, as a model gets it: prefix, transforms, start and end tokens included.

    A conversation is one side, with what its chat template adds; so is plain text that is learned as it goes on, whose
    documents are in pieces and lose nothing. ``cut`` is the share longer than the data section's ``limit``.

    >>> Lengths.of("source", "tokens", LengthCounts([4, 5, 5, 9]), limit=8)
    Lengths(side='source', unit='tokens', p50=5, p90=9, p99=9, max=9, limit=8, cut=0.25)
    """

    side: str
    unit: str
    p50: int
    p90: int
    p99: int
    max: int
    limit: int | None = None
    cut: float | None = None

    @classmethod
    def of(cls, side: str, unit: str, counts: LengthCounts, limit: int | None = None) -> Lengths:
        """The figures of these lengths; every percentile is a length that occurs."""
        p50, p90, p99, longest = (counts.quantile(share) for share in (0.5, 0.9, 0.99, 1.0))
        return cls(side, unit, p50, p90, p99, longest, limit, None if limit is None else counts.share_above(limit))


@dataclass(frozen=True)
class FileReport:
    """What was found in one file. ``error`` says why it cannot be used, or nothing; plain text has ``documents``.

    >>> report = FileReport("train", "a.txt", "txt", "", 3, 2, 1, ("a.txt:2: invalid UTF-8",), (), "", "", "", "")
    >>> report.records, report.examples, report.bad_lines
    (3, 2, 1)
    """

    split: str
    file: str
    format: str
    compression: str
    records: int
    examples: int
    bad_lines: int
    first_bad_lines: tuple[str, ...]
    columns: tuple[str, ...]
    source: str
    target: str
    why: str
    error: str
    documents: int = 0


@dataclass(frozen=True)
class Split:
    """What was found in all files of the training or the validation data.

    >>> Split("train", 0, (), {}, Repeated(0, 0, (), 1)).examples
    0
    """

    split: str
    examples: int
    lengths: tuple[Lengths, ...]
    histogram: dict[str, list[tuple[int, int]]]
    repeated: Repeated


@dataclass(frozen=True)
class Unknown:
    """What the tokenizer cannot say: unknown tokens, the examples that hold them, and the characters that are lost.

    >>> Unknown(0, 0, "", ()).tokens
    0
    """

    tokens: int
    examples: int
    first: str
    characters: tuple[Lost, ...]


@dataclass(frozen=True)
class Plan:
    """What a run would be. Tokens are those of an epoch, cut as the run cuts them; rows are for static shapes.

    >>> shape = RowShape(16, 8, 0.9, 0.8, 0.85, 2.0)
    >>> Plan("pairs", "seq2seq", 64, 32, 2, 700, 300, shape, 2000, 1e6, 0.5, None).steps_per_epoch
    2
    """

    objective: str
    kind: str
    examples: int
    batch: int
    steps_per_epoch: int
    source_tokens: int
    target_tokens: int
    rows: RowShape
    store_bytes: int
    tokenized_per_s: float
    prepare_seconds: float
    epoch_seconds: float | None


@dataclass(frozen=True)
class Report:
    """What was found in all files.

    >>> Report((), tokenizer="").exit_code
    0
    """

    files: tuple[FileReport, ...]
    tokenizer: str
    splits: tuple[Split, ...] = ()
    overlap: Overlap | None = None
    unknown: Unknown | None = None
    plan: Plan | None = None

    @property
    def problems(self) -> list[str]:
        """One line on each thing to look at.

        >>> Report((), tokenizer="").problems
        []
        """
        return [*(problem for file in self.files for problem in _problems(file)), *_findings(self)]

    @property
    def exit_code(self) -> int:
        """0: nothing wrong; 1: something to look at; 2: a file that cannot be used.

        >>> Report((), tokenizer="").exit_code
        0
        """
        return 2 if any(file.error for file in self.files) else int(bool(self.problems))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it.

        >>> sorted(Report((), tokenizer="bytes").as_dict())
        ['files', 'overlap', 'plan', 'problems', 'splits', 'tokenizer', 'unknown']
        """
        return asdict(self) | {"problems": self.problems}


def _problems(report: FileReport) -> Iterator[str]:
    if report.error:
        yield report.error
    elif report.bad_lines:
        first = report.first_bad_lines[0].removeprefix(f"{report.file}:")
        yield f"{report.file}: {counted(report.bad_lines, 'bad line')}, the first at line {first}"


def _findings(report: Report) -> Iterator[str]:
    """What is to look at in all files together."""
    for split in report.splits:
        repeated = split.repeated.pairs
        if repeated > REPEATS * split.examples:
            yield f"{split.split}: {_of(repeated, split.examples)} repeat an earlier one"
        for row in split.lengths:
            if row.cut is not None and row.cut > CUT:
                longer = f"{row.cut:.1%} of the {row.side}s are longer than {LIMITS[row.side]} = {row.limit:,}"
                yield f"{split.split}: {longer}; {row.p99:,} would cut 1%, {row.max:,} nothing"
    if report.overlap and report.overlap.sources:
        held = report.splits[-1].examples
        both = f"{_of(report.overlap.sources, held)} have their source in the training data, {report.overlap.pairs:,}"
        yield f"validation: {both} the target with it"
    if report.unknown and report.unknown.tokens:
        yield _unsaid(report.unknown)


def _unsaid(unknown: Unknown) -> str:
    times = f"{counted(unknown.tokens, 'unknown token')} in {counted(unknown.examples, 'example')}"
    missing = [lost.character for lost in unknown.characters if lost.unknown]
    if not missing:
        return f"{times}, the first at {unknown.first}"
    names = " ".join(missing[:CHARACTERS]) + (" ..." if len(missing) > CHARACTERS else "")
    advice = 'bytes say every text (ByT5, or model.tokenizer = "bytes"), model.new_tokens adds single ones'
    return f"{times}: the tokenizer has no {names}; {advice}"


def _of(count: int, all: int) -> str:
    return f"{count:,} of {counted(all, 'example')} ({count / all:.1%})"


def counted(count: int, what: str) -> str:
    """A count with what is counted.

    >>> counted(1, "line"), counted(1000, "line")
    ('1 line', '1,000 lines')
    """
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
