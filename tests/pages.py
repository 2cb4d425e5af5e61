"""What the pages of the documentation show, for tests that run it."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, heading: str, language: str) -> list[str]:
    """The fenced blocks of a language under a heading of the second rank; of the whole page where that is empty."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(page: str, heading: str = "") -> list[str]:
    """The commands of the bash blocks, line by line."""
    return [line for block in blocks(page, heading, "bash") for line in block.splitlines()]
