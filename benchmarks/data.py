"""Data on two CPU cores: t2t against `datasets`, `DataLoader` and Hugging Face's collator, side by side in one run.

    python benchmarks/data.py DATA_DIR [--megabytes 50] [--rounds 3] [--gigabytes 5] [--out FILE.json]
    python benchmarks/data.py DATA_DIR --only loader [--megabytes 50] [--rounds 3] [--out FILE.json]
    python benchmarks/data.py DATA_DIR --smoke

DATA_DIR holds novels as ro/eltec_rom.txt.xz and lm/eltec_eng.txt.xz, RO-STS as mt/rosts.train.en and mt/rosts.train.ro,
and T5's vocabulary as tok/t5_spiece.model. The pairs are English and Romanian sentences, and lines of the novels with
their diacritics taken away, in four files of JSON lines, repeated where they are too few.

| case | what is measured |
|---|---|
| prepare | from the files to stored tokens; loading libraries and tokenizer is not counted, starting processes is |
| loader | tokens that two readers bring to the main process out of what was stored, shuffled, 128 examples a step |
| streaming | the same out of the files, shuffled among 10,000 records, tokenized on the way |
| resume | seconds to the first batch of a loader that begins at a step |
| memory | (--gigabytes) a corpus of bytes prepared and trained from, beside a megabyte of it, by a tiny model |

The same for both: files, fast tokenizer, lengths, examples a step, cores. Useful tokens are those that are no padding;
the first steps, in which readers start, are not timed. Each measurement is a process of its own, and rounds of the two
alternate; a figure is the median of its rounds. Memory is that of the whole tree of processes, looked at twenty times a
second: shared pages count once (PSS), ``anonymous`` are those that no file is behind, and ``loaded`` what of these was
there before the work began: libraries and the tokenizer.

The peer is given its best, as short probes find it: its number of processes and the threads of its tokenizer; the
format of its rows, once in random order, as ours is, and once in its own, which groups examples of like length.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import lzma
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Neither torch nor transformers here: pages that this process maps too would count as half a child's.
from t2t import __version__
from t2t.terminal import table

if TYPE_CHECKING:
    from t2t.config import Data
    from t2t.data.loader import Loader
    from t2t.data.prepare import Maker
    from t2t.data.stream import Stream
    from t2t.data.tokens import HuggingFace

CORES, READERS, BATCH, SEED = 2, 2, 128, 1
LONGEST = 256  # tokens of a source, and of a target
BUFFER = 10_000  # records that a stream is shuffled among
FILES = 4  # of pairs: the peer shares a stream among readers by whole files
GPU_SLOTS = 131072  # of a micro-batch, as on a GPU
EVERY_S = 0.05
OURS, PEER = "t2t", "datasets"
ORDERS = ("random", "grouped")  # of the peer's loader
ALONE = ("prepare", "loader", "streaming")  # cases that can be measured alone
TINY = {
    "model_type": "t5",
    "vocab_size": 384,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class Job:
    """One measurement, done by a process of its own; ``choice`` is what was chosen for the peer."""

    case: str
    who: str
    folder: str
    tokenizer: str
    warmup: int = 5
    most: int = 1000  # steps
    step: int = 0
    choice: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The pairs."""
        return [str(file) for file in sorted(Path(self.folder).glob("pairs-*.jsonl"))]

    @property
    def store(self) -> Path:
        """Where this side stores its tokens."""
        return Path(self.folder) / self.who

    @property
    def settings(self) -> str:
        """What is special about it, in words."""
        told = [f"step {self.step:,}"] if self.case.startswith("resume") else []
        return ", ".join(told + [f"{name} {value}" for name, value in self.choice.items()])


@dataclass(frozen=True)
class Plan:
    """How much is measured, and what is tried for the peer."""

    rounds: int
    prepares: tuple[dict[str, Any], ...]
    loaders: tuple[dict[str, Any], ...]


