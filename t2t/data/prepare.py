"""From files to a store of tokens, by several processes; what was interrupted goes on where it ended."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from t2t.config import Data
from t2t.data import chat, store
from t2t.data.blocks import BEGINNING, Block, BlockReader, Place, blocks
from t2t.data.chat import Chat, Template
from t2t.data.objectives import Objective
from t2t.data.ragged import Ragged, id_type
from t2t.data.sources import Reader, compression_of
from t2t.data.store import Part, Store
from t2t.data.tables import grouped, objective, text_objective, tokenized, tokenized_texts, Texts
from t2t.data.tasks import Task, transform
from t2t.data.text import Documents
from t2t.data.tokens import Pairs, Tokenizer
from t2t.errors import InputError
