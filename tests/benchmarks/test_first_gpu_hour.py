"""`benchmarks/first_gpu_hour.sh` without a GPU: its steps could be run, it goes on where it stopped, and it reports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "first_gpu_hour.sh"
STEPS = ("environment", "kernels", "engine", "links", "pair", "sanitizer", "gpu_kernels", "gpu_engine")


def run(out: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), "--out", str(out), *arguments]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_every_step_could_be_run_and_fits_the_time(tmp_path: Path) -> None:
    done = run(tmp_path, "--dry-run", "--seconds", str(25 * 60 + 300))
    assert done.returncode == 0, done.stdout
    report = (tmp_path / "report.md").read_text()
    assert all(f"| {name} | passed |" in report for name in STEPS)
    limits = [int(line.split("at most ")[1].split()[0]) for line in done.stdout.splitlines() if "at most" in line]
    assert len(limits) == len(STEPS)
    assert max(limits) <= 9 * 60
    assert sum(limits) <= 25 * 60


def test_every_test_that_can_run_on_a_gpu_does() -> None:
    root = SCRIPT.parents[1]
    on_gpus = {
        str(file.relative_to(root))
        for file in (root / "tests").rglob("test_*.py")
        if re.search(r"^def test\w*\([^)]*\bdevice: torch|\bDEVICE\b|mark\.gpu\b", file.read_text(), re.MULTILINE)
    }
    assert len(on_gpus) > 14
    assert on_gpus <= set(re.findall(r"tests/[\w/]+\.py", SCRIPT.read_text()))


@pytest.mark.more
def test_no_step_needs_ray(tmp_path: Path) -> None:
    """Programs of the steps can be imported without Ray and the packages of the command line and the extras."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('ray', 'llguidance', 'opentelemetry', 'click', 'rich'):\n"
        "            raise ModuleNotFoundError(f'{name} is absent')\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    folders = (tmp_path, SCRIPT.parent, SCRIPT.parents[1] / "src", SCRIPT.parents[1] / "tests")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}

    def imported(modules: str) -> str:
        command = [sys.executable, "-c", f"import {modules}"]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, env=environment).stderr

    servers = ("router.server", "prefill_worker.__main__", "decode_worker.__main__")
    assert imported(", ".join(("gpu", "support.processes", *(f"kvrelay.{name}" for name in servers)))) == ""
    assert "ray is absent" in imported("ray")


def test_wheels_are_given_in_a_folder(tmp_path: Path) -> None:
    refused = run(tmp_path, "--dry-run", "--wheels", str(tmp_path / "none"))
    assert refused.returncode == 2
    assert str(tmp_path / "none") in refused.stderr
    assert run(tmp_path, "--dry-run", "--wheels", str(tmp_path), "environment").returncode == 0


def test_it_goes_on_where_it_stopped_also_in_another_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    done = run(first, "--dry-run", "--seconds", "279")  # one step may take 280
    assert done.returncode == 3
    assert "call again" in done.stdout
    finished = [name for name in STEPS if (first / f"{name}.result").exists()]
    assert 0 < len(finished) < len(STEPS)
    again = run(second, "--dry-run", "--seconds", "3000", "--earlier", str(first))
    assert again.returncode == 0, again.stdout
    assert [name for name in STEPS if f"{name}: done earlier" in again.stdout] == finished
    assert all(f"| {name} | passed |" in (second / "report.md").read_text() for name in STEPS)


def test_a_step_that_fails_is_reported_and_tried_again(tmp_path: Path) -> None:
    for _ in range(2):
        done = run(tmp_path, "environment", PYTHON="false")
        assert done.returncode == 1
        assert "environment: failed" in done.stdout
        assert "| environment | failed |" in (tmp_path / "report.md").read_text()
    assert run(tmp_path, "environment", PYTHON="true").returncode == 0
    assert "| kernels | not run |" in (tmp_path / "report.md").read_text()


def test_an_unknown_step_or_option_is_refused(tmp_path: Path) -> None:
    refused = run(tmp_path, "enviroment")
    assert refused.returncode == 2
    assert "step enviroment is unknown; allowed: environment kernels engine" in refused.stderr
    assert "allowed: --dry-run, --seconds" in run(tmp_path, "--dry").stderr
