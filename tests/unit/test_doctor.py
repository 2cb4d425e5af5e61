"""The environment, and what files hold: formats, columns, lengths, bad lines, repeats, unknown characters, the plan."""

import gzip
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from t2t import doctor
from t2t.config import Config, load
from t2t.data.check import LengthCounts, Sample, Seen, rows_for
from t2t.data.tokens import Bytes
from t2t.doctor import read
from t2t.doctor.report import Report
from t2t.errors import InputError


def write(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines))
    return str(path)


def pair(source, target):
    return json.dumps({"source": source, "target": target})


def check(files, **overrides):
    config = load(overrides={key.replace("__", "."): value for key, value in overrides.items()})
    return doctor.check([files] if isinstance(files, str) else files, config)


def check_one(file, **overrides):
    return check(file, **overrides).files[0]


def figures(report, side, unit, split=0):
    (found,) = [row for row in report.splits[split].lengths if (row.side, row.unit) == (side, unit)]
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
    assert len(found.first_bad_lines) == read.SHOWN
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
    assert [(row.side, row.unit, row.p50, row.max, row.cut) for row in report.splits[0].lengths] == [
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
    report = check(file, model__tokenizer=str(tmp_path / "tokenizer"), data__block="14", data__max_target_length="4")
    assert figures(report, "conversation", "tokens") == (14, 28, 28, 28, 0.5)
    assert report.files[0].error == ""
    assert (report.plan.objective, report.plan.kind, report.plan.examples) == ("chat", "causal", 4)
    assert report.plan.target_tokens == 7 - 1 + 3 * (14 - 1)
    assert "data.block, or both maximal lengths, = 14; 28 would cut 1%, 28 nothing" in report.problems[0]


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
    told = doctor.render(Report((found,), ""))
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
    found = check(file, model__tokenizer="bytes", data__max_source_length="91", data__max_target_length="21")
    assert figures(found, "source", "characters") == (50, 90, 99, 100, None)
    assert figures(found, "source", "tokens") == (51, 91, 100, 101, 0.1)
    assert figures(found, "target", "characters") == (10, 10, 10, 10, None)
    assert figures(found, "target", "tokens") == (21, 21, 21, 21, 0.0)


def test_prefix_and_transforms_count(tmp_path):
    file = write(tmp_path / "a.txt", "ț")
    found = check(file, model__tokenizer="bytes", data__prefix="restore: ", data__source_transforms="strip_diacritics")
    assert figures(found, "source", "tokens")[0] == len("restore: t") + 1
    assert figures(found, "target", "tokens")[0] == len("ț".encode()) + 1


def test_blocks_change_nothing(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", *("x" * n for n in range(1, 40)))
    whole = check(file, model__tokenizer="bytes")
    monkeypatch.setattr(read, "_BLOCK_CHARACTERS", 50)
    parts = check(file, model__tokenizer="bytes")
    assert (parts.files, parts.splits, parts.unknown) == (whole.files, whole.splits, whole.unknown)
    assert whole.files[0].examples == 39


def test_no_tokenizer_no_token_lengths(tmp_path):
    report = doctor.check([write(tmp_path / "a.txt", "text")], Config())
    assert report.tokenizer == ""
    assert [(row.side, row.unit) for row in report.splits[0].lengths] == [("text", "characters")]
    assert (report.unknown, report.plan) == (None, None)
    assert "no tokens are told" in doctor.render(report)


def test_models_own_tokenizer(tmp_path):
    (tmp_path / "model").mkdir()
    settings = {"tokenizer_class": "ByT5Tokenizer"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape | {"vocab_size": 384}))
    report = check(write(tmp_path / "a.txt", "text"), model__path=str(tmp_path / "model"))
    assert figures(report, "source", "tokens")[0] == 5
    assert (report.plan.objective, report.plan.kind) == ("pairs", "seq2seq")


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


# What repeats


def test_repeats_and_sources_of_many_targets_are_told_apart(tmp_path):
    rows = [("a", "1"), ("b", "2"), ("a", "1"), ("a", "9"), ("a", "1"), ("c", "3")]
    file = write(tmp_path / "a.tsv", *(f"{s}\t{t}" for s, t in rows))
    more = write(tmp_path / "b.tsv", "b\t2", "ab\t1")
    report = check([file, more])
    repeated = report.splits[0].repeated
    assert (repeated.pairs, repeated.sources, repeated.every) == (3, 1, 1)
    assert [(m.where, m.same_as, m.pair) for m in repeated.first] == [
        (f"{file}:3", f"{file}:1", True),
        (f"{file}:5", f"{file}:1", True),
        (f"{more}:1", f"{file}:2", True),
        (f"{file}:4", f"{file}:1", False),
    ]
    assert report.problems == ["train: 3 of 8 examples (37.5%) repeat an earlier one"]
    assert report.exit_code == 1


def test_a_source_and_target_are_not_mixed_up(tmp_path):
    report = check(write(tmp_path / "a.tsv", "ab\tc", "a\tbc", "c\tab"))
    assert (report.splits[0].repeated.pairs, report.splits[0].repeated.sources) == (0, 0)


def test_few_repeats_are_told_but_nothing_is_wrong(tmp_path):
    file = write(tmp_path / "a.tsv", *(f"s{n}\tt" for n in range(199)), "s0\tt")
    report = check(file)
    assert report.splits[0].repeated.pairs == 1
    assert report.exit_code == 0
    assert f"{file}:200  repeats  {file}:1" in doctor.render(report)


def test_overlap_of_the_splits_by_source_and_by_pair(tmp_path):
    train = write(tmp_path / "train.tsv", *(f"s{n}\tt{n}" for n in range(50)))
    held = write(tmp_path / "dev.tsv", "s7\tt7", "new\tt1", "s8\tother", "s7\tt7")
    report = check(train, data__validation=held)
    assert [split.split for split in report.splits] == ["train", "validation"]
    assert (report.overlap.sources, report.overlap.pairs) == (3, 2)
    assert [(m.where, m.same_as, m.pair) for m in report.overlap.first] == [
        (f"{held}:1", f"{train}:8", True),
        (f"{held}:3", f"{train}:9", False),
        (f"{held}:4", f"{train}:8", True),
    ]
    assert report.exit_code == 1
    assert "validation: 3 of 4 examples (75.0%) have their source in the training data" in report.problems[-1]
    assert check(train, data__validation=write(tmp_path / "ok.tsv", "x\tt1")).exit_code == 0


def test_validation_equal_to_training(tmp_path):
    file = write(tmp_path / "a.txt.gz", gzip.compress(b"one\ntwo\nthree\n"))
    report = check(file, data__validation=file)
    assert (report.overlap.sources, report.overlap.pairs) == (3, 3)
    assert report.exit_code == 1


def test_training_files_of_the_config_and_validation_alone(tmp_path):
    file = write(tmp_path / "a.txt", "one", "two")
    assert [f.split for f in check([], data__train=file).files] == ["train"]
    report = check([], data__validation=file)
    assert [(f.split, f.examples) for f in report.files] == [("validation", 2)]
    assert (report.overlap, report.plan, report.exit_code) == (None, None, 0)
    with pytest.raises(InputError, match="data.validation: no such file"):
        check(file, data__validation=str(tmp_path / "none.txt"))


def test_repeated_chats(tmp_path):
    def talk(*contents):
        roles = ["user", "assistant"] * len(contents)
        return json.dumps({"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]})

    rows = [talk("a", "b"), talk("a", "b"), talk("a", "c"), talk("a", "b", "a", "b")]
    repeated = check(write(tmp_path / "chats.jsonl", *rows)).splits[0].repeated
    assert (repeated.pairs, repeated.sources) == (1, 1)


def test_more_examples_than_are_remembered_are_estimated():
    train, held = Seen(most=1000), Seen()
    for n in range(20_000):
        train.add(f"s{n // 2}", "t", f"a.tsv:{n + 1}")  # each twice
    for n in range(5000):
        held.add(f"s{2 * n}", "t", f"b.tsv:{n + 1}")  # half of these are there
        held.add(f"x{n}", "t", f"c.tsv:{n + 1}")
    assert len(train._bytes) <= 24 * 1000
    repeated, overlap = train.repeated(), held.overlap(train)
    assert repeated.every == overlap.every == 32
    assert repeated.pairs == pytest.approx(10_000, rel=0.15)
    assert overlap.pairs == overlap.sources == pytest.approx(5000, rel=0.2)
    assert (repeated.sources, held.repeated().pairs) == (0, 0)


# What the tokenizer cannot say


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    """A T5 vocabulary that has met no capital Ș."""
    import sentencepiece

    letters = "abcdefghijklmnopqrstuvwxyzășțîâABCDEFGHIJKLMNOPQRSTUVWXYZÎ."
    sentences = iter([" ".join(letters), "o fată și un băiat în țară", "o casă și o masă"] * 20)
    file = tmp_path_factory.mktemp("tokenizer") / "own"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_prefix=str(file), vocab_size=80, character_coverage=1.0, minloglevel=2,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, normalization_rule_name="nmt_nfkc",
    )  # fmt: skip
    return f"{file}.model"


def test_unknown_characters_are_named_and_counted(tmp_path, unigram):
    rows = ["Și Ștefan are o țară", "o casă", "Țara e Șa… Șu", "S\u0326i s\u0326i"]
    file = write(tmp_path / "ro.txt", *rows)
    report = check(file, model__tokenizer=unigram, data__source_transforms="strip_diacritics")
    unknown = {lost.character: lost for lost in report.unknown.characters if lost.unknown}
    assert set(unknown) == {"Ș", "Ț", "S\u0326"}
    assert [(unknown[c].count, unknown[c].examples, unknown[c].first) for c in "ȘȚ"] == [
        (4, 2, f"{file}:1"),
        (1, 1, f"{file}:3"),
    ]
    assert unknown["Ș"].code == "U+0218"
    changed = [(lost.character, lost.becomes) for lost in report.unknown.characters if not lost.unknown]
    assert changed == [("…", "...")]  # by NFKC
    assert report.unknown.examples == 3
    assert report.unknown.first == f"{file}:1"
    assert "the tokenizer has no Ș" in report.problems[0]
    assert 'model.tokenizer = "bytes"' in report.problems[0]
    assert "model.new_tokens" in report.problems[0]
    assert report.exit_code == 1
    shown = doctor.render(report)
    assert "U+0053 U+0326" in shown
    assert "unknown" in shown


def test_bytes_and_new_tokens_say_everything(tmp_path, unigram):
    file = write(tmp_path / "ro.txt", "Șoptă", "casă")
    assert check(file, model__tokenizer=unigram).exit_code == 1
    assert check(file, model__tokenizer=unigram, model__new_tokens=["Ș"]).exit_code == 0
    assert check(file, model__tokenizer="bytes").unknown.characters == ()


def test_line_ends_that_a_tokenizer_drops_are_told(tmp_path, unigram):
    file = write(tmp_path / "a.jsonl", pair("o casă\nși o masă", "o casă"))
    report = check(file, model__tokenizer=unigram)
    (lost,) = report.unknown.characters
    assert (lost.character, lost.code, lost.becomes, lost.unknown, lost.count) == ("\n", "U+000A", " ", False, 1)
    assert report.exit_code == 0  # told, but not wrong
    assert check(file, model__tokenizer="bytes").unknown.characters == ()


def test_unknown_words_of_known_letters_are_told(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "a": 2, "##b": 3, "c": 4}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", sep_token="[SEP]", pad_token="[SEP]")
    fast.save_pretrained(tmp_path / "tokenizer")
    report = check(write(tmp_path / "a.txt", "ab a", "c ac ab"), model__tokenizer=str(tmp_path / "tokenizer"))
    assert (report.unknown.tokens, report.unknown.examples) == (1, 1)
    assert report.unknown.first.endswith("a.txt:2")
    known = check(write(tmp_path / "b.txt", "ab a"), model__tokenizer=str(tmp_path / "tokenizer"))
    assert (known.unknown.tokens, known.unknown.characters, known.exit_code) == (0, (), 0)


# The plan


def test_the_plan_is_what_a_run_does(tmp_path):
    from t2t.data.loader import Loader, pick_shape
    from t2t.data.packing import slots
    from t2t.data.splits import read_splits

    file = write(tmp_path / "pairs.jsonl", *(pair("a" * (3 + n % 37), "b" * (2 + n % 11)) for n in range(300)))
    given = {"model.tokenizer": "bytes", "data.train": file, "data.max_source_length": "30", "train.batch": "16"}
    config = load(overrides=given)
    plan = doctor.check([], config).plan
    splits = read_splits(config.data, Bytes(), config.run.seed)
    shape = pick_shape(splits.train, config.data, 16, slots, config.run.seed)
    loader = Loader(splits.train, 16, shape, 1, config.run.seed, pad_id=0)
    assert (plan.examples, plan.steps_per_epoch) == (300, loader.steps_per_epoch)
    assert (plan.rows.source_row, plan.rows.target_row) == (shape.source_row, shape.target_row)
    assert plan.rows.fill == pytest.approx(shape.fill, abs=0.02)
    made = [batch for step in range(loader.steps_per_epoch) for batch in loader.step(step)]
    assert plan.source_tokens + plan.target_tokens == sum(batch.tokens for batch in made)
    tokens = sum(len(splits.train.feature(i, 0).labels) + len(splits.train.feature(i, 0).source) for i in range(300))
    assert plan.store_bytes == 2 * tokens + 8 * 600 + 12 * 300
    assert plan.prepare_seconds > 0
    assert plan.epoch_seconds is None
    assert doctor.check([], config, tokens_per_s=100.0).plan.epoch_seconds == tokens / 100


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lm", "causal"), ("blocks", "causal"), ("span_corruption", "seq2seq"), ("prefix_lm", "seq2seq")],
)
def test_the_plan_of_plain_text(tmp_path, name, kind):
    from t2t.data.splits import read_splits

    text = [
        "".join(chr(97 + (n * 7 + i) % 26) for i in range(20 + n)) + ("\n" if n % 3 == 0 else "") for n in range(40)
    ]
    file = write(tmp_path / "a.txt", *text)
    given = {"data.objective": name, "data.train": file, "data.max_source_length": "64", "data.max_target_length": "32"}
    config = load(overrides=given | {"model.tokenizer": "bytes"})
    plan = doctor.check([], config).plan
    train = read_splits(config.data, Bytes(), config.run.seed, kind).train
    assert (plan.objective, plan.kind, plan.examples) == (name, kind, len(train))
    features = [train.feature(i, seed=1) for i in range(len(train))]
    most = [max(len(side) for side in sides) for sides in zip(*((f.source, f.inputs) for f in features), strict=True)]
    assert plan.rows.source_row >= most[0]
    assert plan.rows.target_row >= most[1]
    if name != "prefix_lm":  # cut at random
        assert plan.target_tokens == pytest.approx(sum(len(f.inputs) for f in features), rel=0.05)


def test_what_a_run_leaves_out_is_not_in_the_plan(tmp_path):
    file = write(tmp_path / "a.tsv", *(f"s{n}\tt{n}" for n in range(100)))
    given = {"model__tokenizer": "bytes", "train__batch": "8"}
    assert check(file, **given, data__max_samples="40").plan.steps_per_epoch == 5
    assert check(file, **given, data__validation_split="0.2").plan.examples == 80


def test_causal_pairs_have_one_stream(tmp_path):
    (tmp_path / "model").mkdir()
    shape = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 384}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    file = write(tmp_path / "a.tsv", "abc\tde")
    report = check(
        file, model__tokenizer="bytes", model__path=str(tmp_path / "model"), data__template="{source}={target}"
    )
    assert figures(report, "source", "tokens")[0] == 4  # with the =, without an end
    assert figures(report, "target", "tokens")[0] == 3
    assert (report.plan.kind, report.plan.source_tokens, report.plan.target_tokens) == ("causal", 0, 6)
    text = check(write(tmp_path / "a.txt", "abc"), model__tokenizer="bytes", model__path=str(tmp_path / "model"))
    assert (text.plan.objective, text.plan.target_tokens) == ("lm", 4)
    long = write(tmp_path / "long.tsv", f"{'a' * 40}\t{'b' * 40}")
    with pytest.raises(InputError, match=r"data\.target_row: must hold the longest example, of 81 slots, or be 0"):
        check(
            long,
            model__tokenizer="bytes",
            model__path=str(tmp_path / "model"),
            data__target_row="64",
            data__max_target_length="64",
        )


