r"""From a record to a source and a target text: columns, pieces, transforms, prefix, in this order.

Columns that are not given are told by the first record of each file:

| the record | source, target |
|---|---|
| ``{"translation": {"s": ..., "t": ...}}`` | ``translation.s``, ``translation.t`` (any pair below, inside) |
| a pair of ``sources.PAIRS``: source/target, src/tgt, input/output, ... | the two of them |
| exactly two fields that are text, such as a .tsv file without header | the first, the second |
| ``text`` alone: plain text | ``text``, ``text`` |

Chat records, ``{"messages": [{"role": ..., "content": ...}, ...]}``, have no columns: see `t2t.data.chat`.

A given name may reach inside with dots (``translation.en``), and is also looked for inside ``translation``.
A list of strings is joined by spaces as a source; as a target its first string counts.

Transforms are declared by text:

| transform | what it does |
|---|---|
| ``strip_diacritics`` | takes the marks off letters: ``ș`` becomes ``s`` |
| ``lower``, ``strip`` | lower case; no white space around |
| ``nfc``, ``nfd``, ``nfkc``, ``nfkd`` | Unicode normal forms |
| ``s/REGEX/TEXT/`` | replaces every match; ``\1`` is a group; any mark may stand for ``/`` |
| ``package.module:function`` | your own, from text to text |

>>> task = Task(source_transforms=("strip_diacritics",), prefix="restore: ")
>>> task.describe(Record({"text": "Bună ziua"}, "ro.txt", 1))
'source: text | strip_diacritics, target: text'
"""

from __future__ import annotations

import importlib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from t2t.config import Data
from t2t.data.sources import PAIRS, Reader, Record, type_name
from t2t.errors import InputError, did_you_mean

ROLES = ("system", "user", "assistant")
Messages = Sequence[Mapping[str, str]]
"""A conversation: the role and the content of each message."""


class BadField(ValueError):
    """A record whose field gives no text."""


@dataclass(frozen=True, slots=True)
class Example:
    """What a model learns from: one text to be turned into another.

    >>> Example("1 2 3", "3 2 1", "pairs.tsv:7").target
    '3 2 1'
    """

    source: str
    target: str
    where: str


class Columns(NamedTuple):
    """Where source and target are in a record: the keys to follow, outermost first.

    >>> Columns(("translation", "en"), ("translation", "ro")).source
    ('translation', 'en')
    """

    source: tuple[str, ...]
    target: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """How records become examples; plain settings, named as in the config's data section.

    >>> Task(source="ro", target="en").source
    'ro'
    """

    source: str = ""
    target: str = ""
    prefix: str = ""
    source_transforms: tuple[str, ...] = ()
    target_transforms: tuple[str, ...] = ()
    piece: int = 0

    def __post_init__(self) -> None:
        for key, value, other in (("source", self.source, self.target), ("target", self.target, self.source)):
            if other and not value:
                raise InputError(f"data.{key}: is missing: give both columns (one name twice for plain text) or none")
        _transforms(self.source_transforms, "data.source_transforms")
        _transforms(self.target_transforms, "data.target_transforms")

    @classmethod
    def from_config(cls, data: Data) -> Task:
        """The task that the data section declares.

        >>> Task.from_config(Data(prefix="summarize: ")).prefix
        'summarize: '
        """
        return cls(data.source, data.target, data.prefix, data.source_transforms, data.target_transforms, data.piece)

    def columns(self, record: Record) -> Columns:
        """The columns given, or told by this record.

        >>> Task().columns(Record({"id": 5, "src": "a", "tgt": "b"}, "pairs.jsonl", 1))
        Columns(source=('src',), target=('tgt',))
        """
        if self.source:
            source, target = _find(record, self.source, "data.source"), _find(record, self.target, "data.target")
            columns = Columns(source, target)
        else:
            columns = _detect(record)
        if self.piece and columns.source != columns.target:
            names = f"{_name(columns.source)} and {_name(columns.target)}"
            raise InputError(f"data.piece: cuts plain text only, not the two columns {names} of {record.file}")
        return columns

    def describe(self, record: Record) -> str:
        """The columns of this record and what is done to them, for a person to read.

        >>> Task().describe(Record({"translation": {"s": "a", "t": "b"}}, "pairs.jsonl", 1))
        'source: translation.s, target: translation.t'
        """
        source, target = self.columns(record)
        return (
            f"source: {' | '.join((_name(source), *self.source_transforms))}, "
            f"target: {' | '.join((_name(target), *self.target_transforms))}"
        )

    def examples(self, reader: Reader, columns: Columns | None = None) -> Iterator[Example]:
        """Every record's example, or examples when ``piece`` cuts it; what has no text is a bad line of the reader.

        The columns are told by the first record of each file, unless they are given.

        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "ro.txt")
        ...     _ = file.write_text("Bună ziua\\nLa revedere\\n", encoding="utf-8")
        ...     task = Task(source_transforms=("strip_diacritics",), prefix="restore: ")
        ...     [(example.source, example.target) for example in task.examples(Reader([file]))]
        [('restore: Buna ziua', 'Bună ziua'), ('restore: La revedere', 'La revedere')]
        """
        to_source = _transforms(self.source_transforms, "data.source_transforms")
        to_target = _transforms(self.target_transforms, "data.target_transforms")
        file, told, count = "", columns or Columns((), ()), 0
        for record in reader:
            if record.file != file and columns is None:
                file, told = record.file, self.columns(record)
            try:
                texts = [
                    (_apply(to_source, source, record, "source"), _apply(to_target, target, record, "target"))
                    for source, target in self._texts(record, told)
                ]
            except BadField as error:
                reader.reject(record, str(error))
                continue
            for source, target in texts:
                count += 1
                yield Example(self.prefix + source, target, record.where)
        if not count and reader.files:
            raise InputError(
                f"{reader.files[0]}: no examples; {reader.bad_count} bad lines, the first: {reader.bad[0]}"
            )

    def _texts(self, record: Record, columns: Columns) -> Iterator[tuple[str, str]]:
        plain = columns.source == columns.target
        source = _text(record, columns.source, joined=True)
        if self.piece:
            # Cut before any transform, so that both sides of a pair are the same words.
            yield from ((piece, piece) for piece in pieces(source, self.piece))
        else:
            yield source, source if plain else _text(record, columns.target, joined=False)


