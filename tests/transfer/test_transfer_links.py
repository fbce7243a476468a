"""Links: made on demand, capped, thrown away on the first error, and never a thread or a job left behind."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest
import torch

from kvrelay.transfer import links
from kvrelay.transfer.links import LinkEnd, LinkManager, LinkSpec
from kvrelay.transfer.ports import RECEIVER, SENDER
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
    news: list[str]

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        buffer[:1].fill_(self.value)
        return link.send(buffer[:1])

    def done(self, buffer: torch.Tensor) -> None:
        self.news.append(f"sent {self.value}")

    def fail(self, message: str) -> None:
        self.news.append(f"not sent {self.value}")


@dataclass
class Receiving:
    """Receives one number."""

    news: list[str]

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        return link.recv(buffer[:1])

    def done(self, buffer: torch.Tensor) -> None:
        self.news.append(f"received {int(buffer[0])}")

    def fail(self, message: str) -> None:
        self.news.append("not received")


@dataclass
class Ends:
    """A sending and a receiving manager, and what they say."""

    transport: FakeTransport = field(default_factory=FakeTransport)
    max_links: int = 4
    timeout: float = 2.0
    busy: set[str] = field(default_factory=set)
    ended: list[tuple[str, int]] = field(default_factory=list)
    news: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sender, self.receiver = LinkManager(self.max_links), LinkManager(64)
        self.loop = asyncio.get_running_loop()

    def open(self, peer: str, epoch: int) -> bool:
        """Opens both ends of the link to `peer`."""
        opened = self.sender.open(self._spec(peer, epoch, SENDER, self.receiver))
        return opened and self.receiver.open(self._spec(peer, epoch, RECEIVER, self.sender))

    def _spec(self, peer: str, epoch: int, rank: int, other: LinkManager) -> LinkSpec:
        manager = self.sender if rank == SENDER else self.receiver

        def tell(entry: str, value: bytes) -> None:
            self.loop.call_soon_threadsafe(other.meet, peer, epoch, entry, value)

        def on_end(end: LinkEnd) -> None:
            manager.ended(peer, end.epoch)
            if rank == SENDER:
                self.ended.append((peer, end.epoch))

        idle = lambda: peer not in self.busy  # noqa: E731  # one of the spec's callables
        return LinkSpec(peer, epoch, self.transport, rank, 64, self.timeout, tell, on_end, idle)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT):
            while not condition():  # noqa: ASYNC110  # the condition may be about anything
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.sender.shut_down(WAIT)
        await self.receiver.shut_down(WAIT)


def test_jobs_pass_in_order() -> None:
    async def test() -> None:
        ends = Ends()
        assert ends.open("a", 1)
        for value in range(20):
            ends.sender.submit("a", 1, Sending(value, ends.news))
            ends.receiver.submit("a", 1, Receiving(ends.news))
        await ends.until(lambda: len(ends.news) == 40)
        assert [news for news in ends.news if news.startswith("rec")] == [f"received {value}" for value in range(20)]
        await ends.close()

    run(test)


def test_every_job_of_a_lost_link_fails_once_and_its_end_is_told() -> None:
    async def test() -> None:
        ends = Ends(FakeTransport(lambda number: Fault("fail") if number == 3 else None))
        ends.open("a", 1)
        for value in range(10):
            ends.sender.submit("a", 1, Sending(value, ends.news))
        await ends.until(lambda: ends.ended == [("a", 1)])
        ends.sender.submit("a", 1, Sending(10, ends.news))
        values = [int(news.split()[-1]) for news in ends.news]
        assert sorted(values) == list(range(11))
        assert "not sent 10" in ends.news
        assert ends.sender.epoch("a") == 0
        await ends.close()

    run(test)


def test_a_later_epoch_takes_the_place_of_the_older() -> None:
    async def test() -> None:
        ends = Ends()
        ends.open("a", 1)
        ends.open("a", 2)
        await ends.until(lambda: ("a", 1) in ends.ended)
        ends.sender.submit("a", 1, Sending(1, ends.news))
        assert ends.news == ["not sent 1"]
        ends.sender.submit("a", 2, Sending(2, ends.news))
        ends.receiver.submit("a", 2, Receiving(ends.news))
        await ends.until(lambda: "received 2" in ends.news)
        assert len(ends.sender) == 1
        await ends.close()

    run(test)


def test_the_link_unused_for_longest_makes_room_unless_it_is_needed() -> None:
    async def test() -> None:
        ends = Ends(max_links=3)
        for number, peer in enumerate("abc"):
            assert ends.open(peer, 1)
            ends.sender.submit(peer, 1, Sending(number, ends.news))
            ends.receiver.submit(peer, 1, Receiving(ends.news))
        await ends.until(lambda: len(ends.news) == 6)
        ends.sender.submit("a", 1, Sending(7, ends.news))
        ends.receiver.submit("a", 1, Receiving(ends.news))
        await ends.until(lambda: "received 7" in ends.news)
        ends.busy = {"b"}
        assert ends.open("d", 1)
        await ends.until(lambda: ends.ended == [("c", 1)])
        ends.busy = {"a", "b", "d"}
        assert not ends.open("e", 1)
        assert len(ends.sender) == 3
        await ends.close()

    run(test)


def test_a_dial_without_an_answer_ends_by_itself() -> None:
    async def test() -> None:
        ends = Ends(timeout=0.2)
        assert ends.sender.open(ends._spec("a", 1, SENDER, ends.receiver))
        ends.sender.submit("a", 1, Sending(1, ends.news))
        await ends.until(lambda: ends.ended == [("a", 1)])
        assert ends.news == ["not sent 1"]
        await ends.close()

    run(test)


def test_two_hundred_links_up_and_down_leave_no_thread() -> None:
    async def test() -> None:
        ends = Ends()
        for epoch in range(1, 201):
            ends.open("a", epoch)
            ends.sender.submit("a", epoch, Sending(epoch % 256, ends.news))
            ends.receiver.submit("a", epoch, Receiving(ends.news))
            await ends.until(lambda epoch=epoch: ends.news.count(f"received {epoch % 256}") == 1 + (epoch > 255))
        await ends.close()
        assert len(ends.sender._ending) <= 2

    run(test)


class StuckTransport(FakeTransport):
    """Links whose close never ends by itself, as a group's destructor that waits for a lost peer."""

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


def test_a_close_that_blocks_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.3)
    transport = StuckTransport()
    before = threading.active_count()

    async def test() -> None:
        ends = Ends(transport)
        for epoch in (1, 2):
            ends.open("a", epoch)
            ends.sender.submit("a", epoch, Sending(epoch, ends.news))
            ends.receiver.submit("a", epoch, Receiving(ends.news))
            await ends.until(lambda epoch=epoch: f"received {epoch}" in ends.news)
        started = time.monotonic()
        await ends.close()
        assert time.monotonic() - started < 3
        # Two ends of two links, each left to a thread of its own that the process's end doesn't wait for.
        await ends.until(lambda: transport.closing == 4)
        left = [thread for thread in threading.enumerate() if thread.name.startswith("reaper")]
        assert len(left) == 4
        assert all(thread.daemon for thread in left)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("link ")]
        transport.let_go.set()
        await ends.until(lambda: threading.active_count() <= before)

    asyncio.run(test())


def test_a_close_that_fails_is_told_and_ends_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    class FailingTransport(StuckTransport):
        def _close(self) -> None:
            raise RuntimeError("no")

    async def test() -> None:
        ends = Ends(FailingTransport())
        ends.open("a", 1)
        await ends.close()

    run(test)
    assert "closing a link failed" in caplog.text
