"""What the library learns from real text, one case a run, each within ten minutes of one GPU.

    python benchmarks/real_data.py prepare DATA_DIR WORK_DIR
    python benchmarks/real_data.py CASE WORK_DIR [--out FILE.json] [--smoke]

CASE is one of gpt2, bert, diacritics, translate, summarize. `prepare` writes texts and vocabularies to WORK_DIR:

- gpt2: GPT-2 of 8 layers, 512 wide, on ELTeC-eng, by GPT-2's vocabulary, the checkpoint that is best on two other
  novels; perplexity on these and on WikiText-2-raw valid, as it is and with its spaces before punctuation taken out.
- bert: BERT of 6 layers, 512 wide, on ELTeC-eng, masked tokens and next sentences; accuracies on two other novels.
- diacritics: the recipe byt5-diacritics on Romanian text; word accuracy on RRT-test, which nothing was chosen by.
- translate: T5 by span corruption on ELTeC-rom, then RO-STS English to Romanian, against the same without the first.
- summarize: T5 by span corruption on ELTeC-eng and abstracts, then SciTLDR; ROUGE against the first sentence.

`--smoke` takes a few steps of each part, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from romanian_text import read, shingles, write

from t2t import metrics
from t2t.config import Config, load

RATE = "5e-4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["prepare", *CASES])
    parser.add_argument("folders", type=Path, nargs="+", help="for prepare DATA_DIR WORK_DIR, for a case WORK_DIR")
    parser.add_argument("--out", type=Path, help="result file (default: results/CASE.json beside this script)")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.case == "prepare":
        prepare(*arguments.folders)
        return
    (work,) = arguments.folders
    started = time.perf_counter()
    rows = CASES[arguments.case](work, arguments.smoke)
    seconds = round(time.perf_counter() - started)
    for row in rows:
        print(json.dumps(row))
    if not arguments.smoke:
        command = f"python benchmarks/real_data.py {arguments.case} WORK_DIR"
        write_result(arguments.out or Path(__file__).parent / f"results/{arguments.case}.json", command, rows, seconds)


def write_result(file: Path, command: str, rows: list[dict[str, Any]], seconds: int) -> None:
    """The figures with the machine they come from."""
    import datetime
    import platform

    import torch
    import transformers

    from t2t import __version__

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {platform.processor()}"
    found = {
        "machine": machine,
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "t2t": __version__,
        },
        "command": command,
        "seconds": seconds,
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")


# What the cases read.


def prepare(data: Path, work: Path) -> None:
    """Texts and vocabularies."""
    from transformers import BertTokenizer, GPT2Tokenizer

    work.mkdir(parents=True, exist_ok=True)
    GPT2Tokenizer(str(data / "tok/gpt2_encoder.json"), str(data / "tok/gpt2_vocab.bpe")).save_pretrained(work / "gpt2")
    BertTokenizer(str(data / "tok/bert_base_uncased_vocab.txt")).save_pretrained(work / "bert")
    novels = [novel.splitlines() for novel in text(data / "lm/eltec_eng.txt.xz").split("\n\n") if novel.strip()]
    write(work / "novels.txt.xz", joined(novels[:-2]))
    write(work / "novels-valid.txt.xz", joined(novels[-2:]))
    sentences = [[s for line in novel for s in split(line)] for novel in novels]
    write(work / "sentences.txt.xz", joined(sentences[:-2]))
    write(work / "sentences-valid.txt.xz", joined(sentences[-2:]))
    wiki = (data / "lm/wikitext-2-raw.valid.txt").read_text("utf-8").splitlines()
    write(work / "wiki.txt.xz", [written(line) for line in wiki if line.strip()])
    write(work / "wiki-raw.txt.xz", [line for line in wiki if line.strip()])
    _prepare_romanian(data, work)
    _prepare_summaries(data, work, novels)


def _prepare_romanian(data: Path, work: Path) -> None:
    test, dev = ((data / f"ro/ro_rrt-{part}.txt").read_text("utf-8").splitlines() for part in ("test", "dev"))
    known = {shingle for sentence in test + dev for shingle in shingles(sentence)}
    novels = read(data / "ro/eltec_rom.txt.xz")
    news = read(data / "ro/ronec.txt.xz")
    names = ("newsdev2016", "rosts.train", "rosts.dev", "rosts.test")
    recent = [*news, *(line for name in names for line in (data / f"mt/{name}.ro").read_text("utf-8").splitlines())]
    recent += [line.split("\t")[-1] for line in (data / "mt/tatoeba.eng-ron.dev.tsv").read_text("utf-8").splitlines()]
    lines = [modern(line.strip()) for line in [*novels, *3 * recent]]
    written = [line for line in lines if any(c in "ăâîșț" for c in line.lower()) and not shingles(line) & known]
    random.Random(1).shuffle(written)
    write(work / "diacritics.txt.xz", written)
    write(work / "rrt-dev.txt", dev)
    write(work / "rrt-test.txt", test)
    write(work / "eltec-rom.txt.xz", novels)
    parts = {name: pairs(data, name) for name in ("train", "dev", "test")}
    seen = {ro for _, ro in parts["train"]}
    for name, found in parts.items():
        kept = found if name == "train" else [pair for pair in found if pair[1] not in seen]
        write(work / f"rosts-{name}.jsonl", [json.dumps({"source": a, "target": b}) for a, b in dict.fromkeys(kept)])
    spoken = [side for pair in parts["train"] for side in pair]
    vocabulary([*novels, *3 * spoken], work / "romanian")


def _prepare_summaries(data: Path, work: Path, novels: list[list[str]]) -> None:
    abstracts: list[str] = []
    for name in ("train", "dev", "test"):
        records = [json.loads(line) for line in read(data / f"sum/scitldr-a.{name}.jsonl.xz")]
        found = [
            {
                "source": " ".join(r["source"]),
                "target": r["target"][0],
                "references": r["target"],
                "lead": r["source"][0],
            }
            for r in records
        ]
        write(work / f"scitldr-{name}.jsonl", [json.dumps(record) for record in found])
        if name == "train":
            abstracts = [str(record["source"]) for record in found]
    lines = [line for novel in novels for line in novel]
    write(work / "english.txt.xz", [*lines, *3 * abstracts])
    vocabulary([*lines, *3 * abstracts], work / "english")


def text(file: Path) -> str:
    with lzma.open(file, "rt", encoding="utf-8") as opened:
        return opened.read()


def written(line: str) -> str:
    """A line of WikiText as people write, without the spaces that part its words from their punctuation."""
    line = re.sub(r" @([-,.])@ ", r"\1", line.strip())
    line = re.sub(r'" ([^"]*) "', r'"\1"', line)
    line = re.sub(r" ([,.;:!?%)\]]|'s\b|n't\b|'\w+\b)", r"\1", line)
    return re.sub(r"([(\[$£]) ", r"\1", line)


def modern(line: str) -> str:
    """Romanian as it is written since 1993: â inside of words, but for î after a prefix, and comma-below letters.

    >>> modern("Cînd sînt neînţeles, hotărît")
    'Când sunt neînțeles, hotărât'
    """
    line = line.translate(str.maketrans("şţŞŢ", "șțȘȚ"))
    line = re.sub(r"\b([Ss])înt(?=em\b|eți\b|\b)", r"\1unt", line)
    return re.sub(r"(?<=\w)(?<!\bne)(?<!\bre)(?<!\bpre)(?<!bine)(?<!mai)(?<!micro)(?<!auto)î(?=\w)", "â", line)


def joined(documents: Iterable[Sequence[str]]) -> list[str]:
    """One line each, and an empty one after every document."""
    return [line for document in documents for line in [*document, ""]]


def split(paragraph: str) -> list[str]:
    """Sentences, near enough."""
    return [s for s in re.split(r"(?<=[.!?])[\"”']?\s+(?=[\"“'A-Z])", paragraph.strip()) if len(s) > 2]


def pairs(data: Path, name: str) -> list[tuple[str, str]]:
    sides = ((data / f"mt/rosts.{name}.{side}").read_text("utf-8").splitlines() for side in ("en", "ro"))
    return [(a.strip(), b.strip()) for a, b in zip(*sides, strict=True) if a.strip() and b.strip()]


def vocabulary(lines: list[str], folder: Path) -> None:
    """A SentencePiece vocabulary of 8,000 with T5's sentinels."""
    import subprocess
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        write(Path(made) / "text.txt", lines)
        words = ["--kind", "unigram", "--style", "t5", "--size", "8000", "--out", str(folder)]
        subprocess.run([sys.executable, "-m", "t2t", "tokenizer", f"{made}/text.txt", *words], check=True)


