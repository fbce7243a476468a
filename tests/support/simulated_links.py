"""Streams and links of the simulated hand-off: they carry messages and frames between two processes, or fail to.

A stream of a `hostile` world loses, doubles and reorders messages; other streams are in order until they are cut. A
link takes frames through one thread at each end, in order, and breaks as a whole; frames on it may be damaged.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.engine.states import StatesLayout
from kvrelay.transfer.frames.frames import announce
from kvrelay.transfer.protocol.events import Frame, Outcome
from kvrelay.transfer.protocol.messages import Code, Grant, Hello, Key, Message, Push, Refuse
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.protocol.ports import SENDER, BlockClaim, LinkEnd, LinkSpec
from support.simulated_blocks import BLOCK, LAYERS, STATES, Stamp, Violation

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
            message = replace(message, have=message.have + 1)  # inside a block, or behind the last token
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


class SimulatedStates:
    """Stands for hidden states: a stamp for each token. A slice is a view."""

    def __init__(self, stamps: Any) -> None:
        """`stamps`: an array of objects."""
        self.stamps = stamps

    @classmethod
    def of(cls, stamps: Sequence[Stamp]) -> "SimulatedStates":
        found = np.empty(len(stamps), object)
        found[:] = stamps
        return cls(found)

    def __len__(self) -> int:
        return len(self.stamps)

    def __getitem__(self, part: slice) -> "SimulatedStates":
        return SimulatedStates(self.stamps[part])

    @property
    def nbytes(self) -> int:
        return len(self) * STATES.token_bytes


class Job:
    """A frame on its way through one end of a link. A drain has no claim; a call (`after_frames`) has no bytes."""

    __slots__ = ("announce", "call", "claim", "done", "frame", "key", "nbytes", "states", "table")

    def __init__(self, key: Key | None = None, frame: Frame | None = None, claim: BlockClaim | None = None) -> None:
        self.key = key
        self.frame = frame
        self.claim = claim
        self.table: Sequence[int] = ()
        self.states: list[SimulatedStates] = []
        """Hidden states in the frame, which touch no blocks; empty for a frame of KV."""
        self.nbytes = 0 if frame is None else frame.nbytes
        self.announce: Callable[[Push], None] | None = None
        self.done: Callable[[Outcome], None] | None = None
        self.call: Callable[[], object] | None = None

    @property
    def written(self) -> KVWrites:
        return WRITTEN if self.claim is None else self.claim.written

    def blocks(self) -> list[int]:
        frame = self.frame
        assert frame is not None
        if frame.states:
            return []
        return list(self.table[frame.first // BLOCK : -(-(frame.first + frame.tokens) // BLOCK)])

    def fail(self) -> None:
        if self.claim is not None and self.done is not None and self.claim.close():
            self.done(Outcome.LOST)


class SimulatedFrames:
    """Makes the jobs of one process; implements `SendJobs` and `ReceiveJobs`."""

    def send(
        self,
        key: Key,
        frame: Frame,
        claim: BlockClaim,
        table: Sequence[int],
        peer: Hello | None,
        announce: Callable[[Push], None],
        on_read: Callable[[], None],
    ) -> Job:
        job = Job(key, frame, claim)
        job.table, job.announce, job.done = table, announce, lambda outcome: on_read()
        return job

    def receive(
        self,
        key: Key,
        frame: Frame,
        claim: BlockClaim,
        table: Sequence[int],
        keep: int,
        peer: Hello,
        on_end: Callable[[Outcome], None],
    ) -> Job:
        job = Job(key, frame, claim)
        job.table, job.done = table, on_end
        return job

    def send_states(
        self,
        key: Key,
        frame: Frame,
        claim: BlockClaim,
        states: Sequence[SimulatedStates],
        peer: Hello | None,
        announce: Callable[[Push], None],
        on_read: Callable[[], None],
    ) -> Job:
        job = self.send(key, frame, claim, (), peer, announce, on_read)
        job.states = list(states)
        return job

    def make_states(self, layout: StatesLayout, tokens: int) -> SimulatedStates:
        return SimulatedStates.of([("nothing",)] * tokens)

    def receive_states(
        self,
        key: Key,
        frame: Frame,
        claim: BlockClaim,
        states: SimulatedStates,
        peer: Hello,
        on_end: Callable[[Outcome], None],
    ) -> Job:
        job = self.receive(key, frame, claim, (), 0, peer, on_end)
        job.states = [states]
        return job

    def drain(self, nbytes: int, peer: Hello) -> Job:
        job = Job()
        job.nbytes = nbytes
        return job


Item = tuple[int, tuple[Stamp, ...], object]
"""Item on the wire: a frame's bytes, and stand-ins for their content and their checksum."""


