"""What a model consists of, as a table."""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn

from t2t.terminal import table

HEADER = ("module", "shape", "parameters", "trainable", "dtype")


def model_summary(model: nn.Module) -> str:
    """Every parameter's shape, size, dtype and whether it is trained, and the totals; like layers share a line.

    >>> block = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False), nn.LayerNorm(2))
    >>> _ = block[2].requires_grad_(False)
    >>> print(model_summary(block))
    module      shape  parameters  trainable  dtype
    ──────────  ─────  ──────────  ─────────  ───────
    0-1.weight  2 x 3          12  yes        float32
    2.weight    2               2  no         float32
    2.bias      2               2  no         float32
    total                      16  12         float32
    """
    parameters = list(model.named_parameters())
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)  # which layers, and how large each
    for full, p in parameters:
        name = full.replace(".parametrizations.weight.original", ".weight").replace(".parametrizations.weight.0", "")
        before, number, after = re.fullmatch(r"(?:(.*?)(?<![^.])(\d+)(?![^.]))?(.*)", name).groups("")  # type: ignore[union-attr]
        shape = " x ".join(map(str, p.shape))
        alike[before, after, shape, "yes" if p.requires_grad else "no", _dtype(p.dtype)].append(
            (int(number or -1), p.numel())
        )
    rows: list[tuple[object, ...]] = []
    for (before, after, shape, trained, dtype), layers in alike.items():
        numbers = [number for number, _ in layers if number >= 0]
        name = f"{before}{_ranges(numbers)}{after}"
        rows.append((name, shape, sum(size for _, size in layers), trained, dtype))
    total = sum(p.numel() for _, p in parameters)
    trained_total = sum(p.numel() for _, p in parameters if p.requires_grad)
    dtypes = ", ".join(dict.fromkeys(_dtype(p.dtype) for _, p in parameters))
    return table([*rows, ("total", "", total, f"{trained_total:,}", dtypes)], HEADER)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _ranges(numbers: list[int]) -> str:
    """Numbers in order, those that follow one another as a range.

    >>> _ranges([0, 1, 2, 5])
    '0-2,5'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
