"""Links between GPUs: torch's ProcessGroupNCCL, made directly, without the global process group.

- Communicators are non-blocking, so that a rank that never comes can't hang the opening of a link.
- The group's own error handling is off, because it would end the process. A watchdog thread aborts overdue operations.
- A group is aborted and never destroyed, because destroying waits for the other end.
- Who waits for an operation sleeps until an event behind it, which a thread of the link waits for in CUDA; the thread
  that waits can end that by the link's timeout or an abort. An error of NCCL causes no event, so it is looked for.
- Channels are capped, because each costs memory at both ends (about 52 MB a pair at 8).
- Two ranks on one GPU need NCCL 2.30 and an environment variable; workers without them use `shm` there. A worker's
  scope names its GPU, followed by + if two ranks may share it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from kvrelay.engine.kv.writes import Event, EventWaiter
from kvrelay.transfer.transports.base import Link, LinkError, Pending, Rendezvous, link_errors

MAX_CHANNELS = 8
OLDEST = (2, 26, 2)
"""The oldest NCCL with a reliable abort of non-blocking communicators."""
OLDEST_SHARED_GPU = (2, 30)
"""The oldest NCCL that lets two ranks share a GPU."""
ERROR_SECONDS = 0.1
"""Seconds between two looks for an error of NCCL, while an operation is waited for."""
LATE_SECONDS = 1.0
"""Seconds by which the event behind an operation may come later than its end, while the GPU has much else to do."""
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
    "NCCL_MAX_NCHANNELS": str(MAX_CHANNELS),
}


def nccl_missing() -> str | None:
    """Why this process can't open NCCL links; None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not torch.distributed.is_nccl_available():
        return "this torch is built without NCCL"
    found = torch.cuda.nccl.version()
    if found < OLDEST:
        return f"NCCL is {_dotted(found)}; allowed: {_dotted(OLDEST)} or newer"
    return None


def environment(version: tuple[int, ...]) -> dict[str, str]:
    """Environment variables for NCCL of this version and for torch; those that the operator has set take precedence."""
    return _ENVIRONMENT | ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if version >= OLDEST_SHARED_GPU else {})


def scope_of(gpu: str, version: tuple[int, ...], switch: str) -> str:
    """The scope of a worker on this GPU; `switch` is the value of NCCL_MULTI_RANK_GPU_ENABLE."""
    return gpu + ("+" if version >= OLDEST_SHARED_GPU and switch == "1" else "")


def not_between(here: str, there: str) -> str | None:
    """Why workers with these scopes can't be linked; None if they can."""
    gpu = here.removesuffix("+")
    if not gpu or gpu != there.removesuffix("+") or (here.endswith("+") and there.endswith("+")):
        return None
    return (
        f"both are on {gpu}, which NCCL shares from {_dotted(OLDEST_SHARED_GPU)} on, with"
        " NCCL_MULTI_RANK_GPU_ENABLE=1 at both; shm needs neither"
    )


def configure(options: Any, timeout: float) -> None:
    """Sets a group's `ProcessGroupNCCL.Options`."""
    options.config.blocking = 0
    options.is_high_priority_stream = True  # prefill's kernels are many; the link's are few, and others wait for them
    options.config.max_ctas = MAX_CHANNELS
    options._timeout = timedelta(seconds=timeout)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


