"""The bundled models' shapes, and the network that `train.py` trains: plain torch, whole sequences, no cache.

Its tensors are named as in transformers' LlamaForCausalLM. Serving has its own network, in `kvrelay.engine.models`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 4096
CONTEXT = 4096
EOS_ID = 1
ROPE_THETA = 10000.0
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """A model's dimensions, and the peak learning rate that suits them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    peak_lr: float
    head_dim: int = 32

    def config(self) -> dict[str, Any]:
        """The `config.json` that transformers reads."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "rms_norm_eps": NORM_EPS,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": EOS_ID,
            "torch_dtype": "bfloat16",
        }


SHAPES = {
    "pico": Shape(hidden=256, layers=8, heads=8, kv_heads=4, intermediate=704, peak_lr=1e-3),
    "pico-draft": Shape(hidden=128, layers=3, heads=4, kv_heads=2, intermediate=352, peak_lr=2e-3),
}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [rows, length, hidden]; `cos` and `sin` [length, head_dim / 2]."""
        rows, length, _ = x.shape
        group = self.shape.heads // self.shape.kv_heads

        def split(projected: Tensor) -> Tensor:
            return projected.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)

        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, dim=-1)
            c, s = cos.to(t.dtype), sin.to(t.dtype)
            return torch.cat((a * c - b * s, b * c + a * s), dim=-1)

        query = rotate(split(self.q_proj(x)))
        key = rotate(split(self.k_proj(x))).repeat_interleave(group, dim=1)
        value = split(self.v_proj(x)).repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [rows, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The `model.` half of the names: embedding, layers, last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)


class Llama(nn.Module):
    """A Llama whose output matrix is its embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        frequency = ROPE_THETA ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angle = torch.arange(CONTEXT)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # What adds to the residual stream starts small, so that depth doesn't blow it up.
                shrink = math.sqrt(2 * shape.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 / shrink)

    def forward(self, ids: Tensor) -> Tensor:
        """`ids` [rows, length] to logits [rows, length, vocabulary] in float32."""
        length = ids.shape[1]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight).float()
