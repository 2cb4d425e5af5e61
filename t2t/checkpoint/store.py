"""A run is a folder, and it cannot be lost: atomic checkpoints of safetensors and JSON.

::

    RUN/lock                                   held while a process trains in RUN
    RUN/checkpoints/step-000100/manifest.json  every tensor's pieces and checksums, every file's size
                                state.json     the rest of the run's state
                                model-00001.safetensors, optim-00001.safetensors, ...

A checkpoint is written under a hidden name and renamed when all of it is on the disk: a folder called
``step-...`` was once complete. Whether it still is, ``verify`` tells: the manifest vouches for each byte of the
other files, and its own checksum for the manifest.

>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as run:
...     folder = save(Path(run) / "checkpoints", 100, {"w": torch.ones(2)}, {"w.mean": torch.zeros(2)}, {"epoch": 1})
...     load(folder).state, load(folder).model
({'epoch': 1}, {'w': tensor([1., 1.])})
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

import torch
from torch import Tensor

from t2t.errors import InputError
from t2t.files import sync, write

_FORMAT = 1
_LONGEST_HEADER = 100_000_000  # as safetensors has it
_STEP = re.compile(r"step-(\d{6,})")
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class CorruptCheckpoint(InputError):
    """A checkpoint that is not what was saved; names the file, and the tensor where it is known.

    >>> str(CorruptCheckpoint("step-000100/state.json: is missing"))
    'step-000100/state.json: is missing'
    """


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint in memory, on the CPU.

    >>> Checkpoint(step=100, state={"epoch": 1}, model={}, optim={}).step
    100
    """

    step: int
    state: dict[str, Any]
    model: dict[str, Tensor]
    optim: dict[str, Tensor]


def save(
    root: Path,
    step: int,
    model: Mapping[str, Tensor],
    optim: Mapping[str, Tensor],
    state: Mapping[str, Any],
    shard_bytes: int = 2 << 30,
) -> Path:
    """Write ``root/step-NNNNNN`` and return it; what fails or is killed on the way changes no earlier checkpoint.

    Tensors may be of any device, stride or sharing; one at a time is copied to the CPU. ``state`` is JSON.
    A step that is already there and verifies is left as it is, since a run reaches each step in one state only;
    one that does not verify is replaced.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     folder = save(Path(root), 100, {"w": torch.ones(2, 3)}, {}, {"epoch": 1})
    ...     folder.name, sorted(path.name for path in folder.iterdir())
    ('step-000100', ['manifest.json', 'model-00001.safetensors', 'state.json'])
    """
    text = json.dumps(state, indent=1).encode()
    root.mkdir(parents=True, exist_ok=True)
    clean(root)
    final = root / _name(step)
    if final.exists():
        with contextlib.suppress(CorruptCheckpoint):
            verify(final)
            return final
    draft = root / f".{final.name}.saving"
    try:
        draft.mkdir()
        _fill(draft, step, {"model": model, "optim": optim}, text, shard_bytes)
        if final.exists():
            final.rename(_grave(final))
        draft.rename(final)
    except BaseException:
        # A full disk needs its room back at once; what cannot be removed now, the next save's clean() removes.
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(root)
    sync(root.parent)
    clean(root)
    return final


def load(folder: Path) -> Checkpoint:
    """Read a whole checkpoint, checking all of it on the way.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     load(save(Path(root), 7, {"w": torch.tensor(1.5)}, {}, {"epoch": 1}))
    Checkpoint(step=7, state={'epoch': 1}, model={'w': tensor(1.5000)}, optim={})
    """
    manifest = _read_manifest(folder)
    state = json.loads(_read_state(folder, manifest))
    model, optim = (dict(_read_tensors(folder, manifest, kind)) for kind in ("model", "optim"))
    return Checkpoint(manifest["step"], state, model, optim)


def tensors(folder: Path, kind: Literal["model", "optim"]) -> Iterator[tuple[str, Tensor]]:
    """One tensor after another, each checked before it is given out.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     for name, tensor in tensors(save(Path(root), 7, {"w": torch.zeros(2, 3)}, {}, {}), "model"):
    ...         print(name, list(tensor.shape))
    w [2, 3]
    """
    yield from _read_tensors(folder, _read_manifest(folder), kind)


def verify(folder: Path) -> None:
    """Read a checkpoint through and raise CorruptCheckpoint unless it is exactly what was saved.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     folder = save(Path(root), 7, {"w": torch.zeros(2)}, {}, {})
    ...     os.remove(folder / "state.json")
    ...     try:
    ...         verify(folder)
    ...     except CorruptCheckpoint as error:
    ...         print(Path(str(error)).name)
    state.json: is missing
    """
    manifest = _read_manifest(folder)
    _read_state(folder, manifest)
    for kind in ("model", "optim"):
        for _ in _read_tensors(folder, manifest, kind):
            pass


