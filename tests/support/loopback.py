"""A whole hand-off in one thread: real machines, jobs and pools, and a list in the place of the link.

A test may damage what is in that list.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.frames import DrainJob, PoolFrames, ReceiveJob, SendJob
from kvrelay.transfer.protocol.events import (
    Commit,
    Computed,
    Expected,
    Failed,
    Finished,
    FrameEnded,
    LinkLost,
    LinkUp,
    Manifest,
    Outcome,
    ReceiveFrame,
    ReleaseHold,
    Reserve,
    Reserved,
    SendFinish,
    SendFrame,
    StopFrames,
    Tell,
    Timeouts,
)
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import Code, Finish, Key, Push
from kvrelay.transfer.protocol.ports import BlockClaim
from kvrelay.transfer.protocol.table import ReceiveAttempt, SendAttempt
from kvrelay.transfer.transports.base import LinkError
from support.handoff import FIRST_TOKEN, RECEIVER, SENDER

DIGEST = b"d" * 16
ROUNDS = 6
"""Links that one hand-off may use."""
WAIT = 60.0


@dataclass
class Crossing:
    """One frame: its announcement, and its bytes on the link. A test may change either, or the order of frames."""

    push: Push | None
    data: bytes | None


class Memory:
    """Both ends of a link. With `streams` it carries memory."""

    mac_key: bytes | None = None
    lender = None

    def __init__(self, streams: bool) -> None:
        self.sent: list[bytes] = []
        self.arrived: deque[bytes] = deque()
        self.stream = self if streams else None
        self._rest = b""

    def send(self, data: torch.Tensor) -> "Done":
        self.sent.append(data.numpy().tobytes())
        return Done()

    def recv(self, into: torch.Tensor) -> "Done":
        data = self._next()
        if len(data) != into.numel():
            raise LinkError(f"{len(data)} bytes arrived; {into.numel()} were expected")
        into.numpy().data[:] = data
        return Done()

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        self._rest += b"".join(runs)

    def flush(self) -> None:
        """Takes the bytes written since the last call as one frame."""
        if self._rest:
            self.sent.append(self._rest)
            self._rest = b""

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        for run in runs:
            while len(self._rest) < len(run):
                self._rest += self._next()
            run[:], self._rest = self._rest[: len(run)], self._rest[len(run) :]

    def _next(self) -> bytes:
        if not self.arrived:
            raise LinkError("no bytes are left")
        return self.arrived.popleft()


class Done:
    """A transfer that is over."""

    def wait(self, timeout: float) -> None: ...


@dataclass
class Handed:
    """Outcome of a hand-off."""

    committed: list[Any] = field(default_factory=list)
    codes: list[Code] = field(default_factory=list)
    holds: int = 0
    released: int = 0
    epochs: int = 0


Damage = Callable[[int, list[Crossing]], None]
"""Function that gets the epoch and the frames on its link, and changes them in place."""


class Loopback:
    """Hand-offs from `source` to `target`, one at a time; of whole prompts, all computed before the first frame."""

    def __init__(self, source: KVPool, target: KVPool, frame_blocks: int, streams: bool = False) -> None:
        self.layout = source.layout
        self.left, self.right = PoolFrames(source, checksum=True), PoolFrames(target, checksum=True)
        self.hello = LocalWorker(SENDER, self.layout, "").hello(RECEIVER, TransferConfig())
        self.frame_tokens = frame_blocks * self.layout.block_size
        self.streams = streams
        self.buffer = torch.empty(self.frame_tokens * self.layout.token_bytes + 64, dtype=torch.uint8)

    def hand_over(self, key: Key, blocks: Sequence[int], into: Sequence[int], tokens: int, damage: Damage) -> Handed:
        """Sends the blocks' KV; `damage` changes the frames of each epoch on their way."""
        shape = Manifest(tokens, DIGEST, self.layout.token_bytes, self.layout.block_size, self.frame_tokens)
        self.handed = Handed(holds=2)
        self.key, self.blocks, self.into, self.damage = key, blocks, into, damage
        self.sender = SendAttempt(key, shape, Timeouts(), 0.0)
        self.receiver = ReceiveAttempt(key, Timeouts(), 0.0)
        self.claims: dict[tuple[bool, Any], BlockClaim] = {}
        self.jobs: list[SendJob | Finish] = []
        self.to_sender: deque[Any] = deque()
        self._receive(LinkUp(1))
        self._receive(Expected(shape))
        self._receive(self.sender.offer)
        self._send(Computed(0, "first"))
        self._send(Finished(FIRST_TOKEN, "all"))
        self.handed.holds += 1  # the reservation
        for epoch in range(1, ROUNDS):
            self.handed.epochs = epoch
            self._drain()
            if self.sender.state.over and self.receiver.state.over:
                break
            if not self._cross(epoch):
                self._drain()
                self._send(LinkLost(epoch))
                self._receive(LinkUp(epoch + 1))
        self._drain()
        return self.handed

    # The sender's end.

    def _drain(self) -> None:
        while self.to_sender:
            self._send(self.to_sender.popleft())

    def _send(self, event: Any) -> None:
        for action in self.sender.on(event, 0.0):
            match action:
                case SendFrame(frame):
                    claim = self.claims[True, frame] = BlockClaim()
                    ended = partial(self.to_sender.append, FrameEnded(frame))
                    job = self.left.send(self.key, frame, claim, self.blocks, self.hello, self._announce, ended)
                    self.jobs.append(job)
                case SendFinish(message):
                    self.jobs.append(message)
                case StopFrames(frames):
                    for frame in frames:
                        if self.claims[True, frame].close():
                            self.to_sender.append(FrameEnded(frame))
                case ReleaseHold():
                    self.handed.released += 1
                case Failed(code):
                    self.handed.codes.append(code)
                case Tell(message):
                    self._receive(message)

    def _announce(self, push: Push) -> None:
        self.pushes.append(push)

    # The link.

    def _cross(self, epoch: int) -> bool:
        """Sends the queued frames over a link; False if that ends on the way."""
        link = Memory(self.streams)
        self.pushes: list[Push] = []
        finish: Finish | None = None
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            if isinstance(job, Finish):
                finish = job
                continue
            pending = job.begin(link, self.buffer)  # type: ignore[arg-type]  # the parts of a link that a job uses
            if pending is not None:
                pending.wait(WAIT)
                link.flush()
                job.done(self.buffer)
        crossings = [Crossing(push, data) for push, data in zip(self.pushes, link.sent, strict=True)]
        self.damage(epoch, crossings)
        link.arrived = deque(crossing.data for crossing in crossings if crossing.data is not None)
        self.whole = True
        for crossing in crossings:
            if crossing.push is not None:
                self._receive(crossing.push, link)
        if finish is not None:
            self._receive(finish)
        return self.whole

    # The receiver's end.

    def _receive(self, event: Any, link: Memory | None = None) -> None:
        actions = self.receiver.on(event, 0.0)
        if isinstance(event, Push) and not any(isinstance(action, ReceiveFrame) for action in actions):
            self._run(self.right.drain(event.nbytes, self.hello), link)
        for action in actions:
            match action:
                case ReceiveFrame(frame):
                    claim = self.claims[False, frame] = BlockClaim()
                    ended: list[Outcome] = []
                    self._run(self.right.receive(self.key, frame, claim, self.into, 0, self.hello, ended.append), link)
                    # A frame that fails its checksum ends the link, as in `KVReceiver`.
                    self.whole = self.whole and ended[0] is not Outcome.CORRUPT
                    self._receive(FrameEnded(frame, ended[0]))
                case Reserve():
                    self._receive(Reserved("reservation"))
                case StopFrames(frames):
                    for frame in frames:
                        if self.claims[False, frame].close():
                            self._receive(FrameEnded(frame, Outcome.LOST))
                case ReleaseHold():
                    self.handed.released += 1
                case Commit(_, first_token):
                    self.handed.committed.append(first_token)
                    self.handed.released += 1
                case Failed(code):
                    self.handed.codes.append(code)
                case Tell(message):
                    self.to_sender.append(message)

    def _run(self, job: ReceiveJob | DrainJob, link: Memory | None) -> None:
        if link is None or not self.whole:
            job.fail("no link")
            return
        try:
            pending = job.begin(link, self.buffer)  # type: ignore[arg-type]  # the parts of a link that a job uses
            assert pending is not None
            pending.wait(WAIT)
            job.done(self.buffer)
        except LinkError as error:
            self.whole = False
            job.fail(str(error))
