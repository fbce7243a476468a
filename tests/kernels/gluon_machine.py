"""One program of a kernel in Gluon: its partitions, its memory, its barriers; see `gluon_interpreter`."""

import random
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from gluon_values import TORCH, Tile
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvrelay.kernels.gluon_prefill import TYPES

SECONDS = 30
"""Limit of one step of a partition."""


class Stopped(Exception):
    """Ends a partition of a program that has failed."""


class Barrier:
    """An `mbarrier`."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._count = self._pending = self._bytes = self.phase = 0

    def init(self, count: int) -> None:
        self._count = self._pending = count

    def arrive(self, expected: int = 0) -> None:
        self._pending -= 1
        self._bytes += expected
        if self._pending < 0:
            raise RuntimeError("an arrival too many at a barrier")
        self._end_phase()

    def receive(self, size: int) -> None:
        self._bytes -= size
        self._end_phase()

    def _end_phase(self) -> None:
        if not self._pending and not self._bytes:
            self.phase ^= 1
            self._pending = self._count


class Shared:
    """A part of an allocation of shared memory: for each of its numbers, where it is."""

    def __init__(self, machine: "Machine", memory: Tensor, places: Tensor, dtype: Any, unfenced: Tensor) -> None:
        self._machine, self.memory, self.places, self.dtype = machine, memory, places, dtype
        self.unfenced = unfenced
        """Of each number of the allocation, whether a thread has stored it without a fence since."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.places.shape)

    def _part(self, places: Tensor) -> "Shared":
        return Shared(self._machine, self.memory, places, self.dtype, self.unfenced)

    def index(self, index: int) -> "Shared":
        return self._part(self.places[int(index)])

    def reshape(self, shape: list[int]) -> "Shared":
        return self._part(self.places.reshape(shape))

    def permute(self, order: list[int]) -> "Shared":
        return self._part(self.places.permute(order))

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Shared":
        if dtype != self.dtype or self.places.numel() != self.memory.numel():
            raise NotImplementedError("only a whole allocation, as the same type")
        return self._part(_places(shape, layout))

    def read(self) -> Tensor:
        return self.memory[self.places]

    def write(self, data: Tensor | float) -> None:
        self.memory[self.places] = data

    def load(self, layout: Any) -> Tile:
        self._machine.pause()
        return Tile(self.read())

    def store(self, value: Tile) -> None:
        self._machine.pause()
        self.unfenced[self.places] = True
        self._machine.stored.setdefault(threading.current_thread(), []).append(self)
        self.write(value.data)


