"""The shape of the house: which room may import which, what is documented, and what the core can do without."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import t2t

PACKAGE = Path(t2t.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [file.relative_to(PACKAGE).as_posix() for file in FILES]

# A room may import what stands before it in this order, and what the table below it says.
ORDER = (
    *("errors", "files", "config", "device", "terminal", "kernels", "models", "parallel", "optim", "checkpoint"),
    *("train", "trainer", "quickstart", "doctor", "cli", "__main__"),
)
# These hang beside, or take less than their place would allow.
ONLY = {
    "errors": set(),
    "files": set(),
    "config": {"errors"},
    "device": {"errors"},
    "terminal": {"errors"},
    "kernels": {"device", "errors"},
    "models": {"kernels", "errors"},
    "data": {"config", "errors", "files"},
    "metrics": {"errors"},
    "generate": {"config", "data", "device", "errors", "kernels", "models"},
}
BESIDE = {"data", "metrics", "generate"}  # for everyone from the training loop on
LIGHT = ("data", "config", "errors", "files", "terminal", "metrics", "cli", "__main__")  # rooms that import no torch


def room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


ROOMS = {room(file) for file in FILES}


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or within a function; ``from t2t import x`` counts as t2t.x."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            assert node.module is not None
            yield from (f"t2t.{name.name}" for name in node.names) if node.module == "t2t" else [node.module]


def allowed(name: str) -> set[str]:
    if name in ONLY:
        return ONLY[name]
    before = set(ORDER[: ORDER.index(name)])
    return before | BESIDE if ORDER.index(name) >= ORDER.index("train") else before


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_imports_point_one_way(file: Path) -> None:
    own = room(file)
    if own == "__init__":
        return
    used = {module.split(".")[1] for module in imports(file) if module.startswith("t2t.")} & ROOMS
    assert used - {own} <= allowed(own)


def test_every_room_has_its_place() -> None:
    assert ROOMS - {"__init__"} <= {*ORDER, *ONLY}


@pytest.mark.parametrize("file", [file for file in FILES if room(file) in LIGHT], ids=lambda file: file.stem)
def test_torch_stays_outside(file: Path) -> None:
    assert not any(module.split(".")[0] == "torch" for module in imports(file))


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_public_name_is_documented(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if tree.body:
        assert ast.get_docstring(tree), "the module says nothing"
    public = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if not ast.get_docstring(node)] == []


def test_training_needs_four_libraries_alone(tmp_path: Path) -> None:
    """torch, transformers, safetensors and numpy; the others are for the features that ask for them."""
    code = """if True:
        import json, pathlib, sys
        extras = "pyarrow zstandard sacrebleu tensorboard wandb trackio rich cyclopts pydantic datasets sentencepiece"
        for name in extras.split():
            sys.modules[name] = None
        import t2t.train.run
        from t2t import config, load
        raw = {"model_type": "t5", "vocab_size": 384, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1}
        pathlib.Path("config.json").write_text(json.dumps(raw))
        pathlib.Path("pairs.tsv").write_text("unu\\tdoi\\ntrei\\tpatru\\n")
        flags = {
            "model.config": "config.json", "model.tokenizer": "bytes", "train.steps": "1", "run.threads": "1",
            "data.train": "pairs.tsv", "data.validation": "pairs.tsv", "train.metrics": ["exact_match", "rouge"],
        }
        assert "validation_rougeL" in t2t.train.run.train(config.load(overrides=flags))
        assert len(load("runs/t2t/model").generate(["unu"])) == 1
    """
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
