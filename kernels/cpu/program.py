"""Programs: a step's native kernels, recorded once with their arguments and run by one call.

A layer is a handful of kernels, a model has dozens of layers, and at batch 1 a kernel takes tens of microseconds: to
call each of them from Python would take as long again. Nothing is allocated while a program runs, and the interpreter
is released.
"""

import ctypes
import weakref


class Team:
    """A kept team of threads, the caller of `run` being one of them. Between runs the others sleep.

    One program runs at a time.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        """
        Raises:
            OSError: the threads can't be had.
        """
        library.kvrelay_team_new.restype = ctypes.c_void_p
        team = library.kvrelay_team_new(threads)
        if team is None:
            raise OSError(f"{threads} threads for the forward pass can't be started")
        self.library = library
        self.threads = threads
        self._team = ctypes.c_void_p(team)
        # Not at exit: a thread may be in a run then.
        weakref.finalize(self, library.kvrelay_team_free, self._team).atexit = False

    def run(self, program: "Program") -> None:
        instructions = program.instructions
        self.library.kvrelay_team_run(self._team, instructions, ctypes.c_int64(len(instructions)))


class _Instruction(ctypes.Structure):
    _fields_ = (("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p))


class Program:
    """Kernels with their arguments, in order: each begins when the one before it has ended on all threads."""

    def __init__(self, library: ctypes.CDLL, *steps: tuple[str, ctypes.Structure]) -> None:
        """
        Args:
            steps: exported kernel and its arguments. These are kept, and may be changed between two runs; what they
                point at is the caller's to keep.
        """
        self._args = [args for _, args in steps]
        self.instructions = (_Instruction * len(steps))(
            *(
                _Instruction(ctypes.cast(getattr(library, kernel), ctypes.c_void_p), ctypes.addressof(args))
                for kernel, args in steps
            )
        )
