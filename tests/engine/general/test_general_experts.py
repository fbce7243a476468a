"""Layers of experts of transformers' classes on the native kernels give the logits of transformers' own."""

import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvrelay.engine.build import build_engine, draft_options, engine_on
from kvrelay.engine.config import EngineConfig, ExpertKernel, Quantization
from kvrelay.engine.models.general.experts import (
    ATTRIBUTE,
    FLASHINFER_PARAMETERS,
    FlashInferExperts,
    experts_of,
    on_cpu,
    on_flashinfer,
    on_gpu,
    swap_experts,
    take_flashinfer,
)
from kvrelay.engine.quant.schemes import LAYERS, quantizing
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.general import GeneralRunner, build_general_runner
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.packed import Epilogue, packer
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.ops import Linear
from support.checkpoints import make_checkpoint
from support.general import logits
from support.serving import run
from support.tiny_models import classes, tiny_model

GATES = {
    "Qwen3MoeForCausalLM": Epilogue.SILU_MUL,
    "MixtralForCausalLM": Epilogue.SILU_MUL,
    "GptOssForCausalLM": Epilogue.CLAMPED_GATE,
    "Glm4MoeForCausalLM": Epilogue.SILU_MUL,
    "MiniMaxM2ForCausalLM": Epilogue.SILU_MUL,
    "NemotronHForCausalLM": Epilogue.RELU_SQUARED,
    "Inkling2ForCausalLM": Epilogue.STORE,
    "DeepseekV4ForCausalLM": Epilogue.STORE,
}
"""Classes, and the gate that computes what is between their experts' products; STORE where their own code does.
`test_every_architecture.py` has all classes."""
QUANTIZED: dict[Quantization, float] = {"int8": 1e-3, "int4": 5e-2, "w8a8": 3e-2, "fp8": 2e-2}
"""Largest norm of a layer's difference relative to its result's: int4 and w8a8 round inputs to 8 bits."""
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def gates(model: nn.Module) -> Iterator[Epilogue]:
    for module in experts_of(model):
        assert ATTRIBUTE in module.__dict__
        assert not list(module.parameters(recurse=False)), "its weights are held twice"
        yield module.__dict__[ATTRIBUTE].layer.gate.epilogue


def model_of(name: str) -> PreTrainedModel:
    """A tiny model whose experts matter: those of a random one hardly change logits."""
    model = tiny_model(classes()[name])
    with torch.no_grad():
        for module in experts_of(model):
            for weight in module.parameters(recurse=False):
                weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize("name", GATES)
def test_logits_are_those_of_transformers(name: str, team: Team) -> None:
    model = model_of(name)
    expected = logits(model)
    held = sum(weight.nbytes for module in experts_of(model) for weight in module.parameters(recurse=False))
    assert swap_experts(model, on_cpu(team, packer(team))) == held > 0
    assert set(gates(model)) == {GATES[name]}
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_quantized_experts_compute_with_their_codes(name: str, quantization: Quantization, team: Team) -> None:
    """Layer by layer, because a router's choice between two nearly equal experts changes all that comes after it."""
    model, dequantized = model_of(name), model_of(name)
    lay_out, quantize = packer(team), LAYERS[quantization]

    def there_and_back(weight: Tensor | CodedWeight, bias: Tensor | None) -> Linear:
        return lay_out(quantize(weight).dequantize(), bias)

    generator = torch.Generator().manual_seed(0)
    given = torch.randn(9, 64, generator=generator), torch.randint(0, 4, (9, 2), generator=generator), torch.rand(9, 2)
    originals = [module(*given) for module in experts_of(model)]
    swap_experts(model, on_cpu(team, quantizing(quantize, lay_out)))
    swap_experts(dequantized, on_cpu(team, there_and_back))
    layers = zip(experts_of(model), experts_of(dequantized), originals, strict=True)
    for own, converted, original in layers:
        found, expected = own(*given), converted(*given)
        assert (found - expected).norm() <= QUANTIZED[quantization] * expected.norm()
        assert (found - original).norm() > 1e-3 * original.norm(), "nothing was quantized"


