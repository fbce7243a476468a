"""Several passes of a decoder in one run of its program; `native/passes.h` has what it is made of."""

import ctypes

from kvrelay.kernels.cpu.program import fields

GATHER = "kvrelay_gather"
FOLLOW = "kvrelay_follow"


class PassArgs(ctypes.Structure):
    """The arguments of both kernels; `PassArgs` in passes.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows tokens hidden last draws sample step passes"),
        *fields(ctypes.c_int64, "hidden_stride width chosen"),
    )
