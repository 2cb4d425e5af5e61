"""Conversations: what is learned of them and what is not, by templates good and bad; trained, evaluated, generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from vocabularies import CHATML, WORDS
from vocabularies import chatting as tokenizer

import t2t
from t2t import cli, config, generate
from t2t.config import Config, Data, Generate
from t2t.data import chat, tokens
from t2t.data.chat import Chat, Template
from t2t.data.packing import IGNORE
from t2t.data.sources import Reader
from t2t.data.splits import read_splits
from t2t.data.tables import Splits
from t2t.data.tokens import Bytes
from t2t.errors import InputError
from t2t.generate import Loaded, Settings, read_settings
from t2t.generate.decode import decode
from t2t.models import load as models
from t2t.train import evaluate
from t2t.train.run import train

INST = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
)  # fmt: skip
# Forgets the first of four messages.
UNSTABLE = CHATML.replace("in messages", "in messages[-3:]")
# Answers to a last question have a thought before them, as those of models that reason.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GOOD = {"chatml": CHATML, "inst": INST, "system": DEFAULT_SYSTEM, "thinking": THINKING, "spaced": SPACED}
END = {"inst": "</s>", "spaced": "</s>"}


def talk(*texts: str, system: str = "") -> list[dict[str, str]]:
    """The user says a text, the assistant the next, and so on."""
    roles = ("user", "assistant") * len(texts)
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *said] if system else said


def write(file: Path, *conversations: Any) -> str:
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return str(file)


def splits(file: str, tokenizer: tokens.Tokenizer, kind: str = "causal", **data: Any) -> Splits:
    return read_splits(Data(train=(file,), **data), tokenizer, seed=1, kind=kind, start_id=1)


# What is learned


def some_talk(seed: int) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)
    pieces = [*WORDS.split(), "\n", "\n\n", " ", "ș", "日本", "<s>", "[INST]", "user:", "🙂", "."]
    texts = []
    for _ in range(2 * rng.integers(1, 5)):
        text = "".join(rng.choice(pieces, rng.integers(1, 9)))
        texts.append(text if text.strip() else "yes")
    return talk(*texts)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("name", GOOD)
def test_the_answers_are_learned_with_their_ends_and_nothing_is_lost(name: str, merges: bool) -> None:
    known = tokenizer(GOOD[name], merges)
    template = Template(known)
    for seed in range(25):
        messages = some_talk(seed)
        shown = template.show(messages)
        assert shown is not None
        whole = known.render(messages, prompt=False)
        assert known.inner.decode(shown.ids) == whole
        said = [known.inner.decode(shown.ids[start:stop]) for start, stop in shown.answers]
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        end = END.get(name, "<|im_end|>")
        if name == "inst":
            answers = [f" {text.strip()} " for text in answers]
        if name == "thinking":
            answers[-1] = f"<think>\n\n</think>\n\n{answers[-1]}"
        assert said == [text + end for text in answers]

        feature = Chat.of([chat.Conversation(messages, "x:1", shown)], known.vocab_size, template.end_id).feature(0, 0)
        learned = feature.labels != IGNORE
        assert [*feature.inputs.tolist(), shown.ids[-1]] == shown.ids
        assert known.inner.decode(feature.labels[learned]) == "".join(said)
        rest = [shown.ids[0], *np.array(shown.ids)[1:][~learned].tolist()]
        parts, place = [], 0
        for start, stop in shown.answers:
            parts, place = [*parts, *shown.ids[place:start]], stop
        assert rest == [*parts, *shown.ids[place:]]


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("name", GOOD)
def test_generation_begins_with_the_tokens_that_training_saw(name: str, merges: bool) -> None:
    template = Template(tokenizer(GOOD[name], merges))
    for seed in range(25):
        messages = some_talk(seed)
        shown = template.show(messages)
        assert shown is not None
        before = shown.ids[: shown.answers[-1][0]]
        assert template.prompt(messages[:-1], longest=10_000) == (before, False)
        assert template.prompt(chat.checked_question(messages), longest=10_000) == (before, False)


def test_an_answer_may_follow_an_answer() -> None:
    template = Template(tokenizer(CHATML))
    messages = [*talk("a", "b"), {"role": "assistant", "content": "c"}]
    shown = template.show(messages)
    assert shown is not None and len(shown.answers) == 2
    source = chat.Conversation(messages, "x:1", shown).source
    assert template.prompt(source, 1000).ids == shown.ids[: shown.answers[-1][0]]


def test_tokens_are_those_of_transformers_where_no_token_crosses_a_border() -> None:
    known = tokenizer(CHATML, merges=True)
    messages = talk("hello there", "the cat", "and the dog", "sat on the mat", system="the answer")
    shown = Template(known).show(messages)
    assert shown is not None
    assert shown.ids == known.inner.apply_chat_template(messages)["input_ids"]
    assert len(shown.ids) < len("".join(m["content"] for m in messages))  # merges did something


def test_a_token_that_would_cross_a_border_is_parted() -> None:
    known = tokenizer(CHATML, merges=True)
    messages = talk("hello", "\n\nthe cat")
    assert known.encode("\n\n\n") != known.encode("\n") + known.encode("\n\n")  # or nothing would cross
    shown = Template(known).show(messages)
    assert shown is not None
    assert shown.ids != known.inner.apply_chat_template(messages)["input_ids"]
    ((start, stop),) = shown.answers
    assert known.inner.decode(shown.ids[start:stop]) == "\n\nthe cat<|im_end|>"


def test_a_default_system_message_is_shown_and_not_learned() -> None:
    known = tokenizer(DEFAULT_SYSTEM)
    shown = Template(known).show(talk("a", "b"))
    assert shown is not None
    assert known.inner.decode(shown.ids).startswith("<|im_start|>system\nBe kind.<|im_end|>")
    other = Template(known).show(talk("a", "b", system="Be brief."))
    assert other is not None and "kind" not in known.inner.decode(other.ids)


# Lengths


def test_the_oldest_turns_give_way_and_the_system_message_stays(tmp_path: Path) -> None:
    known = tokenizer(CHATML)
    template = Template(known)
    long = talk("q1", "a1", "q2", "a2", "q3", "a3", system="s")
    whole, two, one = (template.show(m) for m in (long, [long[0], *long[3:]], [long[0], *long[5:]]))
    assert whole and two and one
    for longest in range(len(one.ids) - 1, len(whole.ids) + 1):
        found = template.show(long, longest)
        fits = [shown for shown in (whole, two, one) if len(shown.ids) <= longest]
        assert found == (fits[0] if fits else None)

    file = write(tmp_path / "a.jsonl", long, talk("q", "a"), talk("q", "x" * 100))
    found = splits(file, known, block=len(two.ids), max_target_length=8)
    assert isinstance(found.train, Chat)
    assert found.train.tokens[0].tolist() == two.ids
    assert tuple(found.train.where) == (f"{file}:1", f"{file}:2")
    assert found.notes == (
        f"data.train: 1 conversations (50.0%) lost 1 answers at {len(two.ids)} tokens",
        f"data.train: 1 conversations left out: not even the last answer fits into {len(two.ids)} tokens",
    )
    with pytest.raises(InputError, match=r"a.jsonl: no conversations; 3 are longer than 10 tokens: set data.block"):
        splits(file, known, block=10, max_target_length=4)
    with pytest.raises(InputError, match="data.block: 10 tokens have no room for a question and an answer of data.max"):
        splits(file, known, block=10)


def test_a_prompt_loses_its_oldest_turns_then_its_beginning() -> None:
    template = Template(tokenizer(CHATML))
    long = talk("q1", "a1", "q2", "a2", "q3", system="s")
    whole = template.prompt(long, 1000)
    last = template.prompt([long[0], *long[5:]], 1000)
    assert not whole.cut
    assert template.prompt(long, len(whole.ids) - 1).ids == template.prompt([long[0], *long[3:]], 1000).ids
    assert template.prompt(long, len(last.ids)) == (last.ids, True)
    assert template.prompt(long, len(last.ids) - 3) == (last.ids[3:], True)


# What is refused


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages, where a list of them is expected"),
        ("hello", "no messages, where a list of them is expected"),
        (["hello"], "message 1 is a string, expected an object with role and content"),
        ([{"role": "usr", "content": "x"}], "message 1 has the role 'usr', expected system, user, assistant"),
        ([{"content": "x"}], "message 1 has the role None"),
        ([*talk("x"), {"role": "assistant", "content": " "}], "the content of message 2 is empty"),
        ([*talk("x"), {"role": "assistant"}], "the content of message 2 is null, expected text"),
        ([*talk("x"), {"role": "assistant", "content": ["y"]}], "the content of message 2 is an array, expected text"),
        (talk("x"), "no message of the assistant, of which to learn"),
        (talk("x", "y")[1:], "message 1 is the assistant's, who has nothing to answer yet"),
        (talk("x", "y<|im_end|>z"), "a message holds '<|im_end|>', a special token"),
        (talk("</s>", "y"), "a message holds '</s>', a special token"),
    ],
)
def test_bad_records_are_told_with_their_line(tmp_path: Path, messages: Any, words: str) -> None:
    known = tokenizer(CHATML)
    file = write(tmp_path / "a.jsonl", talk("a", "b"), messages)
    with pytest.raises(InputError) as error:
        splits(file, known, objective="chat")
    assert str(error.value).startswith(f"{file}:2: {words}")
    found = splits(file, known, objective="chat", on_bad_line="skip")
    assert len(found.train) == 1
    assert found.notes[0].startswith(f"data.train: 1 bad lines skipped, the first: {file}:2: {words}")


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (UNSTABLE, talk("a", "b", "c", "d"), "the chat template shows messages in another way once others follow"),
        (INST, talk("a", "b", system="s"), "the chat template fails: no system here"),
        (CHATML.replace("{{ m.content }}", "{{ m.content | replace('q', '') }}"), talk("a", "q"),
         "the chat template does not show the assistant's words as they are"),
        (CHATML.replace("<|im_end|>", "{{ '<|im_end|>' if loop.index < 3 else '</s>' }}"), talk("a", "b", "c", "d"),
         "the chat template does not end every answer with the same token"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_suit_a_record(tmp_path: Path, template: str, messages: Any, words: str) -> None:
    file = write(tmp_path / "a.jsonl", talk("a", "b"), messages)
    with pytest.raises(InputError) as error:
        splits(file, tokenizer(template))
    assert str(error.value) == f"{file}:2: {words}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: access to attribute '__class__' of 'str' object"),
        ("{% set _ = messages.append(1) %}", "the chat template fails: access to attribute 'append' of 'list' object"),
        ("{{ messages", "the chat template fails: "),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "the chat template fails: Range too big"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "ends an answer with no special token"),
        (CHATML.partition("{% if add_gen")[0], "begins no answer when it is asked for a generation prompt"),
        ("{% for m in messages %}{{ loop.length }}{{ m.content }}</s>{% endfor %}", "in another way once others"),
    ],
)  # fmt: skip
def test_a_template_that_suits_nothing(template: str | None, words: str) -> None:
    with pytest.raises(InputError, match="model.tokenizer: ") as error:
        Template(tokenizer(template))
    assert words in str(error.value)


def test_bytes_have_no_template() -> None:
    with pytest.raises(InputError, match="model.tokenizer: has no chat template"):
        Template(Bytes())


def test_chat_is_told_by_the_record_and_for_causal_models_alone(tmp_path: Path) -> None:
    known = tokenizer(CHATML)
    file = write(tmp_path / "a.jsonl", talk("a", "b"))
    assert isinstance(splits(file, known).train, Chat)
    for objective in ("auto", "chat"):
        with pytest.raises(InputError, match="data.objective: chat is for causal models, this one is seq2seq"):
            splits(file, known, kind="seq2seq", objective=objective)
    with pytest.raises(InputError, match=r'a.jsonl:1: holds chat messages: data.objective = "chat" is for them'):
        splits(file, known, objective="pairs")
    both = tmp_path / "both.jsonl"
    both.write_text(json.dumps({"messages": talk("a", "b"), "x": "1", "y": "2"}) + "\n")
    assert not isinstance(splits(str(both), known, source="x", target="y").train, Chat)
    for key, value in (("prefix", "x"), ("source_transforms", ("lower",)), ("template", "{source}{target}")):
        with pytest.raises(InputError, match=f"data.{key}: is for pairs"):
            splits(file, known, **{key: value})


def test_parquet_holds_conversations_too(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    known = tokenizer(CHATML)
    conversations = [talk("a", "b", system="s"), talk("c", "d", "e", "f")]
    jsonl = write(tmp_path / "a.jsonl", *conversations)
    parquet.write_table(pyarrow.table({"messages": conversations}), tmp_path / "a.parquet")
    found = splits(str(tmp_path / "a.parquet"), known).train
    assert len(found) == 2
    assert found.fingerprint == splits(jsonl, known).train.fingerprint


def test_the_fingerprint_knows_tokens_and_what_is_learned() -> None:
    messages = talk("a", "b")

    def fingerprint(*shown: chat.Shown) -> str:
        return Chat.of([chat.Conversation(messages, "x:1", s) for s in shown], 384, end_id=2).fingerprint

    one = chat.Shown([5, 6, 7, 2], [(2, 4)])
    others = [[one, one], [chat.Shown([5, 6, 8, 2], [(2, 4)])], [chat.Shown([5, 6, 7, 2], [(1, 4)])]]
    assert len({fingerprint(one), *(fingerprint(*other) for other in others)}) == 4


# Whole runs

RAW = {
    "model_type": "gpt2",
    "vocab_size": 260,
    "n_positions": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ANSWERS = {"who?": "the cat", "where?": "on the mat"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of a tiny GPT-2 that learned two answers."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer(CHATML).save(folder)
    (folder / "config.json").write_text(json.dumps(RAW))
    talks = [talk(q, a) for q, a in ANSWERS.items()]
    write(folder / "chats.jsonl", *talks, [*talks[0], *talks[1]], [*talks[1], *talks[0]])
    settings = tiny.settings(
        folder,
        model__tokenizer=str(folder),
        model__dropout="0",
        data__train=str(folder / "chats.jsonl"),
        data__validation=str(folder / "chats.jsonl"),
        data__block="96",
        data__max_target_length="16",
        train__batch="4",
        train__steps="60",
        train__metrics="exact_match",
        checkpoint__every="0",
    )
    chosen = config.load(overrides=settings)
    figures = train(chosen, tiny.quiet)
    assert figures["validation_exact_match"] == 1
    return chosen


def test_two_answers_are_learned_and_said(trained: Config) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained.run_dir / "model"
    assert read_settings(folder).chat
    assert read_settings(folder).max_source_length == 80
    loaded = t2t.load(folder, "cpu")
    questions = list(ANSWERS)
    assert loaded.generate(questions) == list(ANSWERS.values())
    assert loaded.generate(questions, beams=3) == list(ANSWERS.values())
    follow_up = [*talk(questions[0], ANSWERS[questions[0]]), *talk(questions[1])]
    assert loaded.generate([follow_up, talk(questions[0], "an answer that is given anew")]) == ["on the mat", "the cat"]

    # transformers, told nothing but the folder, says the same and stops where we stop.
    peer, words = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompt = words.apply_chat_template(talk("who?"), add_generation_prompt=True, return_tensors="pt")
    said = peer.generate(**prompt)[0, prompt["input_ids"].shape[1] :]
    assert words.decode(said) == "the cat<|im_end|>"


def test_generation_stops_at_the_end_of_a_turn(trained: Config) -> None:
    loaded = t2t.load(trained.run_dir / "model", "cpu")
    prompt = torch.tensor([Template(loaded.tokenizer).prompt(talk("who?"), 80).ids])
    wanted = [*loaded.tokenizer.encode("the cat<|im_end|>"), *[0] * 5]
    for beams in (1, 2):
        found = decode(loaded.model, prompt, torch.ones_like(prompt), Generate(beams=beams), len(wanted))
        assert found.tokens.tolist() == [wanted]
    loaded.model.stops = ()
    assert decode(loaded.model, prompt, torch.ones_like(prompt), Generate(), len(wanted)).tokens.tolist() != [wanted]


def test_the_predictions_are_the_last_answers(trained: Config) -> None:
    (file,) = (trained.run_dir / "predictions").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["reference"] for row in rows] == ["the cat", "on the mat", "on the mat", "the cat"]
    assert [row["prediction"] for row in rows] == [row["reference"] for row in rows]
    assert rows[2]["source"] == [*talk("who?", "the cat"), *talk("where?")]


def test_a_finished_model_is_evaluated_on_chats(trained: Config, tmp_path: Path) -> None:
    folder, device = str(trained.run_dir / "model"), {"run.device": "cpu"}
    found = evaluate.evaluate(folder, trained.data.train, ["exact_match"], device)
    assert found["exact_match"] == 1
    assert found["loss"] < 0.1
    wrong = write(tmp_path / "wrong.jsonl", talk("who?", "the cat", "where?", "nowhere"))
    other = evaluate.evaluate(folder, [wrong], ["exact_match"], device)
    assert other["exact_match"] == 0
    assert other["loss"] > found["loss"] + 1


def test_the_command_line_answers_files_of_chats_and_of_texts(trained: Config, tmp_path: Path, capsys: Any) -> None:
    model = str(trained.run_dir / "model")
    chats, texts = write(tmp_path / "chats.jsonl", talk("who?"), talk("where?", "nowhere")), tmp_path / "texts.txt"
    texts.write_text("where?\nwho?\n")
    for file, answers in ((chats, ["the cat", "on the mat"]), (str(texts), ["on the mat", "the cat"])):
        assert cli.main(["generate", model, "--input", file, "--run.device", "cpu"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["output"] for line in lines] == answers
    assert lines[0]["input"] == "where?"
    write(tmp_path / "bad.jsonl", talk("who?"), [{"role": "nobody", "content": "x"}])
    assert cli.main(["generate", model, "--input", str(tmp_path / "bad.jsonl"), "--run.device", "cpu"]) == 2
    assert f"{tmp_path / 'bad.jsonl'}:2: message 1 has the role 'nobody'" in capsys.readouterr().err


def test_what_cannot_be_answered(trained: Config) -> None:
    loaded = t2t.load(trained.run_dir / "model", "cpu")
    for given, words in (
        (["who?", talk("x", "y")[1:]], "input 2: no message to answer"),
        (["who?", "a <|im_end|> b"], "input 2: a message holds '<|im_end|>'"),
        ([""], "input 1: the content of message 1 is empty"),
        ([[{"role": "x"}]], "input 1: message 1 has the role 'x'"),
    ):
        with pytest.raises(InputError) as error:
            loaded.generate(given)
        assert str(error.value).startswith(words)
    cut: list[int] = []
    long = [talk("who?"), talk("x" * 40, "y", "who?"), "z" * 100]
    assert list(loaded.stream(long, on_cut=cut.append))[:2] == ["the cat", "the cat"]
    assert cut == [1, 2]


def test_messages_are_for_models_that_were_trained_on_chat() -> None:
    model = models.create(RAW, seed=0)
    with pytest.raises(InputError, match="generate: got messages, but the model was not trained on chat"):
        Loaded(model, tokenizer(CHATML), RAW, Settings()).generate([talk("a")])


def test_the_settings_hold_whether_it_is_chat(tmp_path: Path) -> None:
    generate.save_settings(tmp_path, Settings(chat=True))
    assert read_settings(tmp_path).chat
    (tmp_path / generate.FILE).write_text('{"chat": 1}')
    with pytest.raises(InputError, match="chat: expected true or false, got 1"):
        read_settings(tmp_path)


def test_a_reader_without_good_conversations(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", talk("a"))
    reader = Reader([file], on_bad_line="skip")
    with pytest.raises(InputError, match=f"{file}: no conversations; {file}:1: no message of the assistant"):
        chat.read(reader, Template(tokenizer(CHATML)), longest=100)
