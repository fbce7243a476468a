"""Counter-based noise: a function of (seed, position, token id) and of nothing else.

So a sequence draws the same tokens whatever it is batched with, and on whichever worker it continues. The integer
arithmetic is modulo 2**32 and 2**64, so it is exact on every device.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

SEED_MASK = 2**64 - 1


def noise_keys(seeds: ArrayLike, positions: ArrayLike) -> NDArray[np.int32]:
    """Two keys for each row, from splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).

    Args:
        seeds: [R] integers from 0 to 2**64 - 1.
        positions: [R] of the token to draw, in its sequence.

    Returns:
        int32 [R, 2].
    """
    mixed = _splitmix64(_splitmix64(np.asarray(seeds, np.uint64)) ^ np.asarray(positions, np.uint64))
    return mixed[:, None].view(np.int32)


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
    # -log(1 - u) of a uniform u in (0, 1]. Small draws win, and near 0 float32 keeps every bit of u.
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_()


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own shift repeats the sign bit."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _signed(x: int) -> int:
    """The int32 with the bits of `x`, 0 to 2**32 - 1."""
    return x - 2**32 if x >= 2**31 else x
