"""Data parallelism over gloo: any number of ranks gives what one gives, sees each example once, and ends as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from t2t.checkpoint import store
from t2t.config import Generate
from t2t.data.tasks import Example
from t2t.parallel import Ranks
from t2t.train import evaluate

GPT = {"model_type": "gpt2", "vocab_size": 384, "n_positions": 64, "n_embd": 12, "n_layer": 2, "n_head": 3}
BERT = {
    "model_type": "bert", "vocab_size": 57, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 20, "max_position_embeddings": 64,
}  # fmt: skip
SIZES = (1, 2, 3)


@dataclass
class Ended:
    """How the ranks of a run ended, and what each printed and trained on."""

    folder: Path
    codes: list[int]
    out: Path

    def output(self, rank: int) -> str:
        return (self.out / str(rank)).read_text()

    def ids(self) -> dict[int, list[int]]:
        """The examples of every step, over all ranks."""
        found: dict[int, list[int]] = {}
        for file in self.out.glob("ids-*"):
            for step, taken in map(json.loads, file.read_text().splitlines()):
                found.setdefault(step, []).extend(taken)
        return found

    def log(self) -> list[dict[str, Any]]:
        return [*map(json.loads, (self.folder / "log.jsonl").read_text().splitlines())]

    def saved(self) -> store.Checkpoint:
        root = self.folder / "checkpoints"
        return store.load(root / f"step-{store.steps(root)[-1]:06d}")


class World:
    """Asks the forking process for runs on files that lie in ``root``."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0
        command = [sys.executable, str(Path(__file__).with_name("world.py"))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.child = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, **pipes)
        for name, raw in (("t5", tiny.RAW), ("gpt", GPT), ("bert", BERT)):
            (root / f"{name}.json").write_text(json.dumps(raw))
        tiny.write_pairs(root / "pairs.tsv", 20)
        tiny.write_pairs(root / "held.tsv", 7, seed=1)
        words = ["one", "two", "three", "four", "five", "six", "seven"]
        texts = [[" ".join(words[(d + s + w) % 7] for w in range(3)) for s in range(5)] for d in range(9)]
        (root / "text.txt").write_text("\n\n".join("\n".join(lines) for lines in texts) + "\n")
        letters = "abcdefghijklmnopqrstuvwxyz"
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
        (root / "letters").mkdir()
        (root / "letters" / "vocab.txt").write_text("\n".join(pieces) + "\n")
        (root / "letters" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))

    def arguments(self, name: str, **overrides: str) -> list[str]:
        """The command line of a run in the folder ``name``."""
        kind = {"model__config": str(self.root / "t5.json"), "model__dropout": "0"}
        flags = tiny.settings(self.root, name, **kind | overrides)
        return ["train", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]

    def train(self, name: str, size: int, asked: dict[str, Any] | None = None, **overrides: str) -> Ended:
        """Train by ``size`` ranks; ``asked`` is for `world.py`."""
        self.count += 1
        out = self.root / f"out-{self.count}"
        out.mkdir()
        line = {"size": size, "arguments": self.arguments(name, **overrides), "out": str(out), **(asked or {})}
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(json.dumps(line) + "\n")
        self.child.stdin.flush()
        return Ended(self.root / name, json.loads(self.child.stdout.readline()), out)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.child.kill()
    made.child.communicate()


def assert_done(ended: Ended) -> None:
    assert set(ended.codes) == {0}, [ended.output(rank) for rank in range(len(ended.codes))]


# As one rank


def kinds(root: Path) -> dict[str, dict[str, str]]:
    """Runs of every kind: steps of 8, 8 and 4 examples, of 5, and of 2, fewer than there are ranks."""
    bert = {"model__config": str(root / "bert.json"), "model__tokenizer": str(root / "letters")}
    bert |= {"data__train": str(root / "text.txt"), "data__objective": "masked_lm_nsp", "train__batch": "2"}
    held = {"data__validation": str(root / "held.tsv"), "train__metrics": "cer", "data__max_target_length": "8"}
    return {
        "t5": {"train__micro_rows": "1", **held},
        "gpt": {"model__config": str(root / "gpt.json"), "train__batch": "5"},
        "bert": {**bert, "data__validation_split": "0.3", "data__max_source_length": "40"},
        "frozen": {"model__freeze": "encoder", "optim__name": "adafactor", "train__label_smoothing": "0.1"},
    }


