"""Launches of Triton's kernels that are repeated with other tensors.

`kernel[grid](...)` looks at each argument anew to find the code that was compiled for it, which takes the host longer
than many kernels take the device. What the layers of a model launch differs by a few pointers only. So the first of
them goes through Triton, and the others repeat it: they call the compiled kernel, `compiled[grid](...)`.

Of Triton (3.6, 3.7 and 3.9) this relies on: `kernel[grid](...)` returns the compiled kernel (None if it is
interpreted); `compiled[grid]` takes all parameters in their order, pointers as tensors or as integers, and launches on
the current stream; compiled code is for the types of tensors, for whether their addresses are multiples of 16, and for
whether an integer is 1, a multiple of 16, or wider than 32 bits. Compiled kernels that don't tell that they take all
parameters, as those of older versions, aren't repeated: Triton launches each time.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)


class Launch:
    """A kernel that was launched, and can be again."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], values: dict[str, Any], options: dict[str, Any]) -> None:
        """Launches the kernel.

        Args:
            values: by parameter, in order.
            options: of the compiler, such as `num_warps`.
        """
        self._kernel = kernel
        self._grid = grid
        self._values = values
        self._options = options
        self._places = {name: (place, _trait(value)) for place, (name, value) in enumerate(values.items())}
        self._passed = [value.data_ptr() if isinstance(value, Tensor) else value for value in values.values()]
        compiled = kernel[grid](*values.values(), **options)
        self._run: Callable[..., None] | None = None
        if compiled is not None and _takes_all(compiled, tuple(values)):
            self._run = compiled[(*grid, 1, 1)[:3]]

    def repeat(self, **changes: Tensor | int | None) -> None:
        """The same launch with other arguments, by parameter: tensors of the same shapes and strides, and integers.

        Their shapes and devices aren't checked. Those that the kernel doesn't take are left out, so that several
        kernels can be given the same. With arguments that other code would be compiled for, Triton launches it.
        """
        passed, places, run = self._passed.copy(), self._places, self._run
        for name, value in changes.items():
            if name not in places:
                continue
            place, trait = places[name]
            if value is None or isinstance(value, int):
                passed[place] = value
                changed = _trait(value) != trait
            else:
                address = passed[place] = value.data_ptr()
                changed = (value.dtype, address % 16 == 0) != trait
            if changed:
                run = None
        if run is not None:
            run(*passed)
        else:
            values = {name: changes.get(name, value) for name, value in self._values.items()}
            self._kernel[self._grid](*values.values(), **self._options)

    def without(self, *names: str) -> "Launch":
        """This launch, which keeps none of these tensors if it has them: each repetition must give others."""
        for name in names:
            if name in self._places:
                self._values[name] = self._passed[self._places[name][0]] = None
        return self


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Launch:
    """Launches `kernel[grid](*arguments, **options)`."""
    names = _parameters(kernel)
    values = dict(zip(names, arguments, strict=False))
    for name in names[len(arguments) :]:
        values[name] = options.pop(name)
    return Launch(kernel, grid, values, options)


def _trait(value: Any) -> object:
    """What compiled code depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return value


def _takes_all(compiled: Any, parameters: tuple[str, ...]) -> bool:
    """Whether `compiled[grid]` takes these, which are all parameters of the kernel: its signature has them, constants
    included.
    """
    signature = getattr(getattr(compiled, "src", None), "signature", None)
    if isinstance(signature, dict) and tuple(signature) == parameters and hasattr(compiled, "__getitem__"):
        return True
    _tell_slow()
    return False


@cache
def _tell_slow() -> None:
    """Once a process."""
    logger.warning("this version of Triton has no launch that can be repeated; the host takes longer for each kernel")


@cache
def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kernel.fn).parameters)
