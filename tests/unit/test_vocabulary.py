"""Trained vocabularies: ids where their models expect them, the same in transformers, the same every time."""

from __future__ import annotations

import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from t2t import cli
from t2t.data import tokens, vocabulary
from t2t.errors import InputError

TEXT = "asset:ro-held-out.txt"
LINES = [
    "Ieri am fost la piață și am cumpărat pâine, brânză și două sticle de vin.",
    "Țăranii din Șomcuta își așteaptă, de-o viață, câinii; «așa-i!» zise el.",
    "Ähnlich: ﬁne 12,5% — l'été!",
]
STYLES: dict[str, dict[str, Any]] = {
    "unigram": {"kind": "unigram"},
    "bpe-t5": {"kind": "bpe", "style": "t5"},
    "bpe": {"kind": "bpe"},
    "wordpiece": {"kind": "wordpiece"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer of every style, trained once."""
    root = tmp_path_factory.mktemp("vocabularies")
    for name, settings in STYLES.items():
        vocabulary.train([TEXT], root / name, 600, **settings)
    return {name: root / name for name in STYLES}


def held_out() -> list[str]:
    from t2t.data.sources import resolve

    return Path(resolve([TEXT])[0]).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", STYLES)
def test_transformers_opens_the_folder_and_gives_the_same_ids(name: str, folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folders[name]), tokens.load(str(folders[name]))
    assert len(theirs) == ours.vocab_size == 600 + 100 * (name in ("unigram", "bpe-t5"))
    for text in [*held_out()[:100], *LINES]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert max(ids) < ours.vocab_size


@pytest.mark.parametrize("name", STYLES)
def test_romanian_text_comes_back(name: str, folders: dict[str, Path]) -> None:
    tokenizer = tokens.load(str(folders[name]))
    for text in [*held_out()[:50], *LINES[:1]]:
        back = tokenizer.decode(tokenizer.encode(text))
        # WordPiece forgets which punctuation stood apart; the letters are what counts.
        assert back.replace(" ", "") == text.replace(" ", "") if name == "wordpiece" else back == text


def test_bytes_bring_every_text_back(folders: dict[str, Path]) -> None:
    tokenizer = tokens.load(str(folders["bpe"]))
    for text in [*LINES, "  two  spaces\n\tand\r\nlines ", "日本 😀 \u2028", "a\u0306", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["unigram", "bpe-t5"])
def test_ids_are_where_t5_has_them(name: str, folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    ours, theirs = tokens.load(str(folders[name])), AutoTokenizer.from_pretrained(folders[name])
    assert theirs.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
    assert (ours.pad_id, ours.eos_id, theirs.unk_token_id) == (0, 1, 2)
    assert list(ours.sentinels) == list(range(699, 599, -1))
    assert theirs("pâine").input_ids[-1] == 1
    assert ours.encode("a <extra_id_0> b")[1:-1].count(699) == 1
    assert ours.decode([*ours.encode("pâine"), 699, 1, 0]) == "pâine"


def test_end_of_text_is_last_as_gpt2_has_it(folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders["bpe"])
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.convert_tokens_to_ids("<|endoftext|>") == 599
    assert tokens.load(str(folders["bpe"])).encode("a<|endoftext|>b")[1] == 599


def test_marks_are_first_as_bert_has_them(folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders["wordpiece"])
    assert theirs.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert [theirs.pad_token_id, theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id] == [0, 2, 3, 4]
    pair = theirs("unu", "doi")
    assert pair.input_ids[0] == 2 and pair.input_ids.count(3) == 2 and pair.token_type_ids[-1] == 1
    assert tokens.load(str(folders["wordpiece"])).eos_id == 3
    assert any(piece.startswith("##") for piece in theirs.tokenize("nemaipomenit"))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_are_those_of_sentencepiece(kind: str, folders: dict[str, Path]) -> None:
    model = vocabulary._sentencepiece(lambda: iter(held_out()), kind, 600, lowercase=False)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = tokens.load(str(folders["unigram" if kind == "unigram" else "bpe-t5"]))
    assert all(tokenizer.encode(text) == reference.encode(text) for text in [*held_out(), LINES[0], LINES[2]])


AGAIN = """
import json, sys
from pathlib import Path
from t2t.data import vocabulary
for name, settings in json.loads(sys.argv[2]).items():
    vocabulary.train([sys.argv[1]], Path(sys.argv[3], name), 600, **settings)
"""


def test_another_process_makes_the_same_files(folders: dict[str, Path], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", AGAIN, TEXT, json.dumps(STYLES), str(tmp_path)], check=True)
    for name, folder in folders.items():
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert files == {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}, name


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_lower_case_keeps_diacritics(kind: str, tmp_path: Path) -> None:
    tokenizer = vocabulary.train([TEXT], tmp_path / "low", 600, kind=kind, lowercase=True)
    assert tokenizer.encode("Piața ȘI Țara") == tokenizer.encode("piața și țara") != tokenizer.encode("piata si tara")
    assert tokenizer.decode(tokenizer.encode("Piața ȘI Țara")) == "piața și țara"


def test_sentinels_are_as_many_as_asked_for(tmp_path: Path) -> None:
    assert list(vocabulary.train([TEXT], tmp_path / "few", 600, sentinels=3).sentinels) == [602, 601, 600]
    none = vocabulary.train([TEXT], tmp_path / "none", 600, sentinels=0)
    assert (list(none.sentinels), none.vocab_size) == ([], 600)


def test_both_columns_and_compressed_files_count(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt", encoding="utf-8") as file:
        for text in held_out():
            file.write(json.dumps({"id": 7, "source": text, "target": text.translate({ord("a"): "ж"})}) + "\n")
    with lzma.open(tmp_path / "more.txt.xz", "wt", encoding="utf-8") as file:
        file.write("щ\n" * 500)
    files = [str(tmp_path / "pairs.jsonl.gz"), str(tmp_path / "more.txt.xz")]
    trained = vocabulary.train(files, tmp_path / "own", 600)
    assert 2 not in trained.encode("ж щ a")
    source_alone = vocabulary.Data(source="source", target="source")
    trained = vocabulary.train(files[:1], tmp_path / "source", 600, data=source_alone)
    assert 2 in trained.encode("ж")


def test_long_lines_are_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(" ".join(held_out()) + "\n", encoding="utf-8")
    assert vocabulary.train([str(tmp_path / "long.txt")], tmp_path / "own", 600).vocab_size == 700


def test_a_sample_is_even_and_bounded() -> None:
    chosen = vocabulary.sample(map(str, range(10_000)), 1000)
    assert len(set(chosen)) == 1000 and chosen == vocabulary.sample(map(str, range(10_000)), 1000)
    assert 400 < sum(int(text) < 5000 for text in chosen) < 600
    assert vocabulary.sample(["a", "b"], 5) == ["a", "b"]


def test_more_text_than_the_sample_still_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "SAMPLE", 200)
    first = vocabulary.train([TEXT], tmp_path / "first", 400)
    again = vocabulary.train([TEXT], tmp_path / "again", 400)
    assert first.fingerprint == again.fingerprint
    monkeypatch.setattr(vocabulary, "SAMPLE", 2_000_000)
    assert vocabulary.train([TEXT], tmp_path / "all", 400).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 10**6}, "--size: 1,000,000 tokens are more than this text gives, which is "),
        ({"size": 10**6, "kind": "bpe", "style": "t5"}, "--size: 1,000,000 tokens are more than this text gives"),
        ({"size": 10**6, "style": "gpt2"}, "--size: 1,000,000 tokens are more than this text gives"),
        ({"size": 10**6, "style": "bert"}, "--size: 1,000,000 tokens are more than this text gives"),
        ({"size": 20}, "--size: 20 tokens are fewer than the "),
        ({"size": 256, "style": "gpt2"}, "--size: 256 tokens are fewer than the 257 that"),
        ({"size": 20, "style": "bert"}, "--size: 20 tokens are fewer than the "),
        ({"size": 0}, "--size: must be 1 or more"),
        ({"kind": "unigrm"}, "--kind: 'unigrm' is not one of unigram, bpe, wordpiece (did you mean unigram?)"),
        ({"style": "gpt"}, "--style: 'gpt' is not one of t5, gpt2, bert (did you mean gpt2?)"),
        ({"kind": "unigram", "style": "bert"}, "--kind: unigram is not for style bert, which can be wordpiece"),
        ({"style": "gpt2", "lowercase": True}, "--lowercase: "),
        ({"style": "bert", "sentinels": 5}, "--sentinels: are T5's"),
        ({"sentinels": 1001}, "--sentinels: are T5's"),
        ({"files": ["nowhere.txt"]}, "FILE: no such file: nowhere.txt"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        vocabulary.train(settings.pop("files", [TEXT]), tmp_path / "own", **settings)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "own").exists()


def test_a_folder_in_use_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("precious")
    for out in (tmp_path, tmp_path / "kept.txt"):
        with pytest.raises(InputError, match="--out: .* is there already"):
            vocabulary.train([TEXT], out, 600)
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"id": "x", "body": text, "note": "y"}) + "\n" for text in held_out()), encoding="utf-8"
    )
    line = ["tokenizer", str(tmp_path / "text.jsonl"), "--size", "500", "--sentinels", "20", "--out"]
    assert cli.main([*line, str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "cannot tell which of the columns id, body, note are source and target" in error
    columns = ["--data.source", "body", "--data.target", "body"]
    assert cli.main([*line, str(tmp_path / "out"), *columns]) == 0
    assert capsys.readouterr().out == f"tokenizer of 520 tokens: {tmp_path / 'out'}\n"
    assert tokens.load(str(tmp_path / "out")).vocab_size == 520
    assert cli.main([*line, str(tmp_path / "out"), *columns]) == 2
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write("{broken\n")
    assert cli.main([*line, str(tmp_path / "more"), *columns]) == 2
    assert cli.main([*line, str(tmp_path / "more"), *columns, "--data.on_bad_line", "skip"]) == 0
    assert "note: 1 bad lines skipped, the first: " in capsys.readouterr().err
    assert cli.main(["tokenizer", TEXT, "--kind", "bpe", "--size", "nine", "--out", "x"]) == 2
    assert "--size: invalid int value: 'nine'" in capsys.readouterr().err
    assert cli.main(["tokenizer", TEXT, "--sise", "9", "--out", "x"]) == 2
    assert "did you mean --size?" in capsys.readouterr().err