def _places(shape: list[int], layout: Any) -> Tensor:
    """Where the numbers of an allocation are: in each buffer, columns of the layout's width, one after another."""
    *_, columns = inner = shape[-layout.rank :]
    rows = torch.Size(inner[:-1]).numel()
    wide = layout.swizzle_byte_width * 8 // layout.element_bitwidth or columns
    buffers = torch.Size(shape[: -layout.rank]).numel()
    physical = torch.arange(buffers * rows * columns).view(buffers, columns // wide, rows, wide)
    return physical.transpose(1, 2).reshape(shape)


class TensorMemory:
    """A part of an allocation of tensor memory."""

    def __init__(self, machine: "Machine", data: Tensor) -> None:
        self._machine, self.data = machine, data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def index(self, index: int) -> "TensorMemory":
        return TensorMemory(self._machine, self.data[int(index)])

    def slice(self, start: int, length: int) -> "TensorMemory":
        return TensorMemory(self._machine, self.data[:, start : start + length])

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "TensorMemory":
        data = self.data.view(TORCH[dtype])
        if list(data.shape) != shape:
            raise ValueError(f"tensor memory of {list(data.shape)} as {shape}")
        return TensorMemory(self._machine, data)

    def get_reg_layout(self, num_warps: int) -> None:
        return None

    def read(self) -> Tensor:
        return self.data

    def load(self, layout: Any = None) -> Tile:
        self._machine.pause()
        return Tile(self.data.clone())

    def store(self, value: Tile) -> None:
        self._machine.pause()
        if value.data.dtype != self.data.dtype:
            raise TypeError(f"{value.data.dtype} into tensor memory of {self.data.dtype}")
        self.data.copy_(value.data)


class Pending:
    """A product of a warpgroup that is under way: computed at once, or when it is waited for."""

    def __init__(self, compute: Callable[[], Tensor], at_once: bool) -> None:
        self._compute = compute
        self._result = compute() if at_once else None

    def result(self) -> Tile:
        return Tile(self._compute() if self._result is None else self._result)


class Machine:
    """What runs one program: its partitions, its memory, the copies and products under way."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._copies: list[Callable[[], None]] = []
        self._products: list[Callable[[], None]] = []
        self._ready: dict[threading.Thread, Callable[[], bool]] = {}
        self._turns: dict[threading.Thread, threading.Semaphore] = {}
        self._ranks: dict[Any, float] = {}
        self._back = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self.stored: dict[threading.Thread, list[Shared]] = {}
        """By partition, what it has stored into shared memory since its last fence."""

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Called by a partition: lets others run, and goes on when it is chosen and `ready`."""
        thread = threading.current_thread()
        if thread not in self._turns:
            return
        self._ready[thread] = ready
        self._back.release()
        self._turns[thread].acquire()
        if self._failure is not None:
            raise Stopped

    def specialize(self, partitions: Any, warps: list[int], registers: list[int]) -> None:
        for function, arguments in partitions:
            thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
            self._turns[thread] = threading.Semaphore(0)
            self._ready[thread] = lambda: True
            thread.start()
        while self._ready or self._copies or self._products:
            agents: list[Any] = [thread for thread, ready in self._ready.items() if ready()]
            agents += self._copies + self._products[:1]
            try:
                if not agents:
                    raise RuntimeError(f"deadlock: {len(self._ready)} partitions wait")
                self._turn(max(agents, key=self._rank))
            except Exception as error:  # noqa: BLE001 - it is raised again when all have stopped
                self._failure = self._failure or error
            if self._failure is not None:
                for turn in self._turns.values():
                    turn.release()
                raise self._failure

    def _rank(self, agent: Any) -> float:
        """Who goes first. It rarely changes, so that some agents are left behind by far."""
        if agent not in self._ranks or self._random.random() < 0.02:
            self._ranks[agent] = self._random.random()
        return self._ranks[agent]

    def _turn(self, agent: Any) -> None:
        if agent in self._copies:
            self._copies.remove(agent)
            agent()
        elif agent in self._products:
            self._products.remove(agent)
            agent()
        else:
            del self._ready[agent]
            self._turns[agent].release()
            if not self._back.acquire(timeout=SECONDS):
                raise TimeoutError(f"a partition runs for more than {SECONDS} seconds")

    def _run(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._turns[threading.current_thread()].acquire()
        try:
            if self._failure is None:
                function(*arguments)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - the thread of the test raises it
            self._failure = self._failure or error
        self._back.release()

    # What a kernel calls.

    def allocate_shared(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype == gl.int64:
            barriers = [Barrier(self) for _ in range(shape[0])]
            return types.SimpleNamespace(index=lambda index: barriers[int(index)])
        memory = torch.full((torch.Size(shape).numel(),), torch.nan, dtype=TORCH[dtype])
        return Shared(self, memory, _places(shape, layout), dtype, torch.zeros(len(memory), dtype=torch.bool))

    def allocate_tensor(self, dtype: Any, shape: list[int], layout: Any) -> TensorMemory:
        return TensorMemory(self, torch.full(shape, torch.nan, dtype=TORCH[dtype]))

    def wait(self, barrier: Barrier, phase: int) -> None:
        self.pause(lambda: barrier.phase != phase)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.pause()
        for _ in range(count):
            barrier.arrive()

    def expect(self, barrier: Barrier, size: int) -> None:
        self.pause()
        barrier.arrive(size)

    def fence(self) -> None:
        self.pause()
        for part in self.stored.pop(threading.current_thread(), []):
            part.unfenced[part.places] = False

    def load_box(self, pages: "Pages", corner: list[int], barrier: Barrier, target: Shared) -> None:
        """A copy of the Tensor Memory Accelerator: zeros for what lies outside of the tensor."""
        self.pause()
        target.write(torch.nan)

        def copy() -> None:
            axes = [
                torch.arange(int(first), int(first) + size) for first, size in zip(corner, target.shape, strict=True)
            ]
            kept = [axis.clamp(0, size - 1) for axis, size in zip(axes, pages.tensor.shape, strict=True)]
            box = pages.tensor[kept[0]][:, kept[1]][:, :, kept[2]].clone()
            for dim, (axis, inside) in enumerate(zip(axes, kept, strict=True)):
                box.index_fill_(dim, (axis != inside).nonzero().flatten(), 0)
            target.write(box)
            barrier.receive(box.nbytes)

        self._copies.append(copy)

    def multiply(self, a: Any, b: Any, acc: TensorMemory, *, use_acc: Any = True, mbarriers: list[Barrier]) -> None:
        """`tcgen05_mma`."""
        self.pause()
        self._check_fenced(a, b)

        def product() -> None:
            result = a.read().float() @ b.read().float()
            acc.data.copy_(result + acc.data if use_acc else result)
            for barrier in mbarriers:
                barrier.arrive()

        self._products.append(product)

    def multiply_in_registers(
        self, a: Any, b: Shared, acc: Tile, *, use_acc: Any = True, is_async: bool = False
    ) -> Any:
        """`warpgroup_mma`."""
        self.pause()
        self._check_fenced(a, b)

        def product() -> Tensor:
            result = (a.data if isinstance(a, Tile) else a.read()).float() @ b.read().float()
            return result + acc.data if use_acc else result

        pending = Pending(product, self._random.random() < 0.5)
        return pending if is_async else pending.result()

    def wait_in_registers(self, outstanding: int, deps: list[Pending]) -> Any:
        self.pause()
        results = tuple(pending.result() for pending in deps)
        return results if len(results) > 1 else results[0]

    def _check_fenced(self, *operands: Any) -> None:
        if any(isinstance(operand, Shared) and operand.unfenced[operand.places].any() for operand in operands):
            raise RuntimeError("tensor cores read shared memory that was stored to and not fenced")


class Pages:
    """A tensor descriptor."""

    def __init__(self, descriptor: TensorDescriptor) -> None:
        self.tensor = descriptor.base
        self.layout = descriptor.layout
        self.dtype = TYPES[self.tensor.dtype]
        shape = list(descriptor.block_shape)
        size = torch.Size(shape).numel() * self.tensor.itemsize
        self.block_type = types.SimpleNamespace(shape=shape, nbytes=size)