# The cases.


def train(recipe: str | None, settings: dict[str, Any], smoke: bool) -> tuple[Config, dict[str, Any]]:
    """Train, and tell the config with what came out."""
    from t2t.train.run import train as run

    short = {"train.steps": "12", "data.max_samples": "3000", "data.max_validation_samples": "64", "optim.warmup": "2"}
    shared = {"checkpoint.every": "0", "data.readers": "6", "train.log_every": "100"}
    given = {key: value if isinstance(value, list) else str(value) for key, value in settings.items()}
    config = load(recipe, shared | given | (short if smoke else {}))
    return config, dict(run(config))


def gpt2(work: Path, smoke: bool) -> list[dict[str, Any]]:
    settings = {
        "run.dir": work / "runs/gpt2",
        "model.config": "gpt2",
        "model.overrides": ["n_embd=512", "n_layer=8", "n_head=8"],
        "model.tokenizer": work / "gpt2",
        "model.dropout": 0.2,
        "data.train": work / "novels.txt.xz",
        "data.validation": work / "novels-valid.txt.xz",
        "data.block": 512,
        "train.batch": 64,
        "train.steps": 600,
        "train.evaluate_every": 100,
        "optim.lr": "1e-3",
        "optim.schedule": "cosine",
        "optim.warmup": 100,
        "optim.weight_decay": 0.1,
    }
    config, _ = train("gpt2-pretrain", {"data.validation_split": 0} | settings, smoke)
    from t2t.train.evaluate import evaluate

    files = {
        "two other novels": "novels-valid.txt.xz",
        "WikiText, as written": "wiki.txt.xz",
        "WikiText, raw": "wiki-raw.txt.xz",
    }
    own = {"data.objective": "blocks", "data.block": "512"}
    return [
        {
            "case": "gpt2",
            "who": "t2t",
            "text": text,
            **evaluate(str(config.run_dir / "model"), [str(work / file)], (), own),
        }
        for text, file in files.items()
    ]


