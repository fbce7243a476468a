"""RWKV-4's recurrence of channels (Peng et al., arXiv:2305.13048, equations 16 to 18).

    y   = (num + exp(first + k) v) / (den + exp(first + k))
    num = exp(decay) num + exp(k) v,  den = exp(decay) den + exp(k)        relative to exp(most)

    k, v, out     [T, C]
    decay, first  float32 [C]
    state         float32 [S, 3, C] num, den, most; slots are `slot_stride` numbers apart

Grid: (R, ceil(C / CHANNELS)). A program goes through a row's tokens. Limit: memory: 3 T C numbers.
"""

import triton
import triton.language as tl

CHANNELS = 128
NOTHING = tl.constexpr(-1e38)


@triton.jit
def wkv_kernel(
    k, v, decay, first, state, out, firsts, starts, slots, k_stride, v_stride, slot_stride, channels,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin = tl.load(firsts + row)
    end = tl.load(firsts + row + 1)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    own = state + tl.load(slots + row) * slot_stride + column
    held = inside & (tl.load(starts + row) + 0 * column > 0)  # a vector, which Triton's interpreter can widen
    num = tl.load(own, mask=held, other=0.0)
    den = tl.load(own + channels, mask=held, other=0.0)
    most = tl.load(own + 2 * channels, mask=held, other=NOTHING)
    rate = tl.load(decay + column, mask=inside, other=0.0)
    bonus = tl.load(first + column, mask=inside, other=0.0)
    for at in range(begin, end):
        of_k = tl.load(k + at * k_stride + column, mask=inside, other=0.0).to(tl.float32)
        of_v = tl.load(v + at * v_stride + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(most, of_k + bonus)
        old, new = tl.exp(most - largest), tl.exp(of_k + bonus - largest)
        y = (old * num + new * of_v) / (old * den + new)
        tl.store(out + at * channels + column, y.to(out.dtype.element_ty), mask=inside)
        largest = tl.maximum(most + rate, of_k)
        old, new = tl.exp(most + rate - largest), tl.exp(of_k - largest)
        num = old * num + new * of_v
        den = old * den + new
        most = largest
    tl.store(own, num, mask=inside)
    tl.store(own + channels, den, mask=inside)
    tl.store(own + 2 * channels, most, mask=inside)
