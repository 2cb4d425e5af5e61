"""From records to examples: columns, transforms, pieces, prefix, and what counts as a bad line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from t2t.config import Data
from t2t.data.sources import Reader, Record
from t2t.data.tasks import Columns, Example, Task, pieces, source_texts, transform
from t2t.errors import InputError

GOOD = {"source": "a", "target": "b"}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(file: Path, task: Task | None = None, **settings: Any) -> list[tuple[str, str]]:
    return [(example.source, example.target) for example in (task or Task()).examples(Reader([file], **settings))]


def error(file: Path, task: Task | None = None, **settings: Any) -> str:
    """The message of the error that the task raises, less the folder."""
    with pytest.raises(InputError) as caught:
        read(file, task, **settings)
    return str(caught.value).replace(f"{file.parent}/", "")


def task_error(**settings: Any) -> str:
    with pytest.raises(InputError) as caught:
        Task(**settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "source", "target"),
    [
        ({"translation": {"s": "a", "t": "b"}}, "translation.s", "translation.t"),
        ({"translation": {"source": "a", "target": "b"}, "id": "x"}, "translation.source", "translation.target"),
        ({"target": "b", "source": "a", "title": "c"}, "source", "target"),
        ({"source": ["a"], "target": ["b"], "title": "c"}, "source", "target"),
        ({"id": 1, "src": "a", "tgt": "b"}, "src", "tgt"),
        ({"output": "b", "input": "a"}, "input", "output"),
        ({"question": "a", "answer": "b", "level": "c"}, "question", "answer"),
        ({"id": "x", "article": "a", "highlights": "b"}, "article", "highlights"),
        ({"document": "a", "summary": "b", "id": "x"}, "document", "summary"),
        ({"text": "a", "summary": "b", "title": "c"}, "text", "summary"),
        ({"t": "b", "s": "a"}, "s", "t"),
        ({"Source": "a", "TARGET": "b", "x": "c"}, "Source", "TARGET"),
        ({"0": "a", "1": "b"}, "0", "1"),
        ({"ro": "a", "n": 3, "en": "b"}, "ro", "en"),
        ({"text": "a"}, "text", "text"),
        ({"text": "a", "n": 3, "flag": None}, "text", "text"),
    ],
)
def test_columns_detected(fields: dict[str, Any], source: str, target: str) -> None:
    record = Record(fields, "f.jsonl", 1)
    assert Task().columns(record) == Columns(tuple(source.split(".")), tuple(target.split(".")))
    assert Task().describe(record) == f"source: {source}, target: {target}"


@pytest.mark.parametrize(
    ("fields", "columns", "advice"),
    [
        ({"translation": {"en": "a", "ro": "b"}}, "translation.en, translation.ro", ', as "en" and "ro"'),
        ({"0": "a", "1": "b", "2": "c"}, "0, 1, 2", ""),
        ({"sentence": "a"}, "sentence", ', as "sentence" and "sentence"'),
        ({"n": 3}, "n", ""),
    ],
)
def test_columns_not_detected(tmp_path: Path, fields: dict[str, Any], columns: str, advice: str) -> None:
    assert error(write(tmp_path / "a.jsonl", fields)) == (
        f"a.jsonl:1: cannot tell which of the columns {columns} are source and target: "
        f"set data.source and data.target{advice}"
    )


@pytest.mark.parametrize(
    ("name", "path"),
    [("ro", "translation.ro"), ("translation.ro", "translation.ro"), ("a.b", "a.b"), ("x.y.z", "x.y.z"), ("n", "n")],
)
def test_columns_given(name: str, path: str) -> None:
    fields = {"translation": {"ro": "1", "en": "2"}, "a.b": "3", "x": {"y": {"z": "4"}}, "n": None}
    task = Task(source=name, target="en")
    assert task.describe(Record(fields, "f", 1)) == f"source: {path}, target: translation.en"


def test_given_column_is_missing_in_the_first_record(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"translation": {"english": "a", "ro": "b"}, "id": 1})
    for policy in ("error", "skip"):
        assert error(file, Task(source="ro", target="translation.englsh"), on_bad_line=policy) == (
            "a.jsonl:1: data.target: no column 'translation.englsh' (did you mean translation.english?); "
            "found: translation.english, translation.ro, id"
        )
    assert error(file, Task(source="zzz", target="ro")).startswith("a.jsonl:1: data.source: no column 'zzz'; found: ")


def test_both_columns_or_none() -> None:
    missing = "is missing: give both columns (one name twice for plain text) or none"
    assert task_error(source="en") == f"data.target: {missing}"
    assert task_error(target="en") == f"data.source: {missing}"


def test_columns_are_told_for_each_file(tmp_path: Path) -> None:
    tsv = tmp_path / "b.tsv"
    tsv.write_text("e\tf\n")
    files = [write(tmp_path / "a.jsonl", {"s": "a", "t": "b"}), tsv]
    assert list(Task().examples(Reader(files))) == [
        Example("a", "b", f"{files[0]}:1"),
        Example("e", "f", f"{files[1]}:1"),
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"source": "a"}, "no field 'target'"),
        ({"source": "a", "target": None}, "field 'target' is null, expected text"),
        ({"source": 3, "target": "b"}, "field 'source' is a number, expected text"),
        ({"source": "a", "target": 0.5}, "field 'target' is a number, expected text"),
        ({"source": True, "target": "b"}, "field 'source' is a boolean, expected text"),
        ({"source": {"x": "a"}, "target": "b"}, "field 'source' is an object, expected text"),
        ({"source": ["a", None], "target": "b"}, "field 'source' is an array that holds null, expected strings"),
        ({"source": [], "target": "b"}, "field 'source' is empty"),
        ({"source": "a", "target": []}, "field 'target' is empty"),
        ({"source": "", "target": "b"}, "field 'source' is empty"),
        ({"source": "a", "target": " \u00a0\n"}, "field 'target' is empty"),
        ({"source": "a\0", "target": "b"}, "field 'source' holds a NUL character"),
        ({"source": "a", "target": "\ud83d"}, "field 'target' holds half of a surrogate pair"),
    ],
)
def test_record_without_text_is_a_bad_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "a.jsonl", GOOD, record, GOOD)
    assert error(file) == f"a.jsonl:2: {message}"
    reader = Reader([file], on_bad_line="skip")
    assert [example.where for example in Task().examples(reader)] == [f"{file}:1", f"{file}:3"]
    assert reader.bad == [f"{file}:2: {message}"]
    assert error(file, on_bad_line="skip", max_bad_lines=0).startswith("more than data.max_bad_lines = 0 bad lines")


def test_missing_nested_field_is_a_bad_line(tmp_path: Path) -> None:
    good = {"translation": {"en": "a", "ro": "b"}}
    for bad in ({"translation": "a"}, {"translation": {"en": "a"}}, {"ro": "b"}):
        file = write(tmp_path / "a.jsonl", good, bad)
        assert error(file, Task(source="ro", target="en")).startswith("a.jsonl:2: no field 'translation.")


def test_no_example_at_all(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *[{"source": "a", "target": ""}] * 2)
    assert error(file, on_bad_line="skip") == (
        "a.jsonl: no examples; 2 bad lines, the first: a.jsonl:1: field 'target' is empty"
    )


def test_csv_numbers_are_text(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("source,target\n1,true\n")
    assert read(file) == [("1", "true")]


def test_list_is_joined_as_source_and_first_as_target(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"source": ["One.", "Two."], "target": ["first", "second"]})
    assert read(file) == [("One. Two.", "first")]
    assert read(file, Task(source="source", target="source")) == [("One. Two.", "One. Two.")]


def test_from_config(tmp_path: Path) -> None:
    data = Data(
        source="ro",
        target="en",
        prefix="translate: ",
        source_transforms=("strip_diacritics", "lower"),
        target_transforms=("s/[!?]//",),
    )
    file = write(tmp_path / "a.jsonl", {"translation": {"ro": "Bună Ziua!", "en": "Good Day!"}})
    task = Task.from_config(data)
    assert read(file, task) == [("translate: buna ziua!", "Good Day")]
    assert task.describe(next(iter(Reader([file])))) == (
        "source: translation.ro | strip_diacritics | lower, target: translation.en | s/[!?]//"
    )
    assert Task.from_config(Data(piece=30)).piece == 30


@pytest.mark.parametrize(
    ("spec", "text", "result"),
    [
        ("strip_diacritics", "ȘTIINȚĂ în câmp; façade, Ångström", "STIINTA in camp; facade, Angstrom"),
        ("strip_diacritics", "o\u0308 \u0219", "o s"),
        ("strip_diacritics", "각", "각"),
        ("lower", "ȘI", "și"),
        ("strip", " a b\n", "a b"),
        ("nfc", "s\u0326", "\u0219"),
        ("nfd", "\u0219", "s\u0326"),
        ("nfkc", "\ufb01\u00b2", "fi2"),
        ("nfkd", "\ufb01\u0219", "fis\u0326"),
        ("s/a/b/", "banana", "bbnbnb"),
        (r"s/(\w+) (\w+)/\2 \1/", "one two", "two one"),
        ("s|/|:|", "a/b", "a:b"),
        (r"s/\//:/", "a/b", "a:b"),
        (r"s/:/\//", "a:b", "a/b"),
        (r"s/\\/\\\\/", "a\\b", "a\\\\b"),
        (r"s|a\|b|x\|y|", "a|b", "x|y"),
        ("s,x,,", "axb", "ab"),
        (r"s/;/\n/", "a;b", "a\nb"),
        ("s/\n/ /", "a\nb", "a b"),
        ("s/\\\n/ /", "a\nb", "a b"),
        ("s/(?i)ABC/x/", "abc", "x"),
        ("textwrap:dedent", "  a", "a"),
        ("os.path:basename", "a/b", "b"),
    ],
)
def test_transform(spec: str, text: str, result: str) -> None:
    assert transform(spec, "data.source_transforms")(text) == result


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("strip_diacritic", "unknown transform 'strip_diacritic' (did you mean strip_diacritics?)"),
        ("NFC", "unknown transform 'NFC'"),
        ("", "unknown transform ''"),
        ("s/a/b", "'s/a/b': expected s/REGEX/TEXT/; every match is replaced"),
        ("s/a/b/g", "'s/a/b/g': expected s/REGEX/TEXT/; every match is replaced"),
        ("s/a/b/c/", "'s/a/b/c/': expected s/REGEX/TEXT/"),
        ("s/(a/b/", "'s/(a/b/': missing ), unterminated subpattern at position 0"),
        (r"s/a/\1/", r"'s/a/\\1/': invalid group reference 1 at position 1"),
        (r"s/a/\g<x>/", "unknown group name 'x'"),
        ("no_such_module:f", "no_such_module:f: cannot import: No module named 'no_such_module'"),
        ("os.path:basenam", "os.path:basenam: no 'basenam' in os.path (did you mean basename?)"),
        ("os.path:sep", "os.path:sep: is str, expected a function from str to str"),
        ("os.path:", "unknown transform 'os.path:'"),
    ],
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_bad_transform_is_named_before_any_reading(spec: str, message: str, side: str) -> None:
    got = task_error(**{f"{side}_transforms": ("lower", spec)})
    assert got.startswith(f"data.{side}_transforms: ") and message in got


def test_function_that_returns_no_text_or_fails(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", GOOD, {"source": "é", "target": "b"})
    assert error(file, Task(target_transforms=("builtins:len",))) == (
        "a.jsonl:1: builtins:len returned int, expected str"
    )
    with pytest.raises(ValueError) as caught:
        read(file, Task(source_transforms=("builtins:int",)), on_bad_line="skip")
    assert not isinstance(caught.value, InputError)
    assert caught.value.__notes__ == [f"in builtins:int, for {file}:1"]


def test_text_that_a_transform_empties_is_a_bad_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "x 1"}, {"text": "1"})
    assert error(file, Task(source_transforms=("s/1//",))) == "a.jsonl:2: the source is empty after its transforms"
    assert error(file, Task(target_transforms=("s/1//",))) == "a.jsonl:2: the target is empty after its transforms"
    # None of the pieces of a bad record gets through.
    pieces_file = write(tmp_path / "b.jsonl", {"text": "fine"}, {"text": "abcdefgh 11111111"})
    assert read(pieces_file, Task(source_transforms=("s/1//",), piece=8), on_bad_line="skip") == [("fine", "fine")]


def test_pieces_keep_all_words() -> None:
    draw = random.Random(1)
    for _ in range(300):
        limit = draw.randint(1, 40)
        words = ["".join(draw.choices("abcș", k=draw.randint(1, 12))) for _ in range(draw.randint(0, 60))]
        text = "".join(word + " " * draw.choice((1, 1, 1, 3)) for word in words)
        cut = list(pieces(text, limit))
        assert all(0 < len(piece) <= limit and piece == piece.strip() for piece in cut)
        assert "".join(cut).replace(" ", "") == "".join(words)
        if limit >= 12:
            assert " ".join(cut).split() == words


@pytest.mark.parametrize(
    ("text", "limit", "cut"),
    [
        ("one two", 7, ["one two"]),
        ("one two", 6, ["one", "two"]),
        ("a b c", 3, ["a b", "c"]),
        ("one  two three", 9, ["one  two", "three"]),
        ("abcdefghij kl", 4, ["abcd", "efgh", "ij", "kl"]),
        ("ab cdefghij", 4, ["ab", "cdef", "ghij"]),
        (" a ", 8, ["a"]),
        ("  ", 8, []),
    ],
)
def test_pieces(text: str, limit: int, cut: list[str]) -> None:
    assert list(pieces(text, limit)) == cut


def test_pieces_of_a_long_line_take_linear_time() -> None:
    # Eight megabytes: copying the rest at every cut would take minutes.
    assert sum(len(piece) for piece in pieces("abc " * 2_000_000, 8)) == 7 * 1_000_000


def test_piece_keeps_pairs_aligned(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Țara și pădurea în mai\n", encoding="utf-8")
    task = Task(prefix="> ", source_transforms=("strip_diacritics", "s/i/ii/"), target_transforms=("lower",), piece=8)
    assert read(file, task) == [("> Tara sii", "țara și"), ("> padurea", "pădurea"), ("> iin maii", "în mai")]


def test_piece_wants_plain_text(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", GOOD)
    assert error(file, Task(piece=8)) == (
        "data.piece: cuts plain text only, not the two columns source and target of a.jsonl"
    )
    assert read(file, Task(source="source", target="source", piece=8)) == [("a", "a")]


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        ({"translation": {"s": "a", "t": "b"}}, "translation.s"),
        ({"translation": {"en": "a"}}, "translation.en"),
        ({"target": "b", "source": "a", "id": "c"}, "source"),
        ({"s": "a", "t": "b", "text": "c"}, "s"),
        ({"id": "x", "Source": "a", "lang": "ro"}, "Source"),
        ({"id": "x", "article": ["a", "b"], "lang": "ro"}, "article"),
        ({"id": "x", "text": "a", "lang": "ro"}, "text"),
        ({"sentence": "a", "n": 3}, "sentence"),
        ({"0": "a", "1": "b"}, "0"),
    ],
)
def test_source_column_detected(tmp_path: Path, fields: dict[str, Any], column: str) -> None:
    value: Any = fields
    for key in column.split("."):
        value = value[key]
    file = write(tmp_path / "a.jsonl", fields)
    assert list(source_texts(Reader([file]))) == [" ".join(value)]
    assert list(source_texts(Reader([file]), column)) == [" ".join(value)]


def test_source_texts_refused_or_skipped(tmp_path: Path) -> None:
    def message(file: Path, column: str = "", **settings: Any) -> str:
        with pytest.raises(InputError) as caught:
            list(source_texts(Reader([file], **settings), column))
        return str(caught.value).replace(f"{tmp_path}/", "")

    three = write(tmp_path / "a.jsonl", {"a": "1", "b": "2", "c": "3"})
    assert message(three) == "a.jsonl:1: cannot tell which of the columns a, b, c is the source: set data.source"
    assert message(three, "d").startswith("a.jsonl:1: data.source: no column 'd'")
    bad = write(tmp_path / "b.jsonl", {"text": "a"}, {"text": None}, {"text": "b"}, {"texts": "c"})
    assert message(bad) == "b.jsonl:2: field 'text' is null, expected text"
    reader = Reader([bad], on_bad_line="skip")
    assert list(source_texts(reader)) == ["a", "b"]
    assert reader.bad_count == 2


def test_source_texts_tell_the_column_of_each_file(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", {"src": "a", "tgt": "b"}), write(tmp_path / "b.jsonl", {"line": "c"})]
    assert list(source_texts(Reader(files))) == ["a", "c"]