def bert(work: Path, smoke: bool) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer

    settings = {
        "run.dir": work / "runs/bert",
        "model.config": "bert-base-uncased",
        "model.overrides": [
            "hidden_size=512",
            "num_hidden_layers=6",
            "num_attention_heads=8",
            "intermediate_size=2048",
        ],
        "model.tokenizer": work / "bert",
        "data.train": work / "sentences.txt.xz",
        "data.validation": work / "sentences-valid.txt.xz",
        "train.batch": 256,
        "train.steps": 7000,
        "optim.lr": RATE,
        "optim.warmup": 600,
    }
    _, figures = train("bert-pretrain-1", settings, smoke)
    tokenizer = AutoTokenizer.from_pretrained(work / "bert")
    lines = text(work / "sentences-valid.txt.xz").splitlines()
    counts = Counter(i for ids in tokenizer(lines, add_special_tokens=False)["input_ids"] for i in ids)
    (_, most), total = counts.most_common(1)[0], sum(counts.values())
    return [{"case": "bert", "who": "t2t", **figures, "most_frequent_share": round(most / total, 4)}]


def diacritics(work: Path, smoke: bool) -> list[dict[str, Any]]:
    import t2t
    from t2t.data.tasks import pieces, transform

    settings = {
        "run.dir": work / "runs/diacritics",
        "data.train": work / "diacritics.txt.xz",
        "data.validation": work / "rrt-dev.txt",
    }
    config, figures = train("byt5-diacritics", settings, smoke)
    strip = transform("strip_diacritics", "data.source_transforms")
    test = (work / "rrt-test.txt").read_text("utf-8").splitlines()[: 20 if smoke else None]
    plain = [strip(line) for line in test]
    model = t2t.load(str(config.run_dir / "model"))
    parts = [list(pieces(line, config.data.piece)) for line in plain]
    said = iter(model.generate([part for several in parts for part in several]))
    restored = [" ".join(next(said) for _ in several) for several in parts]
    row = {"case": "diacritics", "who": "t2t", "validation_loss": figures["validation_loss"]}
    row |= {"parameters": sum(p.numel() for p in model.model.parameters())}
    return [row | interval(restored, test), {"case": "diacritics", "who": "copy", **interval(plain, test)}]


