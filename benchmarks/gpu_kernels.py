"""The cases of the elementwise kernels, the quantized products and the sampler; see `gpu.py`."""

from collections.abc import Iterator

import numpy as np
import torch
from gpu_measure import Case, Machine
from torch import Tensor
from torch.nn import functional

from kvrelay.engine.sampling.noise import exponential
from kvrelay.kernels.reference import token_probabilities
from kvrelay.kernels.triton import add_rmsnorm, quant_gemv, rope_kv_write, silu_mul
from kvrelay.kernels.triton import sample as sampling
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.quant_gemv import QuantGemv, quantize_int4, quantize_int8

TOLERANCE = 1.5e-2
"""bfloat16 has 8 bits; results are compared with the same inputs in float64."""


def elementwise(machine: Machine) -> Iterator[Case]:
    """Norms, gate and rotation, on the shapes of an 8B Llama."""
    rows_of = (1, 3) if machine.dry else (1, 16, 64, 256, 8192)
    for rows in rows_of:
        yield _norm(machine, rows, 96 if machine.dry else 4096)
        yield _gate(machine, rows, 80 if machine.dry else 14336)
        for norm in (False, True):
            yield _rope(machine, rows, norm, (4, 2, 16) if machine.dry else (32, 8, 128))


def _norm(machine: Machine, rows: int, columns: int) -> Case:
    x, residual = (_normal(machine, rows, columns) for _ in range(2))
    weight = _normal(machine, columns)

    def exact() -> Tensor:
        total = (x + residual).double()
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()

    kept = residual.clone()

    def run() -> Tensor:
        out, _ = add_rmsnorm.add_rms_norm(x, kept.copy_(residual) if machine.dry else kept, weight, 1e-5)
        return out

    expected = exact()
    return Case(
        "add_rmsnorm",
        {"rows": rows, "columns": columns},
        run,
        lambda: expected,
        TOLERANCE,
        bytes=add_rmsnorm.bytes_moved(rows, columns, x.element_size(), add=True),
        rivals={"torch": lambda: functional.rms_norm(x + residual, (columns,), weight, 1e-5)},
    )


def _gate(machine: Machine, rows: int, inner: int) -> Case:
    gate_up = _normal(machine, rows, 2 * inner)
    gate, up = gate_up.chunk(2, -1)
    return Case(
        "silu_mul",
        {"rows": rows, "inner": inner},
        lambda: silu_mul.silu_mul(gate_up),
        lambda: functional.silu(gate.double()) * up.double(),
        TOLERANCE,
        bytes=3 * rows * inner * gate_up.element_size(),
        rivals={"torch": lambda: functional.silu(gate) * up},
    )


