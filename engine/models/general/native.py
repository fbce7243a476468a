"""The flat way's attention on kernels that read the pages in place: on a CPU the native ones, on a GPU Triton's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvrelay.engine.models.general.step import Step
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.cpu.attention import ATTEND, WRITE, PagedAttention, supports
from kvrelay.kernels.cpu.program import Program, Team

LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Call:
    """Options of one cache layer's attention."""

    heads: int
    window: int | None
    """Window in tokens, 0 for none; None if the mask isn't causal with such a window."""
    softcap: float = 0.0
    """See `reference.paged_attention`; 0 for none."""
    sinks: Tensor | None = None
    """[H], or None."""


class Track(Protocol):
    """The kernels for one track, whose layers have keys and values of one shape."""

    def plan(self, step: Step) -> None:
        """Begins a step."""
        ...

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Writes keys and values and attends: [1, T, H, D] of queries, keys and values [1, heads, T, D]; valid until
        the next call."""
        ...


class NativeTrack:
    """Implements `Track` on a CPU."""

    def __init__(self, store: Store, track: int, calls: Mapping[int, Call], team: Team) -> None:
        """
        Args:
            calls: how each layer of the track is attended to, with as many heads.
        """
        pool = store.pools[track]
        self._calls = [calls[layer] for layer in range(pool.layout.layers)]
        self._sinks = [None if call.sinks is None else call.sinks.float().contiguous() for call in self._calls]
        heads, windows = self._calls[0].heads, [call.window or 0 for call in self._calls]
        self.group = store.groups[track]
        self._pool, self._heads, self._team = pool, heads, team
        self._kernels = PagedAttention(team.library, pool.tensor, heads, windows, team.threads)
        self._capacity = 0
        self._programs: list[Program] = []
        self._make_room(LEAST_TOKENS)

    @staticmethod
    def fits(store: Store, track: int) -> bool:
        """Whether the kernels read the track's pages."""
        pool = store.pools[track]
        return supports(pool.tensor.dtype) and pool.layout.order == "NHD"

    def plan(self, step: Step) -> None:
        """See `Track.plan`."""
        self._kernels.plan(step.starts, step.lengths, step.tables[self.group])
        self._make_room(len(step.tokens))

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Track.run`."""
        tokens, heads, keys = query.shape[2], self._heads, self._pool.layout.kv_heads
        source = self._qkv[:tokens]
        factor = scaling * query.shape[3] ** 0.5
        queries = source[:, :heads].transpose(0, 1)
        if factor == 1.0:
            queries.copy_(query[0])
        else:
            torch.mul(query[0], factor, out=queries) if query.dtype == torch.float32 else queries.copy_(
                query[0] * factor
            )
        source[:, heads : heads + keys].transpose(0, 1).copy_(key[0])
        source[:, heads + keys :].transpose(0, 1).copy_(value[0])
        self._team.run(self._programs[layer])
        return self._out[None, :tokens].to(query.dtype)

    def _make_room(self, tokens: int) -> None:
        """Makes larger buffers if a step has more tokens than any before, and records the programs with them."""
        if tokens <= self._capacity:
            return
        self._capacity = max(tokens, 2 * self._capacity)
        layout = self._pool.layout
        rows = self._heads + 2 * layout.kv_heads
        self._qkv = torch.zeros(self._capacity, rows, layout.head_dim)
        self._out = torch.zeros(self._capacity, self._heads, layout.head_dim)
        inputs, outputs = rows * layout.head_dim, self._heads * layout.head_dim
        addresses = self._qkv.data_ptr(), inputs, self._out.data_ptr(), outputs
        self._programs = []
        for layer, (call, sinks) in enumerate(zip(self._calls, self._sinks, strict=True)):
            args = self._kernels.args(layer, *addresses, None, 0.0, softcap=call.softcap, sinks=sinks)
            self._programs.append(Program(self._team.library, (WRITE, args), (ATTEND, args)))


MakeTrack = Callable[[int, Mapping[int, Call]], Track | None]


class FlatKernels:
    """The kernels for those tracks that they support."""

    def __init__(self, store: Store, tracks: Mapping[int, Track]) -> None:
        self._tracks = tracks
        self._layers = {
            number: (tracks[layer.keys.track], layer.keys.layer)
            for number, layer in enumerate(store.placing.layers)
            if layer.keys is not None and layer.keys.track in tracks
        }

    @classmethod
    def fitting(cls, store: Store, calls: Mapping[int, Call], make: MakeTrack) -> "FlatKernels | None":
        """The kernels; None if they support no track.

        Args:
            calls: how each cache layer is attended to.
            make: gives the kernels for a track by its layers' calls, or None.
        """
        calls_of: dict[int, dict[int, Call]] = {}
        others: set[int] = set()
        for number, layer in enumerate(store.placing.layers):
            call = calls.get(number)
            if layer.keys is None or layer.values is None:
                continue
            track = layer.keys.track
            if call is None or call.window is None or layer.values.track != track:
                others.add(track)
                continue
            calls_of.setdefault(track, {})[layer.keys.layer] = call
        found: dict[int, Track] = {}
        for track, of_layers in calls_of.items():
            alike = len({call.heads for call in of_layers.values()}) == 1
            kernels = make(track, of_layers) if alike and track not in others else None
            if kernels is not None:
                found[track] = kernels
        return cls(store, found) if found else None

    def plan(self, step: Step) -> None:
        """Begins a step."""
        for track in self._tracks.values():
            track.plan(step)

    def serves(self, layer: int) -> bool:
        """Whether the kernels write and read this cache layer."""
        return layer in self._layers

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Track.run`."""
        track, number = self._layers[layer]
        return track.run(number, query, key, value, scaling)
