"""Attention of layers that keep latents: absorbed for a few tokens of a sequence, expanded for many.

The weights of `expand_kv` (`absorbed.py`) are absorbed into queries and results of short rows, as those of decode,
which then attend over the latents themselves. The keys and values of a long row's heads are expanded, which takes less
arithmetic there.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kvrelay.engine.models.general.absorbed import EXPAND, UNLIMITED, Absorbed, Kept, write
from kvrelay.engine.models.general.attend import attend
from kvrelay.engine.models.general.places import LayerPlaces
from kvrelay.engine.models.general.step import Step, UnfitError, host
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.cpu.attention import ATTEND as ATTEND_PAGED
from kvrelay.kernels.cpu.attention import PagedAttention, supports
from kvrelay.kernels.cpu.latent import ATTEND, PRODUCTS, WRITE, LatentAttention
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.reference import latent_attention


class Attending(Protocol):
    """Writes and attends to latents, absorbed."""

    most: int
    """Tokens of the longest row that it is for."""

    def plan(self, step: Step) -> None:
        """Begins a step."""
        ...

    def run(
        self, places: LayerPlaces, weights: Absorbed, queries: Tensor, latents: Tensor, rotated: Tensor, scaling: float
    ) -> Tensor:
        """[T, H, Dv] of queries [T, H, D], after latents [T, C] and rotated keys [T, R] have been written."""
        ...


class PlainLatents:
    """Implements `Attending` by torch's operations."""

    most = UNLIMITED

    def __init__(self, store: Store) -> None:
        self._store = store
        self._step: Step | None = None

    def plan(self, step: Step) -> None:
        """See `Attending.plan`."""
        self._step = step

    def run(
        self, places: LayerPlaces, weights: Absorbed, queries: Tensor, latents: Tensor, rotated: Tensor, scaling: float
    ) -> Tensor:
        """See `Attending.run`."""
        step = self._step
        if step is None or places.keys is None or places.values is None:
            raise UnfitError("latents are attended to outside of a step")
        write(self._store, step, places, latents, rotated)
        absorbed, sums = weights.absorb(queries), []
        table = step.tables[self._store.groups[places.keys.track]]
        for row, (first, length, end) in enumerate(zip(step.firsts, step.lengths, step.contexts, strict=True)):
            held, turned = (
                self._store.read_range(place, table[row], 0, int(end), torch.float32)[:, 0]
                for place in (places.keys, places.values)
            )
            sums.append(latent_attention(absorbed[first : first + length], held, turned, scaling))
        return weights.release(torch.cat(sums).to(queries.dtype))


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
        """float32 [tokens, heads, width] that is kept."""
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


