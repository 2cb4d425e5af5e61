"""What is here: the environment, and what a run would make of data files. Reads everything, changes nothing.

Exit codes of `t2t doctor`: 0, nothing wrong; 1, bad lines were found; 2, a file cannot be used at all.

>>> import tempfile
>>> from pathlib import Path
>>> with tempfile.TemporaryDirectory() as folder:
...     file = Path(folder, "pairs.jsonl")
...     _ = file.write_text('{"src": "1 2", "tgt": "2 1"}\\n{"src": "3 4"}\\n')
...     report = check([str(file)], Config())
>>> report.files[0].source, report.files[0].target, report.files[0].why, report.exit_code
('src', 'tgt', 'known names', 1)
>>> [problem.removeprefix(str(file)) for problem in report.problems]
[": 1 bad line, the first at line 2: no field 'tgt'"]
"""

from __future__ import annotations

import json
import platform
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import numpy as np

from t2t.config import Config
from t2t.data import chat, sources
from t2t.data.chat import Template
from t2t.data.loader import begins_document
from t2t.data.sources import Reader, Record
from t2t.data.tasks import BadField, Columns, Example, Task, is_chat
from t2t.data.tokens import Tokenizer
from t2t.errors import InputError
from t2t.terminal import human_bytes, table

EXTRAS = ("pyarrow", "zstandard", "sacrebleu", "tensorboard", "wandb", "trackio")
"""Packages that some features need and a plain run does not."""

SHOWN = 5
"""How many bad lines of a file are shown; all are counted."""

_BLOCK_CHARACTERS = 2**20  # tokenized at once, so that memory does not follow the length of lines


@dataclass(frozen=True)
class Lengths:
    """How long one side of the examples is, as a model gets it: prefix, transforms and end token included.

    A conversation is one side, with what its chat template adds. ``cut`` is the share of examples longer than the data
    section allows; characters are not cut.

    >>> Lengths.of("source", "tokens", [4, 5, 5, 9], limit=8)
    Lengths(side='source', unit='tokens', p50=5, p90=9, p99=9, max=9, cut=0.25)
    """

    side: str
    unit: str
    p50: int
    p90: int
    p99: int
    max: int
    cut: float | None = None

    @classmethod
    def of(cls, side: str, unit: str, lengths: Sequence[int], limit: int | None = None) -> Lengths:
        """The figures of these lengths; every percentile is a length that occurs."""
        values = np.asarray(lengths)
        p50, p90, p99 = (int(rank) for rank in np.quantile(values, (0.5, 0.9, 0.99), method="inverted_cdf"))
        cut = None if limit is None else float((values > limit).mean())
        return cls(side, unit, p50, p90, p99, int(values.max()), cut)


@dataclass(frozen=True)
class FileReport:
    """What was found in one file. ``error`` says why it cannot be used, or nothing; plain text has ``documents``.

    >>> report = FileReport("a.txt", "txt", "", 3, 2, 1, ("a.txt:2: invalid UTF-8",), (), "", "", "", (), "")
    >>> report.records, report.examples, report.bad_lines
    (3, 2, 1)
    """

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
    lengths: tuple[Lengths, ...]
    error: str
    documents: int = 0


