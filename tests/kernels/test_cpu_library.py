"""The native kernels are built once, by the first process; where that fails, torch's kernels run, with a warning."""

import ctypes
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.fast.decoder import Decoder
from kvrelay.engine.models.fast.native import NativeDecoder
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.kernels.cpu import library as module
from kvrelay.kernels.cpu.attention import AttentionArgs
from kvrelay.kernels.cpu.library import build, library
from kvrelay.kernels.cpu.packed import EmbedArgs, LinearArgs, NormArgs
from kvrelay.kernels.cpu.passes import PassArgs
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.cpu.sample import ROW, SampleArgs
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.paged import logits_by
from support.processes import wait_until

needs_kernels = pytest.mark.skipif(library() is None, reason="no native kernels here")
OPTIONS = EngineConfig(kv_memory_bytes=2**22, threads=1)

BUILD = """
import pathlib, sys
from kvrelay.kernels.cpu import library
library.SOURCES = pathlib.Path(sys.argv[2])
print(library.build(pathlib.Path(sys.argv[1])))
"""


@pytest.fixture
def few_sources(tmp_path: Path) -> Path:
    """Two of the kernels' sources, which compile in a second."""
    folder = tmp_path / "native"
    folder.mkdir()
    for source in ("team.cpp", "tiles.cpp", "team.h", "tiles.h"):
        shutil.copy(module.SOURCES / source, folder)
    return folder


