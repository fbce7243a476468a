"""A 64-bit checksum of bytes, which any number of programs compute in parallel.

    sum = mix(length ^ LENGTH) + sum_i mix(word[i] ^ (i + 1) * POSITION)     modulo 2^64
    mix(x): x ^= x >> 30, x *= M1, x ^= x >> 27, x *= M2, x ^= x >> 31

    data   uint8 [length] contiguous, any length, at an address that is a multiple of 8
    word   its little-endian words of 8 bytes, the last one padded with zeros
    out    int64 [1], the bits of the sum

`mix` is a bijection, so a change within one word always changes the sum: every flipped bit, and every burst of errors
in 8 aligned bytes. Any other change (swapped words or blocks, truncation, appended zeros) adds differences of mixed
values that behave as independent and uniform, and stays undetected with probability 2^-64. The checksum detects faults.
It doesn't stop an adversary, who can construct a collision. A sum of integers doesn't depend on their order, so the
result doesn't depend on the grid, and a kernel that copies the bytes anyway can add their words (`kv_frame`).

Grid: (ceil(words / SPAN),). Limit: memory: each byte is read once.
Source of `mix`: Stafford's variant 13, as in Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
SPAN = 8 * BLOCK
"""Number of words for each program."""
POSITION = 0x9E3779B97F4A7C15
LENGTH = 0xD1B54A32D192ED03
M1 = 0xBF58476D1CE4E5B9
M2 = 0x94D049BB133111EB


@triton.jit
def mix(x, M1: tl.constexpr, M2: tl.constexpr):
    x = (x ^ (x >> 30)) * M1
    x = (x ^ (x >> 27)) * M2
    return x ^ (x >> 31)


# Triton would make an argument of 1 a constant, which has no type.
@triton.jit(do_not_specialize=["length", "first_word"])
def kv_checksum_kernel(
    words,
    tail,
    out,
    length,
    first_word,
    POSITION: tl.constexpr,
    M1: tl.constexpr,
    M2: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    # An even number of words, so that no mask cuts a vector of 16 bytes; `tail` has the remaining bytes.
    count = length // 16 * 2
    total = tl.zeros((BLOCK,), tl.uint64)
    for step in range(STEPS):
        index = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + index, mask=index < count, other=0).to(tl.uint64, bitcast=True)
        mixed = mix(word ^ (first_word + index + 1).to(tl.uint64) * POSITION, M1, M2)
        total += tl.where(index < count, mixed, 0)
    part = tl.sum(total, 0)
    if program == 0:
        byte = tl.arange(0, 16)
        rest = tl.load(tail + byte, mask=byte < length % 16, other=0).to(tl.uint64)
        rest = rest << (byte % 8 * 8).to(tl.uint64)
        position = (first_word + count + 1).to(tl.uint64) * POSITION
        if length % 16 > 0:
            part += mix(tl.sum(tl.where(byte < 8, rest, 0), 0) ^ position, M1, M2)
        if length % 16 > 8:
            part += mix(tl.sum(tl.where(byte >= 8, rest, 0), 0) ^ (position + POSITION), M1, M2)
    tl.atomic_add(out, part.to(tl.int64, bitcast=True), sem="relaxed")


def of_length(length: int) -> int:
    """The part of a checksum that depends on the length only, as the bits of an int64."""
    x = (length ^ LENGTH) % 2**64
    x = (x ^ x >> 30) * M1 % 2**64
    x = (x ^ x >> 27) * M2 % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def kv_checksum(data: Tensor) -> Tensor:
    """The checksum of `data`, int64 [1] on its device; `int(...) % 2**64` is the number.

    Raises:
        ValueError: `data` isn't contiguous bytes at a multiple of 8.
    """
    total = torch.full((1,), of_length(len(data)), dtype=torch.int64, device=data.device)
    add_words(total, data, 0)
    return total


def add_words(total: Tensor, data: Tensor, first_word: int) -> None:
    """Adds the words of `data` to `total`, int64 [1], as those from `first_word` on of a longer run of bytes.

    Raises:
        ValueError: as `kv_checksum`.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"data is {data.dtype} {list(data.shape)}; allowed: torch.uint8 [length], contiguous")
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        raise ValueError("data isn't aligned; allowed: addresses that are multiples of 8 bytes")
    length = len(data)
    whole = length // 16 * 16
    kv_checksum_kernel[(max(1, triton.cdiv(whole // 8, SPAN)),)](
        data[:whole].view(torch.int64),
        data[whole:],
        total,
        length,
        first_word,
        POSITION=POSITION,
        M1=M1,
        M2=M2,
        STEPS=SPAN // BLOCK,
        BLOCK=BLOCK,
        num_warps=4,
    )
