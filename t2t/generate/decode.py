"""From source ids to target ids, token by token on a preallocated cache: greedy, sampling, beam search.

Shapes never depend on data, and all state stays on the device: the host looks once a window of tokens whether every
row has ended. The cache is used up to the end of the window, so that early tokens do not pay for late ones.

Shapes: R rows, K beams, V vocabulary, T new tokens at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from t2t.config import Generate
from t2t.models.base import Cache, Model

WINDOW = 16
NEVER = -1e9  # a score below every real one, and finite: it can be added to


class Output(NamedTuple):
    """Tokens [R, T] up to and with the end token, then padding; scores [R] where beams were searched.

    >>> Output(torch.tensor([[7, 1, 0]]), None).tokens.tolist()
    [[7, 1, 0]]
    """

    tokens: Tensor
    scores: Tensor | None


def decode(
    model: Model, source_ids: Tensor, source_segments: Tensor, settings: Generate, max_length: int, seed: int = 0
) -> Output:
    """Decode as ``settings`` say, at most ``settings.max_length`` tokens, or ``max_length`` where that is 0.

    >>> from t2t.models.t5 import T5, T5Config
    >>> model = T5(T5Config(vocab_size=16, d_model=8, num_layers=1, num_decoder_layers=1))
    >>> source = torch.tensor([[5, 6, 1]])
    >>> decode(model, source, torch.ones_like(source), Generate(beams=2), max_length=4).tokens.shape
    torch.Size([1, 4])
    """
    length = settings.max_length or max_length
    if settings.beams > 1:
        return beam(model, source_ids, source_segments, length, settings.beams, settings.length_penalty)
    if settings.temperature > 0:
        generator = torch.Generator(source_ids.device).manual_seed(seed)
        shape = settings.temperature, settings.top_k, settings.top_p
        return Output(sample(model, source_ids, source_segments, length, *shape, generator), None)
    return Output(greedy(model, source_ids, source_segments, length), None)


def greedy(model: Model, source_ids: Tensor, source_segments: Tensor, max_length: int) -> Tensor:
    """The likeliest token each time, [R, T].

    >>> from t2t.models.t5 import T5, T5Config
    >>> model = T5(T5Config(vocab_size=16, d_model=8, num_layers=1, num_decoder_layers=1))
    >>> source = torch.tensor([[5, 6, 1], [7, 1, 0]])
    >>> greedy(model, source, (source != 0).long(), max_length=4).shape
    torch.Size([2, 4])
    """
    return _one_by_one(model, source_ids, source_segments, max_length, lambda logits: logits.argmax(-1))


def sample(
    model: Model,
    source_ids: Tensor,
    source_segments: Tensor,
    max_length: int,
    temperature: float,
    top_k: int,
    top_p: float,
    generator: torch.Generator,
) -> Tensor:
    """Tokens drawn by `probabilities`, [R, T].

    >>> from t2t.models.t5 import T5, T5Config
    >>> model = T5(T5Config(vocab_size=16, d_model=8, num_layers=1, num_decoder_layers=1))
    >>> source = torch.tensor([[5, 6, 1]])
    >>> rng = torch.Generator().manual_seed(0)
    >>> sample(model, source, torch.ones_like(source), 4, 1.0, top_k=5, top_p=0.9, generator=rng).shape
    torch.Size([1, 4])
    """

    def draw(logits: Tensor) -> Tensor:
        chances = probabilities(logits, temperature, top_k, top_p)
        # The largest p / Exp(1) falls on a token with its probability p, and asks the host nothing.
        return (chances / torch.empty_like(chances).exponential_(generator=generator)).argmax(-1)

    return _one_by_one(model, source_ids, source_segments, max_length, draw)


def probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """What is sampled from: the softmax at a temperature, of the ``top_k`` likeliest tokens (0: all), and of these the
    fewest that reach ``top_p``.

    >>> probabilities(torch.tensor([[0.5, 0.3, 0.2]]).log(), 1.0, top_k=0, top_p=0.7)
    tensor([[0.6250, 0.3750, 0.0000]])
    """
    scaled = logits.float() / temperature
    if 0 < top_k < scaled.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[:, -1:], -torch.inf)
    chances = scaled.softmax(-1)
    if top_p < 1:
        ordered, order = chances.sort(dim=-1, descending=True)
        likelier = ordered.cumsum(-1) - ordered
        kept = ordered.masked_fill(likelier >= top_p, 0)
        chances = torch.zeros_like(chances).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
    return chances


def beam(
    model: Model, source_ids: Tensor, source_segments: Tensor, max_length: int, beams: int, length_penalty: float
) -> Output:
    """The best sequence that beam search finds, and its score: summed log-probability / length ** ``length_penalty``.

    A row is done when it has as many ended sequences as beams and its best running one, scored at the length it has,
    is no better than the worst of them (the rule of `transformers`).

    >>> from t2t.models.t5 import T5, T5Config
    >>> model = T5(T5Config(vocab_size=16, d_model=8, num_layers=1, num_decoder_layers=1))
    >>> source = torch.tensor([[5, 6, 1]])
    >>> tokens, scores = beam(model, source, torch.ones_like(source), max_length=4, beams=3, length_penalty=1.0)
    >>> tokens.shape, scores.shape
    (torch.Size([1, 4]), torch.Size([1]))
    """
    config, device, rows = model.config, source_ids.device, len(source_ids)
    running = torch.full((rows, beams, max_length + 1), config.pad_id, device=device)
    running[:, :, 0] = model.first(source_ids, source_segments)[:, None]
    # All beams begin alike: only the first may propose.
    scores = torch.full((rows, beams), NEVER, device=device)
    scores[:, 0] = 0
    ended_scores = torch.full((rows, beams), NEVER, device=device)
    best = running[:, 0]
    done = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    row_starts = torch.arange(0, rows * beams, beams, device=device)[:, None]
    among_best = torch.arange(2 * beams, device=device) < beams

    with _decoding(model):
        cache = model.start(source_ids, source_segments, max_length, copies=beams)
        for _ in _steps(cache, max_length, done):
            last = running.index_select(2, cache.position).flatten()
            log_probs = model.decode(last, cache).float().log_softmax(-1).unflatten(0, (rows, beams))
            length = cache.position
            penalty = length.float() ** length_penalty

            # One end token a beam at most: among twice as many candidates there are enough to run on.
            proposed, index = (scores[:, :, None] + log_probs).flatten(1).topk(2 * beams)
            parents, tokens = index // log_probs.shape[-1], index % log_probs.shape[-1]
            ends = model.ends(tokens) | (length == max_length)

            now_ended = torch.where(ends & among_best & ~done, proposed / penalty, NEVER)
            value, which = now_ended.max(1, keepdim=True)
            candidate = _extended(running, parents.gather(1, which), tokens.gather(1, which), length)[:, 0]
            best = torch.where(value > ended_scores[:, :1], candidate, best)
            ended_scores = torch.cat((ended_scores, now_ended), 1).topk(beams).values

            scores, kept = proposed.masked_fill(ends, NEVER).topk(beams)
            parents, tokens = parents.gather(1, kept), tokens.gather(1, kept)
            running = _extended(running, parents, tokens, length)
            cache.reorder((row_starts + parents).flatten())
            done |= scores[:, :1] / penalty <= ended_scores[:, -1:]
    return Output(best[:, 1:], ended_scores[:, 0])


def _one_by_one(
    model: Model, source_ids: Tensor, source_segments: Tensor, max_length: int, choose: Callable[[Tensor], Tensor]
) -> Tensor:
    """Decode every row with one rule from logits [R, V] to tokens [R]."""
    config, rows = model.config, len(source_ids)
    tokens = torch.full((rows, max_length + 1), config.pad_id, device=source_ids.device)
    tokens[:, 0] = token = model.first(source_ids, source_segments)
    ended = torch.zeros_like(token, dtype=torch.bool)
    with _decoding(model):
        cache = model.start(source_ids, source_segments, max_length)
        for _ in _steps(cache, max_length, ended):
            token = choose(model.decode(token, cache)).masked_fill(ended, config.pad_id)
            tokens.index_copy_(1, cache.position, token[:, None])
            ended |= model.ends(token)
    return tokens[:, 1:]


def _steps(cache: Cache, max_length: int, done: Tensor) -> Iterator[int]:
    """Count the tokens until every row is done, which is asked once a window."""
    for begin in range(0, max_length, WINDOW):
        end = min(begin + WINDOW, max_length)
        cache.use(end)
        yield from range(begin, end)
        if done.all():
            return


def _extended(sequences: Tensor, parents: Tensor, tokens: Tensor, position: Tensor) -> Tensor:
    """Of sequences [R, K, T], those at ``parents`` [R, N], with ``tokens`` [R, N] at one position."""
    index = parents[:, :, None].expand(-1, -1, sequences.shape[2])
    return sequences.gather(1, index).index_copy_(2, position, tokens[:, :, None])


@contextmanager
def _decoding(model: Model) -> Iterator[None]:
    """No gradients, no dropout; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with parametrize.cached(), torch.inference_mode():  # adapted weights are made once
            yield
    finally:
        for module, training in modes:
            module.training = training