@pytest.mark.parametrize("kind", ["t5", "gpt", "bert", "frozen"])
def test_ranks_train_as_one_does(world: World, kind: str) -> None:
    # Gradients that are zero but for rounding, as of the biases of keys, must stay small: hence the eps.
    settings = {"train__steps": "5", "optim__clip": "0.05", "optim__eps": "1e-4", **kinds(world.root)[kind]}
    one, *others = (world.train(f"{kind}-{size}", size, **settings) for size in SIZES)
    assert_done(one)
    alone, expected = one.log(), one.saved()
    assert max(line["grad_norm"] for line in alone) > 0.05  # clipping bites
    for ended in others:
        assert_done(ended)
        assert {step: sorted(ids) for step, ids in ended.ids().items()} == {
            step: sorted(ids) for step, ids in one.ids().items()
        }
        for line, wanted in zip(ended.log(), alone, strict=True):
            assert line.keys() == wanted.keys()
            assert (line["step"], line["tokens"], line["lr"]) == (wanted["step"], wanted["tokens"], wanted["lr"])
            for name in line.keys() - {"tokens_per_s"}:
                assert line[name] == pytest.approx(wanted[name], rel=1e-5), (name, line["step"])
        found = ended.saved()
        for part in ("model", "optim"):
            tensors, others_ = getattr(expected, part), getattr(found, part)
            assert tensors.keys() == others_.keys()
            for name, tensor in tensors.items():
                # Of what is zero but for rounding nothing can be asked.
                assert (others_[name] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-3), name
        names = sorted(path.name for path in ended.folder.rglob("*"))
        assert names == sorted(path.name for path in one.folder.rglob("*"))
        assert all(not ended.output(rank) for rank in range(1, len(ended.codes)))


