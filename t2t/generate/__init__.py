"""Texts from a trained model: ``t2t.load(folder).generate(texts)``, and the settings that travel in the model folder.

The file ``t2t.json`` beside the weights says how sources were prepared in training and how texts are produced:

    {"prefix": "restore: ", "max_source_length": 256, "max_target_length": 256,
     "source_transforms": ["strip_diacritics"], "generate": {"beams": 4}}

Whatever it leaves out has its default, and so has a folder without it. A model of several tasks has such settings for
each, by name, under ``tasks``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from t2t import config
from t2t.config import Config, Data, Generate
from t2t.data import tasks, tokens
from t2t.data.chat import Prompt, Template, checked_question
from t2t.data.tasks import Messages
from t2t.device import resolve
from t2t.errors import InputError, did_you_mean
from t2t.generate import batching
from t2t.models import adapters
from t2t.models import load as models
from t2t.models.base import Model

FILE = "t2t.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How sources become what the model knows, and how long and in which way it answers.

    >>> Settings(prefix="summarize: ").max_source_length
    512
    """

    prefix: str = ""
    max_source_length: int = Data.max_source_length
    max_target_length: int = Data.max_target_length
    source_transforms: tuple[str, ...] = ()
    generate: Generate = field(default_factory=Generate)
    template: str = ""  # how a causal model was shown pairs; empty: it goes on from the source
    chat: bool = False  # it was shown conversations, by the tokenizer's chat template
    tasks: Mapping[str, Settings] = field(default_factory=dict)  # by name, of a model that learned several

    @property
    def notes(self) -> list[str]:
        """What to tell whoever uses a model of several tasks and chose none of them.

        >>> Settings(tasks={"title": Settings(), "gist": Settings()}).notes
        ['no task given, so sources are read as they are; there are: title, gist']
        """
        told = f"no task given, so sources are read as they are; there are: {', '.join(self.tasks)}"
        return [told] if self.tasks else []


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, its Hugging Face config and its settings, ready to generate.

    >>> from t2t.data.tokens import Bytes
    >>> raw = {"model_type": "t5", "vocab_size": 384, "d_model": 8, "num_layers": 1}
    >>> loaded = Loaded(models.create(raw, seed=0), Bytes(), raw, Settings())
    >>> len(loaded.generate(["una", "alta"], max_length=4, beams=2))
    2
    """

    model: Model
    tokenizer: tokens.Tokenizer
    config: dict[str, Any]
    settings: Settings

    def task(self, name: str) -> Loaded:
        """The same with the settings of one of the tasks that the model was trained on; empty: with those of none.

        >>> loaded = Loaded(None, None, {}, Settings(tasks={"title": Settings(prefix="title: ")}))
        >>> loaded.task("title").settings.prefix, loaded.task("").settings.prefix
        ('title: ', '')
        >>> loaded.task("titel")
        Traceback (most recent call last):
        t2t.errors.InputError: task: no task 'titel' (did you mean title?); the model has: title
        """
        known = self.settings.tasks
        if name and name not in known:
            has = f"the model has: {', '.join(known)}" if known else "the model was trained on one without a name"
            raise InputError(f"task: no task {name!r}{did_you_mean(name, known)}; {has}")
        return dataclasses.replace(self, settings=known[name]) if name else self

    def generate(self, texts: Iterable[str | Messages], seed: int = 0, **overrides: Any) -> list[str]:
        """A text for each text; ``overrides`` are fields of the config's generate section: ``beams=4``.

        A model that was trained on chat answers: a text is what the user says, or there are messages, each with its
        ``role`` and ``content``.
        """
        return list(self.stream(texts, seed, None, **overrides))

    def stream(
        self,
        texts: Iterable[str | Messages],
        seed: int = 0,
        on_cut: Callable[[int], None] | None = None,
        **overrides: Any,
    ) -> Iterator[str]:
        """The same while the texts come in; ``on_cut`` is told the number of each source too long for the model."""
        if isinstance(texts, str):
            raise InputError("generate: expected a list of texts, got one text: put it into a list")
        known = self.settings
        settings = dataclasses.replace(known, generate=_replaced(known.generate, overrides, "generate."))
        _check_ranges(settings)
        sources = self._inputs(texts)
        lengths = known.max_source_length, known.max_target_length
        outputs = batching.texts(
            self.model,
            self.tokenizer,
            sources,
            settings.generate,
            *lengths,
            known.prefix,
            seed,
            on_cut=on_cut,
            template=known.template,
        )
        return map(str.strip, outputs) if known.chat else outputs

    def generate_diverse(
        self, text: str | Messages, beams: int, groups: int, diversity_penalty: float, max_length: int = 0
    ) -> list[str]:
        """Texts that differ for one input, by diverse beam search: each group's best first, then their second best."""
        known = self.settings
        (source,) = self._inputs([text])
        lengths = known.max_source_length, max_length or known.generate.max_length or known.max_target_length
        return batching.diverse_texts(
            self.model,
            self.tokenizer,
            source,
            *lengths,
            beams=beams,
            groups=groups,
            diversity_penalty=diversity_penalty,
            prefix=known.prefix,
            template=known.template,
        )

    def _inputs(self, texts: Iterable[str | Messages]) -> Iterator[str | Prompt]:
        """What the model reads of texts, transformed as in training, or of conversations."""
        functions = [tasks.transform(spec, "source_transforms") for spec in self.settings.source_transforms]
        sources = (reduce(lambda t, function: function(t), functions, x) if isinstance(x, str) else x for x in texts)
        return self._prompts(sources) if self.settings.chat else map(_only_text, sources)

    def _prompts(self, inputs: Iterable[str | Messages]) -> Iterator[Prompt]:
        """What to answer: a text is one message of the user."""
        template, longest = Template(self.tokenizer), self.settings.max_source_length
        for number, given in enumerate(inputs, 1):
            try:
                found = [{"role": "user", "content": self.settings.prefix + given}] if isinstance(given, str) else given
                yield template.prompt(checked_question(found), longest)
            except tasks.BadField as error:
                raise InputError(f"input {number}: {error}") from None


