"""Small tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

from t2t.data.tokens import HuggingFace

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "the cat sat on the mat and the dog ate the answer of the assistant user hello there"


def chatting(template: str | None, merges: bool = False) -> HuggingFace:
    """Bytes under GPT-2's names for them, with merges of some English words or with none."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    specials = ["<pad>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = 340 if merges else 0
    inner.train_from_iterator(
        [WORDS, "\n\n\n"] * 50,
        BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=specials[2:],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return HuggingFace(fast, "tiny")


def letters(folder: Path) -> Path:
    """A WordPiece tokenizer of single letters."""
    folder.mkdir()
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder
