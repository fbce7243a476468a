"""What the two ends of a control stream share: who speaks, the queue of what is to be said, the link of the pair."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.events import Timeouts
from kvrelay.transfer.messages import MAX_KEYS, VERSION, Code, Hello, Key, Message, Renew, in_frames

logger = logging.getLogger(__name__)

MAX_PENDING = 65536
WRITE_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """This worker, as it introduces itself to others."""

    name: str
    incarnation: str
    layout: KVLayout
    fingerprint: str
    """Of the model."""
    gpu: bool = False
    """Whether the KV lies on a GPU."""

    def hello(self, peer_incarnation: str, config: TransferConfig) -> Hello:
        """What this worker says first on a stream."""
        return Hello(
            version=VERSION,
            worker=self.name,
            incarnation=self.incarnation,
            peer_incarnation=peer_incarnation,
            fingerprint=self.fingerprint,
            layout=self.layout,
            checksum=config.checksum,
            gpu=self.gpu,
            frame_bytes=config.frame_bytes,
        )

    def objection(self, hello: Hello, config: TransferConfig) -> tuple[Code, str] | None:
        """Why no KV can be handed over between this worker and the one that said `hello`; names the field."""
        if hello.peer_incarnation != self.incarnation:
            return Code.UNKNOWN_PEER, f"incarnation: {hello.peer_incarnation} was meant, this is {self.incarnation}"
        differing = self.layout.mismatch(hello.layout)
        if differing is not None:
            return Code.INCOMPATIBLE, f"layout.{differing}"
        if self.layout.dtype != hello.layout.dtype and not config.convert_dtype:
            dtypes = f"{self.layout.dtype} here, {hello.layout.dtype} there"
            return Code.INCOMPATIBLE, f"layout.dtype: {dtypes}; transfer.convert_dtype is off"
        for name, mine, theirs in (
            ("version", VERSION, hello.version),
            ("fingerprint", self.fingerprint, hello.fingerprint),
            ("checksum", config.checksum, hello.checksum),
        ):
            if mine != theirs:
                return Code.INCOMPATIBLE, f"{name}: {mine} here, {theirs} there"
        return None


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one hand-off took, as seen at one end."""

    transfer_seconds: float
    """Sender: first frame begun to acknowledgement. Receiver: grant to commit."""
    handoff_seconds: float
    """What no compute hid. Sender: end of prefill to acknowledgement. Receiver: news of that end to commit."""
    nbytes: int
    """KV bytes that crossed the link and were verified."""


def timeouts_of(config: TransferConfig) -> Timeouts:
    """The protocol's bounds."""
    return Timeouts(
        lease=config.lease_seconds,
        grant=config.grant_timeout_seconds,
        prefill=config.prefill_timeout_seconds,
        transfer=config.transfer_timeout_seconds,
    )


class Outbox:
    """Messages that wait to be written to one stream: the event loop puts, the stream's writer takes.

    What comes while a write is under way leaves together in the next frame. A peer that reads so slowly that
    MAX_PENDING messages wait is given up.
    """

    def __init__(self) -> None:
        self._pending: list[Message] = []
        self._ready = asyncio.Event()
        self.closed = False

    def put(self, *messages: Message) -> None:
        """Queues messages; drops them once the stream is closed."""
        if self.closed:
            return
        self._pending += messages
        if len(self._pending) > MAX_PENDING:
            logger.error("a peer reads its control stream too slowly; it is given up")
            self.close()
        self._ready.set()

    def close(self) -> None:
        """Lets what is queued be written, and ends `frames`."""
        self.closed = True
        self._ready.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """What to write, in order, until the outbox is closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._pending:
                batch, self._pending = self._pending, []
                for frame in in_frames(batch):
                    yield frame
            if self.closed:
                return


def renewals(keys: Iterable[Key]) -> list[Renew]:
    """Signs of life for `keys`, in as many messages as it takes."""
    every = list(keys)
    return [Renew(tuple(every[start : start + MAX_KEYS])) for start in range(0, len(every), MAX_KEYS)]


def tick_seconds(config: TransferConfig) -> float:
    """How often deadlines are looked at; a quarter of what the shortest of them is, between 5 ms and 0.25 s."""
    shortest = min(config.lease_seconds, config.grant_timeout_seconds, config.transfer_timeout_seconds)
    return min(0.25, max(0.005, shortest / 4))


def post(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *arguments: object) -> None:
    """Runs `what` on the loop, from any thread. Where the loop has closed, nobody is left to be told."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *arguments)


async def every(seconds: float, what: Callable[[], None]) -> None:
    """Calls `what` again and again, for as long as the task lives: no wait is without a deadline, whatever happens."""
    while True:
        await asyncio.sleep(seconds)
        try:
            what()
        except Exception:
            logger.exception("a deadline's consequence failed")
