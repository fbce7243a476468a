"""The cases of attention and of KV copies; see `gpu.py`."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from gpu_measure import Case, Machine
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvrelay.engine.attention.base import AttentionInputs
from kvrelay.engine.attention.choice import choose_prefill
from kvrelay.engine.attention.prefill import PlannedPrefill, Shapes
from kvrelay.engine.attention.triton import architecture_of
from kvrelay.engine.config import GPU_DEFAULTS
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.kernels import reference
from kvrelay.kernels.triton import kv_checksum, kv_frame, kv_gather
from kvrelay.kernels.triton.decode_work import DecodeParts, DecodeWork, count_programs, plan_decode
from kvrelay.kernels.triton.flash_prefill import choose_tile, flash_prefill, flops, plan_tiles
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.paged_decode import bytes_moved as decode_bytes
from kvrelay.kernels.triton.paged_decode import paged_decode

TOLERANCE = 1.5e-2
BLOCK = GPU_DEFAULTS.block_size
"""Slots of a page, as the engine has them: enough for a tile of keys, which is then loaded by TMA."""
SMALL_BLOCK = 16
"""Without TMA."""
CHECKED = 64
"""Queries of a long prompt that are checked: the last ones, which see the most keys."""


class Paged:
    """R sequences of `context` tokens each on scattered blocks, with random KV in bfloat16."""

    def __init__(self, machine: Machine, rows: int, context: int, kv_heads: int, dim: int, block: int = BLOCK) -> None:
        width = -(-context // block)
        blocks = rows * width + 1
        shape = (blocks, 1, 2, kv_heads, block, dim)
        self.pool = torch.empty(shape, dtype=machine.dtype, device=machine.device).normal_()
        self.tables = torch.randperm(blocks, device=machine.device)[: rows * width].view(rows, width).int()
        self.kv = PagedKV(self.pool, 0)
        self.context = context

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """Keys and values [R, Hkv, context, D]."""
        gathered = self.pool[self.tables.long(), 0].permute(2, 0, 3, 1, 4, 5)
        keys, values = gathered.flatten(3, 4)[..., : self.context, :]
        return keys.contiguous(), values.contiguous()


def moving(machine: Machine) -> Iterator[Case]:
    """Frames of an 8B Llama's KV, read from the pool and written into it, and their checksums."""
    layers, kv_heads, dim = (2, 2, 16) if machine.dry else (32, 8, 128)
    for tokens in (80, 200) if machine.dry else (256, 4096):
        count = -(-tokens // BLOCK)
        shape = (count + 3, layers, 2, kv_heads, BLOCK, dim)
        pool = torch.empty(shape, dtype=machine.dtype, device=machine.device).normal_()
        blocks = torch.randperm(count + 3, device=machine.device)[:count]
        frame = torch.zeros(pool[0].nbytes // BLOCK * tokens, dtype=torch.uint8, device=machine.device)
        name = {"tokens": tokens, "mb": round(len(frame) / 1e6, 1)}
        whole = tokens // BLOCK * pool[0].nbytes
        expected = pool[blocks].view(torch.uint8).flatten()[:whole].to(torch.int64)

        def gather(pool=pool, blocks=blocks, tokens=tokens, frame=frame) -> Tensor:
            kv_gather.kv_gather(pool, blocks, tokens, frame)
            return frame

        target = torch.zeros_like(pool)

        def scatter(target=target, blocks=blocks, tokens=tokens, frame=frame) -> Tensor:
            kv_gather.kv_scatter(target, blocks, tokens, frame)
            return target

        def first(found: Tensor, whole=whole) -> Tensor:
            return found[:whole].to(torch.int64)

        def scattered(found: Tensor, blocks=blocks, whole=whole) -> Tensor:
            return found[blocks].view(torch.uint8).flatten()[:whole].to(torch.int64)

        moved = 2 * len(frame)
        yield Case("kv_gather", name, gather, lambda expected=expected: expected, 0.0, bytes=moved, part=first)
        yield Case("kv_scatter", name, scatter, lambda expected=expected: expected, 0.0, bytes=moved, part=scattered)

        def checksum(frame=frame) -> Tensor:
            number = np.array([reference.kv_checksum(frame.cpu().numpy().data)], np.uint64)
            return torch.from_numpy(number.view(np.int32)).to(frame.device)

        yield Case(
            "kv_checksum",
            name,
            lambda frame=frame: kv_checksum.kv_checksum(frame),
            checksum,
            0.0,
            bytes=len(frame),
            part=lambda found: found.view(torch.int32),
        )
        yield from _in_one_pass(pool, blocks[: tokens // BLOCK], frame, name)


def _in_one_pass(pool: Tensor, blocks: Tensor, frame: Tensor, name: dict[str, Any]) -> Iterator[Case]:
    """Whole blocks copied with their checksum, which the copy's bytes are the bound of; and summed in place."""
    planes = pool.view(torch.uint8).flatten(3)
    size = len(blocks) * planes[0].numel()

    def expected() -> Tensor:
        number = np.array([reference.kv_checksum(planes[blocks].flatten().cpu().numpy().data)], np.uint64)
        return torch.from_numpy(number.view(np.int32)).to(frame.device)

    def move(way: kv_frame.Way) -> Tensor:
        total = torch.full((1,), kv_checksum.of_length(size), dtype=torch.int64, device=frame.device)
        kv_frame.kv_frame(way, planes, blocks, frame, total)
        return total

    for way, passes in (("read", 2), ("sum", 1)):
        yield Case(
            f"kv_frame_{way}",
            name,
            partial(move, way),
            expected,
            0.0,
            bytes=passes * size,
            launches=2,
            part=lambda found: found.view(torch.int32),
        )


def exact_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """float64 [T, H, D] of one sequence's last T tokens, query [T, H, D], keys and values [Hkv, N, D]."""
    tokens, heads, dim = query.shape
    kv_heads, context, _ = keys.shape
    grouped = query.double().view(tokens, kv_heads, -1, dim)
    scores = torch.einsum("tkgd,kjd->kgtj", grouped, keys.double()) * dim**-0.5
    unseen = torch.ones(tokens, context, dtype=torch.bool, device=query.device).triu(context - tokens + 1)
    weights = scores.masked_fill_(unseen, -torch.inf).softmax(-1)
    return torch.einsum("kgtj,kjd->tkgd", weights, values.double()).reshape(tokens, heads, dim)


def prefill(machine: Machine) -> Iterator[Case]:
    """One long prompt, several short ones, and a chunk after a context; 32 query heads on 8 KV heads."""
    if machine.dry:
        shapes = [(1, 0, 40, 4, 2, 16, BLOCK), (2, 24, 17, 4, 2, 16, BLOCK)]
    else:
        shapes = [
            (rows, start, length, 32, 8, 128, block)
            for rows, start, length in ((1, 0, 1024), (1, 0, 4096), (1, 0, 16384), (1, 0, 32768), (16, 0, 1024))
            for block in (BLOCK, SMALL_BLOCK)
        ]
        shapes += [(1, 30720, 2048, 32, 8, 128, BLOCK), (4, 0, 4096, 32, 8, 64, BLOCK)]
    for shape in shapes:
        yield _prefill(machine, *shape)


def _prefill(
    machine: Machine, rows: int, start: int, length: int, heads: int, kv_heads: int, dim: int, block: int
) -> Case:
    paged = Paged(machine, rows, start + length, kv_heads, dim, block)
    query = torch.randn(rows * length, heads, dim, device=machine.device).to(machine.dtype)
    tile = choose_tile(dim, machine.dtype, block, architecture_of(machine.device))
    starts, lengths = np.full(rows, start), np.full(rows, length)
    tiles = torch.from_numpy(plan_tiles(starts, lengths, tile.rows // (heads // kv_heads))).to(machine.device)
    out = torch.empty_like(query)
    keys, values = paged.contiguous()
    checked = min(CHECKED, length)

    def exact() -> Tensor:
        return exact_attention(query[-checked:], keys[-1], values[-1])

    def run() -> Tensor:
        flash_prefill(query, paged.kv, paged.tables, tiles, tile, 0, out)
        return out

    rivals: dict[str, Callable[[], Tensor]] = {}
    timed = not machine.dry and block == BLOCK
    if timed and start == 0:
        q = query.view(rows, length, heads, dim).transpose(1, 2).contiguous()
        rivals |= _dense_rivals(q, keys, values)
    if timed:
        rivals |= _other_prefills(query, paged, starts, lengths)
    return Case(
        "flash_prefill",
        {
            "rows": rows,
            "start": start,
            "length": length,
            "heads": f"{heads}/{kv_heads}",
            "dim": dim,
            "block": block,
            "tma": tile.tma,
        },
        run,
        exact,
        TOLERANCE,
        flops=flops(starts.tolist(), lengths.tolist(), heads, dim),
        rivals=rivals,
        part=lambda found: found[-checked:],
    )


def _dense_rivals(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Callable[[], Tensor]]:
    """torch's own kernels on contiguous [R, H, T, D], without the block table that a server needs."""

    def sdpa(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)

        return run

    return {
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "flex": lambda: _flex(query.shape[2], query.device)(query, keys, values),
    }


@cache
def _flex(length: int, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)
    compiled: Any = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def decode(machine: Machine) -> Iterator[Case]:
    """From one short context to many long ones, up to 256k tokens of KV in all."""
    if machine.dry:
        yield from (_decode(machine, rows, context, (4, 2, 16), kind) for rows, context, kind in DRY_DECODES)
        return
    for rows, context in ((1, 128), (1, 4096), (1, 32768), (16, 1024), (16, 4096), (64, 1024), (64, 4096), (256, 1024)):
        yield _decode(machine, rows, context, (32, 8, 128), machine.dtype)
    for kind in (torch.int8, torch.float8_e4m3fn):
        yield _decode(machine, 64, 4096, (32, 8, 128), kind)
    yield _decode(machine, 64, 4096, (32, 8, 64), machine.dtype)


DRY_DECODES = [(1, 20, torch.float16), (3, 300, torch.float16), (2, 40, torch.int8)]


def _decode(machine: Machine, rows: int, context: int, sizes: tuple[int, int, int], kind: torch.dtype) -> Case:
    heads, kv_heads, dim = sizes
    paged = Paged(machine, rows, context, kv_heads, dim)
    query = torch.randn(rows, heads, dim, device=machine.device).to(machine.dtype)
    keys, values = paged.contiguous()
    kv, exact_keys, exact_values = paged.kv, keys, values
    if kind != machine.dtype:
        scale = float(torch.tensor(2.0 / 127).bfloat16()) if kind == torch.int8 else 1 / 64
        pool = (paged.pool.float() / scale).clamp(-127, 127)
        pool = pool.round().to(kind) if kind == torch.int8 else pool.to(kind)
        kv = PagedKV(pool, 0, torch.full(pool.shape[:5], scale, dtype=torch.bfloat16, device=machine.device))
        paged.pool = pool.float() * scale
        exact_keys, exact_values = paged.contiguous()
    contexts = [context] * rows
    programs = count_programs(kv_heads, machine.processors)
    planned = DecodeWork.view(torch.zeros(sum(DecodeWork.sizes(rows, programs)), dtype=torch.int32), rows, programs)
    plan_decode(np.array(contexts), 0, planned)
    work = DecodeWork(*(tensor.to(machine.device) for tensor in planned))
    parts = DecodeParts.empty(programs, heads, kv_heads, dim, machine.device)
    out = torch.empty_like(query)

    def exact() -> Tensor:
        return torch.cat(
            [exact_attention(query[row : row + 1], exact_keys[row], exact_values[row]) for row in range(rows)]
        )

    def run() -> Tensor:
        paged_decode(query, kv, paged.tables, work, parts, out)
        return out

    grouped = query.view(rows, kv_heads, -1, dim)
    rivals: dict[str, Callable[[], Tensor]] = {}
    if not machine.dry and kind == machine.dtype:
        rivals["SDPA"] = lambda: scaled_dot_product_attention(grouped, keys, values)
        rivals |= _flashinfer_decode(query, paged)
    return Case(
        "paged_decode",
        {
            "rows": rows,
            "context": context,
            "heads": f"{heads}/{kv_heads}",
            "dim": dim,
            "kv": str(kind)[6:],
            "parts": int((planned.entries[: planned.starts[-1], 3] >= 0).sum()),
        },
        run,
        exact,
        TOLERANCE,
        bytes=decode_bytes(contexts, heads, kv_heads, dim, query.element_size(), kind.itemsize),
        rivals=rivals,
    )


def _other_prefills(
    query: Tensor, paged: Paged, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, Callable[[], Tensor]]:
    """What else `engine.prefill_attention` may be here, as the engine runs it."""
    _, _, _, kv_heads, block, dim = paged.pool.shape
    kind: Any = str(query.dtype)[6:]
    layout = KVLayout(1, kv_heads, dim, block, kind, "HND")
    device = query.device
    shapes = Shapes(layout, query.dtype, query.shape[1], (0,), architecture_of(device), device)
    contexts = torch.from_numpy((starts + lengths).astype(np.int32)).to(device)
    nothing = torch.empty(0, device=device)
    inputs = AttentionInputs(nothing, nothing, paged.tables, contexts, starts, lengths)
    rivals: dict[str, Callable[[], Tensor]] = {}
    for prefill in choose_prefill("auto", shapes)[1:]:
        out, step = torch.empty_like(query), prefill.plan(inputs, 0)

        def run(step: PlannedPrefill = step, out: Tensor = out) -> Tensor:
            step.launch(query, paged.kv, 0, out)
            return out

        rivals[prefill.name] = run
    return rivals


def _flashinfer_decode(query: Tensor, paged: Paged) -> dict[str, Callable[[], Tensor]]:
    """FlashInfer, where it can be imported."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    import flashinfer

    rows, width = paged.tables.shape
    _, _, _, kv_heads, block, dim = paged.pool.shape
    device = query.device
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    last = torch.full((rows,), (paged.context - 1) % block + 1, dtype=torch.int32, device=device)
    counts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        counts * width, paged.tables.flatten(), last, query.shape[1], kv_heads, dim, block, q_data_type=query.dtype
    )
    return {"FlashInfer": lambda: wrapper.run(query, paged.pool[:, 0])}
