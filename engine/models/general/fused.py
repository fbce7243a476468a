"""Modules made of two or three products with operations between them, computed by one native program each.

    MLP           gate and up, their gate, down; or up, an activation, down
    convolution   b, c and x of a token are one product, c * conv(b * x) is the input of the next one (LFM2)
    layer         x + f(norm(x)), where f is one of these, once or twice

The products are those of `linears.swap`. Whether a module computes just that is found by calling it with stand-ins in
the place of its parts, whose results are known.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvrelay.engine.models.general.experts import ATTRIBUTE, GATED, UNGATED, gate_of
from kvrelay.engine.models.general.linears import JoinedPart, Product
from kvrelay.engine.models.general.narrow import narrowed
from kvrelay.engine.models.general.norms import Norm
from kvrelay.engine.models.general.states import running_step
from kvrelay.kernels import reference
from kvrelay.kernels.cpu.experts import ExpertsCall
from kvrelay.kernels.cpu.packed import BLOCK, PackedLinear, PackedMlp, PackedNorm, ResidualBlocks
from kvrelay.kernels.cpu.program import Buffer, Team
from kvrelay.kernels.cpu.states import GatedConv

ROWS = 8
"""Rows of the calls with stand-ins."""


class StandIn(nn.Module):
    """Takes the place of a module's part: keeps its input, and gives a known result."""

    def __init__(self, result: Tensor, calls: list["StandIn"], weight: Tensor | None) -> None:
        """
        Args:
            calls: to which it adds itself when it is called.
            weight: that of the part.
        """
        super().__init__()
        self.result, self.input = result, torch.empty(0)
        self.calls, self.weight = calls, weight

    def forward(self, hidden_states: Tensor, **others: object) -> Tensor:
        self.input = hidden_states
        self.calls.append(self)
        return self.result


class NativeMlp:
    """The forward pass of an MLP."""

    def __init__(self, native: PackedMlp) -> None:
        self.native = native

    def __call__(self, x: Tensor) -> Tensor:
        return narrowed(self.native, x)


