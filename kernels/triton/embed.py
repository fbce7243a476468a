"""The beginning of a step in one pass: its tokens, their embeddings, and the angles of their positions.

    token[t]   = tokens[t], or max(sampled[rows[t]], 0) where rows[t] >= 0
    hidden[t]    = table[token[t]] * scale
    angle[r, t]  = positions[t] * rotary[r, 0]                 (in float32)
    cos[r, t]    = rotary[r, 1] * cos(angle[r, t]), twice
    sin[r, t]    = -rotary[r, 1] * sin(angle[r, t]), then that without the sign

    tokens, rows, positions  int64 [T] contiguous
    sampled                  int64 [R], tokens that the step before has left on the device
    table                    [V, N] contiguous
    rotary                   float32 [R, 2, D / 2] contiguous
    hidden                   [T, N];  cos, sin  float32 [R, T, 1, D]

Grid: (T,). Limit: launch, then memory: T N numbers are read and written. Token ids aren't checked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.ops import Feeds
from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Repeat, launch

BLOCK = 2048
"""Number of columns that are copied at a time."""


@triton.jit
def embed_kernel(
    tokens,
    rows,
    sampled,
    positions,
    table,
    rotary,
    hidden,
    cos,
    sin,
    columns,
    half_dim,
    scale,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + place)
    if rows is not None:
        row = tl.load(rows + place)
        # A row with invalid logits has sampled no token. Its sequence has failed, so any token will do.
        fed = tl.maximum(tl.load(sampled + tl.maximum(row, 0)), 0)
        token = tl.where(row < 0, token, fed)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        values = tl.load(table + token * columns + column, mask=inside, other=0.0)
        scaled = (values.to(tl.float32) * scale).to(values.dtype)
        tl.store(hidden + place * columns + column, scaled, mask=inside)
    i = tl.arange(0, HALF)
    within = i < half_dim
    position = tl.load(positions + place).to(tl.float32)
    for kind in tl.static_range(KINDS):
        pair = rotary + kind * 2 * half_dim + i
        angle = position * tl.load(pair, mask=within, other=0.0)
        factor = tl.load(pair + half_dim, mask=within, other=0.0)
        c, s = factor * tl.cos(angle), factor * tl.sin(angle)
        target = (kind * tl.num_programs(0) + place) * 2 * half_dim + i
        tl.store(cos + target, c, mask=within)
        tl.store(cos + target + half_dim, c, mask=within)
        tl.store(sin + target, -s, mask=within)
        tl.store(sin + target + half_dim, s, mask=within)


class Embed:
    """`Ops.embed`, prepared: a call with tensors like those of the call before repeats its launch. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[object, Repeat] = {}

    def __call__(
        self, tokens: Tensor, feeds: Feeds | None, positions: Tensor, table: Tensor, rotary: Tensor, scale: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Ops.embed`.

        Raises:
            ValueError: a tensor has another shape, type or device than it should.
        """
        rows, sampled = (None, None) if feeds is None else feeds
        like = table.data_ptr(), rotary.data_ptr(), scale, feeds is None
        known = self._known.get(like)
        if known is None or positions.shape != tokens.shape or (rows is not None and rows.shape != tokens.shape):
            _check(tokens, feeds, positions, table, rotary)
        count, columns, (kinds, _, half_dim) = len(tokens), table.shape[1], rotary.shape
        hidden = torch.empty((count, columns), dtype=table.dtype, device=table.device)
        angles = torch.empty((2, kinds, count, 1, 2 * half_dim), dtype=torch.float32, device=table.device)
        cos, sin = angles
        if not count:
            return hidden, cos, sin
        if known is None:
            made = launch(
                embed_kernel,
                (count, 1, 1),
                tokens,
                rows,
                sampled,
                positions,
                table,
                rotary,
                hidden,
                cos,
                sin,
                columns,
                half_dim,
                scale,
                KINDS=kinds,
                BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
                HALF=triton.next_power_of_2(half_dim),
                num_warps=4,
            )
            fed = () if feeds is None else ("rows", "sampled")
            self._known[like] = made.repeating("tokens", *fed, "positions", "hidden", "cos", "sin")
        else:
            given = () if rows is None or sampled is None else (rows, sampled)
            known((count, 1, 1), tokens, *given, positions, hidden, cos, sin)
        return hidden, cos, sin


def _check(tokens: Tensor, feeds: Feeds | None, positions: Tensor, table: Tensor, rotary: Tensor) -> None:
    if tokens.dim() != 1 or table.dim() != 2 or rotary.dim() != 3:
        shapes = [list(tensor.shape) for tensor in (tokens, table, rotary)]
        raise ValueError(f"tokens, table and rotary are {shapes}; allowed: [T], [V, N] and [R, 2, D / 2]")
    count = len(tokens)
    check_tensor("tokens", tokens, (count,), table, torch.int64)
    check_tensor("positions", positions, (count,), table, torch.int64)
    check_tensor("table", table, tuple(table.shape), table)
    check_tensor("rotary", rotary, (len(rotary), 2, rotary.shape[2]), table, torch.float32)
    if feeds is not None:
        check_tensor("feeds.rows", feeds.rows, (count,), table, torch.int64)
        check_tensor("feeds.sampled", feeds.sampled, (feeds.sampled.numel(),), table, torch.int64)
