"""BERT with its masked-LM and next-sentence heads.

Parameters carry the names and shapes of `transformers`' ``BertForPreTraining``. Rows are packed: a segment, one
sentence or a pair of them, attends to itself alone, and its positions begin at 0.

Shapes: R rows, T slots, D model width, H heads, C channels of a head, P predicted slots, M segments of a row at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2t import kernels
from t2t.errors import InputError
from t2t.models.activations import ACTIVATIONS
from t2t.models.architectures import BertConfig, Kind
from t2t.models.base import Embedding, Model, Rows

CHUNK = 1024  # positions whose logits are held at once where they are judged


class Embeddings(nn.Module):
    """Tokens where they stand, and in which sentence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(config.vocab_size, config.width, config.tied)
        self.position_embeddings = nn.Embedding(config.positions, config.width)
        self.token_type_embeddings = nn.Embedding(config.types, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        sentence = self.token_type_embeddings.weight[0] if types is None else self.token_type_embeddings(types)
        return self.LayerNorm(self.word_embeddings(ids) + self.position_embeddings(positions) + sentence)


class Output(nn.Module):
    """What ends both halves of a layer: a product, dropout, the residual, and a norm."""

    def __init__(self, config: BertConfig, inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, residual: Tensor, x: Tensor, dropout: float) -> Tensor:
        return self.LayerNorm(kernels.linear_dropout_add(residual, x, self.dense.weight, dropout, self.dense.bias))


class Heads(nn.Module):
    """Queries, keys and values, by one product."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        for name in ("query", "key", "value"):
            self.add_module(name, nn.Linear(config.width, config.width))
        self.heads = config.num_heads

    def forward(self, x: Tensor) -> Tensor:
        """All three, [R, T, 3, H, C]."""
        parts = [cast(nn.Linear, getattr(self, name)) for name in ("query", "key", "value")]
        merged = F.linear(x, torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts]))
        return merged.unflatten(-1, (3, self.heads, -1))


class Attention(nn.Module):
    """Heads and what follows them, under the names that `transformers` gives them."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.add_module("self", Heads(config))
        self.output = Output(config, config.width)


class Layer(nn.Module):
    """Attention, then feed-forward, each followed by its norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(config.width, config.inner)
        self.output = Output(config, config.inner)
        self.activation, self.config = ACTIVATIONS[config.activation], config

    def forward(self, x: Tensor, bias: Any) -> Tensor:
        c = self.config
        attention_rate, rate = (c.attention_dropout, c.dropout) if self.training else (0.0, 0.0)
        packed = cast(Heads, self.attention.get_submodule("self"))(x)
        mixed = kernels.attention([packed], bias, attention_rate, packed.shape[-1] ** -0.5).flatten(2)
        x = self.attention.output(x, mixed, rate)
        return self.output(x, self.activation(cast(nn.Linear, self.intermediate.dense)(x)), rate)


class Transform(nn.Module):
    """What stands before the masked-LM head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.eps)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(x)))


