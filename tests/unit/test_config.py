"""The config: files and overrides in, every error named, TOML out and in again."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest

from t2t import config
from t2t.config import Config, find_recipe, flat, load, to_toml
from t2t.errors import InputError


def refused(path: Path | None = None, **overrides: str | list[str]) -> str:
    """The message for a file or for overrides; section__key stands for section.key."""
    with pytest.raises(InputError) as caught:
        load(path, {key.replace("__", "."): value for key, value in overrides.items()})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def toml(folder: Path, text: str) -> Path:
    file = folder / "my.toml"
    file.write_text(text, encoding="utf-8")
    return file


def other(key: config.Key) -> Any:
    """A value of the key's type that is not its default."""
    kinds = typing.get_args(key.type) if typing.get_origin(key.type) not in (None, tuple) else (key.type,)
    if typing.get_origin(key.type) is typing.Literal:
        return next(option for option in kinds if option != key.default)
    if typing.get_origin(key.type) is tuple:
        return ('țară "x"\\\n\t\x7f', "b")
    if bool in kinds:
        return not key.default
    return {str: 'a "quoted" ț\\\n\x01', int: 7, float: 1e-07}[kinds[0]]


# In and out


def test_every_key_survives_toml(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {}
    for key in config.keys():
        section, _, leaf = key.name.partition(".")
        sections.setdefault(section, {})[leaf] = other(key)
    parts = {name: dataclasses.replace(getattr(Config(), name), **values) for name, values in sections.items()}
    changed = Config(**parts)
    assert all(flat(changed)[key.name] != key.default for key in config.keys())
    assert load(toml(tmp_path, to_toml(changed)), validate=False) == changed
    assert load(toml(tmp_path, to_toml(Config()))) == Config()


def test_written_toml_is_what_others_read() -> None:
    tree = tomllib.loads(to_toml(load(overrides={"data.train": ["a.tsv", "b.tsv"], "optim.lr": "3e-4"})))
    assert tree["data"]["train"] == ["a.tsv", "b.tsv"]
    assert tree["optim"]["lr"] == 3e-4
    assert tree["checkpoint"]["resume"] is True
    assert "dropout" not in tree["model"]


def test_every_key_is_documented_and_has_a_default_that_is_right() -> None:
    keys = list(config.keys())
    assert len({key.name for key in keys}) == len(keys) > 60
    assert all(key.help for key in keys)
    load()


def test_overrides_go_before_the_file_and_the_file_before_the_base(tmp_path: Path) -> None:
    file = toml(tmp_path, "[train]\nbatch = 8\nsteps = 9\n")
    base = Config(train=config.Train(batch=1, steps=1, log_every=5))
    train = load(file, {"train.steps": "10"}, base=base).train
    assert (train.batch, train.steps, train.log_every) == (8, 10, 5)


def test_a_file_that_repeats_a_value_in_other_forms(tmp_path: Path) -> None:
    file = toml(tmp_path, '[data]\ntrain = "one.tsv"\n[train]\nsteps = 100.0\nmicro_rows = "auto"\n[optim]\nlr = 1\n')
    loaded = load(file)
    assert (loaded.data.train, loaded.train.steps, loaded.optim.lr) == (("one.tsv",), 100, 1.0)
    assert type(loaded.train.steps) is int
    assert type(loaded.optim.lr) is float


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("checkpoint.resume", "false", False),
        ("checkpoint.resume", "True", True),
        ("model.dropout", "0.5", 0.5),
        ("model.dropout", "none", None),
        ("model.dropout", "", None),
        ("optim.lr", "1e-3", 1e-3),
        ("train.micro_rows", "4", 4),
        ("train.micro_rows", "auto", "auto"),
        ("data.train", "a b.tsv", ("a b.tsv",)),
        ("data.train", ["a", "b"], ("a", "b")),
        ("model.freeze", [], ()),
        ("data.prefix", "12", "12"),
        ("data.prefix", "", ""),
        ("optim.name", "adafactor", "adafactor"),
    ],
)
def test_override_forms(key: str, text: str | list[str], value: object) -> None:
    assert flat(load(overrides={key: text}))[key] == value


