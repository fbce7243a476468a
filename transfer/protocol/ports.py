"""Interfaces to what the coordinators of the hand-off need from outside: the product has real ones, tests simulate
them.

Runtime        the clock and the event loop     `LoopRuntime`, one per process
ControlStream  messages to one peer             `prefill_worker.handoff_client`, `decode_worker.handoff_service`
Links          links to all peers               `transfer.links.LinkManager`, for the ranks of one process
                                                `transfer.links.RankLinks`, for a worker of several ranks
Job            the transfer of one frame        made by `transfer.frames.PoolFrames`; it has a `BlockClaim`
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.protocol.messages import Code, Key, Message
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.protocol.routes import RankPair, Route

logger = logging.getLogger(__name__)

SENDER, RECEIVER = 0, 1
"""Ranks of a link's two ends."""


class NoTransportError(ValueError):
    """No transport suits both workers of a pair; the text says which each can use, and why no other."""


class Runtime(Protocol):
    """Clock and event loop of one process."""

    def now(self) -> float:
        """Monotonic time in seconds."""

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Runs `call` on the event loop, after this returns and in the order of posting. Any thread."""


class ControlStream(Protocol):
    """This end of one control stream. Used on the event loop."""

    @property
    def peer(self) -> Peer: ...

    def put(self, *messages: Message) -> None:
        """Queues messages in order; drops them once the stream has ended."""

    def end(self, code: Code, message: str) -> None:
        """Ends the stream for this reason, which the peer is told. The endpoint's `stream_ended` follows."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """Report of the end of one epoch's links. The first link that ends, ends all."""

    epoch: int
    reason: str
    up: bool
    """Whether a link of the epoch had carried its first bytes. If not, opening the next ones at once makes no sense."""
    stuck: Key | None
    """Hand-off whose frame took longer than a frame may. Other frames that failed had not begun."""
    worker_lost: bool = False
    """Whether the link ended because this worker has lost a rank: then the worker itself is about to end."""

    def gives_up(self, key: Key) -> bool:
        """Whether the hand-off `key` should be retried elsewhere, and not over the next link of this pair."""
        return not self.up or self.stuck == key


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The links of one epoch, which are to be opened. The callbacks run on the event loop."""

    local: str
    """Incarnation of this worker."""
    peer: str
    """Incarnation of the other worker."""
    epoch: int
    transport: str
    """Name of the transport."""
    rank: int
    """SENDER or RECEIVER."""
    frame_bytes: int
    """KV bytes of a frame at most."""
    tell: Callable[[RankPair, str, bytes], None]
    """Sends an entry of a link's rendezvous to the other end."""
    on_end: Callable[[LinkEnd], None]
    """Called once, when a link has ended for whatever reason; the others end with it."""
    idle: Callable[[], bool]
    """Whether no hand-off needs the links, so that they may be closed in favour of others."""
    links: tuple[RankPair, ...] = (RankPair(),)
    """Ranks of each link's two ends."""
    on_up: Callable[[], object] = lambda: None
    """Called when a link has carried its first bytes."""

    def name(self, ranks: RankPair) -> str:
        """The name of this link and no other; equal at both ends."""
        ends = (self.local, self.peer) if self.rank == SENDER else (self.peer, self.local)
        return f"{' '.join(ends)} {self.epoch} {ranks.sender} {ranks.receiver}"


class Links(Protocol):
    """The links of one worker: at most one epoch per peer, with a link for each pair of ranks that share a route. Used
    on the event loop."""

    def transport_for(self, peer: Peer) -> str:
        """The name of the transport of this pair.

        Raises:
            NoTransportError: there is none.
        """

    def epoch(self, peer: str) -> int:
        """Epoch of the links to this incarnation; 0 if there are none."""

    def open(self, spec: LinkSpec) -> bool:
        """Starts to open links; jobs may be submitted at once. Older links of the pair are closed.

        False if that would exceed `transfer.max_links` or `transfer.gpu_buffer_bytes`, and no open links are idle.
        """

    def meet(self, peer: str, epoch: int, ranks: RankPair, entry: str, value: bytes) -> None:
        """Takes an entry of the other end's rendezvous; ignores one of another epoch, or of ranks without a link."""

    def submit(self, peer: str, epoch: int, ranks: RankPair, job: Any) -> None:
        """Queues a job for a link of this epoch; fails the job at once if that link has ended."""

    def after_frames(self, peer: str, epoch: int, key: Key, call: Callable[[], object]) -> None:
        """Runs `call` on the event loop behind the announcements of the hand-off's frames that were queued before.

        Never, if the link ends.
        """

    def close(self, peer: str, reason: str) -> None:
        """Ends the links to `peer`, if there are any; `on_end` follows."""


class BlockClaim:
    """Lets one thread touch the blocks of one frame, once, unless the claim was closed before."""

    def __init__(self, written: KVWrites = WRITTEN) -> None:
        """`written`: when the frame's KV is in the blocks, if they are to be read."""
        self.written = written
        self.in_place = False
        """Whether the frame is sent from where it lies in a pool on a GPU, or in registered memory."""
        self._lock = threading.Lock()
        self._entered = self._closed = False
        self._stop: Callable[[], object] | None = None

    def give(self, stop: Callable[[], object]) -> None:
        """The blocks are another rank's, which has a claim of its own: `close` calls `stop`, so that it is closed."""
        self._stop = stop

    def enter(self) -> bool:
        """Whether the caller may touch the blocks now. After True nobody else gets True."""
        with self._lock:
            self._entered = not self._closed
            self._closed = True
            return self._entered

    def close(self) -> bool:
        """Keeps every thread out. True for the caller that closed it: nobody has touched the blocks or will."""
        if self._stop is not None:
            self._stop()
            return False
        with self._lock:
            first = not self._closed
            self._closed = True
            return first


@dataclass(frozen=True, slots=True)
class FrameTask:
    """A frame that one end sends or receives, and its place there."""

    key: Key
    frame: Frame
    claim: BlockClaim
    place: Any
    """The sequence's block table; for a frame of states, the tensors that are sent, or the one that is filled."""
    route: Route


class LoopRuntime:
    """The running asyncio loop and the monotonic clock."""

    def __init__(self) -> None:
        """Takes the running loop."""
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return time.monotonic()

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        # A closed loop raises RuntimeError; nobody is left to be informed then.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)


async def every(seconds: float, call: Callable[[], None]) -> None:
    """Calls `call` periodically, until the task is cancelled. An exception is logged and does not end the period."""
    while True:
        await asyncio.sleep(seconds)
        try:
            call()
        except Exception:
            logger.exception("a deadline's consequence failed")