def test_text_that_a_tokenizer_makes_nothing_of_has_no_plan(tmp_path, unigram):
    file = write(tmp_path / "a.txt", "\u200b\u200b")
    report = check(file, model__tokenizer=unigram, data__objective="masked_lm")
    assert (report.files[0].examples, report.plan) == (1, None)
    assert "U+200B" in doctor.render(report)


def test_rows_of_a_step_larger_than_the_sample():
    lengths = np.full(100, 8)
    shape = rows_for(lengths, lengths, Config().data, 5000, lambda s, t: s + t, seed=0)
    assert shape.rows_per_step * shape.source_row == 5000 * 8
    alone = rows_for(lengths, np.arange(1, 101), Config().data, 10, lambda s, t: s + t, seed=0, packed=False)
    assert (alone.source_row, alone.target_row, alone.rows_per_step) == (8, 104, 10)


# Small memory, strange files


def test_sample_is_even_and_the_same_each_time():
    sample, again = Sample(most=200), Sample(most=200)
    for n in range(10_000):
        sample.add(n, 2 * n)
        again.add(n, 2 * n)
    first, second = sample.arrays()
    assert len(first) == 200
    assert (second == 2 * first).all()
    assert (again.arrays()[0] == first).all()
    assert abs(first.mean() - 5000) < 1000


