"""The lock on the blocks of one frame, and the digest by which two workers compare prompts."""

import struct
import threading
from array import array
from collections.abc import Sequence

import xxhash

from kvrelay.engine.kv.writes import WRITTEN, KVWrites


class BlockClaim:
    """Lets one thread touch the blocks of one frame, once, unless the claim was closed before."""

    def __init__(self, written: KVWrites = WRITTEN) -> None:
        """`written`: when the frame's KV is in the blocks, if they are to be read."""
        self.written = written
        self.in_place = False
        """Whether the frame is sent from where it lies in a pool on a GPU, or in registered memory."""
        self._lock = threading.Lock()
        self._entered = self._closed = False

    def enter(self) -> bool:
        """Whether the caller may touch the blocks now. After True nobody else gets True."""
        with self._lock:
            self._entered = not self._closed
            self._closed = True
            return self._entered

    def close(self) -> bool:
        """Keeps every thread out. True for the caller that closed it: nobody has touched the blocks or will."""
        with self._lock:
            first = not self._closed
            self._closed = True
            return first


def tokens_digest(tokens: Sequence[int]) -> bytes:
    """16 bytes (xxh3) that are equal for equal token ids."""
    return xxhash.xxh3_128_digest(array("I", tokens).tobytes() + struct.pack("<Q", len(tokens)))
