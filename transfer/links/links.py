"""The links of one process: one per pair of ranks, opened on demand, each with an I/O thread, discarded on the first
error. All links between two workers are of one epoch, and end with the first of them that does.

    queue          producer                          consumer
    jobs           the event loop (`submit`)         the link's thread, first in, first out but for KV that isn't there
    ends of links  the link's thread                 the event loop (`LinkSpec.on_end`)

A thread has two buffers, so that one frame is on the wire while the bytes of the next (sending) or the previous one
(receiving) are copied and hashed. A receive starts only for a frame that the other end has announced, because a receive
that waits for nothing would time out and end the link.

A frame may be queued while the step that computes it runs on a GPU. It begins when its KV is there; jobs of other
hand-offs pass it meanwhile. If none can, its copy to the buffer is queued on the GPU behind the step (`prepare`), so
that only its announcement is left when the step ends.
"""

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.transfer.config import BETWEEN_GPUS, LINK_BUFFERS
from kvrelay.transfer.frames.checks import MAX_TRAILER_BYTES
from kvrelay.transfer.protocol.messages import Key
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.protocol.ports import SENDER, LinkEnd, LinkSpec, NoTransportError, Runtime
from kvrelay.transfer.protocol.routes import RankPair
from kvrelay.transfer.transports.base import Link, LinkError, Pending, Rendezvous, Transport, take_link_stream
from kvrelay.transfer.transports.registry import choose, entries

logger = logging.getLogger(__name__)

LATE_SHARE = 0.8
"""Share of a frame's timeout after which the end of the link is attributed to the frame that is waited for."""

CLOSE_SECONDS = 2.0
"""Longest time in seconds that the process waits for a link to close. After that its thread goes on alone."""


class LinkTimeouts(NamedTuple):
    """Timeouts of a link, in seconds."""

    frame: float
    """Seconds for each frame, and to open a link between hosts."""
    dial: float
    """Seconds to open a link between GPUs."""

    def to_open(self, transport: str) -> float:
        """The seconds to open a link of the transport with this name."""
        return max(self.dial, self.frame) if transport in BETWEEN_GPUS else self.frame


class LinkLimits(NamedTuple):
    """Limits of all links of a process together."""

    links: int
    """Number of peers that links are open to, `TransferConfig.max_links`."""
    gpu_buffer_bytes: int
    """Bytes of GPU memory, `TransferConfig.gpu_buffer_bytes`."""


class Job(Protocol):
    """The transfer of one frame on a link's thread: `begin`, then `done`; or `fail` at any point, as the last call."""

    @property
    def key(self) -> Key | None:
        """The hand-off that the frame belongs to; None if it belongs to none."""

    @property
    def written(self) -> KVWrites:
        """Writes of the KV that the job reads. `begin` is called after them."""

    def prepare(self, link: Link, buffer: torch.Tensor) -> None:
        """Queues what can be queued before `begin`, and waits for nothing. Called at most once; `begin` gets the same
        buffer.
        """

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        """Begins the transfer, using `buffer`; None if there is nothing left to transfer."""

    def done(self, buffer: torch.Tensor) -> None:
        """Takes note that the transfer has ended; the buffer is reused after the return."""

    def fail(self, message: str) -> None:
        """Takes note that the link ended before the transfer."""


class AfterFrames:
    """A job that transfers nothing: it makes a call once its hand-off's frames, queued before it, are announced."""

    written: KVWrites = WRITTEN

    def __init__(self, key: Key, call: Callable[[], None]) -> None:
        self.key: Key | None = key
        self._call = call

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        self._call()
        return None

    def prepare(self, link: Link, buffer: torch.Tensor) -> None:
        """Never called, because it waits for no KV."""

    def done(self, buffer: torch.Tensor) -> None:
        """Never called, because `begin` starts no transfer."""

    def fail(self, message: str) -> None:
        """Makes no call: the end of the link is reported by the link itself."""


