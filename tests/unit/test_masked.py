"""BERT's objectives: nothing is lost, shares are as published, partners come from where they should; and whole runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import gradients
from vocabularies import letters

from t2t import config
from t2t import device as devices
from t2t.cli import main
from t2t.config import Config, Data
from t2t.data import tokens
from t2t.data.loader import Loader, pick_shape, prediction_slots
from t2t.data.masked import Masked, MaskedLM, Masking, NextSentence, most_predictions
from t2t.data.packing import IGNORE, Feature, RowShape
from t2t.data.ragged import Ragged
from t2t.data.splits import read_splits
from t2t.data.text import Documents
from t2t.data.tokens import Bytes, Marks
from t2t.errors import InputError
from t2t.models import load as models
from t2t.train import evaluate
from t2t.train.run import train
from t2t.train.step import batch_loss

CLS, SEP, MASK, FIRST, VOCABULARY = 2, 3, 4, 10, 6000
MARKS = Marks(CLS, SEP, MASK, np.arange(VOCABULARY) >= FIRST, np.arange(VOCABULARY) % 3 == 2)


def some(seed: int, documents: int = 12) -> tuple[Documents, np.ndarray]:
    """Documents in which every token is another, so that each tells its place, and where their sentences end."""
    rng = np.random.default_rng(seed)
    texts = [[int(rng.integers(1, 30)) for _ in range(rng.integers(1, 15))] for _ in range(documents)]
    lengths = [sum(sentences) for sentences in texts]
    ids = np.arange(FIRST, FIRST + sum(lengths))
    where = tuple(f"a.txt:{i}" for i in range(documents))
    made = Documents(Ragged.of(np.split(ids, np.cumsum(lengths)[:-1]), VOCABULARY), where, words=0)
    return made, np.cumsum([length for sentences in texts for length in sentences])


def original(feature: Feature) -> np.ndarray:
    return np.where(feature.labels != IGNORE, feature.labels, feature.inputs)


def sides(feature: Feature) -> tuple[np.ndarray, np.ndarray]:
    """The two texts of a pair, unmasked, and its marks checked."""
    whole, types = original(feature), feature.types
    assert types is not None and (np.diff(types) >= 0).all()
    cut = int((types == 0).sum())
    assert whole[0] == CLS and whole[cut - 1] == SEP and whole[-1] == SEP
    return whole[1 : cut - 1], whole[cut:-1]


# Masked tokens


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("longest", [8, 40, 128])
def test_every_token_of_a_document_is_in_one_piece(longest: int, whole_words: bool) -> None:
    documents, _ = some(1)
    examples = MaskedLM(documents, Masking(MARKS, most_predictions(longest), whole_words), longest)
    rebuilt, sizes = [], examples.sizes(np.arange(len(examples)))[1]
    for i in range(len(examples)):
        feature = examples.feature(i, seed=i)
        text = original(feature)
        assert (text[0], text[-1], len(text)) == (CLS, SEP, sizes[i])
        assert len(text) <= longest
        assert 0 <= feature.predicted <= examples.predictions
        assert whole_words or feature.predicted == max(1, round(0.15 * len(text)))
        assert (np.diff(text[1:-1]) == 1).all()
        assert documents.tokens[examples.document(i)][0] <= text[1]
        assert examples.tell(i)["text"] == text[1:-1].tolist()
        rebuilt += text[1:-1].tolist()
    assert rebuilt == documents.tokens.tokens(0, documents.tokens.total).tolist()


def test_the_shares_are_those_of_the_paper() -> None:
    tokens = np.concatenate([[CLS], np.arange(FIRST, FIRST + 126), [SEP]])
    masking, counts, spread = Masking(MARKS, most=20), np.zeros(4), np.zeros(128)
    for seed in range(3000):
        inputs, labels = masking(tokens, np.random.default_rng(seed))
        chosen = labels != IGNORE
        assert (inputs[~chosen] == tokens[~chosen]).all() and (labels[chosen] == tokens[chosen]).all()
        assert not chosen[[0, -1]].any()
        masked, kept = inputs[chosen] == MASK, inputs[chosen] == tokens[chosen]
        assert MARKS.ordinary[inputs[chosen][~masked]].all()
        counts += chosen.sum(), masked.sum(), kept.sum(), (~masked & ~kept).sum()
        spread += chosen
    assert counts[0] / (3000 * 128) == pytest.approx(0.15, rel=0.02)
    assert (counts[1:] / counts[0]).tolist() == pytest.approx([0.8, 0.1, 0.1], abs=0.01)
    assert spread[1:-1] / 3000 == pytest.approx(np.full(126, 19 / 126), abs=0.04)  # every place alike


def test_special_tokens_inside_a_text_are_never_masked() -> None:
    tokens = np.array([CLS, 20, SEP, MASK, 21, 1, 22, SEP])
    seen = set()
    for seed in range(100):
        inputs, labels = Masking(MARKS, most=20)(tokens, np.random.default_rng(seed))
        seen |= set(np.flatnonzero(labels != IGNORE).tolist())
        assert (inputs[[0, 2, 3, 5, 7]] == tokens[[0, 2, 3, 5, 7]]).all()
    assert seen == {1, 4, 6}


def test_whole_words_are_taken_or_left() -> None:
    tokens = np.concatenate([[CLS], 12 + np.tile([0, 2, 5], 30), [14, SEP, 14, 12, SEP]])  # words of 1, 2 or 3 pieces
    continues = MARKS.continues
    assert continues is not None
    words = [[1]]
    for place in range(2, len(tokens)):
        if tokens[place] == SEP:
            continue
        joined = continues[tokens[place]] and tokens[place - 1] != SEP
        words[-1].append(place) if joined else words.append([place])
    assert {len(word) for word in words} == {1, 3, 4}
    total = 0
    for seed in range(200):
        labels = Masking(MARKS, most=20, whole_words=True)(tokens, np.random.default_rng(seed))[1]
        chosen = set(np.flatnonzero(labels != IGNORE).tolist())
        assert all(chosen.issuperset(word) or chosen.isdisjoint(word) for word in words)
        total += len(chosen)
        assert len(chosen) <= 14
    assert total / 200 > 13
    with pytest.raises(InputError, match="data.whole_words: this tokenizer's tokens do not tell"):
        Masking(Marks(CLS, SEP, MASK, MARKS.ordinary, None), most=20, whole_words=True)


def test_the_seed_decides() -> None:
    documents, sentences = some(2)
    for examples in (
        MaskedLM(documents, Masking(MARKS, 20), 128),
        NextSentence(documents, sentences, Masking(MARKS, 20), 128),
    ):
        one, same, other = (examples.feature(3, seed).inputs.tolist() for seed in (5, 5, 6))
        assert one == same != other


# Pairs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("longest", [8, 48, 128])
def test_every_sentence_is_used_and_partners_come_from_where_the_label_says(seed: int, longest: int) -> None:
    documents, sentences = some(seed)
    examples = NextSentence(documents, sentences, Masking(MARKS, 20), longest)
    offsets = np.append(0, np.cumsum(documents.tokens.lengths))
    assert examples.starts[0] == 0 and (examples.starts[1:] == examples.stops[:-1]).all()
    assert examples.stops[-1] == offsets[-1]  # passages are all of the text, each token once
    for start, stop in zip(examples.starts, examples.stops, strict=True):  # of whole sentences, or inside one
        assert stop in sentences or not ((sentences > start) & (sentences < stop)).any()

    def document(token: int) -> int:
        return int(np.searchsorted(offsets, token - FIRST, side="right")) - 1

    followed, drawn, sizes = 0, 0, examples.sizes(np.arange(len(examples)))[1]
    for i in range(len(examples)):
        for draw in range(6):
            feature = examples.feature(i, seed=100 * i + draw)
            first, second = sides(feature)
            own = examples.passage(i).tolist()
            assert own in (first.tolist(), second.tolist())
            assert len(first) and len(second)
            assert len(feature.inputs) <= sizes[i] <= longest
            assert {document(t) for t in first} | {document(t) for t in second} >= {examples.document(i)}
            assert len({document(t) for t in first}) == len({document(t) for t in second}) == 1
            if feature.pair == 0:
                assert (np.diff(np.concatenate([first, second])) == 1).all()
                followed += 1
            else:
                assert feature.pair == 1
                assert document(first[0]) != document(second[0])
                drawn += 1
    assert followed and drawn


def test_half_of_the_partners_follow_and_most_pairs_are_full() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 20, 400)
    ids = np.arange(FIRST, FIRST + lengths.sum())
    bounds = np.cumsum(lengths)
    documents = Documents(Ragged.of(np.split(ids, bounds[[99, 199, 299]]), VOCABULARY), ("",) * 4, words=0)
    examples = NextSentence(documents, bounds, Masking(MARKS, 20), 128)
    features = [examples.feature(i, seed) for i in range(len(examples)) for seed in range(40)]
    assert np.mean([f.pair for f in features]) == pytest.approx(0.5, abs=0.03)
    sizes = np.array([len(f.inputs) for f in features])
    assert np.mean(sizes == 128) > 0.8
    short = np.mean(examples.most < 125)
    assert short == pytest.approx(0.1, abs=0.08)
    # Where a partner comes from says nothing about the label: the beginnings of documents are never second.
    beginnings = set((examples.offsets[:-1] + FIRST).tolist())
    assert not any(sides(f)[1][0] in beginnings for f in features)


def test_documents_of_one_sentence_have_no_next() -> None:
    documents = Documents(Ragged.of([[10, 11], [12]], VOCABULARY), ("", ""), words=0)
    examples = NextSentence(documents, np.array([2, 3]), Masking(MARKS, 20), 16)
    assert {examples.feature(i, seed).pair for i in range(2) for seed in range(20)} == {1}
    with pytest.raises(InputError, match="masked_lm_nsp needs two documents or more"):
        NextSentence(Documents(Ragged.of([[10], []], VOCABULARY), ("", ""), 0), np.array([1]), Masking(MARKS, 20), 16)


# A fixed number of slots for the head

TINY: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 64, "max_position_embeddings": 512, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


def shape(row: int) -> RowShape:
    return RowShape(0, row, 1.0, 1.0, 1.0, 1.0)


def small(seed: int) -> NextSentence:
    """Pairs in the 64 tokens of the tiny model."""
    documents, sentences = some(seed)
    folded = Ragged.of((documents.tokens[i] % 50 + FIRST for i in range(len(documents))), VOCABULARY)
    return NextSentence(Documents(folded, documents.where, 0), sentences, Masking(marks_of(64), 8), 48)


def marks_of(size: int) -> Marks:
    return Marks(CLS, SEP, MASK, np.arange(size) >= FIRST, None)


def test_static_rows_tell_the_same_number_of_slots_and_all_labels() -> None:
    examples = small(1)
    loader = Loader(examples, 16, shape(96), micro_rows=4, seed=1, pad_id=0)
    assert loader.predictions == prediction_slots(7, 96) == 16
    for batch in (batch for step in range(loader.steps_per_epoch) for batch in loader.step(step)):
        assert batch.predicted is not None and batch.predicted.shape == (4, 16)
        assert (np.diff(np.sort(batch.predicted)) > 0).all()
        assert (np.take_along_axis(batch.labels, batch.predicted, 1) != IGNORE).sum() == batch.counts[0]
    flat = Loader(examples, 16, shape(48), micro_rows=4, seed=1, pad_id=0, static=False)
    for step in range(loader.steps_per_epoch):
        ours = flat.step(step)
        assert all(b.predicted is not None and b.predicted.shape == (1, b.counts[0]) for b in ours)
        assert sum(b.counts for b in ours).tolist() == sum(b.counts for b in loader.step(step)).tolist()


def test_rows_are_not_filled_beyond_their_slots_for_labels() -> None:
    documents = Documents(Ragged.of([[20]] * 100, 64), ("",) * 100, words=0)
    examples = MaskedLM(documents, Masking(marks_of(64), 20), 128)  # a label for every three slots
    batches = Loader(examples, 100, shape(128), micro_rows=2, seed=1, pad_id=0).step(0)
    assert {b.predicted.shape for b in batches if b.predicted is not None} == {(2, 24)}
    assert sum(int(b.counts[0]) for b in batches) == 100


@pytest.mark.parametrize("static", [False, True])
def test_the_slots_give_the_dense_loss_and_gradients(static: bool) -> None:
    model = models.create(TINY, seed=0).double().eval()
    examples = small(2)
    batches = Loader(examples, 12, shape(96), micro_rows=4, seed=1, pad_id=0, static=static).step(0)
    for batch in batches:
        dense = dataclasses.replace(batch, predicted=None)
        (some_sums, some_each), (sums, each) = batch_loss(model, batch), batch_loss(model, dense)
        torch.testing.assert_close(some_sums, sums, rtol=1e-12, atol=0)
        torch.testing.assert_close(some_each, each, rtol=1e-12, atol=1e-14)
        one, two = gradients(model, some_sums.sum()), gradients(model, sums.sum())
        for name in one:
            torch.testing.assert_close(one[name], two[name], rtol=1e-10, atol=1e-13, msg=name)


def test_rows_are_picked_for_a_model_without_a_source() -> None:
    examples = small(3)
    cost = models.architecture(TINY)[1].row_cost
    picked = pick_shape(examples, Data(), 16, cost, seed=1)
    assert picked.source_row == 0 and picked.target_row >= 48
    assert picked.fill == picked.target_fill > 0.8


# From files


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return letters(tmp_path / "tokenizer")


def test_ids_and_words_are_told_by_the_tokenizer(tokenizer: Path) -> None:
    loaded = tokens.load(str(tokenizer))
    marks = loaded.marks
    assert marks is not None and marks.continues is not None
    assert (marks.cls, marks.sep, marks.mask, loaded.pad_id) == (2, 3, 4, 0)
    assert np.flatnonzero(~marks.ordinary).tolist() == [0, 1, 2, 3, 4]
    assert marks.continues[loaded.encode("ab c")].tolist() == [False, True, False]
    assert Bytes().marks is None


@pytest.fixture
def make(tmp_path: Path, tokenizer: Path) -> Callable[..., Config]:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    text = [[" ".join(words[(d + s + w) % 7] for w in range(3)) for s in range(5)] for d in range(14)]
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(lines) for lines in text) + "\n")

    def make(name: str = "run", **overrides: str) -> Config:
        base = {
            "run.dir": str(tmp_path / name),
            "run.device": "cpu",
            "run.threads": "1",
            "model.config": str(tmp_path / "config.json"),
            "model.tokenizer": str(tokenizer),
            "model.dropout": "0",
            "data.train": str(tmp_path / "text.txt"),
            "data.validation_split": "0.2",
            "data.max_source_length": "48",
            "train.batch": "16",
            "train.steps": "4",
            "train.log_every": "1",
            "optim.lr": "0.01",
        }
        return config.load(overrides=base | {key.replace("__", "."): value for key, value in overrides.items()})

    return make


def quiet(line: str) -> None:
    pass


def test_plain_text_is_masked_for_a_masked_model_and_documents_stay_apart(make: Callable[..., Config]) -> None:
    chosen = make()
    loaded = tokens.load(chosen.model.tokenizer)
    splits = read_splits(chosen.data, loaded, seed=1, kind="masked")
    assert isinstance(splits.train, MaskedLM) and isinstance(splits.validation, MaskedLM)
    assert (len(splits.train.documents), len(splits.validation.documents)) == (11, 3)
    chosen = make(data__objective="masked_lm_nsp")
    pairs = read_splits(chosen.data, loaded, seed=1, kind="masked").train
    assert isinstance(pairs, NextSentence) and isinstance(pairs, Masked)
    assert pairs.documents.tokens.digest == splits.train.documents.tokens.digest


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__tokenizer": "bytes"}, "data.objective: masked_lm needs a tokenizer with the special tokens"),
        ({"data__objective": "lm"}, "data.objective: lm is for causal models, this one is masked"),
        ({"data__max_source_length": "7"}, "data.max_source_length: must be 8 or more for masked_lm, got 7"),
        (
            {"data__block": "513", "data__objective": "masked_lm_nsp"},
            "data: an example takes 513 positions; the model has 512",
        ),
        ({"train__metrics": "bleu"}, "train.metrics: compares generated text"),
    ],
)
def test_what_cannot_be(make: Callable[..., Config], overrides: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(make(**overrides), quiet)


def test_static_shapes_train_as_rows_of_any_length_do(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = train(make("free", data__objective="masked_lm_nsp"), quiet)
    monkeypatch.setattr(devices, "static_shapes", lambda device: True)
    static = train(make("static", data__objective="masked_lm_nsp", train__micro_rows="3"), quiet)
    for name in ("loss", "validation_loss", "validation_masked_accuracy", "validation_next_sentence_accuracy"):
        assert static[name] == pytest.approx(free[name], rel=1e-4), name


def test_figures_of_both_losses_during_training_and_afterwards(
    make: Callable[..., Config], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    short = train(make("short", data__objective="masked_lm_nsp", train__steps="1"), quiet)
    chosen = make(data__objective="masked_lm_nsp", train__steps="60", train__best="masked_accuracy", optim__warmup="5")
    figures = train(chosen, quiet)
    assert figures["validation_masked_accuracy"] > 3 * short["validation_masked_accuracy"]
    assert 0 <= figures["validation_next_sentence_accuracy"] <= 1
    both = figures["validation_masked_loss"] + figures["validation_next_sentence_loss"]
    assert figures["validation_loss"] == pytest.approx(both)
    arguments = ["evaluate", str(chosen.run_dir / "model"), str(tmp_path / "text.txt"), "--json", "--run.device", "cpu"]
    assert main([*arguments, "--data.objective", "masked_lm_nsp"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["masked_accuracy"] == pytest.approx(figures["validation_masked_accuracy"], abs=0.15)
    names = ["loss", "masked_loss", "masked_accuracy", "next_sentence_loss", "next_sentence_accuracy"]
    assert list(found) == names
    assert main(arguments) == 0
    assert list(json.loads(capsys.readouterr().out)) == names[:3]
    assert main([*arguments, "--metrics", "bleu"]) == 2
    assert "plain text has none" in capsys.readouterr().err


def test_accuracy_counts_the_likeliest_token() -> None:
    model, examples = models.create(TINY, seed=0).eval(), small(4)
    loader = Loader(examples, 16, shape(96), micro_rows=2, seed=1, pad_id=0, static=False)
    right = np.zeros(2)
    counts = np.zeros(2)
    for batch in (batch for step in range(loader.steps_per_epoch) for batch in loader.step(step)):
        ids, segments, places, types = map(
            torch.from_numpy, (batch.target_ids, batch.target_segments, batch.target_positions, batch.target_types)
        )
        hidden = model(ids, segments, places, types)
        said = (model.cls.predictions.transform(hidden) @ model.head.T + model.cls.predictions.bias).argmax(-1)
        first = torch.from_numpy(np.flatnonzero(batch.target_positions[0] == 0))
        pooled = torch.tanh(model.bert.pooler.dense(hidden[0, first]))
        follows = model.cls.seq_relationship(pooled).argmax(-1).numpy()
        assert batch.pair_labels is not None
        right += (said.numpy() == batch.labels).sum(), (follows == batch.pair_labels[0]).sum()
        counts += batch.counts
    figures = evaluate.loss(model, loader)
    assert figures["masked_accuracy"] == pytest.approx(right[0] / counts[0])
    assert figures["next_sentence_accuracy"] == pytest.approx(right[1] / counts[1])


# The recipes


def flags(**overrides: str) -> list[str]:
    return [word for key, value in overrides.items() for word in (f"--{key.replace('__', '.')}", value)]


def test_both_phases_of_pretraining(make: Callable[..., Config], tmp_path: Path) -> None:
    """Phase 1, stopped and resumed, is the uninterrupted run; phase 2 goes on from its folder with longer texts."""
    chosen = make()
    common = {"data__train": str(tmp_path / "text.txt"), "train__batch": "4", "run__device": "cpu", "run__threads": "1"}
    scratch = {"model__config": chosen.model.config, "model__tokenizer": chosen.model.tokenizer}
    toy = common | {"train__steps": "4", "train__log_every": "1", "checkpoint__every": "2"}
    for name, stop in (("whole", "0"), ("parts", "2"), ("parts", "0")):
        run = flags(**toy, **scratch, run__dir=str(tmp_path / name), train__stop_at=stop)
        assert main(["train", "bert-pretrain-1", *run]) == 0
    whole, parts = (tmp_path / name / "model" for name in ("whole", "parts"))
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    second = flags(**toy, model__path=str(whole), run__dir=str(tmp_path / "second"), optim__name="lamb")
    assert main(["train", "bert-pretrain-2", *second]) == 0
    before, after = (models.load(folder)[0].head for folder in (whole, tmp_path / "second" / "model"))
    assert not torch.equal(before, after)
    log = [json.loads(line) for line in (tmp_path / "second" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    saved = config.load(tmp_path / "second" / "config.toml")
    assert (saved.data.max_source_length, saved.data.max_predictions) == (512, 80)


def test_what_is_trained_opens_in_transformers(make: Callable[..., Config]) -> None:
    from transformers import AutoTokenizer, BertForPreTraining

    chosen = make(data__objective="masked_lm_nsp")
    train(chosen, quiet)
    folder = chosen.run_dir / "model"
    peer = BertForPreTraining.from_pretrained(folder).eval()
    ours = models.load(folder)[0].eval()
    inner = AutoTokenizer.from_pretrained(folder)
    text = inner("one [MASK] three", "four five", return_tensors="pt")
    ids = text["input_ids"]
    hidden = ours(ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None], text["token_type_ids"])
    torch.testing.assert_close(hidden, peer.bert(**text).last_hidden_state, rtol=1e-5, atol=1e-5)
    assert not (folder / "generation_config.json").exists()
