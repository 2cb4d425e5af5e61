"""Datasets of Hugging Face's `datasets` in the place of files: ``dataset:NAME[:CONFIG][@SPLIT]``.

| NAME | what is read |
|---|---|
| ``owner/name`` or ``name`` | a dataset of the hub, or of the cache where there is no network |
| a folder | what ``save_to_disk`` wrote there, or the data files in it as ``load_dataset`` finds them |
| a file that ends in .arrow | its rows |
| arrow, csv, json, parquet, text | the data files that CONFIG names: a URL, a path or a glob |

SPLIT may be a slice or a sum: ``train[:1%]``, ``train[100:200]+validation``. What has no splits of its own (a saved
``Dataset``, an .arrow file, data files by name) is the split ``train``. Where none is given, data.train means
``train``, data.validation means ``validation``, and elsewhere a dataset with a single split needs no name for it.

Rows are read from memory-mapped Arrow files, a few hundred at a time and from any row on, so that memory does not grow
with the dataset; data that is not Arrow yet is converted into the cache of `datasets` first, unless it is streamed.
Rows in which nothing is written are passed over, as blank lines of files are. No script of a dataset is ever run.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from t2t.data import arrow
from t2t.errors import InputError, did_you_mean

PREFIX = "dataset:"
BUILDERS = ("arrow", "csv", "json", "parquet", "text")
"""Formats whose data files may be named themselves, as ``dataset:parquet:https://.../train.parquet``."""

SPLITS = {"data.train": "train", "data.validation": "validation"}
"""The splits that these keys mean where none is given."""

ROWS = 256  # read at once


@dataclass(frozen=True)
class Undecoded:
    """Stands in a row for what is not text and is never decoded: an image, audio, video.

    >>> Undecoded("of the type Image").what
    'of the type Image'
    """

    what: str


class _Name(NamedTuple):
    path: str
    config: str  # or, where the path is one of the BUILDERS, the data files
    split: str

    @classmethod
    def parse(cls, entry: str) -> _Name:
        """The split is what follows the last @, the configuration what follows the first colon."""
        rest, split = entry.removeprefix(PREFIX), ""
        if found := re.search(r"@([^@/]*)$", rest):  # not the @ inside a URL
            rest, split = rest[: found.start()], found[1]
        path, _, config = rest.partition(":")
        return cls(path, config, split)

    def __str__(self) -> str:
        config, split = (f":{self.config}" if self.config else ""), (f"@{self.split}" if self.split else "")
        return f"{PREFIX}{self.path}{config}{split}"

    @property
    def saved(self) -> bool:
        """Whether `datasets` wrote it as Arrow files, which are read where they are."""
        folder = Path(self.path)
        names = ("state.json", "dataset_dict.json")
        return (self.path.endswith(".arrow") and folder.is_file()) or any((folder / name).is_file() for name in names)


def is_dataset(entry: str) -> bool:
    """Whether an entry of a config names a dataset, not a file.

    >>> is_dataset("dataset:abisee/cnn_dailymail:3.0.0@train"), is_dataset("train.jsonl")
    (True, False)
    """
    return entry.startswith(PREFIX)


def resolve(entry: str, key: str) -> str:
    """The same entry with its split, once configuration and split are known to exist.

    >>> resolve("dataset:no/such/folder@train", "data.train")
    Traceback (most recent call last):
    t2t.errors.InputError: data.train: dataset:no/such/folder@train: no such folder, and no name of the hub either
    """
    name = _Name.parse(entry)
    try:
        known = _splits(name)
        split = name.split or (SPLITS.get(key) or _only(name, known) if known else "train")
        for part in split.split("+"):
            asked = part.partition("[")[0].strip()
            if asked not in (known or ["train"]):
                found = f"; found: {', '.join(known)}" if known else ": it has none, and is read whole without a name"
                raise InputError(f"{name}: no split {asked!r}{did_you_mean(asked, known)}{found}")
        with _told(name):
            _datasets(name).ReadInstruction.from_spec(split)  # raises what is wrong with a slice
    except InputError as error:
        raise InputError(f"{key}: {error}") from error.__cause__
    return str(name._replace(split=split))


def count(entry: str) -> int:
    """How many rows there are, without reading them.

    >>> import datasets, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     datasets.Dataset.from_dict({"text": ["one", "two", "three"]}).save_to_disk(folder)
    ...     count(f"dataset:{folder}@train"), count(f"dataset:{folder}@train[:2]")
    (3, 2)
    """
    return len(_open(_Name.parse(entry)))


