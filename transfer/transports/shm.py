"""Links between two processes of one machine through shared memory: the CPU form of `same_host`."""

import fcntl
import mmap
import os
import socket
import sys

import torch

from kvrelay.transfer.transports.base import LinkError, PinnedMap, link_errors
from kvrelay.transfer.transports.same_host import Lent, SameHostTransport, machine_id

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class SharedMemory:
    """Anonymous memory files (memfd); a `same_host.Memory`. They have no name, and vanish with their last mapping."""

    on_host = True

    def __init__(self, pinned: bool = False) -> None:
        """`pinned` if buffers are copied to and from a GPU."""
        self._pinned = pinned

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes, int | None]:
        with link_errors(f"shm: {nbytes} bytes of shared memory", OSError, RuntimeError):
            descriptor = os.memfd_create("kvrelay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, nbytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                return _mapped(descriptor, nbytes, self._pinned), b"", descriptor
            except BaseException:
                os.close(descriptor)
                raise

    def lend(self, tensor: torch.Tensor) -> Lent:
        """Never called: links in host memory send a pool as a stream."""
        raise LinkError("shm: only its own memory has a file")

    def open(self, nbytes: int, handle: bytes, descriptor: int | None) -> torch.Tensor:
        if descriptor is None or handle:
            raise LinkError("shm: a buffer came without its memory file")
        with link_errors(f"shm: a buffer of {nbytes} bytes can't be mapped", OSError):
            # If the owner could still shrink the file, an access behind its end would kill this process (SIGBUS).
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(descriptor).st_size != nbytes:
                raise LinkError(f"shm: a buffer of {nbytes} bytes came with a file of another size, or an unsealed one")
            return _mapped(descriptor, nbytes)

    def synchronize(self) -> None:
        """Returns at once: the CPU's memory operations are done when their call returns."""


def _mapped(descriptor: int, nbytes: int, pinned: bool = False) -> torch.Tensor:
    """The file's bytes, unmapped with the last tensor on them. The mapping is writable because torch requires it."""
    memory = PinnedMap(descriptor, nbytes).pin() if pinned else mmap.mmap(descriptor, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


def shm_missing() -> str | None:
    """Why this process can't open shared-memory links; None if it can."""
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


def shm_transport(pinned: bool = False) -> SameHostTransport:
    """Links to workers of the same user on this machine (in one network namespace, as in one pod).

    `pinned` if the KV pool is on a GPU.

    Raises:
        OSError: the machine's id can't be read.
    """
    return SameHostTransport("shm", machine_id(), SharedMemory(pinned))
