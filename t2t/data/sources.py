"""From names of files to records that know where they came from.

| suffix | one record is | fields |
|---|---|---|
| .jsonl .ndjson .json | a line that holds a JSON object | its keys |
| .csv | a row; quoted cells may hold commas, doubled quotes and newlines | header, or "0", "1", ... |
| .tsv | a line cut at tabs, without quoting | header, or "0", "1", ... |
| .txt | a line | text |
| .parquet | a row | its columns |
| .hdf5 .h5 | none: see `t2t.data.hdf5` | |
| ``dataset:NAME@SPLIT`` | a row: see `t2t.data.hub` | its columns |

Each file may also be compressed: .gz, .xz, .zst. Files are streamed, so memory does not grow with their size; so are
http:// and https:// addresses, whose path tells the format.
Blank lines are passed over; a byte-order mark and CRLF are dropped. A .json file that is one array or one
document is refused: JSON lines can be streamed and tell the line of an error.

The first row of a .csv or .tsv file is its header if columns are asked for by name; if they are asked for by
number ("0", "1") it is data; if none are asked for, it is a header when it holds both names of a pair in
``PAIRS``, or ``text``.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import lzma
import shutil
import tempfile
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from t2t.data import arrow, hub
from t2t.data.remote import Patient, is_remote
from t2t.errors import InputError, did_you_mean

_T = TypeVar("_T")

MAX_LINE_BYTES = 8 * 1024 * 1024
"""A longer line, or quoted CSV record, is a bad line."""

PAIRS = (
    ("source", "target"),
    ("src", "tgt"),
    ("input", "output"),
    ("question", "answer"),
    ("article", "highlights"),
    ("document", "summary"),
    ("text", "summary"),
    ("dialogue", "summary"),
    ("s", "t"),
)
"""Column names that are taken for source and target when none are given, in any case of letters."""

_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".hdf5": "hdf5",
    ".h5": "hdf5",
}
_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
_COMPRESSIONS = (".gz", ".xz", ".zst")
BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)
# First bytes that no UTF-8 text has, and what to do about them.
_NOT_TEXT = {
    b"\x1f\x8b": "holds gzip data: its name should end in .gz",
    b"\xfd7zXZ\0": "holds xz data: its name should end in .xz",
    b"\x28\xb5\x2f\xfd": "holds zstd data: its name should end in .zst",
    b"PAR1\x15": 'holds parquet data: its name should end in .parquet, or set data.format = "parquet"',
    b"\xff\xfe": "holds UTF-16 text: convert it to UTF-8",
    b"\xfe\xff": "holds UTF-16 text: convert it to UTF-8",
}


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of one line or row, and where it stands (lines and rows count from 1).

    >>> Record({"text": "Bună ziua"}, "ro.txt", 3).fields["text"]
    'Bună ziua'
    """

    fields: dict[str, Any]
    file: str
    line: int

    @property
    def where(self) -> str:
        """How messages begin: ``file:line``.

        >>> Record({}, "pairs.tsv", 7).where
        'pairs.tsv:7'
        """
        return f"{self.file}:{self.line}"


def resolve(patterns: Sequence[str], key: str = "data.train") -> list[str]:
    """The files that a config entry names: paths, globs (sorted), and ``asset:NAME`` for one the package carries.

    A dataset, ``dataset:NAME``, stays one name, with its split (see `t2t.data.hub`); addresses (http://, https://) stay
    as they are.

    >>> resolve(["no/such/pairs.tsv"])
    Traceback (most recent call last):
    t2t.errors.InputError: data.train: no such file: no/such/pairs.tsv
    """
    return [file for pattern in patterns for file in _resolve(pattern, key)]


def shown(file: str | Path) -> str:
    """A file's name for a person to read: what `resolve` takes.

    >>> shown(resolve(["asset:NOTICE.md"])[0]), shown("data/pairs.tsv")
    ('asset:NOTICE.md', 'data/pairs.tsv')
    """
    path, assets = Path(file), _assets()
    return f"asset:{path.relative_to(assets).as_posix()}" if path.is_relative_to(assets) else str(file)


