"""Sums, gathers and messages over memory that the ranks of one machine share; `native/reduce.h` and `native/mailbox.h`
say how.
"""

import ctypes

from kvrelay.kernels.cpu.program import fields

ALL_REDUCE = "kvrelay_all_reduce"
SLOT_BYTES = 2**18
"""Size in bytes of a slot: large parts go in pieces of it, which stay in the cache of the cores that exchange them."""
TIMED_OUT, MISMATCHED = 1, 3
"""Values of `RankGroup.failure` and `Mailbox.failure` where a rank didn't come in time, and where it sent too much, or
a message of another size than its receiver expects; any other but 0 after an abort."""


class RankGroup(ctypes.Structure):
    """`RankGroup` in reduce.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "memory"),
        *fields(ctypes.c_int64, "slot_bytes spin_ns timeout_ns"),
        *fields(ctypes.c_int32, "rank ranks lanes threads failure"),
    )


class ReduceArgs(ctypes.Structure):
    """`ReduceArgs` in reduce.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows group part out"),
        *fields(ctypes.c_int64, "part_stride out_stride width"),
        *fields(ctypes.c_int32, "type add"),
    )


class AllGatherArgs(ctypes.Structure):
    """`AllGatherArgs` in reduce.h."""

    _fields_ = (*fields(ctypes.c_void_p, "group part out"), *fields(ctypes.c_int64, "bytes"))


class AllToAllArgs(ctypes.Structure):
    """`AllToAllArgs` in reduce.h."""

    _fields_ = (*fields(ctypes.c_void_p, "group part out sent received"), *fields(ctypes.c_int64, "room"))


def shared_bytes(library: ctypes.CDLL, ranks: int, lanes: int) -> int:
    """Size of the memory that a group shares, with slots of SLOT_BYTES."""
    library.kvrelay_ranks_bytes.restype = ctypes.c_int64
    size: int = library.kvrelay_ranks_bytes(ranks, lanes, ctypes.c_int64(SLOT_BYTES))
    return size


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
