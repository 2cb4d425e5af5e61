"""Tokenizers against transformers and sentencepiece, their errors, and the table of token ids."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from vocabularies import CHATML, chatting

from t2t.config import Data
from t2t.data import tokens
from t2t.data.ragged import Ragged
from t2t.data.tables import tokenized
from t2t.data.tasks import Example
from t2t.data.tokens import Bytes, tokenize
from t2t.errors import InputError

TEXT = """Ploaia cade încet peste sate și câmpuri. Vântul bate dinspre munte, iar oamenii stau la gura sobei.
Copiii au plecat la școală devreme; mama coace pâine, tata taie lemne. Este iarnă, și zăpada acoperă tot.
The quick brown fox jumps over the lazy dog. Summaries are short, and texts are long. A model learns from pairs.
"""


@pytest.fixture(scope="module")
def spiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spiece")
    (folder / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "own"),
        vocab_size=100,
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return folder / "own.model"


def random_texts(count: int) -> list[str]:
    rng = random.Random(5)
    ranges = [(32, 127), (0xA0, 0x24F), (0x400, 0x4FF), (0x4E00, 0x4FFF), (0x1F600, 0x1F64F), (0x300, 0x36F)]
    draw = [lambda low=low, high=high: chr(rng.randrange(low, high)) for low, high in ranges]
    return ["".join(rng.choice(draw)() for _ in range(rng.randrange(1, 30))) for _ in range(count)]


def test_bytes_are_those_of_byt5() -> None:
    from transformers import ByT5Tokenizer

    theirs, ours = ByT5Tokenizer(), Bytes()
    assert (ours.eos_id, ours.pad_id, ours.vocab_size) == (theirs.eos_token_id, theirs.pad_token_id, len(theirs))
    for text in [*random_texts(300), "", " ", "a\tb\nc", "  two  spaces  "]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode([*ids, 1, 0, 0]) == text
        assert ours.decode(ids[:-1]) == theirs.decode(ids[:-1], skip_special_tokens=True)
    assert ours.decode([3 + 0xC8, 3 + 97, 300, 383]) == "a"


@pytest.mark.parametrize("spec", ["bytes", "folder"])
def test_saved_bytes_open_in_transformers_and_here(tmp_path: Path, spec: str) -> None:
    from transformers import AutoTokenizer

    Bytes().save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("țară").input_ids == [*Bytes().encode("țară"), 1]
    assert len(theirs) == 384
    assert isinstance(tokens.load(spec if spec == "bytes" else str(tmp_path)), Bytes)


def test_a_bare_sentencepiece_file_gives_its_own_ids(spiece: Path) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
    ours = tokens.load(str(spiece))
    assert (ours.pad_id, ours.eos_id, ours.vocab_size) == (0, 1, 200)
    lines = [*TEXT.splitlines(), "țară și 中 x", "DOG", "two  spaces", " a ", "a\tb", "ﬁ ½"]
    assert ours.encode_batch(lines) == [theirs.encode(line) for line in lines]
    assert ours.decode([*ours.encode("Ploaia cade încet"), 1, 0]) == "Ploaia cade încet"


def test_a_saved_sentencepiece_tokenizer_opens_in_transformers_and_here(spiece: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = tokens.load(str(spiece))
    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), tokens.load(str(tmp_path))
    for line in TEXT.splitlines():
        ids = ours.encode(line)
        assert theirs(line).input_ids == [*ids, 1]
        assert again.encode(line) == ids
    assert again.fingerprint == ours.fingerprint != Bytes().fingerprint
    assert again.vocab_size == ours.vocab_size
    # The folder that the file was read through is gone; nothing may remember it.
    assert not [file for file in tmp_path.iterdir() if "/tmp" in file.read_text(errors="replace")]


def test_tokenizers_that_differ_have_other_fingerprints(spiece: Path, tmp_path: Path) -> None:
    tokens.load(str(spiece)).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"][10][1] -= 1.0
    file.write_text(json.dumps(content))
    assert tokens.load(str(tmp_path)).fingerprint != tokens.load(str(spiece)).fingerprint


def test_what_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    empty, broken, text = tmp_path / "empty", tmp_path / "broken", tmp_path / "text.model"
    empty.mkdir()
    broken.mkdir()
    (broken / "tokenizer_config.json").write_text("{")
    text.write_text("not a SentencePiece model")
    for spec, words in [
        (str(empty), f"model.tokenizer: no tokenizer files in {empty}"),
        (str(broken), f"{broken / 'tokenizer_config.json'}: not valid JSON"),
        (str(text), f"model.tokenizer: cannot load {text}: "),
        ("no-such/tokenizer", "model.tokenizer: cannot load no-such/tokenizer: "),
        (str(tmp_path / "nowhere" / "at" / "all"), "model.tokenizer: cannot load "),
    ]:
        with pytest.raises(InputError) as caught:
            tokens.load(spec)
        assert str(caught.value).startswith(words)
        assert "\n" not in str(caught.value)


def test_examples_are_cut_before_their_end_token() -> None:
    examples = [Example("abcdef", "xy", "f:1"), Example("ab", "xyz", "f:2"), Example("a", "x", "f:3")]
    pairs = tokenize(iter(examples), Bytes(), max_source_length=3, max_target_length=3)
    assert [pairs.source[i].tolist() for i in range(3)] == [[100, 101, 1], [100, 101, 1], [100, 1]]
    assert [pairs.target[i].tolist() for i in range(3)] == [[123, 124, 1], [123, 124, 1], [123, 1]]
    assert (pairs.cut_sources, pairs.cut_targets) == (1, 1)
    assert pairs.where == ("f:1", "f:2", "f:3")


def test_many_examples_come_through_in_order() -> None:
    pairs = tokenize((Example(str(i), str(-i), f"f:{i}") for i in range(2500)), Bytes(), 16, 16)
    assert [Bytes().decode(pairs.source[i].tolist()) for i in range(2500)] == [str(i) for i in range(2500)]
    assert pairs.where[2499] == "f:2499"
    assert len(tokenize([], Bytes(), 16, 16)) == 0


def test_the_fingerprint_tells_tables_apart() -> None:
    def fingerprint(*pairs: tuple[str, str]) -> str:
        return tokenize([Example(s, t, "f:1") for s, t in pairs], Bytes(), 16, 16).fingerprint

    several = [(("a", "b"),), (("a", "c"),), (("b", "a"),), (("a", "b"), ("a", "b")), (("ab", "c"),), (("a", "bc"),)]
    assert len({fingerprint(*pairs) for pairs in several}) == len(several)
    assert fingerprint(("a", "b")) == fingerprint(("a", "b"))


def test_ids_take_two_bytes_where_they_can() -> None:
    assert Ragged.of([[65535]], 65536)[0].dtype == np.uint16
    wide = Ragged.of([[250111, 1], []], 250112)
    assert wide[0].dtype == np.uint32
    assert [wide[i].tolist() for i in range(2)] == [[250111, 1], []]
    assert len(Ragged.of([], 10)) == 0


def test_texts_begin_as_the_tokenizers_models_are_used_to(tmp_path: Path) -> None:
    """As BART's <s>, in the source and in what its decoder says, unless that begins with it anyway."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5}, unk_token="c"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(tmp_path)
    tokenizer = tokens.load(str(tmp_path))
    assert list(tokenizer.starts) == [0] and list(tokens.load("bytes").starts) == []
    examples = [Example("a b", "b", "x:1"), Example("a b c a b c", "c", "x:2")]
    data = Data(max_source_length=5, template="{source}{target}")

    def ids(kind: str, start_id: int) -> list[list[int]]:
        pairs, _ = tokenized(examples, tokenizer, data, kind, start_id)
        return [side[i].tolist() for i in (0, 1) for side in (pairs.source, pairs.target)]

    assert ids("seq2seq", start_id=2) == [[0, 3, 4, 2], [0, 4, 2], [0, 3, 4, 5, 2], [0, 5, 2]]
    assert ids("seq2seq", start_id=0) == [[0, 3, 4, 2], [4, 2], [0, 3, 4, 5, 2], [5, 2]]
    assert ids("causal", start_id=0) == [[0, 3, 4], [4, 2], [0, 3, 4, 5, 3], [5, 2]]


def test_a_tokenizer_encodes_in_another_process_without_transformers(tmp_path: Path) -> None:
    tokenizer = chatting(CHATML, merges=True)
    (tmp_path / "sent").write_bytes(pickle.dumps(tokenizer))
    script = (
        "import pickle, sys; t = pickle.load(open(sys.argv[1], 'rb')); "
        "found = t.encode('the cat'), 'transformers' in sys.modules; print(*found, t.inner.eos_token, sep=';')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "sent")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{tokenizer.encode('the cat')};False;</s>"
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(tokenizer))))
    assert again.inner.chat_template == tokenizer.inner.chat_template and again.marks == tokenizer.marks
