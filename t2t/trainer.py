"""The Trainer people know: the flat names of t2t-tuner and of Hugging Face's training arguments, on one Config.

>>> arguments = TrainerArguments(train_file="pairs.json", per_device_train_batch_size=4, gradient_accumulation_steps=8)
>>> arguments.config().train.batch
32

Every name becomes a key of the Config (`docs/trainer.md` lists them), changes what the Trainer does, or is refused with
the reason when it is set to something that is not done.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from t2t import config as configs
from t2t import device as devices
from t2t import metrics
from t2t.config import Config
from t2t.data.tokens import Tokenizer
from t2t.errors import InputError, did_you_mean
from t2t.generate import Loaded, Settings
from t2t.generate import load as load_folder
from t2t.models import adapters
from t2t.models import load as models
from t2t.models.base import Kind, Model
from t2t.train import evaluate, run
from t2t.train.summary import model_summary

MODES: dict[str, Kind] = {"seq2seq": "seq2seq", "t5": "seq2seq", "clm": "causal", "gpt": "causal", "causal": "causal"}
SCHEDULES = {name: name for name in ("linear", "cosine", "constant", "inverse_sqrt")} | {
    "constant_with_warmup": "constant"
}
OPTIMIZERS = dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw") | {
    "adafactor": "adafactor",
    "lamb": "lamb",
}
METRICS = {"sacrebleu": "bleu"}  # names that are others here

PACKED = "rows are packed, so that there is next to no padding"
WHOLE = "every device has the whole model"
FIRST_TELLS = "rank 0 alone writes and tells"
DATA_PARALLEL = "the processes share a step's examples, and no more is split yet"
NOT_DDP = "gradients are summed without DistributedDataParallel: what a rank has none of counts as zero"
OWN_FORMAT = "a checkpoint is the whole state of a run"
NO_HUB = "nothing is uploaded: the folder model/ of the run can be, by huggingface_hub"
NO_COMPILE = "the model runs as it is written: torch.compile is not applied yet"
STORED = "tokens of large files are stored, and stores are never stale"
SHUFFLED = "the order of the data is a permutation keyed by seed, whatever reads it"


def key(name: str, default: Any = None) -> Any:
    """A field that is a key of the Config; None leaves the Config's own default."""
    return field(default=default, metadata={"key": name, "becomes": f"`{name}`"})


def rule(becomes: str, default: Any = None) -> Any:
    """A field that `TrainerArguments.config` or the Trainer reads by a rule of its own."""
    return field(default=default, metadata={"becomes": becomes})


def refused(reason: str, default: Any = None, *also: Any) -> Any:
    """A field that may only have values which ask for nothing: the default and those after it."""
    return field(default=default, metadata={"refused": reason, "harmless": (default, *also)})


