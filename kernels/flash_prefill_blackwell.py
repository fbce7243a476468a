"""`flash_prefill` for Blackwell (sm_100): one warp loads, one multiplies, two warpgroups weigh.

It computes what `flash_prefill` defines, for a pool of the query's type, heads of 64 or 128, and pages of a multiple of
64 slots. The 256 query rows of a tile are two halves of 128, each of which has a warpgroup. Scores and weighted sums
of both are in tensor memory; the weights of a step replace its scores there.

    load       brings the keys and values of a step through the Tensor Memory Accelerator into a ring of buffers
    multiply   issues, in this order, the scores of both halves for step 0, and then for each step i:
               values of step i for half 0, scores of step i + 1 for half 0, the same two for half 1
    weigh      of each half: scores out of tensor memory, softmax, weights back into it

So the tensor cores multiply for one half while the exponentials of the other are computed. Each product ends with an
arrival at a barrier: scores are there, the sum is up to date, a buffer has been read. Products run in the order in
which they are issued, so scores may overwrite the weights that the product before them reads.

The sum of the values must be rescaled when a row's largest score grows. A row keeps its old one until the new one is
greater by SLACK, which scales its weights by at most 2 ** SLACK; then hardly any step rescales, and one in which no
row does so leaves the sum where it is. Whether it is rescaled changes no bit of the rows that keep their largest score.

A step has KEYS keys, which lie in boxes of 64 slots, each in one page. The box with a tile's last key ends at that key,
and boxes behind it are empty, as slots that nobody has written may hold anything. Such a box begins as many slots
before its place as it is short of; the copy engine fills what lies outside of the page with zeros, and the mask hides
the keys that other boxes have.

Grid: as `flash_prefill`. Limit: arithmetic of the tensor cores, and the exponentials, which take as long.
Source: Shah et al.: FlashAttention-3, arXiv:2407.08608; its successor for Blackwell for the order of the products and
for the slack (github.com/Dao-AILab/flash-attention).
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_mma,
    tensor_memory_descriptor,
)

from kvrelay.kernels.gluon_prefill import GluonPrefill, async_load
from kvrelay.kernels.triton.launch import Launch
from kvrelay.kernels.triton.paged import PagedKV

NEEDED = tensor_memory_descriptor.get_reg_layout
"""Versions of Triton that lack it fail here, when they import the kernel, and not when they compile it."""

ROWS = 256
"""Query rows of a tile, of both halves."""
KEYS = 128
"""Keys of a step."""
BOX_DIM = 64
"""Dimensions of a box: 128 bytes, the widest that the copy engine stores as tensor cores read it."""
SLACK = gl.constexpr(8.0)
"""Powers of 2 by which a score may be greater than what is taken for a row's largest."""
LOAD_REGISTERS, MULTIPLY_REGISTERS, WEIGH_REGISTERS = 24, 24, 224
"""Registers of a thread. Three warpgroups, of which the two warps that load and multiply are one, share 65,536."""