class Latents:
    """The layers of a model that keep latents."""

    def __init__(self, store: Store, team: Team | None) -> None:
        """
        Args:
            team: threads of the native kernels, where those may be used.
        """
        self._store, self._team = store, team
        self._weights: dict[int, Absorbed] = {}
        self._attending: dict[tuple[int, int, int], Attending] = {}
        self._expanding: dict[tuple[int, int, int], NativeExpanded] = {}
        self._plain = PlainLatents(store)
        self._native = False
        self._step: Step | None = None
        self._short: Step | None = None
        self._most = -1
        self._rows: list[int] = []
        self._tokens: Tensor | None = None
        self._planned: set[int] = set()

    def use_native(self) -> bool:
        """Has kernels attend from now on, if there are some that can read the pools of all layers."""
        layers = [places for places in self._store.placing.layers if places.cache.latent]
        if self._store.device.type == "cuda":
            self._native = True
        else:
            self._native = self._team is not None and all(NativeLatents.fits(self._store, each) for each in layers)
        return self._native

    def plan(self, step: Step) -> None:
        """Begins a step."""
        self._step, self._most = step, -1

    def run(
        self,
        places: LayerPlaces,
        module: nn.Module,
        query: Tensor,
        latents: Tensor,
        rotated: Tensor,
        scaling: float,
    ) -> Tensor:
        """[1, T, H, Dv], the step's attention of a layer, whose new numbers it also writes.

        Args:
            query: [1, H, T, D].
            latents, rotated: of the step's tokens, [1, 1, T, C] and [1, 1, T, R].

        Raises:
            UnfitError: the module's keys and values aren't linear in what is kept.
        """
        step = self._step
        if step is None:
            raise UnfitError("the cache is used outside of a step")
        weights = self._weights.get(id(module))
        if weights is None:
            expand = getattr(module, EXPAND, None)
            if not isinstance(expand, Kept):
                raise UnfitError("latents aren't expanded by a function of their own")
            weights = Absorbed(expand.expand, latents.shape[3], rotated.shape[3], latents)
            self._weights[id(module)] = weights
        if query.shape[1] != weights.heads or query.shape[3] != weights.dim:
            raise UnfitError(f"queries have the shape {list(query.shape)}")
        attending = self._attending_of(places, weights)
        self._split(step, min(weights.most, attending.most))
        if self._short is not None and id(attending) not in self._planned:
            self._planned.add(id(attending))
            attending.plan(self._short)
        queries, own, turned = query[0].transpose(0, 1), latents[0, 0], rotated[0, 0]
        if self._tokens is None:
            return attending.run(places, weights, queries, own, turned, scaling)[None]
        write(self._store, step, places, own, turned)
        out = queries.new_empty((len(queries), weights.heads, weights.values.shape[2]))
        if self._short is not None:
            at = self._tokens
            out[at] = attending.run(places, weights, queries[at], own[at], turned[at], scaling)
        for row in self._rows:
            first, length = int(step.firsts[row]), int(step.lengths[row])
            rows = slice(first, first + length)
            out[rows] = self._expanded(places, weights, row, queries[rows], scaling)
        return out[None]

    def _split(self, step: Step, most: int) -> None:
        """Parts the step's rows into short ones and long ones, once for layers of one shape."""
        if most == self._most:
            return
        self._most = most
        short = np.flatnonzero(step.lengths <= most)
        self._rows = np.flatnonzero(step.lengths > most).tolist()
        self._short = self._tokens = None
        if self._rows:
            chosen = np.isin(step.rows_of_tokens, short)
            self._tokens = host(np.flatnonzero(chosen), self._store.device)
            self._short = step.part(short) if len(short) else None
        else:
            self._short = step
        self._planned = set()

    def _attending_of(self, places: LayerPlaces, weights: Absorbed) -> Attending:
        if not self._native or places.keys is None or places.values is None:
            return self._plain
        key = places.keys.track, places.values.track, weights.heads
        if key not in self._attending:
            made: Attending
            if self._team is None:
                # Triton, which a worker without a GPU doesn't need.
                from kvrelay.engine.models.general.latents_triton import TritonLatents

                made = TritonLatents(self._store, places, weights)
            else:
                made = NativeLatents(self._store, places, weights, self._team)
            self._attending[key] = made
        return self._attending[key]

    def _expanded(self, places: LayerPlaces, weights: Absorbed, row: int, queries: Tensor, scaling: float) -> Tensor:
        """[T, H, Dv] of a row's queries [T, H, D], whose latents have been written."""
        step = self._step
        if step is None or places.keys is None or places.values is None:
            raise UnfitError("latents have no place")
        table, end = step.tables[self._store.groups[places.keys.track]][row], int(step.contexts[row])
        latents, rotated = (
            self._store.read_range(place, table, 0, end, queries.dtype).transpose(0, 1)[None]
            for place in (places.keys, places.values)
        )
        keys, values = weights.expand(latents, rotated)
        if self._native and self._team is not None:
            key = weights.heads, weights.dim, weights.values.shape[2]
            if key not in self._expanding:
                self._expanding[key] = NativeExpanded(weights, keys.dtype, self._team)
            return self._expanding[key].run(queries, keys[0], values[0], scaling)
        positions = torch.arange(end, device=queries.device)
        visible = positions[None] <= positions[int(step.starts[row]) :, None]
        return attend(queries, keys[0].transpose(0, 1), values[0].transpose(0, 1), visible, scaling)
