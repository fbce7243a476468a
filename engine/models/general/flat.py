"""All rows of a step, chunks and decode alike, as one row of tokens; attention reads and writes blocks.

The model's cache gives keys and values back as it got them, with a mark that names the cache layer. The attention
function, which is registered with transformers, finds the layer by that mark: modules that share a layer, or run
several times, name another one. The mask function, registered too, only says which keys a query may see; it is asked
at the tokens' positions in their own sequences.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
from transformers.masking_utils import causal_mask_function

from kvrelay.engine.models.general.attend import attend
from kvrelay.engine.models.general.inputs import Inputs
from kvrelay.engine.models.general.latents.absorbed import intercept
from kvrelay.engine.models.general.latents.layers import Latents
from kvrelay.engine.models.general.narrow import Narrowing, mix
from kvrelay.engine.models.general.native import Call, FlatKernels, NativeTrack, Track
from kvrelay.engine.models.general.observe import cache_argument
from kvrelay.engine.models.general.places import LayerPlaces
from kvrelay.engine.models.general.reading import set_attention
from kvrelay.engine.models.general.states import (
    StateLayer,
    StateStep,
    number_of_states,
    shifting_layers,
    take_functions,
)
from kvrelay.engine.models.general.step import Step, UnfitError, host
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.cpu.states import NativeStateOps
from kvrelay.kernels.states import StateOps

NAME = "kvrelay_flat"
MARK = "_kvrelay_layer"
WINDOWED = ["sliding_window_overlay.<locals>.inner_mask", "causal_mask_function"]
"""Names of the mask functions that together make a causal mask with a window."""
HARMLESS = frozenset(
    {"position_ids", "sliding_window", "use_cache", "is_causal", "output_attentions", "cache_position"}
)
"""Arguments of an attention function that add nothing to what the mask says."""


@dataclass(frozen=True, slots=True)
class FlatMask:
    """The keys that a query may see."""

    function: Callable[..., Any]
    """The mask function of transformers: (batch, head, query's position, key's position) -> bool."""
    window: int | None
    """The window, or 0, if it is that of a causal mask and nothing else; None if it is another mask."""

    def of(self, positions: Tensor, context: int) -> Tensor | None:
        """bool [T, context]; None if each query sees all keys."""
        if len(positions) == 1 and self.window is not None and (not self.window or context <= self.window):
            return None
        keys = torch.arange(context, device=positions.device)
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=positions.device)
        mask: Tensor = self.function(zero, zero, positions[None, None, :, None], keys[None, None, None, :])
        return mask.expand(1, 1, len(positions), context)[0, 0]


CAUSAL = FlatMask(causal_mask_function, 0)


@dataclass(eq=False)
class Running:
    """State of the step that is being computed."""

    step: Step
    positions: Tensor
    slots: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Slots of the step's tokens, by track."""


class FlatLayer(DynamicLayer):
    """A cache layer whose keys and values are in blocks."""

    def __init__(self, way: "FlatWay", number: int, places: LayerPlaces) -> None:
        DynamicLayer.__init__(self)
        self.way, self.number, self.places = way, number, places

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        # New objects: a model may give the same tensor twice, or to two layers.
        keys, values = key_states.view(key_states.shape), value_states.view(value_states.shape)
        setattr(keys, MARK, self)
        setattr(values, MARK, self)
        self.way.write(self, keys, values)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class FlatWindowLayer(FlatLayer, DynamicSlidingWindowLayer):
    """As `FlatLayer`, in a class by which transformers finds the layers that have a window."""

    def __init__(self, way: "FlatWay", number: int, places: LayerPlaces) -> None:
        DynamicSlidingWindowLayer.__init__(self, places.cache.window)
        self.way, self.number, self.places = way, number, places


class FlatHybridLayer(StateLayer, FlatLayer, LinearAttentionAndFullAttentionLayer):
    """A cache layer with states in slots and keys and values in blocks."""

    def __init__(self, way: "FlatWay", number: int, places: LayerPlaces, states: StateStep) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states(places))
        self.way, self.number, self.places, self.states = way, number, places, states


class FlatHybridWindowLayer(StateLayer, FlatWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):
    """As `FlatHybridLayer`, with a window."""

    def __init__(self, way: "FlatWay", number: int, places: LayerPlaces, states: StateStep) -> None:
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(self, places.cache.window, number_of_states(places))
        self.way, self.number, self.places, self.states = way, number, places, states


