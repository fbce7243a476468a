"""CUDA graphs of steps, captured for a few sizes: of decode steps whole, of steps with chunks of prompts in pieces.

A step runs on the smallest graph that it fits in; padding rows or tokens fill the rest. All graphs take their
intermediate tensors from one memory pool: the largest is captured first, so the tensors of smaller ones fit where its
own were, and only one graph runs at a time.

In a step with chunks, what attention launches depends on the rows, everything else on the number of tokens only. So
what lies between the attention of two layers is a graph:

    embed, norm, QKV,        | attend  | output, norm, MLP, norm, QKV,  | attend  |     | output, norm, MLP
    rotation and KV write    | layer 0 | rotation and KV write          | layer 1 | ... |

Tensors that live from one graph to the next, such as the residual, stay allocated while the later one is captured, so
nothing else of the step is put in their place.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from kvrelay.engine.attention.base import Attention, HeadNorm, Rotation
from kvrelay.engine.attention.triton import TritonAttention


class Graph(Protocol):
    """The part of `torch.cuda.CUDAGraph` that is used; tests stand in for it."""

    def replay(self) -> None: ...


Capture = Callable[[], AbstractContextManager[Graph]]
"""Captures a graph of the kernels that are launched within the context."""


def cuda_capture(stream: torch.cuda.Stream) -> Capture:
    """Captures graphs of a stream that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture() -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of links and of NCCL, may go on asking their own events.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield graph

    return capture


def batch_sizes(most: int) -> tuple[int, ...]:
    """The batch sizes that get a graph, ascending up to `most`.

    At most half of the rows are padding in a graph of up to 8 rows, 7 rows in one of up to 64, 15 up to 256, then 31.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return (*[size for size in sizes if size < most], most)


def fitting(sizes: tuple[int, ...], count: int) -> int | None:
    """The smallest of the ascending `sizes` that `count` fits in; None if none is large enough."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


class DecodeGraphs:
    """The graphs of one decode step, by batch size."""

    def __init__(self, sizes: tuple[int, ...], prepare: Callable[[int], Callable[[], None]], capture: Capture) -> None:
        """Runs each step once, so that all its kernels are compiled, then captures it; the largest first.

        Args:
            sizes: ascending.
            prepare: plans a step of so many rows; returns what launches it, on static tensors and without waiting for
                the device.
        """
        self.sizes = sizes
        self._graphs: dict[int, Graph] = {}
        for size in reversed(sizes):
            launch = prepare(size)
            launch()
            with capture() as graph:
                launch()
            self._graphs[size] = graph

    def replay(self, size: int) -> None:
        """Launches the graph of `size` rows, which must be one of the sizes."""
        self._graphs[size].replay()


Forward = Callable[[Attention], Tensor]
"""Launches a step with this attention; returns its hidden states."""


def step_sizes(most: int) -> tuple[int, ...]:
    """The numbers of tokens that get graphs, ascending up to `most`; none if it is 0.

    Up to some 200 tokens, products take as long as their weights take to be read, and padding costs little. Above that,
    at most 63 tokens are padding.
    """
    sizes = [16, 32, 64, *range(128, most, 64)]
    return (*[size for size in sizes if size < most], most) if most else ()


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The graphs of steps of one size."""

    graphs: tuple[Graph, ...]
    """Graphs of the pieces, one more than layers."""
    query: Tensor
    """Queries [T, H, D], which each graph but the last writes."""
    attended: Tensor
    """Results of attention [T, H, D], which each graph but the first reads."""
    hidden: Tensor
    """Hidden states [T, hidden], which the last graph writes."""


class StepPieces:
    """The graphs of steps with chunks of prompts, by size."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        prepare: Callable[[int], Forward],
        attention: TritonAttention,
        heads: tuple[Tensor, Tensor],
        capture: Capture,
    ) -> None:
        """Runs a step of each size once, so that all its kernels are compiled, then captures it; the largest first.

        Args:
            sizes: ascending.
            prepare: plans a step of no rows and so many tokens, and tells how it is launched: on static tensors and
                without waiting for the device.
            heads: [T, H, D] for the queries and for the results of attention of the largest size.
        """
        self.sizes = sizes
        self._attention = attention
        self._pieces: dict[int, Pieces] = {}
        for size in reversed(sizes):
            forward = prepare(size)
            forward(attention)
            query, attended = (tensor[:size] for tensor in heads)
            with CutAttention(attention, query, attended, capture) as cut:
                hidden = forward(cut)
            self._pieces[size] = Pieces(tuple(cut.graphs), query, attended, hidden)

    def replay(self, size: int) -> Tensor:
        """Launches the planned step, which was filled up to `size` tokens.

        Returns:
            [size, hidden], until the next replay.
        """
        pieces, attend = self._pieces[size], self._attention.attend
        for layer, graph in enumerate(pieces.graphs[:-1]):
            graph.replay()
            attend(layer, pieces.query, pieces.attended)
        pieces.graphs[-1].replay()
        return pieces.hidden


class CutAttention:
    """Attention while a step is captured: after a layer's KV write a graph ends, and another one begins.

    A context, because the first graph begins before the first layer and the last one ends after the last.
    """

    def __init__(self, attention: TritonAttention, query: Tensor, attended: Tensor, capture: Capture) -> None:
        """
        Args:
            query: [T, H, D], where the graphs leave their queries.
            attended: [T, H, D], where they find what attention has made of them.
        """
        self.graphs: list[Graph] = []
        self._attention = attention
        self._query = query
        self._attended = attended
        self._capture = capture
        self._open: AbstractContextManager[Graph] = capture()

    def __enter__(self) -> "CutAttention":
        self.graphs.append(self._open.__enter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def plan(self, inputs: object) -> None:
        """Does nothing, because the step was planned."""

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """See `Attention.run`."""
        self._attention.write(layer, qkv, rotation, norm, self._query)
        self._open.__exit__(None, None, None)
        self._open = self._capture()
        self.graphs.append(self._open.__enter__())
        return self._attended.view(len(self._attended), -1)
