"""From logits to tokens on the device: temperature, top-k, top-p, min-p and the draw, without sorting.

    s[v]    = (logits[v] - max) / temperature
    kept    = the tokens that pass top-k, then top-p, then min-p (`reference.token_probabilities`)
    token   = argmax over kept v of exp(s[v]) / e[v],  e exponential noise, a function of (keys, v) only
            = argmax of the logits, the first of equal ones, where the temperature is 0
            = NONFINITE where a logit is NaN, or the largest one is infinite

    logits       float32 [R, V] contiguous; those of banned tokens are overwritten
    temperature  float32 [R]; 0 is greedy
    top_k        int32 [R]; 0 keeps all
    top_p        float32 [R]; 1 keeps all
    min_p        float32 [R]; 0 keeps all
    keys         int32 [R, 2] of the noise
    banned       int32 [R, B] tokens that must not be chosen; -1 is none
    workspace      int32 [R, V]
    tokens       int64 [R]

Each filter keeps all tokens with s above some bound, so the kernel only has to find that bound: the smallest s that is
kept. Two passes over the row first reduce the vocabulary to a short list of candidates:

    1  the maximum, and the largest logit of each lane (BLOCK of them): at least k tokens are as large as the k-th
       largest lane, so a token below that isn't among the top k
    2  the mass (the sum of exp(s)), and the list of tokens above a floor: for top-k the lane of pass 1, for top-p
       log((1 - p) / V), because all tokens below it together have less than 1 - p of the mass

Then a bisection over the list finds the bound. Each probe counts (or weighs) the tokens above the middle and notes the
values next to it, so both ends are always values of the list; they meet after about log2(list) probes, however the
values are distributed.

Grid: (R,). Limit: memory, at the bandwidth of one multiprocessor: every logit must be read at least once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.checks import check_tensor

NONFINITE = -1
BLOCK = 1024
WARPS = 16
LANE_PROBES = 20
"""Halvings of the lanes' range; the remaining error adds only a few candidates."""


class Choices(NamedTuple):
    """How each row's token is chosen; tensors on the device, so that a captured graph reads new values."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    banned: Tensor

    @classmethod
    def empty(cls, rows: int, banned: int, device: torch.device | str) -> "Choices":
        """For `rows` rows, all greedy, with up to `banned` banned tokens each."""
        return cls(
            temperature=torch.zeros(rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(rows, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
            keys=torch.zeros(rows, 2, dtype=torch.int32, device=device),
            banned=torch.full((rows, banned), -1, dtype=torch.int32, device=device),
        )

    def first(self, rows: int) -> "Choices":
        """Views of the first `rows` rows."""
        return Choices(*(column[:rows] for column in self))

    def select(self, rows: Tensor) -> "Choices":
        """Copies of the rows with these indices, int64 [N]."""
        return Choices(*(column.index_select(0, rows) for column in self))


@triton.jit
def _exponential(key_0, key_1, token):
    """-log(1 - u) as `engine.sampling.noise.exponential` has it; uint32 arithmetic wraps."""
    x = (token.to(tl.uint32) ^ key_0) * 0x7FEB352D
    x ^= x >> 15
    x = (x + key_1) * 0x846CA68B
    x ^= x >> 16
    x *= 0x2C1B3C6D
    x ^= x >> 15
    u = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    # log1p(-u) from log: the quotient corrects the rounding error of 1 - u (Goldberg 1991, theorem 4).
    w = 1.0 - u
    exact = tl.log(tl.maximum(w, 1e-37)) * (u / tl.where(w == 1.0, 1.0, 1.0 - w))
    return tl.where(w == 1.0, u, -exact)


@triton.jit
def _race(best, token, s, ids, bound, key_0, key_1):
    """The best score and its token, of `token` with `best`, and of those `ids` [BLOCK] whose s is `bound` or more."""
    score = tl.where(s >= bound, tl.exp(s) / _exponential(key_0, key_1, ids), -1.0)
    most = tl.max(score, 0)
    # Token ids ascend, and the first of equal scores wins.
    winner = tl.min(tl.where(score == most, ids, 2147483647), 0)
    token = tl.where(most > best, winner, token)
    return tl.maximum(most, best), token


@triton.jit
def _load_candidates(row_logits, candidates, first, count, largest, temperature, BLOCK: tl.constexpr):
    """s and token ids of BLOCK entries of the list, from `first` on; s is minus infinity past the end of the list."""
    index = first + tl.arange(0, BLOCK)
    listed = index < count
    ids = tl.load(candidates + index, mask=listed, other=0)
    s = (tl.load(row_logits + ids, mask=listed, other=float("-inf")) - largest) / temperature
    return tl.where(listed, s, float("-inf")), ids


@triton.jit
def _smallest_kept(
    row_logits, candidates, count, largest, temperature, low, budget, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest s of the list, not below its value `low`, that fewer than `budget` tokens (or less mass) exceed."""
    high = low * 0.0
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle >= high, low, middle)
        weight = (budget * 0.0).to(tl.float64)
        above, below = high, low
        for first in range(0, count, BLOCK):
            s, _ = _load_candidates(row_logits, candidates, first, count, largest, temperature, BLOCK)
            larger = s > middle
            each = tl.exp(s) if BY_MASS else tl.full(s.shape, 1.0, tl.float32)
            weight += tl.sum(tl.where(larger, each, 0.0), 0)
            above = tl.minimum(above, tl.min(tl.where(larger, s, 0.0), 0))
            below = tl.maximum(below, tl.max(tl.where(larger, float("-inf"), s), 0))
        kept = weight < budget
        high = tl.where(kept, below, high)
        low = tl.where(kept, low, above)
    return high