class Watchdog:
    """Aborts links whose operation is overdue. One thread, started with the first operation."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[NcclLink, float] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, link: "NcclLink", timeout: float) -> Iterator[None]:
        """Aborts `link` if the body takes longer than `timeout` seconds."""
        with self._changed:
            self._due[link] = time.monotonic() + timeout
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nccl watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._due.pop(link, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for link in [link for link, due in self._due.items() if due <= now]:
                    del self._due[link]
                    link.abort()
                self._changed.wait(min(self._due.values()) - now if self._due else None)


class NcclTransport:
    """Opens NCCL links on this process's current CUDA device; see `nccl_missing`."""

    name = "nccl"

    def __init__(self) -> None:
        version = torch.cuda.nccl.version()
        for name, value in environment(version).items():
            os.environ.setdefault(name, value)
        self._device = torch.device("cuda", torch.cuda.current_device())
        gpu = str(torch.cuda.get_device_properties(self._device).uuid)
        self.scope = scope_of(gpu, version, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", ""))
        self._watchdog = Watchdog()

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`. The first operation makes the communicator."""
        # torch.distributed of a build without NCCL doesn't have it.
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(self._device)
        options = ProcessGroupNCCL.Options()
        configure(options, timeout)
        with link_errors("nccl", RuntimeError):
            group = ProcessGroupNCCL(rendezvous, rank, 2, options)
        return NcclLink(group, rank, self._device, self._watchdog, timeout, StreamEnds(self._device))


Ends = Callable[[Any], Event]
"""Makes an event behind a process group's operation (`Work`). Waits for nothing."""


class StreamEnds:
    """Events on a stream of their own: the thread's stream must not wait for an operation before its end is known."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Any) -> Event:
        with torch.cuda.stream(self._stream):
            work.wait()
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return event


class NcclLink:
    """One end of an NCCL link."""

    stream = None
    lender = None
    mac_key = None

    def __init__(
        self, group: Any, rank: int, device: torch.device, watchdog: Watchdog, timeout: float, ends: Ends
    ) -> None:
        self._group = group
        self._ends = ends
        self._waiter = EventWaiter("nccl operations")
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        """Numbers of operations that have begun and ended. They end in the order in which they were begun."""
        self._peer = 1 - rank
        self._device = device
        self._watchdog = watchdog
        self._timeout = timeout
        self._aborted = threading.Event()
        self._abort_once = threading.Lock()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def send(self, data: torch.Tensor) -> Pending:
        return self._begin("send", data)

    def recv(self, into: torch.Tensor) -> Pending:
        return self._begin("recv", into)

    def _begin(self, operation: str, tensor: torch.Tensor) -> Pending:
        self._check_open()
        with link_errors(f"nccl {operation}", RuntimeError), self._watchdog.watching(self, self._timeout):
            work = getattr(self._group, operation)([tensor], self._peer, 0)
            self._waiter.then(self._ends(work), self._one_ended)
        self._begun += 1
        return Pending(partial(self._wait, work, self._begun))

    def _one_ended(self) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def _wait(self, work: Any, number: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with link_errors("nccl", RuntimeError):
            while not self._over(number, min(ERROR_SECONDS, max(0.0, deadline - time.monotonic()))):
                # An operation that NCCL has given up counts as completed, but its event doesn't come.
                if work.is_completed():
                    if self._over(number, LATE_SECONDS):
                        break
                    self.abort()
                    raise LinkError("nccl: an operation has failed")
                if time.monotonic() >= deadline:
                    self.abort()
                    raise LinkError(f"nccl: no end within {timeout} s")
            self._check_open()
            # Later work of this thread on the GPU waits for the operation.
            work.wait()

    def _over(self, number: int, seconds: float) -> bool:
        """Waits some seconds for the operation's end or the link's abort; returns whether either came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended >= number or self._aborted.is_set(), seconds)

    def _check_open(self) -> None:
        if self._aborted.is_set():
            raise LinkError("nccl: the link is closed")

    def abort(self) -> None:
        self._end_waits()
        # The abort of the communicators may block, even for ever, and must not run on a thread that is inside NCCL.
        threading.Thread(target=self.close, name="nccl abort", daemon=True).start()

    def _end_waits(self) -> None:
        with self._changed:
            self._aborted.set()
            self._changed.notify_all()

    def close(self) -> None:
        self._end_waits()
        self._waiter.close()
        # Never released, because a second abort of the same communicators isn't defined.
        if self._abort_once.acquire(blocking=False):
            self._group.abort()
