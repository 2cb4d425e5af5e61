"""What a run is told: frozen dataclass sections, TOML in and out, dotted overrides, one validation.

Every field is declared, typed and documented here and nowhere else; the command line's flags and the
reference are made from these classes.

>>> config = load(overrides={"train.steps": "100", "data.train": "pairs.tsv"})
>>> config.train.steps, config.data.train
(100, ('pairs.tsv',))
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from t2t.errors import InputError, did_you_mean


def opt(default: Any, help: str) -> Any:
    """A field with its one line of documentation."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Run:
    """Where the run lives and what it runs on."""

    dir: str = opt("", "run folder; empty: runs/<name>")
    name: str = opt("t2t", "name of the run, for its folder and for trackers")
    seed: int = opt(1, "seed of data order, dropout, objectives and fresh weights")
    device: str = opt("auto", 'device to run on: "auto", "cpu", "cuda", "mps", ...')
    threads: int = opt(0, "CPU threads; 0: as many as there are cores")


@dataclass(frozen=True)
class Model:
    """What is trained."""

    path: str = opt("", "model folder to start from (Hugging Face layout), a .gguf file, or asset:NAME")
    config: str = opt(
        "",
        "start from scratch: a config.json, a folder that holds one, asset:NAME, or a published size as t5-base, "
        "whose vocabulary and special ids then follow the tokenizer",
    )
    overrides: tuple[str, ...] = opt(
        (), "changes to model.config, key=value in its own words: num_layers=4 d_model=256"
    )
    tokenizer: str = opt("", 'empty: the model\'s own; "bytes"; a tokenizer folder or name; a SentencePiece file')
    dropout: float | None = opt(None, "dropout rate; unset: as the model's config says")
    new_tokens: tuple[str, ...] = opt((), "tokens added to the vocabulary, each beginning as the mean of the old ones")
    vocab_size: int = opt(0, "embedding and head rows, never fewer than there are; 0: as many as the tokens need")
    freeze: tuple[str, ...] = opt((), "what stays as it is: encoder, decoder, embeddings, or name globs: shared.*")


