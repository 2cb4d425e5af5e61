"""Models by what their folders say, before any of them is built: for native ones this takes no torch.

>>> kind, found = architecture(scratch_config("t5-small", vocab_size=384, pad_id=5))
>>> kind, found.start_id
('seq2seq', 5)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from t2t.errors import InputError
from t2t.models import sizes
from t2t.models.architectures import NATIVE, Kind


def find(path: str) -> Path:
    """The folder of a model: a path (or a GGUF file's), ``asset:NAME`` for one shipped with the package, or a hub name.

    >>> find("no/such-folder-here/at-all")
    Traceback (most recent call last):
    t2t.errors.InputError: model.path: no such folder: no/such-folder-here/at-all
    """
    if path.startswith("asset:"):
        folder = Path(str(resources.files("t2t") / "assets" / path.removeprefix("asset:")))
    else:
        folder = Path(path)
    if folder.is_dir() or _is_gguf(folder):
        return folder
    if path.count("/") > 1 or path.startswith(("asset:", ".", "/", "~")):
        raise InputError(f"model.path: no such folder: {path}")
    return _from_hub(path)


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf" and not path.is_file():
        raise InputError(f"model.path: no such file: {path}")
    return path.suffix == ".gguf"


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds; all mean that the model cannot be had
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"model.path: {name} is no folder here and the hub did not give it: {reason}") from error


def read_config(path: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a folder (or ``asset:NAME``), or the file itself, or what a GGUF file says.

    >>> read_config("nowhere")
    Traceback (most recent call last):
    t2t.errors.InputError: nowhere: no config.json there
    """
    path = find(path) if isinstance(path, str) and path.startswith("asset:") else Path(path)
    if path.suffix == ".gguf":
        return _wrapped().read_gguf(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() and (path / "adapter_config.json").is_file():
        raise InputError(f"{path}: holds an adapter: give its base model, or what `t2t merge` makes of both")
    if not file.is_file():
        raise InputError(f"{path}: no config.json there")
    raw = read_json(file)
    if raw.get("model_type") not in NATIVE:
        _wrapped().family(raw)  # refuses what transformers does not know
    return raw


def _wrapped() -> Any:
    """What knows of models that are not native; it brings torch along."""
    from t2t.models import huggingface

    return huggingface


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file}: not a JSON object")
    return raw


def scratch_config(
    name: str, overrides: Sequence[str] = (), vocab_size: int = 384, eos_id: int = 1, pad_id: int = 0
) -> dict[str, Any]:
    """The config of a model from scratch: a file's as it stands, or a published size made to fit a tokenizer.

    A file or folder of that name wins. The overrides come last, so that one of ``vocab_size`` stands.

    >>> raw = scratch_config("t5-base", ["num_layers=2"], vocab_size=8100, eos_id=1, pad_id=0)
    >>> raw["d_model"], raw["num_layers"], raw["vocab_size"]
    (768, 2, 8128)
    """
    path = Path(name)
    if name.startswith("asset:") or path.exists() or path.parent != Path() or path.suffix == ".json":
        raw = read_config(name)
    else:
        raw = sizes.fitted(sizes.named(name), vocab_size, eos_id, pad_id)
    raw = sizes.changed(raw, overrides)
    try:
        architecture(raw)
    except InputError as error:
        if not overrides:
            raise
        raise InputError(f"model.overrides: {str(error).removeprefix('config.json: ')}") from None
    return raw


def architecture(raw: Mapping[str, Any]) -> tuple[Kind, Any]:
    """The kind of a config's model, and what its class reads in it."""
    if raw.get("model_type") in NATIVE:
        native = NATIVE[raw["model_type"]]
        return native.kind, native.from_huggingface(raw)
    family = _wrapped().family(raw)
    return family.kind, family.read(raw, None)