def source_texts(reader: Reader, column: str = "") -> Iterator[str | Messages]:
    """The text of every record to generate from, or its messages; a target beside it is not needed.

    It is in the given column, or else, by the first record of each file, in the source of a pair of ``PAIRS``, with its
    target or alone, in the first of exactly two fields that are text, or in the only one.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "new.jsonl")
    ...     _ = file.write_text('{"id": "7", "article": ["One.", "Two."]}\\n')
    ...     list(source_texts(Reader([file])))
    ['One. Two.']
    """
    file, chat = "", False
    path: tuple[str, ...] = ()
    for record in reader:
        if record.file != file:
            file = record.file
            chat = not column and is_chat(record.fields)
            if not chat:
                path = _find(record, column, "data.source") if column else _detect_source(record)
        try:
            text = checked_messages(record.fields.get("messages")) if chat else _text(record, path, joined=True)
        except BadField as error:
            reader.reject(record, str(error))
            continue
        yield text


def transform(spec: str, key: str) -> Callable[[str], str]:
    """The function that a declaration means; ``key`` is the config key that errors name.

    >>> transform("strip_diacritics", "data.source_transforms")("Țară și pădure")
    'Tara si padure'
    >>> transform("s/([0-9]+) lei/RON \\\\1/", "data.target_transforms")("5 lei")
    'RON 5'
    >>> transform("lowr", "data.source_transforms")
    Traceback (most recent call last):
    t2t.errors.InputError: data.source_transforms: unknown transform 'lowr' (did you mean lower?)
    """
    if spec in _NAMED:
        return _NAMED[spec]
    if spec.startswith("s") and len(spec) > 1 and not (spec[1].isalnum() or spec[1] in "_.\\"):
        return _substitution(spec, key)
    module, colon, function = spec.partition(":")
    if colon and module and function:
        return _imported(spec, module, function, key)
    raise InputError(f"{key}: unknown transform {spec!r}{did_you_mean(spec, _NAMED)}")


def join(template: str) -> tuple[str, str, str]:
    """What a template has before the source, between source and target, and after the target.

    >>> join("Q: {source}\\nA: {target}")
    ('Q: ', '\\nA: ', '')
    """
    before, source, rest = template.partition("{source}")
    between, target, after = rest.partition("{target}")
    if not (source and target):
        raise InputError(f"data.template: {template!r} must have {{source}} in it, and {{target}} after that")
    return before, between, after


