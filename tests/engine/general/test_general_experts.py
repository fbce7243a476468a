"""Layers of experts of transformers' classes on the native kernels give the logits of transformers' own."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvrelay.engine.config import Quantization
from kvrelay.engine.models.general.experts import ATTRIBUTE, experts_of, swap_experts
from kvrelay.engine.quant.schemes import LAYERS, quantizing
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.library import library
from kvrelay.kernels.cpu.packed import Epilogue, packer
from kvrelay.kernels.cpu.program import Team
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
"""Classes, and the gate that computes what is between their experts' products; STORE where their own code does."""
QUANTIZED: dict[Quantization, float] = {"int8": 1e-3, "int4": 5e-2, "w8a8": 8e-2, "fp8": 2e-2}
"""Largest norm of the difference relative to the logits': int4 and w8a8 round inputs to 8 bits."""
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
    assert swap_experts(model, team, packer(team)) == held > 0
    assert set(gates(model)) == {GATES[name]}
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_quantized_experts_compute_with_their_codes(name: str, quantization: Quantization, team: Team) -> None:
    model, dequantized = model_of(name), model_of(name)
    lay_out, quantize = packer(team), LAYERS[quantization]

    def there_and_back(weight: Tensor | CodedWeight, bias: Tensor | None) -> object:
        assert isinstance(weight, Tensor)
        return lay_out(quantize(weight).dequantize(), bias)

    original = logits(model)
    swap_experts(model, team, quantizing(quantize, lay_out))
    swap_experts(dequantized, team, there_and_back)  # type: ignore[arg-type]  # what `packer` makes
    found, expected = logits(model), logits(dequantized)
    assert (found - expected).norm() <= QUANTIZED[quantization] * expected.norm()
    assert (found - original).norm() > 1e-3 * original.norm(), "nothing was quantized"


def test_bfloat16(team: Team) -> None:
    model = model_of("Qwen3MoeForCausalLM").bfloat16()
    expected = logits(model).float()
    swap_experts(model, team, packer(team))
    assert (logits(model).float() - expected).norm() <= 2e-2 * expected.norm()
