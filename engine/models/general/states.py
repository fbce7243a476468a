"""Layers with states in the flat way: transformers' functions of their recurrences, on our kernels.

The modelling code of such a layer asks the cache to update the state of its convolution. Then it calls functions of its
module, which have the same names and arguments in each class (FUNCTIONS):

    update_conv_state -> causal_conv1d_fn -> mamba2_chunk_scan, or another recurrence -> update_recurrent_state

The cache has no previous state to give, so the code takes this road for one token, too. While a way runs, the functions
find in it which slots of which layer to read and write. Elsewhere they are as they were.

RWKV-4 has no cache. Its layers shift tokens by a module, `time_shift`, whose place a convolution takes, and then call
`rwkv_linear_attention`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from kvrelay.engine.models.general.narrow import mix
from kvrelay.engine.models.general.places import LayerCache, LayerPlaces, StatePlace, StateShape
from kvrelay.engine.models.general.step import Step, UnfitError
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.cpu.states import GatedConv
from kvrelay.kernels.states import StateOps, StateRows, TimeStep

SILU = frozenset({"silu", "swish"})
SHIFT = "shifted"
"""Name of the state that holds the last tokens before a shift."""
MARK = "_kvrelay_state"
"""Attribute of a tensor: the layer's state that it stands for."""
_running: ContextVar["StateStep | None"] = ContextVar("states", default=None)


def running_step() -> "StateStep | None":
    """The states of the step that this thread computes; None outside of one."""
    return _running.get()


