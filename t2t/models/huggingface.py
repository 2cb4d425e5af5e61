"""Any other model of `transformers`, with its own forward, under our loss, step, checkpoints and decoding.

Nothing is known of its attention, so that every row holds one example. Its parameters keep the names that it gives
them. No remote code is run and no pickle read.

Shapes: R rows, S source slots, T target slots, V vocabulary, K beams.
"""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2t.errors import InputError, did_you_mean
from t2t.models.architectures import Kind, OneStack
from t2t.models.base import Model, Rows
from t2t.models.cache import ending_together


@dataclass(frozen=True)
class WrappedConfig(OneStack):
    """What the house asks of an architecture; ``original`` is the config that `transformers` makes of it.

    >>> config = WrappedConfig.from_huggingface({"model_type": "llama", "hidden_size": 64, "eos_token_id": [7, 8]})
    >>> config.width, config.eos_id, config.positions
    (64, 7, 0)
    """

    original: Any
    vocab_size: int
    positions: int  # that have an embedding; 0: any number, as with rotary ones
    width: int
    inner: int
    num_heads: int
    num_layers: int
    attention_dropout: float
    start_id: int
    pad_id: int
    eos_id: int

    @classmethod
    def from_huggingface(cls, raw: Mapping[str, Any], dropout: float | None = None) -> WrappedConfig:
        """Read a Hugging Face ``config.json`` of any model type that `transformers` knows."""
        original = _read(raw)
        if dropout is not None:
            _set_dropout(original, dropout)
        text = original.get_text_config(decoder=True)

        def find(*names: str) -> Any:
            found = (getattr(part, name, None) for name in names for part in (original, text))
            return next((value for value in found if value is not None), None)

        eos = find("eos_token_id")
        eos = eos[0] if isinstance(eos, list) else eos
        start = find(*(["decoder_start_token_id"] if original.is_encoder_decoder else []), "bos_token_id")
        pad = find("pad_token_id")
        if eos is None and family(raw).kind != "masked":
            raise InputError("config.json: eos_token_id: is missing, so that no text would ever end")
        eos = 0 if eos is None else eos
        width = find("hidden_size", "d_model")
        return cls(
            original=original,
            vocab_size=find("vocab_size"),
            positions=0 if find("rope_parameters", "rope_theta") else find("max_position_embeddings") or 0,
            width=width,
            inner=find("intermediate_size", "encoder_ffn_dim", "ffn_dim") or 4 * width,
            num_heads=find("num_attention_heads") or 1,
            num_layers=find("num_hidden_layers") or 1,
            attention_dropout=find("attention_dropout", "attention_probs_dropout_prob") or 0.0,
            start_id=eos if start is None else start,
            pad_id=eos if pad is None else pad,
            eos_id=eos,
        )

    def row_cost(self, source_row: int, target_row: int) -> float:
        """About the work of one row forward, in multiply-adds."""
        slots = source_row + target_row
        block = 4 * self.width**2 + 3 * self.width * self.inner + 2 * self.width * slots
        return self.num_layers * block * slots + self.vocab_size * self.width * target_row

    def activations(self, source: float, target: float, dense: bool, recomputed: bool) -> float:
        """About how many numbers forward keeps for backward of a row: as one stack of both, and all logits."""
        return super().activations(0, source + target, True, recomputed) + 2 * target * self.vocab_size