@triton.jit
def _bound(row_logits, candidates, count, largest, temperature, mass, top_k, top_p, BLOCK: tl.constexpr):
    """The smallest s of the list that top-k and top-p keep; `mass` is that of all tokens."""
    low = 0.0
    for first in range(0, count, BLOCK):
        s, _ = _load_candidates(row_logits, candidates, first, count, largest, temperature, BLOCK)
        low = tl.minimum(low, tl.min(tl.where(s == float("-inf"), 0.0, s), 0))
    if top_k > 0:
        budget = top_k.to(tl.float64)
        low = _smallest_kept(row_logits, candidates, count, largest, temperature, low, budget, False, BLOCK)
        mass = mass * 0.0
        for first in range(0, count, BLOCK):
            s, _ = _load_candidates(row_logits, candidates, first, count, largest, temperature, BLOCK)
            mass += tl.sum(tl.where(s >= low, tl.exp(s), 0.0), 0)
    if top_p < 1.0:
        budget = top_p.to(tl.float64) * mass
        low = _smallest_kept(row_logits, candidates, count, largest, temperature, low, budget, True, BLOCK)
    return low


@triton.jit
def _lane_floor(lanes, wanted, PROBES: tl.constexpr):
    """The largest value that a few probes find which at least `wanted` lanes reach; the maximum of the lanes is 0."""
    floor = tl.min(lanes, 0)
    floor = tl.maximum(floor, -3.0e38)
    enough = tl.sum((lanes >= floor).to(tl.int32), 0) >= wanted
    floor = tl.where(enough, floor, -3.0e38)
    high = floor * 0.0
    for _ in range(PROBES):
        middle = floor + (high - floor) * 0.5
        reached = tl.sum((lanes >= middle).to(tl.int32), 0) >= wanted
        floor = tl.where(enough & reached, middle, floor)
        high = tl.where(reached, high, middle)
    return floor


