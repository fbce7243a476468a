"""The contract of every transport: bytes arrive unchanged and in order, and each failure is an error in time."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import pytest
import torch

from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import Link, LinkError, Rendezvous, Transport
from kvrelay.transfer.transports.nixl import nixl_missing
from support.fake_transport import FakeTransport
from support.link_process import beside, filled, linked_process, meetings, pattern, transport_named
from support.processes import wait_until

SIZES = [1, 4097, 65536, 3 * 2**20 + 1]
WAIT = 20.0

without_nixl = pytest.mark.skipif(nixl_missing() is not None, reason=f"nixl: {nixl_missing()}")
PROCESSES = ["gloo", "shm", "tcp", pytest.param("nixl", marks=without_nixl)]
HERE = [*PROCESSES, "fake"]
SEES_DEATH = ["gloo", "shm", "tcp"]
"""Transports that notice a killed peer at once; the others do at their timeout."""


@cache
def transport(name: str) -> Transport:
    return FakeTransport() if name == "fake" else transport_named(name)


def joined(name: str, send: Callable[[Link], None], receive: Callable[[Link], None], timeout: float = WAIT) -> None:
    """Both ends of a link in this process, each on a thread of its own; closed in the end."""
    meeting = meetings(timeout)
    # A send is done when its buffer may be reused, perhaps before the other end has the bytes.
    done = threading.Event(), threading.Event()

    def end(rank: int, work: Callable[[Link], None]) -> None:
        link = transport(name).connect(meeting[rank], rank, timeout)
        try:
            work(link)
        finally:
            done[rank].set()
            done[1 - rank].wait(WAIT)
            link.close()

    other = beside(lambda: end(RECEIVER, receive))
    try:
        end(SENDER, send)
    finally:
        other()


@pytest.mark.parametrize("name", HERE)
def test_frames_arrive_in_order_both_ways_with_two_in_transit(name: str) -> None:
    """Like a link's thread: a byte there and back, then frames, each begun before the one before it has ended."""

    def send(link: Link) -> None:
        link.send(link.buffer(1)).wait(WAIT)
        link.recv(link.buffer(1)).wait(WAIT)
        buffers = [link.buffer(5000), link.buffer(5000)]
        window = []
        for number in range(40):
            buffer = buffers[number % 2]
            if len(window) == 2:
                window.pop(0).wait(WAIT)
            size = 1 + number * 97
            buffer[:size].fill_(number)
            window.append(link.send(buffer[:size]))
        for pending in window:
            pending.wait(WAIT)
        link.recv(link.buffer(1)).wait(WAIT)

    def receive(link: Link) -> None:
        byte = link.buffer(1)
        link.recv(byte).wait(WAIT)
        link.send(byte).wait(WAIT)
        buffers = [link.buffer(5000), link.buffer(5000)]
        window = [(link.recv(buffers[0][:1]), buffers[0][:1])]
        for number in range(40):
            if number + 1 < 40:
                into = buffers[(number + 1) % 2][: 1 + (number + 1) * 97]
                window.append((link.recv(into), into))
            pending, into = window.pop(0)
            pending.wait(WAIT)
            assert (into == number).all()
        link.send(byte).wait(WAIT)

    joined(name, send, receive)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_frame_longer_than_the_receive_ends_no_process(name: str) -> None:
    """Such a frame comes after one that an end missed. The result is an error, or bytes that no checksum accepts."""

    def send(link: Link) -> None:
        with suppress(LinkError):
            link.send(link.buffer(5000)).wait(1)

    def receive(link: Link) -> None:
        with suppress(LinkError):
            link.recv(link.buffer(5000)[:100]).wait(1)

    joined(name, send, receive)
    joined(
        name,
        receive=lambda link: link.recv(link.buffer(9)).wait(WAIT),
        send=lambda link: link.send(link.buffer(9)).wait(WAIT),
    )


@pytest.mark.parametrize("name", PROCESSES)
def test_bytes_of_every_size_cross_between_processes(name: str) -> None:
    with linked_process(name, "idle", SIZES) as other:
        for size in SIZES:
            into = other.link.buffer(size)
            other.link.recv(into).wait(WAIT)
            assert torch.equal(into, pattern(size))


