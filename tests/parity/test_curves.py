"""The same loss curve as Hugging Face's Trainer, from the same weights and batches, over 50 steps in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import SequentialSampler

from t2t.config import Optim
from t2t.data.loader import Loader
from t2t.data.masked import Masking, NextSentence
from t2t.data.objectives import Objective
from t2t.data.packing import IGNORE, Batch, RowShape
from t2t.data.ragged import Ragged
from t2t.data.text import BlockLM, Documents
from t2t.data.tokens import Marks
from t2t.models import load
from t2t.optim.build import Optimizer, schedule
from t2t.train.step import train_step

STEPS, BATCH, LENGTH, VOCABULARY, RATE = 50, 8, 32, 48, 3e-3
SETTINGS = Optim(name="adamw", schedule="linear", weight_decay=0.01, clip=1.0)
GPT: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "bos_token_id": 1, "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def documents() -> tuple[Documents, np.ndarray]:
    """Text with something to learn: few tokens are most of it; and where its sentences end."""
    rng = np.random.default_rng(0)
    texts = [5 + rng.geometric(0.3, 90) % 43 for _ in range(30)]
    where = tuple(map(str, range(len(texts))))
    return Documents(Ragged.of(texts, VOCABULARY), where, words=0), np.arange(9, 30 * 90 + 1, 9)


def examples(kind: str) -> Objective:
    text, sentences = documents()
    if kind == "gpt2":
        return BlockLM(text, start_id=1, block=LENGTH)
    marks = Marks(cls=2, sep=3, mask=4, ordinary=np.arange(VOCABULARY) > 4, continues=None)
    return NextSentence(text, sentences, Masking(marks, most=6), LENGTH)


def ours(folder: Path, loader: Loader) -> list[float]:
    model = load.load(folder)[0].train()
    optimizer = Optimizer(dict(model.named_parameters()), SETTINGS, RATE, schedule(SETTINGS, STEPS))
    steps = range(STEPS)
    return [train_step(model, optimizer, loader.step(n), n, 1, SETTINGS.clip, 0.0).loss for n in steps]


def padded(batches: list[Batch], kind: str) -> dict[str, torch.Tensor]:
    """A step's examples as transformers takes them: one a row, and GPT-2's labels where the tokens themselves are."""
    examples = []
    for batch in batches:
        for r, s in np.argwhere(batch.example_ids >= 0):
            slots = np.flatnonzero(batch.target_segments[r] == s + 1)
            ids, labels = batch.target_ids[r, slots], batch.labels[r, slots]
            if kind == "gpt2":  # its model moves labels by one place, ours are where they are predicted
                ids, labels = np.append(ids, 0), np.append(IGNORE, labels)
            found = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}
            if batch.target_types is not None and batch.pair_labels is not None:
                found |= {"token_type_ids": batch.target_types[r, slots]}
                found |= {"next_sentence_label": batch.pair_labels[r, s]}
            examples.append({name: torch.as_tensor(values) for name, values in found.items()})
    names = examples[0].keys()
    return {
        name: pad_sequence([e[name] for e in examples], True, IGNORE if name == "labels" else 0)
        if examples[0][name].ndim
        else torch.stack([e[name] for e in examples])
        for name in names
    }


def theirs(model: Any, items: list[dict[str, torch.Tensor]], folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class Recorder(Trainer):
        def _get_train_sampler(self, *arguments: Any) -> Any:
            return SequentialSampler(items)

        def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
            found = super().compute_loss(*arguments, **settings)
            losses.append((found[0] if isinstance(found, tuple) else found).item())
            return found

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,  # an item is a batch already
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        weight_decay=SETTINGS.weight_decay,
        max_grad_norm=SETTINGS.clip,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Recorder(model, arguments, lambda found: found[0], items).train()  # type: ignore[arg-type]
    return losses


@pytest.mark.parametrize("raw", [GPT, BERT], ids=["gpt2", "bert"])
def test_the_loss_curve_is_that_of_the_hugging_face_trainer(raw: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, BertForPreTraining, GPT2LMHeadModel

    kind = raw["model_type"]
    torch.manual_seed(0)
    settings = raw | ({"n_positions": LENGTH + 1} if kind == "gpt2" else {})
    peer = (GPT2LMHeadModel if kind == "gpt2" else BertForPreTraining)(AutoConfig.for_model(**settings))
    peer.save_pretrained(tmp_path)
    shape = RowShape(0, 2 * LENGTH, 1.0, 1.0, 1.0, 1.0)
    loader = Loader(examples(kind), BATCH, shape, micro_rows=2, seed=1, pad_id=0, static=False)
    assert loader.steps_per_epoch < STEPS  # another epoch begins
    expected = theirs(peer, [padded(loader.step(n), kind) for n in range(STEPS)], tmp_path / "trainer")
    curve = ours(tmp_path, loader)
    assert len(curve) == len(expected) == STEPS
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(curve, expected, rtol=0, atol=1e-4)
