"""Tokenize a run's data ahead of it. torch is left out where nothing needs it: it is larger than all of the work."""

from __future__ import annotations

from typing import Any

from t2t.config import Config, Data, tasks
from t2t.data import prepare as making
from t2t.data import tokens
from t2t.data.sources import format_of, resolve
from t2t.data.splits import chosen_objective
from t2t.data.store import Store
from t2t.errors import InputError
from t2t.models import configs
from t2t.terminal import Preparing


def prepare(config: Config, processes: int | None = None) -> dict[str, Store]:
    """The stores that training by this config takes its tokens from, made where they are not there yet.

    A mixture has one a task, by its name; what is not a mixture has one without a name.

    >>> prepare(Config())
    Traceback (most recent call last):
    t2t.errors.InputError: data.train: no training files given, as --data.train pairs.jsonl
    """
    if config.data.streaming:
        raise InputError("data.streaming: what is streamed is not stored: leave it out to prepare the files")
    files = {task: _files(task, own) for task, own in tasks(config.data).items()}
    tokenizer = tokens.extended(tokens.light(tokenizer_name(config)), config.model.new_tokens)
    kind, architecture = configs.architecture(read_model_config(config, tokenizer))
    count = making.processes() if processes is None else processes
    made = {}
    for task, own in tasks(config.data).items():
        name = chosen_objective(own, kind)
        maker = making.Maker(own, tokenizer, name, kind, architecture.start_id)
        with Preparing() as tell:
            made[task] = making.prepare(maker, files[task], count, tell)
    return made


def _files(task: str, data: Data) -> list[str]:
    """What is to be stored of a task."""
    where = f"data.mix.{task}.train" if task else "data.train"
    if not data.train:
        raise InputError(f"{where}: no training files given, as --{where} pairs.jsonl")
    files = resolve(data.train, where)
    if any(format_of(file, data.format) == "hdf5" for file in files):
        raise InputError(f"{where}: HDF5 shards hold tokens already and are read where they lie: nothing to prepare")
    return files


def tokenizer_name(config: Config) -> str:
    """The tokenizer that the config names, or the model's folder.

    >>> tokenizer_name(Config())
    Traceback (most recent call last):
    t2t.errors.InputError: model.tokenizer: training from scratch needs one: "bytes", a folder, a SentencePiece file
    """
    if not config.model.path and not config.model.tokenizer:
        raise InputError('model.tokenizer: training from scratch needs one: "bytes", a folder, a SentencePiece file')
    return config.model.tokenizer or str(configs.find(config.model.path))


def read_model_config(config: Config, tokenizer: tokens.Tokenizer) -> dict[str, Any]:
    """The Hugging Face config of the model to start from."""
    own = config.model
    if own.path:
        return configs.read_config(configs.find(own.path))
    return configs.scratch_config(own.config, own.overrides, tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id)