def rows(
    entry: str, start: int = 0, streaming: bool = False, columns: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Rows, each with its number, which counts from 1; the first ``start`` are left out.

    A row whose text is not UTF-8 is None. ``columns`` are those that text is asked of: a class label among them is
    given by its name, elsewhere by its number. With ``streaming``, data files are read as they come and nothing is
    stored; what was saved as Arrow is read where it is either way.

    >>> import datasets, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     datasets.Dataset.from_dict({"text": ["one", "two", "three"]}).save_to_disk(folder)
    ...     list(rows(f"dataset:{folder}@train", start=1))
    [(2, {'text': 'two'}), (3, {'text': 'three'})]
    """
    name = _Name.parse(entry)
    tables = _streamed(name, start) if streaming and not name.saved else _stored(name, start)
    number = start
    fields: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    with _told(name):
        for features, table in tables:
            kept = [column for column, feature in features.items() if not _decoded(feature) - {"Json"}]
            fields = fields or _fields(features, columns)
            for row in arrow.rows(table.select(kept)):
                number += 1
                if row is None or any(not _blank(value) for value in row.values()):
                    yield number, None if row is None else fields(row)


def fingerprint(entry: str) -> str:
    """Another one when the rows are others: from that of `datasets`, or the commit, ETag, time or size of data files.

    >>> import datasets, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     datasets.Dataset.from_dict({"text": ["one", "two", "three"]}).save_to_disk(folder)
    ...     fingerprint(f"dataset:{folder}@train") == fingerprint(f"dataset:{folder}@train[:2]")
    False
    """
    name = _Name.parse(entry)
    with _told(name):
        if name.saved:
            parts: list[Any] = [(split, dataset._fingerprint) for split, dataset in sorted(_saved(name).items())]
        else:
            builder = _builder(name)
            parts = [(builder.dataset_name, builder.config_id, builder.hash), *_sizes(name)]
    return hashlib.sha256(repr((name.split, parts)).encode()).hexdigest()[:16]


def _datasets(name: _Name) -> Any:
    try:
        import datasets
    except ImportError:
        raise InputError(f"{name}: needs the datasets package: pip install 't2t[hub]'") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _only(name: _Name, known: Sequence[str]) -> str:
    if len(known) > 1:
        raise InputError(f"{name}: name one of its splits, as {name}@{known[0]}; found: {', '.join(known)}")
    return known[0]


def _splits(name: _Name) -> list[str]:
    """The splits that there are; none where all is one."""
    datasets = _datasets(name)
    with _told(name):
        if name.saved:
            parts = _saved(name)
            return list(parts) if (Path(name.path) / "dataset_dict.json").is_file() else []
        builder = _builder(name)
        if name.path in BUILDERS:
            return []
        return [*map(str, builder.info.splits or datasets.get_dataset_split_names(name.path, name.config or None))]


def _saved(name: _Name) -> dict[str, Any]:
    datasets = _datasets(name)
    if name.config:
        raise InputError(f"{name}: what was saved as Arrow has no configurations: leave out :{name.config}")
    if name.path.endswith(".arrow"):
        return {"train": datasets.Dataset.from_file(name.path)}
    found = datasets.load_from_disk(name.path)
    return found if isinstance(found, dict) else {"train": found}


def _open(name: _Name) -> Any:
    """All rows, memory-mapped."""
    datasets = _datasets(name)
    with _told(name):
        if name.saved:
            parts = _saved(name)
        else:
            builder = _builder(name)
            builder.download_and_prepare()
            parts = builder.as_dataset()
        slices = datasets.ReadInstruction.from_spec(name.split).to_absolute({s: len(part) for s, part in parts.items()})
        pieces = [parts[piece.splitname].select(range(piece.from_, piece.to)) for piece in slices]
        return datasets.concatenate_datasets(pieces) if len(pieces) > 1 else pieces[0]


def _stored(name: _Name, start: int) -> Iterator[tuple[Any, Any]]:
    """Features and rows, a table at a time."""
    dataset = _open(name).with_format("arrow")
    for first in range(start, len(dataset), ROWS):
        yield dataset.features, dataset[first : first + ROWS]


def _streamed(name: _Name, start: int) -> Iterator[tuple[Any, Any]]:
    datasets = _datasets(name)
    if "[" in name.split or "+" in name.split:
        raise InputError(f"{name}: slices and sums of splits cannot be streamed: name one split")
    if name.path == "text" and "://" in name.config:  # datasets 5.2 hands the encoding to the HTTP client, which fails
        raise InputError(f"{name}: lines of text are streamed without {PREFIX}text: name {name.config} itself")
    dataset = _builder(name).as_streaming_dataset(name.split)
    for table in dataset.skip(start).with_format("arrow").iter(ROWS):
        yield dataset.features or datasets.Features.from_arrow_schema(table.schema), table


def _builder(name: _Name) -> Any:
    """What knows the data files; of the hub, the same commit for as long as the process lives."""
    path = Path(name.path)
    if name.path in BUILDERS:
        if not name.config:
            raise InputError(f"{name}: name the data files, as {PREFIX}{name.path}:https://.../train.{name.path}")
        return _datasets(name).load_dataset_builder(name.path, data_files=name.config)
    if path.is_file():
        raise InputError(f"{name}: is a file: leave out {PREFIX!r}, or name its format, as {PREFIX}json:{name.path}")
    if path.is_dir():
        return _configured(name.path, name.config)
    if name.path.startswith(("/", ".")) or name.path.count("/") > 1:
        beside = [folder.name for folder in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        raise InputError(f"{name}: no such folder, and no name of the hub either{near}")
    return _of_hub(name.path, name.config)


def _configured(path: str, config: str) -> Any:
    name = _Name(path, config, "")
    try:
        return _datasets(name).load_dataset_builder(path, config or None)
    except ValueError as error:
        # One is missing or unknown: the message lists those that there are, on the hub or in the cache.
        known = re.findall(r"'([^']+)'", str(error).rpartition("[")[2].partition("]")[0])
        if not known or config in known:
            raise
        unknown = f"no configuration {config!r}{did_you_mean(config, known)}"
        wrong = unknown if config else f"name one of its configurations, as {name}:{known[0]}"
        raise InputError(f"{name}: {wrong}; found: {', '.join(known)}") from None


_of_hub = functools.lru_cache(_configured)


def _sizes(name: _Name) -> list[tuple[Any, ...]]:
    """What is known of a data file with a URL; not every server tells an ETag, which `datasets` would look at."""
    if name.path not in BUILDERS or "://" not in name.config:
        return []
    from fsspec.core import url_to_fs

    system, path = url_to_fs(name.config)
    return [(name.config, system.info(path).get("size"))]


def _decoded(feature: Any) -> set[str]:
    """The types of all that `datasets` would decode inside a feature, such as Image and Json."""
    if isinstance(feature, dict):
        return set().union(*map(_decoded, feature.values()))
    if hasattr(feature, "decode_example"):
        return {type(feature).__name__}
    return _decoded(feature.feature) if hasattr(feature, "feature") else set()


def _fields(features: Any, columns: Sequence[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What makes a record's fields from a row: JSON parsed, labels named, and what is not text told by its type."""
    parsed = type(features)({column: feature for column, feature in features.items() if _decoded(feature) == {"Json"}})
    names = {column: features[column].names for column in columns if hasattr(features.get(column), "int2str")}
    undecoded = {
        column: Undecoded(f"of the type {' and '.join(sorted(types))}")
        for column, feature in features.items()
        if (types := _decoded(feature) - {"Json"})
    }

    def fields(row: dict[str, Any]) -> dict[str, Any]:
        if parsed:
            row |= parsed.decode_example({column: row[column] for column in parsed})
        for column, labels in names.items():
            number = row[column]
            row[column] = None if number is None or number < 0 else labels[number]
        return row | undecoded

    return fields


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


@contextmanager
def _told(name: _Name) -> Iterator[None]:
    """Turns what `datasets` and the libraries below it raise, which is of many types, into one line on this dataset."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    while type(error).__name__ == "DatasetGenerationError" and error.__cause__:
        error = error.__cause__
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "scripts are no longer supported" in text:
        return "is made by a script, which is never run: look for a copy of it in parquet"
    if isinstance(error, ImportError):
        return f"{text}: pip install 't2t[hub]'"
    if isinstance(error, ConnectionError):
        advice = "fetch it once where there is a network, or name a folder that save_to_disk wrote"
        return f"cannot be reached, and is not in the cache: {advice} ({text})"
    return f"cannot be read: {text}"