FULL = Plan(
    3,
    tuple({"num_proc": n, "threads": t} for n, t in ((1, "on"), (1, "off"), (2, "off"), (4, "off"))),
    tuple({"rows": f, "order": o} for f in ("lists", "numpy", "torch") for o in ORDERS),
)
SMOKE = Plan(1, ({"num_proc": 2, "threads": "off"},), tuple({"rows": "lists", "order": o} for o in ORDERS))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", nargs="?", type=Path, metavar="DATA_DIR", help="folder with ro/, lm/, mt/ and tok/")
    parser.add_argument("--megabytes", type=float, default=50.0, help="of JSON lines (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=FULL.rounds, help="of each side (default: %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=0.0, help="of the corpus of case memory; 0: leave it out")
    parser.add_argument("--out", type=Path, help="result file (default: results/data.json beside this script)")
    parser.add_argument("--only", choices=ALONE, default="", help="one case alone; writes to --out alone")
    parser.add_argument("--smoke", action="store_true", help="two megabytes, one round; writes to --out alone")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.job:
        print(json.dumps(measure(Job(**json.loads(args.job)))))
        return
    if args.data_dir is None:
        parser.error("DATA_DIR is missing")
    if args.megabytes <= 0 or args.rounds < 1 or args.gigabytes < 0:
        parser.error("--megabytes, --rounds and --gigabytes: must be positive")
    plan, megabytes = (SMOKE, 2.0) if args.smoke else (replace(FULL, rounds=args.rounds), args.megabytes)
    told = "--smoke" if args.smoke else f"--megabytes {megabytes:g} --rounds {args.rounds}"
    told += f" --gigabytes {args.gigabytes:g}" if args.gigabytes else ""
    told += f" --only {args.only}" if args.only else ""
    if os.getloadavg()[0] > 0.5:
        print("note: the machine is busy: what shares its cores is slower than it is", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder), texts(args.data_dir), megabytes * 1e6)
        found = compare(Path(folder), str(args.data_dir / "tok/t5_spiece.model"), plan, only=args.only)
        if args.gigabytes:
            found["rows"] += memory_rows(Path(folder), args.data_dir, args.gigabytes * 1e9)
    print(f"\n{render(found['rows'])}")
    result = {"machine": machine(), "date": datetime.date.today().isoformat(), "versions": versions(),
              "command": f"python benchmarks/data.py DATA_DIR {told}", **found}  # fmt: skip
    out = args.out or (None if args.smoke or args.only else Path(__file__).parent / "results/data.json")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def texts(data_dir: Path) -> Iterator[tuple[str, str]]:
    """Pairs without end: of each kind of text one, again and again."""
    from t2t.data.tasks import transform

    strip = transform("strip_diacritics", "")
    sides = [(data_dir / f"mt/rosts.train.{side}").read_text(encoding="utf-8").split("\n") for side in ("en", "ro")]
    novels = (_lines(data_dir / name) for name in ("ro/eltec_rom.txt.xz", "lm/eltec_eng.txt.xz"))
    kinds = [[*zip(*sides, strict=True)], *([(strip(line), line) for line in lines] for lines in novels)]
    kept = ([pair for pair in kind if pair[0].strip() and pair[1].strip()] for kind in kinds)
    return itertools.chain.from_iterable(zip(*(itertools.cycle(kind) for kind in kept), strict=True))


def _lines(file: Path) -> list[str]:
    with lzma.open(file, "rt", encoding="utf-8") as stream:
        return [line.strip() for line in stream]


def write_pairs(folder: Path, pairs: Iterable[tuple[str, str]], size: float) -> None:
    """So many bytes of pairs, in turn into every file."""
    written = 0
    files = [open(folder / f"pairs-{i}.jsonl", "wb") for i in range(FILES)]  # noqa: SIM115
    for file, (source, target) in zip(itertools.cycle(files), pairs, strict=False):
        written += file.write(json.dumps({"source": source, "target": target}, ensure_ascii=False).encode() + b"\n")
        if written >= size:
            break
    for file in files:
        file.close()


