"""Every architecture of transformers' causal-LM mapping: served together as in one forward pass."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvrelay.engine.models.general.experts import ATTRIBUTE, experts_of
from kvrelay.kernels.cpu.library import library
from support.general import Driver
from support.general_table import DEPLOYED, build, deployed_line, deployed_lines, line, lines
from support.tiny_models import classes, save, tiny_model

PROMPTS = [[5, 9, 7, 11, 200], list(range(3, 26)), [3 + (7 * n) % 251 for n in range(41)]]
CHUNK = 16
COMPLETION = 8
COVERING = (
    "BambaForCausalLM",
    "BartForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3nForCausalLM",
    "GptOssForCausalLM",
    "Lfm2ForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "MambaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "RoFormerForCausalLM",
    "RwkvForCausalLM",
)
"""Classes that have every kind of group and way between them."""
SERVED_AT_LEAST = 150
ROOT = Path(__file__).parents[3]
INSTALL_SECONDS, RUN_SECONDS = 300, 900


def case(name: str) -> object:
    return pytest.param(name, marks=[] if name in COVERING else [pytest.mark.more])


@pytest.mark.parametrize("name", [case(name) for name in classes()])
@pytest.mark.some(5)
def test_sequences_served_together_are_those_of_whole_passes(name: str, tmp_path: Path) -> None:
    folder = save(classes()[name], tmp_path)
    assert line(name, folder) == lines()[name]
    if " | - | " in lines()[name]:
        return
    runner = build(folder)
    model = getattr(runner.way, "model", None) or runner.way._model
    swapped = [ATTRIBUTE in module.__dict__ for module in experts_of(model)]
    assert all(swapped) or library() is None, "its own code computes experts"
    driver = Driver(runner, PROMPTS, COMPLETION)
    driver.serve(CHUNK, moves=True)
    driver.check(tiny_model(classes()[name]))


@pytest.mark.parametrize("name", [case(name) for name in DEPLOYED])
@pytest.mark.some(4)
def test_what_computes_the_classes_that_are_deployed_most(name: str, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no native kernels here")
    assert deployed_line(name, save(classes()[name], tmp_path)) == deployed_lines()[name]
    assert deployed_lines().keys() == set(DEPLOYED)


def test_nearly_all_architectures_are_served() -> None:
    served = [text for text in lines().values() if " | - | " not in text]
    assert lines().keys() == classes().keys()
    assert len(served) >= SERVED_AT_LEAST


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_SECONDS + RUN_SECONDS)
@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_the_covering_ones_run_with_both_ends_of_the_range_of_transformers(end: str, tmp_path: Path) -> None:
    """All other packages are those that are installed."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (declared,) = [requirement for requirement in requirements if requirement.startswith("transformers>=")]
    wanted = re.sub(">=([0-9.]+),.*", r"==\1", declared) if end == "oldest" else declared
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), wanted]
    subprocess.run(pip, check=True, timeout=INSTALL_SECONDS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    asked = [sys.executable, "-c", "import transformers; print(transformers.__file__)"]
    found = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True, timeout=RUN_SECONDS)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)
    chosen = [
        f"{Path(__file__)}::{test_sequences_served_together_are_those_of_whole_passes.__name__}[{name}]"
        for name in COVERING
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
