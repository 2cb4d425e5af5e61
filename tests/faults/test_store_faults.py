"""What the machine can do to a checkpoint while it is written: kill -9, a full disk, a second process."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from t2t.checkpoint import store
from t2t.errors import InputError

# A child that has torch loaded forks one more for each kill: a round costs milliseconds, not an import.
COMMON = """
import os, random, select, signal, sys
from pathlib import Path
import torch
from t2t.checkpoint import store
torch.set_num_threads(1)
root = Path(sys.argv[1])

def save(step):
    big = torch.full((200, 200), float(step))
    store.save(root, step, {"w": big, "b": big[0]}, {"m": big.t()}, {"step": step}, shard_bytes=big.nbytes)
    store.prune(root, keep=1, protect=())

def check(at_least):
    for step in store.steps(root):
        store.verify(root / f"step-{step:06d}")
    found = store.load(store.newest(root, lambda line: sys.exit(line)))
    assert found.step == found.state["step"] >= at_least, (found.step, at_least)
    assert (found.model["w"] == found.step).all()
    return found.step

def killed(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
"""

# Python announces opens, renames, makings and removals of files; fsync and write are added by hand.
KILL_EVERYWHERE = (
    COMMON
    + """
def arm(point):
    count = -1
    def tick(event, *_):
        nonlocal count
        if event.startswith(("os.", "open", "shutil.", "test.")):
            count += 1
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)
    fsync, write = os.fsync, store._bytes
    os.fsync = lambda handle: (tick("test."), fsync(handle))
    store._bytes = lambda tensor: (tick("test."), write(tensor))[1]
    sys.addaudithook(tick)

save(1)
point, last = 0, 1
while True:
    pid = os.fork()
    if not pid:
        arm(point)
        save(last + 1)
        os._exit(0)
    if not killed(pid):
        break
    last, point = check(last), point + 1
assert check(last) > 1
assert sorted(os.listdir(root)) == [f"step-{last + 1:06d}"], os.listdir(root)
print(point)
"""
)

KILL_AT_RANDOM = (
    COMMON
    + """
rng = random.Random(int(sys.argv[2]))
last = 0
for _ in range(15):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        while True:
            last += 1
            save(last)
            os.write(write, b"%d\\n" % last)
    os.close(write)
    with os.fdopen(read) as lines:
        for _ in range(rng.randrange(1, 4)):
            last = int(lines.readline())
        select.select([], [], [], rng.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        assert killed(pid)
    last = check(last)
save(last + 1)
assert sorted(os.listdir(root)) == [f"step-{last + 1:06d}"], os.listdir(root)
print(last)
"""
)

HOLD_LOCK = """
import sys
from pathlib import Path
from t2t.checkpoint import store
with store.RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout.strip()


def test_killed_at_every_point_of_a_save_and_prune(tmp_path: Path) -> None:
    points = int(run(KILL_EVERYWHERE, tmp_path))
    assert points > 30


def test_killed_at_random_during_repeated_saves(tmp_path: Path) -> None:
    assert int(run(KILL_AT_RANDOM, tmp_path, 1)) >= 15


def test_a_write_that_the_system_refuses_leaves_the_earlier(tmp_path: Path) -> None:
    first = store.save(tmp_path, 1, {"w": torch.ones(4)}, {}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            store.save(tmp_path, 2, {"small": torch.ones(4, dtype=torch.int64), "w": torch.ones(100_000)}, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == [first.name]
    assert store.newest(tmp_path, pytest.fail) == first


def test_a_full_disk_at_any_sync_leaves_the_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.save(tmp_path, 1, {"w": torch.ones(4)}, {"m": torch.ones(4)}, {})
    sync = os.fsync
    for full_after in range(100):
        calls = 0

        def limited(handle: int, room: int = full_after) -> None:
            nonlocal calls
            calls += 1
            if calls > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(handle)

        monkeypatch.setattr(os, "fsync", limited)
        try:
            store.save(tmp_path, 2, {"w": torch.zeros(4)}, {"m": torch.zeros(4)}, {})
        except OSError as error:
            assert error.errno == errno.ENOSPC
        store.verify(first)
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
        if 2 in store.steps(tmp_path):
            break
    assert full_after >= 4
    store.verify(tmp_path / "step-000002")


def test_the_lock_refuses_a_second_process_and_dies_with_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            words = f"{tmp_path} is in use by process {child.pid} on {socket.gethostname()} (started "
            with pytest.raises(InputError) as refused:
                store.RunLock(tmp_path).__enter__()
            assert str(refused.value).startswith(words)
        finally:
            child.send_signal(signal.SIGKILL)
    with store.RunLock(tmp_path):
        pass
