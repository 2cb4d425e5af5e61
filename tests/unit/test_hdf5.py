"""HDF5 shards: every row of every shard is trained, and nothing outside the files is read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from t2t import config
from t2t.cli import main
from t2t.data import hdf5
from t2t.data.hdf5 import FEW, PAIR, WIDE, Shards
from t2t.data.loader import Loader, pick_shape
from t2t.data.packing import IGNORE
from t2t.errors import InputError
from t2t.models import load as models
from t2t.train.run import train

Columns = dict[str, np.ndarray]
VOCABULARY, LENGTH, MOST = 57, 24, 4
TINY = {
    "model_type": "bert", "vocab_size": VOCABULARY, "max_position_embeddings": 32, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


def columns(count: int, seed: int) -> Columns:
    """A shard's content as the classic scripts make it."""
    rng = np.random.default_rng(seed)
    made = {key: np.zeros((count, LENGTH if key in WIDE else MOST), np.int32) for key in (*WIDE, *FEW)}
    for row in range(count):
        length, labels = int(rng.integers(8, LENGTH + 1)), int(rng.integers(1, MOST + 1))
        cut = length // 2
        made["input_ids"][row, :length] = [2, *rng.integers(5, VOCABULARY, length - 2), 3]
        made["input_mask"][row, :length] = 1
        made["segment_ids"][row, cut:length] = 1
        made["masked_lm_positions"][row, :labels] = np.sort(rng.choice(np.arange(1, length - 1), labels, False))
        made["masked_lm_ids"][row, :labels] = rng.integers(5, VOCABULARY, labels)
        made["input_ids"][row, made["masked_lm_positions"][row, :labels]] = 4
    return made | {PAIR: rng.integers(0, 2, count).astype(np.int8)}


def write(file: Path, content: Columns, **settings: Any) -> Path:
    with h5py.File(file, "w") as made:
        for key, values in content.items():
            made.create_dataset(key, data=values, **settings)
    return file


@pytest.fixture
def shards(tmp_path: Path) -> list[tuple[Path, Columns]]:
    found = [(tmp_path / f"part_training_{i}.hdf5", columns(count, i)) for i, count in enumerate((5, 1, 7))]
    for file, content in found:
        write(file, content, compression="gzip")
    return found


def test_every_row_of_every_shard_is_an_example(
    shards: list[tuple[Path, Columns]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5, "MOST_OPEN", 2)  # so that files are closed and opened again
    examples = Shards([file for file, _ in shards], VOCABULARY)
    assert (len(examples), examples.longest, examples.predictions) == (13, (0, LENGTH), MOST)
    expected = [(content, row, file) for file, content in shards for row in range(len(content[PAIR]))]
    for again in (examples, pickle.loads(pickle.dumps(examples))):  # as a reader process gets it
        for i, (content, row, file) in enumerate(expected):
            feature = again.feature(i, seed=i)
            length = int(content["input_mask"][row].sum())
            assert feature.inputs.tolist() == content["input_ids"][row, :length].tolist()
            assert feature.types is not None
            assert feature.types.tolist() == content["segment_ids"][row, :length].tolist()
            places = [int(p) for p in content["masked_lm_positions"][row] if p]
            assert np.flatnonzero(feature.labels != IGNORE).tolist() == places
            assert feature.labels[places].tolist() == content["masked_lm_ids"][row, : len(places)].tolist()
            assert (feature.pair, len(feature.source)) == (content[PAIR][row], 0)
            assert again.tell(i)["where"] == f"{file}, row {row}"
    alone = Shards([shards[0][0]], VOCABULARY, pairs=False)
    assert alone.feature(0, 0).pair == IGNORE


def test_an_epoch_takes_each_row_once(shards: list[tuple[Path, Columns]]) -> None:
    examples = Shards([file for file, _ in shards], VOCABULARY)
    cost = models.architecture(TINY)[1].row_cost
    loader = Loader(examples, 4, pick_shape(examples, config.Data(), 4, cost, seed=1), 2, seed=1, pad_id=0)
    batches = [batch for step in range(loader.steps_per_epoch) for batch in loader.step(step)]
    seen = [int(i) for batch in batches for i in batch.example_ids.flatten() if i >= 0]
    assert sorted(seen) == list(range(13))
    assert len({batch.target_ids.shape for batch in batches}) == 1


def test_the_fingerprint_tells_other_data(shards: list[tuple[Path, Columns]], tmp_path: Path) -> None:
    files = [file for file, _ in shards]
    whole = Shards(files, VOCABULARY)
    assert whole.fingerprint == Shards(files, VOCABULARY).fingerprint
    content = columns(5, 0)
    content[PAIR][2] ^= 1
    others = [
        Shards(files[:2], VOCABULARY), Shards(files[::-1], VOCABULARY), whole.first(5), whole.subset(np.arange(1, 6)),
        Shards(files, VOCABULARY, pairs=False), Shards([write(tmp_path / "o.hdf5", content), *files[1:]], VOCABULARY),
    ]  # fmt: skip
    assert len({examples.fingerprint for examples in (whole, *others)}) == 7
    assert [len(part) for part in others[2:4]] == [5, 5]
    assert others[3].feature(0, 0).inputs.tolist() == whole.feature(1, 0).inputs.tolist()


Change = Callable[[h5py.File], None]


def replaced(key: str, values: Any) -> Change:
    def change(file: h5py.File) -> None:
        del file[key]
        file[key] = values

    return change


def to_soft_link(file: h5py.File) -> None:
    file["elsewhere"] = h5py.ExternalLink("secret.hdf5", "/")
    del file["input_ids"]
    file["input_ids"] = h5py.SoftLink("/elsewhere/input_ids")


def to_external_storage(file: h5py.File) -> None:
    values = file["input_ids"][:]
    del file["input_ids"]
    file.create_dataset("input_ids", values.shape, values.dtype, external=[("raw.bin", 0, h5py.h5f.UNLIMITED)])


def to_virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=file["input_ids"].shape, dtype="i4")
    layout[:] = h5py.VirtualSource("secret.hdf5", "input_ids", shape=file["input_ids"].shape)
    del file["input_ids"]
    file.create_virtual_dataset("input_ids", layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("input_ids", h5py.ExternalLink("secret.hdf5", "/input_ids")), "input_ids: is a link to elsewhere"),
        (to_soft_link, "input_ids: is a link to elsewhere"),
        (to_external_storage, "input_ids: keeps its data in other files"),
        (to_virtual, "input_ids: keeps its data in other files"),
        (lambda file: file.pop(PAIR), "next_sentence_labels: no such key; found: input_ids, "),
        (lambda file: (file.pop("input_mask"), file.create_group("input_mask")), "input_mask: is a group"),
        (replaced("segment_ids", np.zeros((5, LENGTH))), "segment_ids: is float64 of 2 dimensions, expected whole num"),
        (replaced("masked_lm_ids", np.zeros(5, "i4")), "masked_lm_ids: is int32 of 1 dimensions"),
        (replaced("input_mask", np.ones((5, 9), "i4")), r"input_mask: has shape \[5, 9\], expected \[5, 24\]"),
        (replaced("masked_lm_ids", np.ones((5, 9), "i4")), r"masked_lm_ids: has shape \[5, 9\], expected \[5, 4\]"),
        (replaced(PAIR, np.zeros(4, "i4")), r"next_sentence_labels: has shape \[4\], expected \[5\]"),
    ],
)
def test_a_shard_that_cannot_be(tmp_path: Path, change: Change, message: str) -> None:
    write(tmp_path / "secret.hdf5", columns(5, 9))
    file = write(tmp_path / "bad.hdf5", columns(5, 0))
    with h5py.File(file, "a") as opened:
        change(opened)
    with pytest.raises(InputError, match=f"bad.hdf5: {message}"):
        Shards([file], VOCABULARY)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input_ids", VOCABULARY),
        ("input_mask", 0),
        ("segment_ids", 2),
        ("masked_lm_positions", LENGTH),
        ("masked_lm_ids", -1),
        (PAIR, 2),
    ],
)
def test_a_row_that_cannot_be(tmp_path: Path, key: str, value: int) -> None:
    content = columns(3, 0)
    content[key].reshape(3, -1)[1, 0] = value
    examples = Shards([write(tmp_path / "bad.hdf5", content)], VOCABULARY)
    examples.feature(0, 0)
    with pytest.raises(InputError, match=f"bad.hdf5: {key}: row 1: "):
        examples.feature(1, 0)


