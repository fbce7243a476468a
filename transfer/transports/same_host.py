"""Links between two processes of one machine: bytes stay in memory that both ends map, messages use a Unix socket.

    sender    [buffer, shared]  --- buffer (once, with what opens it), frame --->  receiver copies it out
                                <-------------------- taken ---------------------
              [pool, lent]      --- the same; of a frame, a run in the pool and what follows it in a buffer (split)

The receiver copies the bytes before it verifies them, so a sender that changes its buffer later can't change what was
verified. The socket is in the abstract namespace and the memory has no name: both vanish with the processes. A killed
peer closes its socket, which is seen at once; a frozen peer is noticed when a wait times out.

`Memory` is the kind of memory: `shm` has the CPU's, `cuda_ipc` a GPU's.
"""

import hashlib
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kvrelay.transfer.protocol.packing import Number, Raw, Rule, WireError, clip, pack, unpack_named
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import (
    ByteStream,
    Lender,
    Link,
    LinkError,
    Pending,
    Rendezvous,
    link_errors,
    seconds_left,
)
from kvrelay.transfer.transports.link_key import BACKLOG, LinkKey

logger = logging.getLogger(__name__)

MAX_BUFFER_BYTES = 257 * 2**20
"""Size limit of a buffer that the other end may ask this one to map."""
MAX_LENT_BYTES = 2**39
"""The same for lent memory, which is a GPU's."""
MAX_BUFFERS = 64
"""Buffers that the other end may announce on one link."""
RING_SLOTS = 8
SLOT_BYTES = 2**19
"""The ring that a stream goes through is small enough to stay in the processor's cache."""
_MAX_MESSAGE_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")

_PART: tuple[Rule, ...] = (Number(0, MAX_BUFFERS - 1), Number(0, MAX_LENT_BYTES), Number(1, MAX_BUFFER_BYTES))
_MESSAGES: dict[str, tuple[Rule, ...]] = {
    "buffer": (Number(0, MAX_BUFFERS - 1), Number(1, MAX_LENT_BYTES), Raw(0, 256)),
    "frame": (Number(1, 2**48), *_PART),
    "split": (Number(1, 2**48), *_PART, *_PART),
    "taken": (Number(1, 2**48),),
}
"""Messages on the socket: name and the rules of their values. buffer: its number, bytes, handle; frame: its number, the
buffer's number, offset, bytes; split: the same for a frame in two parts; taken: the frame's number."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Memory that the other end opens."""

    tensor: torch.Tensor
    """Keeps it alive."""
    address: int
    """Where the memory that the handle opens begins."""
    nbytes: int
    handle: bytes
    descriptor: int | None


class Memory(Protocol):
    """A kind of memory that two processes of one machine can share."""

    on_host: bool
    """Whether it is the CPU's."""

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes, int | None]:
        """A uint8 tensor [nbytes], and what opens it in another process: a handle, and a file descriptor or None.

        The caller closes the descriptor. The memory is freed with the tensor.

        Raises:
            LinkError: there is no memory left.
        """

    def lend(self, tensor: torch.Tensor) -> Lent:
        """What opens the memory of a tensor that `allocate` has not made. It must live until the process ends.

        The caller closes the descriptor.

        Raises:
            LinkError: it can't be opened by others.
        """

    def open(self, nbytes: int, handle: bytes, descriptor: int | None) -> torch.Tensor:
        """Maps the other process's tensor, as `allocate` there described it, until the returned tensor is freed.

        Raises:
            LinkError: the description doesn't match such a tensor.
        """

    def synchronize(self) -> None:
        """Returns when the operations that this thread has begun on tensors of this memory are done."""


def machine_id() -> str:
    """16 characters, equal for two processes if one can reach the other by an abstract Unix socket.

    Raises:
        OSError: the system doesn't provide them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot} {network} {os.getuid()}".encode()).hexdigest()[:16]


class SameHostTransport:
    """Opens links over one kind of memory."""

    def __init__(self, name: str, scope: str, memory: Memory) -> None:
        """`scope` must be equal at both ends; the receiver checks it again when a link is opened."""
        self.name = name
        self.scope = scope
        self._memory = memory

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`. The sender listens."""
        meet = self._accept if rank == SENDER else self._connect
        with link_errors(self.name, OSError, RuntimeError, WireError):
            return SameHostLink(self.name, meet(rendezvous, timeout), self._memory, timeout)

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


