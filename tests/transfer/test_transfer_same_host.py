"""Links within one machine: which peers may join, what may be mapped, and that nothing outlives the link."""

import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from device_twin import DriverTwin

from kvrelay.transfer.packing import pack
from kvrelay.transfer.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import Link, LinkError
from kvrelay.transfer.transports.cuda_ipc import HANDLE_BYTES, CudaMemory
from kvrelay.transfer.transports.same_host import SameHostLink, SameHostTransport
from kvrelay.transfer.transports.shm import SharedMemory
from support.link_process import beside, filled, meetings, pattern

WAIT = 10.0


def shm() -> SameHostTransport:
    return SameHostTransport("shm", "here", SharedMemory())


def refusal(*values: object, descriptor: int | None = None) -> str:
    """The error of a receiver that gets these values on its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SameHostLink("shm", ours, SharedMemory(), WAIT)
    try:
        socket.send_fds(theirs, [pack(list(values))], [] if descriptor is None else [descriptor])
        with pytest.raises(LinkError) as refused:
            link.recv(link.buffer(64)).wait(WAIT)
        return str(refused.value)
    finally:
        link.close()
        theirs.close()


@contextmanager
def memory_file(nbytes: int) -> Iterator[int]:
    """A memory file that its owner can still shrink."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, nbytes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_buffer_that_could_shrink_under_its_reader_is_refused() -> None:
    with memory_file(4096) as descriptor:
        assert "another size, or an unsealed one" in refusal("buffer", 0, 4096, b"", descriptor=descriptor)
    assert "without its memory file" in refusal("buffer", 0, 4096, b"")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("frame", 1, 0, 0, 64), "outside the buffers"),
        (("taken", 1), "0 were sent"),
        (("frame", 1, 0, 0), "allowed: buffer, frame, taken"),
        (("frame", -1, 0, 0, 64), "allowed: an integer from 1"),
        (("buffer", 0, 2**40, b""), "allowed: an integer from 1 to"),
        (("anything",), "allowed: buffer, frame, taken"),
    ],
)
def test_an_invalid_message_is_an_error_with_the_reason(values: tuple[object, ...], reason: str) -> None:
    assert reason in refusal(*values)


def test_an_unexpected_descriptor_is_closed() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with memory_file(64) as descriptor:
        assert "file descriptor came with taken" in refusal("taken", 1, descriptor=descriptor)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def exchange(transport: SameHostTransport) -> None:
    """One frame over a link of its own."""
    meeting = meetings(WAIT)
    received = threading.Event()

    def receive() -> None:
        link: Link = transport.connect(meeting[RECEIVER], RECEIVER, WAIT)
        into = link.buffer(4097)
        link.recv(into).wait(WAIT)
        assert torch.equal(into, pattern(4097))
        received.set()
        link.close()

    other = beside(receive)
    link = transport.connect(meeting[SENDER], SENDER, WAIT)
    link.send(filled(link, 4097)).wait(WAIT)
    assert received.wait(WAIT)
    link.close()
    other()


def test_shared_memory_has_no_name_and_is_unmapped_with_the_link() -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:kvrelay")

    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    before = mapped()
    for _ in range(3):
        exchange(shm())
    assert mapped() == before
    assert (os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []) == names


def test_device_memory_is_freed_and_unmapped_with_the_link() -> None:
    driver = DriverTwin()
    transport = SameHostTransport("cuda_ipc", "here", CudaMemory(driver))
    for _ in range(3):
        exchange(transport)
    gc.collect()
    assert driver.in_use == 0
    assert driver.synchronized >= 6, (
        "once before the sender announces a frame, once before the receiver returns the buffer"
    )


def test_an_invalid_handle_is_refused() -> None:
    memory = CudaMemory(DriverTwin())
    with pytest.raises(LinkError, match=f"allowed: {HANDLE_BYTES}"):
        memory.open(64, b"short", None)
    with pytest.raises(LinkError, match="no such handle"):
        memory.open(64, bytes(HANDLE_BYTES), None)
