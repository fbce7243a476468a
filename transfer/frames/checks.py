"""Trailers: the bytes that follow a frame on the link, by which the receiver knows that it is the frame that was
announced.

    checksum   8 bytes: the checksum of the bytes XOR the checksum of the announcement; against accidents
    MAC       16 bytes: AES-GMAC of the bytes, under a key that only the link's two ends can derive from the link's key
              and the announcement; against whoever can change traffic

So the bytes of another attempt, epoch or token range don't verify. A key authenticates one frame only, so its nonce
can be derived along with it. (GMAC: NIST SP 800-38D. `benchmarks/NOTES.md` compares it with other MACs.)
"""

import enum
import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Protocol

import torch
import xxhash
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from kvrelay.engine.kv.pool import gpu_checksum
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.protocol.messages import Key

CHECKSUM_BYTES = 8
MAC_BYTES = 16
MAX_TRAILER_BYTES = max(CHECKSUM_BYTES, MAC_BYTES)
_KEY_BYTES, _NONCE_BYTES = 16, 12


class ChecksumKind(enum.Enum):
    """The checksum behind a frame's bytes on the link."""

    OFF = "off"
    XXH3 = "xxh3"
    MIX64 = "mix64"
    """`gpu_checksum` for bytes in GPU memory, XXH3 for others."""

    @classmethod
    def of(cls, checksum: bool, on_gpus: bool) -> "ChecksumKind":
        """The kind that a pair uses; `on_gpus` if both KV pools are in GPU memory."""
        if not checksum:
            return cls.OFF
        return cls.MIX64 if on_gpus else cls.XXH3


class Running(Protocol):
    """A check over bytes that come piece by piece."""

    def update(self, data: memoryview) -> None: ...

    def trailer(self) -> bytes:
        """The trailer that follows the bytes; this is the last call."""


class FrameCheck:
    """The check of one frame on one link."""

    def __init__(self, kind: ChecksumKind, mac_key: bytes | None, key: Key, frame: Frame) -> None:
        """`mac_key` is the link's; if there is one, the frame carries a MAC whatever `kind` is."""
        self._kind = kind
        self._mac_key = mac_key
        self._announced = announcement(key, frame)
        self.nbytes = trailer_bytes(kind, mac_key)
        """Size of the trailer in bytes."""

    def begin(self) -> Running:
        """Begins a check of bytes in host memory."""
        if self._mac_key is not None:
            return _Mac(self._mac_key, self._announced)
        return _Checksum(self._announced) if self.nbytes else _Nothing()

    def of(self, data: Tensor) -> bytes:
        """The trailer of a contiguous uint8 tensor; computed on the GPU if `kind` allows, else from a CPU copy."""
        if self.on_gpu and data.is_cuda:
            return trailer(gpu_checksum(data), self._announced)
        running = self.begin()
        if self.nbytes:
            running.update(data.cpu().numpy().data)
        return running.trailer()

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes the checksum of a frame in its memory."""
        return self._mac_key is None and self._kind is ChecksumKind.MIX64

    def of_sum(self, total: Tensor) -> Tensor:
        """The trailer, uint8 [8], of a frame whose checksum a GPU has in `total`, int64 [1]; computed there."""
        (announced,) = struct.unpack("<q", trailer(0, self._announced))
        found: Tensor = total ^ announced
        return found.view(torch.uint8)

    @staticmethod
    def same(here: bytes, there: bytes) -> bool:
        """Whether a trailer is the expected one; in constant time, so that nobody can find a MAC byte by byte."""
        return hmac.compare_digest(here, there)


def trailer_bytes(kind: ChecksumKind, mac_key: bytes | None) -> int:
    """Number of bytes of the trailer behind a frame."""
    if mac_key is not None:
        return MAC_BYTES
    return 0 if kind is ChecksumKind.OFF else CHECKSUM_BYTES


def announcement(key: Key, frame: Frame) -> bytes:
    """The fields of a frame's announcement, as bytes."""
    place = frame.epoch, frame.index, frame.first, frame.tokens, *frame.part, frame.states, frame.track
    return struct.pack("<9Q", key[1], *place) + key[0].encode()


def trailer(checksum: int, announced: bytes) -> bytes:
    """The last bytes of a frame with this checksum."""
    return struct.pack("<Q", checksum ^ xxhash.xxh3_64_intdigest(announced))


class _Nothing:
    def update(self, data: memoryview) -> None:
        """Does nothing: the frame carries no checksum."""

    def trailer(self) -> bytes:
        return b""


class _Checksum:
    def __init__(self, announced: bytes) -> None:
        self._announced = announced
        self._digest = xxhash.xxh3_64()
        self.update: Callable[[memoryview], None] = self._digest.update

    def trailer(self) -> bytes:
        return trailer(self._digest.intdigest(), self._announced)


class _Mac:
    def __init__(self, mac_key: bytes, announced: bytes) -> None:
        derived = hashlib.blake2b(
            announced, digest_size=_KEY_BYTES + _NONCE_BYTES, key=mac_key, person=b"kvrelay frame"
        ).digest()
        mode = modes.GCM(derived[_KEY_BYTES:])
        self._gmac = Cipher(algorithms.AES(derived[:_KEY_BYTES]), mode).encryptor()
        self.update: Callable[[memoryview], None] = self._gmac.authenticate_additional_data

    def trailer(self) -> bytes:
        self._gmac.finalize()
        return self._gmac.tag
