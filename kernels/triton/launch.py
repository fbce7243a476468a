"""Launches of Triton's kernels that are repeated with other tensors.

`kernel[grid](...)` looks at each argument anew to find the code that was compiled for it, which takes the host longer
than many kernels take the device. What one layer launches in step after step differs in a few pointers and in the grid
only. So the first launch goes through Triton, and those that repeat it call the launcher of the compiled kernel with a
list of arguments, in which these pointers are replaced.

Of Triton (3.6, 3.7 and 3.9) this relies on: `kernel[grid](...)` returns the compiled kernel (None if it is
interpreted); `compiled.run` takes the grid, the stream, the function, its metadata, those of the launch, two hooks, and
all parameters in their order, pointers as tensors or as integers; compiled code is for the types of tensors, for
whether their addresses are multiples of 16, and for integers but those that aren't specialized. Compiled kernels that
don't tell that they take all parameters, as those of older versions, aren't repeated: Triton launches each time.
Profilers that hook Triton's launches don't see repeated ones; those that ask the driver do.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

logger = logging.getLogger(__name__)
HEAD = 9
"""Number of arguments that `compiled.run` takes before the kernel's own."""
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Largest shared memory of a program in KiB, by compute capability times ten (CUDA C++ programming guide, table of
technical specifications)."""


def shared_bytes(architecture: int | None = None) -> int:
    """The largest shared memory of a program in bytes; the least that any GPU has, if it isn't known.

    Args:
        architecture: compute capability, times ten; the current device's unless given, or 90 in the interpreter.
    """
    if architecture is None:
        architecture = 90 if knobs.runtime.interpret else driver.active.get_current_target().arch
    return SHARED_KIB.get(architecture, min(SHARED_KIB.values())) * 1024


def processors_of(device: torch.device) -> int:
    """Multiprocessors of the GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel that was launched."""

    kernel: Any
    values: dict[str, Any]
    """Arguments by parameter, in order."""
    options: dict[str, Any]
    """Options of the compiler, such as `num_warps`."""
    compiled: Any
    """Compiled kernel; None if the kernel is interpreted."""

    def repeating(self, *names: str) -> "Repeat":
        """A launch that repeats this one with other values of these parameters, which it doesn't keep."""
        return Repeat(self, names)


class Repeat:
    """A launch that can be repeated with another grid and other values of some parameters. Not thread-safe."""

    def __init__(self, launched: Launch, names: tuple[str, ...]) -> None:
        """
        Raises:
            ValueError: the kernel hasn't these parameters, or code is compiled for the value of one of them.
        """
        unknown = sorted(set(names) - set(launched.values))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} can't vary; allowed: {', '.join(launched.values)}")
        self._kernel, self._options = launched.kernel, launched.options
        self._names = names
        self._values = {name: None if name in names else value for name, value in launched.values.items()}
        parameters = list(launched.values)
        varying = {name: launched.values[name] for name in names}
        tensors = [name for name, value in varying.items() if isinstance(value, Tensor)]
        if tensors != [*names[: len(tensors)]]:
            raise ValueError(f"{', '.join(names)} vary; allowed: tensors ({', '.join(tensors)}) before numbers")
        self._places = [HEAD + parameters.index(name) for name in tensors]
        self._number_places = [HEAD + parameters.index(name) for name in names[len(tensors) :]]
        self._run: Callable[..., None] | None = None
        compiled = launched.compiled
        if compiled is None or not _takes_all(compiled, tuple(parameters)) or not all(map(_aligned, varying.values())):
            return
        for name in names[len(tensors) :]:
            if name not in (launched.kernel.do_not_specialize or ()):
                raise ValueError(f"{name} is {varying[name]!r}, for which code is compiled; allowed: what isn't so")
        # The compiled kernel is kept, because its code is unloaded with it.
        self._compiled, self._run = compiled, compiled.run
        code = compiled.function, compiled.packed_metadata, None, None, None
        self._passed = [0, 0, 0, 0, *code, *map(_passed, self._values.values())]
        """Arguments of `run`: grid and stream, the kernel, and the kernel's arguments."""
        self._stream: Callable[[int], int] = driver.active.get_current_stream
        self._device: int = driver.active.get_current_device()

    def __call__(self, grid: tuple[int, int, int], *values: Tensor | int) -> None:
        """Launches on the current stream.

        Args:
            values: of the parameters that vary, in their order: tensors of the types, the strides and the device of the
                first launch, which isn't checked, and integers of 32 bits. A tensor whose address is no multiple of 16
                is launched by Triton.

        Raises:
            ValueError: there are more or fewer values.
        """
        if len(values) != len(self._names):
            raise ValueError(f"{len(values)} values; allowed: those of {', '.join(self._names)}")
        run, addresses = self._run, 0
        if run is not None:
            passed = self._passed
            for place, value in zip(self._places, values, strict=False):
                passed[place] = address = value.data_ptr()  # type: ignore[union-attr]  # tensors come first
                addresses |= address
            if not addresses & 15:
                if self._number_places:
                    for place, value in zip(self._number_places, values[len(self._places) :], strict=True):
                        passed[place] = value
                passed[0], passed[1], passed[2] = grid
                passed[3] = self._stream(self._device)
                run(*passed)
                return
        given = self._values | dict(zip(self._names, values, strict=True))
        self._kernel[grid](*given.values(), **self._options)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Launch:
    """Launches `kernel[grid](*arguments, **options)`."""
    names = _parameters(kernel)
    values = dict(zip(names, arguments, strict=False))
    for name in names[len(arguments) :]:
        values[name] = options.pop(name)
    return Launch(kernel, values, options, kernel[grid](*values.values(), **options))


def _passed(value: Any) -> Any:
    """The value as a launcher takes it: tensors as addresses, also those in tuples."""
    if isinstance(value, tuple):
        return tuple(map(_passed, value))
    return value.data_ptr() if isinstance(value, Tensor) else value


def _aligned(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.data_ptr() % 16 == 0


def _takes_all(compiled: Any, parameters: tuple[str, ...]) -> bool:
    """Whether `compiled.run` takes these, which are all parameters of the kernel: its signature has them, constants
    included.
    """
    signature = getattr(getattr(compiled, "src", None), "signature", None)
    has = all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
    if isinstance(signature, dict) and tuple(signature) == parameters and has:
        return True
    _tell_slow()
    return False


@cache
def _tell_slow() -> None:
    """Logs once per process that launches aren't repeated, and so are slow."""
    logger.warning("this version of Triton has no launch that can be repeated; the host takes longer for each kernel")


@cache
def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kernel.fn).parameters)
