"""The wheel: what it carries, and that the first run works from it alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "t2t", "tests", "benchmarks")
TOY = (
    *("--train.steps", "2", "--data.max_samples", "32", "--data.max_validation_samples", "4", "--train.batch", "4"),
    *("--data.piece", "30", "--data.max_source_length", "40", "--data.max_target_length", "40", "--run.threads", "1"),
)


def python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that nothing an earlier build left lying about gets into it."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), cwd=folder)
    (file,) = (folder / "dist").glob("*.whl")
    return file


def test_wheel_carries_the_whole_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "t2t"
    kept = {file.relative_to(ROOT).as_posix() for file in package.rglob("*") if file.is_file()}
    kept = {name for name in kept if "__pycache__" not in name}
    assert {"t2t/assets/byt5-ro/model.safetensors", "t2t/assets/NOTICE.md", "t2t/recipes/quickstart.toml"} <= kept
    assert {name for name in names if name.startswith("t2t/")} == kept
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"t2t"}
    licenses = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE.md"}


def test_quickstart_works_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    package, here = tmp_path / "package", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(package)
    here.mkdir()
    where = python("-c", "import t2t; print(t2t.__file__)", cwd=here, path=package)
    assert Path(where.strip()).is_relative_to(package)
    out = python("-m", "t2t.cli", "quickstart", *TOY, cwd=here, path=package)
    assert "words right" in out
    assert sorted(json.loads((here / "runs/quickstart/result.json").read_text())) == [
        "after", "before", "copy", "train_seconds",
    ]  # fmt: skip
