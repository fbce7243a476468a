"""Contents of a model's cache in each layer, found by a run of a few tokens."""

from itertools import pairwise

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvrelay.engine.models.general.places import LayerCache, StateShape
from kvrelay.engine.models.general.ranks.plan import divided_keys
from kvrelay.engine.models.general.reading import parameters_of
from kvrelay.engine.models.general.states import shifting_layers
from kvrelay.engine.models.general.step import UnfitError
from kvrelay.engine.ranks.collective import NO_GROUP, Collective

KNOWN = (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
CACHE_ARGUMENTS = ("past_key_values", "cache_params", "cache")
"""Names of the argument of `forward` that takes the cache: until 5.23 one of the first two, from 5.24 on the last."""
LENGTH = 3


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the argument of `forward` that takes the cache.

    Raises:
        UnfitError: it takes none.
    """
    names = [name for name in CACHE_ARGUMENTS if name in parameters_of(model)]
    if not names:
        raise UnfitError("it takes no cache")
    return names[0]


def observe(model: PreTrainedModel, group: Collective = NO_GROUP) -> tuple[LayerCache, ...]:
    """Contents of each layer of the whole model's cache after a few tokens.

    Args:
        model: perhaps the part of one rank, each of which calls this.
        group: of the ranks that share the layers.

    Raises:
        UnfitError: it keeps something that isn't known, or the ranks keep other parts of it than they should.
    """
    if shifting := shifting_layers(model):
        return shifting
    name = cache_argument(model)
    cache = DynamicCache(config=model.config)
    tokens = torch.ones((1, LENGTH), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        out = model(input_ids=tokens, use_cache=True, return_dict=True, **{name: cache})
    given = getattr(out, name, None)
    if id(given) != id(cache):
        kind = "none" if given is None else type(given).__name__
        raise UnfitError(f"it has a cache of its own ({kind})")
    divided = divided_keys(model)
    return tuple(_layer(layer, group, divided) for layer in cache.layers)


def _layer(layer: object, group: Collective, divided: bool) -> LayerCache:
    if type(layer) not in KNOWN:
        raise UnfitError(f"its cache has layers of its own ({type(layer).__name__})")
    keys = values = None
    window = indexer = 0
    states: tuple[StateShape, ...] = ()
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        if layer.keys.dim() != 4 or layer.keys.shape[0] != 1:
            raise UnfitError(f"its keys have the shape {list(layer.keys.shape)}")
        keys, values = _inner(layer.keys, group, divided), _inner(layer.values, group, divided)
    if isinstance(layer, DynamicSlidingWindowLayer):
        window = int(layer.sliding_window)
    if isinstance(layer, DynamicIndexedLayer):
        if layer.indexer_position_ids is not None:
            raise UnfitError("its indexer keeps positions")
        if layer.indexer_keys is not None:
            indexer = layer.indexer_keys.shape[-1]
            if copies(layer.indexer_keys, group) < group.size:
                raise UnfitError("its indexer's keys are divided over ranks")
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states = tuple(
            StateShape(name, number, tuple(tensor.shape[1:]), tensor.dtype)
            for name in ("conv_states", "recurrent_states")
            for number, tensor in sorted(getattr(layer, name).items())
            if tensor is not None
        )
        for name in ("conv_states", "recurrent_states"):
            for tensor in getattr(layer, name).values():
                if tensor is not None and copies(tensor, group) < group.size:
                    raise UnfitError("its states are divided over ranks")
    return LayerCache(keys, values, indexer, window, states, replicated=not divided)


def _inner(numbers: torch.Tensor, group: Collective, divided: bool) -> tuple[int, int]:
    """(heads of the whole model, numbers of a head) of keys or values [1, heads of the rank, T, numbers]."""
    heads, same = int(numbers.shape[1]), copies(numbers, group)
    if same != group.size and (not divided or (same > 1 and heads > 1)):
        raise UnfitError("its ranks have other KV heads than its plan says")
    if same == group.size > 1 and divided and heads > 1:
        raise UnfitError("its ranks have the same KV heads, which its plan divides")
    return heads * group.size // same, int(numbers.shape[3])


def copies(numbers: torch.Tensor, group: Collective) -> int:
    """Number of neighbouring ranks that have the same numbers.

    Raises:
        UnfitError: not as many each.
    """
    if group.size == 1:
        return 1
    parts = group.gather(numbers)
    same = [torch.equal(one, other) for one, other in pairwise(parts)]
    count = [*same, False].index(False) + 1
    if same != [(number + 1) % count != 0 for number in range(group.size - 1)] or group.size % count:
        raise UnfitError("its ranks keep other parts of a sequence than its plan says")
    return count
