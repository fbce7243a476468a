"""A whole hand-off in one thread: the real machines, jobs and pools, and between them a list that a test may damage."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.events import (
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
from kvrelay.transfer.frames import BlockClaim, ChecksumKind, DrainJob, PoolFrame, ReceiveJob, SendJob
from kvrelay.transfer.messages import Code, Finish, Key, Push
from kvrelay.transfer.protocol import ReceiveAttempt, SendAttempt
from kvrelay.transfer.transports.base import LinkError

DIGEST = b"d" * 16
FIRST_TOKEN = 7
ROUNDS = 6


@dataclass
class Crossing:
    """One frame as it crosses: what is announced, and the bytes on the link. A test may change either, or the order."""

    push: Push | None
    data: bytes | None


class Memory:
    """Both ends of a link that is a list. With `streams` it carries memory as it lies."""

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
            raise LinkError(f"{len(data)} bytes came; {into.numel()} were expected")
        into.numpy().data[:] = data
        return Done()

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        self._rest += b"".join(runs)

    def flush(self) -> None:
        """What was written as a stream since the last time is one frame."""
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
            raise LinkError("nothing comes any more")
        return self.arrived.popleft()


class Done:
    """A transfer that is over."""

    def wait(self, timeout: float) -> None: ...


@dataclass
class Handed:
    """How a hand-off ended."""

    committed: list[Any] = field(default_factory=list)
    codes: list[Code] = field(default_factory=list)
    holds: int = 0
    released: int = 0
    epochs: int = 0


Damage = Callable[[int, list[Crossing]], None]
"""Told the epoch and what crosses the link in it; changes it in place."""


class Loopback:
    """Hand-offs from `source` to `target`, one at a time; of whole prompts, all computed before the first frame."""

    def __init__(self, source: KVPool, target: KVPool, frame_blocks: int, streams: bool = False) -> None:
        self.source = source
        self.target = target
        self.layout = source.layout
        self.frame_tokens = frame_blocks * self.layout.block_size
        self.streams = streams
        self.buffer = torch.empty(self.frame_tokens * self.layout.token_bytes + 64, dtype=torch.uint8)

    def hand_over(self, key: Key, blocks: Sequence[int], into: Sequence[int], tokens: int, damage: Damage) -> Handed:
        """Sends the blocks' KV; `damage` is done to each epoch's frames."""
        shape = Manifest(
            tokens, DIGEST, self.layout.token_bytes, self.layout.block_size, self.frame_tokens, self.layout.layers
        )
        self.handed = Handed(holds=2)
        self.key, self.blocks, self.into, self.damage = key, blocks, into, damage
        self.sender = SendAttempt(key, shape, Timeouts(), 0.0)
        self.receiver = ReceiveAttempt(key, Timeouts(), 0.0)
        self.guards: dict[tuple[bool, Any], BlockClaim] = {}
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
                    guard = self.guards[True, frame] = BlockClaim()
                    place = PoolFrame(self.source, self.blocks, frame)
                    ended = partial(self.to_sender.append, FrameEnded(frame))
                    self.jobs.append(SendJob(self.key, frame, guard, place, ChecksumKind.XXH3, self._announce, ended))
                case SendFinish(message):
                    self.jobs.append(message)
                case StopFrames(frames):
                    for frame in frames:
                        if self.guards[True, frame].close():
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
        """What the sender has queued crosses the link; False if that breaks."""
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
                pending.wait(60)
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
            self._run(DrainJob(event.nbytes, True), link)
        for action in actions:
            match action:
                case ReceiveFrame(frame):
                    guard = self.guards[False, frame] = BlockClaim()
                    place = PoolFrame(self.target, self.into, frame)
                    ended: list[Outcome] = []
                    self._run(ReceiveJob(self.key, frame, guard, place, ChecksumKind.XXH3, ended.append), link)
                    # A checksum that fails ends the link, as the importer does.
                    self.whole = self.whole and ended[0] is not Outcome.CORRUPT
                    self._receive(FrameEnded(frame, ended[0]))
                case Reserve():
                    self._receive(Reserved("reservation"))
                case StopFrames(frames):
                    for frame in frames:
                        if self.guards[False, frame].close():
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
            pending.wait(60)
            job.done(self.buffer)
        except LinkError as error:
            self.whole = False
            job.fail(str(error))
