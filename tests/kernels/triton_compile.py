"""Compiles the kernels of a launch for GPUs that this machine doesn't have, and describes the results.

The launcher is called with tensors in host memory and a driver that only knows its target. So Triton specializes the
kernel for the same types, constants, warps and stages as in a real launch.
"""

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

SHARED_LIMITS = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Largest shared memory of a program, in bytes, by architecture (CUDA C++ programming guide)."""
ARCHITECTURES = tuple(SHARED_LIMITS)
OWN_INSTRUCTIONS = (90, 100)
"""Architectures that have matrix instructions of their own."""
each_architecture = pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=pytest.mark.more if each in (86, *OWN_INSTRUCTIONS) else pytest.mark.slow)
        for each in ARCHITECTURES
    ],
)
"""Marks a test that compiles for each architecture: in `make test-all` for one of those that are alike."""
SECONDS = 170
"""Timeout of a compilation."""
PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one architecture."""

    name: str
    architecture: int
    warps: int
    registers: int
    """Registers of a thread."""
    stack: int
    """Bytes of a thread's local memory, where registers are spilled."""
    shared: int
    """Shared memory of a program, in bytes."""
    ttgir: str
    ptx: str

    def check_fits(self, stack: int = 0) -> None:
        """Fails if registers are spilled, but for `stack` bytes, or if the architecture has less shared memory."""
        where = f"{self.name} on sm_{self.architecture}: {self.registers} registers"
        assert self.stack <= stack, f"{where}, {self.stack} bytes spilled"
        assert self.shared <= SHARED_LIMITS[self.architecture], f"{where}, {self.shared} bytes of shared memory"

    def check_overlaps(self) -> None:
        """Fails unless every program waits for the kernel before it ahead of all else; on older architectures, none."""
        before, wait, after = self.ptx.partition("griddepcontrol.wait")
        assert bool(wait) == (self.architecture >= 90), self.name
        if wait:
            assert "griddepcontrol.launch_dependents" in after, self.name
            begun = before[before.index(".entry") :]
            assert not re.search(r"\b(ld|st|atom|red|cp)\S*\.global|\bret\b|\bbra\b", begun), f"{self.name}: {begun}"

    @property
    def tensor_cores(self) -> str:
        """The newest matrix instruction that it uses: "tcgen05", "wgmma", "mma", or "" for none."""
        for name, pattern in (("tcgen05", r"tcgen05\.mma"), ("wgmma", r"wgmma\.mma_async"), ("mma", r"mma\.sync")):
            if re.search(pattern, self.ptx):
                return name
        return ""

    @property
    def stages(self) -> int:
        """Buffers of the deepest pipeline of loads through shared memory; 0 for none."""
        buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x\D", self.ttgir)
        return max(map(int, buffers), default=0)


class Compiler:
    """A context with two processes that compile. A launch that was started before isn't compiled again."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._known: dict[Any, Future[list[Compiled]]] = {}

    def __enter__(self) -> "Compiler":
        # Spawned, not forked: Triton must be imported again, without its interpreter.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(PROCESSES, context, initializer=_use_compiler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def start(self, architecture: int, launch: Callable[..., object], *arguments: Any) -> Future[list[Compiled]]:
        """Begins to compile the kernels that `launch(*arguments)` launches, in another process.

        Args:
            launch: a function at the top level of a module.
            arguments: can be pickled and hashed.
        """
        if self._pool is None:
            raise RuntimeError("the compiler isn't entered")
        key = (architecture, launch, arguments)
        if key not in self._known:
            self._known[key] = self._pool.submit(_compile, architecture, launch, arguments)
        return self._known[key]

    def compile(self, architecture: int, launch: Callable[..., object], *arguments: Any) -> list[Compiled]:
        """The kernels that `launch(*arguments)` launches, in order; see `start`."""
        return self.start(architecture, launch, *arguments).result(SECONDS)


def _use_compiler() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


class _Target:
    """The part of a driver that compilation needs."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        # Triton caches compiled kernels by device.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(architecture: int, launch: Callable[..., object], arguments: tuple[Any, ...]) -> list[Compiled]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Compiled] = []
    compile_and_run = JITFunction.run

    def compile_only(self: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = compile_and_run(self, *values, grid=grid, warmup=True, **options)
        compiled.append(_describe(kernel, architecture))

    driver.set_active(_Target(architecture))
    JITFunction.run = compile_only
    try:
        launch(*arguments)
    finally:
        JITFunction.run = compile_and_run
    return compiled


def _describe(kernel: Any, architecture: int) -> Compiled:
    registers, stack = _resource_usage(kernel.asm["cubin"])
    return Compiled(
        name=kernel.metadata.name,
        architecture=architecture,
        warps=kernel.metadata.num_warps,
        registers=registers,
        stack=stack,
        shared=kernel.metadata.shared,
        ttgir=kernel.asm["ttgir"],
        ptx=kernel.asm["ptx"],
    )


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its local memory, by `cuobjdump`."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
