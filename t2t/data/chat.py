"""Conversations for causal models: shown as the tokenizer's own chat template shows them, learned where the assistant
speaks.

A record is ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}``. Roles are
system, user and assistant; what else a message holds is not looked at, nor is what follows the last answer.

An answer lies between what the template shows before it, with the generation prompt, and the first special token
after it, which ends the turn and is learned too. So each of these beginnings must be a beginning of the whole.

A conversation longer than it may be loses its oldest turns, but not a system message at its head, until it fits. One
whose last question and answer alone do not fit is left out. Both are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from t2t.config import Data
from t2t.data.packing import IGNORE, Feature
from t2t.data.ragged import Ragged
from t2t.data.sources import Reader
from t2t.data.tasks import BadField, Messages, checked_messages
from t2t.data.tokens import Tokenizer
from t2t.errors import InputError

_PROBE: Messages = ({"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"})


def checked_conversation(found: Any) -> Messages:
    """Messages to learn from, checked, up to the last answer.

    >>> checked_conversation([{"role": "user", "content": "Hi"}])
    Traceback (most recent call last):
    t2t.data.tasks.BadField: no message of the assistant, of which to learn
    """
    messages = checked_messages(found)
    answers = _answers(messages)
    if not answers:
        raise BadField("no message of the assistant, of which to learn")
    if answers[0] == 0:
        raise BadField("message 1 is the assistant's, who has nothing to answer yet")
    return messages[: answers[-1] + 1]


def checked_question(found: Any) -> Messages:
    """Messages to answer, checked; an answer at their end is to be given anew.

    >>> checked_question([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    ({'role': 'user', 'content': 'Hi'},)
    """
    messages = checked_messages(found)
    question = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not question:
        raise BadField("no message to answer")
    return question


class Shown(NamedTuple):
    """The tokens of a conversation, and from where to where the assistant speaks, the token that ends a turn included.

    >>> Shown([7, 8, 9, 2], [(2, 4)]).answers
    [(2, 4)]
    """

    ids: list[int]
    answers: list[tuple[int, int]]


class Prompt(NamedTuple):
    """Tokens to go on from, and whether others were left out because there were too many.

    >>> Prompt([7, 8], cut=False).ids
    [7, 8]
    """

    ids: list[int]
    cut: bool


class Template:
    """A tokenizer's chat template, which must have a special token end the assistant's turns.

    It is run in the sandbox of `transformers`: it can reach nothing but the messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        texts = sorted(tokenizer.specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._special_ids = set(tokenizer.specials.values())
        try:
            shown = self._show(_PROBE)
        except BadField as error:
            raise InputError(f"model.tokenizer: {error}") from None
        self.end_id = shown.ids[shown.answers[0][1] - 1]

    def show(self, messages: Messages, longest: int = 0) -> Shown | None:
        """The conversation with as many of its turns as ``longest`` tokens hold (0: all); None where that is none."""
        for kept in _shortened(messages):
            shown = self._show(kept)
            if any(shown.ids[stop - 1] != self.end_id for _, stop in shown.answers):
                raise BadField("the chat template does not end every answer with the same token")
            if not longest or len(shown.ids) <= longest:
                return shown
        return None

    def prompt(self, messages: Messages, longest: int) -> Prompt:
        """What to answer; too long, it loses its oldest turns, and the last turn, if that alone is, its beginning."""
        for kept in _shortened(messages):
            ids, _ = self._tokens([*self._before_answers(kept), self._render(kept, prompt=True)])
            if len(ids) <= longest:
                return Prompt(ids, cut=len(kept) < len(messages))
        return Prompt(ids[-longest:], cut=True)

    def _show(self, messages: Messages) -> Shown:
        texts = [*self._before_answers(messages), self._render(messages, prompt=False)]
        ids, begins = self._tokens(texts)
        answers = []
        for n, i in enumerate(_answers(messages)):
            before, words, _ = texts[-1][len(texts[n]) :].partition(messages[i]["content"].strip())
            if not words:
                raise BadField("the chat template does not show the assistant's words as they are")
            if self._special.search(before):
                raise BadField("the chat template begins no answer when it is asked for a generation prompt")
            stop = next((p for p in range(begins[n], begins[n + 1]) if ids[p] in self._special_ids), None)
            if stop is None:
                raise BadField("the chat template ends an answer with no special token, where generation could stop")
            answers.append((begins[n], stop + 1))
        return Shown(ids, answers)

    def _before_answers(self, messages: Messages) -> list[str]:
        return [self._render(messages[:i], prompt=True) for i in _answers(messages)]

    def _render(self, messages: Messages, prompt: bool) -> str:
        for message in messages:
            special = self._special.search(message["content"])
            if special:
                raise BadField(f"a message holds {special[0]!r}, a special token, which only the template may write")
        try:
            return self.tokenizer.render(messages, prompt)
        except InputError:
            raise
        except Exception as error:  # a template is a program of somebody else
            raise BadField(f"the chat template fails: {str(error) or type(error).__name__}") from error

    def _tokens(self, texts: list[str]) -> tuple[list[int], list[int]]:
        """The tokens of the last text, and how many of them are each text's, each being the beginning of the next."""
        ids: list[int] = []
        counts = []
        before = ""
        for text, found in zip(texts, self.tokenizer.encode_batch(texts), strict=True):
            if not text.startswith(before):
                raise BadField("the chat template shows messages in another way once others follow")
            # Where a token would reach over the border the rest begins anew: generation begins there too.
            ids = found if found[: len(ids)] == ids else ids + self.tokenizer.encode(text[len(before) :])
            counts.append(len(ids))
            before = text
        return ids, counts


def _answers(messages: Messages) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _shortened(messages: Messages) -> Iterator[Messages]:
    """The messages, then the same without the oldest question and its answers, and so on; the system's stays.

    >>> system, user, assistant = ({"role": role, "content": "..."} for role in ("system", "user", "assistant"))
    >>> [len(kept) for kept in _shortened([system, user, assistant, user, assistant])]
    [5, 3]
    """
    yield messages
    head = list(messages[:1]) if messages[0]["role"] == "system" else []
    for i in range(1, len(messages)):
        if messages[i]["role"] == "user" and messages[i - 1]["role"] == "assistant":
            yield [*head, *messages[i:]]


@dataclass(frozen=True)
class Conversation:
    """Messages up to the last answer, where they stand in the files, and what is shown of them.

    >>> messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho "})
    >>> conversation = Conversation(messages, "a.jsonl:1", Shown([7, 8, 9, 2], [(2, 4)]))
    >>> conversation.source, conversation.target
    (({'role': 'user', 'content': 'Hi'},), 'Ho')
    """

    messages: Messages
    where: str
    shown: Shown

    @property
    def source(self) -> Messages:
        """What the last answer follows."""
        return self.messages[:-1]

    @property
    def target(self) -> str:
        """The last answer."""
        return self.messages[-1]["content"].strip()


def lengths(data: Data) -> tuple[int, int]:
    """The most tokens of a conversation, and of what is before an answer that has room for `data.max_target_length`.

    >>> lengths(Data(max_source_length=512, max_target_length=128)), lengths(Data(block=1024, max_target_length=128))
    ((640, 512), (1024, 896))
    """
    longest = data.block or data.max_source_length + data.max_target_length
    if longest < data.max_target_length + 2:
        answer = f"data.max_target_length = {data.max_target_length}"
        raise InputError(f"data.block: {longest} tokens have no room for a question and an answer of {answer}")
    return longest, longest - data.max_target_length


class Cut(NamedTuple):
    """How many conversations lost answers, how many answers that is, and how many conversations do not fit at all."""

    cut: int = 0
    answers: int = 0
    left_out: int = 0

    def told(self, count: int, longest: int) -> list[str]:
        """The same in words, of ``count`` conversations."""
        notes = []
        if self.cut:
            share = f"{self.cut / count:.1%}"
            notes.append(f"{self.cut:,} conversations ({share}) lost {self.answers:,} answers at {longest} tokens")
        if self.left_out:
            why = f"not even the last answer fits into {longest} tokens"
            notes.append(f"{self.left_out:,} conversations left out: {why}")
        return notes


def read(reader: Reader, template: Template, longest: int, limit: int = 0) -> tuple[list[Conversation], list[str]]:
    """The conversations of files, at most ``limit`` (0: all), and a line on what was cut; bad ones are bad lines."""
    found, told = read_counted(reader, template, longest, limit)
    if not found and reader.files:
        why = f"{told.left_out:,} are longer than {longest} tokens: set data.block" if told.left_out else reader.bad[0]
        raise InputError(f"{reader.files[0]}: no conversations; {why}")
    return found, told.told(len(found), longest)


def read_counted(reader: Reader, template: Template, longest: int, limit: int = 0) -> tuple[list[Conversation], Cut]:
    """The conversations of a reader, and what was cut."""
    found: list[Conversation] = []
    cut = answers = left_out = 0
    for record in reader:
        try:
            messages = checked_conversation(record.fields.get("messages"))
            shown = template.show(messages, longest)
        except BadField as error:
            reader.reject(record, str(error))
            continue
        if shown is None:
            left_out += 1
            continue
        lost = len(_answers(messages)) - len(shown.answers)
        cut, answers = cut + (lost > 0), answers + lost
        found.append(Conversation(messages, record.where, shown))
        if len(found) == limit:
            break
    return found, Cut(cut, answers, left_out)


class Chat:
    """What the assistant says, of conversations.

    >>> messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"})
    >>> talk = Conversation(messages, "a.jsonl:1", Shown([5, 6, 7, 2, 8], [(2, 4)]))
    >>> feature = Chat.of([talk], 384, end_id=2).feature(0, seed=0)
    >>> feature.inputs, feature.labels
    (array([5, 6, 7, 2]), array([-100,    7,    2, -100]))
    """

    words = 0

    def __init__(self, tokens: Ragged, said: Ragged, where: Sequence[str], end_id: int) -> None:
        self.tokens, self.said, self.where, self.end_id = tokens, said, where, end_id

    @classmethod
    def of(cls, conversations: Sequence[Conversation], vocab_size: int, end_id: int) -> Chat:
        """What is learned from these conversations."""
        tokens = Ragged.of([c.shown.ids for c in conversations], vocab_size)
        said = Ragged.of([_said(c.shown) for c in conversations], vocab_size=2)
        return cls(tokens, said, tuple(c.where for c in conversations), end_id)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        """A digest of every token and of what is learned."""
        return f"{self.tokens.digest}-{self.said.digest}"

    @property
    def longest(self) -> tuple[int, int]:
        return 0, self.tokens.longest - 1

    def sizes(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots that each conversation takes in both streams: the source's has none."""
        return np.zeros(len(index), dtype=np.int64), self.tokens.sizes(index) - 1

    def feature(self, i: int, seed: int) -> Feature:
        """Conversation ``i``."""
        ids = self.tokens[i].astype(np.int64)
        return Feature(np.zeros(0, np.int64), ids[:-1], np.where(self.said[i][1:], ids[1:], IGNORE))

    def tell(self, i: int) -> dict[str, str | list[int]]:
        """Where conversation ``i`` came from, and its tokens."""
        return {"where": self.where[i], "text": self.tokens[i].tolist()}


def _said(shown: Shown) -> np.ndarray:
    """Which tokens are the assistant's."""
    said = np.zeros(len(shown.ids), dtype=np.uint16)
    for start, stop in shown.answers:
        said[start:stop] = 1
    return said
