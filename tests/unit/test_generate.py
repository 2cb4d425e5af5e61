"""Decoding rules, streaming of texts, and the settings that travel with a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import t2t
from t2t.config import Generate
from t2t.data.tokens import Bytes
from t2t.errors import InputError
from t2t.generate import Loaded, Settings, batching, read_settings, save_settings
from t2t.generate import decode as decoding
from t2t.models import load as models
from t2t.models.t5 import T5

RAW = {"model_type": "t5", "vocab_size": 384, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def model() -> T5:
    return models.create(RAW, seed=0)


class Echo:
    """Stands for the model where only the handling of texts is in question: answers with the source's own tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        monkeypatch.setattr(batching, "decode", self.decode)

    def decode(self, model: T5, ids: Tensor, segments: Tensor, *rest: Any) -> decoding.Output:
        self.shapes.append(tuple(ids.shape))
        return decoding.Output(ids * segments, None)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    return Echo(monkeypatch)


def sources(*rows: list[int]) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(rows)
    return ids, (ids != 0).long()


# Token level


def test_sampling_frequencies_are_the_filtered_softmax(model: T5) -> None:
    ids, segments = sources([5, 9, 1])
    with torch.inference_mode():
        logits = model.eval().decode(torch.tensor([0]), model.start(ids, segments, 1))[0]
    settings = Generate(temperature=2.0, top_k=6, top_p=0.8)
    chances = dict(sorted(((i, p) for i, p in enumerate((logits / 2).softmax(0).tolist())), key=lambda x: -x[1])[:6])
    total, kept = sum(chances.values()), {}
    for token, chance in chances.items():
        if sum(kept.values()) < 0.8 * total:
            kept[token] = chance
    expected = {token: chance / sum(kept.values()) for token, chance in kept.items()}
    assert 2 <= len(expected) < 6  # top-p took some of the six away

    draws = 20_000
    many, ones = ids.expand(draws, -1), segments.expand(draws, -1)
    first = decoding.decode(model, many, ones, settings, max_length=1, seed=3).tokens[:, 0]
    counts = torch.bincount(first, minlength=384) / draws
    assert set(counts.nonzero()[:, 0].tolist()) == set(expected)
    for token, chance in expected.items():
        assert abs(counts[token].item() - chance) < 4 * (chance * (1 - chance) / draws) ** 0.5


def test_probabilities_keep_the_token_that_crosses_top_p() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    torch.testing.assert_close(decoding.probabilities(logits, 1.0, 0, 0.75), torch.tensor([[0, 2 / 9, 3 / 9, 4 / 9]]))
    torch.testing.assert_close(decoding.probabilities(logits, 1.0, 2, 1.0), torch.tensor([[0, 0, 3 / 7, 4 / 7]]))
    torch.testing.assert_close(decoding.probabilities(logits, 1.0, 0, 0.01), torch.tensor([[0.0, 0, 0, 1]]))
    assert decoding.probabilities(logits, 0.01, 0, 1.0)[0, 3] > 0.99


def test_a_seed_decides_a_sample(model: T5) -> None:
    rows = sources([5, 9, 1], [7, 1, 0])
    settings = Generate(temperature=1.0)
    once, again, other = (decoding.decode(model, *rows, settings, 12, seed).tokens.tolist() for seed in (1, 1, 2))
    assert once == again != other


def test_greedy_is_the_argmax_of_a_whole_pass_and_pads_after_the_end(model: T5) -> None:
    ids, segments = sources([5, 9, 1, 0], [7, 11, 4, 1])
    tokens = decoding.greedy(model, ids, segments, 20)
    shifted = torch.cat((torch.zeros(2, 1, dtype=torch.long), tokens[:, :-1]), 1)
    with torch.inference_mode():
        logits = model.eval()(ids, segments, shifted, torch.ones_like(shifted)) @ model.head.T
    assert torch.equal(logits.argmax(-1), tokens)

    # Were its third token the end token, a row would be these three, then padding.
    end = int(tokens[0, 2])
    kept = (tokens[0] == end).nonzero()[0, 0].item() + 1
    ending = models.create({**RAW, "eos_token_id": end}, seed=0)
    assert decoding.greedy(ending, ids, segments, 20)[0].tolist() == tokens[0, :kept].tolist() + [0] * (20 - kept)


