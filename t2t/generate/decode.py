"""From source ids to target ids, token by token on a preallocated cache: greedy, sampling, beams, diverse beams.

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
from t2t.errors import InputError
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
    tokens, scores = _search(model, source_ids, source_segments, max_length, beams, 1, 0.0, length_penalty, keep=1)
    return Output(tokens[:, 0], scores[:, 0])


def diverse(
    model: Model,
    source_ids: Tensor,
    source_segments: Tensor,
    max_length: int,
    beams: int,
    groups: int,
    diversity_penalty: float,
    length_penalty: float = 1.0,
) -> Output:
    """Diverse beam search (arXiv 1610.02424): tokens [R, K, T] and scores [R, K], group by group, best first in each.

    The beams are shared out among groups that search one after the other at every position. A token costs a group
    ``diversity_penalty`` for every beam of an earlier group that has just chosen it (Hamming diversity), and scores
    keep what was paid. A group that is done chooses no more.

    >>> from t2t.models.t5 import T5, T5Config
    >>> model = T5(T5Config(vocab_size=16, d_model=8, num_layers=1, num_decoder_layers=1))
    >>> source = torch.tensor([[5, 6, 1]])
    >>> diverse(model, source, torch.ones_like(source), 4, beams=6, groups=3, diversity_penalty=0.5).tokens.shape
    torch.Size([1, 6, 4])
    """
    keep = beams // groups
    search = beams, groups, diversity_penalty, length_penalty, keep
    return Output(*_search(model, source_ids, source_segments, max_length, *search))


def _search(
    model: Model,
    source_ids: Tensor,
    source_segments: Tensor,
    max_length: int,
    beams: int,
    groups: int,
    diversity_penalty: float,
    length_penalty: float,
    keep: int,
) -> tuple[Tensor, Tensor]:
    """The ``keep`` best sequences of every group of beams, [R, groups * keep, T], and their scores."""
    config, device, rows = model.config, source_ids.device, len(source_ids)
    if beams % groups:
        raise InputError(f"generate: {beams} beams cannot be shared out among {groups} groups")
    size = beams // groups
    first = model.first(source_ids, source_segments)
    done = torch.zeros(rows, groups, dtype=torch.bool, device=device)
    parts = [_Group(first, size, keep, max_length, config.pad_id, done[:, g : g + 1]) for g in range(groups)]
    row_starts = torch.arange(0, rows * beams, beams, device=device)[:, None]

    with _decoding(model):
        cache = model.start(source_ids, source_segments, max_length, copies=beams)
        for _ in _steps(cache, max_length, done):
            last = torch.cat([part.running.index_select(2, cache.position) for part in parts], 1).flatten()
            log_probs = model.decode(last, cache).float().log_softmax(-1).unflatten(0, (rows, beams))
            taken = torch.zeros_like(log_probs[:, :1])
            origins = []
            for g, part in enumerate(parts):
                begin = g * size
                running = ~part.done
                parents, tokens = part.advance(
                    log_probs[:, begin : begin + size] - taken, cache.position, model.ends, length_penalty
                )
                origins.append(row_starts + begin + parents)
                if groups > 1:
                    cost = (diversity_penalty * running).expand_as(tokens)
                    taken = taken.scatter_add(2, tokens[:, None], cost[:, None])
            cache.reorder(torch.cat(origins, 1).flatten())
    tokens, scores = (torch.cat(side, 1) for side in ([p.ended for p in parts], [p.ended_scores for p in parts]))
    return tokens[:, :, 1:], scores


class _Group:
    """Beams of each row that are searched together: those that run, and the best of those that have ended."""

    def __init__(self, first: Tensor, beams: int, keep: int, max_length: int, pad_id: int, done: Tensor) -> None:
        rows, device = len(first), first.device
        self.beams, self.keep, self.max_length, self.done = beams, keep, max_length, done
        self.running = torch.full((rows, beams, max_length + 1), pad_id, device=device)
        self.running[:, :, 0] = first[:, None]
        # All beams begin alike: only the first may propose.
        self.scores = torch.full((rows, beams), NEVER, device=device)
        self.scores[:, 0] = 0
        self.ended, self.all_ended_scores = self.running[:, :keep], torch.full((rows, beams), NEVER, device=device)
        self.among_best = torch.arange(2 * beams, device=device) < beams

    @property
    def ended_scores(self) -> Tensor:
        """Scores [R, keep] of the sequences that are kept."""
        return self.all_ended_scores[:, : self.keep]

    def advance(
        self, log_probs: Tensor, length: Tensor, ends: Callable[[Tensor], Tensor], length_penalty: float
    ) -> tuple[Tensor, Tensor]:
        """Go on by one token, given [R, K, V]; gives back which beams went on, and with which tokens, [R, K]."""
        penalty = length.float() ** length_penalty
        # One end token a beam at most: among twice as many candidates there are enough to run on.
        proposed, index = (self.scores[:, :, None] + log_probs).flatten(1).topk(2 * self.beams)
        parents, tokens = index // log_probs.shape[-1], index % log_probs.shape[-1]
        last = ends(tokens) | (length == self.max_length)

        now_ended = torch.where(last & self.among_best & ~self.done, proposed / penalty, NEVER)
        self.all_ended_scores, which = torch.cat((self.all_ended_scores, now_ended), 1).topk(self.beams)
        # The best are in order: what is kept comes from what was kept, or has ended just now.
        which = which[:, : self.keep]
        new = (which - self.beams).clamp(min=0)
        candidates = _extended(self.running, parents.gather(1, new), tokens.gather(1, new), length)
        kept = _taken(self.ended, which.clamp(max=self.keep - 1))
        self.ended = torch.where((which >= self.beams)[:, :, None], candidates, kept)

        self.scores, going = proposed.masked_fill(last, NEVER).topk(self.beams)
        parents, tokens = parents.gather(1, going), tokens.gather(1, going)
        self.running = _extended(self.running, parents, tokens, length)
        self.done |= self.scores[:, :1] / penalty <= self.all_ended_scores[:, -1:]
        return parents, tokens


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
    return _taken(sequences, parents).index_copy_(2, position, tokens[:, :, None])


def _taken(sequences: Tensor, which: Tensor) -> Tensor:
    """Of sequences [R, K, T], those at ``which`` [R, N]."""
    return sequences.gather(1, which[:, :, None].expand(-1, -1, sequences.shape[2]))


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
