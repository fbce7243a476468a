"""Records what is launched on a device: torch's operations and Triton's kernels, with the tensors that they were given.

A recording can be replayed as a CUDA graph is: the same operations on the same tensors with the same numbers, and no
Python of the code that was recorded. Kernels are interpreted, so this works on CPU tensors only.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

READS = {torch.ops.aten._local_scalar_dense.default}
"""Operations that wait for the device, which none may do while a graph is captured."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One operation."""

    name: str
    call: Callable[[], Any]
    given: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    specialization: tuple[object, ...] = ()
    """Properties of its arguments that Triton compiles a kernel for; empty if it is no kernel."""

    @property
    def on_device(self) -> bool:
        """Whether a GPU would be given something to do: no view, and no allocation."""
        if self.specialization or self.name.split(".")[1].endswith("_"):
            return True
        known = {tensor.untyped_storage().data_ptr() for tensor in self.given}
        made = any(result.untyped_storage().data_ptr() not in known for result in self.results)
        return made and not self.name.startswith(("aten.empty", "aten.new_empty"))

    def replay(self) -> None:
        """The operation on the same tensors; what it allocates anew goes to where its first result is."""
        again = tensors(self.call())
        for result, other in zip(self.results, again, strict=True):
            if result.data_ptr() != other.data_ptr():
                result.copy_(other)


class Launches(TorchDispatchMode):
    """Records all operations of its context, but those of replayed graphs."""

    _replaying = False

    def __init__(self, reads: bool = True) -> None:
        """Without `reads`, an operation that waits for the device fails."""
        super().__init__()
        self.all: list[Launch] = []
        self._reads = reads
        self._in_kernel = False
        self._stack = contextlib.ExitStack()

    @property
    def kernels(self) -> list[Launch]:
        """Launches of Triton's kernels."""
        return [launch for launch in self.all if launch.specialization]

    def __enter__(self) -> "Launches":
        run, recorder = InterpretedFunction.run, self

        def recorded(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            def call() -> None:
                recorder._in_kernel = True
                try:
                    run(kernel, *args, grid=grid, warmup=warmup, **options)
                finally:
                    recorder._in_kernel = False

            call()
            what = specialization(kernel, args, options)
            recorder.all.append(Launch(kernel.__name__, call, tensors((args, options)), (), what))

        self._stack.enter_context(mock.patch.object(InterpretedFunction, "run", recorded))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if not self._reads and not self._in_kernel and func in READS:
            raise AssertionError(f"{func} waits for the device")
        result = func(*args, **options)
        if not self._in_kernel and not Launches._replaying:
            found = tensors(result)
            self.all.append(Launch(str(func), lambda: func(*args, **options), tensors((args, options)), found))
        return result

    def replay(self) -> None:
        for launch in self.all:
            launch.replay()


def tensors(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def specialization(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[object, ...]:
    """The kernel and, for each argument, what Triton's cache of compiled kernels distinguishes."""
    fixed = set(kernel.kwargs.get("do_not_specialize") or ())
    parameters = inspect.signature(kernel.fn).parameters
    values = dict(zip(parameters, args, strict=False)) | options
    key: list[object] = [kernel.__name__]
    for name, value in values.items():
        constant = name in parameters and "constexpr" in str(parameters[name].annotation)
        if isinstance(value, torch.Tensor):
            key.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif constant or name not in parameters or not isinstance(value, int):
            key.append((name, value))
        else:
            wide = not -(2**31) <= value < 2**31
            key.append((name, wide, *(() if name in fixed else (value == 1, value % 16 == 0))))
    return tuple(key)


class RecordedGraphs:
    """Stands in for `cuda_capture`: makes graphs that replay what was launched while they were captured."""

    def __init__(self) -> None:
        self.captured: list[Launches] = []
        self.replayed: list[Launches] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator["RecordedGraph"]:
        with Launches(reads=False) as launches:
            self.captured.append(launches)
            yield RecordedGraph(self, launches)


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """Implements `Graph`."""

    graphs: RecordedGraphs
    launches: Launches

    def replay(self) -> None:
        self.graphs.replayed.append(self.launches)
        Launches._replaying = True
        try:
            self.launches.replay()
        finally:
            Launches._replaying = False
