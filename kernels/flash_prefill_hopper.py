"""`flash_prefill` for Hopper (sm_90): one warp loads, two warpgroups compute in turns.

It computes what `flash_prefill` defines, for a pool of the query's type, heads of 64 or 128, and pages of a multiple of
KEYS slots. The 128 query rows of a tile are split between two consumer warpgroups. The producer warp brings the pages
of keys and values of a step through the Tensor Memory Accelerator into a ring of buffers; each buffer has a barrier
that says it is full, and one that says both consumers have read it. In step i a consumer

    waits for its turn, issues the scores of step i + 1 and the values of step i - 1, and gives the turn to the other
    computes the softmax of step i, while the tensor cores compute what was issued
    waits for the tensor cores, and rescales the weighted sum of the values

so neither softmax nor products wait for one another within a consumer, and its products fill the tensor cores while
the other consumer computes exponentials. No product is under way from one step of the loop to the next: the compiler
would then wait for each single one.

First and last step are outside of the loop, so a tile has two at least: a step of zeros precedes a single one.

A tile's last step has the KEYS keys before its end, not those from a multiple of KEYS on: slots that nobody has written
may hold anything. A box of the descriptor lies in one page and begins as many slots before it as the step is short of;
the copy engine fills what lies outside of the page with zeros.

Grid: as `flash_prefill`. Limit: arithmetic.
Source: Shah et al.: FlashAttention-3, arXiv:2407.08608.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvrelay.kernels.gluon_prefill import BOX, GluonPrefill, async_load
from kvrelay.kernels.triton.launch import Launch
from kvrelay.kernels.triton.paged import PagedKV

ROWS = 128
"""Query rows of a tile, of both consumers."""
KEYS = BOX
"""Keys of a step."""
STAGES = 4
"""Steps whose pages the producer is ahead of the consumers at most."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""Registers of a thread. Three warpgroups, of which the producer is one, share 65,536."""


