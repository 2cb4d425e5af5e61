"""T5 and its kin: T5 1.0 and 1.1, Flan, mT5, umT5 (a bias table in every layer), ByT5 (any depth split).

Parameters carry the names and shapes of `transformers`. Rows are packed: a segment attends to itself alone.

Shapes: R rows (or sequences), S source slots, T target slots, D model width, H heads, C channels of a head, K beams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2t import kernels
from t2t.models.activations import ACTIVATIONS
from t2t.models.architectures import Kind, T5Config
from t2t.models.base import Embedding, Model, Rows
from t2t.models.cache import BeamCache, LayerCache


class Norm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.eps = config.eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head attention without scaling (T5 folds it into the initial weights)."""

    def __init__(self, config: T5Config, has_table: bool) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.config = config
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        if has_table:
            self.relative_attention_bias = nn.Embedding(config.buckets, config.num_heads)

    def project(self, x: Tensor, *names: str) -> Tensor:
        """Queries, keys or values, or several of them, by one product: [R, S, n, H, C]."""
        weights = [getattr(self, name).weight for name in names]
        merged = torch.cat(weights) if len(weights) > 1 else weights[0]
        return F.linear(x, merged).unflatten(-1, (len(names), self.config.num_heads, self.config.d_kv))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H, S, C], as a cache holds them."""
        keys, values = self.project(x, "k", "v").unbind(2)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def bias(self, segments: Tensor, causal: bool) -> Any:
        """What the table and the mask add to the scores of self-attention."""
        table = self.relative_attention_bias.weight
        sight = kernels.Sight(segments, segments, causal, table, self.config.max_distance, table.dtype)
        return kernels.attention_bias(sight)

    def forward(self, residual: Tensor, x: Tensor, memory: Tensor | None, bias: Any, dropout: float) -> Tensor:
        """Attention of ``x`` to itself or to the memory, added to the residual."""
        if memory is None:
            packed = [self.project(x, "q", "k", "v")]
        else:
            packed = [self.project(x, "q"), self.project(memory, "k", "v")]
        mixed = kernels.attention(packed, bias, dropout).flatten(2)
        return kernels.linear_dropout_add(residual, mixed, self.o.weight, dropout)

    def step(self, residual: Tensor, x: Tensor, keys_values: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        """Attention of a few queries to what a cache holds, added to the residual."""
        queries = self.project(x, "q").squeeze(2).transpose(1, 2)
        keys, values = keys_values
        mixed = kernels.attention_weights(queries, keys, bias) @ values
        return residual + self.o(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The MLP, plain or gated."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        if config.gated:
            self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
            self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        else:
            self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.gated = config.gated

    def forward(self, residual: Tensor, x: Tensor, dropout: float) -> Tensor:
        """Added to the residual."""
        if self.activation is F.relu and not self.gated:
            return kernels.relu_feed_forward(residual, x, self.wi.weight, self.wo.weight, dropout)
        hidden = self.activation(self.wi_0(x)) * self.wi_1(x) if self.gated else self.activation(self.wi(x))
        hidden = kernels.dropout(hidden, dropout)
        return kernels.linear_dropout_add(residual, hidden, self.wo.weight, dropout)


class Layer(nn.Module):
    """A norm and what follows it, under the name that `transformers` gives it."""

    def __init__(self, config: T5Config, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)
        self.layer_norm = Norm(config)


class Block(nn.Module):
    """One layer of encoder or decoder: self-attention, in a decoder cross-attention, feed-forward."""

    def __init__(self, config: T5Config, decoder: bool, has_table: bool) -> None:
        super().__init__()
        cross = [Layer(config, "EncDecAttention", Attention(config, has_table=False))] if decoder else []
        first = Layer(config, "SelfAttention", Attention(config, has_table))
        self.layer = nn.ModuleList([first, *cross, Layer(config, "DenseReluDense", FeedForward(config))])
        self.dropout = config.dropout

    @property
    def attention(self) -> Attention:
        """Self-attention."""
        return cast(Attention, self.layer[0].SelfAttention)

    @property
    def cross(self) -> Attention:
        """Attention to the memory, in a decoder."""
        return cast(Attention, self.layer[1].EncDecAttention)

    @property
    def feed(self) -> FeedForward:
        """The MLP."""
        return cast(FeedForward, self.layer[-1].DenseReluDense)

    @property
    def norms(self) -> list[Norm]:
        """The norm before each."""
        return [cast(Norm, layer.layer_norm) for layer in self.layer]

    def forward(self, x: Tensor, bias: Any, memory: Tensor | None = None, memory_bias: Any = None) -> Tensor:
        rate, norms = self.dropout if self.training else 0.0, self.norms
        x = self.attention(x, norms[0](x), None, bias, rate)
        if memory is not None:
            x = self.cross(x, norms[1](x), memory, memory_bias, rate)
        return self.feed(x, norms[-1](x), rate)

    def step(
        self, x: Tensor, bias: Tensor, cache: LayerCache, memory_bias: Tensor, memory: tuple[Tensor, Tensor]
    ) -> Tensor:
        """One new token a beam [R, K, D]; keys and values of the others come from the cache."""
        norms = self.norms
        normed = norms[0](x)
        x = self.attention.step(x, normed, cache.append(*self.attention.keys_values(normed)), bias)
        x = self.cross.step(x, norms[1](x), memory, memory_bias)
        return self.feed(x, norms[-1](x), 0.0)


class Stack(nn.Module):
    """Encoder or decoder: blocks and a last norm; the first block's bias table serves all, or each has its own."""

    def __init__(self, config: T5Config, decoder: bool) -> None:
        super().__init__()
        depth = config.num_decoder_layers if decoder else config.num_layers
        self.block = nn.ModuleList(Block(config, decoder, i == 0 or config.bias_everywhere) for i in range(depth))
        self.final_layer_norm = Norm(config)
        self.config = config
        self.decoder = decoder

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last."""
        return cast("list[Block]", list(self.block))

    def forward(
        self, x: Tensor, segments: Tensor, memory: Tensor | None = None, memory_segments: Tensor | None = None
    ) -> Tensor:
        rate = self.config.dropout if self.training else 0.0
        memory_bias = None
        if memory_segments is not None:
            memory_bias = kernels.attention_bias(kernels.Sight(segments, memory_segments, dtype=x.dtype))
        x, bias = kernels.dropout(x, rate), None
        for block in self.blocks:
            if bias is None or self.config.bias_everywhere:
                bias = block.attention.bias(segments, causal=self.decoder)
            x = block(x, bias, memory, memory_bias)
        return kernels.dropout(self.final_layer_norm(x), rate)


class Cache(BeamCache):
    """What decoding remembers: the decoder's own keys and values, the memory's, and the biases of every position."""

    def __init__(
        self, layers: list[LayerCache], memory: list[tuple[Tensor, Tensor]], biases: list[Tensor], memory_bias: Tensor
    ) -> None:
        super().__init__(layers, layers[0].position, len(memory_bias))
        self.memory, self.biases, self.memory_bias = memory, biases, memory_bias

    def present_biases(self) -> list[Tensor]:
        """What each table adds to the scores of the present position [R, H, K, slots * K], its own tokens alone."""
        own, slots, copies = self.own(), self.layers[0].slots, len(self.beams)
        rows = (bias.index_select(2, self.position)[..., :slots] for bias in self.biases)
        return [kernels.additive(own, row.repeat_interleave(copies, -1), row.dtype) for row in rows]


class T5(Model):
    """T5 for conditional generation.

    >>> tiny = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=2)
    >>> model = T5(tiny).eval()
    >>> source, target = torch.tensor([[5, 6, 1]]), torch.tensor([[0, 7]])
    >>> hidden = model(source, torch.ones_like(source), target, torch.ones_like(target))
    >>> hidden.shape
    torch.Size([1, 2, 8])
    """

    kind: ClassVar[Kind] = T5Config.kind
    family = "t5"
    classes: ClassVar[dict[str, str]] = {
        "t5": "T5ForConditionalGeneration",
        "mt5": "MT5ForConditionalGeneration",
        "umt5": "UMT5ForConditionalGeneration",
    }
    embeddings = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    output = "lm_head.weight"

    @classmethod
    def read(cls, raw: Mapping[str, Any], dropout: float | None) -> T5Config:
        config = T5Config.from_huggingface(raw)
        return config if dropout is None else dataclasses.replace(config, dropout=dropout)

    @classmethod
    def adopt(cls, stored: str) -> str | None:
        # In the first T5 checkpoints, used by nobody.
        return None if stored.endswith(".EncDecAttention.relative_attention_bias.weight") else stored

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = Embedding(config.vocab_size, config.d_model, config.tied)
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        if not config.tied:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def head(self) -> Tensor:
        """The output matrix [V, D]: the embedding, or a matrix of its own."""
        return self.shared.weight if self.config.tied else self.lm_head.weight

    def initialize_one(self, name: str, parameter: Tensor) -> None:
        """With the paper's scales, those of Mesh TensorFlow.

        A head of its own is a layer like the others there. In transformers its scale is 1, so that a new model's logits
        are as large as the root of its width and its loss begins many times too high.
        """
        c, factor = self.config, self.config.initializer_factor
        scales = {
            "q": (c.d_model * c.d_kv) ** -0.5,
            "o": (c.num_heads * c.d_kv) ** -0.5,
            "wo": c.d_ff**-0.5,
            "shared": 1.0,
        }
        leaf = name.split(".")[-2]
        if leaf.endswith("norm"):
            nn.init.constant_(parameter, factor)
        else:
            nn.init.normal_(parameter, std=factor * scales.get(leaf, c.d_model**-0.5))

    def encode(self, source_ids: Tensor, source_segments: Tensor) -> Tensor:
        """The memory [R, S, D]."""
        return self.encoder(self.shared(source_ids), source_segments)

    def forward(
        self, source_ids: Tensor, source_segments: Tensor, target_ids: Tensor, target_segments: Tensor
    ) -> Tensor:
        """What the head multiplies, [R, T, D]. ``target_ids`` are shifted right within each segment."""
        # One look-up for both: the gradient of a look-up is as large as the vocabulary.
        both = self.shared(torch.cat([source_ids, target_ids], 1))
        source, target = both.split([source_ids.shape[1], target_ids.shape[1]], 1)
        memory = self.encoder(source, source_segments)
        return self._scaled(self.decoder(target, target_segments, memory, source_segments))

    def loss(self, rows: Rows, smoothing: float) -> tuple[Tensor, Tensor]:
        hidden = self(rows.source_ids, rows.source_segments, rows.target_ids, rows.target_segments)
        total, each = kernels.linear_cross_entropy(hidden.flatten(0, 1), self.head, rows.labels.flatten(), smoothing)
        return total[None], each.view(rows.labels.shape)

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.block, *self.decoder.block]

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden * self.config.d_model**-0.5 if self.config.scale_outputs else hidden

    def start(self, source_ids: Tensor, source_segments: Tensor, length: int, copies: int = 1) -> Cache:
        """Encode and prepare to decode ``length`` tokens, each row ``copies`` times side by side (beams)."""
        c = self.config
        memory = self.encode(source_ids, source_segments)
        position = torch.zeros(1, dtype=torch.long, device=memory.device)
        blocks = self.decoder.blocks
        tables = [b.attention.relative_attention_bias.weight for b in (blocks if c.bias_everywhere else blocks[:1])]
        biases = [kernels.relative_bias(t, length, length, c.max_distance, False).to(memory.dtype) for t in tables]
        hidden = kernels.additive((source_segments != 0)[:, None, None], None, memory.dtype)
        none = memory.new_zeros(len(memory), c.num_heads, 0, c.d_kv)
        layers = [LayerCache(none, none, length, copies, position) for _ in blocks]
        read = [tuple(x.contiguous() for x in block.cross.keys_values(memory)) for block in blocks]
        return Cache(layers, cast("list[tuple[Tensor, Tensor]]", read), biases, hidden)

    def first(self, ids: Tensor, segments: Tensor) -> Tensor:
        return torch.full_like(ids[:, 0], self.config.start_id)

    def decode(self, token_ids: Tensor, cache: Cache) -> Tensor:
        """Logits [R * K, V] after one more token a sequence [R * K]; the cache moves on by one position."""
        # The beams of a row are so many queries of its one memory and its one cache.
        x = self.shared(token_ids.view(-1, len(cache.beams)))
        biases = cache.present_biases()
        for i, block in enumerate(self.decoder.blocks):
            bias = biases[i if self.config.bias_everywhere else 0]
            x = block.step(x, bias, cache.layers[i], cache.memory_bias, cache.memory[i])
        cache.position += 1
        return F.linear(self._scaled(self.decoder.final_layer_norm(x)), self.head).flatten(0, 1)