def test_every_example_is_seen_once_an_epoch_and_dropout_differs_across_ranks(world: World) -> None:
    for size in (2, 3):
        ended = world.train(f"epochs-{size}", size, train__steps="6", train__batch="7", model__dropout="0.1")
        assert_done(ended)
        for epoch in (0, 1):
            seen = Counter(i for step in range(3) for i in ended.ids()[3 * epoch + step])
            assert seen == Counter(range(20))
    pairs = world.root / "twins.tsv"
    pairs.write_text("abcd\tdcba\n" * 2)
    settings = {"data__train": str(pairs), "train__steps": "1", "model__dropout": "0.5", "train__micro_rows": "1"}
    both = [world.train(f"twins-{size}", size, train__batch="2", **settings).log()[0]["loss"] for size in (1, 2)]
    single = world.train("twin", 1, train__batch="1", **settings).log()[0]["loss"]
    # Two equal examples drop other units, on one rank as on two; were it the same, the mean would be that of either.
    assert both[0] == pytest.approx(both[1], rel=1e-5) != pytest.approx(single, rel=1e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_texts_that_ranks_generate_stand_beside_their_own_references(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    examples = [Example(f"{i}", f"{i}!", f"x:{i}") for i in range(5)]
    shares = [[f"{i}!" for i in range(first, 5, 2)] for first in (0, 1)]

    class Two(Ranks):
        def any(self, wish: object) -> bool:
            return bool(wish)

        def gather(self, value: Any) -> list[Any]:
            assert value == shares[self.rank]
            return shares

    def texts(model: Any, tokenizer: Any, sources: Any, *rest: Any, **settings: Any) -> Iterator[str]:
        return (f"{source}!" for source in sources)

    monkeypatch.setattr(evaluate.batching, "texts", texts)
    given: Any = (["exact_match"], None, None, examples, Generate(), 8, 8)
    file = tmp_path / "predictions.jsonl"
    assert evaluate.score(*given, file, ranks=Two(rank, 2)) == {"exact_match": 1.0}
    assert file.exists() == (rank == 0)


# Ending and going on


def test_killed_and_resumed_by_any_number_of_ranks(world: World) -> None:
    whole = world.train("whole", 2)
    assert_done(whole)
    for size in (2, 1, 3):
        name = f"killed-{size}"
        killed = world.train(name, 2, {"rank": 1, "step": 6, "what": "SIGKILL"})
        assert killed.codes == [1, -signal.SIGKILL]
        assert "error: rank 0: another rank is gone" in killed.output(0)
        assert "Traceback" not in killed.output(0)
        resumed = world.train(name, size)
        assert_done(resumed)
        assert f"resumed from {resumed.folder}/checkpoints/step-000004" in resumed.output(0)
        before = {step: ids for step, ids in killed.ids().items() if step < 4}
        seen = before | resumed.ids()
        assert {step: sorted(ids) for step, ids in seen.items()} == {
            step: sorted(ids) for step, ids in whole.ids().items()
        }
        found, expected = resumed.saved(), whole.saved()
        for key, tensor in expected.model.items():
            torch.testing.assert_close(found.model[key], tensor, rtol=1e-4, atol=1e-5, msg=key)
            assert size != 2 or torch.equal(found.model[key], tensor)
        losses = [[line["loss"] for line in ended.log()] for ended in (resumed, whole)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("what", ["SIGTERM", "SIGINT"])
def test_a_signal_to_one_rank_saves_and_ends_all_after_the_same_step(world: World, what: str) -> None:
    settings = {"data__validation": str(world.root / "held.tsv"), "train__evaluate_every": "3"}
    stopped = world.train(f"stopped-{what}", 3, {"rank": 1, "step": 3, "what": what}, **settings)
    assert stopped.codes == [75, 75, 75], stopped.output(0)
    told = f"{what}: saved at step 3; the same command goes on from there"
    assert told in stopped.output(0)
    assert not stopped.output(1) and not stopped.output(2)
    assert stopped.saved().step == 3 and stopped.saved().state["owes"]
    assert [sorted(stopped.ids())] == [[0, 1, 2]]
    resumed = world.train(f"stopped-{what}", 3, **settings)
    assert_done(resumed)
    assert [line["step"] for line in resumed.log()] == [*range(1, 8)]
    assert "validation_loss" in resumed.log()[2]


def test_an_error_on_one_rank_ends_all_and_is_told_once(world: World) -> None:
    ended = world.train("error", 3, {"exits": True, "rank": 1, "step": 3, "what": "error"})
    assert ended.codes == [1, 1, 1]
    told = "".join(ended.output(rank) for rank in range(3))
    assert told.count("[rank1]: ZeroDivisionError: what a bug would raise") == told.count("Traceback") == 1


def test_bad_input_is_told_once(world: World) -> None:
    ended = world.train("bad", 2, {"exits": True}, data__train="nowhere.tsv")
    assert ended.codes == [2, 2]
    assert ended.output(0).startswith("error: rank 0: data.train: ") and not ended.output(1)
    assert not ended.folder.exists()
    ended = world.train("bad", 2, parallel__dp="3")
    assert ended.codes == [2, 2]
    assert "parallel.dp: 3 ranks are asked for, and the processes are 2" in ended.output(0)
    ended = world.train("bad", 2, {"rank": 1, "spoil": True})
    assert ended.codes == [2, 2]
    assert "error: rank 0: weights: rank 1 has another than rank 0" in ended.output(0)
    assert not ended.output(1)


def test_all_ranks_diverge_together_and_the_examples_of_all_are_kept(world: World) -> None:
    ended = world.train("diverged", 2, optim__lr="1e38", checkpoint__every="1")
    assert ended.codes == [3, 3]
    assert "error: step 2: the loss is not finite" in ended.output(0)
    assert not ended.output(1)
    file = ended.folder / "crash" / "step-000002" / "examples.jsonl"
    named = [json.loads(line)["example"] for line in file.read_text().splitlines()]
    assert named and sorted(named) == sorted(ended.ids()[1])
    assert store.steps(ended.folder / "checkpoints") == [1]


# From the command line


def launch(world: World, name: str, **overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "t2t", *world.arguments(name, **overrides), "--launch", "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_launch_trains_as_ranks_do(world: World) -> None:
    child = launch(world, "launched", parallel__dp="2")
    whole = world.train("not-launched", 2)
    output, _ = child.communicate()
    assert child.returncode == 0, output
    assert next(line for line in output.splitlines() if line.startswith("device")).endswith("2 ranks")
    found = store.load(world.root / "launched" / "checkpoints" / "step-000007")
    assert all(torch.equal(found.model[name], tensor) for name, tensor in whole.saved().model.items())


def test_launch_forwards_a_signal_and_gives_the_code_of_its_ranks(world: World) -> None:
    child = launch(world, "interrupted", train__steps="100000")
    assert child.stdout is not None
    told = []
    for line in child.stdout:
        told.append(line)
        if line.startswith("train  "):  # the first step is done
            child.send_signal(signal.SIGTERM)
            break
    told += child.stdout
    assert child.wait() == 75, told
    assert sum("SIGTERM: saved at step" in line for line in told) == 1
    assert store.steps(world.root / "interrupted" / "checkpoints")
