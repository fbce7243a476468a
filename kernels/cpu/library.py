"""The native kernels (`native/*.cpp`): compiled once for the machine they run on, kept, and called through ctypes.

They include no headers but the compiler's and the C library's, so a build takes a few seconds. What was built is kept
in `$XDG_CACHE_HOME/kvrelay` under a name that says what it was made of: sources, compiler, flags, and what the CPU can
do. torch's own extension loader is not used: a builder that is killed leaves its lock file behind there, and everybody
after it waits for ever. Here the lock is the kernel's and goes with the process.
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
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TextIO

__all__ = ["build", "library"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++20", "-O2", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-pthread")
"""-O3 compiles half as long again, for kernels that are no faster: what must be unrolled says so."""
NEEDED = frozenset({"avx2", "fma"})
"""What a CPU must have; with less, torch's own kernels are as good."""
BUILD_SECONDS = 120.0


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, built if they aren't yet; None, with a warning that says why, where they can't be had."""
    try:
        kernels = ctypes.CDLL(str(build()))
        kernels.kvrelay_use_tiles(1)
        return kernels
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("no native CPU kernels, torch's are used, which are slower: %s", error)
        return None


def build(folder: Path | None = None) -> Path:
    """The shared library's file, made unless it is there already. Several processes may call this at once.

    Args:
        folder: where built libraries are kept.

    Raises:
        RuntimeError: the CPU, or the lack of a compiler, rules it out, or the compiler failed; the text says which.
        OSError: the folder can't be written.
    """
    features = cpu_features()
    if missing := NEEDED - features:
        raise RuntimeError(f"the CPU has no {', '.join(sorted(missing))}")
    compiler = _compiler()
    sources, headers = sorted(SOURCES.glob("*.cpp")), sorted(SOURCES.glob("*.h"))
    version = _run(compiler, "--version")
    digest = hashlib.sha256("\0".join((compiler, *FLAGS, *sorted(features), version)).encode())
    for path in sources + headers:
        digest.update(path.name.encode() + path.read_bytes())
    folder = folder or _cache_folder()
    built = folder / f"kernels-{digest.hexdigest()[:24]}.so"
    if built.exists():
        return built
    with (folder / "build.lock").open("w") as lock:
        _wait_for(lock)
        if not built.exists():
            _compile(compiler, sources, built)
    return built


def _wait_for(lock: TextIO) -> None:
    """Takes the lock, which whoever builds holds; it goes with its process.

    Raises:
        RuntimeError: another process has held it for longer than a build takes.
    """
    deadline = time.monotonic() + BUILD_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError(f"another process has held {lock.name} for {BUILD_SECONDS:.0f} s") from None
            time.sleep(0.05)


def cpu_features() -> frozenset[str]:
    """What this CPU can do, as the kernel names it; empty where it doesn't tell, or on another architecture."""
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
    raise RuntimeError("there is no C++ compiler (c++, g++, clang++, or what CXX names)")


def _cache_folder() -> Path:
    """The user's, or one of this process's own where that can't be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kvrelay-kernels-"))


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    """Compiles to files beside `target` and moves the result there, so that nobody ever sees half of one."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        made = Path(scratch) / target.name
        with ThreadPoolExecutor() as pool:
            jobs = [
                pool.submit(_run, compiler, *FLAGS, "-c", source, "-o", made_of)
                for source, made_of in zip(sources, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        _run(compiler, *FLAGS, "-shared", *objects, "-o", made)
        made.replace(target)


def _run(*command: str | Path) -> str:
    """What the command prints.

    Raises:
        RuntimeError: it failed; with what it said first.
    """
    result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed: {result.stderr.strip()[:1000]}")
    return result.stdout
