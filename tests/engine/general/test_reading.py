"""Checkpoints that the general path refuses, with the file and what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from support.checkpoints import change_tensors
from support.tiny_models import save

OPTIONS = EngineConfig(kv_memory_bytes=2**22, threads=1, device="cpu", max_sequences=4)


WEIGHT = "gpt_neox.layers.1.attention.dense.weight"
Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save("gpt_neox", tmp_path)


def refuses(folder: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        build_engine(folder, "float32", OPTIONS)


def configure(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def configured(**fields: object) -> Damage:
    return lambda folder: configure(folder, **fields)


def changed(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    """Damage to the tensors."""
    return lambda folder: change_tensors(folder, change)


def with_number(number: float) -> Damage:
    return changed(lambda tensors: tensors[WEIGHT].view(-1)[1:2].fill_(number))


REFUSED: dict[str, tuple[Damage, str]] = {
    **{
        f"{number}": (with_number(number), rf"safetensors: tensor {WEIGHT} has a number that is infinite or NaN")
        for number in (torch.nan, torch.inf)
    },
    "a tensor is missing": (changed(lambda tensors: tensors.pop(WEIGHT)), f"tensor {WEIGHT} is missing"),
    "another shape": (
        changed(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].clone()})),
        rf"model\.safetensors: tensor {WEIGHT} has another shape than config\.json says",
    ),
    "a type that transformers doesn't know": (
        configured(model_type="unheard_of"),
        "config.json: model_type is 'unheard_of'; allowed: a model type of transformers 5",
    ),
    "a type that doesn't continue texts": (
        configured(model_type="vit"),
        "config.json: model_type is 'vit'; allowed: .* that continues a text",
    ),
    "many layers": (configured(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; allowed: up to 4096"),
    "wide": (configured(hidden_size=2**20), "describes a model of .* weights, and the files have"),
    "many tokens": (configured(vocab_size=2**40), "describes a model of .* weights, and the files have"),
    "quantized": (
        configured(quantization_config={"quant_method": "awq", "bits": 4}),
        "config.json: quantization_config is",
    ),
}
"""Damage to a checkpoint, and what its refusal says. `test_loader.py` has damage to files."""


@pytest.mark.parametrize(("damage", "pattern"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_loaded_is_refused_with_the_reason(folder: Path, damage: Damage, pattern: str) -> None:
    damage(folder)
    refuses(folder, pattern)


def test_code_of_the_checkpoint_is_never_run(folder: Path) -> None:
    trace = folder / "ran"
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    configure(folder, model_type="unheard_of", auto_map=own)
    refuses(folder, "model_type is 'unheard_of'")
    configure(folder, model_type="gpt_neox", auto_map=own)
    build_engine(folder, "float32", OPTIONS)
    assert not trace.exists()


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_guesses_that_need_our_own_code(folder: Path, method: Literal["medusa", "eagle3"]) -> None:
    options = EngineConfig(kv_memory_bytes=2**22, device="cpu", speculation=SpeculationConfig(method, "pico"))
    with pytest.raises(ValueError, match=f"speculation.method is '{method}'; allowed .* off, ngram, suffix, draft"):
        build_engine(folder, "float32", options)
