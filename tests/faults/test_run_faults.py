"""What can be done to a run: kill -9, signals to its whole group, a second process, a kill while it exports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from t2t.checkpoint import store
from t2t.config import Config
from t2t.models import load as models

# One process has torch loaded and forks for every run that is asked for: a run costs its steps, not an import.
# A run's output is read to its end, which comes when the last process that it started is gone.
SERVER = """
import json, os, select, signal, sys
import torch._dynamo  # which the first optimizer imports
from t2t import cli
from t2t.train import run

def act(what):
    if what.startswith("group "):
        os.killpg(0, getattr(signal, what.removeprefix("group ")))
    else:
        os.kill(os.getpid(), getattr(signal, what))

def arm_step(number, what):
    train_step = run.train_step
    def watched(model, optimizer, batches, step, *rest):
        if step + 1 == number:
            act(what)
        return train_step(model, optimizer, batches, step, *rest)
    run.train_step = watched

def arm_export(point):
    export = run.export
    def watched(built):
        count = -1
        def tick(event, *_):
            nonlocal count
            if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                count += 1
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(tick)
        return export(built)
    run.export = watched

def start(asked, write):
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    if "step" in asked:
        arm_step(asked["step"], asked["what"])
    if "export" in asked:
        arm_export(asked["export"])
    sys.stdin.close()
    os._exit(cli.main(asked["arguments"]))

def output(read):
    chunks = []
    while select.select([read], [], [], 60)[0]:
        chunk = os.read(read, 65536)
        if not chunk:
            return b"".join(chunks).decode()
        chunks.append(chunk)
    return "TIMEOUT: somebody still holds the output"

stopped = {}
for line in sys.stdin:
    asked = json.loads(line)
    if "continue" in asked:
        pid, read = stopped.pop(asked["continue"])
        os.kill(pid, signal.SIGCONT)
    else:
        read, write = os.pipe()
        pid = start(asked, write)
        os.close(write)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        stopped[pid] = pid, read
        answer = {"stopped": pid}
    else:
        answer = {"output": output(read), "code": os.waitstatus_to_exitcode(status)}
        os.close(read)
    print(json.dumps(answer), flush=True)
