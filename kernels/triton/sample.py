"""From logits to tokens on the device: temperature, top-k, top-p, min-p and the draw, without sorting.

    s[v]    = (logits[v] - max) / temperature
    kept    = the tokens that pass top-k, then top-p, then min-p (`reference.token_probabilities`)
    token   = argmax over kept v of exp(s[v]) / e[v],  e exponential noise, a function of (keys, v) only
            = argmax of the logits, the first of equal ones, where the temperature is 0
            = ops.NONFINITE where a logit is NaN, or the largest one is infinite

    logits       float32 [R, V] contiguous; those of banned tokens are overwritten
    temperature  float32 [R]; 0 is greedy
    top_k        int32 [R]; 0 keeps all
    top_p        float32 [R]; 1 keeps all
    min_p        float32 [R]; 0 keeps all
    keys         int32 [R, 2] of the noise
    banned       int32 [R, B] tokens that must not be chosen; -1 is none
    workspace    see `Workspace`
    tokens       int64 [R]

A row's vocabulary is cut into slices, each for a program of its own, and four kernels follow one another:

    1  slices: the largest logit, and its token
    2  slices: the race for the token (`race`) in rows without top-k and top-p; in the others the mass (the sum of
       exp(s)), and how many tokens are in each bin of s
    3  slices: in rows with top-k or top-p the bins tell which tokens are kept for sure, and which aren't for sure.
       The race of the former, their mass, and a list of the tokens in the bins between
    4  rows: the winner of the slices. With a list: the bound, the race of the listed tokens that are kept, and the
       winner of all

Each filter keeps all tokens with s above some bound, the smallest s that is kept. A bisection over the list finds it.
Each probe counts (or weighs) the tokens above the middle and notes the values next to it, so both ends are always
values of the list; they meet after about log2(list) probes, however the values are distributed. The bins only make the
list short. They are narrow: tokens of one bin differ in probability by a factor of e^(1/16) at most, so the tokens that
they leave open have some 6 % of the mass.

The race gives each token a time, exponential noise over its weight, and the first one wins: token v with probability
exp(s[v]) / sum(exp(s)), whoever runs in which program, and in which order. It is the Gumbel-max trick in the form of an
exponential race; the noise is that of `engine.sampling.noise`.

Kernels have nothing to do in greedy rows but for the first and the last, and end at once. The first three share a row
between programs, and read all of a slice before they use any of it; the last one has the list in registers.

Grid: (slices, R) three times, then (R,). Limit: memory: every logit must be read at least once.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Repeat, launch
from kvrelay.kernels.triton.overlap import begin_after_inputs, overlapping

SLICE = 8192
"""Number of tokens of a slice."""
LISTED = 4096
"""Number of listed tokens that the last kernel keeps in registers; of longer lists it reads the rest again at each
probe."""
WARPS = 16
NO_TOKEN = tl.constexpr(2147483647)
BINS = tl.constexpr(512)
"""Number of bins of s, the last one without a lower end."""
BINS_PER_UNIT = tl.constexpr(16.0)
"""Number of bins in one unit of s; a power of two, so that bins are exact."""
SLACK = tl.constexpr(1e-4)
"""Relative error that sums of float32 may have."""


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
        """Choices for `rows` rows, all greedy, with up to `banned` banned tokens each."""
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


class Workspace(NamedTuple):
    """Memory in which the kernels leave results for one another, for R rows of S slices."""

    largest: Tensor
    """float32 [R, S]: the largest logit; NaN if any is."""
    first: Tensor
    """int32 [R, S]: its token, the first of equal ones."""
    mass: Tensor
    """float64 [R, S]."""
    sure: Tensor
    """int32 [R, S]: the number of tokens that are kept for sure."""
    sure_mass: Tensor
    """float64 [R, S]: their mass."""
    score: Tensor
    """float32 [R, S] of the race's winner; -1 if nobody ran."""
    winner: Tensor
    """int32 [R, S]."""
    length: Tensor
    """int32 [R, S] of the slice's list."""
    counts: Tensor
    """int32 [R, BINS] tokens."""
    listed: Tensor
    """int32 [R, V]: each slice's list, at the slice's place."""

    @staticmethod
    def columns(vocabulary: int) -> list[tuple[str, int, torch.dtype]]:
        """Name, values in a row, and type of each tensor."""
        slices = triton.cdiv(vocabulary, slice_of(vocabulary))
        of_slices = [torch.float32, torch.int32, torch.float64, torch.int32, torch.float64]
        of_slices += [torch.float32, torch.int32, torch.int32]
        return [
            *((name, slices, dtype) for name, dtype in zip(Workspace._fields, of_slices, strict=False)),
            ("counts", BINS.value, torch.int32),
            ("listed", vocabulary, torch.int32),
        ]

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device | str) -> "Workspace":
        """Memory for `rows` rows of so many tokens each."""
        return cls(*(torch.empty(rows, size, dtype=dtype, device=device) for _, size, dtype in cls.columns(vocabulary)))

    def rows(self, count: int) -> "Workspace":
        """Views of the first `count` rows."""
        return Workspace(*(tensor[:count] for tensor in self))


