"""Links: opened on demand, capped, discarded on the first error, without a thread or a job left behind. A frame is sent
once the step that computes it has ended, and not before."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.writes import WRITTEN, EventWaiter, KVWrites
from kvrelay.transfer.links import links
from kvrelay.transfer.links.links import LinkLimits, LinkManager, LinkTimeouts
from kvrelay.transfer.protocol.messages import Key
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER, LinkEnd, LinkSpec, LoopRuntime
from kvrelay.transfer.protocol.routes import RankPair
from kvrelay.transfer.transports.base import Link, Pending, Rendezvous, poll
from support.fake_transport import FakeLink, FakeTransport, Fault
from support.late_writes import LateWrites
from support.router_fakes import until

pytestmark = pytest.mark.anyio
WAIT = 10.0
Log = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert poll(lambda: threading.active_count() <= before, WAIT, 0.005), "a link's thread is left"


@dataclass
class Sending:
    """Sends one number once its step has ended."""

    value: int
    log: Log
    written: KVWrites = WRITTEN
    key: Key | None = None

    def prepare(self, link: Link, buffer: torch.Tensor) -> None:
        buffer[0] = self.value
        self.log.append(("prepared", self.value))

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        assert self.written.ended
        if ("prepared", self.value) in self.log:
            assert int(buffer[0]) == self.value, "another job had the buffer"
        buffer[0] = self.value
        self.log.append(("begun", self.value))
        return link.send(buffer[:1])

    def done(self, buffer: torch.Tensor) -> None:
        self.log.append(("sent", self.value))

    def fail(self, message: str) -> None:
        self.log.append(("not sent", self.value))


@dataclass
class Receiving:
    """Receives one number."""

    log: Log
    key: Key | None = None
    written: KVWrites = WRITTEN

    def prepare(self, link: Link, buffer: torch.Tensor) -> None:
        raise AssertionError("it reads no blocks")

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        return link.recv(buffer[:1])

    def done(self, buffer: torch.Tensor) -> None:
        self.log.append(("received", int(buffer[0])))

    def fail(self, message: str) -> None:
        self.log.append(("not received", 0))


@dataclass
class Ends:
    """A sending and a receiving manager, and what became of their jobs."""

    transport: FakeTransport = field(default_factory=FakeTransport)
    max_links: int = 4
    gpu_buffer_bytes: int = 2**30
    timeout: float = 10.0
    dial: float = 10.0
    busy: set[str] = field(default_factory=set)
    ended: list[tuple[str, int]] = field(default_factory=list)
    log: Log = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runtime = LoopRuntime()
        self.sender, self.receiver = self._manager(self.max_links), self._manager(64)

    def _manager(self, max_links: int) -> LinkManager:
        transports = {self.transport.name: self.transport}
        limits, timeouts = LinkLimits(max_links, self.gpu_buffer_bytes), LinkTimeouts(self.timeout, self.dial)
        return LinkManager(transports, limits, timeouts, "auto", self.runtime)

    def open(self, peer: str = "a", epoch: int = 1) -> bool:
        """Opens both ends of the link to `peer`."""
        return self.open_end(peer, epoch, SENDER) and self.open_end(peer, epoch, RECEIVER)

    def open_end(self, peer: str = "a", epoch: int = 1, rank: int = SENDER) -> bool:
        mine, other = (self.sender, self.receiver) if rank == SENDER else (self.receiver, self.sender)

        def tell(ranks: RankPair, entry: str, value: bytes) -> None:
            self.runtime.post(other.meet, peer, epoch, ranks, entry, value)

        def on_end(end: LinkEnd) -> None:
            if rank == SENDER:
                self.ended.append((peer, end.epoch))

        idle = lambda: peer not in self.busy  # noqa: E731  # an argument
        return mine.open(LinkSpec("here", peer, epoch, self.transport.name, rank, 64, tell, on_end, idle))

    def send(self, value: int, peer: str = "a", epoch: int = 1, written: KVWrites = WRITTEN, of: str = "r") -> None:
        self.sender.submit(peer, epoch, RankPair(), Sending(value, self.log, written, (of, 1)))

    def receive(self, peer: str = "a", epoch: int = 1) -> None:
        self.receiver.submit(peer, epoch, RankPair(), Receiving(self.log))

    async def cross(self, value: int, peer: str = "a", epoch: int = 1) -> None:
        """Sends a number over a link, and waits until it has come."""
        self.log.clear()
        self.send(value, peer, epoch)
        self.receive(peer, epoch)
        await until(lambda: {("sent", value), ("received", value)} <= {*self.log})

    def values(self, kind: str) -> list[int]:
        return [value for other, value in self.log if other == kind]


@asynccontextmanager
async def ends_with(opened: bool = True, **options: object) -> AsyncIterator[Ends]:
    """Both ends, with a link if `opened`; shut down in the end."""
    ends = Ends(**options)  # type: ignore[arg-type]  # as named
    if opened:
        assert ends.open()
    yield ends
    await ends.sender.shut_down()
    await ends.receiver.shut_down()


async def test_every_job_of_a_lost_link_fails_once_and_its_end_is_reported() -> None:
    fails_at_3 = FakeTransport(lambda number: Fault("fail") if number == 3 else None)
    async with ends_with(transport=fails_at_3) as ends:
        for value in range(10):
            ends.send(value)
        await until(lambda: ends.ended == [("a", 1)])
        ends.send(10)
        assert sorted(ends.values("sent") + ends.values("not sent")) == list(range(11))
        assert 10 in ends.values("not sent")
        assert ends.sender.epoch("a") == 0


async def test_a_later_epoch_takes_the_place_of_the_older() -> None:
    async with ends_with() as ends:
        ends.open("a", 2)
        await until(lambda: ("a", 1) in ends.ended)
        ends.send(1, epoch=1)
        assert ends.values("not sent") == [1]
        await ends.cross(2, epoch=2)
        assert len(ends.sender) == 1


async def test_the_least_recently_used_link_is_closed_unless_it_is_needed() -> None:
    async with ends_with(opened=False, max_links=3) as ends:
        for number, peer in enumerate("abca"):
            assert ends.sender.epoch(peer) or ends.open(peer)
            await ends.cross(number, peer)
        ends.busy = {"b"}
        assert ends.open("d")
        await until(lambda: ends.ended == [("c", 1)])
        ends.busy = {"a", "b", "d"}
        assert not ends.open("e")
        assert len(ends.sender) == 3


async def test_links_between_gpus_keep_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BETWEEN_GPUS", frozenset({FakeTransport().name}))
    # Room for two links, of two frames of 64 bytes each.
    async with ends_with(opened=False, gpu_buffer_bytes=256, busy={"a", "b"}) as ends:
        assert [ends.open(peer) for peer in "abc"] == [True, True, False]
        ends.busy = {"b"}
        assert ends.open("c")
        await until(lambda: ends.ended == [("a", 1)])


async def test_a_link_whose_other_end_never_opens_ends_by_itself() -> None:
    async with ends_with(opened=False, timeout=0.2) as ends:
        assert ends.open_end()
        ends.send(1)
        await until(lambda: ends.ended == [("a", 1)])
        assert ends.log == [("not sent", 1)]


class StuckTransport(FakeTransport):
    """Links whose close blocks, like a group's destructor that waits for a lost peer."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.closing = 0

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        link = super().connect(meeting, rank, timeout)
        if isinstance(link, FakeLink):
            link.close = self._close  # type: ignore[method-assign]  # the fault that this transport is for
        return link

    def _close(self) -> None:
        self.closing += 1
        self.let_go.wait(WAIT)


