"""Programs: the native kernels of a step, recorded once with their arguments and run by one call.

A layer is a few kernels, a model has dozens of layers, and at batch 1 a kernel takes tens of microseconds. Calling each
one from Python would double that. While a program runs, nothing is allocated and the interpreter is released.
"""

import ctypes
import weakref
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)
LINE = 64
"""Bytes of a cache line."""


def fields(ctype: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type for a `ctypes.Structure`; `names` are separated by spaces."""
    return tuple((name, ctype) for name in names.split())


class Buffer(Generic[Number]):
    """Array that is kept for kernels to read and write: asking a new one for its address takes longer than filling this
    one.
    """

    def __init__(self, dtype: type[Number]) -> None:
        self._array: NDArray[Number] = np.empty(0, dtype)
        self.address = 0
        """Address of the array that `take` returned last."""

    def take(self, count: int) -> NDArray[Number]:
        """[count] numbers of any value, valid until the next call."""
        if count > len(self._array):
            self._array = np.empty(2 * count, self._array.dtype)
            self.address = self._array.ctypes.data
        return self._array[:count]


class Team:
    """A team of threads that lives as long as this object. The caller of `run` is one of them; the others sleep between
    runs. Runs one program at a time.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        """
        Raises:
            OSError: the threads can't be started.
        """
        library.kvrelay_team_new.restype = ctypes.c_void_p
        team = library.kvrelay_team_new(threads)
        if team is None:
            raise OSError(f"{threads} threads for the forward pass can't be started")
        self.library = library
        self.threads = threads
        self._workspace: Buffer[np.uint8] = Buffer(np.uint8)
        self._team = ctypes.c_void_p(team)
        self._run = library.kvrelay_team_run
        pointer = ctypes.c_void_p
        self._run.argtypes = pointer, pointer, ctypes.c_int64, pointer, pointer
        # Not at exit, when a thread may still be in a run.
        weakref.finalize(self, library.kvrelay_team_free, self._team).atexit = False

    def workspace(self, size: int) -> int:
        """Address of `size` bytes for a program of one kernel, at a cache line's border; valid until the next call."""
        self._workspace.take(size + LINE)
        return -(-self._workspace.address // LINE) * LINE

    def run(self, program: "Program", passes: "ctypes.c_int64 | None" = None) -> None:
        """Returns when all of the program's kernels have ended, or one has stopped it.

        Args:
            passes: the program runs again as long as this, which its kernels change, is above 0; None runs it once.
        """
        again = None if passes is None else ctypes.byref(passes)
        self._run(self._team, program.instructions, program.count, again, program.stop)


class _Instruction(ctypes.Structure):
    _fields_ = fields(ctypes.c_void_p, "kernel args")


class Program:
    """Kernels with their arguments, in order: each starts after the previous one has ended on all threads."""

    def __init__(self, library: ctypes.CDLL, *steps: tuple[str, ctypes.Structure], stop: int | None = None) -> None:
        """
        Args:
            steps: the name of an exported kernel and its arguments. The arguments are kept and may be changed between
                two runs; the caller keeps what they point to.
            stop: address of an int32, which the caller keeps: a run ends behind the kernel that makes it other than 0.
        """
        self.stop = stop
        self._args = [args for _, args in steps]
        self.instructions = (_Instruction * len(steps))(
            *(
                _Instruction(ctypes.cast(getattr(library, kernel), ctypes.c_void_p), ctypes.addressof(args))
                for kernel, args in steps
            )
        )
        self.count = len(steps)