def slice_of(vocabulary: int) -> int:
    """The number of tokens of a slice, in a vocabulary of so many."""
    return min(SLICE, int(triton.next_power_of_2(vocabulary)))


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
    # Where u rounds to 1, w would be 0: 2^-24 is what it is for the largest u below.
    w = tl.maximum(1.0 - u, 5.9604644775390625e-08)
    exact = tl.log(w) * (u / tl.where(w == 1.0, 1.0, 1.0 - w))
    return tl.where(w == 1.0, u, -exact)


@triton.jit
def race(s, ids, bound, key_0, key_1):
    """The best score, and its token, of those `ids` whose s is `bound` or more; the first of equal ones."""
    score = tl.where(s >= bound, tl.exp(s) / _exponential(key_0, key_1, ids), -1.0)
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, ids, NO_TOKEN), 0)


@triton.jit
def better(best, token, other, other_token):
    """The better one of two results of `race`."""
    wins = (other > best) | ((other == best) & (other_token < token))
    return tl.where(wins, other, best), tl.where(wins, other_token, token)


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


@triton.jit
def _load_slice(logits, row, vocabulary, SLICE: tl.constexpr):
    """The logits of this program's slice, minus infinity past the end of the vocabulary, and their tokens."""
    ids = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    return tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=float("-inf")), ids


@triton.jit
def _largest(largest, row, SLICES: tl.constexpr, BLOCK_S: tl.constexpr):
    """The row's largest logit, and whether it and all others allow a choice."""
    index = tl.arange(0, BLOCK_S)
    value = tl.load(largest + row * SLICES + index, mask=index < SLICES, other=float("-inf"))
    nan = tl.max((value != value).to(tl.int32), 0) > 0
    most = tl.max(tl.where(value == value, value, float("-inf")), 0)
    return most, (most > float("-inf")) & (most < float("inf")) & (nan == 0)


@triton.jit
def _sum_slices(column, row, SLICES: tl.constexpr, BLOCK_S: tl.constexpr):
    index = tl.arange(0, BLOCK_S)
    return tl.sum(tl.load(column + row * SLICES + index, mask=index < SLICES, other=0.0), 0)


@triton.jit
def _filters(choices, row, vocabulary):
    """top_k, 0 if it keeps all; top_p; the smallest s that min-p keeps."""
    top_k, top_p, min_p = tl.load(choices.top_k + row), tl.load(choices.top_p + row), tl.load(choices.min_p + row)
    least = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-37)), -3.0e38)
    return tl.where(top_k < vocabulary, top_k, 0), top_p, least


@triton.jit
def _keys(choices, row):
    key_0, key_1 = tl.load(choices.keys + 2 * row), tl.load(choices.keys + 2 * row + 1)
    return key_0.to(tl.uint32, bitcast=True), key_1.to(tl.uint32, bitcast=True)