class NativeConv:
    """The forward pass of a convolution between gates."""

    def __init__(self, native: GatedConv, layer: int, original: Callable[..., Tensor]) -> None:
        """
        Args:
            layer: its number in the cache.
            original: computes it outside of steps.
        """
        self.native, self.layer, self._original = native, layer, original

    def __call__(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        step = running_step()
        if step is None or others or named.get("attention_mask") is not None:
            return self._original(hidden_states, *others, **named)
        state, rows = step.gated_conv(self.native, self.layer, hidden_states.dtype)
        return self.native(hidden_states[0], state, rows)[None]


class NativeLayer:
    """The forward pass of a layer."""

    def __init__(
        self, team: Team, parts: list[tuple[PackedNorm, NativeMlp | NativeConv]], original: Callable[..., Tensor]
    ) -> None:
        """
        Args:
            parts: each norm, and the native forward pass of what is behind it.
            original: computes the layer outside of steps.
        """
        self._original = original
        self._convs: list[tuple[GatedConv, int]] = []
        blocks: list[PackedMlp | GatedConv] = []
        for norm, part in parts:
            if isinstance(part, NativeConv):
                conv = part.native.behind(norm)
                self._convs.append((conv, part.layer))
                blocks.append(conv)
            else:
                blocks.append(part.native.behind(norm))
        self._native = ResidualBlocks(team, blocks)

    def __call__(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        if self._convs:
            step = running_step()
            if step is None or others or named.get("attention_mask") is not None:
                return self._original(hidden_states, *others, **named)
            for conv, layer in self._convs:
                conv.begin(*step.gated_conv(conv, layer, hidden_states.dtype))
        return self._native(hidden_states)


def fuse(model: nn.Module, team: Team) -> int:
    """Makes the model's modules of these kinds compute natively; returns their number.

    Args:
        model: whose norms and linear layers have been swapped.
        team: for which their weights are packed.
    """
    inner, fused = Buffer(np.float32), 0
    finds: list[Callable[[Any], Callable[..., Tensor] | None]] = [
        lambda module: _mlp(module, team, inner) or _conv(module, team),
        lambda module: _layer(module, team),
    ]
    module: Any
    for find in finds:
        for module in model.modules():
            if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:  # noqa: SLF001  # torch has no other name
                continue
            native = find(module)
            if native is not None:
                module.forward = native
                fused += 1
    return fused


def native_modules(model: nn.Module) -> list[str]:
    """Names of the kinds of modules that native kernels compute."""
    modules = list(model.modules())
    forwards = [module.__dict__.get("forward") for module in modules]
    has = {
        "experts": any(isinstance(module.__dict__.get(ATTRIBUTE), ExpertsCall) for module in modules),
        "MLPs": any(isinstance(forward, NativeMlp) for forward in forwards),
        "whole layers": any(isinstance(forward, NativeLayer) for forward in forwards),
        "norms": any(isinstance(module, Norm) and module.native is not None for module in modules),
        "products": any(isinstance(module, (Product, JoinedPart)) for module in modules),
    }
    return [name for name, found in has.items() if found]


def _called(module: nn.Module, results: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Result of a module for x, and the inputs of its parts, in the order of their calls, if the parts give these
    results.

    Raises:
        ValueError: the module needs more than x, or calls a part twice.
    """
    calls: list[StandIn] = []
    originals = {name: getattr(module, name) for name in results}
    stands = {
        name: StandIn(result, calls, getattr(originals[name], "weight", None)) for name, result in results.items()
    }
    try:
        for name, stand in stands.items():
            setattr(module, name, stand)
        with torch.inference_mode():
            out = module(x)
    except Exception as error:  # the module's code fails in whatever way
        raise ValueError(f"{type(module).__name__} takes no input alone") from error
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
    names = {id(stand): name for name, stand in stands.items()}
    inputs = {names[id(stand)]: stand.input for stand in calls}
    if len(calls) != len(results) or len(inputs) != len(results) or not isinstance(out, Tensor):
        raise ValueError(f"{type(module).__name__} doesn't call each of its parts once")
    return out, inputs


def _between(module: nn.Module, results: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The input of a module's last product, if the products have these results.

    Args:
        results: by the products' names. All but the last one get x, and the last one's result is the module's.

    Raises:
        ValueError: the module computes something else.
    """
    out, inputs = _called(module, results, x)
    *firsts, last = results
    if any(not torch.equal(inputs[first], x) for first in firsts) or not torch.equal(out, results[last]):
        raise ValueError(f"{type(module).__name__} computes more than its products")
    return inputs[last]


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _mlp(module: nn.Module, team: Team, inner: "Buffer[np.float32]") -> NativeMlp | None:
    """The native MLP that computes what a module does; None if there is none.

    Args:
        inner: shared by all of them.
    """
    products = {name: child for name, child in module.named_children() if isinstance(child, (Product, JoinedPart))}
    if not 2 <= len(products) <= 3 or any(True for _ in module.parameters()):
        return None
    parts = {child.index: name for name, child in products.items() if isinstance(child, JoinedPart)}
    joined = {id(child.joined): child.joined for child in products.values() if isinstance(child, JoinedPart)}
    *singles, last = [name for name in products if name not in parts.values()] or [""]
    down = products.get(last)
    if len(joined) == 1 and len(parts) == 2 and not singles:
        (both,) = joined.values()
        names, up = [parts[0], parts[1]], both.run
        if len(both.outputs) != 2:
            return None
    elif len(singles) == 1 and not parts and isinstance(first := products[singles[0]], Product):
        names, up = singles, first.run
    else:
        return None
    if not isinstance(down, Product) or not isinstance(up, PackedLinear) or not isinstance(down.run, PackedLinear):
        return None
    width, hidden = down.in_features, down.out_features
    if up.inputs != hidden or up.outputs not in (width, 2 * width) or width % BLOCK:
        return None

    def operation(numbers: Tensor) -> Tensor:
        results = dict(zip(names, numbers[None].chunk(len(names), -1), strict=True))
        x = _normal(1, len(numbers), hidden)
        return _between(module, {**results, last: x + 1}, x)[0]

    try:
        gate = gate_of(operation, up.outputs, GATED if up.outputs == 2 * width else UNGATED)
    except ValueError:
        return None
    return None if gate is None else NativeMlp(PackedMlp(team, up, gate.epilogue, down.run, inner))


def _conv(module: Any, team: Team) -> Callable[..., Tensor] | None:
    """The native form of a convolution between gates; None if a module isn't one."""
    products = {name: child for name, child in module.named_children() if isinstance(child, Product)}
    convs = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    layer = getattr(module, "layer_idx", None)
    if len(products) != 2 or len(convs) != 1 or not isinstance(layer, int):
        return None
    (conv,), (first, last) = convs, products
    channels, before, behind = conv.out_channels, products[first].run, products[last].run
    if not isinstance(before, PackedLinear) or not isinstance(behind, PackedLinear) or conv.groups != channels:
        return None
    if (before.outputs, behind.inputs) != (3 * channels, channels) or before.inputs != behind.outputs:
        return None
    weight, dtype = conv.weight.detach().squeeze(1), conv.weight.dtype
    bias = None if conv.bias is None else conv.bias.detach()
    gates = _normal(1, ROWS, 3 * channels).to(dtype)
    x = _normal(1, ROWS, before.inputs).to(dtype)
    try:
        found = _between(module, {first: gates, last: x + 1}, x)[0].float()
    except ValueError:
        return None
    state = torch.zeros(1, weight.shape[1], channels, dtype=dtype)
    expected = reference.gated_conv(gates[0], weight.T, bias, state, [0, ROWS], [0])
    bound = 4 * torch.finfo(dtype).eps * max(1.0, float(expected.abs().max()))
    if found.shape != expected.shape or float((found - expected).abs().max()) > bound:
        return None
    return NativeConv(GatedConv(team, before, behind, weight, bias), layer, module.forward)


def _layer(module: nn.Module, team: Team) -> NativeLayer | None:
    """The native form of a layer; None if a module isn't one."""
    norms: dict[str, PackedNorm] = {}
    like = torch.empty(0)
    parts: dict[str, NativeMlp | NativeConv] = {}
    for name, child in module.named_children():
        native = child.__dict__.get("forward")
        if isinstance(child, Norm) and child.native is not None:
            norms[name], like = child.native, child.weight
        elif isinstance(native, (NativeMlp, NativeConv)):
            parts[name] = native
        else:
            return None
    widths = {len(norm.weight) for norm in norms.values()}
    if len(norms) != len(parts) or len(widths) != 1 or any(True for _ in module.parameters(recurse=False)):
        return None
    if sum(isinstance(part, NativeMlp) for part in parts.values()) > 1:
        return None
    x = _normal(1, ROWS, len(like)).to(like.dtype)
    results = {name: _normal(*x.shape, seed=seed).to(x.dtype) for seed, name in enumerate((*norms, *parts), 1)}
    try:
        out, inputs = _called(module, results, x)
    except ValueError:
        return None
    order = list(inputs)
    found: list[tuple[PackedNorm, NativeMlp | NativeConv]] = []
    for norm, part in zip(order[::2], order[1::2], strict=True):
        if norm not in norms or part not in parts or not torch.equal(inputs[norm], x):
            return None
        if not torch.equal(inputs[part], results[norm]):
            return None
        x = x + results[part]
        found.append((norms[norm], parts[part]))
    return NativeLayer(team, found, module.forward) if torch.equal(out, x) else None
