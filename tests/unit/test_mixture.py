"""Mixtures: shares that add up, an order that is a pure function, and tasks that keep what is their own."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import blocks, commands
from tiny import RAW, quiet, write_pairs

import t2t
from t2t import cli, config
from t2t.checkpoint import store
from t2t.config import Config, Data, load, tasks, to_toml
from t2t.data import order, tokens
from t2t.data.loader import Loader, drawn, pick_shape
from t2t.data.masked import MaskedLM
from t2t.data.mixture import Mixture, quotas, weights
from t2t.data.objectives import Objective, Prompted, Seq2Seq
from t2t.data.packing import Batch, Feature
from t2t.data.splits import read_splits
from t2t.data.tasks import Example
from t2t.data.text import SpanCorruption
from t2t.data.tokens import Bytes, tokenize
from t2t.errors import InputError
from t2t.generate import Settings, read_settings, save_settings
from t2t.train import evaluate, run
from t2t.train.run import train

Make = Callable[..., Config]
SIZES = [(5,), (7, 3), (1, 40), (1, 1, 1), (2, 30, 11), (64, 1, 17, 5)]
RATES: list[Callable[[tuple[int, ...]], list[float]]] = [
    lambda sizes: [*sizes],
    lambda sizes: [1.0] * len(sizes),
    lambda sizes: [size**0.5 for size in sizes],
    lambda sizes: [0.1 + k * 3.7 for k in range(len(sizes))],
    lambda sizes: [1000.0**k for k in range(len(sizes))],
]


class Numbers:
    """Examples that are told apart by their tokens; every seed that is asked for is kept."""

    words = predictions = 0

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count, self.asked = first, count, list[tuple[int, int]]()
        self.fingerprint, self.longest = f"{first}-{count}", (1 + (count - 1) % 3, 1)

    def __len__(self) -> int:
        return self.count

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return 1 + index % 3, np.ones_like(index)

    def feature(self, i: int, seed: int) -> Feature:
        self.asked.append((i, seed))
        token = np.array([self.first + i])
        return Feature(np.repeat(token, 1 + i % 3), token, token)

    def tell(self, i: int) -> dict[str, str | list[int]]:
        return {"where": f"x:{self.first + i}"}


def mixed(sizes: tuple[int, ...], rates: list[float]) -> Mixture:
    starts = np.cumsum((0, *sizes)).tolist()
    return Mixture({f"t{k}": Numbers(starts[k], size) for k, size in enumerate(sizes)}, rates)


def make_loader(examples: Objective, batch: int, seed: int = 1, **settings: Any) -> Loader:
    shape = pick_shape(examples, Data(), batch, lambda s, t: s + t, seed)
    return Loader(examples, batch, shape, 2, seed, pad_id=0, **settings)


def ids(batches: list[Batch]) -> list[int]:
    """The examples of a step; each has its number as its token, too."""
    found = [int(i) for batch in batches for i in batch.example_ids.flatten() if i >= 0]
    assert sorted(found) == sorted(int(i) for batch in batches for i in batch.labels.flatten() if i != -100)
    return found


# Shares


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rate", RATES)
def test_quotas_add_up_and_nobody_goes_without(
    sizes: tuple[int, ...], rate: Callable[[tuple[int, ...]], list[float]]
) -> None:
    total, rates = sum(sizes), rate(sizes)
    found = quotas(rates, total)
    assert sum(found) == total
    assert min(found) >= 1
    shares = [total * own / sum(rates) for own in rates]
    if min(shares) >= 1:
        assert all(math.floor(share) <= own <= math.ceil(share) for own, share in zip(found, shares, strict=True))
    assert quotas(sizes, total) == [*sizes]


def test_quotas_by_size_are_exact_where_floats_are_not() -> None:
    sizes = [10**17 + 1, 10**17 + 3, 5]
    assert quotas(sizes, sum(sizes)) == sizes


def test_weights_by_size_temperature_and_rate() -> None:
    sizes = {"a": 1000, "b": 8}
    mix: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    assert weights(Data(mix=mix), sizes) == [1000, 8]
    assert weights(Data(mix=mix, mixing_limit=100), sizes) == [100, 8]
    assert weights(Data(mix=mix, mixing="equal"), sizes) == [1, 1]
    assert weights(Data(mix=mix, mixing="temperature", temperature=3.0), sizes) == pytest.approx([10, 2])
    limited = Data(mix=mix, mixing="temperature", temperature=3.0, mixing_limit=27)
    assert weights(limited, sizes) == pytest.approx([3, 2])
    assert weights(Data(mix={"a": {"rate": 0.5}, "b": {"rate": 2.0}}), sizes) == [0.5, 2.0]


# The order


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rate", RATES)
def test_every_epoch_keeps_the_shares_and_no_example_comes_twice_before_all_came_once(
    sizes: tuple[int, ...], rate: Callable[[tuple[int, ...]], list[float]]
) -> None:
    mixture = mixed(sizes, rate(sizes))
    tasks = np.split(np.arange(len(mixture)), np.cumsum(sizes)[:-1])
    for batch, seed in ((1, 3), (4, 1), (len(mixture), 2), (1000, 1)):
        loader = make_loader(mixture, batch, seed)
        seen: Counter[int] = Counter()
        for epoch in range(5):
            steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
            taken = [ids(loader.step(n)) for n in steps]
            assert [sorted(step) for step in taken] == [sorted(loader.taken(n).tolist()) for n in steps]
            assert all(len(step) == min(batch, len(mixture)) for step in taken[:-1])
            now = Counter(itertools.chain.from_iterable(taken))
            assert [sum(now[i] for i in task.tolist()) for task in tasks] == mixture.quotas
            seen += now
            for task in tasks:
                counts = [seen[i] for i in task.tolist()]
                assert max(counts) - min(counts) <= 1
            if mixture.quotas == [*sizes]:
                assert now == Counter(range(len(mixture)))


def test_any_step_is_found_without_those_before_it() -> None:
    sizes, rates = (30, 4, 1), [1.0, 1.0, 0.3]
    whole = [sorted(ids(mix.step(n))) for mix in [make_loader(mixed(sizes, rates), 8)] for n in range(40)]
    for start, readers in ((0, 0), (1, 0), (4, 0), (5, 0), (17, 1), (39, 0)):
        loader = make_loader(mixed(sizes, rates), 8)
        assert [sorted(ids(batches)) for batches in loader.steps(start, 40, readers)] == whole[start:]
    far = make_loader(mixed(sizes, rates), 8)
    assert len(ids(far.step(10**9))) == 8
    assert [sorted(ids(far.step(n))) for n in reversed(range(40))] == whole[::-1]
    assert [sorted(ids(make_loader(mixed(sizes, rates), 8, seed=2).step(n))) for n in range(40)] != whole


def test_repeats_of_an_example_have_seeds_of_their_own() -> None:
    mixture = mixed((20, 3, 1), [1.0, 1.0, 1.0])
    loader = make_loader(mixture, 6)
    for n in range(30):
        loader.step(n)
    asked = []
    for name, task in mixture.tasks.items():
        assert isinstance(task, Numbers)
        asked += [(name, i, seed) for i, seed in task.asked]
    assert max(Counter((name, i) for name, i, _ in asked).values()) > 30
    assert len(set(asked)) == len(asked)


def test_tasks_do_not_follow_one_another_in_an_epoch() -> None:
    mixture = mixed((50, 50), [1.0, 1.0])
    loader = make_loader(mixture, 20)
    assert all(3 < sum(i < 50 for i in loader.taken(n).tolist()) < 17 for n in range(10))
    orders = {tuple(i for n in range(5) for i in loader.taken(5 * e + n).tolist() if i < 50) for e in range(4)}
    assert len(orders) == 4


def test_every_round_of_every_task_has_an_order_of_its_own() -> None:
    mixture = mixed((30, 30), [1.0, 1.0])
    rounds = [mixture.drawn(np.arange(60), epoch, seed)[0] for epoch in range(3) for seed in (1, 2)]
    orders = {tuple(part.tolist()) for drawn in rounds for part in (drawn[:30], drawn[30:] - 30)}
    assert len(orders) == 12


def test_a_mixture_has_the_examples_of_its_tasks() -> None:
    mixture = mixed((4, 1, 3), [1.0, 2.0, 3.0])
    assert len(mixture) == 8
    assert mixture.longest == (3, 1)
    index = np.array([7, 0, 4, 2, 5, 3])
    assert [side.tolist() for side in mixture.sizes(index)] == [[3, 1, 1, 3, 1, 1], [1] * 6]
    assert [int(mixture.feature(i, 0).labels[0]) for i in range(8)] == [*range(8)]
    assert [int(f.labels[0]) for f in mixture.features(np.array([5, 0, 7, 0, 3]), iter(range(5)))] == [5, 0, 7, 0, 3]
    assert mixture.tell(4) == {"task": "t1", "where": "x:4"}
    prints = {mixed((4, 1, 3), [1, 2, 3]).fingerprint, mixed((4, 1, 3), [3, 2, 1]).fingerprint}
    renamed = Mixture({name.upper(): task for name, task in mixture.tasks.items()}, mixture.weights)
    assert len(prints | {renamed.fingerprint, mixed((4, 1, 2), [1, 2, 3]).fingerprint}) == 4
    assert mixture.fingerprint in prints


def test_held_out_examples_come_in_their_order() -> None:
    loader = make_loader(mixed((4, 1, 3), [1.0, 2.0, 3.0]), 3, shuffle=False)
    assert [loader.taken(n).tolist() for n in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_rows_are_picked_from_what_will_come() -> None:
    long, short = (
        tokenize([Example("s" * size, "t", "x")] * 50, Bytes(), 64, 8) for size in (60, 4)
    )  # half of the examples, but hardly any of the batches
    mixture = Mixture({"long": Seq2Seq(long, 0), "short": Seq2Seq(short, 0)}, [1, 99])
    assert make_loader(mixture, 10).mean_sizes[0] < 10
    index, rounds = drawn(mixture, 100, 0, order.key("sizes"))
    assert (index >= 50).sum() == 99
    assert rounds.max() == 1


# What is told


def toml(folder: Path, text: str) -> Path:
    file = folder / "mix.toml"
    file.write_text(text, encoding="utf-8")
    return file


TWO = """
[data]
source = "en"
validation_split = 0.25
[data.mix.to_ro]
train = "a.jsonl"
target = "ro"
prefix = "to Romanian: "
rate = 2
metrics = ["chrf"]
[data.mix.to-de]
train = ["b.jsonl", "c.jsonl"]
target = "de"
rate = 1.5
validation = "held.jsonl"
"""


def test_a_task_has_the_keys_of_the_section_that_it_does_not_set(tmp_path: Path) -> None:
    chosen = load(toml(tmp_path, TWO), {"data.mix.to_ro.piece": "9", "data.piece": "8", "data.mix.to_ro.train": "z"})
    found = tasks(chosen.data)
    assert list(found) == ["to-de", "to_ro"]
    assert (found["to_ro"].train, found["to_ro"].source, found["to_ro"].target) == (("z",), "en", "ro")
    assert (found["to_ro"].piece, found["to-de"].piece) == (9, 8)
    assert (found["to_ro"].rate, found["to-de"].rate) == (2.0, 1.5)
    assert (found["to_ro"].validation_split, found["to_ro"].validation) == (0.25, ())
    assert (found["to-de"].validation_split, found["to-de"].validation) == (0.0, ("held.jsonl",))
    assert chosen.metrics("to_ro") == ("chrf",) != chosen.metrics("to-de")


def test_a_mixture_survives_toml_in_whatever_order_it_was_told(tmp_path: Path) -> None:
    chosen = load(toml(tmp_path, TWO))
    written = to_toml(chosen)
    assert load(toml(tmp_path, written)) == chosen
    assert to_toml(load(tmp_path / "mix.toml")) == written
    assert config.flat(chosen)["data.mix.to_ro.prefix"] == "to Romanian: "
    one, two = (["data.mix.b.train", "data.mix.a.train"][::step] for step in (1, -1))
    assert to_toml(load(overrides=dict.fromkeys(one, "x"))) == to_toml(load(overrides=dict.fromkeys(two, "x")))


A, B = '[data.mix.a]\ntrain = "a"\n', '[data.mix.b]\ntrain = "b"\n'
EQUAL, LETTERS = "[data]\nmixing = 'equal'\n", "a task's name may have letters, digits, _ and -, not"
NO_TASKS = "has no tasks: write [data.mix.NAME] and its keys below for each"
NO_TASK = "is no task: write [data.mix.a] and its keys below"


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("[data.mix]\n", "data.mix", NO_TASKS),
        ("[data]\nmix = 3\n", "data.mix", NO_TASKS),
        ("[data.mix]\na = 3\n", "data.mix.a", NO_TASK),
        ("[data.mix.a]\n", "data.mix.a", NO_TASK),
        (A + "prefx = 'x'\n", "data.mix.a.prefx", "unknown key (did you mean data.mix.a.prefix?)"),
        (A + "readers = 2\n", "data.mix.a.readers", "all tasks share it: set data.readers"),
        (A + "rate = -1\n", "data.mix.a.rate", "must be 0 or more, got -1.0"),
        (A + "rate = 'often'\n", "data.mix.a.rate", "expected a number, got 'often'"),
        (A + "rate = 2\n" + B + "rate = 0\n", "data.mix.b.rate", "is missing: give a rate to every task, or to none"),
        (A + "piece = 3\n", "data.mix.a.piece", "must be 0, or 8 or more, got 3"),
        ('[data.mix."a.b"]\ntrain = "x"\n', "data.mix.a.b.train", f"{LETTERS} 'a.b'"),
        ('[data.mix."ä"]\ntrain = "x"\n', "data.mix.ä.train", f"{LETTERS} 'ä'"),
        ('[data.mix."../b"]\ntrain = "x"\n', "data.mix.../b.train", f"{LETTERS} '../b'"),
        (EQUAL, "data.mixing", "is for mixtures: give their tasks, as [data.mix.NAME]"),
        (EQUAL + A + "rate = 1\n", "data.mixing", "is unused where tasks have rates; leave one of them out"),
        (
            EQUAL + "mixing_limit = 9\n" + A,
            "data.mixing_limit",
            'is unused under data.mixing = "equal"; leave one of them out',
        ),
        (
            "[data]\ntemperature = 3\n" + A,
            "data.temperature",
            'is unused under data.mixing = "size"; leave one of them out',
        ),
        ("[data]\ntemperature = 0\n" + A, "data.temperature", "must be above 0, got 0.0"),
        ("[data]\nmixing_limit = -9\n" + A, "data.mixing_limit", "must be 0 or more, got -9"),
        ("[data]\nstreaming = true\n" + A, "data.streaming", "is for one task, not for mixtures"),
        (
            A + "validation = 'v'\nvalidation_split = 0.5\n",
            "data.mix.a.validation_split",
            "is for runs without data.mix.a.validation; give one of them",
        ),
        (
            "[data]\nsource_row = 512\n" + A + "max_source_length = 600\n",
            "data.source_row",
            "must hold one example: at least data.mix.a.max_source_length = 600, or 0",
        ),
        ("[train]\nbest = 'a_wer'\n" + A + B, "train.best", "'a_wer' is not computed, there are: a_loss, b_loss"),
        (
            "[train]\nbest = 'wer'\n" + A + "metrics = 'wer'\n",
            "train.best",
            "'wer' is not computed, there are: a_loss, a_wer",
        ),
    ],
)
def test_bad_mixtures_are_named(
    tmp_path: Path, text: str, key: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = toml(tmp_path, text)
    assert cli.main(["train", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file}: {key}: {message}\n"


@pytest.mark.parametrize(("names", "figure"), [(["masked"], "masked_loss"), (["a", "a_masked"], "a_masked_loss")])
def test_names_that_make_two_figures_one_are_refused(names: list[str], figure: str) -> None:
    with pytest.raises(InputError) as caught:
        load(overrides={f"data.mix.{name}.train": "x" for name in names})
    advice = "give the task another name"
    assert str(caught.value) == f"data.mix.{names[-1]}: another figure is called {figure} already: {advice}"


def test_flags_of_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, message in {
        "--data.mix.a.prefx": "--data.mix.a.prefx: unknown argument (did you mean --data.mix.a.prefix?)",
        "--data.mix.prefix": "--data.mix.prefix: unknown argument (did you mean --data.mix.NAME.prefix?)",
        "--data.mix.a.b.prefix": "--data.mix.a.b.prefix: a task's name may have letters, digits, _ and -, not 'a.b'",
    }.items():
        assert cli.main(["train", flag, "x"]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    with pytest.raises(SystemExit):
        cli.main(["train", "--data.mix.a.train", "x", "--help"])
    told = capsys.readouterr().out
    assert "[data.mix.NAME]" in told and "--data.mix.NAME.rate RATE" in told
    assert "--data.mix.a.train" not in told and "--data.mix.NAME.train TRAIN" not in told


@pytest.mark.parametrize("best", ["loss", "a_loss", "b_loss", "a_wer", "b_rougeL", "a_perplexity"])
def test_the_best_figure_may_be_any_of_a_task(best: str) -> None:
    given: dict[str, str | list[str]] = {"data.mix.a.train": "x", "data.mix.b.metrics": ["rouge"], "train.best": best}
    assert load(overrides=given | {"train.metrics": ["wer"]}).train.best == best


# Whole runs


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Words backwards in columns of one name, words in capitals in columns of another, and plain text."""
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    write_pairs(tmp_path / "pairs.tsv", 20)
    words = [line.split("\t")[0] for line in (tmp_path / "pairs.tsv").read_text(encoding="utf-8").splitlines()]
    back = "".join(json.dumps({"id": i, "word": w, "back": w[::-1]}) + "\n" for i, w in enumerate(words))
    (tmp_path / "back.jsonl").write_text(back)
    (tmp_path / "upper.csv").write_text(
        "plain,big\n" + "".join(f"{w},{w.upper()}\n" for w in words[:6]), encoding="utf-8"
    )
    (tmp_path / "one.tsv").write_text("a\tb\n")
    (tmp_path / "plain.txt").write_text("\n\n".join(" ".join(words) for _ in range(3)) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def mix(files: Path, make: Make) -> Make:
    """The tiny run on two tasks of different columns and prefixes."""
    two: dict[str, str | list[str]] = {
        "data__train": [],
        "data__mix__back__train": str(files / "back.jsonl"),
        "data__mix__back__source": "word",
        "data__mix__back__target": "back",
        "data__mix__back__prefix": "b: ",
        "data__mix__upper__train": str(files / "upper.csv"),
        "data__mix__upper__source": "plain",
        "data__mix__upper__target": "big",
        "data__mix__upper__prefix": "u: ",
    }
    return lambda folder="run", /, **overrides: make(folder, **two | overrides)


HELD = {"data__validation_split": "0.2", "train__evaluate_every": "2"}


def figures_of(chosen: Config) -> list[dict[str, Any]]:
    """The log but for the speed, which no two runs share."""
    lines = (chosen.run_dir / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


def tensors(chosen: Config, step: int) -> dict[str, torch.Tensor]:
    found = store.load(chosen.run_dir / "checkpoints" / f"step-{step:06d}")
    return {f"{part}.{name}": t for part in ("model", "optim") for name, t in getattr(found, part).items()}


def test_two_tasks_are_learned_and_told_apart(mix: Make) -> None:
    lines: list[str] = []
    metrics = {
        "train__metrics": ["exact_match"],
        "data__mix__upper__metrics": ["cer", "wer"],
        "train__best": "upper_cer",
    }
    chosen = mix(train__steps="6", data__mix__back__rate="1", data__mix__upper__rate="3", **HELD, **metrics)
    told = train(chosen, lines.append)
    held = [name for name in told if name.startswith("validation_")]
    assert held == [
        *("validation_loss", "validation_back_loss", "validation_back_exact_match"),
        *("validation_upper_loss", "validation_upper_cer", "validation_upper_wer"),
    ]
    text = "\n".join(lines)
    # 16 and 5 examples learned from, 21 places an epoch, 3 steps: 5 and 16 places of them.
    assert "21 examples, 5 held out" in text
    assert "16 examples, 4 held out, 23.8% of the batches, 0.62 epochs" in text
    assert "5 examples, 1 held out, 76.2% of the batches, 6.40 epochs" in text
    predictions = chosen.run_dir / "predictions"
    names = [f"step-{n:06d}-{task}.jsonl" for n in (2, 4, 6) for task in ("back", "upper")]
    assert sorted(file.name for file in predictions.iterdir()) == names
    rows = [json.loads(line) for line in (predictions / names[1]).read_text(encoding="utf-8").splitlines()]
    assert [(row["source"][:3], row["source"][3:].upper()) for row in rows] == [("u: ", rows[0]["reference"])]
    rows = [json.loads(line) for line in (predictions / names[0]).read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 4
    assert all(row["source"] == f"b: {row['reference'][::-1]}" for row in rows)
    values = {line["step"]: line["validation_upper_cer"] for line in figures_of(chosen) if "validation_loss" in line}
    state = store.load(chosen.run_dir / "checkpoints" / "step-000006").state
    assert state["best"]["value"] == min(values.values())  # an error rate, of whichever task, falls


def test_the_loss_of_all_counts_every_label_alike(mix: Make) -> None:
    built = run.build(mix(**HELD), quiet)
    told = evaluate.task_losses(built.model, built.validation)
    assert built.splits.validation is not None
    parts = built.config, built.model, built.device, built.splits.validation
    together = run._loader(*parts, 1, built.ranks, shuffle=False)
    assert told[""]["loss"] == pytest.approx(evaluate.loss(built.model, together)["loss"], rel=1e-6)
    alone = {task: evaluate.loss(built.model, loader)["loss"] for task, loader in built.validation.items()}
    assert {task: told[task]["loss"] for task in alone} == alone
    assert alone["back"] != alone["upper"]
    assert told[""]["loss"] != pytest.approx(sum(alone.values()) / 2, rel=1e-6)


def test_a_mixture_stopped_and_resumed_is_the_uninterrupted_run(mix: Make, files: Path) -> None:
    settings: dict[str, Any] = {"train__steps": "9", "data__mixing": "equal", "train__micro_rows": "1", **HELD}
    settings |= {
        "data__mix__one__train": str(files / "one.tsv"),
        "data__mix__one__validation": str(files / "pairs.tsv"),
    }
    whole, parts = mix("whole", **settings), mix("parts", **settings)
    train(whole, quiet)
    for stop in ("2", "6"):
        train(mix("parts", train__stop_at=stop, **settings), quiet)
    train(parts, quiet)
    one, two = tensors(whole, 9), tensors(parts, 9)
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert figures_of(whole) == figures_of(parts)


def test_what_changes_what_is_learned_is_refused_with_its_name(mix: Make, files: Path) -> None:
    rates = {"data__mix__back__rate": "1", "data__mix__upper__rate": "3"}
    train(mix(train__stop_at="2", **rates), quiet)

    def refused(**changed: str) -> str:
        with pytest.raises(InputError) as caught:
            train(mix(**rates | changed), quiet)
        return str(caught.value).partition("undo: ")[2]

    assert refused(data__mix__upper__rate="2") == "data.mix.upper.rate: 3.0 before, 2.0 now"
    assert refused(data__mix__upper__prefix="v: ") == "data.mix.upper.prefix: 'u: ' before, 'v: ' now"
    added = refused(data__mix__one__train=str(files / "one.tsv"), data__mix__one__rate="1")
    assert added == "data.mix.one.rate: nothing before, 1.0 now"
    (files / "other.jsonl").write_text('{"word": "a", "back": "a"}\n')
    with pytest.raises(InputError, match="belongs to other training data"):
        train(mix(data__mix__back__train=str(files / "other.jsonl"), **rates), quiet)
    (files / "upper.csv").rename(files / "moved.csv")
    train(mix(data__mix__upper__train=str(files / "moved.csv"), **rates), quiet)


def test_a_task_that_cannot_be_read_is_named(mix: Make, files: Path) -> None:
    with pytest.raises(InputError, match=r"^data\.mix\.upper: data\.train: "):
        run.build(mix(data__mix__upper__train="nowhere.csv"), quiet)
    with pytest.raises(InputError, match=r"^data\.mix\.back: .*data\.source: no column 'wrd' \(did you mean word\?\)"):
        run.build(mix(data__mix__back__source="wrd"), quiet)
    (files / "back.jsonl").write_text('{"word": "a", "back": "a"}\nnonsense\n')
    notes: list[str] = []
    run.build(mix(data__mix__back__on_bad_line="skip"), notes.append)
    assert notes[0].startswith("note: back: data.train: 1 bad lines skipped")


def test_metrics_are_for_tasks_with_targets(mix: Make, files: Path) -> None:
    plain = {"data__mix__spans__train": str(files / "plain.txt"), "data__mix__spans__objective": "span_corruption"}
    settings = {"train__metrics": ["cer"], "train__steps": "2", **HELD, **plain}
    told = train(mix(data__mix__spans__validation_split="0.4", **settings), quiet)
    assert {"validation_spans_loss", "validation_back_cer", "validation_upper_cer"} <= told.keys()
    assert "validation_spans_cer" not in told
    with pytest.raises(InputError, match=r"data\.mix\.spans\.metrics: compares generated text with targets"):
        run.build(
            mix("b", data__mix__spans__metrics=["wer"], data__mix__spans__validation_split="0.4", **settings), quiet
        )
    only = {"train__evaluate_every": "2", "data__mix__upper__validation_split": "0.2"}
    assert list(run.build(mix("c", **only), quiet).validation) == ["upper"]
    with pytest.raises(InputError, match="train.evaluate_every: needs examples to evaluate on"):
        run.build(mix("d", train__evaluate_every="2"), quiet)


def test_objectives_may_differ(mix: Make, files: Path) -> None:
    spans = {"data__mix__spans__train": str(files / "plain.txt"), "data__mix__spans__objective": "span_corruption"}
    built = run.build(mix(**spans), quiet)
    assert isinstance(built.splits.train, Mixture)
    kinds = {name: type(task) for name, task in built.splits.train.tasks.items()}
    assert kinds == {"back": Seq2Seq, "spans": SpanCorruption, "upper": Seq2Seq}
    assert math.isfinite(train(mix(**spans, train__steps="3"), quiet)["loss"])


def test_a_soft_prompt_stands_before_every_task(mix: Make) -> None:
    chosen = mix("base", train__steps="1")
    train(chosen, quiet)
    prompt = {"model__config": "", "model__path": str(chosen.run_dir / "model"), "model__dropout": "none"}
    built = run.build(mix("b", tune__method="prompt", tune__tokens="3", data__mixing="equal", **prompt), quiet)
    assert isinstance(built.loader.examples, Mixture)
    assert all(isinstance(task, Prompted) for task in built.loader.examples.tasks.values())
    assert isinstance(built.splits.train, Mixture)
    assert built.loader.examples.quotas == built.splits.train.quotas == [13, 13]


def test_masked_models_mix_what_is_alike(tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "sentence", "text", "of", "two", "words"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = tokens.load(str(tmp_path))
    for name in "ab":
        text = "".join(f"{name} sentence {i} of some words\n" for i in range(6)) + "\nanother text\nof two\n"
        (tmp_path / f"{name}.txt").write_text(text)
    own: dict[str, dict[str, Any]] = {name: {"train": (str(tmp_path / f"{name}.txt"),)} for name in "ab"}
    own["a"]["max_predictions"] = 1
    data = Data(mix=own, max_source_length=16)
    splits = read_splits(data, tokenizer, seed=1, kind="masked")
    assert isinstance(splits.train, Mixture)
    assert all(isinstance(task, MaskedLM) for task in splits.train.tasks.values())
    assert [getattr(task, "predictions", 0) for task in splits.train.tasks.values()] == [1, splits.train.predictions]
    assert splits.train.predictions > 1
    batches = make_loader(splits.train, 4).step(0)
    assert all(batch.predicted is not None for batch in batches)
    own["a"]["objective"] = "masked_lm_nsp"
    message = "data.mix: a masked model's tasks must be alike, found masked_lm and masked_lm_nsp"
    with pytest.raises(InputError, match=message):
        read_splits(data, tokenizer, seed=1, kind="masked")


# The model that comes out


def test_a_model_of_several_tasks_prepares_sources_for_the_one_that_is_asked(
    mix: Make, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = {"data__mix__upper__max_target_length": "40", "data__mix__upper__source_transforms": ["lower", "nfc"]}
    chosen = mix(train__steps="1", **lengths)
    train(chosen, quiet)
    folder = str(chosen.run_dir / "model")
    settings = read_settings(chosen.run_dir / "model")
    assert (settings.prefix, settings.max_source_length, settings.max_target_length) == ("", 24, 40)
    assert {name: (own.prefix, own.max_target_length) for name, own in settings.tasks.items()} == {
        "back": ("b: ", 24),
        "upper": ("u: ", 40),
    }
    assert settings.tasks["upper"].source_transforms == ("lower", "nfc")
    loaded = t2t.load(folder, device="cpu")
    (files / "in.txt").write_text("Casa\n")
    outputs = {}
    for task in ("back", "upper", ""):
        flags = ["--task", task] if task else []
        assert cli.main(["generate", folder, "--input", str(files / "in.txt"), "--run.device", "cpu", *flags]) == 0
        said = capsys.readouterr()
        outputs[task] = json.loads(said.out)["output"]
        assert ("no task given, so sources are read as they are; there are: back, upper" in said.err) == (not task)
    assert outputs["back"] == loaded.generate(["b: Casa"])[0] == loaded.task("back").generate(["Casa"])[0]
    assert outputs["upper"] == loaded.generate(["u: casa"], max_length=40)[0]
    assert outputs[""] == loaded.generate(["Casa"])[0]
    columns = ["--data.source", "plain", "--data.target", "big", "--run.device", "cpu", "--json"]
    figures = []
    for flags in (["--task", "upper"], ["--data.prefix", "u: "], []):
        assert cli.main(["evaluate", folder, str(files / "upper.csv"), *columns, "--metrics", "cer", *flags]) == 0
        figures.append(json.loads(capsys.readouterr().out)["loss"])
    assert figures[0] == figures[1] != figures[2]
    assert cli.main(["generate", folder, "--input", str(files / "in.txt"), "--task", "bakc"]) == 2
    assert "task: no task 'bakc' (did you mean back?); the model has: back, upper" in capsys.readouterr().err


def test_settings_of_tasks_are_checked_as_all_others(tmp_path: Path) -> None:
    own = Settings(prefix="x: ", source_transforms=("lower", "my.module:function"))
    save_settings(tmp_path, Settings(tasks={"a": own}))
    assert read_settings(tmp_path).tasks == {"a": dataclasses.replace(own, source_transforms=("lower",))}
    for raw, message in (
        ({"tasks": 3}, "tasks: expected an object with settings by name, got 3"),
        ({"tasks": {"a": {"prefx": ""}}}, "tasks.a.prefx: unknown key (did you mean prefix?)"),
        ({"tasks": {"a": {"max_source_length": 1}}}, "tasks.a.max_source_length: must be 2 or more"),
        ({"tasks": {"a": {"source_transforms": ["os:getcwd"]}}}, "tasks.a.source_transforms: 'os:getcwd': a model"),
    ):
        (tmp_path / "t2t.json").write_text(json.dumps(raw))
        with pytest.raises(InputError) as caught:
            read_settings(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / 't2t.json'}: {message}")


def test_a_model_of_one_task_has_no_others(make: Make) -> None:
    chosen = make(train__steps="1")
    train(chosen, quiet)
    with pytest.raises(InputError, match="task: no task 'a'; the model was trained on one without a name"):
        t2t.load(chosen.run_dir / "model", device="cpu").task("a")
    assert read_settings(chosen.run_dir / "model").notes == []


def test_the_commands_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("T2T_STORE", str(tmp_path / "stores"))
    (recipe,) = blocks("data.md", "Mixtures", "toml")
    (tmp_path / "mix.toml").write_text(recipe)
    (tmp_path / "restore.txt").write_text("".join(f"Casa {i} și țara\n" for i in range(20)), encoding="utf-8")
    news = [json.dumps({"article": f"It rained for {i} days.", "headline": f"Rain, {i}"}) for i in range(5)]
    (tmp_path / "news.jsonl").write_text("\n".join(news) + "\n")
    for line in commands("data.md", "Mixtures"):
        typed, _, command = line.rpartition("| ")
        words = shlex.split(command)[1:]
        if words[0] == "train":
            words += ["--train.steps", "1", "--train.batch", "4", "--generate.max_length", "4"]
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed.removeprefix("echo ").encode())))
        assert cli.main([*words, "--run.device", "cpu", "--run.threads", "1"]) == 0, capsys.readouterr().err
    logged = json.loads((tmp_path / "runs" / "rates" / "log.jsonl").read_text())
    assert {"validation_title_chrf", "validation_restore_word_accuracy"} <= logged.keys()
