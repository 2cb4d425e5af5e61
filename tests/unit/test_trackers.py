"""log.jsonl through kills and resumes; the real TensorBoard, wandb and trackio where they are installed."""

import importlib
import json
import math
import os
import sqlite3
import subprocess
import sys

import pytest

from t2t.config import load
from t2t.errors import InputError
from t2t.train import trackers
from t2t.train.trackers import JsonLines, Trackers


def lines(path):
    """The objects of a log, read as strict JSON: a bare NaN or Infinity would raise."""

    def refuse(constant):
        raise AssertionError(f"not JSON: {constant}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write(path, from_step, steps, loss=1.0):
    log = JsonLines(path, from_step)
    for step in steps:
        log.log(step, {"loss": loss})
    log.close()


def test_json_lines_are_flushed_one_by_one(tmp_path):
    log = JsonLines(tmp_path / "run" / "log.jsonl", from_step=0)
    log.log(1, {"loss": 1.5, "tokens": 4096})
    assert lines(tmp_path / "run" / "log.jsonl") == [{"step": 1, "loss": 1.5, "tokens": 4096}]
    log.close()


def test_json_lines_non_finite_is_valid_json(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl", from_step=0)
    log.log(1, {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf})
    log.close()
    assert lines(tmp_path / "log.jsonl") == [{"step": 1, "loss": "nan", "grad_norm": "inf", "low": "-inf"}]


def test_json_lines_resume_drops_later_steps(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, from_step=0, steps=[10, 20, 30, 40], loss=1.0)
    write(path, from_step=20, steps=[30, 40, 50], loss=2.0)
    assert [(line["step"], line["loss"]) for line in lines(path)] == [
        (10, 1.0),
        (20, 1.0),
        (30, 2.0),
        (40, 2.0),
        (50, 2.0),
    ]


def test_json_lines_resume_keeps_all_when_nothing_is_later(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, from_step=0, steps=[10, 20])
    write(path, from_step=25, steps=[30])
    assert [line["step"] for line in lines(path)] == [10, 20, 30]


def test_json_lines_keeps_two_lines_of_the_resumed_step(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, from_step=0, steps=[10, 20, 20])  # training figures and evaluation figures of one step
    write(path, from_step=20, steps=[])
    assert [line["step"] for line in lines(path)] == [10, 20, 20]


@pytest.mark.parametrize("tail", ['{"step": 20, "lo', '{"step": 20}', "\x00\x00\x00", "{"])
def test_json_lines_resume_after_a_cut_line(tmp_path, tail):
    path = tmp_path / "log.jsonl"
    write(path, from_step=0, steps=[10])
    with path.open("a") as file:
        file.write(tail)
    write(path, from_step=20, steps=[30])
    assert [line["step"] for line in lines(path)] == [10, 30]


def test_json_lines_start_from_zero_is_empty(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, from_step=0, steps=[0, 10])  # killed before its first checkpoint
    write(path, from_step=0, steps=[0])
    assert [line["step"] for line in lines(path)] == [0]


@pytest.mark.parametrize("bad", ["garbage", "[1]", '{"loss": 1.0}', '{"step": "x"}', "5"])
def test_json_lines_broken_line_is_named(tmp_path, bad):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"step": 10}}\n{bad}\n{{"step": 20}}\n')
    with pytest.raises(InputError, match=r"log\.jsonl:2: not a JSON object with a step"):
        JsonLines(path, from_step=20)
    assert path.read_text().count("\n") == 3  # nothing was cut


