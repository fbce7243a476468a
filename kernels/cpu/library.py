"""The native kernels (`native/*.cpp`): called through ctypes, compiled beforehand or for the machine that they run on.

An image without a compiler has them for several instruction sets (`python -m kvrelay.kernels.cpu.prebuild`), of which
the best that the CPU knows is taken. Elsewhere they are compiled once, when they are first needed. The environment
variable KVRELAY_INSTRUCTION_SET names a lesser one. They include only headers of the compiler and libc, so a build
takes a few seconds. The library is cached in `$XDG_CACHE_HOME/kvrelay`; its name is a hash of sources, compiler, flags
and CPU features. torch's own extension loader isn't used: if a builder is killed, its lock file stays, and every later
builder waits forever. The lock here is a flock, which the operating system releases when the process ends.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TextIO

from kvrelay.machine.cache import user_cache

__all__ = ["attempt", "build", "instruction_set", "library", "load", "missing", "named_set", "prebuild"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Folder in which an image has the kernels for INSTRUCTION_SETS."""
VARIABLE = "KVRELAY_INSTRUCTION_SET"
"""The environment variable that names one of INSTRUCTION_SETS; empty or not set takes the best that the CPU has."""
NATIVE = ("-march=native",)
FLAGS = ("-std=c++20", "-O2", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-pthread")
"""Flags of the compiler. -O3 takes 1.5 times as long, and the kernels aren't faster: loops that must be unrolled have a
pragma. The sources say which products and sums are fused (`simd.h`)."""
NEEDED = frozenset({"avx2", "fma"})
"""Features that the CPU must have; without them, torch's own kernels are as fast."""
BUILD_SECONDS = 600.0
"""Limit in seconds for one file, which takes a few on an idle machine; and for the build of another process."""
SAID_SECONDS = 20.0
"""Seconds between two warnings that a build still goes on."""
PREBUILD_SECONDS = 1800.0
"""Limit in seconds for one file. Nobody waits for it but the build of an image, on however slow a machine."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Instructions that kernels are compiled for."""

    name: str
    flags: tuple[str, ...]
    """Flags of the compiler."""
    needed: frozenset[str]
    """Features that the CPU must have, by Linux's names."""


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
_AMX_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
INSTRUCTION_SETS = (
    InstructionSet("amx", _AMX_FLAGS, _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}),
    InstructionSet("avx512bf16", _BF16_FLAGS, _BF16),
    InstructionSet("avx512vnni", _VNNI_FLAGS, _VNNI),
    InstructionSet("avx512", ("-march=x86-64-v4",), _V4),
    InstructionSet("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    InstructionSet("avx2", ("-march=x86-64-v3",), _V3),
)
"""Instruction sets that the kernels' sources have code for, the fastest first."""


def library() -> ctypes.CDLL | None:
    """The kernels, built if necessary; None where that is impossible, with a warning that gives the reason.

    Raises:
        ValueError: KVRELAY_INSTRUCTION_SET names a set that isn't known or that this CPU doesn't have.
    """
    return attempt()[0]


def missing() -> str:
    """The reason why `library` has returned None; empty if it has kernels, or hasn't been called yet."""
    return attempt()[1] if attempt.cache_info().currsize else ""


@cache
def attempt() -> tuple[ctypes.CDLL | None, str]:
    """The only attempt of this process to get the kernels: see `library` and `missing`."""
    instructions = named_set()
    try:
        return load(instructions), ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("no native CPU kernels; using torch's, which are slower: %s", error)
        return None, str(error)


def named_set() -> InstructionSet | None:
    """The set that KVRELAY_INSTRUCTION_SET names; None if it names none.

    Raises:
        ValueError: the set isn't known, or this CPU doesn't have it; the text says what is allowed.
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    features = cpu_features()
    allowed = ", ".join(each.name for each in INSTRUCTION_SETS if each.needed <= features) or "none on this CPU"
    for each in INSTRUCTION_SETS:
        if each.name == name:
            if missing := each.needed - features:
                lacks = ", ".join(sorted(missing))
                raise ValueError(f"{VARIABLE} is {name!r}, but this CPU has no {lacks}; allowed here: {allowed}")
            return each
    raise ValueError(f"{VARIABLE} is {name!r}; allowed here: {allowed}")


def instruction_set(kernels: ctypes.CDLL) -> str:
    """The name of the instruction set that `kernels` were compiled for."""
    kernels.kvrelay_instruction_set.restype = ctypes.c_char_p
    return bytes(kernels.kvrelay_instruction_set()).decode()


def load(instructions: InstructionSet | None = None) -> ctypes.CDLL:
    """The kernels for `instructions`, or for the best set that the CPU has, built if necessary.

    Raises:
        RuntimeError, OSError: as `build`.
    """
    kernels = _load_prebuilt(instructions) or ctypes.CDLL(str(build(instructions=instructions)))
    kernels.kvrelay_use_tiles(1)
    return kernels


def _load_prebuilt(instructions: InstructionSet | None) -> ctypes.CDLL | None:
    """The kernels that are there already; None if there are none, or with a warning if they can't be loaded."""
    path = prebuilt(instructions=instructions)
    try:
        return None if path is None else ctypes.CDLL(str(path))
    except OSError as error:  # such as a damaged file, or another libc
        logger.warning("the prebuilt CPU kernels can't be loaded, so they are compiled here: %s", error)
        return None


def prebuilt(folder: Path = PREBUILT, instructions: InstructionSet | None = None) -> Path | None:
    """The file in `folder` for `instructions`, or for the best set that this CPU has; None if there is none of these
    sources."""
    features = cpu_features()
    sets = INSTRUCTION_SETS if instructions is None else (instructions,)
    files = (folder / _prebuilt_name(each) for each in sets if each.needed <= features)
    return next((file for file in files if file.is_file()), None)


def prebuild(folder: Path = PREBUILT, sets: Sequence[InstructionSet] = INSTRUCTION_SETS) -> None:
    """Compiles the kernels for several instruction sets, whatever this CPU has.

    Raises:
        RuntimeError: there is no compiler, or it failed.
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for each in sets:
        _compile(_compiler(), each.flags, folder / _prebuilt_name(each), PREBUILD_SECONDS)


def _prebuilt_name(instructions: InstructionSet) -> str:
    digest = hashlib.sha256("\0".join((*FLAGS, *instructions.flags)).encode() + _source_bytes())
    return f"kernels-{instructions.name}-{digest.hexdigest()[:24]}.so"


def _source_bytes() -> bytes:
    """All sources and headers with their names."""
    files = [*sorted(SOURCES.glob("*.cpp")), *sorted(SOURCES.glob("*.h"))]
    return b"".join(path.name.encode() + path.read_bytes() for path in files)


def build(folder: Path | None = None, instructions: InstructionSet | None = None) -> Path:
    """The shared library's file, built unless it exists. Several processes may call this at once.

    Args:
        folder: the cache; the user's unless given.
        instructions: the set to compile for, which this CPU needn't have; None for everything that this CPU has.

    Raises:
        RuntimeError: the CPU lacks a feature, there is no compiler, or the compiler failed; the text says which.
        OSError: the folder can't be written.
    """
    features = cpu_features()
    if missing := NEEDED - features:
        raise RuntimeError(f"the CPU has no {', '.join(sorted(missing))}")
    compiler = _compiler()
    version = _run(compiler, "--version")
    machine, name = (NATIVE, "native") if instructions is None else (instructions.flags, instructions.name)
    digest = hashlib.sha256("\0".join((compiler, *FLAGS, *machine, *sorted(features), version)).encode())
    digest.update(_source_bytes())
    folder = folder or _cache_folder()
    built = folder / f"kernels-{name}-{digest.hexdigest()[:24]}.so"
    if built.exists():
        return built
    with (folder / f"build-{name}.lock").open("w") as lock:
        _wait_for(lock)
        if not built.exists():
            _compile(compiler, machine, built)
    return built


def _wait_for(lock: TextIO) -> None:
    """Takes the lock that a builder holds while it compiles.

    Raises:
        RuntimeError: another process has held it for longer than a build takes.
    """
    began = said = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
            if now > began + BUILD_SECONDS:
                raise RuntimeError(f"another process has held {lock.name} for {BUILD_SECONDS:.0f} s") from None
            if now > said + SAID_SECONDS:
                said = now
                logger.warning("another process compiles the native CPU kernels: waited for %.0f s so far", now - began)
            time.sleep(0.05)


def cpu_features() -> frozenset[str]:
    """The features of this CPU, by Linux's names; empty where /proc/cpuinfo has none, or on another architecture."""
    if platform.machine() != "x86_64":
        return frozenset()
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("flags"):
                return frozenset(line.split(":")[1].split())
    return frozenset()


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise RuntimeError("there is no C++ compiler (c++, g++, clang++, or the one that CXX names)")


def _cache_folder() -> Path:
    """The user's cache folder, or a temporary one where that can't be written."""
    folder = user_cache()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kvrelay-kernels-"))


def _compile(compiler: str, machine: tuple[str, ...], target: Path, seconds: float = BUILD_SECONDS) -> None:
    """Compiles in a temporary folder beside `target` and renames the result, so that no process loads a part of it."""
    sources, flags = sorted(SOURCES.glob("*.cpp")), (*FLAGS, *machine)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        run = partial(_run, seconds=seconds)
        began = time.monotonic()
        pairs = zip(sources, objects, strict=True)
        jobs = [pool.submit(run, compiler, *flags, "-c", source, "-o", made) for source, made in pairs]
        while wait(jobs, SAID_SECONDS).not_done:
            logger.warning("compiling the native CPU kernels: %.0f s so far", time.monotonic() - began)
        for job in jobs:
            job.result()
        linked = Path(folder) / target.name
        run(compiler, *flags, "-shared", *objects, "-o", linked)
        linked.replace(target)


def _run(*command: str | Path, seconds: float = BUILD_SECONDS) -> str:
    """The command's standard output.

    Raises:
        RuntimeError: it failed; the text has the beginning of its standard error.
    """
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed: {result.stderr.strip()[:1000]}")
    return result.stdout
