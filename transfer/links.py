"""The links of one worker: one per pair, made on demand, one I/O thread each, thrown away on the first error.

    queue          producer                          consumer
    jobs           the event loop (`submit`)         the link's thread, first in, first out
    ends of links  the link's thread (`on_end`)      the event loop

A thread keeps two buffers, so that one frame is on the wire while the bytes of the next (sending) or the last
(receiving) are copied and hashed. A receive is begun only for a frame that the other end has announced: one that waits
without need would time out and take the link with it.
"""

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.transfer.control import post
from kvrelay.transfer.messages import Key
from kvrelay.transfer.transports.base import SENDER, Link, LinkError, Pending, Rendezvous, Transport

logger = logging.getLogger(__name__)

BUFFERS = 2

LATE_SHARE = 0.8
"""Of a frame's time, from which on the end of the link is put down to that frame."""

CLOSE_SECONDS = 2.0
"""How long closing a link may take until it is left to itself."""


class Job(Protocol):
    """One frame's way through a link's thread: `begin`, then `done`; or `fail` at any point, and then nothing else."""

    @property
    def key(self) -> Key | None:
        """The hand-off that the frame is of; None for one that nobody wants any more."""

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        """Begins the transfer, using `buffer`; None where there is nothing to transfer any more."""

    def done(self, buffer: torch.Tensor) -> None:
        """The transfer has ended; the buffer is reused after this returns."""

    def fail(self, message: str) -> None:
        """The link has ended first."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link to be made."""

    peer: str
    """Incarnation of the other worker."""
    epoch: int
    transport: Transport
    rank: int
    buffer_bytes: int
    timeout: float
    """Seconds for the dial, and for each frame."""
    tell: Callable[[str, bytes], None]
    """Sends an entry of the rendezvous to the other end. Called by the link's thread."""
    on_end: Callable[["LinkEnd"], None]
    """Told when the link has ended, whatever ended it. Called on the event loop."""
    idle: Callable[[], bool]
    """Whether nothing under way needs the link, so that it may be closed to make room for another."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """How a link has ended."""

    epoch: int
    reason: str
    up: bool
    """It had been made, and carried its first bytes. Where it had not, there is no point in trying again at once."""
    stuck: Job | None
    """The frame that took longer than it may. Others that are failed had not begun, or went with it."""

    def gives_up(self, key: Key) -> bool:
        """Whether the hand-off `key` should rather be tried elsewhere than on the next link."""
        return not self.up or (self.stuck is not None and self.stuck.key == key)


class LinkThread:
    """One end of one link, and the thread that does its I/O."""

    def __init__(self, spec: LinkSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec
        self.meeting = Rendezvous(spec.tell, spec.timeout)
        self._loop = loop
        self._jobs: deque[Job] = deque()
        self._window: deque[tuple[Job, Pending, torch.Tensor]] = deque()
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._link: Link | None = None
        self._up = False
        self._waiting_since = self._closed_at = math.inf
        # Not a daemon: an interpreter that ends while one of its threads is inside a transport's C++ aborts. What a
        # transport blocks on has a timeout, so this delays the end of the process by no more than that.
        self.thread = threading.Thread(target=self._run, name=f"link {spec.peer[:8]}/{spec.epoch}")

    def submit(self, job: Job) -> None:
        """Queues a job; fails it at once where the link has ended."""
        with self._changed:
            if self._reason is None:
                self._jobs.append(job)
                self._changed.notify()
                return
            reason = self._reason
        job.fail(reason)

    def close(self, reason: str) -> None:
        """Ends the link, and fails what is queued or under way. Never blocks; any thread."""
        with self._changed:
            self._reason = self._reason or reason
            self._closed_at = min(self._closed_at, time.monotonic())
            self._changed.notify()
            link = self._link
        self.meeting.close()
        if link is not None:
            link.abort()

    def _run(self) -> None:
        try:
            link = self.spec.transport.connect(self.meeting, self.spec.rank, self.spec.timeout)
            with self._changed:
                self._link = link
                closed = self._reason is not None
            if not closed:
                self._warm_up(link)
                self._up = True
                self._serve(link)
        except LinkError as error:
            self.close(str(error))
        except Exception as error:
            logger.exception("a link's thread failed", extra={"peer": self.spec.peer, "epoch": self.spec.epoch})
            self.close(f"{type(error).__name__} in the link's thread")
        self._end()

    def _end(self) -> None:
        self.close("closed")
        reason = self._reason or ""
        failed = [job for job, _, _ in self._window] + list(self._jobs)
        # The other end's time runs out a little earlier where it began to wait earlier, and then ends this one's wait.
        late = self._closed_at - self._waiting_since > LATE_SHARE * self.spec.timeout
        end = LinkEnd(self.spec.epoch, reason, self._up, self._window[0][0] if late and self._window else None)
        self._window.clear()
        self._jobs.clear()
        for job in failed:
            job.fail(reason)
        post(self._loop, self.spec.on_end, end)
        if self._link is not None:
            # Last, since some transports block here; this thread has nothing else to do.
            self._reap(self._link)

    def _reap(self, link: Link) -> None:
        """Closes the link. A close that doesn't end keeps what the link has; it keeps no thread and no process."""
        who = {"peer": self.spec.peer, "epoch": self.spec.epoch}

        def close() -> None:
            try:
                link.close()
            except Exception:
                logger.exception("closing a link failed", extra=who)

        reaper = threading.Thread(target=close, name=f"reaper {self.spec.peer[:8]}/{self.spec.epoch}", daemon=True)
        reaper.start()
        reaper.join(CLOSE_SECONDS)
        if reaper.is_alive():
            logger.error("closing a link blocks; it is left to itself", extra=who)

    def _warm_up(self, link: Link) -> None:
        """One byte there and back: connections and buffers are made now, and a link that can't carry fails now."""
        byte = link.buffer(1)
        first, second = (link.send, link.recv) if self.spec.rank == SENDER else (link.recv, link.send)
        first(byte).wait(self.spec.timeout)
        second(byte).wait(self.spec.timeout)

    def _serve(self, link: Link) -> None:
        buffers = [link.buffer(self.spec.buffer_bytes) for _ in range(BUFFERS)]
        while self._begin_jobs(link, buffers, wait=not self._window):
            job, pending, buffer = self._window[0]
            self._waiting_since = time.monotonic()
            pending.wait(self.spec.timeout)
            self._waiting_since = math.inf
            self._begin_jobs(link, buffers, wait=False)
            job.done(buffer)
            self._window.popleft()
            buffers.append(buffer)

    def _begin_jobs(self, link: Link, buffers: list[torch.Tensor], wait: bool) -> bool:
        """Begins queued jobs while there are buffers; with `wait`, at least one. False when the link is to end."""
        while buffers:
            with self._changed:
                if wait and not self._window:
                    self._changed.wait_for(lambda: self._jobs or self._reason is not None)
                if self._reason is not None:
                    return False
                if not self._jobs:
                    return True
                job = self._jobs.popleft()
            try:
                pending = job.begin(link, buffers[-1])
            except BaseException as error:
                job.fail(str(error))
                raise
            if pending is not None:
                self._window.append((job, pending, buffers.pop()))
        return True


