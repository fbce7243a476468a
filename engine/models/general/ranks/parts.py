"""The modules of a rank: parameters are cut as they are loaded, and what the ranks compute is put together."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvrelay.engine.models.general.ranks.plan import Cut, Division, Exchange, divide, part_of
from kvrelay.engine.models.general.step import UnfitError
from kvrelay.engine.ranks.collective import ALONE, Collective, Place

DIVISION = "_kvrelay_division"
"""Attribute of a model whose parameters are being loaded: its `Division`."""
LOADED = "_is_hf_initialized"
"""Attribute by which transformers knows the parameters that it needn't draw at random."""
HAS_SOME = "_is_expert_parallel"
"""Attribute by which transformers' experts know that some tokens' experts are none of theirs."""
SUMMED = (torch.float32, torch.bfloat16)
"""Types that every collective adds; others are added as float32."""


class Part(NamedTuple):
    """The part of a model that is loaded."""

    place: Place = ALONE
    """The rank's place among the worker's ranks."""
    experts: int = 1
    """Parts that whole experts are divided into (`plan.divide`)."""


WHOLE = Part()


def class_of_part(model_class: type[PreTrainedModel], part: Part) -> type[PreTrainedModel]:
    """The class of a model whose modules keep the rank's part of each parameter that is assigned to them, whole.

    So a checkpoint is read as for the whole model, and of each tensor only a part stays in memory.
    """

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        division = divide(self, part.place.degree, part.place.rank, part.experts)
        self.__dict__[DIVISION] = division
        for name, module in self.named_modules():
            if name in division.cuts:
                module.__class__ = _cutting(module, division.cuts[name])

    # The name is the same, because transformers finds by it what it knows of the class.
    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})


def _cutting(module: nn.Module, cuts: Mapping[str, tuple[Cut, ...]]) -> type[nn.Module]:
    """The module's class, whose `__setattr__` cuts parameters."""
    kind: Any = type(module)
    whole = {name: getattr(module, name).shape for name in cuts}

    def assign(self: nn.Module, name: str, value: object) -> None:
        if name in cuts and isinstance(value, Tensor) and value.shape == whole[name]:
            part = value.detach()
            for cut in cuts[name]:
                part = cut.of(part)
            value = nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
            setattr(value, LOADED, True)
        kind.__setattr__(self, name, value)

    return type(kind.__name__, (kind,), {"__setattr__": assign, "__module__": kind.__module__})


def put_together(model: PreTrainedModel, place: Place) -> None:
    """Makes the modules of a model of `class_of_part`, whose parameters are loaded, exchange their results."""
    division: Division = model.__dict__.pop(DIVISION)
    model.__class__ = type(model).__bases__[0]
    for name in division.cuts:
        module: Any = model.get_submodule(name)
        module.__class__ = type(module).__bases__[0]
    for name, count in division.groups.items():
        attention: Any = model.get_submodule(name)
        attention.num_key_value_groups = count
    for name, exchange in division.exchanges.items():
        _exchange(model, name, exchange, place.group, division.experts.get(name))
    for name in division.cuts:
        for module in model.get_submodule(name).modules():
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape


def _exchange(model: PreTrainedModel, name: str, exchange: Exchange, group: Collective, held: range | None) -> None:
    """Makes one module exchange its results.

    Args:
        held: the rank's experts, if it has whole ones.
    """
    module: Any = model.get_submodule(name)
    if exchange == "experts":
        _sum_experts(module, group, held)
    elif exchange == "share":
        _around(module, lambda given: given / group.size, lambda out: out)
    elif exchange == "vocabulary":
        _look_up_part(module, group)
    elif exchange == "gather" and isinstance(module, nn.Embedding):
        _around(module, lambda given: given, lambda out: gathered(group, out, module.embedding_dim))
    elif isinstance(module, nn.Linear):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Shared(module, group, exchange))
    elif exchange == "sum":
        _around(module, lambda given: given, lambda out: total(group, out))
    else:
        raise ValueError(f"tensor_parallel: {name}, a {type(module).__name__}, can't be divided; allowed: 1")


class Shared(nn.Module):
    """A linear layer of which each rank computes a part."""

    def __init__(self, layer: nn.Linear, group: Collective, exchange: Exchange) -> None:
        """
        Args:
            layer: with the rank's weights, and the sizes of the whole layer.
            exchange: sum, split or gather.
        """
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._group, self._exchange = group, exchange
        self._inputs = part_of(layer.in_features, group.size, group.place)
        if exchange != "gather" and group.place > 0:
            layer.register_parameter("bias", None)  # the first rank adds it

    def forward(self, input: Tensor) -> Tensor:
        if self._exchange == "gather":
            return gathered(self._group, self.layer(input), self.out_features)
        if self._exchange == "split":
            input = input[..., self._inputs.start : self._inputs.stop]
        return total(self._group, self.layer(input))

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            return getattr(self.layer, name)
        return super().__getattr__(name)


def total(group: Collective, part: Tensor) -> Tensor:
    """The sum of all ranks' parts."""
    if part.dtype in SUMMED:
        return group.sum(part.contiguous())
    return group.sum(part.float()).to(part.dtype)


def gathered(group: Collective, part: Tensor, size: int) -> Tensor:
    """[..., size] of all ranks' parts of the last dimension."""
    parts = [part_of(size, group.size, number) for number in range(group.size)]
    widest = max(map(len, parts))
    found = group.gather(nn.functional.pad(part, (0, widest - part.shape[-1])))
    return torch.cat([found[number][..., : len(each)] for number, each in enumerate(parts)], -1)


def _around(module: Any, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
    """Wraps a module's `forward` in functions that change its first argument and its result."""
    original = module.forward

    def forward(given: Tensor, *others: Any, **named: Any) -> Tensor:
        return after(original(before(given), *others, **named))

    module.forward = forward


def _look_up_part(module: Any, group: Collective) -> None:
    """Makes an embedding look up the tokens of its part of the vocabulary; the ranks' sum has all tokens."""
    original, part = module.forward, part_of(module.num_embeddings, group.size, group.place)
    module.padding_idx = None

    def forward(tokens: Tensor) -> Tensor:
        own = (tokens >= part.start) & (tokens < part.stop)
        found = original(torch.where(own, tokens - part.start, 0))
        return total(group, found.masked_fill(~own[..., None], 0.0))

    module.forward = forward


def _sum_experts(module: Any, group: Collective, held: range | None) -> None:
    """Makes the ranks add up the results of their experts, or of their parts of all experts, for all tokens."""
    original = module.forward

    def forward(hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        if held is not None:
            if len(others) < 2:
                raise UnfitError("its experts have other arguments than tokens' experts and their weights")
            chosen, weights, *rest = others
            away = (chosen < held.start) | (chosen >= held.stop)
            others = (torch.where(away, len(held), chosen - held.start), weights.masked_fill(away, 0.0), *rest)
        return total(group, original(hidden, *others, **named))

    if held is not None:
        # Numbers of other ranks' experts become a number without an expert, which transformers' code leaves out.
        module.num_experts = len(held)
        setattr(module, HAS_SOME, True)
    module.forward = forward
