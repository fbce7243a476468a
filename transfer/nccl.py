"""Links between GPUs: torch's ProcessGroupNCCL, made directly, without the global process group.

What is known of it, and kept to here: communicators are made non-blocking, so that a rank that never comes can't hang
the dial; the group's own error handling would end the process, so it is off, and a watchdog thread aborts what is
overdue; a group is aborted and never destroyed, since destroying waits for the other end; channels are capped, since
each costs memory on both ends (about 52 MB a pair at 8).
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from kvrelay.transfer.transport import RECEIVER, SENDER, Link, LinkError, Rendezvous

MAX_CHANNELS = 8
POLL_SECONDS = 0.0001
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
    "NCCL_MAX_NCHANNELS": str(MAX_CHANNELS),
}


def nccl_is_available() -> bool:
    """Whether this process can make NCCL links: a CUDA device, and a torch that was built with NCCL."""
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


class Watchdog:
    """Aborts links: those whose operation is overdue, and those that it is told of. One thread, started when needed.

    Aborting may take its time, which the event loop doesn't have, and must not be done by a thread that is inside NCCL.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[NcclLink, float] = {}
        self._told: set[NcclLink] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, link: "NcclLink", timeout: float) -> Iterator[None]:
        """Aborts `link` if the body takes longer than `timeout` seconds."""
        with self._changed:
            self._due[link] = time.monotonic() + timeout
            self._wake()
        try:
            yield
        finally:
            with self._changed:
                self._due.pop(link, None)

    def abort(self, link: "NcclLink") -> None:
        """Aborts `link` soon. Never blocks."""
        with self._changed:
            self._told.add(link)
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nccl watchdog", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            for link in self._next():
                link.abort_now()

    def _next(self) -> set["NcclLink"]:
        """Waits until there is a link to abort."""
        with self._changed:
            while True:
                now = time.monotonic()
                links = self._told | {link for link, due in self._due.items() if due <= now}
                if links:
                    self._told.clear()
                    self._due = {link: due for link, due in self._due.items() if link not in links}
                    return links
                self._changed.wait(min(self._due.values()) - now if self._due else None)


class NcclTransport:
    """Makes NCCL links on this process's current CUDA device."""

    name = "nccl"

    def __init__(self) -> None:
        """
        Raises:
            ValueError: there is no GPU, or torch has no NCCL.
        """
        if not nccl_is_available():
            raise ValueError(
                "transfer.transport is 'nccl'; this worker has no GPU that NCCL can use; allowed: auto, gloo"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._watchdog = Watchdog()

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`. The communicator itself is made by the first operation."""
        # Not in torch.distributed of a build without NCCL.
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(self._device)
        options = ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options.config.max_ctas = MAX_CHANNELS
        options._timeout = timedelta(seconds=timeout)
        try:
            group = ProcessGroupNCCL(meeting, rank, 2, options)
        except RuntimeError as error:
            raise LinkError(f"nccl: {error}") from error
        return NcclLink(group, rank, self._device, self._watchdog, timeout)


class NcclLink:
    """One end of an NCCL link."""

    def __init__(self, group: Any, rank: int, device: torch.device, watchdog: Watchdog, timeout: float) -> None:
        self._group = group
        self._peer = RECEIVER if rank == SENDER else SENDER
        self._device = device
        self._watchdog = watchdog
        self._timeout = timeout
        self._abort_once = threading.Lock()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def send(self, data: torch.Tensor) -> "NcclPending":
        return self._begin("send", data)

    def recv(self, into: torch.Tensor) -> "NcclPending":
        return self._begin("recv", into)

    def _begin(self, what: str, tensor: torch.Tensor) -> "NcclPending":
        try:
            with self._watchdog.watching(self, self._timeout):
                return NcclPending(self, getattr(self._group, what)([tensor], self._peer, 0))
        except RuntimeError as error:
            raise LinkError(f"nccl {what}: {error}") from error

    def abort(self) -> None:
        self._watchdog.abort(self)

    def abort_now(self) -> None:
        """Aborts the communicators; may block. The watchdog's own."""
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
                if time.monotonic() > deadline:
                    self._link.abort()
                    raise LinkError(f"nccl: no end within {timeout} s")
                time.sleep(POLL_SECONDS)
            self._work.wait()
        except RuntimeError as error:
            if isinstance(error, LinkError):
                raise
            raise LinkError(f"nccl: {error}") from error
