"""Tokenize a run's data ahead of it."""

from __future__ import annotations

from t2t.config import Config, Data, tasks
from t2t.data import prepare as making
from t2t.data.sources import format_of, resolve
from t2t.data.splits import chosen_objective
from t2t.data.store import Store
from t2t.errors import InputError
from t2t.models import load as models
from t2t.terminal import Preparing
from t2t.train.run import load_tokenizer, read_model_config


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
    tokenizer = load_tokenizer(config)
    family, architecture = models.architecture(read_model_config(config, tokenizer))
    count = making.processes() if processes is None else processes
    made = {}
    for task, own in tasks(config.data).items():
        name = chosen_objective(own, family.kind)
        maker = making.Maker(own, tokenizer, name, family.kind, architecture.start_id)
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
