"""From files to micro-batches: which examples a step holds, and that nothing but seed, data and step decides it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from t2t.config import Data
from t2t.data import objectives
from t2t.data.loader import Loader, pick_shape, step_examples
from t2t.data.objectives import CharacterNoise, Objective, Seq2Seq
from t2t.data.packing import Batch
from t2t.data.splits import read_examples, read_splits
from t2t.data.tasks import Example
from t2t.data.tokens import Bytes, Pairs, tokenize
from t2t.errors import InputError


def make_pairs(count: int, salt: str = "") -> Pairs:
    examples = [Example("s" * (1 + i * 7 % 13) + salt, "t" * (1 + i * 5 % 7), f"x:{i}") for i in range(count)]
    return tokenize(examples, Bytes(), 32, 16)


def make_loader(
    pairs: Pairs, batch: int, micro_rows: int = 2, seed: int = 1, noise: bool = False, **settings: object
) -> Loader:
    examples = CharacterNoise(pairs, start_id=0, longest=32) if noise else Seq2Seq(pairs, start_id=0)
    shape = pick_shape(examples, Data(max_source_length=32, max_target_length=16), batch, lambda s, t: s + t, seed)
    return Loader(examples, batch, shape, micro_rows, seed, pad_id=0, **settings)  # type: ignore[arg-type]


def examples_of(batches: list[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.example_ids.flatten() if i >= 0]


def same(one: list[Batch], two: list[Batch]) -> bool:
    fields = [field.name for field in dataclasses.fields(Batch)]
    return len(one) == len(two) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for a, b in zip(one, two, strict=True) for name in fields
    )


@pytest.mark.parametrize(("count", "batch"), [(64, 16), (50, 16), (5, 16), (1, 1), (1, 8), (17, 16), (100, 7)])
@pytest.mark.parametrize("micro_rows", [1, 3])
def test_a_step_holds_its_batch_and_an_epoch_every_example_once(count: int, batch: int, micro_rows: int) -> None:
    loader = make_loader(make_pairs(count), batch, micro_rows)
    orders = []
    for epoch in range(3):
        steps = [examples_of(loader.step(epoch * loader.steps_per_epoch + n)) for n in range(loader.steps_per_epoch)]
        full, left = divmod(count, batch)
        assert [len(step) for step in steps] == [batch] * full + [left] * (left > 0)
        assert Counter(i for step in steps for i in step) == Counter(range(count))
        orders.append([sorted(step) for step in steps])
    if full > 1:
        assert orders[0] != orders[1] != orders[2]


def test_a_step_is_a_pure_function_of_seed_data_and_step() -> None:
    pairs = make_pairs(40)
    loader, again = make_loader(pairs, 8), make_loader(make_pairs(40), 8)
    backwards = {n: again.step(n) for n in reversed(range(12))}
    assert all(same(loader.step(n), backwards[n]) for n in range(12))
    assert not same(make_loader(pairs, 8, seed=2).step(0), loader.step(0))
    other = make_loader(make_pairs(40, salt="!"), 8)
    assert other.taken(0).tolist() != loader.taken(0).tolist()


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("readers", [0, 2])
def test_background_steps_are_the_steps(noise: bool, readers: int) -> None:
    loader = make_loader(make_pairs(30), 8, noise=noise)
    found = list(loader.steps(3, 14, readers))
    assert len(found) == 11
    assert all(same(batches, loader.step(n)) for n, batches in enumerate(found, 3))


def test_steps_end_early_and_hold_nothing_when_there_are_none() -> None:
    loader = make_loader(make_pairs(30), 8)
    assert list(loader.steps(5, 5)) == []
    assert list(loader.steps(7, 5)) == []
    steps = loader.steps(0, 10**9)
    next(steps)
    steps.close()


def test_an_error_in_the_background_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader(make_pairs(30), 8)
    step = loader.step
    monkeypatch.setattr(loader, "step", lambda n: step(n) if n < 2 else 1 / 0)
    steps = loader.steps(0, 5)
    assert [same(next(steps), step(n)) for n in range(2)] == [True, True]
    with pytest.raises(ZeroDivisionError):
        next(steps)


def test_static_batches_have_one_shape_and_the_same_examples() -> None:
    pairs = make_pairs(50)
    static, flat = (make_loader(pairs, 16, micro_rows=3, static=static) for static in (True, False))
    shape = 3, static.shape.source_row
    for n in range(8):
        batches = static.step(n)
        assert {batch.source_ids.shape for batch in batches} == {shape}
        assert {batch.labels.shape for batch in batches} == {(3, static.shape.target_row)}
        assert sorted(examples_of(batches)) == sorted(examples_of(flat.step(n)))
        assert sum(batch.tokens for batch in batches) == sum(batch.tokens for batch in flat.step(n))
    assert any((static.step(n)[-1].example_ids == -1).all(1).any() for n in range(8))
    batches = [batch for n in range(8) for batch in flat.step(n)]
    assert len({batch.source_ids.shape for batch in batches}) > 1
    assert all(batch.source_segments.all() and batch.target_segments.all() for batch in batches)


def test_any_cut_of_a_step_holds_the_same_examples() -> None:
    pairs = make_pairs(50)
    cuts = [make_loader(pairs, 16, m, static=False, workers=w).step(2) for m, w in ((1, 1), (2, 1), (99, 1), (99, 2))]
    assert [len(cut) for cut in cuts[2:]] == [1, 2]
    assert len({tuple(sorted(examples_of(cut))) for cut in cuts}) == 1
    assert len({sum(batch.tokens for batch in cut) for cut in cuts}) == 1


def test_evaluation_takes_the_examples_in_their_order() -> None:
    loader = make_loader(make_pairs(20), 8, shuffle=False)
    assert [loader.taken(n).tolist() for n in range(3)] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]


def test_orders_of_epochs_and_seeds_differ() -> None:
    orders = {tuple(step_examples(30, 30, step, seed).tolist()) for step in range(4) for seed in range(4)}
    assert len(orders) == 16


def test_noise_differs_between_epochs() -> None:
    pairs = tokenize([Example("", "o casă mare", "x:1")], Bytes(), 32, 16)
    loader = make_loader(pairs, 1, noise=True)
    sources = {loader.step(epoch)[0].source_ids.tobytes() for epoch in range(20)}
    assert len(sources) > 10  # now and then nothing is spoilt


def test_noise_that_lengthens_a_source_is_cut_before_its_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(target: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.append(np.repeat(target[:-1], 2), target[-1:])

    monkeypatch.setattr(objectives, "character_noise", doubled)
    pairs = tokenize([Example("", "abcdefghijkl", "x:1")], Bytes(), 128, 128)
    feature = CharacterNoise(pairs, start_id=0, longest=16).feature(0, seed=1)
    assert Bytes().decode(feature.source.tolist()) == "aabbccddeeffggh"
    assert feature.source[-1] == 1


# Reading


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"source {i}\ttarget {i}\n" for i in range(20)))
    return str(path)


def texts(examples: Objective | None) -> list[str]:
    assert isinstance(examples, Seq2Seq)
    return [Bytes().decode(examples.pairs.source[i].tolist()) for i in range(len(examples))]


def test_a_split_holds_out_a_share_that_is_not_trained_on(file: str) -> None:
    data = Data(train=(file,), validation_split=0.25)
    splits = read_splits(data, Bytes(), seed=1)
    held, trained = texts(splits.validation), texts(splits.train)
    assert (len(held), len(trained)) == (5, 15)
    assert sorted([*held, *trained]) == sorted(f"source {i}" for i in range(20))
    assert [example.source for example in splits.validation_examples] == held
    assert texts(read_splits(data, Bytes(), seed=1).validation) == held
    assert texts(read_splits(data, Bytes(), seed=2).validation) != held
    assert len(read_splits(dataclasses.replace(data, validation_split=0.001), Bytes(), seed=1).validation) == 1


def test_a_split_must_leave_something_to_train_on(tmp_path: Path) -> None:
    file = tmp_path / "one.tsv"
    file.write_text("a\tb\n")
    with pytest.raises(InputError, match=r"data.validation_split: 1 examples leave none to train on"):
        read_splits(Data(train=(str(file),), validation_split=0.5), Bytes(), seed=1)


def test_limits_on_examples(file: str, tmp_path: Path) -> None:
    validation = tmp_path / "held.tsv"
    validation.write_text("a\tb\nc\td\ne\tf\n")
    limits = {"max_samples": 7, "max_validation_samples": 2}
    splits = read_splits(Data(train=(file,), validation=(str(validation),), **limits), Bytes(), seed=1)
    assert texts(splits.train) == [f"source {i}" for i in range(7)]
    assert texts(splits.validation) == ["a", "c"]


def test_what_was_cut_and_skipped_is_told(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"source": "abcdef", "target": "b"}\nnonsense\n{"source": "a", "target": "b"}\n')
    data = Data(train=(str(file),), on_bad_line="skip", max_source_length=4, max_target_length=4)
    notes = read_splits(data, Bytes(), seed=1).notes
    assert notes[0].startswith("data.train: 1 bad lines skipped, the first: ")
    assert notes[1:] == ("data.train: 1 sources (50.0%) cut at data.max_source_length = 4",)
    examples, _ = read_examples(data.train, "data.train", data, 1)
    assert [example.where for example in examples] == [f"{file}:1"]


def test_no_files_and_an_objective_without_bytes(file: str) -> None:
    with pytest.raises(InputError, match="data.train: no training files given"):
        read_splits(Data(), Bytes(), seed=1)

    class Other(Bytes):
        fingerprint = "other"

    with pytest.raises(InputError, match="data.objective: character_noise needs model.tokenizer"):
        read_splits(Data(train=(file,), objective="character_noise"), Other(), seed=1)


def test_given_row_lengths_are_kept() -> None:
    pairs = make_pairs(40)
    shape = pick_shape(Seq2Seq(pairs, 0), Data(source_row=77, target_row=33), 8, lambda s, t: s + t, seed=1)
    assert (shape.source_row, shape.target_row) == (77, 33)
    assert pick_shape(Seq2Seq(pairs, 0), Data(target_row=33), 8, lambda s, t: s + t, seed=1).target_row == 33


# Ranks


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_share_every_step_and_make_the_features_of_one(size: int, static: bool) -> None:
    pairs = make_pairs(17)
    alone = make_loader(pairs, batch=4, noise=True, static=static)
    ranks = [make_loader(pairs, batch=4, noise=True, static=static, rank=rank, size=size) for rank in range(size)]
    for step in range(2 * alone.steps_per_epoch):
        taken = alone.taken(step).tolist()
        shares = [loader.step(step) for loader in ranks]
        assert [sorted(examples_of(share)) for share in shares] == [sorted(taken[rank::size]) for rank in range(size)]
        assert all(loader.taken(step).tolist() == taken for loader in ranks)
        whole = {i: row for batch in alone.step(step) for i, row in rows_of(batch)}
        assert {i: row for share in shares for batch in share for i, row in rows_of(batch)} == whole
    assert size < 5 or any(not loader.step(0) for loader in ranks)


def rows_of(batch: Batch) -> list[tuple[int, tuple[list[int], list[int]]]]:
    """The examples of a batch, and what each reads and says."""
    found = []
    for r, named in enumerate(batch.example_ids):
        for segment, i in enumerate(named.tolist(), 1):
            if i >= 0:
                read, said = batch.source_segments[r] == segment, batch.target_segments[r] == segment
                found.append((i, (batch.source_ids[r][read].tolist(), batch.labels[r][said].tolist())))
    return found
