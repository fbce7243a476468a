"""Stand-ins for FlashInfer and FlashAttention 3: what kvrelay calls, with the parameters that the packages have
(FlashInfer 0.6.18, FlashAttention 3.0.0), computed by the definition in float64.
"""

import types
from itertools import pairwise
from typing import Any

import torch
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
    """FlashInfer's."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
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
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32
            assert each.is_contiguous()
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal
        assert sm_scale is None or sm_scale == head_dim_qk**-0.5
        self._plan = {key: value for key, value in locals().items() if key != "self"}

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
    ) -> Tensor:
        plan = self._plan
        keys, values = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
        if self._hnd:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        assert keys.shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim_qk"])
        assert q.shape == (int(plan["qo_indptr"][-1]), plan["num_qo_heads"], plan["head_dim_qk"])
        assert q.dtype == plan["q_data_type"]
        assert keys.dtype == plan["kv_data_type"]
        result = torch.empty_like(q) if out is None else out
        tokens, pages = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        for row, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            assert 1 <= last <= plan["page_size"]
            table = plan["paged_kv_indices"][pages[row] : pages[row + 1]].tolist()
            context = (len(table) - 1) * plan["page_size"] + last
            mine = slice(tokens[row], tokens[row + 1])
            result[mine] = attend(q[mine], keys, values, table, context, plan["window_left"] + 1).to(q.dtype)
        return result


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """FlashAttention 3's, module `flash_attn_interface`."""
    assert isinstance(cache_seqlens, Tensor)
    assert page_table is not None
    assert cu_seqlens_q is not None
    for each in (cache_seqlens, page_table, cu_seqlens_q):
        assert each.dtype == torch.int32
        assert each.stride(-1) == 1
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert causal
    assert softmax_scale is None or softmax_scale == q.shape[-1] ** -0.5
    left, right = window_size
    assert right == (-1 if left < 0 else 0)
    tokens = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(end - begin for begin, end in pairwise(tokens))
    assert tokens[-1] == len(q)
    assert len(tokens) - 1 == len(page_table) == len(cache_seqlens)
    result = torch.empty_like(q)
    for row, context in enumerate(cache_seqlens.tolist()):
        mine = slice(tokens[row], tokens[row + 1])
        table = page_table[row].tolist()
        result[mine] = attend(q[mine], k_cache, v_cache, table, context, left + 1).to(q.dtype)
    return result


def modules() -> dict[str, types.ModuleType]:
    """By name, what would be imported."""
    flashinfer, flash_attn = types.ModuleType("flashinfer"), types.ModuleType("flash_attn_interface")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]  # it is made here
    flash_attn.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]  # likewise
    return {"flashinfer": flashinfer, "flash_attn_interface": flash_attn}
