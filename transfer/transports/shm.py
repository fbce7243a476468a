"""Links between two processes of one machine: bytes stay in memory that both ends map, messages use a Unix socket.

    sender    [buffer, shared]  --- buffer (once, with its file), frame --->  receiver copies it out
                                <----------------- taken -------------------

The receiver copies the bytes before it verifies them, so a sender that changes its buffer later can't change what was
verified. The socket is in the abstract namespace and the memory has no name: both vanish with the processes. A killed
peer closes its socket, which is seen at once; a frozen peer is noticed when a wait times out.

KV of a GPU is copied to host memory by the sender, and from there by the receiver; its buffers are pinned for that.
"""

import hashlib
import mmap
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.machine.memory import is_memory_file, make_memory_file
from kvrelay.transfer.protocol.packing import Number, Rule, WireError, clip, pack, unpack_named
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import (
    ByteStream,
    Link,
    LinkError,
    Pending,
    PinnedMap,
    Rendezvous,
    link_errors,
    seconds_left,
)
from kvrelay.transfer.transports.link_key import BACKLOG, LinkKey

MAX_BUFFER_BYTES = 257 * 2**20
"""Size limit of a buffer that the other end may ask this one to map."""
MAX_BUFFERS = 64
"""Buffers that the other end may announce on one link."""
RING_SLOTS = 8
SLOT_BYTES = 2**19
"""Size in bytes of one slot of the ring that a stream goes through; the ring is small enough to stay in the processor's
cache."""
_MAX_MESSAGE_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")

_MESSAGES: dict[str, tuple[Rule, ...]] = {
    "buffer": (Number(0, MAX_BUFFERS - 1), Number(1, MAX_BUFFER_BYTES)),
    "frame": (
        Number(1, 2**48),
        Number(0, MAX_BUFFERS - 1),
        Number(0, MAX_BUFFER_BYTES),
        Number(1, MAX_BUFFER_BYTES),
    ),
    "taken": (Number(1, 2**48),),
}
"""Rules of the values of each message on the socket, by name. buffer: its number, bytes; frame: its number, the
buffer's number, offset, bytes; taken: the frame's number."""


