"""The environment, and what files hold: formats, columns, lengths, bad lines, exit codes."""

import gzip
import json
import subprocess
import sys

import pytest

from t2t import doctor
from t2t.config import Config, load
from t2t.errors import InputError


def write(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines))
    return str(path)


def pair(source, target):
    return json.dumps({"source": source, "target": target})


def check_one(file, **overrides):
    config = load(overrides={key.replace("__", "."): value for key, value in overrides.items()})
    return doctor.check([file], config).files[0]


def figures(report, side, unit):
    (found,) = [row for row in report.lengths if (row.side, row.unit) == (side, unit)]
    return found.p50, found.p90, found.p99, found.max, found.cut


def test_good_file_has_no_problems(tmp_path):
    file = write(tmp_path / "pairs.jsonl", pair("ab", "b"), pair("abc", "b"))
    report = doctor.check([file], Config())
    found = report.files[0]
    assert (found.format, found.compression, found.records, found.examples, found.bad_lines) == ("jsonl", "", 2, 2, 0)
    assert report.problems == []
    assert report.exit_code == 0
    assert doctor.render(report).endswith("nothing wrong")


def test_bad_lines_are_counted_and_the_first_few_kept(tmp_path):
    bad = ["{"] * 3 + [json.dumps({"source": "a", "target": None})] * 2000
    file = write(tmp_path / "pairs.jsonl", pair("a", "b"), b"\xff\n", *bad, pair("c", "d"))
    report = doctor.check([file], load(overrides={"data.max_bad_lines": "1"}))
    found = report.files[0]
    assert (found.records, found.examples, found.bad_lines) == (2002, 2, 2004)
    assert len(found.first_bad_lines) == doctor.SHOWN
    assert found.first_bad_lines[0] == f"{file}:2: invalid UTF-8 at byte 1 of the line"
    assert found.first_bad_lines[4] == f"{file}:6: field 'target' is null, expected text"
    assert report.problems == [f"{file}: 2,004 bad lines, the first at line 2: invalid UTF-8 at byte 1 of the line"]
    assert report.exit_code == 1
    assert f"{file}: ... and 1,999 more bad lines" in doctor.render(report)


def test_unusable_file_does_not_hide_the_others(tmp_path):
    empty, good = write(tmp_path / "a.csv"), write(tmp_path / "b.jsonl", pair("a", "b"))
    strange = write(tmp_path / "c.docx", "x")
    report = doctor.check([str(tmp_path / "*.*")], Config())
    assert [(f.file, f.format, f.examples) for f in report.files] == [
        (empty, "csv", 0),
        (good, "jsonl", 1),
        (strange, "unknown", 0),
    ]
    assert report.problems[0] == f"{empty}: no records: the file is empty"
    assert "no format known" in report.problems[1]
    assert report.exit_code == 2


def test_file_of_bad_lines_alone_is_unusable(tmp_path):
    file = write(tmp_path / "pairs.jsonl", *["x"] * 7)
    report = doctor.check([file], Config())
    assert report.problems[0].startswith(f"{file}: no records; 7 bad lines, the first: {file}:1: invalid JSON")
    assert report.exit_code == 2


def test_file_without_an_example_is_unusable(tmp_path):
    file = write(tmp_path / "pairs.jsonl", *[pair("a", "")] * 7)
    report = doctor.check([file], Config())
    assert report.problems == [f"{file}: no examples; 7 bad lines, the first: {file}:1: field 'target' is empty"]
    assert report.exit_code == 2


def test_cut_file_tells_what_was_read_before(tmp_path):
    whole = gzip.compress("".join(f"text number {n}\n" for n in range(5000)).encode())
    file = write(tmp_path / "a.txt.gz", whole[:-2000])
    found = check_one(file)
    assert "cut or broken after line" in found.error
    assert found.compression == ".gz"
    assert 0 < found.examples == found.records < 5000


