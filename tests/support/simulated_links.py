"""Streams and links of the simulated hand-off: what carries messages and frames between two processes, or fails to.

A stream of a `hostile` world loses, doubles and reorders messages; another's are in order until it is cut. A link takes
frames through one thread at each end, in order, and breaks as a whole; what is on it may be damaged.
"""

from collections import deque
from typing import Any

from kvrelay.transfer.events import Frame, FrameEnded, Outcome
from kvrelay.transfer.messages import Finish, Push
from support.simulated_blocks import BLOCK, Stamp

TIMEOUT = 0.5
"""Of a dial, and of each frame."""


class Stream:
    """Messages between one prefill and one decode process; `forward` goes to decode."""

    __slots__ = ("last", "left", "left_link", "open", "right", "right_link", "silent", "world")

    def __init__(self, world: Any, left: Any, right: Any) -> None:
        self.world = world
        self.left = left
        self.right = right
        self.open = [True, True]
        """Whether the left, the right process still has it."""
        self.silent = [False, False]
        """Whether what goes backward, forward is swallowed."""
        self.left_link: Link | None = None
        self.right_link: Link | None = None
        self.last = [0.0, 0.0]

    def send(self, forward: bool, message: Any) -> None:
        if self.silent[forward] or not self.open[not forward]:
            return
        world, random = self.world, self.world.random
        times, delay = 1, random() * 0.02
        if world.hostile:
            roll = random()
            if roll < 0.03:
                return
            times = 2 if roll < 0.06 else 1
            delay = random() * 2.0 if roll > 0.92 else delay
            for _ in range(times):
                world.post(delay, self.right if forward else self.left, self._arrive, forward, message)
                delay += random() * 0.5
            return
        at = self.last[forward] = max(self.last[forward], world.now + delay)
        world.post(at - world.now, self.right if forward else self.left, self._arrive, forward, message)

    def _arrive(self, forward: bool, message: Any) -> None:
        if self.open[forward]:
            (self.right if forward else self.left).on_message(self, message)

    def cut(self) -> None:
        """Both ends are told, each in its time."""
        for process in (self.left, self.right):
            self.world.post(self.world.random() * 0.2, process, process.on_stream_end, self)


class Job:
    """A frame on its way through one end of a link; a drain has no end, a finish no frame."""

    __slots__ = ("end", "finish", "frame", "guard", "nbytes")

    def __init__(self, end: Any, frame: Frame | None, guard: Any, nbytes: int, finish: Finish | None = None) -> None:
        self.end = end
        self.frame = frame
        self.guard = guard
        self.nbytes = nbytes
        self.finish = finish


Item = tuple[int, tuple[Stamp, ...], object]
"""Bytes, what stands for their content, and for their checksum."""