class LinkManager:
    """All links of one worker, by the other worker's incarnation. Touched by the event loop only."""

    def __init__(self, max_links: int) -> None:
        self._max_links = max_links
        self._links: OrderedDict[str, LinkThread] = OrderedDict()
        self._ending: set[LinkThread] = set()

    def __len__(self) -> int:
        return len(self._links)

    def epoch(self, peer: str) -> int:
        """Of the link to `peer`; 0 where there is none."""
        link = self._links.get(peer)
        return 0 if link is None else link.spec.epoch

    def open(self, spec: LinkSpec) -> bool:
        """Begins to make a link; jobs may be submitted at once. An older link of the pair is closed.

        False where `max_links` are open and none of them is idle.
        """
        self.close(spec.peer, "superseded by a later epoch")
        if len(self._links) >= self._max_links and not self._close_one_idle():
            return False
        link = LinkThread(spec, asyncio.get_running_loop())
        self._links[spec.peer] = link
        link.thread.start()
        return True

    def meet(self, peer: str, epoch: int, entry: str, value: bytes) -> None:
        """Takes an entry of the other end's rendezvous; one of another epoch is dropped."""
        link = self._links.get(peer)
        if link is not None and link.spec.epoch == epoch:
            link.meeting.put(entry, value)

    def submit(self, peer: str, epoch: int, job: Job) -> None:
        """Queues a job for the link of this epoch; fails it at once where that has ended."""
        link = self._links.get(peer)
        if link is None or link.spec.epoch != epoch:
            job.fail("the link of this epoch has ended")
            return
        self._links.move_to_end(peer)
        link.submit(job)

    def close(self, peer: str, reason: str) -> None:
        """Ends the link to `peer`, if there is one; `on_end` follows."""
        link = self._links.pop(peer, None)
        if link is not None:
            self._retire(link, reason)

    def ended(self, peer: str, epoch: int) -> None:
        """Forgets a link whose `on_end` was called."""
        link = self._links.get(peer)
        if link is not None and link.spec.epoch == epoch:
            self._retire(self._links.pop(peer), "ended")

    async def shut_down(self, timeout: float) -> None:
        """Ends all links and waits for their threads, `timeout` seconds at most."""
        for peer in list(self._links):
            self.close(peer, "this worker is shutting down")
        deadline = asyncio.get_running_loop().time() + timeout
        while any(link.thread.is_alive() for link in self._ending):
            if asyncio.get_running_loop().time() > deadline:
                logger.warning("links still blocked at shutdown", extra={"links": len(self._ending)})
                return
            await asyncio.sleep(0.005)

    def _close_one_idle(self) -> bool:
        for peer, link in self._links.items():
            if link.spec.idle():
                self.close(peer, "closed to make room for another link")
                return True
        return False

    def _retire(self, link: LinkThread, reason: str) -> None:
        link.close(reason)
        self._ending = {old for old in self._ending if old.thread.is_alive()} | {link}
