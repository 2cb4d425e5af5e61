"""Files in blocks of consecutive lines or rows, so that processes can share the work and reading can go on anywhere.

Where a line is a record (JSON lines, TSV, plain text) a block holds lines as they are: reading one costs next to
nothing beside parsing it, which is left to whoever takes it. Rows of CSV and parquet files are parsed when read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from t2t.data.sources import (
    BROKEN,
    Item,
    Reader,
    Record,
    compression_of,
    decoded,
    opened,
    parsed,
    parsed_lines,
    raw_line,
    text_format,
)
from t2t.errors import InputError

MOST_BYTES = 4 * 2**20
"""A block ends once it has so many bytes, however few lines that is."""

_BY_LINES = ("jsonl", "tsv", "txt")


class Place(NamedTuple):
    """How far a file was read: lines or rows, and where lines are records the bytes of its unpacked text."""

    line: int = 0
    byte: int = 0


BEGINNING = Place()


@dataclass(frozen=True)
class Block:
    """Consecutive lines, each as it is (None: too long), or rows, of one file, and where reading goes on after them."""

    file: str
    kind: str
    first: int
    lines: Sequence[bytes | None]
    rows: Sequence[Item[dict[str, Any]]]
    columns: Sequence[str]
    names: Sequence[str]
    end: Place

    def __len__(self) -> int:
        return len(self.lines) or len(self.rows)

    def items(self) -> Iterator[Item[dict[str, Any]]]:
        """What each line or row gave; blank lines give nothing."""
        if not self.lines:
            return iter(self.rows)
        lines = decoded(self.lines, self.first)
        return parsed_lines(self.file, self.kind, lines, self.columns, self.names, begins=self.first == 1)


class BlockReader(Reader):
    """The records of a block, under the same policy for bad lines as those of whole files.

    >>> block = Block("a.txt", "txt", 7, [b"one\\n", b"\\xff\\n"], (), (), (), Place(8, 100))
    >>> reader = BlockReader(block, on_bad_line="skip")
    >>> [(record.where, record.fields) for record in reader], reader.bad
    ([('a.txt:7', {'text': 'one'})], ['a.txt:8: invalid UTF-8 at byte 1 of the line'])
    """

    def __init__(self, block: Block, on_bad_line: str = "error", max_bad_lines: int = 1000) -> None:
        super().__init__((), "auto", on_bad_line, max_bad_lines)
        self.block = block

    def __iter__(self) -> Iterator[Record]:
        self.bad, self.bad_count = [], 0
        for item in self.block.items():
            if item.error:
                self._count(f"{self.block.file}:{item.line}: {item.error}")
            else:
                yield Record(item.value, self.block.file, item.line)


def blocks(
    file: str,
    format: str = "auto",
    columns: Sequence[str] = (),
    records: int = 1000,
    start: Place = BEGINNING,
    documents: bool = False,
) -> Generator[Block, None, None]:
    """The blocks of a file from a place on, each of ``records`` lines or rows, fewer where these are long.

    With ``documents`` those of .txt files end at blank lines, so that none parts a document.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "pairs.tsv")
    ...     _ = file.write_text("source\\ttarget\\na\\tb\\nc\\td\\ne\\tf\\n")
    ...     first, second = blocks(str(file), records=2)
    ...     again = next(blocks(str(file), records=2, start=first.end))
    >>> [item.value for item in first.items()], [item.value["source"] for item in second.items()]
    ([{'source': 'a', 'target': 'b'}], ['c', 'e'])
    >>> first.end, again == second
    (Place(line=2, byte=18), True)
    """
    kind = text_format(file, format)
    if kind in _BY_LINES:
        return _line_blocks(file, kind, columns, records, start, documents and kind == "txt")
    return _row_blocks(file, kind, format, columns, records, start)


def _row_blocks(
    file: str, kind: str, format: str, columns: Sequence[str], records: int, start: Place
) -> Generator[Block, None, None]:
    with closing(parsed(file, format, columns, start.line)) as items:
        while rows := list(islice(items, records)):
            yield Block(file, kind, rows[0].line, (), rows, columns, (), Place(rows[-1].line))


def _line_blocks(
    file: str, kind: str, columns: Sequence[str], records: int, start: Place, documents: bool
) -> Generator[Block, None, None]:
    number, byte = start
    names = _names(file, kind, columns) if kind == "tsv" and number else ()
    try:
        with opened(file, compression_of(file), text=True) as stream:
            if compression_of(file):
                _skip(stream, byte)
            else:
                stream.seek(byte)
            while True:
                lines: list[bytes | None] = []
                began, blank = byte, False
                while (len(lines) < records and byte - began < MOST_BYTES) or (documents and not blank):
                    line, size = raw_line(stream)
                    if not size:
                        break
                    lines.append(line)
                    byte += size
                    blank = line is not None and not line.strip()
                if not lines:
                    return
                yield Block(file, kind, number + 1, lines, (), columns, names, Place(number + len(lines), byte))
                number += len(lines)
                if kind == "tsv" and not names:
                    names = _names(file, kind, columns)
    except BROKEN as error:
        raise InputError(f"{file}: cut or broken after line {number}: {error}") from None


def _skip(stream: Any, count: int) -> None:
    while count > 0:
        read = len(stream.read(min(count, 2**20)))
        if not read:
            return
        count -= read


def _names(file: str, kind: str, columns: Sequence[str]) -> Sequence[str]:
    """The columns of a table, by its first good row."""
    with closing(parsed(file, kind, columns)) as items:
        return tuple(next((item.value for item in items if not item.error), {}))
