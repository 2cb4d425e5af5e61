"""Fine-tuning T5 on two CPU cores: t2t against `Seq2SeqTrainer` of transformers, side by side in one run.

    python benchmarks/cpu_vs_hf.py DATA_DIR [--steps 12] [--out FILE.json]
    python benchmarks/cpu_vs_hf.py --smoke

DATA_DIR holds RO-STS as mt/rosts.train.en and mt/rosts.train.ro, and T5's vocabulary as tok/t5_spiece.model.

Same for both: model (fresh weights, dropout 0.1), token ids (cut at 512 and 128), examples a step, fp32, AdamW,
clipping, threads, and the count: useful tokens are the source and target tokens that are no padding, over the wall
time of the timed steps, data loading included. Each measurement is a process of its own, and rounds of the two
alternate; a figure is the median of its rounds.

The peer is given its best: dynamic padding, its own length grouping over the whole data by whichever length pads
least, fused AdamW, no cache, and of eager or SDPA attention and one micro-batch or four what a short probe finds
fastest. Grouping makes steps of unequal size, so its timed steps are picked evenly by size, padding included, from an
epoch's; the longest, which its order puts first, falls into the warm-up and counts for memory only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Neither torch nor transformers here: on Linux a process's peak memory starts at that of the one that started it.
from t2t import __version__
from t2t.terminal import table

if TYPE_CHECKING:
    import numpy as np

    from t2t.data.tokens import Pairs

CORES, SEED, LR, CLIP = 2, 1, 1e-4, 1.0
MAX_SOURCE, MAX_TARGET = 512, 128
T5 = {
    "model_type": "t5",
    "d_kv": 64,
    "dropout_rate": 0.1,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
ASSET = T5 | {"vocab_size": 384, "d_model": 256, "d_ff": 1024, "num_layers": 6, "num_decoder_layers": 3, "num_heads": 4}
SMALL = T5 | {"vocab_size": 32128, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
TINY = T5 | {"vocab_size": 384, "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}


@dataclass(frozen=True)
class Job:
    """One measurement, done by a process of its own."""

    who: str
    config: str
    tokenizer: str
    data: str
    batch: int
    warmup: int
    steps: int
    attention: str = ""
    micro_batches: int = 1

    @property
    def settings(self) -> str:
        """What was chosen for the peer."""
        if self.who == "t2t":
            return ""
        return f"{self.attention}, {self.micro_batches} x {self.batch // self.micro_batches}"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    batch: int
    warmup: int
    steps: int
    probe_steps: int
    rounds: int
    peers: tuple[tuple[str, int], ...]  # attention and micro-batches a step that the probe tries


FULL = Plan(64, 3, 12, 6, 5, (("eager", 1), ("eager", 4), ("sdpa", 1), ("sdpa", 4)))
SMOKE = Plan(8, 1, 2, 1, 1, (("sdpa", 4),))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", nargs="?", type=Path, metavar="DATA_DIR", help="folder with mt/ and tok/")
    parser.add_argument("--steps", type=int, default=FULL.steps, help="timed steps of a round (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="result file (default: results/cpu_vs_hf.json beside this script)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on made-up pairs; writes to --out alone")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.job:
        print(json.dumps(measure(Job(**json.loads(args.job)))))
        return
    if args.smoke:
        plan, command = SMOKE, "python benchmarks/cpu_vs_hf.py --smoke"
        pairs, cases = made_up_pairs(100), {"smoke": (TINY, "bytes")}
    elif args.data_dir is None:
        parser.error("DATA_DIR is missing")
    else:
        plan = replace(FULL, steps=args.steps, probe_steps=min(FULL.probe_steps, args.steps))
        command = f"python benchmarks/cpu_vs_hf.py DATA_DIR --steps {args.steps}"
        pairs = read_pairs(args.data_dir / "mt/rosts.train.en", args.data_dir / "mt/rosts.train.ro")
        cases = {"asset-size": (ASSET, "bytes"), "t5-small": (SMALL, str(args.data_dir / "tok/t5_spiece.model"))}
    most = len(pairs) // plan.batch - plan.warmup
    if not 1 <= plan.steps <= most:
        parser.error(f"--steps: {plan.steps}, where 1 to {most} make at most one epoch")
    if os.getloadavg()[0] > 0.5:
        print("note: the machine is busy: two threads that share their cores are many times slower", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), pairs, cases, plan)
    result = {"machine": result["machine"], "date": datetime.date.today().isoformat(), "versions": versions(),
              "command": command, "rows": result["rows"], "probes": result["probes"]}  # fmt: skip
    print(f"\n{render(result['rows'])}")
    out = args.out or (None if args.smoke else Path(__file__).parent / "results/cpu_vs_hf.json")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def read_pairs(source: Path, target: Path) -> list[tuple[str, str]]:
    """The lines of two files side by side."""
    sides = [path.read_text(encoding="utf-8").split("\n") for path in (source, target)]
    return [(s, t) for s, t in zip(*sides, strict=True) if s.strip() and t.strip()]


def made_up_pairs(count: int) -> list[tuple[str, str]]:
    """Short texts of unequal length and their reversals."""
    rng = random.Random(SEED)
    texts = ["".join(rng.choices("abcdefgh ", k=rng.randint(2, 30))).strip() or "a" for _ in range(count)]
    return [(text, text[::-1]) for text in texts]


def compare(
    folder: Path,
    pairs: Sequence[tuple[str, str]],
    cases: dict[str, tuple[dict[str, Any], str]],
    plan: Plan,
    run: Callable[[Job], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Every case in turn: the peer's probes, then rounds in which the two alternate."""
    run = run or run_job
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in pairs), encoding="utf-8")
    machine, rows, probes = "", [], []
    for case, (raw, tokenizer) in cases.items():
        config = folder / f"{case}.json"
        config.write_text(json.dumps(raw), encoding="utf-8")
        ours = Job("t2t", str(config), tokenizer, str(data), plan.batch, plan.warmup, plan.steps)
        tried = [replace(ours, who="transformers", attention=a, micro_batches=n) for a, n in plan.peers]
        peer = tried[0]
        if len(tried) > 1:
            speeds = [_told(case, job, run(job)) for job in (replace(job, steps=plan.probe_steps) for job in tried)]
            peer = max(zip(tried, speeds, strict=True), key=lambda pair: pair[1]["tokens_per_s"])[0]
            probes += [row(case, job, [found]) for job, found in zip(tried, speeds, strict=True)]
        found: dict[str, list[dict[str, Any]]] = {"t2t": [], "transformers": []}
        for _ in range(plan.rounds):
            for job in (ours, peer):
                found[job.who].append(_told(case, job, run(job)))
        rows += [row(case, job, found[job.who]) for job in (ours, peer)]
        machine = found["t2t"][0]["machine"]
    return {"machine": machine, "rows": rows, "probes": probes}


