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

    tensor: Tensor
    dtype: torch.dtype
    then: Callable[[Tensor], object]
    ready: torch.cuda.Event | None
    """On a GPU: behind what writes the tensor."""


class Fetches:
    """Copies tensors on a thread of its own, one after the other, into pinned memory if they are on a GPU.

    The thread starts with the first one. It is a daemon, because a copy of a device that hangs never ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fetch(self, tensor: Tensor, dtype: torch.dtype, then: Callable[[Tensor], object]) -> None:
        """Calls `then` with a contiguous copy of this type, on the thread; never, if the device has failed.

        Args:
            tensor: what writes it has ended, or was launched on the current stream. Nothing writes it any more.
        """
        ready = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        self._queue.put(Fetch(tensor, dtype, then, ready))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fetches", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        gpu = self._device.type == "cuda"
        # Not the engine's stream, where a copy would wait for the next step.
        stream = torch.cuda.Stream(self._device) if gpu else None
        while True:
            tensor, dtype, then, ready = self._queue.get()
            try:
                with torch.inference_mode(), torch.cuda.stream(stream):
                    if stream is not None and ready is not None:
                        stream.wait_event(ready)
                    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=gpu)
                    # Waits for its end, so that the device's memory isn't used again before.
                    copy.copy_(tensor)
            except RuntimeError:
                # The engine's next step gets the same error.
                logger.exception("hidden states could not be copied from the device")
            else:
                then(copy)
            del tensor, then
