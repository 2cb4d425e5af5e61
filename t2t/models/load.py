"""Models from and to Hugging Face folders: built on the meta device, weights streamed in tensor by tensor."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from t2t.errors import InputError
from t2t.models import huggingface
from t2t.models.base import Model
from t2t.models.bert import Bert
from t2t.models.configs import find as find
from t2t.models.configs import read_config, read_json
from t2t.models.configs import scratch_config as scratch_config
from t2t.models.gpt import GPT
from t2t.models.huggingface import Wrapped
from t2t.models.t5 import T5

FAMILIES: tuple[type[Model], ...] = (T5, GPT, Bert)
NATIVE: dict[str, type[Model]] = {kind: family for family in FAMILIES for kind in family.classes}  # by model type
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 2**30


def _family(raw: Mapping[str, Any]) -> type[Model]:
    """The class that serves a config; what is not native comes from transformers."""
    return NATIVE.get(raw.get("model_type", "")) or huggingface.family(raw)


def architecture(raw: Mapping[str, Any]) -> tuple[type[Model], Any]:
    """The family that serves a config, and what it reads in it.

    >>> family, config = architecture({"model_type": "gpt2", "n_layer": 3})
    >>> family.kind, config.num_layers
    ('causal', 3)
    """
    family = _family(raw)
    return family, family.read(raw, None)


def create(
    raw: Mapping[str, Any],
    seed: int,
    dropout: float | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A model from scratch, by its Hugging Face config.

    >>> raw = {"model_type": "t5", "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4}
    >>> create(raw, seed=0).shared.weight.shape
    torch.Size([32128, 8])
    """
    torch.manual_seed(seed)
    family = _family(raw)
    model = family(family.read(raw, dropout))
    model.initialize()
    model.to(device)
    for parameter in model.parameters():  # buffers, as the angles of rotary positions, keep their precision
        parameter.data = parameter.data.to(dtype)
    return model


def load(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, dropout: float | None = None
) -> tuple[Model, dict[str, Any]]:
    """A model with the weights of a folder or a GGUF file, and the raw config. Peak memory is one copy and one tensor.

    >>> import tempfile
    >>> raw = {"model_type": "t5", "d_model": 8, "d_ff": 8, "num_layers": 1, "vocab_size": 16}
    >>> with tempfile.TemporaryDirectory() as name:
    ...     save(create(raw, seed=0).state_dict(), raw, Path(name))
    ...     load(Path(name))[0].shared.weight.shape
    torch.Size([16, 8])
    """
    raw = read_config(folder)
    files = {} if folder.is_file() else {name: file for file in weight_files(folder) for name in _names(file)}
    family = _family(raw)
    config = family.read(raw, dropout)
    model: Model
    if issubclass(family, Wrapped):
        model, missing = family.open(folder, config, dtype)
        model.to(device)
    else:
        config = dataclasses.replace(config, tied=_is_tied(family, files, config.tied))
        with torch.device("meta"):
            model = family(config).to(dtype)
        model.to_empty(device=device)
        missing = _fill(model, folder, files)
        raw["tie_word_embeddings"] = config.tied
        if raw["model_type"] == "t5":  # else transformers would guess it from the line above
            raw["scale_decoder_outputs"] = config.scale_outputs
    model.fresh = tuple(name for name in missing if model.may_lack(name))
    for name in model.fresh:
        model.initialize_one(name, model.get_parameter(name))
    missing = [name for name in missing if name not in model.fresh]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(f"{folder}: the weights lack {', '.join(missing[:3])}{more}")
    return model, raw


def grow(model: Model, raw: dict[str, Any], vocab_size: int, fresh: range) -> None:
    """Give embedding and head ``vocab_size`` rows; new ones, and those in ``fresh``, are the mean of what is before.

    ``fresh`` are the ids of new tokens: a checkpoint often has more rows than its tokenizer tokens.

    >>> raw = {"model_type": "t5", "vocab_size": 16, "d_model": 8, "num_layers": 1}
    >>> model = create(raw, seed=0)
    >>> grow(model, raw, vocab_size=24, fresh=range(14, 17))
    >>> model.shared.weight.shape, raw["vocab_size"]
    (torch.Size([24, 8]), 24)
    """
    have = model.config.vocab_size
    tables = model.resize(vocab_size) if isinstance(model, Wrapped) else _resized(model, vocab_size)
    with torch.no_grad():
        for table in tables:
            mean = table[: fresh.start].float().mean(0).to(table.dtype)
            table[have:] = mean
            table[fresh.start : fresh.stop] = mean
    model.config = dataclasses.replace(model.config, vocab_size=vocab_size)
    raw["vocab_size"] = vocab_size


