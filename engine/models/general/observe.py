"""What a model's cache holds in each layer, by a run of a few tokens."""

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
from kvrelay.engine.models.general.reading import parameters_of
from kvrelay.engine.models.general.step import UnfitError

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


def observe(model: PreTrainedModel) -> tuple[LayerCache, ...]:
    """What each layer of the model's cache holds after a few tokens. The model may be on the device `meta`.

    Raises:
        UnfitError: it keeps something that isn't known.
    """
    name = cache_argument(model)
    cache = DynamicCache(config=model.config)
    tokens = torch.ones((1, LENGTH), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        out = model(input_ids=tokens, use_cache=True, return_dict=True, **{name: cache})
    given = getattr(out, name, None)
    if id(given) != id(cache):
        kind = "none" if given is None else type(given).__name__
        raise UnfitError(f"it has a cache of its own ({kind})")
    return tuple(_layer(layer) for layer in cache.layers)


def _layer(layer: object) -> LayerCache:
    if type(layer) not in KNOWN:
        raise UnfitError(f"its cache has layers of its own ({type(layer).__name__})")
    keys = values = None
    window = indexer = 0
    states: tuple[StateShape, ...] = ()
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        if layer.keys.dim() != 4 or layer.keys.shape[0] != 1:
            raise UnfitError(f"its keys have the shape {list(layer.keys.shape)}")
        keys, values = _inner(layer.keys), _inner(layer.values)
    if isinstance(layer, DynamicSlidingWindowLayer):
        window = int(layer.sliding_window)
    if isinstance(layer, DynamicIndexedLayer):
        if layer.indexer_position_ids is not None:
            raise UnfitError("its indexer keeps positions")
        indexer = 0 if layer.indexer_keys is None else layer.indexer_keys.shape[-1]
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states = tuple(
            StateShape(name, number, tuple(tensor.shape[1:]), tensor.dtype)
            for name in ("conv_states", "recurrent_states")
            for number, tensor in sorted(getattr(layer, name).items())
            if tensor is not None
        )
    return LayerCache(keys, values, indexer, window, states)


def _inner(numbers: torch.Tensor) -> tuple[int, int]:
    """(heads, numbers of a head) of keys or values [1, heads, T, numbers]."""
    return int(numbers.shape[1]), int(numbers.shape[3])
