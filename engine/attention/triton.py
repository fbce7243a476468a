"""Attention on a GPU: at most three kernels per layer, on tensors at fixed addresses, as a captured graph needs.

rope_kv_write   norm, rotation and KV write of all tokens
paged_decode    rows of one token, which come first in a step
prefill         rows of several tokens, by one of `choice.py`
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, HeadNorm, LayerKV, Places, Rotation
from kvrelay.engine.attention.choice import choose_prefill
from kvrelay.engine.attention.prefill import PlannedPrefill, Prefill, Shapes
from kvrelay.engine.config import PrefillAttention
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.kernels.triton.decode_work import DecodeParts, DecodeWork, count_programs, plan_decode
from kvrelay.kernels.triton.launch import Repeat, processors_of
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.paged_decode import paged_decode
from kvrelay.kernels.triton.rope_kv_write import HEADS, launch_rope_kv_write


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """Work of one step, the same in every layer."""

    places: Mapping[int, Places]
    """Places of the tokens by window."""
    decodes: int
    """Number of rows with one token each, which come first."""
    prompts: PlannedPrefill | None
    """Attention for the other rows; None if there are none."""


class LayerLaunches:
    """Launches of one layer in an earlier step, which later steps repeat."""

    def __init__(self) -> None:
        self.norm: HeadNorm | None = None
        """Norm that the launch `write` was made with."""
        self.table_stride = 0
        """Stride of the block tables that the launch `decode` was made with."""
        self.write: Repeat | None = None
        self.decode: Repeat | None = None


class DecodeSchedule:
    """The work lists of decode rows, one for each window, at fixed addresses, and the results of their parts.

    All batch sizes and all layers use them in turn.
    """

    def __init__(
        self, layout: KVLayout, heads: int, rows: int, windows: tuple[int, ...], device: torch.device, plans: int
    ) -> None:
        """
        Args:
            heads: query heads.
            rows: of a batch at most.
            windows: of the layers, each once.
            plans: as for `TritonAttention`.
        """
        self.programs = programs = count_programs(layout.kv_heads, processors_of(device))
        self.parts = DecodeParts.empty(programs, heads, layout.kv_heads, layout.head_dim, device)
        words = (len(windows), sum(DecodeWork.sizes(rows, programs)))
        pinned = device.type == "cuda"
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._host_words = deque([torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(plans)])
        host_works = [[DecodeWork.view(words, rows, programs) for words in host] for host in self._host_words]
        self._host_works = deque([dict(zip(windows, works, strict=True)) for works in host_works])
        self.works = {
            window: DecodeWork.view(words, rows, programs) for window, words in zip(windows, self._words, strict=True)
        }
        """Work lists on the device, by window."""

    def load(self, contexts: NDArray[np.int64]) -> None:
        """Queues the copy to the device of the work lists of rows [R] with these contexts."""
        self._host_words.rotate()
        self._host_works.rotate()
        for window, work in self._host_works[0].items():
            plan_decode(contexts, window, work)
        self._words.copy_(self._host_words[0], non_blocking=True)


class TritonAttention:
    """Implements `Attention`.

    Each layer repeats what it has launched in an earlier step with other pointers. Arguments of a kind that it has had
    aren't checked again.

    A captured graph repeats `run`, not `plan`: plan a step as for a launch, then replay the graph. All that a plan of
    decode rows changes on the device lies in tensors that the graph reads at fixed addresses.
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        dtype: torch.dtype,
        heads: int,
        rows: int,
        prefill: PrefillAttention = "triton",
        plans: int = 2,
    ) -> None:
        """
        Args:
            dtype: of queries.
            heads: query heads.
            rows: of a step at most.
            prefill: what attends for rows of several tokens; see `choose_prefill`.
            plans: steps with decode rows that are planned at most while the copies of the first one may not have
                begun. Two, because a step is planned while the one before it runs.

        Raises:
            ValueError: a pool's order isn't HND, or `prefill` can't be had.
        """
        layout, device = layers[0].pool.layout, layers[0].pool.tensor.device
        if layout.order != "HND":
            raise ValueError(f"KVLayout.order is {layout.order}; attention on GPU takes HND")
        self._layers = [PagedKV(pool.tensor, layer, pool.scales) for pool, layer, _ in layers]
        self._windows = [layer.window for layer in layers]
        self._launches = [LayerLaunches() for _ in layers]
        self._kinds = kinds = tuple(sorted(set(self._windows)))
        shapes = Shapes(layout, dtype, heads, kinds, architecture_of(device), device)
        self.candidates = choose_prefill(prefill, shapes)
        """Kernels that may attend for rows of several tokens."""
        self.prefill: Prefill = self.candidates[0]
        """Kernel that attends for rows of several tokens, from the next plan on."""
        self._heads, self._kv_heads = heads, layout.kv_heads
        self._head_grids = -(-(heads + 2 * layout.kv_heads) // HEADS)
        self._step: PlannedStep | None = None
        self._schedule = DecodeSchedule(layout, heads, rows, kinds, device, plans)

    def plan(self, inputs: AttentionInputs) -> None:
        """See `Attention.plan`. Rows of one token are taken as decode rows up to the first longer row."""
        longer = np.flatnonzero(inputs.lengths > 1)
        rows = len(inputs.lengths)
        decodes = int(longer[0]) if len(longer) else rows
        prompts = None
        if decodes:
            self._schedule.load(inputs.starts[:decodes] + 1)
        if decodes < rows:
            prompts = self.prefill.plan(inputs, decodes)
        self._step = PlannedStep({window: inputs.of(window) for window in self._kinds}, decodes, prompts)

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """See `Attention.run`."""
        tokens, _, dim = qkv.shape
        query = qkv.new_empty((tokens, self._heads, dim))
        out = torch.empty_like(query)
        self.write(layer, qkv, rotation, norm, query)
        self.attend(layer, query, out)
        return out.view(tokens, -1)

    def write(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None, query: Tensor) -> None:
        """The first half of `run`: norms, rotates, writes keys and values into the pool and the queries into `query`.

        Checks the arguments of a layer's first call. It depends on nothing of the plan but the address of `slots`.

        Args:
            qkv: [T, H + 2 Hkv, D].
            query: [T, H, D].
        """
        slots, known = self._planned().places[self._windows[layer]].slots, self._launches[layer]
        tokens = qkv.shape[0]
        if known.write is None or known.norm is not norm or slots.shape[0] != tokens:
            made = launch_rope_kv_write(qkv, rotation, slots, self._layers[layer], norm, query)
            if made is not None:
                known.norm, known.write = norm, made.repeating("qkv", "cos", "sin", "slots", "out")
        else:
            known.write((tokens, self._head_grids, 1), qkv, rotation.cos, rotation.sin, slots, query)

    def attend(self, layer: int, query: Tensor, out: Tensor) -> None:
        """The second half of `run`: writes the attention of the planned rows' tokens into `out`.

        Args:
            query, out: [T, H, D], T at least as many as the plan's tokens. Rows of `out` past those aren't touched.
        """
        step, known = self._planned(), self._launches[layer]
        window = self._windows[layer]
        tables = step.places[window].block_tables
        if known.table_stride != tables.stride(0):
            known.table_stride, known.decode = tables.stride(0), None
        first = step.decodes
        if first and known.decode is not None:
            known.decode((self._kv_heads, self._schedule.programs, 1), query, tables, out)
        elif first:
            kv, work, parts = self._layers[layer], self._schedule.works[window], self._schedule.parts
            made = paged_decode(query[:first], kv, tables[:first], work, parts, out[:first])
            known.decode = None if made is None else made.repeating("query", "block_tables", "out")
        if step.prompts is not None:
            step.prompts.launch(query, self._layers[layer], window, out)

    def _planned(self) -> PlannedStep:
        if self._step is None:
            raise RuntimeError("attention runs before a step was planned")
        return self._step


def architecture_of(device: torch.device) -> int:
    """The GPU's compute capability times ten; Hopper's for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
