"""Launches of the kernels of layers that keep a state."""

import torch
import triton
from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.states import StateRows, TimeStep, token_rows
from kvrelay.kernels.triton.states import conv as conv_file
from kvrelay.kernels.triton.states import delta as delta_file
from kvrelay.kernels.triton.states import ssd as ssd_file
from kvrelay.kernels.triton.states import wkv as wkv_file

LEAST = 16
"""Least side of a tile that tensor cores multiply."""
DIM = 32
"""Largest width of a program's part of a state."""
PART = 16
"""Largest number of a state's rows that a product of a chunk takes at once: threads have registers for no more."""
CHUNKS = {"num_warps": 8, "num_stages": 1}
"""Options of the compiler for the kernels of chunks: deeper pipelines would take registers that a state needs."""


class TritonStateOps:
    """Implements `StateOps` on GPU, and in Triton's interpreter."""

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, *, silu: bool
    ) -> Tensor:
        """See `StateOps.conv`."""
        x, weight = token_rows(x), weight.contiguous()
        channels, width = weight.shape
        out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
        columns, count = triton.cdiv(channels, conv_file.CHANNELS), len(rows.starts)
        of_rows = rows.firsts, rows.starts, rows.slots, x.stride(0), state.stride(0), channels
        grid = count, triton.cdiv(rows.longest, conv_file.TOKENS), columns
        conv_file.conv_kernel[grid](
            x, weight, weight if bias is None else bias, state, out, *of_rows,
            WIDTH=width, BIASED=bias is not None, SILU=silu, TOKENS=conv_file.TOKENS, CHANNELS=conv_file.CHANNELS,
        )  # fmt: skip
        conv_file.conv_state_kernel[(count, columns)](
            x, state, *of_rows, WIDTH=width, PADDED=triton.next_power_of_2(width), CHANNELS=conv_file.CHANNELS
        )
        return out

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        time_step: TimeStep,
        state: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """See `StateOps.ssd`."""
        (tokens, heads, dim), (groups, size) = x.shape, b.shape[1:]
        x, b, c = token_rows(x), token_rows(b), token_rows(c)
        step = dt.float() if time_step.bias is None else dt.float() + time_step.bias.float()
        step = functional.softplus(step) if time_step.softplus else step
        step = step.clamp(time_step.least, time_step.most).contiguous()
        out = torch.empty((tokens, heads, dim), dtype=torch.float32, device=x.device)
        a = a.float().contiguous()
        given = (
            x, b, c, step, a, a if d is None else d.float().contiguous(), state, out,
            rows.firsts, rows.starts, rows.slots,
            x.stride(0), b.stride(0), c.stride(0), state.stride(0), heads, heads // groups, dim, size,
        )  # fmt: skip
        sides = {"SKIPS": d is not None, "DIM": _side(dim, DIM), "SIZE": _side(size)}
        grid = len(rows.starts), heads, triton.cdiv(dim, sides["DIM"])
        ssd_file.ssd_token_kernel[grid](*given, **sides)
        if rows.longest > 1:
            ssd_file.ssd_kernel[grid](
                *given, **sides, CHUNK=ssd_file.CHUNK, PART=_side(size, PART), PRECISION=_precision(x),
                **CHUNKS,
            )  # fmt: skip
        return out

    def delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        rows: StateRows,
        *,
        normalized: bool,
    ) -> Tensor:
        """See `StateOps.delta`."""
        (tokens, heads, dim), (key_heads, key_dim) = v.shape, k.shape[1:]
        q, k, v = token_rows(q), token_rows(k), token_rows(v)
        g, beta = g.float().contiguous(), beta.float().contiguous()
        out = torch.empty((tokens, heads, dim), dtype=v.dtype, device=v.device)
        shared, precision, part = heads // key_heads, _precision(v), _side(key_dim, PART)
        given = (
            state, out, rows.firsts, rows.starts, rows.slots,
            q.stride(0), k.stride(0), v.stride(0), state.stride(0), heads, shared, dim, key_dim, key_dim**-0.5,
        )  # fmt: skip
        channels = g.dim() == 3
        sides = {"NORMALIZED": normalized, "CHANNELS": channels, "DIM": _side(dim, DIM), "KEYS": _side(key_dim)}
        count = len(rows.starts)
        grid = count, heads, triton.cdiv(dim, sides["DIM"])
        delta_file.delta_token_kernel[grid](q, k, v, g, beta, *given, **sides)
        if rows.longest > 1:
            chunk, pairs = delta_file.CHUNK, g
            if channels:
                pairs = torch.empty((tokens, heads, 2, chunk), dtype=torch.float32, device=v.device)
                delta_file.channel_pairs_kernel[(count, heads, triton.cdiv(rows.longest, chunk))](
                    q, k, g, pairs, rows.firsts, q.stride(0), k.stride(0), heads, shared, key_dim,
                    CHUNK=chunk, PART=part, PRECISION=precision,
                )  # fmt: skip
            delta_file.delta_kernel[grid](
                q, k, v, g, beta, pairs, *given, **sides, CHUNK=chunk, PART=part, PRECISION=precision, **CHUNKS
            )
        return out

    def wkv(self, k: Tensor, v: Tensor, decay: Tensor, first: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """See `StateOps.wkv`."""
        k, v = token_rows(k), token_rows(v)
        tokens, channels = k.shape
        out = torch.empty((tokens, channels), dtype=k.dtype, device=k.device)
        wkv_file.wkv_kernel[(len(rows.starts), triton.cdiv(channels, wkv_file.CHANNELS))](
            k, v, decay.float().contiguous(), first.float().contiguous(), state, out,
            rows.firsts, rows.starts, rows.slots, k.stride(0), v.stride(0), state.stride(0), channels,
            CHANNELS=wkv_file.CHANNELS,
        )  # fmt: skip
        return out


def _side(numbers: int, most: int = 2**31) -> int:
    return min(most, max(LEAST, 1 << (numbers - 1).bit_length()))


def _precision(x: Tensor) -> str:
    """Precision of tensor cores for float32: one TF32 product where inputs have 10 bits at most, else three."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
