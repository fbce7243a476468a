"""Swaps a model's layers of experts for our packed, quantized ones, in all classes that use transformers' interface of
experts (`ExpertsInterface`): routers stay transformers' own, products become those of the native kernels.

A module of that interface says how its weights are laid out. The operation between its two products is its own code:
where that computes the same numbers as one of the kernels' gates, the kernels do, else the module is called between two
of their products.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from kvrelay.engine.config import ExpertKernel
from kvrelay.engine.models.fast.loader import MakeLinear
from kvrelay.engine.models.general.mxfp4 import STORED, StoredExperts
from kvrelay.engine.models.general.narrow import rows_of
from kvrelay.engine.models.loads import ExpertLoads
from kvrelay.engine.packages import TYPES, Unavailable, check_parameters, imported
from kvrelay.engine.quant.schemes import Quantize
from kvrelay.engine.ranks.collective import Collective
from kvrelay.kernels import reference
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.experts import ExpertsCall, ExpertsCalls, Gate, PackedExperts, laid_out
from kvrelay.kernels.cpu.packed import Epilogue, PackedLinear
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.ops import Linear

logger = logging.getLogger(__name__)

NAME = "kvrelay"
"""Name of the implementation with transformers."""
ATTRIBUTE = "_kvrelay_experts"
"""Attribute of a module: the `Call` that computes it."""
LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "num_experts", "down_proj")
"""Attributes that a module of transformers' interface has."""
Operation = Callable[[Tensor], Tensor]
EXACT = 1e-5
"""Largest difference of two gates that compute the same, relative to the largest number."""
CLOSE = 2e-2
"""Largest norm of a difference that rounding to 16 bits makes, relative to the result's."""
FLASHINFER_PARAMETERS = {
    "input",
    "token_selected_experts",
    "token_final_scales",
    "fc1_expert_weights",
    "fc2_expert_weights",
    "output_dtype",
    "quant_scales",
    "fc1_expert_biases",
    "fc2_expert_biases",
    "swiglu_alpha",
    "swiglu_beta",
    "swiglu_limit",
    "output",
    "use_fused_finalize",
}
"""Parameters of FlashInfer's `cutlass_fused_moe` that are given."""
FLASHINFER_MULTIPLE = 8
"""Number of 16-bit numbers in 128 bits, the alignment that its kernels need."""


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


class Call(Protocol):
    """Computes a layer, and counts the tokens of its experts; `ExpertsCall` has the docstrings."""

    @property
    def experts(self) -> int: ...

    def count(self, load: Tensor) -> None: ...

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor: ...