def _only_text(given: str | Messages) -> str:
    if not isinstance(given, str):
        raise InputError("generate: got messages, but the model was not trained on chat: give texts")
    return given


def merge(folder: str | Path, out: Path) -> None:
    """Fold an adapter into its base and write both as one Hugging Face folder.

    >>> merge("asset:byt5-ro", Path("merged"))
    Traceback (most recent call last):
    t2t.errors.InputError: asset:byt5-ro: holds no adapter, so there is nothing to merge
    """
    found = models.find(str(folder))
    if adapters.read_config(found) is None:
        raise InputError(f"{folder}: holds no adapter, so there is nothing to merge")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out: {out} is there already; give a folder that is not, or empty it")
    loaded = load(found, "cpu")
    if loaded.model.prompt:
        reason = "a soft prompt is part of the input and cannot be folded into weights: use the folder as it is"
        raise InputError(f"{folder}: {reason}")
    models.save(dict(loaded.model.named_parameters()), loaded.config, out)
    loaded.tokenizer.save(out)
    save_settings(out, loaded.settings)
    for home in (found, adapters.base(found)):
        file = home / "generation_config.json"
        if file.is_file():
            shutil.copy(file, out)
            break


def load(folder: str | Path, device: str = "auto") -> Loaded:
    """Open a model folder (or ``asset:NAME``, or a hub name), or an adapter's that names its base, for generation.

    >>> load("no/such/folder")
    Traceback (most recent call last):
    t2t.errors.InputError: model.path: no such folder: no/such/folder
    """
    found = models.find(str(folder))
    home = found if found.is_file() or (found / FILE).is_file() else adapters.base(found)  # others hold weights alone
    settings = read_settings(home)
    model, raw = adapters.load(found, resolve(device))
    tokenizer = tokens.load(str(home))
    if any(own.chat for own in (settings, *settings.tasks.values())):
        model.stops = (Template(tokenizer).end_id,)
    return Loaded(model.eval(), tokenizer, raw, settings)


