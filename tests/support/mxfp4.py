"""gpt-oss checkpoints with experts in MXFP4, and their dequantized numbers."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrelay.engine.models.reading.stored import MXFP4
from kvrelay.kernels.codes import NUMBERS, CodeType


def in_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and dequantized numbers of a weight [experts, inputs, outputs], as gpt-oss has them."""
    grouped = weight.transpose(1, 2).unflatten(2, (-1, MXFP4.group))
    exponents = torch.floor(torch.log2(grouped.abs().amax(3).clamp(min=1e-20))) - 1
    numbers = NUMBERS[CodeType.FP4]()
    codes = (grouped / torch.exp2(exponents)[..., None]).unsqueeze(-1).sub(numbers).abs().argmin(-1)
    dequantized = (numbers[codes] * torch.exp2(exponents)[..., None]).flatten(2).transpose(1, 2)
    pairs = codes.unflatten(3, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8), dequantized.contiguous()


def write_in_mxfp4(folder: Path, coded: Path, plain: Path) -> None:
    """Writes a checkpoint with the experts of `folder` in MXFP4, and one with the same numbers in float32."""
    dequantized, stored = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, numbers = in_mxfp4(weight)
            stored |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
            dequantized[name] = numbers
        else:
            stored[name] = dequantized[name] = weight
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    for to, weights, more in ((plain, dequantized, {}), (coded, stored, {"quantization_config": quantized})):
        save_file(weights, to / "model.safetensors", {"format": "pt"})
        (to / "config.json").write_text(json.dumps({**config, **more}))
