"""Families with experts on own code: experts in MXFP4, what else a checkpoint may hold, and what runs elsewhere."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.choice import is_fast
from kvrelay.engine.models.fast.native import NativeDecoder
from kvrelay.engine.models.reading.config import read_config
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.kernels.codes import CodeType
from kvrelay.kernels.routing import Scoring
from support.checkpoints import WITH_EXPERTS, copied
from support.paged import logits_of
from support.stored_layouts import write_in_mxfp4

TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 4, 21, 8]
CPU = EngineConfig(device="cpu", kv_memory_bytes=2**20, threads=1)


def test_experts_in_mxfp4(model_of: Callable[..., Path], tmp_path: Path) -> None:
    """The logits are those of the dequantized weights: exactly with `dense`; in 4 bits, products round their inputs to
    8 bits where the CPU multiplies integers. Codes take half a byte for each number."""
    coded, plain = tmp_path / "coded", tmp_path / "plain"
    write_in_mxfp4(model_of("gpt_oss", intermediate_size=128), coded, plain)
    expected = logits_of(plain, TOKENS)
    assert (logits_of(coded, TOKENS, quantization="dense") - expected).abs().max() < 1e-4
    assert (logits_of(coded, TOKENS) - expected).norm() <= 2e-2 * expected.norm()
    runner = build_cpu_runner(coded, "float32", CPU)
    assert runner.spec.weights == "mxfp4"
    assert isinstance(runner.model, NativeDecoder)
    layers = [linear for linear in runner.model.linears() if linear.type == CodeType.FP4]
    assert len(layers) == 2 * read_config(coded).layers
    assert all(linear.packed.nbytes == linear.outputs * linear.inputs // 2 for linear in layers)
    with pytest.raises(ValueError, match="quantization is 'int8'; allowed: none, dense; the checkpoint is in mxfp4"):
        logits_of(coded, TOKENS, quantization="int8")


def test_layers_that_predict_further_tokens_are_left_alone(model_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_of("glm4_moe")
    weights = load_file(folder / "model.safetensors")
    layers = read_config(folder).layers
    weights[f"model.layers.{layers}.mlp.gate.weight"] = torch.zeros(8, 64)
    runner = build_cpu_runner(copied(folder, tmp_path, weights), "float32", CPU)
    assert isinstance(runner.model, NativeDecoder)
    assert torch.equal(logits_of(tmp_path, TOKENS), logits_of(folder, TOKENS))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_where_they_run_on_own_code(model_of: Callable[..., Path], family: str) -> None:
    folder = model_of(family)
    assert is_fast(folder, "auto", CPU)
    elsewhere: dict[str, dict[str, Any]] = {
        "each of 2 parts of its experts is on several ranks": {"tensor_parallel": 4, "expert_parallel": 2},
        "its experts run on a GPU": {"device": "cuda"},
    }
    for reason, fields in elsewhere.items():
        options = dataclasses.replace(CPU, **fields)
        assert not is_fast(folder, "auto", options)
        with pytest.raises(ValueError, match=f"model_path is 'fast'; allowed: auto, general, because {reason}"):
            is_fast(folder, "fast", options)
    assert not is_fast(folder, "auto", CPU, "float16")
    with pytest.raises(ValueError, match="because its experts need the native CPU kernels"):
        is_fast(folder, "fast", CPU, "float16")


@pytest.mark.parametrize(
    ("family", "field", "value", "message"),
    [
        ("qwen3_moe", "moe_intermediate_size", 50, "a multiple of 16, for experts on the fast path"),
        ("qwen3_moe", "mlp_only_layers", [1], "an empty list"),
        ("qwen3_moe", "decoder_sparse_step", 2, "1"),
        ("mixtral", "num_experts_per_tok", 5, r"1 to num_local_experts \(4\)"),
        ("glm4_moe", "n_group", 3, r"a divisor of n_routed_experts \(8\)"),
        ("glm4_moe", "topk_group", 5, r"1 to n_group \(4\)"),
    ],
)
def test_what_own_code_does_not_compute_is_named(
    model_of: Callable[..., Path], tmp_path: Path, family: str, field: str, value: object, message: str
) -> None:
    config = json.loads((model_of(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ValueError, match=f"{field} is .*; allowed: {message}"):
        read_config(tmp_path)


def test_routing_is_that_of_the_config(model_of: Callable[..., Path]) -> None:
    experts = read_config(model_of("glm4_moe")).traits.experts
    routing = experts.routing
    assert (routing.scoring, routing.groups, routing.top_groups, routing.scale) == (Scoring.SIGMOID, 4, 2, 1.7)
    assert [experts.in_layer(layer) for layer in range(3)] == [False, True, True]
