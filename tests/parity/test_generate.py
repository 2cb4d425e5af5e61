"""Greedy and beam tokens are those of `transformers`, for every kind of T5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from t2t.config import Generate
from t2t.generate.decode import decode
from t2t.models import load
from t2t.models.t5 import T5

LENGTH = 40  # more than one window of the decoder
SMALL = {
    "vocab_size": 40,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5 1.0": ("T5", {}),
    "t5 1.1": ("T5", GATED),
    "mt5": ("MT5", GATED),
    "umt5": ("UMT5", {**GATED, "relative_attention_max_distance": 20}),
    "byt5": ("T5", {**GATED, "num_layers": 3, "num_decoder_layers": 1}),
}
SETTINGS = {
    "greedy": Generate(),
    "4 beams": Generate(beams=4),
    "4 beams, penalty 0.6": Generate(beams=4, length_penalty=0.6),
    "4 beams, penalty 2": Generate(beams=4, length_penalty=2.0),
    "3 beams, penalty -1": Generate(beams=3, length_penalty=-1.0),
}


def reference(kind: str, source: Tensor) -> Any:
    """A peer model that has half learned to answer each source with its start: rows differ, and end at many places."""
    family, changes = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    labels = source.masked_fill(source == 0, -100)
    for _ in range(40):
        optimizer.zero_grad()
        model(input_ids=source, attention_mask=(source != 0).long(), labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[T5, Any]:
    peer = reference(request.param, ragged_sources())
    folder = tmp_path_factory.mktemp("model")
    peer.save_pretrained(folder)
    return load.load(folder)[0], peer


def ragged_sources() -> Tensor:
    rng = torch.Generator().manual_seed(1)
    source = torch.randint(2, 40, (12, 17), generator=rng)
    lengths = torch.randint(3, 18, (12, 1), generator=rng)
    places = torch.arange(17)
    return source.masked_fill(places == lengths - 1, 1).masked_fill(places >= lengths, 0)


def until_end(tokens: Tensor) -> list[list[int]]:
    return [row[: row.index(1) + 1] if 1 in row else row for row in tokens.tolist()]


@pytest.mark.parametrize("name", list(SETTINGS))
def test_tokens_and_scores_are_those_of_transformers(pair: tuple[T5, Any], name: str) -> None:
    model, peer = pair
    settings, source = SETTINGS[name], ragged_sources()
    segments = (source != 0).long()
    theirs = peer.generate(
        input_ids=source,
        attention_mask=segments,
        do_sample=False,
        num_beams=settings.beams,
        length_penalty=settings.length_penalty,
        max_new_tokens=LENGTH,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ours = decode(model, source, segments, settings, LENGTH)
    expected = until_end(theirs.sequences[:, 1:])
    assert [row[:n] for row, n in zip(ours.tokens.tolist(), map(len, expected), strict=True)] == expected
    assert all(not any(row[n:]) for row, n in zip(ours.tokens.tolist(), map(len, expected), strict=True))
    if settings.beams > 1:
        torch.testing.assert_close(ours.scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)
    # The comparison says little about outputs that are all alike.
    assert len(set(map(tuple, expected))) > 8
    assert len(set(map(len, expected))) > 3
