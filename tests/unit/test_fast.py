"""Tokenizers opened without transformers are those that transformers opens, or transformers opens them."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vocabularies import CHATML, chatting, letters

from t2t.config import Config, Data, Model
from t2t.data import tokens, vocabulary
from t2t.data.prepare import Maker, place
from t2t.data.tokens import HuggingFace
from t2t.models import architectures, configs, load, sizes
from t2t.train.prepare import prepare

TEXT = "asset:ro-held-out.txt"
WORDS = """Ploaia cade încet peste sate și câmpuri. Vântul bate dinspre munte, iar oamenii stau la gura sobei.
Copiii au plecat la școală devreme; mama coace pâine, tata taie lemne. Este iarnă, și zăpada acoperă tot.
The quick brown fox jumps over the lazy dog. Summaries are short, and texts are long. A model learns from pairs.
"""
Made = Callable[[str], Path]
ODD = ["", " ", "two  spaces ", "a\tb\nc", "ﬁ ½ DOG", "[MASK] <extra_id_3></s>x <|endoftext|>", "中文 țară Ș 😀"]


def texts(specials: list[str]) -> list[str]:
    rng = random.Random(7)
    ranges = [(32, 127), (0xA0, 0x24F), (0x400, 0x4FF), (0x4E00, 0x4FFF), (0x1F600, 0x1F64F), (0x300, 0x36F)]
    draw: list[Callable[[], str]] = [lambda low=low, high=high: chr(rng.randrange(low, high)) for low, high in ranges]
    draw += [lambda: rng.choice(WORDS.split()) + " ", lambda: rng.choice(specials)]
    drawn = ["".join(rng.choice(draw)() for _ in range(rng.randrange(1, 30))) for _ in range(300)]
    return [*WORDS.splitlines(), *ODD, *drawn]


def trained(folder: Path, style: str, kind: str = "", **settings: Any) -> Path:
    vocabulary.train([TEXT], folder, 600, kind, style, **settings)
    return folder


def bare(folder: Path) -> Path:
    """A SentencePiece file."""
    words = WORDS.splitlines() * 3
    file = folder.with_suffix(".model")
    file.write_bytes(vocabulary._sentencepiece(lambda: iter(words), "unigram", 100, lowercase=False))
    return file


def saved(folder: Path, tokenizer: HuggingFace) -> Path:
    tokenizer.save(folder)
    return folder


def starting(folder: Path) -> Path:
    """Words between <s> and </s>, with a mask that takes the space before it."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = {name: i for i, name in enumerate(["<s>", "<pad>", "</s>", "<mask>", "dog", "fox", "?"])}
    words = Tokenizer(models.WordLevel(names, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    special |= {"cls_token": "<s>", "sep_token": "</s>", "mask_token": AddedToken("<mask>", lstrip=True, special=True)}
    words.enable_truncation(3)
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


MADE: dict[str, Callable[[Path], Path]] = {
    "spiece": bare,
    "t5": lambda folder: trained(folder, "t5"),
    "t5 with few sentinels": lambda folder: trained(folder, "t5", sentinels=7),
    "t5 of lower case": lambda folder: trained(folder, "t5", lowercase=True),
    "t5 of merges": lambda folder: trained(folder, "t5", "bpe"),
    "gpt2": lambda folder: trained(folder, "gpt2"),
    "bert": lambda folder: trained(folder, "bert"),
    "bert of lower case": lambda folder: trained(folder, "bert", lowercase=True),
    "chat": lambda folder: saved(folder, chatting(CHATML, merges=True)),
    "starting": starting,
}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    return cache(lambda name: MADE[name](root / name.replace(" ", "-")))


@pytest.fixture
def made(once: Made, tmp_path: Path) -> Made:
    """A copy of one of `MADE`."""

    def copied(name: str) -> Path:
        found = once(name)
        copy = shutil.copytree if found.is_dir() else shutil.copy
        return Path(copy(found, tmp_path / f"made{found.suffix}"))

    return copied


def told(tokenizer: tokens.Tokenizer) -> list[Any]:
    """All that tokenizing depends on, and what comes of it."""
    marks = tokenizer.marks
    continues = None if marks is None or marks.continues is None else marks.continues.tolist()
    return [
        (tokenizer.fingerprint, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size),
        (list(tokenizer.starts), list(tokenizer.sentinels), dict(tokenizer.specials)),
        marks and (marks.cls, marks.sep, marks.mask, marks.ordinary.tolist(), continues),
        tokenizer.encode_batch(texts([*tokenizer.specials])),
    ]


def is_light(tokenizer: tokens.Tokenizer) -> bool:
    return "inner" not in tokenizer.__dict__


@pytest.mark.parametrize("name", MADE)
def test_what_is_opened_without_transformers_is_the_same(name: str, made: Made) -> None:
    spec = str(made(name))
    light, whole = tokens.light(spec), tokens.load(spec)
    assert is_light(light) and not is_light(whole)
    assert told(light) == told(whole) == told(pickle.loads(pickle.dumps(light)))
    assert isinstance(whole, HuggingFace) and len(whole.encode(WORDS)) > 3
    theirs = whole.inner(texts([*whole.specials]), add_special_tokens=False)["input_ids"]
    assert light.encode_batch(texts([*whole.specials])) == theirs
    assert is_light(light)
    assert light.decode(theirs[0]) == whole.decode(theirs[0]) and not is_light(light)


def edited(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return edit


def in_settings(**values: Any) -> Callable[[Path], None]:
    return edited("tokenizer_config.json", lambda content: content.update(values))


LOWER = {"type": "Lowercase"}
SPLIT = {"type": "Whitespace"}
SEVERAL: Callable[[Any], Any] = lambda own: {"type": "Sequence", "normalizers": [LOWER, own]}  # noqa: E731
PLAIN = {"rstrip": False, "lstrip": False, "single_word": False, "normalized": False, "special": True}
STRAY = {"999": {"content": "<new>", **PLAIN}}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        # The class makes these parts anew, whatever the file says.
        ("gpt2", edited("tokenizer.json", lambda t: t.update(normalizer=LOWER))),
        ("gpt2", edited("tokenizer.json", lambda t: t["pre_tokenizer"].update(add_prefix_space=True))),
        ("gpt2", edited("tokenizer.json", lambda t: t["model"].update(fuse_unk=True))),
        ("bert", edited("tokenizer.json", lambda t: t["normalizer"].update(lowercase=True))),
        ("bert", edited("tokenizer.json", lambda t: t["model"].update(max_input_chars_per_word=2))),
        # Settings that change ids, or may.
        ("gpt2", in_settings(add_prefix_space=True)),
        ("bert", in_settings(do_lower_case=True)),
        ("bert", in_settings(strip_accents=True)),
        ("chat", in_settings(split_special_tokens=True)),
        ("chat", in_settings(add_bos_token=True, bos_token="<pad>")),
        # Special tokens that are to be added, or to be changed.
        ("chat", in_settings(extra_special_tokens=["<|new|>"])),
        ("chat", in_settings(cls_token="<|new|>")),
        ("chat", in_settings(other_token="the")),
        ("chat", in_settings(added_tokens_decoder=STRAY)),
        ("t5", in_settings(extra_ids=103)),
        ("chat", edited("tokenizer.json", lambda t: t["added_tokens"][2].update(rstrip=True))),
        ("chat", edited("tokenizer.json", lambda t: t["added_tokens"][1].update(special=False))),
        ("chat", lambda folder: (folder / "added_tokens.json").write_text('{"<|new|>": 900}')),
        ("chat", lambda folder: (folder / "special_tokens_map.json").write_text('{"cls_token": "<|new|>"}')),
        ("t5", edited("tokenizer.json", lambda t: t["added_tokens"][1].update(id=77))),
        ("t5", edited("tokenizer.json", lambda t: t["added_tokens"][5].update(normalized=True))),
        # What transformers has exceptions for.
        ("gpt2", lambda folder: (folder / "config.json").write_text('{"model_type": "qwen2"}')),
    ],
)
def test_what_transformers_makes_anew_is_left_to_it(name: str, change: Callable[[Path], Any], made: Made) -> None:
    spec = made(name)
    before = told(tokens.light(str(spec)))
    change(spec)
    light, whole = tokens.light(str(spec)), tokens.load(str(spec))
    assert not is_light(light)
    assert told(light) == told(whole)
    assert before[0][0]  # it was light before: see above


IGNORED = in_settings(model_max_length=512, padding_side="left", clean_up_tokenization_spaces=True)
OF_T5: Callable[[Path], Any] = lambda folder: (folder / "config.json").write_text('{"model_type": "t5"}')  # noqa: E731


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in ("t5", "gpt2", "bert", "chat") for change in (IGNORED, OF_T5)),
        # T5's class makes all of its parts anew, and so does what stands for it here.
        ("t5", edited("tokenizer.json", lambda t: t.update(pre_tokenizer=SPLIT))),
        ("t5", edited("tokenizer.json", lambda t: t.update(normalizer=LOWER))),
        ("t5", edited("tokenizer.json", lambda t: t.update(normalizer=SEVERAL(t["normalizer"])))),
        ("t5", edited("tokenizer.json", lambda t: t["model"].update(unk_id=5))),
        ("t5", edited("tokenizer.json", lambda t: t["model"].update(byte_fallback=True))),
        ("t5", edited("tokenizer.json", lambda t: t.update(post_processor=None, decoder=None))),
    ],
)
def test_what_changes_no_ids_does_not_matter(name: str, change: Callable[[Path], Any], made: Made) -> None:
    spec = made(name)
    change(spec)
    light = tokens.light(str(spec))
    assert is_light(light) and told(light) == told(tokens.load(str(spec)))