def test_bfloat16(team: Team) -> None:
    """Logits are no farther from those of float32 than transformers' own."""
    exact = logits(model_of("Qwen3MoeForCausalLM"))
    model = model_of("Qwen3MoeForCausalLM").bfloat16()
    own = (logits(model).float() - exact).norm()
    swap_experts(model, on_cpu(team, packer(team)))
    assert (logits(model).float() - exact).norm() <= 1.5 * own


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.more
def test_quantized_experts_on_a_gpu(name: str, quantization: Quantization, team: Team) -> None:
    """They are those of the CPU, but for how inputs are rounded."""
    model, on_gpus = model_of(name), model_of(name).to(DEVICE, torch.float16)
    quantize = LAYERS[quantization]
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(9, 64, generator=generator), torch.randint(0, 4, (9, 2), generator=generator), torch.rand(9, 2)
    swap_experts(model, on_cpu(team, quantizing(quantize, packer(team))))
    swap_experts(on_gpus, on_gpu(quantize, torch.float16, torch.device(DEVICE)))
    for own, other in zip(experts_of(model), experts_of(on_gpus), strict=True):
        x, chosen, shares = (each.to(DEVICE) for each in given)
        expected = own(*given)
        assert (other(x.half(), chosen, shares).cpu().float() - expected).norm() <= 4e-2 * expected.norm()


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor] | None,
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    output: Tensor | None = None,
    use_fused_finalize: bool = True,
) -> Tensor:
    """A stand-in for FlashInfer's function, with the parameters that are given: its checks, and its definition in
    float64 with the numbers between the products rounded. The first half of an expert's first outputs are ups."""
    kind, (experts, outputs, hidden) = input.dtype, fc1_expert_weights.shape
    assert kind in (torch.float16, torch.bfloat16)
    assert kind == output_dtype == fc1_expert_weights.dtype == fc2_expert_weights.dtype
    assert token_selected_experts.dtype == torch.int32
    assert token_final_scales.dtype == torch.float32
    assert token_selected_experts.shape == token_final_scales.shape
    assert token_selected_experts.shape[0] == len(input)
    assert fc2_expert_weights.shape == (experts, hidden, outputs // 2)
    assert hidden % 8 == outputs // 2 % 8 == 0
    assert not quant_scales
    assert not use_fused_finalize, "its sums would be in no order"
    assert output is not None
    assert output.shape == input.shape
    biases: list[Tensor | None] = [fc1_expert_biases, fc2_expert_biases]
    for bias, width in zip(biases, (outputs, hidden), strict=True):
        assert bias is None or (bias.shape == (experts, width) and bias.dtype == kind)
    given = (fc1_expert_weights, fc2_expert_weights, *biases, input, token_selected_experts, token_final_scales, output)
    assert all(each is None or each.is_contiguous() for each in given)
    factors = (swiglu_alpha, swiglu_beta, swiglu_limit)
    assert all(each is None or (each.shape == (experts,) and each.dtype == torch.float32) for each in factors)
    total = torch.zeros(input.shape, dtype=torch.float64)
    for expert in range(experts):
        rows, places = (token_selected_experts == expert).nonzero(as_tuple=True)
        first, second = (None if bias is None else bias[expert].double() for bias in biases)
        both = nn.functional.linear(input[rows].double(), fc1_expert_weights[expert].double(), first)
        up, gate = both.chunk(2, 1)
        alpha, beta = 1.0, 0.0
        if swiglu_alpha is not None and swiglu_beta is not None and swiglu_limit is not None:
            alpha, beta, limit = float(swiglu_alpha[expert]), float(swiglu_beta[expert]), float(swiglu_limit[expert])
            up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
        inner = ((up + beta) * gate * torch.sigmoid(alpha * gate)).to(kind).double()
        part = nn.functional.linear(inner, fc2_expert_weights[expert].double(), second)
        total.index_add_(0, rows, token_final_scales[rows, places, None].double() * part)
    output.copy_(total)
    return output


def install(patch: pytest.MonkeyPatch, function: Callable[..., Tensor] = cutlass_fused_moe) -> None:
    package, module = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.fused_moe")
    module.cutlass_fused_moe = function
    for each in (package, module):
        patch.setitem(sys.modules, each.__name__, each)


def runner_of(folder: Path, kernel: ExpertKernel) -> tuple[GeneralRunner, EngineConfig]:
    """A runner in float16, for which a CPU has no native kernels, as the runner for a GPU."""
    options = EngineConfig(kv_memory_bytes=2**22, model_path="general", max_batch_tokens=16).on("cpu")
    options = replace(options, device="auto", expert_kernel=kernel)
    return build_general_runner(folder, "float16", options), options


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.some(2)
def test_an_engine_on_flashinfer_has_the_same_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    model_of(name).save_pretrained(tmp_path)
    prompts = [[5, 9, 7, 11, 200], list(range(3, 26)), [(7 * n) % 251 for n in range(41)]]
    found = []
    for kernel in ("builtin", "flashinfer", "auto"):
        runner, options = runner_of(tmp_path, kernel)
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        requests = [Request(str(n), 1, tuple(prompt), len(prompt), greedy) for n, prompt in enumerate(prompts)]
        found.append(run(engine_on(runner, options), requests))
        calls = [module.__dict__.get(ATTRIBUTE) for module in experts_of(runner.way.model)]
        assert calls
        assert all(isinstance(call, FlashInferExperts) is (kernel != "builtin") for call in calls)
        assert (runner.expert_loads is not None) is (kernel != "builtin")
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("NemotronHForCausalLM", torch.float16, "another operation .* than SwiGLU"),
        ("Qwen3MoeForCausalLM", torch.float32, "its experts are torch.float32; FlashInfer takes"),
        ("LlamaForCausalLM", torch.float16, "the model has no layers of experts"),
    ],
)
def test_what_flashinfer_does_not_compute_is_refused_by_name(
    name: str, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    model = tiny_model(classes()[name]).to(dtype)
    with pytest.raises(ValueError, match=f"expert_kernel is 'flashinfer', but .*{reason}.*; allowed: auto, builtin"):
        take_flashinfer(model, "flashinfer")
    take_flashinfer(model, "auto")
    assert not any(ATTRIBUTE in module.__dict__ for module in experts_of(model))


def test_a_kernel_that_is_absent_or_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(**given: Tensor) -> Tensor:
        ups, gates = given.pop("fc1_expert_weights").chunk(2, 1)
        return cutlass_fused_moe(fc1_expert_weights=torch.cat((gates, ups), 1), **given)

    def failing(**given: Tensor) -> Tensor:
        raise RuntimeError("Invalid backend: 80")

    def refused(reason: str) -> None:
        with pytest.raises(ValueError, match=f"expert_kernel is 'flashinfer', but FlashInfer.*{reason}.*allowed: auto"):
            take_flashinfer(model_of("Qwen3MoeForCausalLM").half(), "flashinfer")

    for function, reason in ((swapped, "another one"), (failing, "failed .Invalid backend: 80")):
        function.__signature__ = inspect.signature(cutlass_fused_moe)
        install(monkeypatch, function)
        refused(reason)
    install(monkeypatch, lambda input: input)
    refused(r"has no .*fc1_expert_biases.* in .*; 0\.6\.18 has")
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", None)
    refused("can't be imported")


def test_where_flashinfer_is_never_had_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="expert_kernel is 'flashinfer'; allowed: auto, builtin on a CPU"):
        EngineConfig(expert_kernel="flashinfer").on("cpu")
    with pytest.raises(ValueError, match=r"expert_kernel is 'flashinfer'; allowed: .* because quantization is 'int8'"):
        EngineConfig(expert_kernel="flashinfer", quantization="int8")
    assert draft_options(EngineConfig(expert_kernel="flashinfer").on("cuda")).expert_kernel == "builtin"
    monkeypatch.setattr("kvrelay.engine.build.device_of", lambda device: "cuda")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (0, 2**34))
    with pytest.raises(ValueError, match=r"expert_kernel is 'flashinfer'; allowed: .* for a model without experts"):
        build_engine(make_checkpoint(tmp_path, "llama"), "float16", EngineConfig(expert_kernel="flashinfer"))


@pytest.mark.gpu
def test_on_a_gpu_flashinfer_computes_experts() -> None:
    """Each call is compared with its definition when it is made."""
    pytest.importorskip("flashinfer")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    for name in ("Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        for dtype in (torch.float16, torch.bfloat16):
            assert swap_experts(model_of(name).to("cuda", dtype), on_flashinfer())


def test_the_stand_in_has_the_parameters_that_are_checked() -> None:
    assert set(inspect.signature(cutlass_fused_moe).parameters) == FLASHINFER_PARAMETERS