class StateStep:
    """The states of the step that is being computed."""

    def __init__(self, store: Store, ops: StateOps) -> None:
        self._store, self._ops = store, ops
        self._places = {
            (number, place.state.name, place.state.number): place
            for number, layer in enumerate(store.placing.layers)
            for place in layer.states
        }
        self._views: dict[tuple[StatePlace, tuple[int, ...]], Tensor] = {}
        self._updated: set[tuple[int, str, int]] = set()
        self._current: tuple[int, int] | None = None
        """Layer, and number of the state in it, whose convolution was updated last."""
        self._rows: StateRows | None = None
        self.kinds: dict[str, None] = {}
        """Recurrences that were computed so far, by name."""

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Context in which the model's functions compute this step.

        Raises:
            UnfitError: the model computes some states by functions of its own.
        """
        tracks = {place.track for place in self._places.values()}
        slots = step.tables[self._store.groups[tracks.pop()]][:, 0]
        origins = slots
        if step.drafts is not None:
            origins = np.where(step.drafts, np.roll(slots, 1), slots)
        self._rows = StateRows.of(step.lengths, step.starts, slots, self._store.device, origins)
        self._updated.clear()
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)
        if self._updated != set(self._places):
            raise UnfitError("it computes states by functions of its own")

    def take(self, layer: int, number: int) -> None:
        """Notes the layer whose convolution comes next."""
        self._current = layer, number

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """[1, C, T] of inputs [1, C, T]; see `StateOps.conv`."""
        if self._current is None or x.dim() != 3 or len(x) != 1 or activation not in (None, *SILU):
            raise UnfitError("a convolution isn't that of a state")
        tokens, width = x[0].T, weight.shape[1]
        self.kinds["short convolutions"] = None
        state, rows = self._state("conv_states", (width, weight.shape[0]), x.dtype)
        out = self._ops.conv(tokens, weight, bias, state, rows, silu=activation is not None)
        return out.T[None]

    def gated_conv(self, native: GatedConv, layer: int, dtype: torch.dtype) -> tuple[Tensor, StateRows]:
        """The states of a layer's convolution, of the type of its inputs, and the step's rows."""
        self.take(layer, 0)
        self.kinds["short convolutions"] = None
        return self._state("conv_states", (native.width, native.channels), dtype)

    def ssd(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, time_step: TimeStep
    ) -> tuple[Tensor, Tensor]:
        """[1, T, H, P] and a stand-in for the state; inputs as `StateOps.ssd`, with 1 in front."""
        state, rows = self._state("recurrent_states", (x.shape[2], b.shape[3], x.shape[3]), torch.float32)
        self.kinds["Mamba-2"] = None
        out = self._ops.ssd(x[0], dt[0], a, b[0], c[0], d, time_step, state, rows)
        return out[None], self._stand_in()

    def delta(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """[1, T, H, D] and a stand-in for the state; inputs as `StateOps.delta`, with 1 in front."""
        state, rows = self._state("recurrent_states", (v.shape[2], k.shape[3], v.shape[3]), torch.float32)
        self.kinds["Kimi Delta Attention" if g.dim() == 4 else "Gated DeltaNet"] = None
        out = self._ops.delta(q[0], k[0], v[0], g[0], beta[0], state, rows, normalized=normalized)
        return out[None], self._stand_in()

    def shift(self, x: Tensor, weight: Tensor, layer: int, number: int) -> Tensor:
        """[1, T, C], the inputs [1, T, C] of one token before; see `StateOps.conv`."""
        self.take(layer, number)
        state, rows = self._state(SHIFT, (weight.shape[1], weight.shape[0]), x.dtype)
        return self._ops.conv(x[0], weight, None, state, rows, silu=False)[None]

    def wkv(self, decay: Tensor, first: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[1, T, C]; inputs as `StateOps.wkv`, with 1 in front."""
        state, rows = self._state("recurrent_states", (3, k.shape[2]), torch.float32)
        self.kinds["RWKV-4"] = None
        return self._ops.wkv(k[0], v[0], decay, first, state, rows)[None]

    def _stand_in(self) -> Tensor:
        stand_in = torch.empty(0)
        setattr(stand_in, MARK, self._current)
        return stand_in

    def _state(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, StateRows]:
        """[slots, *shape] of the current layer."""
        mix()
        if self._current is None or self._rows is None:
            raise UnfitError("a recurrence isn't that of a state")
        key = self._current[0], name, self._current[1]
        place = self._places.get(key)
        if (
            place is None
            or place.state.dtype != dtype
            or place.state.nbytes != torch.Size(shape).numel() * dtype.itemsize
        ):
            raise UnfitError(f"a state isn't {dtype} of the shape {list(shape)}")
        self._updated.add(key)
        if (place, shape) not in self._views:
            data = self._store.pools[place.track].bytes[:, place.layer, 0, place.offset :]
            self._views[place, shape] = data[:, : place.state.nbytes].view(dtype).view(-1, *shape)
        return self._views[place, shape], self._rows


