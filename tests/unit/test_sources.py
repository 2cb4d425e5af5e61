"""Reading files: every format and compression, every kind of bad line, with its exact place."""

from __future__ import annotations

import builtins
import csv
import gzip
import io
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t2t.data import remote, sources
from t2t.data.sources import MAX_LINE_BYTES, Reader, Record, resolve
from t2t.errors import InputError

PAIRS = [{"source": "Bună ziua", "target": 'Good "day", all'}, {"source": "a\u2028b\x85c", "target": "d e"}]
COMPRESSIONS = ("", ".gz", ".xz", ".zst")


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def compress(data: bytes, compression: str) -> bytes:
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}
    return pack[compression](data) if compression else data


def parquet(table: dict[str, Any]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    sink = io.BytesIO()
    write_table(pyarrow.table(table), sink, row_group_size=2)
    return sink.getvalue()


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def rows(*files: Path, **settings: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(record.line, record.fields) for record in Reader(files, **settings)]


def error(*files: Path, **settings: Any) -> str:
    """The message of the error that reading raises, less the folder."""
    with pytest.raises(InputError) as caught:
        rows(*files, **settings)
    return str(caught.value).replace(f"{files[0].parent}/", "")


def skipped(file: Path, **settings: Any) -> tuple[list[int], list[str]]:
    """Lines read and messages of the lines skipped."""
    reader = Reader([file], on_bad_line="skip", **settings)
    good = [record.line for record in reader]
    assert reader.bad_count == len(reader.bad)
    return good, [message.replace(f"{file.parent}/", "") for message in reader.bad]


def as_bytes(format: str) -> tuple[bytes, list[dict[str, Any]]]:
    """The pairs in a format, and the fields that should come back."""
    if format in ("jsonl", "json", "ndjson"):
        return "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in PAIRS).encode(), PAIRS
    if format == "csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["source", "target"])
        writer.writeheader()
        writer.writerows(PAIRS)
        return text.getvalue().encode(), PAIRS
    if format == "tsv":
        return "".join(f"{pair['source']}\t{pair['target']}\n" for pair in PAIRS).encode(), [
            {"0": pair["source"], "1": pair["target"]} for pair in PAIRS
        ]
    if format == "txt":
        return "".join(f"{pair['source']}\n" for pair in PAIRS).encode(), [{"text": pair["source"]} for pair in PAIRS]
    return parquet({key: [pair[key] for pair in PAIRS] for key in PAIRS[0]}), PAIRS


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("format", ["jsonl", "json", "ndjson", "csv", "tsv", "txt", "parquet"])
def test_round_trip(tmp_path: Path, format: str, compression: str) -> None:
    data, fields = as_bytes(format)
    file = write(tmp_path / f"pairs.{format}{compression}", compress(data, compression))
    first = 2 if format == "csv" else 1
    assert rows(file) == [(first + n, field) for n, field in enumerate(fields)]


def test_records_know_their_file_and_files_come_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path / name, "x\n\ny\n") for name in ("b.txt", "a.txt")]
    assert [record.where for record in Reader(files)] == [f"{f}:{n}" for f in files for n in (1, 3)]
    assert Record({}, "a.txt", 3).where == "a.txt:3"


def test_format_can_be_given(tmp_path: Path) -> None:
    file = write(tmp_path / "train.ro.gz", gzip.compress(b"x\ty\n"))
    assert rows(file, format="txt") == [(1, {"text": "x\ty"})]
    assert rows(file, format="tsv") == [(1, {"0": "x", "1": "y"})]
    assert error(file).startswith("train.ro.gz: no format known by the name '.ro' (.jsonl, ")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("last", [True, False])