async def test_a_close_that_blocks_delays_no_other_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.3)
    transport = StuckTransport()
    async with ends_with(opened=False, transport=transport) as ends:
        for epoch in (1, 2):
            ends.open("a", epoch)
            await ends.cross(epoch, epoch=epoch)
        started = time.monotonic()
    assert time.monotonic() - started < 3
    # Two ends of two links, each on a daemon thread, for which the exit of the process doesn't wait.
    await until(lambda: transport.closing == 4)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("reaper")]
    assert len(left) == 4
    assert all(thread.daemon for thread in left)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("link ")]
    transport.let_go.set()


async def test_a_close_that_fails_is_logged_and_ends_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    class FailingTransport(StuckTransport):
        def _close(self) -> None:
            raise RuntimeError("no")

    async with ends_with(transport=FailingTransport()):
        pass
    assert "closing a link failed" in caplog.text


async def test_a_link_between_gpus_has_longer_to_open_than_a_frame_takes() -> None:
    """The first operation of a NCCL link starts NCCL, which takes longer than any frame may."""
    timeouts = LinkTimeouts(frame=3.0, dial=20.0)
    assert [timeouts.to_open(name) for name in ("nccl", "tcp", "shm")] == [20.0, 3.0, 3.0]
    assert LinkTimeouts(frame=60.0, dial=20.0).to_open("nccl") == 60.0

    class Slow(FakeTransport):
        name = "nccl"

        def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
            link = super().connect(meeting, rank, timeout)
            # As a communicator that the first operation makes.
            time.sleep(1.5)
            return link

    async with ends_with(transport=Slow(), timeout=1.0, dial=20.0) as ends:
        await ends.cross(7)
        assert not ends.ended