def test_the_run_folder() -> None:
    assert load(overrides={"run.name": "x"}).run_dir == Path("runs/x")
    assert load(overrides={"run.name": "x", "run.dir": "y/z"}).run_dir == Path("y/z")


# What is refused


def test_unknown_names_are_told_with_their_file_and_a_suggestion(tmp_path: Path) -> None:
    file = toml(tmp_path, "[train]\nbach = 8\n")
    assert refused(file) == f"{file}: train.bach: unknown key (did you mean train.batch?)"
    file = toml(tmp_path, "[trian]\nbatch = 8\n")
    assert refused(file) == f"{file}: trian: unknown section (did you mean train?)"
    file = toml(tmp_path, "batch = 8\n")
    assert refused(file).startswith(f"{file}: batch: unknown section")
    file = toml(tmp_path, "train = 8\n")
    assert refused(file) == f"{file}: train: is a section: write [train] and its keys below"
    file = toml(tmp_path, "[train.batch]\nsize = 8\n")
    assert refused(file) == f"{file}: train.batch: expected a whole number, got {{'size': 8}}"
    assert refused(train__bach="8") == "--train.bach: unknown key (did you mean train.batch?)"
    assert refused(zzzzz="8") == "--zzzzz: unknown key"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("steps = '8'", "expected a whole number, got '8'"),
        ("steps = 1.5", "expected a whole number, got 1.5"),
        ("steps = true", "expected a whole number, got True"),
        ("steps = [1]", "expected a whole number, got [1]"),
        ("steps = inf", "expected a whole number, got inf"),
        ("steps = nan", "expected a whole number, got nan"),
        ("steps = 2024-01-01", "expected a whole number, got datetime.date(2024, 1, 1)"),
        ("steps = -1", "must be 0 or more, got -1"),
        ("epochs = nan", "expected a finite number, got nan"),
        ("epochs = 0", "must be above 0, got 0.0"),
        ("gradient_checkpointing = 1", "expected true or false, got 1"),
        ("gradient_checkpointing = 'true'", "expected true or false, got 'true'"),
        ("precision = 'fp23'", "'fp23' is not one of auto, fp32, mixed (did you mean fp32?)"),
        ("precision = 32", "32 is not one of auto, fp32, mixed (did you mean fp32?)"),
        ("best = 3", "expected text, got 3"),
        ("metrics = 3", "expected a list of strings, got 3"),
        ("metrics = ['bleu', 3]", "expected text, got 3"),
        ("micro_rows = 'all'", "expected a whole number, got 'all'; or 'all' is not one of auto"),
        ("micro_rows = 0", 'must be 1 or more, or "auto", got 0'),
    ],
)
def test_values_of_the_wrong_kind_or_size(tmp_path: Path, line: str, message: str) -> None:
    file = toml(tmp_path, f"[train]\n{line}\n")
    assert refused(file) == f"{file}: train.{line.split(' ')[0]}: {message}"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("train.steps", "many", "expected a whole number, got 'many'"),
        ("train.steps", "1.5", "expected a whole number, got '1.5'"),
        ("train.steps", ["1", "2"], "expected a whole number, got ['1', '2']"),
        ("optim.lr", "inf", "expected a finite number, got 'inf'"),
        ("optim.lr", "fast", "expected a number, got 'fast'"),
        ("checkpoint.resume", "yes", "expected true or false, got 'yes'"),
        ("optim.name", "adam", "'adam' is not one of adamw, adafactor, lamb (did you mean adamw?)"),
        ("data.prefix", ["a", "b"], "expected text, got ['a', 'b']"),
    ],
)
def test_overrides_of_the_wrong_kind(key: str, text: str | list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(overrides={key: text})
    assert str(caught.value) == f"--{key}: {message}"


def test_every_range_is_held_at_its_border() -> None:
    just_outside = {"0 or more": -1, "1 or more": 0, "above 0": 0, "at least 0 and below 1": 1}
    for key, (_, words) in config._RANGES.items():
        if words in just_outside:
            for value in (just_outside[words], -5):
                with pytest.raises(InputError, match=f"^--{key}: must be {words}, got "):
                    load(overrides={key: str(value)})
    assert set(config._RANGES) <= {key.name for key in config.keys()}
    assert "must be above 0 and at most 1" in refused(generate__top_p="1.01")
    assert "must be 0 or more and below 2**63" in refused(run__seed=str(2**63))
    assert "must be 0, or 8 or more" in refused(data__piece="7")
    assert "must be 2 or more" in refused(data__max_source_length="1")


def test_every_number_has_a_range_or_needs_none() -> None:
    numbers = {key.name for key in config.keys() if {int, float} & {key.type, *typing.get_args(key.type)}}
    assert numbers - set(config._RANGES) == {"generate.length_penalty"}


def test_keys_that_do_not_go_together(tmp_path: Path) -> None:
    assert refused(data__source_row="100") == (
        "--data.source_row: must hold one example: at least data.max_source_length = 512, or 0"
    )
    assert "at least data.max_target_length = 128" in refused(data__target_row="127")
    assert refused(model__path="a", model__config="b").startswith("--model.config: is for training from scratch")
    assert refused(data__validation="a", data__validation_split="0.1").startswith("--data.validation_split: is for")
    assert refused(generate__beams="2", generate__temperature="1").startswith("--generate.temperature: samples")
    assert refused(optim__relative_step="true") == '--optim.relative_step: needs optim.name = "adafactor"'
    relative = {"optim__relative_step": "true", "optim__name": "adafactor"}
    assert refused(optim__lr="1", **relative).startswith("--optim.lr: is unused under optim.relative_step")
    assert refused(track__to=["wandbb"]) == "--track.to: no tracker 'wandbb' (did you mean wandb?)"
    file = toml(tmp_path, "[generate]\nbeams = 2\ntemperature = 1\n")
    assert refused(file).startswith(f"{file}: generate.temperature: samples")
    # The key that is wrong was never given: its name alone stands for where.
    assert refused(data__max_source_length="1000", data__source_row="800").startswith("--data.source_row: must hold")


def test_the_best_figure_must_be_computed() -> None:
    assert refused(train__best="bleu") == "--train.best: 'bleu' is not computed, of train.metrics come: loss"
    said = refused(train__best="rouge", train__metrics=["rouge", "wer"])
    assert said.endswith("of train.metrics come: loss, rouge1, rouge2, rougeL, wer")
    for best, metrics in (("rougeL", ["rouge"]), ("wer", ["bleu", "wer"]), ("mine", ["my.module:figures"])):
        assert load(overrides={"train.best": best, "train.metrics": metrics}).train.best == best


def test_bad_toml_is_told_with_its_line(tmp_path: Path) -> None:
    file = toml(tmp_path, "[train]\nbatch = = 8\n")
    assert refused(file).startswith(f"{file}: not valid TOML: ")
    assert "line 2" in refused(file)
    file.write_bytes(b"[run]\nname = '\xff'\n")
    assert refused(file).startswith(f"{file}: not valid TOML: ")


def test_recipes_are_found_by_name_and_a_file_of_that_name_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("quickstart").parent.name == "recipes"
    assert find_recipe("quickstart.toml") == find_recipe("quickstart")
    (tmp_path / "quickstart.toml").write_text("[train]\nbatch = 3\n")
    assert load("quickstart.toml").train.batch == 3
    with pytest.raises(InputError) as caught:
        load("quikstart")
    assert "quikstart: no such config file, nor a recipe (did you mean quickstart?); recipes: " in str(caught.value)
    with pytest.raises(InputError, match="folder/quickstart.toml: no such config file"):
        load("folder/quickstart.toml")