MakeCall = Callable[[Layer], Call]


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
    calls: list[Call] = [module.__dict__[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in module.__dict__]
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


class FlashInferExperts:
    """Calls a layer of experts by FlashInfer's `cutlass_fused_moe`: `run(x, chosen, shares)`."""

    def __init__(self, function: Callable[..., object], layer: Layer, up: Tensor, down: Tensor, gate: Gate) -> None:
        """
        Args:
            up, down: the layer's weights.
            gate: SILU_MUL or CLAMPED_GATE.
        """
        self.experts = layer.experts
        self._function = function
        self._load: Tensor | None = None

        def by_expert(numbers: Tensor | None, *, first: bool) -> Tensor | None:
            """[experts, outputs, ...]; of the first product, ups come before gates."""
            if numbers is None:
                return None
            own = numbers.reshape(layer.experts, -1, *numbers.shape[1:])
            if first:
                gates, ups = (own[:, ::2], own[:, 1::2]) if layer.interleaved else own.chunk(2, 1)
                own = torch.cat((ups, gates), 1)
            return own.contiguous()

        self._given: dict[str, object] = {
            "fc1_expert_weights": by_expert(up, first=True),
            "fc1_expert_biases": by_expert(layer.up_bias, first=True),
            "fc2_expert_weights": by_expert(down, first=False),
            "fc2_expert_biases": by_expert(layer.down_bias, first=False),
            # A sum that is fused into the second product adds a token's experts in any order.
            "use_fused_finalize": False,
            "quant_scales": None,
        }
        if gate.epilogue is Epilogue.CLAMPED_GATE:
            for name, number in (("alpha", gate.alpha), ("beta", 1.0), ("limit", gate.limit)):
                self._given[f"swiglu_{name}"] = torch.full((layer.experts,), number, device=down.device)

    def count(self, load: Tensor) -> None:
        """Has the pairs of each expert added to `load`, int64 [experts], from now on."""
        self._load = load

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """[T, hidden] of x [T, hidden], chosen [T, top] and shares [T, top]; see `reference.experts`."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if self._load is not None:
            counts = self._load.new_zeros(self.experts + 1)
            own = chosen.flatten().clamp(max=self.experts).long()
            self._load += counts.scatter_add_(0, own, torch.ones_like(own))[:-1]
        self._function(
            input=x.contiguous(),
            token_selected_experts=chosen.int().contiguous(),
            token_final_scales=shares.float().contiguous(),
            output_dtype=x.dtype,
            output=out,
            **self._given,
        )
        return out


def on_flashinfer() -> MakeCall:
    """Makes calls of FlashInfer's kernel. Each is compared with the layer's definition when it is made.

    Raises:
        Unavailable: the package isn't there. What is returned raises it, too, for a layer that FlashInfer doesn't
            compute.
    """
    function = imported("flashinfer.fused_moe", "cutlass_fused_moe", "FlashInfer")
    check_parameters(function, FLASHINFER_PARAMETERS, "FlashInfer", "0.6.18")

    def make(layer: Layer) -> Call:
        up, down = layer.up, layer.down
        if isinstance(up, CodedWeight) or isinstance(down, CodedWeight) or up.dtype not in TYPES:
            kind = "quantized" if isinstance(up, CodedWeight) else up.dtype
            raise Unavailable(f"its experts are {kind}; FlashInfer takes weights of float16 or bfloat16")
        gate = gate_of(layer.operation, layer.outputs, layer.gates, interleaved=layer.interleaved)
        if gate is None or gate.epilogue not in (Epilogue.SILU_MUL, Epilogue.CLAMPED_GATE) or layer.norm is not None:
            raise Unavailable("its experts have another operation between or behind their products than SwiGLU")
        hidden, inner = up.shape[1], down.shape[1]
        if hidden % FLASHINFER_MULTIPLE or inner % FLASHINFER_MULTIPLE:
            widths = f"{hidden} inputs and {inner} in between"
            raise Unavailable(f"its experts have {widths}; FlashInfer takes multiples of {FLASHINFER_MULTIPLE}")
        call = FlashInferExperts(function, layer, up, down, gate)
        random = torch.Generator().manual_seed(0)
        x, chosen = torch.randn((8, hidden), generator=random), torch.rand((8, layer.experts), generator=random)
        given = x.to(up), chosen.argsort(1)[:, :2].to(up.device), torch.full((8, 2), 0.5).to(up)
        try:
            found = call(*given)
        except Exception as error:  # FlashInfer builds its kernels in the first call, and has them for some GPUs only
            raise Unavailable(f"FlashInfer failed ({error})") from error
        expected = _defined(layer, (up, down), *given)
        if not (found - expected).float().norm() <= CLOSE * expected.float().norm():
            raise Unavailable("FlashInfer's result of a layer of its experts is another one than the definition's")
        return call

    return make


def _defined(layer: Layer, weights: tuple[Tensor, Tensor], x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """A layer's result by definition, of its first and second weights."""

    def products(weight: Tensor, bias: Tensor | None) -> list[Operation]:
        biases: Sequence[Tensor | None] = [None] * layer.experts if bias is None else bias.chunk(layer.experts)
        both = zip(weight.chunk(layer.experts), biases, strict=True)
        return [partial(nn.functional.linear, weight=own, bias=of) for own, of in both]

    up, down = products(weights[0], layer.up_bias), products(weights[1], layer.down_bias)
    return reference.experts(x, chosen, shares, up, layer.operation, down)


def take_flashinfer(model: PreTrainedModel, wanted: ExpertKernel) -> None:
    """Swaps all layers of experts for calls of FlashInfer's kernel.

    Args:
        wanted: flashinfer, or auto, which leaves layers that FlashInfer can't compute as they are.

    Raises:
        ValueError: flashinfer is wanted, and can't be had; the text says why.
    """
    try:
        make = on_flashinfer()
        if not swap_experts(model, make):
            raise Unavailable("the model has no layers of experts")
    except Unavailable as reason:
        if wanted == "flashinfer":
            raise ValueError(f"expert_kernel is {wanted!r}, but {reason}; allowed: auto, builtin") from reason
        logger.info("FlashInfer doesn't compute the model's experts: %s", reason)


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
