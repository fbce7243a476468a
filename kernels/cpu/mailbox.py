"""Messages between two ranks over memory that they share; `native/mailbox.h` says how."""

import ctypes

from kvrelay.kernels.cpu.program import fields

MISMATCHED = 3
"""Value of `Mailbox.failure` where a message has another size than its receiver expects; the others are those of
`kernels.cpu.reduce`."""


class Mailbox(ctypes.Structure):
    """`Mailbox` in mailbox.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "memory"),
        *fields(ctypes.c_int64, "slot_bytes spin_ns timeout_ns"),
        *fields(ctypes.c_int32, "slots failure"),
    )


class MessageArgs(ctypes.Structure):
    """`MessageArgs` in mailbox.h."""

    _fields_ = (*fields(ctypes.c_void_p, "box rows"), *fields(ctypes.c_int64, "count row_bytes stride"))


def mailbox_bytes(library: ctypes.CDLL, slots: int, slot_bytes: int) -> int:
    """Size of the memory of a mailbox."""
    library.kvrelay_mailbox_bytes.restype = ctypes.c_int64
    size: int = library.kvrelay_mailbox_bytes(slots, ctypes.c_int64(slot_bytes))
    return size
