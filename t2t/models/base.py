"""What every model is to the rest of the house: a kind, a loss over packed rows, and a way to say one more token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from t2t import kernels
from t2t.models.architectures import Kind


class Rows(NamedTuple):
    """A batch (see `data.packing.Batch`) on the device: R rows of S source and T target slots.

    A model without a decoder reads the target side, and its source has no slots.
    """

    source_ids: Tensor  # [R, S]
    source_segments: Tensor  # [R, S]
    target_ids: Tensor  # [R, T]
    target_segments: Tensor  # [R, T]
    target_positions: Tensor  # [R, T], from 0 in every segment
    labels: Tensor  # [R, T]
    target_types: Tensor | None = None  # [R, T], 1 in the second sentence of a pair
    pair_labels: Tensor | None = None  # [R, most segments], 0: the second sentence follows, 1: not, -100: no segment
    predicted: Tensor | None = None  # [R, P], slots that hold every label of the row; a head may look at these alone


class Embedding(nn.Embedding):
    """Rows of tokens; ``tied``: they make the head too.

    >>> import torch
    >>> Embedding(4, 2, tied=True)(torch.tensor([3])).shape
    torch.Size([1, 2])
    """

    def __init__(self, count: int, width: int, tied: bool) -> None:
        super().__init__(count, width)
        self.tied = tied

    def forward(self, ids: Tensor) -> Tensor:
        return kernels.embedding(ids, self.weight, self.tied)


class Cache(Protocol):
    """What decoding remembers, for R rows of K beams side by side."""

    position: Tensor  # [1]: how many tokens were decoded

    def use(self, slots: int) -> None:
        """Compute with the first ``slots`` new tokens alone: they must hold all until this is called again."""

    def reorder(self, sequences: Tensor) -> None:
        """Let sequence i of R * K go on from what ``sequences[i]`` has decoded, another beam of the same row."""


class Model(nn.Module):
    """A model of any kind. Parameters carry the names and shapes of `transformers`."""

    kind: ClassVar[Kind]
    family: ClassVar[str]
    classes: ClassVar[dict[str, str]]  # the model types it serves, and the class of transformers that opens each
    embeddings: ClassVar[tuple[str, ...]]  # names under which checkpoints hold the embedding; the first is its own
    output: ClassVar[str]  # the head's name where it is not the embedding
    packs: ClassVar[bool] = True  # whether several examples may share a row
    config: Any
    fresh: tuple[str, ...] = ()  # parameters that the checkpoint lacked and that started afresh
    stops: tuple[int, ...] = ()  # tokens that end a text besides the end token, as a chat's answers do
    prompt: range = range(0)  # ids of a soft prompt (`adapters.add_prompt`), which stand before every input
    adapter: Mapping[str, Any] = {}  # what peft is told of the adapter that is trained on it

    @classmethod
    @abstractmethod
    def read(cls, raw: Mapping[str, Any], dropout: float | None) -> Any:
        """The architecture of a Hugging Face ``config.json``, with another dropout rate if one is given."""

    def initialize(self) -> None:
        """Fresh weights, from torch's generator."""
        for name, parameter in self.named_parameters():
            self.initialize_one(name, parameter)

    @abstractmethod
    def initialize_one(self, name: str, parameter: Tensor) -> None:
        """A fresh weight with the scale that the paper gives it."""

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """The output matrix [V, D]."""

    @abstractmethod
    def loss(self, rows: Rows, smoothing: float) -> tuple[Tensor, Tensor]:
        """Sums of what is minimised, [1], or [2] with next sentences, and each label's loss, [R, T], detached."""

    def judge(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Sums of losses as `loss` gives them, and where a model tells, how many of those labels it would get right."""
        return self.loss(rows, 0.0)[0], None

    def start(self, ids: Tensor, segments: Tensor, length: int, copies: int = 1) -> Cache:
        """Read the inputs [R, S], one a row, and prepare to decode ``length`` tokens, each row ``copies`` times."""
        raise NotImplementedError(f"{self.family} models do not generate")

    def first(self, ids: Tensor, segments: Tensor) -> Tensor:
        """The token [R] that decoding begins after."""
        raise NotImplementedError(f"{self.family} models do not generate")

    def decode(self, token_ids: Tensor, cache: Any) -> Tensor:
        """Logits [R * K, V] after one more token a sequence [R * K]; the cache moves on by one position."""
        raise NotImplementedError(f"{self.family} models do not generate")

    def ends(self, tokens: Tensor) -> Tensor:
        """Which of these tokens end a text."""
        found = tokens == self.config.eos_id
        for stop in self.stops:
            found = found | (tokens == stop)
        return found

    @classmethod
    def adopt(cls, stored: str) -> str | None:
        """The parameter that a checkpoint's tensor fills; None: nobody needs it."""
        return stored

    def may_lack(self, name: str) -> bool:
        """Whether a checkpoint may leave this parameter out, which then starts afresh."""
        return False

    def blocks(self) -> list[nn.Module]:
        """The layers that gradient checkpointing recomputes, one by one."""
        return []