class Link:
    """One epoch's link of a pair: the wire and both ends' threads."""

    def __init__(self, world: Any, left: Any) -> None:
        self.world = world
        self.left, self.right = left, None
        self.specs: dict[Any, LinkSpec] = {}
        self.up = self.broken = self.reading = self.writing = self.watched = False
        self.over: set[Any] = set()
        self.stuck: Key | None = None
        self.jobs: deque[Job] = deque()
        self.receives: deque[Job] = deque()
        self.wire: deque[Item] = deque()
        self.history: list[Item] = []
        world.post(TIMEOUT, left, self._check_up)

    def _check_up(self) -> None:
        if not self.up:
            self.break_()

    def join(self, right: Any, spec: LinkSpec) -> None:
        """The right end is there; it is of no use if the left end has given up already."""
        self.right = right
        self.specs[right] = spec
        self.up = not self.broken
        if self.broken:
            self.world.post(0.01, right, self.end, right)
        else:
            self.world.post(self.world.random() * 0.02, self.left, self._read_next)

    def break_(self) -> None:
        """The link carries nothing any more; each end finds out in its time."""
        if not self.broken:
            self.broken = True
            for process in self.specs:
                self.world.post(self.world.random() * 0.1, process, self.end, process)

    # The left end: reads blocks, announces, sends.

    def submit(self, process: Any, job: Job) -> None:
        if process in self.over:
            job.fail()
        elif process is self.left:
            self.jobs.append(job)
            self._read_next()
            if not job.written.ended:
                job.written.then(self._read_next)
        else:
            self.receives.append(job)
            self._watch()
            self._write_next()

    def _read_next(self) -> None:
        world = self.world
        while self.up and not self.reading and not self.broken and (job := self._next_job()) is not None:
            if job.call is not None:
                self.left.post(job.call)
            elif job.claim is not None and job.claim.enter():
                self.left.blocks.touch(job.key, job.blocks())
                self.reading = True
                slow = world.slow_frame()
                world.post(world.random() * (2.5 if slow else 0.02), self.left, self._was_read, job)

    def _next_job(self) -> Job | None:
        """The first whose blocks are written. The frames of a hand-off keep their order."""
        waiting: set[Key | None] = set()
        for job in self.jobs:
            if job.key not in waiting and job.written.ended:
                self.jobs.remove(job)
                return job
            waiting.add(job.key)
        return None

    def _was_read(self, job: Job) -> None:
        frame, blocks = job.frame, job.blocks()
        assert frame is not None
        assert job.key is not None
        assert job.done is not None
        assert job.announce is not None
        layers, content = frame.part.layers(LAYERS), self.left.blocks.content
        payload = tuple(content[block][layer] for block in blocks for layer in layers)
        if frame.states:
            payload = tuple(stamp for states in job.states for stamp in states.stamps)
            if len(payload) != frame.tokens:
                raise Violation("lost", f"{job.key}: {frame} has the states of {len(payload)} tokens")
        self.left.blocks.let_go(blocks)
        self.reading = False
        job.done(Outcome.VERIFIED)
        if self.broken:
            self.end(self.left)
            return
        job.announce(announce(job.key, frame))
        self._transmit((frame.nbytes, payload, (job.key, frame, payload)))
        self._read_next()

    def _transmit(self, item: Item) -> None:
        world, wire = self.world, self.wire
        fault = world.damage()
        match fault:
            case "flip":
                nbytes, payload, check = item
                item = (nbytes, (("flipped", world.now), *payload[1:]), check)
            case "replay" if self.history:
                item = self.history[int(world.random() * len(self.history))]
            case "drop":
                return
        wire.append(item)
        if fault == "twice":
            wire.append(item)
        elif fault == "swap" and len(wire) > 1:
            wire[-1], wire[-2] = wire[-2], wire[-1]
        if world.link_noise:
            self.history.append(item)
        world.post(world.random() * 0.01, self.right, self._write_next)
        self._watch()

    # The right end: receives, verifies, writes blocks.

    def _write_next(self) -> None:
        world, right = self.world, self.right
        while self.receives and self.wire and not self.writing and not self.broken:
            job, (nbytes, payload, check) = self.receives.popleft(), self.wire.popleft()
            if nbytes != job.nbytes:
                self.receives.appendleft(job)
                self.break_()
                return
            if job.claim is None or not job.claim.enter():
                continue
            # Bytes may lie in the blocks before they are verified; they count only afterwards.
            right.blocks.touch(job.key, job.blocks(), writing=True)
            self.writing = True
            slow = world.slow_frame()
            world.post(world.random() * (2.5 if slow else 0.01), right, self._was_written, job, payload, check)

    def _was_written(self, job: Job, payload: tuple[Stamp, ...], check: object) -> None:
        blocks, right, world = job.blocks(), self.right, self.world
        assert job.done is not None
        intact = not world.checksums or check == (job.key, job.frame, payload)
        # A link that breaks meanwhile may have written any part of the frame.
        stamps = iter(() if self.broken else payload)
        assert job.frame is not None
        for states in job.states:
            states.stamps[:] = [next(stamps, ("torn",)) for _ in range(len(states))]
        for block in blocks:
            for layer in job.frame.part.layers(LAYERS):
                right.blocks.content[block][layer] = next(stamps, ("torn",))
        right.blocks.let_go(blocks)
        self.writing = False
        job.done(Outcome.LOST if self.broken else Outcome.VERIFIED if intact else Outcome.CORRUPT)
        if self.broken:
            self.end(right)
        else:
            self._write_next()

    # Either end.

    def _watch(self) -> None:
        """A frame that isn't taken, or doesn't come, ends the link within two timeouts."""
        if not self.watched:
            self.watched = True
            oldest = self.wire[0] if self.wire else self.receives[0] if self.receives else None
            self.world.post(TIMEOUT, self.left, self._look, oldest)

    def _look(self, oldest: object) -> None:
        self.watched = False
        heads: list[Any] = [queue[0] for queue in (self.wire, self.receives) if queue]
        if any(head is oldest for head in heads) and not self.writing:
            self.stuck = next((job.key for job in self.receives), None)
            self.break_()
        elif heads and not self.broken:
            self._watch()

    def end(self, process: Any) -> None:
        """The end's thread ends, after what it does now."""
        self.broken = True
        if process in self.over or (self.reading if process is self.left else self.writing):
            return
        self.over.add(process)
        queue = self.jobs if process is self.left else self.receives
        while queue:
            queue.popleft().fail()
        process.post(process.links.ended, self, LinkEnd(self.specs[process].epoch, "broke", self.up, self.stuck))