def pieces(text: str, limit: int) -> Iterator[str]:
    """The text in pieces of at most ``limit`` characters, cut at spaces; a longer word is cut where it must be.

    >>> list(pieces("one two three fourteen", 8))
    ['one two', 'three', 'fourteen']
    >>> list(pieces("incomprehensible", 8))
    ['incompre', 'hensible']
    """
    text = text.strip()
    start = 0
    while len(text) - start > limit:
        space = text.rfind(" ", start + 1, start + limit + 1)
        stop = space if space > 0 else start + limit
        yield text[start:stop].rstrip()
        start = stop
        while text[start].isspace():
            start += 1
    if text:
        yield text[start:]


def checked_text(value: Any, what: str) -> str:
    """A value that is text to learn from; `BadField` says why one is not.

    >>> checked_text(None, "field 'target'")
    Traceback (most recent call last):
    t2t.data.tasks.BadField: field 'target' is null, expected text
    """
    if not isinstance(value, str):
        raise BadField(f"{what} is {type_name(value)}, expected text")
    if not value.strip():
        raise BadField(f"{what} is empty")
    if "\0" in value:
        raise BadField(f"{what} holds a NUL character")
    if _SURROGATE.search(value):
        raise BadField(f"{what} holds half of a surrogate pair")
    return value


def is_chat(fields: Mapping[str, Any]) -> bool:
    """Whether a record is a conversation.

    >>> is_chat({"messages": [{"role": "user", "content": "Hi"}]}), is_chat({"messages": "none"})
    (True, False)
    """
    return isinstance(fields.get("messages"), list)


