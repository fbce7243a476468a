"""The native kernels (`native/*.cpp`): compiled once for the machine that they run on, cached, called through ctypes.

They include only headers of the compiler and libc, so a build takes a few seconds. The library is cached in
`$XDG_CACHE_HOME/kvrelay`; its name is a hash of sources, compiler, flags and CPU features. torch's own extension loader
isn't used: if a builder is killed, its lock file stays, and every later builder waits forever. The lock here is a
flock, which the operating system releases when the process ends.
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
"""-O3 takes 1.5 times as long to compile, and the kernels aren't faster: loops that must be unrolled have a pragma."""
NEEDED = frozenset({"avx2", "fma"})
"""Features that the CPU must have; without them, torch's own kernels are as fast."""
BUILD_SECONDS = 120.0


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, built if necessary; None where that is impossible, with a warning that gives the reason."""
    try:
        kernels = ctypes.CDLL(str(build()))
        kernels.kvrelay_use_tiles(1)
        return kernels
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("no native CPU kernels; using torch's, which are slower: %s", error)
        return None


def build(folder: Path | None = None) -> Path:
    """The shared library's file, built unless it exists. Several processes may call this at once.

    Args:
        folder: the cache; the user's unless given.

    Raises:
        RuntimeError: the CPU lacks a feature, there is no compiler, or the compiler failed; the text says which.
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
    """Takes the lock that a builder holds while it compiles.

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
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kvrelay-kernels-"))


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    """Compiles in a temporary folder beside `target` and renames the result, so that no process loads a part of it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        # A list, so that the first error is raised here.
        list(pool.map(lambda source, made: _run(compiler, *FLAGS, "-c", source, "-o", made), sources, objects))
        linked = Path(folder) / target.name
        _run(compiler, *FLAGS, "-shared", *objects, "-o", linked)
        linked.replace(target)


def _run(*command: str | Path) -> str:
    """The command's standard output.

    Raises:
        RuntimeError: it failed; the text has the beginning of its standard error.
    """
    result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed: {result.stderr.strip()[:1000]}")
    return result.stdout
