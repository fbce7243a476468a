"""Links between two processes of one machine through shared memory: the CPU form of `same_host`."""

import fcntl
import mmap
import os
import socket
import sys

import torch

from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.same_host import SameHostTransport, machine_id

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class SharedMemory:
    """Anonymous files of memory (memfd): they have no name, and are gone when nobody maps them any more."""

    on_host = True

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes, int | None]:
        try:
            descriptor = os.memfd_create("kvrelay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, nbytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                return _mapped(descriptor, nbytes), b"", descriptor
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise LinkError(f"shm: {nbytes} bytes of shared memory: {error}") from error

    def open(self, nbytes: int, handle: bytes, descriptor: int | None) -> torch.Tensor:
        if descriptor is None or handle:
            raise LinkError("shm: a buffer came without the file that it lies in")
        try:
            # An owner that could still shrink the file could end this process by a bus error.
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(descriptor).st_size != nbytes:
                raise LinkError(
                    f"shm: the file of a buffer of {nbytes} bytes is of another size, or may still change it"
                )
            return _mapped(descriptor, nbytes)
        except OSError as error:
            raise LinkError(f"shm: a buffer of {nbytes} bytes can't be mapped: {error}") from error

    def settle(self) -> None:
        """What a thread does to the CPU's memory is done when it returns."""


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """The file's bytes; unmapped with the last tensor on them. Mapped writable, since torch knows no other tensors."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def shm_missing() -> str | None:
    """Why this process can't make shared-memory links; None if it can."""
    if sys.platform != "linux":
        return "needs Linux"
    try:
        machine_id()
        _, _, descriptor = SharedMemory().allocate(1)
        if descriptor is not None:
            os.close(descriptor)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind("")
    except (OSError, LinkError) as error:
        return str(error)
    return None


def shm_transport() -> SameHostTransport:
    """Links to workers of the same user on this machine (in one network namespace, as in one pod).

    Raises:
        OSError: the system doesn't tell which machine this is.
    """
    return SameHostTransport("shm", machine_id(), SharedMemory())
