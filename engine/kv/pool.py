"""The tensors of paged KV, and token-exact access to their bytes."""

import contextlib
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvrelay.engine.kv.layout import ALL_LAYERS, KVLayout, LayerPart, memory_runs

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVPool:
    """One zeroed tensor `[block, layer, k|v, *inner]`.

    `read` and `write` touch the named blocks only, so other threads may send some blocks while a step computes in
    others; the holder of a block decides who may touch it. On the CPU they copy in the calling thread and use none of
    the forward pass's threads.

    A frame is the KV of tokens [first_token, first_token + num_tokens) of one sequence, where `first_token` is the
    first of a block: whole blocks as they lie in the pool, then what the tokens use of a partial last block, compacted.

        whole      [layer, k|v, *inner] each
        partial    [layer, k|v, slot, head, dim] of its first slots (NHD), or [layer, k|v, head, slot, dim] (HND)

    A frame may also be of a part of the layers only.

    In host memory, `runs` gives a frame's whole blocks in place, to be sent or received without a copy.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        # Zeroed now, so that all memory is taken at start, where running out of it is a clear error. Otherwise a
        # worker's size would grow as blocks are first used.
        self.tensor = _empty(layout.shape(num_blocks), TORCH_DTYPES[layout.dtype], torch.device(device)).zero_()
        self._bytes = self.tensor.view(torch.uint8)
        # Block by block, a GPU would spend its time on starting copies.
        self._by_kernel = self._bytes.is_cuda

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds at most."""
        return self.num_blocks * self.layout.block_size

    def runs(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, part: LayerPart = ALL_LAYERS
    ) -> list[memoryview]:
        """The whole blocks of a frame in place: writable bytes, in the frame's order, neighbours in one run.

        Raises:
            ValueError: as `read`, or the pool isn't in host memory.
        """
        if self._bytes.device.type != "cpu":
            raise ValueError(f"the KV pool is on {self._bytes.device}; runs are of host memory only")
        self._check_range(blocks, first_token, num_tokens)
        start = first_token // self.layout.block_size
        used = blocks[start : start + num_tokens // self.layout.block_size]
        memory = memoryview(self._bytes.view(-1).numpy().data)
        return [memory[first:end] for first, end in memory_runs(self.layout, used, part)]

    def read(
        self,
        blocks: Sequence[int],
        first_token: int,
        num_tokens: int,
        out: Tensor,
        part: LayerPart = ALL_LAYERS,
    ) -> int:
        """Copies a frame into the beginning of `out`.

        Args:
            blocks: the sequence's whole block table.
            out: uint8, contiguous, at least `layout.nbytes(num_tokens, part)` long.

        Returns:
            The frame's bytes, `layout.nbytes(num_tokens, part)`.

        Raises:
            ValueError: the tokens don't begin a block or are not all in `blocks`, or `out` is too short.
        """
        size = self._check(blocks, first_token, num_tokens, out, part)
        if self._by_kernel:
            self._gather(self._used(blocks, first_token, num_tokens), num_tokens, out[:size], part)
        else:
            for pooled, framed in self._pieces(blocks, first_token, num_tokens, out, part):
                framed[...] = pooled
        return size

    def write(
        self,
        blocks: Sequence[int],
        first_token: int,
        num_tokens: int,
        data: Tensor,
        part: LayerPart = ALL_LAYERS,
    ) -> None:
        """Copies a frame from the beginning of `data` into the pool; the rest of a partial last block becomes zero.

        Only in the layers of `part`.

        Args:
            blocks: the sequence's whole block table.
            data: uint8, contiguous, at least `layout.nbytes(num_tokens, part)` long.

        Raises:
            ValueError: the tokens don't begin a block or are not all in `blocks`, or `data` is too short.
        """
        size = self._check(blocks, first_token, num_tokens, data, part)
        if self._by_kernel:
            self._scatter(self._used(blocks, first_token, num_tokens), num_tokens, data[:size], part)
            return
        end = first_token + num_tokens
        if end % self.layout.block_size:
            layers = part.layers(self.layout.layers)
            self._bytes[blocks[end // self.layout.block_size], layers.start : layers.stop].zero_()
        for pooled, framed in self._pieces(blocks, first_token, num_tokens, data, part):
            pooled[...] = framed

    def _gather(self, blocks: Tensor, num_tokens: int, out: Tensor, part: LayerPart) -> None:
        """`read` by one kernel; `out`, as long as the frame, may be on another device."""
        from kvrelay.kernels.kv_gather import kv_gather

        near = out.device == blocks.device
        frame = out if near else torch.empty(len(out), dtype=torch.uint8, device=blocks.device)
        kv_gather(self.tensor, blocks, num_tokens, frame, self.layout.order, layers=self._range(part))
        if not near:
            out.copy_(frame)
        self.settle()

    def _scatter(self, blocks: Tensor, num_tokens: int, data: Tensor, part: LayerPart) -> None:
        """`write` by one kernel; `data`, as long as the frame, may be on another device."""
        from kvrelay.kernels.kv_gather import kv_scatter

        frame = data.to(blocks.device)
        kv_scatter(self.tensor, blocks, num_tokens, frame, self.layout.order, layers=self._range(part))
        self.settle()

    def _range(self, part: LayerPart) -> tuple[int, int]:
        """The first layer of the part, and how many it has."""
        layers = part.layers(self.layout.layers)
        return layers.start, len(layers)

    def _used(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> Tensor:
        """int64, on the pool's device: the blocks of a frame."""
        size = self.layout.block_size
        used = blocks[first_token // size : self.layout.blocks_for(first_token + num_tokens)]
        return torch.tensor(used, dtype=torch.int64, device=self.tensor.device)

    def warm_up(self) -> None:
        """Compiles the kernels that frames need on a GPU, before a frame's timeout could count it. Changes no block."""
        if self._by_kernel:
            frame = torch.empty(self.layout.block_bytes, dtype=torch.uint8, device=self._bytes.device)
            self.read([0], 0, self.layout.block_size, frame)
            gpu_checksum(frame)
            self.write([0], 0, self.layout.block_size, frame)

    def settle(self) -> None:
        """Waits for this thread's copies on a GPU: the next user may be another thread, or another stream."""
        if self._bytes.is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()

    def _check_range(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> None:
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

    def _check(self, blocks: Sequence[int], first_token: int, num_tokens: int, frame: Tensor, part: LayerPart) -> int:
        """Bytes of the frame, after all checks."""
        self._check_range(blocks, first_token, num_tokens)
        needed = self.layout.nbytes(num_tokens, part)
        if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous() or len(frame) < needed:
            raise ValueError(f"frame is {frame.dtype} {list(frame.shape)}; allowed: torch.uint8 [{needed} or more]")
        return needed

    def _pieces(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, frame: Tensor, part: LayerPart
    ) -> Iterator[tuple[Any, Any]]:
        """Pairs of equal shape, (part of the pool, part of the frame), that the frame consists of.

        NumPy arrays if both are on the CPU, because torch would split a copy of this size over threads; else tensors.
        """
        on_cpu = self._bytes.device.type == frame.device.type == "cpu"
        pool: Any = self._bytes.numpy() if on_cpu else self._bytes
        rest: Any = frame.numpy() if on_cpu else frame
        layout, layers = self.layout, part.layers(self.layout.layers)
        index = first_token // layout.block_size
        while num_tokens > 0:
            used = min(num_tokens, layout.block_size)
            block = pool[blocks[index], layers.start : layers.stop]
            piece = block[:, :, :used] if layout.order == "NHD" else block[:, :, :, :used]
            size = layout.nbytes(used, part)
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
