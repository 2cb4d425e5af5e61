"""A Trainer's script as torchrun starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tiny

from t2t.config import load
from t2t.data.tokens import Bytes
from t2t.models import load as models

SCRIPT = """
import os, t2t

arguments = t2t.TrainerArguments(
    model_name_or_path="tiny", train_file="pairs.tsv", output_dir="run", per_device_train_batch_size=3,
    gradient_accumulation_steps=2, max_steps=2, use_cpu=True, local_rank=int(os.environ["LOCAL_RANK"]),
    ddp_backend="gloo", ddp_find_unused_parameters=False,
)
trainer = t2t.Trainer(arguments)
print("figures", sorted(trainer.train()), trainer.generate_single("abc", max_length=3) is not None)
"""


def test_processes_of_torchrun_train_together(tmp_path: Path) -> None:
    tiny.write_pairs(tmp_path / "pairs.tsv", 20)
    models.save(models.create(tiny.RAW, seed=1).state_dict(), tiny.RAW, tmp_path / "tiny")
    Bytes().save(tmp_path / "tiny")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("figures ['grad_norm', 'loss', 'lr', 'tokens', 'tokens_per_s'] True") == 2
    assert sum(line.endswith("2 ranks") for line in done.stdout.splitlines()) == 1
    assert load(tmp_path / "run" / "config.toml").train.batch == 12
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2
