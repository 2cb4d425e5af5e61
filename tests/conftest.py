"""What several test files share: no network, one thread, a tiny config for every kind of T5, and a tiny run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest
import tiny as tiny_run
import torch
from torch import nn

from t2t import config
from t2t.config import Config

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when kernels are defined

Raw = dict[str, Any]

# A width that is not heads x channels, and distances beyond the last bucket, show what equal sizes would hide.
TINY: Raw = {
    "model_type": "t5",
    "vocab_size": 48,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}
UNTIED: Raw = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
VARIANTS: dict[str, Raw] = {
    "t5": TINY,
    "flan": TINY | UNTIED,
    "mt5": TINY | UNTIED | {"model_type": "mt5"},
    "mt5-tied": TINY | {"model_type": "mt5"},
    "umt5": TINY | UNTIED | {"model_type": "umt5"},
    "umt5-tied": TINY | {"model_type": "umt5"},
    "byt5": TINY | UNTIED | {"vocab_size": 384, "num_layers": 4, "num_decoder_layers": 1},
    "deep-decoder": TINY | {"num_layers": 1, "num_decoder_layers": 3, "feed_forward_proj": "gated-silu"},
}


@pytest.fixture(params=VARIANTS)
def raw(request: pytest.FixtureRequest) -> Raw:
    """The tiny config of every variant in turn, as its ``config.json`` would say it."""
    return dict(VARIANTS[request.param])


@pytest.fixture
def tiny() -> Raw:
    """The smallest T5, for tests that do not turn on the variant."""
    return dict(TINY)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    """The config of a tiny run (see tiny.py) with some keys changed; its files are in ``tmp_path``."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_run.RAW))
    tiny_run.write_pairs(tmp_path / "pairs.tsv", 20)

    def make(folder: str = "run", /, **overrides: str | list[str]) -> Config:
        return config.load(overrides=tiny_run.settings(tmp_path, folder, **overrides))

    return make


@pytest.fixture
def huggingface() -> Callable[[Raw], Any]:
    """Builds the transformers model of a config, with norms, tables and an untied head that show when misused."""

    def build(raw: Raw) -> Any:
        from transformers import AutoConfig, AutoModelForSeq2SeqLM

        torch.manual_seed(0)
        settings = {key: value for key, value in raw.items() if key != "model_type"}
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(raw["model_type"], **settings)).eval()
        if raw.get("tie_word_embeddings") is False:  # transformers ties all T5 that it makes itself
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.shared.weight))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "relative_attention_bias" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
        return model

    return build
