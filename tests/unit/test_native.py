"""The compiled kernels: what they are compiled with, where they are kept, and that a run goes on without them."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from t2t.kernels import cpu
from t2t.kernels.cpu import native
from t2t.kernels.cpu.blocks import Blocks
from t2t.kernels.cpu.by_segment import SegmentBias
from t2t.kernels.reference import Sight

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("T2T_NATIVE", raising=False)
    native._library.cache_clear()
    yield tmp_path / "t2t/native"
    native._library.cache_clear()


def compiler(folder: Path, script: str) -> str:
    """A command that stands for a compiler."""
    file = folder / "compiler"
    file.write_text(f"#!{sys.executable}\n{script}\n")
    file.chmod(0o755)
    return str(file)


def way() -> type:
    segments = torch.ones(1, 2, dtype=torch.long)
    return type(cpu.attention_bias(Sight(segments, segments)))


@needs_compiler
def test_the_library_is_compiled_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert way() is SegmentBias
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    (file,) = fresh.iterdir()
    before = file.stat()
    native._library.cache_clear()
    assert native.library() is not None
    assert [x.stat() for x in fresh.iterdir()] == [before]
    # Another source is another library, beside the first.
    source = fresh / "other.c"
    source.write_text(native.SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "SOURCE", source)
    native._library.cache_clear()
    assert native.library() is not None
    assert len(list(fresh.glob("*.so"))) == 2


@needs_compiler
def test_processes_that_start_together_compile_side_by_side(fresh: Path) -> None:
    code = "from t2t.kernels.cpu import native; assert native.library() is not None"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert len(list(fresh.iterdir())) == 1


def test_the_environment_turns_it_off(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("T2T_NATIVE", "0")
    assert way() is Blocks
    assert not fresh.exists() and not capfd.readouterr().err


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (None, "is not here"),
        ("import sys; sys.exit('no such processor')", "no such processor"),
        ("", "file too short"),  # says it compiled, and did not
    ],
)
def test_without_a_compiler_that_works_torch_computes(
    script: str | None,
    told: str,
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CC", "t2t-no-such-compiler" if script is None else compiler(tmp_path, script))
    assert way() is Blocks and way() is Blocks
    notes = capfd.readouterr().err.splitlines()
    assert len(notes) == 1 and notes[0].startswith("note: ") and told in notes[0]
    assert not list(fresh.parent.rglob("*.so"))
    rms = cpu.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
    torch.testing.assert_close(rms, torch.tensor([[3.0, 4.0]]) / 12.5**0.5)


def test_a_machine_without_any_compiler(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert way() is Blocks
    assert "no C compiler" in capfd.readouterr().err


def test_arguments_in_cc_are_passed_on_and_no_shell_reads_them(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    script = f"import sys; open({str(log)!r}, 'a').write(repr(sys.argv[1:3])); sys.exit(1)"
    monkeypatch.setenv("CC", f"{compiler(tmp_path, script)} -DX='a b' $(touch {tmp_path}/shell)")
    assert native.library() is None
    assert log.read_text() == repr(["-DX=a b", "$(touch"])
    assert not (tmp_path / "shell").exists()


def test_a_folder_that_others_may_write_to_is_not_used(fresh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert native.library() is None
    assert "others may write there" in capfd.readouterr().err


def test_a_folder_that_cannot_be_made_means_torch(fresh: Path) -> None:
    fresh.parent.write_text("a file")
    assert native.library() is None


def test_other_dtypes_are_torchs() -> None:
    assert not native.serves(torch.float64) and not native.serves(torch.bfloat16)


@needs_compiler
def test_what_c_would_read_wrongly_is_refused(fresh: Path) -> None:
    """Under autocast products come out in bf16 while the bias is fp32; torch's default dtype is nobody's concern."""
    segments = torch.ones(1, 2, dtype=torch.long)
    bias = cpu.attention_bias(Sight(segments, segments))
    packed = torch.randn(1, 2, 3, 1, 4)
    with pytest.raises(TypeError, match="fp32"):
        cpu.attention([packed.bfloat16()], bias, 0.0)
    expected = cpu.attention([packed], bias, 0.0)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(cpu.attention([packed], bias, 0.0), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_compiler
def test_several_threads_are_left_to_torch(fresh: Path) -> None:
    assert native.serves(torch.float32)
    torch.set_num_threads(2)
    try:
        assert not native.serves(torch.float32)
    finally:
        torch.set_num_threads(1)


def test_a_user_without_a_home_has_torch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert native.library() is None