@dataclass(frozen=True)
class Data:
    """The text, and how it becomes rows."""

    train: tuple[str, ...] = opt(
        (),
        "training files or globs: jsonl, csv, tsv, txt, parquet; also .gz .xz .zst; for BERT .hdf5 shards; "
        "dataset:NAME[:CONFIG][@SPLIT] for one of Hugging Face's",
    )
    validation: tuple[str, ...] = opt((), "validation files, globs or datasets")
    validation_split: float = opt(0.0, "share of the training examples held out when no validation file is given")
    format: Literal["auto", "jsonl", "csv", "tsv", "txt", "parquet", "hdf5"] = opt(
        "auto", "file format; auto: by file name"
    )
    source: str = opt("", "source column; empty: detected; dots reach inside: translation.en")
    target: str = opt("", "target column; empty: detected")
    prefix: str = opt("", 'text put before every source, as "summarize: "')
    source_transforms: tuple[str, ...] = opt(
        (), "applied to the source in order: strip_diacritics, lower, nfc, nfkc, s/REGEX/TEXT/, package.module:function"
    )
    target_transforms: tuple[str, ...] = opt((), "the same for the target")
    piece: int = opt(0, "cut longer plain-text lines at spaces into pieces of at most so many characters; 0: never")
    objective: Literal[
        "auto",
        "pairs",
        "chat",
        "lm",
        "blocks",
        "span_corruption",
        "prefix_lm",
        "character_noise",
        "masked_lm",
        "masked_lm_nsp",
    ] = opt(
        "auto",
        "what is learned; auto: target from source, with a causal model the answers in chat records ({messages: "
        "[{role, content}, ...]}), on plain text the next token (causal models) or masked tokens (masked models); "
        "masked_lm_nsp: also whether a text follows, with one sentence a line and in .txt files a blank line between "
        "documents",
    )
    whole_words: bool = opt(False, "mask all tokens of a word or none")
    max_predictions: int = opt(0, "masked tokens of an example at most; 0: 15% of the longest, rounded up")
    template: str = opt("{source}\n{target}", "how a causal model sees a pair; it learns what begins at {target}")
    loss_on: Literal["target", "both"] = opt("target", "what of a pair a causal model is to say")
    block: int = opt(
        0,
        "tokens that a causal or masked model sees at once, of plain text (0: data.max_source_length) or of a "
        "conversation, whose oldest turns give way (0: data.max_source_length + data.max_target_length)",
    )
    max_source_length: int = opt(512, "source tokens kept, end token included")
    max_target_length: int = opt(128, "target tokens kept, end token included")
    source_row: int = opt(0, "slots in a packed source row; 0: picked from the data")
    target_row: int = opt(0, "slots in a packed target row; 0: picked from the data")
    max_samples: int = opt(0, "use at most so many training examples; 0: all")
    max_validation_samples: int = opt(0, "use at most so many validation examples; 0: all")
    store: str = opt("", "folder for tokenized data; empty: $T2T_STORE, or t2t below the user's cache folder")
    streaming: bool = opt(False, "read the training files as they come and keep nothing of them; needs train.steps")
    shuffle: int = opt(10000, "records that a streamed block has, within which the order is shuffled; 1: not at all")
    retries: int = opt(5, "times that a streamed source is opened again after it failed, ever later, before giving up")
    readers: int = opt(0, "background processes that make batches; 0: a thread, which keeps a CPU fed")
    on_bad_line: Literal["error", "skip"] = opt("error", "what a bad line does: stop, or be skipped and counted")
    max_bad_lines: int = opt(1000, "skipping stops with an error beyond so many bad lines")
    mixing: Literal["size", "temperature", "equal"] = opt(
        "size",
        "how often a mixture's tasks come that have no rate: by their number of examples, by that but the smaller ones "
        "more often, or all alike",
    )
    mixing_limit: int = opt(0, "by size or temperature: count no task for more examples than this; 0: for all it has")
    temperature: float = opt(2.0, "by temperature: tasks come by their size to the power 1 / temperature")
    mix: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what [data.mix.NAME] says, task by task


@dataclass(frozen=True)
class Mixed(Data):
    """One task of a mixture, [data.mix.NAME]: the data section with what the task sets itself."""

    rate: float = opt(0.0, "how often the task comes, against the rates of the others; 0: as data.mixing says")
    metrics: tuple[str, ...] = opt((), "the task's own text metrics; unset: train.metrics")


# What all tasks of a mixture share.
_OF_ALL = (
    *("source_row", "target_row", "store", "streaming", "shuffle", "retries", "readers"),
    *("mixing", "mixing_limit", "temperature", "mix"),
)
_NAME = re.compile("[A-Za-z0-9_-]+")  # of a task: what TOML leaves without quotes


def tasks(data: Data) -> dict[str, Mixed]:
    """The tasks of a mixture with all their keys, by name; without one it is the data section itself, without a name.

    A task that says by itself what is held out takes over neither of the section's two ways to say it.

    >>> told = tasks(Data(source="en", mix={"to_ro": {"target": "ro"}, "to_de": {"target": "de", "rate": 2.0}}))
    >>> [(name, task.source, task.target, task.rate) for name, task in told.items()]
    [('to_ro', 'en', 'ro', 0.0), ('to_de', 'en', 'de', 2.0)]
    >>> list(tasks(Data()))
    ['']
    """
    held = {"validation": (), "validation_split": 0.0}
    shared = {**vars(data), "mix": {}}
    told = {}
    for name, own in (data.mix or {"": {}}).items():
        told[name] = Mixed(**(shared | (held if own.keys() & held.keys() else {}) | dict(own)))
    return told