@dataclass
class TrainerArguments:
    """What a Trainer is told. A field left at None has the Config's own default.

    >>> TrainerArguments(train_file="pairs.json", learning_rat=1e-4)
    Traceback (most recent call last):
    t2t.errors.InputError: learning_rat: unknown argument (did you mean learning_rate?)
    >>> TrainerArguments(train_file="pairs.json", fp16=True)
    Traceback (most recent call last):
    t2t.errors.InputError: fp16: T5 overflows in it: use bf16=True
    """

    # The model
    model_name_or_path: str = key("model.path", "t5-small")
    mode: str | None = rule("checked against the model's kind, which its config tells")
    dropout_rate: float | None = key("model.dropout")
    cache_dir: str | None = refused("the hub's client keeps its cache where the environment's HF_HOME says")
    # The data
    train_file: str | Sequence[str] | None = key("data.train")
    validation_file: str | Sequence[str] | None = key("data.validation")
    validation_split: float | None = key("data.validation_split")
    test_file: str | None = rule("the file that `Trainer.evaluate()` scores")
    dataset_name: str | None = refused("give train_file='dataset:NAME:CONFIG@SPLIT'")
    dataset_config_name: str | None = refused("give train_file='dataset:NAME:CONFIG@SPLIT'")
    source_id: str | None = key("data.source")
    target_id: str | None = key("data.target")
    prefix: str = key("data.prefix", "")
    max_source_length: int = key("data.max_source_length", 128)
    max_target_length: int = key("data.max_target_length", 128)
    block_size: int | None = rule("`data.block`, and `data.objective` is `blocks`")
    pad_to_max_length: bool = refused(PACKED, False)
    pad_to_multiple_of: int | None = refused(PACKED, 8, None)
    ignore_pad_token_for_loss: bool = refused("padding is never learned", True)
    preprocessing_num_workers: int | None = refused("a store is made by one process a core", 1, None)
    overwrite_cache: bool = refused(STORED, False, True)
    dataset_cache: bool = refused(STORED, True, False)
    # How long and how much at once
    output_dir: str = key("run.dir", "./saved_model/")
    run_name: str | None = key("run.name")
    seed: int = key("run.seed", 42)
    data_seed: int | None = refused("seed is the seed of everything")
    per_device_train_batch_size: int = rule(
        "`train.batch`, times gradient_accumulation_steps and the number of processes", 8
    )
    gradient_accumulation_steps: int = rule(
        "`train.batch`, times per_device_train_batch_size and the number of processes", 1
    )
    per_device_eval_batch_size: int | None = key("generate.batch")
    num_train_epochs: float = key("train.epochs", 3.0)
    max_steps: int = rule("`train.steps`; -1: num_train_epochs decides", -1)
    bf16: bool | None = rule("`train.precision`: `mixed`; False: `fp32`; None: mixed on a GPU")
    fp16: bool = refused("T5 overflows in it: use bf16=True", False)
    tf32: bool | None = refused("matrix products are not rounded to TF32: use bf16=True for speed", None, False)
    gradient_checkpointing: bool = key("train.gradient_checkpointing", False)
    label_smoothing_factor: float = key("train.label_smoothing", 0.0)
    dataloader_num_workers: int = key("data.readers", 0)
    use_cpu: bool = rule("`run.device` is `cpu`", False)
    no_cuda: bool = rule("`run.device` is `cpu`", False)
    # The optimizer
    optim: str | None = rule("`optim.name`")
    optimizer: object = rule("`optim.name`, as optim; an optimizer object is refused")
    adafactor: bool = rule("`optim.name` is `adafactor`", False)
    learning_rate: float | None = key("optim.lr")
    lr_scheduler_type: str = rule("`optim.schedule`", "linear")
    warmup_steps: float = rule("`optim.warmup`", 0)
    warmup_ratio: float | None = rule("`optim.warmup`, as a share of all steps")
    weight_decay: float = key("optim.weight_decay", 0.0)
    adam_beta1: float = key("optim.beta1", 0.9)
    adam_beta2: float = key("optim.beta2", 0.999)
    adam_epsilon: float = key("optim.eps", 1e-8)
    max_grad_norm: float = key("optim.clip", 1.0)
    # Logging, evaluating, saving
    logging_strategy: str | None = rule("`train.log_every`: `epoch` or `steps`")
    logging_steps: int | None = rule("`train.log_every`")
    report_to: str | Sequence[str] | None = rule("`track.to`")
    project: str | None = key("track.project")
    eval_strategy: str | None = rule("`train.evaluate_every`: `epoch`, `steps`, or `no`: once, at the end")
    evaluation_strategy: str | None = rule("`train.evaluate_every`, the old name of eval_strategy")
    eval_steps: int | None = rule("`train.evaluate_every`")
    metric: str | Sequence[str] | None = rule("`train.metrics`; None: `bleu` for encoder-decoders")
    predict_with_generate: bool = rule("`train.metrics`: none if False", True)
    generation_num_beams: int | None = key("generate.beams", 4)
    generation_max_length: int | None = key("generate.max_length")
    metric_for_best_model: str | None = rule("`train.best`")
    greater_is_better: bool | None = rule("checked against what the metric is")
    load_best_model_at_end: bool = refused(
        "the best is what model/ holds, or the last where nothing is evaluated", True
    )
    save_strategy: str | None = rule("`checkpoint.every`: `epoch` (default) or `steps`; `no`, `best`: `0`")
    save_steps: int | None = rule("`checkpoint.every`")
    save_total_limit: int = key("checkpoint.keep", 2)
    resume_from_checkpoint: bool | str | None = rule("`checkpoint.resume`; a run goes on from its newest checkpoint")
    # Anything else that the Config has
    torch_ort: bool = key("train.torch_ort", False)
    overrides: Mapping[str, str | list[str]] | None = rule('any key of the Config: `{"data.on_bad_line": "skip"}`')
    # What is not done
    model_parallel_gpus: int = refused(f"{WHOLE}: gradient_checkpointing and optim='adafactor' save memory", 1)
    embedding_on_cpu: bool = refused(f"{WHOLE}: Trainer.freeze(embeddings=True) saves what training it takes", False)
    deepspeed: object = refused(f"{DATA_PARALLEL}: DeepSpeed is not used")
    overwrite_output_dir: bool = refused("nothing is overwritten: give another output_dir", False)
    do_train: bool = refused("call Trainer.train()", False)
    do_eval: bool = refused("call Trainer.train(valid=True)", False)
    do_predict: bool = refused("call Trainer.evaluate()", False)
    lr_scheduler_kwargs: object = refused("the schedules have no settings besides warm-up")
    optim_args: object = refused('use overrides, as {"optim.relative_step": "true"}')
    optim_target_modules: object = refused("every parameter that is not frozen is trained alike")
    average_tokens_across_devices: bool = refused("the loss is always over all target tokens of a step", True)
    bf16_full_eval: bool = refused("evaluation computes as training does", False)
    fp16_full_eval: bool = refused("evaluation computes as training does", False)
    gradient_checkpointing_kwargs: object = refused("blocks are recomputed one by one, which needs no settings")
    torch_compile: bool = refused(NO_COMPILE, False)
    torch_compile_backend: str | None = refused(NO_COMPILE)
    torch_compile_mode: str | None = refused(NO_COMPILE)
    use_liger_kernel: bool = refused("the models have kernels of their own", False)
    liger_kernel_config: object = refused("the models have kernels of their own")
    use_cache: bool = refused("decoding always has a cache, training never", False)
    neftune_noise_alpha: float | None = refused("no noise is added to embeddings: dropout_rate regularises")
    torch_empty_cache_steps: int | None = refused("shapes repeat, so that memory does not fragment")
    auto_find_batch_size: bool = refused(
        'the batch is what you say; "train.micro_rows" in overrides decides memory', False
    )
    logging_first_step: bool = refused("use logging_steps=1", False)
    logging_dir: str | None = refused("log.jsonl and the trackers' files are in output_dir")
    log_on_each_node: bool = refused(FIRST_TELLS, True, False)
    logging_nan_inf_filter: bool = refused("a loss that is not finite stops the run before the update", True, False)
    include_num_input_tokens_seen: object = refused("log.jsonl always counts tokens", "no", False)
    log_level: str = refused("a run reports by print", "passive")
    log_level_replica: str = refused(FIRST_TELLS, "warning")
    disable_tqdm: bool | None = refused("a bar is drawn on a terminal alone", None, False)
    trackio_space_id: str | None = refused("trackio is used as it is set up here")
    trackio_bucket_id: str | None = refused("trackio is used as it is set up here")
    trackio_static_space_id: object = refused("trackio is used as it is set up here")
    eval_delay: float = refused("use eval_steps", 0)
    prediction_loss_only: bool = refused("use predict_with_generate=False", False)
    eval_on_start: bool = refused("call Trainer.evaluate() before Trainer.train()", False)
    eval_do_concat_batches: bool = refused("figures are summed up text by text", True)
    eval_use_gather_object: bool = refused("figures are summed over all processes", False, True)
    eval_accumulation_steps: int | None = refused("figures are summed up text by text")
    include_for_metrics: object = refused("metrics compare generated text with targets", None, [])
    batch_eval_metrics: bool = refused("figures are summed up text by text", False, True)
    save_only_model: bool = refused(OWN_FORMAT, False)
    save_on_each_node: bool = refused(f"{FIRST_TELLS}, in a folder that all can read", False)
    save_safetensors: bool = refused("nothing else is written", True)
    enable_jit_checkpoint: bool = refused("a signal always saves the run after its current step", False, True)
    push_to_hub: bool = refused(NO_HUB, False)
    hub_token: str | None = refused(NO_HUB)
    hub_private_repo: bool | None = refused(NO_HUB)
    hub_model_id: str | None = refused(NO_HUB)
    hub_strategy: str = refused(NO_HUB, "every_save")
    hub_always_push: bool = refused(NO_HUB, False)
    hub_revision: str | None = refused(NO_HUB)
    ignore_data_skip: bool = refused("a run goes on with the data where it stopped, at no cost", False)
    restore_callback_states_from_checkpoint: bool = refused(OWN_FORMAT, False, True)
    full_determinism: bool = refused("on a CPU runs repeat exactly; on a GPU it is not promised", False)
    accelerator_config: object = refused("accelerate is not used")
    parallelism_config: object = refused(DATA_PARALLEL)
    dataloader_drop_last: bool = refused("every example is trained on, also those of a last short step", False)
    dataloader_pin_memory: bool = refused("batches are moved as the device likes it", True)
    dataloader_persistent_workers: bool = refused("readers always live as long as the run", False, True)
    dataloader_prefetch_factor: int | None = refused("every reader is two steps ahead")
    dataloader_multiprocessing_context: str | None = refused("readers are started by a forkserver", None, "forkserver")
    dataloader_in_order: bool = refused(SHUFFLED, True)
    remove_unused_columns: bool = refused("columns that are not used are not read", True)
    label_names: object = refused("use target_id")
    group_by_length: bool = refused(PACKED, False)
    sortish_sampler: bool = refused(PACKED, False)
    train_sampling_strategy: str = refused(SHUFFLED, "random")
    length_column_name: str = refused(PACKED, "length")
    ddp_find_unused_parameters: bool | None = refused(NOT_DDP, None, True, False)
    ddp_bucket_cap_mb: int | None = refused("gradients travel in buckets of 64 MiB", None, 64)
    ddp_broadcast_buffers: bool | None = refused("nothing but gradients is sent", None, False)
    ddp_static_graph: bool | None = refused(NOT_DDP, None, True, False)
    ddp_backend: str | None = refused("the device decides: gloo between CPUs, nccl between GPUs", None, "gloo", "nccl")
    ddp_timeout: int = refused("a process that ends is noticed at once, one that hangs after half an hour", 1800)
    fsdp: object = refused(DATA_PARALLEL, None, "", [], False)
    fsdp_config: object = refused(DATA_PARALLEL)
    local_rank: int = rule("checked against the LOCAL_RANK that torchrun tells", -1)
    debug: object = refused("nothing is there to be debugged so", "")
    skip_memory_metrics: bool = refused("the run's first table says what memory it needs", True)
    generation_config: object = refused("use generation_num_beams, generation_max_length, or generate.* in overrides")

    def __new__(cls, *positional: Any, **given: Any) -> TrainerArguments:
        for name in given:
            cls._check_name(name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.config()

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_name(name)
        super().__setattr__(name, value)

    @classmethod
    def _check_name(cls, name: str) -> None:
        known = [f.name for f in dataclasses.fields(cls)]
        if name not in known:
            raise InputError(f"{name}: unknown argument{did_you_mean(name, known)}")

    def config(self, kind: Kind | None = None) -> Config:
        """The Config that these arguments are for a model of a kind; None: what mode or block_size is for, or T5's.

        >>> config = TrainerArguments(train_file="pairs.json", optim="adafactor", save_strategy="steps").config()
        >>> config.optim.name, config.data.train, config.checkpoint.every
        ('adafactor', ('pairs.json',), 500)
        """
        wanted: Kind | None = None if self.mode is None else _one_of("mode", self.mode, MODES)
        kind = kind or wanted or ("seq2seq" if self.block_size is None else "causal")
        if wanted not in (None, kind):
            raise InputError(f"mode: {self.mode!r} is for {wanted} models, and the model's config says {kind}")
        values: dict[str, tuple[Any, str]] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if "refused" in f.metadata and value not in f.metadata["harmless"]:
                raise InputError(f"{f.name}: {f.metadata['refused']}")
            if "key" in f.metadata and value is not None:
                values[f.metadata["key"]] = (_plain(value), f.name)
        values |= self._length() | self._optimizer() | self._kept() | self._objective(kind) | self._figures(kind)
        return configs.load(overrides=self.overrides, values=values)

    def metrics(self, kind: Kind) -> list[str]:
        """The text metrics of an evaluation.

        >>> TrainerArguments(train_file="pairs.json", metric="sacrebleu").metrics("seq2seq")
        ['bleu']
        """
        if not self.predict_with_generate:
            return []
        if self.metric is None:
            return ["bleu"] if kind == "seq2seq" else []
        names = [self.metric] if isinstance(self.metric, str) else self.metric
        return [METRICS.get(name, name) for name in names]

    def _length(self) -> dict[str, tuple[Any, str]]:
        """How much at once, how long, on what and how precisely."""
        rows, times = (self._count(n) for n in ("per_device_train_batch_size", "gradient_accumulation_steps"))
        ranks, local = (int(os.environ.get(name, other)) for name, other in (("WORLD_SIZE", 1), ("LOCAL_RANK", -1)))
        if self.local_rank not in (-1, local):
            raise InputError(f"local_rank: torchrun tells it, as LOCAL_RANK: leave it out, got {self.local_rank!r}")
        factors = "per_device_train_batch_size x gradient_accumulation_steps" + " x processes" * (ranks > 1)
        values: dict[str, tuple[Any, str]] = {"train.batch": (rows * times * ranks, factors)}
        if self.max_steps != -1:
            values["train.steps"] = self.max_steps, "max_steps"
        if self.bf16 is not None:
            values["train.precision"] = "mixed" if self.bf16 else "fp32", "bf16"
        if self.use_cpu or self.no_cuda:
            values["run.device"] = "cpu", "use_cpu"
        return values

    def _count(self, name: str) -> int:
        value = getattr(self, name)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name}: must be a whole number, 1 or more, got {value!r}")
        return value

    def _optimizer(self) -> dict[str, tuple[Any, str]]:
        given = {"optim": self.optim, "optimizer": self.optimizer, "adafactor": "adafactor" if self.adafactor else None}
        names = {argument: value for argument, value in given.items() if value is not None}
        if not isinstance(self.optimizer, str | None):
            raise InputError("optimizer: is built by the run, so that it can be resumed: name it, as optim='adafactor'")
        chosen = {_one_of(argument, value, OPTIMIZERS) for argument, value in names.items()}
        if len(chosen) > 1:
            raise InputError(f"{' and '.join(names)}: contradict each other; give one of them")
        warmup, ratio = (self.warmup_steps, "warmup_steps"), self.warmup_ratio
        if ratio is not None:
            if self.warmup_steps:
                raise InputError("warmup_ratio: and warmup_steps say the same; give one of them")
            if not isinstance(ratio, float | int) or not 0 <= ratio < 1:
                raise InputError(f"warmup_ratio: must be at least 0 and below 1, got {ratio!r}")
            warmup = (ratio, "warmup_ratio")
        schedule = _one_of("lr_scheduler_type", self.lr_scheduler_type, SCHEDULES), "lr_scheduler_type"
        values: dict[str, tuple[Any, str]] = {"optim.warmup": warmup, "optim.schedule": schedule}
        if names:
            values["optim.name"] = chosen.pop(), next(iter(names))
        return values

    def _kept(self) -> dict[str, tuple[Any, str]]:
        """What is written, and how often."""
        values: dict[str, tuple[Any, str]] = {}
        if self.logging_strategy == "no":
            raise InputError("logging_strategy: log.jsonl is always written, with figures of the last step at least")
        every = _every("logging", self.logging_strategy, self.logging_steps)
        if every is not None:
            values["train.log_every"] = every, "logging_steps"
        strategy = "no" if self.save_strategy == "best" else self.save_strategy  # the best is always saved
        every = _every("save", strategy or (None if self.save_steps is not None else "epoch"), self.save_steps)
        if every is not None:
            values["checkpoint.every"] = every, "save_steps"
        if self.resume_from_checkpoint is not None:
            if not isinstance(self.resume_from_checkpoint, bool):
                reason = "a run goes on from the newest good checkpoint of output_dir: give that alone"
                raise InputError(f"resume_from_checkpoint: {reason}")
            values["checkpoint.resume"] = self.resume_from_checkpoint, "resume_from_checkpoint"
        if self.report_to is not None and self.report_to not in ("none", ["none"]):
            values["track.to"] = _plain(self.report_to), "report_to"
        return values

    def _objective(self, kind: Kind) -> dict[str, tuple[Any, str]]:
        if self.block_size is None:
            return {}
        if kind != "causal":
            raise InputError(f"block_size: is for causal models, this one is {kind}: use max_source_length")
        return {"data.block": (self.block_size, "block_size"), "data.objective": ("blocks", "block_size")}

    def _figures(self, kind: Kind) -> dict[str, tuple[Any, str]]:
        """What is evaluated, when, and what is best."""
        values: dict[str, tuple[Any, str]] = {}
        strategies = {s for s in (self.eval_strategy, self.evaluation_strategy) if s is not None}
        if len(strategies) > 1:
            raise InputError("evaluation_strategy: contradicts eval_strategy; give one of them")
        strategy = next(iter(strategies), None)
        if strategy == "steps" and self.eval_steps is None:
            raise InputError("eval_strategy: 'steps' needs eval_steps")
        every = _every("eval", strategy, self.eval_steps)
        if every is not None:
            values["train.evaluate_every"] = every, "eval_steps"
        if self.validation_file or self.validation_split:
            values["train.metrics"] = self.metrics(kind), "metric"
        if self.metric_for_best_model is not None:
            best = self.metric_for_best_model.removeprefix("eval_")
            values["train.best"] = METRICS.get(best, best), "metric_for_best_model"
        best = values.get("train.best", ("loss", ""))[0]
        if self.greater_is_better is not None and self.greater_is_better != metrics.better(best, 1.0, 0.0):
            raise InputError(f"greater_is_better: {self.greater_is_better} is not so of {best}")
        return values