@pytest.mark.parametrize("name", HERE)
def test_a_frame_of_another_size_is_an_error(name: str) -> None:
    """The error is raised at the receiver or at the sender."""
    if name in ("gloo", "shm", "tcp"):
        pytest.skip("carries bytes; announcements and checksums separate the frames on it")
    errors: list[str] = []

    def attempt(work: Callable[[Link], None]) -> Callable[[Link], None]:
        def run(link: Link) -> None:
            try:
                work(link)
            except LinkError as error:
                errors.append(str(error))

        return run

    joined(
        name,
        attempt(lambda link: link.send(filled(link, 64)).wait(2)),
        attempt(lambda link: link.recv(link.buffer(128)).wait(2)),
        timeout=2,
    )
    assert any("64" in error and "128" in error for error in errors), errors


@pytest.mark.parametrize("name", PROCESSES)
def test_a_killed_peer_is_an_error_at_once_or_at_the_timeout(name: str) -> None:
    with linked_process(name, "idle", []) as other:
        pending = other.link.recv(other.link.buffer(1024))
        other.process.kill()
        killed = time.monotonic()
        with pytest.raises(LinkError):
            pending.wait(10 if name in SEES_DEATH else 1)
        assert time.monotonic() - killed < 2
        with pytest.raises(LinkError):
            other.link.recv(other.link.buffer(1024)).wait(1)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_frozen_peer_is_an_error_at_the_timeout(name: str) -> None:
    with linked_process(name, "idle", []) as other:
        pid = other.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(LinkError):
            other.link.recv(other.link.buffer(1024)).wait(0.5)
        assert 0.4 < time.monotonic() - started < 5
        with pytest.raises(LinkError):
            other.link.recv(other.link.buffer(1024)).wait(0.5)
        closing = time.monotonic()
        other.link.close()
        assert time.monotonic() - closing < 2


@pytest.mark.parametrize("name", PROCESSES)
def test_an_end_that_closes_fails_the_other(name: str) -> None:
    with linked_process(name, "abort", [1]) as other:
        other.link.recv(other.link.buffer(1)).wait(WAIT)
        started = time.monotonic()
        with pytest.raises(LinkError):
            other.link.recv(other.link.buffer(64)).wait(10)
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("name", [name for name in HERE if name != "gloo"])
def test_abort_from_another_thread_ends_a_wait(name: str) -> None:
    """A wait of gloo is ended only by its timeout."""
    waits = threading.Event()

    def receive(link: Link) -> None:
        timer = threading.Timer(0.1, link.abort)
        timer.start()
        started = time.monotonic()
        with pytest.raises(LinkError):
            link.recv(link.buffer(64)).wait(10)
        assert time.monotonic() - started < 2
        waits.set()

    joined(name, lambda link: waits.wait(WAIT) and None, receive)


@pytest.mark.parametrize("name", HERE)
def test_a_peer_that_never_comes_is_an_error_at_the_timeout(name: str) -> None:
    for rank in (SENDER, RECEIVER):
        meeting = Rendezvous(lambda entry, value: None, 0.5, "a link")
        started = time.monotonic()
        with pytest.raises(LinkError, match="did not come"):
            transport(name).connect(meeting, rank, 0.5)
        assert 0.4 < time.monotonic() - started < 5


@pytest.mark.parametrize("name", HERE)
def test_opening_a_link_can_be_cancelled(name: str) -> None:
    for rank in (SENDER, RECEIVER):
        meeting = Rendezvous(lambda entry, value: None, 30, "a link")
        timer = threading.Timer(0.1, meeting.close)
        timer.start()
        started = time.monotonic()
        with pytest.raises(LinkError, match="closed"):
            transport(name).connect(meeting, rank, 30)
        assert time.monotonic() - started < 5
        timer.join()


@pytest.mark.parametrize("name", HERE)
def test_links_up_and_down_leave_no_thread_no_descriptor_and_no_memory(name: str) -> None:
    """A pair opens link after link, and abandons every other one with a receive in progress."""

    def one_link(given_up: bool) -> None:
        def receive(link: Link) -> None:
            into = link.buffer(2**16)
            link.recv(into).wait(WAIT)
            assert torch.equal(into, pattern(2**16))
            if given_up:
                link.recv(into)

        joined(name, lambda link: link.send(filled(link, 2**16)).wait(WAIT), receive)

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    for number in range(5):
        one_link(number % 2 == 0)
    threads, descriptors = held()
    before = resident()
    for number in range(40):
        one_link(number % 2 == 0)
    # A link's threads may end a moment after it.
    wait_until(lambda: held()[0] <= threads, lambda: f"as many threads as before, {threads}: {held()}", WAIT)
    assert held()[1] <= descriptors + 2
    assert resident() - before < 24 * 2**20


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
