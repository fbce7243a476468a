"""KV that is given to a link while the step that computes it runs: it is read when it is there, and not before."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.kv.writes import WRITTEN, EventWaiter, KVWrites
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.checks import ChecksumKind, FrameCheck
from kvrelay.transfer.frames.frames import SendJob
from kvrelay.transfer.frames.places import PoolFrame
from kvrelay.transfer.links.links import LinkLimits, LinkManager, LinkTimeouts
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.protocol.messages import Key
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER, BlockClaim, LinkSpec, LoopRuntime
from kvrelay.transfer.transports.base import Link, Pending, poll
from support.fake_transport import FakeTransport
from support.handoff import FIRST_TOKEN, blocks_of, pair, prompt
from support.handoff import LAYOUT as PAIR_LAYOUT
from support.late_writes import LateWrites

WAIT = 10.0
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, block_size=8, dtype="float16", order="HND")


@dataclass
class Sending:
    """Sends one number once its step has ended."""

    key: Key
    value: int
    written: KVWrites
    log: list[tuple[str, int]]

    def prepare(self, link: Link, buffer: torch.Tensor) -> None:
        buffer[0] = self.value
        self.log.append(("prepared", self.value))

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        assert self.written.ended
        if ("prepared", self.value) in self.log:
            assert int(buffer[0]) == self.value, "another job had the buffer"
        buffer[0] = self.value
        self.log.append(("sent", self.value))
        return link.send(buffer[:1])

    def done(self, buffer: torch.Tensor) -> None:
        self.log.append(("done", self.value))

    def fail(self, message: str) -> None:
        self.log.append(("failed", self.value))


@dataclass
class Taking:
    """Receives a number."""

    log: list[int]
    key: Key | None = None
    written: KVWrites = field(default=WRITTEN)

    def prepare(self, link: Link, buffer: torch.Tensor) -> None:
        raise AssertionError("it reads no blocks")

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        return link.recv(buffer[:1])

    def done(self, buffer: torch.Tensor) -> None:
        self.log.append(int(buffer[0]))

    def fail(self, message: str) -> None: ...


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110  # the condition may be about anything
            await asyncio.sleep(0.001)


class Ends:
    """Both ends of one link."""

    def __init__(self) -> None:
        self.runtime, self.transport = LoopRuntime(), FakeTransport()
        limits, timeouts = LinkLimits(4, 2**30), LinkTimeouts(5.0, 5.0)
        self.left, self.right = (
            LinkManager({"fake": self.transport}, limits, timeouts, "auto", self.runtime) for _ in range(2)
        )
        for manager, rank, other in ((self.left, SENDER, self.right), (self.right, RECEIVER, self.left)):

            def tell(entry: str, value: bytes, other: LinkManager = other) -> None:
                self.runtime.post(other.meet, "p", 1, entry, value)

            assert manager.open(
                LinkSpec("here", "p", 1, self.transport.name, rank, 64, tell, lambda end: None, lambda: False)
            )

    async def close(self) -> None:
        await self.left.shut_down()
        await self.right.shut_down()


@settings(max_examples=20, deadline=None)
@given(
    # Per job: its hand-off, and the step that computes it; steps end in order, and a hand-off's frames are in theirs.
    jobs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12),
)
def test_frames_wait_for_their_step_only_and_keep_the_order_of_their_hand_off(jobs: list[tuple[int, int]]) -> None:
    async def test() -> None:
        ends, log, received = Ends(), list[tuple[str, int]](), list[int]()
        steps = [LateWrites() for _ in range(4)]
        latest = dict[int, int]()
        sent_of = dict[int, list[int]]()
        for value, (hand_off, step) in enumerate(jobs):
            latest[hand_off] = step = max(step, latest.get(hand_off, 0))
            sent_of.setdefault(hand_off, []).append(value)
            jobs[value] = hand_off, step
            ends.left.submit("p", 1, Sending((f"r{hand_off}", 1), value, steps[step], log))
            ends.right.submit("p", 1, Taking(received))
        for step, writes in enumerate(steps):
            writes.end()
            # All that is computed goes, whatever waits before it.
            await until(lambda step=step: len(received) == sum(of <= step for _, of in jobs))
        await until(lambda: [kind for kind, _ in log].count("done") == len(jobs))
        await ends.close()
        for values in sent_of.values():
            assert [value for value in received if value in values] == values
        assert [kind for kind, _ in log].count("failed") == 0
        prepared = [value for kind, value in log if kind == "prepared"]
        assert len(set(prepared)) == len(prepared)

    asyncio.run(test())


class Clock:
    """Steps that end between two looks at them."""

    def __init__(self, ends_at: int) -> None:
        self.looks = 0
        self.ends_at = ends_at


class Observed:
    """Writes that have ended from the clock's `ends_at`-th look on, at whichever step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @property
    def ended(self) -> bool:
        self._clock.looks += 1
        return self._clock.looks >= self._clock.ends_at

    def follow(self) -> None: ...

    def then(self, call: Callable[[], object]) -> None:
        raise AssertionError("the test wakes the link itself")


