"""Swaps a model's layers of experts for our packed, quantized ones, in all classes that use transformers' interface of
experts (`ExpertsInterface`): routers stay transformers' own, products become those of the native kernels.

A module of that interface says how its weights are laid out. The operation between its two products is its own code:
where that computes the same numbers as one of the kernels' gates, the kernels do, else the module is called between two
of their products.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from kvrelay.engine.models.fast.loader import MakeLinear
from kvrelay.engine.models.general.mxfp4 import STORED, StoredExperts
from kvrelay.engine.models.general.narrow import rows_of
from kvrelay.engine.models.loads import ExpertLoads
from kvrelay.engine.quant.schemes import Quantize
from kvrelay.engine.ranks.collective import Collective
from kvrelay.kernels import reference
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.experts import ExpertsCall, ExpertsCalls, Gate, PackedExperts, laid_out
from kvrelay.kernels.cpu.packed import Epilogue, PackedLinear
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.ops import Linear

NAME = "kvrelay"
"""Name of the implementation with transformers."""
ATTRIBUTE = "_kvrelay_experts"
"""Attribute of a module: the `Call` that computes it."""
LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "num_experts", "down_proj")
"""Attributes that a module of transformers' interface has."""
Operation = Callable[[Tensor], Tensor]
EXACT = 1e-5
"""Largest difference of two gates that compute the same, relative to the largest number."""


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that use transformers' interface of experts."""
    for module in model.modules():
        if all(hasattr(module, name) for name in LAYOUT):
            yield module


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer of experts."""

    experts: int
    up: Tensor | CodedWeight
    """[experts * outputs, hidden] all experts' first weights, one below the other."""
    down: Tensor | CodedWeight
    """[experts * hidden, inner] all experts' second weights, one below the other."""
    up_bias: Tensor | None
    down_bias: Tensor | None
    gated: bool
    interleaved: bool
    """Whether each gate is followed by its up; else gates come first."""
    operation: Operation
    """The module's operation between the products."""
    gates: tuple[tuple[Gate, Operation], ...]
    """The kernels' gates that may compute the module's operation, and their definitions."""
    norm: Operation | None
    """The norm that the module applies to its products' result."""

    @property
    def outputs(self) -> int:
        """Outputs of an expert's first product."""
        return len(self.up.codes if isinstance(self.up, CodedWeight) else self.up) // self.experts


Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes a layer's result [T, hidden] of its input [T, hidden], and [T, top] numbers and shares of the experts."""
MakeCall = Callable[[Layer], Call]


@runtime_checkable
class Counting(Protocol):
    """A call that counts the tokens of its experts; `ExpertsCall` has the docstrings."""

    @property
    def experts(self) -> int: ...

    def count(self, load: Tensor) -> None: ...

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor: ...


def swap_experts(model: PreTrainedModel, make: MakeCall) -> int:
    """Swaps all layers of experts; their weights are freed.

    Args:
        make: makes the call that computes a layer.

    Returns:
        The bytes of the weights that were swapped.
    """
    swapped = 0
    for module in list(experts_of(model)):
        layer = _layer_of(module)
        if layer is None:
            continue
        module.__dict__[ATTRIBUTE] = make(layer)
        module.__dict__.pop(STORED, None)
        for name, parameter in list(module.named_parameters(recurse=False)):
            swapped += parameter.nbytes
            setattr(module, name, None)
        config: Any = module.config
        if isinstance(config, PreTrainedConfig):
            config._experts_implementation = NAME  # noqa: SLF001  # `set_experts_implementation` refuses what isn't known
    return swapped


def count_loads(
    model: nn.Module, group: Collective, parts: int, device: torch.device | str = "cpu"
) -> ExpertLoads | None:
    """Has our kernels of a model's experts count their tokens.

    Args:
        group: the model's ranks.
        parts: that whole experts are divided into.
        device: of the model.

    Returns:
        What they count; None if they compute no layer, or layers with different numbers of experts.
    """
    found = [module.__dict__.get(ATTRIBUTE) for module in model.modules()]
    calls = [call for call in found if isinstance(call, Counting)]
    counts = {call.experts for call in calls}
    if len(counts) != 1:
        return None
    held = counts.pop()
    loads = ExpertLoads(len(calls), held * parts, held if parts > 1 else None, group, parts, device)
    for layer, call in enumerate(calls):
        call.count(loads.of(layer))
    return loads


