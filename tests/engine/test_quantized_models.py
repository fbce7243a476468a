"""Quantized models compute what their weights, converted there and back, would compute."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.engine.config import EngineConfig, Quantization
from kvrelay.engine.quant.schemes import HEAD, LAYERS
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import build_gpu_runner
from kvrelay.kernels.cpu.packed import PackedLinear
from support.checkpoints import make_checkpoint
from support.paged import GREEDY, PagedSequences, make_plan

SCHEMES: tuple[Quantization, ...] = ("int8", "int4", "fp8")
TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 4, 21, 8]


def logits(folder: Path, quantization: Quantization) -> torch.Tensor:
    """float32 [tokens, vocabulary] of TOKENS."""
    options = EngineConfig(kv_memory_bytes=4 * 2**20, threads=1, quantization=quantization)
    runner = build_cpu_runner(folder, "float32", options)
    sequence = PagedSequences(runner).add(TOKENS)
    plan = make_plan([(sequence, len(TOKENS), GREEDY)], None)
    with torch.inference_mode():
        return runner.model.logits(runner.forward(plan).clone()).clone()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.mark.parametrize("quantization", SCHEMES)
def test_a_quantized_model_computes_with_its_codes(folder: Path, quantization: Quantization, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    converted = {}
    for name, weight in weights.items():
        head = name in ("lm_head.weight", "model.embed_tokens.weight")
        quantize = HEAD[quantization] if head else LAYERS[quantization]
        tied = "lm_head.weight" not in weights
        kept = weight.dim() == 1 or (name == "model.embed_tokens.weight" and not tied)
        converted[name] = weight if kept else quantize(weight.float()).dequantize()
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(converted, tmp_path / "model.safetensors")
    found, expected = logits(folder, quantization), logits(tmp_path, "none")
    # The products round weights, and on some CPUs their inputs, to bfloat16.
    assert (found - expected).norm() <= 2e-2 * expected.norm()
    assert (found - logits(folder, "none")).norm() > 1e-4 * expected.norm(), "nothing was quantized"


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.35), ("int4", 0.25), ("fp8", 0.35)])
def test_packed_weights_are_small(folder: Path, quantization: Quantization, most: float) -> None:
    """As a share of float32's, scales included."""
    options = EngineConfig(kv_memory_bytes=2**20, threads=1, quantization=quantization)
    runner = build_cpu_runner(folder, "float32", options)
    packed = [layer.down for layer in runner.model._layers]  # type: ignore[union-attr]  # a native decoder
    for linear in packed:
        assert isinstance(linear, PackedLinear)
        parts = [linear.packed, linear.scales, linear.zeros]
        size = sum(part.nbytes for part in parts if part is not None)
        assert size <= most * 4 * linear.inputs * linear.outputs


def test_a_gpu_refuses_it(folder: Path) -> None:
    with pytest.raises(ValueError, match="quantization is 'int8'; allowed: none on a GPU"):
        build_gpu_runner(folder, "float32", EngineConfig(quantization="int8"), device="cpu")
