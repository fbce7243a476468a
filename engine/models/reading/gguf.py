"""Weights of GGUF files. They are in blocks of consecutive weights of one output, each with codes and scales.

    type  weights of a block   value of a code q
    Q8_0  32                   d * q, q from -128 to 127
    Q4_0  32                   d * (q - 8)
    Q4_1  32                   d * q + m
    Q5_0  32                   d * (q - 16)
    Q5_1  32                   d * q + m
    Q4_K  256, 8 groups        d * s[group] * q - m * t[group]
    Q5_K  256, 8 groups        d * s[group] * q - m * t[group]
    Q6_K  256, 16 groups       d * s[group] * (q - 32)

These become codes without loss; other types are dequantized by the package `gguf`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.machine.gguf import QUANTIZED


def coded(dtype: str, raw: Tensor) -> CodedWeight | None:
    """A tensor as codes; None if its type has none.

    Args:
        raw: uint8 [out, bytes of an output].
    """
    return KEPT[dtype](raw.view(len(raw), -1, QUANTIZED[dtype].size)) if dtype in KEPT else None


def dequantized(dtype: str, raw: Tensor) -> Tensor:
    """float32 [out, in] of a quantized tensor; raw as for `coded`."""
    weight = coded(dtype, raw)
    if weight is not None:
        return weight.dequantize()
    # Imported here, because it takes a fifth of a second and few files need it.
    import gguf

    kind = gguf.GGMLQuantizationType(QUANTIZED[dtype].number)
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind))


def in_order(rows: Tensor, heads: int) -> Tensor:
    """Rows [out, ...] of heads whose two halves take turns, with the first half before the second."""
    halves = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    """float32 [out, blocks] of the float16 at a place of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _parts(data: Tensor, count: int) -> Tensor:
    """[..., n] as [..., count, n / count]."""
    return data.reshape(*data.shape[:-1], count, -1)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes as [..., 2 n] codes: the low halves before the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor) -> Tensor:
    """[..., n] bytes as [..., 8 n] bits, the lowest first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q8_0(blocks: Tensor) -> CodedWeight:
    return CodedWeight(CodeType.INT8, blocks[..., 2:].flatten(1), _half(blocks, 0), None, 32)


def _q4_0(blocks: Tensor) -> CodedWeight:
    scales = _half(blocks, 0)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    return CodedWeight(CodeType.INT4, _nibbles(blocks[..., 2:]).flatten(1), scales, zeros, 32)


def _q4_1(blocks: Tensor) -> CodedWeight:
    codes = _nibbles(blocks[..., 4:]).flatten(1)
    return CodedWeight(CodeType.INT4, codes, _half(blocks, 0), None, 32, minima=_half(blocks, 2))


def _q5_0(blocks: Tensor) -> CodedWeight:
    codes = (_nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4) - 16
    return CodedWeight(CodeType.INT8, codes.flatten(1), _half(blocks, 0), None, 32)


def _q5_1(blocks: Tensor) -> CodedWeight:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return CodedWeight(CodeType.INT8, codes.flatten(1), _half(blocks, 0), None, 32, minima=_half(blocks, 2))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [out, groups] of Q4_K and Q5_K: 8 of either of 6 bits, in the 12 bytes behind d and m."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), -1)
    d, m = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return (d * scales.float()).flatten(1), (-m * minima.float()).flatten(1)


def _q4_k(blocks: Tensor) -> CodedWeight:
    scales, minima = _k_scales(blocks)
    codes = _nibbles(_parts(blocks[..., 16:], 4)).flatten(1)
    return CodedWeight(CodeType.INT4, codes, scales, None, 32, minima=minima)


def _q5_k(blocks: Tensor) -> CodedWeight:
    scales, minima = _k_scales(blocks)
    low = _nibbles(_parts(blocks[..., 48:], 4)).flatten(-2)
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)
    return CodedWeight(CodeType.INT8, (low | high << 4).flatten(1), scales, None, 32, minima=minima)


def _q6_k(blocks: Tensor) -> CodedWeight:
    low = _nibbles(_parts(blocks[..., :128], 2))  # [out, blocks, halves of a block, 128]
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = (_parts(blocks[..., 128:192], 2)[..., None, :] >> shifts & 3).flatten(-2)
    codes = (low | high << 4) - 32
    scales = _half(blocks, 208)[..., None] * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return CodedWeight(CodeType.INT8, codes.flatten(1), scales.flatten(1), None, 16)


KEPT: Mapping[str, Callable[[Tensor], CodedWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Makes codes of blocks, uint8 [out, blocks, bytes]."""
