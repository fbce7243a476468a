"""Attention over latents, and over keys and values expanded from them, by the native CPU kernels."""

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.models.general.latents.absorbed import UNLIMITED, Absorbed
from kvrelay.engine.models.general.places import LayerPlaces
from kvrelay.engine.models.general.step import Step, UnfitError
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.cpu.attention import ATTEND as ATTEND_PAGED
from kvrelay.kernels.cpu.attention import PagedAttention, supports
from kvrelay.kernels.cpu.latent import ATTEND, PRODUCTS, WRITE, LatentAttention
from kvrelay.kernels.cpu.program import Program, Team


class NativeLatents:
    """Implements `Attending` by the native CPU kernels, for the layers of one pair of tracks."""

    most = UNLIMITED

    def __init__(self, store: Store, places: LayerPlaces, weights: Absorbed, team: Team) -> None:
        if places.keys is None or places.values is None:
            raise UnfitError("latents have no place")
        self._group, self._team = store.groups[places.keys.track], team
        pools = [store.pools[place.track].tensor for place in (places.keys, places.values)]
        self._kernels = LatentAttention(team.library, pools[0], pools[1], weights.heads, team.threads)
        self._buffers: dict[tuple[str, int, int, int], Tensor] = {}
        self._programs: dict[tuple[int, int], tuple[int, float, Program]] = {}
        self._tokens = 0

    @classmethod
    def fits(cls, store: Store, places: LayerPlaces) -> bool:
        """Whether the kernels read the pools of a layer."""
        tracks = [place.track for place in (places.keys, places.values) if place is not None]
        return store.device.type == "cpu" and all(
            supports(store.pools[track].tensor.dtype) and store.pools[track].layout.order == "NHD" for track in tracks
        )

    def plan(self, step: Step) -> None:
        """See `Attending.plan`."""
        self._kernels.plan(step.starts, step.lengths, step.tables[self._group])
        if len(step.tokens) > self._tokens:
            self._tokens = max(8, 2 * self._tokens, len(step.tokens))
            self._buffers.clear()
            self._programs.clear()

    def run(
        self, places: LayerPlaces, weights: Absorbed, queries: Tensor, latents: Tensor, rotated: Tensor, scaling: float
    ) -> Tensor:
        """See `Attending.run`; valid until the next call."""
        tokens, heads, width = len(queries), weights.heads, weights.values.shape[2]
        plain = self._buffer("plain", heads, weights.plain)
        absorbed = self._buffer("absorbed", heads, weights.latent + weights.rotated)
        out = self._buffer("out", heads, width)
        own = self._buffer("latents", 1, weights.latent), self._buffer("rotated", 1, weights.rotated)
        plain[:tokens].copy_(queries[..., : weights.plain])
        absorbed[:tokens, :, weights.latent :].copy_(queries[..., weights.plain :])
        own[0][:tokens, 0].copy_(latents)
        own[1][:tokens, 0].copy_(rotated)
        key = id(weights), id(places)
        found = self._programs.get(key)
        if found is None or found[1] != scaling:
            sums = self._buffer("sums", heads, weights.latent)
            keys, values = (0 if place is None else place.layer for place in (places.keys, places.values))
            program = Program(
                self._team.library,
                (WRITE, self._kernels.write(keys, values, own[0], own[1])),
                (PRODUCTS, self._kernels.products(plain, weights.keys, absorbed)),
                (ATTEND, self._kernels.attend(keys, values, absorbed, sums, scaling)),
                (PRODUCTS, self._kernels.products(sums, weights.values, out)),
            )
            found = self._programs[key] = tokens, scaling, program
        self._team.run(found[2])
        return out[:tokens].to(queries.dtype)

    def _buffer(self, name: str, heads: int, width: int) -> Tensor:
        """float32 [tokens, heads, width]; reused by later calls."""
        key = name, self._tokens, heads, width
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(self._tokens, heads, width)
        return self._buffers[key]


class NativeExpanded:
    """Attention over the expanded keys and values of one sequence, by the native CPU kernels; of layers of one shape.

    The kernels read a pool whose keys and values have one size, so the smaller ones have zeros behind them.
    """

    def __init__(self, weights: Absorbed, dtype: torch.dtype, team: Team) -> None:
        """
        Args:
            dtype: of keys and values.
        """
        self._heads, self._dim, self._width = weights.heads, weights.dim, weights.values.shape[2]
        self._size, self._dtype, self._team = max(self._dim, self._width), dtype, team
        self._room = self._tokens = 0

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """[T, H, Dv] of the last T tokens' queries [T, H, D], over keys [H, C, D] and values [H, C, Dv]; valid until
        the next call."""
        tokens, context = len(queries), keys.shape[1]
        self._make_room(tokens, context)
        self._pool[0, 0, 0, :context, :, : self._dim].copy_(keys.transpose(0, 1))
        self._pool[0, 0, 1, :context, :, : self._width].copy_(values.transpose(0, 1))
        self._queries[:tokens, :, : self._dim].copy_(queries.float() * (scaling * self._size**0.5))
        self._kernels.plan(np.array([context - tokens]), np.array([tokens]), np.zeros((1, 1), np.int64))
        self._team.run(self._program)
        return self._out[:tokens, :, : self._width].to(queries.dtype)

    def _make_room(self, tokens: int, context: int) -> None:
        if tokens <= self._tokens and context <= self._room:
            return
        self._tokens, self._room = max(tokens, self._tokens), max(context, 2 * self._room)
        self._pool = torch.zeros(1, 1, 2, self._room, self._heads, self._size, dtype=self._dtype)
        self._queries = torch.zeros(self._tokens, self._heads, self._size)
        self._out = torch.zeros(self._tokens, self._heads, self._size)
        self._kernels = PagedAttention(self._team.library, self._pool, self._heads, [0], self._team.threads)
        stride = self._heads * self._size
        args = self._kernels.args(0, self._queries.data_ptr(), stride, self._out.data_ptr(), stride, None, 0.0)
        self._program = Program(self._team.library, (ATTEND_PAGED, args))