def test_bom_line_ends_and_missing_last_newline(tmp_path: Path, end: str, bom: str, last: bool) -> None:
    def text(*lines: str) -> str:
        return bom + end.join(lines) + (end if last else "")

    pair = {"source": "a", "target": "b"}
    assert rows(write(tmp_path / "a.jsonl", text(json.dumps(pair), "", json.dumps(pair)))) == [(1, pair), (3, pair)]
    assert rows(write(tmp_path / "a.csv", text("source,target", "a,b"))) == [(2, pair)]
    assert rows(write(tmp_path / "a.tsv", text("source\ttarget", "a\tb"))) == [(2, pair)]
    assert rows(write(tmp_path / "a.txt", text("a", " ", "b"))) == [(1, {"text": "a"}), (3, {"text": "b"})]


# Line 2 of three is bad; lines 1 and 3 are good.
BAD_LINES = {
    "a.jsonl": [
        (b'{"s": "1", "t"}', "invalid JSON: Expecting ':' delimiter (column 15)"),
        (b'{"s": "\xc8"}', "invalid UTF-8 at byte 8 of the line"),
        (b'{"s": "\0"}', "holds a NUL character"),
        (b'["1", "2"]', "an array, where a JSON object is expected"),
        (b"3", "a number, where a JSON object is expected"),
        (b"null", "null, where a JSON object is expected"),
        (b"[" * 100_000, "invalid JSON: maximum recursion depth exceeded"),
        (b"9" * 5000, "invalid JSON: Exceeds the limit"),
        (b"x" * (MAX_LINE_BYTES + 1), "longer than 8,388,608 bytes: expected one record a line"),
    ],
    "a.txt": [
        (b"abc\xff", "invalid UTF-8 at byte 4 of the line"),
        (b"a\0b", "holds a NUL character"),
        (b"x" * 10_000_000, "longer than 8,388,608 bytes: expected one record a line"),
    ],
    "a.tsv": [
        (b"a\tb\tc", "3 columns, where the first row has 2"),
        (b"a", "1 columns, where the first row has 2"),
        (b"a\t\xff", "invalid UTF-8 at byte 3 of the line"),
        (b"a\t\0", "holds a NUL character"),
    ],
    "a.csv": [
        (b"a,b,c", "3 columns, where the first row has 2"),
        (b'a,"\xff"', "invalid UTF-8 at byte 4 of the line"),
        (b"a,\0", "holds a NUL character"),
        (b'a,"b"c', "invalid CSV: ',' expected after '\"' (a quote that is not closed, or not doubled?)"),
        (b'a,"b', "invalid CSV: unexpected end of data (a quote that is not closed, or not doubled?)"),
        (b"x" * (MAX_LINE_BYTES + 1), "longer than 8,388,608 bytes: expected one record a line"),
    ],
}
GOOD_LINE = {"a.jsonl": b'{"s": "1", "t": "2"}', "a.txt": b"1", "a.tsv": b"1\t2", "a.csv": b"1,2"}


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        pytest.param(name, line, message, id=f"{name}-{message[:30]}")
        for name, cases in BAD_LINES.items()
        for line, message in cases
    ],
)
def test_bad_line_stops_or_is_skipped(tmp_path: Path, name: str, line: bytes, message: str) -> None:
    file = write(tmp_path / name, b"\n".join([GOOD_LINE[name], line, GOOD_LINE[name]]) + b"\n")
    assert error(file).startswith(f"{name}:2: {message}")
    good, bad = skipped(file)
    assert good == [1, 3]
    assert len(bad) == 1 and bad[0].startswith(f"{name}:2: {message}")


def test_cap_on_bad_lines(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"s": 1}\n' + "{\n" * 5)
    assert len(skipped(file, max_bad_lines=5)[1]) == 5
    message = "Expecting property name enclosed in double quotes (column 2)"
    assert error(file, on_bad_line="skip", max_bad_lines=4) == (
        "more than data.max_bad_lines = 4 bad lines, the first: "
        + "; ".join(f"a.jsonl:{n}: invalid JSON: {message}" for n in (2, 3, 4))
    )
    assert error(file, on_bad_line="skip", max_bad_lines=0).startswith("more than data.max_bad_lines = 0 bad lines, ")


