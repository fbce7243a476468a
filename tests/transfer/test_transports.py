"""The contract of every transport: bytes arrive unchanged and in order, and each failure is an error in time."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import ClassVar

import pytest
import torch

from kvrelay.machine.memory import return_free_memory
from kvrelay.transfer.protocol.packing import pack
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import Link, LinkError, Rendezvous, Transport, poll
from kvrelay.transfer.transports.nccl import OLDEST_SHARED_GPU, nccl_missing
from kvrelay.transfer.transports.nixl import NixlLink, nixl_missing
from support import link_process
from support.fake_transport import FakeTransport
from support.link_process import filled, linked_process, pattern, transport_named

SIZES = [1, 4097, 65536, 3 * 2**20 + 1, 16 * 2**20]
WAIT = 20.0


def missing_nccl() -> str | None:
    reason = nccl_missing()
    if reason is None and torch.cuda.nccl.version() < OLDEST_SHARED_GPU:
        return "this NCCL does not let two ranks share a GPU"
    return reason


more = pytest.mark.more
nixl = pytest.param("nixl", marks=[more, pytest.mark.skipif(nixl_missing() is not None, reason=str(nixl_missing()))])
nccl = pytest.param(
    "nccl", marks=[pytest.mark.gpu, pytest.mark.skipif(missing_nccl() is not None, reason=str(missing_nccl()))]
)
PROCESSES = ["shm", *(pytest.param(name, marks=more) for name in ("gloo", "tcp")), nixl]
HERE = [*PROCESSES, "fake"]
BYTES = {"gloo", "shm", "tcp"}
"""Transports that carry bytes: announcements and checksums separate the frames on them. These notice a killed peer at
once; the others do at their timeout."""


@cache
def transport(name: str) -> Transport:
    return FakeTransport() if name == "fake" else transport_named(name)


def joined(name: str, send: Callable[[Link], object], receive: Callable[[Link], object], timeout: float = WAIT) -> None:
    link_process.joined([transport(name)] * 2, send, receive, timeout)


@pytest.mark.parametrize("name", HERE)
def test_frames_arrive_in_order_both_ways_with_two_in_transit(name: str) -> None:
    """Like a link's thread: a byte there and back, then frames, each begun before the one before it has ended."""
    sizes = [1 + number * 97 for number in range(40)]

    def send(link: Link) -> None:
        link.send(link.buffer(1)).wait(WAIT)
        link.recv(link.buffer(1)).wait(WAIT)
        buffers = [link.buffer(5000), link.buffer(5000)]
        window = []
        for number, size in enumerate(sizes):
            if len(window) == 2:
                window.pop(0).wait(WAIT)
            buffers[number % 2][:size].fill_(number)
            window.append(link.send(buffers[number % 2][:size]))
        for pending in window:
            pending.wait(WAIT)
        link.recv(link.buffer(1)).wait(WAIT)

    def receive(link: Link) -> None:
        byte = link.buffer(1)
        link.recv(byte).wait(WAIT)
        link.send(byte).wait(WAIT)
        buffers = [link.buffer(5000), link.buffer(5000)]
        window = []
        for number, size in [*enumerate(sizes), (len(sizes), 0)]:
            if size:
                into = buffers[number % 2][:size]
                window.append((link.recv(into), into))
            if number:
                pending, into = window.pop(0)
                pending.wait(WAIT)
                assert (into == number - 1).all()
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
    joined(name, lambda link: link.send(link.buffer(9)).wait(WAIT), lambda link: link.recv(link.buffer(9)).wait(WAIT))


@pytest.mark.parametrize("name", [*PROCESSES, nccl])
def test_bytes_of_every_size_cross_between_processes(name: str) -> None:
    with linked_process(name, "idle", SIZES) as (link, _):
        for size in SIZES:
            into = link.buffer(size)
            link.recv(into).wait(WAIT)
            assert torch.equal(into.cpu(), pattern(size))


@pytest.mark.parametrize("name", [nixl, "fake"])
def test_a_frame_of_another_size_is_an_error(name: str) -> None:
    """The error is raised at the receiver or at the sender."""
    errors: list[str] = []

    def attempt(work: Callable[[Link], object]) -> Callable[[Link], None]:
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


