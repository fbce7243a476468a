"""Plain definitions of every operation: what a kernel must compute. Slow; tests compare the kernels with them."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.kernels.ops import Feeds


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """`x [T, in] -> x @ weight.T + bias [T, out]`; weight is [out, in]."""

    def apply(x: Tensor) -> Tensor:
        y = x.float() @ weight.float().T
        return (y if bias is None else y + bias.float()).to(x.dtype)

    return apply


def rotations(positions: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as `rope` takes them, of R kinds of rotation: float32 [R, T, 1, D].

    Args:
        positions: int64 [T].
        rotary: float32 [R, 2, D / 2], of each pair radians per position, and a factor of cos and sin.
    """
    frequencies, factors = rotary[:, None, None].unbind(3)
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos() * factors, angles.sin() * factors
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def fed_tokens(tokens: Tensor, feeds: Feeds | None) -> Tensor:
    """int64 [T] tokens, some of them fed."""
    if feeds is None:
        return tokens
    fed = feeds.sampled[feeds.rows.clamp(min=0)].clamp(min=0)
    return torch.where(feeds.rows < 0, tokens, fed)


def embed(
    tokens: Tensor, feeds: Feeds | None, positions: Tensor, table: Tensor, rotary: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Ops.embed`."""
    found = torch.nn.functional.embedding(fed_tokens(tokens, feeds), table)
    return found if scale == 1 else found * scale, *rotations(positions, rotary)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32.

    Args:
        x: [..., D].
        weight: [D], or anything that broadcasts to x, e.g. a weight per head [H, D].
    """
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(total), total)` of total = x + residual. Backends may overwrite `x` or `residual`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, in float32."""
    y = x.float() - x.float().mean(-1, keepdim=True)
    scaled = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + D/2]) by the angle of its position (Su et al., arXiv:2104.09864).

    Args:
        x: [T, H, D].
        cos, sin: float32 [T, 1, D]. Both halves have the same angles, and the first half of `sin` is negated: the
            rotation is `x * cos + swapped(x) * sin`, where `swapped` exchanges the halves of x.
    """
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((second, first), -1) * sin).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, [T, 2I] -> [T, I]; gate is the first half."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu(x: Tensor) -> Tensor:
    """`0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`."""
    y = x.float()
    return (0.5 * y * (1 + (math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)).tanh())).to(x.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, as `silu_mul`."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gelu(gate) * up).to(gate_up.dtype)


def paged_attention(
    query: Tensor,
    pool: Tensor,
    layer: int,
    blocks: list[int],
    context: int,
    window: int = 0,
    precision: torch.dtype = torch.float32,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last T tokens of one sequence over its paged KV, their own included.

        out[t, h] = sum_j softmax_j(cap(query[t, h] . key[j, h // G] / sqrt(D))) value[j, h // G],  G = H / Hkv
        over the positions j of p - window < j <= p, or all j <= p without a window, where p = context - T + t
        and cap(s) = softcap * tanh(s / softcap), or s without a soft cap

    Args:
        query: [T, H, D].
        pool: [block, layer, k|v, slot, Hkv, D]; for an HND pool, the view `pool.transpose(3, 4)`.
        blocks: the sequence's block table.
        context: tokens of the sequence that are in the pool.
        window: keys that a query sees, itself included; 0 for all.
        precision: type of the computation.
        softcap: 0 for none.
        sinks: [H] scores that take a share of each query's softmax for nothing.

    Returns:
        [T, H, D].
    """
    tokens, heads, _ = query.shape
    keys, values = pool[blocks, layer].to(precision).transpose(0, 1).flatten(1, 2)[:, :context]
    group = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("thd,jhd->htj", query.to(precision), keys) * query.shape[-1] ** -0.5
    positions = torch.arange(context - tokens, context, device=query.device)[:, None]
    key_positions = torch.arange(context, device=query.device)[None]
    seen = key_positions <= positions
    if window:
        seen &= key_positions > positions - window
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(precision)[:, None, None].expand(-1, tokens, 1)), -1)
    weights = scores.softmax(-1)[..., :context]
    return torch.einsum("htj,jhd->thd", weights, values).to(query.dtype if precision == torch.float32 else precision)


def latent_attention(query: Tensor, latents: Tensor, rotated: Tensor, scale: float) -> Tensor:
    """Causal attention of the last T tokens of one sequence over its latents, their own included, with the weights of
    keys and values absorbed into queries and results (DeepSeek-V2, arXiv:2405.04434, section 2.1).

        out[t, h] = sum_j softmax_j(scale * (query[t, h, :C] . latents[j] + query[t, h, C:] . rotated[j])) latents[j]
        over the positions j <= J - T + t

    Args:
        query: [T, H, C + R].
        latents: [J, C].
        rotated: [J, R].

    Returns:
        [T, H, C] in the type of `latents`.
    """
    keys = torch.cat((latents, rotated), -1)
    scores = torch.einsum("thd,jd->htj", query.to(keys.dtype), keys) * scale
    tokens, context = len(query), len(latents)
    hidden = torch.ones(tokens, context, dtype=torch.bool, device=query.device).triu(context - tokens + 1)
    return torch.einsum("htj,jc->thc", scores.masked_fill(hidden, -torch.inf).softmax(-1), latents)


def head_products(numbers: Tensor, weight: Tensor) -> Tensor:
    """`numbers [T, H, K] . weight [H, K, N]` for each head: float32 [T, H, N]."""
    return torch.einsum("thk,hkn->thn", numbers.float(), weight.float())


def token_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution that a token is drawn from: float64 [V], from one row of logits [V].

    The temperature comes first. Then each filter removes some of the tokens that the filter before it kept. The rules
    treat tokens with equal logits alike:

        top_k   keeps a token if fewer than top_k tokens have larger logits; 0 keeps all
        top_p   keeps a token if the tokens with larger logits have less than top_p of the probability
        min_p   keeps a token if its probability is at least min_p of the largest
    """
    scaled = logits.double() / temperature
    if top_k:
        larger = (scaled[None, :] > scaled[:, None]).sum(-1)
        scaled = scaled.masked_fill(larger >= top_k, -torch.inf)
    probabilities = scaled.softmax(-1)
    larger_mass = ((probabilities[None, :] > probabilities[:, None]) * probabilities[None, :]).sum(-1)
    keep = (larger_mass < top_p) & (probabilities >= min_p * probabilities.max())
    probabilities = probabilities * keep
    return probabilities / probabilities.sum()


def kv_checksum(data: bytes | bytearray | memoryview) -> int:
    """The sum modulo 2^64 of each mixed word of 8 bytes (little-endian, the last padded with zeros) and of the length;
    see `kernels.kv_checksum`."""

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return x ^ x >> np.uint64(31)

    words = np.frombuffer(bytes(data) + bytes(-len(data) % 8), "<u8")
    positions = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    length = np.array([len(data) ^ 0xD1B54A32D192ED03], np.uint64)
    return int(np.concatenate((mix(words ^ positions), mix(length))).sum())


def route(
    logits: Tensor,
    top: int,
    *,
    scoring: Literal["softmax", "sigmoid", "softmax of the chosen"] = "softmax",
    bias: Tensor | None = None,
    normalized: bool = True,
    least: float = 0.0,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
) -> tuple[Tensor, Tensor]:
    """The experts of each row, int64 [rows, top], and their shares, float32 [rows, top].

    Args:
        logits: [rows, experts].
        bias: [experts] numbers that are added to scores to choose experts, and aren't in shares (DeepSeek-V3,
            arXiv:2412.19437).
        normalized: whether shares are divided by their sum plus `least`.
        scale: factor of shares.
        groups: number of groups of consecutive experts. Experts are chosen from the `top_groups` groups whose
            `group_best` largest scores have the largest sums.
    """
    numbers = logits.float()
    scores = {"softmax": numbers.softmax(1), "sigmoid": numbers.sigmoid()}.get(scoring, numbers)
    choice = scores if bias is None else scores + bias.float()
    if groups > 1:
        grouped = choice.view(len(choice), groups, -1)
        best = grouped.topk(group_best, 2).values.sum(2).topk(top_groups, 1).indices
        kept = torch.zeros(len(choice), groups, dtype=torch.bool, device=choice.device).scatter_(1, best, True)
        choice = grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    chosen = choice.topk(top, 1).indices
    shares = scores.gather(1, chosen)
    if scoring == "softmax of the chosen":
        shares = shares.softmax(1)
    if normalized:
        shares = shares / (shares.sum(1, keepdim=True) + least)
    return chosen, shares * scale


def clamped_gate(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)` of gate, the first half, at most `limit`, and up between -limit and
    limit (gpt-oss)."""
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    up: Sequence[Callable[[Tensor], Tensor]],
    gate: Callable[[Tensor], Tensor],
    down: Sequence[Callable[[Tensor], Tensor]],
) -> Tensor:
    """`sum over k of shares[:, k] * down_e(gate(up_e(x)))`, where e is chosen[:, k].

    Args:
        x: [rows, hidden], as the result.
        chosen: integers [rows, top]; others than an expert's number add nothing.
        shares: [rows, top].
        up, down: products of each expert.
        gate: the operation between them.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, (first, second) in enumerate(zip(up, down, strict=True)):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        out.index_add_(0, rows, shares[rows, places, None].float() * second(gate(first(x[rows]))).float())
    return out.to(x.dtype)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, firsts: list[int], starts: list[int], silu: bool
) -> Tensor:
    """[T, C]: y[t, c] = bias[c] + sum over k of weight[k, c] x[t - K + 1 + k, c], perhaps with SiLU.

    Args:
        x: [T, C], rows of tokens behind each other.
        weight: [K, C].
        bias: [C].
        state: [R, K, C] the last K inputs of each row, oldest first, which are overwritten; those of a row that starts
            at 0 aren't read.
        firsts: [R + 1] first token of each row.
        starts: [R] tokens of each row's sequence before these.
    """
    out, width = torch.empty_like(x), len(weight)
    for row, start in enumerate(starts):
        own = slice(firsts[row], firsts[row + 1])
        before = state[row] if start else torch.zeros_like(state[row])
        inputs = torch.cat((before, x[own]))
        windows = inputs.float().unfold(0, width, 1)[1:]  # [T, C, K]
        y = (windows * weight.float().T).sum(-1) + (0.0 if bias is None else bias.float())
        out[own] = (torch.nn.functional.silu(y) if silu else y).to(x.dtype)
        state[row] = inputs[-width:]
    return out


def gated_conv(
    gates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    firsts: list[int],
    starts: list[int],
    silu: bool = False,
) -> Tensor:
    """float32 [T, C]: c * conv(b * x), where b * x is rounded to the type of the state (LFM2).

    Args:
        gates: float32 [T, 3 C] b, c and x of each token.
        weight, bias, state, firsts, starts, silu: see `short_conv`.
    """
    b, c, x = gates.float().chunk(3, -1)
    inputs = (b * x).to(state.dtype).float()
    own = state.float()
    out = short_conv(inputs, weight, bias, own, firsts, starts, silu)
    state.copy_(own)
    return c * out


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    firsts: list[int],
    starts: list[int],
) -> Tensor:
    """float32 [T, H, P]: S = exp(dt A) S + B (dt x)', y = C' S + D x for each token and head (Mamba-2).

    Args:
        x: [T, H, P], rows of tokens behind each other.
        dt: [T, H], with bias, softplus and bounds applied.
        a: [H].
        b, c: [T, G, N], of groups of H / G heads.
        d: [H].
        state: float32 [R, H, N, P], which is overwritten; that of a row that starts at 0 isn't read.
        firsts, starts: see `short_conv`.
    """
    x, dt, a, b, c = (each.float() for each in (x, dt, a, b, c))
    b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (b, c))
    out = torch.empty_like(x)
    for row, start in enumerate(starts):
        s = state[row] if start else torch.zeros_like(state[row])
        for t in range(firsts[row], firsts[row + 1]):
            s = s * (dt[t] * a).exp()[:, None, None] + b[t, :, :, None] * (dt[t, :, None] * x[t])[:, None]
            out[t] = (c[t, :, :, None] * s).sum(1) + (0.0 if d is None else d.float()[:, None] * x[t])
        state[row] = s
    return out


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    firsts: list[int],
    starts: list[int],
    normalized: bool,
) -> Tensor:
    """[T, H, D] of Gated DeltaNet, for each token and head: S = exp(g) S, S = S + k (beta (v - S' k))',
    o = S' q / sqrt(K).

    Args:
        q, k: [T, Hk, K], rows of tokens behind each other; a key head serves H / Hk consecutive heads.
        v: [T, H, D].
        g: [T, H]; or [T, H, K], a decay of its own for each row of the state (Kimi Delta Attention).
        beta: [T, H].
        state: float32 [R, H, K, D], which is overwritten; that of a row that starts at 0 isn't read.
        firsts, starts: see `short_conv`.
        normalized: whether q and k are scaled to length 1 first.
    """
    dtype, (heads, key_dim) = v.dtype, (v.shape[1], k.shape[2])
    q, k, v, g, beta = (each.float() for each in (q, k, v, g, beta))
    if normalized:
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q, k = (each.repeat_interleave(heads // each.shape[1], 1) for each in (q * key_dim**-0.5, k))
    out = torch.empty_like(v)
    for row, start in enumerate(starts):
        s = state[row] if start else torch.zeros_like(state[row])
        for t in range(firsts[row], firsts[row + 1]):
            s = s * g[t].exp().view(heads, -1, 1)
            new = (v[t] - (s * k[t, :, :, None]).sum(1)) * beta[t, :, None]
            s = s + k[t, :, :, None] * new[:, None]
            out[t] = (s * q[t, :, :, None]).sum(1)
        state[row] = s
    return out.to(dtype)


def wkv(
    k: Tensor, v: Tensor, decay: Tensor, first: Tensor, state: Tensor, firsts: list[int], starts: list[int]
) -> Tensor:
    """[T, C]: y = (num + exp(first + k) v) / (den + exp(first + k)), then num = exp(decay) num + exp(k) v, and den
    alike without v (RWKV-4), relative to exp(most).

    Args:
        k, v: [T, C], rows of tokens behind each other.
        decay: [C] below 0.
        first: [C].
        state: float32 [R, 3, C] num, den and most, which are overwritten; those of a row that starts at 0 aren't read.
        firsts, starts: see `short_conv`.
    """
    dtype, (k, v) = v.dtype, (k.float(), v.float())
    out = torch.empty_like(v)
    for row, start in enumerate(starts):
        num, den, most = state[row] if start else state.new_tensor([[0.0], [0.0], [-1e38]]).expand(3, k.shape[1])
        for t in range(firsts[row], firsts[row + 1]):
            largest = torch.maximum(most, k[t] + first)
            old, own = (most - largest).exp(), (k[t] + first - largest).exp()
            out[t] = (old * num + own * v[t]) / (old * den + own)
            largest = torch.maximum(most + decay, k[t])
            old, own = (most + decay - largest).exp(), (k[t] - largest).exp()
            num, den, most = old * num + own * v[t], old * den + own, largest
        state[row] = torch.stack((num, den, most))
    return out.to(dtype)
