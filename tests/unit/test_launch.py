"""What a parent does with its ranks, shown with ranks that do not train."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t2t.cli import main
from t2t.train import launch


@pytest.fixture
def act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that every rank runs in the place of t2t, as the file that is given back says."""
    program, action = tmp_path / "program", tmp_path / "action.py"
    program.write_text(f"#!{sys.executable}\nexec(open({str(action)!r}).read())\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return action


def test_ranks_get_the_arguments_and_an_environment_of_their_own(act: Path, tmp_path: Path) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    act.write_text(f"""if True:
        import json, os, sys
        told = [sys.argv[1:], [os.environ[name] for name in {names}], os.environ["MASTER_PORT"]]
        open({str(tmp_path)!r} + "/rank" + os.environ["RANK"], "w").write(json.dumps(told))
    """)
    given = ["train", "quickstart", "--launch", "2", "--train.steps=3"]
    assert main(given) == main([*given[:2], "--launch=2", given[-1]]) == 0
    told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    assert [one[0] for one in told] == [["-m", "t2t", "train", "quickstart", "--train.steps=3"]] * 2
    assert [one[1] for one in told] == [[str(rank), "2", str(rank), "2", "127.0.0.1"] for rank in (0, 1)]
    assert told[0][2] == told[1][2]


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_rank_that_fails_ends_the_others(
    act: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.1)
    act.write_text(f"""if True:
        import os, sys, time
        {end} if os.environ["RANK"] == "1" else time.sleep(600)
    """)
    assert launch.launch(3, []) == code
    assert ("rank 1 was ended by SIGKILL" in capfd.readouterr().err) == (code == 137)


def test_ranks_end_when_their_parent_is_killed(act: Path, tmp_path: Path) -> None:
    program = str(act.with_name("program"))
    ready = tmp_path / "ready"
    act.write_text(f"""if True:
        import os, sys, time
        from t2t.train import launch
        if "RANK" not in os.environ:
            sys.executable = {program!r}
            launch.launch(1, [])
        launch.end_with_parent()
        open({str(ready)!r}, "w").close()
        time.sleep(600)
    """)
    child = subprocess.Popen([program], stdout=subprocess.PIPE)
    while not ready.exists():
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)  # the rank holds the parent's output, which ends with the last of them


@pytest.mark.parametrize(("count", "words"), [("0", "must be 1 or more"), ("two", "invalid int value")])
def test_bad_counts_are_told(capsys: pytest.CaptureFixture[str], count: str, words: str) -> None:
    assert main(["train", "quickstart", "--launch", count]) == 2
    assert "--launch" in (said := capsys.readouterr().err) and words in said


def test_a_rank_starts_no_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "quickstart", "--launch", "2"]) == 2
    assert "--launch: this process is a rank already" in capsys.readouterr().err
