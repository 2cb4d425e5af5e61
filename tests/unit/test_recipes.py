"""Every recipe of the package, and every command of docs/recipes.md, runs through the command line at toy size."""

from __future__ import annotations

import io
import json
import math
import shlex
from pathlib import Path

import pytest
from pages import commands

from t2t import cli, config
from t2t.data import vocabulary
from t2t.data.tokens import Bytes
from t2t.models import load as models
from t2t.models import sizes

PACKAGED = sorted(config.find_recipe("quickstart").parent.glob("*.toml"))
RECIPES = [file for file in PACKAGED if not file.stem.startswith("bert-")]  # test_masked.py trains BERT's
DOCS = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
# By the beginning of a model type: what makes a config of any size tiny, and whose vocabulary suits it.
TINY = {
    "t5": (["d_model=16", "d_kv=4", "d_ff=24", "num_layers=1", "num_decoder_layers=1", "num_heads=2"], "t5"),
    "mt5": (["d_model=16", "d_kv=4", "d_ff=24", "num_layers=1", "num_heads=2"], "t5"),
    "gpt2": (["n_embd=16", "n_layer=1", "n_head=2"], "gpt2"),
    "bert": (["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=24"], "bert"),
}
TOY = [
    *("--run.threads", "1", "--data.max_samples", "16", "--data.max_validation_samples", "4", "--train.steps", "2"),
    *("--train.batch", "4", "--train.log_every", "1", "--generate.max_length", "8"),
]


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer of every style."""
    folder = tmp_path_factory.mktemp("vocabularies")
    for style in vocabulary.STYLES:
        vocabulary.train(["asset:ro-held-out.txt"], folder / style, 400, style=style)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the files that the documentation speaks of."""
    monkeypatch.chdir(tmp_path)
    text = "Ieri am fost la piață și am cumpărat pâine.\nAlaltăieri n-am fost nicăieri; ploua.\n\n" * 12
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    pairs = [{"article": f"Un text despre {i} oameni și o casă.", "highlights": f"{i} oameni"} for i in range(24)]
    for name in ("pairs", "train", "validation"):
        lines = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def own_model(name: str) -> tuple[list[str], str]:
    """What makes a recipe's model tiny, and its kind of vocabulary; a hub name must be that of a known size."""
    raw = models.read_config(name) if name.startswith("asset:") else sizes.named(name.rpartition("/")[2])
    return TINY[raw["model_type"]]


def tiny_model(whole: config.Config, folder: Path, vocabularies: Path) -> dict[str, list[str]]:
    """Flags that put a tiny model of the same family in the place of the recipe's own."""
    if whole.model.path.startswith("runs/"):
        return {}  # what the command before it made
    changes, style = own_model(whole.model.path or whole.model.config)
    if whole.model.config:
        wanted = "bytes" if whole.model.tokenizer == "bytes" else str(vocabularies / style)
        return {"--model.overrides": changes, "--model.tokenizer": [wanted]}
    name = whole.model.path if whole.model.path.startswith("asset:") else whole.model.path.rpartition("/")[2]
    raw = models.scratch_config(name, changes)
    models.save(models.create(raw, seed=1).state_dict(), raw, folder / "tiny")
    Bytes().save(folder / "tiny")
    return {"--model.path": [str(folder / "tiny")]}


def made_data(whole: config.Config) -> list[str]:
    """Flags that name files where the recipe leaves them to the user."""
    plain = whole.data.source_transforms or whole.data.objective not in ("auto", "pairs")
    flags = [] if whole.data.train else ["--data.train", "text.txt" if plain else "train.jsonl"]
    lacks = whole.train.metrics and not whole.data.validation and not whole.data.validation_split
    return [*flags, *(["--data.validation", "validation.jsonl"] if lacks else [])]


def test_there_are_recipes() -> None:
    named = {"quickstart", "byt5-ro-pretrain", "t2t", "t5-summarize", "t5-pretrain", "mt5-diacritics", "gpt2-pretrain"}
    assert named <= {recipe.stem for recipe in RECIPES}
    for recipe in RECIPES:
        assert recipe.read_text(encoding="utf-8").startswith("# "), "t2t recipes shows the first line"
        assert config.load(recipe).run.name == recipe.stem


@pytest.mark.parametrize(
    ("recipe", "readers"),
    [*((recipe, 0) for recipe in RECIPES), (config.find_recipe("byt5-ro-pretrain"), 2)],
    ids=lambda value: value.stem if isinstance(value, Path) else str(value),
)
def test_recipe_trains_at_toy_size(
    recipe: Path, readers: int, folder: Path, vocabularies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = config.load(recipe)
    tiny = [word for flag, values in tiny_model(whole, folder, vocabularies).items() for word in (flag, *values)]
    flags = [*tiny, *made_data(whole), "--data.readers", str(readers)]
    code = cli.main(["train", recipe.stem, *flags, *TOY, "--run.dir", "run"])
    assert code == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) for line in lines)
    if whole.data.validation or whole.data.validation_split or whole.train.metrics:
        assert f"validation_{whole.train.best}" in lines[-1]
    ran = config.load(folder / "run" / "config.toml")
    assert (ran.optim, ran.generate.beams) == (whole.optim, whole.generate.beams), "what it is about stays"
    if whole.model.path:
        before, after = (dict(models.load(folder / name)[0].named_parameters()) for name in ("tiny", "run/model"))
        assert any(not weight.equal(after[name]) for name, weight in before.items())


def documented() -> list[str]:
    lines = commands("recipes.md")
    assert all("t2t " in line for line in lines)
    return lines


def test_every_documented_command_runs(
    folder: Path, vocabularies: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page; a pipe's left side is an echo."""
    for line in documented():
        left, _, right = line.rpartition("|")
        words = shlex.split(right)
        assert words[0] == "t2t"
        if left:
            typed = io.TextIOWrapper(io.BytesIO(shlex.split(left)[1].encode() + b"\n"), encoding="utf-8")
            monkeypatch.setattr("sys.stdin", typed)
        if words[1] == "train":
            sized = {"model.config": words[words.index("--model.config") + 1]} if "--model.config" in words else {}
            for flag, values in tiny_model(config.load(words[2], sized), folder, vocabularies).items():
                words += [] if flag in words else [flag, *values]  # what the page names itself stays
            words += TOY
        if words[1] == "tokenizer":
            words[words.index("--size") + 1] = "300"
            words[2] = "asset:ro-held-out.txt"
        assert cli.main(words[1:]) == 0, f"{line}\n{capsys.readouterr().err}"
    runs = {file.parent.parent.name for file in folder.glob("runs/*/model/model.safetensors")}
    described = {file.stem for file in PACKAGED} - {"quickstart", "byt5-ro-pretrain"}
    assert runs == {*described, "tuned", "gpt2-xl"}


@pytest.mark.parametrize("recipe", [r.stem for r in PACKAGED if r.stem not in ("quickstart", "byt5-ro-pretrain")])
def test_every_recipe_is_documented(recipe: str) -> None:
    assert f"t2t train {recipe} " in DOCS
