"""Mamba-2 (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060, section 6).

    S = exp(dt A) S + B (dt x)',  y = C' S + D x        for each token and head, S [N, P]

and for a chunk of Q tokens, with s the sums of dt A since its begin:

    Y = exp(s) (C S) + tril(C B' * exp(s_i - s_j)) (dt X) + D X
    S = exp(s_Q) S + B' (exp(s_Q - s) dt X)

    x        [T, H, P]
    b, c     [T, G, N], each for H / G heads
    dt       float32 [T, H], with softplus and bounds applied
    a, d     float32 [H]
    state    float32 [S, H, N, P]; slots are `slot_stride` numbers apart
    out      float32 [T, H, P]

Grid: (R, H, ceil(P / DIM)), in either form. Limit: for one token memory, 8 N P bytes of state a head; for a chunk
2 Q (N + P) + 4 N P FLOPs a token and head.
"""

import triton
import triton.language as tl

from kvrelay.kernels.triton.states.parts import load_rows, load_state, next_state, store_state

CHUNK = 64


@triton.jit
def ssd_kernel(
    x, b, c, dt, a, d, state, out, firsts, starts, slots,
    x_stride, b_stride, c_stride, slot_stride, heads, per_group, dim, size,
    SKIPS: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of more than one token."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(firsts + row)
    end = tl.load(firsts + row + 1)
    if end - first <= 1:
        return
    group = head // per_group
    column = tl.program_id(2) * DIM + tl.arange(0, DIM)
    token = tl.arange(0, CHUNK)
    inside = column < dim
    place = state + tl.load(slots + row) * slot_stride + head * size * dim
    s = load_state(place, starts + row, size, dim, column, SIZE, PART)
    rate = tl.load(a + head)
    b += group * size
    c += group * size
    # Addresses that are computed ahead of the loop would take registers that the state needs.
    for begin in tl.range(first, end, CHUNK, disable_licm=True):
        at = begin + token
        there = at < end
        step = tl.load(dt + at * heads + head, mask=there, other=0.0)
        sums = tl.cumsum(step * rate, 0)
        last = tl.sum(step * rate, 0)
        weights = tl.zeros((CHUNK, CHUNK), tl.float32)
        y = tl.zeros((CHUNK, DIM), tl.float32)
        for part in tl.static_range(SIZE // PART):
            of_b = load_rows(b, at, there, b_stride, part * PART, size, PART)
            of_c = load_rows(c, at, there, c_stride, part * PART, size, PART)
            weights = tl.dot(of_c, tl.trans(of_b), weights, input_precision=PRECISION)
            y = tl.dot(of_c.to(tl.float32), s[part], y, input_precision=PRECISION)
        visible = token[:, None] >= token[None]
        weights *= tl.exp(tl.where(visible, sums[:, None] - sums[None], float("-inf")))
        of_x = tl.load(
            x + at[:, None] * x_stride + head * dim + column[None], mask=there[:, None] & inside[None], other=0.0
        ).to(tl.float32)
        stepped = of_x * step[:, None]
        y = tl.dot(weights, stepped, y * tl.exp(sums)[:, None], input_precision=PRECISION)
        if SKIPS:
            y += of_x * tl.load(d + head)
        tl.store(out + (at[:, None] * heads + head) * dim + column[None], y, mask=there[:, None] & inside[None])
        later = stepped * tl.exp(last - sums)[:, None]
        s = next_state(s, b, at, there, b_stride, size, later, last, SIZE, PART, PRECISION)
    store_state(place, s, size, dim, column, SIZE, PART)


@triton.jit
def ssd_token_kernel(
    x, b, c, dt, a, d, state, out, firsts, starts, slots,
    x_stride, b_stride, c_stride, slot_stride, heads, per_group, dim, size,
    SKIPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Rows of one token."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(firsts + row)
    if tl.load(firsts + row + 1) - at != 1:
        return
    group = head // per_group
    column = tl.program_id(2) * DIM + tl.arange(0, DIM)
    number = tl.arange(0, SIZE)
    inside, used = column < dim, number < size
    place = state + tl.load(slots + row) * slot_stride + (head * size + number[:, None]) * dim + column[None]
    held = used[:, None] & inside[None]
    begun = tl.load(starts + row) + 0 * number > 0  # a vector, which Triton's interpreter can widen
    s = tl.load(place, mask=held & begun[:, None], other=0.0)
    step = tl.load(dt + at * heads + head)
    of_b = tl.load(b + at * b_stride + group * size + number, mask=used, other=0.0).to(tl.float32)
    of_c = tl.load(c + at * c_stride + group * size + number, mask=used, other=0.0).to(tl.float32)
    of_x = tl.load(x + at * x_stride + head * dim + column, mask=inside, other=0.0).to(tl.float32)
    s = s * tl.exp(step * tl.load(a + head)) + of_b[:, None] * (of_x * step)[None]
    y = tl.sum(s * of_c[:, None], 0)
    if SKIPS:
        y += of_x * tl.load(d + head)
    tl.store(out + (at * heads + head) * dim + column, y, mask=inside)
    tl.store(place, s, mask=held)
