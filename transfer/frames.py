"""Frames: how the KV of a token range gets from one pool's blocks through a link into another's.

What a frame is on the link: its bytes (see `kvrelay.engine.kv.pool`), and behind them, where checksums are on, 8 bytes:
the checksum of the bytes XOR that of what the announcement says of the frame, so that the bytes of another attempt,
epoch or place don't verify here.

    link carries             sender                                 receiver
    memory (link.stream)     hashes and sends piece by piece,       receives and hashes piece by piece, straight into
                             straight out of the blocks             the reserved blocks, which are nobody's until the
                                                                    commit; a partial last block goes through a buffer
    buffers only, or other   copies the blocks to the link's        receives into the link's buffer, verifies, and
    layouts, or a GPU's      buffer, hashes, sends                  only then copies (or converts) into the blocks
"""

import enum
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout, Layers
from kvrelay.engine.kv.pool import gpu_checksum
from kvrelay.transfer.events import Frame, Outcome
from kvrelay.transfer.failpoints import Fault, failpoint
from kvrelay.transfer.messages import Key, Push
from kvrelay.transfer.transports.base import ByteStream, Link, Pending

CHECKSUM_BYTES = 8

PIECE_BYTES = 2**19
"""What is hashed at once: it is still in the core's cache when it is sent, or was just received."""


class KVBytes(Protocol):
    """Token-exact byte access to a KV pool; `kvrelay.engine.kv.pool.KVPool` says what each does."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def tensor(self) -> Tensor: ...

    def runs(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, layers: Layers | None = None
    ) -> list[memoryview]: ...

    def read(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, out: Tensor, layers: Layers | None = None
    ) -> int: ...

    def write(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, data: Tensor, layers: Layers | None = None
    ) -> None: ...


class FrameBuffer(Protocol):
    """Where a frame comes from or goes to at one end."""

    def runs(self) -> list[memoryview] | None:
        """The whole blocks where they lie; None where the frame can't be reached like that."""

    def tail(self) -> "FrameBuffer | None":
        """What `runs` leaves out."""

    def nbytes(self) -> int: ...

    def read(self, out: Tensor) -> None:
        """Copies all of the frame into the beginning of `out` (uint8)."""

    def write(self, data: Tensor) -> None:
        """Copies the frame from the beginning of `data` (uint8) into the blocks."""


class PoolFrame:
    """A frame in the blocks of a pool whose layout is the sender's."""

    def __init__(self, pool: KVBytes, table: Sequence[int], frame: Frame) -> None:
        """`table` is the sequence's block table, from its first token on."""
        self._pool = pool
        self._table = table
        self._frame = frame
        self._layers = frame.layer, frame.layers

    def nbytes(self) -> int:
        return self._frame.nbytes

    def runs(self) -> list[memoryview] | None:
        if self._pool.tensor.device.type != "cpu":
            return None
        return self._pool.runs(self._table, self._frame.first, self._frame.tokens, self._layers)

    def tail(self) -> FrameBuffer | None:
        frame = self._frame
        over = frame.tokens % self._pool.layout.block_size
        if not over:
            return None
        rest = replace(
            frame,
            first=frame.first + frame.tokens - over,
            tokens=over,
            nbytes=over * frame.layers * self._pool.layout.layer_bytes,
        )
        return PoolFrame(self._pool, self._table, rest)

    def read(self, out: Tensor) -> None:
        self._pool.read(self._table, self._frame.first, self._frame.tokens, out, self._layers)

    def write(self, data: Tensor) -> None:
        self._pool.write(self._table, self._frame.first, self._frame.tokens, data, self._layers)


