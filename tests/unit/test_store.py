import errno
import json
import os
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

from t2t import files
from t2t.checkpoint import store
from t2t.errors import InputError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def save(root: Path, step: int) -> Path:
    model = {"w": torch.full((2, 3), float(step)), "scale": torch.tensor(step, dtype=torch.bfloat16)}
    return store.save(root, step, model, {"w.mean": torch.ones(5)}, {"step": step, "best": None})


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def reports(root: Path) -> tuple[Path | None, list[str]]:
    lines: list[str] = []
    return store.newest(root, lines.append), lines


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5)], ids=str)
def test_round_trip_is_bitwise(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # Random bits, so that NaN payloads and negative zeros are among them.
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    back = store.load(store.save(tmp_path, 1, {"a": tensor}, {"b": tensor}, {}))
    for got in (back.model["a"], back.optim["b"]):
        assert (got.dtype, got.shape, bits(got)) == (dtype, tensor.shape, bits(tensor))


def test_state_and_step_come_back(tmp_path: Path) -> None:
    state = {"epoch": 1.1, "best": {"loss": 0.1 + 0.2, "step": 3}, "names": ["ă", None, True], "big": 2**70}
    checkpoint = store.load(store.save(tmp_path, 1234567, {}, {}, state))
    assert (checkpoint.step, checkpoint.state) == (1234567, state)
    assert store.steps(tmp_path) == [1234567]


def test_tensors_of_any_stride_and_sharing(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    model = {
        "whole": base,
        "same": base,
        "column": base[:, 1],
        "transposed": base.T,
        "expanded": torch.ones(1).expand(3, 4),
        "parameter": torch.nn.Parameter(base[1:3]),
    }
    back = store.load(store.save(tmp_path, 1, model, {}, {})).model
    assert back.keys() == model.keys()
    for name, tensor in model.items():
        assert torch.equal(back[name], tensor)
        assert back[name].is_contiguous()
    back["whole"].zero_()
    assert back["same"].any()


def test_shards_are_cut_by_size_and_open_elsewhere(tmp_path: Path) -> None:
    model = {f"layer.{i}": torch.full((10,), i, dtype=torch.int64) for i in range(5)}
    model |= {"huge": torch.arange(100), "odd": torch.ones(3, dtype=torch.bfloat16), "ă": torch.tensor(2.5)}
    folder = store.save(tmp_path, 1, model, {}, {}, shard_bytes=200)
    files = sorted(folder.glob("model-*.safetensors"))
    assert [file.name for file in files[:2]] == ["model-00001.safetensors", "model-00002.safetensors"]
    read = [safetensors.torch.load_file(file) for file in files]
    assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= 200 for part in read)
    assert sum(len(part) for part in read) == len(model)
    streamed = dict(store.tensors(folder, "model"))
    for name, tensor in {name: tensor for part in read for name, tensor in part.items()}.items():
        assert torch.equal(tensor, model[name])
        assert torch.equal(streamed[name], model[name])


def test_manifest_describes_every_tensor(tmp_path: Path) -> None:
    manifest = json.loads((save(tmp_path, 7) / "manifest.json").read_text())
    entry = manifest["tensors"]["model"]["w"]
    (piece,) = entry["pieces"]
    assert (manifest["format"], manifest["step"]) == (1, 7)
    assert (entry["dtype"], entry["shape"]) == ("F32", [2, 3])
    assert (piece["file"], piece["key"], piece["offset"], piece["shape"]) == (
        "model-00001.safetensors", "w", [0, 0], [2, 3]
    )  # fmt: skip
    assert manifest["files"].keys() == {"state.json", "model-00001.safetensors", "optim-00001.safetensors"}


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    rng = random.Random(0)
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        for at in range(len(good)):
            file.write_bytes(good[:at] + bytes([good[at] ^ rng.randrange(1, 256)]) + good[at + 1 :])
            with pytest.raises(store.CorruptCheckpoint):
                store.verify(folder)
        file.write_bytes(good)
    store.verify(folder)


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        for length in range(0, len(good), 7):
            file.write_bytes(good[:length])
            with pytest.raises(store.CorruptCheckpoint, match=file.name):
                store.verify(folder)
        file.write_bytes(good)
    store.verify(folder)


def reseal(folder: Path, change: str, value: object = None) -> None:
    """Edit the manifest, a dotted path at a time, as if it had been saved so."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    *parents, leaf = change.split("/")
    node = body
    for key in parents:
        node = node[key]
    if value is None:
        del node[leaf]
    else:
        node[leaf] = value
    path.write_bytes(store._sealed(body))


def damage(folder: Path, how: str) -> None:
    model = folder / "model-00001.safetensors"
    match how:
        case "no file":
            model.unlink()
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "extra file":
            (folder / "model-00002.safetensors").write_bytes(model.read_bytes())
        case "unreadable file":
            model.unlink()
            model.mkdir()
            reseal(folder, "files/model-00001.safetensors/bytes", model.stat().st_size)
        case "tensor renamed":
            model.write_bytes(model.read_bytes().replace(b'"w"', b'"v"'))
        case "tensor missing in manifest":
            reseal(folder, "tensors/model/w")
        case "tensor missing in file":
            safetensors.torch.save_file({"w": torch.ones(2, 3)}, model)
            reseal(folder, "files/model-00001.safetensors/bytes", model.stat().st_size)
        case "tensor reshaped":
            reseal(folder, "tensors/model/w/shape", [3, 2])
        case "other text":
            model.write_bytes((8).to_bytes(8, "little") + b"[1,  2 ]" + model.read_bytes()[16:])
        case "tensor changed":
            model.write_bytes(model.read_bytes()[:-1] + b"\x7f")
        case "other step":
            reseal(folder, "step", 3)
        case "other format":
            reseal(folder, "format", 2)
        case "not an object":
            (folder / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no file", "model-00001.safetensors: is missing"),
        ("no manifest", "manifest.json: No such file"),
        ("extra file", "model-00002.safetensors: is not part of the checkpoint"),
        ("unreadable file", "model-00001.safetensors: Is a directory"),
        ("tensor renamed", "model-00001.safetensors: tensor 'v' is .* not in the manifest"),
        ("tensor missing in manifest", "model-00001.safetensors: tensor 'w' is .* not in the manifest"),
        ("tensor missing in file", "model-00001.safetensors: tensor 'scale' is missing"),
        ("tensor reshaped", r"model-00001.safetensors: tensor 'w' is .*\[2, 3\].* not .*\[3, 2\]"),
        ("other text", "model-00001.safetensors: its header is damaged"),
        ("tensor changed", "model-00001.safetensors: tensor 'scale' has changed"),
        ("other step", "manifest.json: is of step 3"),
        ("other format", "manifest.json: is not a manifest of format 1"),
        ("not an object", "manifest.json: is not a manifest of format 1"),
    ],
)
def test_damage_is_named_and_newest_falls_back(tmp_path: Path, how: str, words: str) -> None:
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    damage(new, how)
    with pytest.raises(store.CorruptCheckpoint, match=f"step-000002/{words}"):
        store.load(new)
    found, lines = reports(tmp_path)
    assert found == old
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert f"step-000002/{words.split(':')[0]}" in lines[0]


def test_streaming_stops_before_a_damaged_tensor(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    damage(folder, "tensor changed")
    stream = store.tensors(folder, "model")
    assert next(stream)[0] == "w"
    with pytest.raises(store.CorruptCheckpoint, match="'scale'"):
        next(stream)


def test_newest_of_nothing(tmp_path: Path) -> None:
    assert store.newest(tmp_path / "none", pytest.fail) is None
    damage(save(tmp_path, 1), "no file")
    found, lines = reports(tmp_path)
    assert found is None
    assert len(lines) == 1


def test_a_hidden_file_of_the_system_does_no_harm(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / ".DS_Store").write_bytes(b"x")
    store.verify(folder)


def test_a_good_step_is_left_and_a_damaged_one_replaced(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    before = snapshot(tmp_path)
    assert store.save(tmp_path, 1, {"w": torch.zeros(1)}, {}, {}) == folder
    assert snapshot(tmp_path) == before
    damage(folder, "tensor changed")
    save(tmp_path, 1)
    assert snapshot(tmp_path) == before


def test_save_removes_leftovers(tmp_path: Path) -> None:
    for name in (".step-000003.saving", ".step-000001.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    save(tmp_path, 4)
    assert os.listdir(tmp_path) == ["step-000004"]


def test_state_that_is_not_json_touches_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        store.save(tmp_path / "checkpoints", 1, {}, {}, {"x": object()})
    assert os.listdir(tmp_path) == []


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    store.prune(tmp_path, keep=2, protect={2, 99})
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000005", "step-000006"]
    store.prune(tmp_path, keep=9, protect=())
    assert store.steps(tmp_path) == [2, 5, 6]


def test_prune_never_deletes_the_last_good_one(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    for step in (4, 5):
        damage(tmp_path / f"step-00000{step}", "tensor changed")
    store.prune(tmp_path, keep=2, protect=())
    assert store.steps(tmp_path) == [3, 4, 5]
    damage(tmp_path / "step-000003", "tensor changed")
    store.prune(tmp_path, keep=1, protect=())
    assert store.steps(tmp_path) == [3, 4, 5]


def test_atomic_write_replaces_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    files.atomic_write(path, "ă")
    files.atomic_write(path, b"two")
    assert path.read_bytes() == b"two"

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.atomic_write(path, "three")
    assert snapshot(tmp_path) == {"config.toml": b"two"}


def test_run_lock_can_be_taken_again_after_release(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    for _ in range(2):
        with store.RunLock(run):
            assert f"process {os.getpid()} on " in (run / "lock").read_text()
            with pytest.raises(InputError, match=rf"x is in use by process {os.getpid()} on .* \(started .*\)$"):
                store.RunLock(run).__enter__()
        assert (run / "lock").read_text() == ""