def test_lengths_equal_numpys():
    lengths = np.random.default_rng(0).integers(0, 3000, 997)
    counts = LengthCounts(lengths.tolist())
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert counts.quantile(share) == np.quantile(lengths, share, method="inverted_cdf")
    assert counts.share_above(700) == (lengths > 700).mean()
    assert counts.total(700) == np.minimum(lengths, 700).sum()
    bins = counts.histogram()
    assert sum(count for _, count in bins) == 997
    assert sum(count for edge, count in bins if edge <= 768) == (lengths <= 768).sum()


def test_histogram_has_a_bar_for_every_length(tmp_path):
    file = write(tmp_path / "a.tsv", *["abcd\tx"] * 3, "a\tx")
    report = check(file, model__tokenizer="bytes")
    assert report.splits[0].histogram == {"source": [(2, 1), (3, 0), (4, 0), (6, 3)], "target": [(2, 4)]}
    shown = doctor.render(report)
    assert f"6        3  {'█' * 24}" in shown
    assert f"2        1  {'█' * 8} " in shown


def test_strange_files(tmp_path):
    nul = write(tmp_path / "nul.txt", "a\0b", "fine")
    report = check(nul, model__tokenizer="bytes")
    assert (report.files[0].examples, report.files[0].bad_lines, report.exit_code) == (1, 1, 1)
    long = write(tmp_path / "long.txt", "x" * 10_000_000, "y" * 5_000_000, "z")
    report = check(long, model__tokenizer="bytes")
    assert (report.files[0].examples, report.files[0].bad_lines) == (2, 1)
    assert report.splits[0].histogram["document"][-1] == (6291456, 1)
    one = check(write(tmp_path / "one.tsv", "a\tb"), model__tokenizer="bytes", data__validation=nul)
    assert (one.plan.examples, one.plan.steps_per_epoch, one.exit_code) == (1, 1, 1)
    empty = check(nul, model__tokenizer="bytes", data__validation=write(tmp_path / "empty.txt"))
    assert (empty.exit_code, empty.overlap, [split.split for split in empty.splits]) == (2, None, ["train"])
    assert "no records: the file is empty" in doctor.render(empty)
    assert check(write(tmp_path / "none.txt"), model__tokenizer="bytes").exit_code == 2