@triton.jit
def sample_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,
    banned,
    workspace,
    tokens,
    vocabulary,
    BANNED: tl.constexpr,
    BANNED_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PROBES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits, candidates = logits + row * vocabulary, workspace + row * vocabulary
    if BANNED > 0:
        ban_index = tl.arange(0, BANNED_BLOCK)
        ban = tl.load(banned + row * BANNED + ban_index, mask=ban_index < BANNED, other=-1)
        tl.store(row_logits + ban, float("-inf"), mask=(ban >= 0) & (ban < vocabulary))
        tl.debug_barrier()

    lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = tl.zeros((BLOCK,), tl.int32)
    nan = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocabulary, BLOCK):
        index = first + tl.arange(0, BLOCK)
        value = tl.load(row_logits + index, mask=index < vocabulary, other=float("-inf"))
        nan |= (value != value).to(tl.int32)
        chosen = tl.where(value > lanes, index, chosen)
        lanes = tl.where(value > lanes, value, lanes)
    largest = tl.max(lanes, 0)
    token = tl.min(tl.where(lanes == largest, chosen, 2147483647), 0)
    finite = (tl.max(nan, 0) == 0) & (largest > float("-inf")) & (largest < float("inf"))
    temperature = tl.load(temperatures + row)
    if finite & (temperature > 0.0):
        key_0 = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
        key_1 = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        top_k = tl.where(top_k < vocabulary, top_k, 0)
        least = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-37)), -3.0e38)
        best = -1.0
        if (top_k > 0) | (top_p < 1.0):
            if top_k > 0:
                floor = _lane_floor((lanes - largest) / temperature, top_k, PROBES)
            else:
                # A little lower than necessary, because of rounding.
                floor = tl.maximum(tl.log(tl.maximum(1.0 - top_p, 1e-7) / vocabulary) - 1.0, least)
            mass = (largest * 0.0).to(tl.float64)
            count = token * 0
            for first in range(0, vocabulary, BLOCK):
                index = first + tl.arange(0, BLOCK)
                value = tl.load(row_logits + index, mask=index < vocabulary, other=float("-inf"))
                s = (value - largest) / temperature
                mass += tl.sum(tl.exp(s), 0)
                listed = (s >= floor) & (s > -3.0e38)
                entry = count + tl.cumsum(listed.to(tl.int32), 0) - 1
                tl.store(candidates + entry, index, mask=listed)
                count += tl.sum(listed.to(tl.int32), 0)
            tl.debug_barrier()
            bound = _bound(row_logits, candidates, count, largest, temperature, mass, top_k, top_p, BLOCK)
            bound = tl.maximum(bound, least)
            for first in range(0, count, BLOCK):
                s, ids = _load_candidates(row_logits, candidates, first, count, largest, temperature, BLOCK)
                best, token = _race(best, token, s, ids, bound, key_0, key_1)
        else:
            for first in range(0, vocabulary, BLOCK):
                index = first + tl.arange(0, BLOCK)
                value = tl.load(row_logits + index, mask=index < vocabulary, other=float("-inf"))
                best, token = _race(best, token, (value - largest) / temperature, index, least, key_0, key_1)
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))


def sample(logits: Tensor, choices: Choices, workspace: Tensor, tokens: Tensor) -> None:
    """Writes a token for each row of `logits` [R, V] into `tokens` [R].

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous() or not logits.shape[1]:
        raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}; allowed: contiguous float32 [R, V]")
    rows, vocabulary = logits.shape
    for name, column in choices._asdict().items():
        wide = {"keys": (rows, 2), "banned": (rows, choices.banned.shape[-1])}
        dtype = torch.int32 if name in ("top_k", "keys", "banned") else torch.float32
        check_tensor(name, column, wide.get(name, (rows,)), logits, dtype)
    check_tensor("workspace", workspace, (rows, vocabulary), logits, torch.int32)
    check_tensor("tokens", tokens, (rows,), logits, torch.int64)
    if rows:
        banned = choices.banned.shape[1]
        sample_kernel[(rows,)](
            logits,
            *choices,
            workspace,
            tokens,
            vocabulary,
            BANNED=banned,
            BANNED_BLOCK=triton.next_power_of_2(max(banned, 1)),
            BLOCK=BLOCK,
            PROBES=LANE_PROBES,
            num_warps=WARPS,
        )
