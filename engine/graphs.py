"""CUDA graphs of decode steps: one for each size of batch that is worth one.

A batch runs on the smallest graph that it fits in, its missing rows filled with harmless ones. Captured largest first,
all graphs take their intermediate tensors from one pool of memory: those of a smaller batch fit where those of the
largest were, and only one graph runs at a time.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """What is needed of a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...


Capture = Callable[[], AbstractContextManager[Graph]]
"""Of what is launched within the context, a graph."""


class CudaCapture:
    """Captures graphs that share one pool of memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self) -> AbstractContextManager[Graph]:
        return _Capturing(self._pool, self._stream)


class _Capturing:
    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._context = torch.cuda.graph(self._graph, pool=pool, stream=stream)

    def __enter__(self) -> Graph:
        self._context.__enter__()
        return self._graph

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


def batch_sizes(most: int) -> tuple[int, ...]:
    """The sizes that get a graph, ascending up to `most`: a batch wastes at most half of the rows up to 8, then 7 rows,
    past 64 15, past 256 31."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return (*[size for size in sizes if size < most], most)


class DecodeGraphs:
    """The graphs of one decode step, by batch size."""

    def __init__(self, sizes: tuple[int, ...], step: Callable[[int], None], capture: Capture) -> None:
        """Runs each step once for real, so that all its kernels are compiled, then captures it; largest first.

        Args:
            sizes: ascending.
            step: launches the step of so many rows, on static tensors and without waiting for the device.
        """
        self._sizes = sizes
        self._graphs: dict[int, Graph] = {}
        for size in reversed(sizes):
            step(size)
            with capture() as graph:
                step(size)
            self._graphs[size] = graph

    def size_for(self, rows: int) -> int | None:
        """Rows of the graph for so many; None if that is more than any has."""
        index = bisect_left(self._sizes, rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> None:
        """Launches the step of `size` rows, one of the graphs' sizes."""
        self._graphs[size].replay()
