"""HDF5 shards of the classic BERT corpora, in which tokens are masked and texts are paired already.

| key | shape | what |
|---|---|---|
| input_ids | [N, S] | tokens, [CLS], [SEP] and masks included, zeros at the end |
| input_mask | [N, S] | 1 where there is a token |
| segment_ids | [N, S] | 1 in the second text of a pair |
| masked_lm_positions | [N, P] | where something is to be guessed; the first 0 ends the list |
| masked_lm_ids | [N, P] | what |
| next_sentence_labels | [N] or [N, 1] | 0: the second text follows the first, 1: it does not |

Only data in the file itself is read: links, external storage and virtual datasets, which could name any file of the
machine, are refused. Rows are read one by one, so that memory does not grow with the shards; of compressed shards
each costs a chunk, which ``data.readers`` spreads over processes.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t2t.data.masked import Masked
from t2t.data.packing import IGNORE, Feature
from t2t.data.text import NOTHING
from t2t.errors import InputError

WIDE = ("input_ids", "input_mask", "segment_ids")
FEW = ("masked_lm_positions", "masked_lm_ids")
PAIR = "next_sentence_labels"
MOST_OPEN = 256  # files at once


class Shards(Masked):
    """The rows of all shards, in the order of the files; with ``pairs`` the second loss is learned too.

    Row lengths are not known before a row is read, so that each is announced as long as the shard's rows are.
    """

    def __init__(self, files: Sequence[str | Path], vocab_size: int, pairs: bool = True) -> None:
        self.files, self.vocab_size, self.pairs = [str(file) for file in files], vocab_size, pairs
        self._open: dict[str, dict[str, Any]] = {}
        counts, lengths, few = np.array([_shape(file, self._shard(file)) for file in self.files]).T
        self._ends, self.longest, self.predictions = np.cumsum(counts), (0, int(lengths.max())), int(few.max())
        self._rows: np.ndarray | range = range(int(self._ends[-1]))
        self._digest = self._sampled()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # a reader process opens the files itself

    def __len__(self) -> int:
        return len(self._rows)

    def subset(self, rows: np.ndarray | range) -> Shards:
        """These examples alone."""
        part = copy.copy(self)
        part._open = {}
        part._rows = np.asarray(self._rows)[rows]
        return part

    def first(self, count: int) -> Shards:
        """At most so many examples, or with 0 all."""
        return self.subset(range(count)) if 0 < count < len(self) else self

    @property
    def fingerprint(self) -> str:
        """A digest of the shards' sizes, of all pair labels and of some rows, and of which rows are taken."""
        rows = self._rows if isinstance(self._rows, range) else hashlib.sha256(self._rows.tobytes()).hexdigest()[:16]
        return f"{self._digest}-{rows}-{self.pairs:d}"

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most slots that each row takes in both streams."""
        return np.zeros(len(index), dtype=np.int64), np.full(len(index), self.longest[1])

    def feature(self, i: int, seed: int) -> Feature:
        """Row ``i``, as it was masked when the shard was made."""
        file, row = self._place(i)
        ids, mask, types, positions, guessed = (self._read(file, key, row) for key in (*WIDE, *FEW))
        length = int(mask.sum())
        places = positions[: int(np.argmin(np.append(positions, 0) != 0))]
        label = int(self._read(file, PAIR, row).item())
        for key, right in (
            ("input_mask", length > 0 and bool((mask == (np.arange(len(mask)) < length)).all())),
            ("input_ids", ids.min() >= 0 and ids.max() < self.vocab_size),
            ("segment_ids", types.min() >= 0 and types.max() <= 1),
            ("masked_lm_positions", len(places) == 0 or (places.min() > 0 and places.max() < length)),
            ("masked_lm_ids", guessed.min() >= 0 and guessed.max() < self.vocab_size),
            (PAIR, label in (0, 1)),
        ):
            if not right:
                raise InputError(f"{file}: {key}: row {row}: {_EXPECTED[key]}")
        labels = np.full(length, IGNORE)
        labels[places] = guessed[: len(places)]
        return Feature(NOTHING, ids[:length], labels, types[:length], label if self.pairs else IGNORE)

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where row ``i`` is, and its tokens."""
        file, row = self._place(i)
        return {"where": f"{file}, row {row}", "text": self._read(file, "input_ids", row).tolist()}

    def _place(self, i: int) -> tuple[str, int]:
        row = int(self._rows[i])
        shard = int(np.searchsorted(self._ends, row, side="right"))
        return self.files[shard], row - (int(self._ends[shard - 1]) if shard else 0)

    def _read(self, file: str, key: str, rows: Any) -> np.ndarray:
        try:
            return np.asarray(self._shard(file)[key][rows]).astype(np.int64)
        except OSError as error:
            raise InputError(f"{file}: {key}: cannot be read: {error}") from None

    def _shard(self, file: str) -> dict[str, Any]:
        """The datasets of a file, which stays open; the one opened first is closed when there are many."""
        if file not in self._open:
            if len(self._open) == MOST_OPEN:
                next(iter(self._open.pop(next(iter(self._open))).values())).file.close()
            self._open[file] = _datasets(file)
        return self._open[file]

    def _sampled(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(self._read(file, PAIR, slice(None)).tobytes())
            count = len(self._shard(file)[PAIR])
            for key in (*WIDE, *FEW):
                for row in (0, count // 2, count - 1):
                    digest.update(self._read(file, key, row).tobytes())
        return digest.hexdigest()[:16]


_EXPECTED = {
    "input_mask": "expected ones for the tokens and then zeros",
    "input_ids": "holds what is no token of the vocabulary",
    "segment_ids": "expected zeros and ones",
    "masked_lm_positions": "holds a place outside the tokens",
    "masked_lm_ids": "holds what is no token of the vocabulary",
    PAIR: "expected 0 or 1",
}


def _shape(file: str, shard: dict[str, Any]) -> tuple[int, int, int]:
    """Rows of a shard, their length, and how many labels they have at most."""
    (count, length), few = shard["input_ids"].shape, shard["masked_lm_positions"].shape[1]
    if not count * length * few:
        raise InputError(f"{file}: input_ids: no rows")
    expected = dict.fromkeys(WIDE, ((count, length),)) | dict.fromkeys(FEW, ((count, few),))
    for key, shapes in (expected | {PAIR: ((count,), (count, 1))}).items():
        if shard[key].shape not in shapes:
            raise InputError(f"{file}: {key}: has shape {list(shard[key].shape)}, expected {list(shapes[0])}")
    return count, length, few


def _datasets(file: str) -> dict[str, Any]:
    try:
        import h5py
    except ImportError:
        raise InputError(f"{file}: HDF5 shards need the h5py package: pip install 't2t[hdf5]'") from None
    try:
        opened = h5py.File(file, "r")
    except OSError as error:
        raise InputError(f"{file}: not a whole HDF5 file: {error}") from None
    return {key: _dataset(opened, file, key) for key in (*WIDE, *FEW, PAIR)}


def _dataset(opened: Any, file: str, key: str) -> Any:
    """A dataset of whole numbers that is in the file itself."""
    import h5py

    link = opened.get(key, getlink=True)
    if link is None:
        raise InputError(f"{file}: {key}: no such key; found: {', '.join(opened)}")
    if not isinstance(link, h5py.HardLink):
        raise InputError(f"{file}: {key}: is a link to elsewhere, which is not followed")
    found = opened[key]
    if not isinstance(found, h5py.Dataset):
        raise InputError(f"{file}: {key}: is a group, expected a dataset")
    if found.is_virtual or found.external:
        raise InputError(f"{file}: {key}: keeps its data in other files, which are not read")
    dimensions = (1, 2) if key == PAIR else (2,)
    if found.dtype.kind not in "iu" or found.ndim not in dimensions:
        kind = f"{found.dtype} of {found.ndim} dimensions"
        raise InputError(f"{file}: {key}: is {kind}, expected whole numbers of {dimensions[-1]}")
    return found