@pytest.mark.parametrize(
    ("name", "line", "given", "columns", "taken"),
    [
        ("a.jsonl", {"id": 1, "Src": "a", "tgt": "b"}, {}, ("id", "Src", "tgt"), ("Src", "tgt", "known names")),
        ("a.jsonl", {"translation": {"s": "a", "t": "b"}}, {}, ("translation",),
         ("translation.s", "translation.t", "known names")),
        ("a.jsonl", {"n": 1, "en": "a", "ro": "b"}, {}, ("n", "en", "ro"), ("en", "ro", "the only two text fields")),
        ("a.jsonl", {"en": "a", "ro": "b"}, {"data.source": "ro", "data.target": "en"}, ("en", "ro"),
         ("ro", "en", "given")),
        ("a.txt", "some text", {}, ("text",), ("text", "text", "plain text")),
        ("a.tsv", "a\tb", {}, ("0", "1"), ("0", "1", "the only two text fields")),
    ],
)  # fmt: skip
def test_columns_and_why(tmp_path, name, line, given, columns, taken):
    file = write(tmp_path / name, line if isinstance(line, str) else json.dumps(line))
    found = doctor.check([file], load(overrides=given)).files[0]
    assert found.columns == columns
    assert (found.source, found.target, found.why) == taken


def test_chat_is_told_and_measured(tmp_path, capsys):
    talk = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    rows = [{"messages": talk}, {"messages": talk * 2, "id": 1}, {"messages": talk[:1]}, {"messages": [{"role": "x"}]}]
    file = write(tmp_path / "chats.jsonl", *map(json.dumps, rows))
    report = doctor.check([file], Config())
    (found,) = report.files
    assert (found.records, found.examples, found.bad_lines, found.columns) == (4, 2, 2, ("messages",))
    assert (found.source, found.target, found.why) == ("", "", "chat")
    assert found.first_bad_lines[0] == f"{file}:3: no message of the assistant, of which to learn"
    assert [(row.side, row.unit, row.p50, row.max, row.cut) for row in found.lengths] == [
        ("conversation", "messages", 2, 4, None),
        ("conversation", "characters", 5, 10, None),
    ]
    assert report.exit_code == 1
    bytes_ = check_one(file, model__tokenizer="bytes")
    assert bytes_.error == "model.tokenizer: has no chat template, by which to show conversations"
    only_bad = check_one(write(tmp_path / "bad.jsonl", json.dumps(rows[2])))
    assert "bad.jsonl: no conversations; 1 bad lines, the first: " in only_bad.error


def test_chat_has_the_tokens_of_its_template(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, "?": 2, "abc": 3}
    inner = Tokenizer(models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} </s>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    talk = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "abc abc"}]
    rows = [json.dumps({"messages": talk * n}) for n in (1, 2, 3, 4)]
    file = write(tmp_path / "chats.jsonl", *rows)
    found = check_one(file, model__tokenizer=str(tmp_path / "tokenizer"), data__block="14", data__max_target_length="4")
    assert figures(found, "conversation", "tokens") == (14, 28, 28, 28, 0.5)
    assert found.error == ""


def test_documents_of_plain_text_are_counted(tmp_path):
    text = write(tmp_path / "a.txt", "one", "two", "", "three", "", "", "four", "five")
    lines = write(tmp_path / "a.jsonl", *(json.dumps({"text": "x"}) for _ in range(5)))
    pairs = write(tmp_path / "b.jsonl", pair("a", "b"))
    report = doctor.check([text, lines, pairs], Config())
    assert [(f.examples, f.documents) for f in report.files] == [(5, 3), (5, 5), (1, 0)]
    shown = doctor.render(report)
    assert "plain text, 3 documents" in shown
    assert "plain text, 1 document\n" in doctor.render(doctor.check([write(tmp_path / "c.txt", "x")], Config()))


def test_assets_are_shown_by_their_name(tmp_path):
    from importlib import resources

    report = doctor.check(["asset:ro-held-out.txt", write(tmp_path / "a.txt", "x")], Config())
    assert [f.file for f in report.files] == ["asset:ro-held-out.txt", str(tmp_path / "a.txt")]
    assert report.files[0].examples > 100
    # Whatever is wrong with one is told under the same name.
    found = check_one("asset:ro-held-out.txt", data__format="jsonl")
    assert found.file == "asset:ro-held-out.txt"
    assert found.first_bad_lines[0].startswith("asset:ro-held-out.txt:1: ")
    told = doctor.render(doctor.Report((found,), ""))
    assert str(resources.files("t2t")) not in told


