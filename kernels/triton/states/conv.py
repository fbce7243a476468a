"""Short causal convolutions of channels, with the last inputs of each row as its state.

    out[t, c] = act(bias[c] + sum over k of weight[c, k] x[t - K + 1 + k, c])        act: silu or nothing
    state[c]  = the last K inputs of the row, of which those before it were in the state

    x, out   [T, C], numbers of a token contiguous; rows of tokens as in `kernels/states.py`
    weight   [C, K] contiguous
    state    [S, K, C], oldest first; slots are `slot_stride` numbers apart

Grid: (R, ceil(longest / TOKENS), ceil(C / CHANNELS)) for outputs, then (R, ceil(C / CHANNELS)) for states, which may be
written only when all programs of a row have read them. Limit: memory: 2 T C numbers; caches hold inputs for K reads.
"""

import triton
import triton.language as tl

TOKENS = 16
CHANNELS = 128


@triton.jit
def _input(x, x_stride, state, channels, at, column, inside, start, WIDTH: tl.constexpr):
    """Inputs [len(at), CHANNELS] at tokens `at` of a row, of which those below 0 are in the state."""
    own = tl.load(x + at[:, None] * x_stride + column[None], mask=(at >= 0)[:, None] & inside[None], other=0.0)
    held = (at < 0) & (start + 0 * at > 0)  # as vectors: Triton's interpreter can't widen a comparison of scalars
    before = tl.load(
        state + (WIDTH + at)[:, None] * channels + column[None], mask=held[:, None] & inside[None], other=0.0
    )
    return tl.where((at < 0)[:, None], before, own)


@triton.jit
def conv_kernel(
    x, weight, bias, state, out, firsts, starts, slots, x_stride, slot_stride, channels,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first = tl.load(firsts + row)
    length = tl.load(firsts + row + 1) - first
    if tl.program_id(1) * TOKENS >= length:
        return
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    column = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    start = tl.load(starts + row)
    own = state + tl.load(slots + row) * slot_stride
    source = x + first * x_stride
    sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for k in tl.static_range(WIDTH):
        at = tl.minimum(token, length - 1) - (WIDTH - 1 - k)
        numbers = _input(source, x_stride, own, channels, at, column, inside, start, WIDTH)
        factor = tl.load(weight + column * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
        sums += factor[None] * numbers.to(tl.float32)
    if BIASED:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None]
    if SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    target = out + (first + token)[:, None] * channels + column[None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(token < length)[:, None] & inside[None])


@triton.jit
def conv_state_kernel(
    x, state, firsts, starts, slots, x_stride, slot_stride, channels,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first = tl.load(firsts + row)
    length = tl.load(firsts + row + 1) - first
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    own = state + tl.load(slots + row) * slot_stride
    tap = tl.arange(0, PADDED).to(tl.int64)
    # Taps behind the last one read it again, and aren't stored.
    at = length - WIDTH + tl.minimum(tap, WIDTH - 1)
    start = tl.load(starts + row)
    numbers = _input(x + first * x_stride, x_stride, own, channels, at, column, inside, start, WIDTH)
    tl.debug_barrier()
    target = own + tap[:, None] * channels + column[None]
    tl.store(target, numbers.to(state.dtype.element_ty), mask=(tap < WIDTH)[:, None] & inside[None])
