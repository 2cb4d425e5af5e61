"""Plain-text objectives: nothing is lost, nothing is said twice, lengths are as announced, and the seed decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from t2t.config import Data
from t2t.data.packing import IGNORE, Feature
from t2t.data.ragged import Ragged
from t2t.data.splits import read_splits
from t2t.data.text import (
    BlockLM,
    DocumentLM,
    Documents,
    PrefixLM,
    SpanCorruption,
    noise_mask,
    span_lengths,
    span_window,
)
from t2t.data.tokens import Bytes
from t2t.errors import InputError

START, END = 2, 1
SENTINELS = list(range(300, 340))


def some(seed: int, count: int = 7) -> Documents:
    rng = np.random.default_rng(seed)
    texts = [[*rng.integers(10, 200, rng.integers(1, 60)), END] for _ in range(count)]
    return Documents(Ragged.of(texts, 384), tuple(f"a.txt:{i}" for i in range(count)), words=9)


def stream(documents: Documents) -> list[int]:
    return [t for i in range(len(documents)) for t in documents.tokens[i].tolist()]


def all_of(examples: DocumentLM | BlockLM | SpanCorruption | PrefixLM, seed: int = 5) -> list[Feature]:
    features = [examples.feature(i, seed + i) for i in range(len(examples))]
    source, target = examples.sizes(np.arange(len(examples)))
    assert examples.longest == (source.max(), target.max())
    for i, feature in enumerate(features):
        assert len(feature.inputs) == len(feature.labels)
        assert len(feature.source) <= source[i] and len(feature.inputs) <= target[i]
        again = examples.feature(i, seed + i)
        assert again.source.tolist() == feature.source.tolist() and again.labels.tolist() == feature.labels.tolist()
        assert examples.tell(i)["where"]
    return features


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("block", [2, 7, 16, 59, 60, 500])
def test_documents_are_said_whole_and_apart(seed: int, block: int) -> None:
    documents = some(seed)
    examples = DocumentLM(documents, START, block)
    features = all_of(examples)
    assert [t for f in features for t in f.labels.tolist()] == stream(documents)
    assert examples.sizes(np.arange(len(examples)))[1].tolist() == [len(f.labels) for f in features]
    for feature in features:
        assert feature.inputs[1:].tolist() == feature.labels[:-1].tolist()
    begins = [f for f in features if f.inputs[0] == START]
    assert len(begins) == len(documents)
    assert max(len(f.inputs) for f in features) <= block


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("block", [2, 16, 500])
def test_blocks_are_the_stream_cut_evenly(seed: int, block: int) -> None:
    documents = some(seed)
    examples = BlockLM(documents, START, block)
    features = all_of(examples)
    labels = [t for f in features for t in f.labels.tolist()]
    assert labels == stream(documents)
    assert [t for f in features for t in f.inputs.tolist()] == [START, *labels[:-1]]
    assert {len(f.labels) for f in features[:-1]} <= {block}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("longest", [12, 24, 64])
def test_spans_can_be_put_back(seed: int, longest: int) -> None:
    documents = some(seed)
    examples = SpanCorruption(documents, START, END, SENTINELS, longest)
    rebuilt: list[int] = []
    for feature in all_of(examples, seed):
        source, target = feature.source.tolist(), feature.labels.tolist()
        assert source[-1] == target[-1] == END
        assert feature.inputs.tolist() == [START, *target[:-1]]
        spans: dict[int, list[int]] = {}
        for token in target[:-1]:
            if token in SENTINELS:
                spans[token] = []
            elif spans:
                spans[list(spans)[-1]].append(token)
        assert list(spans) == SENTINELS[: len(spans)]
        if not spans:  # a window of one token has nothing that could be kept
            rebuilt += target[:-1]
            continue
        for token in source[:-1]:
            rebuilt += spans[token] if token in SENTINELS else [token]
    assert rebuilt == stream(documents)
    full = [f for f in all_of(examples) if len(f.source) == longest]
    assert len(full) >= len(examples) - 1  # every window but the last fills its source


def test_spans_have_the_published_lengths() -> None:
    assert span_window(512, 0.15, 3.0) == 568
    noise, spans, source = span_lengths(568, 0.15, 3.0)
    assert (noise, spans, source, noise + spans + 1) == (85, 28, 512, 114)


def test_noise_is_spread_evenly() -> None:
    masks = np.stack([noise_mask(60, 9, 3, np.random.default_rng(i)) for i in range(4000)])
    assert (masks.sum(1) == 9).all()
    begins = masks & ~np.pad(masks, ((0, 0), (1, 0)))[:, :-1]
    assert (begins.sum(1) == 3).all()
    assert not masks[:, 0].any() and masks[:, -1].all()  # kept text first, a span last
    order = begins.cumsum(1) * masks  # which span a noisy token is in, from 1
    for span in (1, 2, 3):
        assert (order == span).sum(1).mean() == pytest.approx(3, rel=0.03)
    kept = [np.diff(np.flatnonzero(np.append(True, m)))[0] for m in begins]  # text before the first span
    assert np.mean(kept) == pytest.approx(51 / 3 + 1, rel=0.03)


def test_few_sentinels_make_shorter_windows() -> None:
    examples = SpanCorruption(some(1), START, END, SENTINELS[:2], longest=200)
    assert examples.windows.size < 60
    all_of(examples)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("source", "target"), [(8, 8), (30, 10), (10, 30), (2, 9)])
def test_a_prefix_and_its_rest_are_the_passage(seed: int, source: int, target: int) -> None:
    documents = some(seed)
    examples = PrefixLM(documents, START, END, source, target)
    features = all_of(examples, seed)
    assert [t for f in features for t in (*f.source[:-1].tolist(), *f.labels[:-1].tolist())] == stream(documents)
    assert all(f.source[-1] == f.labels[-1] == END for f in features)
    if source == target == 8:
        assert len({len(f.source) for f in features}) > 2


def test_no_label_is_ignored() -> None:
    for feature in all_of(DocumentLM(some(3), START, 16)):
        assert (feature.labels != IGNORE).all()


# Reading


def test_blank_lines_part_the_documents_of_a_text_file(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("a\nb\n\n\nc\n")
    two.write_text("d\n")
    assert documents(one, two) == [(f"{one}:1", "a\nb"), (f"{one}:5", "c"), (f"{two}:1", "d")]
    assert len(documents(one, two, max_samples=2)) == 2
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n{"text": "b\\nc"}\n')
    assert [text for _, text in documents(lines)] == ["a", "b\nc"]


def documents(*files: Path, **settings: int) -> list[tuple[str, str]]:
    data = Data(train=tuple(map(str, files)), objective="lm", block=64, **settings)
    found = read_splits(data, Bytes(), seed=1, kind="causal", start_id=1).train
    assert isinstance(found, DocumentLM)
    own = found.documents
    return [(own.where[i], Bytes().decode(own.tokens[i].tolist())) for i in range(len(own))]


def test_documents_are_held_out_whole(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"document {i}" for i in range(20)))
    data = Data(train=(str(file),), validation_split=0.2, objective="lm")
    splits = read_splits(data, Bytes(), seed=1, kind="causal", start_id=1)
    assert isinstance(splits.train, DocumentLM) and isinstance(splits.validation, DocumentLM)
    assert (len(splits.train.documents), len(splits.validation.documents)) == (16, 4)
    assert splits.validation.documents.words == 8


def test_spans_need_sentinels(tmp_path: Path) -> None:
    class Bare(Bytes):
        sentinels = range(0)

    file = tmp_path / "text.txt"
    file.write_text("some words\n")
    with pytest.raises(InputError, match="span_corruption needs a tokenizer with sentinels"):
        read_splits(Data(train=(str(file),), objective="span_corruption"), Bare(), seed=1)
