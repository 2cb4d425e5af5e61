"""Where a run's figures go: log.jsonl always; TensorBoard, Weights & Biases and Trackio on wish.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     trackers = build(Config(), Path(folder), from_step=0)
...     trackers.log(10, {"loss": 1.5, "lr": 0.001})
...     trackers.close()
...     Path(folder, "log.jsonl").read_text()
'{"step": 10, "loss": 1.5, "lr": 0.001}\\n'
"""

from __future__ import annotations

import importlib
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from t2t.config import Config, flat
from t2t.errors import InputError


class Tracker(Protocol):
    """Takes the figures of a step.

    >>> class Printer:
    ...     def log(self, step, figures):
    ...         print(step, figures)
    ...
    ...     def close(self):
    ...         print("closed")
    >>> Trackers([Printer()]).log(1, {"loss": 2.0})
    1 {'loss': 2.0}
    """

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step; steps never go down."""

    def close(self) -> None:
        """Hand over what is still held back."""


class Trackers:
    """Several trackers as one.

    >>> Trackers([]).log(1, {"loss": 2.0})
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand the figures to each tracker."""
        for tracker in self._trackers:
            tracker.log(step, figures)

    def close(self) -> None:
        """Close each tracker, also when closing another one fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


class JsonLines:
    """One JSON object a logged step. A run that goes on from ``from_step`` first drops the lines of later steps.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "log.jsonl")
    ...     _ = path.write_text('{"step": 1, "loss": 3.0}\\n{"step": 2, "loss": 2.0}\\n{"step": 3, "lo')
    ...     log = JsonLines(path, from_step=1)
    ...     log.log(2, {"loss": math.inf})
    ...     log.close()
    ...     path.read_text().splitlines()
    ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": "inf"}']
    """

    def __init__(self, path: Path, from_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # Steps only go up in the file, so what stays is its beginning: one cut, nothing rewritten.
            os.truncate(path, _bytes_until(path, from_step))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write one line and flush it. JSON has no nan and no inf: they become strings."""
        values = {name: value if math.isfinite(value) else str(value) for name, value in figures.items()}
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in RUN/tensorboard; later steps of a run that was cut off are hidden.

    >>> from unittest import mock
    >>> with mock.patch.dict("sys.modules", {"tensorboard": None}):
    ...     TensorBoard(Config(), Path("runs/x"), from_step=0)
    Traceback (most recent call last):
    t2t.errors.InputError: track.to: tensorboard is not installed: pip install 't2t[tensorboard]'
    """

    def __init__(self, config: Config, run_dir: Path, from_step: int) -> None:
        _package("tensorboard")
        board: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = board.SummaryWriter(str(run_dir / "tensorboard"), purge_step=from_step + 1)
        values = {name: v if isinstance(v, (bool, int, float, str)) else str(v) for name, v in flat(config).items()}
        # Not add_hparams: its own second file in the folder would end TensorBoard's reading of the first.
        for summary in board.summary.hparams(values, {}):
            self._writer.file_writer.add_summary(summary)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """One scalar a figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run, the same one after a resume: its id is kept in RUN/wandb_id.

    WANDB_MODE=offline keeps everything on disk, in WANDB_DIR or else in the run folder.

    >>> from unittest import mock
    >>> with mock.patch.dict("sys.modules", {"wandb": None}):
    ...     Wandb(Config(), Path("runs/x"), from_step=0)
    Traceback (most recent call last):
    t2t.errors.InputError: track.to: wandb is not installed: pip install 't2t[wandb]'
    """

    def __init__(self, config: Config, run_dir: Path, from_step: int) -> None:
        wandb = _package("wandb")
        folder = Path(os.environ.get("WANDB_DIR") or run_dir)
        folder.mkdir(parents=True, exist_ok=True)  # wandb turns to a temporary folder when there is none
        try:
            # Steps that the server has already are ignored there; a resumed run gives the same figures for them.
            self._run: Any = wandb.init(
                project=config.track.project,
                name=config.run.name,
                id=_kept_id(run_dir / "wandb_id", fresh=from_step == 0),
                dir=str(folder),
                config=flat(config),
                resume="allow",
            )
        except wandb.errors.UsageError as error:
            raise InputError(f"track.to: wandb: {error} WANDB_MODE=offline needs no login.") from None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """A local Trackio run (in TRACKIO_DIR); a resumed run goes on under its name.

    >>> from unittest import mock
    >>> with mock.patch.dict("sys.modules", {"trackio": None}):
    ...     Trackio(Config(), Path("runs/x"), from_step=0)
    Traceback (most recent call last):
    t2t.errors.InputError: track.to: trackio is not installed: pip install 't2t[trackio]'
    """

    def __init__(self, config: Config, run_dir: Path, from_step: int) -> None:
        # Trackio finds a run by its name alone: a new run of an old name must not go on in the old one.
        self._run: Any = _package("trackio").init(
            project=config.track.project,
            name=config.run.name,
            config=flat(config),
            resume="allow" if from_step else "never",
            embed=False,
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue the figures."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Write what is queued."""
        self._run.finish()


_EXTRAS: dict[str, Callable[[Config, Path, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def build(config: Config, run_dir: Path, from_step: int) -> Trackers:
    """The trackers of a run that starts after ``from_step``: log.jsonl first, then those of ``track.to``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     build(Config(), Path(folder), from_step=0).close()
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['log.jsonl']
    """
    for name in config.track.to:
        _package(name)  # a missing one is told before any run is opened anywhere
    extras = (_EXTRAS[name](config, run_dir, from_step) for name in config.track.to)
    return Trackers([JsonLines(run_dir / "log.jsonl", from_step), *extras])


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # it is there, but something that it needs is not
            raise
        raise InputError(f"track.to: {name} is not installed: pip install 't2t[{name}]'") from None


def _bytes_until(path: Path, step: int) -> int:
    """The length of the file's beginning that holds steps up to ``step``; a run that starts anew keeps nothing."""
    size = 0
    if step == 0:
        return size
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # the process was killed while writing it
                break
            try:
                if json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path}:{number}: not a JSON object with a step: remove the line") from None
            size += len(line)
    return size


def _kept_id(path: Path, fresh: bool) -> str:
    kept = path.read_text(encoding="utf-8").strip() if path.exists() and not fresh else ""
    if not kept:
        kept = uuid.uuid4().hex[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(kept + "\n", encoding="utf-8")
    return kept