def save_settings(folder: Path, settings: Settings) -> None:
    """Write ``t2t.json`` into a model folder, without the transforms that do not travel (see `travels`).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     save_settings(Path(name), Settings(source_transforms=("lower", "my.module:function")))
    ...     read_settings(Path(name)).source_transforms
    ('lower',)
    """
    tree = dataclasses.asdict(_travelling(settings))
    (folder / FILE).write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _travelling(settings: Settings) -> Settings:
    kept = tuple(spec for spec in settings.source_transforms if travels(spec))
    tasks = {name: _travelling(own) for name, own in settings.tasks.items()}
    return dataclasses.replace(settings, source_transforms=kept, tasks=tasks)


def read_settings(folder: Path) -> Settings:
    """The settings in a model folder; the defaults where it has none.

    >>> read_settings(Path("nowhere")) == Settings()
    True
    """
    file = folder / FILE
    if not file.is_file():
        return Settings()
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    settings = _replaced(Settings(), raw, f"{file}: ")
    _check(settings, f"{file}: ")
    for name, own in settings.tasks.items():
        _check(own, f"{file}: tasks.{name}.")
    return settings


def _check(settings: Settings, where: str) -> None:
    _check_ranges(settings, where)
    for spec in settings.source_transforms:
        if not travels(spec):
            reason = "a model folder may not name code to run, only built-in transforms and s/REGEX/TEXT/"
            raise InputError(f"{where}source_transforms: {spec!r}: {reason}")
        tasks.transform(spec, f"{where}source_transforms")


def travels(spec: str) -> bool:
    """Whether a transform may go with a model: a built-in name or a substitution, never a function by import path.

    >>> travels("strip_diacritics"), travels("s/[0-9]//"), travels("my.module:function")
    (True, True, False)
    """
    # Neither form can reach the import in `tasks.transform`: a name has no colon, and s with a mark is a substitution.
    return re.fullmatch(r"[a-z_]+|s[^\w.\\].*", spec, re.DOTALL) is not None


def _replaced(base: T, raw: Any, where: str) -> T:
    """A dataclass with some of its fields given anew, each known and of its type; ``where`` stands before the key."""
    if not isinstance(raw, Mapping):
        raise InputError(f"{where.rstrip(': .')}: expected an object with keys, got {raw!r}")
    kinds = typing.get_type_hints(type(base))
    for key in raw:
        if key not in kinds:
            raise InputError(f"{where}{key}: unknown key{did_you_mean(key, kinds)}")
    values = {key: _typed(value, kinds[key], getattr(base, key), f"{where}{key}") for key, value in raw.items()}
    return dataclasses.replace(base, **values)  # type: ignore[type-var]


def _typed(value: Any, kind: Any, base: Any, where: str) -> Any:
    if kind is Generate:
        return _replaced(base, value, f"{where}.")
    if typing.get_origin(kind) is Mapping:
        if not isinstance(value, dict):
            raise InputError(f"{where}: expected an object with settings by name, got {value!r}")
        return {name: _replaced(Settings(), own, f"{where}.{name}.") for name, own in value.items()}
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError(f"{where}: expected a list of strings, got {value!r}")
        return tuple(value)
    wanted = (int, float) if kind is float else kind
    if (
        not isinstance(value, wanted)
        or isinstance(value, bool) != (kind is bool)
        or (kind is float and not math.isfinite(value))
    ):
        raise InputError(f"{where}: expected {_WORDS[kind]}, got {value!r}")
    return kind(value)


_WORDS = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}


def _check_ranges(settings: Settings, where: str = "") -> None:
    """Hold the values to the ranges of the config's keys."""
    data = Data(max_source_length=settings.max_source_length, max_target_length=settings.max_target_length)
    try:
        config.load(base=Config(data=data, generate=settings.generate))
    except InputError as error:
        raise InputError(f"{where}{str(error).removeprefix('data.')}") from None