@gluon.jit
def _tile_of(tiles, HEADS_KV: gl.constexpr):
    """The program's entry in the work list, and its KV head."""
    program = gl.program_id(0)
    return tiles + (program // HEADS_KV) * 4, program % HEADS_KV


@gluon.jit
def _bounds(tile, window, WINDOWED: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr):
    """First key of a tile, a multiple of BOX, number of its steps, and the key behind its last one."""
    before = gl.load(tile + 3)
    end = before + gl.load(tile + 2)
    lowest = 0
    if WINDOWED:
        lowest = gl.maximum(before - window + 1, 0) // BOX * BOX
    return lowest, (end - lowest + KEYS - 1) // KEYS, end


@gluon.jit
def _load(
    pages,
    planes,
    key_row,
    block_tables,
    table_stride,
    tiles,
    window,
    ring,
    HEADS_KV: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """Loads the keys and values of all steps, in their order."""
    buffers, full, empty = ring
    tile, head = _tile_of(tiles, HEADS_KV)
    table = block_tables + gl.load(tile).to(gl.int64) * table_stride
    key_plane = key_row // BLOCK_SIZE + head
    lowest, count, end = _bounds(tile, window, WINDOWED, pages.block_type.shape[1], buffers.shape[1])
    KEYS: gl.constexpr = buffers.shape[1]
    BOX: gl.constexpr = pages.block_type.shape[1]
    BOX_DIM: gl.constexpr = pages.block_type.shape[2]
    BOXES: gl.constexpr = KEYS // BOX
    COLUMNS: gl.constexpr = buffers.shape[2] // BOX_DIM
    RING: gl.constexpr = buffers.shape[0]
    # Tensor cores read a matrix in columns of 128 bytes, one after another.
    boxes = buffers.reinterpret(buffers.dtype, [RING * COLUMNS * BOXES, 1, BOX, BOX_DIM], pages.layout)
    for i in range(count):
        for kind in gl.static_range(2):
            item = 2 * i + kind
            place = item % RING
            mbarrier.wait(empty.index(place), (item // RING & 1) ^ 1)
            mbarrier.expect(full.index(place), BOXES * COLUMNS * pages.block_type.nbytes)
            for box in gl.static_range(BOXES):
                key = lowest + i * KEYS + box * BOX
                # Boxes behind the last key lie outside of any page.
                last = gl.minimum(key, end - 1)
                page = gl.load(table + last // BLOCK_SIZE) * planes + key_plane + kind * HEADS_KV
                slot = gl.where(key < end, key % BLOCK_SIZE - gl.maximum(key + BOX - end, 0), -BOX)
                for column in gl.static_range(COLUMNS):
                    target = boxes.index((place * COLUMNS + column) * BOXES + box)
                    async_load(pages, [page, slot, column * BOX_DIM], full.index(place), target)


@gluon.jit
def _weights_of(scores, dtype: gl.constexpr):
    """The place of the weights: the first half of the columns of the scores."""
    rows: gl.constexpr = scores.shape[0]
    keys: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = TensorMemoryLayout([rows, keys], col_stride=1)
    return scores.reinterpret(dtype, [rows, 2 * keys], layout).slice(0, keys)


@gluon.jit
def _multiply(
    tiles,
    window,
    ring,
    memory,
    signals,
    HEADS_KV: gl.constexpr,
    WINDOWED: gl.constexpr,
    BOX: gl.constexpr,
):
    """Issues the products of both halves."""
    buffers, full, empty = ring
    queries, scores, totals = memory
    queries_full, scores_full, weights_full, totals_full = signals
    RING: gl.constexpr = buffers.shape[0]
    tile, _ = _tile_of(tiles, HEADS_KV)
    _, count, _ = _bounds(tile, window, WINDOWED, BOX, buffers.shape[1])
    mbarrier.wait(queries_full.index(0), 0)
    mbarrier.wait(queries_full.index(1), 0)
    mbarrier.wait(full.index(0), 0)
    keys = buffers.index(0).permute([1, 0])
    tcgen05_mma(queries.index(0), keys, scores.index(0), use_acc=False, mbarriers=[scores_full.index(0)])
    done = [scores_full.index(1), empty.index(0)]
    tcgen05_mma(queries.index(1), keys, scores.index(1), use_acc=False, mbarriers=done)
    for i in range(count):
        item = 2 * i + 1
        place, ahead = item % RING, (item + 1) % RING
        values = buffers.index(place)
        keys = buffers.index(ahead).permute([1, 0])
        mbarrier.wait(full.index(place), item // RING & 1)
        for half in gl.static_range(2):
            mbarrier.wait(weights_full.index(half), i & 1)
            weights = _weights_of(scores.index(half), buffers.dtype)
            done = [totals_full.index(half)]
            if half == 1:
                done = [totals_full.index(half), empty.index(place)]
            tcgen05_mma(weights, values, totals.index(half), use_acc=i > 0, mbarriers=done)
            if i + 1 < count:
                if half == 0:
                    mbarrier.wait(full.index(ahead), (item + 1) // RING & 1)
                done = [scores_full.index(half)]
                if half == 1:
                    done = [scores_full.index(half), empty.index(ahead)]
                tcgen05_mma(queries.index(half), keys, scores.index(half), use_acc=False, mbarriers=done)


@gluon.jit
def _mask(s, position, key, end, window, WINDOWED: gl.constexpr, BOX: gl.constexpr):
    """Scores of keys that a row doesn't see become -inf.

    Args:
        key: of the first column, if the step's boxes all lie in their places.
    """
    column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    # The keys before a box are another's; only in the box with the last key there are any.
    start = key + column // BOX * BOX
    n = key + column - gl.where(start < end, gl.maximum(start + BOX - end, 0), 0)
    seen = (n[None, :] <= position[:, None]) & (n >= start)[None, :]
    if WINDOWED:
        seen = seen & (n[None, :] > position[:, None] - window)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _weigh(
    query,
    out,
    tiles,
    scale,
    window,
    memory,
    signals,
    HALF: gl.constexpr,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
    BOX: gl.constexpr,
):
    """Computes the softmax of one half of the tile's rows, and writes their result."""
    queries, scores, totals = memory
    queries_full, scores_full, weights_full, totals_full = signals
    ROWS: gl.constexpr = queries.shape[1]
    DIM: gl.constexpr = queries.shape[2]
    KEYS: gl.constexpr = scores.shape[2]
    dtype: gl.constexpr = queries.dtype
    tile, head = _tile_of(tiles, HEADS_KV)
    before = gl.load(tile + 3)
    lowest, count, end = _bounds(tile, window, WINDOWED, BOX, KEYS)

    # A thread has a row: nothing is exchanged, and little is kept of where the row is.
    runs: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    place, inside = _rows_of(tile, head, gl.SliceLayout(1, runs), HALF, ROWS, HEADS_KV, GROUP)
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, runs))
    q = gl.load(query + place[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
    queries.index(HALF).store(q)
    fence_async_shared()
    mbarrier.arrive(queries_full.index(HALF), count=1)

    s_memory = scores.index(HALF)
    p_memory = _weights_of(s_memory, dtype)
    layout: gl.constexpr = s_memory.get_reg_layout(num_warps=4)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    position = before + (HALF * ROWS + gl.arange(0, ROWS, layout=row)) // GROUP
    largest = gl.full([ROWS], -1.0e30, gl.float32, layout=row)
    weight = gl.zeros([ROWS], gl.float32, layout=row)
    # From `left` on, all rows see all keys of a step, and before `unmasked` they do.
    left = 0
    unmasked = (before + 1 - lowest) // KEYS
    if WINDOWED:
        left = gl.minimum((gl.maximum(end - window - lowest, 0) + KEYS - 1) // KEYS, count)
        unmasked = gl.maximum(unmasked, left)
    edges = (0, left, unmasked, count)
    for part in gl.static_range(0 if WINDOWED else 1, 3):
        for i in range(edges[part], edges[part + 1]):
            mbarrier.wait(scores_full.index(HALF), i & 1)
            s = s_memory.load(layout)
            if part != 1:
                s = _mask(s, position, lowest + i * KEYS, end, window, WINDOWED, BOX)
            top = gl.max(s, 1) * scale
            grown = top > largest + SLACK
            new_largest = gl.where(grown, top, largest)
            rescale = gl.exp2(largest - new_largest)
            p = gl.exp2(s * scale - new_largest[:, None])
            p_memory.store(p.to(dtype))
            weight = weight * rescale + gl.sum(p, 1)
            largest = new_largest
            # These scores were issued behind the values of the step before, so the sum has those.
            if i > 0:  # noqa: SIM102 - `and` would be computed for the first step, too
                if gl.max(grown.to(gl.int32), 0) > 0:
                    _rescale(totals.index(HALF), rescale)
            mbarrier.arrive(weights_full.index(HALF), count=1)
    mbarrier.wait(totals_full.index(HALF), (count - 1) & 1)
    PART: gl.constexpr = DIM // 4
    for part in gl.static_range(4):
        total = totals.index(HALF).slice(part * PART, PART).load()
        total = total / gl.convert_layout(weight, gl.SliceLayout(1, total.type.layout))[:, None]
        place, inside = _rows_of(tile, head, gl.SliceLayout(1, total.type.layout), HALF, ROWS, HEADS_KV, GROUP)
        d = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, total.type.layout))
        gl.store(out + place[:, None] * DIM + d[None, :], total.to(dtype), mask=inside[:, None])


@gluon.jit
def _rows_of(
    tile,
    head,
    layout: gl.constexpr,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Where the rows of a half of the tile are in [T * H, D], and whether the tile has them."""
    m = HALF * ROWS + gl.arange(0, ROWS, layout=layout)
    token = m // GROUP
    row = (gl.load(tile + 1) + token).to(gl.int64) * (HEADS_KV * GROUP) + (head - token) * GROUP + m
    return row, token < gl.load(tile + 2)


@gluon.jit
def _rescale(total, rescale):
    """Multiplies each row of the sum, a quarter of the columns at a time."""
    PART: gl.constexpr = total.shape[1] // 4
    for part in gl.static_range(4):
        columns = total.slice(part * PART, PART)
        values = columns.load()
        columns.store(values * gl.convert_layout(rescale, gl.SliceLayout(1, values.type.layout))[:, None])


@gluon.jit
def flash_prefill_blackwell_kernel(
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
    RING: gl.constexpr,
    WEIGH_REGISTERS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    BOX: gl.constexpr = pages.block_type.shape[1]
    HALF_ROWS: gl.constexpr = ROWS // 2
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], pages.dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_ROWS, DIM], pages.dtype)
    buffers = gl.allocate_shared_memory(pages.dtype, [RING, KEYS, DIM], k_layout)
    queries = gl.allocate_shared_memory(pages.dtype, [2, HALF_ROWS, DIM], q_layout)
    scores = allocate_tensor_memory(gl.float32, [2, HALF_ROWS, KEYS], TensorMemoryLayout([HALF_ROWS, KEYS], 1))
    totals = allocate_tensor_memory(gl.float32, [2, HALF_ROWS, DIM], TensorMemoryLayout([HALF_ROWS, DIM], 1))
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    queries_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    scores_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    totals_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(queries_full.index(i), count=1)
        mbarrier.init(scores_full.index(i), count=1)
        mbarrier.init(weights_full.index(i), count=1)
        mbarrier.init(totals_full.index(i), count=1)
    fence_async_shared()
    ring = (buffers, full, empty)
    memory = (queries, scores, totals)
    signals = (queries_full, scores_full, weights_full, totals_full)
    gl.warp_specialize(
        [
            (
                _weigh,
                (query, out, tiles, scale, window, memory, signals, 0, HEADS_KV, GROUP, WINDOWED, BOX),
            ),
            (
                _weigh,
                (query, out, tiles, scale, window, memory, signals, 1, HEADS_KV, GROUP, WINDOWED, BOX),
            ),
            (_multiply, (tiles, window, ring, memory, signals, HEADS_KV, WINDOWED, BOX)),
            (
                _load,
                (
                    pages,
                    planes,
                    key_row,
                    block_tables,
                    table_stride,
                    tiles,
                    window,
                    ring,
                    HEADS_KV,
                    BLOCK_SIZE,
                    WINDOWED,
                ),
            ),
        ],
        [4, 1, 1],
        [WEIGH_REGISTERS, MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def buffers_of(dim: int) -> int:
    """Buffers of keys or values of a step: 128 KiB."""
    return 4 * 128 // dim


PREFILL = GluonPrefill(flash_prefill_blackwell_kernel, ROWS, BOX_DIM)


def flash_prefill_blackwell(
    query: Tensor, kv: PagedKV, block_tables: Tensor, tiles: Tensor, window: int, out: Tensor
) -> Launch | None:
    """As `flash_prefill`, with tiles that `plan_tiles` gave for `ROWS // G` tokens.

    Raises:
        ValueError: a tensor has another shape, type or device than it should, or `PREFILL` doesn't take them.
    """
    return PREFILL.launch(
        (query, kv, block_tables, tiles, window, out),
        KEYS=KEYS,
        RING=buffers_of(query.shape[-1]),
        WEIGH_REGISTERS=WEIGH_REGISTERS,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS,
        LOAD_REGISTERS=LOAD_REGISTERS,
    )