def end(clock: Clock, wake: Callable[[], None]) -> None:
    clock.ends_at = 0
    wake()


@pytest.mark.parametrize("ends_at", range(1, 10))
def test_frames_keep_their_order_if_their_steps_end_while_the_link_looks(ends_at: int) -> None:
    async def test() -> None:
        ends, log, received = Ends(), list[tuple[str, int]](), list[int]()
        clock = Clock(ends_at)
        for _ in range(2):
            ends.right.submit("p", 1, Taking(received))
        link = ends.left._links["p"]
        with link._changed:
            # The link's thread sees both at once.
            link._jobs.extend(Sending(("r", 1), value, Observed(clock), log) for value in (1, 2))
            threading.Timer(0.05, end, (clock, link._wake)).start()
        await until(lambda: len(received) == 2)
        await ends.close()
        assert received == [1, 2]

    asyncio.run(test())


class EndsAtOnce:
    """Writes that end in `submit`, once the link's thread has prepared their frame and waits."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        self._log = log
        self._loop = threading.get_ident()
        self._over = False

    @property
    def ended(self) -> bool:
        if threading.get_ident() == self._loop:
            self._end_within(0.05)
        return self._over

    def follow(self) -> None: ...

    def then(self, call: Callable[[], object]) -> None:
        self._end_within(WAIT)
        call()

    def _end_within(self, seconds: float) -> None:
        self._over = poll(lambda: ("prepared", 1) in self._log, seconds, 0.005)


def test_a_step_that_ends_while_its_frame_is_submitted_wakes_the_link() -> None:
    async def test() -> None:
        ends, log, received = Ends(), list[tuple[str, int]](), list[int]()
        ends.right.submit("p", 1, Taking(received))
        await until(lambda: ends.left._links["p"]._up)
        ends.left.submit("p", 1, Sending(("r", 1), 1, EndsAtOnce(log), log))
        try:
            async with asyncio.timeout(1):
                await until(lambda: received == [1])
        finally:
            await ends.close()

    asyncio.run(test())


def test_the_frames_of_a_hand_off_do_not_wait_for_another_ones_step() -> None:
    async def test() -> None:
        ends, log, received = Ends(), list[tuple[str, int]](), list[int]()
        late = LateWrites()
        ends.left.submit("p", 1, Sending(("late", 1), 1, late, log))
        ends.left.submit("p", 1, Sending(("early", 1), 2, WRITTEN, log))
        for _ in range(2):
            ends.right.submit("p", 1, Taking(received))
        await until(lambda: received == [2])
        late.end()
        await until(lambda: received == [2, 1])
        await ends.close()

    asyncio.run(test())


def test_a_link_that_closes_before_the_step_ends_fails_its_frames_and_leaves_no_thread() -> None:
    async def test() -> None:
        before = threading.active_count()
        ends, log, late = Ends(), list[tuple[str, int]](), LateWrites()
        for value in range(3):
            ends.left.submit("p", 1, Sending((f"r{value}", 1), value, late, log))
        await until(lambda: ("prepared", 0) in log)
        ends.left.close("p", "test")
        await until(lambda: sorted(value for kind, value in log if kind == "failed") == [0, 1, 2])
        await ends.close()
        late.end()
        assert threading.active_count() <= before

    asyncio.run(test())


class Behind(LateWrites):
    """Writes that note who follows them."""

    follows = 0

    def follow(self) -> None:
        self.follows += 1


class QueuedPool(KVPool):
    """A pool whose copies run when they are waited for, as late as a GPU may."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 8)
        self._by_kernel = True
        self.queued: list[Callable[[], object]] = []

    def settle(self) -> None:
        for run in self.queued:
            run()
        self.queued.clear()


class QueuedFrame(PoolFrame):
    def begin_read(self, data: torch.Tensor, check: FrameCheck) -> None:
        self._pool.queued.append(lambda: super(QueuedFrame, self).begin_read(data, check))  # type: ignore[attr-defined]  # it is a QueuedPool


class NoLink:
    stream = None
    lender = None
    mac_key = None

    def send(self, data: torch.Tensor) -> str:
        return "sent"


