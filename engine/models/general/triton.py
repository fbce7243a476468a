"""The flat way's attention on a GPU, by Triton's kernels: reads the pages in place.

Rows of one token go to the kernel for decode, longer ones to that for prompts, as in `engine/attention/triton.py`.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.attention.triton import architecture_of
from kvrelay.engine.models.general.native import Call
from kvrelay.engine.models.general.places import Place
from kvrelay.engine.models.general.step import Step, UnfitError, host
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.triton.decode_work import DecodeParts, DecodeWork, count_programs, plan_decode
from kvrelay.kernels.triton.flash_prefill import choose_tile, flash_prefill, plan_tiles
from kvrelay.kernels.triton.launch import processors_of
from kvrelay.kernels.triton.paged import DIMS, PagedKV
from kvrelay.kernels.triton.paged_decode import paged_decode

FP8_ARCHITECTURE = 89
"""First compute capability, times ten, for which Triton compiles loads of e4m3."""
ALIGNMENT = 16
"""Triton compiles a second version of a kernel for strides and addresses that aren't multiples of this. Block tables
and work lists are padded, so that there is one version only."""


class TritonTrack:
    """Implements `Track`."""

    def __init__(self, store: Store, track: int, calls: Mapping[int, Call]) -> None:
        """
        Args:
            calls: how each layer of the track is attended to, with as many heads.
        """
        pool = store.pools[track]
        layout, device = pool.layout, store.device
        self.group = store.groups[track]
        self._store, self._track, self._layout = store, track, layout
        self._calls = [calls[layer] for layer in range(layout.layers)]
        self._sinks = [
            None if call.sinks is None else call.sinks.float().reshape(-1).contiguous() for call in self._calls
        ]
        self._kv = [PagedKV(pool.tensor, layer, pool.scales) for layer in range(layout.layers)]
        self._heads = self._calls[0].heads
        self._programs = count_programs(layout.kv_heads, processors_of(device))
        self._parts = DecodeParts.empty(self._programs, self._heads, layout.kv_heads, layout.head_dim, device)
        self._step: Step | None = None

    @staticmethod
    def fits(store: Store, track: int) -> bool:
        """Whether the kernels read the track's pages."""
        layout, architecture = store.pools[track].layout, architecture_of(store.device)
        known = layout.dtype != "fp8" or architecture >= FP8_ARCHITECTURE
        return known and layout.order == "HND" and DIMS[0] <= layout.head_dim <= DIMS[1]

    def plan(self, step: Step) -> None:
        """See `Track.plan`."""
        device = self._store.device
        self._step, self._slots = step, self._store.slots(step, self._track)
        tables = step.tables[self.group].astype(np.int32)
        self._tables = host(np.pad(tables, ((0, 0), (0, -tables.shape[1] % ALIGNMENT))), device)
        self._tiles: dict[int, Tensor] = {}
        self._longer, single = np.flatnonzero(step.lengths > 1), np.flatnonzero(step.lengths == 1)
        self._single = host(step.firsts[single], device)
        self._single_tables = self._tables[host(single, device)]
        self._work: dict[int, DecodeWork] = {}
        # An even number of entries, whose 24 bytes each end where `starts` is aligned.
        rows = len(single) + (len(single) + self._programs - 1) % 2
        for window in {call.window or 0 for call in self._calls} if len(single) else ():
            words = torch.zeros(sum(DecodeWork.sizes(rows, self._programs)), dtype=torch.int32)
            plan_decode(step.contexts[single], window, DecodeWork.view(words, rows, self._programs))
            self._work[window] = DecodeWork.view(words.to(device), rows, self._programs)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Track.run`."""
        if self._step is None:
            raise UnfitError("attention runs before a step was planned")
        for plane, numbers in enumerate((key, value)):
            self._store.write(Place(self._track, layer, plane), self._slots, numbers[0].transpose(0, 1))
        call, kv, sinks = self._calls[layer], self._kv[layer], self._sinks[layer]
        window = call.window or 0
        kind = query.dtype if self._layout.scaled else kv.pool.dtype
        # The kernels' own factor is 1 / sqrt(D).
        queries = (query[0].transpose(0, 1) * (scaling * query.shape[3] ** 0.5)).to(kind).contiguous()
        out = torch.empty_like(queries)
        if len(self._single):
            own = queries[self._single]
            attended = torch.empty_like(own)
            work = self._work[window]
            paged_decode(own, kv, self._single_tables, work, self._parts, attended, call.softcap, sinks)
            out[self._single] = attended
        if len(self._longer):
            layout, group = self._layout, self._heads // self._layout.kv_heads
            pages = 0 if layout.scaled else layout.block_size
            tile = choose_tile(layout.head_dim, kind, pages, architecture_of(self._store.device), group)
            if window not in self._tiles:
                step, tokens = self._step, tile.rows // group
                tiles = plan_tiles(step.starts, step.lengths, tokens, window, self._longer.tolist())
                self._tiles[window] = host(tiles, self._store.device)
            flash_prefill(queries, kv, self._tables, self._tiles[window], tile, window, out, call.softcap, sinks)
        return out[None].to(query.dtype)
