"""Absorbed attention over latents on a GPU, by Triton's kernel: each token of a short row is a row of the kernel."""

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.models.general.latents.absorbed import Absorbed, write
from kvrelay.engine.models.general.places import LayerPlaces, Place
from kvrelay.engine.models.general.step import Step, UnfitError, host
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.triton.decode_work import DecodeParts, DecodeWork, count_programs, plan_decode
from kvrelay.kernels.triton.latent_decode import PagedLatents, group_of, latent_decode
from kvrelay.kernels.triton.launch import processors_of


class TritonLatents:
    """Implements `Attending`, for the layers of one pair of tracks."""

    most = 8
    """A row's tokens read its latents once each, so longer rows are expanded."""

    def __init__(self, store: Store, places: LayerPlaces, weights: Absorbed) -> None:
        if places.keys is None or places.values is None:
            raise UnfitError("latents have no place")
        self._store, self._group = store, store.groups[places.keys.track]
        device, groups = store.device, weights.heads // group_of(weights.heads)
        self._programs = count_programs(groups, processors_of(device))
        self._parts = DecodeParts.empty(self._programs, weights.heads, groups, weights.latent, device)
        self._step: Step | None = None

    def plan(self, step: Step) -> None:
        """See `Attending.plan`."""
        self._step = step
        rows = len(step.tokens)
        words = torch.zeros(sum(DecodeWork.sizes(rows, self._programs)), dtype=torch.int32)
        plan_decode(step.positions + 1, 0, DecodeWork.view(words, rows, self._programs))
        self._work = DecodeWork.view(words.to(self._store.device), rows, self._programs)
        tables = step.tables[self._group][step.rows_of_tokens].astype(np.int32)
        self._tables = host(tables, self._store.device)

    def run(
        self, places: LayerPlaces, weights: Absorbed, queries: Tensor, latents: Tensor, rotated: Tensor, scaling: float
    ) -> Tensor:
        """See `Attending.run`."""
        if self._step is None or places.keys is None or places.values is None:
            raise UnfitError("latents are attended to outside of a step")
        write(self._store, self._step, places, latents, rotated)
        absorbed = weights.absorb(queries).contiguous()
        sums = absorbed.new_empty((*absorbed.shape[:2], weights.latent))
        (held, held_scales), (turned, turned_scales) = self._plane(places.keys), self._plane(places.values)
        kv = PagedLatents(held, turned, held_scales, turned_scales)
        latent_decode(absorbed, kv, self._tables, self._work, self._parts, scaling, sums)
        return weights.release(sums)

    def _plane(self, place: Place) -> tuple[Tensor, Tensor | None]:
        """Numbers [block, slot, C] of a layer, and their scales [block, slot]; there is one head in either order."""
        pool = self._store.pools[place.track]
        numbers = pool.tensor[:, place.layer, place.plane]
        scales = None if pool.scales is None else pool.scales[:, place.layer, place.plane].flatten(1)
        return numbers.flatten(1, 3).view(len(numbers), pool.layout.block_size, -1), scales
