"""Gloo links between two processes: bytes arrive as they were, and a lost or silent peer is an error, soon."""

import os
import signal
import threading
import time

import pytest
import torch

from kvrelay.transfer.gloo import GlooTransport
from kvrelay.transfer.transport import RECEIVER, SENDER, LinkError, Rendezvous, choose
from support.link_process import linked_process, pattern

SIZES = [1, 4097, 65536, 3 * 2**20 + 1]


def test_bytes_arrive_as_they_were_sent() -> None:
    with linked_process("send", SIZES) as other:
        for size in SIZES:
            into = other.link.buffer(size)
            other.link.recv(into).wait(10)
            assert torch.equal(into, pattern(size))


def test_a_killed_peer_is_an_error_at_once() -> None:
    with linked_process("idle", []) as other:
        pending = other.link.recv(other.link.buffer(1024))
        other.process.kill()
        killed = time.monotonic()
        with pytest.raises(LinkError):
            pending.wait(10)
        assert time.monotonic() - killed < 2
        with pytest.raises(LinkError):
            other.link.send(other.link.buffer(1024)).wait(10)


def test_a_frozen_peer_is_an_error_at_the_timeout() -> None:
    with linked_process("idle", []) as other:
        pid = other.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(LinkError):
            other.link.recv(other.link.buffer(1024)).wait(0.5)
        assert 0.4 < time.monotonic() - started < 2
        with pytest.raises(LinkError):
            other.link.recv(other.link.buffer(1024)).wait(0.5)


def test_a_peer_that_never_comes_is_an_error_at_the_timeout() -> None:
    meeting = Rendezvous(lambda entry, value: None, 0.5)
    started = time.monotonic()
    with pytest.raises(LinkError, match="did not come"):
        GlooTransport("127.0.0.1").connect(meeting, SENDER, 0.5)
    assert 0.4 < time.monotonic() - started < 2


def test_a_dial_can_be_called_off() -> None:
    meeting = Rendezvous(lambda entry, value: None, 30)
    threading.Timer(0.1, meeting.close).start()
    started = time.monotonic()
    with pytest.raises(LinkError, match="closed"):
        GlooTransport("127.0.0.1").connect(meeting, RECEIVER, 30)
    assert time.monotonic() - started < 5


def test_a_hundred_links_leave_no_thread_and_no_socket() -> None:
    transport = GlooTransport("127.0.0.1")

    def one_link() -> None:
        meetings: list[Rendezvous] = []
        meetings.append(Rendezvous(lambda entry, value: meetings[1].put(entry, value), 10))
        meetings.append(Rendezvous(lambda entry, value: meetings[0].put(entry, value), 10))
        failures: list[BaseException] = []

        def receive() -> None:
            try:
                link = transport.connect(meetings[1], RECEIVER, 10)
                link.recv(link.buffer(8)).wait(10)
                link.close()
            except LinkError as error:
                failures.append(error)

        receiver = threading.Thread(target=receive)
        receiver.start()
        link = transport.connect(meetings[0], SENDER, 10)
        link.send(link.buffer(8)).wait(10)
        receiver.join(10)
        link.close()
        assert not failures

    one_link()
    threads, sockets = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        one_link()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= sockets + 2


def test_the_best_transport_that_both_can_do_is_chosen() -> None:
    assert choose("auto", ["nccl", "gloo"], ["nccl", "gloo"]) == "nccl"
    assert choose("auto", ["nccl", "gloo"], ["gloo"]) == "gloo"
    assert choose("gloo", ["nccl", "gloo"], ["nccl", "gloo"]) == "gloo"


@pytest.mark.parametrize(("wanted", "here", "there"), [("nccl", ["gloo"], ["gloo"]), ("auto", ["nccl"], ["gloo"])])
def test_no_common_transport_is_an_error_that_says_what_either_can_do(
    wanted: str, here: list[str], there: list[str]
) -> None:
    with pytest.raises(LinkError, match=rf"{wanted}.*{here[0]}.*{there[0]}"):
        choose(wanted, here, there)