class Stack(nn.Module):
    """Embeddings, layers and the pooler."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.pooler = nn.Module()
        self.pooler.dense = nn.Linear(config.width, config.width)
        self.config = config

    @property
    def layers(self) -> list[nn.Module]:
        """First to last."""
        return list(cast(nn.ModuleList, self.encoder.layer))

    def forward(self, ids: Tensor, segments: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        x = self.embeddings(ids, positions, types)
        x = kernels.dropout(x, self.config.dropout if self.training else 0.0)
        bias = kernels.attention_bias(kernels.Sight(segments, segments, dtype=x.dtype))
        for layer in self.layers:
            x = layer(x, bias)
        return x


class Bert(Model):
    """BERT for pretraining.

    >>> model = Bert(BertConfig(vocab_size=16, width=8, num_heads=2, num_layers=1, inner=16)).eval()
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> model(ids, torch.ones_like(ids), torch.arange(3)[None]).shape
    torch.Size([1, 3, 8])
    """

    kind: ClassVar[Kind] = BertConfig.kind
    family = "bert"
    classes: ClassVar[dict[str, str]] = {"bert": "BertForPreTraining"}
    embeddings = ("bert.embeddings.word_embeddings.weight", "embeddings.word_embeddings.weight")
    output = "cls.predictions.decoder.weight"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if not config.tied:
            raise InputError(
                "config.json: tie_word_embeddings: BERT's head is its embedding here; false is not supported"
            )
        self.config = config
        self.bert = Stack(config)
        self.cls = nn.Module()
        predictions = nn.Module()
        predictions.bias = nn.Parameter(torch.empty(config.vocab_size))
        predictions.transform = Transform(config)
        self.cls.predictions = predictions
        self.cls.seq_relationship = nn.Linear(config.width, 2)

    @classmethod
    def read(cls, raw: Mapping[str, Any], dropout: float | None) -> BertConfig:
        config = BertConfig.from_huggingface(raw)
        return config if dropout is None else dataclasses.replace(config, dropout=dropout, attention_dropout=dropout)

    @classmethod
    def adopt(cls, stored: str) -> str | None:
        if stored.endswith("position_ids") or stored == "cls.predictions.decoder.bias":
            return None  # a count, and another name of cls.predictions.bias
        name = stored.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return name if name.startswith(("bert.", "cls.")) else f"bert.{name}"

    def may_lack(self, name: str) -> bool:
        return name.startswith(("cls.", "bert.pooler."))

    @property
    def head(self) -> Tensor:
        return self.bert.embeddings.word_embeddings.weight

    def initialize_one(self, name: str, parameter: Tensor) -> None:
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "LayerNorm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=self.config.initializer_range)

    def blocks(self) -> list[nn.Module]:
        return self.bert.layers

    def forward(self, ids: Tensor, segments: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """The last layer's states, [R, T, D]."""
        return self.bert(ids, segments, positions, types)

    def loss(self, rows: Rows, smoothing: float) -> tuple[Tensor, Tensor]:
        hidden = self(rows.target_ids, rows.target_segments, rows.target_positions, rows.target_types)
        states, labels = self._asked(hidden, rows)
        total, each = kernels.linear_cross_entropy(
            states.flatten(0, 1), self.head, labels.flatten(), smoothing, bias=self._bias
        )
        sums, each = [total], each.view(labels.shape)
        if rows.predicted is not None:
            each = each.new_zeros(rows.labels.shape).scatter_(1, rows.predicted, each)
        if rows.pair_labels is not None:
            logits = self._pair_logits(hidden, rows.target_segments, rows.pair_labels.shape[1])
            sums.append(F.cross_entropy(_wide(logits), rows.pair_labels.flatten(), reduction="sum"))
        return torch.stack(sums), each

    @torch.no_grad()
    def judge(self, rows: Rows) -> tuple[Tensor, Tensor]:
        hidden = self(rows.target_ids, rows.target_segments, rows.target_positions, rows.target_types)
        states, labels = (x.flatten(0, 1) for x in self._asked(hidden, rows))
        parts = zip(states.split(CHUNK), labels.split(CHUNK), strict=True)
        found = [torch.stack([_judged(torch.addmm(self._bias, x, self.head.T), label) for x, label in parts]).sum(0)]
        if rows.pair_labels is not None:
            logits = self._pair_logits(hidden, rows.target_segments, rows.pair_labels.shape[1])
            found.append(_judged(logits, rows.pair_labels.flatten()))
        losses, hits = torch.stack(found).T
        return losses, hits

    @property
    def _bias(self) -> Tensor:
        return cast(Tensor, cast(nn.Module, self.cls.predictions).bias)

    def _asked(self, hidden: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """What the masked-LM head reads, [R, P, D], and the labels there: of all slots, or of those that are told."""
        labels = rows.labels
        if rows.predicted is not None:
            hidden = hidden.gather(1, rows.predicted[..., None].expand(-1, -1, hidden.shape[-1]))
            labels = labels.gather(1, rows.predicted)
        return cast(Transform, cast(nn.Module, self.cls.predictions).transform)(hidden), labels

    def _pair_logits(self, hidden: Tensor, segments: Tensor, most: int) -> Tensor:
        """Whether the second sentence follows, [R * M, 2], told from the first slot of each segment."""
        numbers = torch.arange(1, most + 1, device=segments.device)[:, None]
        first = (segments[:, None] == numbers).long().argmax(-1)  # [R, M]; 0 where there is no such segment
        states = hidden.gather(1, first[..., None].expand(-1, -1, hidden.shape[-1]))
        pooled = torch.tanh(cast(nn.Linear, self.bert.pooler.dense)(states))
        return cast(nn.Linear, self.cls.seq_relationship)(pooled).flatten(0, 1)


def _judged(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the labels' losses, and how many of them are the likeliest, [2]."""
    return torch.stack([F.cross_entropy(_wide(logits), labels, reduction="sum"), (logits.argmax(-1) == labels).sum()])


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
