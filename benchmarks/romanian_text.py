"""The text of the quickstart and of the pretraining of its model, out of RONEC and ELTeC-rom.

    python benchmarks/romanian_text.py DATA_DIR OUT_DIR

DATA_DIR holds ro/ronec.txt.xz and ro/eltec_rom.txt.xz, one sentence or paragraph a line. OUT_DIR gets
ro-held-out.txt (320 RONEC sentences), ro-train.txt.xz (3,000 other RONEC sentences and 1,000 ELTeC paragraphs), both
shipped as assets, and pretrain.txt: all the rest and the training text, but no line that shares 40 letters in a row
with a held-out sentence.
"""

from __future__ import annotations

import argparse
import lzma
import random
import re
import unicodedata
from pathlib import Path

HELD_OUT, RONEC_TRAIN, ELTEC_TRAIN, SEED, SHINGLE = 320, 3000, 1000, 7, 40


def letters(text: str) -> str:
    """Lower-case letters alone, without diacritics: what two copies of a sentence share."""
    plain = (c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))
    return re.sub("[^a-z]", "", "".join(plain))


def shingles(text: str) -> set[str]:
    """Every run of 40 letters; a shorter text is one itself."""
    plain = letters(text)
    return {plain[i : i + SHINGLE] for i in range(max(1, len(plain) - SHINGLE + 1))}


def whole(sentence: str) -> bool:
    """A sentence of a line's length, with modern diacritics."""
    ends = sentence[0].isupper() and sentence[-1] in ".?!"
    return 30 <= len(sentence) <= 110 and ends and any(c in sentence for c in "ăâîșț") and not set("şţ") & set(sentence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    ronec, eltec = (read(arguments.data / "ro" / name) for name in ("ronec.txt.xz", "eltec_rom.txt.xz"))
    shuffle = random.Random(SEED)
    shuffle.shuffle(ronec)
    held_out = [sentence for sentence in ronec if whole(sentence)][:HELD_OUT]
    known = {shingle for sentence in held_out for shingle in shingles(sentence)}
    ronec = [sentence for sentence in ronec if not shingles(sentence) & known]
    paragraphs = [line for line in eltec if 40 <= len(line) <= 200]
    shuffle.shuffle(paragraphs)
    train = ronec[:RONEC_TRAIN] + paragraphs[:ELTEC_TRAIN]
    pretrain = [line for line in eltec + ronec if not shingles(line) & known]
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out / "ro-held-out.txt", held_out)
    write(arguments.out / "ro-train.txt.xz", train)
    write(arguments.out / "pretrain.txt", pretrain)
    print(f"{len(held_out):,} held out, {len(train):,} to train on, {len(pretrain):,} lines of pretraining text")


def read(file: Path) -> list[str]:
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [line.strip() for line in lines if line.strip()]


def write(file: Path, lines: list[str]) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    file.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if file.suffix == ".xz" else data)


if __name__ == "__main__":
    main()
