"""The kernels of native.c, compiled at first use where a C compiler is, and called through ctypes.

ctypes lets go of Python's lock during a call, so that threads compute at once. Where there is no compiler, or it
fails, `library` gives None and the kernels are torch's; T2T_NATIVE=0 in the environment asks for that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".c")
PAD = 16  # numbers that rows of weights are padded to: the longest vector that native.c knows
_PROCESSOR = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ("-O3", _PROCESSOR, "-fno-math-errno", "-fno-trapping-math", "-std=gnu11", "-shared", "-fPIC", f"-DPAD={PAD}")
_lock = threading.Lock()


class Unavailable(Exception):
    """Why there is no native library."""


class Attention(ctypes.Structure):
    """``struct attention`` of native.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "bias", "weights", "segments", "dropped")),
        *((name, c_int64) for name in ("q_slot", "k_slot", "count", "heads", "channels", "reach", "dropped_count")),
        *((name, c_int64) for name in ("causal", "window")),
        *((name, c_float) for name in ("scale", "kept")),
    ]


_FUNCTIONS = {
    "attention_forward": (ctypes.POINTER(Attention), c_void_p),
    "attention_backward": (ctypes.POINTER(Attention), *[c_void_p] * 5),
    "norm_forward": (*[c_void_p] * 4, c_int64, c_int64, c_float),
    "norm_backward": (*[c_void_p] * 6, c_int64, c_int64),
    "cross_entropy": (*[c_void_p] * 3, c_int64, c_int64, c_float),
}


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None; why there are none is told once."""
    with _lock:  # threads that start together compile once
        return _library()


@cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("T2T_NATIVE") == "0":
        return None
    try:
        found = ctypes.CDLL(str(compiled(_compiler(), cache_folder())))
    except (Unavailable, OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home, no compiler ...
        if os.environ.get("RANK", "0") == "0":  # what all ranks know, one tells
            print(f"note: kernels are not compiled, which costs some speed: {error}", file=sys.stderr)
        return None
    for name, types in _FUNCTIONS.items():
        getattr(found, name).argtypes = types
        getattr(found, name).restype = ctypes.c_int
    return found


def call(name: str, *arguments: object) -> None:
    """One of the library's functions; tensors stand for the addresses of their numbers, None for no address."""
    if getattr(library(), name)(*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)):
        raise MemoryError(f"native kernels: {name}")


def serves(dtype: torch.dtype) -> bool:
    """Whether the library is there and made for such tensors. It has no threads: several are left to torch."""
    return dtype == torch.float32 and torch.get_num_threads() == 1 and library() is not None


def cache_folder() -> Path:
    """Where compiled libraries are kept; a folder of this user's alone, since what is in it is run."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t2t" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(f"{folder}: others may write there")
    return folder


def compiled(compiler: Sequence[str], folder: Path) -> Path:
    """The library in ``folder``, made if it is not there. Its name tells source, flags, compiler and processor."""
    # What the compiler defines for this processor has its own version in it.
    defined = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    digest = hashlib.sha256(b"\0".join((SOURCE.read_bytes(), shlex.join(FLAGS).encode(), defined))).hexdigest()
    file = folder / f"{digest[:32]}.so"
    if not file.exists():
        # Whoever compiles at the same time makes the same file: the last to rename it wins.
        handle, draft = tempfile.mkstemp(".so", dir=folder)
        os.close(handle)
        try:
            _run([*compiler, *FLAGS, "-o", draft, str(SOURCE), "-lm"])
            ctypes.CDLL(draft)  # what cannot be loaded is not kept
            os.replace(draft, file)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    return file


def _compiler() -> list[str]:
    """The command that compiles C: $CC, else the first that is here."""
    given = os.environ.get("CC")
    for command in [shlex.split(given)] if given else [["cc"], ["gcc"], ["clang"]]:
        if command and shutil.which(command[0]):
            return command
    raise Unavailable(f"CC: {given!r} is not here" if given else "there is no C compiler here (cc, gcc, clang)")


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing said"]
        raise Unavailable(f"{command[0]} failed with exit code {done.returncode}: {last[0]}")
    return done.stdout
