"""Every recipe of the package trains, with a tiny model in its model's place."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from t2t import config
from t2t.data.tokens import Bytes
from t2t.models import load as models
from t2t.train.run import train

PACKAGED = sorted(config.find_recipe("quickstart").parent.glob("*.toml"))
RECIPES = [file for file in PACKAGED if not file.stem.startswith("bert-")]  # test_masked.py trains BERT's
RAW = {
    "model_type": "t5", "vocab_size": 384, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2,
}  # fmt: skip


def toy(recipe: Path, folder: Path, readers: int) -> config.Config:
    """The recipe as it stands, but for the model, the amount of data, and its length."""
    whole = config.load(recipe)
    assert models.read_config(whole.model.path or whole.model.config), "its own model is there"
    models.save(models.create(RAW, whole.run.seed).state_dict(), RAW, folder / "tiny")
    Bytes().save(folder / "tiny")
    (folder / "text.txt").write_text("Ieri am fost la piață și am cumpărat pâine.\n" * 8, encoding="utf-8")
    overrides = {
        "run.dir": str(folder / "run"),
        "run.threads": "1",
        "model.path" if whole.model.path else "model.config": str(folder / "tiny"),
        "data.max_samples": "16",
        "data.max_validation_samples": "4",
        "data.readers": str(readers),
        "train.steps": "2",
        "train.batch": "4",
        "train.log_every": "1",
    }
    return config.load(recipe, overrides | ({} if whole.data.train else {"data.train": str(folder / "text.txt")}))


def test_there_are_recipes() -> None:
    assert {"quickstart", "byt5-ro-pretrain"} <= {recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize(
    ("recipe", "readers"),
    [*((recipe, 0) for recipe in RECIPES), (config.find_recipe("byt5-ro-pretrain"), 2)],
    ids=lambda value: value.stem if isinstance(value, Path) else str(value),
)
def test_recipe_trains_at_toy_size(recipe: Path, readers: int, tmp_path: Path) -> None:
    assert recipe.read_text(encoding="utf-8").startswith("# "), "t2t recipes shows the first line"
    chosen = toy(recipe, tmp_path, readers)
    figures = train(chosen, report=lambda line: None)
    assert math.isfinite(figures["loss"])
    if chosen.data.validation:
        assert f"validation_{chosen.train.best}" in figures
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    before, after = (models.load(tmp_path / name)[0].shared.weight for name in ("tiny", "run/model"))
    assert not before.equal(after)