def _resized(model: Model, rows: int) -> list[Tensor]:
    """Embedding, head and the head's bias with so many rows, new ones of any content."""
    tables: list[Tensor] = []
    for name, parameter in list(model.named_parameters()):
        if name in (model.embeddings[0], model.output, "cls.predictions.bias"):
            table = torch.nn.Parameter(parameter.new_empty(rows, *parameter.shape[1:]), parameter.requires_grad)
            table.data[: len(parameter)] = parameter.detach()
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, table)
            tables.append(table)
    return tables


def save(weights: Mapping[str, Tensor], raw: Mapping[str, Any], folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a Hugging Face folder's ``config.json`` and safetensors (in shards with an index, when large).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     save({"shared.weight": torch.zeros(2, 2)}, {"model_type": "t5"}, Path(name))
    ...     sorted(file.name for file in Path(name).iterdir())
    ['config.json', 'model.safetensors']
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = [[]]
    size = 0
    sizes = {name: tensor.numel() * (dtype or tensor.dtype).itemsize for name, tensor in weights.items()}
    for name in weights:
        if size and size + sizes[name] > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sizes[name]
    index: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        part = {n: weights[n].detach().to("cpu", dtype or weights[n].dtype).contiguous() for n in names}
        save_file(part, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(names, file))
    written = set(index.values())
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
        written.add(INDEX)
    for old in folder.glob("model*.safetensors*"):  # of an earlier save, which a reader might take for this one
        if old.name not in written:
            old.unlink()
    stored = str(dtype or next(iter(weights.values())).dtype).removeprefix("torch.")
    config = {"architectures": _architectures(raw), **raw, "dtype": stored}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _architectures(raw: Mapping[str, Any]) -> list[str]:
    native = NATIVE.get(raw["model_type"])
    return huggingface.architectures(raw) if native is None else [native.classes[raw["model_type"]]]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one.

    >>> weight_files(Path("nowhere"))
    Traceback (most recent call last):
    t2t.errors.InputError: nowhere: no safetensors weights there
    """
    single, index = folder / "model.safetensors", folder / INDEX
    indexed = index.is_file() and not single.is_file()  # one file goes before an index, as in transformers
    files = [folder / name for name in _shards(index)] if indexed else [single]
    missing = [file.name for file in files if not file.is_file()]
    if missing and any(folder.glob("*.bin")):
        raise InputError(f"{folder}: only pickled weights (.bin), which are not loaded: convert them to safetensors")
    if missing and indexed:
        raise InputError(f"{folder}: the index names {', '.join(missing)}, which is not there")
    if missing:
        raise InputError(f"{folder}: no safetensors weights there")
    return files


def digest(folder: Path) -> str:
    """A digest of a folder's weight files, or of a GGUF file: two are equal when theirs are.

    >>> digest(find("asset:byt5-ro")) == digest(find("asset:byt5-ro"))
    True
    """
    total = hashlib.sha256()
    for file in [folder] if folder.is_file() else weight_files(folder):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]


def _shards(index: Path) -> list[str]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise InputError(f"{index}: no weight_map, which names each tensor's file")
    for name in where.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"{index}: {name!r} is not a file name of this folder")
    return sorted(set(where.values()))


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise InputError(f"{file}: damaged safetensors file: {error}") from None


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)


def _is_tied(family: type[Model], files: Mapping[str, Path], declared: bool) -> bool:
    """Whether the embedding is the head too: as in transformers, unless the weights hold both and they differ."""
    embedding = next((name for name in family.embeddings if name in files), None)
    if embedding is None or family.output not in files:
        return True
    return declared and torch.equal(_tensor(files[family.output], family.output), _tensor(files[embedding], embedding))


def _fill(model: Model, folder: Path, files: Mapping[str, Path]) -> list[str]:
    """Copy every tensor into its parameter; gives back the parameters that none filled."""
    parameters = dict(model.named_parameters())
    left = set(parameters)
    aliases = (*model.embeddings, model.output) if model.config.tied else model.embeddings
    with torch.no_grad():
        for stored, file in files.items():
            # In a few checkpoints an alias is its only name.
            name = model.embeddings[0] if stored in aliases else model.adopt(stored)
            if name is None or (name in parameters and name not in left):
                continue
            if name not in parameters:
                raise InputError(f"{folder}: {name} is no tensor of a {model.family} model with this config.json")
            tensor = _tensor(file, stored)
            if parameters[name].shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, the config asks for {tuple(parameters[name].shape)}"
                raise InputError(f"{folder}: {name} has shape {shapes}")
            parameters[name].copy_(tensor)
            left.remove(name)
    return sorted(left)
