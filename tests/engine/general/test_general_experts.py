"""Layers of experts of transformers' classes on the native kernels give the logits of transformers' own."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrelay.engine.config import Quantization
from kvrelay.engine.models.general.experts import ATTRIBUTE, experts_of, on_cpu, on_gpu, swap_experts
from kvrelay.engine.quant.schemes import LAYERS, quantizing
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.library import library
from kvrelay.kernels.cpu.packed import Epilogue, packer
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.ops import Linear
from support.tiny_models import classes, tiny_config, tiny_model

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
"""Classes, and the gate that computes what is between their experts' products; STORE where their own code does."""
QUANTIZED: dict[Quantization, float] = {"int8": 1e-3, "int4": 5e-2, "w8a8": 3e-2, "fp8": 2e-2}
"""Largest norm of a layer's difference relative to its result's: int4 and w8a8 round inputs to 8 bits."""
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
LEAST_CLASSES = 50
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def team() -> Team:
    kernels = library()
    if kernels is None:
        pytest.skip("no native kernels here")
    return Team(kernels, 2)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        return model(TOKENS, use_cache=False).logits[0]


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


@pytest.mark.more
@pytest.mark.timeout(600)
def test_all_classes_of_the_interface(team: Team) -> None:
    compared = 0
    for name, model_type in classes().items():
        with torch.device("meta"):
            config = tiny_config(model_type)
            config.is_decoder = True
            if next(experts_of(AutoModelForCausalLM.from_config(config)), None) is None:
                continue
        model = tiny_model(model_type)
        expected = logits(model)
        swap_experts(model, on_cpu(team, packer(team)))
        assert all(ATTRIBUTE in module.__dict__ for module in experts_of(model)), name
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3, msg=name)
        compared += 1
    assert compared >= LEAST_CLASSES


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_quantized_experts_compute_with_their_codes(name: str, quantization: Quantization, team: Team) -> None:
    """Layer by layer, because a router's choice between two nearly equal experts changes all that comes after it."""
    model, dequantized = model_of(name), model_of(name)
    lay_out, quantize = packer(team), LAYERS[quantization]

    def there_and_back(weight: Tensor | CodedWeight, bias: Tensor | None) -> Linear:
        assert isinstance(weight, Tensor)
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
