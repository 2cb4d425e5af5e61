"""The report of `t2t doctor` for a person to read."""

from __future__ import annotations

from collections.abc import Iterator

from t2t.data.check import Match
from t2t.doctor.report import CHARACTERS, FileReport, Plan, Report, Unknown, counted
from t2t.terminal import bar, human_bytes, human_count, human_seconds, table

BAR = 24
"""Columns of the longest bar."""


def render(report: Report) -> str:
    """The report for a person to read.

    >>> from t2t.data.check import Repeated
    >>> from t2t.doctor.report import Lengths, Split
    >>> file = FileReport("train", "a.txt", "txt", "", 3, 3, 0, (), ("text",), "text", "text", "plain text", "")
    >>> lengths = Lengths("text", "characters", 5, 8, 9, 9)
    >>> print(render(Report((file,), "", (Split("train", 3, (lengths,), {}, Repeated(0, 0, (), 1)),))))
    split  file   format  records  examples  bad lines  columns  source  target  why
    ─────  ─────  ──────  ───────  ────────  ─────────  ───────  ──────  ──────  ──────────
    train  a.txt  txt           3         3          0  text     text    text    plain text
    <BLANKLINE>
    split  side  unit        p50  p90  p99  max  limit  cut
    ─────  ────  ──────────  ───  ───  ───  ───  ─────  ───
    train  text  characters    5    8    9    9
    <BLANKLINE>
    what is there twice             count  share
    ──────────────────────────────  ─────  ─────
    train: repeat an earlier pair       0   0.0%
    train: sources of many targets      0   0.0%
    <BLANKLINE>
    no tokens are told: name a tokenizer or a model, as --model.tokenizer bytes
    <BLANKLINE>
    nothing wrong
    """
    problems = "\n".join(f"- {problem}" for problem in report.problems)
    parts = [
        _render_files(report),
        _render_lengths(report),
        _render_histogram(report),
        _render_repeats(report),
        _render_unknown(report.unknown),
        _render_plan(report.plan),
        "" if report.tokenizer else "no tokens are told: name a tokenizer or a model, as --model.tokenizer bytes",
        "\n".join(line for f in report.files for line in _bad_lines(f)),
        f"to look at:\n{problems}" if problems else "nothing wrong",
    ]
    return "\n\n".join(part for part in parts if part)


def _render_files(report: Report) -> str:
    rows = [
        (
            f.split,
            f.file,
            f.format + f.compression,
            f.records,
            f.examples,
            f.bad_lines,
            " ".join(f.columns),
            f.source,
            f.target,
            f"{f.why}, {counted(f.documents, 'document')}" if f.documents else f.why,
        )
        for f in report.files
    ]
    header = ("split", "file", "format", "records", "examples", "bad lines", "columns", "source", "target", "why")
    return table(rows, header)


def _render_lengths(report: Report) -> str:
    rows = [
        (
            *(split.split, row.side, row.unit, row.p50, row.p90, row.p99, row.max, row.limit),
            None if row.cut is None else f"{row.cut:.1%}",
        )
        for split in report.splits
        for row in split.lengths
    ]
    return table(rows, ("split", "side", "unit", "p50", "p90", "p99", "max", "limit", "cut")) if rows else ""


def _render_histogram(report: Report) -> str:
    histogram = next((split.histogram for split in report.splits if split.histogram), {})
    sides = {side: dict(bins) for side, bins in histogram.items()}
    edges = sorted(set().union(*sides.values()))
    rows: list[list[object]] = [[edge] for edge in edges]
    for bins in sides.values():
        most = max(bins.values())
        for row, count in zip(rows, (bins.get(edge, 0) for edge in edges), strict=True):
            row += [count, bar(count / most, BAR)]
    header = ["tokens up to", *(cell for side in sides for cell in (f"{side}s", ""))]
    return table(rows, header) if rows else ""


def _render_repeats(report: Report) -> str:
    rows: list[tuple[str, int, str]] = []
    matches: list[Match] = []
    for split in report.splits:
        found = split.repeated
        rows.append((f"{split.split}: repeat an earlier pair", found.pairs, f"{found.pairs / split.examples:.1%}"))
        rows.append((f"{split.split}: sources of many targets", found.sources, f"{found.sources / split.examples:.1%}"))
        matches += found.first
    if report.overlap:
        held = report.splits[-1].examples
        for what, count in (("source", report.overlap.sources), ("pair", report.overlap.pairs)):
            rows.append((f"validation: {what} is in train", count, f"{count / held:.1%}"))
        matches += report.overlap.first
    if not rows:
        return ""
    every = max([split.repeated.every for split in report.splits])
    places = [(m.where, "repeats" if m.pair else "has the source of", m.same_as) for m in matches]
    parts = [
        table(rows, ("what is there twice", "count", "share")),
        f"(estimated by one source in {every})" if every > 1 else "",
        table(places),
    ]
    return "\n\n".join(part for part in parts if part)


def _render_unknown(unknown: Unknown | None) -> str:
    if unknown is None or not unknown.characters:
        return ""
    rows = [
        (
            lost.character if lost.character.isprintable() and not lost.character.isspace() else "",
            lost.code,
            "unknown" if lost.unknown else repr(lost.becomes) if lost.becomes else "nothing",
            lost.count,
            lost.examples,
            lost.first,
        )
        for lost in unknown.characters[:CHARACTERS]
    ]
    more = len(unknown.characters) - len(rows)
    shown = table(rows, ("character", "code", "becomes", "times", "examples", "first at"))
    return shown + (f"\n... and {more:,} more characters (all with --json)" if more else "")


def _render_plan(plan: Plan | None) -> str:
    if plan is None:
        return ""
    rows = plan.rows
    tokens = [("source", plan.source_tokens), ("target", plan.target_tokens)]
    sides = [("source ", rows.source_row, rows.source_fill), ("target ", rows.target_row, rows.target_fill)]
    if not rows.source_row:
        tokens, sides = [("", plan.target_tokens)], [("", rows.target_row, rows.target_fill)]
    shape = ", ".join(f"{side}{row:,} slots ({fill:.0%} full)" for side, row, fill in sides)
    told = [
        ("learned", f"{plan.objective}, by a {plan.kind} model"),
        ("an epoch", f"{plan.steps_per_epoch:,} steps of {plan.batch:,} examples, {plan.examples:,} in all"),
        ("tokens an epoch", ", ".join(f"{human_count(count)} {side}".rstrip() for side, count in tokens)),
        ("rows, where shapes are static", f"{shape}, {rows.rows_per_step:.1f} a step"),
        ("prepared store", f"about {human_bytes(plan.store_bytes)}"),
        (
            "preparing takes about",
            f"{human_seconds(plan.prepare_seconds)} in one process, {plan.tokenized_per_s:,.0f} tokens/s tokenized",
        ),
    ]
    if plan.epoch_seconds is not None:
        told.append(("training an epoch takes about", human_seconds(plan.epoch_seconds)))
    return table(told)


def _bad_lines(report: FileReport) -> Iterator[str]:
    yield from report.first_bad_lines
    more = report.bad_lines - len(report.first_bad_lines)
    if more:
        yield f"{report.file}: ... and {more:,} more bad lines"