def test_a_nixl_link_keeps_nothing_of_frames_that_have_come_and_takes_none_twice() -> None:
    class Agent:
        came: ClassVar[list[int]] = []

        def get_new_notifs(self) -> dict[str, list[bytes]]:
            found = [pack(["came", number]) for number in self.came]
            self.came.clear()
            return {"peer": found}

        def __getattr__(self, _: str) -> Callable[..., bytes]:
            return lambda *arguments: b""

    link = NixlLink(Agent(), "peer", torch.device("cpu"), None)
    into = link.buffer(8)
    for number in range(1, 200, 2):
        pending = [link.recv(into), link.recv(into)]
        Agent.came += [number + 1, number]  # one has overtaken the other
        for each in pending:
            each.wait(WAIT)
    assert not link._came
    for again in (1, 200, 201):
        Agent.came.append(again)
        with pytest.raises(LinkError, match=f"frame {again} came twice or unrequested; 200 were requested"):
            link.greet(WAIT)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("how", ["killed", "frozen", "closed"])
def test_a_peer_that_is_gone_is_an_error_in_time(name: str, how: str) -> None:
    """A receive fails at once or at its timeout, and so does the next one; closing doesn't wait for the peer."""
    timeout = {"killed": 10.0 if name in BYTES else 1.0, "frozen": 0.5, "closed": 10.0}[how]
    with linked_process(name, "abort" if how == "closed" else "idle", [1]) as (link, process):
        link.recv(link.buffer(1)).wait(WAIT)
        pending = link.recv(link.buffer(1024))
        assert process.pid is not None
        if how != "closed":
            os.kill(process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(LinkError):
            pending.wait(timeout)
        assert (0.4 if how == "frozen" else 0.0) < time.monotonic() - started < 4
        with pytest.raises(LinkError):
            link.recv(link.buffer(1024)).wait(0.5)
        closing = time.monotonic()
        link.close()
        assert time.monotonic() - closing < 2


@pytest.mark.gpu
@pytest.mark.skipif(missing_nccl() is not None, reason=str(missing_nccl()))
def test_a_killed_peer_is_an_error_in_time_over_nccl() -> None:
    with linked_process("nccl", "idle", [4096]) as (link, process):
        into = link.buffer(4096)
        link.recv(into).wait(WAIT)
        pending = link.recv(into)
        process.kill()
        killed = time.monotonic()
        with pytest.raises(LinkError):
            pending.wait(2)
        assert time.monotonic() - killed < 4


@pytest.mark.parametrize("name", HERE)
def test_abort_from_another_thread_ends_a_wait(name: str) -> None:
    if name == "gloo":
        pytest.skip("its wait ends only by its timeout")
    waits = threading.Event()

    def receive(link: Link) -> None:
        timer = threading.Timer(0.1, link.abort)
        timer.start()
        started = time.monotonic()
        with pytest.raises(LinkError):
            link.recv(link.buffer(64)).wait(10)
        assert time.monotonic() - started < 2
        waits.set()

    joined(name, lambda link: waits.wait(WAIT), receive)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_opening_a_link_ends_at_its_timeout_or_when_it_is_cancelled(name: str, rank: int) -> None:
    for seconds, reason in ((0.5, "did not come"), (30, "closed")):
        meeting = Rendezvous(lambda entry, value: None, seconds, "a link")
        timer = threading.Timer(0.1, meeting.close)
        if reason == "closed":
            timer.start()
        started = time.monotonic()
        with pytest.raises(LinkError, match=reason):
            transport(name).connect(meeting, rank, seconds)
        assert min(seconds, 0.1) * 0.8 < time.monotonic() - started < 5
        timer.cancel()


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
    assert poll(lambda: held()[0] <= threads, WAIT, 0.005), f"as many threads as before, {threads}: {held()}"
    assert held()[1] <= descriptors + 2
    assert resident() - before < 24 * 2**20


def resident() -> int:
    """Bytes of this process in memory, without what it has freed."""
    return_free_memory()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