def test_what_is_no_hdf5_file(tmp_path: Path) -> None:
    (tmp_path / "bad.hdf5").write_text("words\n")
    with pytest.raises(InputError, match="bad.hdf5: not a whole HDF5 file"):
        Shards([tmp_path / "bad.hdf5"], VOCABULARY)
    with pytest.raises(InputError, match="empty.hdf5: input_ids: no rows"):
        Shards([write(tmp_path / "empty.hdf5", columns(0, 0))], VOCABULARY)


# Whole runs


@pytest.fixture
def arguments(tmp_path: Path, shards: list[tuple[Path, Columns]]) -> dict[str, str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return {
        "run.dir": str(tmp_path / "run"), "run.device": "cpu", "run.threads": "1", "train.batch": "4",
        "model.config": str(tmp_path / "config.json"), "model.tokenizer": str(tmp_path / "tokenizer"),
        "data.train": str(tmp_path / "part_*.hdf5"), "train.steps": "3", "train.log_every": "1",
    }  # fmt: skip


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize("readers", ["0", "2"])
def test_shards_train_a_masked_model(arguments: dict[str, str], readers: str) -> None:
    chosen = config.load(overrides=arguments | {"data.validation_split": "0.2", "data.readers": readers})
    figures = train(chosen, quiet)
    assert figures["validation_loss"] == pytest.approx(
        figures["validation_masked_loss"] + figures["validation_next_sentence_loss"]
    )
    alone = arguments | {"data.objective": "masked_lm", "run.dir": f"{chosen.run_dir}-alone", "data.max_samples": "8"}
    assert train(config.load(overrides=alone), quiet)["loss"] < figures["loss"]  # one loss of the two


def test_shards_evaluate_a_masked_model(arguments: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    chosen = config.load(overrides=arguments | {"data.validation": arguments["data.train"]})
    figures = train(chosen, quiet)
    command = ["evaluate", str(chosen.run_dir / "model"), arguments["data.train"], "--json", "--run.device", "cpu"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    for name, value in found.items():
        assert value == pytest.approx(figures[f"validation_{name}"], rel=1e-5), name


def test_shards_are_for_masked_models_alone(arguments: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("words\n")
    both = config.load(overrides=arguments | {"data.train": [arguments["data.train"], str(tmp_path / "more.txt")]})
    with pytest.raises(InputError, match="data.train: HDF5 shards and other files cannot be mixed"):
        train(both, quiet)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}))
    with pytest.raises(InputError, match="HDF5 shards hold masked tokens, not text"):
        train(config.load(overrides=arguments), quiet)