class SameHostLink:
    """One end of a link. A buffer is announced to the other end when it is first sent from."""

    mac_key = None
    """Memory that two processes of one user share is on no network; who could change it could change the pool."""
    most_runs = 1
    """A further message and a further copy take longer than the copy of a run into a buffer."""

    def __init__(self, name: str, connection: socket.socket, memory: Memory, timeout: float) -> None:
        self._name = name
        self._connection = connection
        self._memory = memory
        self._timeout = timeout
        self._unannounced: dict[int, Lent] = {}
        """By the address of its storage: a buffer, or lent memory, not announced yet."""
        self._announced: dict[int, tuple[int, Lent]] = {}
        """By the address of its storage: the number under which it is announced."""
        self._lendable: bool | None = None
        """Whether the lent memory can be sent from; None before it was tried."""
        self._opened: dict[int, torch.Tensor] = {}
        """The other end's buffers, by number."""
        self._frames: deque[tuple[int, list[torch.Tensor]]] = deque()
        """Frames of the other end that are not taken yet: number, parts; in host memory one part."""
        self._consumed = 0
        """Bytes of the first of `_frames` that have been read."""
        self._sent = self._received = self._taken = 0
        self._slot_frames = [0] * RING_SLOTS
        """By slot of the ring: the number of the last frame that was sent from it."""
        self._slot = 0

    @cached_property
    def _ring(self) -> torch.Tensor:
        """Shared memory that `write` copies to, [slots, bytes]."""
        return self.buffer(RING_SLOTS * SLOT_BYTES).view(RING_SLOTS, SLOT_BYTES)

    @property
    def stream(self) -> ByteStream | None:
        return self if self._memory.on_host else None

    @property
    def lender(self) -> Lender | None:
        return None if self._memory.on_host else self

    def lend(self, memory: torch.Tensor) -> bool:
        """See `Lender.lend`; one tensor for a link."""
        if self._lendable is None:
            try:
                self._unannounced[_address(memory)] = self._memory.lend(memory)
                self._lendable = True
            except LinkError as error:
                logger.warning("frames are copied before they are sent", extra={"reason": str(error)})
                self._lendable = False
        return self._lendable

    def send_runs(self, parts: Sequence[torch.Tensor]) -> Pending:
        """See `Lender.send_runs`."""
        places = [(*self._announce(part), part.numel()) for part in parts]
        self._memory.synchronize()
        self._sent += 1
        self._tell("frame" if len(places) == 1 else "split", self._sent, *chain.from_iterable(places))
        return Pending.in_wait(partial(self._wait_taken, self._sent))

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
                number, (data,) = self._next_frame(deadline)
                part = data.numpy()[self._consumed : self._consumed + len(run)]
                np.frombuffer(run, np.uint8)[: len(part)] = part
                run = run[len(part) :]
                self._consumed += len(part)
                if self._consumed == len(data):
                    self._return_frame(number)

    def buffer(self, nbytes: int) -> torch.Tensor:
        tensor, handle, descriptor = self._memory.allocate(nbytes)
        self._unannounced[_address(tensor)] = Lent(tensor, tensor.data_ptr(), nbytes, handle, descriptor)
        return tensor

    def send(self, data: torch.Tensor) -> Pending:
        return self.send_runs([data])

    def recv(self, into: torch.Tensor) -> Pending:
        if self._memory.on_host:
            # The other end may have written these bytes slot by slot.
            return Pending.in_wait(partial(self.read, [memoryview(into.numpy().data)]))
        self._received += 1
        return Pending.in_wait(partial(self._receive, self._received, into))

    def abort(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._connection.close()
        for lent in self._unannounced.values():
            if lent.descriptor is not None:
                os.close(lent.descriptor)
        # The other end's memory first: it may wait for that.
        for known in (self._frames, self._opened, self._announced, self._unannounced):
            known.clear()

    def _wait_taken(self, number: int, deadline: float) -> None:
        while self._taken < number:
            self._hear(deadline)

    def _receive(self, expected: int, into: torch.Tensor, deadline: float) -> None:
        """Copies one whole frame."""
        number, parts = self._next_frame(deadline)
        size = sum(part.numel() for part in parts)
        if number != expected or size != into.numel():
            wanted = f"frame {expected} of {into.numel()} bytes"
            raise LinkError(f"{self._name}: frame {number} of {size} bytes came; expected was {wanted}")
        for part in parts:
            into[: part.numel()].copy_(part)
            into = into[part.numel() :]
        self._memory.synchronize()
        self._return_frame(number)

    def _next_frame(self, deadline: float) -> tuple[int, list[torch.Tensor]]:
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
                raise LinkError(f"{self._name}: only a buffer of this link can be sent from")
            lent = self._unannounced.pop(address)
            number = len(self._announced)
            self._announced[address] = number, lent
            try:
                self._tell("buffer", number, lent.nbytes, lent.handle, descriptor=lent.descriptor)
            finally:
                if lent.descriptor is not None:
                    os.close(lent.descriptor)
        number, lent = self._announced[address]
        return number, data.data_ptr() - lent.address

    def _tell(self, name: str, *values: object, descriptor: int | None = None) -> None:
        """Sends one message."""
        with link_errors(self._name, OSError):
            self._connection.settimeout(self._timeout)
            socket.send_fds(self._connection, [pack([name, *values])], [] if descriptor is None else [descriptor])

    def _hear(self, deadline: float) -> None:
        """Receives one message."""
        with link_errors(self._name, OSError, WireError):
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
            case "frame", (number, *place):
                self._frames.append((number, [self._part(number, *place)]))
            case "split", (number, *places) if not self._memory.on_host:
                self._frames.append((number, [self._part(number, *place) for place in (places[:3], places[3:])]))
            case "buffer", (number, nbytes, handle):
                if number in self._opened:
                    raise WireError(f"buffer {number} was announced twice")
                if self._memory.on_host and nbytes > MAX_BUFFER_BYTES:
                    raise WireError(f"buffer {number} has {nbytes} bytes; allowed: up to {MAX_BUFFER_BYTES}")
                self._opened[number] = self._memory.open(nbytes, handle, descriptor)
            case _:
                raise WireError(f"a message {name} is not allowed on an open link")

    def _part(self, number: int, buffer: int, offset: int, nbytes: int) -> torch.Tensor:
        """A part of a frame in a buffer of the other end."""
        opened = self._opened.get(buffer)
        if opened is None or offset + nbytes > opened.numel():
            raise WireError(f"frame {number} lies outside the buffers that were announced")
        return opened[offset : offset + nbytes]


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