class StateLayer(LinearAttentionLayer):
    """A cache layer whose states are in slots."""

    def __init__(self, step: StateStep, number: int, places: LayerPlaces) -> None:
        LinearAttentionLayer.__init__(self, number_of_states(places))
        self.states, self.number = step, number

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        self.states.take(self.number, state_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        if getattr(recurrent_states, MARK, None) != (self.number, state_idx):
            raise UnfitError("it computes a state by a function of its own")
        return recurrent_states


def number_of_states(places: LayerPlaces) -> int:
    """Number of states in a cache layer."""
    return 1 + max((place.state.number for place in places.states), default=0)


def conv(original: Callable[..., Any]) -> Callable[..., Any]:
    """`causal_conv1d_fn` of transformers, on our kernels while a way runs."""

    @wraps(original)
    def run(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Any:
        step = _running.get()
        if step is None:
            return original(hidden_states, weight, bias, activation=activation, **others)
        return step.conv(hidden_states, weight, bias, activation)

    return run


def ssd(original: Callable[..., Any]) -> Callable[..., Any]:
    """`mamba2_chunk_scan` of transformers, on our kernels while a way runs."""

    @wraps(original)
    def run(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        z: Tensor | None = None,
        **others: Any,
    ) -> Any:
        step = _running.get()
        if step is None:
            given = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "z": z, **others}
            return original(hidden_states, dt, A, B, C, chunk_size, **given)
        if z is not None or others.get("initial_states") is not None or A.dim() != 1:
            raise UnfitError("a Mamba-2 layer has arguments that aren't known")
        return step.ssd(hidden_states, dt, A, B, C, D, TimeStep(dt_bias, dt_softplus, *dt_limit))

    return run


def delta(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' functions of Gated DeltaNet and Kimi Delta Attention, on our kernels while a way runs."""

    @wraps(original)
    def run(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **others: Any) -> Any:
        step = _running.get()
        if step is None:
            return original(query, key, value, g=g, beta=beta, **others)
        if others.get("initial_state") is not None or others.get("cu_seqlens") is not None:
            raise UnfitError("a layer of the delta rule has arguments that aren't known")
        return step.delta(query, key, value, g, beta, bool(others.get("use_qk_l2norm_in_kernel")))

    return run


def wkv(original: Callable[..., Any]) -> Callable[..., Any]:
    """`rwkv_linear_attention` of transformers, on our kernels while a way runs."""

    @wraps(original)
    def run(time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, **others: Any) -> Any:
        step = _running.get()
        if step is None:
            return original(time_decay, time_first, key, value, **others)
        if others.get("state") is not None:
            raise UnfitError("an RWKV layer has arguments that aren't known")
        return step.wkv(-torch.exp(time_decay), time_first, key, value), None

    return run


class TimeShift(nn.Module):
    """Tokens [1, T, C] moved one place on; while a way runs, each row's first one comes from its state."""

    def __init__(self, original: nn.Module, layer: int, number: int, like: Tensor) -> None:
        """
        Args:
            number: of the state in the layer.
            like: [..., C], whose dtype and device the tokens have.
        """
        super().__init__()
        self._original, self._layer, self._number = original, layer, number
        self._weight = torch.tensor([1.0, 0.0], dtype=like.dtype, device=like.device).repeat(like.shape[-1], 1)

    def forward(self, hidden: Tensor) -> Tensor:
        step = _running.get()
        if step is None:
            found: Tensor = self._original(hidden)
            return found
        return step.shift(hidden, self._weight, self._layer, self._number)


def shifting_layers(model: nn.Module) -> tuple[LayerCache, ...]:
    """States that each layer of a model of RWKV-4 keeps; empty for other models."""
    layers: dict[int, list[StateShape]] = {}
    for module in _shifting(model):
        states = layers.setdefault(module.layer_id, [])
        number, mix = sum(state.name == SHIFT for state in states), module.time_mix_key
        states.append(StateShape(SHIFT, number, (2, mix.shape[-1]), mix.dtype))
        if hasattr(module, "time_decay"):
            states.append(StateShape("recurrent_states", number, (3, len(module.time_decay)), torch.float32))
    return tuple(LayerCache(states=tuple(layers[layer])) for layer in sorted(layers))


def _shifting(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if hasattr(module, "time_shift") and hasattr(sys.modules[type(module).__module__], "rwkv_linear_attention")
    ]


FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "causal_conv1d_fn": conv,
    "mamba2_chunk_scan": ssd,
    "torch_chunk_gated_delta_rule": delta,
    "chunk_kimi_delta_attention": delta,
    "rwkv_linear_attention": wkv,
}
"""Replacements of a module's functions, by their names."""
_TAKEN = "_kvrelay_taken"


def take_functions(model: PreTrainedModel) -> None:
    """Replaces the functions of the model's modules with ones that use our kernels while a way runs."""
    numbers: dict[int, int] = {}
    for module in _shifting(model):
        number = numbers.get(module.layer_id, 0)
        numbers[module.layer_id] = number + 1
        if not isinstance(module.time_shift, TimeShift):
            module.time_shift = TimeShift(module.time_shift, module.layer_id, number, module.time_mix_key)
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        for function, replace in FUNCTIONS.items():
            original = getattr(module, function, None)
            if original is not None and not hasattr(original, _TAKEN):
                taken = replace(original)
                setattr(taken, _TAKEN, True)
                setattr(module, function, taken)
