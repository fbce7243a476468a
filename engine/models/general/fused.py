"""Modules made of two or three products with operations between them, computed by one native program each.

    MLP           gate and up, their gate, down; or up, an activation, down
    convolution   b, c and x of a token are one product, c * conv(b * x) is the input of the next one (LFM2)

The products are those of `linears.swap`. Whether a module computes just that is found by calling it with stand-ins in
the place of its products, whose results are known.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvrelay.engine.models.general.experts import GATED, UNGATED, gate_of
from kvrelay.engine.models.general.linears import JoinedPart, Product
from kvrelay.engine.models.general.states import running_step
from kvrelay.kernels import reference
from kvrelay.kernels.cpu.packed import BLOCK, PackedLinear, PackedMlp
from kvrelay.kernels.cpu.program import Buffer, Team
from kvrelay.kernels.cpu.states import GatedConv

ROWS = 8
"""Rows of the calls with stand-ins."""


class StandIn(nn.Module):
    """Takes the place of a product: keeps its input, and gives a known result."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result, self.input = result, torch.empty(0)

    def forward(self, input: Tensor) -> Tensor:
        self.input = input
        return self.result


def fuse(model: nn.Module, team: Team) -> int:
    """Has the model's modules of these kinds compute natively; returns how many.

    Args:
        model: whose linear layers have been swapped.
        team: for which their weights are packed.
    """
    inner, fused = Buffer(np.float32), 0
    module: Any
    for module in model.modules():
        if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:  # noqa: SLF001  # torch has no other name
            continue
        native = _mlp(module, team, inner) or _conv(module, team)
        if native is not None:
            module.forward = native
            fused += 1
    return fused


def _between(module: nn.Module, results: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The input of a module's last product, if the products have these results.

    Args:
        results: by the products' names. All but the last one get x, and the last one's result is the module's.

    Raises:
        ValueError: the module computes something else.
    """
    stands = {name: StandIn(result) for name, result in results.items()}
    originals = {name: getattr(module, name) for name in stands}
    *firsts, last = stands.values()
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
    if any(not torch.equal(first.input, x) for first in firsts) or not torch.equal(out, last.result):
        raise ValueError(f"{type(module).__name__} computes more than its products")
    return last.input


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _mlp(module: nn.Module, team: Team, inner: "Buffer[np.float32]") -> Callable[[Tensor], Tensor] | None:
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
    return None if gate is None else PackedMlp(team, up, gate.epilogue, down.run, inner)


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
    native, original = GatedConv(team, before, behind, weight, bias), module.forward

    def forward(hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        step = running_step()
        if step is None or others or named.get("attention_mask") is not None:
            result: Tensor = original(hidden_states, *others, **named)
            return result
        return step.gated_conv(native, hidden_states, layer)

    return forward
