"""Swaps a model's layers of experts for our packed, quantized ones, in all classes that use transformers' interface of
experts (`ExpertsInterface`): routers stay transformers' own, products become those of the native kernels.

A module of that interface says how its weights are laid out. The operation between its two products is its own code:
where that computes the same numbers as one of the kernels' gates, the kernels do, else the module is called between two
of their products.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from kvrelay.engine.models.fast.loader import MakeLinear
from kvrelay.engine.models.general.mxfp4 import STORED, StoredExperts
from kvrelay.kernels import reference
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.experts import ExpertsCall, ExpertsCalls, Gate, PackedExperts, laid_out
from kvrelay.kernels.cpu.packed import Epilogue, PackedLinear
from kvrelay.kernels.cpu.program import Team

NAME = "kvrelay"
"""Name of the implementation with transformers."""
ATTRIBUTE = "_kvrelay_experts"
"""Attribute of a module: the `ExpertsCall` that computes it."""
LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "num_experts", "down_proj")
"""Attributes that a module of transformers' interface has."""
EXACT = 1e-5
"""Largest difference of two gates that compute the same, relative to the largest number."""


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that use transformers' interface of experts."""
    for module in model.modules():
        if all(hasattr(module, name) for name in LAYOUT):
            yield module


def swap_experts(model: PreTrainedModel, team: Team, linear: MakeLinear) -> int:
    """Swaps all layers of experts; their weights are freed.

    Args:
        linear: lays out a weight.

    Returns:
        The bytes of the weights that were swapped.
    """
    calls, swapped = ExpertsCalls(team), 0
    for module in list(experts_of(model)):
        before = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        call = _call_of(module, team, calls, linear)
        if call is None:
            continue
        module.__dict__[ATTRIBUTE] = call
        module.__dict__.pop(STORED, None)
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            setattr(module, name, None)
        swapped += before
        config: Any = module.config
        if isinstance(config, PreTrainedConfig):
            config._experts_implementation = NAME  # noqa: SLF001  # `set_experts_implementation` refuses what isn't known
    return swapped


def _call_of(module: Any, team: Team, calls: ExpertsCalls, linear: MakeLinear) -> ExpertsCall | None:
    """The call that computes a module; None if its weights aren't as the interface says."""
    gated, experts = bool(module.has_gate), int(module.num_experts)
    first, second = ("gate_up_proj" if gated else "up_proj"), "down_proj"
    weights = _weight(module, first), _weight(module, second)
    if weights[0] is None or weights[1] is None:
        return None
    outputs = len(weights[0].codes if isinstance(weights[0], CodedWeight) else weights[0]) // experts
    gate, between = _gate(module, outputs)
    apart = gated and not module.is_concatenated
    packed = []
    for number, name in enumerate((first, second)):
        halves, interleaved = (2 if gated and between is None else 1, apart) if number == 0 else (1, False)
        bias = getattr(module, f"{name}_bias").detach().flatten() if module.has_bias else None
        offsets = None if bias is None else laid_out(bias, experts, halves=halves, interleaved=interleaved)
        weight = weights[number]
        packed.append(linear(laid_out(weight, experts, halves=halves, interleaved=interleaved), offsets))
    up, down = packed
    if not isinstance(up, PackedLinear) or not isinstance(down, PackedLinear):
        return None
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    return ExpertsCall(calls, PackedExperts(team, up, down, experts, gate), between, norm)


def _weight(module: Any, name: str) -> Tensor | CodedWeight | None:
    """All experts' weights [experts * outputs, inputs], one below the other."""
    stored: StoredExperts | None = module.__dict__.get(STORED)
    if stored is not None:
        return stored.weight(name)
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or weight.dim() != 3:
        return None
    weight = weight.detach()
    return (weight.transpose(1, 2) if module.is_transposed else weight).flatten(0, 1)


def _gate(module: Any, outputs: int) -> tuple[Gate, Callable[[Tensor], Tensor] | None]:
    """The kernels' gate that computes what the module does between its products, or STORE and the module's own.

    Args:
        outputs: of an expert's first product.
    """

    def own(numbers: Tensor) -> Tensor:
        found: Tensor
        if not module.has_gate:
            found = module.act_fn(numbers)
        elif module.is_concatenated:
            found = module._apply_gate(numbers)  # noqa: SLF001  # the interface's name for it
        else:
            halves = numbers.unflatten(-1, (2, -1))
            found = module._apply_gate(halves.transpose(-1, -2).flatten(-2))  # noqa: SLF001
        return found

    generator = torch.Generator().manual_seed(0)
    given = 4 * torch.randn((8, outputs), generator=generator)
    with torch.inference_mode():
        expected = own(given)
    for gate, compute in _gates(module):
        found = compute(given)
        bound = EXACT * max(1.0, float(expected.abs().max()))
        if found.shape == expected.shape and float((found - expected).abs().max()) <= bound:
            return gate, None
    return Gate(Epilogue.STORE), own


def _gates(module: Any) -> Iterator[tuple[Gate, Callable[[Tensor], Tensor]]]:
    """The kernels' gates that a module's operation may be, and their definitions."""
    if not module.has_gate:
        yield Gate(Epilogue.RELU_SQUARED), lambda numbers: numbers.relu().square()
        yield Gate(Epilogue.GELU), reference.gelu
        return
    yield Gate(Epilogue.SILU_MUL), reference.silu_mul
    yield Gate(Epilogue.GELU_MUL), reference.gelu_mul
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    alphas = [getattr(module, name, None) for name in ("alpha", "swiglu_alpha")]
    for limit in limits:
        for alpha in alphas:
            if isinstance(limit, (int, float)) and isinstance(alpha, (int, float)):
                yield (
                    Gate(Epilogue.CLAMPED_GATE, float(limit), float(alpha)),
                    lambda numbers, limit=limit, alpha=alpha: reference.clamped_gate(numbers, limit, alpha),
                )


def _forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An implementation of experts; see `ExpertsInterface`."""
    call: ExpertsCall | None = self.__dict__.get(ATTRIBUTE)
    if call is None:
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return call(hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(NAME, _forward)
