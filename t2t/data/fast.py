"""Fast tokenizers by the `tokenizers` library alone, where `transformers` is sure to make the very same.

Asked for a tokenizer, `transformers` brings torch along: several times the memory that tokenizing takes. A folder's
``tokenizer.json`` would do, but of the classes of `transformers` some make parts anew by rules of their own, and
settings in ``tokenizer_config.json`` may change others. So this takes what it knows in all its parts and nothing else:
the classes of `_CLASSES`, settings that change no ids, special tokens that are there already. A SentencePiece file
becomes what T5's class makes of it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KNOWN = "5.22."  # the transformers whose ways the tests compare these with
SENTINELS = 100  # that T5's tokenizers have beside their pieces

_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_NO_MATTER = frozenset(
    (
        *("tokenizer_class", "backend", "is_local", "local_files_only", "name_or_path", "processor_class", "unk_id"),
        *("model_max_length", "model_input_names", "padding_side", "truncation_side", "chat_template", "errors"),
        *("clean_up_tokenization_spaces", "legacy", "sp_model_kwargs", "max_length", "stride", "truncation_strategy"),
        *("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", *_SPECIAL),
    )
)
# Of these models the folders name the class that is taken; for some others transformers has a list of exceptions.
_MODELS = (None, "t5", "mt5", "umt5", "gpt2", "gpt_neo", "bert")


@dataclass(frozen=True)
class Fast:
    """What encoding asks of a tokenizer, named as in `transformers`."""

    backend_tokenizer: Tokenizer
    eos_token_id: int | None
    pad_token_id: int | None
    cls_token_id: int | None
    sep_token_id: int | None
    mask_token_id: int | None
    all_special_ids: Sequence[int]

    @classmethod
    def of(cls, backend: Tokenizer, special: Mapping[str, str], extra: Sequence[str]) -> Fast:
        """With special tokens by their names, and more without."""

        def find(name: str) -> int | None:
            return backend.token_to_id(special[f"{name}_token"]) if f"{name}_token" in special else None

        every = {i for token in (*special.values(), *extra) if (i := backend.token_to_id(token)) is not None}
        return cls(backend, find("eos"), find("pad"), find("cls"), find("sep"), find("mask"), sorted(every))


def read(path: Path) -> Fast | None:
    """The tokenizer of a folder or a SentencePiece file; None where only `transformers` can tell what it is."""
    if path.suffix == ".gguf" or not metadata.version("transformers").startswith(KNOWN):
        return None
    return _from_spiece(path) if path.is_file() else _from_folder(path)


def _from_folder(folder: Path) -> Fast | None:
    try:
        settings = _json(folder / "tokenizer_config.json")
        name = settings["tokenizer_class"]
        make, defaults, own = _CLASSES[name if name in _CLASSES else name.removesuffix("Fast")]
        kind = _json(folder / "config.json")["model_type"] if (folder / "config.json").is_file() else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # missing, broken, or not known here
        return None
    legacy = any((folder / file).is_file() for file in ("special_tokens_map.json", "added_tokens.json"))
    if kind not in _MODELS or set(settings) - _NO_MATTER - own or (legacy and "added_tokens_decoder" not in settings):
        return None
    named = {**defaults, **{name: _content(settings[name]) for name in _SPECIAL if name in settings}}
    special = {name: token for name, token in named.items() if token is not None}
    extra = [*(settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ())]
    if "extra_ids" in own:
        extra += _sentinels(settings.get("extra_ids", SENTINELS))
    try:
        backend = make(folder / "tokenizer.json", special, settings)
        there = backend is not None and _all_there(backend, special, extra, settings.get("added_tokens_decoder"))
    except Exception:  # of a damaged file, for which transformers has the words
        return None
    return Fast.of(backend, special, extra) if backend is not None and there else None


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _sentinels(count: int) -> list[str]:
    return [f"<extra_id_{i}>" for i in range(count)]


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) and token.get("__type") == "AddedToken" else token


def _all_there(
    backend: Tokenizer, special: Mapping[str, str], extra: Sequence[Any], told: Mapping[str, Any] | None
) -> bool:
    """Whether `transformers` would find nothing to add to the special tokens, nor to change."""
    from tokenizers import AddedToken

    there = {str(token): token for token in backend.get_added_tokens_decoder().values()}
    if not all(isinstance(token, str) for token in (*special.values(), *extra)):
        return False
    if told is not None:
        given = {int(i): AddedToken(**token) for i, token in told.items()}
        if repr(given) != repr(dict(sorted(backend.get_added_tokens_decoder().items()))):
            return False
    plain = {token: AddedToken(token, special=True, normalized=False) for token in extra}
    named = all(token in there and there[token].special for token in special.values())
    return named and all(repr(there.get(token)) == repr(own) for token, own in plain.items())


def _as_saved(file: Path, special: Mapping[str, str], settings: Mapping[str, Any]) -> Tokenizer | None:
    """The class without rules of its own takes a file as it is, but for a post-processor where there is none."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(file))
    return found if found.post_processor is not None else None


