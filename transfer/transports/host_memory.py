"""Buffers of links in host memory. Those of a KV pool on a GPU are pinned.

CUDA copies pageable memory piece by piece through pinned memory of its own, and holds up the calling thread meanwhile.
"""

import mmap
from typing import Any

import torch


def host_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    """A uint8 tensor [nbytes]."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


class PinnedMap(mmap.mmap):
    """A mapping that CUDA copies from and to directly, from `pin` on until it is unmapped."""

    _address: int | None = None

    def pin(self) -> "PinnedMap":
        """
        Raises:
            RuntimeError: CUDA refuses it.
        """
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        _checked(_runtime().cudaHostRegister(address, len(self), 0))
        self._address = address
        return self

    def __del__(self) -> None:
        if self._address is not None:
            _runtime().cudaHostUnregister(self._address)


def _runtime() -> Any:
    return torch.cuda.cudart()


def _checked(status: Any) -> None:
    if int(status):
        raise RuntimeError(f"cudaHostRegister: {status}")