class SimulatedLinks:
    """The links of one process; implements `Links`."""

    def __init__(self, process: Any, max_links: int) -> None:
        self._process = process
        self._max_links = max_links
        self._open: dict[str, Link] = {}

    def transport_for(self, peer: Peer) -> str:
        return "simulated"

    def epoch(self, peer: str) -> int:
        link = self._open.get(peer)
        return 0 if link is None else link.specs[self._process].epoch

    def open(self, spec: LinkSpec) -> bool:
        process, world = self._process, self._process.world
        self.close(spec.peer, "superseded")
        if len(self._open) >= self._max_links and not self._close_one_idle():
            return False
        if spec.rank == SENDER:
            link = Link(world, process)
            link.specs[process] = spec
            world.dialled[process.id.incarnation, spec.peer, spec.epoch] = link
        else:
            link = world.dialled[spec.peer, process.id.incarnation, spec.epoch]
            link.join(process, spec)
        self._open[spec.peer] = link
        return True

    def _close_one_idle(self) -> bool:
        for peer, link in self._open.items():
            if link.specs[self._process].idle():
                self.close(peer, "closed in favour of another link")
                return True
        return False

    def meet(self, peer: str, epoch: int, entry: str, value: bytes) -> None:
        """Simulated links need no rendezvous."""

    def submit(self, peer: str, epoch: int, job: Job) -> None:
        link = self._open.get(peer)
        if link is None or link.specs[self._process].epoch != epoch:
            job.fail()
        else:
            link.submit(self._process, job)

    def after_frames(self, peer: str, epoch: int, call: Callable[[], object]) -> None:
        job = Job()
        job.call = call
        self.submit(peer, epoch, job)

    def close(self, peer: str, reason: str) -> None:
        link = self._open.pop(peer, None)
        if link is not None:
            link.break_()

    def ended(self, link: Link, end: LinkEnd) -> None:
        """The link's thread has ended."""
        spec = link.specs[self._process]
        if self._open.get(spec.peer) is link:
            del self._open[spec.peer]
        spec.on_end(end)