def _read(raw: Mapping[str, Any]) -> Any:
    """The config object of `transformers`, whatever code the file may offer beside it."""
    from transformers import CONFIG_MAPPING

    name = raw.get("model_type")
    if name is None:
        raise InputError("config.json: model_type: is missing")
    if name not in CONFIG_MAPPING:
        suggestion = did_you_mean(name, {kind for mapping in _mappings().values() for kind in mapping})
        raise InputError(f"config.json: model_type: transformers knows no {name!r}{suggestion}")
    try:
        return CONFIG_MAPPING[name].from_dict({**raw, "return_dict": True})
    except Exception as error:  # whatever its validation raises means that the file is at fault
        raise InputError(f"config.json: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of what began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().split("\n")[0] or type(error).__name__


@contextmanager
def _quietly() -> Iterator[None]:
    """What `transformers` would print about the weights we say ourselves."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _set_dropout(config: Any, rate: float) -> None:
    """Set every rate at which numbers are dropped; whole layers, and classifiers, are another matter."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    hit = 0
    for part in filter(None, parts):
        for name in part.to_dict():
            rates = ("dropout" in name or "pdrop" in name) and "classif" not in name
            if rates and type(getattr(part, name)) in (int, float):
                setattr(part, name, rate)
                hit += 1
    if not hit:
        raise InputError(f"model.dropout: {config.model_type} models have no dropout to set")


def family(raw: Mapping[str, Any]) -> type[Wrapped]:
    """The class that serves a config, by what the config says of itself, never by a model's name.

    An encoder-decoder is seq2seq. Among the others ``architectures`` decides, and where it does not, causal goes before
    masked.

    >>> family({"model_type": "bart"}).kind, family({"model_type": "opt"}).kind, family({"model_type": "roberta"}).kind
    ('seq2seq', 'causal', 'causal')
    >>> family({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}).kind
    'masked'
    >>> family({"model_type": "lama"})
    Traceback (most recent call last):
    t2t.errors.InputError: config.json: model_type: transformers knows no 'lama' (did you mean llama?)
    """
    decodes, name, mappings = _read(raw).is_encoder_decoder, raw["model_type"], _mappings()
    able = [one for one, mapping in mappings.items() if name in mapping and (one is WrappedSeq2Seq) == decodes]
    if not able:
        raise InputError(f"config.json: model_type: {name!r} is no seq2seq, causal or masked language model")
    said = [one for one in able if _classes(mappings[one][name]) & set(raw.get("architectures") or ())]
    return (said or able)[0]


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """The classes of `transformers` that open a config's model.

    >>> architectures({"model_type": "opt"})
    ['OPTForCausalLM']
    """
    return sorted(_classes(_mappings()[family(raw)][raw["model_type"]]))


def _mappings() -> dict[type[Wrapped], Mapping[str, Any]]:
    """Which classes of `transformers` each of ours serves, by model type."""
    from transformers.models.auto import modeling_auto as auto

    return {
        WrappedSeq2Seq: auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        WrappedCausal: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        WrappedMasked: auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }


def _classes(entry: str | tuple[str, ...]) -> set[str]:
    return {entry} if isinstance(entry, str) else set(entry)


def read_gguf(file: Path) -> dict[str, Any]:
    """The ``config.json`` that a GGUF file amounts to."""
    if find_spec("gguf") is None:
        raise InputError("model.path: reading a .gguf file takes the gguf package: pip install 't2t[gguf]'")
    return json.loads(_gguf_config(file, file.stat().st_mtime_ns))


@lru_cache(maxsize=1)  # its vocabulary takes seconds to read, and a run asks twice
def _gguf_config(file: Path, changed: int) -> str:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False).to_json_string()
    except Exception as error:  # of a damaged file, of an architecture that transformers cannot read from GGUF
        raise InputError(f"{file}: {_reason(error)}") from error


class Cache:
    """What the inner model remembers of R * K sequences, those of a row side by side."""

    def __init__(self, mask: Tensor, memory: Any = None, lengths: Tensor | None = None) -> None:
        self.mask, self.memory, self.lengths = mask, memory, lengths
        self.past: Any = None  # the inner model makes it
        self.position = torch.zeros(1, dtype=torch.long, device=mask.device)

    def use(self, slots: int) -> None:
        """Nothing to do: it grows with its tokens."""

    def reorder(self, sequences: Tensor) -> None:
        """Let sequence i of R * K go on from what ``sequences[i]`` has decoded, another beam of the same row."""
        self.past.reorder_cache(sequences)