class BlockClaim:
    """Lets one thread touch the blocks of one frame, once, unless it was closed before that began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = self._closed = False

    def enter(self) -> bool:
        """Whether the blocks may be touched now. After True nobody else gets in."""
        with self._lock:
            self._entered = not self._closed
            self._closed = True
            return self._entered

    def close(self) -> bool:
        """Keeps everybody out. True for whoever closed it: nobody has touched the blocks, and nobody will."""
        with self._lock:
            first = not self._closed
            self._closed = True
            return first


def tokens_digest(tokens: Sequence[int]) -> bytes:
    """16 bytes that two workers compare, to know that they speak of the same tokens."""
    return xxhash.xxh3_128_digest(array("I", tokens).tobytes() + struct.pack("<Q", len(tokens)))


class ChecksumKind(enum.Enum):
    """What stands behind a frame's bytes on the link."""

    OFF = "off"
    XXH3 = "xxh3"
    MIX64 = "mix64"
    """`gpu_checksum` of what lies in a GPU's memory; of other bytes as XXH3."""

    @classmethod
    def of(cls, checksum: bool, on_gpus: bool) -> "ChecksumKind":
        """What a pair uses; `on_gpus`: both of its KV pools are on GPUs, so that a link may carry GPU memory."""
        if not checksum:
            return cls.OFF
        return cls.MIX64 if on_gpus else cls.XXH3


def checksum(data: Tensor, seal: ChecksumKind = ChecksumKind.XXH3) -> int:
    """64 bits of a contiguous uint8 tensor: where it lies if `seal` allows, else of a copy on the CPU."""
    if seal is ChecksumKind.MIX64 and data.is_cuda:
        return gpu_checksum(data)
    return xxhash.xxh3_64_intdigest(data.cpu().numpy().data)


def identity(key: Key, frame: Frame) -> int:
    """64 bits of what an announcement says of a frame."""
    place = struct.pack("<7Q", key[1], frame.epoch, frame.index, frame.first, frame.tokens, frame.layer, frame.layers)
    return xxhash.xxh3_64_intdigest(place + key[0].encode())


def trailer(value: int) -> bytes:
    return struct.pack("<Q", value)


