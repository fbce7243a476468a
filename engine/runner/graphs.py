"""CUDA graphs of decode steps, captured for a few batch sizes.

A batch runs on the smallest graph that it fits in; padding rows fill the rest. All graphs take their intermediate
tensors from one memory pool: the largest is captured first, so the tensors of smaller ones fit where its own were, and
only one graph runs at a time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


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
