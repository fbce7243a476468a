"""Quantized models compute what their weights, converted there and back, would compute."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import CacheDtype, Dtype, EngineConfig, Quantization
from kvrelay.engine.engine import Engine
from kvrelay.engine.quant.schemes import HEAD, LAYERS
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import build_gpu_runner
from kvrelay.engine.scheduling.progress import Progress
from kvrelay.kernels.cpu.library import library
from kvrelay.kernels.cpu.packed import PackedLinear
from kvrelay.models import resolve
from support.checkpoints import make_checkpoint
from support.paged import GREEDY, PagedSequences, make_plan

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SCHEMES: tuple[Quantization, ...] = ("int8", "int4", "fp8", "w8a8")
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
    # The products round weights, and on some CPUs their inputs, to bfloat16. int4 and w8a8 round inputs to 8 bits: 64
    # of a token by their own largest, or all.
    most = {"int4": 5e-2, "w8a8": 8e-2}.get(quantization, 2e-2)
    assert (found - expected).norm() <= most * expected.norm()
    assert (found - logits(folder, "none")).norm() > 1e-4 * expected.norm(), "nothing was quantized"


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.35), ("int4", 0.25), ("fp8", 0.35)])
def test_packed_weights_are_small(folder: Path, quantization: Quantization, most: float) -> None:
    """Sizes are shares of float32's, scales included."""
    options = EngineConfig(kv_memory_bytes=2**20, threads=1, quantization=quantization)
    runner = build_cpu_runner(folder, "float32", options)
    assert runner.spec.weights == quantization
    packed = [layer.down for layer in runner.model._layers]  # type: ignore[union-attr]  # a native decoder
    for linear in packed:
        assert isinstance(linear, PackedLinear)
        parts = [linear.packed, linear.scales, linear.zeros]
        size = sum(part.nbytes for part in parts if part is not None)
        assert size <= most * 4 * linear.inputs * linear.outputs


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_gpu_computes_the_same(folder: Path, quantization: Quantization) -> None:
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
from kvrelay.kernels.cpu.library import library


def resident(field):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


small, folder, quantization = sys.argv[1:]
options = EngineConfig(kv_memory_bytes=2**20, threads=1, quantization=quantization)
build_cpu_runner(Path(small), "bfloat16", options)  # what is imported and compiled once
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
runner = build_cpu_runner(Path(folder), "bfloat16", options)
print(resident("VmHWM") - before, sum(linear.nbytes for linear in runner.model._linears()))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 20, "vocab_size": 16384}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    return make_checkpoint(tmp_path_factory.mktemp("large") / "model", "llama", dtype="bfloat16", **shape, **heads)


@pytest.mark.skipif(library() is None, reason="no native kernels here")
@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_loading_needs_little_more_memory_than_the_quantized_weights(
    tmp_path: Path, large: Path, quantization: Quantization
) -> None:
    small = make_checkpoint(tmp_path / "small", "llama")
    command = [sys.executable, "-c", MEASURE, str(small), str(large), quantization]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    peak, quantized = map(int, output.split())
    assert peak <= 1.3 * quantized


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


def streams(engine: Engine, requests: list[Request]) -> dict[str, list[Progress]]:
    for request in requests:
        engine.scheduler.add(request)
    heard: dict[str, list[Progress]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for report in engine.step():
            assert report.error is None
            if report.token is not None:
                heard[report.sequence.request.request_id].append(report)
    return heard


@pytest.mark.parametrize(("dtype", "kv_dtype", "quantization", "most"), AGAIN)
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
    plain = streams(engine, requests)

    scarce, _ = build_engine(resolve("pico"), dtype, dataclasses.replace(options, kv_memory_bytes=2**21))
    preempted = streams(scarce, requests)
    assert scarce.scheduler.preemptions > 0

    had = 30
    elsewhere, _ = build_engine(resolve("pico"), dtype, options)
    continued = streams(
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
                assert mine.logprobs is not None
                assert its.logprobs is not None
                if mine.token != its.token:
                    best, second = mine.logprobs.top_logprobs
                    assert best - second <= 2 * most
                    break
                assert abs(mine.logprobs.logprob - its.logprobs.logprob) <= most