def _plain(value: Any) -> Any:
    """A path as text, a sequence as a list."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _one_of(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if value not in known:
        raise InputError(f"{name}: {str(value)!r} is not one of {', '.join(known)}{did_you_mean(str(value), known)}")
    return known[value]


def _every(name: str, strategy: str | None, steps: int | None) -> Any:
    """How often, of a strategy and a number of steps; None where neither says."""
    often = {"steps": steps, "epoch": "epoch", "no": 0}
    if strategy is None:
        return steps
    found = _one_of(f"{name}_strategy", strategy, often)
    if steps is not None and strategy != "steps":
        raise InputError(f"{name}_steps: is for {name}_strategy='steps', not {str(strategy)!r}")
    return found


class Trainer:
    """Train a model by its arguments, and use it before and after.

    ``config`` shows the Config that everything comes down to; ``model`` and ``tokenizer`` are for looking at and for
    generating: a run begins with what ``config`` says. After `train` they are those that it made.

    >>> trainer = Trainer(TrainerArguments(model_name_or_path="asset:byt5-ro", train_file="pairs.json"))
    >>> trainer.freeze(embeddings=True)
    >>> trainer.config.model.freeze
    ('embeddings',)
    """

    def __init__(self, arguments: TrainerArguments) -> None:
        self.arguments = arguments
        self._changes: dict[str, tuple[Any, str]] = {}  # keys of the Config that methods have set
        self._frozen: dict[str, bool] = {}
        self._loaded: Loaded | None = None
        self._marks: dict[str, tuple[int, bool]] = {}
        self._trained = False
        named = arguments.model_name_or_path
        self._family, self._architecture = models.architecture(models.read_config(models.find(named)))
        self.config  # noqa: B018 (what contradicts the model is told now)

    @property
    def config(self) -> Config:
        """The Config of the next run."""
        base = self.arguments.config(self._family.kind)
        return configs.load(base=base, values=self._changes)

    @property
    def model(self) -> Model:
        """The model: as a run would begin with it, or as `train` left it."""
        return self._open().model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._open().tokenizer

    def train(
        self,
        valid: bool | None = None,
        batch_size: int | None = None,
        max_source_length: int | None = None,
        max_target_length: int | None = None,
        tensorboard: bool = False,
        dev_mode: bool = False,
        mode: str | None = None,
    ) -> dict[str, float]:
        """Train, or go on where ``output_dir`` left off; gives back the last figures.

        With ``valid`` it must be evaluated, without not; None: where the arguments name something to evaluate on. What
        else is given replaces the arguments'; ``dev_mode`` stops after 10 steps.
        """
        if batch_size is not None:
            self.arguments.per_device_train_batch_size = self.arguments.per_device_eval_batch_size = int(batch_size)
        if max_source_length is not None:
            self.arguments.max_source_length = int(max_source_length)
        if max_target_length is not None:
            self.arguments.max_target_length = int(max_target_length)
        if dev_mode:
            self.arguments.max_steps = 10
        if mode is not None:
            self.arguments.mode = mode
        config = self._with_validation(valid)
        if tensorboard and "tensorboard" not in config.track.to:
            values = {"track.to": ([*config.track.to, "tensorboard"], "tensorboard")}
            config = configs.load(base=config, values=values)
        self._check_untouched()
        self._loaded = None  # no second copy while the run has its own
        figures = run.train(config)
        self._trained = True
        return figures

    def evaluate(self, file: str | None = None) -> dict[str, float]:
        """Loss and text metrics on a file: the one given, or the arguments' test_file, or their validation_file."""
        if self._changes and not self._trained:
            raise InputError("evaluate: the model was changed since it was loaded: train it first")
        chosen = file or self.arguments.test_file or self.arguments.validation_file
        if chosen is None:
            raise InputError("evaluate: no file given, neither here nor as test_file or validation_file")
        config = self.config
        told = {
            name: [*map(str, value)] if isinstance(value, tuple) else str(value)
            for name, value in configs.flat(config).items()
            if name.startswith(("data.", "generate.", "run.")) and name not in ("data.train", "data.validation")
        }
        path = str(config.run_dir / "model") if self._trained else config.model.path
        files = [chosen] if isinstance(chosen, str) else chosen
        return evaluate.evaluate(path, files, self.arguments.metrics(self._family.kind), told)

    def freeze(self, encoder: bool | None = None, decoder: bool | None = None, embeddings: bool | None = None) -> None:
        """Let parts stay as they are (True) or train them again (False); the encoder is without the embedding."""
        for name, frozen in (("encoder", encoder), ("decoder", decoder), ("embeddings", embeddings)):
            if frozen is not None:
                if name not in adapters.parts(self._family):
                    raise InputError(f"freeze: a {self._family.family} model has no {name} of its own")
                self._frozen[name] = frozen
        chosen = [name for name, frozen in self._frozen.items() if frozen]
        self._change({"model.freeze": [*self.arguments.config(self._family.kind).model.freeze, *chosen]}, "freeze")

    def add_new_tokens(self, additional_special_tokens: Sequence[str]) -> None:
        """Add tokens to the vocabulary; they begin as the mean of the others, and stay in texts that are generated."""
        new = [*self.config.model.new_tokens, *additional_special_tokens]
        self._change({"model.new_tokens": new}, "add_new_tokens")
        if self._changes.pop("model.vocab_size", None):
            self.resize_token_embeddings_layer()

    def resize_token_embeddings_layer(self, round_up: bool = True) -> None:
        """Give every token of the tokenizer a row in the embedding and the head; rows are only ever added.

        ``round_up``: in eights.
        """
        needed = run.load_tokenizer(self.config).vocab_size
        rows = max(-(-needed // 8) * 8 if round_up else needed, self._architecture.vocab_size)
        self._change({"model.vocab_size": rows}, "resize_token_embeddings_layer")

    def convert_to_prompt_tuning(self, prompt_list: Sequence[str]) -> None:
        """Train a soft prompt before every input, a vector for each word of ``prompt_list``, and nothing else."""
        words = " ".join(prompt_list)
        told = {"tune.method": "prompt", "tune.init": "text", "tune.text": words, "tune.tokens": len(words.split())}
        self._change(told, "convert_to_prompt_tuning")

    def count_parameters(self, trainable_only: bool = False, return_M: bool = False) -> float:
        """How many parameters there are; with ``return_M`` in millions, to one place."""
        counted = sum(p.numel() for p in self.model.parameters() if p.requires_grad or not trainable_only)
        return round(counted / 1e6, 1) if return_M else counted

    def model_summary(self, no_print: bool = False) -> str | None:
        """Print every parameter of the model and what of it is trained; with ``no_print`` give the text back."""
        text = model_summary(self.model)
        if no_print:
            return text
        print(text)
        return None

    def generate_single(self, input_text: str, max_length: int = 128, device: str | None = None) -> str:
        """The model's text for a text, token by likeliest token; the arguments' prefix is added unless it is there."""
        loaded = self._open(device)
        text = input_text.removeprefix(loaded.settings.prefix)
        return loaded.generate([text], beams=1, temperature=0.0, max_length=int(max_length))[0].strip()

    def generate_diverse(
        self,
        input_text: str,
        output_count: int = 8,
        max_length: int = 128,
        beam_width: int = 4,
        num_beam_groups: int = 2,
        device: str | None = None,
        diversity_penalty: float = 0.5,
    ) -> list[str]:
        """At most ``output_count`` texts that differ, by diverse beam search with ``output_count * beam_width`` beams.

        They come from the groups in turn, the best of each first.
        """
        loaded = self._open(device)
        text = input_text.removeprefix(loaded.settings.prefix)
        beams = output_count * beam_width
        found = loaded.generate_diverse(text, beams, num_beam_groups, diversity_penalty, int(max_length))
        return list(dict.fromkeys(each.strip() for each in found))[:output_count]

    def _open(self, device: str | None = None) -> Loaded:
        """The model ready to generate, loaded when it is first asked for."""
        config = self.config
        if self._loaded is None:
            if self._trained:
                self._loaded = load_folder(config.run_dir / "model", config.run.device)
                adapters.freeze(self._loaded.model, config.model.freeze)
            else:
                tokenizer = run.load_tokenizer(config)
                model, raw = run.load_model(config, devices.resolve(config.run.device), torch.float32, tokenizer)
                data = config.data
                lengths = data.max_source_length, data.max_target_length
                settings = Settings(data.prefix, *lengths, data.source_transforms)
                self._loaded = Loaded(model.eval(), tokenizer, raw, settings)
            self._marks = _marks(self._loaded.model)
        if device is not None:
            self._loaded.model.to(devices.resolve(device))
        return self._loaded

    def _change(self, values: Mapping[str, Any], where: str) -> None:
        """Set keys of the Config for the next run."""
        if self._trained:
            folder = self.config.run_dir / "model"
            raise InputError(f"{where}: this model was trained: make a Trainer with model_name_or_path='{folder}'")
        self._check_untouched()
        changes = self._changes | {name: (value, where) for name, value in values.items()}
        configs.load(base=self.arguments.config(self._family.kind), values=changes)
        self._changes, self._loaded = changes, None

    def _check_untouched(self) -> None:
        """A run begins with what the config says: what was done to the model by hand would be lost without a word."""
        if self._loaded is not None and _marks(self._loaded.model) != self._marks:
            raise InputError(
                "model: was changed by hand, and a run begins with what trainer.config says: "
                "save the changed model and give its folder as model_name_or_path"
            )

    def _with_validation(self, valid: bool | None) -> Config:
        config = self.config
        given = bool(config.data.validation or config.data.validation_split)
        if valid and not given:
            raise InputError("train: valid=True needs validation_file or validation_split")
        if valid is False:
            none = {"data.validation": [], "data.validation_split": 0.0, "train.metrics": [], "train.best": "loss"}
            none |= {"train.evaluate_every": 0, "train.patience": 0}
            return configs.load(base=config, values={name: (value, "valid") for name, value in none.items()})
        return config


def _marks(model: Model) -> dict[str, tuple[int, bool]]:
    """What tells whether parameters were written to or frozen since."""
    return {name: (p._version, p.requires_grad) for name, p in model.named_parameters()}