def test_memory_does_not_follow_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_BLOCK_CHARACTERS", 2**13)

    def peak(count):
        file = write(tmp_path / f"{count}.tsv", *(f"source number {n}\ttarget {n % 97}" for n in range(count)))
        tracemalloc.start()
        report = check(file, model__tokenizer="bytes", data__source_row="512", data__target_row="128")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert report.files[0].examples == count
        return most

    peak(100)  # what is imported
    few, many = peak(3_000), peak(13_000)
    # An example's 24 bytes, its two lengths for the rows, and what sorting takes.
    assert many - few < 10_000 * 150


def test_json_can_be_read_back(tmp_path, capsys):
    file = write(tmp_path / "a.tsv", "a\tb", "a\tb", "c\td")
    config = load(overrides={"model.tokenizer": "bytes", "data.validation": file})
    assert doctor.run([file], config, as_json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["splits"][0]["repeated"]["first"] == [{"where": f"{file}:2", "same_as": f"{file}:1", "pair": True}]
    assert printed["splits"][1]["histogram"]["source"] == [[2, 3]]
    assert printed["overlap"]["pairs"] == 3
    assert printed["plan"]["rows"]["source_row"] == 8
    assert printed["unknown"]["characters"] == []


def test_command_line(tmp_path, capsys):
    from t2t.cli import main

    file = write(tmp_path / "a.tsv", "a\tb", "c\td")
    arguments = ["doctor", file, "--model.tokenizer", "bytes", "--train.batch", "2", "--tokens-per-s", "4"]
    assert main(arguments) == 0
    assert "training an epoch takes about  0:02" in capsys.readouterr().out
    assert main(["doctor", file, "--tokens-per-s", "-1"]) == 2
    recipe = tmp_path / "own.toml"
    recipe.write_text(f'[data]\ntrain = ["{file}"]\nvalidation = ["{file}"]\n')
    assert main(["doctor", "--recipe", str(recipe), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["overlap"]["pairs"] == 2
