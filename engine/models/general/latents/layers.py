"""The layers of a model that keep latents: short rows, as those of decode, attend absorbed.

The keys and values of a long row's heads are expanded, which takes less arithmetic there.
"""

import numpy as np
import torch
from torch import Tensor, nn

from kvrelay.engine.models.general.attend import attend
from kvrelay.engine.models.general.latents.absorbed import EXPAND, Absorbed, Attending, Kept, PlainLatents, write
from kvrelay.engine.models.general.latents.native import NativeExpanded, NativeLatents
from kvrelay.engine.models.general.places import LayerPlaces
from kvrelay.engine.models.general.step import Step, UnfitError, host
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.cpu.program import Team


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
        self.native = False
        """Whether kernels attend."""
        self._step: Step | None = None
        self._short: Step | None = None
        self._most = -1
        self._rows: list[int] = []
        self._tokens: Tensor | None = None
        self._planned: set[int] = set()

    def use_kernels(self) -> bool:
        """Uses kernels for attention from now on, if they can read the pools of all layers."""
        layers = [places for places in self._store.placing.layers if places.cache.latent]
        if self._store.device.type == "cuda":
            self.native = True
        else:
            self.native = self._team is not None and all(NativeLatents.fits(self._store, each) for each in layers)
        return self.native

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
        if not self.native or places.keys is None or places.values is None:
            return self._plain
        key = places.keys.track, places.values.track, weights.heads
        if key not in self._attending:
            made: Attending
            if self._team is None:
                # Triton, which a worker without a GPU doesn't need.
                from kvrelay.engine.models.general.latents.triton import TritonLatents

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
        if self.native and self._team is not None:
            key = weights.heads, weights.dim, weights.values.shape[2]
            if key not in self._expanding:
                self._expanding[key] = NativeExpanded(weights, keys.dtype, self._team)
            return self._expanding[key].run(queries, keys[0], values[0], scaling)
        positions = torch.arange(end, device=queries.device)
        visible = positions[None] <= positions[int(step.starts[row]) :, None]
        return attend(queries, keys[0].transpose(0, 1), values[0].transpose(0, 1), visible, scaling)
