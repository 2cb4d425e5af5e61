import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from t2t.train.signals import EXIT_INTERRUPTED, StopRequest

LOOP = """
from t2t.train.signals import EXIT_INTERRUPTED, StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        pass
    print(stop.requested, flush=True)
    {then}
raise SystemExit(EXIT_INTERRUPTED)
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    children = []

    def start(then: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOOP.format(then=then)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_loop_finish(start: Callable[[str], subprocess.Popen[str]], number: signal.Signals) -> None:
    child = start("print('saved', flush=True)")
    child.send_signal(number)
    out, _ = child.communicate(timeout=60)
    assert out == f"{number.name}\nsaved\n"
    assert child.returncode == EXIT_INTERRUPTED == 75


def test_a_second_interrupt_stops_at_once(start: Callable[[str], subprocess.Popen[str]]) -> None:
    child = start("while True: pass")
    assert child.stdout is not None
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "SIGINT\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert child.returncode == -signal.SIGINT


def test_terminating_twice_is_one_request_and_then_an_interrupt_is_the_first() -> None:
    with StopRequest() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert stop.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_previous_handlers_are_restored() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    before = handlers()
    with StopRequest() as stop:
        inside = handlers()
        signal.raise_signal(signal.SIGINT)
    assert handlers() == before != inside
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert handlers() == before
    assert stop.requested == "SIGINT"


def test_outside_the_main_thread_nothing_is_installed() -> None:
    seen: list[object] = []

    def work() -> None:
        with StopRequest() as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.requested])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, None]
