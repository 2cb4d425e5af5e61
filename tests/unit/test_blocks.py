"""Blocks give what whole files give, from any place on, whatever the format and the compression."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from t2t.data.blocks import BEGINNING, Block, BlockReader, Place, Share, blocks
from t2t.data.sources import MAX_LINE_BYTES, Reader
from t2t.errors import InputError

LINES = {
    "jsonl": [
        "\ufeff" + json.dumps({"s": "ă", "t": "a"}),
        "",
        *(json.dumps({"s": str(i), "t": "x"}) for i in range(9)),
    ],
    "tsv": ["source\ttarget", *(f"{i}\tș{i}" for i in range(11))],
    "csv": ["source,target", *(f'"{i}\n{i}",ș{i}' for i in range(11))],
    "txt": ["one", "", "two", "three", "", "", *map(str, range(8))],
}
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def made(folder: Path, kind: str, compression: str = "") -> str:
    file = folder / f"data.{kind}{compression}"
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"source": [str(i) for i in range(11)], "target": ["x"] * 11})
        parquet.write_table(table, file, row_group_size=4)
    elif compression == ".zst":
        import zstandard

        file.write_bytes(zstandard.compress("\n".join(LINES[kind]).encode()))
    else:
        file.write_bytes(PACK[compression]("\r\n".join(LINES[kind]).encode()))
    return str(file)


def records(found: list[Block]) -> list[tuple[str, dict[str, object]]]:
    return [(record.where, record.fields) for block in found for record in BlockReader(block)]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("kind", [*LINES, "parquet"])
def test_blocks_hold_what_the_file_holds(kind: str, size: int, tmp_path: Path) -> None:
    file = made(tmp_path, kind)
    whole = [(record.where, record.fields) for record in Reader([file])]
    found = list(blocks(file, records=size))
    assert records(found) == whole
    assert all(len(block) <= size for block in found)


@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", [*LINES, "parquet"])
def test_reading_goes_on_from_any_block(kind: str, compression: str, tmp_path: Path) -> None:
    if kind == "parquet" and compression:
        return
    file = made(tmp_path, kind, compression)
    found = list(blocks(file, records=3))
    for i, place in enumerate([BEGINNING, *(block.end for block in found)]):
        assert records(list(blocks(file, records=3, start=place))) == records(found[i:])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", [*LINES, "parquet"])
def test_readers_share_every_block(kind: str, documents: bool, tmp_path: Path) -> None:
    file = made(tmp_path, kind)
    whole = [(record.where, record.fields) for record in Reader([file])]
    shares = [list(blocks(file, records=2, documents=documents, share=Share(n, 3))) for n in range(3)]
    assert documents or all(records(share) for share in shares)
    assert sorted(item for share in shares for item in map(str, records(share))) == sorted(map(str, whole))
    assert len({tuple(block.end for block in share) for share in shares}) == 1
    for place in (block.end for block in shares[1]):
        left = [block for block in shares[1] if block.end > place]
        assert records(list(blocks(file, records=2, start=place, documents=documents, share=Share(1, 3)))) == records(
            left
        )


def test_a_header_below_bad_lines_is_still_one(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_bytes(b"\xff\n\nsource\ttarget\na\tb\nc\td\n")
    found = [record.fields for block in blocks(str(file), records=1) for record in BlockReader(block, "skip")]
    assert found == [{"source": "a", "target": "b"}, {"source": "c", "target": "d"}]


def test_parts_of_a_block_keep_their_lines(tmp_path: Path) -> None:
    (block,) = blocks(made(tmp_path, "txt"), documents=True)
    units = block.units(documents=True)
    assert [record.where.rpartition(":")[2] for record in BlockReader(block.part([units[1], units[0]]))] == [
        "3",
        "4",
        "1",
    ]


def test_documents_are_not_parted(tmp_path: Path) -> None:
    file = made(tmp_path, "txt")
    found = [b"".join(line or b"" for line in block.lines).split() for block in blocks(file, records=1, documents=True)]
    assert found == [[b"one"], [b"two", b"three"], [], [str(i).encode() for i in range(8)]]


def test_a_line_that_is_too_long_is_a_bad_line_and_costs_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"a\n" + b"x" * (3 * MAX_LINE_BYTES) + b"\nb\n")
    first, last = blocks(str(file), records=9)
    reader = BlockReader(first, on_bad_line="skip")
    assert [record.fields["text"] for record in reader] == ["a"]
    assert reader.bad_count == 1 and first.lines == [b"a\n", None]
    assert records([last]) == [(f"{file}:3", {"text": "b"})]
    assert last.end == Place(3, file.stat().st_size)


def test_an_array_in_the_middle_is_a_bad_line_and_at_the_beginning_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"s": 1}\n[{"s": 2}]\n')
    _, second = blocks(str(file), records=1)
    with pytest.raises(InputError, match=":2: an array, where a JSON object is expected"):
        list(BlockReader(second))
    file.write_text('[{"s": 2}]\n')
    with pytest.raises(InputError, match=":1: one JSON document"):
        records(list(blocks(str(file))))


def test_a_cut_file_says_after_which_line(tmp_path: Path) -> None:
    file = Path(made(tmp_path, "jsonl", ".gz"))
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(InputError, match="cut or broken after line"):
        list(blocks(str(file), records=2))