class Link:
    """One epoch's link of a stream."""

    __slots__ = (
        "broken",
        "epoch",
        "history",
        "jobs",
        "left",
        "over",
        "reading",
        "receives",
        "right",
        "stream",
        "told",
        "up",
        "watched",
        "wire",
        "world",
        "writing",
    )

    def __init__(self, stream: Stream, epoch: int) -> None:
        self.world = stream.world
        self.stream = stream
        self.left, self.right = stream.left, stream.right
        self.epoch = epoch
        self.up = self.broken = self.reading = self.writing = self.watched = False
        self.over = [False, False]
        self.told = [0.0, 0.0]
        self.jobs: deque[Job] = deque()
        self.receives: deque[Job] = deque()
        self.wire: deque[Item] = deque()
        self.history: list[Item] = []
        self.world.post(TIMEOUT, self.left, self._check_up)

    def _check_up(self) -> None:
        if not self.up:
            self.break_()

    def join(self) -> None:
        """The right end is there."""
        self.up = True
        self.world.post(self.world.random() * 0.02, self.left, self._read_next)

    def break_(self) -> None:
        """It carries nothing any more; each end finds out in its time."""
        if not self.broken:
            self.broken = True
            random, post = self.world.random, self.world.post
            post(random() * 0.1, self.left, self.end_left)
            post(random() * 0.1, self.right, self.end_right)

    # The left end: reads blocks, announces, sends.

    def send(self, job: Job) -> None:
        if self.over[0]:
            self._fail(self.left, job)
            return
        self.jobs.append(job)
        self._read_next()

    def _read_next(self) -> None:
        jobs = self.jobs
        while jobs and self.up and not self.reading and not self.broken:
            job = jobs.popleft()
            if job.finish is not None:
                self.stream.send(True, job.finish)
            elif job.guard.enter():
                self.left.blocks.touch(job.end.key, job.end.blocks_of(job.frame))
                self.reading = True
                world = self.world
                slow = world.random() < 0.05
                world.post(world.random() * (2.5 if slow else 0.02), self.left, self._was_read, job)

    def _was_read(self, job: Job) -> None:
        end, frame = job.end, job.frame
        blocks = end.blocks_of(frame)
        payload = self.left.blocks.read(blocks, range(frame.layer, frame.layer + frame.layers))
        self.left.blocks.let_go(blocks)
        self.reading = False
        self._tell(self.left, end.feed, FrameEnded(frame))
        if self.broken:
            self.end_left()
            return
        self.stream.send(
            True,
            Push(
                *end.key, frame.epoch, frame.index, frame.first, frame.tokens, frame.nbytes, frame.layer, frame.layers
            ),
        )
        self._transmit((frame.nbytes, payload, (end.key, frame, payload)))
        self._read_next()

    def _transmit(self, item: Item) -> None:
        world, wire = self.world, self.wire
        fault = world.damage()
        match fault:
            case "flip":
                nbytes, payload, seal = item
                item = (nbytes, (("flipped", world.now), *payload[1:]), seal)
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

    def _watch(self) -> None:
        """A frame that isn't taken, or doesn't come, ends the link within two timeouts."""
        if not self.watched:
            self.watched = True
            oldest = self.wire[0] if self.wire else self.receives[0] if self.receives else None
            self.world.post(TIMEOUT, self.left, self._look, oldest)

    def _look(self, oldest: object) -> None:
        self.watched = False
        heads = [queue[0] for queue in (self.wire, self.receives) if queue]
        if any(head is oldest for head in heads) and not self.writing:
            self.break_()
        elif heads and not self.broken:
            self._watch()

    def end_left(self) -> None:
        """The thread ends, after what it is at."""
        self.broken = True
        if self.reading or self.over[0]:
            return
        self.over[0] = True
        for job in self.jobs:
            self._fail(self.left, job)
        self.jobs.clear()
        self._tell(self.left, self.left.on_link_end, self)

    # The right end: receives, verifies, writes blocks.

    def receive(self, job: Job) -> None:
        if self.over[1]:
            self._fail(self.right, job)
            return
        self.receives.append(job)
        self._watch()
        self._write_next()

    def _write_next(self) -> None:
        world = self.world
        while self.receives and self.wire and not self.writing and not self.broken:
            job, (nbytes, payload, seal) = self.receives.popleft(), self.wire.popleft()
            if nbytes != job.nbytes:
                self.receives.appendleft(job)
                self.break_()
                return
            if job.frame is None or not job.guard.enter():
                continue
            # Bytes may lie in the blocks before they are verified; they count only afterwards.
            self.right.blocks.touch(job.end.key, job.end.blocks_of(job.frame), writing=True)
            self.writing = True
            slow = world.random() < 0.05
            world.post(world.random() * (2.5 if slow else 0.01), self.right, self._was_written, job, payload, seal)

    def _was_written(self, job: Job, payload: tuple[Stamp, ...], seal: object) -> None:
        end, frame, world = job.end, job.frame, self.world
        blocks = end.blocks_of(frame)
        intact = not world.checksums or seal == (end.key, frame, payload)
        # A link that breaks meanwhile leaves anything there.
        stamps = iter(() if self.broken else payload)
        for block in blocks:
            for layer in range(frame.layer, frame.layer + frame.layers):
                self.right.blocks.write(block, layer, next(stamps, ("torn",)))
        self.right.blocks.let_go(blocks)
        self.writing = False
        outcome = Outcome.LOST if self.broken else Outcome.VERIFIED if intact else Outcome.CORRUPT
        self._tell(self.right, self._written, end, frame, outcome)
        if self.broken:
            self.end_right()
        else:
            self._write_next()

    def _written(self, end: Any, frame: Frame, outcome: Outcome) -> None:
        if outcome is Outcome.CORRUPT:
            self.break_()
        end.feed(FrameEnded(frame, outcome))

    def end_right(self) -> None:
        """The thread ends, after what it is at."""
        self.broken = True
        if self.writing or self.over[1]:
            return
        self.over[1] = True
        for job in self.receives:
            self._fail(self.right, job)
        self.receives.clear()

    def _fail(self, process: Any, job: Job) -> None:
        if job.frame is not None and job.guard.close():
            self._tell(process, job.end.feed, FrameEnded(job.frame, Outcome.LOST))

    def _tell(self, process: Any, what: Any, *arguments: Any) -> None:
        """What a link's thread tells its process arrives in order, but perhaps late."""
        world, side = self.world, process is self.right
        late = world.random() < 0.1
        if late or self.told[side] > world.now:
            at = self.told[side] = max(self.told[side], world.now + (0.3 if late else 0.0))
            world.post(at - world.now, process, what, *arguments)
        else:
            world.post(0.0, process, what, *arguments)


def blocks_in(table: list[int], frame: Frame) -> list[int]:
    """The blocks of a frame's tokens."""
    return table[frame.first // BLOCK : -(-(frame.first + frame.tokens) // BLOCK)]
