"""A stand-in for a GPU's driver: "device memory" is the CPU's, and a handle opens it from within this process only."""

import secrets
import threading

import numpy as np
import torch

from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.cuda_ipc import HANDLE_BYTES


class DriverTwin:
    """Keeps account of what is allocated and mapped; both ends of a link share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allocated: dict[int, torch.Tensor] = {}
        self._exported: dict[bytes, int] = {}
        self._mapped: dict[int, int] = {}
        self.synchronized = 0
        self.lent: list[torch.Tensor] = []
        """Memory that others have allocated."""
        self.freed_while_mapped = 0
        """What CUDA doesn't define."""

    @property
    def in_use(self) -> int:
        """Allocations and mappings that nobody has let go of."""
        return len(self._allocated) + len(self._mapped)

    def allocate(self, nbytes: int) -> int:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            self._allocated[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, address: int) -> None:
        with self._lock:
            self.freed_while_mapped += address in self._mapped
            del self._allocated[address]

    def export(self, address: int) -> bytes:
        handle = secrets.token_bytes(HANDLE_BYTES)
        with self._lock:
            self._exported[handle] = address
        return handle

    def allocation(self, address: int) -> tuple[int, int]:
        """Of memory that `lent` names."""
        for tensor in self.lent:
            base = tensor.untyped_storage().data_ptr()
            if base <= address < base + tensor.untyped_storage().nbytes():
                return base, tensor.untyped_storage().nbytes()
        raise LinkError("cuda_ipc: no allocation that has a handle")

    def open(self, handle: bytes) -> int:
        with self._lock:
            if handle not in self._exported:
                raise LinkError("cuda_ipc: no such handle")
            address = self._exported[handle]
            self._mapped[address] = self._mapped.get(address, 0) + 1
        return address

    def close(self, address: int) -> None:
        with self._lock:
            self._mapped[address] -= 1
            if not self._mapped[address]:
                del self._mapped[address]

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(_HostBytes(address, nbytes, owner)))

    def synchronize(self) -> None:
        self.synchronized += 1


class _HostBytes:
    """Memory in the form in which numpy takes it over without copying; as `_DeviceBytes` for a GPU's."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