@pytest.mark.parametrize("ends_by", ["a send", "a lost link"])
def test_a_prepared_copy_is_waited_for_once_and_its_blocks_are_kept_until_then(ends_by: str) -> None:
    pool, late, events = QueuedPool(), Behind(), list[str]()
    table, frame = [4, 1, 6], Frame(1, 0, 0, 21, LAYOUT.nbytes(21))
    job = SendJob(
        ("r", 1),
        frame,
        BlockClaim(late),
        QueuedFrame(pool, table, frame),
        ChecksumKind.MIX64,
        lambda push: events.append("announced"),
        lambda: events.append("read"),
    )
    buffer = torch.zeros(frame.nbytes + 8, dtype=torch.uint8)
    job.prepare(NoLink(), buffer)  # type: ignore[arg-type]  # the parts of a link that the job uses
    assert (late.follows, len(pool.queued), events) == (1, 1, [])
    # The step's writes, after the copy was queued.
    pool.bytes.random_(0, 256)
    late.end()
    if ends_by == "a lost link":
        job.fail("lost")
        assert (pool.queued, events) == ([], ["read"])
        return
    assert job.begin(NoLink(), buffer) == "sent"  # type: ignore[arg-type, comparison-overlap]
    assert (pool.queued, events) == ([], ["read", "announced"])
    expected = torch.empty(frame.nbytes, dtype=torch.uint8)
    KVPool.read(pool, table, 0, 21, expected)
    assert torch.equal(buffer[: frame.nbytes], expected)


class Lender:
    """Sends blocks from where they lie."""

    most_runs = 8

    def lend(self, memory: torch.Tensor) -> bool:
        return True


class LendingLink(NoLink):
    lender = Lender()


def test_a_frame_of_a_lost_link_was_not_sent_in_place() -> None:
    pool, late = QueuedPool(), Behind()
    claim, frame = BlockClaim(late), Frame(1, 0, 0, 16, LAYOUT.nbytes(16))
    place = PoolFrame(pool, [4, 1], frame)
    job = SendJob(("r", 1), frame, claim, place, ChecksumKind.MIX64, lambda push: None, lambda: None)
    job.prepare(LendingLink(), torch.zeros(frame.nbytes + 8, dtype=torch.uint8))  # type: ignore[arg-type]  # what the job uses
    assert claim.in_place
    job.fail("lost")
    assert not claim.in_place


def test_a_frame_whose_copy_cannot_be_queued_can_be_stopped_until_its_step_ends() -> None:
    claim, frame = BlockClaim(LateWrites()), Frame(1, 0, 0, 16, LAYOUT.nbytes(16))
    place = PoolFrame(KVPool(LAYOUT, 8), [4, 1], frame)
    job = SendJob(("r", 1), frame, claim, place, ChecksumKind.XXH3, lambda push: None, lambda: None)
    job.prepare(NoLink(), torch.zeros(frame.nbytes + 8, dtype=torch.uint8))  # type: ignore[arg-type]  # what the job uses
    assert claim.close()


def test_a_frame_waits_for_no_later_step_than_its_own() -> None:
    async def test() -> None:
        config = TransferConfig(frame_bytes=2**16)
        async with pair(config) as world:
            # Each step computes as much as one frame carries.
            key, size = ("r", 1), config.frame_bytes // PAIR_LAYOUT.block_bytes
            tokens = size * PAIR_LAYOUT.block_size
            world.receiving.gate = asyncio.Event()
            world.announce(key, prompt(2 * tokens))
            early, late, blocks = LateWrites(), LateWrites(), blocks_of(2 * tokens)
            world.sender.progress(key, world.sending.hold(blocks[:size]), early)
            world.sender.progress(key, world.sending.hold(blocks[size:]), late)
            early.end()
            world.receiving.gate.set()
            await world.ends.until(lambda: world.receiver._transfers[key].machine._verified == tokens)
            assert not late.ended
            late.end()
            world.sender.finished(key, FIRST_TOKEN, world.sending.hold(blocks))
            await world.settled(key)
            world.check_equal(key, blocks, 2 * tokens)

    asyncio.run(test())


def test_the_time_of_a_hand_off_begins_when_its_first_frame_is_computed() -> None:
    async def test() -> None:
        async with pair() as world:
            key, late, blocks = ("r", 1), LateWrites(), blocks_of(40)
            world.announce(key, prompt(40))
            world.sender.progress(key, world.sending.hold(blocks), late)
            (transfer,) = world.sender._transfers.values()
            await world.ends.until(lambda: transfer.claims)
            await asyncio.sleep(0.2)
            computed = time.monotonic()
            late.end()
            world.sender.finished(key, FIRST_TOKEN, world.sending.hold(blocks))
            await world.settled(key)
            stats = world.ends.exported[key]
            assert stats.handoff_seconds <= stats.transfer_seconds < time.monotonic() - computed

    asyncio.run(test())


def test_a_waiter_calls_back_in_order_also_after_a_failed_device_and_ends() -> None:
    class Failing:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error")

    class Gate:
        def __init__(self) -> None:
            self.open = threading.Event()

        def synchronize(self) -> None:
            assert self.open.wait(WAIT)

    waiter, gate, heard, over = EventWaiter("test"), Gate(), list[int](), threading.Event()
    waiter.then(gate, lambda: heard.append(1))
    waiter.then(Failing(), lambda: heard.append(1 // 0))
    waiter.then(Failing(), lambda: heard.append(2))
    waiter.then(Failing(), over.set)
    waiter.close()
    waiter.then(Failing(), lambda: heard.append(3))
    assert heard == []
    gate.open.set()
    assert over.wait(WAIT)
    assert heard == [1, 2]
