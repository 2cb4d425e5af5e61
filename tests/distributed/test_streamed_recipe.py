"""The diacritics recipe streamed by two ranks: killed and started again it is the run that nobody disturbed.

That one reads by a thread in each rank, the other by a process, which comes to the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from t2t import cli
from t2t.data.tokens import Bytes
from t2t.models import load as models

STEPS, EVERY, KILLED = 13, 4, 7
BATCH, LINES, EPOCH = 6, 15, 5  # a rank's 3 examples a step take it through one of the two files in 5 steps
FILES = ("unu", "doi")
TINY = ["d_model=16", "d_kv=4", "d_ff=24", "num_layers=1", "num_heads=2", "vocab_size=384"]
# `t2t`, of which every rank writes down the examples of its steps; in step KILL_AT all that it started is killed.
# The process that `--launch` runs in starts this file in the place of Python.
WATCHED = """#!{python}
import json, os, signal, sys

from t2t import cli
from t2t.train import run

def watch(rank):
    train_step = run.train_step

    def watched(model, optimizer, batches, step, *rest):
        taken = [int(i) for batch in batches for i in batch.example_ids.flatten() if i >= 0]
        with open(os.environ["IDS"] + "-" + rank, "a") as file:
            file.write(json.dumps([step, taken]) + "\\n")
        if step + 1 == int(os.environ["KILL_AT"]):
            if rank == "0":
                os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
            os.killpg(0, signal.SIGKILL)  # a rank has a group of its own, with its readers
        return train_step(model, optimizer, batches, step, *rest)

    run.train_step = watched

if __name__ == "__main__":
    if "RANK" in os.environ:
        watch(os.environ["RANK"])
        sys.exit(cli.main(sys.argv[3:]))
    sys.executable = __file__
    sys.exit(cli.main(sys.argv[1:]))
"""


class Streamed:
    """Runs of the recipe on files that lie in ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.program = root / "watched"
        self.program.write_text(WATCHED.format(python=sys.executable))
        self.program.chmod(0o755)
        raw = models.scratch_config("mt5-small", TINY)
        models.save(models.create(raw, seed=1).state_dict(), raw, root / "tiny")
        Bytes().save(root / "tiny")
        for name in FILES:
            lines = (f"Rândul {i} al fișierului {name} și țara.\n" for i in range(LINES))
            (root / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
        (root / "held.txt").write_text("Încă un rând în plus.\n" * 3, encoding="utf-8")

    def arguments(self, name: str, readers: int) -> list[str]:
        flags = {
            "model.path": "tiny", "run.dir": name, "run.device": "cpu", "run.threads": 1,
            "data.streaming": "true", "data.shuffle": 4, "data.readers": readers,
            "data.validation": "held.txt", "data.validation_split": 0, "generate.max_length": 4,
            "train.batch": BATCH, "train.steps": STEPS, "train.log_every": 1, "train.evaluate_every": STEPS,
            "checkpoint.every": EVERY,
        }  # fmt: skip
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        return ["train", "mt5-diacritics", "--data.train", *(f"{name}.txt" for name in FILES), *words]

    def start(self, name: str, ids: str, readers: int, kill_at: int = 0) -> subprocess.Popen[str]:
        told = {"IDS": str(self.root / ids), "KILL_AT": str(kill_at)}
        return subprocess.Popen(
            [self.program, *self.arguments(name, readers), "--launch", "2"],
            cwd=self.root, env=os.environ | told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ids(self, name: str) -> dict[int, list[list[int]]]:
        """The examples of every step, rank by rank."""
        found: dict[int, list[list[int]]] = {}
        for rank in (0, 1):
            for step, taken in map(json.loads, (self.root / f"{name}-{rank}").read_text().splitlines()):
                found.setdefault(step, []).append(sorted(taken))
        return found

    def log(self, name: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.root / name / "log.jsonl").read_text().splitlines())
        return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


def test_killed_and_started_again_is_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streamed = Streamed(tmp_path)
    both = streamed.start("whole", "whole-ids", readers=0), streamed.start("run", "killed-ids", 1, KILLED)
    told = [child.communicate()[0] for child in both]  # a run's output ends with the last of its processes
    assert both[0].returncode == 0, told[0]
    assert both[1].returncode == -signal.SIGKILL, told[1]

    monkeypatch.chdir(tmp_path)
    assert cli.main(streamed.arguments("run", readers=1)) == 2
    reason = "data.readers: the run was streamed by 2 ranks x 1 readers, and these are 1 x 1"
    assert reason in capsys.readouterr().err

    again = streamed.start("run", "again-ids", readers=1)
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert f"resumed from run/checkpoints/step-{EVERY:06d}" in output

    whole, killed, resumed = (streamed.ids(f"{name}-ids") for name in ("whole", "killed", "again"))
    assert sorted(whole) == [*range(STEPS)]
    assert sorted(killed) == [*range(KILLED)]
    assert sorted(resumed) == [*range(EVERY, STEPS)]
    for seen in (killed, resumed):
        assert seen == {step: whole[step] for step in seen}
    assert streamed.log("run") == streamed.log("whole")

    records = Counter((file << 40) + line for file in range(len(FILES)) for line in range(1, LINES + 1))
    taken = [Counter(i for rank in whole[step] for i in rank) for step in range(STEPS)]
    epochs = [sum(taken[first : first + EPOCH], Counter[int]()) for first in range(0, STEPS, EPOCH)]
    assert epochs[:-1] == [records, records]
    assert epochs[-1] < records
