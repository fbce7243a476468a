"""The tensors of paged KV, and token-exact access to their bytes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVPool:
    """One tensor `[block, layer, k|v, *inner]`, zeroed, so that all of its memory is there from the start.

    `read` and `write` touch the named blocks only, so that other threads may ship some blocks while a step computes in
    others; whoever holds a block decides who may touch it. On CPU they copy in the calling thread alone and take none
    of the forward pass's threads.

    A frame is the bytes of tokens [first_token, first_token + num_tokens) of one sequence, `first_token` being the
    first of a block: whole blocks as they lie in the pool, then what the tokens use of a partial last block, compacted.

        whole      [layer, k|v, *inner] each
        partial    [layer, k|v, slot, head, dim] of its first slots (NHD), or [layer, k|v, head, slot, dim] (HND)
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        # Written to now: the memory is taken at start, where running out of it is a clear error, and not as blocks are
        # first used, so that a worker's size doesn't grow with the requests it served.
        self.tensor = torch.empty(layout.shape(num_blocks), dtype=TORCH_DTYPES[layout.dtype], device=device).zero_()
        self._bytes = self.tensor.view(torch.uint8)

    def read(self, blocks: Sequence[int], first_token: int, num_tokens: int, out: Tensor) -> int:
        """Copies a frame into the beginning of `out`.

        Args:
            blocks: the sequence's whole block table.
            out: uint8, contiguous, at least `num_tokens * layout.token_bytes` long.

        Returns:
            The frame's bytes, `num_tokens * layout.token_bytes`.

        Raises:
            ValueError: the tokens don't begin a block or are not all in `blocks`, or `out` is too short.
        """
        size = self._check(blocks, first_token, num_tokens, out)
        for pooled, framed in self._pieces(blocks, first_token, num_tokens, out):
            framed[...] = pooled
        return size

    def write(self, blocks: Sequence[int], first_token: int, num_tokens: int, data: Tensor) -> None:
        """Copies a frame from the beginning of `data` into the pool; the rest of a partial last block becomes zero.

        Args:
            blocks: the sequence's whole block table.
            data: uint8, contiguous, at least `num_tokens * layout.token_bytes` long.

        Raises:
            ValueError: the tokens don't begin a block or are not all in `blocks`, or `data` is too short.
        """
        self._check(blocks, first_token, num_tokens, data)
        end = first_token + num_tokens
        if end % self.layout.block_size:
            self._bytes[blocks[end // self.layout.block_size]].zero_()
        for pooled, framed in self._pieces(blocks, first_token, num_tokens, data):
            pooled[...] = framed

    def _check(self, blocks: Sequence[int], first_token: int, num_tokens: int, frame: Tensor) -> int:
        """Bytes of the frame, if there can be one."""
        size, end = self.layout.block_size, first_token + num_tokens
        if first_token < 0 or first_token % size:
            raise ValueError(f"first_token is {first_token}; allowed: multiples of the block size, {size}")
        if num_tokens < 1 or end > len(blocks) * size:
            raise ValueError(
                f"num_tokens is {num_tokens} from {first_token} on; {len(blocks)} blocks of {size} are held"
            )
        used = blocks[first_token // size : self.layout.blocks_for(end)]
        if min(used) < 0 or max(used) >= self.num_blocks:
            raise ValueError(f"blocks holds {min(used)} to {max(used)}; allowed: 0 to {self.num_blocks - 1}")
        needed = num_tokens * self.layout.token_bytes
        if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous() or len(frame) < needed:
            raise ValueError(f"frame is {frame.dtype} {list(frame.shape)}; allowed: torch.uint8 [{needed} or more]")
        return needed

    def _pieces(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, frame: Tensor
    ) -> Iterator[tuple[Any, Any]]:
        """Pairs of equal shape, (part of the pool, part of the frame), that the frame consists of.

        NumPy arrays when both are on CPU, for torch would split a copy of this size over threads; else tensors.
        """
        on_cpu = self._bytes.device.type == frame.device.type == "cpu"
        pool: Any = self._bytes.numpy() if on_cpu else self._bytes
        rest: Any = frame.numpy() if on_cpu else frame
        layout = self.layout
        index = first_token // layout.block_size
        while num_tokens > 0:
            used = min(num_tokens, layout.block_size)
            block = pool[blocks[index]]
            piece = block[:, :, :used] if layout.order == "NHD" else block[:, :, :, :used]
            size = used * layout.token_bytes
            yield piece, rest[:size].reshape(piece.shape)
            rest = rest[size:]
            num_tokens -= used
            index += 1
