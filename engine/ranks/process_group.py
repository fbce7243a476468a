"""Collectives over torch's process groups, which are made directly, without the global group.

`GlooCollective` carries host memory between machines; `NcclCollective` the memory of GPUs.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvrelay.engine.ranks.collective import CollectiveError, Ring

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

CONNECT_TRIES = 5
"""Number of times that gloo tries to connect; each try lasts as long as the group's timeout."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2e-5, 1e-3
"""Seconds between two looks for an end of an operation of gloo: how much longer each is than the one before, and the
limit."""
LOOK_SECONDS = 0.1
"""Seconds between two looks for an end of an operation on a GPU, or for an abort of a message over gloo."""
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
}
"""Environment variables with which a failed operation of NCCL doesn't end the process."""


@contextmanager
def _errors(place: int, size: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(f"rank {place} of {size} has lost another one: {error}") from error


class GlooCollective:
    """Implements `Collective` over TCP. One thread at a time may call it.

    All ranks get all parts and add them up by themselves. Gloo's own sum adds in another order.
    """

    def __init__(self, store: "Store", place: int, size: int, timeout: float, host: str = "127.0.0.1") -> None:
        """Connects to the other ranks of the group, each of which makes one.

        Args:
            store: where ranks find each other; used by this group alone.
            timeout: seconds that this rank waits for another one, here and in each call.
            host: an address of this machine that the other ranks can reach.

        Raises:
            CollectiveError: a rank didn't come.
        """
        # torch.distributed of a build without gloo doesn't have it.
        from torch.distributed import ProcessGroupGloo

        self.place, self.size = place, size
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's own stub
        options._threads = 1
        options._timeout = timedelta(seconds=timeout / CONNECT_TRIES)
        self._options = torch._C._distributed_c10d.AllgatherOptions()
        self._to_all_options = torch._C._distributed_c10d.AllToAllOptions()
        self._options.timeout = self._to_all_options.timeout = timedelta(seconds=timeout)
        self._aborted = False
        self._rings: list[GlooRing] = []
        self._newest: tuple[Any, Tensor, Tensor] | None = None
        """The last operation and its tensors."""
        store.set_timeout(timedelta(seconds=timeout))
        with _errors(place, size):
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            self._group: Any = ProcessGroupGloo(store, place, size, options)

    def sum(self, part: Tensor) -> Tensor:
        """See `Collective.sum`. Types shorter than float32 are summed in float32 and rounded once."""
        first, *others = self.gather(part)
        total = first.float() if part.is_floating_point() and part.itemsize < 4 else first
        for other in others:
            total += other
        return part.copy_(total)

    def gather(self, part: Tensor) -> Tensor:
        """See `Collective.gather`."""
        out = torch.empty(self.size, *part.shape, dtype=part.dtype)
        self.check()
        with _errors(self.place, self.size):
            # As bytes, because gloo doesn't know all types.
            source, target = part.contiguous().view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
            self._wait(self._group._allgather_base(target, source, self._options), source, target)
        return out

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int] | None = None, most: int = 0
    ) -> tuple[Tensor, list[int]]:
        """See `Collective.exchange`. If the numbers of rows aren't known, they are gathered first."""
        if received is None:
            received = self.gather(torch.tensor(sent))[:, self.place].tolist()
        out = torch.empty(sum(received), rows.shape[1], dtype=rows.dtype)
        self.check()
        with _errors(self.place, self.size):
            row = rows.shape[1] * rows.itemsize
            source, target = rows.view(torch.uint8).view(-1), out.view(torch.uint8).view(-1)
            sizes = [[count * row for count in counts] for counts in (received, sent)]
            work = self._group.alltoall_base(target, source, *sizes, self._to_all_options)
            self._wait(work, source, target)
        return out, list(received)

    def _wait(self, work: Any, source: Tensor, target: Tensor) -> None:
        """Waits for the end of an operation with these tensors."""
        # Gloo's thread must neither call nor free anything of Python: where the interpreter is about to end, that
        # would abort the process.
        self._newest = work, source, target
        # Only its timeout ends an operation of gloo, so this thread looks for an abort as well.
        pause = 0.0
        while not work.is_completed():
            self.check()
            time.sleep(pause)
            pause = min(pause + PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        try:
            work.wait()
        except RuntimeError:
            # The two ends of its connections are out of step.
            self._aborted = True
            raise

    def check(self) -> None:
        """See `Collective.check`."""
        if self._aborted:
            raise CollectiveError("the group was aborted")

    def ring(self, to: int, source: int, message_bytes: int, depth: int) -> "GlooRing":
        """See `Collective.ring`."""
        ring = GlooRing(self._group, to, source, depth, self._options.timeout)
        self._rings.append(ring)
        return ring

    def abort(self) -> None:
        """See `Collective.abort`."""
        self._aborted = True
        for ring in self._rings:
            ring.abort()


class GlooRing:
    """Implements `Ring` over a group's own connections. One thread at a time may call it."""

    def __init__(self, group: Any, to: int, source: int, depth: int, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        """Longest wait for a message; the group's own limit is that of one try to connect."""
        self._to, self._source, self._depth = to, source, depth
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """Messages that the next rank may not have received yet."""
        self._received: tuple[Any, Tensor] | None = None
        """The last message to this rank, which is kept for gloo."""
        self._aborted = False

    def send(self, rows: Tensor) -> None:
        """See `Ring.send`."""
        with _errors(self._group.rank(), self._group.size()):
            data = rows.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            self._sent.append((self._group.send([data], self._to, 0), data))
            if len(self._sent) > self._depth:
                self._wait(self._sent[0][0])
                self._sent.popleft()

    def receive(self, rows: Tensor) -> None:
        """See `Ring.receive`."""
        with _errors(self._group.rank(), self._group.size()):
            data = torch.empty(rows.shape, dtype=rows.dtype)
            work = self._group.recv([data.view(-1).view(torch.uint8)], self._source, 0)
            self._received = work, data
            self._wait(work)
            rows.copy_(data)

    def _wait(self, work: Any) -> None:
        """Waits on a thread of its own, because gloo ends a wait by its timeout only."""
        errors: list[RuntimeError] = []
        ended = threading.Event()

        def run() -> None:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                errors.append(error)
            ended.set()

        threading.Thread(target=run, name="ring", daemon=True).start()
        while not ended.wait(LOOK_SECONDS):
            if self._aborted:
                raise CollectiveError("the ring was aborted")
        if errors:
            raise errors[0]

    def abort(self) -> None:
        """See `Ring.abort`. The neighbours' calls end with this process, or by their timeout."""
        self._aborted = True


class NcclCollective:
    """Implements `Collective` on this process's current GPU. One thread at a time may call it.

    Results are ready for what the calling thread's stream does next; no call waits for them. Where a rank doesn't come,
    the stream goes on after the timeout, with wrong numbers, and `check` and all later calls raise. NCCL adds in an
    order of its own, which is the same on all ranks. An operation in a captured graph isn't watched, but by who waits
    for its replay (`GpuCollective.wait`).
    """

    def __init__(self, store: "Store", place: int, size: int, timeout: float) -> None:
        """As `GlooCollective`."""
        # torch.distributed of a build without NCCL doesn't have it.
        from torch.distributed import ProcessGroupNCCL

        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options = ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=timeout)
        store.set_timeout(timedelta(seconds=timeout))
        with _errors(place, size):
            group = ProcessGroupNCCL(store, place, size, options)
        self._watch(group, place, size, timeout)

    def _watch(self, group: Any, place: int, size: int, timeout: float) -> None:
        """Starts the thread that aborts the group when an operation is overdue."""
        self.place, self.size = place, size
        self._group, self._timeout = group, timeout
        self._newest: Any = None
        """The last operation; None after it has ended. Operations end in the order in which they were begun."""
        self._aborted = threading.Event()
        self._abort_once = threading.Lock()
        self._late = False
        threading.Thread(target=self._look, name="nccl ranks", daemon=True).start()

    @property
    def backend(self) -> Any:
        """The group, as torch's `ProcessGroup` takes it for a backend."""
        return self._group

    def sum(self, part: Tensor) -> Tensor:
        """See `Collective.sum`."""
        self._run("allreduce", [part])
        return part

    def gather(self, part: Tensor) -> Tensor:
        """See `Collective.gather`."""
        out = part.new_empty(self.size, *part.shape)
        self._run("_allgather_base", out, part.contiguous())
        return out

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int] | None = None, most: int = 0
    ) -> tuple[Tensor, list[int]]:
        """See `Collective.exchange`.

        Raises:
            ValueError: always, because no runner on GPUs exchanges rows.
        """
        raise ValueError("expert_exchange is all_to_all; allowed on a GPU: auto, all_reduce")

    def ring(self, to: int, source: int, message_bytes: int, depth: int) -> Ring:
        """See `Collective.ring`.

        Raises:
            ValueError: always, because no runner on GPUs has stages.
        """
        raise ValueError("pipeline_parallel is above 1; allowed on a GPU: 1")

    def _run(self, operation: str, *tensors: Any) -> None:
        self.check()
        with _errors(self.place, self.size):
            work = getattr(self._group, operation)(*tensors)
            # The events of a captured operation can't be asked.
            captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            self._newest = None if captured else work
            work.wait()  # on the stream

    def check(self) -> None:
        """See `Collective.check`."""
        if self._late:
            raise CollectiveError(f"rank {self.place} of {self.size}: no exchange within {self._timeout:g} s")
        if self._aborted.is_set():
            raise CollectiveError("the group was aborted")

    def _look(self) -> None:
        seen, since = None, 0.0
        while not self._aborted.wait(LOOK_SECONDS):
            newest = self._newest
            if newest is None:
                continue
            if newest.is_completed():
                if self._newest is newest:
                    self._newest = None
                seen = None
            elif seen is None:
                seen, since = newest, time.monotonic()
            elif seen.is_completed():
                seen = None
            elif time.monotonic() - since > self._timeout:
                self._late = True
                self.abort()

    def abort(self) -> None:
        """See `Collective.abort`."""
        self._aborted.set()
        # A second abort of the same communicators isn't defined. It may block, even for ever, and must not run on a
        # thread that is inside NCCL.
        if self._abort_once.acquire(blocking=False):
            threading.Thread(target=self._group.abort, name="nccl abort", daemon=True).start()