def type_name(value: Any) -> str:
    """What a value is, in JSON's words.

    >>> type_name(None), type_name(True), type_name(3)
    ('null', 'a boolean', 'a number')
    """
    if isinstance(value, hub.Undecoded):
        return value.what
    return _TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


class Reader:
    """The records of several files, one by one, with one policy for bad lines.

    Under ``on_bad_line="error"`` the first one raises; under ``"skip"`` they are kept in ``bad`` ("file:line: what",
    of the latest pass) and raise once there are more than ``max_bad_lines``. ``columns`` are the names that the user
    gave, which decide whether a .csv or .tsv file has a header (see the module). A file that fails is opened again
    ``retries`` times in a row.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "pairs.jsonl")
    ...     _ = file.write_text('{"s": "1 2", "t": "2 1"}\\n{"s": \\n')
    ...     reader = Reader([file], on_bad_line="skip")
    ...     fields = [record.fields for record in reader]
    >>> fields
    [{'s': '1 2', 't': '2 1'}]
    >>> [message.removeprefix(str(file)) for message in reader.bad]
    [':2: invalid JSON: Expecting value (column 7)']
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        format: str = "auto",
        on_bad_line: str = "error",
        max_bad_lines: int = 1000,
        columns: Sequence[str] = (),
        retries: int = 0,
        streaming: bool = False,
    ) -> None:
        self.files = [str(file) for file in files]
        self.format = format
        self.on_bad_line = on_bad_line
        self.max_bad_lines = max_bad_lines
        self.columns = [column for column in columns if column]
        self.retries = retries
        self.streaming = streaming
        self.bad: list[str] = []
        self.bad_count = 0

    def __iter__(self) -> Iterator[Record]:
        self.bad, self.bad_count = [], 0
        for file in self.files:
            bad_before, good = len(self.bad), 0
            with closing(parsed(file, self.format, self.columns, 0, self.retries, self.streaming)) as rows:
                for row in rows:
                    if row.error:
                        self._count(f"{file}:{row.line}: {row.error}")
                    else:
                        good += 1
                        yield Record(row.value, file, row.line)
            if not good:
                bad = self.bad[bad_before:]
                raise InputError(
                    f"{file}: no records" + (f"; {len(bad)} bad lines, the first: {bad[0]}" if bad else "")
                )

    def reject(self, record: Record, message: str) -> None:
        """Treat a record as a bad line, for a reason that only a later stage can see.

        >>> Reader([]).reject(Record({}, "a.jsonl", 7), "field 'target' is null")
        Traceback (most recent call last):
        t2t.errors.InputError: a.jsonl:7: field 'target' is null
        """
        self._count(f"{record.where}: {message}")

    def _count(self, message: str) -> None:
        self.bad_count += 1
        if self.on_bad_line == "error":
            raise InputError(message)
        if self.bad_count > self.max_bad_lines:
            first = "; ".join([*self.bad, message][:3])
            raise InputError(f"more than data.max_bad_lines = {self.max_bad_lines} bad lines, the first: {first}")
        self.bad.append(message)


class Item(NamedTuple, Generic[_T]):
    """What one line (or row) gave: a value, or what is wrong with it."""

    line: int
    value: _T
    error: str = ""


def _assets() -> Path:
    return Path(str(resources.files("t2t") / "assets"))


def _resolve(pattern: str, key: str) -> list[str]:
    if hub.is_dataset(pattern):
        return [hub.resolve(pattern, key)]
    if is_remote(pattern):
        return [pattern]
    if pattern.startswith("asset:"):
        path = _assets() / pattern.removeprefix("asset:")
    else:
        path = Path(pattern)
    if path.is_dir():
        found = [p.name for p in sorted(path.iterdir()) if _suffixes(p)[0] in _FORMATS]
        example = f"*{''.join(_suffixes(found[0]))}" if found else "*.jsonl"
        raise InputError(f"{key}: {pattern} is a folder: name its files, as {pattern.rstrip('/')}/{example}")
    if path.exists():
        return [str(path)]
    if glob.has_magic(pattern):
        files = [str(Path(name)) for name in sorted(glob.glob(pattern, recursive=True)) if not Path(name).is_dir()]
        if not files:
            raise InputError(f"{key}: no file matches {pattern}")
        return files
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise InputError(f"{key}: no such file: {pattern}{did_you_mean(path.name, beside)}")


def format_of(file: str | Path, format: str = "auto") -> str | None:
    """The format that a file is read as: the given one, or what its name says; None where that says nothing.

    >>> format_of("ro.txt.xz"), format_of("pairs.dat", "tsv"), format_of("pairs.dat")
    ('txt', 'tsv', None)
    """
    if hub.is_dataset(str(file)):
        return "dataset"
    return _FORMATS.get(_suffixes(file)[0]) if format == "auto" else format


def compression_of(file: str | Path) -> str:
    """The suffix that says how a file is compressed, or nothing.

    >>> compression_of("ro.txt.xz"), compression_of("pairs.tsv")
    ('.xz', '')
    """
    return _suffixes(file)[1]


def _suffixes(file: str | Path) -> tuple[str, str]:
    """The suffix that tells the format, and the compression's or nothing."""
    path = Path(urlsplit(str(file)).path if is_remote(file) else file)
    if path.suffix.lower() in _COMPRESSIONS:
        return Path(path.stem).suffix.lower(), path.suffix.lower()
    return path.suffix.lower(), ""