def compare(
    folder: Path, tokenizer: str, plan: Plan, run: Callable[[Job], dict[str, Any]] | None = None, only: str = ""
) -> dict[str, Any]:
    """Every case in turn, or one of `ALONE`: the peer's probes, then rounds in which the two alternate."""
    run = run or run_job
    rows: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []

    def rounds(jobs: Sequence[Job]) -> None:
        found: list[list[dict[str, Any]]] = [[] for _ in jobs]
        for _ in range(plan.rounds):
            for job, results in zip(jobs, found, strict=True):
                results.append(_told(job, run(job)))
        rows.extend(row(job, results) for job, results in zip(jobs, found, strict=True))

    def best(job: Job, choices: Sequence[dict[str, Any]]) -> Job:
        tried = [replace(job, choice=choice) for choice in choices]
        if len(tried) == 1:
            return tried[0]
        found = [_told(job, run(job)) for job in tried]
        probes.extend(row(job, [result]) for job, result in zip(tried, found, strict=True))
        return max(zip(tried, found, strict=True), key=lambda pair: pair[1]["tokens_per_s"])[0]

    def jobs(case: str, **more: Any) -> tuple[Job, Job]:
        return Job(case, OURS, str(folder), tokenizer, **more), Job(case, PEER, str(folder), tokenizer, **more)

    ours, peer = jobs("prepare")
    if only in ("", "prepare"):
        rounds([ours, best(peer, plan.prepares)])
    elif only == "loader":  # there must be something to load
        for job in (ours, replace(peer, choice=plan.prepares[0])):
            run(job)
    if only in ("", "loader"):
        ours, peer = jobs("loader")
        orders = [[choice for choice in plan.loaders if choice["order"] == order] for order in ORDERS]
        loaders = [best(peer, choices) for choices in orders if choices]
        rounds([ours, *loaders])
    if only in ("", "streaming"):
        rounds(jobs("streaming"))
    if only:
        return {"rows": rows, "probes": probes}
    for step in (0, 1000):
        ours, peer = jobs("resume", step=step)
        rounds([ours, replace(peer, choice=loaders[0].choice)])
    rounds([jobs("resume", step=1_000_000)[0]])
    rounds(jobs("resume a stream", step=1000))
    return {"rows": rows, "probes": probes}


def _told(job: Job, found: dict[str, Any]) -> dict[str, Any]:
    figures = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
    print(f"{job.case}  {job.who}  {job.settings}: {figures}", flush=True)
    return found