class FlatWay:
    """Implements `Way`."""

    name = "flat"

    def __init__(self, model: PreTrainedModel, store: Store, team: Team | None = None) -> None:
        """
        Args:
            team: threads of the native kernels, where those may be used.

        Raises:
            UnfitError: some layers keep what has no place in blocks.
        """
        if any(layer.indexer is not None for layer in store.placing.layers):
            raise UnfitError("layers choose their keys by an indexer")
        self._recurrent: StateStep | None = None
        if any(layer.states for layer in store.placing.layers):
            self._recurrent = StateStep(store, _state_ops(store.device, team))
            take_functions(model)
        self.model, self.store, self.team = model, store, team
        self._argument = None if shifting_layers(model) else cache_argument(model)
        self._inputs = Inputs(model)
        self._running: Running | None = None
        self._states: Tensor | None = None
        self._keeps_states = False
        self._narrowing = Narrowing()
        self._attended: set[int] = set()
        self.calls: dict[int, Call] = {}
        """The latest call of attention of each cache layer."""
        self._native: FlatKernels | None = None
        self._latents: Latents | None = None
        if any(layer.cache.latent for layer in store.placing.layers):
            self._latents = Latents(store, team)
            intercept(model, lambda latents: isinstance(getattr(latents, MARK, None), FlatLayer))
        self._cache = Cache(layers=[self._layer(number, layer) for number, layer in enumerate(store.placing.layers)])
        self._kept = {number for number, layer in enumerate(store.placing.layers) if layer.keys is not None}

    def run(self, step: Step, wanted: NDArray[np.int64]) -> Tensor:
        """See `Way.run`."""
        set_attention(self.model, NAME)
        device = self.store.device
        positions = host(step.positions, device)
        self._running = Running(step, positions)
        self._attended.clear()
        if self._native is not None:
            self._native.plan(step)
        if self._latents is not None:
            self._latents.plan(step)
        tokens = host(step.tokens, device)[None]
        cache = {} if self._argument is None else {self._argument: self._cache}
        places = host(wanted, device)
        states = nullcontext() if self._recurrent is None else self._recurrent.running(step)
        with states, self._narrowing.running(len(step.tokens), None if self._keeps_states else places):
            out = self._inputs.call(tokens, positions[None], None, places, cache)
        if self._attended != self._kept:
            raise UnfitError("it takes no other attention function")
        return out[0]

    def states(self) -> Tensor:
        """[T, hidden], the last hidden states of all tokens of the step that ran last, after `keep_states`."""
        if self._states is None:
            raise RuntimeError("no step has kept its last hidden states")
        return self._states

    def keep_states(self) -> None:
        """Makes each step from now on keep its last hidden states."""
        if not self._keeps_states:
            self._keeps_states = True
            body: Any = self.model.base_model
            body.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, given: object, out: Any) -> None:
        self._states = out[0][0]

    def _layer(self, number: int, places: LayerPlaces) -> CacheLayerMixin | StateLayer:
        if places.states and self._recurrent is not None:
            if places.keys is None:
                return StateLayer(self._recurrent, number, places)
            kind = FlatHybridWindowLayer if places.cache.window else FlatHybridLayer
            return kind(self, number, places, self._recurrent)
        if places.keys is None:
            return DummyLayer()
        return (FlatWindowLayer if places.cache.window else FlatLayer)(self, number, places)

    def use_kernels(self) -> bool:
        """Uses kernels for attention from now on, if they support what the model has asked for so far."""
        self._native = FlatKernels.fitting(self.store, self.calls, partial(kernels_of, self.store, self.team))
        latents = self._latents is not None and self._latents.use_kernels()
        return latents or self._native is not None

    @property
    def native(self) -> list[str]:
        """Names of what kernels compute so far of attention and states."""
        found = ["attention"] if self._native is not None else []
        if self._latents is not None and self._latents.native:
            found.append("attention over latents")
        return found if self._recurrent is None else [*found, *self._recurrent.kinds]

    def write(self, layer: FlatLayer, keys: Tensor, values: Tensor) -> None:
        """Writes a layer's new keys and values [1, heads, T, dim]."""
        running, places = self._at_work(), layer.places
        if keys.dim() != 4 or keys.shape[0] != 1 or keys.shape[2] != len(running.positions):
            raise UnfitError(f"keys have the shape {list(keys.shape)}")
        if places.cache.latent or (self._native is not None and self._native.serves(layer.number)):
            return  # they are written when they are attended to
        for place, numbers in ((places.keys, keys), (places.values, values)):
            if place is not None:
                if place.track not in running.slots:
                    running.slots[place.track] = self.store.slots(running.step, place.track)
                self.store.write(place, running.slots[place.track], numbers[0].transpose(0, 1))

    def attend_latents(
        self,
        layer: FlatLayer,
        module: torch.nn.Module,
        query: Tensor,
        latents: Tensor,
        rotated: Tensor,
        mask: FlatMask,
        scaling: float,
    ) -> Tensor:
        """[1, T, H, Dv]; see `Latents.run`."""
        mix()
        self._attended.add(layer.number)
        if self._latents is None or mask.window != 0:
            raise UnfitError("latents are seen through another mask than a causal one")
        return self._latents.run(layer.places, module, query, latents, rotated, scaling)

    def attend(
        self,
        layer: FlatLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: FlatMask,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[1, T, H, Dv]."""
        mix()
        self._attended.add(layer.number)
        self.calls[layer.number] = Call(query.shape[1], mask.window, softcap or 0.0, sinks)
        if self._native is not None and self._native.serves(layer.number):
            return self._native.run(layer.number, query, key, value, scaling)
        running, places = self._at_work(), layer.places
        if places.keys is None or places.values is None:
            raise UnfitError("a layer without keys is attended to")
        queries = query[0].transpose(0, 1)
        table = running.step.tables[self.store.groups[places.keys.track]]
        out = queries.new_empty((len(queries), queries.shape[1], value.shape[3]))
        window = mask.window or 0
        for row, (first, start, length) in enumerate(
            zip(running.step.firsts.tolist(), running.step.starts.tolist(), running.step.lengths.tolist(), strict=True)
        ):
            own = slice(first, first + length)
            seen = max(0, start - window + 1) if window else 0
            keys, values = (
                self.store.read_range(place, table[row], seen, start + length, queries.dtype)
                for place in (places.keys, places.values)
            )
            visible = mask.of(running.positions[own], start + length)
            visible = None if visible is None else visible[:, seen:]
            out[own] = attend(queries[own], keys, values, visible, scaling, softcap, sinks)
        return out[None]

    def _at_work(self) -> Running:
        if self._running is None:
            raise UnfitError("the cache is used outside of a step")
        return self._running


def kernels_of(store: Store, team: Team | None, track: int, calls: Mapping[int, Call]) -> Track | None:
    """The kernels of attention for a track on the store's device; None if there are none that read its pages."""
    if store.device.type == "cuda":
        # Triton, which a worker without a GPU doesn't need.
        from kvrelay.engine.models.general.triton import TritonTrack

        return TritonTrack(store, track, calls) if TritonTrack.fits(store, track) else None
    return NativeTrack(store, track, calls, team) if team is not None and NativeTrack.fits(store, track) else None


def _state_ops(device: torch.device, team: Team | None) -> StateOps:
    """The kernels of layers with states.

    Raises:
        UnfitError: there are none.
    """
    if device.type == "cuda":
        from kvrelay.kernels.triton.states.ops import TritonStateOps

        return TritonStateOps()
    if team is None:
        raise UnfitError("layers keep states, for which there are no kernels here")
    return NativeStateOps(team)


def flat_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: FlatMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """An attention function of transformers; see `AttentionInterface`."""
    layer, of_value = getattr(key, MARK, None), getattr(value, MARK, None)
    if not isinstance(layer, FlatLayer) or id(of_value) != id(layer):
        raise UnfitError("keys or values are changed after the cache's update")
    unknown = sorted(
        name for name, given in others.items() if given is not None and given is not False and name not in HARMLESS
    )
    if unknown:
        raise UnfitError(f"attention has arguments that aren't known ({', '.join(unknown)})")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            raise UnfitError("attention isn't causal")
        attention_mask = CAUSAL
    if not isinstance(attention_mask, FlatMask):
        raise UnfitError("the mask is changed")
    scaling = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    if layer.places.cache.latent:
        if softcap is not None or s_aux is not None:
            raise UnfitError("latents are attended to with a soft cap or sinks")
        return layer.way.attend_latents(layer, module, query, key, value, attention_mask, scaling), None
    return layer.way.attend(layer, query, key, value, attention_mask, scaling, softcap, s_aux), None


def flat_mask(mask_function: Callable[..., Any] = causal_mask_function, **others: object) -> FlatMask:
    """A mask function of transformers; see `AttentionMaskInterface`."""
    return FlatMask(mask_function, _window_of(mask_function, others.get("local_size")))


def _window_of(function: Callable[..., Any], window: object) -> int | None:
    """See `FlatMask.window`."""
    if function is causal_mask_function:
        return 0
    if not isinstance(window, int):
        return None
    cells: Any = getattr(function, "__closure__", None) or ()
    parts: Any = cells[0].cell_contents if len(cells) == 1 else None
    names = [getattr(part, "__qualname__", "") for part in parts] if isinstance(parts, tuple) else []
    return window if names == WINDOWED else None


AttentionInterface.register(NAME, flat_attention)
AttentionMaskInterface.register(NAME, flat_mask)
