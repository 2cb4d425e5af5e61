"""Greedy and beam tokens are those of `transformers`, for every kind of T5; those of diverse beams, which it no longer
has, are those of the paper written out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from t2t.config import Generate
from t2t.errors import InputError
from t2t.generate.decode import beam, decode, diverse
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


class Group:
    """A group of the written-out search: (score, tokens) of what runs and of what has ended, best first."""

    def __init__(self) -> None:
        self.running: list[tuple[float, list[int]]] = [(0.0, [])]
        self.ended: list[tuple[float, list[int]]] = []
        self.done = False


def written_out(peer: Any, source: Tensor, beams: int, groups: int, penalty: float, length: int) -> list[Group]:
    """Diverse beam search of one source, without batches, caches or tensors of its own."""
    size = beams // groups
    parts = [Group() for _ in range(groups)]
    memory = peer.get_encoder()(source[None])
    for position in range(1, length + 1):
        chosen: Counter[int] = Counter()
        for group in parts:
            if group.done:
                continue
            candidates = []
            for score, tokens in group.running:
                with torch.no_grad():
                    logits = peer(encoder_outputs=memory, decoder_input_ids=torch.tensor([[0, *tokens]])).logits[0, -1]
                for token, value in enumerate(logits.log_softmax(-1).tolist()):
                    candidates.append((score + value - penalty * chosen[token], [*tokens, token]))
            candidates = sorted(candidates, reverse=True)[: 2 * size]
            ends = [tokens[-1] == 1 or position == length for _, tokens in candidates]
            ranked = zip(candidates[:size], ends, strict=False)
            group.ended += [(score / position, tokens) for (score, tokens), end in ranked if end]
            group.ended = sorted(group.ended, reverse=True)[:size]
            group.running = [each for each, end in zip(candidates, ends, strict=True) if not end][:size]
            chosen.update(tokens[-1] for _, tokens in group.running)
            full = len(group.ended) == size
            group.done = full and (not group.running or group.running[0][0] / position <= group.ended[-1][0])
    return parts


@pytest.mark.parametrize(("beams", "groups", "penalty"), [(4, 2, 0.5), (6, 3, 2.0), (4, 4, 0.7)])
@pytest.mark.parametrize("pair", ["t5 1.0", "umt5"], indirect=True)
def test_diverse_beams_are_those_of_the_paper(pair: tuple[T5, Any], beams: int, groups: int, penalty: float) -> None:
    model, peer = pair
    source = ragged_sources()[:5]
    length = 18  # more than one window
    ours = diverse(model, source, (source != 0).long(), length, beams, groups, penalty)
    assert ours.scores is not None
    for row, tokens, scores in zip(source, ours.tokens, ours.scores, strict=True):
        parts = written_out(peer, row[row != 0], beams, groups, penalty, length)
        expected = [ended for group in parts for ended in group.ended]
        assert until_end(tokens) == [found for _, found in expected]
        torch.testing.assert_close(scores, torch.tensor([score for score, _ in expected]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pair", ["t5 1.0"], indirect=True)
def test_diversity_is_what_is_paid_for(pair: tuple[T5, Any]) -> None:
    source = ragged_sources()
    inputs = pair[0], source, (source != 0).long(), LENGTH
    firsts = [diverse(*inputs, beams=8, groups=4, diversity_penalty=cost).tokens[:, ::2] for cost in (0.0, 5.0)]
    alone = beam(*inputs, beams=2, length_penalty=1.0).tokens
    assert all(
        torch.equal(firsts[0][:, g], alone) for g in range(4)
    )  # without a penalty the groups are the same search
    assert torch.equal(firsts[1][:, 0], alone)  # nobody is before the first group
    first_tokens = firsts[1][:, :, 0].tolist()
    assert all(len(set(row)) == 4 for row in first_tokens)
    with pytest.raises(InputError, match="8 beams cannot be shared out among 3 groups"):
        diverse(*inputs, beams=8, groups=3, diversity_penalty=1.0)
