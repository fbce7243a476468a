"""Counter-based noise: a function of (seed, position, token id) and of nothing else.

So a sequence draws the same tokens whatever it is batched with, on whichever worker it goes on. Integer arithmetic
modulo 2**32 and 2**64, exact everywhere.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MASK64 = 2**64 - 1


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit keys, from splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators)."""
    mixed = _splitmix64(_splitmix64(seed & MASK64) ^ position)
    return _signed(mixed & 0xFFFFFFFF), _signed(mixed >> 32)


def noise_keys_of(seeds: NDArray[np.generic], positions: NDArray[np.uint64]) -> NDArray[np.int32]:
    """`noise_keys` of many rows: int32 [R, 2] of uint64 [R] seeds, already modulo 2**64, and positions."""
    return _splitmix64s(_splitmix64s(seeds.astype(np.uint64)) ^ positions)[:, None].view(np.int32)


def exponential(keys: Tensor, tokens: Tensor) -> Tensor:
    """Independent draws from the exponential distribution with mean 1.

    Args:
        keys: int32 [R, 2], of each row.
        tokens: int32 [V] or [R, V] token ids.

    Returns:
        float32 [R, V], above 0.
    """
    x = (tokens ^ keys[:, :1]).mul_(0x7FEB352D)
    x ^= _shifted(x, 15)
    x.add_(keys[:, 1:]).mul_(_signed(0x846CA68B))
    x ^= _shifted(x, 16)
    x.mul_(0x2C1B3C6D)
    x ^= _shifted(x, 15)
    # -log(1 - u) of a uniform u in (0, 1]. It is small draws that win, and around 0 float32 keeps every bit of u.
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_()


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own repeats the sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def _splitmix64s(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _signed(x: int) -> int:
    """The int32 with the bits of `x`, 0 to 2**32 - 1."""
    return x - 2**32 if x >= 2**31 else x