def steps(root: Path) -> list[int]:
    """The steps saved under ``root``, oldest first, verified or not.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     folders = [save(Path(root), step, {}, {}, {}) for step in (20, 10)]
    ...     steps(Path(root))
    [10, 20]
    """
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for path in root.iterdir() if (match := _STEP.fullmatch(path.name)))


def newest(root: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies; ``report`` gets one line for each newer one that does not.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     old, new = (save(Path(root), step, {}, {}, {}) for step in (10, 20))
    ...     _ = (new / "state.json").write_text("[]")
    ...     newest(Path(root), report=lambda line: print(Path(line).name)) == old
    state.json: has changed since it was saved
    True
    """
    for step in reversed(steps(root)):
        folder = root / _name(step)
        try:
            verify(folder)
            return folder
        except CorruptCheckpoint as error:
            report(f"skipped a damaged checkpoint: {error}")
    return None


def prune(root: Path, keep: int, protect: Collection[int] = ()) -> None:
    """Delete all but the newest ``keep`` checkpoints, the ``protect``-ed steps and the newest that verifies.

    Before anything is deleted, the newest checkpoint is read back; where none verifies, all stay.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     folders = [save(Path(root), step, {}, {}, {}) for step in (10, 20, 30, 40)]
    ...     prune(Path(root), keep=1, protect={20})
    ...     steps(Path(root))
    [20, 40]
    """
    assert keep >= 1
    saved = steps(root)
    doomed = [root / _name(step) for step in saved[:-keep] if step not in protect]
    if not doomed:
        return
    good = newest(root, report=lambda line: None)
    if good is None:
        return
    for folder in doomed:
        if folder != good:
            folder.rename(_grave(folder))
    # The new names must be on the disk first: a power cut must not bring back a half-deleted folder as step-*.
    sync(root)
    clean(root)


def clean(root: Path) -> None:
    """Remove what an interrupted save or prune left; only the process that holds the run's lock may call it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     (Path(root) / ".step-000100.saving").mkdir()
    ...     clean(Path(root))
    ...     os.listdir(root)
    []
    """
    for path in root.glob(".step-*"):
        shutil.rmtree(path)


class RunLock:
    """Held while a process trains in a run folder; a second process is refused. It ends with the process.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as run, RunLock(Path(run)):
    ...     try:
    ...         RunLock(Path(run)).__enter__()
    ...     except InputError as error:
    ...         f"is in use by process {os.getpid()} on " in str(error)
    True
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self.run.mkdir(parents=True, exist_ok=True)
        file = open(self.run / "lock", "a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip()
            raise InputError(f"{self.run} is in use by {holder or 'another process'}") from None
        except BaseException:
            file.close()
            raise
        started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} (started {started})\n")
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        # The file stays: to delete it would let two processes lock two files of one name.
        self._file.truncate(0)
        # Unlocked by hand, as a forked worker that is still alive would hold on to the lock.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
        self._file = None


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _grave(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.deleted")


# --- writing


def _fill(folder: Path, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: bytes, shard_bytes: int) -> None:
    """All files of a checkpoint, the manifest last, and all of them on the disk."""
    write(folder / "state.json", state)
    files: dict[str, Any] = {"state.json": {"bytes": len(state), "sha256": sha256(state).hexdigest()}}
    index: dict[str, dict[str, Any]] = {}
    for kind, part in parts.items():
        index[kind] = {}
        for number, shard in enumerate(_cut(part, shard_bytes), 1):
            file = folder / f"{kind}-{number:05d}.safetensors"
            index[kind] |= _write_shard(file, shard)
            files[file.name] = {"bytes": file.stat().st_size}
    write(folder / "manifest.json", _sealed({"format": _FORMAT, "step": step, "tensors": index, "files": files}))
    sync(folder)


def _cut(part: Mapping[str, Tensor], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Shards of at most ``shard_bytes``, or of one larger tensor."""
    shard: dict[str, Tensor] = {}
    size = 0
    # Widest dtypes first keeps every tensor aligned, for readers that map the file.
    for name, tensor in sorted(part.items(), key=lambda item: -item[1].dtype.itemsize):
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _write_shard(file: Path, shard: Mapping[str, Tensor]) -> dict[str, Any]:
    """One safetensors file, and its manifest entries.

    Not by the safetensors library: the checksum is of the very bytes written, only one tensor is copied at a time,
    and reading back without a memory map makes a bad disk an error instead of a SIGBUS.
    """
    entries: dict[str, Any] = {}
    with open(file, "wb") as stream:
        stream.write(_header((name, _CODES[tensor.dtype], list(tensor.shape)) for name, tensor in shard.items()))
        for name, tensor in shard.items():
            shape = list(tensor.shape)
            piece = {"file": file.name, "key": name, "offset": [0] * len(shape), "shape": shape}
            piece["sha256"] = _write_tensor(stream, tensor)
            entries[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "pieces": [piece]}
        stream.flush()
        os.fsync(stream.fileno())
    return entries


def _write_tensor(stream: IO[bytes], tensor: Tensor) -> str:
    """Append a tensor's bytes and return their checksum; its CPU copy, if it needs one, is gone with the return."""
    data = _bytes(tensor)
    stream.write(data)
    return sha256(data).hexdigest()


def _header(layout: Iterator[tuple[str, str, list[int]]]) -> bytes:
    """The safetensors header of (name, dtype, shape) in file order: its length, then JSON padded to 8 bytes."""
    table: dict[str, Any] = {}
    end = 0
    for name, code, shape in layout:
        start, end = end, end + torch.Size(shape).numel() * _DTYPES[code].itemsize
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes; its own memory where it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _sealed(body: Mapping[str, Any]) -> bytes:
    """The manifest's text, which ends with a checksum of the rest."""
    seal = sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "sha256": seal}, indent=1).encode()


# --- reading


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, once it is whole and the folder holds just the files it lists, in their sizes."""
    path = folder / "manifest.json"
    with _unreadable_is_corrupt(path):
        raw = path.read_bytes()
    try:
        body = json.loads(raw.decode())
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: is not JSON: {error}") from None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CorruptCheckpoint(f"{path}: is not a manifest of format {_FORMAT}, the one that this version reads")
    body.pop("sha256", None)
    if raw != _sealed(body):
        raise CorruptCheckpoint(f"{path}: has changed since it was saved")
    if (match := _STEP.fullmatch(folder.name)) and int(match[1]) != body["step"]:
        raise CorruptCheckpoint(f"{path}: is of step {body['step']}")
    with _unreadable_is_corrupt(folder):
        # Hidden files are the system's (.DS_Store, .nfs...).
        sizes = {item.name: item.stat().st_size for item in folder.iterdir() if not item.name.startswith(".")}
    del sizes["manifest.json"]
    listed = {name: facts["bytes"] for name, facts in body["files"].items()}
    for name in listed | sizes:
        if name not in listed:
            raise CorruptCheckpoint(f"{folder / name}: is not part of the checkpoint; move it elsewhere")
        if name not in sizes:
            raise CorruptCheckpoint(f"{folder / name}: is missing")
        if sizes[name] != listed[name]:
            raise CorruptCheckpoint(f"{folder / name}: has {sizes[name]} bytes, not {listed[name]}")
    return body


def _read_state(folder: Path, manifest: Mapping[str, Any]) -> bytes:
    path = folder / "state.json"
    with _unreadable_is_corrupt(path):
        raw = path.read_bytes()
    if sha256(raw).hexdigest() != manifest["files"]["state.json"]["sha256"]:
        raise CorruptCheckpoint(f"{path}: has changed since it was saved")
    return raw


def _read_tensors(folder: Path, manifest: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Tensor]]:
    # One piece a tensor, in file order: every file is read once, from front to back.
    entries = manifest["tensors"][kind].items()
    for file, group in groupby(entries, key=lambda item: item[1]["pieces"][0]["file"]):
        yield from _read_shard(folder / file, dict(group))


def _read_shard(file: Path, entries: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    header = _header((name, entry["dtype"], entry["shape"]) for name, entry in entries.items())
    with _unreadable_is_corrupt(file), open(file, "rb") as stream:
        if stream.read(len(header)) != header:
            stream.seek(0)
            raise CorruptCheckpoint(f"{file}: {_difference(stream.read(_LONGEST_HEADER), header)}")
        for name, entry in entries.items():
            tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
            data = _bytes(tensor)
            (piece,) = entry["pieces"]
            if stream.readinto(data) != len(data) or sha256(data).hexdigest() != piece["sha256"]:
                raise CorruptCheckpoint(f"{file}: tensor {name!r} has changed since it was saved")
            yield name, tensor


def _difference(found: bytes, header: bytes) -> str:
    """In words, where a safetensors file's header departs from the one that the manifest asks for."""
    try:
        have, want = (dict(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])) for raw in (found, header))
    except (ValueError, TypeError):
        return "its header is damaged"
    # Names that only one of them has come first: they move the tensors behind them.
    for name in sorted(have | want, key=lambda name: name in have and name in want):
        if have.get(name) != want.get(name):
            return f"tensor {name!r} is {have.get(name, 'missing')}, not {want.get(name, 'in the manifest')}"
    return "its header is damaged"


@contextlib.contextmanager
def _unreadable_is_corrupt(path: Path) -> Iterator[None]:
    """What the system cannot read is as good as damaged: the checkpoint before it may still be read."""
    try:
        yield
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error.strerror or error}") from error
