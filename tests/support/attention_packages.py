"""Stand-ins for FlashInfer and PyTorch's varlen_attn, computed by the definition in float64: FlashInfer's with the
parameters that kvrelay gives (of FlashInfer 0.6.18), PyTorch's with all that it has (of PyTorch 2.13).
"""

import sys
import types
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import Tensor

from kvrelay.kernels.reference import paged_attention


def attend(query: Tensor, keys: Tensor, values: Tensor, table: list[int], context: int, window: int) -> Tensor:
    """[T, H, D] of one sequence's last T tokens.

    Args:
        keys, values: [page, slot, Hkv, D]; what isn't a number in them is nobody's.
    """
    held = torch.stack((keys, values), 1)[:, None].nan_to_num(0.0, 0.0, 0.0)
    return paged_attention(query, held, 0, table, context, window, torch.float64)


class BatchPrefillWithPagedKVCacheWrapper:
    """A stand-in for FlashInfer's wrapper."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self._hnd = kv_layout == "HND"
        self._plan: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32
            assert each.is_contiguous()
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal
        assert sm_scale is None or sm_scale == head_dim_qk**-0.5
        self._plan = {key: value for key, value in locals().items() if key != "self"}

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        plan = self._plan
        keys, values = paged_kv_cache
        if self._hnd:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        assert keys.shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim_qk"])
        assert q.shape == (int(plan["qo_indptr"][-1]), plan["num_qo_heads"], plan["head_dim_qk"])
        assert q.dtype == plan["q_data_type"]
        assert keys.dtype == plan["kv_data_type"]
        tokens, pages = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        for row, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            assert 1 <= last <= plan["page_size"]
            table = plan["paged_kv_indices"][pages[row] : pages[row + 1]].tolist()
            context = (len(table) - 1) * plan["page_size"] + last
            mine = slice(tokens[row], tokens[row + 1])
            out[mine] = attend(q[mine], keys, values, table, context, plan["window_left"] + 1).to(q.dtype)
        return out


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """PyTorch's, module `torch.nn.attention.varlen`, as FlashAttention 3 computes it."""
    assert seqused_k is not None
    assert block_table is not None
    assert cu_seq_k is None, "FlashAttention refuses it beside a block table"
    for each in (cu_seq_q, seqused_k, block_table):
        assert each.dtype == torch.int32
        assert each.stride(-1) == 1
    assert key.stride(-1) == value.stride(-1) == out.stride(-1) == 1
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert scale is None or scale == query.shape[-1] ** -0.5
    left, right = window_size
    assert right == 0, "not causal"
    tokens = cu_seq_q.tolist()
    assert out.shape == query.shape
    assert max_q == max(end - begin for begin, end in pairwise(tokens))
    assert max_k == max(seqused_k.tolist())
    assert tokens[-1] == len(query)
    assert len(tokens) - 1 == len(block_table) == len(seqused_k)
    for row, context in enumerate(seqused_k.tolist()):
        mine = slice(tokens[row], tokens[row + 1])
        out[mine] = attend(query[mine], key, value, block_table[row].tolist(), context, left + 1).to(query.dtype)
    return out


def install(patch: pytest.MonkeyPatch) -> list[str]:
    """Makes both importable; what PyTorch is told to activate is appended to the list."""
    flashinfer, varlen = types.ModuleType("flashinfer"), types.ModuleType("torch.nn.attention.varlen")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]  # it is made here
    varlen.varlen_attn_out = varlen_attn_out  # type: ignore[attr-defined]  # likewise
    for module in (flashinfer, varlen):
        patch.setitem(sys.modules, module.__name__, module)
    activated: list[str] = []
    patch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: (activated or [None])[-1])
    return activated
