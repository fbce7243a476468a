"""Checkpoints that the general path refuses, with the file and what is wrong with it."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from support.tiny_models import save

OPTIONS = EngineConfig(kv_memory_bytes=2**22, threads=1, device="cpu", max_sequences=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save("gpt_neox", tmp_path)


def refuses(folder: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        build_engine(folder, "float32", OPTIONS)


def configure(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change(folder: Path, *, drop: str = "", damage: str = "", cut: str = "", number: float = torch.nan) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(drop, None)
    if damage:
        tensors[damage].view(-1)[1] = number
    if cut:
        tensors[cut] = tensors[cut][:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})


WEIGHT = "gpt_neox.layers.1.attention.dense.weight"


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite(number: float, folder: Path) -> None:
    change(folder, damage=WEIGHT, number=number)
    refuses(folder, rf"model\.safetensors: tensor {WEIGHT} has a number that is infinite or NaN")


def test_a_tensor_that_is_missing(folder: Path) -> None:
    change(folder, drop=WEIGHT)
    refuses(folder, f"tensor {WEIGHT} is missing")


def test_a_tensor_of_another_shape(folder: Path) -> None:
    change(folder, cut=WEIGHT)
    refuses(folder, rf"model\.safetensors: tensor {WEIGHT} has another shape than config\.json says")


def test_a_type_that_transformers_does_not_know(folder: Path) -> None:
    configure(folder, model_type="unheard_of")
    refuses(folder, "config.json: model_type is 'unheard_of'; allowed: a model type of transformers 5")


def test_code_of_the_checkpoint_is_never_run(folder: Path) -> None:
    trace = folder / "ran"
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    configure(folder, model_type="unheard_of", auto_map=own)
    refuses(folder, "model_type is 'unheard_of'")
    configure(folder, model_type="gpt_neox", auto_map=own)
    build_engine(folder, "float32", OPTIONS)
    assert not trace.exists()


def test_a_type_that_does_not_continue_texts(folder: Path) -> None:
    configure(folder, model_type="vit")
    refuses(folder, "config.json: model_type is 'vit'; allowed: .* that continues a text")


def test_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(folder, r"pytorch_model\.bin: a pickled checkpoint")


def test_files_of_no_bytes(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    refuses(folder, r"model\.safetensors: not a safetensors file")


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; allowed: up to 4096"),
        ("hidden_size", 2**20, "describes a model of .* weights, and the files have"),
        ("vocab_size", 2**40, "describes a model of .* weights, and the files have"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "config.json: quantization_config is"),
    ],
)
def test_absurd_configs(folder: Path, field: str, value: object, pattern: str) -> None:
    configure(folder, **{field: value})
    refuses(folder, pattern)


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_guesses_that_need_our_own_code(folder: Path, method: Literal["medusa", "eagle3"]) -> None:
    options = EngineConfig(kv_memory_bytes=2**22, device="cpu", speculation=SpeculationConfig(method, "pico"))
    with pytest.raises(ValueError, match=f"speculation.method is '{method}'; allowed .* off, ngram, suffix, draft"):
        build_engine(folder, "float32", options)
