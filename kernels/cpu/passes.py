"""Several passes of a decoder in one run of its program; `native/passes.h` has what it is made of."""

import ctypes

from torch import Tensor

from kvrelay.kernels.cpu.program import fields

GATHER = "kvrelay_gather"
FOLLOW = "kvrelay_follow"


class TokenRows(ctypes.Structure):
    """A buffer of a row for each token; `TokenRows` in passes.h."""

    _fields_ = (*fields(ctypes.c_void_p, "rows"), *fields(ctypes.c_int64, "stride width"))

    @classmethod
    def of(cls, rows: Tensor) -> "TokenRows":
        """The buffer float32 [tokens, width], which the caller keeps."""
        return cls(rows=rows.data_ptr(), stride=rows.stride(0), width=rows.shape[1])


class PassArgs(ctypes.Structure):
    """The arguments of both kernels; `PassArgs` in passes.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows tokens last draws sample step passes"),
        *fields(ctypes.c_int64, "chosen"),
        ("gathered", TokenRows * 3),
    )
