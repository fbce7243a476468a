"""Quantized models compute what their weights, converted there and back, would compute."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import CacheDtype, Dtype, EngineConfig, Quantization
from kvrelay.engine.models.fast.native import NativeDecoder
from kvrelay.engine.quant.schemes import HEAD, LAYERS, PART, quantizing
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import build_gpu_runner
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.library import library
from kvrelay.models import resolve
from support.checkpoints import copied, make_checkpoint
from support.paged import logits_of
from support.serving import token_reports

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SCHEMES: tuple[Quantization, ...] = ("int8", "int4", "fp8", "w8a8")
FAMILIES = ("llama", "qwen3", "glm4", "starcoder2")
TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 4, 21, 8]


@pytest.mark.parametrize("quantization", SCHEMES)
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe", "glm4_moe", "gpt_oss"])
@pytest.mark.some(8)
def test_a_quantized_model_computes_with_its_codes(
    model_of: Callable[..., Path], family: str, quantization: Quantization, tmp_path: Path
) -> None:
    """The head isn't in 4 bits. Routers, norms and embeddings that aren't tied to the head aren't quantized."""
    folder = model_of(family)
    weights = load_file(folder / "model.safetensors")
    kept = [
        "bias",
        "sinks",
        "mlp.gate.weight",
        "router.weight",
        *["embed_tokens.weight"] * ("lm_head.weight" in weights),
    ]

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() == 1 or name.endswith(tuple(kept)):
            return weight
        if weight.dim() == 3:  # [experts, inputs, outputs]
            return torch.stack([rounded(name, expert.t()).t() for expert in weight])
        scheme = HEAD if name in ("lm_head.weight", "model.embed_tokens.weight") else LAYERS
        return scheme[quantization](weight.float()).dequantize()

    converted = copied(folder, tmp_path, {name: rounded(name, weight) for name, weight in weights.items()})
    found, expected = logits_of(folder, TOKENS, quantization=quantization), logits_of(converted, TOKENS)
    # The products round weights, and on some CPUs their inputs, to bfloat16. int4 and w8a8 round inputs to 8 bits: 64
    # of a token by their own largest, or all.
    most = {"int4": 5e-2 if family in FAMILIES else 8e-2, "w8a8": 8e-2}.get(quantization, 2e-2)
    assert (found - expected).norm() <= most * expected.norm()
    assert (found - logits_of(folder, TOKENS)).norm() > 1e-4 * expected.norm(), "nothing was quantized"


@pytest.mark.parametrize("quantization", LAYERS)
@pytest.mark.parametrize("shape", [(3, 96), (PART // 64 + 5, 64), (2, PART + 32)])
def test_a_weight_quantized_in_parts_is_that_quantized_at_once(
    quantization: Quantization, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found: list[torch.Tensor | CodedWeight] = []
    quantizing(LAYERS[quantization], lambda each, _: found.append(each))(weight, None)
    whole = LAYERS[quantization](weight)
    assert torch.equal(found[0].dequantize(), whole.dequantize())
    assert found[0].round_inputs == whole.round_inputs
    assert quantizing(LAYERS[quantization], lambda each, _: each)(whole, None) is whole, "codes stay as they are"


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.35), ("int4", 0.25), ("fp8", 0.35)])
def test_packed_weights_are_small(llama: Path, quantization: Quantization, most: float) -> None:
    """Sizes are shares of float32's, scales included."""
    options = EngineConfig(kv_memory_bytes=2**20, threads=1, quantization=quantization)
    runner = build_cpu_runner(llama, "float32", options)
    assert runner.spec.weights == quantization
    assert isinstance(runner.model, NativeDecoder)
    # All but the head, which has a scheme of its own.
    for linear in [*runner.model.linears()][:-1]:
        parts = [linear.packed, linear.scales, linear.zeros]
        size = sum(part.nbytes for part in parts if part is not None)
        assert size <= most * 4 * linear.inputs * linear.outputs


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(4)
def test_a_gpu_computes_the_same(model_of: Callable[..., Path], family: str, quantization: Quantization) -> None:
    folder = model_of(family)
    options = EngineConfig(kv_memory_bytes=4 * 2**20, quantization=quantization)
    runner = build_gpu_runner(folder, "float32", options, device=DEVICE)
    x = torch.randn(3, runner.model.config.hidden_size)
    on_cpu = build_cpu_runner(folder, "float32", EngineConfig(kv_memory_bytes=2**20, quantization=quantization))
    found, expected = runner.model.logits(x.to(DEVICE)).cpu(), on_cpu.model.logits(x)
    assert (found - expected).norm() <= 2e-2 * expected.norm()


MEASURE = """
import sys
from pathlib import Path

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.runner.cpu import build_cpu_runner


def resident(field):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


small, folder, quantization = sys.argv[1:]
options = EngineConfig(kv_memory_bytes=2**20, threads=1, quantization=quantization)
build_cpu_runner(Path(small), "bfloat16", options)  # what is imported and compiled once
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
runner = build_cpu_runner(Path(folder), "bfloat16", options)
packed = sum(linear.nbytes for linear in runner.model.linears())
print(resident("VmHWM") - before, resident("VmRSS") - before, packed)
"""


@pytest.mark.more
@pytest.mark.skipif(library() is None, reason="no native kernels here")
@pytest.mark.parametrize(("quantization", "tied"), [("int8", True), ("int4", True), ("none", False)])
def test_loading_needs_little_more_memory_than_the_weights_that_it_keeps(
    tmp_path: Path, model_of: Callable[..., Path], quantization: Quantization, tied: bool
) -> None:
    """The embedding of an untied model is kept beside the packed weights."""
    small = model_of("llama")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 20, "vocab_size": 16384}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": tied}
    large = make_checkpoint(tmp_path / "large", "llama", dtype="bfloat16", **shape, **heads)
    command = [sys.executable, "-c", MEASURE, str(small), str(large), quantization]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    peak, kept, packed = map(int, output.split())
    size = packed if tied else (large / "model.safetensors").stat().st_size
    assert peak <= 1.3 * size
    assert kept <= 1.2 * size


