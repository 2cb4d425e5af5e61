"""What we run on, asked of a machine that may have nothing but a CPU."""

from __future__ import annotations

import os

import pytest
import torch

from t2t import device as devices
from t2t.errors import InputError

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 2) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind) if kind else None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert devices.resolve() == devices.resolve("cpu") == CPU
    pretend(monkeypatch, "cuda")
    assert devices.resolve() == CUDA
    assert devices.resolve("cpu") == CPU
    assert devices.resolve("cuda:1") == torch.device("cuda:1")


def test_ranks_of_a_machine_take_an_accelerator_each(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    pretend(monkeypatch, "cuda")
    second = torch.device("cuda:1")
    assert devices.resolve(rank=1) == devices.resolve("cuda", rank=1) == second
    assert chosen == [second, second]
    assert (devices.resolve("cpu", rank=1), devices.resolve("cuda:0", rank=1)) == (CPU, torch.device("cuda:0"))
    with pytest.raises(InputError, match=r"run.device: 'cuda:2' is not here; found: cpu, cuda \(2\)"):
        devices.resolve(rank=2)
    assert devices.backend() == "cpu:gloo,cuda:nccl"
    pretend(monkeypatch, None)
    assert (devices.resolve(rank=1), devices.backend()) == (CPU, "gloo")


@pytest.mark.parametrize(
    ("here", "name", "words"),
    [
        (None, "cuda", "run.device: 'cuda' is not here; found: cpu"),
        (None, "cqu", "run.device: 'cqu' is not here; found: cpu"),
        (None, "", "run.device: '' is not here; found: cpu"),
        ("cuda", "mps", "run.device: 'mps' is not here; found: cpu, cuda (2)"),
        ("cuda", "cuda:2", "run.device: 'cuda:2' is not here; found: cpu, cuda (2)"),
    ],
)
def test_what_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, here: str | None, name: str, words: str) -> None:
    pretend(monkeypatch, here)
    with pytest.raises(InputError) as caught:
        devices.resolve(name)
    assert str(caught.value) == words


def test_threads_are_those_asked_for_or_those_we_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        assert devices.use_threads(1) == torch.get_num_threads() == 1
        if hasattr(os, "sched_getaffinity"):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
            assert devices.use_threads(0) == 3
            assert [devices.use_threads(0, processes=count) for count in (2, 3, 8)] == [1, 1, 1]
            assert devices.use_threads(2, processes=8) == 2
    finally:
        torch.set_num_threads(before)


def test_precision_by_device() -> None:
    assert devices.compute_dtype("auto", CPU) == torch.float32
    assert devices.compute_dtype("mixed", CPU) == torch.bfloat16
    assert devices.compute_dtype("auto", CUDA) == devices.compute_dtype("mixed", CUDA) == torch.bfloat16
    assert devices.compute_dtype("fp32", CUDA) == torch.float32
    assert [devices.static_shapes(d) for d in (CPU, CUDA, MPS)] == [False, True, True]


def test_memory_of_the_process_grows_with_what_it_holds() -> None:
    before = devices.peak_memory(CPU)
    block = torch.ones(max(before, 2**26) // 4 + 2**24)
    assert devices.peak_memory(CPU) >= block.nbytes
    assert devices.peak_memory(CPU) < devices.total_memory(CPU)
    assert devices.total_memory(MPS) == devices.peak_memory(MPS) == 0


def test_the_device_in_words() -> None:
    words = devices.describe(CPU)
    assert words.startswith("cpu, ")
    assert words.endswith(f", {torch.get_num_threads()} threads")