class LinkThread:
    """One end of one link, and the thread that does its I/O."""

    def __init__(
        self,
        spec: LinkSpec,
        ranks: RankPair,
        transport: Transport,
        timeouts: LinkTimeouts,
        runtime: Runtime,
        on_up: Callable[[], None],
        on_end: Callable[["LinkThread", str, Key | None], None],
    ) -> None:
        """
        Args:
            on_up: called on the event loop when the link has carried its first bytes.
            on_end: called on the event loop, once, with the reason and `LinkEnd.stuck`.
        """
        self.spec = spec
        self._transport = transport
        self._timeout, self._open_timeout = timeouts.frame, timeouts.to_open(spec.transport)
        self.meeting = Rendezvous(
            lambda entry, value: runtime.post(spec.tell, ranks, entry, value), self._open_timeout, spec.name(ranks)
        )
        self._runtime = runtime
        self._on_up = on_up
        self._on_end = on_end
        self._jobs: deque[Job] = deque()
        self._ahead: tuple[Job, torch.Tensor] | None = None
        """Job that is prepared, and its buffer."""
        self._window: deque[tuple[Job, Pending, torch.Tensor]] = deque()
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._link: Link | None = None
        self._waiting_since = self._closed_at = math.inf
        # Not a daemon: an interpreter that exits while a thread is inside a transport's C++ code aborts. Every wait of
        # a transport has a timeout, so the exit of the process is delayed by no more than that.
        self.thread = threading.Thread(target=self._run, name=f"link {spec.peer[:8]}/{spec.epoch}")

    def submit(self, job: Job) -> None:
        """Queues a job; fails it at once if the link has ended."""
        late = not job.written.ended  # asked first: the KV may come while the link's thread begins to wait for it
        with self._changed:
            reason = self._reason
            if reason is None:
                self._jobs.append(job)
                self._changed.notify()
        if reason is not None:
            job.fail(reason)
        elif late:
            job.written.then(self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def close(self, reason: str) -> None:
        """Ends the link, and fails queued jobs and those in progress. Never blocks; any thread."""
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
            take_link_stream()
            link = self._transport.connect(self.meeting, self.spec.rank, self._open_timeout)
            with self._changed:
                self._link = link
                closed = self._reason is not None
            if not closed:
                self._warm_up(link)
                self._runtime.post(self._on_up)
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
        ahead = [] if self._ahead is None else [self._ahead[0]]
        failed = [job for job, _, _ in self._window] + ahead + list(self._jobs)
        # The other end may have begun to wait a little earlier. Its timeout then ends the wait of this end, too.
        late = self._closed_at - self._waiting_since > LATE_SHARE * self._timeout
        stuck = self._window[0][0].key if late and self._window else None
        self._window.clear()
        self._jobs.clear()
        self._ahead = None
        for job in failed:
            job.fail(reason)
        self._runtime.post(self._on_end, self, reason, stuck)
        if self._link is not None:
            # Last, because some transports block here; this thread has nothing else to do.
            self._reap(self._link)

    def _reap(self, link: Link) -> None:
        """Closes the link.

        A close that blocks for ever keeps the link's memory, but neither this thread nor the process.
        """
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
            logger.error("closing a link blocks; its thread goes on alone", extra=who)

    def _warm_up(self, link: Link) -> None:
        """Sends one byte there and back: this makes connections and buffers, and finds a link that carries nothing."""
        byte = link.buffer(1)
        first, second = (link.send, link.recv) if self.spec.rank == SENDER else (link.recv, link.send)
        first(byte).wait(self._open_timeout)
        second(byte).wait(self._open_timeout)

    def _serve(self, link: Link) -> None:
        buffers = [link.buffer(self.spec.frame_bytes + MAX_TRAILER_BYTES) for _ in range(LINK_BUFFERS)]
        while self._begin_jobs(link, buffers):
            job, pending, buffer = self._window[0]
            self._waiting_since = time.monotonic()
            pending.wait(self._timeout)
            self._waiting_since = math.inf
            self._begin_jobs(link, buffers)
            job.done(buffer)
            self._window.popleft()
            buffers.append(buffer)

    def _begin_jobs(self, link: Link, buffers: list[torch.Tensor]) -> bool:
        """Begins queued jobs while there are buffers; waits if none is in progress. False if the link must end."""
        while buffers or self._ahead is not None:
            taken = self._next(buffers)
            if taken is None:
                return self._reason is None
            job, buffer = taken
            try:
                if not job.written.ended:
                    job.prepare(link, buffer)
                    self._ahead = job, buffer
                    continue
                pending = job.begin(link, buffer)
            except BaseException as error:
                job.fail(str(error))
                raise
            if pending is None:
                buffers.append(buffer)
            else:
                self._window.append((job, pending, buffer))
        return True

    def _next(self, buffers: list[torch.Tensor]) -> tuple[Job, torch.Tensor] | None:
        """A job that can begin, and its buffer; if there is none, one to prepare. None if there is neither while a job
        is in progress, or if the link must end.
        """
        with self._changed:
            while self._reason is None:
                if self._ahead is not None and self._ahead[0].written.ended:
                    taken, self._ahead = self._ahead, None
                    return taken
                if buffers and (job := self._first_ready()) is not None:
                    return job, buffers.pop()
                if buffers and self._jobs and self._ahead is None:
                    return self._jobs.popleft(), buffers.pop()
                if self._window:
                    return None
                self._changed.wait()
        return None

    def _first_ready(self) -> Job | None:
        """Takes the first queued job whose KV is there. The frames of a hand-off keep their order."""
        waiting = set() if self._ahead is None else {self._ahead[0].key}
        for index, job in enumerate(self._jobs):
            if job.key not in waiting and job.written.ended:
                del self._jobs[index]
                return job
            waiting.add(job.key)
        return None


@dataclass(slots=True, eq=False)
class EpochLinks:
    """The links of one epoch to one peer, as far as their ends are in this process."""

    spec: LinkSpec
    threads: dict[RankPair, LinkThread] = field(default_factory=dict)
    up: bool = False
    """Whether one of them has carried its first bytes."""
    ended: bool = False
    """Whether the end is reported."""


class LinkManager:
    """All links of one process, by the incarnation of the peer; implements `Links` with real transports."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        limits: LinkLimits,
        timeouts: LinkTimeouts,
        wanted: str,
        runtime: Runtime,
        rank: int = 0,
    ) -> None:
        """
        Args:
            transports: those that this worker can use, best first.
            wanted: `TransferConfig.transport`.
            rank: this process's among the worker's: links of other ranks aren't opened here.
        """
        self._transports = transports
        self._limits = limits
        self._timeouts = timeouts
        self._wanted = wanted
        self._runtime = runtime
        self._rank = rank
        self._links: OrderedDict[str, EpochLinks] = OrderedDict()
        self._ending: set[LinkThread] = set()

    def __len__(self) -> int:
        return len(self._links)

    @property
    def peers(self) -> list[str]:
        """Incarnations of the peers that links are open to."""
        return list(self._links)

    def transport_for(self, peer: Peer) -> str:
        return choose(self._wanted, entries(self._transports), peer.transports)

    def epoch(self, peer: str) -> int:
        links = self._links.get(peer)
        return 0 if links is None else links.spec.epoch

    def open(self, spec: LinkSpec) -> bool:
        transport = self._transports.get(spec.transport)
        if transport is None:
            raise NoTransportError(f"{spec.transport!r}; allowed: {', '.join(self._transports)}")
        self.close(spec.peer, "superseded by a later epoch")
        here = [ranks for ranks in spec.links if ranks[spec.rank] == self._rank]
        while not self._has_room(spec, len(here)):
            if not self._close_one_idle():
                return False
        links = self._links[spec.peer] = EpochLinks(spec)
        on_up, on_end = partial(self._is_up, links), partial(self._ended, links)
        for ranks in here:
            links.threads[ranks] = LinkThread(spec, ranks, transport, self._timeouts, self._runtime, on_up, on_end)
        for link in links.threads.values():
            link.thread.start()
        return True

    def meet(self, peer: str, epoch: int, ranks: RankPair, entry: str, value: bytes) -> None:
        link = self._of(peer, epoch).get(ranks)
        if link is not None:
            link.meeting.put(entry, value)

    def submit(self, peer: str, epoch: int, ranks: RankPair, job: Job) -> None:
        link = self._of(peer, epoch).get(ranks)
        if link is None:
            job.fail("the link of this epoch has ended")
            return
        self._links.move_to_end(peer)
        link.submit(job)

    def after_frames(self, peer: str, epoch: int, key: Key, call: Callable[[], object]) -> None:
        links = list(self._of(peer, epoch).values())
        behind = call if len(links) == 1 else countdown(len(links), call)
        for link in links:
            link.submit(AfterFrames(key, partial(self._runtime.post, behind)))

    def close(self, peer: str, reason: str) -> None:
        links = self._links.pop(peer, None)
        if links is not None:
            self._retire(links, reason)

    async def shut_down(self) -> None:
        """Ends all links and waits for their threads, as long as a transport may block at most."""
        for peer in self.peers:
            self.close(peer, "this worker is shutting down")
        deadline = self._runtime.now() + max(self._timeouts) + self._timeouts.frame + 1.0
        while any(link.thread.is_alive() for link in self._ending):
            if self._runtime.now() > deadline:
                logger.warning("links still blocked at shutdown", extra={"links": len(self._ending)})
                return
            await asyncio.sleep(0.005)

    def _of(self, peer: str, epoch: int) -> dict[RankPair, LinkThread]:
        """The links to a peer; empty if they are of another epoch."""
        links = self._links.get(peer)
        return links.threads if links is not None and links.spec.epoch == epoch else {}

    def _is_up(self, links: EpochLinks) -> None:
        if not links.up:
            links.up = True
            links.spec.on_up()

    def _ended(self, links: EpochLinks, link: LinkThread, reason: str, stuck: Key | None) -> None:
        """Ends all links of an epoch after the first one has ended, and reports that one's reason."""
        if links.ended:
            return
        links.ended = True
        if self._links.get(links.spec.peer) is links:
            self._retire(self._links.pop(links.spec.peer), f"a link of the same epoch has ended: {reason}")
        links.spec.on_end(LinkEnd(links.spec.epoch, reason, links.up, stuck))

    def _has_room(self, spec: LinkSpec, count: int) -> bool:
        """Whether `count` more links, to one more peer, keep within the limits."""
        if len(self._links) >= self._limits.links:
            return False
        if spec.transport not in BETWEEN_GPUS:
            return True
        frames = [spec.frame_bytes] * count
        for other in self._links.values():
            frames += [other.spec.frame_bytes] * len(other.threads) * (other.spec.transport in BETWEEN_GPUS)
        # One link may be larger: a layer of a block is a frame even if it is larger than the largest frame.
        return len(frames) == 1 or LINK_BUFFERS * sum(frames) <= self._limits.gpu_buffer_bytes

    def _close_one_idle(self) -> bool:
        for peer, links in self._links.items():
            if links.spec.idle():
                self.close(peer, "closed in favour of another link")
                return True
        return False

    def _retire(self, links: EpochLinks, reason: str) -> None:
        for link in links.threads.values():
            link.close(reason)
        self._ending = {old for old in self._ending if old.thread.is_alive()} | {*links.threads.values()}


def countdown(count: int, call: Callable[[], object]) -> Callable[[], None]:
    """A function whose last call of `count` calls `call`."""
    left = [None] * count

    def step() -> None:
        left.pop()
        if not left:
            call()

    return step
