"""The collective of ranks on one machine, and their ring: they exchange parts and messages in memory that they share.

The memory is a file without a name: nothing is left of it, however the ranks end. Rank 0 makes it, and the others open
it through its process. That of a message is its sender's.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrelay.engine.ranks.collective import CollectiveError
from kvrelay.kernels.cpu.library import library
from kvrelay.kernels.cpu.reduce import (
    MISMATCHED,
    SLOT_BYTES,
    TIMED_OUT,
    AllGatherArgs,
    AllToAllArgs,
    Mailbox,
    MessageArgs,
    RankGroup,
    ReduceArgs,
    mailbox_bytes,
    shared_bytes,
)
from kvrelay.machine.memory import is_memory_file, make_memory_file

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SPIN_SECONDS = 50e-6
"""Seconds that a thread looks for the other ranks before it sleeps, where each thread of each rank has a core: longer
than ranks of equal shares are apart, and about as long as a wake-up takes."""
MASK_BITS = 63
"""Cores in one number of a set of cores."""
MASKS = 32
_KEY = "shared memory"
_DTYPES = (torch.float32, torch.bfloat16)
"""Types of parts that can be summed, in the order of `WeightType` in linear.h."""


def shared_memory_missing() -> str | None:
    """Why this process can't exchange parts in shared memory; None if it can."""
    return None if library() is not None else "needs the native CPU kernels"


