"""Streams and links of the simulated hand-off: they carry messages and frames between two processes, or fail to.

A stream of a `hostile` world loses, doubles and reorders messages; other streams are in order until they are cut. A
link moves frames through one thread at each end, in order, and breaks as a whole. The jobs of the frames and the
manager of the links are those of the product, so the bytes on a link and their checksums are real ones.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvrelay.transfer.frames.checks import MAX_TRAILER_BYTES, trailer_bytes
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.links import AfterFrames
from kvrelay.transfer.protocol.events import Outcome
from kvrelay.transfer.protocol.messages import Code, Grant, Hello, Key, Message, Push, Refuse
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.protocol.ports import SENDER, FrameTask, LinkSpec
from kvrelay.transfer.protocol.routes import RankPair, Route
from kvrelay.transfer.transports.base import LinkError, Pending
from support.simulation.blocks import FLOATS, Blocks, Violation, WatchedClaim
from support.simulation.damage import Crossing, History

TIMEOUT = 0.5
"""Seconds that opening a link, and each frame, may take."""


class Stream:
    """The control stream between one prefill and one decode process."""

    def __init__(self, world: Any, left: Any, right: Any) -> None:
        self.world = world
        self.left, self.right = StreamSide(self, left, right), StreamSide(self, right, left)
        self.silenced: set[StreamSide] = set()
        """The sides whose messages are lost, to the stream's end: nothing arrives behind a message that did not."""

    def send(self, side: "StreamSide", message: Message) -> None:
        other = self.right if side is self.left else self.left
        if side in self.silenced or other.over:
            return
        world, random = self.world, self.world.random
        if not world.hostile or isinstance(message, Hello | Refuse):
            at = side.last = max(side.last, world.now + random() * 0.02)
            world.post_at(at, other.process, other.arrive, message)
            return
        roll = random()
        if roll < 0.03:
            return
        if isinstance(message, Grant) and random() < 0.05:
            message = replace(
                message, have=(message.have[0] + 1, *message.have[1:])
            )  # inside a block, or behind the last token
        delay = random() * (2.0 if roll > 0.92 else 0.02)
        for _ in range(2 if roll < 0.06 else 1):
            world.post(delay, other.process, other.arrive, message)
            delay += random() * 0.5

    def cut(self) -> None:
        """Cuts the stream; each side notices in its time."""
        for side in (self.left, self.right):
            self.world.post(self.world.random() * 0.2, side.process, side.finish, Code.CLOSED, "the stream was cut")


class StreamSide:
    """One end of a control stream; implements `ControlStream`."""

    def __init__(self, stream: Stream, process: Any, other: Any) -> None:
        self.stream = stream
        self.process = process
        self.peer: Peer = other.peer
        self.over = False
        self.last = 0.0
        self.greeted = False
        """Whether the endpoint knows this side; the right one's only once it has accepted the stream."""
        self._early: list[Message] = []

    def greet(self) -> None:
        """The endpoint takes messages from here on."""
        self.greeted = True
        for message in self._early:
            self.arrive(message)

    def put(self, *messages: Message) -> None:
        if not self.over:
            for message in messages:
                self.stream.send(self, message)

    def end(self, code: Code, message: str) -> None:
        if self.over:
            return
        if self is self.stream.right:
            self.put(Refuse(code, message))
        self.over = True
        world, other = self.stream.world, self.stream.left if self is self.stream.right else self.stream.right
        world.post(0.0, self.process, self.process.endpoint.stream_ended, self, code, message)
        world.post(world.random() * 0.1, other.process, other.finish, Code.CLOSED, "the peer ended the stream")

    def finish(self, code: Code, message: str) -> None:
        """The connection is lost at this side."""
        if not self.over:
            self.over = True
            self.process.endpoint.stream_ended(self, code, message)

    def arrive(self, message: Message) -> None:
        if self is self.stream.right and isinstance(message, Hello):
            return  # taken by `DecodeProcess.accept`
        if not self.greeted:
            self._early.append(message)
        elif not self.over:
            self.process.endpoint.on_message(self, message)


@dataclass(slots=True, eq=False)
class Work:
    """A job of the product, with what the simulated thread has to know of it."""

    job: Any
    claim: WatchedClaim | None = None
    nbytes: int = 0
    """Bytes to be received, with the trailer."""
    announce: Callable[[Push], None] = print
    pushes: list[Push] = field(default_factory=list)

    @property
    def key(self) -> Key | None:
        key: Key | None = self.job.key
        return key

    @property
    def written(self) -> Any:
        return self.job.written

    def fail(self, message: str) -> None:
        self.job.fail(message)


