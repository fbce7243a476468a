"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, arXiv:2412.06464, section 3.3).

    S = exp(g) S,  S = S + k (beta (v - S' k))',  o = S' q        for each token and head, S [K, D]

and for a chunk of Q tokens, with s the sums of g since its begin, and E[i, j] = exp(s_i - s_j):

    U = (1 + tril(beta K K' * E, -1))^-1 beta (V - exp(s) K S)
    O = exp(s) (Q S) + tril(Q K' * E) U
    S = exp(s_Q) S + K' (exp(s_Q - s) U)

The triangle is inverted row by row: its powers, which a product of fewer steps needs, overflow what float32 can tell
apart where keys repeat.

With CHANNELS, Kimi Delta Attention (arXiv:2510.26692, section 3): each channel of the key has a decay of its own, and
exp(s_i) exp(-s_j), which would let one product sum over the channels, may overflow. So a chunk is halved, and each half
again, until i and j are in different halves: the decay between them is that from j to the middle, times that from there
to i. Both are at most 1.

    q, k     [T, Hk, K], each for H / Hk heads, normalized and scaled here
    v, out   [T, H, D]
    g        float32 [T, H] or, with CHANNELS, [T, H, K] contiguous
    beta     float32 [T, H]
    pairs    float32 [T, H, 2, Q], with CHANNELS: K K' * E and Q K' * E of a token and those of its chunk up to it
    state    float32 [S, H, K, D]; slots are `slot_stride` numbers apart

Grid: (R, H, ceil(D / DIM)), in either form. Limit: for one token memory, 8 K D bytes of state a head; for a chunk
2 Q (2 K + 2 D) + 6 K D FLOPs a token and head. Pairs are computed first, in a grid (R, H, ceil(longest / Q)); limit:
4 Q K FLOPs a token and head for each time that a chunk is halved.
"""

import triton
import triton.language as tl

from kvrelay.kernels.triton.states.parts import load_rows, load_state, next_state, store_state

CHUNK = 16
HALVINGS = tl.constexpr(CHUNK.bit_length() - 1)
"""Times that a chunk can be halved."""
LEAST = tl.constexpr(1e-6)


@triton.jit
def channel_pairs_kernel(
    q, k, g, pairs, firsts, q_stride, k_stride, heads, shared, key_dim,
    CHUNK: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The pairs of one chunk; only those of queries with their own token's key are computed on the diagonal."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(firsts + row)
    end = tl.load(firsts + row + 1)
    begin = first + tl.program_id(2) * CHUNK
    if (end - first <= 1) | (begin >= end):
        return
    q += head // shared * key_dim
    k += head // shared * key_dim
    g += head * key_dim
    token = tl.arange(0, CHUNK)
    at = begin + token
    there = at < end
    i, j = token[:, None], token[None]
    of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_queries = tl.zeros((CHUNK, CHUNK), tl.float32)
    for channel in tl.range(0, key_dim, PART, disable_licm=True):
        of_q = load_rows(q, at, there, q_stride, channel, key_dim, PART).to(tl.float32)
        of_k = load_rows(k, at, there, k_stride, channel, key_dim, PART).to(tl.float32)
        rate = load_rows(g, at, there, heads * key_dim, channel, key_dim, PART)
        of_queries += tl.where(i == j, tl.sum(of_q * of_k, 1)[:, None], 0.0)
        for halving in tl.static_range(HALVINGS):
            # Each token's decay is that between it and the middle of its block of 2 << halving tokens.
            block = i >> (halving + 1)
            middle = (2 * block + 1) << halving
            second = i >= middle
            between = tl.where(second, (j >= middle) & (j <= i), (j > i) & (j < middle))
            decay = tl.exp(tl.dot(between.to(tl.float32), rate, input_precision="tf32x3"))
            keys = tl.trans(tl.where(second, 0.0, of_k * decay))
            own = block == j >> (halving + 1)
            later = tl.where(second, of_k * decay, 0.0)
            of_keys += tl.where(own, tl.dot(later, keys, input_precision=PRECISION), 0.0)
            later = tl.where(second, of_q * decay, 0.0)
            of_queries += tl.where(own, tl.dot(later, keys, input_precision=PRECISION), 0.0)
    place = pairs + 2 * CHUNK * (at * heads + head)[:, None] + j
    tl.store(place, of_keys, mask=there[:, None])
    tl.store(place + CHUNK, of_queries, mask=there[:, None])


@triton.jit
def _next_channel_state(
    s, k, g, at, there, k_stride, g_stride, size, later,
    KEYS: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`next_state` with a decay for each channel; `later` isn't decayed yet."""
    new = ()
    for part in tl.static_range(KEYS // PART):
        of_k = load_rows(k, at, there, k_stride, part * PART, size, PART).to(tl.float32)
        rate = load_rows(g, at, there, g_stride, part * PART, size, PART)
        last = tl.sum(rate, 0)
        of_k *= tl.exp(last[None] - tl.cumsum(rate, 0))
        new += (tl.dot(tl.trans(of_k), later, s[part] * tl.exp(last)[:, None], input_precision=PRECISION),)  # type: ignore[assignment]
    return new


@triton.jit
def delta_kernel(
    q, k, v, g, beta, pairs, state, out, firsts, starts, slots,
    q_stride, k_stride, v_stride, slot_stride, heads, shared, dim, key_dim, scaling,
    NORMALIZED: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of more than one token."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(firsts + row)
    end = tl.load(firsts + row + 1)
    if end - first <= 1:
        return
    key_head = head // shared
    column = tl.program_id(2) * DIM + tl.arange(0, DIM)
    token = tl.arange(0, CHUNK)
    inside = column < dim
    place = state + tl.load(slots + row) * slot_stride + head * key_dim * dim
    s = load_state(place, starts + row, key_dim, dim, column, KEYS, PART)
    q += key_head * key_dim
    k += key_head * key_dim
    if CHANNELS:
        g += head * key_dim
    earlier = token[:, None] > token[None]
    visible = token[:, None] >= token[None]
    # Addresses that are computed ahead of the loop would take registers that the state needs.
    for begin in tl.range(first, end, CHUNK, disable_licm=True):
        at = begin + token
        there = at < end
        # Channels decay in the pairs, and in what is multiplied with the state.
        rate = tl.zeros((CHUNK,), tl.float32) if CHANNELS else tl.load(g + at * heads + head, mask=there, other=0.0)
        strength = tl.load(beta + at * heads + head, mask=there, other=0.0)
        sums = tl.cumsum(rate, 0)
        last = tl.sum(rate, 0)
        decay = tl.exp(tl.where(visible, sums[:, None] - sums[None], float("-inf")))
        if CHANNELS:
            place_of_pairs = pairs + 2 * CHUNK * (at * heads + head)[:, None] + token[None]
            triangle = tl.load(place_of_pairs, mask=there[:, None], other=0.0)
            weights = tl.load(place_of_pairs + CHUNK, mask=there[:, None], other=0.0)
        else:
            triangle = tl.zeros((CHUNK, CHUNK), tl.float32)
            weights = tl.zeros((CHUNK, CHUNK), tl.float32)
        known = tl.zeros((CHUNK, DIM), tl.float32)
        o = tl.zeros((CHUNK, DIM), tl.float32)
        q_squares = tl.zeros((CHUNK,), tl.float32)
        k_squares = tl.zeros((CHUNK,), tl.float32)
        for part in tl.static_range(KEYS // PART):
            of_q = load_rows(q, at, there, q_stride, part * PART, key_dim, PART)
            of_k = load_rows(k, at, there, k_stride, part * PART, key_dim, PART)
            if not CHANNELS:
                triangle = tl.dot(of_k, tl.trans(of_k), triangle, input_precision=PRECISION)
                weights = tl.dot(of_q, tl.trans(of_k), weights, input_precision=PRECISION)
            of_q, of_k = of_q.to(tl.float32), of_k.to(tl.float32)
            q_squares += tl.sum(of_q * of_q, 1)
            k_squares += tl.sum(of_k * of_k, 1)
            if CHANNELS:
                rates = load_rows(g, at, there, heads * key_dim, part * PART, key_dim, PART)
                decays = tl.exp(tl.cumsum(rates, 0))
                of_q *= decays
                of_k *= decays
            known = tl.dot(of_k, s[part], known, input_precision=PRECISION)
            o = tl.dot(of_q, s[part], o, input_precision=PRECISION)
        # Queries and keys are scaled in the products, not before: so no thread keeps all parts of them.
        q_scale = tl.zeros((CHUNK,), tl.float32) + scaling
        k_scale = tl.zeros((CHUNK,), tl.float32) + 1
        if NORMALIZED:
            q_scale /= tl.sqrt(q_squares + LEAST)
            k_scale /= tl.sqrt(k_squares + LEAST)
        triangle *= decay * (k_scale * strength)[:, None] * k_scale[None]
        inverse = tl.where(earlier, -triangle, 0.0)
        for i in range(1, CHUNK):
            own = tl.sum(tl.where(token[:, None] == i, inverse, 0.0), 0)
            own += tl.sum(own[:, None] * inverse, 0)
            inverse = tl.where(token[:, None] == i, own[None], inverse)
        inverse += tl.where(token[:, None] == token[None], 1.0, 0.0)
        of_v = tl.load(
            v + at[:, None] * v_stride + head * dim + column[None], mask=there[:, None] & inside[None], other=0.0
        )
        wanted = of_v.to(tl.float32) - (tl.exp(sums) * k_scale)[:, None] * known
        u = tl.dot(inverse, wanted * strength[:, None], input_precision=PRECISION)
        weights *= decay * q_scale[:, None] * k_scale[None]
        o = tl.dot(weights, u, o * (tl.exp(sums) * q_scale)[:, None], input_precision=PRECISION)
        target = out + (at[:, None] * heads + head) * dim + column[None]
        tl.store(target, o.to(out.dtype.element_ty), mask=there[:, None] & inside[None])
        later = u * (tl.exp(last - sums) * k_scale)[:, None]
        if CHANNELS:
            s = _next_channel_state(
                s, k, g, at, there, k_stride, heads * key_dim, key_dim, later, KEYS, PART, PRECISION
            )
        else:
            s = next_state(s, k, at, there, k_stride, key_dim, later, last, KEYS, PART, PRECISION)
    store_state(place, s, key_dim, dim, column, KEYS, PART)


@triton.jit
def delta_token_kernel(
    q, k, v, g, beta, state, out, firsts, starts, slots,
    q_stride, k_stride, v_stride, slot_stride, heads, shared, dim, key_dim, scaling,
    NORMALIZED: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Rows of one token."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(firsts + row)
    if tl.load(firsts + row + 1) - at != 1:
        return
    key_head = head // shared
    column = tl.program_id(2) * DIM + tl.arange(0, DIM)
    number = tl.arange(0, KEYS)
    inside, used = column < dim, number < key_dim
    place = state + tl.load(slots + row) * slot_stride + (head * key_dim + number[:, None]) * dim + column[None]
    held = used[:, None] & inside[None]
    begun = tl.load(starts + row) + 0 * number > 0  # a vector, which Triton's interpreter can widen
    s = tl.load(place, mask=held & begun[:, None], other=0.0)
    of_q = tl.load(q + at * q_stride + key_head * key_dim + number, mask=used, other=0.0).to(tl.float32)
    of_k = tl.load(k + at * k_stride + key_head * key_dim + number, mask=used, other=0.0).to(tl.float32)
    if NORMALIZED:
        of_q = of_q / tl.sqrt(tl.sum(of_q * of_q, 0) + LEAST)
        of_k = of_k / tl.sqrt(tl.sum(of_k * of_k, 0) + LEAST)
    of_v = tl.load(v + at * v_stride + head * dim + column, mask=inside, other=0.0).to(tl.float32)
    if CHANNELS:
        s *= tl.exp(tl.load(g + (at * heads + head) * key_dim + number, mask=used, other=0.0))[:, None]
    else:
        s *= tl.exp(tl.load(g + at * heads + head))
    new = (of_v - tl.sum(s * of_k[:, None], 0)) * tl.load(beta + at * heads + head)
    s = s + of_k[:, None] * new[None]
    o = tl.sum(s * (of_q * scaling)[:, None], 0)
    tl.store(out + (at * heads + head) * dim + column, o.to(out.dtype.element_ty), mask=inside)
    tl.store(place, s, mask=held)
