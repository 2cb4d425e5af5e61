"""A run is a folder, and it cannot be lost: atomic checkpoints of safetensors and JSON.

::

    RUN/lock                                   held while a process trains in RUN
    RUN/checkpoints/step-000100/manifest.json  every tensor's pieces and checksums, every file's size
                                state.json     the rest of the run's state
                                model-00001.safetensors, optim-00001.safetensors, ...

A checkpoint is written under a hidden name and renamed when all of it is on the disk, so a folder called
``step-...`` was once complete. Whether it still is, ``verify`` tells: each byte of the folder is covered by
the manifest, and the manifest by its own checksum.

>>> with tempfile.TemporaryDirectory() as run:
...     folder = save(Path(run) / "checkpoints", 100, {"w": torch.ones(2)}, {"w.exp_avg": torch.zeros(2)}, {"epoch": 1})
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
import tempfile  # noqa: F401 (the examples use it)
from collections.abc import Buffer, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import torch
from torch import Tensor

from t2t.errors import InputError

FORMAT = 1
