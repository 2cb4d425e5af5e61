"""The published sizes of the native families by name, and the changes that a user makes to a config.

A size is the Hugging Face ``config.json`` of the model of that name. A run from scratch takes it as a pattern: its
vocabulary and special ids follow the tokenizer (`fitted`), and `changed` sets single keys.

>>> named("t5-base")["d_model"], changed(named("gpt2"), ["n_layer=4", "attn_pdrop=0"])["attn_pdrop"]
(768, 0.0)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from t2t.errors import InputError, did_you_mean

VOCABULARY_STEP = 64
"""A vocabulary that follows the tokenizer is rounded up to a multiple of this, which matrix products like."""

_T5 = {
    "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
    "num_decoder_layers": None, "num_heads": 8, "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128, "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0,
    "feed_forward_proj": "relu", "tie_word_embeddings": True, "is_encoder_decoder": True, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
_T5_1_1 = _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_MT5 = _T5_1_1 | {"model_type": "mt5", "vocab_size": 250112}
_UMT5 = _T5_1_1 | {"model_type": "umt5", "vocab_size": 256384}
_BYT5 = _T5_1_1 | {"vocab_size": 384}
_GPT2 = {
    "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
_NEO = {
    "model_type": "gpt_neo", "vocab_size": 50257, "max_position_embeddings": 2048, "hidden_size": 2048,
    "num_layers": 24, "attention_types": [[["global", "local"], 12]], "num_heads": 16, "intermediate_size": None,
    "window_size": 256, "activation_function": "gelu_new", "resid_dropout": 0.0, "embed_dropout": 0.0,
    "attention_dropout": 0.0, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
    "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
_BERT = {
    "model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}  # fmt: skip
_BY_TYPE = {base["model_type"]: base for base in (_T5, _MT5, _UMT5, _GPT2, _NEO, _BERT)}


def _t5(base: dict[str, Any], width: int, inner: int, heads: int, layers: int, **more: int) -> dict[str, Any]:
    return base | {"d_model": width, "d_ff": inner, "num_heads": heads, "num_layers": layers} | more


def _gpt2(width: int, heads: int, layers: int) -> dict[str, Any]:
    return _GPT2 | {"n_embd": width, "n_head": heads, "n_layer": layers}


def _neo(width: int, heads: int, layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_heads": heads, "num_layers": layers}
    return _NEO | sizes | {"attention_types": [[["global", "local"], layers // 2]]}


def _bert(width: int, heads: int, layers: int, vocab_size: int = 30522) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
    return _BERT | sizes | {"intermediate_size": 4 * width, "vocab_size": vocab_size}


# Width, inner width, heads, layers of what T5 1.1, Flan, mT5 and umT5 call by one name.
_LATER = {
    "small": (512, 1024, 6, 8),
    "base": (768, 2048, 12, 12),
    "large": (1024, 2816, 16, 24),
    "xl": (2048, 5120, 32, 24),
    "xxl": (4096, 10240, 64, 24),
}
SIZES: dict[str, dict[str, Any]] = {
    "t5-small": _t5(_T5, 512, 2048, 8, 6),
    "t5-base": _t5(_T5, 768, 3072, 12, 12),
    "t5-large": _t5(_T5, 1024, 4096, 16, 24),
    "t5-3b": _t5(_T5, 1024, 16384, 32, 24, d_kv=128),
    "t5-11b": _t5(_T5, 1024, 65536, 128, 24, d_kv=128),
    **{f"t5-v1_1-{size}": _t5(_T5_1_1, *shape) for size, shape in _LATER.items()},
    **{f"flan-t5-{size}": _t5(_T5_1_1, *shape) for size, shape in _LATER.items()},
    **{f"mt5-{size}": _t5(_MT5, *shape) for size, shape in _LATER.items()},
    **{f"umt5-{size}": _t5(_UMT5, *shape) for size, shape in _LATER.items() if size != "large"},
    "byt5-small": _t5(_BYT5, 1472, 3584, 6, 12, num_decoder_layers=4),
    "byt5-base": _t5(_BYT5, 1536, 3968, 12, 18, num_decoder_layers=6),
    "byt5-large": _t5(_BYT5, 1536, 3840, 16, 36, num_decoder_layers=12),
    "byt5-xl": _t5(_BYT5, 2560, 6720, 32, 36, num_decoder_layers=12),
    "byt5-xxl": _t5(_BYT5, 4672, 12352, 64, 36, num_decoder_layers=12),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 16, 24),
    "gpt2-large": _gpt2(1280, 20, 36),
    "gpt2-xl": _gpt2(1600, 25, 48),
    "gpt-neo-125m": _neo(768, 12, 12),
    "gpt-neo-1.3b": _neo(2048, 16, 24),
    "gpt-neo-2.7b": _neo(2560, 20, 32),
    "bert-tiny": _bert(128, 2, 2),
    "bert-mini": _bert(256, 4, 4),
    "bert-small": _bert(512, 8, 4),
    "bert-medium": _bert(512, 8, 8),
    "bert-base-uncased": _bert(768, 12, 12),
    "bert-base-cased": _bert(768, 12, 12, 28996),
    "bert-large-uncased": _bert(1024, 16, 24),
    "bert-large-cased": _bert(1024, 16, 24, 28996),
}
"""Every name, and its config."""


def named(name: str) -> dict[str, Any]:
    """The config of a published size.

    >>> named("t5-bass")
    Traceback (most recent call last):
    t2t.errors.InputError: model.config: t5-bass is neither a file or folder here nor a known size (did you mean ...?)
    """
    if name not in SIZES:
        known = did_you_mean(name, SIZES) or f"; sizes: {', '.join(SIZES)}"
        raise InputError(f"model.config: {name} is neither a file or folder here nor a known size{known}")
    return dict(SIZES[name])


def changed(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A config with ``key=value`` applied: keys that a config of its type has, values of their type.

    A decoder as deep as its encoder stays so, and GPT-Neo's kinds of layers go on repeating, unless they are set too.

    >>> changed(named("t5-small"), ["num_layers=2", "tie_word_embeddings=false"])["num_layers"]
    2
    >>> changed(named("t5-small"), ["num_layer=2"])
    Traceback (most recent call last):
    t2t.errors.InputError: model.overrides: num_layer: no key of a t5 config (did you mean num_layers?)
    """
    before = {**_BY_TYPE.get(raw["model_type"], {}), **raw}
    given = dict(_setting(text, before) for text in overrides)
    after, depth = {**raw, **given}, given.get("num_layers")
    if depth and "num_decoder_layers" in raw and raw["num_decoder_layers"] == raw.get("num_layers"):
        after["num_decoder_layers"] = given.get("num_decoder_layers", depth)
    if depth and "attention_types" in raw and "attention_types" not in given:
        pattern = raw["attention_types"][0][0]
        after["attention_types"] = [[pattern, depth // len(pattern)]]
        after.pop("attention_layers", None)  # the same, written out
    return after


def fitted(raw: Mapping[str, Any], vocab_size: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """A pattern made to fit a tokenizer: its ids, and its vocabulary rounded up to a multiple of `VOCABULARY_STEP`.

    The published vocabulary stays where the tokenizer fills it but for a few rows: with its own tokenizer a model has
    its published shape.

    >>> small = fitted(named("gpt2"), vocab_size=8000, eos_id=0, pad_id=0)
    >>> small["vocab_size"], small["bos_token_id"], small["eos_token_id"]
    (8000, 0, 0)
    >>> fitted(named("gpt2"), 50257, 50256, 50256)["vocab_size"], fitted(named("t5-base"), 32100, 1, 0)["vocab_size"]
    (50257, 32128)
    """
    # GPT begins a text after the end of another, T5 after padding.
    ids = {"eos_token_id": eos_id, "bos_token_id": eos_id, "decoder_start_token_id": pad_id}
    ids = {key: value for key, value in ids.items() if key in raw} | {"pad_token_id": pad_id}
    rows = raw["vocab_size"]
    if not 0 <= rows - vocab_size < 2 * VOCABULARY_STEP:
        rows = math.ceil(vocab_size / VOCABULARY_STEP) * VOCABULARY_STEP
    return {**raw, **ids, "vocab_size": rows}


def _setting(text: str, before: Mapping[str, Any]) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise InputError(f"model.overrides: {text!r}: expected key=value, as num_layers=4")
    if key not in before or key == "model_type":
        known = did_you_mean(key, before)
        raise InputError(f"model.overrides: {key}: no key of a {before['model_type']} config{known}")
    return key, _value(key, value, before[key])


def _value(key: str, text: str, old: Any) -> Any:
    """A value of the old one's type; where that is null, it stands for a count that follows from others."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    kind = int if old is None else type(old)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise InputError(f"model.overrides: {key}: expected {_WORDS.get(kind, 'a value')} as {old!r}, got {text!r}")
    least = 0 if key.endswith("_id") else 1
    if kind is int and value < least:
        raise InputError(f"model.overrides: {key}: must be {least} or more, got {value}")
    if kind is float and not 0 <= value < math.inf:
        raise InputError(f"model.overrides: {key}: must be 0 or more and finite, got {text}")
    return value


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a JSON list"}
