"""Files in blocks of consecutive lines or rows, so that processes can share the work and reading can go on anywhere.

Where a line is a record (JSON lines, TSV, plain text) a block holds lines as they are: reading one costs next to
nothing beside parsing it, which is left to whoever takes it. Rows of CSV and parquet files are parsed when read.

Several readers may share a block, each keeping every so-manieth line of it and passing over the rest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice, pairwise
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
    table_head,
    text_format,
)
from t2t.errors import InputError

MOST_BYTES = 4 * 2**20
"""A block ends once it has so many bytes, however few lines that is."""
LARGEST = 4 * MOST_BYTES
"""A document of a .txt file is parted once its block has so many bytes."""

_BY_LINES = ("jsonl", "tsv", "txt")


class Place(NamedTuple):
    """How far a file was read: lines or rows, and where lines are records the bytes of its unpacked text."""

    line: int = 0
    byte: int = 0


BEGINNING = Place()


class Share(NamedTuple):
    """One of several readers that share every block: it keeps the lines whose number, from 0, leaves this remainder."""

    number: int = 0
    readers: int = 1


WHOLE = Share()


@dataclass(frozen=True)
class Block:
    """Lines, each as it is (None: too long), or rows, of one file, and where reading goes on after them.

    ``names`` are the columns of a table that has its lines here, and ``header`` the line that tells them, 0: none does.
    """

    file: str
    kind: str
    numbers: Sequence[int]
    lines: Sequence[bytes | None]
    rows: Sequence[Item[dict[str, Any]]]
    columns: Sequence[str]
    names: Sequence[str]
    end: Place
    header: int = 0

    def __len__(self) -> int:
        return len(self.lines) or len(self.rows)

    def items(self) -> Iterator[Item[dict[str, Any]]]:
        """What each line or row gave; blank lines give nothing."""
        if not self.lines:
            return iter(self.rows)
        lines = (line for line in decoded(self.lines, self.numbers) if line.line != self.header)
        return parsed_lines(self.file, self.kind, lines, self.columns, self.names, begins=self.numbers[0] == 1)

    def units(self, documents: bool) -> list[range]:
        """Which lines or rows belong together: those of each document of a .txt file if asked, else each is alone.

        >>> block = Block("a.txt", "txt", range(1, 5), [b"one", b"two", b"", b"three"], (), (), (), BEGINNING)
        >>> block.units(documents=True), len(block.units(documents=False))
        ([range(0, 3), range(3, 4)], 4)
        """
        if not documents or self.kind != "txt":
            return [range(i, i + 1) for i in range(len(self))]
        ends = [i + 1 for i, line in enumerate(self.lines) if _blank(line)]
        return [range(start, stop) for start, stop in pairwise([0, *ends, len(self)]) if start < stop]

    def part(self, units: Sequence[range]) -> Block:
        """A block of some units, in the order given."""
        index = [i for unit in units for i in unit]
        if not self.lines:
            return replace(self, rows=[self.rows[i] for i in index])
        return replace(self, numbers=[self.numbers[i] for i in index], lines=[self.lines[i] for i in index])


class BlockReader(Reader):
    """The records of a block, under the same policy for bad lines as those of whole files.

    ``bad_before`` are bad lines that were met before and count too.

    >>> block = Block("a.txt", "txt", [7, 8], [b"one\\n", b"\\xff\\n"], (), (), (), Place(8, 100))
    >>> reader = BlockReader(block, on_bad_line="skip")
    >>> [(record.where, record.fields) for record in reader], reader.bad
    ([('a.txt:7', {'text': 'one'})], ['a.txt:8: invalid UTF-8 at byte 1 of the line'])
    """

    def __init__(
        self, block: Block, on_bad_line: str = "error", max_bad_lines: int = 1000, bad_before: int = 0
    ) -> None:
        super().__init__((), "auto", on_bad_line, max_bad_lines)
        self.block, self.bad_before = block, bad_before

    def __iter__(self) -> Iterator[Record]:
        self.bad, self.bad_count = [], self.bad_before
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
    share: Share = WHOLE,
    retries: int = 0,
    streaming: bool = False,
) -> Generator[Block, None, None]:
    """The blocks of a file from a place on, each of ``records`` lines or rows, fewer where these are long.

    With ``documents`` those of .txt files end at blank lines, so that none parts a document. Readers who ``share`` the
    blocks see so many times larger ones, all the same, and keep their part of each: lines, rows, or whole documents.

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
        return _line_blocks(file, kind, columns, records, start, documents and kind == "txt", share, retries)
    items = parsed(file, format, columns, start.line, retries, streaming)
    return _row_blocks(file, kind, items, columns, records, start, share)


def _row_blocks(
    file: str,
    kind: str,
    found: Generator[Item[dict[str, Any]], None, None],
    columns: Sequence[str],
    records: int,
    start: Place,
    share: Share,
) -> Generator[Block, None, None]:
    number = start.line
    with closing(found) as items:
        while rows := list(islice(items, records * share.readers)):
            mine = rows[(share.number - number) % share.readers :: share.readers]
            number = rows[-1].line
            yield Block(file, kind, (), (), mine, columns, (), Place(number))


def _line_blocks(
    file: str,
    kind: str,
    columns: Sequence[str],
    records: int,
    start: Place,
    documents: bool,
    share: Share,
    retries: int,
) -> Generator[Block, None, None]:
    number, byte = start
    names, header = _head(file, columns, retries) if kind == "tsv" else ((), 0)
    try:
        with opened(file, compression_of(file), text=True, retries=retries, start=byte) as stream:
            while True:
                lines: list[bytes | None] = []
                numbers: list[int] = []
                first, began, unit, blank = number, byte, number, True
                most, room = records * share.readers, MOST_BYTES * share.readers
                while (number - first < most and byte - began < room) or (
                    documents and not blank and byte - began < LARGEST * share.readers
                ):
                    line, size = raw_line(stream)
                    if not size:
                        break
                    number, byte, between, blank = number + 1, byte + size, blank, _blank(line)
                    if unit % share.readers == share.number:
                        lines.append(line)
                        numbers.append(number)
                    unit += (blank and not between) or not documents
                if number == first:
                    return
                yield Block(file, kind, numbers, lines, (), columns, names, Place(number, byte), header)
    except BROKEN as error:
        raise InputError(f"{file}: cut or broken after line {number}: {error}") from None


def _blank(line: bytes | None) -> bool:
    return line is not None and not line.strip()


def _head(file: str, columns: Sequence[str], retries: int) -> tuple[Sequence[str], int]:
    """The columns of a .tsv file, by its first good line, and the number of that line if it is a header."""
    with opened(file, compression_of(file), text=True, retries=retries) as stream:
        lines = iter(lambda: raw_line(stream), (b"", 0))
        for number, text, error in decoded(line for line, _ in lines):
            if text and not error:
                names, named = table_head(file, number, text.split("\t"), columns)
                return names, number if named else 0
    return (), 0
