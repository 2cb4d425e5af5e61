"""A process that has torch loaded and forks for every rank that is asked for: a rank costs its steps, not an import.

Each line of its input asks for a run, ``{"size", "arguments", "out", ...}``, and each line of its output gives the
ranks' exit codes; what rank 1 printed is in ``out/1``. Every rank writes the examples of its steps to ``out/ids-1``.
With ``step`` and ``what`` something happens to the rank ``rank`` in that step, and with ``spoil`` to its weights. With
``exits`` ranks end as processes do, which takes a second; without, they are cut off.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports
import transformers.models.auto.tokenization_auto  # noqa: F401  which BERT's tokenizer comes from

from t2t import cli
from t2t.train import run

PATIENCE = 90  # seconds after which a rank that hangs is ended


def arm(asked: dict[str, Any], rank: int, ids: Path) -> None:
    train_step, build = run.train_step, run.build
    chosen = asked.get("rank") == rank

    def watched(model: Any, optimizer: Any, batches: Any, step: int, *rest: Any) -> Any:
        taken = [int(i) for batch in batches for i in batch.example_ids.flatten() if i >= 0]
        with ids.open("a") as file:
            file.write(json.dumps([step, taken]) + "\n")
        if chosen and step + 1 == asked.get("step"):
            if asked["what"] == "error":
                raise ZeroDivisionError("what a bug would raise")
            os.kill(os.getpid(), getattr(signal, asked["what"]))
        return train_step(model, optimizer, batches, step, *rest)

    def spoilt(*arguments: Any) -> run.Run:
        built = build(*arguments)
        with torch.no_grad():
            built.model.head[0, 0] += 1
        return built

    run.train_step = watched
    if chosen and asked.get("spoil"):
        run.build = spoilt


def become(rank: int, port: int, asked: dict[str, Any]) -> None:
    """What a forked process does: train as that rank, and leave."""
    signal.alarm(PATIENCE)
    out = Path(asked["out"])
    file = os.open(out / str(rank), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    if asked["size"] > 1:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": asked["size"], "LOCAL_WORLD_SIZE": asked["size"]}
        os.environ |= {name: str(value) for name, value in told.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arm(asked, rank, out / f"ids-{rank}")
    try:
        code = cli.main(asked["arguments"])
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    if asked.get("exits"):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = []
        for rank in range(asked["size"]):
            pid = os.fork()
            if not pid:
                become(rank, port, asked)
            ranks.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