def machine_id() -> str:
    """16 characters, equal for two processes if one can reach the other by an abstract Unix socket.

    Raises:
        OSError: the system doesn't provide them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot} {network} {os.getuid()}".encode()).hexdigest()[:16]


def allocate(nbytes: int, pinned: bool = False) -> tuple[torch.Tensor, int]:
    """A uint8 tensor [nbytes] on a file in memory, and the file's descriptor, which the caller closes.

    Args:
        pinned: whether the memory is copied to and from a GPU.

    Raises:
        LinkError: there is no memory left.
    """
    with link_errors(f"shm: {nbytes} bytes of shared memory", OSError, RuntimeError):
        descriptor = make_memory_file(nbytes)
        try:
            return _mapped(descriptor, nbytes, pinned), descriptor
        except BaseException:
            os.close(descriptor)
            raise


def open_shared(nbytes: int, descriptor: int | None) -> torch.Tensor:
    """Maps the other process's tensor until the returned one is freed.

    Raises:
        LinkError: the file isn't one of `allocate` with this size.
    """
    if descriptor is None:
        raise LinkError("shm: a buffer came without its memory file")
    with link_errors(f"shm: a buffer of {nbytes} bytes can't be mapped", OSError):
        if not is_memory_file(descriptor, nbytes):
            raise LinkError(f"shm: a buffer of {nbytes} bytes came with a file of another size, or an unsealed one")
        return _mapped(descriptor, nbytes)


def _mapped(descriptor: int, nbytes: int, pinned: bool = False) -> torch.Tensor:
    """The file's bytes, unmapped with the last tensor on them. The mapping is writable because torch requires it."""
    memory = PinnedMap(descriptor, nbytes).pin() if pinned else mmap.mmap(descriptor, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


def shm_missing() -> str | None:
    """Why this process can't open shared-memory links; None if it can."""
    if sys.platform != "linux":
        return "needs Linux"
    try:
        machine_id()
        os.close(allocate(1)[1])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind("")
    except (OSError, LinkError) as error:
        return str(error)
    return None


class SharedMemoryTransport:
    """Opens links to workers of the same user on this machine (in one network namespace, as in one pod)."""

    name = "shm"

    def __init__(self, pinned: bool = False, scope: str = "") -> None:
        """
        Args:
            pinned: whether the KV pool is on a GPU.
            scope: what both ends must have in common; this machine's id unless given. The receiver checks it again
                when a link is opened.

        Raises:
            OSError: the machine's id can't be read.
        """
        self.scope = scope or machine_id()
        self._pinned = pinned

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`. The sender listens."""
        meet = self._accept if rank == SENDER else self._connect
        with link_errors(self.name, OSError, RuntimeError, WireError):
            return SharedMemoryLink(meet(rendezvous, timeout), timeout, self._pinned)

    def _accept(self, rendezvous: Rendezvous, timeout: float) -> socket.socket:
        key, deadline = LinkKey.agree(rendezvous, SENDER), time.monotonic() + timeout

        def look() -> None:
            if rendezvous.check(["refusal"]):
                refusal = clip(rendezvous.get("refusal").decode(errors="replace"))
                raise LinkError(f"{self.name}: the other end refused: {refusal}")

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            # The kernel chooses a free abstract name. Any process of this machine can connect to it.
            listener.bind("")
            listener.listen(BACKLOG)
            rendezvous.set("scope", self.scope)
            rendezvous.set("address", listener.getsockname())
            return key.admit(listener, deadline, look, _same_owner)

    def _connect(self, rendezvous: Rendezvous, timeout: float) -> socket.socket:
        key, deadline = LinkKey.agree(rendezvous, RECEIVER), time.monotonic() + timeout
        scope = rendezvous.get("scope").decode(errors="replace")
        if scope != self.scope:
            refusal = f"{self.name} links workers of one scope only; this is {self.scope}, the sender's {clip(scope)}"
            rendezvous.set("refusal", refusal)
            raise LinkError(refusal)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(timeout)
            connection.connect(rendezvous.get("address"))
            if not _same_owner(connection):
                raise LinkError(f"{self.name}: the listening process belongs to another user")
            key.introduce(connection, deadline)
        except BaseException as error:
            connection.close()
            with suppress(RuntimeError):
                rendezvous.set("refusal", clip(str(error)) or type(error).__name__)
            raise
        return connection


class SharedMemoryLink:
    """One end of a link. A buffer is announced to the other end when it is first sent from."""

    lender = None
    mac_key = None
    """No MAC is needed: memory that two processes of one user share is on no network; who could change it could change
    the pool."""

    def __init__(self, connection: socket.socket, timeout: float, pinned: bool = False) -> None:
        self._connection = connection
        self._timeout = timeout
        self._pinned = pinned
        self._unannounced: dict[int, tuple[torch.Tensor, int]] = {}
        """Buffers that aren't announced yet, and the descriptors of their files, by address."""
        self._announced: dict[int, tuple[torch.Tensor, int]] = {}
        """Buffers and the numbers under which they are announced, by address."""
        self._opened: dict[int, torch.Tensor] = {}
        """Buffers of the other end, by number."""
        self._frames: deque[tuple[int, torch.Tensor]] = deque()
        """Frames of the other end that are not taken yet: number and bytes."""
        self._consumed = 0
        """Number of bytes of the first of `_frames` that have been read."""
        self._sent = self._taken = 0
        self._slot_frames = [0] * RING_SLOTS
        """Number of the last frame that was sent from each slot of the ring."""
        self._slot = 0

    @cached_property
    def _ring(self) -> torch.Tensor:
        """Shared memory that `write` copies to, [slots, bytes]."""
        return self.buffer(RING_SLOTS * SLOT_BYTES).view(RING_SLOTS, SLOT_BYTES)

    @property
    def stream(self) -> ByteStream:
        return self

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        """Copies to the next slots of the ring; waits until the other end has taken the frame that lies in a slot."""
        slots, used = self._ring.numpy(), 0
        for run in runs:
            while len(run):
                if not used:
                    self._wait_taken(self._slot_frames[self._slot], deadline)
                part = np.frombuffer(run[: SLOT_BYTES - used], np.uint8)
                slots[self._slot, used : used + len(part)] = part
                used += len(part)
                run = run[len(part) :]
                if used == SLOT_BYTES:
                    self._send_slot(used)
                    used = 0
        if used:
            self._send_slot(used)

    def _send_slot(self, nbytes: int) -> None:
        self.send(self._ring[self._slot, :nbytes])
        self._slot_frames[self._slot] = self._sent
        self._slot = (self._slot + 1) % RING_SLOTS

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        """Copies out of the other end's buffers, and returns each frame that has been read to its end."""
        for run in runs:
            while len(run):
                number, data = self._next_frame(deadline)
                part = data.numpy()[self._consumed : self._consumed + len(run)]
                np.frombuffer(run, np.uint8)[: len(part)] = part
                run = run[len(part) :]
                self._consumed += len(part)
                if self._consumed == len(data):
                    self._return_frame(number)

    def buffer(self, nbytes: int) -> torch.Tensor:
        tensor, descriptor = allocate(nbytes, self._pinned)
        self._unannounced[_address(tensor)] = tensor, descriptor
        return tensor

    def send(self, data: torch.Tensor) -> Pending:
        number, offset = self._announce(data)
        self._sent += 1
        self._tell("frame", self._sent, number, offset, data.numel())
        return Pending.in_wait(partial(self._wait_taken, self._sent))

    def recv(self, into: torch.Tensor) -> Pending:
        # The other end may have written these bytes slot by slot.
        return Pending.in_wait(partial(self.read, [memoryview(into.numpy().data)]))

    def abort(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._connection.close()
        for _, descriptor in self._unannounced.values():
            os.close(descriptor)
        for known in (self._frames, self._opened, self._announced, self._unannounced):
            known.clear()

    def _wait_taken(self, number: int, deadline: float) -> None:
        while self._taken < number:
            self._hear(deadline)

    def _next_frame(self, deadline: float) -> tuple[int, torch.Tensor]:
        while not self._frames:
            self._hear(deadline)
        return self._frames[0]

    def _return_frame(self, number: int) -> None:
        self._frames.popleft()
        self._consumed = 0
        self._tell("taken", number)

    def _announce(self, data: torch.Tensor) -> tuple[int, int]:
        """The number of the buffer that `data` is part of, announced if it is not yet, and the offset in it."""
        address = _address(data)
        if address not in self._announced:
            if address not in self._unannounced:
                raise LinkError("shm: only a buffer of this link can be sent from")
            buffer, descriptor = self._unannounced.pop(address)
            number = len(self._announced)
            self._announced[address] = buffer, number
            try:
                self._tell("buffer", number, buffer.numel(), descriptor=descriptor)
            finally:
                os.close(descriptor)
        buffer, number = self._announced[address]
        return number, data.data_ptr() - buffer.data_ptr()

    def _tell(self, name: str, *values: object, descriptor: int | None = None) -> None:
        """Sends one message."""
        with link_errors("shm", OSError):
            self._connection.settimeout(self._timeout)
            socket.send_fds(self._connection, [pack([name, *values])], [] if descriptor is None else [descriptor])

    def _hear(self, deadline: float) -> None:
        """Receives one message."""
        with link_errors("shm", OSError, WireError):
            self._connection.settimeout(seconds_left(deadline))
            name, values, descriptor = _read_message(self._connection)
            try:
                self._take(name, values, descriptor)
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _take(self, name: str, values: tuple[Any, ...], descriptor: int | None) -> None:
        match name, values:
            case "taken", (number,):
                if not self._taken < number <= self._sent:
                    raise WireError(f"frame {number} can't have been taken; {self._sent} were sent")
                self._taken = number
            case "frame", (number, buffer, offset, nbytes):
                opened = self._opened.get(buffer)
                if opened is None or offset + nbytes > opened.numel():
                    raise WireError(f"frame {number} lies outside the buffers that were announced")
                self._frames.append((number, opened[offset : offset + nbytes]))
            case "buffer", (number, nbytes):
                if number in self._opened:
                    raise WireError(f"buffer {number} was announced twice")
                self._opened[number] = open_shared(nbytes, descriptor)
            case _:
                raise WireError(f"a message {name} is not allowed on an open link")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_owner(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this process's user."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, owner, _ = _CREDENTIALS.unpack(packed)
    return bool(owner == os.getuid())


def _read_message(connection: socket.socket) -> tuple[str, tuple[Any, ...], int | None]:
    """One message: its name, its values, and the file descriptor that came with it, which the caller closes.

    Raises:
        ConnectionError: the other end has closed.
        OSError
        WireError: the message doesn't match `_MESSAGES`.
    """
    message, descriptors, flags, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not message:
            raise ConnectionError("the other end has closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise WireError("a message that is too long")
        name, values = unpack_named(message, _MESSAGES)
        if descriptors and name != "buffer":
            raise WireError(f"a file descriptor came with {name}")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return name, values, descriptors[0] if descriptors else None
