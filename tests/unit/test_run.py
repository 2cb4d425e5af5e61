"""Whole runs of a second: what they write, what they refuse, and that they go on as if never stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import RAW, quiet, write_pairs

import t2t
from t2t import config, metrics
from t2t.checkpoint import store
from t2t.config import Config
from t2t.data.loader import Loader
from t2t.data.packing import Batch, RowShape
from t2t.data.tokens import Bytes
from t2t.errors import InputError
from t2t.generate import read_settings
from t2t.models import load as models
from t2t.optim.build import Optimizer
from t2t.train import evaluate, run, trackers
from t2t.train.run import Interrupted, train
from t2t.train.step import Diverged

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
Make = Callable[..., Config]


def checkpoint(chosen: Config, step: int) -> store.Checkpoint:
    return store.load(chosen.run_dir / "checkpoints" / f"step-{step:06d}")


def log(chosen: Config) -> list[dict[str, Any]]:
    """The log but for the speed, which no two runs share."""
    lines = (chosen.run_dir / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


def saved(chosen: Config) -> list[int]:
    return store.steps(chosen.run_dir / "checkpoints")


def assert_same(one: Config, two: Config, step: int) -> None:
    """Weights, moments and all else that is kept are equal to the last bit."""
    first, second = checkpoint(one, step), checkpoint(two, step)
    for part in ("model", "optim"):
        tensors, others = getattr(first, part), getattr(second, part)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    for state in (first.state, second.state):
        state["window"]["seconds"] = 0.0
        state["figures"].pop("tokens_per_s", None)
    assert first.state == second.state


def exported(chosen: Config) -> dict[str, torch.Tensor]:
    model, _ = models.load(chosen.run_dir / "model")
    return {name: p.detach() for name, p in model.named_parameters()}


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], object]) -> None:
    """Do something in the middle of one training step, counted from 1."""
    train_step = run.train_step

    def watched(model: Any, optimizer: Any, batches: Any, step: int, *rest: Any) -> Any:
        if step + 1 == number:
            action()
        return train_step(model, optimizer, batches, step, *rest)

    monkeypatch.setattr(run, "train_step", watched)


def scripted_losses(monkeypatch: pytest.MonkeyPatch, values: Iterator[float]) -> None:
    monkeypatch.setattr(evaluate, "loss", lambda model, loader, *rest: {"loss": next(values)})


# What a run is


def test_a_run_learns_and_leaves_its_folder(make: Make) -> None:
    lines: list[str] = []
    settings = {"train__micro_rows": "auto", "checkpoint__every": "20", "model__dropout": "0"}
    chosen = make(train__steps="60", train__log_every="20", data__validation_split="0.1", **settings)
    figures = train(chosen, lines.append)
    folder = chosen.run_dir
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.toml",
        "lock",
        "log.jsonl",
        "model",
    ]
    assert saved(chosen) == [40, 60]
    assert [line["step"] for line in log(chosen)] == [20, 40, 60]
    assert log(chosen)[-1]["loss"] < log(chosen)[0]["loss"] - 1
    names = ["loss", "tokens", "tokens_per_s", "lr", "grad_norm", "validation_loss"]
    assert list(figures) == names
    assert list(json.loads((folder / "log.jsonl").read_text().splitlines()[-1])) == ["step", *names]
    assert config.load(folder / "config.toml") == chosen
    text = "\n".join(lines)
    for words in ("18 examples, 2 held out", "60 (20.00 epochs), at step 0", "8 examples, about", "adamw, linear"):
        assert words in text


def test_epochs_decide_the_steps_and_data_smaller_than_a_batch_works(make: Make) -> None:
    chosen = make(train__steps="0", train__epochs="2.5", train__batch="64", data__max_samples="3")
    train(chosen, quiet)
    assert [line["step"] for line in log(chosen)] == [1, 2, 3]
    assert run.build(make("b", train__steps="0", train__epochs="2"), quiet).total_steps == 6


def test_a_finished_run_says_so_and_keeps_its_figures(make: Make) -> None:
    chosen = make(data__validation_split="0.1")
    figures = train(chosen, quiet)
    before = {path: path.read_bytes() for path in chosen.run_dir.rglob("*") if path.is_file()}
    lines: list[str] = []
    assert train(chosen, lines.append) == figures
    assert "step 7: nothing left to train" in lines
    assert {path: path.read_bytes() for path in chosen.run_dir.rglob("*") if path.is_file()} == before


def test_speed_counts_training_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(run.time, "perf_counter", lambda: now)
    save, train_step, loss = store.save, run.train_step, evaluate.loss
    monkeypatch.setattr(store, "save", lambda *a: (pass_by(100), save(*a))[1])
    monkeypatch.setattr(evaluate, "loss", lambda *a: (pass_by(1000), loss(*a))[1])
    monkeypatch.setattr(run, "train_step", lambda *a: (pass_by(2), train_step(*a))[1])
    chosen = make(train__evaluate_every="1", data__validation_split="0.1")
    figures = train(chosen, quiet)
    assert figures["tokens_per_s"] == pytest.approx(figures["tokens"] / 2)


def test_the_expected_memory_grows_with_what_is_held(make: Make) -> None:
    def expected(**overrides: str) -> int:
        return run.activation_bytes(run.build(make(**overrides), quiet))

    assert expected(train__micro_rows="1") < expected()
    assert expected(train__batch="8", train__micro_rows="99") == 2 * expected(train__batch="4", train__micro_rows="99")
    assert expected(train__gradient_checkpointing="true") < expected()
    assert "memory      about" in run.summary(run.build(make(), quiet))


def test_micro_rows_fit_the_device_and_part_a_step_evenly() -> None:
    cpu = torch.device("cpu")
    for rows in (0.7, 3.0, 10.5, 40.0, 300.0):
        shape = RowShape(100, 28, 1.0, 1.0, 1.0, rows)
        micro = run._auto_micro_rows(shape, cpu)
        assert 1 <= micro * 128 <= 16384
        assert micro <= rows + 0.03 * rows + 2
    assert run._auto_micro_rows(RowShape(10**6, 10**6, 1.0, 1.0, 1.0, 4.0), cpu) == 1


# Going on


def test_other_kernels_than_before_are_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    train(make("ways", train__stop_at="2"), quiet)
    train(make("ways", train__stop_at="3"), lines.append)
    assert not any("kernels computed it" in line for line in lines)
    monkeypatch.setattr(run.kernels, "ways", lambda device: "wooden")
    train(make("ways", train__stop_at="4"), lines.append)
    assert any("kernels computed it and wooden ones go on" in line for line in lines)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "lamb"])
def test_stopped_and_resumed_is_the_uninterrupted_run(make: Make, optimizer: str) -> None:
    settings = {"optim__name": optimizer, "optim__weight_decay": "0.01", "data__validation_split": "0.1"}
    settings |= {"train__evaluate_every": "2", "train__micro_rows": "1"}
    whole, parts = make("whole", **settings), make("parts", **settings)
    figures = train(whole, quiet)
    # Step 5 lies inside the second epoch; each step has several micro-batches.
    assert len(run.build(whole, quiet).loader.step(4)) > 1
    lines: list[str] = []
    train(make("parts", train__stop_at="2", **settings), quiet)
    train(make("parts", train__stop_at="5", **settings), lines.append)
    assert f"resumed from {parts.run_dir}/checkpoints/step-000002" in lines
    assert saved(parts)[-1] == 5
    again = train(parts, quiet)
    assert_same(whole, parts, 7)
    assert {k: v for k, v in again.items() if k != "tokens_per_s"} == {
        k: v for k, v in figures.items() if k != "tokens_per_s"
    }
    rates = [line["lr"] for line in log(parts)]
    assert rates == [line["lr"] for line in log(whole)]
    assert rates == pytest.approx([0.01 * (1 - n / 7) for n in range(7)])  # the full schedule, wherever it stopped
    losses = [[line["loss"] for line in log(chosen)] for chosen in (whole, parts)]
    assert losses[0] == losses[1]
    assert all(torch.equal(p, exported(parts)[name]) for name, p in exported(whole).items())


def test_reader_processes_give_what_the_thread_gives(make: Make) -> None:
    thread, readers = make("thread"), make("readers", data__readers="2")
    train(thread, quiet)
    train(readers, quiet)
    assert_same(thread, readers, 7)


@pytest.mark.parametrize("settings", [{"model__dropout": "0.1"}, {"train__label_smoothing": "0.1"}])
def test_gradient_checkpointing_gives_the_same(make: Make, settings: dict[str, str]) -> None:
    plain, recomputed = make("a", **settings), make("b", train__gradient_checkpointing="true", **settings)
    for chosen in (plain, recomputed):
        train(chosen, quiet)
    one, two = checkpoint(plain, 7).model, checkpoint(recomputed, 7).model
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, msg=name)


def test_label_smoothing_reaches_the_loss(make: Make) -> None:
    losses = [train(make(name, train__steps="1", train__label_smoothing=name), quiet)["loss"] for name in ("0", "0.5")]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_the_run_goes_on_as_if_there_was_none(
    make: Make, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    settings = {"train__log_every": "3", "train__evaluate_every": "3", "data__validation_split": "0.1"}
    whole, parts = make("whole", **settings), make("parts", **settings)
    train(whole, quiet)
    for step in (2, 3, 5):  # in the midst of a line of the log, where an evaluation is due, and anywhere
        with monkeypatch.context() as patch:
            at_step(patch, step, lambda: signal.raise_signal(number))
            with pytest.raises(Interrupted, match=f"{number.name}: saved at step {step}; the same command goes on"):
                train(parts, quiet)
        assert saved(parts)[-1] == step
        assert not (parts.run_dir / "model").exists()
    train(parts, quiet)
    assert_same(whole, parts, 7)
    assert log(parts) == log(whole)
    assert [line["step"] for line in log(parts)] == [3, 6, 7]
    assert "validation_loss" in log(parts)[0]


def test_a_signal_ends_an_evaluation_which_is_made_up_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"train__evaluate_every": "3", "data__validation_split": "0.3", "train__metrics": ["exact_match"]}
    whole, parts = make("whole", **settings), make("parts", **settings)
    train(whole, quiet)
    for function in ("loss", "score"):
        with monkeypatch.context() as patch:
            original = getattr(evaluate, function)
            patch.setattr(evaluate, function, lambda *a, f=original: (signal.raise_signal(signal.SIGTERM), f(*a))[1])
            with pytest.raises(Interrupted, match="saved at step 3"):
                train(parts, quiet)
    # Made up for, it is in the log; a crash before the next checkpoint makes it once more.
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(parts, quiet)
    assert log(parts) == log(whole)[:3]
    train(parts, quiet)
    assert_same(whole, parts, 7)
    assert log(parts) == log(whole)


def test_readers_that_a_signal_ended_do_not_keep_the_run_from_saving(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Loader, start: int, stop: int, readers: int) -> Iterator[list[Batch]]:
        yield from (self.step(n) for n in range(start, 3))
        if signalled:
            signal.raise_signal(signal.SIGTERM)
        raise BrokenProcessPool

    chosen = make()
    monkeypatch.setattr(Loader, "steps", broken)
    signalled = True
    with pytest.raises(Interrupted, match="saved at step 3"):
        train(chosen, quiet)
    assert saved(chosen) == [2, 3]
    signalled = False
    with pytest.raises(BrokenProcessPool):
        train(chosen, quiet)


def test_a_signal_before_the_first_step_loses_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = make()
    build = trackers.build
    with monkeypatch.context() as patch:
        patch.setattr(trackers, "build", lambda *a: (signal.raise_signal(signal.SIGTERM), build(*a))[1])
        with pytest.raises(Interrupted, match="saved at step 0"):
            train(chosen, quiet)
    train(chosen, quiet)
    assert [line["step"] for line in log(chosen)] == [*range(1, 8)]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(make: Make) -> None:
    whole, chosen = make("whole"), make()
    train(whole, quiet)
    train(make(train__stop_at="4"), quiet)
    file = chosen.run_dir / "checkpoints" / "step-000004" / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    lines: list[str] = []
    train(chosen, lines.append)
    assert any("skipped a damaged checkpoint" in line and "step-000004" in line for line in lines)
    assert any(line.endswith("step-000002") for line in lines)
    assert_same(whole, chosen, 7)
    assert log(chosen) == log(whole)


def test_nothing_but_damaged_checkpoints_is_refused(make: Make) -> None:
    chosen = make()
    train(chosen, quiet)
    for step in saved(chosen):
        (chosen.run_dir / "checkpoints" / f"step-{step:06d}" / "state.json").write_text("{}")
    with pytest.raises(InputError, match="checkpoints: every checkpoint is damaged; give another run.dir"):
        train(chosen, quiet)
    assert saved(chosen) == [6, 7]


# What is refused


def test_a_changed_config_is_refused_with_what_differs(make: Make) -> None:
    train(make(train__stop_at="2"), quiet)
    with pytest.raises(InputError) as caught:
        train(make(optim__lr="0.02", train__batch="4"), quiet)
    said = str(caught.value)
    assert said.startswith(f"{make().run_dir}: holds a run with another config; give another run.dir, or undo: ")
    assert said.endswith("train.batch: 8 before, 4 now; optim.lr: 0.01 before, 0.02 now")


def test_what_changes_nothing_may_change(make: Make, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").rename(tmp_path / "moved.tsv")
    train(make(train__stop_at="2", data__train=str(tmp_path / "moved.tsv")), quiet)
    (tmp_path / "run").rename(tmp_path / "other")
    (tmp_path / "moved.tsv").rename(tmp_path / "pairs.tsv")
    free = {
        "run__name": "x", "train__stop_at": "3", "train__micro_rows": "2", "train__log_every": "2",
        "checkpoint__every": "1", "checkpoint__keep": "5", "generate__beams": "2", "track__project": "y",
    }  # fmt: skip
    chosen = make("other", **free)
    train(chosen, quiet)
    assert saved(chosen) == [2, 3]
    assert config.load(chosen.run_dir / "config.toml") == chosen
    known = {key.name for key in config.keys(["*"])}
    assert all(key.endswith(".*") or key in known for key in run.FREE_KEYS)


@pytest.mark.parametrize("which", ["training", "validation"])
def test_changed_data_is_refused(make: Make, tmp_path: Path, which: str) -> None:
    held = tmp_path / "held.tsv"
    write_pairs(held, 5, seed=1)
    train(make(train__stop_at="2", data__validation=str(held)), quiet)
    write_pairs(tmp_path / "pairs.tsv" if which == "training" else held, 20, seed=2)
    with pytest.raises(InputError, match=f"step-000002: belongs to other {which} data .*same files and settings"):
        train(make(data__validation=str(held)), quiet)


def test_resuming_can_be_forbidden(make: Make) -> None:
    train(make(checkpoint__resume="false"), quiet)
    with pytest.raises(InputError, match="run: holds a run already; resume it or give another run.dir"):
        train(make(checkpoint__resume="false"), quiet)


def test_a_checkpoint_without_its_config_is_refused(make: Make) -> None:
    train(make(), quiet)
    (make().run_dir / "config.toml").unlink()
    with pytest.raises(InputError, match=r"config.toml: is missing"):
        train(make(optim__lr="0.5"), quiet)


def test_a_second_run_in_the_folder_is_refused(make: Make) -> None:
    chosen = make()
    with store.RunLock(chosen.run_dir), pytest.raises(InputError, match="run is in use by process"):
        train(chosen, quiet)
    train(chosen, quiet)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"data__train": "nowhere.tsv"}, "data.train"),
        ({"data__train": []}, "data.train: no training files given"),
        ({"model__config": "nowhere"}, "model.config: nowhere is neither a file or folder here nor a known size"),
        ({"model__config": "no/where"}, "no/where: no config.json there"),
        ({"model__config": ""}, "model.path: no model given"),
        ({"model__config": "", "model__path": "no/such/folder"}, "model.path: no such folder: no/such/folder"),
        ({"model__tokenizer": ""}, "model.tokenizer: training from scratch needs one"),
        ({"model__freeze": ["encodr.*"]}, "model.freeze: 'encodr.*' matches no parameter (did you mean"),
        ({"model__freeze": ["*"]}, "model.freeze: leaves no parameter to train"),
        ({"train__metrics": ["blue"]}, "metric 'blue' is unknown (did you mean bleu?)"),
        ({"train__patience": "2"}, "train.patience: needs examples to evaluate on: give data.validation"),
        ({"train__metrics": ["wer"]}, "train.metrics: needs examples to evaluate on"),
        ({"train__evaluate_every": "2"}, "train.evaluate_every: needs examples to evaluate on"),
        ({"run__device": "warp"}, "run.device: 'warp' is not here"),
    ],
)
def test_a_bad_config_writes_nothing(make: Make, overrides: dict[str, Any], words: str) -> None:
    chosen = make(**overrides)
    with pytest.raises(InputError) as caught:
        train(chosen, quiet)
    assert str(caught.value).startswith(words)
    assert not chosen.run_dir.exists()


def test_a_tokenizer_must_fit_the_model(make: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"vocab_size": 300}))
    with pytest.raises(InputError, match="model.tokenizer: does not fit the model: it has 384 tokens, the model 300"):
        train(make(), quiet)


def test_a_run_folder_that_cannot_be_made_is_told(make: Make, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InputError, match="run.dir: .*run: File exists"):
        train(make(), quiet)


# What diverges


def test_a_loss_that_is_not_finite_leaves_a_crash_folder_and_the_last_good_state(make: Make, tmp_path: Path) -> None:
    lines: list[str] = []
    chosen = make(optim__lr="1e38", checkpoint__every="1")
    with pytest.raises(Diverged, match="step 2: the loss is not finite"):
        train(chosen, lines.append)
    crash = chosen.run_dir / "crash" / "step-000002"
    rows = [json.loads(line) for line in (crash / "examples.jsonl").read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("\t") for line in (tmp_path / "pairs.tsv").read_text(encoding="utf-8").splitlines()]
    assert rows
    assert {row["example"] for row in rows} <= set(run.build(chosen, quiet).loader.taken(1).tolist())
    for row in rows:
        assert [row["source"], row["target"]] == pairs[row["example"]]
        assert row["where"] == f"{tmp_path / 'pairs.tsv'}:{row['example'] + 1}"
    assert json.loads((crash / "error.json").read_text()) == {"step": 2, "error": "step 2: the loss is not finite"}
    assert f"{len(rows)} examples are in {crash}" in lines[-1]
    assert store.newest(chosen.run_dir / "checkpoints", pytest.fail) == chosen.run_dir / "checkpoints" / "step-000001"
    assert [line["step"] for line in log(chosen)] == [1]
    assert not (chosen.run_dir / "model").exists()


def test_a_gradient_that_is_not_finite_stops_likewise(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = Optimizer.clip

    def poisoned(self: Optimizer, limit: float) -> torch.Tensor:
        norm = clip(self, limit)
        return norm * float("inf") if self.updates == 4 else norm

    monkeypatch.setattr(Optimizer, "clip", poisoned)
    chosen = make()
    with pytest.raises(Diverged, match="step 5: the gradient is not finite") as caught:
        train(chosen, quiet)
    assert sorted(caught.value.examples) == sorted(run.build(chosen, quiet).loader.taken(4).tolist())
    rows = (chosen.run_dir / "crash" / "step-000005" / "examples.jsonl").read_text().splitlines()
    assert [json.loads(row)["example"] for row in rows] == caught.value.examples
    assert saved(chosen) == [2, 4]
    monkeypatch.undo()
    whole = make("whole")
    train(whole, quiet)
    train(chosen, quiet)
    assert_same(whole, chosen, 7)


# Evaluating


def test_the_best_is_kept_and_exported_and_patience_ends_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_losses(monkeypatch, iter([5.0, 3.0, 4.0, 3.0]))
    settings = {"data__validation_split": "0.1", "train__evaluate_every": "1", "train__patience": "2"}
    settings |= {"checkpoint__keep": "1", "checkpoint__every": "0"}
    chosen = make(**settings)
    lines: list[str] = []
    figures = train(chosen, lines.append)
    assert [line["validation_loss"] for line in log(chosen)] == [5.0, 3.0, 4.0, 3.0]
    assert saved(chosen) == [2, 4]
    assert lines[-1] == f"model of step 2: {chosen.run_dir / 'model'}"
    best, last = checkpoint(chosen, 2).model, checkpoint(chosen, 4).model
    assert all(torch.equal(p, best[name]) for name, p in exported(chosen).items())
    assert not torch.equal(best["shared.weight"], last["shared.weight"])
    # It has ended: to start it again neither trains nor forgets.
    assert train(chosen, lines.append) == figures
    assert "step 4: nothing left to train" in lines
    assert saved(chosen) == [2, 4]


def test_patience_is_counted_through_a_resume(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_losses(monkeypatch, iter([3.0, 5.0, 4.0, 4.0]))
    settings = {"data__validation_split": "0.1", "train__evaluate_every": "1", "train__patience": "3"}
    for stop in ("1", "2", "3"):
        train(make(train__stop_at=stop, **settings), quiet)
    train(make(**settings), quiet)
    assert [line["step"] for line in log(make())] == [1, 2, 3, 4]
    state = checkpoint(make(), 4).state
    assert (state["best"], state["stale"]) == ({"step": 1, "value": 3.0}, 3)
    assert saved(make()) == [1, 3, 4]


def test_figures_that_are_no_numbers_are_never_the_best(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_losses(monkeypatch, iter([float("nan"), 4.0, float("nan"), 5.0, 5.0, 5.0, 5.0]))
    chosen = make(data__validation_split="0.1", train__evaluate_every="1")
    train(chosen, quiet)
    assert checkpoint(chosen, 7).state["best"] == {"step": 2, "value": 4.0}


def test_a_best_checkpoint_that_is_lost_gives_way_to_the_last_weights(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted_losses(monkeypatch, iter([3.0] + [4.0] * 6))
    settings = {"data__validation_split": "0.1", "train__evaluate_every": "1"}
    train(make(train__stop_at="5", **settings), quiet)
    (make().run_dir / "checkpoints" / "step-000001" / "state.json").unlink()
    (make().run_dir / "checkpoints" / "step-000001" / "manifest.json").unlink()
    lines: list[str] = []
    train(make(**settings), lines.append)
    assert "the best checkpoint cannot be read, so the last weights are taken" in "\n".join(lines)
    last = checkpoint(make(), 7).model
    assert all(torch.equal(p, last[name]) for name, p in exported(make()).items())


def test_metrics_are_computed_at_evaluations_and_decide_the_best(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held.tsv"
    write_pairs(held, 5, seed=1)
    chosen = make(
        data__validation=str(held), data__prefix="turn: ", data__max_validation_samples="4",
        train__metrics=["exact_match", "cer", "rouge"], train__evaluate_every="3", train__best="cer",
    )  # fmt: skip
    figures = train(chosen, quiet)
    names = {"loss", "exact_match", "cer", "rouge1", "rouge2", "rougeL"}
    assert {k.removeprefix("validation_") for k in figures if k.startswith("validation_")} == names
    assert sorted(path.name for path in (chosen.run_dir / "predictions").iterdir()) == [
        f"step-00000{n}.jsonl" for n in (3, 6, 7)
    ]
    file = chosen.run_dir / "predictions" / "step-000007.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("\t") for line in held.read_text(encoding="utf-8").splitlines()][:4]
    assert [[row["source"], row["reference"]] for row in rows] == [[f"turn: {s}", t] for s, t in pairs]
    assert [row["where"] for row in rows] == [f"{held}:{n}" for n in range(1, 5)]
    again = metrics.evaluate(["cer"], [row["prediction"] for row in rows], [row["reference"] for row in rows])
    assert figures["validation_cer"] == again["cer"]
    values = {line["step"]: line["validation_cer"] for line in log(chosen) if "validation_cer" in line}
    assert checkpoint(chosen, 7).state["best"]["value"] == min(values.values())
    # The folder remembers the prefix and the lengths; evaluated by itself it gives the same figures.
    assert read_settings(chosen.run_dir / "model").prefix == "turn: "
    best = int(checkpoint(chosen, 7).state["best"]["step"])
    limits = {"data.max_validation_samples": "4", "run.threads": "1", "run.device": "cpu"}
    alone = evaluate.evaluate(str(chosen.run_dir / "model"), [str(held)], ["cer"], limits)
    assert alone["cer"] == values[best]
    logged = next(line["validation_loss"] for line in log(chosen) if line["step"] == best)
    assert alone["loss"] == pytest.approx(logged, rel=1e-5)


def test_evaluating_does_not_touch_training(make: Make) -> None:
    settings = {"data__validation_split": "0.3"}
    often = make("often", train__evaluate_every="1", train__metrics=["wer"], **settings)
    once = make("once", **settings)
    for chosen in (often, once):
        train(chosen, quiet)
    one, two = checkpoint(often, 7), checkpoint(once, 7)
    assert all(torch.equal(p, two.model[name]) for name, p in one.model.items())


# Freezing


def test_frozen_parameters_stay_and_the_others_move(make: Make) -> None:
    settings: dict[str, Any] = {"optim__weight_decay": "0.5", "model__freeze": ["encoder.*", "shared.weight"]}
    chosen = make(**settings)
    built = run.build(chosen, quiet)
    before = {name: p.detach().clone() for name, p in built.model.named_parameters()}
    assert "trained" in run.summary(built)
    train(make(train__stop_at="3", **settings), quiet)
    train(chosen, quiet)
    after = exported(chosen)
    for name, weight in before.items():
        frozen = name.startswith("encoder.") or name == "shared.weight"
        assert torch.equal(after[name], weight) == frozen, name
    assert not any("encoder" in name for name in checkpoint(chosen, 7).optim)


# The result


def sentencepiece_file(folder: Path) -> Path:
    import sentencepiece

    words = ["ploaia cade încet", "vântul bate", "copiii au plecat la școală", "mama coace pâine", "the quick fox"]
    (folder / "text.txt").write_text("\n".join(words * 5), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "own"), vocab_size=36, character_coverage=1.0,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return folder / "own.model"


@pytest.mark.parametrize(("tokenizer", "kind"), [("bytes", {}), ("bytes", GATED), ("sentencepiece", GATED)])
def test_the_model_opens_in_transformers_and_says_the_same(
    make: Make, tmp_path: Path, tokenizer: str, kind: dict[str, Any]
) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps(RAW | kind))
    spec = "bytes" if tokenizer == "bytes" else str(sentencepiece_file(tmp_path))
    chosen = make(model__tokenizer=spec, train__steps="3", optim__lr="0.002", data__prefix="x: ")
    train(chosen, quiet)
    folder = chosen.run_dir / "model"
    theirs, their_tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["abc", "ploaia cade", "eșăabcde", "a"]
    inputs = their_tokenizer([f"x: {text}" for text in texts], return_tensors="pt", padding=True)
    assert theirs.config.decoder_start_token_id == 0  # which the config we started from left out
    assert theirs.generation_config.max_new_tokens == 24  # else it would stop at 20
    expected = their_tokenizer.batch_decode(theirs.eval().generate(**inputs), skip_special_tokens=True)
    loaded = t2t.load(folder, device="cpu")
    assert loaded.generate(texts) == expected
    assert len(set(expected)) > 1
    assert isinstance(loaded.tokenizer, Bytes) == (tokenizer == "bytes")


def test_a_run_starts_from_the_model_of_another(make: Make) -> None:
    first = make("first", data__prefix="turn: ")
    train(first, quiet)
    second = make("second", model__config="", model__tokenizer="", model__path=str(first.run_dir / "model"))
    built = run.build(second, quiet)
    start = exported(first)
    assert all(torch.equal(p, start[name]) for name, p in built.model.named_parameters())
    train(second, quiet)
    assert saved(second) == [6, 7]


def test_character_noise_trains_and_resumes(make: Make) -> None:
    settings = {"data__objective": "character_noise", "data__validation_split": "0.2"}
    whole, parts = make("whole", **settings), make("parts", **settings)
    train(whole, quiet)
    train(make("parts", train__stop_at="4", **settings), quiet)
    train(parts, quiet)
    assert_same(whole, parts, 7)


def test_mixed_precision_keeps_fp32_weights(make: Make) -> None:
    settings = {"train__precision": "mixed"}
    whole, parts = make("whole", **settings), make("parts", **settings)
    train(whole, quiet)
    train(make("parts", train__stop_at="4", **settings), quiet)
    train(parts, quiet)
    assert_same(whole, parts, 7)
    weight = checkpoint(whole, 7).model["shared.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())
    assert torch.equal(exported(whole)["shared.weight"], weight)
