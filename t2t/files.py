"""Files that are whole or not there, even after a crash."""

from __future__ import annotations

import os
from pathlib import Path


def atomic_write(path: Path, data: str | bytes) -> None:
    """Write a whole file or nothing: whoever reads ``path`` sees the old content or the new, even after a crash.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as run:
    ...     atomic_write(Path(run) / "result.json", "{}")
    ...     os.listdir(run)
    ['result.json']
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(draft, data.encode() if isinstance(data, str) else data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write(path: Path, data: bytes) -> None:
    """Write a file and put it on the disk."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Put a folder's own entries, such as a rename, on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
