"""Copies from a device to host memory that the engine's thread doesn't wait for."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.engine.kv.writes import EventWaiter


class Fetches:
    """Copies hidden states on a thread of its own, one after the other, into pinned memory if they are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        # Not the engine's stream, where a copy would wait for the next step.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = EventWaiter("fetches")

    def fetch(
        self, states: Tensor, places: tuple[int, ...], dtype: torch.dtype, then: Callable[[Tensor], object]
    ) -> None:
        """See `Runner.fetch`; `then` is called on the thread, and never if the device has failed."""
        self._thread.then(None, lambda: then(self._copy(states, places, dtype)))

    def _copy(self, states: Tensor, places: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns when the copy is there. Until then the caller holds the device's memory, which is used again."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if places != tuple(range(states.shape[1])):
                states = states[:, list(places)]
            copy = torch.empty(states.shape, dtype=dtype, pin_memory=self._stream is not None)
            return copy.copy_(states)