@dataclass(frozen=True)
class Report:
    """What was found in all files.

    >>> Report((), tokenizer="").exit_code
    0
    """

    files: tuple[FileReport, ...]
    tokenizer: str

    @property
    def problems(self) -> list[str]:
        """One line on each file with something wrong.

        >>> Report((), tokenizer="").problems
        []
        """
        return [problem for file in self.files for problem in _problems(file)]

    @property
    def exit_code(self) -> int:
        """0: nothing wrong; 1: bad lines; 2: a file that cannot be used.

        >>> Report((), tokenizer="").exit_code
        0
        """
        if any(file.error for file in self.files):
            return 2
        return int(any(file.bad_lines for file in self.files))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it.

        >>> Report((), tokenizer="bytes").as_dict()
        {'files': (), 'tokenizer': 'bytes', 'problems': []}
        """
        return asdict(self) | {"problems": self.problems}


def run(data: list[str], config: Config, as_json: bool) -> int:
    """Print the environment, and the report on files if there are any; gives back the exit code.

    >>> run([], Config(), as_json=False)  # doctest: +ELLIPSIS
    python ...
    0
    """
    found = environment()
    report = check(data, config)
    if as_json:
        print(json.dumps({"environment": found} | (report.as_dict() if data else {}), indent=2))
    else:
        print(_render_environment(found))
        if data:
            print(f"\n{render(report)}")
    return report.exit_code


def environment() -> dict[str, Any]:
    """Versions, devices and memory; a package that is not installed has the version None.

    >>> sorted(environment())
    ['devices', 'extras', 'memory', 'threads', 'versions']
    """
    import torch

    from t2t import __version__, device

    accelerator = device.resolve("auto")
    devices = [
        torch.device("cpu"),
        *(torch.device(accelerator.type, n) for n in range(torch.accelerator.device_count())),
    ]
    packages = ("torch", "transformers", "safetensors", "numpy")
    return {
        "versions": {"python": platform.python_version(), "t2t": __version__} | {p: _version(p) for p in packages},
        "devices": [device.describe(d) for d in devices],
        "threads": torch.get_num_threads(),
        "memory": device.total_memory(devices[0]),
        "extras": {package: _version(package) for package in EXTRAS},
    }


def check(patterns: Sequence[str], config: Config) -> Report:
    """Read files to their ends, as training with this config would, past every bad line.

    Token lengths are told where the config names a tokenizer or a model. Memory grows by a few bytes an example.

    >>> check(["no/such/pairs.tsv"], Config())
    Traceback (most recent call last):
    t2t.errors.InputError: doctor: no such file: no/such/pairs.tsv
    """
    files = sources.resolve(patterns, "doctor")
    task = Task.from_config(config.data)
    tokenizer = _tokenizer(config) if files else None
    name = (config.model.tokenizer or config.model.path) if tokenizer else ""
    return Report(tuple(_check_file(str(file), task, tokenizer, config) for file in files), name)


def render(report: Report) -> str:
    """The report for a person to read.

    >>> file = FileReport("a.txt", "txt", "", 3, 3, 0, (), ("text",), "text", "text", "plain text",
    ...                   (Lengths("source", "characters", 5, 8, 9, 9),), "")
    >>> print(render(Report((file,), tokenizer="")))
    file   format  records  examples  bad lines  columns  source  target  why
    ─────  ──────  ───────  ────────  ─────────  ───────  ──────  ──────  ──────────
    a.txt  txt           3         3          0  text     text    text    plain text
    <BLANKLINE>
    file   side    unit        p50  p90  p99  max  cut
    ─────  ──────  ──────────  ───  ───  ───  ───  ───
    a.txt  source  characters    5    8    9    9
    <BLANKLINE>
    nothing wrong
    """
    files = [
        (
            f.file,
            f.format + f.compression,
            f.records,
            f.examples,
            f.bad_lines,
            " ".join(f.columns),
            f.source,
            f.target,
            f"{f.why}, {_counted(f.documents, 'document')}" if f.documents else f.why,
        )
        for f in report.files
    ]
    lengths = [
        (f.file, row.side, row.unit, row.p50, row.p90, row.p99, row.max, None if row.cut is None else f"{row.cut:.1%}")
        for f in report.files
        for row in f.lengths
    ]
    parts = [
        table(files, ("file", "format", "records", "examples", "bad lines", "columns", "source", "target", "why")),
        table(lengths, ("file", "side", "unit", "p50", "p90", "p99", "max", "cut")) if lengths else "",
        "\n".join(line for f in report.files for line in _bad_lines(f)),
        "\n".join(f.error for f in report.files if f.error),
        "" if report.problems else "nothing wrong",
    ]
    return "\n\n".join(part for part in parts if part)


class _Tally(Reader):
    """A reader that goes on past every bad line, counts them all and keeps the first few."""

    def __init__(self, file: str, config: Config) -> None:
        super().__init__([file], config.data.format, columns=(config.data.source, config.data.target))
        self.first: Record | None = None
        self.records = 0

    def __iter__(self) -> Iterator[Record]:
        self.records = 0
        for record in super().__iter__():
            self.first = self.first or record
            self.records += 1
            yield record

    def _count(self, message: str) -> None:
        self.bad_count += 1
        if len(self.bad) < SHOWN:
            self.bad.append(message)


def _check_file(file: str, task: Task, tokenizer: Tokenizer | None, config: Config) -> FileReport:
    reader = _Tally(file, config)
    found = _Found()
    error = ""
    try:
        if is_chat(next(iter(reader)).fields) and not task.source:
            _measure_chat(reader, tokenizer, config, found)
        else:
            _measure_pairs(reader, task, tokenizer, config, found)
    except InputError as problem:
        error = str(problem)
    if reader.bad and not reader.records:
        error = f"{file}: no records; {reader.bad_count:,} bad lines, the first: {reader.bad[0]}"
    name = sources.shown(file)
    source, target, why = _columns(task, reader.first)
    return FileReport(
        name,
        sources.format_of(file, config.data.format) or "unknown",
        sources.compression_of(file),
        reader.records,
        found.examples,
        reader.bad_count,
        tuple(line.replace(file, name) for line in reader.bad),
        tuple(reader.first.fields) if reader.first else (),
        source,
        target,
        why,
        tuple(
            Lengths.of(side, unit, lengths, found.limits[side] if unit == "tokens" else None)
            for (side, unit), lengths in found.lengths.items()
            if lengths
        ),
        error.replace(file, name),
        found.documents if source and source == target else 0,
    )


class _Found:
    """What was measured of a file so far."""

    def __init__(self) -> None:
        self.lengths: defaultdict[tuple[str, str], array[int]] = defaultdict(lambda: array("I"))
        self.limits: dict[str, int] = {}
        self.examples = self.documents = 0


def _measure_pairs(reader: Reader, task: Task, tokenizer: Tokenizer | None, config: Config, found: _Found) -> None:
    found.limits = {"source": config.data.max_source_length, "target": config.data.max_target_length}
    before = ""
    for block in _blocks(task.examples(reader)):
        found.examples += len(block)
        for example in block:
            found.documents += begins_document(example.where, before, config.data.format)
            before = example.where
        sides = {"source": [example.source for example in block], "target": [example.target for example in block]}
        for side, texts in sides.items():
            found.lengths[side, "characters"].extend(map(len, texts))
        if tokenizer is not None:
            for side, texts in sides.items():
                found.lengths[side, "tokens"].extend(len(ids) + 1 for ids in tokenizer.encode_batch(texts))


def _measure_chat(reader: Reader, tokenizer: Tokenizer | None, config: Config, found: _Found) -> None:
    template = Template(tokenizer) if tokenizer is not None else None
    found.limits = {"conversation": chat.lengths(config.data)[0]}
    for record in reader:
        try:
            messages = chat.checked_conversation(record.fields.get("messages"))
            shown = template.show(messages) if template is not None else None
        except BadField as error:
            reader.reject(record, str(error))
            continue
        found.examples += 1
        found.lengths["conversation", "messages"].append(len(messages))
        found.lengths["conversation", "characters"].append(sum(len(message["content"]) for message in messages))
        if shown is not None:
            found.lengths["conversation", "tokens"].append(len(shown.ids))
    if not found.examples:
        raise InputError(
            f"{reader.files[0]}: no conversations; {reader.bad_count:,} bad lines, the first: {reader.bad[0]}"
        )


def _columns(task: Task, record: Record | None) -> tuple[str, str, str]:
    """Source, target, and how they were told apart; nothing where they could not be."""
    if record is None:
        return "", "", ""
    if is_chat(record.fields) and not task.source:
        return "", "", "chat"
    try:
        columns = task.columns(record)
    except InputError:
        return "", "", ""  # the same error ended the file's reading and stands in its report
    return ".".join(columns.source), ".".join(columns.target), _why(task, columns)


def _why(task: Task, columns: Columns) -> str:
    if task.source:
        return "given"
    if columns.source == columns.target:
        return "plain text"
    names = columns.source[-1].lower(), columns.target[-1].lower()
    return "known names" if names in sources.PAIRS else "the only two text fields"


def _tokenizer(config: Config) -> Tokenizer | None:
    if not (config.model.tokenizer or config.model.path):
        return None
    from t2t.train.run import load_tokenizer  # brings torch along

    return load_tokenizer(config)


def _blocks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Examples in blocks; an error comes after the examples that were read before it."""
    block: list[Example] = []
    size, problem = 0, None
    try:
        for example in examples:
            block.append(example)
            size += len(example.source) + len(example.target)
            if size >= _BLOCK_CHARACTERS:
                yield block
                block, size = [], 0
    except InputError as error:
        problem = error
    yield block
    if problem:
        raise problem


def _problems(report: FileReport) -> Iterator[str]:
    if report.error:
        yield report.error
    elif report.bad_lines:
        first = report.first_bad_lines[0].removeprefix(f"{report.file}:")
        yield f"{report.file}: {_counted(report.bad_lines, 'bad line')}, the first at line {first}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _bad_lines(report: FileReport) -> Iterator[str]:
    yield from report.first_bad_lines
    more = report.bad_lines - len(report.first_bad_lines)
    if more:
        yield f"{report.file}: ... and {more:,} more bad lines"


def _render_environment(found: dict[str, Any]) -> str:
    rows = [
        *found["versions"].items(),
        *(("device", device) for device in found["devices"]),
        ("memory", human_bytes(found["memory"])),
        *((f"{name} (optional)", version or "not installed") for name, version in found["extras"].items()),
    ]
    return table(rows)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
