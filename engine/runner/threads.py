"""Number of torch's threads in the thread that runs steps."""

import threading

import torch


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
