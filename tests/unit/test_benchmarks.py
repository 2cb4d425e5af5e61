"""The benchmarks run, count right, and treat their peer fairly."""

import importlib.util
import itertools
import json
import lzma
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

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


@pytest.fixture(scope="module")
def data_bench():
    spec = importlib.util.spec_from_file_location("data_bench", SCRIPT.parent / "data.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def novels(tmp_path_factory):
    """A small folder of texts of each kind, and a vocabulary of them."""
    folder = tmp_path_factory.mktemp("novels")
    lines = [f"Omul num\u0103rul {i} \u0219i c\u00e2inele lui merg acas\u0103." for i in range(50)]
    for kind in ("ro", "lm", "mt", "tok"):
        (folder / kind).mkdir()
    for name in ("ro/eltec_rom.txt.xz", "lm/eltec_eng.txt.xz"):
        (folder / name).write_bytes(lzma.compress("\n\n".join(lines).encode()))
    (folder / "mt/rosts.train.en").write_text("The man walks.\nThe dog too.\n")
    (folder / "mt/rosts.train.ro").write_text("Omul merge.\nCâinele și el.\n")
    (folder / "text").write_text("\n".join([*lines, "The man walks.", "The dog too."]))
    model = {"model_prefix": str(folder / "tok/t5_spiece"), "vocab_size": 60, "hard_vocab_limit": False}
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(input=str(folder / "text"), minloglevel=2, **model, **ids)
    return folder


@pytest.mark.parametrize("choice", [{"rows": "lists", "order": "random"}, {"rows": "numpy", "order": "grouped"}])
def test_both_sides_bring_every_token_of_the_files(data_bench, novels, tmp_path, monkeypatch, choice):
    pytest.importorskip("datasets")
    monkeypatch.setattr(data_bench, "BATCH", 8)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    pairs = list(itertools.islice(data_bench.texts(novels), 8 * 8))
    assert pairs[0] == ("The man walks.", "Omul merge.")
    assert pairs[1] == ("Omul numarul 0 si cainele lui merg acasa.", "Omul numărul 0 și câinele lui merg acasă.")
    data_bench.write_pairs(tmp_path, pairs, 1e9)

    def measured(case, who, **choice):
        job = data_bench.Job(case, who, str(tmp_path), str(novels / "tok/t5_spiece.model"), warmup=0, choice=choice)
        return data_bench.MEASURES[case, who](job)

    tokenizer = tokens.load(str(novels / "tok/t5_spiece.model"))
    whole = sum(len(tokenizer.encode(text)) + 1 for pair in pairs for text in pair)
    made = [measured("prepare", "t2t"), measured("prepare", "datasets", num_proc=1)]
    brought = [measured("loader", "t2t"), measured("loader", "datasets", **choice)]
    streamed = [measured("streaming", who) for who in ("t2t", "datasets")]
    for found in (*made, *brought, *streamed):
        assert found["tokens"] == whole
        assert found["began"] < found["ended"] and found["tokens_per_s"] > 0
    assert all(0 < found["fill"] <= 1 for found in (*brought, *streamed))


def test_memory_is_of_the_whole_tree_and_counts_shared_pages_once(data_bench):
    own, shared = "b'x' * 2**26", "time.sleep(1)"
    child = f"import time; kept = {own}; {shared}"
    script = f"import os, time; kept = {own}; os.fork(); {shared}"
    _, forked = data_bench.watched([sys.executable, "-c", script], {})
    assert 64 < forked.until(float("inf"))["anonymous_mib"] < 110 and len(forked.alone) == 2
    started = f"import subprocess, sys; kept = {own}; subprocess.run([sys.executable, '-c', {child!r}])"
    _, both = data_bench.watched([sys.executable, "-c", started], {})
    peak = both.until(float("inf"))
    assert 128 < peak["anonymous_mib"] <= peak["peak_mib"] < 200 and min(both.alone.values()) > 64
    assert both.until(0.0) == {"peak_mib": 0.0, "anonymous_mib": 0.0}


def test_the_best_of_the_peer_is_compared_in_turns(data_bench, tmp_path):
    jobs, speed = [], {"on": 9.0, "grouped": 8.0, "numpy": 1.0}

    def run(job):
        jobs.append(job)
        lead = sum(speed.get(value, 0.0) for value in job.choice.values()) + len(jobs) / 1000
        return {"first_s": lead, "step": job.step} if "resume" in job.case else {"tokens_per_s": lead, "fill": 0.5}

    found = data_bench.compare(tmp_path, "tokenizer", replace(data_bench.FULL, rounds=2), run)
    prepared = [job for job in jobs if job.case == "prepare"]
    assert [job.who for job in prepared] == ["datasets"] * 4 + ["t2t", "datasets"] * 2
    assert prepared[-1].choice == {"num_proc": 1, "threads": "on"}
    loaded = [job.choice for job in jobs if job.case == "loader"]
    assert loaded[6:9] == loaded[9:] == [{}, *({"rows": "numpy", "order": order} for order in ("random", "grouped"))]
    assert len(found["probes"]) == 10
    resumed = [(row["who"], row["step"]) for row in found["rows"] if row["case"] == "resume"]
    assert resumed == [("t2t", 0), ("datasets", 0), ("t2t", 1000), ("datasets", 1000), ("t2t", 1_000_000)]
    row = next(row for row in found["rows"] if row["case"] == "streaming")
    assert row["tokens_per_s"] == np.median(row["rounds_tokens_per_s"])
    assert "resume a stream" in data_bench.render(found["rows"])


def test_one_case_is_measured_alone(data_bench, tmp_path):
    def run(job):
        jobs.append(job.case)
        return {"tokens_per_s": 1.0}

    for only, stored in (("prepare", 0), ("loader", 2), ("streaming", 0)):
        jobs = []
        found = data_bench.compare(tmp_path, "tokenizer", data_bench.SMOKE, run, only)
        assert {row["case"] for row in found["rows"]} == {only} == set(jobs[stored:])
        assert jobs[:stored] == ["prepare"] * stored


@pytest.mark.parametrize("arguments", [[], ["FOLDER", "--rounds", "0"], ["FOLDER", "--megabytes", "-1"]])
def test_bad_arguments_of_the_data_benchmark_exit_with_2(data_bench, novels, arguments):
    with pytest.raises(SystemExit) as error:
        data_bench.main([a.replace("FOLDER", str(novels)) for a in arguments])
    assert error.value.code == 2