# Frames of steps that still run.


@settings(max_examples=20)
@given(
    # Per job: its hand-off, and the step that computes it; steps end in order, and a hand-off's frames are in theirs.
    jobs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=24),
)
async def test_frames_wait_for_their_step_only_and_keep_the_order_of_their_hand_off(
    jobs: list[tuple[int, int]],
) -> None:
    steps = [LateWrites() for _ in range(4)]
    latest, sent_of, step_of = dict[int, int](), dict[int, list[int]](), dict[int, int]()
    async with ends_with() as ends:
        for value, (hand_off, step) in enumerate(jobs):
            latest[hand_off] = step_of[value] = max(step, latest.get(hand_off, 0))
            sent_of.setdefault(hand_off, []).append(value)
            ends.send(value, written=steps[step_of[value]], of=f"r{hand_off}")
            ends.receive()
        for step, writes in enumerate(steps):
            writes.end()
            # All that is computed goes, whatever waits before it.
            computed = sum(of <= step for of in step_of.values())
            await until(lambda computed=computed: len(ends.values("received")) == computed)
        await until(lambda: len(ends.values("sent")) == len(jobs))
        for values in sent_of.values():
            assert [value for value in ends.values("received") if value in values] == values
        assert not ends.values("not sent")
        assert len({*ends.values("prepared")}) == len(ends.values("prepared"))


class Observed:
    """Writes of two steps that have ended from the n-th look of a link's thread on, at whichever step."""

    def __init__(self, ends_at: int) -> None:
        self._loop = threading.get_ident()
        self._left = ends_at
        self._calls: list[Callable[[], object]] = []

    @property
    def ended(self) -> bool:
        if threading.get_ident() != self._loop:
            self._left -= 1
        return self._left <= 0

    def follow(self) -> None: ...

    def then(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def end(self) -> None:
        self._left = 0
        for call in self._calls:
            call()


@pytest.mark.parametrize("ends_at", range(1, 10))
async def test_frames_keep_their_order_if_their_steps_end_while_the_link_looks(ends_at: int) -> None:
    async with ends_with(opened=False) as ends:
        ends.open_end(rank=SENDER)
        writes = Observed(ends_at)
        for value in (1, 2):
            ends.send(value, written=writes)
        # The link's thread sees both at once.
        ends.open_end(rank=RECEIVER)
        for _ in range(2):
            ends.receive()
        await asyncio.sleep(0.05)
        writes.end()
        await until(lambda: len(ends.values("received")) == 2)
        assert ends.values("received") == [1, 2]


class EndsAtOnce:
    """Writes that end in `submit`, once the link's thread has prepared their frame and waits."""

    begun = True

    def __init__(self, log: Log) -> None:
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


async def test_a_step_that_ends_while_its_frame_is_submitted_wakes_the_link() -> None:
    async with ends_with() as ends:
        await ends.cross(9)
        ends.log.clear()
        ends.receive()
        ends.send(1, written=EndsAtOnce(ends.log))
        await until(lambda: ends.values("received") == [1])


async def test_the_finish_of_a_hand_off_does_not_wait_for_another_ones_step() -> None:
    async with ends_with() as ends:
        told, late = list[int](), LateWrites()
        ends.send(1, written=late, of="late")
        ends.send(2, of="early")
        ends.sender.after_frames("a", 1, ("early", 1), lambda: told.append(len(ends.values("begun"))))
        for _ in range(2):
            ends.receive()
        await until(lambda: told)
        assert told == [1]
        await until(lambda: ends.values("received") == [2])
        late.end()
        await until(lambda: ends.values("received") == [2, 1])


async def test_a_link_that_closes_before_the_step_ends_fails_its_frames() -> None:
    async with ends_with() as ends:
        late = LateWrites()
        for value in range(3):
            ends.send(value, written=late, of=f"r{value}")
        await until(lambda: ("prepared", 0) in ends.log)
        ends.sender.close("a", "test")
        await until(lambda: sorted(ends.values("not sent")) == [0, 1, 2])
        late.end()


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
