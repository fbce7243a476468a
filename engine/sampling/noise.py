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


def exponential(keys: NDArray[np.int32], tokens: NDArray[np.int32]) -> Tensor:
    """Independent draws from the exponential distribution with mean 1, computed on the host.

    The integers are numpy's: torch takes twice the time, since its shifts repeat the sign bit and each of its calls
    costs more than the work on one row.

    Args:
        keys: [R, 2], of each row.
        tokens: [V] or [R, V] token ids.

    Returns:
        float32 [R, V], above 0 and finite.
    """
    first, second = keys.view(np.uint32)[:, :1], keys.view(np.uint32)[:, 1:]
    x = tokens.view(np.uint32) ^ first
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x += second
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x2C1B3C6D)
    x ^= x >> np.uint32(15)
    x &= np.uint32(0x7FFFFFFF)
    # -log(1 - u) of a uniform u in (0, 1). Small draws win, and near 0 float32 keeps every bit of u.
    uniform = x.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(-(2.0**-31))
    # Rounded to 1 it would be infinite, and a token without rivals would lose to those that filters have removed.
    np.maximum(uniform, np.float32(2.0**-24 - 1), out=uniform)
    return torch.from_numpy(uniform).log1p_().neg_()


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
