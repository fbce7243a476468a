"""Runs the prefill kernels in Gluon from their source, without a GPU: partitions as threads, hardware as queues.

Triton's interpreter has no Gluon. This one has what those kernels use: numbers are torch's, memory is kept in the order
in which it lies in shared and tensor memory, and barriers count as the hardware's do. One agent runs at a time: a
partition up to its next use of memory or barrier, one copy of the Tensor Memory Accelerator (in any order), or the
oldest product of the tensor cores (in order). Each has a random rank, and the first of those that can go on is taken
(Burckhardt et al.: A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, 2010). So a test with many
seeds sees far-off interleavings. It fails for

    a deadlock                     nobody can go on
    one arrival too many           a barrier would end a phase too early
    a missing fence                tensor cores would read what a thread has stored without `fence_async_shared`
    a race, by a wrong result      memory that a copy is on its way to holds NaN; products read it as late as they may

It has no layouts of registers, no swizzle within 1024 bytes (which is the same for all who read and write there), and
no timing. A wait holds for the whole warpgroup, and the threads of a partition run in step.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from gluon_machine import Machine, Pages
from gluon_values import TORCH, Pointer, Tile, Whole, load, pairwise, reducing, store, where
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def _language(machine: Machine, program: int) -> dict[str, Any]:
    """What replaces the names that the kernels import from Gluon."""
    no_layout = lambda *_, **__: None  # noqa: E731
    language = types.SimpleNamespace(
        program_id=lambda axis: Whole(program),
        load=load,
        store=store,
        arange=lambda start, end, layout=None: Tile(torch.arange(start, end)),
        full=lambda shape, value, dtype, layout=None: Tile(torch.full(shape, value, dtype=TORCH[dtype])),
        zeros=lambda shape, dtype, layout=None: Tile(torch.zeros(shape, dtype=TORCH[dtype])),
        where=where,
        maximum=pairwise(torch.maximum),
        minimum=pairwise(torch.minimum),
        max=reducing(torch.amax),
        sum=reducing(torch.sum),
        exp2=lambda value: Tile(torch.exp2(value.data)),
        convert_layout=lambda value, layout: value,
        static_range=range,
        allocate_shared_memory=machine.allocate_shared,
        warp_specialize=machine.specialize,
        NVMMASharedLayout=gl.NVMMASharedLayout,
        **dict.fromkeys(("SliceLayout", "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout"), no_layout),
        **{name: getattr(gl, name) for name in ("float32", "int32", "int64")},
    )
    barriers = types.SimpleNamespace(
        MBarrierLayout=no_layout,
        init=lambda barrier, count: barrier.init(count),
        wait=machine.wait,
        arrive=machine.arrive,
        expect=machine.expect,
    )
    return {
        "gl": language,
        "mbarrier": barriers,
        "fence_async_shared": machine.fence,
        "async_load": machine.load_box,
        "warpgroup_mma": machine.multiply_in_registers,
        "warpgroup_mma_wait": machine.wait_in_registers,
        "tcgen05_mma": machine.multiply,
        "TensorMemoryLayout": no_layout,
        "allocate_tensor_memory": machine.allocate_tensor,
    }


def _bind(module: types.ModuleType, replaced: dict[str, Any]) -> dict[str, Any]:
    """The module's names, with functions that are kernels' or called by them as plain Python over these names."""
    names: dict[str, Any] = {}
    for name, value in vars(module).items():
        function = getattr(value, "fn", None)
        if isinstance(function, types.FunctionType):
            value = types.FunctionType(function.__code__, names, name, function.__defaults__)
            value.__kwdefaults__ = function.__kwdefaults__
        names[name] = getattr(value, "value", value) if isinstance(value, gl.constexpr) else value
    names.update(replaced)
    return names


class Interpreted:
    """Stands in for a kernel that is launched."""

    def __init__(self, module: types.ModuleType, kernel: Any, seed: int) -> None:
        self.fn = kernel.fn
        self._module = module
        self._seed = seed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*values: Any, num_warps: int) -> None:
            arguments = [_argument(value) for value in values]
            for program in range(grid[0]):
                machine = Machine(self._seed + program)
                _bind(self._module, _language(machine, program))[self.fn.__name__](*arguments)

        return run


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        whole = value.untyped_storage().nbytes() // value.itemsize
        return Pointer(value.as_strided((whole,), (1,), 0), Whole(value.storage_offset()))
    if isinstance(value, TensorDescriptor):
        return Pages(value)
    return Whole(value) if type(value) is int else value


@contextmanager
def interpreted(module: types.ModuleType, seed: int) -> Iterator[None]:
    """Within the context, launches of the module's `PREFILL` are interpreted; the seed orders what runs at a time."""
    prefill = module.PREFILL  # type: ignore[attr-defined]  # each module of such a kernel has it
    module.PREFILL = replace(prefill, kernel=Interpreted(module, prefill.kernel, seed))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.PREFILL = prefill  # type: ignore[attr-defined]