def _rope(machine: Machine, tokens: int, norm: bool, sizes: tuple[int, int, int]) -> Case:
    heads, kv_heads, dim = sizes
    block, blocks = 16, tokens // 16 + 1
    qkv = _normal(machine, tokens, heads + 2 * kv_heads, dim)
    weight = _normal(machine, heads + kv_heads, dim)
    angles = torch.rand(tokens, 1, dim // 2, device=machine.device) * 6
    rotation = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.randperm(blocks * block, device=machine.device)[:tokens]
    pool = torch.zeros(blocks, 1, 2, kv_heads, block, dim, dtype=machine.dtype, device=machine.device)
    kv = PagedKV(pool, 0)
    weights = (weight, 1e-5) if norm else None

    def exact() -> Tensor:
        x = qkv[:, :heads].double()
        if norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight[:heads].double()
        return x * rotation[0].double() + x.roll(dim // 2, -1) * rotation[1].double()

    return Case(
        "rope_kv_write",
        {"tokens": tokens, "heads": f"{heads}/{kv_heads}", "dim": dim, "norm": norm},
        lambda: rope_kv_write.rope_kv_write(qkv, rotation, slots, kv, weights),
        exact,
        TOLERANCE,
        bytes=rope_kv_write.bytes_moved(tokens, heads, kv_heads, dim, qkv.element_size(), qkv.element_size()),
    )


def gemv(machine: Machine) -> Iterator[Case]:
    """Weights of 8 and 4 bits, on the projections of an 8B Llama."""
    if machine.dry:
        shapes, rows_of = [(70, 256)], (1, 5)
    else:
        shapes, rows_of = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], (1, 4, 16)
    for outputs, inputs in shapes:
        weight = _normal(machine, outputs, inputs) / inputs**0.5
        for bits, quantized in ((8, quantize_int8(weight)), (4, quantize_int4(weight))):
            product = QuantGemv(quantized, None, machine.processors)
            dense = quantized.dequantize(torch.float64)
            for rows in rows_of:
                x = _normal(machine, rows, inputs)
                yield Case(
                    f"w{bits}_gemv",
                    {"rows": rows, "outputs": outputs, "inputs": inputs, "splits": product.splits},
                    lambda product=product, x=x: product(x),
                    lambda dense=dense, x=x: x.double() @ dense.T,
                    TOLERANCE,
                    bytes=quant_gemv.bytes_moved(rows, quantized, x.element_size()),
                    rivals={"dense": lambda weight=weight, x=x: functional.linear(x, weight)},
                )


def sampler(machine: Machine) -> Iterator[Case]:
    """Every way to choose a token; a case's values are the chosen tokens' ranks in the exact race (0 is the winner)."""
    vocabulary, rows_of = (500, (2,)) if machine.dry else (128256, (1, 16, 64, 256))
    for rows in rows_of:
        logits = (torch.randn(rows, vocabulary, device=machine.device) * 2).contiguous()
        for name, temperature, top_k, top_p, min_p in (
            ("greedy", 0.0, 0, 1.0, 0.0),
            ("plain", 1.0, 0, 1.0, 0.0),
            ("top_k 50", 0.8, 50, 1.0, 0.0),
            ("top_p 0.9", 0.8, 0, 0.9, 0.0),
            ("k 200, p 0.95", 1.0, 200, 0.95, 0.0),
            ("min_p 0.05", 1.0, 0, 1.0, 0.05),
        ):
            choices = sampling.Choices.empty(rows, 1, machine.device)
            choices.temperature.fill_(temperature)
            choices.top_k.fill_(top_k)
            choices.top_p.fill_(top_p)
            choices.min_p.fill_(min_p)
            choices.keys.random_(-(2**31), 2**31 - 1)
            workspace = sampling.Workspace.empty(rows, vocabulary, machine.device)
            tokens = torch.empty(rows, dtype=torch.int64, device=machine.device)

            def run(logits=logits, choices=choices, workspace=workspace, tokens=tokens) -> Tensor:
                sampling.sample(logits, choices, workspace, tokens)
                return tokens

            yield Case(
                "sample",
                {"rows": rows, "vocabulary": vocabulary, "how": name},
                run,
                lambda logits=logits, choices=choices: _winners(logits, choices),
                0.0,
                bytes=logits.nbytes,
                launches=4,
                rivals={"torch.sort": lambda logits=logits: logits.sort(-1).indices} if "p" in name else {},
            )


def _winners(logits: Tensor, choices: sampling.Choices) -> Tensor:
    """int64 [R] by the definition, in float64 and with a sort instead of a comparison of all pairs."""
    if not choices.temperature.any():
        return logits.argmax(-1)
    tokens = np.arange(logits.shape[1], dtype=np.int32)
    noise = exponential(choices.keys.cpu().numpy(), tokens).to(logits.device).double()
    if logits.shape[1] < 1000:
        columns = (choices.temperature, choices.top_k, choices.top_p, choices.min_p)
        options = zip(*(column.tolist() for column in columns), strict=True)
        rows = [token_probabilities(row, *option) for row, option in zip(logits, options, strict=True)]
        return (torch.stack(rows) / noise).argmax(-1)
    scaled = logits.double() / choices.temperature[:, None]
    ordered, order = scaled.sort(-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(choices.top_k > 0, choices.top_k, logits.shape[1])[:, None]
    probabilities = ordered.masked_fill(rank >= top_k, -torch.inf).softmax(-1)
    larger = probabilities.cumsum(-1) - probabilities
    keep = (larger < choices.top_p[:, None]) & (probabilities >= choices.min_p[:, None] * probabilities[:, :1])
    probabilities = (probabilities * keep) / noise.gather(1, order)
    return order.gather(1, probabilities.argmax(-1, keepdim=True))[:, 0]


def _normal(machine: Machine, *shape: int) -> Tensor:
    return torch.randn(shape, device=machine.device).to(machine.dtype)