def test_columns_that_cannot_be_told_are_an_error(tmp_path):
    report = doctor.check([write(tmp_path / "a.jsonl", json.dumps({"a": "1", "b": "2", "c": "3"}))], Config())
    found = report.files[0]
    assert found.columns == ("a", "b", "c")
    assert (found.source, found.target, found.why) == ("", "", "")
    assert "cannot tell which of the columns a, b, c" in found.error
    assert report.exit_code == 2


def test_percentiles_of_characters_and_tokens(tmp_path):
    file = write(tmp_path / "pairs.jsonl", *(pair("a" * n, "ș" * 10) for n in range(1, 101)))
    found = check_one(file, model__tokenizer="bytes", data__max_source_length="91", data__max_target_length="21")
    assert figures(found, "source", "characters") == (50, 90, 99, 100, None)
    assert figures(found, "source", "tokens") == (51, 91, 100, 101, 0.1)
    assert figures(found, "target", "characters") == (10, 10, 10, 10, None)
    assert figures(found, "target", "tokens") == (21, 21, 21, 21, 0.0)


def test_prefix_and_transforms_count(tmp_path):
    file = write(tmp_path / "a.txt", "ț")
    found = check_one(
        file, model__tokenizer="bytes", data__prefix="restore: ", data__source_transforms="strip_diacritics"
    )
    assert figures(found, "source", "tokens")[0] == len("restore: t") + 1
    assert figures(found, "target", "tokens")[0] == len("ț".encode()) + 1


def test_blocks_change_nothing(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", *("x" * n for n in range(1, 40)))
    whole = check_one(file, model__tokenizer="bytes")
    monkeypatch.setattr(doctor, "_BLOCK_CHARACTERS", 50)
    assert check_one(file, model__tokenizer="bytes") == whole
    assert whole.examples == 39


def test_no_tokenizer_no_token_lengths(tmp_path):
    report = doctor.check([write(tmp_path / "a.txt", "text")], Config())
    assert report.tokenizer == ""
    assert [(row.side, row.unit) for row in report.files[0].lengths] == [
        ("source", "characters"),
        ("target", "characters"),
    ]


def test_models_own_tokenizer(tmp_path):
    (tmp_path / "model").mkdir()
    settings = {"tokenizer_class": "ByT5Tokenizer"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    found = check_one(write(tmp_path / "a.txt", "text"), model__path=str(tmp_path / "model"))
    assert figures(found, "source", "tokens")[0] == 5


def test_missing_file_and_config_errors_raise(tmp_path):
    with pytest.raises(InputError, match="doctor: no such file"):
        doctor.check([str(tmp_path / "none.txt")], Config())
    with pytest.raises(InputError, match=r"data\.target: is missing"):
        doctor.check([write(tmp_path / "a.txt", "x")], load(overrides={"data.source": "x"}, validate=False))


def test_run_prints_json_and_returns_the_exit_code(tmp_path, capsys):
    file = write(tmp_path / "pairs.jsonl", pair("a", "b"), "{")
    assert doctor.run([file], Config(), as_json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["environment"]["versions"]["python"]
    assert printed["files"][0]["bad_lines"] == 1
    assert len(printed["problems"]) == 1


def test_run_without_data_prints_the_environment_alone(capsys):
    assert doctor.run([], Config(), as_json=True) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["environment"]
    assert doctor.run([], Config(), as_json=False) == 0
    assert "records" not in capsys.readouterr().out


def test_environment_names_missing_extras(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "EXTRAS", ("numpy", "no-such-package"))
    found = doctor.environment()
    assert found["extras"] == {"numpy": found["versions"]["numpy"], "no-such-package": None}
    assert found["memory"] > 2**20
    assert found["threads"] >= 1
    assert found["devices"][0].startswith("cpu")
    doctor.run([], Config(), as_json=False)
    assert "no-such-package (optional)  not installed" in capsys.readouterr().out


def test_checking_files_needs_no_torch(tmp_path):
    file = write(tmp_path / "a.txt", "text")
    code = (
        "import sys; from t2t import doctor; from t2t.config import Config; "
        f"doctor.render(doctor.check([{file!r}], Config())); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
