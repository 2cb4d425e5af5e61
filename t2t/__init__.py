"""t2t: text in, a tuned Hugging Face-compatible model out.

The names below are imported when first used, so that ``import t2t`` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "Config": "t2t.config",
    "InputError": "t2t.errors",
    "Trainer": "t2t.trainer",
    "TrainerArguments": "t2t.trainer",
    "load": "t2t.generate",
}
__all__ = ["Config", "InputError", "Trainer", "TrainerArguments", "load", "train"]

if TYPE_CHECKING:
    from t2t.config import Config
    from t2t.errors import InputError
    from t2t.generate import load
    from t2t.train.run import train
    from t2t.trainer import Trainer, TrainerArguments


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("t2t.train")  # callable, see there
    if name not in _LAZY:
        raise AttributeError(f"module 't2t' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