def pieces(runs: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in the same order, in groups of at most PIECE_BYTES."""
    group: list[memoryview] = []
    size = 0
    for run in runs:
        while len(run):
            part = run[: PIECE_BYTES - size]
            group.append(part)
            size += len(part)
            run = run[len(part) :]
            if size == PIECE_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


class FrameJob:
    """What sending and receiving share: the end of a frame is told once, whatever happens."""

    def __init__(self, key: Key, frame: Frame, guard: BlockClaim, place: FrameBuffer, seal: ChecksumKind) -> None:
        """`guard` lets this job's thread at the blocks."""
        self.key = key
        self._frame = frame
        self._guard = guard
        self._place = place
        self._seal = seal
        self._open = False

    @property
    def _sealed(self) -> bool:
        return self._seal is not ChecksumKind.OFF

    @property
    def _on_link(self) -> int:
        return self._frame.nbytes + (CHECKSUM_BYTES if self._sealed else 0)

    def _close(self, outcome: Outcome) -> None:
        """The blocks aren't touched any more."""
        if self._open:
            self._open = False
            self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        raise NotImplementedError

    def fail(self, message: str) -> None:
        self._open = self._open or self._guard.close()
        self._close(Outcome.LOST)


class SendJob(FrameJob):
    """Announces a frame and sends it.

    Once announced, the frame is sent whatever becomes of the request: the other end has begun to receive it. Its blocks
    are needed until they are copied to the link's buffer, or, where the link takes them as they lie, have left.
    """

    def __init__(
        self,
        key: Key,
        frame: Frame,
        guard: BlockClaim,
        place: FrameBuffer,
        seal: ChecksumKind,
        announce: Callable[[Push], None],
        on_read: Callable[[], None],
    ) -> None:
        """`on_read` is told, once, when the blocks aren't needed any more."""
        super().__init__(key, frame, guard, place, seal)
        self.on_sent: Callable[[float, float], None] | None = None
        """Told, on the link's thread, when it began and when it had left."""
        self._began = 0.0
        self._announce = announce
        self._on_read = on_read

    def _ended(self, outcome: Outcome) -> None:
        self._on_read()

    def begin(self, link: Link, buffer: Tensor) -> Pending | None:
        if not self._guard.enter():
            return None
        self._open = True
        self._began = time.monotonic()
        frame, stream = self._frame, link.stream
        failpoint("transfer.read", self.key, index=frame.index)
        runs = self._place.runs() if stream is not None else None
        data = buffer[: self._on_link]
        if runs is None:
            self._fill(data)
        fault = failpoint("transfer.frame", self.key, index=frame.index)
        if fault is not None and fault.action == "drop":
            self._close(Outcome.LOST)
            return None
        damage = failpoint("transfer.frame_bytes", self.key, index=frame.index)
        if damage is not None and runs is not None:
            self._fill(data)
            runs = None
        if damage is not None:
            damage.spoil(data[: frame.nbytes])
        if runs is None:
            self._close(Outcome.VERIFIED)
        push = Push(
            *self.key, frame.epoch, frame.index, frame.first, frame.tokens, frame.nbytes, frame.layer, frame.layers
        )
        self._announce(push)
        if failpoint("transfer.frame_announced", self.key, index=frame.index) is not None:
            self._close(Outcome.LOST)
            return None

        # A frame may be begun before the one ahead of it is waited for, so what is announced here is in its place here.
        times = 1
        if fault is not None:
            times = 2
            self._announce(push)
        if stream is None:
            return Several([link.send(data) for _ in range(times)])

        # Bytes of a stream move while they are waited for, after those of the frames before this one.
        def send(deadline: float) -> None:
            for _ in range(times):
                if runs is None:
                    stream.write([memoryview(data.numpy().data)], deadline)
                else:
                    self._stream(stream, runs, deadline)

        return Streamed(send)

    def done(self, buffer: Tensor) -> None:
        if self.on_sent is not None:
            self.on_sent(self._began, time.monotonic())
        self._close(Outcome.VERIFIED)

    def _fill(self, data: Tensor) -> None:
        """The frame as it is on the link."""
        nbytes = self._frame.nbytes
        self._place.read(data[:nbytes])
        if self._sealed:
            value = checksum(data[:nbytes], self._seal) ^ identity(self.key, self._frame)
            data[nbytes:] = torch.frombuffer(bytearray(trailer(value)), dtype=torch.uint8)

    def _stream(self, stream: ByteStream, runs: Sequence[memoryview], deadline: float) -> None:
        tail = self._place.tail()
        if tail is not None:
            rest = torch.empty(tail.nbytes(), dtype=torch.uint8)
            tail.read(rest)
            runs = [*runs, memoryview(rest.numpy().data)]
        digest = xxhash.xxh3_64()
        for piece in pieces(runs):
            if self._sealed:
                for part in piece:
                    digest.update(part)
            stream.write(piece, deadline)
        if self._sealed:
            value = digest.intdigest() ^ identity(self.key, self._frame)
            stream.write([memoryview(trailer(value))], deadline)


class ReceiveJob(FrameJob):
    """Receives an announced frame and verifies it; see the module's docstring for where the bytes go meanwhile."""

    def __init__(
        self,
        key: Key,
        frame: Frame,
        guard: BlockClaim,
        place: FrameBuffer,
        seal: ChecksumKind,
        on_end: Callable[[Outcome], None],
    ) -> None:
        """`on_end` is told, once, how it ended, after which this end doesn't touch the blocks."""
        super().__init__(key, frame, guard, place, seal)
        self._on_end = on_end
        self._streamed: tuple[int, bytes, Tensor | None] | None = None

    def _ended(self, outcome: Outcome) -> None:
        self._on_end(outcome)

    def begin(self, link: Link, buffer: Tensor) -> Pending | None:
        # Even for a request that has ended meanwhile: the other end sends what it has announced.
        stream = link.stream
        if stream is None:
            return link.recv(buffer[: self._on_link])
        return Streamed(lambda at: self._stream(stream, buffer, at))

    def _stream(self, stream: ByteStream, buffer: Tensor, deadline: float) -> None:
        runs = self._place.runs()
        if runs is None or not self._guard.enter():
            stream.read([memoryview(buffer[: self._on_link].numpy().data)], deadline)
            return
        self._open = True
        tail = self._place.tail()
        rest = None if tail is None else torch.empty(tail.nbytes(), dtype=torch.uint8)
        if rest is not None:
            runs.append(memoryview(rest.numpy().data))
        digest = xxhash.xxh3_64()
        for piece in pieces(runs):
            stream.read(piece, deadline)
            if self._sealed:
                for part in piece:
                    digest.update(part)
        said = memoryview(bytearray(CHECKSUM_BYTES if self._sealed else 0))
        stream.read([said], deadline)
        self._streamed = digest.intdigest(), bytes(said), rest

    def done(self, buffer: Tensor) -> None:
        damage = failpoint("decode.after_frame", self.key, index=self._frame.index)
        if self._streamed is not None:
            self._finish_stream(*self._streamed, damage)
        else:
            self._finish_buffer(buffer, damage)

    def _finish_stream(self, digest: int, said: bytes, rest: Tensor | None, damage: Fault | None) -> None:
        tail = self._place.tail()
        if damage is not None:
            everything = b"".join(self._place.runs() or []) + (b"" if rest is None else rest.numpy().tobytes())
            data = torch.frombuffer(bytearray(everything), dtype=torch.uint8)
            damage.spoil(data)
            digest = checksum(data)
        intact = not self._sealed or said == trailer(digest ^ identity(self.key, self._frame))
        if intact and tail is not None and rest is not None:
            tail.write(rest)
        self._close(Outcome.VERIFIED if intact else Outcome.CORRUPT)

    def _finish_buffer(self, buffer: Tensor, damage: Fault | None) -> None:
        data, said = buffer[: self._frame.nbytes], buffer[self._frame.nbytes : self._on_link]
        if damage is not None:
            damage.spoil(data)
        intact = True
        if self._sealed:
            value = checksum(data, self._seal) ^ identity(self.key, self._frame)
            intact = bytes(said.cpu().numpy().data) == trailer(value)
        if not self._guard.enter():
            return
        self._open = True
        if intact:
            self._place.write(data)
        self._close(Outcome.VERIFIED if intact else Outcome.CORRUPT)


class DrainJob:
    """Receives an announced frame that nobody wants (any more), so that those after it get through."""

    key: Key | None = None

    def __init__(self, nbytes: int, seal: ChecksumKind) -> None:
        self._nbytes = nbytes + (CHECKSUM_BYTES if seal is not ChecksumKind.OFF else 0)

    def begin(self, link: Link, buffer: Tensor) -> Pending | None:
        return _receive_all(link, buffer[: self._nbytes])

    def done(self, buffer: Tensor) -> None:
        pass

    def fail(self, message: str) -> None:
        pass


class SayJob:
    """Says something on the control stream once every frame queued before it is announced."""

    key: Key | None = None

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say

    def begin(self, link: Link, buffer: Tensor) -> Pending | None:
        self._say()
        return None

    def done(self, buffer: Tensor) -> None:
        pass

    def fail(self, message: str) -> None:
        """Nothing is said: the link's end is told by the link itself."""


def _receive_all(link: Link, into: Tensor) -> Pending:
    """Receives a frame into a buffer, however the other end sends it."""
    stream = link.stream
    if stream is None:
        return link.recv(into)
    return Streamed(lambda deadline: stream.read([memoryview(into.numpy().data)], deadline))


class Several:
    """Operations of a link, waited for as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for part in self._parts:
            part.wait(deadline - time.monotonic())


class Streamed:
    """A frame on a link that carries memory: it is sent or received while it is waited for."""

    def __init__(self, run: Callable[[float], None]) -> None:
        self._run = run

    def wait(self, timeout: float) -> None:
        self._run(time.monotonic() + timeout)