def parsed(
    file: str, format: str, columns: Sequence[str], start: int = 0, retries: int = 0, streaming: bool = False
) -> Generator[Item[dict[str, Any]], None, None]:
    """What the lines or rows of a file give, without the first ``start`` of them; of a dataset maybe as they come."""
    if hub.is_dataset(file):
        yield from (_row(number, row) for number, row in hub.rows(file, start, streaming, columns))
        return
    kind, compression = text_format(file, format), compression_of(file)
    with opened(file, compression, text=kind != "parquet", retries=retries) as stream:
        if kind == "parquet":
            yield from _parquet(file, stream, bool(compression) or is_remote(file), start)
        else:
            items = parsed_lines(file, kind, decoded(_raw_lines(file, stream)), columns)
            yield from (item for item in items if item.line > start) if start else items


def text_format(file: str, format: str) -> str:
    """The format that a file's text is read by."""
    kind = format_of(file, format)
    if kind is None:
        known = ", ".join(_FORMATS)
        suffix = _suffixes(file)[0]
        raise InputError(f"{file}: no format known by the name {suffix!r} ({known}): rename it or set data.format")
    if kind == "hdf5":
        raise InputError(f"{file}: HDF5 shards hold masked tokens, not text: they are for training masked models")
    return kind


def parsed_lines(
    file: str,
    kind: str,
    lines: Iterator[Item[str]],
    columns: Sequence[str],
    names: Sequence[str] = (),
    begins: bool = True,
) -> Iterator[Item[dict[str, Any]]]:
    """What lines give, of a file's beginning, or of its middle, where ``names`` are the columns of a table."""
    match kind:
        case "jsonl":
            yield from _jsonl(file, lines, begins)
        case "csv":
            yield from _table(file, _csv(lines), columns, names)
        case "tsv":
            cells = (Item(n, text.split("\t"), error) for n, text, error in lines if text or error)
            yield from _table(file, cells, columns, names)
        case "txt":
            yield from (Item(n, {"text": text}, error) for n, text, error in lines if text.strip() or error)
        case _:
            raise AssertionError(kind)