def row(job: Job, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """One line of the result: the median of each figure over the rounds."""
    medians = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    lead = next(name for name in ("tokens_per_s", "first_s") if name in medians)
    return {
        "case": job.case,
        "who": job.who,
        "settings": job.settings,
        **{name: round(value, 1 if value > 1000 else 4) for name, value in medians.items()},
        f"rounds_{lead}": [round(found[lead], 4) for found in rounds],
    }


def render(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table; ratios are t2t over the peer's fastest."""
    figures = ("tokens_per_s", "seconds", "first_s", "fill", "peak_mib", "anonymous_mib")
    lines = []
    for r in rows:
        peers = [p for p in rows if p["who"] == PEER and (p["case"], p.get("step")) == (r["case"], r.get("step"))]
        peer = max(peers, key=lambda p: p.get("tokens_per_s", 0), default=None)
        ratios = [
            f"{r[name] / peer[name]:.2f}x" if r["who"] == OURS and peer and name in r and name in peer else ""
            for name in ("tokens_per_s", "first_s", "peak_mib")
        ]
        lines.append([r["case"], r["who"], r["settings"], *(_figure(r.get(name)) for name in figures), *ratios])
    return table(lines, ("case", "who", "settings", *figures, "speed", "first", "memory"))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def machine() -> str:
    """The processor, in words."""
    import torch

    from t2t import device

    torch.set_num_threads(CORES)
    return device.describe(torch.device("cpu"))


def versions() -> dict[str, str]:
    """What was measured with what."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "numpy", "pyarrow")
    return {"python": platform.python_version(), "t2t": __version__} | {p: metadata.version(p) for p in packages}


def run_job(job: Job) -> dict[str, Any]:
    """Measure in a fresh process, and look at the memory of it and of those that it starts."""
    if job.case == "prepare":
        shutil.rmtree(job.store, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=job.folder) as home:
        threads = {} if job.who == OURS else {"TOKENIZERS_PARALLELISM": "true" if _threads(job) else "false"}
        done, peaks = watched([sys.executable, __file__, "--job", json.dumps(asdict(job))], threads | {"HF_HOME": home})
    found = json.loads(done.stdout.splitlines()[-1])
    before, after = (peaks.until(found.pop(name)) for name in ("began", "ended"))
    return found | after | {"loaded_mib": before["anonymous_mib"]}


def _threads(job: Job) -> bool:
    return job.choice.get("threads") == "on"


@dataclass
class Peaks:
    """The memory of a tree of processes over time: all of it and what no file is behind, in MiB; most of each alone."""

    seen: list[tuple[float, float, float]] = field(default_factory=list)
    alone: dict[int, float] = field(default_factory=dict)  # by process

    def look(self, root: int) -> None:
        """Add what is there now."""
        total = anonymous = 0
        for process in tree(root):
            told = kilobytes(Path(f"/proc/{process}/smaps_rollup"))
            total += told.get("Pss", 0)
            anonymous += told.get("Pss_Anon", 0) + told.get("Pss_Shmem", 0)
            most = kilobytes(Path(f"/proc/{process}/status")).get("VmHWM", 0)
            self.alone[process] = max(self.alone.get(process, 0.0), most / 1024)
        self.seen.append((time.monotonic(), total / 1024, anonymous / 1024))

    def until(self, end: float) -> dict[str, float]:
        """The most that there was up to a time."""
        seen = [figures for at, *figures in self.seen if at <= end]
        return {name: max((f[i] for f in seen), default=0.0) for i, name in enumerate(("peak_mib", "anonymous_mib"))}


def tree(root: int) -> list[int]:
    """A process and all that it started, and those that they did."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def kilobytes(file: Path) -> dict[str, int]:
    """The figures in kB that a file of /proc tells; none of a process that has ended."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1:] == ["kB"]}


def watched(command: Sequence[str], variables: Mapping[str, str]) -> tuple[subprocess.CompletedProcess[str], Peaks]:
    """Run a command to its end and look at its memory all the while."""
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(CORES), "PYTHONPATH": str(Path(__file__).parents[1])}
    inherited = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, **quiet, **alone, **variables},
    )
    peaks, ended = Peaks(), threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            peaks.look(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        stdout, stderr = process.communicate()
    finally:
        ended.set()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{stderr}\n{' '.join(command)} failed with exit code {process.returncode}")
    return subprocess.CompletedProcess(command, 0, stdout, stderr), peaks


def measure(job: Job) -> dict[str, Any]:
    """One measurement, in this process."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    return MEASURES[job.case, job.who](job)


def _data(job: Job) -> Data:
    from t2t.config import Data

    lengths: dict[str, Any] = {"max_source_length": LONGEST, "max_target_length": LONGEST}
    return Data(train=tuple(job.files), store=str(job.store), shuffle=BUFFER, readers=READERS, **lengths)


def _tokenizer(job: Job) -> HuggingFace:
    from t2t.data import tokens

    found = tokens.light(job.tokenizer)
    assert isinstance(found, tokens.HuggingFace)
    return found


def _maker(job: Job) -> Maker:
    from t2t.data.prepare import Maker

    return Maker(_data(job), _tokenizer(job), "pairs", "seq2seq", start_id=0)


def _prepare_ours(job: Job) -> dict[str, Any]:
    from t2t.data import prepare

    maker = _maker(job)
    began = time.monotonic()
    store = prepare.prepare(maker, job.files, prepare.processes())
    ended = time.monotonic()
    seconds = ended - began
    tokens = sum(store.column(name).total for name in ("source", "target"))
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "tokens": tokens, "began": began, "ended": ended}


def _encode(tokenizer: Any) -> Callable[[Mapping[str, list[str]]], dict[str, list[list[int]]]]:
    """What the peer maps its rows by."""

    def encode(rows: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        settings = {"max_length": LONGEST, "truncation": True, "return_attention_mask": False}
        sides = (tokenizer(rows[name], **settings)["input_ids"] for name in ("source", "target"))
        return dict(zip(("input_ids", "labels"), sides, strict=True))

    return encode


def _prepare_peer(job: Job) -> dict[str, Any]:
    import datasets
    import pyarrow.compute

    encode = _encode(_tokenizer(job).inner)
    processes = job.choice["num_proc"] if job.choice["num_proc"] > 1 else None
    began = time.monotonic()
    read = datasets.load_dataset("json", data_files=job.files, split="train")
    made = read.map(encode, batched=True, num_proc=processes, remove_columns=["source", "target"])
    ended = time.monotonic()
    seconds = ended - began
    columns = (made.data.column(name) for name in ("input_ids", "labels"))
    tokens = sum(pyarrow.compute.sum(pyarrow.compute.list_value_length(column)).as_py() for column in columns)
    made.save_to_disk(job.store)
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "tokens": tokens, "began": began, "ended": ended}


def _rate(steps: Iterable[tuple[int, int]], warmup: int, began: float) -> dict[str, Any]:
    """Useful tokens a second and over slots, out of both of every step, from some step on."""
    tokens = slots = count = 0
    first, start = 0.0, began
    for count, (useful, all_slots) in enumerate(steps, 1):
        if count == 1:
            first = time.monotonic() - began
        if count > warmup:
            tokens, slots = tokens + useful, slots + all_slots
        elif count == warmup:
            start = time.monotonic()
    assert count > warmup, f"{count} steps, of which {warmup} are not timed"
    seconds = time.monotonic() - start
    figures = {"tokens_per_s": tokens / seconds, "fill": tokens / slots, "tokens": tokens, "steps": count - warmup}
    return figures | {"first_s": first, "began": began, "ended": time.monotonic()}


def _shape(examples: Any, data: Data) -> tuple[Any, int]:
    """Row lengths as they are picked for T5-small on a GPU, and how many rows a micro-batch has."""
    from t2t.data.loader import pick_shape
    from t2t.models.t5 import T5Config

    shape = pick_shape(examples, data, BATCH, T5Config().row_cost, SEED)
    most = max(1, GPU_SLOTS // (shape.source_row + shape.target_row))
    rows = 1.03 * shape.rows_per_step + 1
    return shape, math.ceil(rows / math.ceil(rows / most))


def _loader_of(job: Job) -> Loader:
    from t2t.data import prepare
    from t2t.data.loader import Loader

    maker = _maker(job)
    examples, _ = maker.objective(prepare.prepare(maker, job.files, 0))
    return Loader(examples, BATCH, *_shape(examples, maker.data), SEED, pad_id=0)


def _stream_of(job: Job) -> Stream:
    from t2t.data.stream import Sample, Source, Stream

    data = _data(job)
    source = Source(data, _tokenizer(job), SEED, "seq2seq", 0)
    learned = source.splits().train
    sample = Sample(learned, source.longest(learned))
    return Stream(sample, BATCH, *_shape(sample, data), SEED, 0, source=source, readers=READERS)


def _count(job: Job) -> int:
    """Steps of an epoch, or as many as are asked for."""
    records = sum(1 for name in job.files for _ in open(name, "rb"))  # noqa: SIM115
    return min(records // BATCH, job.warmup + job.most)


def _ours(job: Job, loader: Loader) -> dict[str, Any]:
    began = time.monotonic()
    with closing(loader.steps(0, _count(job), readers=READERS)) as steps:
        sizes = (
            (sum(b.tokens for b in batches), sum(b.source_ids.size + b.target_ids.size for b in batches))
            for batches in steps
        )
        return _rate(sizes, job.warmup, began)


def _peer(job: Job, loader: Any) -> dict[str, Any]:
    began = time.monotonic()
    sizes = (
        (
            int(batch["attention_mask"].sum()) + int((batch["labels"] != -100).sum()),
            batch["input_ids"].numel() + batch["labels"].numel(),
        )
        for batch in itertools.islice(loader, _count(job))
    )
    return _rate(sizes, job.warmup, began)


def _collator(job: Job) -> Any:
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(_tokenizer(job).inner, padding="longest", pad_to_multiple_of=8)


def _peer_loader(job: Job, workers: int) -> Any:
    import datasets
    import pyarrow.compute
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    rows = datasets.load_from_disk(job.store)
    order: dict[str, Any] = {"shuffle": True}
    if job.choice["order"] == "grouped":
        lengths = pyarrow.compute.list_value_length(rows.data.column("input_ids")).to_pylist()
        order = {"sampler": LengthGroupedSampler(BATCH, lengths=lengths)}
    if job.choice["rows"] != "lists":
        rows = rows.with_format(job.choice["rows"])
    torch.manual_seed(SEED)
    settings = {"batch_size": BATCH, "collate_fn": _collator(job), "num_workers": workers, "drop_last": True}
    return torch.utils.data.DataLoader(rows, **settings, **order)


def _peer_stream(job: Job) -> Any:
    import datasets
    import torch

    rows = datasets.load_dataset("json", data_files=job.files, split="train", streaming=True)
    rows = rows.shuffle(seed=SEED, buffer_size=BUFFER)
    rows = rows.map(_encode(_tokenizer(job).inner), batched=True, remove_columns=["source", "target"])
    settings = {"batch_size": BATCH, "collate_fn": _collator(job), "num_workers": READERS, "drop_last": True}
    return torch.utils.data.DataLoader(rows, **settings)


def _first(begin: Callable[[], Iterator[Any]]) -> dict[str, Any]:
    began = time.monotonic()
    steps = begin()
    next(steps)
    ended = time.monotonic()
    figures = {"first_s": ended - began, "began": began, "ended": ended}
    if hasattr(steps, "close"):
        steps.close()
    return figures


def _resume_ours(job: Job) -> dict[str, Any]:
    loader = _loader_of(job)
    return {"step": job.step} | _first(lambda: loader.steps(job.step, job.step + 1))


def _skipped(loader: Any, step: int) -> dict[str, Any]:
    """As the peer's trainer begins at a step."""
    from accelerate import skip_first_batches

    return {"step": step} | _first(lambda: iter(skip_first_batches(loader, step)))


def _resume_peer(job: Job) -> dict[str, Any]:
    loader = _peer_loader(job, 0)
    return _skipped(loader, job.step % len(loader)) | {"step": job.step}


def _resume_our_stream(job: Job) -> dict[str, Any]:
    """From the cursors that a run keeps."""
    stream, step = _stream_of(job), min(job.step, _count(job) - READERS)
    for _ in stream.steps(0, step):
        pass
    kept, again = stream.cursors(step), _stream_of(job)
    again.restore([kept])
    return {"step": step} | _first(lambda: again.steps(step, step + 1))


def _resume_peer_stream(job: Job) -> dict[str, Any]:
    return _skipped(_peer_stream(job), min(job.step, _count(job) - READERS))


MEASURES: dict[tuple[str, str], Callable[[Job], dict[str, Any]]] = {
    ("prepare", OURS): _prepare_ours,
    ("prepare", PEER): _prepare_peer,
    ("loader", OURS): lambda job: _ours(job, _loader_of(job)),
    ("loader", PEER): lambda job: _peer(job, _peer_loader(job, READERS)),
    ("streaming", OURS): lambda job: _ours(job, _stream_of(job)),
    ("streaming", PEER): lambda job: _peer(job, _peer_stream(job)),
    ("resume", OURS): _resume_ours,
    ("resume", PEER): _resume_peer,
    ("resume a stream", OURS): _resume_our_stream,
    ("resume a stream", PEER): _resume_peer_stream,
}


def memory_rows(folder: Path, data_dir: Path, size: float) -> list[dict[str, Any]]:
    """What processes need for a large corpus, and for its first megabyte: beyond it is the data."""
    (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    text = "\n\n".join(line for line in _lines(data_dir / "ro/eltec_rom.txt.xz") if line).encode() + b"\n\n"
    (folder / "small.txt").write_bytes(text[: text.index(b"\n", min(10**6, len(text) // 2))])
    with open(folder / "large.txt", "wb") as file:
        while file.tell() < size:
            file.write(text)
    rows = []
    for name, verbs in (("large", ("prepare", "train")), ("small", ("train",))):
        for verb in verbs:
            settings = {
                "data.train": folder / f"{name}.txt",
                "data.objective": "span_corruption",
                "data.store": folder / "stores",
                "model.config": folder / "tiny.json",
                "model.tokenizer": "bytes",
                "run.device": "cpu",
                "run.dir": folder / f"run-{name}",
                "train.steps": 20,
                "train.batch": 64,
                "data.readers": READERS,
            }
            command = [sys.executable, "-m", "t2t", verb, *(f"--{key}={value}" for key, value in settings.items())]
            began = time.monotonic()
            _, peaks = watched(command, {})
            main, *children = peaks.alone.values()
            figures: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "main_mib": round(main, 1)}
            figures |= {"children_mib": [round(child, 1) for child in children]}
            figures |= {key: round(value, 1) for key, value in peaks.until(math.inf).items()}
            told = f"{verb}, {(folder / f'{name}.txt').stat().st_size / 1e6:,.0f} MB"
            rows.append({"case": "memory", "who": OURS, "settings": told, **figures})
            print(f"memory  {told}: {figures}", flush=True)
    return rows


if __name__ == "__main__":
    main()
