"""Memory of this process, and memory that processes of one machine share: files in memory (memfd), which have no name
and vanish with their last descriptor and mapping.
"""

import ctypes
import fcntl
import os
from contextlib import suppress

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


def make_memory_file(nbytes: int) -> int:
    """The descriptor, which the caller closes, of a new file of zeros. Its size can't be changed.

    Raises:
        OSError: there is no memory left, or the system has no such files.
    """
    descriptor = os.memfd_create("kvrelay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_memory_file(descriptor: int, nbytes: int) -> bool:
    """Whether the file is one of `make_memory_file` with this size.

    If its owner could still shrink it, an access behind its end would kill this process (SIGBUS).

    Raises:
        OSError: the file isn't in memory at all.
    """
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    return sealed and os.fstat(descriptor).st_size == nbytes


def return_free_memory() -> None:
    """Gives the system back what the process has freed: the C library keeps it otherwise, a fifth of a model's weights
    after they were packed."""
    with suppress(AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)