"""

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[Ask]:
    child = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    to, back = child.stdin, child.stdout

    def ask(**asked: Any) -> dict[str, Any]:
        to.write(json.dumps(asked) + "\n")
        to.flush()
        return json.loads(back.readline())  # type: ignore[no-any-return]

    yield ask
    child.kill()
    child.communicate()


@pytest.fixture
def train(server: Ask, make: Callable[..., Config], tmp_path: Path) -> Ask:
    """Runs ``t2t train`` on the files of ``make`` in its own process, which may do something to itself at a step."""

    def run(folder: str, /, settings: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
        flags = tiny.settings(tmp_path, folder, train__steps="8", train__micro_rows="1", train__log_every="2")
        flags |= settings or {}
        return server(arguments=["train", *(word for k, v in flags.items() for word in (f"--{k}", v))], **asked)

    return run


def assert_same(one: Path, two: Path, step: int = 8) -> None:
    first, second = (store.load(folder / "checkpoints" / f"step-{step:06d}") for folder in (one, two))
    for part in ("model", "optim"):
        tensors, others = getattr(first, part), getattr(second, part)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert log(one) == log(two)


def log(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_killed_twice_and_resumed_is_the_uninterrupted_run(train: Ask, tmp_path: Path, optimizer: str) -> None:
    settings = {"optim.name": optimizer}
    assert train("whole", settings)["code"] == 0
    assert train("killed", settings, step=4, what="SIGKILL")["code"] == -signal.SIGKILL
    assert store.steps(tmp_path / "killed" / "checkpoints") == [2]
    assert train("killed", settings, step=8, what="SIGKILL")["code"] == -signal.SIGKILL
    assert store.steps(tmp_path / "killed" / "checkpoints") == [4, 6]
    assert not (tmp_path / "killed" / "model").exists()
    done = train("killed", settings)
    assert done["code"] == 0
    assert "resumed from " in done["output"]
    assert_same(tmp_path / "whole", tmp_path / "killed")
    assert [line["step"] for line in log(tmp_path / "killed")] == [2, 4, 6, 8]


@pytest.mark.parametrize("what", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_after_the_step_and_exits_with_75(train: Ask, tmp_path: Path, what: str) -> None:
    assert train("whole")["code"] == 0
    stopped = train("parts", step=3, what=what)
    assert stopped["code"] == 75
    assert f"{what}: saved at step 3; the same command goes on from there" in stopped["output"]
    assert store.steps(tmp_path / "parts" / "checkpoints") == [2, 3]
    assert train("parts")["code"] == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("what", ["group SIGTERM", "group SIGINT", "SIGKILL"])
def test_readers_leave_signals_to_the_run_and_die_with_it(train: Ask, tmp_path: Path, what: str) -> None:
    settings = {"data.readers": "2"}
    ended = train("parts", settings, step=3, what=what)
    assert "TIMEOUT" not in ended["output"]
    assert "Traceback" not in ended["output"]
    assert ended["code"] == (-signal.SIGKILL if what == "SIGKILL" else 75), ended["output"]
    assert store.steps(tmp_path / "parts" / "checkpoints") == ([2] if what == "SIGKILL" else [2, 3])
    assert train("parts", settings)["code"] == 0
    assert train("whole")["code"] == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(("readers", "stops"), [("0", {4: "SIGKILL", 5: "SIGTERM"}), ("2", {6: "SIGKILL"})])
def test_a_streamed_run_killed_and_stopped_is_the_uninterrupted_run(
    train: Ask, tmp_path: Path, readers: str, stops: dict[int, str]
) -> None:
    settings = {"data.streaming": "true", "data.readers": readers, "data.shuffle": "6", "train.batch": "5"}
    assert train("whole", settings)["code"] == 0
    for step, what in stops.items():
        ended = train("parts", settings, step=step, what=what)
        assert ended["code"] == (75 if what == "SIGTERM" else -signal.SIGKILL), ended["output"]
    assert train("parts", settings)["code"] == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")
    states = [
        json.loads((tmp_path / name / "checkpoints/step-000008/state.json").read_text()) for name in ("whole", "parts")
    ]
    assert states[0]["cursors"] == states[1]["cursors"]
    assert [len(rank) for rank in states[0]["cursors"]] == [max(1, int(readers))]


def test_a_second_process_in_the_folder_is_refused(train: Ask, server: Ask, tmp_path: Path) -> None:
    first = train("run", step=3, what="SIGSTOP")
    assert list(first) == ["stopped"]
    second = train("run")
    assert second["code"] == 2
    assert f"error: {tmp_path / 'run'} is in use by process {first['stopped']} on " in second["output"]
    assert server(**{"continue": first["stopped"]})["code"] == 0
    assert train("run")["code"] == 0


def test_a_run_that_diverges_exits_with_3(train: Ask, tmp_path: Path) -> None:
    settings = {"optim.lr": "1e38", "checkpoint.every": "1"}
    for _ in range(2):  # going on from the last good state is no way out, and does no harm
        ended = train("run", settings)
        assert ended["code"] == 3
        assert "error: step 2: the loss is not finite" in ended["output"]
        assert store.steps(tmp_path / "run" / "checkpoints") == [1]
        assert (tmp_path / "run" / "crash" / "step-000002" / "examples.jsonl").stat().st_size > 0


def test_killed_at_any_point_of_an_export(train: Ask, tmp_path: Path) -> None:
    settings = {"train.steps": "2"}
    folder = tmp_path / "run"
    assert train("run", settings)["code"] == 0
    good, _ = models.load(folder / "model")
    weights = dict(good.named_parameters())
    files = sorted(path.name for path in (folder / "model").iterdir())
    between = 0
    for point in range(100):
        ended = train("run", settings, export=point)
        if ended["code"] == 0:
            break
        assert ended["code"] == -signal.SIGKILL, ended["output"]
        whole = folder / "model"
        if not whole.exists():
            between, whole = between + 1, folder / ".model.old"
        assert sorted(path.name for path in whole.iterdir()) == files
        found, _ = models.load(whole)
        assert all(torch.equal(p, weights[name]) for name, p in found.named_parameters())
        assert train("run", settings)["code"] == 0
        assert sorted(path.name for path in (folder / "model").iterdir()) == files
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert point > 8
    assert between == 1
