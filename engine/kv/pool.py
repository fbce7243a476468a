"""The tensors of paged KV, and token-exact access to their bytes."""

import contextlib
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout, Layers, memory_runs

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVPool:
    """One tensor `[block, layer, k|v, *inner]`, zeroed, so that all of its memory is there from the start.

    `read` and `write` touch the named blocks only, so that other threads may ship some blocks while a step computes in
    others; whoever holds a block decides who may touch it. On CPU they copy in the calling thread alone and take none
    of the forward pass's threads.

    A frame is the bytes of tokens [first_token, first_token + num_tokens) of one sequence in `layers` (first, number;
    all of them unless given), `first_token` being the first of a block: whole blocks as they lie in the pool, then what
    the tokens use of a partial last block, compacted.

        whole      [layer, k|v, *inner] each
        partial    [layer, k|v, slot, head, dim] of its first slots (NHD), or [layer, k|v, head, slot, dim] (HND)

    In host memory `runs` gives a frame's whole blocks as they lie there, to be sent or received without a copy.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        # Written to now: the memory is taken at start, where running out of it is a clear error, and not as blocks are
        # first used, so that a worker's size doesn't grow with the requests it served.
        self.tensor = _empty(layout.shape(num_blocks), TORCH_DTYPES[layout.dtype], torch.device(device)).zero_()
        self._bytes = self.tensor.view(torch.uint8)
        # Block by block, a GPU would spend its time on starting copies.
        self._by_kernel = self._bytes.is_cuda

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds at most."""
        return self.num_blocks * self.layout.block_size

    def runs(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, layers: Layers | None = None
    ) -> list[memoryview]:
        """The whole blocks of a frame where they lie: writable bytes, in the frame's order, neighbours in one run.

        Raises:
            ValueError: as `read`, or the pool isn't in host memory.
        """
        if self._bytes.device.type != "cpu":
            raise ValueError(f"the KV pool is on {self._bytes.device}; runs are of host memory only")
        layers = layers or (0, self.layout.layers)
        self._check_range(blocks, first_token, num_tokens, layers)
        start = first_token // self.layout.block_size
        used = blocks[start : start + num_tokens // self.layout.block_size]
        memory = memoryview(self._bytes.view(-1).numpy().data)
        return [memory[first:end] for first, end in memory_runs(self.layout, used, layers)]

    def read(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, out: Tensor, layers: Layers | None = None
    ) -> int:
        """Copies a frame into the beginning of `out`.

        Args:
            blocks: the sequence's whole block table.
            out: uint8, contiguous, at least `num_tokens * layout.token_bytes` long.

        Returns:
            The frame's bytes, `num_tokens * layout.token_bytes` where it has all layers.

        Raises:
            ValueError: the tokens don't begin a block or are not all in `blocks`, or `out` is too short.
        """
        layers = layers or (0, self.layout.layers)
        size = self._check(blocks, first_token, num_tokens, out, layers)
        if self._by_kernel:
            used = self._used(blocks, first_token, num_tokens)
            self._gather(used, num_tokens, out[:size], layers)
        else:
            for pooled, framed in self._pieces(blocks, first_token, num_tokens, out, layers):
                framed[...] = pooled
        return size

    def write(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, data: Tensor, layers: Layers | None = None
    ) -> None:
        """Copies a frame from the beginning of `data` into the pool; the rest of a partial last block becomes zero.

        Args:
            blocks: the sequence's whole block table.
            data: uint8, contiguous, at least `num_tokens * layout.token_bytes` long.

        Raises:
            ValueError: the tokens don't begin a block or are not all in `blocks`, or `data` is too short.
        """
        layer, count = layers = layers or (0, self.layout.layers)
        size = self._check(blocks, first_token, num_tokens, data, layers)
        if self._by_kernel:
            self._scatter(self._used(blocks, first_token, num_tokens), num_tokens, data[:size], layers)
            return
        end = first_token + num_tokens
        if end % self.layout.block_size:
            self._bytes[blocks[end // self.layout.block_size], layer : layer + count].zero_()
        for pooled, framed in self._pieces(blocks, first_token, num_tokens, data, layers):
            pooled[...] = framed

    def _gather(self, blocks: Tensor, num_tokens: int, out: Tensor, layers: Layers) -> None:
        """`read` by one kernel; `out`, as long as the frame, may be on another device."""
        from kvrelay.kernels.kv_gather import kv_gather

        near = out.device == blocks.device
        frame = out if near else torch.empty(len(out), dtype=torch.uint8, device=blocks.device)
        kv_gather(self.tensor, blocks, num_tokens, frame, self.layout.order, layers)
        if not near:
            out.copy_(frame)
        self._settle()

    def _scatter(self, blocks: Tensor, num_tokens: int, data: Tensor, layers: Layers) -> None:
        """`write` by one kernel; `data`, as long as the frame, may be on another device."""
        from kvrelay.kernels.kv_gather import kv_scatter

        kv_scatter(self.tensor, blocks, num_tokens, data.to(blocks.device), self.layout.order, layers)
        self._settle()

    def _used(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> Tensor:
        """int64, on the pool's device: the blocks of a frame."""
        size = self.layout.block_size
        used = blocks[first_token // size : self.layout.blocks_for(first_token + num_tokens)]
        return torch.tensor(used, dtype=torch.int64, device=self.tensor.device)

    def _settle(self) -> None:
        """Waits for this thread's copies on a GPU: what comes after may be on another thread, or another stream."""
        if self._bytes.is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()

    def _check_range(self, blocks: Sequence[int], first_token: int, num_tokens: int, layers: Layers) -> None:
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
        layer, count = layers
        if not (layer >= 0 and 1 <= count <= self.layout.layers - layer):
            raise ValueError(f"layers are {count} from {layer} on; there are {self.layout.layers}")

    def _check(self, blocks: Sequence[int], first_token: int, num_tokens: int, frame: Tensor, layers: Layers) -> int:
        """Bytes of the frame, if there can be one."""
        self._check_range(blocks, first_token, num_tokens, layers)
        needed = num_tokens * self.layout.layer_bytes * layers[1]
        if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous() or len(frame) < needed:
            raise ValueError(f"frame is {frame.dtype} {list(frame.shape)}; allowed: torch.uint8 [{needed} or more]")
        return needed

    def _pieces(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, frame: Tensor, layers: Layers
    ) -> Iterator[tuple[Any, Any]]:
        """Pairs of equal shape, (part of the pool, part of the frame), that the frame consists of.

        NumPy arrays when both are on CPU, for torch would split a copy of this size over threads; else tensors.
        """
        on_cpu = self._bytes.device.type == frame.device.type == "cpu"
        pool: Any = self._bytes.numpy() if on_cpu else self._bytes
        rest: Any = frame.numpy() if on_cpu else frame
        layout = self.layout
        layer, count = layers
        index = first_token // layout.block_size
        while num_tokens > 0:
            used = min(num_tokens, layout.block_size)
            block = pool[blocks[index], layer : layer + count]
            piece = block[:, :, :used] if layout.order == "NHD" else block[:, :, :, :used]
            size = used * layout.layer_bytes * count
            yield piece, rest[:size].reshape(piece.shape)
            rest = rest[size:]
            num_tokens -= used
            index += 1


def allocate_pool(layout: KVLayout, memory_bytes: int, device: torch.device | str = "cpu") -> KVPool:
    """A pool of as many blocks as fit into `memory_bytes`.

    Raises:
        ValueError: not even one block fits, or the device doesn't have the memory.
    """
    num_blocks = layout.blocks_in(memory_bytes)
    try:
        return KVPool(layout, num_blocks, device)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ValueError(f"kv_memory_bytes is {memory_bytes}; {free} of {total} bytes are free on {device}") from error


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of that shape; on CPU in huge pages if the system has them.

    Decode reads blocks all over the pool, and with small pages the look-up of their addresses slows it down.
    """
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def gpu_checksum(data: Tensor) -> int:
    """64 bits of uint8 [length] in a GPU's memory, computed there; see `kvrelay.kernels.kv_checksum`."""
    from kvrelay.kernels.kv_checksum import kv_checksum  # Triton, which a worker without a GPU doesn't need

    return int(kv_checksum(data)) % 2**64
