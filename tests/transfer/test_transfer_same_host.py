"""Links within one machine: which peers may join, what may be mapped, and that nothing outlives the link."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from device_twin import DriverTwin

from kvrelay.transfer.protocol.packing import pack
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import Link, LinkError
from kvrelay.transfer.transports.cuda_ipc import HANDLE_BYTES, CudaMemory, view_of
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
        (("frame", 1, 0, 0), "allowed: buffer, frame, split, taken"),
        (("frame", -1, 0, 0, 64), "allowed: an integer from 1"),
        (("buffer", 0, 2**40, b""), "allowed: an integer from 1 to"),
        (("anything",), "allowed: buffer, frame, split, taken"),
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


def eventually(condition: Callable[[], bool]) -> None:
    gc.collect()
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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

    def ours() -> list[str]:
        """Named files of shared memory that this process has open or mapped: others come and go with other tests."""
        opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [name for name in (*opened, *lines) if "/dev/shm/" in name]

    names, before = ours(), mapped()
    for _ in range(3):
        exchange(shm())
    assert mapped() == before
    assert ours() == names


def test_device_memory_is_freed_and_unmapped_with_the_link() -> None:
    driver = DriverTwin()
    transport = SameHostTransport("cuda_ipc", "here", CudaMemory(driver))
    for _ in range(3):
        exchange(transport)
    eventually(lambda: driver.in_use == 0)
    assert driver.freed_while_mapped == 0
    assert driver.synchronized >= 6, (
        "once before the sender announces a frame, once before the receiver returns the buffer"
    )


def test_an_invalid_handle_is_refused() -> None:
    memory = CudaMemory(DriverTwin())
    with pytest.raises(LinkError, match=f"allowed: {HANDLE_BYTES}"):
        memory.open(64, b"short", None)
    with memory_file(64) as descriptor:
        for other in (None, descriptor):
            with pytest.raises(LinkError, match="without its pipe"):
                memory.open(64, bytes(HANDLE_BYTES), other)
    for descriptor in (pipe := os.pipe()):
        with pytest.raises(LinkError, match="no such handle"):
            memory.open(64, bytes(HANDLE_BYTES), descriptor)
    for descriptor in pipe:
        os.close(descriptor)


def test_device_memory_is_freed_only_after_the_other_end_has_unmapped_it() -> None:
    driver = DriverTwin()
    owner, user = CudaMemory(driver), CudaMemory(driver)
    tensor, handle, descriptor = owner.allocate(64)
    mapped = user.open(64, handle, descriptor)
    assert descriptor is not None
    os.close(descriptor)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert driver.in_use == 2, "the owner has let go of it, and the other end has not"
    assert mapped.data_ptr() == address
    del mapped
    eventually(lambda: driver.in_use == 0)
    assert driver.freed_while_mapped == 0


def test_device_memory_is_freed_after_the_process_that_maps_it_was_killed() -> None:
    driver = DriverTwin()
    tensor, _, descriptor = CudaMemory(driver).allocate(64)
    assert descriptor is not None
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, pass_fds=(descriptor,)) as other:
        os.close(descriptor)
        del tensor
        gc.collect()
        assert driver.in_use == 1
        other.kill()
        other.wait(WAIT)
        eventually(lambda: driver.in_use == 0)


def test_memory_that_nobody_maps_is_freed_at_once() -> None:
    driver = DriverTwin()
    link = SameHostLink("cuda_ipc", socket.socketpair()[0], CudaMemory(driver), WAIT)
    buffer = link.buffer(64)
    assert driver.in_use == 1
    link.close()
    del buffer
    gc.collect()
    assert driver.in_use == 0


def test_a_view_that_torch_would_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of another GPU than the one that is asked for: torch copies it once, and the copy never changes again."""
    original = torch.arange(8, dtype=torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: original)
    assert view_of(original.data_ptr(), 8, None, torch.device("cpu")) is original
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: original.clone())
    with pytest.raises(LinkError, match="is not of cuda:1, so torch made a copy"):
        view_of(original.data_ptr(), 8, None, torch.device("cuda", 1))
