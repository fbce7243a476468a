"""Programmatic dependent launch: a kernel is set up on the device while the one before it still runs.

From compute capability 9.0 on, a kernel that was launched with `overlapping()` may begin when all programs of the one
before it in the stream have called `begin_after_inputs`, or ended. Its own programs wait there until that kernel has
ended and all that it has written can be read. So what overlaps is the launch, not the work.

Every program calls it before it reads or writes memory, and before it may return: a program that doesn't wait could end
before the kernel before its own, and the kernel after it would no longer know of that one. A kernel without the option,
such as a product by cuBLAS, a copy, and an event wait for the end of all that was launched before, as always.

`embed` does without, because copies of the step's inputs come before it, and so do the kernels that move KV between
streams, because events are between them and others.
"""

import ctypes
from contextlib import suppress
from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

FIRST_ARCHITECTURE = 90
"""Smallest compute capability, times ten, of GPUs that overlap launches."""
FIRST_DRIVER = 12030
"""Smallest version of CUDA whose driver captures such launches in graphs."""


@triton.jit
def begin_after_inputs(OVERLAP: tl.constexpr):
    """Waits until the kernel before this one has ended; lets the next one be set up."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlapping() -> dict[str, bool]:
    """The constant OVERLAP of a kernel that calls `begin_after_inputs`, and options of its launch."""
    if knobs.runtime.interpret or gdc_wait is None:
        return {"OVERLAP": False}
    target = driver.active.get_current_target()
    can = target.backend == "cuda" and target.arch >= FIRST_ARCHITECTURE and _driver_version() >= FIRST_DRIVER
    return {"OVERLAP": True, "launch_pdl": True} if can else {"OVERLAP": False}


@cache
def _driver_version() -> int:
    """The driver's version of CUDA; FIRST_DRIVER where there is no driver, and kernels are only compiled."""
    version = ctypes.c_int(FIRST_DRIVER)
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value
