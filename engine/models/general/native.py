"""The flat way's attention on the native CPU kernels: reads the pages in place."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.engine.models.general.step import Step
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.cpu.attention import ATTEND, WRITE, PagedAttention, supports
from kvrelay.kernels.cpu.program import Program, Team

LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Call:
    """How a cache layer is attended to."""

    heads: int
    window: int | None
    """The window, or 0; None if the mask is no causal one with a window."""
    plain: bool
    """Whether there are no soft caps and no sinks."""


class NativeTrack:
    """The kernels for one track, whose layers have keys and values of one shape."""

    def __init__(self, store: Store, track: int, heads: int, windows: Mapping[int, int], team: Team) -> None:
        """
        Args:
            heads: query heads.
            windows: of each layer of the track.
        """
        pool = store.pools[track]
        layers = range(pool.layout.layers)
        self.group = store.groups[track]
        self._pool, self._heads, self._team = pool, heads, team
        self._kernels = PagedAttention(
            team.library, pool.tensor, heads, [windows[layer] for layer in layers], team.threads
        )
        self._capacity = 0
        self._programs: list[Program] = []
        self._make_room(LEAST_TOKENS)

    def plan(self, step: Step) -> None:
        """Begins a step."""
        self._kernels.plan(step.starts, step.lengths, step.tables[self.group])
        self._make_room(len(step.tokens))

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, T, H, D] of queries, keys and values [1, heads, T, D]; valid until the next call."""
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
        self._programs = [
            Program(self._team.library, (WRITE, args), (ATTEND, args))
            for args in (self._kernels.args(layer, *addresses, None, 0.0) for layer in range(layout.layers))
        ]


class NativeFlat:
    """The kernels for those tracks that they support."""

    def __init__(self, store: Store, tracks: Mapping[int, NativeTrack]) -> None:
        self._tracks = tracks
        self._layers = {
            number: (tracks[layer.keys.track], layer.keys.layer)
            for number, layer in enumerate(store.placing.layers)
            if layer.keys is not None and layer.keys.track in tracks
        }

    @classmethod
    def fitting(cls, store: Store, calls: Mapping[int, Call], team: Team) -> "NativeFlat | None":
        """The kernels; None if they support no track.

        Args:
            calls: how each cache layer is attended to.
        """
        windows: dict[int, dict[int, int]] = {}
        heads: dict[int, set[int]] = {}
        others: set[int] = set()
        for number, layer in enumerate(store.placing.layers):
            call = calls.get(number)
            if layer.keys is None or layer.values is None:
                continue
            track = layer.keys.track
            if call is None or call.window is None or not call.plain or layer.values.track != track:
                others.add(track)
                continue
            windows.setdefault(track, {})[layer.keys.layer] = call.window
            heads.setdefault(track, set()).add(call.heads)
        found = {}
        for track, of_layers in windows.items():
            pool = store.pools[track]
            fits = supports(pool.tensor.dtype) and pool.layout.order == "NHD" and store.device.type == "cpu"
            if fits and track not in others and len(heads[track]) == 1:
                found[track] = NativeTrack(store, track, heads[track].pop(), of_layers, team)
        return cls(store, found) if found else None

    def plan(self, step: Step) -> None:
        """Begins a step."""
        for track in self._tracks.values():
            track.plan(step)

    def serves(self, layer: int) -> bool:
        """Whether the kernels write and read this cache layer."""
        return layer in self._layers

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `NativeTrack.run`."""
        track, number = self._layers[layer]
        return track.run(number, query, key, value, scaling)
