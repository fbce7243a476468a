"""Threads of a CPU's runner: those of torch, and those of the native kernels."""

import logging
import threading

import torch

from kvrelay.kernels.cpu.library import instruction_set, library
from kvrelay.kernels.cpu.program import Team

logger = logging.getLogger(__name__)


class TorchThreads:
    """torch's number of threads. torch keeps it per calling thread, so every thread that runs steps must set it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._thread: int | None = None

    def set(self) -> None:
        """Sets the number for the calling thread."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self._count)
            self._thread = threading.get_ident()


def native_team(threads: int, *, supported: bool) -> Team | None:
    """The threads of the native kernels; None if those don't support the model, or aren't available."""
    kernels = library() if supported else None
    if kernels is None:
        return None
    logger.info("the engine computes with native kernels for %s, on %d threads", instruction_set(kernels), threads)
    return Team(kernels, threads)
