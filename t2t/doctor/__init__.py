"""What is here: the environment, and what a run would make of data files. Reads everything once, changes nothing.

Exit codes of `t2t doctor`: 0, nothing wrong; 2, a file cannot be used at all; 1, something to look at: a bad line, a
validation example whose source is in the training data, more than 1% of examples that repeat an earlier one, an unknown
token, or more than 5% of one side cut. What repeats is found by digests, of 24 bytes an example (`t2t.data.check`).

| key of ``--json`` | what it holds |
|---|---|
| environment | versions, devices, threads, memory, extras |
| files | of each file: split, format, compression, records, examples, bad lines, columns and why, documents, error |
| tokenizer | its name, or nothing; then there are no tokens, nothing unknown and no plan |
| splits | of training and validation data: examples, lengths, histogram, repeated |
| splits.lengths | side and unit; p50, p90, p99, max; limit, and the share cut there: p99 would cut 1%, max nothing |
| splits.histogram | side to pairs: a length in tokens, and how many have it or less, but more than the one before |
| splits.repeated | pairs that repeat an earlier one, sources with several targets, the first of both |
| overlap | validation examples that are in the training data, by source and as pairs, the first of them |
| unknown | tokens, the examples that hold them, the first, and every character that does not come back |
| plan | objective, kind of model, examples, steps and tokens of an epoch, rows and how full they are, bytes of a \
prepared store and seconds to make it at the pace of this pass, seconds of an epoch where tokens a second are given |
| problems | one line on each thing to look at |

>>> import tempfile
>>> from pathlib import Path
>>> with tempfile.TemporaryDirectory() as folder:
...     file = Path(folder, "pairs.jsonl")
...     _ = file.write_text('{"src": "1 2", "tgt": "2 1"}\\n{"src": "3 4"}\\n')
...     report = check([str(file)], Config())
>>> report.files[0].source, report.files[0].target, report.files[0].why, report.exit_code
('src', 'tgt', 'known names', 1)
>>> [problem.removeprefix(str(file)) for problem in report.problems]
[": 1 bad line, the first at line 2: no field 'tgt'"]
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from t2t.config import Config
from t2t.doctor.read import check
from t2t.doctor.render import render
from t2t.terminal import human_bytes, table

EXTRAS = ("pyarrow", "zstandard", "sacrebleu", "tensorboard", "wandb", "trackio")
"""Packages that some features need and a plain run does not."""


def run(data: Sequence[str], config: Config, as_json: bool, tokens_per_s: float = 0.0) -> int:
    """Print the environment, and the report on files if there are any; gives back the exit code.

    >>> run([], Config(), as_json=False)  # doctest: +ELLIPSIS
    python ...
    0
    """
    found = environment()
    report = check(data, config, tokens_per_s)
    if as_json:
        print(json.dumps({"environment": found} | (report.as_dict() if report.files else {}), indent=2))
    else:
        print(_render_environment(found))
        if report.files:
            print(f"\n{render(report)}")
    return report.exit_code


def environment() -> dict[str, Any]:
    """Versions, devices and memory; a package that is not installed has the version None.

    >>> sorted(environment())
    ['devices', 'extras', 'memory', 'threads', 'versions']
    """
    import torch

    from t2t import __version__, device

    accelerator = device.resolve("auto")
    devices = [
        torch.device("cpu"),
        *(torch.device(accelerator.type, n) for n in range(torch.accelerator.device_count())),
    ]
    packages = ("torch", "transformers", "safetensors", "numpy")
    return {
        "versions": {"python": platform.python_version(), "t2t": __version__} | {p: _version(p) for p in packages},
        "devices": [device.describe(d) for d in devices],
        "threads": torch.get_num_threads(),
        "memory": device.total_memory(devices[0]),
        "extras": {package: _version(package) for package in EXTRAS},
    }


def _render_environment(found: dict[str, Any]) -> str:
    rows = [
        *found["versions"].items(),
        *(("device", device) for device in found["devices"]),
        ("memory", human_bytes(found["memory"])),
        *((f"{name} (optional)", version or "not installed") for name, version in found["extras"].items()),
    ]
    return table(rows)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
