"""What decoding remembers: keys and values in preallocated buffers, and whose tokens are whose among beams.

A row's K beams share its buffers, and nothing in them ever moves. A prompt that was read at once lies before the
decoded tokens, once for all beams.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ending_together(ids: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts [R, S], one a row, without their last tokens and moved so that all end in the same slot, [R, S - 1], and
    the place of each slot in its prompt, which is negative before it begins.

    >>> moved, places = ending_together(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]))
    >>> places.tolist(), moved[:, 1].tolist()
    ([[0, 1], [-1, 0]], [6, 8])
    """
    width = ids.shape[1] - 1
    places = torch.arange(width, device=ids.device) - width + segments.sum(1, keepdim=True) - 1
    return ids.gather(1, places.clamp(min=0)), places


class LayerCache:
    """Keys and values of one layer: of the prompt's P slots, then of T tokens of K beams, [R, H, P + T * K, C]."""

    def __init__(self, keys: Tensor, values: Tensor, length: int, copies: int, position: Tensor) -> None:
        """Begin with those of the prompt [R, H, P, C]; ``position`` counts the tokens since."""
        self.prompt, self.copies, self.position, self.slots = keys.shape[2], copies, position, length
        room = keys.new_zeros(*keys.shape[:2], length * copies, keys.shape[3])
        self.keys, self.values = torch.cat([keys, room], 2), torch.cat([values, room], 2)
        self._beams = torch.arange(copies, device=keys.device) + self.prompt

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in those of one token a beam [R, H, K, C]; give all in use [R, H, P + slots * K, C]."""
        at = self._beams + self.position * self.copies
        self.keys.index_copy_(2, at, keys)
        self.values.index_copy_(2, at, values)
        used = self.prompt + self.slots * self.copies
        return self.keys[:, :, :used], self.values[:, :, :used]


class BeamCache:
    """The layers, where we are, and the ancestors of each beam.

    ``ancestors`` [R, K, T] says in which beam's place a beam finds its own token of each position.
    """

    def __init__(self, layers: list[LayerCache], position: Tensor, rows: int) -> None:
        self.layers, self.position = layers, position
        self.beams = torch.arange(layers[0].copies, device=position.device)
        self.places = torch.arange(layers[0].slots, device=position.device)
        self.ancestors = self.beams[:, None].expand(rows, -1, len(self.places)).clone()

    def use(self, slots: int) -> None:
        """Compute with the first ``slots`` positions alone: they must hold all tokens until this is called again."""
        for layer in self.layers:
            layer.slots = slots

    def reorder(self, sequences: Tensor) -> None:
        """Let sequence i of R * K go on from what ``sequences[i]`` has decoded, another beam of the same row."""
        parents = sequences.view(-1, len(self.beams), 1) % len(self.beams)
        inherited = self.ancestors.gather(1, parents.expand_as(self.ancestors))
        self.ancestors.copy_(torch.where(self.places < self.position, inherited, self.beams[:, None]))

    def own(self) -> Tensor:
        """Which of the tokens in use are a beam's own, past or present, [R, 1, K, slots * K]."""
        slots = self.layers[0].slots
        decoded = (self.places[:slots] <= self.position)[:, None]
        return ((self.ancestors[:, :, :slots, None] == self.beams) & decoded).flatten(2)[:, None]