@dataclass(frozen=True)
class Train:
    """How long, how much at once, how precisely."""

    steps: int = opt(0, "optimizer steps; 0: train.epochs decides")
    epochs: float = opt(3.0, "passes over the data, where train.steps is 0")
    stop_at: int = opt(0, "end after this step under the full schedule; 0: run to the end")
    batch: int = opt(32, "examples in one optimizer step, over all ranks")
    micro_rows: int | Literal["auto"] = opt("auto", "packed rows computed at once: memory and speed, never the result")
    precision: Literal["auto", "fp32", "mixed"] = opt("auto", "auto: mixed on a GPU, fp32 on a CPU")
    torch_ort: bool = opt(False, "run the forward pass in ONNX Runtime by the package torch-ort")
    gradient_checkpointing: bool = opt(False, "recompute activations in backward: less memory, a third more time")
    label_smoothing: float = opt(0.0, "share of probability spread over the vocabulary")
    log_every: int | Literal["epoch"] = opt(10, 'steps between log lines, or "epoch"')
    evaluate_every: int | Literal["epoch"] = opt(0, 'steps between evaluations, or "epoch"; 0: once, at the end')
    metrics: tuple[str, ...] = opt((), "text metrics computed with generation at evaluations: bleu, chrf, rouge, ...")
    best: str = opt("loss", "figure that decides which checkpoint is best")
    patience: int = opt(0, "stop after so many evaluations without a better figure; 0: never")


@dataclass(frozen=True)
class Optim:
    """The optimizer, its rate and its schedule."""

    name: Literal["adamw", "adafactor", "lamb"] = opt("adamw", "optimizer")
    lr: float | None = opt(None, "peak learning rate; unset: the default of the optimizer and model family")
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = opt(
        "linear", "course of the rate after warm-up"
    )
    warmup: float = opt(0.0, "warm-up: steps, or a share of all steps when below 1")
    weight_decay: float = opt(0.0, "decoupled decay; never of norms, biases and relative-bias tables")
    clip: float = opt(1.0, "largest global gradient norm; 0: no clipping")
    beta1: float = opt(0.9, "AdamW, LAMB: decay of the first moment")
    beta2: float = opt(0.999, "AdamW, LAMB: decay of the second moment")
    eps: float = opt(1e-8, "AdamW, LAMB: term that keeps the division finite")
    relative_step: bool = opt(False, "Adafactor: rate from the step number; optim.lr and schedule are then unused")
    scale_parameter: bool = opt(False, "Adafactor: scale updates by each tensor's root mean square")


@dataclass(frozen=True)
class Tune:
    """Light-weight tuning: the model stays as it is, and a small adapter beside it learns."""

    method: Literal["none", "prompt", "lora"] = opt("none", "what is trained: the model, a soft prompt, or LoRA")
    tokens: int = opt(20, "prompt: virtual tokens before every input")
    init: Literal["vocabulary", "text", "random"] = opt("vocabulary", "prompt: what the virtual tokens start from")
    text: str = opt("", 'prompt: the text to start from, with tune.init = "text"')
    r: int = opt(8, "LoRA: rank of what is added to a weight")
    alpha: float = opt(16.0, "LoRA: what is added is scaled by alpha / r")
    targets: tuple[str, ...] = opt((), "LoRA: linear layers by the end of their name; empty: queries and values")
    dropout: float = opt(0.0, "LoRA: only 0, since weights are adapted and not the layers' inputs")


@dataclass(frozen=True)
class Parallel:
    """How many processes train together."""

    dp: int = opt(0, "ranks that share a step's examples; 0: as many as were started, by --launch or torchrun")


@dataclass(frozen=True)
class Checkpoint:
    """Saving, so that no run is lost."""

    every: int | Literal["epoch"] = opt(
        500, 'steps between checkpoints, or "epoch"; 0: only at the end and on a signal'
    )
    keep: int = opt(2, "newest checkpoints kept, besides the best")
    resume: bool = opt(True, "go on from the newest checkpoint that verifies; false: refuse a folder that has one")


