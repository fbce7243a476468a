"""Links between two processes that see the same GPUs of one machine: device memory that both map (CUDA IPC).

The GPU form of `same_host`. Buffers come from the driver itself: torch's caching allocator would
hand out parts of larger blocks, whose handle gives the other process more than the buffer, and torch's own sharing
keeps what it has shared until the other process says that it is done, which a killed one never does.

No IPC event orders the two processes: each waits for its own stream before it says that a frame is there, or taken.
"""

import ctypes
import hashlib
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.same_host import SameHostTransport, machine_id
from kvrelay.transfer.transports.shm import shm_missing

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


def cuda_ipc_missing() -> str | None:
    """Why this process can't make CUDA IPC links; None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    return shm_missing()


def cuda_ipc_transport() -> SameHostTransport:
    """Links to workers of the same user on this machine that see the same GPUs, from the current device.

    Raises:
        OSError: the driver's library isn't there, or the system doesn't tell which machine this is.
    """
    # The driver opens handles within these namespaces only.
    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("ipc", "pid")]
    devices = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    # Which is not the same set where CUDA_VISIBLE_DEVICES differs: a handle of a GPU that isn't seen can't be opened.
    visible = hashlib.sha256(" ".join([*spaces, *sorted(devices)]).encode()).hexdigest()[:16]
    return SameHostTransport(
        "cuda_ipc", f"{machine_id()}.{visible}", CudaMemory(CudaDriver(torch.cuda.current_device()))
    )


class Driver(Protocol):
    """What `CudaMemory` asks of the GPU's driver. Addresses are of device memory."""

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """A handle of HANDLE_BYTES, by which another process opens the allocation at `address`."""

    def open(self, handle: bytes) -> int: ...

    def close(self, address: int) -> None:
        """Unmaps what `open` mapped."""

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """The memory as a uint8 tensor, which keeps `owner` alive."""

    def synchronize(self) -> None:
        """Returns when what this thread has given the device to do is done."""


class CudaMemory:
    """Device memory that other processes open by its handle."""

    on_host = False

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes, int | None]:
        address = self._driver.allocate(nbytes)
        tensor = self._owned(address, nbytes, self._driver.free)
        return tensor, self._driver.export(address), None

    def open(self, nbytes: int, handle: bytes, descriptor: int | None) -> torch.Tensor:
        if len(handle) != HANDLE_BYTES or descriptor is not None:
            raise LinkError(f"cuda_ipc: a handle of {len(handle)} bytes; allowed: {HANDLE_BYTES}")
        return self._owned(self._driver.open(handle), nbytes, self._driver.close)

    def settle(self) -> None:
        self._driver.synchronize()

    def _owned(self, address: int, nbytes: int, let_go: Callable[[int], None]) -> torch.Tensor:
        """A tensor with whose last reference `let_go(address)` is called."""
        owner = _Owner()
        # At the process's end the driver takes everything back by itself, and may be gone before this is called.
        weakref.finalize(owner, let_go, address).atexit = False
        return self._driver.tensor(address, nbytes, owner)


class _Owner:
    """Lives as long as the tensors on a piece of memory."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _DeviceBytes:
    """Device memory in the form in which torch takes it over without copying."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaDriver:
    """The CUDA driver's own functions, on the primary context of one device, which is torch's too."""

    def __init__(self, device: int) -> None:
        """
        Raises:
            OSError: the driver's library isn't there.
        """
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
        self._device = torch.device("cuda", device)
        # Makes the primary context, and keeps torch's own.
        torch.cuda.synchronize(self._device)
        self._context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ctypes.c_int(self._ordinal()))

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        packed = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), packed, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return torch.as_tensor(_DeviceBytes(address, nbytes, owner), device=self._device)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def _ordinal(self) -> int:
        device = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._device.index))
        return device.value

    def _call(self, name: str, *arguments: Any) -> None:
        # A thread has no context of its own until it is given one.
        self._check("cuCtxSetCurrent", self._context)
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise LinkError(f"cuda_ipc: {name}: {(text.value or b'unknown error').decode()} ({status})")