def test_folders_as_transformers_4_saved_them(made: Made) -> None:
    """With every added token in tokenizer_config.json, and a map of the special ones beside it."""
    spec = made("t5")
    content = json.loads((spec / "tokenizer.json").read_text())
    added = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in content["added_tokens"]}
    settings = json.loads((spec / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] = [f"<extra_id_{i}>" for i in range(100)]
    settings |= {"added_tokens_decoder": added, "eos_token": {"__type": "AddedToken", **added["1"]}}
    settings["tokenizer_class"] = "T5TokenizerFast"
    del settings["extra_special_tokens"], settings["backend"]
    (spec / "tokenizer_config.json").write_text(json.dumps(settings))
    (spec / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    light = tokens.light(str(spec))
    assert is_light(light) and told(light) == told(tokens.load(str(spec)))


def test_what_has_no_fast_file_is_opened_by_transformers(tmp_path: Path) -> None:
    spec = str(letters(tmp_path / "letters"))
    assert not is_light(tokens.light(spec)) and told(tokens.light(spec)) == told(tokens.load(spec))
    assert isinstance(tokens.light("bytes"), tokens.Bytes)


def test_new_tokens_are_added_to_a_light_tokenizer(made: Made) -> None:
    spec = str(made("t5"))
    light, whole = (tokens.extended(open(spec), ["<person>"]) for open in (tokens.light, tokens.load))
    assert told(light) == told(whole) and light.vocab_size == tokens.light(spec).vocab_size + 1


def test_a_config_tells_the_same_with_torch_and_without() -> None:
    assert architectures.NATIVE.keys() == load.NATIVE.keys()
    for raw in sizes.SIZES.values():
        family, whole = load.architecture(raw)
        assert configs.architecture(raw) == (family.kind, whole)


@pytest.mark.parametrize("name", ["bytes", "spiece", "gpt2"])
def test_preparing_leaves_torch_and_transformers_out(name: str, made: Made, tmp_path: Path) -> None:
    spec = name if name == "bytes" else str(made(name))
    (tmp_path / "pairs.tsv").write_text("unu\tdoi\nfox\tdog\n" * 50)
    model = "gpt2" if name == "gpt2" else "t5-small"
    settings = {"data.train": tmp_path / "pairs.tsv", "data.store": tmp_path / "stores", "model.tokenizer": spec}
    words = [f"--{key}={value}" for key, value in {**settings, "model.config": model}.items()]
    script = (
        "import sys, t2t.cli; code = t2t.cli.main(sys.argv[1:]); "
        "sys.exit(code or ' '.join({'torch', 'transformers', 'pyarrow', 'datasets'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "prepare", *words, "--processes", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (manifest,) = tmp_path.glob("stores/*/manifest.json")
    data = Data(train=(str(tmp_path / "pairs.tsv"),), store=str(tmp_path / "stores"))
    found = prepare(Config(data=data, model=Model(config=model, tokenizer=spec)), processes=0)[""]
    assert found.folder == manifest.parent
    whole = tokens.load(spec)
    raw = configs.scratch_config(model, (), whole.vocab_size, whole.eos_id, whole.pad_id)
    family, read = load.architecture(raw)
    maker = Maker(data, whole, "pairs", family.kind, read.start_id)
    assert place(maker, list(data.train)).folder == manifest.parent  # as training looks for it
    assert found.column("target")[0].tolist() == [*whole.encode("doi"), whole.eos_id]


def test_readers_need_no_torch_for_the_cost_of_a_row() -> None:
    sent = pickle.dumps([load.architecture({"model_type": name})[1].row_cost for name in load.NATIVE])
    script = "import pickle, sys; pickle.load(sys.stdin.buffer); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], input=sent, check=True)
