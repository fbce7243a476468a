"""Quantized checkpoints in the layouts that people download, each beside one of the same numbers in float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrelay.engine.models.reading.stored import MXFP4
from kvrelay.kernels.codes import NUMBERS, CodeType
from support.checkpoints import copied

GROUP = 32
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
Layer = tuple[dict[str, Tensor], Tensor]
"""The stored tensors of a layer, by the end of their names, and the weight that they stand for."""


def random_layer(outputs: int, inputs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0 to 15 [out, in], and scales and zeros [out, groups]."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (outputs, inputs), generator=draw)
    scales = (0.01 + 0.02 * torch.rand(outputs, inputs // GROUP, generator=draw)).half()
    zeros = torch.randint(1, 16, (outputs, inputs // GROUP), generator=draw)
    return numbers, scales, zeros


def value(numbers: Tensor, scales: Tensor, zeros: Tensor | int) -> Tensor:
    spread = zeros.repeat_interleave(GROUP, 1) if isinstance(zeros, Tensor) else zeros
    return (numbers - spread).float() * scales.float().repeat_interleave(GROUP, 1)


def packed(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 of eight numbers each, along the last dimension: the first in the lowest bits is that of `order[0]`."""
    eights = values.long().unflatten(-1, (-1, 8))[..., list(order)]
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def awq(outputs: int, inputs: int, seed: int) -> Layer:
    numbers, scales, zeros = random_layer(outputs, inputs, seed)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": packed(numbers.t(), order), "qzeros": packed(zeros.t(), order), "scales": scales.t()}
    return stored, value(numbers, scales, zeros)


def gptq(outputs: int, inputs: int, seed: int) -> Layer:
    numbers, scales, zeros = random_layer(outputs, inputs, seed)
    order = torch.arange(inputs, dtype=torch.int32) // GROUP
    stored = {"qweight": packed(numbers).t(), "qzeros": packed(zeros.t() - 1), "scales": scales.t(), "g_idx": order}
    return stored, value(numbers, scales, zeros)


def pack_quantized(outputs: int, inputs: int, seed: int) -> Layer:
    numbers, scales, _ = random_layer(outputs, inputs, seed)
    shape = torch.tensor([outputs, inputs])
    return {"weight_packed": packed(numbers), "weight_scale": scales, "weight_shape": shape}, value(numbers, scales, 8)


def pack_quantized_with_zeros(outputs: int, inputs: int, seed: int) -> Layer:
    numbers, scales, zeros = random_layer(outputs, inputs, seed)
    stored = {"weight_packed": packed(numbers), "weight_scale": scales, "weight_zero_point": packed(zeros.t()).t()}
    return stored, value(numbers, scales, zeros)


def mxfp4(outputs: int, inputs: int, seed: int) -> Layer:
    codes, _, _ = random_layer(outputs, inputs, seed)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    exponents = torch.randint(120, 124, (outputs, inputs // 32), generator=torch.Generator().manual_seed(seed))
    scales = torch.exp2(exponents.float() - 127)
    weight = torch.cat((magnitudes, -magnitudes))[codes] * scales.repeat_interleave(32, 1)
    halves = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {"weight_packed": halves, "weight_scale": exponents.to(torch.uint8)}, weight


def fp8(outputs: int, inputs: int, seed: int) -> Layer:
    codes = (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 100).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.0003 * (seed % 5 + 1))
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, codes.float() * scale


def fp8_blocks(outputs: int, inputs: int, seed: int) -> Layer:
    codes = (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 100).to(torch.float8_e4m3fn)
    scales = 0.0005 + 0.001 * torch.rand(-(-outputs // 128), -(-inputs // 128))
    spread = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def int8(outputs: int, inputs: int, seed: int) -> Layer:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (outputs, inputs), generator=draw, dtype=torch.int8)
    scales = (0.0005 + 0.001 * torch.rand(outputs, 1, generator=draw)).bfloat16()
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GROUPED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
LAYOUTS: dict[str, tuple[Callable[[int, int, int], Layer], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "w4a16": (pack_quantized, compressed("pack-quantized", GROUPED)),
    "w4a16 with zeros": (pack_quantized_with_zeros, compressed("pack-quantized", GROUPED | {"symmetric": False})),
    "w8a16": (int8, compressed("int-quantized", CHANNEL)),
    "w8a8": (int8, compressed("int-quantized", CHANNEL, TOKEN)),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32})),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 in blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def quantized(plain: Path, folder: Path, layout: str, **changes: Any) -> tuple[Path, Path]:
    """Two checkpoints below `folder`: one in the layout, and one of the same numbers in float32."""
    make, config = LAYOUTS[layout]
    stored, values = {}, {}
    for seed, (name, weight) in enumerate(sorted(load_file(plain / "model.safetensors").items())):
        if name.endswith("_proj.weight"):
            tensors, values[name] = make(*weight.shape, seed)
            stored.update({name.removesuffix("weight") + end: tensor.contiguous() for end, tensor in tensors.items()})
        else:
            stored[name] = values[name] = weight
    for target, tensors in (("stored", stored), ("values", values)):
        copied(plain, folder / target, tensors)
    fields = json.loads((plain / "config.json").read_bytes()) | {"quantization_config": config | changes}
    (folder / "stored" / "config.json").write_text(json.dumps(fields))
    return folder / "stored", folder / "values"


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
        to.mkdir(exist_ok=True)
        save_file(weights, to / "model.safetensors", {"format": "pt"})
        (to / "config.json").write_text(json.dumps({**config, **more}))
