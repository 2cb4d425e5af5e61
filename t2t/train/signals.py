"""How a run is asked to stop, and what its exit code says.

| code | meaning |
|---|---|
| 0 | done |
| 1 | crashed: a bug, or a broken machine |
| 2 | bad input: mend what the message names |
| 3 | diverged: a non-finite loss or gradient; the last good state is kept |
| 75 | interrupted and saved: run the same command to go on |

>>> EXIT_INTERRUPTED
75
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_DONE = 0
EXIT_CRASH = 1
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later


class StopRequest:
    """Turns SIGTERM and SIGINT into a wish that the loop reads between steps; a second SIGINT stops at once.

    ``requested`` is the name of the first signal, or None. On leaving, the previous handlers are back. Python gives
    signals to the main thread only: in another thread this does nothing and ``requested`` stays None.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.requested
    'SIGTERM'
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None: a handler that was not set from Python, and that Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
