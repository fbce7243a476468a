"""Frames: how the KV of a token range gets from one pool's blocks through a link into another's."""

import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import xxhash

from kvrelay.transfer.events import Frame, Outcome
from kvrelay.transfer.failpoints import failpoint
from kvrelay.transfer.transport import Link, Pending
from kvrelay.transfer.wire import Key, Push

DUPLICATE_SECONDS = 3.0
"""For the first of the two frames that a failpoint makes of one."""


class KVBytes(Protocol):
    """Token-exact byte access to a KV pool.

    `blocks` is a sequence's block table from its first token on; the range is tokens [first_token, first_token +
    num_tokens) of that sequence, `first_token` at a block's border. Bytes are `num_tokens * token_bytes`: whole blocks
    as they lie in the pool, then the used slots of a partial last one.
    """

    def read(self, blocks: Sequence[int], first_token: int, num_tokens: int, out: torch.Tensor) -> int:
        """Copies the range into `out` (uint8) and returns the number of bytes."""

    def write(self, blocks: Sequence[int], first_token: int, num_tokens: int, data: torch.Tensor) -> None:
        """Copies `data` (uint8) into the range."""


class Guard:
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


def checksum(data: torch.Tensor) -> int:
    """xxh3_64 of a contiguous uint8 tensor, copied to the CPU first where it isn't there."""
    return xxhash.xxh3_64_intdigest(data.cpu().numpy().data)


class SendJob:
    """Reads a frame's blocks, announces the frame, sends it.

    The blocks are read into the link's buffer before anything is sent, so they are free to go as soon as that is done,
    however slow the link is. Once announced, the frame is sent whatever becomes of the request: the other end has begun
    to receive it.
    """

    def __init__(
        self,
        key: Key,
        frame: Frame,
        guard: Guard,
        read: Callable[[torch.Tensor], int],
        announce: Callable[[Push], None],
        on_read: Callable[[], None],
        verify: bool,
    ) -> None:
        """`read` copies the blocks; `on_read` is told, once, when the blocks aren't needed any more."""
        self._key = key
        self._frame = frame
        self._guard = guard
        self._read = read
        self._announce = announce
        self._on_read = on_read
        self._verify = verify

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        if not self._guard.enter():
            return None
        frame = self._frame
        data = buffer[: frame.nbytes]
        try:
            self._read(data)
        finally:
            self._on_read()
        digest = checksum(data) if self._verify else 0
        push = Push(*self._key, frame.epoch, frame.index, frame.first, frame.tokens, frame.nbytes, digest)
        fault = failpoint("transfer.frame", self._key, index=frame.index)
        if fault is not None and fault.action == "drop":
            return None
        damage = failpoint("transfer.frame_bytes", self._key, index=frame.index)
        if damage is not None:
            damage.spoil(data)
        self._announce(push)
        if failpoint("transfer.frame_announced", self._key, index=frame.index) is not None:
            return None
        pending = link.send(data)
        if fault is not None:
            pending.wait(DUPLICATE_SECONDS)
            self._announce(push)
            pending = link.send(data)
        return pending

    def done(self, buffer: torch.Tensor) -> None:
        pass

    def fail(self, message: str) -> None:
        if self._guard.close():
            self._on_read()


class ReceiveJob:
    """Receives an announced frame into the link's buffer, verifies it, and only then writes it to the blocks."""

    def __init__(
        self,
        key: Key,
        frame: Frame,
        expected: int | None,
        guard: Guard,
        write: Callable[[torch.Tensor], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        """`expected` is the announced checksum, None to take the bytes as they come; `on_end` is called once."""
        self._key = key
        self._frame = frame
        self._expected = expected
        self._guard = guard
        self._write = write
        self._on_end = on_end

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        # Even for a request that has ended meanwhile: the other end sends what it has announced.
        return link.recv(buffer[: self._frame.nbytes])

    def done(self, buffer: torch.Tensor) -> None:
        data = buffer[: self._frame.nbytes]
        damage = failpoint("decode.after_frame", self._key, index=self._frame.index)
        if damage is not None:
            damage.spoil(data)
        intact = self._expected is None or checksum(data) == self._expected
        if not self._guard.enter():
            return
        outcome = Outcome.LOST
        try:
            if intact:
                self._write(data)
            outcome = Outcome.VERIFIED if intact else Outcome.CORRUPT
        finally:
            self._on_end(outcome)

    def fail(self, message: str) -> None:
        if self._guard.close():
            self._on_end(Outcome.LOST)


class DrainJob:
    """Receives an announced frame that nobody wants (any more), so that those after it get through."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending | None:
        return link.recv(buffer[: self._nbytes])

    def done(self, buffer: torch.Tensor) -> None:
        pass

    def fail(self, message: str) -> None:
        pass