@dataclass(frozen=True)
class Generate:
    """How text is produced."""

    beams: int = opt(1, "beams; 1: greedy, or sampling when a temperature is given")
    max_length: int = opt(0, "new tokens at most; 0: the training target length")
    temperature: float = opt(0.0, "0: no sampling")
    top_k: int = opt(0, "sample from the k likeliest tokens; 0: all")
    top_p: float = opt(1.0, "sample from the smallest set with this probability")
    length_penalty: float = opt(1.0, "beam scores are divided by length to this power")
    batch: int = opt(64, "inputs decoded together")


@dataclass(frozen=True)
class Track:
    """Where figures go besides log.jsonl."""

    to: tuple[str, ...] = opt((), "tensorboard, wandb, trackio; each an extra to install")
    project: str = opt("t2t", "project name at the tracker")


@dataclass(frozen=True)
class Config:
    """All sections of a run.

    >>> Config().train.batch
    32
    """

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    tune: Tune = field(default_factory=Tune)
    optim: Optim = field(default_factory=Optim)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    generate: Generate = field(default_factory=Generate)
    track: Track = field(default_factory=Track)

    @property
    def run_dir(self) -> Path:
        """The run's folder.

        >>> load(overrides={"run.name": "x"}).run_dir.as_posix()
        'runs/x'
        """
        return Path(self.run.dir or f"runs/{self.run.name}")

    def metrics(self, task: str) -> tuple[str, ...]:
        """The text metrics of a task: the run's, unless it has its own.

        >>> told = load(overrides={"train.metrics": ["chrf"], "data.mix.a.train": "a", "data.mix.b.metrics": "wer"})
        >>> told.metrics("a"), told.metrics("b")
        (('chrf',), ('wer',))
        """
        return self.data.mix.get(task, {}).get("metrics", self.train.metrics)


@dataclass(frozen=True)
class Key:
    """One config field as the outside sees it: ``train.steps``."""

    name: str
    type: Any
    default: Any
    help: str


def keys(mix: Iterable[str] = ()) -> Iterator[Key]:
    """Every key of the config, in order, with those of the tasks of a mixture, given by name.

    >>> next(keys()).name
    'run.dir'
    >>> [key.name for key in keys(["a"]) if key.name.endswith("prefix")]
    ['data.prefix', 'data.mix.a.prefix']
    """
    for section in dataclasses.fields(Config):
        yield from _section_keys(section.name, _section_class(section.name), ("mix",))
        if section.name == "data":
            for task in mix:
                yield from _section_keys(f"data.mix.{task}", Mixed, _OF_ALL)


def _section_keys(name: str, cls: type, without: Iterable[str]) -> Iterator[Key]:
    types_ = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if f.name not in without:
            yield Key(f"{name}.{f.name}", types_[f.name], f.default, f.metadata["help"])


def task_names(names: Iterable[str]) -> list[str]:
    """The tasks that dotted keys speak of, each once.

    >>> task_names(["data.train", "data.mix.a.train", "data.mix.b.train", "data.mix.a.rate"])
    ['a', 'b']
    """
    inside = [name.removeprefix("data.mix.").rpartition(".")[0] for name in names if name.startswith("data.mix.")]
    return [name for name in dict.fromkeys(inside) if name]