AGAIN: list[tuple[Dtype, CacheDtype, Quantization, float]] = [
    ("float32", "auto", "none", 1e-4),
    ("bfloat16", "auto", "none", 0.1),
    ("bfloat16", "int8", "none", 0.1),
    ("bfloat16", "auto", "int8", 0.1),
    ("bfloat16", "int8", "int8", 0.1),
    ("bfloat16", "auto", "w8a8", 0.25),
    ("bfloat16", "auto", "int4", 0.25),
    ("bfloat16", "int8", "int4", 0.25),
]
"""Types of weights and KV, with the largest difference of a log-probability that documentation allows them."""


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "quantization", "most"),
    [AGAIN[-1], *(pytest.param(*case, marks=pytest.mark.more) for case in AGAIN[:-1])],
)
@pytest.mark.more
def test_kv_that_is_computed_again_differs_by_rounding_only(
    dtype: Dtype, kv_dtype: CacheDtype, quantization: Quantization, most: float
) -> None:
    """Preempted sequences, and sequences that go on at another worker, against those of one undisturbed engine."""
    options = EngineConfig(
        device="cpu", kv_memory_bytes=2**25, kv_dtype=kv_dtype, quantization=quantization, threads=1, max_sequences=64
    )
    text = b"def __init__(self, name): return"
    prompts = [(*text[number % 7 :] * 3, number) for number in range(16)]
    sampling = SamplingParams(temperature=0.0, logprobs=2, max_tokens=80)
    requests = [Request(f"{n}", 1, prompt, len(prompt), sampling) for n, prompt in enumerate(prompts)]
    engine, _ = build_engine(resolve("pico"), dtype, options)
    plain = token_reports(engine, requests)

    scarce, _ = build_engine(resolve("pico"), dtype, dataclasses.replace(options, kv_memory_bytes=2**21))
    preempted = token_reports(scarce, requests)
    assert scarce.scheduler.preemptions > 0

    had = 30
    elsewhere, _ = build_engine(resolve("pico"), dtype, options)
    continued = token_reports(
        elsewhere,
        [
            dataclasses.replace(
                asked, attempt=2, tokens=(*asked.tokens, *(report.token or 0 for report in plain[name][:had]))
            )
            for name, asked in zip(plain, requests, strict=True)
        ],
    )
    for name, whole in plain.items():
        for first, found in ((whole, preempted[name]), (whole[had:], continued[name])):
            for mine, its in zip(first, found, strict=True):
                if mine.token != its.token:
                    best, second = mine.logprobs.top_logprobs
                    assert best - second <= 2 * most
                    break
                assert abs(mine.logprobs.logprob - its.logprobs.logprob) <= most
