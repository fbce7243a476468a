"""KV of one layout written into a pool of another, or read from it: block size, dtype and NHD/HND may differ.

The sender ships what is in its pool, and the receiver converts; but KV for a pool of 8 bits is made by the sender, so
that the link carries the short form. Frames begin and end at the sender's block borders, so a frame may fill only a
part of a block here.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool, fields, planes
from kvrelay.kernels.kv_codes import dequantize, quantize
from kvrelay.transfer.protocol.events import Frame


def convert(pool: KVPool, table: Sequence[int], theirs: KVLayout, frame: Frame, data: Tensor, keep: int) -> None:
    """Writes the frame in `data` (uint8, layout `theirs`) into the blocks `table` of `pool`.

    Values are those of torch's `.to()`, or of `kv_codes` for 8 bits. The slots of the last token's block behind that
    token become zero. The first `keep` tokens have their KV here already, in blocks that others may share: they stay
    untouched.
    """
    size = pool.layout.block_size
    layers = frame.part.layers(theirs.layers)
    mine = [_by_slot(field[:, layers.start : layers.stop], pool.layout) for field in pool.fields]
    blocks = torch.tensor(table, device=pool.bytes.device)
    first, end = frame.first, frame.first + frame.tokens
    if end <= keep:
        return
    if end % size:
        for part in mine:
            part[int(blocks[end // size]), end % size :] = 0
    for numbers, scales in _by_token(theirs, frame, len(layers), data[: frame.nbytes]):
        skip = min(len(numbers), max(0, keep - first))
        at = torch.arange(first + skip, first + len(numbers), device=blocks.device)
        stored = _as_bytes(*_of_dtype(numbers[skip:], None if scales is None else scales[skip:], theirs, pool.layout))
        for part, new in zip(mine, stored, strict=True):
            part[blocks[at // size], at % size] = new.to(blocks.device)
        first += len(numbers)
    # On a GPU the copies are only queued, while the engine reads on another stream and `data` is overwritten.
    pool.settle()


def narrow(pool: KVPool, table: Sequence[int], wire: KVLayout, frame: Frame, out: Tensor) -> None:
    """Copies a frame of `pool` into the beginning of `out` (uint8), in the 8 bits of `wire`, which the pool hasn't."""
    size, layers = pool.layout.block_size, frame.part.layers(wire.layers)
    blocks = torch.tensor(table, device=pool.bytes.device)[frame.first // size :]
    whole, over = divmod(frame.tokens, size)
    for used, slots in ((blocks[:whole], size), (blocks[whole : whole + 1], over)):
        if len(used) and slots:
            width = wire.nbytes(len(used) * slots, frame.part)
            numbers = pool.tensor[used, layers.start : layers.stop].narrow(3 if wire.order == "NHD" else 4, 0, slots)
            stored = _as_bytes(*quantize(numbers, TORCH_DTYPES[wire.dtype]))
            framed = fields(out[:width].view(len(used), len(layers), wire.planes, -1), wire)
            for part, new in zip(framed, stored, strict=True):
                part.copy_(new)
            out = out[width:]
    pool.settle()


def _of_dtype(numbers: Tensor, scales: Tensor | None, theirs: KVLayout, mine: KVLayout) -> tuple[Tensor, Tensor | None]:
    """The numbers [..., dim] and scales [...] of `theirs` in the dtype of `mine`."""
    if theirs.dtype == mine.dtype:
        return numbers, scales
    if scales is not None:
        numbers = dequantize(numbers, scales)
    dtype = TORCH_DTYPES[mine.dtype]
    return quantize(numbers, dtype) if mine.scaled else (numbers.to(dtype), None)


def _as_bytes(numbers: Tensor, scales: Tensor | None) -> list[Tensor]:
    """uint8 [..., bytes] of the numbers [..., dim], and of the scales [...] if there are any."""
    parts = [numbers] if scales is None else [numbers, scales[..., None]]
    return [part.contiguous().view(torch.uint8) for part in parts]


def _by_slot(blocks: Tensor, layout: KVLayout) -> Tensor:
    """View [block, slot, layer, k|v, head, ...] of `blocks` [block, layer, k|v, *inner, ...]."""
    return blocks.movedim(3 if layout.order == "NHD" else 4, 1)


def _by_token(layout: KVLayout, frame: Frame, layers: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Numbers [token, layer, k|v, head, dim], and scales without dim: of whole blocks, then of a partial last one."""
    size = layout.block_size
    for slots, blocks in ((size, frame.tokens // size), (frame.tokens % size, 1)):
        width = layout.nbytes(slots * blocks, frame.part)
        if width:
            numbers, scales = planes(data[:width].view(blocks, layers, layout.planes, -1), layout)
            yield (
                _by_slot(numbers, layout).flatten(0, 1),
                None if scales is None else _by_slot(scales, layout).flatten(0, 1),
            )
            data = data[width:]