def load(
    path: str | Path | None = None,
    overrides: Mapping[str, str | list[str]] | None = None,
    base: Config | None = None,
    validate: bool = True,
    values: Mapping[str, tuple[Any, str]] | None = None,
) -> Config:
    """Read a TOML file (or a recipe's name) and overrides (dotted key to text or texts), and validate the whole.

    ``values`` are for callers in Python: dotted key to a typed value and the name that messages are to give it.

    >>> load(overrides={"train.bach": "8"})
    Traceback (most recent call last):
    t2t.errors.InputError: --train.bach: unknown key (did you mean train.batch?)
    """
    start = base or Config()
    told = []  # name, value, where it was given, and whether as text
    if path is not None:
        file = find_recipe(path)
        told += [(name, raw, f"{file}: {name}", False) for name, raw in _flatten(_read_toml(file), file)]
    told += [(name, raw, where, False) for name, (raw, where) in (values or {}).items()]
    told += [(name, raw, f"--{name}", True) for name, raw in (overrides or {}).items()]
    mix = {task: dict(own) for task, own in start.data.mix.items()}
    for task in task_names(name for name, *_ in told):
        mix.setdefault(task, {})
    known = {key.name: key for key in keys(mix)}
    given: dict[str, dict[str, Any]] = {s.name: {} for s in dataclasses.fields(Config)}
    given["data"]["mix"] = dict(sorted(mix.items()))  # the order in which tasks are named changes nothing
    origin: dict[str, str] = {}
    for name, raw, where, text in told:
        if name not in known:
            raise InputError(f"{where}: {_unknown(name, known)}")
        section, _, leaf = name.rpartition(".")
        task = section.removeprefix("data.mix.")
        if section != task and not _NAME.fullmatch(task):
            raise InputError(f"{where}: a task's name may have letters, digits, _ and -, not {task!r}")
        part = given[section] if section == task else mix[task]
        part[leaf] = _convert(raw, known[name].type, where, text)
        origin[name] = where
    config = Config(**{name: dataclasses.replace(getattr(start, name), **part) for name, part in given.items()})
    if validate:
        _validate(config, origin)
    return config


def _unknown(name: str, known: Iterable[str]) -> str:
    leaf = name.rpartition(".")[2]
    if name.startswith("data.mix.") and leaf in _OF_ALL:
        return f"all tasks share it: set data.{leaf}"
    return f"unknown key{did_you_mean(name, known)}"


def find_recipe(path: str | Path) -> Path:
    """A TOML file by path, or a packaged recipe by name.

    >>> find_recipe("quickstart").name
    'quickstart.toml'
    """
    if Path(path).is_file():
        return Path(path)
    packaged = Path(str(resources.files("t2t") / "recipes" / f"{Path(path).stem}.toml"))
    if packaged.is_file() and str(path) in (packaged.stem, packaged.name):
        return packaged
    names = sorted(p.stem for p in packaged.parent.glob("*.toml"))
    raise InputError(
        f"{path}: no such config file, nor a recipe{did_you_mean(str(path), names)}; recipes: {', '.join(names)}"
    )


def to_toml(config: Config) -> str:
    """The whole config as TOML, every field written out; unset fields are left away.

    >>> load_text = to_toml(Config())
    >>> "[train]" in load_text and "batch = 32" in load_text
    True
    """
    lines: list[str] = []
    before = ""
    for name, value in flat(config).items():
        section, _, leaf = name.rpartition(".")
        if section != before:
            lines += ["", f"[{section}]"] if before else [f"[{section}]"]
            before = section
        if value is not None:
            lines.append(f"{leaf} = {_toml_value(value)}")
    return "\n".join([*lines, ""])


def flat(config: Config) -> dict[str, Any]:
    """Every key and its value, for comparing two configs; of a mixture's tasks the keys that they set themselves.

    >>> flat(Config())["train.batch"]
    32
    """
    sections: dict[str, Mapping[str, Any]] = {f.name: vars(getattr(config, f.name)) for f in dataclasses.fields(config)}
    sections |= {f"data.mix.{task}": own for task, own in config.data.mix.items()}
    places = [(key.name, *key.name.rpartition(".")[::2]) for key in keys(config.data.mix)]
    return {name: sections[section][leaf] for name, section, leaf in places if leaf in sections[section]}


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings, numbers and booleans are TOML's; DEL is the one character TOML wants escaped besides.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _section_class(name: str) -> type:
    return typing.cast(type, typing.get_type_hints(Config)[name])


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not valid TOML: {error}") from None


def _flatten(tree: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Any]]:
    sections = [s.name for s in dataclasses.fields(Config)]
    for section, table in tree.items():
        if section not in sections:
            raise InputError(f"{file}: {section}: unknown section{did_you_mean(section, sections)}")
        if not isinstance(table, dict):
            raise InputError(f"{file}: {section}: is a section: write [{section}] and its keys below")
        for leaf, raw in table.items():
            if (section, leaf) != ("data", "mix"):
                yield f"{section}.{leaf}", raw
        if "mix" in table and section == "data":
            yield from _flatten_mix(table["mix"], file)


