"""Ranks on this machine: so many processes of the same command, watched by their parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

GRACE = 20.0  # seconds that the other ranks have to end by themselves once one has failed
LAUNCHED = "T2T_LAUNCHED"  # in the environment of ranks whose standard input ends with their parent


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``t2t ARGUMENTS`` as ranks 0 to ``count`` - 1; signals go to all of them.

    Gives back 0, or the exit code of the first that failed, in the shell's way (128 + N) where signal N ended it.

    >>> launch(2, ["recipes", "no-such-recipe"])
    2
    """
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), LAUNCHED: "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [(number, signal.signal(number, forward)) for number in numbers]
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **shared, **own}
            command = [sys.executable, "-m", "t2t", *arguments]
            # In sessions of their own: a Ctrl-C must not reach them from the terminal and from here, as two would.
            child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
            children.append(child)
        return _wait(children)
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        for number, handler in previous:
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all are done, or one has failed and the others ended or had time to."""
    while True:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            break
        time.sleep(0.05)
    deadline = time.monotonic() + GRACE
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    first = min(failed, default=0)  # of several at once the one that a signal ended is the cause
    if first < 0:
        print(f"error: rank {codes.index(first)} was ended by {signal.Signals(-first).name}", file=sys.stderr)
    return first if first >= 0 else 128 - first


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with_parent() -> None:
    """In a rank that `launch` started: end when the parent is gone, also where it was killed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
