"""GPT-2 and GPT-Neo (local and global attention).

Parameters carry the names and shapes of `transformers`: GPT-2's matrices lie the other way round than a linear
layer's. Rows are packed: a segment attends to itself alone, and its positions begin at 0.

Shapes: R rows, T slots, D model width, H heads, C channels of a head, K beams.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2t import kernels
from t2t.errors import InputError
from t2t.models.activations import ACTIVATIONS
from t2t.models.architectures import GPTConfig, Kind
from t2t.models.base import Embedding, Model, Rows
from t2t.models.cache import BeamCache, LayerCache, ending_together


class Matrix(nn.Module):
    """A linear layer whose weight lies the other way round, [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))


class Attention(nn.Module):
    """GPT-2's: one matrix makes queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = Matrix(config.width, 3 * config.width)
        self.c_proj = Matrix(config.width, config.width)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side."""
        return F.linear(x, self.c_attn.weight.T, self.c_attn.bias)

    def output(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of what follows the heads."""
        return self.c_proj.weight.T, self.c_proj.bias


class NeoAttention(nn.Module):
    """GPT-Neo's: three matrices without biases."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = nn.Module()
        for name in ("k_proj", "v_proj", "q_proj"):
            self.attention.add_module(name, nn.Linear(config.width, config.width, bias=False))
        self.attention.out_proj = nn.Linear(config.width, config.width)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side."""
        names = ("q_proj", "k_proj", "v_proj")
        return F.linear(x, torch.cat([cast(nn.Linear, getattr(self.attention, name)).weight for name in names]))

    def output(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of what follows the heads."""
        linear = cast(nn.Linear, self.attention.out_proj)
        return linear.weight, linear.bias


class FeedForward(nn.Module):
    """The MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        make = nn.Linear if config.neo else Matrix
        self.c_fc, self.c_proj = make(config.width, config.inner), make(config.inner, config.width)
        self.activation, self.neo = ACTIVATIONS[config.activation], config.neo

    def forward(self, residual: Tensor, x: Tensor, dropout: float) -> Tensor:
        """Added to the residual."""
        first, second = (m.weight if self.neo else m.weight.T for m in (self.c_fc, self.c_proj))
        hidden = self.activation(F.linear(x, first, self.c_fc.bias))
        return kernels.linear_dropout_add(residual, hidden, second, dropout, self.c_proj.bias)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each after a norm."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, eps=config.eps)
        self.attn = NeoAttention(config) if config.neo else Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = FeedForward(config)
        self.config, self.scale = config, config.scales[index]

    def packed(self, x: Tensor) -> Tensor:
        """Queries, keys and values [R, T, 3, H, C]."""
        return self.attn.project(self.ln_1(x)).unflatten(-1, (3, self.config.num_heads, -1))

    def forward(self, x: Tensor, bias: Any) -> Tensor:
        return self._after(x, self.packed(x), bias)

    def read(self, x: Tensor, bias: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and keys and values [R, H, T, C] for a cache."""
        packed = self.packed(x)
        _, keys, values = packed.unbind(2)
        return self._after(x, packed, bias), keys.transpose(1, 2), values.transpose(1, 2)

    def _after(self, x: Tensor, packed: Tensor, bias: Any) -> Tensor:
        c = self.config
        attention_rate, rate = (c.attention_dropout, c.dropout) if self.training else (0.0, 0.0)
        mixed = kernels.attention([packed], bias, attention_rate, self.scale).flatten(2)
        weight, offset = self.attn.output()
        x = kernels.linear_dropout_add(x, mixed, weight, rate, offset)
        return self.mlp(x, self.ln_2(x), rate)

    def step(self, x: Tensor, bias: Tensor, cache: LayerCache) -> Tensor:
        """One new token a beam [R, K, D]; keys and values of the others come from the cache."""
        q, k, v = (part.transpose(1, 2) for part in self.packed(x).unbind(2))
        keys, values = cache.append(k, v)
        mixed = kernels.attention_weights(q, keys, bias, self.scale) @ values
        weight, offset = self.attn.output()
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), weight, offset)
        return self.mlp(x, self.ln_2(x), 0.0)


