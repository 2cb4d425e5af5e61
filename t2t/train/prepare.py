"""Tokenize a run's data ahead of it."""

from __future__ import annotations

from t2t.config import Config
from t2t.data import prepare as making
from t2t.data.loader import chosen_objective
from t2t.data.sources import resolve
from t2t.data.store import Store
from t2t.errors import InputError
from t2t.models import load as models
from t2t.terminal import Preparing
from t2t.train.run import load_tokenizer, read_model_config


def prepare(config: Config, processes: int | None = None) -> Store:
    """The store that training by this config takes its tokens from, made where it is not there yet.

    >>> prepare(Config())
    Traceback (most recent call last):
    t2t.errors.InputError: data.train: no training files given, as --data.train pairs.jsonl
    """
    if not config.data.train:
        raise InputError("data.train: no training files given, as --data.train pairs.jsonl")
    tokenizer = load_tokenizer(config)
    family, architecture = models.architecture(read_model_config(config, tokenizer))
    name = chosen_objective(config.data, family.kind)
    maker = making.Maker(config.data, tokenizer, name, family.kind, architecture.start_id)
    files = [str(file) for file in resolve(config.data.train, "data.train")]
    with Preparing() as tell:
        return making.prepare(maker, files, making.processes() if processes is None else processes, tell)
