"""The public wire contract only ever gains: clients of the released contract can call any later router."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RELEASED = ROOT / "tests" / "data" / "contract-0.1.0"
CONTRACT = Path("kvrelay", "v1", "inference.proto")
BUF = "@bufbuild/buf@1.75.0"
SECONDS = 120


@pytest.fixture(scope="module")
def buf() -> Sequence[str]:
    """The command of buf: the one that is installed, else that of its npm package."""
    if found := shutil.which("buf"):
        return [found]
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("neither buf nor npm is installed")
    command = [npm, "exec", "--yes", f"--package={BUF}", "--", "buf"]
    try:
        tried = subprocess.run([*command, "--version"], timeout=SECONDS, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm didn't bring {BUF} within {SECONDS} s")
    if tried.returncode:
        pytest.skip(f"npm can't bring {BUF}: {tried.stderr.strip()[-200:]}")
    return command


def breaks(buf: Sequence[str], contract: Path) -> list[str]:
    """Findings of buf in `contract`, the folder of the .proto files, that break callers of the released contract."""
    command = [*buf, "breaking", contract, "--against", RELEASED]
    done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, cwd=contract)
    lines = done.stdout.splitlines()
    assert bool(lines) == bool(done.returncode), done.stderr
    return lines


@pytest.mark.more
def test_the_contract_breaks_no_caller_of_the_released_one(buf: Sequence[str]) -> None:
    assert breaks(buf, ROOT / "proto") == []


def test_a_break_is_found(buf: Sequence[str], tmp_path: Path) -> None:
    contract = Path(shutil.copytree(ROOT / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("gen")))
    text = (contract / CONTRACT).read_text()
    renumbered = text.replace("uint32 prompt_tokens = 1;", "uint32 prompt_tokens = 9;")
    (contract / CONTRACT).write_text(renumbered.replace("FINISH_REASON_LENGTH = 2", "FINISH_REASON_FULL = 2"))
    found = breaks(buf, contract)
    assert any('"prompt_tokens"' in line for line in found)
    assert any("FINISH_REASON_LENGTH" in line for line in found)
