"""The native architectures, as a Hugging Face ``config.json`` tells them; without torch, so that readers need none.

>>> NATIVE["gpt2"].kind, NATIVE["gpt2"].from_huggingface({"model_type": "gpt2", "eos_token_id": 7}).start_id
('causal', 7)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from t2t.errors import InputError

Kind = Literal["seq2seq", "causal", "masked"]
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu")
"""The names of what stands between two products; `t2t.models.activations` has the functions."""


class OneStack:
    """What the architectures of models without a decoder have in common."""

    width: int
    inner: int
    num_heads: int
    num_layers: Any  # a number; in GPT's config a property
    attention_dropout: float

    def activations(self, source: float, target: float, dense: bool, recomputed: bool) -> float:
        """About how many numbers forward keeps for backward of a row; ``dense``: with scores of whole rows."""
        token = (13 if dense else 10) * self.width + (3 if dense else 2) * self.inner
        score = self.num_heads * ((2 if self.attention_dropout else 1) if dense else 1 + 2 * self.attention_dropout)
        block = target * (token + score * target)
        return self.num_layers * target * self.width + block if recomputed else self.num_layers * block


@dataclass(frozen=True)
class T5Config:
    """The architecture, as far as the model needs it.

    >>> T5Config.from_huggingface({"model_type": "t5", "d_model": 8, "feed_forward_proj": "gated-gelu"}).gated
    True
    """

    kind: ClassVar[Kind] = "seq2seq"
    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int = 6
    num_heads: int = 8
    buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.1
    eps: float = 1e-6
    activation: str = "relu"
    gated: bool = False
    tied: bool = True
    scale_outputs: bool = True
    bias_everywhere: bool = False
    start_id: int = 0
    pad_id: int = 0
    eos_id: int = 1
    initializer_factor: float = 1.0

    def row_cost(self, source_row: int, target_row: int) -> float:
        """Work of one packed row forward, in multiply-adds; row lengths are picked by it."""
        inner = self.num_heads * self.d_kv
        feed = (3 if self.gated else 2) * self.d_model * self.d_ff
        encoder = self.num_layers * (4 * self.d_model * inner + feed)
        cross_memory = self.num_decoder_layers * 2 * self.d_model * inner
        decoder = self.num_decoder_layers * (6 * self.d_model * inner + feed) + self.vocab_size * self.d_model
        scores = self.num_layers * source_row**2 + self.num_decoder_layers * target_row * (target_row + source_row)
        return (encoder + cross_memory) * source_row + decoder * target_row + 2 * inner * scores

    def activations(self, source: float, target: float, dense: bool, recomputed: bool) -> float:
        """About how many numbers forward keeps for backward of a row; ``dense``: with scores of whole rows."""
        inner = self.num_heads * self.d_kv
        feed = (6 if self.gated else 4) if dense else (5 if self.gated else 1)
        token = (8 if dense else 5) * self.d_model + 4 * inner + feed * self.d_ff
        score = self.num_heads * ((2 if self.dropout else 1) if dense else 1 + 2 * self.dropout)
        encoder = source * (token + score * source)
        decoder = target * (token + 4 * inner + score * (source + target))
        if recomputed:
            between = self.num_layers * source + self.num_decoder_layers * target
            return between * self.d_model + max(encoder, decoder)
        return self.num_layers * encoder + self.num_decoder_layers * decoder

    @classmethod
    def from_huggingface(cls, raw: Mapping[str, Any]) -> T5Config:
        """Read the fields of a Hugging Face ``config.json`` of model type t5, mt5 or umt5."""
        kind = raw["model_type"]
        projection = raw.get("feed_forward_proj", "gated-gelu" if kind in ("mt5", "umt5") else "relu")
        gate, _, activation = projection.rpartition("-")
        activation = "gelu_new" if projection == "gated-gelu" else activation
        if gate not in ("", "gated") or activation not in ACTIVATIONS:
            known = ", ".join(f"[gated-]{name}" for name in ACTIVATIONS)
            raise InputError(f"config.json: feed_forward_proj: {projection!r} is not one of {known}")
        # transformers scales T5's outputs unless the config unties the head, umT5's always and mT5's never.
        tied = raw.get("tie_word_embeddings") is not False
        scale = {"t5": raw.get("scale_decoder_outputs", tied), "mt5": False, "umt5": True}[kind]
        layers = raw.get("num_layers", 6 if kind == "t5" else 8)
        return cls(
            vocab_size=raw.get("vocab_size", {"t5": 32128, "mt5": 250112, "umt5": 250112}[kind]),
            d_model=raw.get("d_model", 512),
            d_kv=raw.get("d_kv", 64),
            d_ff=raw.get("d_ff", 2048 if kind == "t5" else 1024),
            num_layers=layers,
            num_decoder_layers=raw.get("num_decoder_layers") or layers,
            num_heads=raw.get("num_heads", 8 if kind == "t5" else 6),
            buckets=raw.get("relative_attention_num_buckets", 32),
            max_distance=raw.get("relative_attention_max_distance", 128),
            dropout=raw.get("dropout_rate", 0.1),
            eps=raw.get("layer_norm_epsilon", 1e-6),
            activation=activation,
            gated=gate == "gated",
            tied=tied,
            scale_outputs=scale,
            bias_everywhere=kind == "umt5",
            start_id=raw.get("decoder_start_token_id") or 0,
            pad_id=raw.get("pad_token_id") or 0,
            eos_id=raw.get("eos_token_id", 1),
            initializer_factor=raw.get("initializer_factor", 1.0),
        )


@dataclass(frozen=True)
class GPTConfig(OneStack):
    """The architecture, as far as the model needs it.

    >>> raw = {"model_type": "gpt_neo", "num_layers": 4, "attention_types": [[["global", "local"], 2]]}
    >>> GPTConfig.from_huggingface(raw).windows
    (0, 256, 0, 256)
    """

    kind: ClassVar[Kind] = "causal"
    vocab_size: int = 50257
    positions: int = 1024
    width: int = 768
    num_heads: int = 12
    inner: int = 3072
    windows: tuple[int, ...] = (0,) * 12  # of each layer: how many slots it looks back; 0: all
    scales: tuple[float, ...] = (0.125,) * 12  # of each layer's scores
    neo: bool = False
    activation: str = "gelu_new"
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    dropout: float = 0.1
    eps: float = 1e-5
    tied: bool = True
    initializer_range: float = 0.02
    start_id: int = 50256
    pad_id: int = 50256
    eos_id: int = 50256

    @property
    def num_layers(self) -> int:
        """How deep it is."""
        return len(self.windows)

    def row_cost(self, source_row: int, target_row: int) -> float:
        """Work of one packed row forward, in multiply-adds; row lengths are picked by it."""
        block = 4 * self.width**2 + 2 * self.width * self.inner
        scores = sum(min(window, target_row) if window else target_row for window in self.windows)
        return (self.num_layers * block + self.vocab_size * self.width + 2 * self.width * scores) * target_row

    @classmethod
    def from_huggingface(cls, raw: Mapping[str, Any]) -> GPTConfig:
        """Read the fields of a Hugging Face ``config.json`` of model type gpt2 or gpt_neo."""
        shared = {
            "vocab_size": raw.get("vocab_size", 50257),
            "activation": raw.get("activation_function", "gelu_new"),
            "eps": raw.get("layer_norm_epsilon", 1e-5),
            "tied": raw.get("tie_word_embeddings") is not False,
            "initializer_range": raw.get("initializer_range", 0.02),
        }
        eos = raw.get("eos_token_id", 50256)
        shared["eos_id"] = eos[0] if isinstance(eos, list) else eos
        shared["start_id"] = shared["eos_id"] if raw.get("bos_token_id") is None else raw["bos_token_id"]
        shared["pad_id"] = shared["eos_id"] if raw.get("pad_token_id") is None else raw["pad_token_id"]
        if shared["activation"] not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise InputError(f"config.json: activation_function: {shared['activation']!r} is not one of {known}")
        return cls(**shared, **(_neo(raw) if raw["model_type"] == "gpt_neo" else _gpt2(raw)))


def _gpt2(raw: Mapping[str, Any]) -> dict[str, Any]:
    width, heads, depth = raw.get("n_embd", 768), raw.get("n_head", 12), raw.get("n_layer", 12)
    _check_heads(width, heads, "n_embd", "n_head")
    scale = (width // heads) ** -0.5 if raw.get("scale_attn_weights", True) else 1.0
    by_layer = raw.get("scale_attn_by_inverse_layer_idx", False)
    return {
        "positions": raw.get("n_positions", 1024),
        "width": width,
        "num_heads": heads,
        "inner": raw.get("n_inner") or 4 * width,
        "windows": (0,) * depth,
        "scales": tuple(scale / (i + 1 if by_layer else 1) for i in range(depth)),
        "embedding_dropout": raw.get("embd_pdrop", 0.1),
        "attention_dropout": raw.get("attn_pdrop", 0.1),
        "dropout": raw.get("resid_pdrop", 0.1),
    }


def _neo(raw: Mapping[str, Any]) -> dict[str, Any]:
    width, heads, depth = raw.get("hidden_size", 2048), raw.get("num_heads", 16), raw.get("num_layers", 24)
    _check_heads(width, heads, "hidden_size", "num_heads")
    types = raw.get("attention_types", [[["global", "local"], 12]])
    kinds = raw.get("attention_layers") or [kind for some, times in types for _ in range(times) for kind in some]
    if len(kinds) != depth or set(kinds) - {"global", "local"}:
        raise InputError(f"config.json: attention_types: gives {kinds}, where num_layers is {depth}")
    return {
        "positions": raw.get("max_position_embeddings", 2048),
        "width": width,
        "num_heads": heads,
        "inner": raw.get("intermediate_size") or 4 * width,
        "windows": tuple(raw.get("window_size", 256) if kind == "local" else 0 for kind in kinds),
        "scales": (1.0,) * depth,
        "neo": True,
        "embedding_dropout": raw.get("embed_dropout", 0.0),
        "attention_dropout": raw.get("attention_dropout", 0.0),
        "dropout": raw.get("resid_dropout", 0.0),
    }


def _check_heads(width: int, heads: int, width_key: str, heads_key: str) -> None:
    if width % heads:
        raise InputError(f"config.json: {heads_key}: {heads} heads do not divide {width_key} {width}")


@dataclass(frozen=True)
class BertConfig(OneStack):
    """The architecture, as far as the model needs it.

    >>> BertConfig.from_huggingface({"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2}).width
    8
    """

    kind: ClassVar[Kind] = "masked"
    vocab_size: int = 30522
    positions: int = 512
    types: int = 2
    width: int = 768
    num_heads: int = 12
    num_layers: int = 12
    inner: int = 3072
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    eps: float = 1e-12
    tied: bool = True
    initializer_range: float = 0.02
    pad_id: int = 0
    start_id: ClassVar[int] = 0  # nothing is decoded

    def row_cost(self, source_row: int, target_row: int) -> float:
        """Work of one packed row forward, in multiply-adds; row lengths are picked by it."""
        block = 4 * self.width**2 + 2 * self.width * self.inner + 2 * self.width * target_row
        return (self.num_layers * block + 0.15 * self.vocab_size * self.width) * target_row

    @classmethod
    def from_huggingface(cls, raw: Mapping[str, Any]) -> BertConfig:
        """Read the fields of a Hugging Face ``config.json`` of model type bert."""
        width, heads = raw.get("hidden_size", 768), raw.get("num_attention_heads", 12)
        _check_heads(width, heads, "hidden_size", "num_attention_heads")
        activation = raw.get("hidden_act", "gelu")
        if activation not in ACTIVATIONS:
            raise InputError(f"config.json: hidden_act: {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if raw.get("position_embedding_type", "absolute") != "absolute":
            raise InputError("config.json: position_embedding_type: only absolute positions are supported")
        return cls(
            vocab_size=raw.get("vocab_size", 30522),
            positions=raw.get("max_position_embeddings", 512),
            types=raw.get("type_vocab_size", 2),
            width=width,
            num_heads=heads,
            num_layers=raw.get("num_hidden_layers", 12),
            inner=raw.get("intermediate_size", 3072),
            activation=activation,
            dropout=raw.get("hidden_dropout_prob", 0.1),
            attention_dropout=raw.get("attention_probs_dropout_prob", 0.1),
            eps=raw.get("layer_norm_eps", 1e-12),
            tied=raw.get("tie_word_embeddings") is not False,
            initializer_range=raw.get("initializer_range", 0.02),
            pad_id=raw.get("pad_token_id") or 0,
        )


NATIVE: dict[str, Any] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), T5Config),
    **dict.fromkeys(("gpt2", "gpt_neo"), GPTConfig),
    "bert": BertConfig,
}
"""The class that reads a config, by model type."""
