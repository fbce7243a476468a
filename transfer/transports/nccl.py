"""Links between GPUs: torch's ProcessGroupNCCL, made directly, without the global process group.

What is known of it, and kept to here: communicators are made non-blocking, so that a rank that never comes can't hang
the dial; the group's own error handling would end the process, so it is off, and a watchdog thread aborts what is
overdue; a group is aborted and never destroyed, since destroying waits for the other end; channels are capped, since
each costs memory on both ends (about 52 MB a pair at 8). Two ranks on one GPU are possible from NCCL 2.30 on, and only
where the environment says so; `cuda_ipc` is the better link there.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch

from kvrelay.transfer.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import Link, LinkError, Rendezvous

MAX_CHANNELS = 8
OLDEST = (2, 26, 2)
"""Of NCCL, whose abort of a non-blocking communicator can be relied on."""
OLDEST_SHARED_GPU = (2, 30)
"""Of NCCL, that lets two ranks share a GPU."""
POLL_SECONDS = 0.0001
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
    "NCCL_MAX_NCHANNELS": str(MAX_CHANNELS),
}


def nccl_missing() -> str | None:
    """Why this process can't make NCCL links; None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not torch.distributed.is_nccl_available():
        return "this torch is built without NCCL"
    found = torch.cuda.nccl.version()
    if found < OLDEST:
        return f"NCCL is {_dotted(found)}; allowed: {_dotted(OLDEST)} or newer"
    return None


def environment(version: tuple[int, ...]) -> dict[str, str]:
    """What NCCL and torch are told by the environment, where the operator says nothing else."""
    return _ENVIRONMENT | ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if version >= OLDEST_SHARED_GPU else {})


def configure(options: Any, timeout: float) -> None:
    """Sets a group's `ProcessGroupNCCL.Options`."""
    options.config.blocking = 0
    options.config.max_ctas = MAX_CHANNELS
    options._timeout = timedelta(seconds=timeout)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


class Abortable(Protocol):
    """What a watchdog watches."""

    def abort_now(self) -> None:
        """Ends it; may block."""


class Watchdog:
    """Aborts links: those whose operation is overdue, and those that it is told of. One thread, started when needed.

    Aborting may take its time, which the event loop doesn't have, and must not be done by a thread that is inside NCCL.
    It may even never end; so each abort has a thread of its own, lest others wait behind it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Abortable, float] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, link: Abortable, timeout: float) -> Iterator[None]:
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

    def abort(self, link: Abortable) -> None:
        """Aborts `link` soon. Never blocks."""
        threading.Thread(target=link.abort_now, name="nccl abort", daemon=True).start()

    def _run(self) -> None:
        while True:
            for link in self._overdue():
                self.abort(link)

    def _overdue(self) -> list[Abortable]:
        """Waits until there is a link to abort."""
        with self._changed:
            while True:
                now = time.monotonic()
                links = [link for link, due in self._due.items() if due <= now]
                if links:
                    self._due = {link: due for link, due in self._due.items() if due > now}
                    return links
                self._changed.wait(min(self._due.values()) - now if self._due else None)


class NcclTransport:
    """Makes NCCL links on this process's current CUDA device."""

    name = "nccl"
    scope = ""

    def __init__(self) -> None:
        """
        Raises:
            ValueError: there is no GPU, or torch has no NCCL.
        """
        missing = nccl_missing()
        if missing is not None:
            raise ValueError(f"transfer.transport is 'nccl', which this worker can't do: {missing}")
        for name, value in environment(torch.cuda.nccl.version()).items():
            os.environ.setdefault(name, value)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._watchdog = Watchdog()

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`. The communicator itself is made by the first operation."""
        # Not in torch.distributed of a build without NCCL.
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(self._device)
        options = ProcessGroupNCCL.Options()
        configure(options, timeout)
        try:
            group = ProcessGroupNCCL(meeting, rank, 2, options)
        except RuntimeError as error:
            raise LinkError(f"nccl: {error}") from error
        return NcclLink(group, rank, self._device, self._watchdog, timeout)


class NcclLink:
    """One end of an NCCL link."""

    stream = None

    def __init__(self, group: Any, rank: int, device: torch.device, watchdog: Watchdog, timeout: float) -> None:
        self._group = group
        self._peer = RECEIVER if rank == SENDER else SENDER
        self._device = device
        self._watchdog = watchdog
        self._timeout = timeout
        self._aborted = threading.Event()
        self._abort_once = threading.Lock()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def send(self, data: torch.Tensor) -> "NcclPending":
        return self._begin("send", data)

    def recv(self, into: torch.Tensor) -> "NcclPending":
        return self._begin("recv", into)

    def _begin(self, what: str, tensor: torch.Tensor) -> "NcclPending":
        if self._aborted.is_set():
            raise LinkError("nccl: the link is closed")
        try:
            with self._watchdog.watching(self, self._timeout):
                return NcclPending(self, getattr(self._group, what)([tensor], self._peer, 0))
        except RuntimeError as error:
            raise LinkError(f"nccl {what}: {error}") from error

    @property
    def aborted(self) -> bool:
        """Whether it was told to end; a wait need not go on."""
        return self._aborted.is_set()

    def abort(self) -> None:
        self._aborted.set()
        self._watchdog.abort(self)

    def abort_now(self) -> None:
        """Aborts the communicators; may block. The watchdog's own."""
        self._aborted.set()
        # Never given back: a second abort of the same communicators isn't defined.
        if self._abort_once.acquire(blocking=False):
            self._group.abort()

    def close(self) -> None:
        self.abort_now()


class NcclPending:
    """An NCCL operation that was begun; its end is polled for, since waiting for it inside CUDA could not be ended."""

    def __init__(self, link: NcclLink, work: Any) -> None:
        self._link = link
        self._work = work

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            while not self._work.is_completed():
                if self._link.aborted:
                    raise LinkError("nccl: the link is closed")
                if time.monotonic() > deadline:
                    self._link.abort()
                    raise LinkError(f"nccl: no end within {timeout} s")
                time.sleep(POLL_SECONDS)
            # An operation that was aborted is completed too. What this enqueues makes later work here wait for it.
            if self._link.aborted:
                raise LinkError("nccl: the link is closed")
            self._work.wait()
        except LinkError:
            raise
        except RuntimeError as error:
            raise LinkError(f"nccl: {error}") from error