def _told(case: str, job: Job, found: dict[str, Any]) -> dict[str, Any]:
    speed, peak = found["tokens_per_s"], found["peak_gib"]
    print(f"{case}  {job.who} {job.settings}  {job.steps} steps: {speed:,.0f} tokens/s, {peak:.2f} GiB", flush=True)
    return found


def row(case: str, job: Job, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the result: the median of each figure over the rounds."""

    def median(figure: str, digits: int) -> float:
        return round(statistics.median(found[figure] for found in rounds), digits)

    return {
        "case": case,
        "who": job.who,
        "settings": job.settings,
        "tokens_per_s": median("tokens_per_s", 1),
        "step_ms": median("step_ms", 1),
        "peak_gib": median("peak_gib", 3),
        "imported_gib": median("imported_gib", 3),
        "tokens_per_step": median("tokens_per_step", 1),
        "fill": median("fill", 3),
        "parameters": rounds[0]["parameters"],
        "rounds_tokens_per_s": [round(found["tokens_per_s"], 1) for found in rounds],
    }


def render(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table; ratios are t2t over the peer."""
    lines = []
    for ours, peer in zip(rows[::2], rows[1::2], strict=True):
        for r in (ours, peer):
            ratio = [f"{r[key] / peer[key]:.2f}x" for key in ("tokens_per_s", "peak_gib")]
            speed, memory = ratio if r is ours else ("", "")
            lines.append([r["case"], r["who"], r["settings"], round(r["tokens_per_s"]), speed, round(r["step_ms"]),
                          f"{r['peak_gib']:.2f}", memory, f"{r['imported_gib']:.2f}", f"{r['fill']:.2f}"])  # fmt: skip
    return table(
        lines,
        ("case", "who", "settings", "tokens/s", "ratio", "step ms", "peak GiB", "ratio", "of it imports", "fill"),
    )


def versions() -> dict[str, str]:
    """What was measured with what."""
    packages = ("torch", "transformers", "accelerate", "numpy")
    return {"python": platform.python_version(), "t2t": __version__} | {p: metadata.version(p) for p in packages}


def run_job(job: Job) -> dict[str, Any]:
    """Measure in a fresh process."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(CORES)}
    command = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet, **alone})
    if done.returncode:
        raise SystemExit(f"{done.stderr}\n{job} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Trace:
    """What a side hands back: its clock, useful tokens and slots so far at the end of each step, and sizes."""

    marks: list[tuple[float, int, int]]
    parameters: int
    imported: int


def measure(job: Job) -> dict[str, Any]:
    """One measurement, in this process."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    import torch

    from t2t import device

    torch.set_num_threads(CORES)
    trace = (_train_t2t if job.who == "t2t" else _train_peer)(job)
    assert len(trace.marks) == job.warmup + job.steps, "another number of steps was made"
    warm, end = trace.marks[job.warmup - 1], trace.marks[-1]
    seconds, tokens, slots = (after - before for before, after in zip(warm, end, strict=True))
    cpu = torch.device("cpu")
    return {
        "machine": device.describe(cpu),
        "tokens_per_s": tokens / seconds,
        "step_ms": 1000 * seconds / job.steps,
        "tokens_per_step": tokens / job.steps,
        "fill": tokens / slots,
        "peak_gib": device.peak_memory(cpu) / 2**30,
        "imported_gib": trace.imported / 2**30,
        "parameters": trace.parameters,
    }


def _train_t2t(job: Job) -> Trace:
    from t2t import device
    from t2t.config import load
    from t2t.train.run import build
    from t2t.train.step import train_step

    imported = device.peak_memory(device.resolve("cpu"))
    settings = {
        "run.device": "cpu",
        "run.seed": SEED,
        "run.threads": CORES,
        "model.config": job.config,
        "model.tokenizer": job.tokenizer,
        "data.train": job.data,
        "data.max_source_length": MAX_SOURCE,
        "data.max_target_length": MAX_TARGET,
        "train.batch": job.batch,
        "train.steps": job.warmup + job.steps,
        "train.precision": "fp32",
        "optim.lr": LR,
        "optim.clip": CLIP,
    }
    run = build(load(overrides={key: str(value) for key, value in settings.items()}), report=lambda line: None)
    marks, tokens, slots = [], 0, 0
    for step, batches in enumerate(run.loader.steps(0, run.total_steps)):
        result = train_step(run.model, run.optimizer, batches, step, SEED, CLIP, 0.0, run.over)
        tokens += result.tokens
        slots += sum(batch.source_ids.size + batch.target_ids.size for batch in batches)
        marks.append((time.perf_counter(), tokens, slots))
    return Trace(marks, _count(run.model), imported)


def _train_peer(job: Job) -> Trace:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForSeq2SeqLM,
        ByT5Tokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        TrainerCallback,
    )

    from t2t import device
    from t2t.data import tokens
    from t2t.data.tasks import Example

    class Counting(Seq2SeqTrainer):
        """Counts the tokens and slots that it computes."""

        seen = slots = 0

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            labels = inputs["labels"]
            self.seen += int(inputs["attention_mask"].sum()) + int((labels != -100).sum())
            self.slots += inputs["input_ids"].numel() + labels.numel()
            return super().training_step(model, inputs, *rest, **named)

    class Clock(TrainerCallback):
        """Notes the time, tokens and slots at the end of every step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), trainer.seen, trainer.slots))

    marks: list[tuple[float, int, int]] = []
    imported = device.peak_memory(torch.device("cpu"))
    lines = [json.loads(line) for line in Path(job.data).read_text(encoding="utf-8").splitlines()]
    tokenizer = tokens.load(job.tokenizer)
    pairs = tokens.tokenize((Example(**line, where="") for line in lines), tokenizer, MAX_SOURCE, MAX_TARGET)
    examples = [
        {"input_ids": pairs.source[i].tolist(), "labels": pairs.target[i].tolist()}
        for i in peer_order(pairs, job.batch, job.warmup, job.steps)
    ]
    torch.manual_seed(SEED)
    raw = json.loads(Path(job.config).read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**raw, use_cache=False)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=job.attention)
    padder = tokenizer.inner if isinstance(tokenizer, tokens.HuggingFace) else ByT5Tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Counting(
            model=model,
            args=Seq2SeqTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=job.batch // job.micro_batches,
                gradient_accumulation_steps=job.micro_batches,
                max_steps=job.warmup + job.steps,
                train_sampling_strategy="sequential",  # the examples lie in its grouped order already
                optim="adamw_torch_fused",
                learning_rate=LR,
                max_grad_norm=CLIP,
                dataloader_num_workers=0,
                dataloader_pin_memory=False,
                remove_unused_columns=False,
                eval_strategy="no",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                seed=SEED,
            ),
            train_dataset=examples,
            data_collator=DataCollatorForSeq2Seq(padder, model=model),
            callbacks=[Clock()],
        )
        trainer.train()
    return Trace(marks, _count(model), imported)


def peer_order(pairs: Pairs, batch: int, warmup: int, steps: int) -> list[int]:
    """The examples of the peer's steps: the first batches of its epoch, then ``steps`` picked evenly by their slots."""
    import numpy as np

    order = _grouped(pairs.source.lengths, pairs.target.lengths, batch)
    batches = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
    source, target = pairs.source.lengths, pairs.target.lengths
    rest = sorted(batches[warmup:], key=lambda rows: len(rows) * int(source[rows].max() + target[rows].max()))
    middles = ((np.arange(steps) + 0.5) * len(rest) / steps).astype(int)
    timed = [rest[i] for i in middles]
    random.Random(SEED).shuffle(timed)
    return [i for rows in [*batches[:warmup], *timed] for i in rows]


def _grouped(source: np.ndarray, target: np.ndarray, batch: int) -> list[int]:
    """An epoch in the order of the peer's length grouping, by the length that leaves the fewest slots."""
    import numpy as np
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    def slots(order: list[int]) -> int:
        batches = [order[i : i + batch] for i in range(0, len(order), batch)]
        return sum(len(rows) * int(source[rows].max() + target[rows].max()) for rows in batches)

    lengths = (source, target, source + target, np.maximum(source, target))
    orders = [
        list(LengthGroupedSampler(batch, lengths=length.tolist(), generator=torch.Generator().manual_seed(SEED)))
        for length in lengths
    ]
    return min(orders, key=slots)


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
