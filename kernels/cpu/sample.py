"""Choosing tokens on the native kernels; `native/sample.h` says how, and what the arguments are."""

import ctypes
import math
import struct

from kvrelay.kernels.cpu.program import fields

SAMPLE = "kvrelay_sample"

ROW = struct.Struct("=Qqdqff")
"""Layout of one row, `SampleRow` in sample.h."""
LARGEST = 3.4028234e38
"""Largest finite float32."""


class SampleArgs(ctypes.Structure):
    """`SampleArgs` in sample.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows input draws tokens largest workspace"),
        *fields(ctypes.c_int64, "input_stride width"),
    )


def pack_row(seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float) -> bytes:
    """How one row's token is chosen, as `ROW`.

    Args:
        seed: from 0 to 2**64 - 1.
        position: of the token to choose, in its sequence.
        temperature: 0 is greedy.
        top_k, top_p, min_p: 0, 1 and 0 keep all tokens.
    """
    lowest = math.log(min_p) if min_p > 0 else -math.inf
    return ROW.pack(seed, position, top_p, top_k, min(temperature, LARGEST), lowest)


def workspace_floats(threads: int, width: int) -> int:
    """Numbers that the kernel needs for itself."""
    return threads * 2 * (-(-width // 16) * 16)