def test_each_pass_counts_anew(tmp_path: Path) -> None:
    reader = Reader([write(tmp_path / "a.jsonl", '{"s": 1}\n{\n')], on_bad_line="skip")
    assert [len(list(reader)) for _ in range(3)] == [1, 1, 1]
    assert reader.bad_count == len(reader.bad) == 1


def test_reject_goes_through_the_same_policy(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"s": 1}\n{\n{"s": 2}\n')
    reader = Reader([file], on_bad_line="skip", max_bad_lines=2)
    records = list(reader)
    reader.reject(records[1], "field 't' is null")
    assert reader.bad[1] == f"{file}:3: field 't' is null" and reader.bad_count == 2
    with pytest.raises(InputError, match="more than data.max_bad_lines = 2 bad lines"):
        reader.reject(records[1], "again")
    with pytest.raises(InputError, match=r"a\.jsonl:3: field 't' is null$"):
        Reader([file]).reject(records[1], "field 't' is null")


def test_long_line_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 50_000)
    file = write(tmp_path / "a.txt", b"x" * 50_000 + b"\n" + b"y" * 5_000_000 + b"\n" + b"z" * 50_000)
    tracemalloc.start()
    good, bad = skipped(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert good == [1, 3] and bad == ["a.txt:2: longer than 50,000 bytes: expected one record a line"]
    assert peak < 1_000_000


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_file_without_records(tmp_path: Path, compression: str, data: bytes) -> None:
    good = write(tmp_path / "a.txt", "x\n")
    file = write(tmp_path / f"b.txt{compression}", compress(data, compression))
    assert error(good, file).startswith(f"b.txt{compression}: no records")
    assert error(write(file, b"")) == f"b.txt{compression}: no records: the file is empty"


def test_file_with_header_or_bad_lines_only(tmp_path: Path) -> None:
    assert error(write(tmp_path / "a.csv", "source,target\n")) == "a.csv: no records"
    file = write(tmp_path / "a.txt", b"\0\n\0\n")
    assert (
        error(file, on_bad_line="skip") == "a.txt: no records; 2 bad lines, the first: a.txt:1: holds a NUL character"
    )
    assert error(write(tmp_path / "a.parquet", parquet({"text": []}))) == "a.parquet: no records"


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_truncated_compressed_file(tmp_path: Path, compression: str, policy: str) -> None:
    data = compress("".join(f"line {n} {n * n % 7919}\n" for n in range(20_000)).encode(), compression)
    for size in (len(data) - 1, len(data) // 2):
        file = write(tmp_path / f"a.txt{compression}", data[:size])
        message = error(file, on_bad_line=policy)
        assert message.startswith(f"a.txt{compression}: cut or broken after line ")
        assert "end" in message.split(": ", 2)[2]
    assert int(message.split("after line ")[1].split(":")[0]) > 0


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_concatenated_compressed_files_are_read_whole(tmp_path: Path, compression: str) -> None:
    data = compress(b"a\nb", compression) + compress(b"c\nd\n", compression)
    file = write(tmp_path / f"a.txt{compression}", data)
    assert rows(file) == [(1, {"text": "a"}), (2, {"text": "bc"}), (3, {"text": "d"})]


def test_zstd_that_expands_much_is_read_in_parts(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt.zst", zstd(b"one line of text\n" * 300_000))
    assert sum(1 for _ in Reader([file])) == 300_000


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_not_the_compression_that_the_name_says(tmp_path: Path, compression: str) -> None:
    file = write(tmp_path / f"a.txt{compression}", "this is plain text\n")
    assert error(file).startswith(f"a.txt{compression}: cut or broken after line 0: ")
    plain = write(tmp_path / "a.txt", compress(b"x\n", compression))
    assert error(plain).endswith(f" data: its name should end in {compression}")


def test_not_the_format_that_the_name_says(tmp_path: Path) -> None:
    assert "a.txt: holds parquet data" in error(write(tmp_path / "a.txt", parquet({"text": ["a"]})))
    assert error(write(tmp_path / "a.jsonl", "hello\n")) == "a.jsonl:1: invalid JSON: Expecting value (column 1)"
    utf16 = write(tmp_path / "a.csv", "source,target\n".encode("utf-16"))
    assert error(utf16) == "a.csv: holds UTF-16 text: convert it to UTF-8"
    assert error(write(tmp_path / "a.parquet", "hello, this is text\n")).startswith(
        "a.parquet: not a whole parquet file (read to row 0): Parquet magic bytes not found"
    )


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_truncated_parquet(tmp_path: Path, compression: str) -> None:
    data = parquet({"text": [f"line {n}" for n in range(1000)]})
    start = f"a.parquet{compression}: not a whole parquet file (read to row 0): "
    packed = compress(data, compression)
    file = tmp_path / f"a.parquet{compression}"
    assert error(write(file, packed[: len(packed) // 2])).startswith(start)
    assert error(write(file, compress(data[:-1], compression))).startswith(start)


@pytest.mark.parametrize(
    "text",
    [
        '[{"s": "1", "t": "2"}]',
        '[\n{"s": "1", "t": "2"},\n{"s": "3", "t": "4"}\n]\n',
        '{"data": [{"s": "1"}]}',
        '{\n "data": []}',
    ],
)
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_json_document_is_refused_with_advice(tmp_path: Path, text: str, policy: str) -> None:
    message = error(write(tmp_path / "a.json", text), on_bad_line=policy)
    assert message.startswith("a.json:1: one JSON document, not JSON lines: write one object a line; jq -c")


def test_csv_quoting_and_line_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", 'source,target\r\n"two\r\nlines","a ""b"", c"\r\n\r\nd,e\r\n')
    assert rows(file) == [
        (2, {"source": "two\nlines", "target": 'a "b", c'}),
        (5, {"source": "d", "target": "e"}),
    ]


def test_csv_bad_line_inside_a_quoted_row(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", b'1,2\n"one\n\xff\nthree",b\n3,4\n')
    assert error(file) == "a.csv:3: invalid UTF-8 at byte 1 of the line"
    assert skipped(file)[0] == [1, 5]


def test_csv_open_quote_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["1,2", '3,"4', *(f"{n},x" for n in range(1000)), '5,"6"', '"7\n8",9']
    file = write(tmp_path / "a.csv", "\n".join(lines))
    good, bad = skipped(file)
    assert good == [n for n in range(1, 1005) if n != 2]
    assert bad == ["a.csv:2: invalid CSV: ',' expected after '\"' (a quote that is not closed, or not doubled?)"]
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    assert skipped(file)[0] == good
    assert error(file).startswith("a.csv:2: invalid CSV: a row longer than 1,000 bytes ")


def test_csv_field_beyond_the_limit_of_the_csv_module(tmp_path: Path) -> None:
    before = csv.field_size_limit(131_072)
    try:
        file = write(tmp_path / "a.csv", f'a,"{"x" * 1_000_000}"\n')
        assert [len(fields["1"]) for _, fields in rows(file)] == [1_000_000]
    finally:
        csv.field_size_limit(before)


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", '"a\tb "c"\n\td\n')
    assert rows(file) == [(1, {"0": '"a', "1": 'b "c"'}), (2, {"0": "", "1": "d"})]


@pytest.mark.parametrize(
    ("first", "columns", "header"),
    [
        ("Source,id,TARGET", (), True),
        ("text,label", (), True),
        ("source,other", (), False),
        ("en,ro", (), False),
        ("en,ro", ("en", "ro"), True),
        ("en,ro", ("de", "ro"), True),
        ("en,ro", ("", ""), False),
        ("source,target", ("0", "1"), False),
    ],
)
def test_header_rule(tmp_path: Path, first: str, columns: tuple[str, ...], header: bool) -> None:
    cells = first.split(",")
    for name, mark in (("a.csv", ","), ("a.tsv", "\t")):
        file = write(tmp_path / name, "\n".join(mark.join(row) for row in (cells, ["x"] * len(cells))))
        got = rows(file, columns=columns)
        assert len(got) == 2 - header
        assert list(got[0][1]) == (cells if header else [str(n) for n in range(len(cells))])


def test_header_names_must_differ(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "source,target,target\na,b,c\n")
    assert error(file) == "a.csv:1: a column name stands twice in the header: source, target, target"


def test_parquet_nested_values_and_row_numbers(tmp_path: Path) -> None:
    table = {"translation": [{"en": f"e{n}", "ro": None} for n in range(600)], "n": list(range(600))}
    got = rows(write(tmp_path / "a.parquet", parquet(table)))
    assert got[599] == (600, {"translation": {"en": "e599", "ro": None}, "n": 599})
    assert [line for line, _ in got] == list(range(1, 601))


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    texts = pyarrow.array([b"a", b"b", b"\xff", b"d", b"\xfe"]).view(pyarrow.string())
    file = write(tmp_path / "a.parquet", parquet({"text": texts}))
    assert error(file) == "a.parquet:3: invalid UTF-8"
    assert skipped(file) == ([1, 2, 4], ["a.parquet:3: invalid UTF-8", "a.parquet:5: invalid UTF-8"])


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    real = builtins.__import__

    def without(module: str, *rest: Any) -> Any:
        if module.split(".")[0] == package:
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    message = error(write(tmp_path / name, "x"))
    assert message.endswith(f"files need the {package} package: pip install {package}")


def test_early_stop_closes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[io.FileIO] = []

    class Spy(io.FileIO):
        def __init__(self, file: str) -> None:
            super().__init__(file)
            opened.append(self)

    monkeypatch.setattr(remote.io, "FileIO", Spy)
    records = iter(Reader([write(tmp_path / "a.txt.gz", gzip.compress(b"a\nb\n"))]))
    assert next(records).fields == {"text": "a"} and not opened[0].closed
    records.close()  # type: ignore[attr-defined]
    assert opened[0].closed


def test_resolve_files_and_globs(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "odd[1].txt"):
        write(tmp_path / name, "x\n")
    write_into = tmp_path / "deep"
    write_into.mkdir()
    write(write_into / "d.txt", "x\n")

    def names(*patterns: str) -> list[str]:
        return [str(Path(p).relative_to(tmp_path)) for p in resolve([f"{tmp_path}/{pattern}" for pattern in patterns])]

    assert names("c.jsonl", "?.txt") == ["c.jsonl", "a.txt", "b.txt"]
    assert names("odd[1].txt") == ["odd[1].txt"]
    assert names("*") == ["a.txt", "b.txt", "c.jsonl", "odd[1].txt"]
    assert names("**/d.txt") == ["deep/d.txt"]
    assert resolve([]) == []


def test_resolve_errors(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv.gz", "x")

    def message(pattern: str, key: str = "data.train") -> str:
        with pytest.raises(InputError) as caught:
            resolve([pattern], key)
        return str(caught.value).replace(f"{tmp_path}", "D")

    assert message(f"{tmp_path}/trian.tsv.gz") == (
        "data.train: no such file: D/trian.tsv.gz (did you mean train.tsv.gz?)"
    )
    assert message(f"{tmp_path}/none/x", "data.validation") == "data.validation: no such file: D/none/x"
    assert message(f"{tmp_path}/*.csv") == "data.train: no file matches D/*.csv"
    assert message(f"{tmp_path}/") == "data.train: D/ is a folder: name its files, as D/*.tsv.gz"
    assert message("asset:no-such-asset") == "data.train: no such file: asset:no-such-asset"


def test_resolve_asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "assets").mkdir()
    file = write(tmp_path / "assets" / "ro.txt", "x\n")
    monkeypatch.setattr(sources.resources, "files", lambda package: tmp_path)
    assert resolve(["asset:ro.txt"]) == [str(file)]
    with pytest.raises(InputError, match=r"data.train: no such file: asset:ro.tx \(did you mean ro.txt\?\)"):
        resolve(["asset:ro.tx"])


def test_unreadable_file(tmp_path: Path) -> None:
    assert error(tmp_path / "gone.txt") == "gone.txt: cannot be opened: No such file or directory"
