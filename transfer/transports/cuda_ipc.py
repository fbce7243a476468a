"""Links between two processes that see the same GPUs of one machine: the GPU form of `same_host`, over CUDA IPC.

The buffers come from the driver itself. torch's caching allocator would return parts of larger allocations, and an IPC
handle always opens the whole allocation. torch's own sharing keeps shared memory until the other process releases it,
which a killed process never does.

No IPC event orders the two processes: each waits for its own CUDA stream before it announces or acknowledges a frame.

CUDA doesn't define what happens if memory is freed while another process maps it. So a handle comes with the writing
end of a pipe, which the other process closes after it has unmapped the memory; a killed process's ends close by
themselves. The owner frees the memory when its end of the pipe says so.
"""

import ctypes
import hashlib
import os
import select
import stat
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvrelay.engine.kv.pool import wait_for_stream
from kvrelay.transfer.transports.base import LinkError, link_errors
from kvrelay.transfer.transports.same_host import Lent, SameHostTransport, machine_id
from kvrelay.transfer.transports.shm import shm_missing

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_DEVICE_ORDINAL = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL."""


def cuda_ipc_missing() -> str | None:
    """Why this process can't open CUDA IPC links; None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    return shm_missing()


def cuda_ipc_transport() -> SameHostTransport:
    """Links to workers of the same user on this machine that see the same GPUs, from the current device.

    Raises:
        OSError: the driver's library is missing, or the machine's id can't be read.
    """
    # The driver opens handles only within these namespaces, and only those of a GPU that CUDA_VISIBLE_DEVICES shows.
    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("ipc", "pid")]
    devices = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    visible = hashlib.sha256(" ".join([*spaces, *sorted(devices)]).encode()).hexdigest()[:16]
    return SameHostTransport(
        "cuda_ipc", f"{machine_id()}.{visible}", CudaMemory(CudaDriver(torch.cuda.current_device()))
    )


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _DeviceBytes:
    """Device memory in the form that torch uses without a copy; keeps `owner` alive."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class CudaDriver:
    """The CUDA driver's own functions, on the primary context of one device, which torch uses too.

    An address is one of device memory. A failed call raises LinkError.
    """

    def __init__(self, device: int) -> None:
        """
        Raises:
            OSError: the driver's library is missing.
        """
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
        self._device = torch.device("cuda", device)
        # torch makes the primary context first, so its settings are torch's.
        torch.cuda.synchronize(self._device)
        self._context = ctypes.c_void_p()
        handle = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        """A handle of HANDLE_BYTES that opens the allocation at `address` in another process."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation; `close` unmaps it."""
        address = ctypes.c_uint64()
        packed = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), packed, _LAZY_PEER_ACCESS)
        return address.value

    def allocation(self, address: int) -> tuple[int, int]:
        """Address and bytes of the allocation that `address` is in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """The memory as a uint8 tensor [nbytes] on the GPU that it is of, which keeps `owner` alive."""
        ordinal = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address))
        return view_of(address, nbytes, owner, torch.device("cuda", ordinal.value))

    def synchronize(self) -> None:
        """Returns when the device has done what this thread has enqueued."""
        wait_for_stream(self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        # A new thread has no current context.
        self._check("cuCtxSetCurrent", self._context)
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise LinkError(f"cuda_ipc: {name}: {(text.value or b'unknown error').decode()} ({status})")


def view_of(address: int, nbytes: int, owner: object, device: torch.device) -> torch.Tensor:
    """Device memory as a uint8 tensor [nbytes], which keeps `owner` alive.

    Raises:
        LinkError: the memory isn't of `device`; torch would copy it there, and what comes later would never be seen.
    """
    tensor = torch.as_tensor(_DeviceBytes(address, nbytes, owner), device=device)
    if tensor.data_ptr() != address:
        raise LinkError(f"cuda_ipc: memory at {address:#x} is not of {device}, so torch made a copy of it")
    return tensor


class CudaMemory:
    """Device memory that other processes open by a handle; a `same_host.Memory`."""

    on_host = False

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes, int | None]:
        with link_errors("cuda_ipc: a pipe", OSError):
            opened, unmapped = os.pipe()
        try:
            address = self._driver.allocate(nbytes)
        except LinkError:
            os.close(opened)
            os.close(unmapped)
            raise
        tensor = self._owned(address, nbytes, partial(self._free, opened))
        try:
            return tensor, self._driver.export(address), unmapped
        except LinkError:
            os.close(unmapped)
            raise

    def lend(self, tensor: torch.Tensor) -> Lent:
        # A handle opens the whole allocation, of which torch's allocator may have made several tensors. Virtual memory
        # (expandable segments) has no handle.
        address, nbytes = self._driver.allocation(tensor.data_ptr())
        handle = self._driver.export(address)
        with link_errors("cuda_ipc: a pipe", OSError):
            opened, unmapped = os.pipe()
        os.close(opened)  # the memory is freed with the process, so nobody waits for the other end to unmap it
        return Lent(tensor, address, nbytes, handle, unmapped)

    def open(self, nbytes: int, handle: bytes, descriptor: int | None) -> torch.Tensor:
        if len(handle) != HANDLE_BYTES:
            raise LinkError(f"cuda_ipc: a handle of {len(handle)} bytes; allowed: {HANDLE_BYTES}")
        if descriptor is None or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise LinkError("cuda_ipc: a handle came without its pipe")
        unmapped = os.dup(descriptor)
        try:
            address = self._driver.open(handle)
        except LinkError:
            os.close(unmapped)
            raise
        return self._owned(address, nbytes, partial(self._close, unmapped))

    def synchronize(self) -> None:
        self._driver.synchronize()

    def _close(self, unmapped: int, address: int) -> None:
        self._driver.close(address)
        os.close(unmapped)

    def _free(self, opened: int, address: int) -> None:
        """Frees the memory now, or on a thread of its own once the other process has unmapped it."""

        def free() -> None:
            os.read(opened, 1)  # nobody writes: it returns when all writing ends are closed
            os.close(opened)
            self._driver.free(address)

        if select.select([opened], [], [], 0)[0]:
            free()
        else:
            threading.Thread(target=free, name="cuda_ipc free", daemon=True).start()

    def _owned(self, address: int, nbytes: int, release: Callable[[int], None]) -> torch.Tensor:
        """A tensor on this memory; `release(address)` is called when no tensor refers to it any more."""
        owner = _Owner()
        # When the process exits, the driver frees everything itself, and may be unloaded before `release` would run.
        weakref.finalize(owner, release, address).atexit = False
        return self._driver.tensor(address, nbytes, owner)


class _Owner:
    """Lives as long as the tensors on one allocation or mapping."""