def test_composite_logs_to_all_and_closes_all_even_when_one_fails():
    class Fake:
        def __init__(self, fails=False):
            self.fails, self.calls = fails, []

        def log(self, step, figures):
            self.calls.append((step, dict(figures)))

        def close(self):
            self.calls.append("closed")
            if self.fails:
                raise OSError("disk full")

    fakes = [Fake(), Fake(fails=True), Fake()]
    both = Trackers(fakes)
    both.log(3, {"loss": 1.0})
    with pytest.raises(OSError, match="disk full"):
        both.close()
    assert [fake.calls for fake in fakes] == [[(3, {"loss": 1.0}), "closed"]] * 3


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_package_is_told_before_anything_is_touched(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    config = load(overrides={"track.to": [name]})
    with pytest.raises(InputError) as error:
        trackers.build(config, tmp_path, from_step=0)
    assert str(error.value) == f"track.to: {name} is not installed: pip install 't2t[{name}]'"
    assert list(tmp_path.iterdir()) == []


def test_broken_package_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text("import surely_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ModuleNotFoundError, match="surely_not_there"):
        trackers.build(load(overrides={"track.to": ["trackio"]}), tmp_path / "run", from_step=0)


def test_tensorboard_events_read_back(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra t2t[tensorboard] is not installed")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    config = load(overrides={"track.to": ["tensorboard"], "train.batch": "48"})
    first = trackers.build(config, tmp_path, from_step=0)
    for step, loss in ((10, 3.0), (20, 2.0), (30, 9.0)):
        first.log(step, {"loss": loss, "lr": 0.5})
    first.close()
    second = trackers.build(config, tmp_path, from_step=20)  # resumed from step 20: the old step 30 is void
    second.log(30, {"loss": 1.0})
    second.close()

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(10, 3.0), (20, 2.0), (30, 1.0)]
    assert [e.step for e in events.Scalars("lr")] == [10, 20]
    start = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"train.batch" in start and b"model.dropout" in start
    assert [line["step"] for line in lines(tmp_path / "log.jsonl")] == [10, 20, 30]


@pytest.fixture
def wandb_at(tmp_path, monkeypatch):
    """wandb with all its folders under tmp_path, and no key."""
    pytest.importorskip("wandb", reason="the extra t2t[wandb] is not installed")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no settings, no key
    for kind in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path / "run"


def offline_runs(folder):
    """Each offline run in a folder: its id and the bytes of its record."""
    sys.modules["wandb"].teardown()  # waits for the process that writes the records
    return {path.stem.removeprefix("run-"): path.read_bytes() for path in folder.glob("wandb/*/run-*.wandb")}


def test_wandb_offline_writes_its_folder_and_resumes_its_id(wandb_at, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = load(overrides={"track.to": ["wandb"], "track.project": "colours", "run.name": "red"})
    run = trackers.build(config, wandb_at, from_step=0)
    run.log(10, {"loss": 1.5, "grad_norm": math.nan})
    run.close()
    [(run_id, record)] = offline_runs(wandb_at).items()
    assert run_id == (wandb_at / "wandb_id").read_text().strip()
    for word in (b"colours", b"red", b"train.batch", b"grad_norm"):
        assert word in record

    again = trackers.build(config, wandb_at, from_step=10)
    again.close()
    assert set(offline_runs(wandb_at)) == {run_id}

    anew = trackers.build(config, wandb_at, from_step=0)  # killed before its first checkpoint: another run
    anew.close()
    assert set(offline_runs(wandb_at)) == {run_id, (wandb_at / "wandb_id").read_text().strip()} != {run_id}


def test_wandb_dir_is_honoured(wandb_at, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    trackers.Wandb(load(), wandb_at, from_step=0).close()
    assert offline_runs(tmp_path / "elsewhere") and not offline_runs(wandb_at)


def test_wandb_without_a_key_says_what_to_do(wandb_at, monkeypatch):
    wandb = sys.modules["wandb"]

    def init(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(
        InputError, match=r"track\.to: wandb: No API key configured\. WANDB_MODE=offline needs no login"
    ):
        trackers.Wandb(load(), wandb_at, from_step=0)


def test_trackio_run_resumes_under_its_name(tmp_path):
    pytest.importorskip("trackio", reason="the extra t2t[trackio] is not installed")
    # Trackio reads its folder's name when it is imported, so it gets a process of its own.
    code = """if True:
        import sys
        from pathlib import Path
        from t2t.config import load
        from t2t.train import trackers
        config = load(overrides={"track.to": ["trackio"], "track.project": "colours", "run.name": "red"})
        for from_step, steps in ((0, (10, 20)), (20, (30,)), (0, (10,))):
            run = trackers.build(config, Path(sys.argv[1]), from_step)
            for step in steps:
                run.log(step, {"loss": 60.0 / step})
            run.close()
    """
    env = {name: v for name, v in os.environ.items() if not name.startswith("TRACKIO_")}
    env |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=env, check=True, capture_output=True)
    with sqlite3.connect(tmp_path / "trackio" / "colours.db") as base:
        rows = base.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
        configs = [row[0] for row in base.execute("SELECT config FROM configs")]
    first, other = rows[0][0], rows[-1][0]
    assert first != other  # a new run of the same name
    assert [(run, step, json.loads(figures)["loss"]) for run, step, figures in rows] == [
        (first, 10, 6.0),
        (first, 20, 3.0),
        (first, 30, 2.0),
        (other, 10, 6.0),
    ]
    assert all(json.loads(config)["train.batch"] == 32 for config in configs) and configs
