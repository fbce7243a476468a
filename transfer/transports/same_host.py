"""Links between two processes of one machine: bytes stay in memory that both ends map, news goes over a Unix socket.

    sender    [buffer, shared]  --- Buffer (once, with what opens it), Frame --->  receiver copies it out
                                <-------------------- Taken ---------------------

The receiver copies before anyone looks at the bytes, so nothing that a sender does to its buffer later can change what
was verified. The socket is of the abstract namespace and the memory has no name: both vanish with the processes. A
killed peer is the end of the socket, seen at once; a frozen one is seen when a wait times out.

`Memory` is the kind of memory: `shm` has the CPU's, `cuda_ipc` a GPU's.
"""

import hashlib
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kvrelay.transfer.packing import Number, Raw, Rule, WireError, clip, pack, unpack
from kvrelay.transfer.ports import SENDER
from kvrelay.transfer.transports.base import ByteStream, Link, LinkError, Rendezvous

MAX_BUFFER_BYTES = 64 * 2**20
"""Of one buffer that the other end may ask this one to map."""
RING_SLOTS = 8
SLOT_BYTES = 2**19
"""Of the ring that a stream goes through: small enough to stay in the processor's cache."""
MAX_BUFFERS = 64
"""That the other end may have of one link."""
_MAX_NEWS_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")

_NEWS: dict[str, tuple[Rule, ...]] = {
    "token": (Raw(16, 16),),
    "buffer": (Number(0, MAX_BUFFERS - 1), Number(1, MAX_BUFFER_BYTES), Raw(0, 256)),
    "frame": (Number(1, 2**48), Number(0, MAX_BUFFERS - 1), Number(0, MAX_BUFFER_BYTES), Number(1, MAX_BUFFER_BYTES)),
    "taken": (Number(1, 2**48),),
}
"""What is said on the socket: its name and the rules of its values. buffer: number, bytes, handle; frame: number,
buffer, offset, bytes; taken: the frame's number."""


class Memory(Protocol):
    """A kind of memory that two processes of one machine can share."""

    @property
    def on_host(self) -> bool:
        """Whether it is the CPU's."""

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes, int | None]:
        """A uint8 tensor [nbytes], and what another process opens it by: a handle, and perhaps a file descriptor.

        The descriptor is the caller's to close. The memory is freed with the tensor.

        Raises:
            LinkError: there is no memory left.
        """

    def open(self, nbytes: int, handle: bytes, descriptor: int | None) -> torch.Tensor:
        """The other process's tensor, as `allocate` there described it. It is let go with the tensor.

        Raises:
            LinkError: the description is of no such memory.
        """

    def settle(self) -> None:
        """Returns when what this thread has begun to do with tensors of this memory is done."""


def machine_id() -> str:
    """16 characters that two processes share if one can reach the other by an abstract Unix socket.

    Raises:
        OSError: the system doesn't tell.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot} {network} {os.getuid()}".encode()).hexdigest()[:16]


class SameHostTransport:
    """Makes links over one kind of memory."""

    def __init__(self, name: str, scope: str, memory: Memory) -> None:
        """`scope` must be equal at both ends; a receiver checks it again when it is dialled."""
        self.name = name
        self.scope = scope
        self._memory = memory

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`. The sender listens."""
        try:
            meet = self._listen if rank == SENDER else self._dial
            connection = meet(meeting, timeout)
        except LinkError:
            raise
        except (OSError, RuntimeError, WireError) as error:
            raise LinkError(f"{self.name}: {error}") from error
        return SameHostLink(self.name, connection, self._memory, timeout)

    def _listen(self, meeting: Rendezvous, timeout: float) -> socket.socket:
        token = secrets.token_bytes(16)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            # The kernel draws a free abstract name.
            listener.bind("")
            listener.listen(1)
            meeting.set("scope", self.scope)
            meeting.set("address", listener.getsockname())
            meeting.set("token", token)
            refusal = meeting.get("answer").decode(errors="replace")
            if refusal:
                raise LinkError(f"{self.name}: the other end refused: {clip(refusal)}")
            listener.settimeout(timeout)
            connection, _ = listener.accept()
        try:
            _check_owner(connection)
            connection.settimeout(timeout)
            # Anybody on this machine can connect to the name; only who was told the token may stay.
            name, said, _ = _read(connection)
            if name != "token" or not secrets.compare_digest(said[0], token):
                raise LinkError(f"{self.name}: a stranger dialled")
        except BaseException:
            connection.close()
            raise
        return connection

    def _dial(self, meeting: Rendezvous, timeout: float) -> socket.socket:
        scope = meeting.get("scope").decode(errors="replace")
        if scope != self.scope:
            refusal = f"{self.name} links workers of one scope only; this is {self.scope}, the sender's {clip(scope)}"
            meeting.set("answer", refusal)
            raise LinkError(refusal)
        address, token = meeting.get("address"), meeting.get("token")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(timeout)
            connection.connect(address)
            _check_owner(connection)
            connection.sendall(pack(["token", token]))
            meeting.set("answer", b"")
        except BaseException as error:
            connection.close()
            with suppress(RuntimeError):
                meeting.set("answer", clip(str(error)) or type(error).__name__)
            raise
        return connection