def on_cpu(team: Team, linear: MakeLinear) -> MakeCall:
    """Makes calls of the native kernels, whose layers share buffers.

    Args:
        linear: lays out a weight for `team`.
    """
    calls = ExpertsCalls(team)

    def make(layer: Layer) -> Call:
        gate = gate_of(layer.operation, layer.outputs, layer.gates, interleaved=layer.interleaved)
        halves, interleaved = (2 if layer.gated else 1, layer.interleaved) if gate is not None else (1, False)

        def packed(weight: Tensor | CodedWeight, bias: Tensor | None, halves: int, interleaved: bool) -> Linear:
            experts = layer.experts
            offsets = None if bias is None else laid_out(bias, experts, halves=halves, interleaved=interleaved)
            return linear(laid_out(weight, experts, halves=halves, interleaved=interleaved), offsets)

        up = packed(layer.up, layer.up_bias, halves, interleaved)
        down = packed(layer.down, layer.down_bias, 1, False)
        if not isinstance(up, PackedLinear) or not isinstance(down, PackedLinear):
            raise TypeError(f"weights are {type(up).__name__}; allowed: PackedLinear")
        made = PackedExperts(team, up, down, layer.experts, gate or Gate(Epilogue.STORE))
        return ExpertsCall(calls, made, layer.operation if gate is None else None, layer.norm, layer.outputs)

    return make


def on_gpu(quantize: Quantize, dtype: torch.dtype, device: torch.device) -> MakeCall:
    """Makes calls of the Triton kernels with quantized weights, for layers that compute in `dtype`."""
    # Imported here because it needs Triton, which doesn't exist for every platform.
    from kvrelay.kernels.triton.grouped_matmul import GroupedExperts, grouped_matmul

    def make(layer: Layer) -> Call:
        up, down = (
            grouped_matmul(
                weight if isinstance(weight, CodedWeight) else quantize(weight), bias, layer.experts, dtype, device
            )
            for weight, bias in ((layer.up, layer.up_bias), (layer.down, layer.down_bias))
        )
        return GroupedExperts(up, layer.operation, down, layer.experts, layer.norm)

    return make


def _layer_of(module: Any) -> Layer | None:
    """The parts of a module; None if its weights aren't as the interface says."""
    gated, experts = bool(module.has_gate), int(module.num_experts)
    first, second = ("gate_up_proj" if gated else "up_proj"), "down_proj"
    up, down = _weight(module, first), _weight(module, second)
    if up is None or down is None:
        return None
    names = (first, second) if module.has_bias else ()
    found: list[Tensor] = [getattr(module, f"{name}_bias").detach().flatten() for name in names]
    up_bias, down_bias = found or (None, None)
    return Layer(
        experts,
        up,
        down,
        up_bias,
        down_bias,
        gated,
        gated and not module.is_concatenated,
        module._apply_gate if gated else module.act_fn,  # noqa: SLF001  # the interface's name for it
        tuple(_gates(module)),
        module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
    )


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


GATED: tuple[tuple[Gate, Operation], ...] = (
    (Gate(Epilogue.SILU_MUL), reference.silu_mul),
    (Gate(Epilogue.GELU_MUL), reference.gelu_mul),
)
UNGATED: tuple[tuple[Gate, Operation], ...] = (
    (Gate(Epilogue.RELU_SQUARED), lambda numbers: numbers.relu().square()),
    (Gate(Epilogue.GELU), reference.gelu),
)
"""The kernels' gates, and their definitions, which take gates before ups."""


def gate_of(
    operation: Operation, outputs: int, gates: Iterable[tuple[Gate, Operation]], *, interleaved: bool = False
) -> Gate | None:
    """The one of these gates that computes what an operation does; None if none does.

    Args:
        operation: [T, outputs] -> [T, inner].
        interleaved: whether it takes each gate before its up; else gates come first.
    """
    given = 4 * torch.randn((8, outputs), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = operation(given)
        ordered = torch.cat((given[:, ::2], given[:, 1::2]), 1) if interleaved else given
        for gate, compute in gates:
            found = compute(ordered)
            bound = EXACT * max(1.0, float(expected.abs().max()))
            if found.shape == expected.shape and float((found - expected).abs().max()) <= bound:
                return gate
    return None


def _gates(module: Any) -> Iterator[tuple[Gate, Operation]]:
    """The kernels' gates that a module's operation may be, and their definitions, which take gates before ups."""
    if not module.has_gate:
        yield from UNGATED
        return
    yield from GATED
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    alphas = [getattr(module, name, None) for name in ("alpha", "swiglu_alpha")]
    for limit in limits:
        for alpha in alphas:
            if isinstance(limit, (int, float)) and isinstance(alpha, (int, float)):
                yield (
                    Gate(Epilogue.CLAMPED_GATE, float(limit), float(alpha)),
                    partial(reference.clamped_gate, limit=limit, alpha=alpha),
                )


def _forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An implementation of experts; see `ExpertsInterface`."""
    call: Call | None = self.__dict__.get(ATTRIBUTE)
    if call is None:
        found: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return found
    rows = rows_of(len(hidden_states))
    if rows is None:
        return call(hidden_states, top_k_index, top_k_weights)
    wanted = call(hidden_states[rows], top_k_index[rows], top_k_weights[rows])
    return torch.zeros_like(hidden_states).index_copy_(0, rows, wanted)


ExpertsInterface.register(NAME, _forward)
