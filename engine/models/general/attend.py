"""Attention with the options of transformers' models, in plain torch: scaling, soft caps, sinks, grouped heads."""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, H, Dv], the attention of one sequence's tokens.

    Args:
        queries: [T, H, D].
        keys: [C, Hkv, D].
        values: [C, Hkv, Dv].
        mask: bool [T, C], or None where each query sees all keys.
        softcap: c of c * tanh(scores / c).
        sinks: [H] scores that take a share of each query's attention for nothing.
    """
    tokens, heads, dim = queries.shape
    context, kv_heads, width = values.shape
    group = heads // kv_heads
    # [Hkv, G, T, D]
    grouped = queries.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
    keys, values = keys.transpose(0, 1)[:, None], values.transpose(0, 1)[:, None]
    if softcap is None:
        # For one token, the group takes the place of the tokens: each key is read once.
        turned = tokens == 1
        if turned:
            grouped = grouped.transpose(1, 2)
        else:
            keys, values = (x.expand(-1, group, -1, -1) for x in (keys, values))
        if sinks is not None:
            # A sink is a key of zeros, whose score is added to it, and whose value is zero.
            keys, values = (pad(x, (0, 0, 0, 1)) for x in (keys, values))
            own = sinks.to(queries.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, tokens, -1)
            added = queries.new_zeros(tokens, context)
            added = added if mask is None else added.masked_fill(~mask, -torch.inf)
            mask = torch.cat((added.expand(kv_heads, group, -1, -1), own), -1)
            mask = mask.transpose(1, 2) if turned else mask
        out = scaled_dot_product_attention(grouped, keys, values, mask, scale=scaling)
        out = out.transpose(1, 2) if turned else out
    else:
        scores = grouped @ keys.transpose(-1, -2) * scaling
        scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if sinks is not None:
            own = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, tokens, 1)
            scores = torch.cat((scores, own), -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(queries.dtype)
        out = weights[..., :context] @ values
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, width)