@triton.jit
def largest_kernel(
    logits,
    banned,
    workspace,
    vocabulary,
    BANNED: tl.constexpr,
    BANNED_BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    row, slices = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    if BANNED > 0:
        first = tl.program_id(0) * SLICE
        ban_index = tl.arange(0, BANNED_BLOCK)
        ban = tl.load(banned + row * BANNED + ban_index, mask=ban_index < BANNED, other=-1)
        mine = (ban >= first) & (ban < tl.minimum(first + SLICE, vocabulary))
        tl.store(logits + row * vocabulary + ban, float("-inf"), mask=mine)
        tl.debug_barrier()
    value, ids = _load_slice(logits, row, vocabulary, SLICE)
    largest = tl.max(value, 0)
    first_token = tl.min(tl.where(value == largest, ids, NO_TOKEN), 0)
    nan = tl.max((value != value).to(tl.int32), 0) > 0
    place = row * slices + tl.program_id(0)
    tl.store(workspace.largest + place, tl.where(nan, float("nan"), largest))
    tl.store(workspace.first + place, first_token)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        tl.store(workspace.counts + row * BINS + bins, tl.zeros((BINS,), tl.int32))


@triton.jit
def weigh_kernel(
    logits,
    choices,
    workspace,
    vocabulary,
    SLICE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(choices.temperature + row)
    if temperature <= 0.0:
        return
    value, ids = _load_slice(logits, row, vocabulary, SLICE)
    largest, finite = _largest(workspace.largest, row, SLICES, BLOCK_S)
    if finite == 0:
        return
    s = (value - largest) / temperature
    top_k, top_p, least = _filters(choices, row, vocabulary)
    place = row * SLICES + tl.program_id(0)
    if (top_k > 0) | (top_p < 1.0):
        tl.store(workspace.mass + place, tl.sum(tl.exp(s).to(tl.float64), 0))
        counts = tl.histogram(bin_of(s), BINS, mask=s > -3.0e38)
        bins = tl.arange(0, BINS)
        tl.atomic_add(workspace.counts + row * BINS + bins, counts, mask=counts > 0, sem="relaxed")
    else:
        key_0, key_1 = _keys(choices, row)
        score, winner = race(s, ids, least, key_0, key_1)
        tl.store(workspace.score + place, score)
        tl.store(workspace.winner + place, winner)


@triton.jit
def list_kernel(
    logits,
    choices,
    workspace,
    vocabulary,
    SLICE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    top_k, top_p, least = _filters(choices, row, vocabulary)
    temperature = tl.load(choices.temperature + row)
    if (temperature <= 0.0) | ((top_k == 0) & (top_p >= 1.0)):
        return
    value, ids = _load_slice(logits, row, vocabulary, SLICE)
    counts = tl.load(workspace.counts + row * BINS + tl.arange(0, BINS))
    largest, finite = _largest(workspace.largest, row, SLICES, BLOCK_S)
    if finite == 0:
        return
    mass = _sum_slices(workspace.mass, row, SLICES, BLOCK_S)
    first, last = open_bins(counts, top_k, top_p, mass.to(tl.float32))
    s = (value - largest) / temperature
    bin = bin_of(s)
    counted = s > -3.0e38
    sure = counted & (bin < first)
    listed = counted & (bin >= first) & (bin <= last)
    place = row * SLICES + tl.program_id(0)
    tl.store(workspace.sure + place, tl.sum(sure.to(tl.int32), 0))
    tl.store(workspace.sure_mass + place, tl.sum(tl.where(sure, tl.exp(s), 0.0).to(tl.float64), 0))
    key_0, key_1 = _keys(choices, row)
    score, winner = race(tl.where(sure, s, float("-inf")), ids, least, key_0, key_1)
    tl.store(workspace.score + place, score)
    tl.store(workspace.winner + place, winner)
    entry = tl.cumsum(listed.to(tl.int32), 0)
    tl.store(workspace.listed + row * vocabulary + tl.program_id(0) * SLICE + entry - 1, ids, mask=listed)
    tl.store(workspace.length + place, tl.max(entry, 0))


@triton.jit
def choose_kernel(
    logits,
    choices,
    workspace,
    tokens,
    vocabulary,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EACH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_S)
    place, present = row * SLICES + index, index < SLICES
    largest, finite = _largest(workspace.largest, row, SLICES, BLOCK_S)
    largests = tl.load(workspace.largest + place, mask=present, other=float("-inf"))
    token = tl.min(tl.where(largests == largest, tl.load(workspace.first + place, mask=present, other=0), NO_TOKEN), 0)
    temperature = tl.load(choices.temperature + row)
    if finite & (temperature > 0.0):
        scores = tl.load(workspace.score + place, mask=present, other=-1.0)
        score = tl.max(scores, 0)
        winners = tl.load(workspace.winner + place, mask=present, other=NO_TOKEN)
        token = tl.min(tl.where(scores == score, winners, NO_TOKEN), 0)
        top_k, top_p, least = _filters(choices, row, vocabulary)
        if (top_k > 0) | (top_p < 1.0):
            length = workspace.length + row * SLICES
            lists = (
                logits + row * vocabulary,
                workspace.listed + row * vocabulary,
                length,
                largest,
                temperature,
                SLICES,
            )
            longest = tl.max(tl.load(length + index, mask=present, other=0), 0)
            parts = (longest + EACH - 1) // EACH
            s, ids = load_listed(lists, 0, SLICE, EACH, BLOCK_S * EACH)
            bound = tl.min(tl.where(s == float("-inf"), 0.0, s), 0)
            for part in range(1, parts):
                more, _ = load_listed(lists, part, SLICE, EACH, BLOCK_S * EACH)
                bound = tl.minimum(bound, tl.min(tl.where(more == float("-inf"), 0.0, more), 0))
            sure_mass = _sum_slices(workspace.sure_mass, row, SLICES, BLOCK_S)
            mass = _sum_slices(workspace.mass, row, SLICES, BLOCK_S)
            if top_k > 0:
                sure = _sum_slices(workspace.sure, row, SLICES, BLOCK_S).to(tl.float64)
                budget = top_k.to(tl.float64)
                bound = smallest_kept(s, lists, parts, bound, sure, budget, False, SLICE, EACH)
                mass = sure_mass + tl.sum(tl.where(s >= bound, tl.exp(s), 0.0).to(tl.float64), 0)
                for part in range(1, parts):
                    more, _ = load_listed(lists, part, SLICE, EACH, BLOCK_S * EACH)
                    mass += tl.sum(tl.where(more >= bound, tl.exp(more), 0.0).to(tl.float64), 0)
            if top_p < 1.0:
                budget = top_p.to(tl.float64) * mass
                bound = smallest_kept(s, lists, parts, bound, sure_mass, budget, True, SLICE, EACH)
            bound = tl.maximum(bound, least)
            key_0, key_1 = _keys(choices, row)
            for part in range(parts):
                s, ids = load_listed(lists, part, SLICE, EACH, BLOCK_S * EACH)
                other, other_token = race(s, ids, bound, key_0, key_1)
                score, token = better(score, token, other, other_token)
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))


class Sampler:
    """Chooses tokens, with choices and a workspace at fixed addresses; but for the first, a call repeats launches."""

    def __init__(self, choices: Choices, workspace: Workspace) -> None:
        """Both for R rows at most, the workspace for V tokens."""
        self._choices = choices
        self._workspace = workspace
        self._most = min(len(choices.temperature), len(workspace.largest))
        self._known: tuple[Repeat, ...] = ()

    def __call__(self, logits: Tensor, tokens: Tensor) -> None:
        """Writes a token for each row of `logits` [N, V] into `tokens` [N], N at most R.

        Raises:
            ValueError: a tensor has another shape, type or device than it should.
        """
        rows = len(logits)
        typed = logits.dtype == torch.float32 and tokens.dtype == torch.int64 and logits.is_contiguous()
        same = typed and logits.shape[1:] == self._workspace.listed.shape[1:] and tokens.shape == (rows,)
        if not self._known or not same or rows > self._most:
            _check(logits, self._choices.first(rows), self._workspace.rows(rows), tokens)
        if not rows:
            return
        if not self._known:
            self._known = _launch(logits, self._choices, self._workspace, tokens)
            return
        largest, weigh, fill, choose = self._known
        grid = triton.cdiv(logits.shape[1], slice_of(logits.shape[1])), rows, 1
        largest(grid, logits)
        weigh(grid, logits)
        fill(grid, logits)
        choose((rows, 1, 1), logits, tokens)


def sample(logits: Tensor, choices: Choices, workspace: Workspace, tokens: Tensor) -> None:
    """One call of `Sampler`."""
    Sampler(choices, workspace)(logits, tokens)


def _check(logits: Tensor, choices: Choices, workspace: Workspace, tokens: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous() or not logits.shape[1]:
        raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}; allowed: contiguous float32 [R, V]")
    rows, vocabulary = logits.shape
    for name, column in choices._asdict().items():
        wide = {"keys": (rows, 2), "banned": (rows, choices.banned.shape[-1])}
        dtype = torch.int32 if name in ("top_k", "keys", "banned") else torch.float32
        check_tensor(name, column, wide.get(name, (rows,)), logits, dtype)
    for name, shape, dtype in Workspace.columns(vocabulary):
        check_tensor(f"workspace.{name}", getattr(workspace, name), (rows, shape), logits, dtype)
    check_tensor("tokens", tokens, (rows,), logits, torch.int64)


def _launch(logits: Tensor, choices: Choices, workspace: Workspace, tokens: Tensor) -> tuple[Repeat, ...]:
    rows, vocabulary = logits.shape
    banned, block = choices.banned.shape[1], slice_of(vocabulary)
    slices = triton.cdiv(vocabulary, block)
    grid, block_s = (slices, rows, 1), triton.next_power_of_2(slices)
    common: dict[str, Any] = {"num_warps": WARPS, **overlapping()}
    largest = launch(
        largest_kernel,
        grid,
        logits,
        choices.banned,
        workspace,
        vocabulary,
        BANNED=banned,
        BANNED_BLOCK=triton.next_power_of_2(max(banned, 1)),
        SLICE=block,
        **common,
    )
    sizes = {"SLICE": block, "SLICES": slices, "BLOCK_S": block_s, **common}
    weigh = launch(weigh_kernel, grid, logits, choices, workspace, vocabulary, **sizes)
    fill = launch(list_kernel, grid, logits, choices, workspace, vocabulary, **sizes)
    each = max(1, LISTED // block_s)
    choose = launch(choose_kernel, (rows, 1, 1), logits, choices, workspace, tokens, vocabulary, **sizes, EACH=each)
    return (*(made.repeating("logits") for made in (largest, weigh, fill)), choose.repeating("logits", "tokens"))
