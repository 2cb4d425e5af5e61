"""From source texts to target texts: windows of a stream, batches of like lengths, results in the order of input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from t2t.config import Generate
from t2t.data.chat import Prompt
from t2t.data.tasks import join
from t2t.data.tokens import Tokenizer
from t2t.generate.decode import decode, diverse
from t2t.models.base import Model

BATCHES = 16  # in a window: enough for batches of like lengths, and no more for a pipe's reader to wait for
MULTIPLE = 8  # source slots come in so many: few shapes


def texts(
    model: Model,
    tokenizer: Tokenizer,
    inputs: Iterable[str | Prompt],
    settings: Generate,
    max_source_length: int,
    max_length: int,
    prefix: str = "",
    seed: int = 0,
    device: torch.device | None = None,
    on_cut: Callable[[int], None] | None = None,
    template: str = "",
) -> Iterator[str]:
    """The model's text for every input, in order, each window's as soon as it has been read and decoded.

    ``max_length`` counts where the settings leave it open; ``device`` is the model's own unless given. A source longer
    than ``max_source_length`` tokens is cut, and ``on_cut`` told its number, from 0. A causal model goes on from what
    ``template`` has before {target}, or from the source alone where that is empty. An input may also be tokens already.

    >>> from t2t.data.tokens import Bytes
    >>> from t2t.models.t5 import T5, T5Config
    >>> model = T5(T5Config(vocab_size=384, d_model=8, num_layers=1, num_decoder_layers=1))
    >>> len(list(texts(model, Bytes(), ["unu", "doi", "trei"], Generate(batch=2), 16, max_length=4)))
    3
    """
    place = device or model.head.device
    stream = iter(inputs)
    read = batches = 0
    while window := list(islice(stream, BATCHES * settings.batch)):
        sources = []
        for number, prompt in enumerate(_encoded(model, tokenizer, window, max_source_length, prefix, template), read):
            if prompt.cut and on_cut is not None:
                on_cut(number)
            sources.append(prompt.ids)
        read += len(window)
        results = [""] * len(window)
        # The longest first: what does not fit into memory fails at once.
        order = sorted(range(len(window)), key=lambda i: -len(sources[i]))
        for start in range(0, len(order), settings.batch):
            rows = order[start : start + settings.batch]
            ids, segments = _padded([sources[i] for i in rows], tokenizer.pad_id, max_source_length + len(model.prompt))
            output = decode(model, ids.to(place), segments.to(place), settings, max_length, _batch_seed(seed, batches))
            for i, tokens in zip(rows, output.tokens.tolist(), strict=True):
                results[i] = tokenizer.decode(tokens)
            batches += 1
        yield from results


def diverse_texts(
    model: Model,
    tokenizer: Tokenizer,
    text: str | Prompt,
    max_source_length: int,
    max_length: int,
    beams: int,
    groups: int,
    diversity_penalty: float,
    prefix: str = "",
    template: str = "",
) -> list[str]:
    """Texts that differ for one input (`decode.diverse`), each group's best first, then their second best and so on.

    >>> from t2t.data.tokens import Bytes
    >>> from t2t.models.t5 import T5, T5Config
    >>> model = T5(T5Config(vocab_size=384, d_model=8, num_layers=1, num_decoder_layers=1))
    >>> found = diverse_texts(model, Bytes(), "unu", 16, max_length=4, beams=4, groups=2, diversity_penalty=0.5)
    >>> len(found) == len(set(found)) <= 4
    True
    """
    (prompt,) = _encoded(model, tokenizer, [text], max_source_length, prefix, template)
    ids = torch.tensor([prompt.ids], device=model.head.device)
    found = diverse(model, ids, torch.ones_like(ids), max_length, beams, groups, diversity_penalty).tokens[0]
    in_turn = found.unflatten(0, (groups, -1)).transpose(0, 1).flatten(0, 1)
    return list(dict.fromkeys(tokenizer.decode(tokens) for tokens in in_turn.tolist()))


def _encoded(
    model: Model, tokenizer: Tokenizer, window: Sequence[str | Prompt], longest: int, prefix: str, template: str
) -> Iterator[Prompt]:
    """What the model reads of every input, behind a soft prompt where it has one."""
    end = [] if model.kind == "causal" else [tokenizer.eos_id]
    room = longest - len(tokenizer.starts) - len(end)
    texts = [prefix + text for text in window if isinstance(text, str)]
    if model.kind == "causal":
        texts = [_prompt(template, text) for text in texts]
    encoded = iter(tokenizer.encode_batch(texts))
    for item in window:
        if isinstance(item, str):
            ids = next(encoded)
            item = Prompt([*tokenizer.starts, *ids[: max(room, 0)], *end], cut=len(ids) > room)
        yield Prompt([*model.prompt, *(item.ids or [model.config.start_id])], item.cut)


def _prompt(template: str, source: str) -> str:
    """What is written before the target.

    >>> _prompt("Q: {source} A: {target}", "why?")
    'Q: why? A: '
    """
    if not template:
        return source
    before, between, _ = join(template)
    return before + source + between


def _padded(sources: list[list[int]], pad_id: int, longest: int) -> tuple[Tensor, Tensor]:
    """Source ids and segments [R, S] of one example a row."""
    width = min(-(-max(map(len, sources)) // MULTIPLE) * MULTIPLE, longest)
    ids = torch.tensor([source + [pad_id] * (width - len(source)) for source in sources])
    lengths = torch.tensor([[len(source)] for source in sources])
    return ids, (torch.arange(width) < lengths).long()


def _batch_seed(seed: int, batch: int) -> int:
    return int(np.random.SeedSequence([seed, batch]).generate_state(1)[0])