class Stack(nn.Module):
    """Embeddings, blocks and a last norm, under the name that `transformers` gives them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.width, config.tied)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.h = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.width, eps=config.eps)
        self.config = config

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last."""
        return cast("list[Block]", list(self.h))

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Tokens where they stand."""
        return self.wte(ids) + self.wpe(positions)

    def biases(self, segments: Tensor, dtype: torch.dtype) -> dict[int, Any]:
        """What each width of window adds to the scores."""
        sight = kernels.Sight(segments, segments, causal=True, dtype=dtype)
        return {window: kernels.attention_bias(sight._replace(window=window)) for window in set(self.config.windows)}

    def forward(self, ids: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids, positions)
        x = kernels.dropout(x, self.config.embedding_dropout if self.training else 0.0)
        biases = self.biases(segments, x.dtype)
        for block, window in zip(self.blocks, self.config.windows, strict=True):
            x = block(x, biases[window])
        return self.ln_f(x)


class Cache(BeamCache):
    """What decoding remembers: every layer's keys and values, and where each row's prompt lies, ending together."""

    def __init__(self, layers: list[LayerCache], prompt: Tensor, lengths: Tensor, windows: tuple[int, ...]) -> None:
        super().__init__(layers, layers[0].position, len(lengths))
        self.prompt, self.lengths, self.windows = prompt, lengths, windows  # [R, P] which slots are real; [R]

    def present_biases(self, dtype: torch.dtype) -> dict[int, Tensor]:
        """The mask of the present position for each width of window, [R, 1, K, P + slots * K]."""
        own, copies, slots = self.own(), len(self.beams), self.layers[0].slots
        seen = torch.cat([self.prompt[:, None, None].expand(-1, -1, copies, -1), own], -1)
        width = self.prompt.shape[1]
        before = torch.arange(width, device=seen.device) - width
        places = torch.cat([before, self.places[:slots].repeat_interleave(copies)])
        return {
            window: kernels.additive(seen & (self.position - places < window) if window else seen, None, dtype)
            for window in set(self.windows)
        }


class GPT(Model):
    """GPT-2 or GPT-Neo with its language-model head.

    >>> model = GPT(GPTConfig(vocab_size=16, width=8, num_heads=2, inner=16, windows=(0,), scales=(0.5,))).eval()
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> model(ids, torch.ones_like(ids), torch.arange(3)[None]).shape
    torch.Size([1, 3, 8])
    """

    kind: ClassVar[Kind] = GPTConfig.kind
    family = "gpt"
    classes: ClassVar[dict[str, str]] = {"gpt2": "GPT2LMHeadModel", "gpt_neo": "GPTNeoForCausalLM"}
    embeddings = ("transformer.wte.weight", "wte.weight")
    output = "lm_head.weight"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Stack(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)

    @classmethod
    def read(cls, raw: Mapping[str, Any], dropout: float | None) -> GPTConfig:
        config = GPTConfig.from_huggingface(raw)
        if dropout is None:
            return config
        return dataclasses.replace(config, dropout=dropout, attention_dropout=dropout, embedding_dropout=dropout)

    @classmethod
    def adopt(cls, stored: str) -> str | None:
        if stored.endswith((".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")):
            return None  # masks that old checkpoints carry along
        return stored if stored.startswith(("transformer.", "lm_head.")) else f"transformer.{stored}"

    @property
    def head(self) -> Tensor:
        return self.transformer.wte.weight if self.config.tied else self.lm_head.weight

    def initialize_one(self, name: str, parameter: Tensor) -> None:
        """As in the GPT-2 paper: what adds to the residual starts smaller the deeper the model."""
        c = self.config
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif ".ln_" in name:
            nn.init.ones_(parameter)
        else:
            residual = not c.neo and name.endswith("c_proj.weight")
            nn.init.normal_(parameter, std=c.initializer_range / (math.sqrt(2 * c.num_layers) if residual else 1))

    def blocks(self) -> list[nn.Module]:
        return list(self.transformer.h)

    def forward(self, ids: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        """What the head multiplies, [R, T, D]."""
        return self.transformer(ids, segments, positions)

    def loss(self, rows: Rows, smoothing: float) -> tuple[Tensor, Tensor]:
        hidden = self(rows.target_ids, rows.target_segments, rows.target_positions)
        total, each = kernels.linear_cross_entropy(hidden.flatten(0, 1), self.head, rows.labels.flatten(), smoothing)
        return total[None], each.view(rows.labels.shape)

    def start(self, ids: Tensor, segments: Tensor, length: int, copies: int = 1) -> Cache:
        """Read all of each prompt but its last token, which decoding begins with."""
        lengths = segments.sum(1)
        width = ids.shape[1] - 1
        if width + length > self.config.positions:
            room = f"{ids.shape[1]} prompt and {length} new tokens"
            raise InputError(
                f"generate.max_length: {room} do not fit into the model's {self.config.positions} positions"
            )
        moved, places = ending_together(ids, segments)
        prompt = places >= 0
        stack = self.transformer
        x = stack.embed(moved, places.clamp(min=0))
        biases = stack.biases(prompt.long(), x.dtype)
        position = torch.zeros(1, dtype=torch.long, device=ids.device)
        layers = []
        for block, window in zip(stack.blocks, self.config.windows, strict=True):
            x, keys, values = block.read(x, biases[window])
            layers.append(LayerCache(keys, values, length, copies, position))
        return Cache(layers, prompt, lengths, self.config.windows)

    def first(self, ids: Tensor, segments: Tensor) -> Tensor:
        return ids.gather(1, segments.sum(1, keepdim=True) - 1)[:, 0]

    def decode(self, token_ids: Tensor, cache: Cache) -> Tensor:
        stack = self.transformer
        positions = (cache.lengths - 1 + cache.position)[:, None]
        x = stack.embed(token_ids.view(-1, len(cache.beams)), positions)
        biases = cache.present_biases(x.dtype)
        for block, window, layer in zip(stack.blocks, self.config.windows, cache.layers, strict=True):
            x = block.step(x, biases[window], layer)
        cache.position += 1
        return F.linear(stack.ln_f(x), self.head).flatten(0, 1)
