"""Reads and writes a step's KV and states in the pools, as a model's cache does."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.models.general.places import Place, Placing, StatePlace
from kvrelay.engine.models.general.step import Step, host
from kvrelay.kernels.kv_codes import dequantize, quantize


class Store:
    """The pools of a model's tracks."""

    def __init__(self, placing: Placing, pools: Sequence[KVPool]) -> None:
        """
        Args:
            pools: of `placing.layout.tracks`, in order.
        """
        self.placing = placing
        self.pools = tuple(pools)
        self.groups = tuple([group for group, _ in placing.layout.tracks])
        """Index of each track's group."""
        self.device = self.pools[0].bytes.device if self.pools else torch.device("cpu")
        self.size = placing.layout.block_size

    def slots(self, step: Step, track: int) -> tuple[Tensor, Tensor]:
        """int64 [T] block, and int64 [T] slot in it, of each token of a step."""
        positions = step.positions
        blocks = step.tables[self.groups[track]][step.rows_of_tokens, positions // self.size]
        return host(blocks, self.device), host(positions % self.size, self.device)

    def write(self, place: Place, slots: tuple[Tensor, Tensor], numbers: Tensor) -> None:
        """Writes numbers [T, heads, dim] to slots."""
        pool = self.pools[place.track]
        if pool.scales is not None:
            numbers, scales = quantize(numbers, pool.tensor.dtype)
            self._inner(pool, pool.scales, place)[slots] = scales
        self._inner(pool, pool.tensor, place)[slots] = numbers.to(pool.tensor.dtype)

    def read(self, place: Place, slots: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """Numbers [..., heads, dim] in slots of any shape [...]."""
        pool = self.pools[place.track]
        numbers = self._inner(pool, pool.tensor, place)[slots]
        if pool.scales is not None:
            numbers = dequantize(numbers, self._inner(pool, pool.scales, place)[slots])
        return numbers.to(dtype)

    def read_range(self, place: Place, table: NDArray[np.int64], first: int, end: int, dtype: torch.dtype) -> Tensor:
        """Numbers [end - first, heads, dim] of these tokens of one sequence."""
        positions = np.arange(first, end)
        slots = host(table[positions // self.size], self.device), host(positions % self.size, self.device)
        return self.read(place, slots, dtype)

    def _inner(self, pool: KVPool, numbers: Tensor, place: Place) -> Tensor:
        """View [block, slot, head, ...] of one plane."""
        plane = numbers[:, place.layer, place.plane]
        return plane if pool.layout.order == "NHD" else plane.transpose(1, 2)

    def write_tokens(self, step: Step) -> None:
        """Keeps a step's tokens themselves."""
        place = self.placing.tokens
        if place is not None:
            tokens = host(step.tokens.astype(np.int32), self.device).view(torch.float32)
            self.write(place, self.slots(step, place.track), tokens[:, None, None])

    def sequence(self, step: Step, row: int) -> NDArray[np.int64]:
        """All tokens of a row's sequence, those of the step included."""
        place = self.placing.tokens
        if place is None:
            raise RuntimeError("tokens aren't kept")
        table, end = step.tables[self.groups[place.track]][row], int(step.contexts[row])
        numbers = self.read_range(place, table, 0, end, torch.float32).flatten()
        return numbers.view(torch.int32).cpu().numpy().astype(np.int64)

    def state(self, place: StatePlace, slots: Tensor) -> Tensor:
        """A tensor of the states in slots [B], copied: [B, *shape]."""
        data = self.pools[place.track].bytes[slots, place.layer, 0, place.offset : place.offset + place.state.nbytes]
        return data.contiguous().view(place.state.dtype).view(len(slots), *place.state.shape)

    def set_state(self, place: StatePlace, slots: Tensor, state: Tensor) -> None:
        """Writes a tensor [B, *shape] of the states in slots [B]."""
        data = state.to(place.state.dtype).contiguous().view(len(slots), -1).view(torch.uint8)
        self.pools[place.track].bytes[slots, place.layer, 0, place.offset : place.offset + place.state.nbytes] = data

    def copy_slots(self, group: int, source: int, target: int) -> None:
        """Copies what a slot of a group of states holds to another one."""
        for track, pool in enumerate(self.pools):
            if self.groups[track] == group:
                pool.bytes[target].copy_(pool.bytes[source])


def scratch_pools(layout: CacheLayout, blocks: int, slots: int, device: torch.device | str) -> tuple[KVPool, ...]:
    """Small pools of a layout, for a check."""
    kinds = [layout.groups[group].kind for group, _ in layout.tracks]
    return tuple(
        KVPool(track, slots if kind == "state" else blocks, device)
        for kind, (_, track) in zip(kinds, layout.tracks, strict=True)
    )
