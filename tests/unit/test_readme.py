"""Every command and Python block of the README is run, at toy size."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FEW = ["--data.max_samples", "24", "--data.max_validation_samples", "4"]  # a stream has no whole to take a part of
TOY = ["--train.steps", "2", "--train.batch", "8", "--run.threads", "1", "--train.log_every", "1"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(word: str) -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if re.search(rf"(^|\| ){word} ", line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    pairs = [{"source": f"propozitia {i} si alta", "target": f"propoziția {i} și alta"} for i in range(30)]
    text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    (folder / "pairs.jsonl").write_text(text, encoding="utf-8")
    sentences = resources.files("t2t") / "assets" / "ro-held-out.txt"
    (folder / "text.txt").write_text(sentences.read_text(encoding="utf-8").replace("\n", "\n\n"), encoding="utf-8")
    return folder


def run(line: str, folder: Path) -> str:
    """One README line without a shell: a pipe's left side is an echo."""
    left, _, right = line.rpartition("|")
    words = shlex.split(right)
    assert words[0] == "t2t"
    if words[1] == "train":
        words += TOY if "--data.streaming" in words else TOY + FEW
    if words[1] == "tokenizer":
        words[words.index("--size") + 1] = "300"
    typed = shlex.split(left)[1] + "\n" if left else None
    arguments = [sys.executable, "-m", "t2t.cli", *words[1:]]
    done = subprocess.run(arguments, cwd=folder, input=typed, capture_output=True, text=True, env=_outside(folder))
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _outside(folder: Path) -> dict[str, str]:
    """No network, and no store outside of the test's folder."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "T2T_STORE": str(folder / "stores")}


def test_commands(folder: Path) -> None:
    lines = commands("t2t")
    assert len(lines) >= 8
    printed = {line: run(line, folder) for line in lines}
    generated = [out for line, out in printed.items() if "generate" in line]
    assert [len(out.splitlines()) for out in generated] == [30, 1]
    assert all("output" in json.loads(text) for out in generated for text in out.splitlines())
    for name in ("longer", "two", "streamed"):
        assert (folder / "runs" / name / "model" / "model.safetensors").is_file()
    assert list((folder / "stores").glob("*/manifest.json"))
    assert "2 ranks" in next(out for line, out in printed.items() if "--launch 2" in line)


def test_python_blocks(folder: Path) -> None:
    code = "\n".join(blocks("python")).replace('"train.steps": "20"', '"train.steps": "2", "data.max_samples": "24"')
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env=_outside(folder) | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_two_make_commands(tmp_path: Path) -> None:
    """`make quickstart` and `make test` with this environment in place of .venv, and less to do."""
    assert [line.split()[1] for line in commands("make")] == ["quickstart", "test"]
    bin_folder = Path(sys.executable).parent
    stamp = tmp_path / "installed"
    stamp.touch()
    shared = ["make", f"VENV={bin_folder.parent}", f"INSTALLED={stamp}"]
    toy = [*TOY, *FEW, "--run.dir", str(tmp_path / "quickstart")]
    done = subprocess.run([*shared, "quickstart", f"ARGS={shlex.join(toy)}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "words right" in done.stdout
    result = json.loads((tmp_path / "quickstart" / "result.json").read_text())
    assert set(result) == {"copy", "before", "after", "train_seconds"}
    done = subprocess.run([*shared, "test", "ARGS=tests/unit/test_order.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
