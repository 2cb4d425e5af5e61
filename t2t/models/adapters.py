"""Light-weight tuning of any model: frozen groups, soft prompts and LoRA, kept in the files of peft.

An adapter folder holds ``adapter_config.json``, which names the base model, and ``adapter_model.safetensors``. Both are
simple enough to be read and written here; the tests hold our logits and gradients to those of peft itself.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from t2t.errors import InputError, did_you_mean
from t2t.models import load as models
from t2t.models.base import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TASKS = {"seq2seq": "SEQ_2_SEQ_LM", "causal": "CAUSAL_LM", "masked": None}  # what peft calls the kinds

# Parts of a model by family, or by kind where the family is not ours; a stack is without the embeddings.
PARTS = ("encoder", "decoder", "embeddings")
_EMBEDDINGS = (
    "*shared.*",
    "*embed_tokens.*",
    "*embed_positions.*",
    "*embed_in.*",
    "*embeddings.*",
    "*.wte.*",
    "*.wpe.*",
)
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "t5": {"encoder": ("encoder.*",), "decoder": ("decoder.*",), "embeddings": ("shared.*",)},
    "gpt": {
        "decoder": ("transformer.h.*", "transformer.ln_f.*"),
        "embeddings": ("transformer.wte.*", "transformer.wpe.*"),
    },
    "bert": {"encoder": ("bert.encoder.*",), "embeddings": ("bert.embeddings.*",)},
    "seq2seq": {"encoder": ("*encoder.*",), "decoder": ("*decoder.*",), "embeddings": _EMBEDDINGS},
    "causal": {"decoder": ("*layers.*", "*.h.*"), "embeddings": _EMBEDDINGS},
    "masked": {"encoder": ("*encoder.*", "*layers.*"), "embeddings": _EMBEDDINGS},
}

# What makes queries and values, under the names that architectures give it: LoRA's targets where none are given.
QUERIES_AND_VALUES = (
    *("q", "v", "q_proj", "v_proj", "query", "value", "q_lin", "v_lin"),
    *("c_attn", "query_key_value", "qkv_proj", "Wqkv"),
)

# Keys of adapter_config.json that give the tensors another meaning than W + scale * B A.
_OTHER_MEANINGS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "alora_invocation_tokens", "layer_replication"),
    *("arrow_config", "kasa_config", "monteclora_config", "trainable_token_indices", "target_parameters"),
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the base weights too


def freeze(model: Model, names: Sequence[str]) -> None:
    """Keep parameters as they are, by group (encoder, decoder, embeddings) or by glob of their names.

    >>> model = models.create({"model_type": "t5", "vocab_size": 16, "d_model": 8, "num_layers": 1}, seed=0)
    >>> freeze(model, ["encoder"])
    >>> model.encoder.final_layer_norm.weight.requires_grad, model.shared.weight.requires_grad
    (False, True)
    """
    parameters = dict(model.named_parameters())
    for name in names:
        hit = group(model, name) if name in PARTS else fnmatch.filter(parameters, name)
        if not hit and name in PARTS:
            raise InputError(f"model.freeze: {name!r}: no such part is known of a {model.family} model: use name globs")
        if not hit:
            known = [*PARTS, *(f"{module}.*" for module, _ in model.named_modules() if module), *parameters]
            raise InputError(f"model.freeze: {name!r} matches no parameter{did_you_mean(name, known)}")
        for each in hit:
            parameters[each].requires_grad_(False)


def parts(model: Model | type[Model]) -> Mapping[str, tuple[str, ...]]:
    """The groups that a model can be frozen by, and the globs of each.

    >>> list(parts(models.NATIVE["gpt2"]))
    ['decoder', 'embeddings']
    """
    return GROUPS.get(model.family) or GROUPS[model.kind]


def group(model: Model, name: str) -> list[str]:
    """The parameters of a model's encoder, decoder or embeddings.

    >>> model = models.create({"model_type": "gpt2", "vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}, seed=0)
    >>> group(model, "embeddings")
    ['transformer.wte.weight', 'transformer.wpe.weight']
    """

    def found(part: str) -> list[str]:
        globs = parts(model).get(part, ())
        return [p for p, _ in model.named_parameters() if any(fnmatch.fnmatchcase(p, glob) for glob in globs)]

    outside = () if name == "embeddings" else found("embeddings")
    return [p for p in found(name) if p not in outside]


# Soft prompts


def prompt_rows(embedding: Tensor, count: int, init: str, ids: Sequence[int], seed: int) -> Tensor:
    """What a soft prompt of ``count`` tokens starts from.

    "text": the rows of ``ids``, repeated or cut; "vocabulary": rows drawn from those of ``ids``; "random": numbers of
    the embedding's own scale.

    >>> prompt_rows(torch.eye(3), 4, "text", [2, 1], seed=0).argmax(1)
    tensor([2, 1, 2, 1])
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = embedding.detach()
    if init == "random":
        return torch.randn(count, embedding.shape[1], generator=generator) * embedding.float().std().cpu()
    if init == "vocabulary":
        ids = [ids[i] for i in torch.randint(len(ids), (count,), generator=generator).tolist()]
    return embedding[list(islice(cycle(ids), count))]


def add_prompt(model: Model, rows: Tensor) -> None:
    """Freeze the model and give its embedding these rows [n, D] beyond the vocabulary: the one thing that is trained.

    Whoever makes inputs puts the ids ``model.prompt`` before them.

    >>> model = models.create({"model_type": "t5", "vocab_size": 16, "d_model": 8, "num_layers": 1}, seed=0)
    >>> add_prompt(model, torch.zeros(3, 8))
    >>> model.prompt, [name for name, p in model.named_parameters() if p.requires_grad]
    (range(16, 19), ['shared.prompt'])
    """
    if model.kind == "masked":
        raise InputError("tune.method: a soft prompt is for models that answer, and a masked one fills in: take lora")
    model.requires_grad_(False)
    embedding = model.get_submodule(model.embeddings[0].removesuffix(".weight"))
    weight = cast(Tensor, embedding.weight)
    embedding.register_parameter("prompt", nn.Parameter(rows.to(weight.device, _wide(weight))))
    embedding.forward = functools.partial(_look_up, embedding, embedding.forward)
    model.prompt = range(len(weight), len(weight) + len(rows))
    model.adapter = {
        "peft_type": "PROMPT_TUNING",
        "task_type": TASKS[model.kind],
        "num_virtual_tokens": len(rows),
        "num_transformer_submodules": 1,  # peft would keep rows for a decoder too, which it never reads
        "token_dim": rows.shape[1],
        "prompt_tuning_init": "RANDOM",
    }


def _look_up(embedding: nn.Module, known: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    count = len(cast(Tensor, embedding.weight))
    rows = known(ids.clamp(max=count - 1))
    virtual = F.embedding((ids - count).clamp(min=0), cast(Tensor, embedding.prompt)).to(rows.dtype)
    return torch.where((ids < count)[..., None], rows, virtual)


# LoRA


class LoRA(nn.Module):
    """``W + scale * B A`` in the place of a weight W [out, in], or [in, out] where it is ``turned``.

    The kernels read weights and not layers, so it is the weight that is adapted; nothing can then be dropped from the
    adapter's own input.

    >>> layer = nn.Linear(3, 2, bias=False)
    >>> before = layer.weight.detach().clone()
    >>> _ = parametrize.register_parametrization(layer, "weight", LoRA(layer.weight, r=1, scale=2.0, turned=False))
    >>> torch.equal(layer.weight, before)
    True
    """

    def __init__(
        self, weight: Tensor, r: int, scale: float, turned: bool, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        outputs, inputs = reversed(weight.shape) if turned else weight.shape
        start = nn.init.kaiming_uniform_(torch.empty(r, inputs), a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(start.to(weight.device, _wide(weight)))
        self.lora_B = nn.Parameter(self.lora_A.new_zeros(outputs, r))
        self.scale, self.turned = scale, turned

    def forward(self, weight: Tensor) -> Tensor:
        return adapted(weight, self.lora_A, self.lora_B, self.scale, self.turned)


def adapted(weight: Tensor, a: Tensor, b: Tensor, scale: float, turned: bool) -> Tensor:
    """The weight with its adapter in it, summed in the adapter's precision.

    >>> adapted(torch.zeros(2, 1), torch.tensor([[3.0]]), torch.tensor([[1.0], [2.0]]), scale=0.5, turned=False)
    tensor([[1.5000], [3.0000]])
    """
    change = scale * (b @ a)
    return (weight + (change.T if turned else change)).to(weight.dtype)


def add_lora(model: Model, r: int, alpha: float, targets: Sequence[str] = (), seed: int = 0) -> None:
    """Freeze the model and adapt the linear layers whose names end with one of ``targets``, at first to no effect.

    >>> model = models.create({"model_type": "gpt2", "vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}, seed=0)
    >>> add_lora(model, r=2, alpha=4)
    >>> [tuple(p.shape) for p in model.parameters() if p.requires_grad], model.adapter["target_modules"]
    ([(2, 8), (24, 2)], ['c_attn'])
    """
    layers = {name: module for name, module in model.named_modules() if _turned(module) is not None}
    for target in targets:
        if not any(_ends(name, target) for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            hint = did_you_mean(target, known)
            raise InputError(f"tune.targets: no linear layer's name ends with {target!r}{hint}: {', '.join(known)}")
    chosen = targets or [name for name in QUERIES_AND_VALUES if any(_ends(layer, name) for layer in layers)]
    if not chosen:
        raise InputError(f"tune.targets: no default for {model.family} models: name the layers to adapt")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    turned = False
    for name, layer in layers.items():
        if any(_ends(name, target) for target in chosen):
            turned = bool(_turned(layer))
            lora = LoRA(cast(Tensor, layer.weight), r, alpha / r, turned, generator)
            parametrize.register_parametrization(layer, "weight", lora)
    model.adapter = {
        "peft_type": "LORA",
        "task_type": TASKS[model.kind],
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(chosen),
        "fan_in_fan_out": turned,
        "bias": "none",
    }


def _turned(module: nn.Module) -> bool | None:
    """Whether the weight of a linear layer lies [in, out]; None: it is no linear layer."""
    if isinstance(module, nn.Linear):
        return False
    return True if type(module).__name__ in ("Matrix", "Conv1D") else None  # ours, and that of transformers


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


# Files


def save(model: Model, weights: Mapping[str, Tensor], base: str, folder: Path) -> None:
    """Write the adapter of a model as peft does; ``weights`` are by the model's own names, and may hold more.

    >>> import tempfile
    >>> model = models.create({"model_type": "t5", "vocab_size": 16, "d_model": 8, "num_layers": 1}, seed=0)
    >>> add_prompt(model, torch.zeros(3, 8))
    >>> with tempfile.TemporaryDirectory() as name:
    ...     save(model, dict(model.named_parameters()), "google/t5", Path(name))
    ...     load_file(Path(name) / WEIGHTS)["prompt_embeddings"].shape
    torch.Size([3, 8])
    """
    assert model.adapter, "the model has no adapter"
    folder.mkdir(parents=True, exist_ok=True)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    tensors = {stored_name(name): weights[name].detach().cpu().contiguous() for name in trained}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {**model.adapter, "base_model_name_or_path": base, "inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def stored_name(name: str) -> str:
    """What peft calls a parameter of an adapter.

    >>> stored_name("decoder.block.0.layer.0.SelfAttention.q.parametrizations.weight.0.lora_A")
    'base_model.model.decoder.block.0.layer.0.SelfAttention.q.lora_A.weight'
    """
    layer, _, matrix = name.partition(".parametrizations.weight.0.")
    return f"base_model.model.{layer}.{matrix}.weight" if matrix else "prompt_embeddings"


def read_config(folder: Path) -> dict[str, Any] | None:
    """The ``adapter_config.json`` of a folder; None: it holds no adapter.

    >>> read_config(Path("nowhere"))
    """
    return models.read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None


def base(folder: Path) -> Path:
    """The folder of the model that an adapter belongs to; a folder without an adapter is its own.

    >>> base(Path("model"))
    PosixPath('model')
    """
    config = read_config(folder)
    if config is None:
        return folder
    where, name = f"{folder / CONFIG}: base_model_name_or_path", config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: names no base model: write its folder there")
    try:
        return models.find(name)
    except InputError as error:
        reason = str(error).removeprefix("model.path: ")
        raise InputError(f"{where}: {reason}; write there where the base model is") from None


def load(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Model, dict[str, Any]]:
    """The model of a folder as `load.load` gives it; where it holds an adapter, its base with the adapter in it.

    LoRA is folded into the weights, so that generation costs nothing more.
    """
    model, raw = models.load(base(folder), device, dtype)
    config = read_config(folder)
    if config is None:
        return model, raw
    file, kind = folder / WEIGHTS, config.get("peft_type")
    if kind not in ("LORA", "PROMPT_TUNING"):
        raise InputError(f"{folder / CONFIG}: peft_type: {kind!r} is not supported; supported: LORA, PROMPT_TUNING")
    if not file.is_file():
        raise InputError(f"{folder}: no {WEIGHTS} there (pickled weights are not loaded)")
    try:
        tensors = load_file(file, device=str(device))
    except SafetensorError as error:
        raise InputError(f"{file}: damaged safetensors file: {error}") from None
    if kind == "LORA":
        _fold(model, config, tensors, folder)
    else:
        _put_prompt(model, config, tensors, folder)
    return model, raw


def _put_prompt(model: Model, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    rows, width = tensors.get("prompt_embeddings"), model.head.shape[1]
    if rows is None or rows.ndim != 2 or rows.shape[1] != width:
        raise InputError(f"{folder / WEIGHTS}: no prompt_embeddings of {width} numbers a token, as the base model has")
    add_prompt(model, rows[: config.get("num_virtual_tokens", len(rows))])


@torch.no_grad()
def _fold(model: Model, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    for key in _OTHER_MEANINGS:
        if config.get(key):
            raise InputError(f"{folder / CONFIG}: {key}: is more than plain LoRA, which alone is supported")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        start = config["init_lora_weights"]
        raise InputError(
            f"{folder / CONFIG}: init_lora_weights: {start!r} changed the base weights: convert it in peft"
        )
    layers: dict[str, dict[str, Tensor]] = {}
    for stored, tensor in tensors.items():
        parts = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", stored)
        if parts is None:
            raise InputError(f"{folder / WEIGHTS}: {stored}: is no tensor of plain LoRA")
        layers.setdefault(parts[1], {})[parts[2]] = tensor
    modules = dict(model.named_modules())
    for name, matrices in layers.items():
        turned = _turned(modules[name]) if name in modules else None
        if turned is None:
            raise InputError(f"{folder / WEIGHTS}: the base model has no linear layer {name}")
        weight = cast(Tensor, modules[name].weight)
        wanted = tuple(reversed(weight.shape)) if turned else tuple(weight.shape)
        a, b = matrices.get("A"), matrices.get("B")
        if a is None or b is None or (len(b), *a.shape[1:], len(a)) != (*wanted, *b.shape[1:]):
            raise InputError(f"{folder / WEIGHTS}: {name}: lora_A and lora_B do not fit a weight of {wanted}")
        wide = _wide(weight)
        weight.copy_(adapted(weight, a.to(wide), b.to(wide), _scale(config, name, len(a)), turned))


def _scale(config: Mapping[str, Any], layer: str, r: int) -> float:
    """As peft has it: alpha / r, or with rslora alpha / sqrt(r); alpha may differ by pattern of the layer's name."""
    patterns = config.get("alpha_pattern") or {}
    own = next((alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", layer)), None)
    alpha = float(config.get("lora_alpha", 8) if own is None else own)
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)
