"""Quantized checkpoints in the layouts that people download: each computes what its numbers say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import change_tensors
from support.paged import logits_of
from support.stored_layouts import LAYOUTS, SHAPE, quantized

TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 4, 21, 8]


@pytest.fixture
def plain(model_of: Callable[..., Path]) -> Path:
    return model_of("llama", **SHAPE)


FAMILIES = [*((layout, "llama") for layout in LAYOUTS), ("gptq", "glm4"), ("fp8 in blocks", "phi3")]


@pytest.mark.parametrize(("layout", "family"), FAMILIES)
def test_a_quantized_checkpoint_computes_with_its_numbers(
    model_of: Callable[..., Path], tmp_path: Path, layout: str, family: str
) -> None:
    stored, values = quantized(model_of(family, **SHAPE), tmp_path, layout)
    found, expected = logits_of(stored, TOKENS), logits_of(values, TOKENS)
    # W8A8 rounds inputs to 8 bits, the others to 16 or to bfloat16.
    assert (found - expected).norm() <= (5e-2 if layout == "w8a8" else 3e-2) * expected.norm()


@pytest.mark.parametrize(
    ("layout", "changes", "text"),
    [
        ("awq", {"quant_method": "aqlm"}, "quant_method is 'aqlm'; allowed: fp8, compressed-tensors, awq, gptq"),
        ("awq", {"bits": 3}, "bits is 3; allowed: 4"),
        ("awq", {"group_size": 48}, "group_size is 48; allowed: a multiple of 32"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; allowed: gemm"),
        ("w8a8", {"format": "marlin-24"}, "format is 'marlin-24'; allowed: int-quantized"),
        ("w8a8", {"ignore": ["re:("]}, r"ignore is \['re:\('\]; allowed: names, and regular expressions"),
        ("w8a8", {"ignore": []}, r"tensor lm_head.weight has dtype F32; allowed: I8"),
        ("fp8 in blocks", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; allowed"),
        ("fp8", {"ignored_layers": ["layers.0.self_attn.q_proj"]}, r"q_proj.weight has dtype F8_E4M3; allowed: F32"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    plain: Path, tmp_path: Path, layout: str, changes: dict[str, Any], text: str
) -> None:
    stored, _ = quantized(plain, tmp_path, layout, **changes)
    with pytest.raises(ValueError, match=text):
        logits_of(stored, TOKENS)


@pytest.mark.parametrize(
    ("layout", "end", "number"),
    [
        ("awq", "scales", torch.inf),
        ("w8a8", "weight_scale", torch.nan),
        ("mxfp4", "weight_scale", 255),
        ("fp8 in blocks", "weight_scale_inv", torch.nan),
        ("fp8", "weight", torch.nan),
    ],
)
def test_a_weight_that_is_not_finite_is_refused(
    plain: Path, tmp_path: Path, layout: str, end: str, number: float
) -> None:
    stored, _ = quantized(plain, tmp_path, layout)
    layer = "model.layers.1.mlp.down_proj"
    change_tensors(stored, lambda tensors: tensors[f"{layer}.{end}"].view(-1)[-1:].fill_(number))
    with pytest.raises(ValueError, match=f"{layer}: its weight has a number or a scale that is infinite or NaN"):
        logits_of(stored, TOKENS)


def test_a_quantized_checkpoint_is_refused_by_the_place_of_what_cannot_be(plain: Path, tmp_path: Path) -> None:
    """It can't be quantized again, and its inputs can't be in an order of their own."""
    stored, _ = quantized(plain, tmp_path, "gptq", desc_act=True)
    with pytest.raises(
        ValueError, match="quantization is 'int8'; allowed: none, dense; the checkpoint is in gptq already"
    ):
        logits_of(stored, TOKENS, quantization="int8")
    name = "model.layers.1.mlp.down_proj.g_idx"
    change_tensors(stored, lambda tensors: tensors.update({name: tensors[name].flip(0).contiguous()}))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: its inputs are grouped by importance \(desc_act"):
        logits_of(stored, TOKENS)
