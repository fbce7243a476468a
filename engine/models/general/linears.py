"""Swaps a model's `nn.Linear` for our packed, quantized ones.

Only those whose weights nothing but their own `forward` reads are swapped, which a run of the model shows. It also
shows which ones get the same input, as queries, keys and values do: their weights become one product, which the first
of them computes for all.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvrelay.engine.models.fast.loader import MakeLinear
from kvrelay.engine.models.general.narrow import narrowed
from kvrelay.kernels.ops import Linear


class Watched(nn.Linear):
    """A linear layer whose uses are noted."""

    _uses: "Uses"

    def forward(self, input: Tensor) -> Tensor:
        uses = self.__dict__["_uses"]
        uses.note(self, input)
        uses.inside = True
        try:
            return super().forward(input)
        finally:
            uses.inside = False

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not self.__dict__["_uses"].inside:
            self.__dict__["_uses"].read.add(id(self))
        return super().__getattr__(name)


class Uses:
    """How a run of a model uses its linear layers."""

    def __init__(self) -> None:
        self.inside = False
        self.read: set[int] = set()
        """Layers whose weight was read outside of their own `forward`."""
        self.called: dict[int, nn.Linear] = {}
        """Layers that were called."""
        self.together: list[list[nn.Linear]] = []
        """Layers that got the same input, one behind the other."""
        self._input: Tensor | None = None

    def note(self, layer: nn.Linear, given: Tensor) -> None:
        """Notes a call."""
        first = id(layer) not in self.called
        self.called[id(layer)] = layer
        if first and given is self._input and self.together:
            self.together[-1].append(layer)
        elif first:
            self.together.append([layer])
        self._input = given if first else None


@contextmanager
def watching(model: nn.Module) -> Iterator[Uses]:
    """Context in which the uses of the model's linear layers are noted."""
    uses = Uses()
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__dict__["_uses"] = uses
        layer.__class__ = Watched
    try:
        yield uses
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
            del layer.__dict__["_uses"]


class Product(nn.Module):
    """Replacement of `nn.Linear` with another product."""

    def __init__(self, run: Linear, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.run = run

    def forward(self, input: Tensor) -> Tensor:
        return narrowed(self._product, input)

    def _product(self, x: Tensor) -> Tensor:
        return self.run(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class Joined:
    """One product for several layers that get the same input."""

    def __init__(self, run: Linear, inputs: int, outputs: list[int]) -> None:
        self.run, self._inputs, self.outputs = run, inputs, outputs
        self._input: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    def take(self, index: int, given: Tensor) -> Tensor:
        """The product of the layer with this index."""
        if given is not self._input or index not in self._results:
            whole = self.run(given.reshape(-1, self._inputs))
            parts = whole.view(*given.shape[:-1], whole.shape[1]).split_with_sizes(self.outputs, -1)
            self._input, self._results = given, dict(enumerate(parts))
        result = self._results.pop(index)
        if not self._results:
            self._input = None
        return result


class JoinedPart(nn.Module):
    """One of the layers of a `Joined`."""

    def __init__(self, joined: Joined, index: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.joined, self.index = joined, index

    def forward(self, input: Tensor) -> Tensor:
        return self.joined.take(self.index, input)


def swap(model: nn.Module, uses: Uses, linear: MakeLinear, head: MakeLinear, head_sizes: Collection[int]) -> int:
    """Swaps the layers that may be swapped.

    Args:
        linear, head: lay out a weight and its bias, `head` those that project to the vocabulary.
        head_sizes: outputs of these: tokens of the vocabulary, and of the rank's part of it.

    Returns:
        The bytes of the weights that were swapped.
    """
    parents: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                parents.setdefault(id(child), []).append((parent, name))
    swapped = 0

    def put(layer: nn.Linear, module: nn.Module) -> None:
        nonlocal swapped
        swapped += layer.weight.nbytes
        for parent, name in parents[id(layer)]:
            setattr(parent, name, module)

    for together in uses.together:
        layers = [layer for layer in together if id(layer) not in uses.read and type(layer) is nn.Linear]
        siblings = {id(parent) for layer in layers for parent, _ in parents[id(layer)]}
        make = head if any(layer.out_features in head_sizes for layer in layers) else linear
        if len(layers) > 1 and len(siblings) == 1 and make is linear:
            outputs = [layer.out_features for layer in layers]
            joined = Joined(_joined(layers, make), layers[0].in_features, outputs)
            for index, layer in enumerate(layers):
                put(layer, JoinedPart(joined, index, layer.in_features, layer.out_features))
        else:
            for layer in layers:
                run = make(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
                put(layer, Product(run, layer.in_features, layer.out_features))
    return swapped


def _joined(layers: list[nn.Linear], make: Callable[[Tensor, Tensor | None], Linear]) -> Linear:
    biases = None
    if any(layer.bias is not None for layer in layers):
        biases = torch.cat([
            layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ])  # fmt: skip
    return make(torch.cat([layer.weight.detach() for layer in layers]), biases)