class SharedMemoryCollective:
    """Implements `Collective`. One thread at a time may call it, or run a program with its `ReduceArgs`."""

    def __init__(self, place: int, size: int, timeout: float, memory: mmap.mmap, lanes: int) -> None:
        """`join` is for ranks; this is a part of it, before the ranks have met.

        Args:
            memory: of `shared_bytes(..., size, lanes)`, shared with the others.
        """
        kernels = library()
        if kernels is None:
            raise OSError(f"shared memory: {shared_memory_missing()}")
        self.place, self.size = place, size
        self._timeout = timeout
        self._library = kernels
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.group = RankGroup(
            memory=self._memory.data_ptr(),
            slot_bytes=SLOT_BYTES,
            timeout_ns=round(timeout * 1e9),
            rank=place,
            ranks=size,
            lanes=lanes,
            threads=1,
        )
        """The group, as the kernels read it."""
        self.failure = ctypes.addressof(self.group) + RankGroup.failure.offset
        """Address of an int32 that is other than 0 after a failure."""
        self._stopped = ctypes.c_uint32.from_address(self.group.memory)
        """Word of the shared memory that is other than 0 after an abort on any rank (`aborted` in reduce.cpp)."""
        self._one = ctypes.c_int64(1)
        self._rings: list[SharedMemoryRing] = []
        rows, group = ctypes.addressof(self._one), ctypes.addressof(self.group)
        self._reduce, self._gather = ReduceArgs(rows=rows, group=group), AllGatherArgs(group=group)
        self._sent, self._received = (ctypes.c_int64 * size)(), (ctypes.c_int64 * size)()
        self._all_to_all = AllToAllArgs(
            group=group, sent=ctypes.addressof(self._sent), received=ctypes.addressof(self._received)
        )

    @classmethod
    def join(cls, store: "Store", place: int, size: int, timeout: float, threads: int = 1) -> "SharedMemoryCollective":
        """Meets the other ranks of the group, each of which calls this.

        Args:
            store: where ranks find each other; used by this group alone.
            timeout: seconds that this rank waits for another one, here and in each call.
            threads: of the team that runs this rank's programs.

        Raises:
            CollectiveError: a rank didn't come, or its memory can't be opened.
            OSError: there is no memory, or no native kernels (`shared_memory_missing`).
        """
        kernels = library()
        if kernels is None:
            raise OSError(f"shared memory: {shared_memory_missing()}")
        if place == 0:
            lanes = threads
            descriptor = make_memory_file(shared_bytes(kernels, size, lanes))
            found = f"/proc/{os.getpid()}/fd/{descriptor} {lanes}"
        else:
            found = _wait_for(store, timeout)
            lanes = int(found.split()[1])
            descriptor = _open(found.split()[0], shared_bytes(kernels, size, lanes), 0)
        try:
            made = cls(place, size, timeout, mmap.mmap(descriptor, shared_bytes(kernels, size, lanes)), lanes)
            if place == 0:
                store.set(_KEY, found)
            made._meet(threads)
        finally:
            os.close(descriptor)
        return made

    def _meet(self, threads: int) -> None:
        """Agrees with the others on the threads that share a sum, and on whether there is a core for each of them."""
        cores = os.sched_getaffinity(0)
        masks = [sum(1 << bit for bit in range(MASK_BITS) if word * MASK_BITS + bit in cores) for word in range(MASKS)]
        all_threads, *all_masks = self.gather(torch.tensor([threads, *masks])).T.tolist()
        union = (sum(1 for bit in range(MASK_BITS) if any(mask >> bit & 1 for mask in each)) for each in all_masks)
        self.group.threads = min(*all_threads, self.group.lanes)
        self.group.spin_ns = round(SPIN_SECONDS * 1e9) if sum(union) >= sum(all_threads) else 0

    def sum(self, part: Tensor) -> Tensor:
        """See `Collective.sum`. Float32 or bfloat16; bfloat16 is summed in float32 and rounded once.

        Raises:
            ValueError: another type, or not contiguous memory of the host.
        """
        if part.dtype not in _DTYPES or not part.is_contiguous() or part.device.type != "cpu":
            raise ValueError(
                f"a part is {part.dtype} on {part.device} with strides {part.stride()}; allowed: contiguous float32 or"
                " bfloat16 on the CPU"
            )
        args = self._reduce
        args.part = args.out = part.data_ptr()
        args.width, args.type = part.numel(), _DTYPES.index(part.dtype)
        self._library.kvrelay_all_reduce(ctypes.byref(args), 0, 1)
        self.check()
        return part

    def gather(self, part: Tensor) -> Tensor:
        """See `Collective.gather`."""
        source, out = part.contiguous(), torch.empty(self.size, *part.shape, dtype=part.dtype)
        args = self._gather
        args.part, args.out, args.bytes = source.data_ptr(), out.data_ptr(), source.nbytes
        self._library.kvrelay_all_gather(ctypes.byref(args), 0, 1)
        self.check()
        return out

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int] | None = None, most: int = 0
    ) -> tuple[Tensor, list[int]]:
        """See `Collective.exchange`."""
        out = torch.empty(most if received is None else sum(received), rows.shape[1], dtype=rows.dtype)
        row, args, sizes, found = rows.shape[1] * rows.itemsize, self._all_to_all, self._sent, self._received
        sizes[:] = [count * row for count in sent]
        args.part, args.out, args.room = rows.data_ptr(), out.data_ptr(), out.nbytes
        self._library.kvrelay_all_to_all(ctypes.byref(args), 0, 1)
        self.check()
        counts = [size // row for size in found]
        return out[: sum(counts)], counts

    def ring(self, to: int, source: int, message_bytes: int, depth: int) -> "SharedMemoryRing":
        """See `Collective.ring`."""
        size = mailbox_bytes(self._library, depth, message_bytes)
        mine = make_memory_file(size)
        try:
            process, theirs = self.gather(torch.tensor([os.getpid(), mine]))[source].tolist()
            opened = _open(f"/proc/{process}/fd/{theirs}", size, source)
            try:
                memories = mmap.mmap(mine, size), mmap.mmap(opened, size)
            finally:
                os.close(opened)
            self.gather(torch.zeros(1))  # until the others have opened theirs
        finally:
            os.close(mine)
        ring = SharedMemoryRing(self._library, memories, message_bytes, depth, self._timeout, self.group.spin_ns)
        self._rings.append(ring)
        return ring

    def check(self) -> None:
        """See `Collective.check`. An abort on any rank is one on all."""
        if not self.group.failure and not self._stopped.value:
            return
        late = [
            str(rank) for rank in range(self.size) if self._library.kvrelay_rank_is_late(ctypes.byref(self.group), rank)
        ]
        names = f"ranks of {self.size} that haven't come to rank {self.place}: {', '.join(late) or 'none'}"
        if self.group.failure == TIMED_OUT:
            raise CollectiveError(f"no exchange within {self._timeout:g} s; {names}")
        if self.group.failure == MISMATCHED:
            raise CollectiveError(f"more rows were sent to rank {self.place} than it has room for")
        raise CollectiveError(f"the group was aborted; {names}")

    def abort(self) -> None:
        """See `Collective.abort`."""
        self._library.kvrelay_ranks_abort(ctypes.byref(self.group))
        for ring in self._rings:
            ring.abort()


class SharedMemoryRing:
    """Implements `Ring`, by a mailbox for each of both neighbours. One thread at a time may call it."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        memories: tuple[mmap.mmap, mmap.mmap],
        message_bytes: int,
        depth: int,
        timeout: float,
        spin_ns: int,
    ) -> None:
        """`memories` are those of `mailbox_bytes` for what is sent, and for what is received."""
        self._library = kernels
        self._timeout = timeout
        self._memories = [torch.frombuffer(memory, dtype=torch.uint8) for memory in memories]
        self._out, self._in = (
            Mailbox(
                memory=memory.data_ptr(),
                slot_bytes=message_bytes,
                spin_ns=spin_ns,
                timeout_ns=round(timeout * 1e9),
                slots=depth,
            )
            for memory in self._memories
        )

    def send(self, rows: Tensor) -> None:
        """See `Ring.send`."""
        self._library.kvrelay_mailbox_send(ctypes.byref(_message(self._out, rows)))
        self._check(self._out, "the next stage takes nothing", rows)

    def receive(self, rows: Tensor) -> None:
        """See `Ring.receive`."""
        self._library.kvrelay_mailbox_receive(ctypes.byref(_message(self._in, rows)))
        self._check(self._in, "the stage before sends nothing", rows)

    def _check(self, box: Mailbox, late: str, rows: Tensor) -> None:
        if not box.failure:
            return
        if box.failure == TIMED_OUT:
            raise CollectiveError(f"{late} within {self._timeout:g} s")
        if box.failure == MISMATCHED:
            raise CollectiveError(f"stages disagree on a message of {list(rows.shape)} {rows.dtype}")
        raise CollectiveError("the ring was aborted")

    def abort(self) -> None:
        """See `Ring.abort`."""
        for box in (self._out, self._in):
            self._library.kvrelay_mailbox_abort(ctypes.byref(box))


def _message(box: Mailbox, rows: Tensor) -> MessageArgs:
    if rows.dim() != 2 or (rows.stride(1) != 1 and rows.shape[1] > 1) or rows.device.type != "cpu":
        raise ValueError(
            f"a message is {list(rows.shape)} on {rows.device} with strides {rows.stride()}; allowed: rows on the CPU"
            " whose numbers lie side by side"
        )
    return MessageArgs(
        box=ctypes.addressof(box),
        rows=rows.data_ptr(),
        count=rows.shape[0],
        row_bytes=rows.shape[1] * rows.itemsize,
        stride=rows.stride(0) * rows.itemsize,
    )


def _wait_for(store: "Store", timeout: float) -> str:
    try:
        store.wait([_KEY], timedelta(seconds=timeout))
        return store.get(_KEY).decode()
    except RuntimeError as error:
        raise CollectiveError(f"rank 0 didn't share its memory within {timeout:g} s: {error}") from error


def _open(path: str, nbytes: int, rank: int) -> int:
    """A descriptor of the memory of `rank`, which the caller closes."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CollectiveError(f"the memory of rank {rank} can't be opened: {error}") from error
    try:
        if is_memory_file(descriptor, nbytes):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    raise CollectiveError(f"{path} isn't a file of rank {rank} with {nbytes} bytes of memory")