@gluon.jit
def _produce(pages, table, rows, bounds, buffers, full, empty, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr):
    """Loads the keys and values of all steps, in their order."""
    first, lowest, count, end = bounds
    planes, key_plane, value_plane = rows
    KEYS: gl.constexpr = pages.block_type.shape[1]
    for i in range(count):
        key = first + i * KEYS
        plane = gl.load(table + gl.maximum(key, lowest) // BLOCK_SIZE) * planes
        slot = gl.where(key < lowest, -KEYS, key % BLOCK_SIZE - gl.maximum(key + KEYS - end, 0))
        for kind in gl.static_range(2):
            item = 2 * i + kind
            place = item % (2 * STAGES)
            mbarrier.wait(empty.index(place), (item // (2 * STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(place), pages.block_type.nbytes)
            row = plane + (value_plane if kind else key_plane)
            async_load(pages, [row, slot, 0], full.index(place), buffers.index(place))


@gluon.jit
def _weigh(s, largest, weight, scale):
    """One step of the running softmax: weights, the factor of what was summed before, largest score, sum of weights."""
    s = s * scale
    new_largest = gl.maximum(largest, gl.max(s, 1))
    p = gl.exp2(s - new_largest[:, None])
    rescale = gl.exp2(largest - new_largest)
    return p, rescale, new_largest, weight * rescale + gl.sum(p, 1)


@gluon.jit
def _mask(s, position, key, start, window, WINDOWED: gl.constexpr):
    """Scores of keys that a row doesn't see, and of those before `start`, which are another step's, become -inf."""
    n = key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    seen = (n[None, :] <= position[:, None]) & (n >= start)[None, :]
    if WINDOWED:
        seen = seen & (n[None, :] > position[:, None] - window)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _consume(
    query,
    out,
    work,
    bounds,
    scale,
    window,
    buffers,
    q_buffer,
    full,
    empty,
    turns,
    WHO: gl.constexpr,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attends with half of the tile's rows, the first (WHO = 0) or the second."""
    first_token, tokens, before, head = work
    first, lowest, count, end = bounds
    left, unmasked = _parts(before, tokens, first, count, window, WINDOWED, buffers.shape[2])
    ROWS: gl.constexpr = q_buffer.shape[0]
    KEYS: gl.constexpr = buffers.shape[2]
    DIM: gl.constexpr = buffers.shape[3]
    dtype: gl.constexpr = buffers.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    totals: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, totals, 2)
    memory: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    RING: gl.constexpr = 2 * STAGES

    m = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, memory))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, memory))
    token = m // GROUP
    offset = ((first_token + token).to(gl.int64) * HEADS_KV + head) * GROUP + m % GROUP
    offset = offset[:, None] * DIM + d[None, :]
    inside = (token < tokens)[:, None] & (d < DIM)[None, :]
    q_buffer.store(gl.load(query + offset, mask=inside, other=0.0))
    fence_async_shared()
    row: gl.constexpr = gl.SliceLayout(1, scores)
    position = before + (WHO * ROWS + gl.arange(0, ROWS, layout=row)) // GROUP

    largest = gl.full([ROWS], -1.0e30, gl.float32, layout=row)
    weight = gl.zeros([ROWS], gl.float32, layout=row)
    total = gl.zeros([ROWS, DIM], gl.float32, layout=totals)
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=scores)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(q_buffer, buffers.index(0).reshape([KEYS, DIM]).permute([1, 0]), zero, use_acc=False)
    mbarrier.arrive(empty.index(0), count=1)
    mbarrier.wait(full.index(2), 0)
    keys = buffers.index(2).reshape([KEYS, DIM]).permute([1, 0])
    s_ahead = warpgroup_mma(q_buffer, keys, zero, use_acc=False, is_async=True)
    s = _mask(s, position, first, lowest, window, WINDOWED)
    p, rescale, largest, weight = _weigh(s, largest, weight, scale)
    s = warpgroup_mma_wait(0, deps=[s_ahead])
    mbarrier.arrive(empty.index(2), count=1)
    p16 = gl.convert_layout(p.to(dtype), weights)
    edges = (1, left, unmasked, count - 1)
    for part in gl.static_range(0 if WINDOWED else 1, 3):
        for i in range(edges[part], edges[part + 1]):
            ahead, behind = 2 * i + 2, 2 * i - 1
            mbarrier.wait(full.index(ahead % RING), ahead // RING & 1)
            mbarrier.wait(full.index(behind % RING), behind // RING & 1)
            mbarrier.wait(turns.index(WHO), ((i - 1) & 1) ^ (1 - WHO))
            keys = buffers.index(ahead % RING).reshape([KEYS, DIM]).permute([1, 0])
            s_ahead = warpgroup_mma(q_buffer, keys, zero, use_acc=False, is_async=True)
            total_ahead = warpgroup_mma(p16, buffers.index(behind % RING).reshape([KEYS, DIM]), total, is_async=True)
            mbarrier.arrive(turns.index(1 - WHO), count=1)
            if part != 1:
                s = _mask(s, position, first + i * KEYS, lowest, window, WINDOWED)
            p, rescale, largest, weight = _weigh(s, largest, weight, scale)
            s, total = warpgroup_mma_wait(0, deps=[s_ahead, total_ahead])
            mbarrier.arrive(empty.index(ahead % RING), count=1)
            mbarrier.arrive(empty.index(behind % RING), count=1)
            total = total * gl.convert_layout(rescale, gl.SliceLayout(1, totals))[:, None]
            p16 = gl.convert_layout(p.to(dtype), weights)
    behind = 2 * count - 3
    mbarrier.wait(full.index(behind % RING), behind // RING & 1)
    total_ahead = warpgroup_mma(p16, buffers.index(behind % RING).reshape([KEYS, DIM]), total, is_async=True)
    start = first + (count - 1) * KEYS
    s = _mask(s, position, gl.minimum(start, end - KEYS), start, window, WINDOWED)
    p, rescale, largest, weight = _weigh(s, largest, weight, scale)
    total = warpgroup_mma_wait(0, deps=[total_ahead])
    total = total * gl.convert_layout(rescale, gl.SliceLayout(1, totals))[:, None]
    p16 = gl.convert_layout(p.to(dtype), weights)
    place = (2 * count - 1) % RING
    mbarrier.wait(full.index(place), (2 * count - 1) // RING & 1)
    total = warpgroup_mma(p16, buffers.index(place).reshape([KEYS, DIM]), total)
    total = total / gl.convert_layout(weight, gl.SliceLayout(1, totals))[:, None]
    gl.store(out + offset, gl.convert_layout(total.to(dtype), memory), mask=inside)


@gluon.jit
def _parts(before, tokens, first, count, window, WINDOWED: gl.constexpr, KEYS: gl.constexpr):
    """The steps from which on all rows see all keys, and until which they do; the last step isn't one of them."""
    unmasked = gl.maximum(gl.minimum((before + 1 - first) // KEYS, count - 1), 1)
    left = 1
    if WINDOWED:
        seen = (gl.maximum(before + tokens - window - first, 0) + KEYS - 1) // KEYS
        left = gl.maximum(gl.minimum(seen, count - 1), 1)
        unmasked = gl.maximum(unmasked, left)
    return left, unmasked


@gluon.jit
def flash_prefill_hopper_kernel(
    query,
    pages,
    planes,
    key_row,
    block_tables,
    tiles,
    out,
    scale,
    window,
    table_stride,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    program = gl.program_id(0)
    tile = tiles + (program // HEADS_KV) * 4
    head = program % HEADS_KV
    table = block_tables + gl.load(tile).to(gl.int64) * table_stride
    first_token = gl.load(tile + 1)
    tokens = gl.load(tile + 2)
    before = gl.load(tile + 3)
    end = before + tokens
    lowest = 0
    if WINDOWED:
        lowest = gl.maximum(before - window + 1, 0) // KEYS * KEYS
    count = (end - lowest + KEYS - 1) // KEYS
    first = lowest - gl.maximum(2 - count, 0) * KEYS
    bounds = (first, lowest, gl.maximum(count, 2), end)
    key_plane = key_row // BLOCK_SIZE + head
    work = (first_token, tokens, before, head)

    buffers = gl.allocate_shared_memory(pages.dtype, [2 * STAGES, 1, KEYS, DIM], pages.layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, DIM], pages.dtype)
    q_buffers = gl.allocate_shared_memory(pages.dtype, [2, ROWS // 2, DIM], q_layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    query,
                    out,
                    work,
                    bounds,
                    scale,
                    window,
                    buffers,
                    q_buffers.index(0),
                    full,
                    empty,
                    turns,
                    0,
                    HEADS_KV,
                    GROUP,
                    WINDOWED,
                    STAGES,
                ),
            ),
            (
                _consume,
                (
                    query,
                    out,
                    work,
                    bounds,
                    scale,
                    window,
                    buffers,
                    q_buffers.index(1),
                    full,
                    empty,
                    turns,
                    1,
                    HEADS_KV,
                    GROUP,
                    WINDOWED,
                    STAGES,
                ),
            ),
            (
                _produce,
                (
                    pages,
                    table,
                    (planes, key_plane, key_plane + HEADS_KV),
                    bounds,
                    buffers,
                    full,
                    empty,
                    BLOCK_SIZE,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


PREFILL = GluonPrefill(flash_prefill_hopper_kernel, ROWS)


def flash_prefill_hopper(
    query: Tensor, kv: PagedKV, block_tables: Tensor, tiles: Tensor, window: int, out: Tensor
) -> Launch | None:
    """As `flash_prefill`, with tiles that `plan_tiles` gave for `ROWS // G` tokens.

    Raises:
        ValueError: a tensor has another shape, type or device than it should, or `PREFILL` doesn't take them.
    """
    return PREFILL.launch(
        (query, kv, block_tables, tiles, window, out),
        KEYS=KEYS,
        STAGES=STAGES,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
    )