def checked_messages(found: Any) -> Messages:
    """The role and the content of each message; `BadField` says what is wrong with one.

    >>> checked_messages([{"role": "user", "content": "Hi", "id": 7}])
    ({'role': 'user', 'content': 'Hi'},)
    >>> checked_messages([{"role": "usr", "content": "Hi"}])
    Traceback (most recent call last):
    t2t.data.tasks.BadField: message 1 has the role 'usr', expected system, user, assistant (did you mean user?)
    """
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise BadField("no messages, where a list of them is expected")
    messages = []
    for number, message in enumerate(found, 1):
        if not isinstance(message, Mapping):
            raise BadField(f"message {number} is {type_name(message)}, expected an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            near = did_you_mean(role, ROLES) if isinstance(role, str) else ""
            raise BadField(f"message {number} has the role {role!r}, expected {', '.join(ROLES)}{near}")
        content = checked_text(message.get("content"), f"the content of message {number}")
        messages.append({"role": role, "content": content})
    return tuple(messages)


_MISSING = object()
# JSON can escape half of a surrogate pair, which no encoding can write.
_SURROGATE = re.compile("[\ud800-\udfff]")


def _inner(record: Record) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields to look among, and the keys that lead to them."""
    inner = record.fields.get("translation")
    return (inner, ("translation",)) if isinstance(inner, dict) else (record.fields, ())


def _known_pair(fields: dict[str, Any]) -> tuple[str, str] | None:
    names = {name.lower(): name for name in fields}
    return next(((names[s], names[t]) for s, t in PAIRS if s in names and t in names), None)


def _text_names(fields: dict[str, Any]) -> list[str]:
    return [name for name, value in fields.items() if isinstance(value, str)]


def _detect(record: Record) -> Columns:
    if is_chat(record.fields):
        raise InputError(f'{record.where}: holds chat messages: data.objective = "chat" is for them')
    fields, inside = _inner(record)
    pair, texts = _known_pair(fields), _text_names(fields)
    if pair:
        return Columns((*inside, pair[0]), (*inside, pair[1]))
    if len(texts) == 2 and not inside:
        return Columns((texts[0],), (texts[1],))
    if texts == ["text"]:
        return Columns((*inside, "text"), (*inside, "text"))
    example = f', as "{texts[0]}" and "{texts[-1]}"' if len(texts) in (1, 2) else ""
    found = ", ".join(_names(record.fields))
    raise InputError(
        f"{record.where}: cannot tell which of the columns {found} are source and target: "
        f"set data.source and data.target{example}"
    )


def _detect_source(record: Record) -> tuple[str, ...]:
    fields, inside = _inner(record)
    names, texts = {name.lower(): name for name in fields}, _text_names(fields)
    known = _known_pair(fields) or [names[source] for source, _ in PAIRS if source in names]
    if known:
        return (*inside, known[0])
    if len(texts) == 1 or (len(texts) == 2 and not inside):
        return (*inside, texts[0])
    found = ", ".join(_names(record.fields))
    raise InputError(f"{record.where}: cannot tell which of the columns {found} is the source: set data.source")


def _find(record: Record, name: str, key: str) -> tuple[str, ...]:
    for path in ((name,), tuple(name.split(".")), ("translation", name)):
        if _get(record.fields, path) is not _MISSING:
            return path
    found = list(_names(record.fields))
    raise InputError(f"{record.where}: {key}: no column {name!r}{did_you_mean(name, found)}; found: {', '.join(found)}")


def _get(fields: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        fields = fields.get(key, _MISSING) if isinstance(fields, dict) else _MISSING
    return fields


def _names(fields: dict[str, Any], inside: tuple[str, ...] = ()) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _names(value, (*inside, name))
        else:
            yield _name((*inside, name))


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _text(record: Record, path: tuple[str, ...], joined: bool) -> str:
    value = _get(record.fields, path)
    if value is _MISSING:
        raise BadField(f"no field {_name(path)!r}")
    if isinstance(value, list):
        strange = [item for item in value if not isinstance(item, str)]
        if strange:
            raise BadField(f"field {_name(path)!r} is an array that holds {type_name(strange[0])}, expected strings")
        value = " ".join(value if joined else value[:1])
    return checked_text(value, f"field {_name(path)!r}")


def _transforms(specs: Sequence[str], key: str) -> list[tuple[str, Callable[[str], str]]]:
    return [(spec, transform(spec, key)) for spec in specs]


def _apply(transforms: list[tuple[str, Callable[[str], str]]], text: str, record: Record, side: str) -> str:
    for spec, function in transforms:
        try:
            text = function(text)
        except Exception as error:
            error.add_note(f"in {spec}, for {record.where}")
            raise
        if not isinstance(text, str):
            raise InputError(f"{record.where}: {spec} returned {type(text).__name__}, expected str")
    if not text.strip():
        raise BadField(f"the {side} is empty after its transforms")
    return text


def _strip_diacritics(text: str) -> str:
    marked = unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", "".join(itertools.filterfalse(unicodedata.combining, marked)))


_NAMED: dict[str, Callable[[str], str]] = {
    "strip_diacritics": _strip_diacritics,
    "lower": str.lower,
    "strip": str.strip,
    "nfc": partial(unicodedata.normalize, "NFC"),
    "nfd": partial(unicodedata.normalize, "NFD"),
    "nfkc": partial(unicodedata.normalize, "NFKC"),
    "nfkd": partial(unicodedata.normalize, "NFKD"),
}


def _substitution(spec: str, key: str) -> Callable[[str], str]:
    mark = spec[1]
    part = rf"((?:\\.|(?!{re.escape(mark)})[^\\])*){re.escape(mark)}"
    parts = re.fullmatch(rf"s{re.escape(mark)}{part}{part}", spec, re.DOTALL)
    if parts is None:
        advice = f"s{mark}REGEX{mark}TEXT{mark}; every match is replaced, and flags go into the regex, as (?i)"
        raise InputError(f"{key}: {spec!r}: expected {advice}")
    # In a regex an escaped mark is that mark already; in a replacement it is not.
    text = re.sub(r"\\(.)", lambda m: mark if m[1] == mark else m[0], parts[2], flags=re.DOTALL)
    try:
        regex = re.compile(parts[1])
        regex.sub(text, "")  # finds fault with the groups named in the replacement
    except (re.error, IndexError) as error:
        raise InputError(f"{key}: {spec!r}: {error}") from None
    return partial(regex.sub, text)


def _imported(spec: str, module_name: str, function_name: str, key: str) -> Callable[[str], str]:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{key}: {spec}: cannot import: {error} (is its folder on PYTHONPATH?)") from None
    function = getattr(module, function_name, None)
    if function is None:
        near = did_you_mean(function_name, vars(module))
        raise InputError(f"{key}: {spec}: no {function_name!r} in {module_name}{near}")
    if not callable(function):
        raise InputError(f"{key}: {spec}: is {type(function).__name__}, expected a function from str to str")
    return function
