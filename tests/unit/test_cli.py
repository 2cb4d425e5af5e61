"""The command line as its user meets it: help, refusals in one line, exit codes, and what each verb prints."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from t2t import config
from t2t.cli import main
from t2t.generate import load

RAW = {
    "model_type": "t5", "vocab_size": 384, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2,
    "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
}  # fmt: skip
VERBS = ("quickstart", "train", "evaluate", "generate", "recipes", "doctor")
FIGURES = {"loss", "bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match", "wer", "cer", "word_accuracy"}
WORDS = ["unu", "doi", "trei și un rest mai lung", "patru", "cinci", "șase"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: exit code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's way out of --help
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def flags(folder: Path, **changes: str) -> list[str]:
    """What trains a tiny model on the pairs of a folder, into its run/."""
    values = {
        "run.dir": str(folder / "run"),
        "run.threads": "1",
        "model.config": str(folder / "config.json"),
        "model.tokenizer": "bytes",
        "data.train": str(folder / "pairs.tsv"),
        "data.prefix": "say: ",
        "data.max_source_length": "40",
        "data.max_target_length": "12",
        "train.batch": "4",
        "train.steps": "3",
        "optim.lr": "0.01",
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [text for key, value in values.items() for text in (f"--{key}", value)]


def write_inputs(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(RAW))
    lines = (f"{word}\t{word[::-1]}\n" for word in WORDS)
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")


def write_recipe(folder: Path) -> Path:
    """The same flags as a file."""
    given = flags(folder)
    overrides = {flag.removeprefix("--"): value for flag, value in zip(given[::2], given[1::2], strict=True)}
    file = folder / "recipe.toml"
    file.write_text(config.to_toml(config.load(overrides=overrides)), encoding="utf-8")
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that `t2t train` wrote; its data lies beside the run."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    assert main(["train", *flags(folder)]) == 0
    return folder / "run" / "model"


def child(arguments: Sequence[str | Path]) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command, both = [sys.executable, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=both, stderr=both, encoding="utf-8")


def assert_one_line(err: str, *parts: str) -> None:
    assert err.startswith("error: ")
    assert err.count("\n") == 1 and err.endswith("\n")
    for part in parts:
        assert part in err


def test_help_is_quick_and_leaves_torch_alone() -> None:
    code = """if True:
        import sys
        from t2t.cli import main
        try:
            main(["--help"])
        except SystemExit as end:
            heavy = {"torch", "numpy", "transformers"} & set(sys.modules)
            sys.exit(f"imported: {heavy}" if heavy else end.code)
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with child(["-c", code]) as process:
        out, err = process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (process.returncode, err) == (0, "")
    assert all(verb in out for verb in VERBS)
    # The processor's seconds, which do not depend on who else is busy.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(run: Run, verb: str) -> None:
    code, out, err = run(verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: t2t {verb}")


def test_train_documents_every_config_key(run: Run) -> None:
    words = " ".join(run("train", "--help")[1].split())
    for key in config.keys():
        assert f"--{key.name} " in words
        assert " ".join(key.help.split()[:3]) in words


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out.split()[0]) == (0, "t2t")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ["trian: unknown verb (did you mean train?)", "doctor"]),
        ([], ["VERB", "t2t --help"]),
        (["train", "--train.bach", "8"], ["--train.bach: unknown argument (did you mean --train.batch?)"]),
        (["train", "--train.bach=8"], ["--train.bach: unknown argument (did you mean --train.batch?)"]),
        (["train", "--dryrun"], ["--dryrun: unknown argument (did you mean --dry-run?)"]),
        (["train", "--optim.name", "adam"], ["--optim.name: 'adam' is not one of", "(did you mean adamw?)"]),
        (["train", "--train.steps", "ten"], ["--train.steps: expected a whole number, got 'ten'"]),
        (["train", "--train.batch", "0"], ["--train.batch: must be 1 or more, got 0"]),
        (["train", "--train.steps"], ["--train.steps", "t2t train --help"]),
        (["train", "quikstart"], ["quikstart: no such config file, nor a recipe (did you mean quickstart?)"]),
        (["train", "--data.train", "x.tsv"], ["model.path: no model given"]),
        (["train", "--model.path", "./nowhere", "--data.train", "x"], ["model.path: no such folder: ./nowhere"]),
        (["evaluate", "./nowhere", "x.tsv"], ["model.path: no such folder: ./nowhere"]),
        (["evaluate", "m", "x.tsv", "--train.steps", "2"], ["--train.steps: unknown argument"]),
        (["generate", "./nowhere"], ["model.path: no such folder: ./nowhere"]),
        (["recipes", "quick"], ["quick: no such config file", "(did you mean quickstart?)"]),
    ],
)
def test_what_is_misspelt_is_told_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert_one_line(err, *parts)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[train]\nbach = 8\n", ["train.bach: unknown key (did you mean train.batch?)"]),
        ("[trian]\nbatch = 8\n", ["trian: unknown section (did you mean train?)"]),
        ('[train]\nbatch = "8"\n', ["train.batch: expected a whole number, got '8'"]),
        ("[train]\nbatch = 0\n", ["train.batch: must be 1 or more, got 0"]),
        ("[train\n", ["not valid TOML", "line 1"]),
    ],
)
def test_a_config_file_is_refused_by_name_and_key(run: Run, tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    code, out, err = run("train", file, "--run.dir", tmp_path / "run")
    assert (code, out) == (2, "")
    assert_one_line(err, f"{file}: ", *parts)
    assert sorted(tmp_path.iterdir()) == [file]


def test_bad_data_is_told_by_file_and_line_and_nothing_is_written(run: Run, folder: Path) -> None:
    file = folder / "bad.tsv"
    file.write_text("unu\tdoi\ntrei\n", encoding="utf-8")
    before = sorted(folder.rglob("*"))
    code, out, err = run("train", *flags(folder, data__train=str(file)))
    assert (code, out) == (2, "")
    assert_one_line(err, f"{file}:2: ")
    assert sorted(folder.rglob("*")) == before


def test_a_diverged_run_ends_with_3(run: Run, folder: Path) -> None:
    code, out, err = run("train", *flags(folder, optim__lr="1e30", optim__clip="0"))
    assert code == 3
    assert "nothing was updated" in out
    assert err.splitlines()[-1].startswith("error: step 2: the ")
    assert (folder / "run" / "crash" / "step-000002" / "examples.jsonl").is_file()


def test_a_terminated_run_ends_with_75_and_goes_on(run: Run, folder: Path) -> None:
    long = flags(folder, train__steps="1000000", checkpoint__every="0")
    with child(["-m", "t2t", "train", *long]) as process:
        assert process.stderr is not None
        assert any(line.startswith("train") for line in process.stderr)  # the first step is done
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 75
    assert "SIGTERM: saved at step" in err and "Traceback" not in err
    saved = [int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").iterdir()]
    assert len(saved) == 1
    code, out, _ = run("train", *long, "--train.stop_at", str(saved[0] + 1))
    assert code == 0
    assert f"step-{saved[0]:06d}" in out


def test_dry_run_prints_the_plan_and_writes_nothing(run: Run, folder: Path) -> None:
    recipe = write_recipe(folder)
    before = sorted(folder.rglob("*"))
    code, out, err = run("train", recipe, "--model.freeze", "encoder.*", "--dry-run")
    assert (code, err) == (0, "")
    plan = dict(line.split(maxsplit=1) for line in out.splitlines())
    loaded = {name: plan[name] for name in ("parameters", "data", "batch", "steps", "device", "memory")}
    parameters, trained, size = loaded["parameters"].split(", ")
    assert parameters.endswith("K") and trained.endswith("K trained") and size.endswith("KiB")
    assert float(trained.removesuffix("K trained")) < float(parameters.removesuffix("K"))
    assert loaded["data"] == "6 examples, 0 held out"
    assert loaded["batch"].startswith("4 examples, about ") and " tokens, " in loaded["batch"]
    assert loaded["steps"].startswith("3 (1.50 epochs)")
    assert loaded["device"].startswith("cpu, ")
    assert loaded["memory"].startswith("about ")
    assert sorted(folder.rglob("*")) == before


def test_evaluate_gives_every_figure_and_the_predictions(run: Run, model: Path, tmp_path: Path) -> None:
    pairs, output = model.parents[1] / "pairs.tsv", tmp_path / "predictions.jsonl"
    code, out, err = run("evaluate", model, pairs, "--run.threads", "1", "--json", "--output", output)
    assert (code, err) == (0, "note: data: 1 targets (16.7%) cut at data.max_target_length = 12\n")
    figures = json.loads(out)
    assert figures.keys() == FIGURES
    assert 0 < figures["loss"] < 10
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["reference"] for row in rows] == [word[::-1] for word in WORDS]
    assert [row["source"] for row in rows] == [f"say: {word}" for word in WORDS]
    assert [row["where"] for row in rows] == [f"{pairs}:{n}" for n in range(1, 7)]
    assert [row["prediction"] for row in rows] == load(model).generate(WORDS)

    code, out, _ = run("evaluate", model, pairs, "--run.threads", "1", "--metrics", "cer", "exact_match")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["loss", "cer", "exact_match"]
    assert f"{figures['cer']:.4f}" in out

    code, _, err = run("evaluate", model, pairs, "--output", tmp_path / "no" / "folder.jsonl")
    assert code == 2
    assert_one_line(err, "--output: no such folder: ")


@pytest.mark.parametrize("name", ["inputs.txt", "inputs.jsonl", "pairs.tsv"])
def test_generate_from_a_file_keeps_the_order(run: Run, model: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    records = {
        "inputs.txt": [*WORDS],
        "inputs.jsonl": [json.dumps({"id": "x", "lang": "ro", "sentence": word}) for word in WORDS],
        "pairs.tsv": [f"{word}\tx" for word in WORDS],
    }[name]
    file.write_text("".join(f"{record}\n" for record in records), encoding="utf-8")
    column = ["--data.source", "sentence"] if name == "inputs.jsonl" else []
    code, out, err = run("generate", model, "--input", file, "--generate.batch", "2", "--run.threads", "1", *column)
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["input"] for row in rows] == WORDS
    # The prefix and the length of the answer are the model's own.
    assert [row["output"] for row in rows] == load(model).generate(WORDS)


def test_generate_settings_reach_the_model(run: Run, model: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "inputs.txt", tmp_path / "out.jsonl"
    file.write_text("\n".join(WORDS), encoding="utf-8")
    beams = ["--generate.beams", "2", "--generate.max_length", "5"]
    code, out, _ = run("generate", model, "--input", file, "--output", output, *beams)
    assert (code, out) == (0, "")
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    loaded = load(model)
    assert [row["output"] for row in rows] == loaded.generate(WORDS, beams=2, max_length=5)

    code, out, err = run("generate", model, "--input", file, "--data.prefix", "other ", "--data.max_source_length", "8")
    assert code == 0
    assert "note: input 3 is longer than 8 tokens and was cut\n" in err
    settings = dataclasses.replace(loaded.settings, prefix="other ", max_source_length=8)
    expected = dataclasses.replace(loaded, settings=settings).generate(WORDS)
    assert [json.loads(line)["output"] for line in out.splitlines()] == expected


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_generate_reads_a_pipe_line_by_line(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "doi\r\n\nșase".encode())
    code, out, err = run("generate", model)
    assert (code, err) == (0, "")
    assert [json.loads(line)["input"] for line in out.splitlines()] == ["doi", "", "șase"]
    pipe(monkeypatch, b"doi\n\xff\n")
    code, out, err = run("generate", model)
    assert code == 2
    assert_one_line(err, "standard input:2: invalid UTF-8 at byte 1")


def test_generate_refuses_before_it_writes(run: Run, model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("precious\n")
    code, _, err = run("generate", model, "--input", tmp_path / "nowhere.txt", "--output", kept)
    assert (code, kept.read_text()) == (2, "precious\n")
    assert_one_line(err, "--input: no such file")
    code, _, err = run("generate", model, "--input", kept, "--output", tmp_path / "no" / "folder.jsonl")
    assert code == 2
    assert_one_line(err, "--output: ", "No such file or directory")


def test_generate_counts_the_bad_lines_it_skips(run: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "inputs.jsonl"
    file.write_text('{"source": "doi"}\n{"source": null}\n{"source": ["a", "b"]}\n')
    code, _, err = run("generate", model, "--input", file)
    assert code == 2
    assert_one_line(err, f"{file}:2: field 'source' is null")
    code, out, err = run("generate", model, "--input", file, "--data.on_bad_line", "skip")
    assert code == 0
    assert [json.loads(line)["input"] for line in out.splitlines()] == ["doi", "a b"]
    assert err == f"note: 1 bad lines skipped, the first: {file}:2: field 'source' is null, expected text\n"


def test_generate_ends_quietly_when_its_reader_does(model: Path, tmp_path: Path) -> None:
    """As under ``| head -1``; more is written than a pipe holds."""
    file = tmp_path / "many.txt"
    file.write_text("".join(f"{'lung ' * 400}{n}\n" for n in range(60)))
    one = ["--generate.batch", "1", "--generate.max_length", "1"]
    with child(["-m", "t2t.cli", "generate", model, "--input", file, *one]) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["input"].endswith(" 0")
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 0
    assert all(line.startswith("note: ") for line in err.splitlines())


def test_recipes_are_listed_and_shown(run: Run) -> None:
    code, out, _ = run("recipes")
    assert code == 0
    listed = [line.split()[0] for line in out.partition("\n\n")[0].splitlines()[2:]]
    assert listed == sorted(file.stem for file in config.find_recipe("quickstart").parent.glob("*.toml"))
    code, out, _ = run("recipes", "quickstart")
    assert code == 0
    assert out == config.find_recipe("quickstart").read_text(encoding="utf-8")


def test_train_is_a_function_and_a_package(folder: Path) -> None:
    """In a fresh process: what imports leave behind is the point."""
    code = """if True:
        import sys
        import t2t
        assert "torch" not in sys.modules
        from t2t.config import load
        before = t2t.train(load(sys.argv[1]))
        import t2t.train.run
        after = t2t.train(load(sys.argv[1]))
        assert before == after and before["loss"] > 0
    """
    with child(["-c", code, write_recipe(folder)]) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert (folder / "run" / "model" / "model.safetensors").is_file()


def test_every_public_name_resolves() -> None:
    import t2t

    run = importlib.import_module("t2t.train.run")
    assert callable(t2t.train) and callable(t2t.load) and callable(run.train)
    assert all(getattr(t2t, name) is not None for name in t2t.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        t2t.trian  # noqa: B018