def interval(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Word accuracy, and between what it lies in 95 of 100 draws of as many sentences."""
    counts = [metrics.RATIOS["word_accuracy"](p, r) for p, r in zip(predictions, references, strict=True)]
    low, high = metrics.bootstrap_interval(counts)
    found = sum(right for right, _ in counts) / sum(words for _, words in counts)
    return {"word_accuracy": round(found, 4), "low": round(low, 4), "high": round(high, 4)}


def pretrain(work: Path, name: str, text: str, sizes: list[str], smoke: bool) -> Path:
    """A T5 that learned spans of a text, by the vocabulary of that name; its folder."""
    settings = {
        "run.dir": work / f"runs/{name}",
        "model.config": "t5-v1_1-small",
        "model.overrides": sizes,
        "model.tokenizer": work / name,
        "data.train": work / text,
        "data.validation_split": 0,
        "train.batch": 64,
        "train.steps": 3000,
        "train.evaluate_every": 0,
        "optim.name": "adamw",
        "optim.relative_step": "false",
        "optim.scale_parameter": "false",
        "optim.lr": RATE,
        "optim.schedule": "cosine",
        "optim.warmup": 200,
        "optim.clip": 1.0,
    }
    config, _ = train("t5-pretrain", settings, smoke)
    return config.run_dir / "model"


def translate(work: Path, smoke: bool) -> list[dict[str, Any]]:
    sizes = ["d_model=384", "d_ff=1024", "num_heads=6", "num_layers=6", "num_decoder_layers=6"]
    fresh = {"model.config": "t5-v1_1-small", "model.overrides": sizes, "model.tokenizer": work / "romanian"}
    pretrained = pretrain(work, "romanian", "eltec-rom.txt.xz", sizes, smoke)
    rows = []
    for who, start in (
        ("span corruption first", {"model.path": pretrained}),
        ("from scratch", fresh),
    ):
        second = {
            "run.dir": work / f"runs/ro-{who.split()[0]}",
            "model.dropout": 0.1,
            "data.train": work / "rosts-train.jsonl",
            "data.validation": work / "rosts-test.jsonl",
            "data.max_source_length": 128,
            "data.max_target_length": 128,
            "train.batch": 64,
            "train.epochs": 12,
            "train.metrics": ["chrf", "bleu"],
            "optim.lr": "1e-3",
            "optim.warmup": 0.05,
        }
        _, figures = train(None, start | second, smoke)
        rows.append({"case": "translate", "who": who, **figures})
    return rows


def summarize(work: Path, smoke: bool) -> list[dict[str, Any]]:
    import t2t

    sizes = ["d_model=512", "d_ff=1024", "num_heads=8", "num_layers=6", "num_decoder_layers=6"]
    pretrained = pretrain(work, "english", "english.txt.xz", sizes, smoke)
    second = {
        "run.dir": work / "runs/scitldr",
        "model.path": pretrained,
        "model.dropout": 0.1,
        "data.train": work / "scitldr-train.jsonl",
        "data.validation": work / "scitldr-dev.jsonl",
        "data.source": "source",
        "data.target": "target",
        "train.batch": 32,
        "train.epochs": 12,
        "train.evaluate_every": 124,
        "optim.lr": RATE,
        "optim.warmup": 0.1,
    }
    tuned, _ = train("t5-summarize", second, smoke)
    test = [json.loads(line) for line in (work / "scitldr-test.jsonl").read_text("utf-8").splitlines()]
    test = test[: 8 if smoke else None]
    outputs = list(t2t.load(str(tuned.run_dir / "model")).generate([record["source"] for record in test], beams=4))
    return [
        {"case": "summarize", "who": who, "rougeL": _best_rouge(texts, [record["references"] for record in test])}
        for who, texts in (("t2t", outputs), ("first sentence", [record["lead"] for record in test]))
    ]


def _best_rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean ROUGE-L against whichever reference is nearest, as SciTLDR is scored."""
    each = [
        max(metrics.evaluate(["rouge"], [prediction], [one])["rougeL"] for one in several)
        for prediction, several in zip(predictions, references, strict=True)
    ]
    return round(sum(each) / len(each), 4)


CASES = {"gpt2": gpt2, "bert": bert, "diacritics": diacritics, "translate": translate, "summarize": summarize}


if __name__ == "__main__":
    main()
