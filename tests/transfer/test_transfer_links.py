"""Links: opened on demand, capped, discarded on the first error, without a thread or a job left behind."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest
import torch

from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.transfer.links import links
from kvrelay.transfer.links.links import LinkLimits, LinkManager, LinkTimeouts
from kvrelay.transfer.protocol.messages import Key
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER, LinkEnd, LinkSpec, LoopRuntime
from kvrelay.transfer.transports.base import Link, Pending, Rendezvous
from support.fake_transport import FakeLink, FakeTransport, Fault

WAIT = 10.0


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    before = threading.active_count()
    asyncio.run(test())
    assert threading.active_count() <= before, "a link's thread is left"


@dataclass
class Sending:
    """Sends one number."""

    value: int
    reports: list[str]
    key: Key | None = None

    written: KVWrites = WRITTEN

    def prepare(self, link: Link, buffer: torch.Tensor) -> None: ...

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        buffer[:1].fill_(self.value)
        return link.send(buffer[:1])

    def done(self, buffer: torch.Tensor) -> None:
        self.reports.append(f"sent {self.value}")

    def fail(self, message: str) -> None:
        self.reports.append(f"not sent {self.value}")


@dataclass
class Receiving:
    """Receives one number."""

    reports: list[str]
    key: Key | None = None

    written: KVWrites = WRITTEN

    def prepare(self, link: Link, buffer: torch.Tensor) -> None: ...

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        return link.recv(buffer[:1])

    def done(self, buffer: torch.Tensor) -> None:
        self.reports.append(f"received {int(buffer[0])}")

    def fail(self, message: str) -> None:
        self.reports.append("not received")


@dataclass
class Ends:
    """A sending and a receiving manager, and what they report."""

    transport: FakeTransport = field(default_factory=FakeTransport)
    max_links: int = 4
    gpu_buffer_bytes: int = 2**30
    timeout: float = 2.0
    dial: float = 2.0
    busy: set[str] = field(default_factory=set)
    ended: list[tuple[str, int]] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runtime = LoopRuntime()
        self.sender, self.receiver = self._manager(self.max_links), self._manager(64)

    def _manager(self, max_links: int) -> LinkManager:
        transports = {self.transport.name: self.transport}
        limits, timeouts = LinkLimits(max_links, self.gpu_buffer_bytes), LinkTimeouts(self.timeout, self.dial)
        return LinkManager(transports, limits, timeouts, "auto", self.runtime)

    def open(self, peer: str, epoch: int) -> bool:
        """Opens both ends of the link to `peer`."""
        opened = self.sender.open(self._spec(peer, epoch, SENDER, self.receiver))
        return opened and self.receiver.open(self._spec(peer, epoch, RECEIVER, self.sender))

    def _spec(self, peer: str, epoch: int, rank: int, other: LinkManager) -> LinkSpec:
        def tell(entry: str, value: bytes) -> None:
            self.runtime.post(other.meet, peer, epoch, entry, value)

        def on_end(end: LinkEnd) -> None:
            if rank == SENDER:
                self.ended.append((peer, end.epoch))

        return LinkSpec(
            "here", peer, epoch, self.transport.name, rank, 64, tell, on_end, idle=lambda: peer not in self.busy
        )

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT):
            while not condition():  # noqa: ASYNC110  # the condition may be about anything
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.sender.shut_down()
        await self.receiver.shut_down()


def test_jobs_pass_in_order() -> None:
    async def test() -> None:
        ends = Ends()
        assert ends.open("a", 1)
        for value in range(20):
            ends.sender.submit("a", 1, Sending(value, ends.reports))
            ends.receiver.submit("a", 1, Receiving(ends.reports))
        await ends.until(lambda: len(ends.reports) == 40)
        assert [report for report in ends.reports if report.startswith("rec")] == [
            f"received {value}" for value in range(20)
        ]
        await ends.close()

    run(test)


def test_every_job_of_a_lost_link_fails_once_and_its_end_is_reported() -> None:
    async def test() -> None:
        ends = Ends(FakeTransport(lambda number: Fault("fail") if number == 3 else None))
        ends.open("a", 1)
        for value in range(10):
            ends.sender.submit("a", 1, Sending(value, ends.reports))
        await ends.until(lambda: ends.ended == [("a", 1)])
        ends.sender.submit("a", 1, Sending(10, ends.reports))
        values = [int(report.split()[-1]) for report in ends.reports]
        assert sorted(values) == list(range(11))
        assert "not sent 10" in ends.reports
        assert ends.sender.epoch("a") == 0
        await ends.close()

    run(test)


def test_a_later_epoch_takes_the_place_of_the_older() -> None:
    async def test() -> None:
        ends = Ends()
        ends.open("a", 1)
        ends.open("a", 2)
        await ends.until(lambda: ("a", 1) in ends.ended)
        ends.sender.submit("a", 1, Sending(1, ends.reports))
        assert ends.reports == ["not sent 1"]
        ends.sender.submit("a", 2, Sending(2, ends.reports))
        ends.receiver.submit("a", 2, Receiving(ends.reports))
        await ends.until(lambda: "received 2" in ends.reports)
        assert len(ends.sender) == 1
        await ends.close()

    run(test)


def test_the_least_recently_used_link_is_closed_unless_it_is_needed() -> None:
    async def test() -> None:
        ends = Ends(max_links=3)
        for number, peer in enumerate("abc"):
            assert ends.open(peer, 1)
            ends.sender.submit(peer, 1, Sending(number, ends.reports))
            ends.receiver.submit(peer, 1, Receiving(ends.reports))
        await ends.until(lambda: len(ends.reports) == 6)
        ends.sender.submit("a", 1, Sending(7, ends.reports))
        ends.receiver.submit("a", 1, Receiving(ends.reports))
        await ends.until(lambda: "received 7" in ends.reports)
        ends.busy = {"b"}
        assert ends.open("d", 1)
        await ends.until(lambda: ends.ended == [("c", 1)])
        ends.busy = {"a", "b", "d"}
        assert not ends.open("e", 1)
        assert len(ends.sender) == 3
        await ends.close()

    run(test)


def test_links_between_gpus_keep_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        # Room for two links, of two frames of 64 bytes each.
        ends = Ends(gpu_buffer_bytes=256, busy={"a", "b"})
        assert ends.open("a", 1)
        assert ends.open("b", 1)
        assert not ends.open("c", 1)
        ends.busy = {"b"}
        assert ends.open("c", 1)
        await ends.until(lambda: ends.ended == [("a", 1)])
        await ends.close()

    monkeypatch.setattr(links, "BETWEEN_GPUS", frozenset({FakeTransport().name}))
    run(test)


def test_a_link_whose_other_end_never_opens_ends_by_itself() -> None:
    async def test() -> None:
        ends = Ends(timeout=0.2)
        assert ends.sender.open(ends._spec("a", 1, SENDER, ends.receiver))
        ends.sender.submit("a", 1, Sending(1, ends.reports))
        await ends.until(lambda: ends.ended == [("a", 1)])
        assert ends.reports == ["not sent 1"]
        await ends.close()

    run(test)


def test_two_hundred_links_up_and_down_leave_no_thread() -> None:
    async def test() -> None:
        ends = Ends()
        for epoch in range(1, 201):
            ends.open("a", epoch)
            ends.sender.submit("a", epoch, Sending(epoch % 256, ends.reports))
            ends.receiver.submit("a", epoch, Receiving(ends.reports))
            await ends.until(lambda epoch=epoch: ends.reports.count(f"received {epoch % 256}") == 1 + (epoch > 255))
        await ends.close()
        assert len(ends.sender._ending) <= 2

    run(test)


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


def test_a_close_that_blocks_delays_no_other_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.3)
    transport = StuckTransport()
    before = threading.active_count()

    async def test() -> None:
        ends = Ends(transport)
        for epoch in (1, 2):
            ends.open("a", epoch)
            ends.sender.submit("a", epoch, Sending(epoch, ends.reports))
            ends.receiver.submit("a", epoch, Receiving(ends.reports))
            await ends.until(lambda epoch=epoch: f"received {epoch}" in ends.reports)
        started = time.monotonic()
        await ends.close()
        assert time.monotonic() - started < 3
        # Two ends of two links, each on a daemon thread, for which the exit of the process doesn't wait.
        await ends.until(lambda: transport.closing == 4)
        left = [thread for thread in threading.enumerate() if thread.name.startswith("reaper")]
        assert len(left) == 4
        assert all(thread.daemon for thread in left)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("link ")]
        transport.let_go.set()
        await ends.until(lambda: threading.active_count() <= before)

    asyncio.run(test())


def test_a_close_that_fails_is_logged_and_ends_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    class FailingTransport(StuckTransport):
        def _close(self) -> None:
            raise RuntimeError("no")

    async def test() -> None:
        ends = Ends(FailingTransport())
        ends.open("a", 1)
        await ends.close()

    run(test)
    assert "closing a link failed" in caplog.text


def test_a_link_between_gpus_has_longer_to_open_than_a_frame_takes() -> None:
    """The first operation of a NCCL link starts NCCL, which takes longer than any frame may."""
    timeouts = LinkTimeouts(frame=3.0, dial=20.0)
    assert [timeouts.to_open(name) for name in ("nccl", "tcp", "shm")] == [20.0, 3.0, 3.0]
    assert LinkTimeouts(frame=60.0, dial=20.0).to_open("nccl") == 60.0


def test_a_warm_up_that_outlasts_a_frames_timeout_opens_the_link() -> None:
    class Slow(FakeTransport):
        name = "nccl"

        def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
            link = super().connect(meeting, rank, timeout)
            # As a communicator that the first operation makes.
            time.sleep(0.5)
            return link

    async def test() -> None:
        ends = Ends(Slow(), timeout=0.2, dial=20.0)
        assert ends.open("a", 1)
        ends.sender.submit("a", 1, Sending(7, ends.reports))
        ends.receiver.submit("a", 1, Receiving(ends.reports))
        await ends.until(lambda: len(ends.reports) == 2)
        assert set(ends.reports) == {"sent 7", "received 7"}
        assert not ends.ended
        await ends.close()

    run(test)
