"""How far top-k and top-p reach down in a row: first by bins of s, then exactly, by a list of a few bins' tokens.

See `sample`, whose kernels these functions are parts of; s is 0 for the largest logit, and less for the others.
"""

import triton
import triton.language as tl

BINS = tl.constexpr(512)
"""Number of bins of s, the last one without a lower end."""
BINS_PER_UNIT = tl.constexpr(16.0)
"""Number of bins in one unit of s; a power of two, so that bins are exact."""
SLACK = tl.constexpr(1e-4)
"""Relative error that sums of float32 may have."""


@triton.jit
def bin_of(s):
    return tl.minimum(-s * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def open_bins(counts, top_k, top_p, mass):
    """The first and the last bin of tokens for which the filters aren't decided by the bin alone.

    With top-k the last one is that of the k-th token, because the mass for top-p ends there.
    """
    bins = tl.arange(0, BINS)
    upto = tl.cumsum(counts, 0)
    first = tl.full((), BINS, tl.int32)
    last = tl.full((), BINS - 1, tl.int32)
    # Bounds of the mass up to each bin, inclusive, and before it.
    most = tl.cumsum(counts * tl.exp(bins * (-1.0 / BINS_PER_UNIT)), 0) * (1.0 + SLACK)
    each = tl.where(bins < BINS - 1, tl.exp((bins + 1) * (-1.0 / BINS_PER_UNIT)), 0.0)
    least = tl.cumsum(counts * each, 0) * (1.0 - SLACK)
    least_kept, most_kept = mass * (1.0 - SLACK), mass * (1.0 + SLACK)
    if top_k > 0:
        first = tl.sum((upto < top_k).to(tl.int32), 0)
        last = tl.minimum(first, BINS - 1)
        least_kept = tl.maximum(tl.max(tl.where(bins < first, least, 0.0), 0), 1.0 - SLACK)
        most_kept = tl.minimum(tl.max(tl.where(bins <= last, most, 0.0), 0), most_kept)
    if top_p < 1.0:
        first = tl.minimum(first, tl.sum((most < top_p * least_kept).to(tl.int32), 0))
        if top_k == 0:
            last = tl.minimum(tl.sum((least < top_p * most_kept).to(tl.int32), 0), BINS - 1)
    return first, last


@triton.jit
def load_listed(lists, part, SLICE: tl.constexpr, EACH: tl.constexpr, LISTED: tl.constexpr):
    """s and tokens of a part of the row's lists, EACH of every slice; s is minus infinity past their ends."""
    row_logits, listed, length, largest, temperature, slices = lists
    index = tl.arange(0, LISTED)
    of_slice, entry = index // EACH, index % EACH + part * EACH
    present = entry < tl.load(length + of_slice, mask=of_slice < slices, other=0)
    ids = tl.load(listed + of_slice * SLICE + entry, mask=present, other=0)
    s = (tl.load(row_logits + ids, mask=present, other=float("-inf")) - largest) / temperature
    return tl.where(present, s, float("-inf")), ids


@triton.jit
def _probe(s, middle, BY_MASS: tl.constexpr):
    """Number, or mass, of the s above `middle`, and the values next to it."""
    larger = s > middle
    each = tl.exp(s) if BY_MASS else tl.full(s.shape, 1.0, tl.float32)
    weight = tl.sum(tl.where(larger, each, 0.0).to(tl.float64), 0)
    return weight, tl.min(tl.where(larger, s, 0.0), 0), tl.max(tl.where(larger, float("-inf"), s), 0)


@triton.jit
def smallest_kept(s, lists, parts, low, before, budget, BY_MASS: tl.constexpr, SLICE: tl.constexpr, EACH: tl.constexpr):
    """The smallest listed s, not below its value `low`, that fewer than `budget` tokens (or less mass) exceed.

    Args:
        s: of the first part of the lists.
        before: number (or mass) of the tokens that aren't listed because their s is larger.

    Returns:
        0 if there is none.
    """
    high = low * 0.0
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle >= high, low, middle)
        weight, above, below = _probe(s, middle, BY_MASS)
        for part in range(1, parts):
            more, _ = load_listed(lists, part, SLICE, EACH, s.shape[0])
            other, other_above, other_below = _probe(more, middle, BY_MASS)
            weight += other
            above, below = tl.minimum(above, other_above), tl.maximum(below, other_below)
        kept = before + weight < budget
        high = tl.where(kept, below, high)
        low = tl.where(kept, low, above)
    return high
