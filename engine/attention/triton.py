"""Attention on a GPU: at most three kernels per layer, on tensors at fixed addresses, as a captured graph needs.

rope_kv_write   norm, rotation and KV write of all tokens
paged_decode    rows of one token, which come first in a step
prefill         rows of several tokens, by one of `choice.py`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, HeadNorm, Rotation
from kvrelay.engine.attention.choice import choose_prefill
from kvrelay.engine.attention.prefill import PlannedPrefill, Prefill, Shapes
from kvrelay.engine.config import PrefillAttention
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.decode_work import DecodeParts, DecodeWork, count_programs, plan_decode
from kvrelay.kernels.launch import Launch
from kvrelay.kernels.paged import PagedKV
from kvrelay.kernels.paged_decode import paged_decode
from kvrelay.kernels.rope_kv_write import launch_rope_kv_write


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """What one step does in every layer."""

    inputs: AttentionInputs
    decodes: int
    """Rows at the beginning that have one token each."""
    prompts: PlannedPrefill | None
    """Attends for the other rows; None if there are none."""
    launches: dict[int, "LayerLaunches"] = field(default_factory=dict)
    """By window, what the first layer of the window has launched, which the others repeat."""


class LayerLaunches:
    """What one layer has launched, to be repeated for another one. Holds no tensor that is made anew for each layer."""

    def __init__(self, write: Launch, attend: Sequence[Launch], rest: PlannedPrefill | None) -> None:
        """
        Args:
            write: of `launch_rope_kv_write`.
            attend: of the kernels that follow it.
            rest: what can't be repeated, but must be launched for each layer.
        """
        self.rest = rest
        self._write = write.without("qkv", "weight", "cos", "sin", "out")
        self._attend = [launch.without("query", "out") for launch in attend]

    def repeat(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        kv: Mapping[str, Tensor | int | None],
        out: tuple[Tensor, Tensor],
    ) -> None:
        """Launches the same for a layer with this KV, as `PagedKV.of_layer` has it, and whose norm has the same eps.

        Args:
            out: the queries and the result, both [T, H, D].
        """
        weight = None if norm is None else norm.weight
        query, result = out
        self._write.repeat(qkv=qkv, weight=weight, cos=rotation.cos, sin=rotation.sin, out=query, **kv)
        for launch in self._attend:
            launch.repeat(query=query, out=result, **kv)


class DecodeSchedule:
    """The work lists of decode rows, one for each window, at fixed addresses, and the results of their parts.

    All batch sizes and all layers use them in turn.
    """

    def __init__(self, layout: KVLayout, heads: int, rows: int, windows: tuple[int, ...], device: torch.device) -> None:
        """
        Args:
            heads: query heads.
            rows: of a batch at most.
            windows: of the layers, each once.
        """
        programs = count_programs(layout.kv_heads, processors_of(device))
        self.parts = DecodeParts.empty(programs, heads, layout.kv_heads, layout.head_dim, device)
        words = (len(windows), sum(DecodeWork.sizes(rows, programs)))
        pinned = device.type == "cuda"
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        # Two, because the copy of the step before may not have begun when this step's copy is queued.
        self._host_words = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in "ab"]
        host_works = [[DecodeWork.view(words, rows, programs) for words in host] for host in self._host_words]
        self._host_works = [dict(zip(windows, works, strict=True)) for works in host_works]
        self.works = {
            window: DecodeWork.view(words, rows, programs) for window, words in zip(windows, self._words, strict=True)
        }
        """By window, on the device."""

    def load(self, contexts: NDArray[np.int64]) -> None:
        """Queues the copy to the device of the work lists of rows [R] with these contexts."""
        self._host_words.reverse()
        self._host_works.reverse()
        for window, work in self._host_works[0].items():
            plan_decode(contexts, window, work)
        self._words.copy_(self._host_words[0], non_blocking=True)


class TritonAttention:
    """Implements `Attention`.

    A captured graph repeats `run`, not `plan`: plan a step as for a launch, then replay the graph. All that a plan of
    decode rows changes on the device lies in tensors that the graph reads at fixed addresses.
    """

    def __init__(
        self,
        pool: KVPool,
        dtype: torch.dtype,
        windows: tuple[int, ...],
        heads: int,
        rows: int,
        prefill: PrefillAttention = "triton",
    ) -> None:
        """
        Args:
            dtype: of queries.
            windows: of each layer; see `Traits`.
            heads: query heads.
            rows: of a step at most.
            prefill: what attends for rows of several tokens; see `choose_prefill`.

        Raises:
            ValueError: the pool's order isn't HND, or `prefill` can't be had.
        """
        if pool.layout.order != "HND":
            raise ValueError(f"KVLayout.order is {pool.layout.order}; attention on GPU takes HND")
        self._pool = pool
        self._windows = windows
        self._layers = [PagedKV(pool.tensor, layer, pool.scales) for layer in range(len(windows))]
        self._of_layer = [kv.of_layer() for kv in self._layers]
        layout, device = pool.layout, pool.tensor.device
        kinds = tuple(sorted(set(windows)))
        shapes = Shapes(layout, dtype, heads, kinds, architecture_of(device), device)
        self.candidates = choose_prefill(prefill, shapes)
        """What may attend for rows of several tokens; the first is used until `prefill` is set to another one."""
        self.prefill: Prefill = self.candidates[0]
        self._step: PlannedStep | None = None
        self._schedule = DecodeSchedule(layout, heads, rows, kinds, device)

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
        self._step = PlannedStep(inputs, decodes, prompts)

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """See `Attention.run`. Checks the arguments in the first layer of each window."""
        step = self._step
        if step is None:
            raise RuntimeError("attention runs before a step was planned")
        inputs, kv, window = step.inputs, self._layers[layer], self._windows[layer]
        shape = len(qkv), qkv.shape[1] - 2 * kv.pool.shape[3], qkv.shape[2]
        query = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        known, first = step.launches.get(window), step.decodes
        if known is not None:
            known.repeat(qkv, rotation, norm, self._of_layer[layer], (query, out))
            if known.rest is not None:
                known.rest.launch(query, kv, window, out)
            return out.view(len(out), -1)
        write = launch_rope_kv_write(qkv, rotation, inputs.slots, kv, norm, query)
        attend: list[Launch | None] = []
        if first:
            work, parts = self._schedule.works[window], self._schedule.parts
            attend.append(paged_decode(query[:first], kv, inputs.block_tables[:first], work, parts, out[:first]))
        rest = None
        if step.prompts is not None:
            launch = step.prompts.launch(query, kv, window, out)
            attend.append(launch)
            rest = step.prompts if launch is None else None
        if write is not None:
            step.launches[window] = LayerLaunches(write, [launch for launch in attend if launch is not None], rest)
        return out.view(len(out), -1)


def architecture_of(device: torch.device) -> int:
    """The GPU's compute capability times ten; Hopper's for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def processors_of(device: torch.device) -> int:
    """Multiprocessors of the GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
