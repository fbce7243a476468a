"""The checksum of `kernels.kv_checksum` in host memory: either end of a hand-off can check the other's frames."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

CHUNK: Final = 16384
"""Words that are mixed at once: few enough that their buffers stay in cache."""
POSITION: Final = np.uint64(0x9E3779B97F4A7C15)
LENGTH: Final = 0xD1B54A32D192ED03
M1: Final = np.uint64(0xBF58476D1CE4E5B9)
M2: Final = np.uint64(0x94D049BB133111EB)
MASK: Final = 2**64 - 1

_SHIFTS = np.array([30, 27, 31], np.uint64)
_POSITIONS = np.arange(1, CHUNK + 1, dtype=np.uint64) * POSITION
"""What the words of the first chunk are mixed with; in chunk c each is `c * CHUNK * POSITION` more."""


def kv_checksum(data: bytes | bytearray | memoryview) -> int:
    """The checksum of contiguous bytes, from 0 to 2^64 - 1; they may begin at any address."""
    view = memoryview(data).cast("B")
    length = len(view)
    whole = length // 8 * 8
    words = np.frombuffer(view[:whole], "<u8") if whole else np.empty(0, np.uint64)
    total = mix(length ^ LENGTH)
    mixed, shifted = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    for first in range(0, len(words), CHUNK):
        chunk = words[first : first + CHUNK]
        x, y = mixed[: len(chunk)], shifted[: len(chunk)]
        np.add(_POSITIONS[: len(chunk)], np.uint64(first * int(POSITION) & MASK), out=x)
        np.bitwise_xor(x, chunk, out=x)
        total += int(_mix(x, y).sum())
    if length > whole:
        last = int.from_bytes(view[whole:], "little")
        total += mix(last ^ (len(words) + 1) * int(POSITION) & MASK)
    return total & MASK


def _mix(x: NDArray[np.uint64], y: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mixes x where it lies; y is scratch of its size."""
    for shift, factor in zip(_SHIFTS, (M1, M2, None), strict=True):
        np.right_shift(x, shift, out=y)
        np.bitwise_xor(x, y, out=x)
        if factor is not None:
            np.multiply(x, factor, out=x)
    return x


def mix(x: int) -> int:
    """The bijection that every word goes through, of one number from 0 to 2^64 - 1."""
    x = (x ^ x >> 30) * int(M1) & MASK
    x = (x ^ x >> 27) * int(M2) & MASK
    return x ^ x >> 31