class Wrapped(Model):
    """A model of `transformers`. To the outside the modules and parameters are its own, under its own names.

    >>> raw = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    ...     "num_attention_heads": 2, "vocab_size": 16}
    >>> model = WrappedCausal(WrappedCausal.read(raw, None))
    >>> [name for name, _ in model.named_parameters()][:2]
    ['model.embed_tokens.weight', 'model.layers.0.self_attn.q_proj.weight']
    """

    family = "huggingface"
    packs = False
    auto: ClassVar[str]  # the class of transformers that builds it
    config: WrappedConfig

    def __init__(self, config: WrappedConfig, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.inner: Any = self._build(config) if inner is None else inner
        self._takes = frozenset(inspect.signature(self.inner.forward).parameters)

    @classmethod
    def read(cls, raw: Mapping[str, Any], dropout: float | None) -> WrappedConfig:
        return WrappedConfig.from_huggingface(raw, dropout)

    @classmethod
    def _auto(cls) -> Any:
        import transformers

        return getattr(transformers, cls.auto)

    @classmethod
    def _build(cls, config: WrappedConfig) -> nn.Module:
        try:
            return cls._auto().from_config(config.original, dtype=torch.float32, trust_remote_code=False)
        except (ValueError, TypeError, KeyError, ImportError, RuntimeError, ZeroDivisionError) as error:
            raise InputError(f"config.json: {_reason(error)}") from error

    @classmethod
    def open(cls, path: Path, config: WrappedConfig, dtype: torch.dtype) -> tuple[Wrapped, list[str]]:
        """The model of a folder with safetensors or of a GGUF file, and the parameters that it did not hold."""
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        try:
            with _quietly():
                inner, found = cls._auto().from_pretrained(
                    folder,
                    config=config.original,
                    dtype=dtype,
                    use_safetensors=True,
                    trust_remote_code=False,
                    local_files_only=True,
                    output_loading_info=True,
                    **where,
                )
        except (OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError) as error:
            raise InputError(f"{path}: {_reason(error)}") from error
        model = cls(config, inner)
        return model, sorted(found["missing_keys"] & dict(model.named_parameters()).keys())

    def initialize_one(self, name: str, parameter: Tensor) -> None:
        """Nothing to do: it was born with the scales that `transformers` gives it."""

    def may_lack(self, name: str) -> bool:
        """A head may be new, as on a model that was trained without one."""
        return not name.startswith(f"{self.inner.base_model_prefix}.")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Our own, then the inner model's under their own names; parameters and buffers are found by this too."""
        yield prefix, self
        yield from self.inner.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        return self.inner.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Every parameter once, whatever is tied to it, and the buffers that its checkpoints hold."""
        aliases = {name for name, _ in self.inner.named_parameters(remove_duplicate=False)}
        aliases -= {name for name, _ in self.named_parameters()}
        return {name: t for name, t in self.inner.state_dict(*args, **kwargs).items() if name not in aliases}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """What `state_dict` gave."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        tied = ((name, names[p]) for name, p in self.inner.named_parameters(remove_duplicate=False))
        aliases = {name: state_dict[own] for name, own in tied if own in state_dict}
        return self.inner.load_state_dict({**aliases, **state_dict}, strict, assign)

    @property
    def embeddings(self) -> tuple[str, ...]:  # type: ignore[override]
        """The name of the inner model's input embedding."""
        rows = self.inner.get_input_embeddings().weight
        return tuple(name for name, parameter in self.inner.named_parameters() if parameter is rows)

    @property
    def head(self) -> Tensor:
        return (self.inner.get_output_embeddings() or self.inner.get_input_embeddings()).weight

    def resize(self, rows: int) -> list[Tensor]:
        """Give embedding and head so many rows, new ones of any content; gives back both, or the one that is both."""
        self.inner.resize_token_embeddings(rows, mean_resizing=False)
        ends = self.inner.get_input_embeddings(), self.inner.get_output_embeddings()
        return list({id(end.weight): end.weight for end in ends if end is not None}.values())

    def blocks(self) -> list[nn.Module]:
        from transformers.modeling_layers import GradientCheckpointingLayer

        found: list[nn.Module] = [m for m in self.inner.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not found:
            name = self.config.original.model_type
            raise InputError(f"train.gradient_checkpointing: {name} models have no layers to recompute one by one")
        return found

    def call(self, **inputs: Any) -> Any:
        """The inner model's output, of those inputs that it takes."""
        return self.inner(**{name: value for name, value in inputs.items() if name in self._takes})

    @abstractmethod
    def logits(self, rows: Rows) -> Tensor:
        """What the inner model makes of rows with one example each, [R, T, V].

        Positions are left to it: an example begins at the left, and models begin to count at 0, 1 or 2.
        """

    def loss(self, rows: Rows, smoothing: float) -> tuple[Tensor, Tensor]:
        logits = self.logits(rows).flatten(0, 1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        each = F.cross_entropy(logits.to(wide), rows.labels.flatten(), reduction="none", label_smoothing=smoothing)
        return each.sum()[None], each.detach().view(rows.labels.shape)

    def _decode(self, cache: Cache, **inputs: Any) -> Tensor:
        """Logits [R * K, V] of one more token."""
        output = self.call(past_key_values=cache.past, use_cache=True, **inputs)
        cache.past = output.past_key_values
        cache.position += 1
        logits = output.logits[:, -1]
        # Some have a token that they may never say, as Marian its padding.
        never = [word[0] for word in self.inner.generation_config.bad_words_ids or () if len(word) == 1]
        if never:
            logits[:, never] = -torch.inf
        return logits

    def _check_generates(self) -> None:
        if "past_key_values" not in self._takes:
            name = self.config.original.model_type
            raise InputError(f"generate: {name} models keep no keys and values to go on from")


def _mask(segments: Tensor) -> Tensor:
    """Which slots are real; all of an empty row, which would have nothing to look at."""
    real = segments != 0
    return (real | ~real.any(1, keepdim=True)).long()


class WrappedSeq2Seq(Wrapped):
    """BART, Pegasus, Marian, T5Gemma and their like."""

    kind: ClassVar[Kind] = "seq2seq"
    auto = "AutoModelForSeq2SeqLM"

    def logits(self, rows: Rows) -> Tensor:
        return self.call(
            input_ids=rows.source_ids,
            attention_mask=_mask(rows.source_segments),
            decoder_input_ids=rows.target_ids,
            decoder_attention_mask=_mask(rows.target_segments),
            use_cache=False,
        ).logits

    def start(self, ids: Tensor, segments: Tensor, length: int, copies: int = 1) -> Cache:
        from transformers.modeling_outputs import BaseModelOutput

        self._check_generates()
        memory = self.inner.get_encoder()(input_ids=ids, attention_mask=segments).last_hidden_state
        copied = BaseModelOutput(last_hidden_state=memory.repeat_interleave(copies, 0))
        return Cache(segments.repeat_interleave(copies, 0), copied)

    def first(self, ids: Tensor, segments: Tensor) -> Tensor:
        return torch.full_like(ids[:, 0], self.config.start_id)

    def decode(self, token_ids: Tensor, cache: Cache) -> Tensor:
        inputs = {"encoder_outputs": cache.memory, "attention_mask": cache.mask}
        return self._decode(cache, decoder_input_ids=token_ids[:, None], **inputs)


class WrappedCausal(Wrapped):
    """Llama, Qwen, Gemma, OPT, Pythia and their like."""

    kind: ClassVar[Kind] = "causal"
    auto = "AutoModelForCausalLM"

    def logits(self, rows: Rows) -> Tensor:
        mask = _mask(rows.target_segments)
        return self.call(input_ids=rows.target_ids, attention_mask=mask, use_cache=False).logits

    def start(self, ids: Tensor, segments: Tensor, length: int, copies: int = 1) -> Cache:
        """Read all of each prompt but its last token, which decoding begins with."""
        self._check_generates()
        moved, places = ending_together(ids, segments)
        mask, lengths = (places >= 0).long(), segments.sum(1)
        cache = Cache(mask.repeat_interleave(copies, 0), lengths=lengths.repeat_interleave(copies))
        if moved.shape[1]:
            positions = places.clamp(min=0)
            output = self.call(input_ids=moved, attention_mask=mask, position_ids=positions, use_cache=True)
            cache.past = output.past_key_values
            cache.past.batch_repeat_interleave(copies)
        return cache

    def first(self, ids: Tensor, segments: Tensor) -> Tensor:
        return ids.gather(1, segments.sum(1, keepdim=True) - 1)[:, 0]

    def decode(self, token_ids: Tensor, cache: Cache) -> Tensor:
        assert cache.lengths is not None
        cache.mask = torch.cat([cache.mask, cache.mask.new_ones(len(token_ids), 1)], 1)
        positions = (cache.lengths - 1 + cache.position)[:, None]
        return self._decode(cache, input_ids=token_ids[:, None], attention_mask=cache.mask, position_ids=positions)


class WrappedMasked(Wrapped):
    """ModernBERT, RoBERTa and their like."""

    kind: ClassVar[Kind] = "masked"
    auto = "AutoModelForMaskedLM"

    def logits(self, rows: Rows) -> Tensor:
        if rows.pair_labels is not None:
            name = self.config.original.model_type
            raise InputError(f"data.objective: next sentences take a head that {name} models do not have")
        mask = _mask(rows.target_segments)
        return self.call(input_ids=rows.target_ids, attention_mask=mask, token_type_ids=rows.target_types).logits