def test_decoding_looks_at_the_device_once_a_window_and_stops(model: T5, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, segments = sources([5, 9, 1])
    end = int(decoding.greedy(model, ids, segments, 1)[0, 0])
    ending = models.create({**RAW, "eos_token_id": end}, seed=0)
    calls = []
    decode = ending.decode
    monkeypatch.setattr(ending, "decode", lambda *a: (calls.append(1), decode(*a))[1])
    decoding.greedy(ending, ids, segments, 100)
    assert len(calls) == decoding.WINDOW


@pytest.mark.parametrize("beams", [1, 3])
def test_results_do_not_depend_on_the_window(model: T5, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sources([5, 9, 1, 0], [7, 11, 4, 1])
    whole = decoding.decode(model, *rows, Generate(beams=beams), 40).tokens
    monkeypatch.setattr(decoding, "WINDOW", 7)
    assert torch.equal(decoding.decode(model, *rows, Generate(beams=beams), 40).tokens, whole)


def test_one_beam_is_greedy_and_more_beams_score_no_worse(model: T5) -> None:
    rows = sources([5, 9, 1, 0], [7, 11, 4, 1])
    one, four = (decoding.beam(model, *rows, 10, beams, 0.0) for beams in (1, 4))
    assert torch.equal(one.tokens, decoding.greedy(model, *rows, 10))
    assert (four.scores >= one.scores - 1e-5).all()


def test_settings_give_the_length_or_leave_it_open(model: T5) -> None:
    rows = sources([5, 9, 1])
    assert decoding.decode(model, *rows, Generate(), 5).tokens.shape == (1, 5)
    assert decoding.decode(model, *rows, Generate(max_length=3), 5).tokens.shape == (1, 3)


@pytest.mark.parametrize("settings", [Generate(), Generate(beams=2), Generate(temperature=1.0)])
def test_training_goes_on_after_decoding(settings: Generate) -> None:
    model = models.create(RAW, seed=0).train()
    model.encoder.eval()
    rows = sources([5, 9, 1])
    decoding.decode(model, *rows, settings, 3)
    assert [m.training for m in (model, model.decoder.block[0], model.encoder)] == [True, True, False]
    model(*rows, *rows).sum().backward()
    assert model.shared.weight.grad is not None


def test_the_mode_is_put_back_after_a_failure(model: T5) -> None:
    model.train()
    with pytest.raises(IndexError):
        decoding.greedy(model, *sources([5, 999, 1]), 3)
    assert model.training
    assert not torch.is_inference_mode_enabled()


# Text level


def test_texts_come_in_input_order_out_of_batches_of_like_lengths(model: T5, echo: Echo) -> None:
    inputs = ["x" * (i * 7 % 30) for i in range(20)]
    outputs = list(batching.texts(model, Bytes(), iter(inputs), Generate(batch=4), 64, 8, prefix="p: "))
    assert outputs == ["p: " + text for text in inputs]
    assert [rows for rows, _ in echo.shapes] == [4] * 5
    assert [width for _, width in echo.shapes] == [40, 32, 24, 16, 16]


def test_an_endless_input_streams(model: T5, echo: Echo) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"line {read}"

    outputs = batching.texts(model, Bytes(), endless(), Generate(batch=2), 64, 8)
    window = batching.BATCHES * 2
    assert [next(outputs) for _ in range(window)] == [f"line {i}" for i in range(1, window + 1)]
    assert read == window
    assert next(outputs) == f"line {window + 1}"


def test_long_sources_are_cut_before_the_end_token_and_told(
    model: T5, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "BATCHES", 1)
    seen, cut = [], []
    decode = echo.decode
    monkeypatch.setattr(batching, "decode", lambda m, ids, *a: (seen.extend(ids.tolist()), decode(m, ids, *a))[1])
    inputs = ["abcd", "abc", "", "abcdefgh"]
    outputs = batching.texts(model, Bytes(), inputs, Generate(batch=2), 4, 8, on_cut=cut.append)
    assert list(outputs) == ["abc", "abc", "", "abc"]
    assert cut == [0, 3]
    assert [100, 101, 102, 1] in seen  # padded to no more than the longest source may be
    assert [1, 0, 0, 0] in seen


def test_sources_begin_as_in_training(model: T5, echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Bytes):
        starts = (300,)

    seen, decode = [], echo.decode
    monkeypatch.setattr(batching, "decode", lambda m, ids, *a: (seen.extend(ids.tolist()), decode(m, ids, *a))[1])
    cut: list[int] = []
    list(batching.texts(model, Started(), ["ab", "abc"], Generate(), 4, 8, on_cut=cut.append))
    assert sorted(seen) == [[300, 100, 101, 1], [300, 100, 101, 1]]
    assert cut == [1]


def test_no_input_no_output(model: T5) -> None:
    assert list(batching.texts(model, Bytes(), [], Generate(), 16, 8)) == []


def test_batches_sample_differently_but_repeatably(model: T5) -> None:
    def run(seed: int) -> list[str]:
        same = ["aceeași"] * 4
        return list(batching.texts(model, Bytes(), same, Generate(temperature=1.0, batch=2), 16, 12, seed=seed))

    assert run(0) == run(0) != run(1)
    assert run(0)[:2] != run(0)[2:]


# The model folder


@pytest.fixture
def folder(model: T5, tmp_path: Path) -> Path:
    models.save(model.state_dict(), RAW, tmp_path)
    Bytes().save(tmp_path)
    return tmp_path


def test_load_generates_as_the_folder_says(folder: Path, echo: Echo) -> None:
    transforms = ("strip_diacritics", "s/[0-9]+/#/")
    save_settings(folder, Settings("fix: ", 64, 12, transforms, Generate(batch=2)))
    loaded = t2t.load(folder, device="cpu")
    assert loaded.config["d_model"] == 16
    assert not loaded.model.training
    assert loaded.generate(["țară 25", "b", "c"]) == ["fix: tara #", "fix: b", "fix: c"]
    assert len(echo.shapes) == 2


def test_load_without_settings_has_the_defaults(folder: Path) -> None:
    loaded = t2t.load(str(folder), device="cpu")
    assert loaded.settings == Settings()
    greedy = loaded.generate(["una"], max_length=9)
    tokens = decoding.greedy(loaded.model, *sources([*Bytes().encode("una"), 1]), 9)
    assert greedy == [Bytes().decode(tokens[0].tolist())]
    assert loaded.generate(["una"], max_length=9, temperature=1, seed=4) != greedy


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"beam": 4}, "generate.beam: unknown key (did you mean beams?)"),
        ({"beams": 0}, "generate.beams: must be 1 or more, got 0"),
        ({"beams": "4"}, "generate.beams: expected a whole number, got '4'"),
        ({"top_p": float("nan")}, "generate.top_p: expected a finite number, got nan"),
        ({"beams": 2, "temperature": 1.0}, "generate.temperature: samples, and beams search"),
    ],
)
def test_bad_overrides_are_told_at_once(model: T5, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Loaded(model, Bytes(), RAW, Settings()).stream(["a"], **overrides)
    assert str(caught.value).startswith(message)


def test_one_text_instead_of_a_list_is_told(model: T5) -> None:
    with pytest.raises(InputError, match="expected a list of texts"):
        Loaded(model, Bytes(), RAW, Settings()).generate("one text")


def test_settings_survive_the_file(tmp_path: Path) -> None:
    settings = Settings("rezumă: ", 100, 20, ("lower", r"s|a/b|\\|"), Generate(beams=4, length_penalty=0.6))
    save_settings(tmp_path, settings)
    assert read_settings(tmp_path) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object with keys, got []"),
        ('{"prefixes": ""}', "prefixes: unknown key (did you mean prefix?)"),
        ('{"prefix": null}', "prefix: expected text, got None"),
        ('{"max_source_length": 1.5}', "max_source_length: expected a whole number, got 1.5"),
        ('{"max_source_length": true}', "max_source_length: expected a whole number, got True"),
        ('{"max_source_length": 1}', "max_source_length: must be 2 or more"),
        ('{"generate": 4}', "generate: expected an object with keys, got 4"),
        ('{"generate": {"beam": 4}}', "generate.beam: unknown key (did you mean beams?)"),
        ('{"generate": {"length_penalty": Infinity}}', "generate.length_penalty: expected a finite number, got inf"),
        ('{"generate": {"top_p": 2}}', "generate.top_p: must be above 0 and at most 1, got 2.0"),
        ('{"source_transforms": "lower"}', "source_transforms: expected a list of strings, got 'lower'"),
        ('{"source_transforms": ["lowr"]}', "source_transforms: unknown transform 'lowr' (did you mean lower?)"),
    ],
)
def test_a_bad_settings_file_is_told_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "t2t.json"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_settings(tmp_path)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize("spec", ["evil:run", "s_evil:run", "s.evil:run", "S/evil:run", "évil:run", "\nevil:run", ":"])
def test_a_model_folder_never_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    for name in ("evil", "s_evil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "t2t.json").write_text(json.dumps({"source_transforms": [spec]}))
    with pytest.raises(InputError, match="may not name code to run"):
        read_settings(tmp_path)
    assert not {"evil", "s_evil"} & set(sys.modules)


def test_import_paths_do_not_travel(tmp_path: Path) -> None:
    save_settings(tmp_path, Settings(source_transforms=("lower", "my.module:function", "s:a:b:")))
    assert read_settings(tmp_path).source_transforms == ("lower", "s:a:b:")
