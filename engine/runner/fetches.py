"""Copies from a device to host memory that the engine's thread doesn't wait for."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Fetch(NamedTuple):
    """One copy; fields as for `Fetches.fetch`."""

    states: Tensor
    places: tuple[int, ...]
    dtype: torch.dtype
    then: Callable[[Tensor], object]


class Fetches:
    """Copies hidden states on a thread of its own, one after the other, into pinned memory if they are on a GPU.

    The thread starts with the first one. It is a daemon, because a copy of a device that hangs never ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fetch(
        self, states: Tensor, places: tuple[int, ...], dtype: torch.dtype, then: Callable[[Tensor], object]
    ) -> None:
        """See `Runner.fetch`; `then` is called on the thread, and never if the device has failed."""
        self._queue.put(Fetch(states, places, dtype, then))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fetches", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        # Not the engine's stream, where a copy would wait for the next step.
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        while True:
            fetch = self._queue.get()
            try:
                fetch.then(self._copy(fetch, stream))
            except Exception:  # those of other requests must still come; if the device has failed, the next step tells
                logger.exception("hidden states could not be copied from the device")
            del fetch

    def _copy(self, fetch: Fetch, stream: torch.cuda.Stream | None) -> Tensor:
        """Returns when the copy is there. Until then `fetch` holds the device's memory, which would be used again."""
        states = fetch.states
        with torch.inference_mode(), torch.cuda.stream(stream):
            if fetch.places != tuple(range(states.shape[1])):
                states = states[:, list(fetch.places)]
            copy = torch.empty(states.shape, dtype=fetch.dtype, pin_memory=stream is not None)
            return copy.copy_(states)