def _flatten_mix(tables: Any, file: Path) -> Iterator[tuple[str, Any]]:
    if not isinstance(tables, dict) or not tables:
        raise InputError(f"{file}: data.mix: has no tasks: write [data.mix.NAME] and its keys below for each")
    for task, table in tables.items():
        if not isinstance(table, dict) or not table:
            raise InputError(f"{file}: data.mix.{task}: is no task: write [data.mix.{task}] and its keys below")
        for leaf, raw in table.items():
            yield f"data.mix.{task}.{leaf}", raw


def _convert(raw: Any, kind: Any, where: str, text: bool) -> Any:
    """One value as its field's type; ``text`` says that it comes from a command line."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if text and raw in ("none", "") and type(None) in args:
            return None
        errors = []
        for option in args:
            if option is type(None):
                continue
            try:
                return _convert(raw, option, where, text)
            except InputError as error:
                errors.append(str(error).removeprefix(f"{where}: "))
        raise InputError(f"{where}: " + "; or ".join(errors))
    if origin is Literal:
        if raw in args:
            return raw
        raise InputError(f"{where}: {raw!r} is not one of {', '.join(map(str, args))}{did_you_mean(str(raw), args)}")
    if origin is tuple:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list):
            raise InputError(f"{where}: expected a list of strings, got {raw!r}")
        return tuple(_convert(item, args[0], where, text) for item in items)
    if kind is bool:
        if text and str(raw).lower() in ("true", "false"):
            return str(raw).lower() == "true"
        if isinstance(raw, bool):
            return raw
        raise InputError(f"{where}: expected true or false, got {raw!r}")
    if kind is str:
        if isinstance(raw, str):
            return raw
        raise InputError(f"{where}: expected text, got {raw!r}")
    if isinstance(raw, (bool, list, dict)) or (isinstance(raw, str) and not text):
        raise InputError(f"{where}: expected {_NUMBER[kind]}, got {raw!r}")
    try:
        number = kind(raw)
    except (ValueError, TypeError, OverflowError):  # of words, of a TOML date, of inf as a whole number
        raise InputError(f"{where}: expected {_NUMBER[kind]}, got {raw!r}") from None
    if kind is int and number != raw and not text:
        raise InputError(f"{where}: expected {_NUMBER[kind]}, got {raw!r}")
    if isinstance(number, float) and not math.isfinite(number):
        raise InputError(f"{where}: expected a finite number, got {raw!r}")
    return number


_NUMBER = {int: "a whole number", float: "a number"}
# Held-out figures that need no text metric; which of them there are depends on the model's kind.
_LOSSES = (
    *("loss", "perplexity", "word_perplexity"),
    *("masked_loss", "masked_accuracy", "next_sentence_loss", "next_sentence_accuracy"),
)
_FIGURES = {"rouge": ("rouge1", "rouge2", "rougeL")}  # metrics that give figures of other names

# key → (test, what is right); each is checked on the value alone.
_RANGES: dict[str, tuple[Any, str]] = {
    "run.seed": (lambda v: 0 <= v < 2**63, "0 or more and below 2**63"),
    "run.threads": (lambda v: v >= 0, "0 or more"),
    "model.vocab_size": (lambda v: v >= 0, "0 or more"),
    "model.dropout": (lambda v: v is None or 0 <= v < 1, "at least 0 and below 1"),
    "data.validation_split": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "data.piece": (lambda v: v == 0 or v >= 8, "0, or 8 or more"),
    "data.max_source_length": (lambda v: v >= 2, "2 or more (one token and the end token)"),
    "data.max_target_length": (lambda v: v >= 2, "2 or more (one token and the end token)"),
    "data.block": (lambda v: v == 0 or v >= 2, "0, or 2 or more"),
    "data.max_predictions": (lambda v: v >= 0, "0 or more"),
    "data.source_row": (lambda v: v >= 0, "0 or more"),
    "data.target_row": (lambda v: v >= 0, "0 or more"),
    "data.max_samples": (lambda v: v >= 0, "0 or more"),
    "data.max_validation_samples": (lambda v: v >= 0, "0 or more"),
    "data.shuffle": (lambda v: v >= 1, "1 or more"),
    "data.retries": (lambda v: v >= 0, "0 or more"),
    "data.readers": (lambda v: v >= 0, "0 or more"),
    "data.max_bad_lines": (lambda v: v >= 0, "0 or more"),
    "data.mixing_limit": (lambda v: v >= 0, "0 or more"),
    "data.temperature": (lambda v: v > 0, "above 0"),
    "train.steps": (lambda v: v >= 0, "0 or more"),
    "train.epochs": (lambda v: v > 0, "above 0"),
    "train.stop_at": (lambda v: v >= 0, "0 or more"),
    "train.batch": (lambda v: v >= 1, "1 or more"),
    "train.micro_rows": (lambda v: v == "auto" or v >= 1, '1 or more, or "auto"'),
    "train.label_smoothing": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "train.log_every": (lambda v: v == "epoch" or v >= 1, '1 or more, or "epoch"'),
    "train.evaluate_every": (lambda v: v == "epoch" or v >= 0, '0 or more, or "epoch"'),
    "train.patience": (lambda v: v >= 0, "0 or more"),
    "tune.tokens": (lambda v: v >= 1, "1 or more"),
    "tune.r": (lambda v: v >= 1, "1 or more"),
    "tune.alpha": (lambda v: v > 0, "above 0"),
    "tune.dropout": (lambda v: v == 0, "0 (LoRA adapts weights here, which have no input to drop from)"),
    "optim.lr": (lambda v: v is None or v >= 0, "0 or more"),
    "optim.warmup": (lambda v: v >= 0, "0 or more"),
    "optim.weight_decay": (lambda v: v >= 0, "0 or more"),
    "optim.clip": (lambda v: v >= 0, "0 or more"),
    "optim.beta1": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "optim.beta2": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "optim.eps": (lambda v: v > 0, "above 0"),
    "parallel.dp": (lambda v: v >= 0, "0 or more"),
    "checkpoint.every": (lambda v: v == "epoch" or v >= 0, '0 or more, or "epoch"'),
    "checkpoint.keep": (lambda v: v >= 1, "1 or more"),
    "generate.beams": (lambda v: v >= 1, "1 or more"),
    "generate.max_length": (lambda v: v >= 0, "0 or more"),
    "generate.temperature": (lambda v: v >= 0, "0 or more"),
    "generate.top_k": (lambda v: v >= 0, "0 or more"),
    "generate.top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "generate.batch": (lambda v: v >= 1, "1 or more"),
}


def _validate(config: Config, origin: Mapping[str, str]) -> None:
    def fail(name: str, message: str) -> None:
        raise InputError(f"{origin.get(name, name)}: {message}")

    values = flat(config)
    for name, value in values.items():
        right, words = _RANGES.get(re.sub(r"^data\.mix\..*\.", "data.", name), (None, ""))
        if right and not right(value):
            fail(name, f"must be {words}, got {value!r}")
    for task, own in tasks(config.data).items():
        section = f"data.mix.{task}" if task else "data"
        for row, longest in (("source_row", "max_source_length"), ("target_row", "max_target_length")):
            if 0 < getattr(own, row) < getattr(own, longest):
                fail(
                    f"data.{row}",
                    f"must hold one example: at least {section}.{longest} = {getattr(own, longest)}, or 0",
                )
        if own.validation and own.validation_split:
            fail(f"{section}.validation_split", f"is for runs without {section}.validation; give one of them")
    _validate_mix(config.data, fail)
    if values["model.path"] and values["model.config"]:
        fail("model.config", "is for training from scratch; give it or model.path, not both")
    if values["model.overrides"] and not values["model.config"]:
        fail("model.overrides", "changes model.config, for training from scratch; none is given")
    if values["tune.method"] != "none" and not values["model.path"]:
        fail("tune.method", "an adapter belongs to a trained model: give model.path")
    if values["tune.method"] != "none" and values["model.freeze"]:
        fail("model.freeze", f'tune.method = "{values["tune.method"]}" freezes the whole model already; leave one out')
    for key in ("model.new_tokens", "model.vocab_size"):
        if values["tune.method"] != "none" and values[key]:
            fail(
                key, f'changes the model, which tune.method = "{values["tune.method"]}" leaves as it is; leave one out'
            )
    if (values["tune.init"] == "text") != bool(values["tune.text"]):
        fail("tune.text", 'is what tune.init = "text" starts from; give both or neither')
    if values["generate.beams"] > 1 and values["generate.temperature"] > 0:
        fail("generate.temperature", "samples, and beams search: set generate.beams to 1 or the temperature to 0")
    if values["optim.relative_step"] and values["optim.name"] != "adafactor":
        fail("optim.relative_step", 'needs optim.name = "adafactor"')
    if values["optim.relative_step"] and values["optim.lr"] is not None:
        fail("optim.lr", "is unused under optim.relative_step; leave one of them out")
    _validate_best(config, fail)
    for name in values["track.to"]:
        if name not in ("tensorboard", "wandb", "trackio"):
            fail("track.to", f"no tracker {name!r}{did_you_mean(name, ('tensorboard', 'wandb', 'trackio'))}")


def _validate_mix(data: Data, fail: Callable[[str, str], None]) -> None:
    rates = {task: own.rate for task, own in tasks(data).items()}
    fixed = any(rates.values())
    for task, rate in rates.items():
        if rate < 0:
            fail(f"data.mix.{task}.rate", f"must be 0 or more, got {rate!r}")
        if fixed and not rate:
            fail(f"data.mix.{task}.rate", "is missing: give a rate to every task, or to none")
    used = {"mixing": not fixed, "mixing_limit": not fixed and data.mixing != "equal"}
    for key, use in (used | {"temperature": data.mixing == "temperature"}).items():
        if getattr(data, key) != getattr(Data, key):
            if not data.mix:
                fail(f"data.{key}", "is for mixtures: give their tasks, as [data.mix.NAME]")
            if not use:
                unused = "where tasks have rates" if fixed else f'under data.mixing = "{data.mixing}"'
                fail(f"data.{key}", f"is unused {unused}; leave one of them out")
    if data.mix and data.streaming:
        fail("data.streaming", "is for one task, not for mixtures")


def figure_name(task: str, figure: str) -> str:
    """What a task's figure is called among those of others; one that has no name leaves it as it is.

    >>> figure_name("summaries", "chrf"), figure_name("", "chrf")
    ('summaries_chrf', 'chrf')
    """
    return f"{task}_{figure}" if task else figure


def _validate_best(config: Config, fail: Callable[[str, str], None]) -> None:
    texts = {
        task: [figure for metric in config.metrics(task) for figure in _FIGURES.get(metric, (metric,))]
        for task in tasks(config.data)
    }
    told = [*_LOSSES, *texts.get("", ())]
    for task in config.data.mix:
        for name in (figure_name(task, figure) for figure in (*_LOSSES, *texts[task])):
            if name in told:
                fail(f"data.mix.{task}", f"another figure is called {name} already: give the task another name")
            told.append(name)
    # A function by import path names its figures itself.
    if config.train.best not in told and not any(":" in figure for own in texts.values() for figure in own):
        shown = [figure_name(task, figure) for task, own in texts.items() for figure in ("loss", *own)]
        source = "of train.metrics come" if "" in texts else "there are"
        fail("train.best", f"{config.train.best!r} is not computed, {source}: {', '.join(dict.fromkeys(shown))}")
