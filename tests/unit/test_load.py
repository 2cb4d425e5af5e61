"""Hugging Face folders: what they hold, how much memory they take, and what is said of broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from t2t.errors import InputError
from t2t.models import load
from t2t.models.t5 import T5, T5Config

Raw = dict[str, Any]
Q = "encoder.block.0.layer.0.SelfAttention.q.weight"


@pytest.fixture
def folder(tiny: Raw, tmp_path: Path) -> Path:
    """A sound folder with one file of weights."""
    load.save(load.create(tiny, seed=0).state_dict(), tiny, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tiny: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound folder with several files and an index."""
    monkeypatch.setattr(load, "SHARD_BYTES", 8000)
    load.save(load.create(tiny, seed=0).state_dict(), tiny, tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        load.load(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_round_trip_keeps_every_tensor_and_the_config(raw: Raw, tmp_path: Path) -> None:
    model = load.create(raw | {"extra": [1, "two"]}, seed=4)
    load.save(model.state_dict(), raw | {"extra": [1, "two"]}, tmp_path)
    again, config = load.load(tmp_path)
    assert again.config == model.config
    assert config["extra"] == [1, "two"]
    assert config["architectures"][0].endswith("ForConditionalGeneration")
    assert config["dtype"] == "float32"
    theirs = model.state_dict()
    assert again.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())
    assert all(p.requires_grad and not p.is_meta for p in again.parameters())


def test_dtypes_of_files_and_of_the_model(tiny: Raw, tmp_path: Path) -> None:
    weights = load.create(tiny, seed=0).state_dict()
    load.save(weights, tiny, tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    model, config = load.load(tmp_path)
    assert config["dtype"] == "bfloat16"
    assert torch.equal(model.shared.weight, weights["shared.weight"].bfloat16().float())
    half = load.load(tmp_path, dtype=torch.bfloat16)[0]
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_dropout_overrides_the_config(folder: Path) -> None:
    assert load.load(folder)[0].config.dropout == 0.1
    assert load.load(folder, dropout=0.0)[0].config.dropout == 0.0


def test_shards_hold_everything_once(sharded: Path) -> None:
    index = json.loads((sharded / load.INDEX).read_text())
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 2
    held = {name: file.name for file in files for name in load_file(file)}
    assert held == index["weight_map"]
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)
    # A file is over the limit only where one tensor is.
    assert all(len(load_file(file)) == 1 or sum(t.nbytes for t in load_file(file).values()) <= 8000 for file in files)


@pytest.mark.parametrize("limits", [(8000, 10**9), (10**9, 8000), (8000, 12000)])
def test_saving_again_leaves_nothing_of_the_old_weights(
    tiny: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for seed, limit in enumerate(limits):
        monkeypatch.setattr(load, "SHARD_BYTES", limit)
        load.save(load.create(tiny, seed=seed).state_dict(), tiny, tmp_path)
    expected = load.create(tiny, seed=1).shared.weight
    assert torch.equal(load.load(tmp_path)[0].shared.weight, expected)
    assert len({name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}) == sum(
        len(load_file(file)) for file in tmp_path.glob("*.safetensors")
    )
    assert (tmp_path / "model.safetensors").exists() != (tmp_path / load.INDEX).exists()
    assert (tmp_path / "tokenizer.json").exists()


def test_first_checkpoints_unused_table_is_passed_over(folder: Path) -> None:
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    change(folder / "model.safetensors", lambda weights: weights.update({name: torch.ones(8, 3)}))
    load.load(folder)


PEAK = """
import re, sys
from pathlib import Path
from t2t.models import load

def status(key):
    return int(re.search(rf"{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

load.load(Path(sys.argv[1]))  # what torch imports at first use is not the weights'
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = status("VmRSS")
model, _ = load.load(Path(sys.argv[2]))
print((status("VmHWM") - before) / sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_loading_takes_little_more_than_one_copy(folder: Path, tmp_path: Path) -> None:
    # 200 MB; the config claims a tied head and the weights have two, which loading must find out.
    wide: Raw = {"model_type": "t5", "vocab_size": 9000, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8}
    with torch.device("meta"):
        shapes = T5(T5Config.from_huggingface(wide | {"tie_word_embeddings": False})).state_dict()
    weights = {name: torch.zeros(tensor.shape) for name, tensor in shapes.items()}
    weights["lm_head.weight"][-1, -1] = 1
    load.save(weights, wide, tmp_path / "wide")
    command = [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "wide")]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert 0.9 < float(child.stdout) < 1.4


def test_missing_config(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: no config.json there"


@pytest.mark.parametrize("text", ["{", "", '{"a": NULL}', "\xff"])
def test_config_that_is_no_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert f"{folder / 'config.json'}: not valid JSON" in refusal(folder)


def test_config_that_is_no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    assert refusal(folder) == f"{folder / 'config.json'}: not a JSON object"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("t55", "config.json: model_type: transformers knows no 't55' (did you mean t5?)"),
        ("vit", "config.json: model_type: 'vit' is no seq2seq, causal or masked language model"),
        (None, "config.json: model_type: is missing"),
    ],
)
def test_model_types_that_nobody_serves(folder: Path, tiny: Raw, kind: str | None, message: str) -> None:
    (folder / "config.json").write_text(json.dumps(tiny | {"model_type": kind}))
    assert refusal(folder) == message


def test_unknown_activation(folder: Path, tiny: Raw) -> None:
    (folder / "config.json").write_text(json.dumps(tiny | {"feed_forward_proj": "gated-sine"}))
    assert "feed_forward_proj: 'gated-sine'" in refusal(folder)


def test_missing_tensors(folder: Path) -> None:
    change(folder / "model.safetensors", lambda weights: weights.pop(Q))
    assert refusal(folder) == f"{folder}: the weights lack {Q}"
    change(folder / "model.safetensors", lambda weights: [weights.pop(name) for name in list(weights)[:5]])
    assert refusal(folder).endswith(" and 3 more")


def test_missing_embedding(folder: Path) -> None:
    change(folder / "model.safetensors", lambda weights: weights.pop("shared.weight"))
    assert refusal(folder) == f"{folder}: the weights lack shared.weight"


def test_unexpected_tensor(folder: Path) -> None:
    change(folder / "model.safetensors", lambda weights: weights.update({"adapter.weight": torch.ones(2)}))
    assert "adapter.weight is no tensor of a t5 model" in refusal(folder)


@pytest.mark.parametrize("name", [Q, "shared.weight"])
def test_wrong_shape(folder: Path, name: str) -> None:
    change(folder / "model.safetensors", lambda weights: weights.update({name: torch.ones(5, 16)}))
    message = refusal(folder)
    assert f"{name} has shape (5, 16), the config asks for (" in message


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file}: damaged safetensors file" in refusal(folder)


def test_only_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pickled weights (.bin)" in refusal(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"{folder}: no safetensors weights there"


def test_index_of_a_missing_file(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    assert refusal(sharded) == f"{sharded}: the index names {file.name}, which is not there"


@pytest.mark.parametrize("name", ["../x.safetensors", "sub/x.safetensors", "/x.safetensors", 3, None])
def test_index_that_leads_outside_the_folder(sharded: Path, name: object) -> None:
    index = json.loads((sharded / load.INDEX).read_text())
    index["weight_map"][Q] = name
    (sharded / load.INDEX).write_text(json.dumps(index))
    # The file is there and sound: its place alone is the reason.
    (sharded.parent / "x.safetensors").write_bytes(min(sharded.glob("*.safetensors")).read_bytes())
    assert f"{sharded / load.INDEX}: {name!r} is not a file name of this folder" in refusal(sharded)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
    ],
)
def test_broken_index(sharded: Path, text: str, said: str) -> None:
    (sharded / load.INDEX).write_text(text)
    assert f"{sharded / load.INDEX}: {said}" in refusal(sharded)


def test_one_file_goes_before_an_index(folder: Path) -> None:
    (folder / load.INDEX).write_text('{"weight_map": {"shared.weight": "old.safetensors"}}')
    assert load.weight_files(folder) == [folder / "model.safetensors"]


@pytest.mark.parametrize("path", ["asset:no-such", "./no-such", "~/no-such", "/no/such", "no/such/folder"])
def test_no_such_model(path: str) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load.find(path)


def test_hub_out_of_reach_is_said_in_one_line() -> None:
    with pytest.raises(InputError, match="no-such-owner/no-such-model is no folder here") as error:
        load.find("no-such-owner/no-such-model")
    assert "\n" not in str(error.value)


def test_folder_is_found(folder: Path) -> None:
    assert load.find(str(folder)) == folder


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "eos_token_id": 1},
        {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "eos_token_id": 1,
         "tie_word_embeddings": True},
        {"model_type": "bert", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2},
    ],
    ids=["llama", "tied llama", "bert"],
)  # fmt: skip
def test_rows_for_new_tokens_are_the_mean_of_the_old(raw: dict[str, Any], tmp_path: Path) -> None:
    raw = {**raw, "num_hidden_layers": 1, "vocab_size": 16}
    model = load.create(raw, seed=0)
    before = model.head.detach().clone()
    load.grow(model, raw, vocab_size=24, fresh=range(14, 18))  # two of the 16 rows were never a token's
    assert model.config.vocab_size == raw["vocab_size"] == 24
    assert torch.equal(model.head[:14], before[:14])
    torch.testing.assert_close(model.head[14:].detach(), before[:14].mean(0).expand(10, -1))
    load.save(model.state_dict(), raw, tmp_path)
    again, _ = load.load(tmp_path)
    assert torch.equal(again.head, model.head)