class SameHostLink:
    """One end of a link. Buffers are announced when they are first sent from."""

    def __init__(self, name: str, connection: socket.socket, memory: Memory, timeout: float) -> None:
        self._name = name
        self._connection = connection
        self._memory = memory
        self._timeout = timeout
        self._made: dict[int, tuple[torch.Tensor, bytes, int | None]] = {}
        """By the address of its storage, what was allocated and not announced yet."""
        self._announced: dict[int, tuple[int, torch.Tensor]] = {}
        """By the address of its storage, the number of a buffer that the other end knows."""
        self._opened: dict[int, torch.Tensor] = {}
        """The other end's, by number."""
        self._frames: deque[tuple[int, torch.Tensor]] = deque()
        self._sent = self._received = self._taken = 0
        self._ring: torch.Tensor | None = None
        self._slots = [0] * RING_SLOTS
        """The number of the frame that is, or was last, in each slot of the ring."""
        self._turn = 0
        self._consumed = 0
        """Bytes of the first of `_frames` that were read already."""

    @property
    def stream(self) -> ByteStream | None:
        return self if self._memory.on_host else None

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        """Copies to the next slots of a ring of shared memory; what can't follow yet waits for a slot to be taken."""
        if self._ring is None:
            self._ring = self.buffer(RING_SLOTS * SLOT_BYTES)
        ring, used = self._ring.numpy(), 0
        start = self._turn * SLOT_BYTES
        for run in runs:
            while len(run):
                if not used:
                    start = self._turn * SLOT_BYTES
                    while self._taken < self._slots[self._turn]:
                        self._hear(deadline)
                part = np.frombuffer(run[: SLOT_BYTES - used], np.uint8)
                ring[start + used : start + used + len(part)] = part
                used += len(part)
                run = run[len(part) :]
                if used == SLOT_BYTES:
                    self._send_slot(self._ring, start, used)
                    used = 0
        if used:
            self._send_slot(self._ring, start, used)

    def _send_slot(self, ring: torch.Tensor, start: int, nbytes: int) -> None:
        self.send(ring[start : start + nbytes])
        self._slots[self._turn] = self._sent
        self._turn = (self._turn + 1) % RING_SLOTS

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        """Copies out of the other end's ring, and gives back each slot that was read to its end."""
        for run in runs:
            while len(run):
                while not self._frames:
                    self._hear(deadline)
                number, data = self._frames[0]
                part = data.numpy()[self._consumed : self._consumed + len(run)]
                np.frombuffer(run, np.uint8)[: len(part)] = part
                run = run[len(part) :]
                self._consumed += len(part)
                if self._consumed == len(data):
                    self._frames.popleft()
                    self._consumed = 0
                    self._received = number
                    self._tell("taken", number)

    def buffer(self, nbytes: int) -> torch.Tensor:
        made = self._memory.allocate(nbytes)
        self._made[_address(made[0])] = made
        return made[0]

    def send(self, data: torch.Tensor) -> "SameHostPending":
        number, offset = self._number_of(data)
        self._memory.settle()
        self._sent += 1
        self._tell("frame", self._sent, number, offset, data.numel())
        return SameHostPending(self, self._sent, None)

    def recv(self, into: torch.Tensor) -> "SameHostPending":
        self._received += 1
        return SameHostPending(self, self._received, into)

    def abort(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._connection.close()
        for _, _, descriptor in self._made.values():
            if descriptor is not None:
                os.close(descriptor)
        for known in (self._made, self._announced, self._opened, self._frames):
            known.clear()

    def finish(self, pending: "SameHostPending", timeout: float) -> None:
        """Does what `Pending.wait` asks."""
        deadline = time.monotonic() + timeout
        if pending.into is None:
            while self._taken < pending.number:
                self._hear(deadline)
            return
        if self._memory.on_host:
            # The other end may have written these bytes slot by slot.
            self.read([memoryview(pending.into.numpy().data)], deadline)
            return
        while not self._frames:
            self._hear(deadline)
        number, data = self._frames.popleft()
        if number != pending.number or data.numel() != pending.into.numel():
            wanted = f"frame {pending.number} of {pending.into.numel()} bytes"
            raise LinkError(f"{self._name}: frame {number} of {data.numel()} bytes came; expected was {wanted}")
        pending.into.copy_(data)
        self._memory.settle()
        self._tell("taken", number)

    def _number_of(self, data: torch.Tensor) -> tuple[int, int]:
        """The number of the buffer that `data` lies in, announced if need be, and where in it."""
        address = _address(data)
        if address not in self._announced:
            if address not in self._made:
                raise LinkError(f"{self._name}: only what lies in a buffer of this link can be sent")
            tensor, handle, descriptor = self._made.pop(address)
            number = len(self._announced)
            self._announced[address] = number, tensor
            try:
                self._tell("buffer", number, tensor.numel(), handle, descriptor=descriptor)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
        return self._announced[address][0], data.data_ptr() - address

    def _tell(self, name: str, *values: object, descriptor: int | None = None) -> None:
        news = pack([name, *values])
        try:
            self._connection.settimeout(self._timeout)
            socket.send_fds(self._connection, [news], [] if descriptor is None else [descriptor])
        except OSError as error:
            raise LinkError(f"{self._name}: {error}") from error

    def _hear(self, deadline: float) -> None:
        """Takes in one piece of news."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise LinkError(f"{self._name}: no end within its time")
        try:
            self._connection.settimeout(left)
            name, values, descriptor = _read(self._connection)
        except TimeoutError as error:
            raise LinkError(f"{self._name}: no end within its time") from error
        except (OSError, WireError) as error:
            raise LinkError(f"{self._name}: {error}") from error
        try:
            match name, values:
                case "taken", (number,):
                    self._take(number)
                case "frame", (number, buffer, offset, nbytes):
                    self._take_frame(number, buffer, offset, nbytes)
                case "buffer", (number, nbytes, handle):
                    if number in self._opened:
                        raise LinkError(f"{self._name}: buffer {number} was announced twice")
                    self._opened[number] = self._memory.open(nbytes, handle, descriptor)
                case _:
                    raise LinkError(f"{self._name}: {name} is not for now")
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _take(self, number: int) -> None:
        if not self._taken < number <= self._sent:
            raise LinkError(f"{self._name}: frame {number} can't have been taken; {self._sent} were sent")
        self._taken = number

    def _take_frame(self, number: int, buffer: int, offset: int, nbytes: int) -> None:
        opened = self._opened.get(buffer)
        if opened is None or offset + nbytes > opened.numel():
            raise LinkError(f"{self._name}: frame {number} lies outside the buffers that were announced")
        self._frames.append((number, opened[offset : offset + nbytes]))


class SameHostPending:
    """A send, or (with `into`) a receive."""

    def __init__(self, link: SameHostLink, number: int, into: torch.Tensor | None) -> None:
        self._link = link
        self.number = number
        self.into = into

    def wait(self, timeout: float) -> None:
        self._link.finish(self, timeout)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_owner(connection: socket.socket) -> None:
    """Another user's process gets nothing here, whatever it knows."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, owner, _ = _CREDENTIALS.unpack(packed)
    if owner != os.getuid():
        raise LinkError(f"the process at the other end belongs to user {owner}, this one to {os.getuid()}")


def _read(connection: socket.socket) -> tuple[str, tuple[Any, ...], int | None]:
    """One piece of news: its name, its values, and the file descriptor that came with it, which is the caller's.

    Raises:
        LinkError: the other end has closed.
        OSError
        WireError: it is not as `_NEWS` says.
    """
    news, descriptors, flags, _ = socket.recv_fds(connection, _MAX_NEWS_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not news:
            raise LinkError("the other end has closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise WireError("news that is too long")
        items = unpack(news, 8)
        rules = _NEWS.get(items[0]) if type(items) is list and items and type(items[0]) is str else None
        if type(items) is not list or rules is None or len(items) != 1 + len(rules):
            raise WireError(f"news of {len(news)} bytes; allowed: {', '.join(_NEWS)} with their values")
        if descriptors and items[0] != "buffer":
            raise WireError(f"a file descriptor came with {items[0]}")
        values = tuple(rule.check(items[0], value) for rule, value in zip(rules, items[1:], strict=True))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return items[0], values, descriptors[0] if descriptors else None