def _as_gpt2(file: Path, special: Mapping[str, str], settings: Mapping[str, Any]) -> Tokenizer | None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    found = Tokenizer.from_file(str(file))
    model = models.BPE({}, [], continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    split = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    same = _same((found.normalizer, None), (found.pre_tokenizer, split), (found.decoder, decoders.ByteLevel()))
    same = same and found.post_processor is not None and _settings(found) == _settings(Tokenizer(model))
    return found if same else None


def _as_bert(file: Path, special: Mapping[str, str], settings: Mapping[str, Any]) -> Tokenizer | None:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    found = Tokenizer.from_file(str(file))
    cls, sep, unknown = (special[f"{name}_token"] for name in ("cls", "sep", "unk"))
    normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    ids = [(token, found.token_to_id(token)) for token in (cls, sep)]
    around = processors.TemplateProcessing(f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", ids)
    same = _same(
        (found.normalizer, normalizer),
        (found.pre_tokenizer, pre_tokenizers.BertPreTokenizer()),
        (found.decoder, decoders.WordPiece(prefix="##")),
        (found.post_processor, around),
    )
    model = models.WordPiece({unknown: 0}, unk_token=unknown)
    return found if same and _settings(found) == _settings(Tokenizer(model)) else None


def _as_t5(file: Path, special: Mapping[str, str], settings: Mapping[str, Any]) -> Tokenizer | None:
    """All parts are made anew, and scores read by Python: the library's own reading is off by the last bit of some."""
    from tokenizers import AddedToken

    told = _json(file)
    normalizer = told["normalizer"] or {}
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    charsmap = next((step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled"), "")
    if told["model"]["type"] != "Unigram":
        return None
    made = _t5([(piece, score) for piece, score in told["model"]["vocab"]], base64.b64decode(charsmap))
    ids = {token.pop("content"): (token.pop("id"), token) for token in told["added_tokens"]}
    made.add_tokens([AddedToken(content, **flags) for content, (_, flags) in ids.items()])
    return made if all(made.token_to_id(content) == i for content, (i, _) in ids.items()) else None


def _t5(pieces: list[tuple[str, float]], charsmap: bytes) -> Tokenizer:
    """What T5's class makes of pieces and their scores, without its special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    if charsmap:
        made.normalizer = normalizers.Precompiled(charsmap)
    spaces = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    end = [("</s>", made.token_to_id("</s>"))]
    made.post_processor = processors.TemplateProcessing(["$A", "</s>"], ["$A", "</s>", "$B", "</s>"], end)
    return made


def _same(*pairs: tuple[Any, Any]) -> bool:
    """Whether the two parts of each pair are the same in full."""
    states = [[b"" if part is None else part.__getstate__() for part in pair] for pair in pairs]
    return all(one == other for one, other in states)


def _settings(tokenizer: Tokenizer) -> bytes:
    """All that a model of merges or of word pieces is told, but for its vocabulary."""
    return tokenizer.model.__getstate__().partition(b'"vocab":')[0]


_Make = Callable[[Path, Mapping[str, str], Mapping[str, Any]], "Tokenizer | None"]
_T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
# By class: what makes a tokenizer of a file, its own special tokens, and the settings that it reads.
_CLASSES: dict[str, tuple[_Make, dict[str, str], frozenset[str]]] = {
    "TokenizersBackend": (_as_saved, {}, frozenset()),
    "PreTrainedTokenizerFast": (_as_saved, {}, frozenset()),
    "T5Tokenizer": (_as_t5, _T5, frozenset(["extra_ids"])),
    "GPT2Tokenizer": (_as_gpt2, _GPT2, frozenset(["add_prefix_space"])),
    "BertTokenizer": (_as_bert, _BERT, frozenset(["do_lower_case", "strip_accents", "tokenize_chinese_chars"])),
}


def _from_spiece(file: Path) -> Fast | None:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as formats
    from tokenizers import AddedToken

    model: Any = formats.ModelProto  # type: ignore[attr-defined]  # made when it is imported
    try:
        told = model.FromString(file.read_bytes())
    except DecodeError:  # it is something else
        return None
    kinds, sentinels = model.SentencePiece, _sentinels(SENTINELS)
    names = [piece.piece for piece in told.pieces]
    own = any(piece.type == kinds.USER_DEFINED for piece in told.pieces) or not set(names).isdisjoint(sentinels)
    if own or names[:3] != ["<pad>", "</s>", "<unk>"]:
        return None
    pieces = [(piece.piece, piece.score) for piece in told.pieces] + [(name, 0.0) for name in reversed(sentinels)]
    made = _t5(pieces, told.normalizer_spec.precompiled_charsmap)
    extra = [*(piece.piece for piece in told.pieces if piece.type == kinds.CONTROL), *sentinels]
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in (*_T5.values(), *extra)])
    return Fast.of(made, _T5, extra)
