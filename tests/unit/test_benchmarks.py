"""The benchmarks run, count right, and treat their peer fairly."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from t2t.data import order, tokens
from t2t.data.loader import step_examples
from t2t.data.ragged import Ragged
from t2t.data.tasks import Example

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu_vs_hf.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("cpu_vs_hf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def lengths_as_pairs(source, target):
    sides = [Ragged.of([[5] * n for n in side], vocab_size=384) for side in (source, target)]
    return tokens.Pairs(*sides, where=("",) * len(source), cut_sources=0, cut_targets=0)


def test_smoke_counts_the_tokens_of_both_sides(bench, tmp_path):
    pytest.importorskip("accelerate")
    out = tmp_path / "result.json"
    done = subprocess.run([sys.executable, SCRIPT, "--smoke", "--out", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert list(result)[:5] == ["machine", "date", "versions", "command", "rows"]
    ours, peer = result["rows"]
    assert (ours["who"], peer["who"]) == ("t2t", "transformers")
    assert ours["parameters"] == peer["parameters"]
    for row in (ours, peer):
        assert row["tokens_per_s"] > 0
        assert 0 < row["imported_gib"] <= row["peak_gib"]
        assert 0 < row["fill"] <= 1

    plan = bench.SMOKE
    examples = [Example(source, target, "") for source, target in bench.made_up_pairs(100)]
    pairs = tokens.tokenize(examples, tokens.Bytes(), bench.MAX_SOURCE, bench.MAX_TARGET)
    size = pairs.source.lengths + pairs.target.lengths
    timed = bench.peer_order(pairs, plan.batch, plan.warmup, plan.steps)[plan.batch * plan.warmup :]
    assert peer["tokens_per_step"] == size[timed].sum() / plan.steps
    key = order.key(bench.SEED, pairs.fingerprint)
    steps = [step_examples(100, plan.batch, n, key) for n in range(plan.warmup, plan.warmup + plan.steps)]
    assert ours["tokens_per_step"] == size[np.concatenate(steps)].sum() / plan.steps


def test_peer_steps_stand_for_its_whole_epoch(bench):
    rng = np.random.default_rng(0)
    source = rng.integers(3, 300, 4000)
    target = np.maximum(2, source // 2 + rng.integers(-10, 10, 4000))
    pairs = lengths_as_pairs(source, target)
    chosen = bench.peer_order(pairs, batch=16, warmup=2, steps=20)
    assert len(chosen) == len(set(chosen)) == 22 * 16
    batches = np.array(chosen).reshape(22, 16)
    assert source[batches[0]].max() == source.max()
    timed = batches[2:]
    assert np.isclose((source + target)[timed].mean(), (source + target).mean(), rtol=0.02)
    fill = source[timed].sum() / (16 * source[timed].max(axis=1)).sum()
    assert fill > 0.9  # a random order fills about half
    assert sorted(bench.peer_order(pairs, batch=16, warmup=2, steps=248)) == list(range(4000))


def test_grouping_takes_the_length_that_pads_least(bench):
    target = np.random.default_rng(0).integers(10, 100, 2000)
    order = np.array(bench._grouped(np.full(2000, 7), target, batch=10)).reshape(-1, 10)
    assert target.sum() / (10 * target[order].max(axis=1)).sum() > 0.9


def figures(speed):
    names = ("step_ms", "tokens_per_step", "fill", "peak_gib", "imported_gib", "parameters")
    return {"machine": "a machine", "tokens_per_s": speed} | dict.fromkeys(names, 1)


def test_fastest_peer_is_compared_in_alternating_rounds(bench, tmp_path):
    jobs = []
    speeds = iter([10.0, 40.0, 20.0, 30.0, *[100, 50, 400, 70, 200, 20]])

    def run(job):
        jobs.append(job)
        return figures(next(speeds))

    plan = replace(bench.FULL, steps=20, rounds=3)
    result = bench.compare(tmp_path, [("a", "b")], {"case": (bench.TINY, "bytes")}, plan, run)
    assert [job.steps for job in jobs] == [6] * 4 + [20] * 6
    assert [job.who for job in jobs[4:]] == ["t2t", "transformers"] * 3
    assert {(job.attention, job.micro_batches) for job in jobs[5::2]} == {("eager", 4)}
    ours, peer = result["rows"]
    assert (ours["tokens_per_s"], peer["tokens_per_s"]) == (200, 50)
    assert (peer["settings"], peer["rounds_tokens_per_s"]) == ("eager, 4 x 16", [50, 70, 20])
    assert [row["tokens_per_s"] for row in result["probes"]] == [10, 40, 20, 30]
    assert "4.00x" in bench.render(result["rows"])


@pytest.fixture
def data_dir(tmp_path):
    """Five steps of pairs."""
    (tmp_path / "mt").mkdir()
    for side in ("en", "ro"):
        (tmp_path / "mt" / f"rosts.train.{side}").write_text("text\n" * 64 * 5)
    return tmp_path


def test_result_does_not_name_the_data_folder(bench, data_dir, monkeypatch):
    pytest.importorskip("accelerate")  # its version is written down
    monkeypatch.setattr(bench, "run_job", lambda job: figures(1.0))
    bench.main([str(data_dir), "--steps", "2", "--out", str(data_dir / "result.json")])
    text = (data_dir / "result.json").read_text()
    assert str(data_dir) not in text
    result = json.loads(text)
    assert result["command"] == "python benchmarks/cpu_vs_hf.py DATA_DIR --steps 2"
    assert [row["case"] for row in result["rows"]] == ["asset-size", "asset-size", "t5-small", "t5-small"]


@pytest.mark.parametrize("arguments", [[], ["FOLDER", "--steps", "0"], ["FOLDER", "--steps", "3"]])
def test_bad_arguments_exit_with_2(bench, data_dir, arguments):
    with pytest.raises(SystemExit) as error:
        bench.main([a.replace("FOLDER", str(data_dir)) for a in arguments])
    assert error.value.code == 2


@pytest.fixture
def real_data(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("real_data")


@pytest.mark.parametrize("case", ["gpt2", "bert", "diacritics", "translate", "summarize"])
def test_every_case_on_real_data_has_settings_that_can_be(real_data, case, tmp_path, monkeypatch):
    from t2t.train import run

    class Began(Exception):
        pass

    def begin(config):
        assert Path(config.data.train[0]).parent == tmp_path and config.train.steps == 12
        raise Began

    monkeypatch.setattr(run, "train", begin)
    with pytest.raises(Began):
        real_data.CASES[case](tmp_path, smoke=True)


def test_a_case_on_real_data_trains_and_is_scored(real_data, tmp_path, monkeypatch, capsys):
    """The shortest one, as the command runs it, on a few sentences and a tiny model of the same recipe."""
    lines = ["Ana \u0219i Ion merg la pia\u021b\u0103.", "Pisica st\u0103 \u00een cas\u0103 \u0219i doarme."] * 8
    for name in ("diacritics.txt.xz", "rrt-dev.txt", "rrt-test.txt"):
        real_data.write(tmp_path / name, lines)
    whole = real_data.train
    tiny = {"model.overrides": ["d_model=16", "d_kv=4", "d_ff=16", "num_layers=1", "num_decoder_layers=1"]}
    tiny |= {"run.device": "cpu", "data.readers": 0, "train.batch": 8}
    monkeypatch.setattr(real_data, "train", lambda recipe, settings, smoke: whole(recipe, settings | tiny, smoke))
    monkeypatch.setattr(sys, "argv", ["real_data.py", "diacritics", str(tmp_path), "--smoke"])
    real_data.main()
    ours, copied = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    logged = json.loads((tmp_path / "runs/diacritics/log.jsonl").read_text().splitlines()[-1])
    assert ours["validation_loss"] == logged["validation_loss"] != logged["loss"]
    assert (ours["who"], copied["who"], copied["word_accuracy"]) == ("t2t", "copy", 0.5)
    assert copied["low"] < 0.5 < copied["high"]


def test_wikitext_as_people_write(real_data):
    raw = ' It " was " 1 @,@ 000 years ( or more ) old , he said ; she did n\'t . '
    assert real_data.written(raw) == 'It "was" 1,000 years (or more) old, he said; she didn\'t.'
    assert real_data.split('He came. "No," she said! Mr went') == ["He came.", '"No," she said!', "Mr went"]