@contextmanager
def opened(file: str, compression: str, text: bool, retries: int = 0, start: int = 0) -> Iterator[io.BufferedReader]:
    """The unpacked bytes of a file from ``start`` on; one that fails is opened again, ``retries`` times in a row."""
    with ExitStack() as stack:
        raw: Any = stack.enter_context(io.BufferedReader(Patient(file, retries), 2**17))
        if start and not compression:  # its beginning was looked at when it was read
            raw.seek(start)
            yield raw
            return
        head = raw.peek(8)
        if not head:
            raise InputError(f"{file}: no records: the file is empty")
        for magic, advice in _NOT_TEXT.items():
            if text and not compression and head.startswith(magic):
                raise InputError(f"{file}: {advice}")
        match compression:
            case ".gz":
                unpacked: Any = stack.enter_context(gzip.GzipFile(fileobj=raw))
            case ".xz":
                unpacked = stack.enter_context(lzma.LZMAFile(raw))
            case ".zst":
                unpacked = _ZstdFile(file, raw)
            case _:
                yield raw
                return
        stream = io.BufferedReader(unpacked)
        while start and (passed := len(stream.read(min(start, 2**20)))):
            start -= passed
        yield stream


class _ZstdFile(io.RawIOBase):
    """Decompresses frame after frame; zstandard's own reader takes a cut file for a whole one."""

    # Small, because one call gives all that these bytes expand to.
    CHUNK = 4096

    def __init__(self, file: str, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise InputError(f"{file}: .zst files need the zstandard package: pip install zstandard") from None
        self._zstd = zstandard
        self._raw = raw
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(self.CHUNK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._zstd.ZstdDecompressor().decompressobj()
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._zstd.ZstdError as error:
            raise OSError(str(error)) from None
        self._input = self._frame.unused_data
        if self._frame.eof:
            self._frame = None


def _raw_lines(file: str, stream: io.BufferedReader) -> Iterator[bytes | None]:
    number = 0
    try:
        while True:
            line, size = raw_line(stream)
            if not size:
                return
            number += 1
            yield line
    except BROKEN as error:
        raise InputError(f"{file}: cut or broken after line {number}: {error}") from None


def raw_line(stream: io.BufferedReader) -> tuple[bytes | None, int]:
    """The next line with its newline, or None for one that is too long, and how many bytes it has: none at the end."""
    raw = stream.readline(MAX_LINE_BYTES + 1)
    if len(raw) <= MAX_LINE_BYTES or raw.endswith(b"\n"):
        return raw, len(raw)
    size = len(raw)
    while raw and not raw.endswith(b"\n"):
        raw = stream.readline(MAX_LINE_BYTES)
        size += len(raw)
    return None, size


def decoded(lines: Iterable[bytes | None], numbers: Iterable[int] | None = None) -> Iterator[Item[str]]:
    """The lines as text, numbered. They were cut as bytes, at newlines alone: U+2028 and the like are text."""
    for number, raw in zip(count(1) if numbers is None else numbers, lines, strict=False):
        if raw is None:
            yield Item(number, "", f"longer than {MAX_LINE_BYTES:,} bytes: expected one record a line")
            continue
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        yield _decode(number, raw.removesuffix(b"\n").removesuffix(b"\r"))


def _decode(number: int, raw: bytes) -> Item[str]:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        # The readable rest still tells CSV where its quotes are.
        return Item(number, raw.decode(errors="replace"), f"invalid UTF-8 at byte {error.start + 1} of the line")
    return Item(number, text, "holds a NUL character" if "\0" in text else "")


def _jsonl(file: str, lines: Iterator[Item[str]], first: bool) -> Iterator[Item[dict[str, Any]]]:
    for number, text, error in lines:
        if not error and not text.strip():
            continue
        value: Any = None
        if not error:
            try:
                value = json.loads(text)
            except json.JSONDecodeError as wrong:
                error = f"invalid JSON: {wrong.msg} (column {wrong.colno})"
            except (ValueError, RecursionError) as wrong:
                error = f"invalid JSON: {wrong}"
            if first and _is_document(text.strip(), value):
                advice = "write one object a line; jq -c '.[]' FILE.json > FILE.jsonl does it for an array"
                raise InputError(f"{file}:{number}: one JSON document, not JSON lines: {advice}")
            if not error and not isinstance(value, dict):
                error = f"{type_name(value)}, where a JSON object is expected"
        first = False
        yield Item(number, value, error)


def _is_document(line: str, value: Any) -> bool:
    """Whether a first line shows that the whole file is one JSON value: an array, or an object around one."""
    if value is None:
        return line.startswith("[") or line == "{"
    items = value.get("data") if isinstance(value, dict) else value
    return isinstance(items, list) and bool(items) and isinstance(items[0], dict)


def _csv(lines: Iterator[Item[str]]) -> Iterator[Item[list[str]]]:
    """The rows. A row that does not parse costs its first line alone: the next one is read anew from there."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    taken: list[Item[str]] = []
    again: deque[Item[str]] = deque()

    def feed() -> Iterator[str]:
        size = 0
        while line := again.popleft() if again else next(lines, None):
            size = len(line.value) + (size if taken else 0)
            taken.append(line)
            if size > MAX_LINE_BYTES:
                raise csv.Error(f"a row longer than {MAX_LINE_BYTES:,} bytes")
            yield line.value + "\n"

    while True:
        try:
            for cells in csv.reader(feed(), strict=True):
                first, wrong = taken[0], [line for line in taken if line.error]
                taken.clear()
                if wrong:
                    yield Item(wrong[0].line, [], wrong[0].error)
                elif cells:
                    yield Item(first.line, cells)
            return
        except csv.Error as error:
            first = taken[0]
            again.extendleft(reversed(taken[1:]))
            taken.clear()
            what = f"invalid CSV: {error} (a quote that is not closed, or not doubled?)"
            yield Item(first.line, [], first.error or what)


def _table(
    file: str, rows: Iterator[Item[list[str]]], columns: Sequence[str], names: Sequence[str] = ()
) -> Iterator[Item[dict[str, Any]]]:
    for number, cells, error in rows:
        if not names and not error:
            names, named = table_head(file, number, cells, columns)
            if named:
                continue
        if not error and len(cells) != len(names):
            error = f"{len(cells)} columns, where the first row has {len(names)}"
        yield Item(number, dict(zip(names, cells, strict=False)), error)


def table_head(file: str, number: int, cells: list[str], columns: Sequence[str]) -> tuple[Sequence[str], bool]:
    """The names of a table's columns by its first row, and whether that is a header."""
    if not _is_header(cells, columns):
        return [str(n) for n in range(len(cells))], False
    names = [cell.strip() for cell in cells]
    if len(set(names)) < len(names):
        raise InputError(f"{file}:{number}: a column name stands twice in the header: {', '.join(names)}")
    return names, True


def _is_header(cells: list[str], columns: Sequence[str]) -> bool:
    if columns:
        return not all(column.isdecimal() for column in columns)
    names = {cell.strip().lower() for cell in cells}
    return "text" in names or any(names.issuperset(pair) for pair in PAIRS)


def _parquet(file: str, stream: io.BufferedReader, spool: bool, start: int) -> Iterator[Item[dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{file}: parquet files need the pyarrow package: pip install pyarrow") from None
    number = 0
    # A parquet file is read from its end, which neither a compressed nor a remote stream can seek.
    with tempfile.TemporaryFile() if spool else nullcontext(stream) as seekable:
        try:
            if spool:
                shutil.copyfileobj(stream, seekable)
            opened = parquet.ParquetFile(seekable)
            sizes = [opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups)]
            groups = list(range(len(sizes)))
            while groups and number + sizes[groups[0]] <= start:
                number += sizes[groups.pop(0)]
            for batch in opened.iter_batches(batch_size=256, row_groups=groups):
                for row in arrow.rows(batch):
                    number += 1
                    if number <= start:
                        continue
                    yield _row(number, row)
        except (pyarrow.ArrowException, *BROKEN) as error:
            what = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"{file}: not a whole parquet file (read to row {number}): {what}") from None


def _row(number: int, row: dict[str, Any] | None) -> Item[dict[str, Any]]:
    return Item(number, row or {}, "" if row is not None else "invalid UTF-8")