def slow_compiler(folder: Path) -> Path:
    """A compiler that records its calls and is slow for one source file."""
    script = folder / "slow-c++"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
        f'case "$*" in *-c*team.cpp*) touch {folder}/begun; sleep 1;; esac\nexec c++ "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def builder(folder: Path, sources: Path, compiler: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, folder, sources],
        env=os.environ | {"CXX": str(compiler)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@needs_kernels
def test_several_builders_at_once_build_once_and_a_killed_one_holds_nobody_up(
    tmp_path: Path, few_sources: Path
) -> None:
    compiler, folder = slow_compiler(tmp_path), tmp_path / "kept"
    folder.mkdir()
    killed = builder(folder, few_sources, compiler)
    wait_until((tmp_path / "begun").exists, "it compiles", 60.0)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    (tmp_path / "calls").unlink()
    others = [builder(folder, few_sources, compiler) for _ in range(3)]
    built = {other.communicate(timeout=150)[0].strip() for other in others}
    assert len(built) == 1
    assert ctypes.CDLL(built.pop()).kvrelay_use_tiles
    links = [line for line in (tmp_path / "calls").read_text().splitlines() if "-shared" in line]
    assert len(links) == 1


@needs_kernels
def test_a_long_build_is_said_while_it_goes_on(
    tmp_path: Path, few_sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both by the process that compiles and by one that waits for it."""
    monkeypatch.setattr(module, "SOURCES", few_sources)
    monkeypatch.setattr(module, "SAID_SECONDS", 0.2)
    monkeypatch.setenv("CXX", str(slow_compiler(tmp_path)))
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda _: build(tmp_path), range(2)))
    assert built[0] == built[1]
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("compiling the native CPU kernels: ") for line in said), said
    assert any(line.startswith("another process compiles the native CPU kernels: ") for line in said), said


@needs_kernels
def test_arguments_are_laid_out_as_the_kernels_read_them() -> None:
    """Python's and C++'s structs have the same size; a missing or mistyped field would change it."""
    kernels = library()
    kernels.kvrelay_args_bytes.restype = ctypes.c_int64
    structs = LinearArgs, EmbedArgs, SampleArgs, AttentionArgs
    for index, size in enumerate((*map(ctypes.sizeof, structs), ROW.size, *map(ctypes.sizeof, (PassArgs, NormArgs)))):
        assert kernels.kvrelay_args_bytes(index) == size, index


@pytest.fixture
def forgotten() -> Iterator[None]:
    """The kernels are looked for anew, in the test and after it."""
    module.attempt.cache_clear()
    yield
    module.attempt.cache_clear()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("_compiler", lambda: "/bin/false"), "/bin/false failed"),
        (("cpu_features", lambda: frozenset({"avx"})), "the CPU has no avx2, fma"),
    ],
    ids=["compiler-fails", "older-cpu"],
)
def test_without_kernels_torch_runs_the_model_and_it_is_said_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: tuple[str, object],
    message: str,
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    tokens = random.Random(0).choices(range(VOCAB_SIZE), k=50)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    native = build_cpu_runner(folder, "float32", OPTIONS)
    assert isinstance(native.model, Decoder if library() is None else NativeDecoder)
    module.attempt.cache_clear()
    monkeypatch.setattr(module, *change)
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            plain = build_cpu_runner(folder, "float32", OPTIONS)
        assert type(plain.model) is Decoder
    torch.testing.assert_close(logits_by(plain, tokens), logits_by(native, tokens), atol=1e-4, rtol=0)
    (said,) = [record.getMessage() for record in caplog.records if "no native CPU kernels" in record.getMessage()]
    assert message in said
    assert message in module.missing()


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler|the CPU has no"):
        build(tmp_path)


@needs_kernels
def test_an_idle_team_uses_no_cpu_and_ends_with_its_owner() -> None:
    kernels = library()
    before = threads_of_this_process()
    team = Team(kernels, 3)
    empty = Program(kernels)
    team.run(empty)
    assert threads_of_this_process() == before + 2
    time.sleep(0.3)  # past the spinning
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.1
    del team
    wait_until(lambda: threads_of_this_process() == before, "its threads end")


@needs_kernels
def test_a_run_lets_other_python_threads_go_on(tmp_path: Path) -> None:
    """Two teams at once, with many runs each: neither hangs, and other Python threads continue."""
    kernels = library()
    enough = threading.Event()

    def many() -> None:
        team = Team(kernels, 2)
        program = Program(kernels)
        runs = 0
        while runs < 2000 or not enough.is_set():
            team.run(program)
            runs += 1

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(many) for _ in range(2)]
        for _ in range(20):
            enough.wait(0.001)
        assert not any(job.done() for job in jobs), "one of them failed"
        enough.set()
        for job in jobs:
            job.result(timeout=60)


def threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def cpu_with(monkeypatch: pytest.MonkeyPatch, *sets: str) -> None:
    """Makes this CPU one that has these instruction sets."""
    had = [each.needed for each in module.INSTRUCTION_SETS if each.name in sets]
    monkeypatch.setattr(module, "cpu_features", lambda: frozenset().union(*had))


def test_the_best_prebuilt_kernels_that_the_cpu_can_run_are_taken_and_none_of_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {each.name: tmp_path / module._prebuilt_name(each) for each in module.INSTRUCTION_SETS}
    for name in ("avx2", "avx512", "avx512bf16", "amx"):
        cpu_with(monkeypatch, name)
        assert module.prebuilt(tmp_path) in (None, *files.values())
        files[name].touch()
        assert module.prebuilt(tmp_path) == files[name]
    cpu_with(monkeypatch, "avx512")
    assert module.prebuilt(tmp_path) == files["avx512"]
    avx2 = next(each for each in module.INSTRUCTION_SETS if each.name == "avx2")
    assert module.prebuilt(tmp_path, avx2) == files["avx2"]
    assert module.prebuilt(tmp_path, module.INSTRUCTION_SETS[0]) is None
    monkeypatch.setattr(module, "_source_bytes", lambda: b"changed")
    assert module.prebuilt(tmp_path) is None
    cpu_with(monkeypatch)
    assert module.prebuilt(tmp_path) is None


@needs_kernels
def test_prebuilt_kernels_need_no_compiler(tmp_path: Path, few_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process compiles them; another, which finds no compiler and has no cache, uses them."""
    monkeypatch.setattr(module, "SOURCES", few_sources)
    module.prebuild(tmp_path, module.INSTRUCTION_SETS[-1:])
    user = """
import pathlib, sys
from kvrelay.kernels.cpu import library
library.SOURCES = pathlib.Path(sys.argv[2])
found = library.prebuilt(pathlib.Path(sys.argv[1]))
library.prebuilt = lambda **_: found
assert found is not None and library.library() is not None
"""
    environment = os.environ | {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", user, tmp_path, few_sources], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@needs_kernels
@pytest.mark.usefixtures("forgotten")
def test_kernels_are_compiled_where_the_prebuilt_ones_can_t_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(module, "prebuilt", lambda **_: damaged)
    with caplog.at_level(logging.WARNING):
        kernels = library()
    assert kernels._name == str(build(instructions=module.named_set()))
    (said,) = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert "damaged.so" in said


@needs_kernels
@pytest.mark.usefixtures("forgotten")
def test_the_variable_names_the_instruction_set(
    tmp_path: Path, few_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are those of the set that is named; a set that this CPU lacks is refused, not replaced."""
    features = module.cpu_features()
    monkeypatch.setattr(module, "SOURCES", few_sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(module.VARIABLE, "avx2")
    kernels = library()
    assert module.instruction_set(kernels) == "avx2"
    allowed = ", ".join(each.name for each in module.INSTRUCTION_SETS if each.needed <= features)
    for each in module.INSTRUCTION_SETS:
        monkeypatch.setenv(module.VARIABLE, each.name)
        if each.needed <= features:
            assert module.named_set() is each
            continue
        lacks = ", ".join(sorted(each.needed - features))
        module.attempt.cache_clear()
        with pytest.raises(ValueError, match=rf"{each.name}.*no {lacks}; allowed here: {allowed}$"):
            library()
    monkeypatch.setenv(module.VARIABLE, "sse2")
    with pytest.raises(ValueError, match=rf"^{module.VARIABLE} is 'sse2'; allowed here: {allowed}$"):
        library()
    monkeypatch.setenv(module.VARIABLE, "")
    assert module.named_set() is None
