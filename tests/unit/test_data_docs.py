"""docs/data.md: its example lines are read as it says, and its commands run at toy size."""

from __future__ import annotations

import functools
import gzip
import json
import shlex
from pathlib import Path

import pytest
from pages import blocks, commands

from t2t import cli
from t2t.config import Data
from t2t.data.sources import Reader
from t2t.data.splits import read_examples
from t2t.data.tasks import checked_messages, is_chat

HERE = ["Formats", "Columns", "Transforms", "Prepared stores"]
ELSEWHERE = ["Streaming", "Datasets of the hub", "Mixtures"]  # run by test_stream.py, test_hub.py, test_mixture.py
TOY = ["--train.steps", "1", "--train.batch", "4", "--run.device", "cpu", "--run.threads", "1"]
show = functools.partial(blocks, "data.md", "Formats")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page speaks of, made of its own examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("T2T_STORE", str(tmp_path / "stores"))
    flat, nested, talk = show("json")[0].splitlines()
    for name, line in (("pairs", flat), ("translated", nested), ("talk", talk)):
        (tmp_path / f"{name}.jsonl").write_text(f"{line}\n" * 12, encoding="utf-8")
    (tsv,), (csv,), (text,) = (show(language) for language in ("tsv", "csv", "txt"))
    for name, shown in (("held-out.tsv", tsv), ("pairs.csv", csv), ("more.csv", csv), ("text.txt", text)):
        (tmp_path / name).write_text(shown, encoding="utf-8")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.tsv.gz").write_bytes(gzip.compress(tsv.encode()))
    return tmp_path


def test_the_examples_are_read(folder: Path) -> None:
    def pair(file: str, **columns: str) -> tuple[str, str]:
        example = read_examples([file], "data.train", Data(**columns), limit=1)[0][0]
        return example.source, example.target

    assert pair("pairs.jsonl") == pair("held-out.tsv") == pair("corpus/*.gz") == ("He came home.", "A venit acasă.")
    assert pair("translated.jsonl", source="en", target="ro") == pair("pairs.jsonl")
    assert pair("pairs.csv") == ("Yes, he came.", "Da, a venit.")
    assert pair("text.txt") == ("A venit acasă târziu.", "A venit acasă târziu.")
    record = next(iter(Reader(["talk.jsonl"])))
    assert is_chat(record.fields)
    assert [message["role"] for message in checked_messages(record.fields["messages"])] == ["user", "assistant"]


def test_the_commands_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for line in (line for heading in HERE for line in commands("data.md", heading)):
        words = shlex.split(line)[1:]
        assert cli.main([*words, *(TOY if words[0] == "train" else [])]) == 0, f"{line}\n{capsys.readouterr().err}"
        told[words[-1]] = capsys.readouterr().out
    names = {"pairs", "files", "ro", "restored", "stored"}
    assert {file.parent.parent.name for file in folder.glob("runs/*/model/config.json")} == names
    assert "12 records are in the store" in told["runs/stored"]
    assert "are in the store" not in told["runs/pairs"]
    settings = json.loads((folder / "runs" / "ro" / "model" / "t2t.json").read_text())
    assert settings["prefix"] == "to Romanian: "


def test_every_command_of_the_page_is_run() -> None:
    everywhere = [line for heading in (*HERE, *ELSEWHERE) for line in commands("data.md", heading)]
    assert everywhere == commands("data.md")