class SimulatedFrames(PoolFrames):
    """Makes the work of one rank of a process."""

    def __init__(self, blocks: Blocks, checksum: bool, rank: int = 0) -> None:
        super().__init__(blocks.ranks[rank], checksum)
        self._blocks = blocks

    def send(self, task: FrameTask, announce: Callable[[Push], None], on_read: Callable[[], None]) -> Any:
        if task.frame.states and sum(map(len, task.place)) != task.frame.tokens:
            raise Violation("lost", f"{task.key}: {task.frame} has the states of {sum(map(len, task.place))} tokens")
        watched, pushes = self._watched(task, None), list[Push]()
        job = super().send(replace(task, claim=watched), pushes.append, watched.ending(on_read))
        return Work(job, watched, announce=announce, pushes=pushes)

    def receive(self, task: FrameTask, keep: int, on_end: Callable[[Outcome], None]) -> Any:
        watched = self._watched(task, task.route.ranks)
        job = super().receive(replace(task, claim=watched), keep, watched.ending(on_end))
        return Work(job, watched, task.frame.nbytes + trailer_bytes(self._kind(task.route), None))

    def drain(self, nbytes: int, route: Route) -> Any:
        return Work(super().drain(nbytes, route), nbytes=nbytes + trailer_bytes(self._kind(route), None))

    def _watched(self, task: FrameTask, part: Any) -> WatchedClaim:
        frame, size = task.frame, self.block_size(task.route.track)
        end = -(-(frame.first + frame.tokens) // size)
        blocks = [] if frame.states else list(task.place[frame.first // size : end])
        if min(blocks, default=0) < 0:
            raise Violation("owner", f"{task.key}: {frame} is of blocks {blocks}")
        return WatchedClaim(task.claim, self._blocks, task.key, blocks, part)


class Wire:
    """A link as the jobs of its two ends see it. With `streams` it carries memory."""

    mac_key = None
    lender = None

    def __init__(self, streams: bool) -> None:
        self.stream = self if streams else None
        self.frames: deque[memoryview] = deque()
        """Bytes under way, a frame each."""
        self.torn = False
        self._sent = bytearray()

    def taken(self) -> bytes:
        """The bytes sent since the last call."""
        data, self._sent = bytes(self._sent), bytearray()
        return data

    def has(self, nbytes: int) -> bool:
        """Whether a frame of this size can be received; another size is an error where frames are kept apart."""
        return bool(self.frames) and (self.stream is None or sum(map(len, self.frames)) >= nbytes)

    def send(self, data: torch.Tensor) -> Pending:
        self._sent += data.numpy().data
        return Pending(lambda timeout: None)

    def recv(self, into: torch.Tensor) -> Pending:
        def receive(timeout: float) -> None:
            if self.torn or len(self.frames[0]) != len(into):
                raise LinkError("torn, or a frame of another size")
            into.numpy().data[:] = self.frames.popleft()

        return Pending(receive)

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        for run in runs:
            self._sent += run

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        for run in runs:
            if self.torn:  # any part of the memory may have been written
                run[: len(run) // 2] = bytes(len(run) // 2)
                raise LinkError("torn")
            while run:
                part = self.frames[0][: len(run)]
                run[: len(part)] = part
                run, self.frames[0] = run[len(part) :], self.frames[0][len(part) :]
                if not self.frames[0]:
                    self.frames.popleft()


_BUFFER = torch.empty(2 * FLOATS.block_bytes + MAX_TRAILER_BYTES, dtype=torch.uint8)
"""The buffer of all links: jobs are done with it before another one begins."""


class SimulatedThread:
    """One end of a link, in the place of the product's `LinkThread`."""

    def __init__(
        self, spec: LinkSpec, ranks: RankPair, transport: Any, timeouts: Any, runtime: Any, on_up: Any, on_end: Any
    ) -> None:
        self.spec = spec
        self.ranks = ranks
        self.process = runtime
        self.thread = self
        """The manager asks it whether it has ended."""
        self.work: deque[Any] = deque()
        self.busy = self.over = False
        self.on_up = on_up
        self._on_end = on_end
        pair = (spec.local, spec.peer) if spec.rank == SENDER else (spec.peer, spec.local)
        dialled: dict[Any, Link] = runtime.world.dialled
        self.link = dialled.setdefault((*pair, spec.epoch, ranks), Link(runtime.world, *pair, ranks))
        self.link.join(self)

    def start(self) -> None:
        """The link begins with its later end."""

    def is_alive(self) -> bool:
        return False

    def close(self, reason: str) -> None:
        self.link.break_()

    def submit(self, work: Any) -> None:
        if self.over:
            work.fail("the link has ended")
            return
        self.work.append(work)
        self.link.look(self)
        if not work.written.ended:
            work.written.then(lambda: self.link.look(self))

    def next(self) -> Any:
        """Takes the first whose blocks are written. The frames of a hand-off keep their order."""
        waiting: set[Key | None] = set()
        for work in self.work:
            if work.key not in waiting and work.written.ended:
                self.work.remove(work)
                return work
            waiting.add(work.key)
        return None

    def end(self, stuck: Key | None) -> None:
        """The thread ends, after what it does now."""
        if self.over or self.busy:
            return
        self.over = True
        while self.work:
            self.work.popleft().fail("the link has ended")
        self.process.post(self._on_end, self, "broke", stuck)


class Link:
    """One epoch's link of a pair: the wire and both ends' threads."""

    def __init__(self, world: Any, left: str, right: str, ranks: RankPair) -> None:
        self.world = world
        self.ends: list[SimulatedThread] = []
        """The ends that are there; once it is up, the left one and the right one."""
        self.up = self.broken = False
        self.wire = Wire(world.streams_of_memory)
        self._history = world.histories.setdefault((left, right, ranks), History([], []))
        self._watched = False
        self._stuck: Key | None = None

    def _check_up(self) -> None:
        if not self.up:
            self.break_()

    def join(self, end: SimulatedThread) -> None:
        """An end is there; the second one is of no use if the first one has given up already."""
        self.ends.insert(0 if end.spec.rank == SENDER else len(self.ends), end)
        if self.broken:
            self.world.post(0.01, end.process, self._end, end)
        elif len(self.ends) == 1:
            self.world.post(TIMEOUT, end.process, self._check_up)
        else:
            self.up = True
            for each in self.ends:
                each.process.post(each.on_up)
            self.world.post(self.world.random() * 0.02, self.ends[0].process, self._send_next)

    def break_(self) -> None:
        """The link carries nothing any more; each end finds out in its time."""
        if not self.broken:
            self.broken = self.wire.torn = True
            for end in self.ends:
                self.world.post(self.world.random() * 0.1, end.process, self._end, end)

    def _end(self, end: SimulatedThread) -> None:
        end.end(self._stuck)

    def look(self, end: SimulatedThread) -> None:
        """There may be something to do at this end."""
        if end.spec.rank == SENDER:
            self._send_next()
        elif self.up:
            self._watch()
            self._receive_next()

    # The left end: reads blocks, announces, sends.

    def _send_next(self) -> None:
        world, left = self.world, self.ends[0]
        if self.up and self.ends[1].work:
            self._watch()
        while self.up and not left.busy and not self.broken and (work := left.next()) is not None:
            if isinstance(work, AfterFrames):
                work.begin(self.wire, _BUFFER)  # type: ignore[arg-type]  # it transfers nothing
            elif work.claim is not None and work.claim.take():
                left.busy = True
                world.post(world.random() * (2.5 if world.slow_frame() else 0.02), left.process, self._was_read, work)

    def _was_read(self, work: Work) -> None:
        left, world = self.ends[0], self.world
        left.busy = False
        if self.broken:
            work.fail("the link broke")
            self._end(left)
            return
        work.job.begin(self.wire, _BUFFER).wait(TIMEOUT)
        work.job.done(_BUFFER)
        held, self._history.held = self._history.held, []
        for crossing in [*self._damaged(Crossing(work.pushes.pop(), self.wire.taken(), work.announce)), *held]:
            if crossing.push is not None:
                crossing.announce(crossing.push)
            if crossing.data:
                self.wire.frames.append(memoryview(crossing.data))
        world.post(world.random() * 0.01, self.ends[1].process, self._receive_next)
        self._watch()
        self._send_next()

    def _damaged(self, crossing: Crossing) -> list[Crossing]:
        history, damage = self._history, self.world.damage()
        found = [crossing]
        if damage is not None and history.crossed:
            found = damage(self.world.rng, crossing, history)
        if self.world.link_noise:
            history.crossed.append(crossing)
        return found

    # The right end: receives, verifies, writes blocks.

    def _receive_next(self) -> None:
        world, right = self.world, self.ends[1]
        if right.work and self.wire.has(right.work[0].nbytes) and not right.busy and not self.broken:
            work = right.work.popleft()
            if work.claim is not None:
                # Bytes may lie in the blocks before they are verified; they count only afterwards.
                work.claim.take()
            right.busy = True
            world.post(world.random() * (2.5 if world.slow_frame() else 0.01), right.process, self._was_written, work)

    def _was_written(self, work: Work) -> None:
        right = self.ends[1]
        right.busy = False
        try:
            work.job.begin(self.wire, _BUFFER).wait(TIMEOUT)
            work.job.done(_BUFFER)
        except LinkError as error:
            work.fail(str(error))
            self.break_()
        if self.broken:
            self._end(right)
        else:
            self._receive_next()

    # Either end.

    def _watch(self) -> None:
        """A frame that isn't taken, or doesn't come, ends the link within two timeouts."""
        if not self._watched:
            self._watched = True
            heads = self._heads()
            self.world.post(TIMEOUT, self.ends[0].process, self._check, heads[0] if heads else None)

    def _heads(self) -> list[object]:
        """The frame and the receive that have waited longest."""
        return [queue[0] for queue in (self.wire.frames, self.ends[-1].work if self.up else ()) if queue]

    def _check(self, oldest: object) -> None:
        self._watched = False
        heads = self._heads()
        if any(head is oldest for head in heads) and not self.ends[-1].busy:
            self._stuck = next((work.key for work in self.ends[-1].work), None)
            self.break_()
        elif heads and not self.broken:
            self._watch()
