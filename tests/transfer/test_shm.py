"""Links through shared memory: which peers may join, what may be mapped, and that nothing outlives the link."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from kvrelay.transfer.protocol.packing import pack
from kvrelay.transfer.transports.base import Link, LinkError
from kvrelay.transfer.transports.shm import SharedMemoryLink, SharedMemoryTransport
from support.link_process import filled, joined, pattern

WAIT = 10.0


def refusal(*values: object, descriptor: int | None = None) -> str:
    """The error of a receiver that gets these values on its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SharedMemoryLink(ours, WAIT)
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
        assert "another size, or an unsealed one" in refusal("buffer", 0, 4096, descriptor=descriptor)
    assert "without its memory file" in refusal("buffer", 0, 4096)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("frame", 1, 0, 0, 64), "outside the buffers"),
        (("taken", 1), "0 were sent"),
        (("frame", 1, 0, 0), "allowed: buffer, frame, taken"),
        (("frame", -1, 0, 0, 64), "allowed: an integer from 1"),
        (("buffer", 0, 2**40), "allowed: an integer from 1 to"),
        (("anything",), "allowed: buffer, frame, taken"),
    ],
)
def test_an_invalid_message_is_an_error_with_the_reason(values: tuple[object, ...], reason: str) -> None:
    assert reason in refusal(*values)


def opened(file: os.stat_result) -> list[int]:
    """The descriptors of this process that are of this file. Others may come and go, on threads of earlier tests."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.path.samestat(os.fstat(number), file):
                found.append(number)
    return found


def test_an_unexpected_descriptor_is_closed() -> None:
    with memory_file(64) as descriptor:
        assert "file descriptor came with taken" in refusal("taken", 1, descriptor=descriptor)
        gc.collect()
        assert opened(os.fstat(descriptor)) == [descriptor]


def exchange() -> None:
    """One frame over a link of its own."""

    def receive(link: Link) -> None:
        into = link.buffer(4097)
        link.recv(into).wait(WAIT)
        assert torch.equal(into, pattern(4097))

    transport = SharedMemoryTransport()
    joined([transport, transport], lambda link: link.send(filled(link, 4097)).wait(WAIT), receive)


def test_shared_memory_has_no_name_and_is_unmapped_with_the_link() -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:kvrelay")

    def ours() -> list[str]:
        """Named files of shared memory that this process has open or mapped: others come and go with other tests."""
        opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [name for name in (*opened, *lines) if "/dev/shm/" in name]

    names, before = ours(), mapped()
    for _ in range(3):
        exchange()
    assert mapped() == before
    assert ours() == names
