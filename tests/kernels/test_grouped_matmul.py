"""Products of experts on GPU: exact up to rounding, whatever experts rows choose, within the limits of GPUs."""

import pytest
import torch
from test_quant_gemv import DEVICE, blank, normal
from test_quant_matmul import FORMATS
from torch import Tensor
from triton_compile import Compiler, each_architecture

from kvrelay.kernels import reference
from kvrelay.kernels.triton.grouped_matmul import FEW, MANY, GroupedExperts, GroupedMatmul, Pairs
from kvrelay.kernels.triton.quant_gemv import QuantizedWeight
from kvrelay.kernels.triton.quant_linear import quantized

NAMES = "int8", "int4", "fp8", "fp8 in blocks"
PROGRAMS = 3
EXPERTS, OUTPUTS, INPUTS = 6, 70, 320


def choices(rows: int, top: int, seed: int) -> Tensor:
    """int64 [rows, top]: few experts have most rows, some have none, and some pairs name no expert."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor([8.0, 4.0, 0.0, 1.0, 0.5, 0.0, 0.5])
    return torch.multinomial(weights.expand(rows, -1), top, generator=generator).to(DEVICE)


def weights_of(name: str) -> tuple[Tensor | QuantizedWeight, Tensor]:
    """The weights of all experts, and as they are dequantized."""
    plain = normal(EXPERTS * OUTPUTS, INPUTS) / INPUTS**0.5
    if name == "dense":
        return plain.half(), plain.half().float()
    weight = FORMATS[name](plain)
    return quantized(weight, torch.float16), weight.dequantize()


@pytest.mark.parametrize("name", ["dense", *(pytest.param(name, marks=pytest.mark.more) for name in NAMES)])
def test_a_product(name: str) -> None:
    """Few rows and many, of a step's rows and of pairs; later launches repeat one before."""
    weight, dense = weights_of(name)
    bias = normal(EXPERTS * OUTPUTS, dtype=torch.float16)
    product = GroupedMatmul(weight, bias, EXPERTS, PROGRAMS)
    expected = dense.view(EXPERTS, OUTPUTS, INPUTS)
    for rows in (1, 5, 70, 5):
        x, chosen = normal(rows, INPUTS, dtype=torch.float16, seed=rows), choices(rows, 2, rows)
        pairs = Pairs.of(chosen, EXPERTS)
        assert pairs.block == (FEW if rows < 70 else MANY)
        count = int(pairs.begins[-1])
        for gathered in (False, True):
            source = x[pairs.source.long()].contiguous() if gathered else x
            found = product(source, pairs, gathered=gathered)[:count]
            expert = chosen.flatten().sort(stable=True).values[:count]
            wanted = torch.einsum("pk,pnk->pn", x[pairs.source[:count].long()].float(), expected[expert])
            wanted += bias.view(EXPERTS, OUTPUTS)[expert].float()
            torch.testing.assert_close(found.float(), wanted, rtol=4e-3, atol=4e-3 * float(wanted.abs().max()))


def test_a_layer() -> None:
    rows, inner = 40, 48
    up, down = normal(EXPERTS, 2 * inner, INPUTS) / INPUTS**0.5, normal(EXPERTS, INPUTS, inner) / inner**0.5
    first, second = (GroupedMatmul(each.half().flatten(0, 1), None, EXPERTS, PROGRAMS) for each in (up, down))
    x, chosen, shares = normal(rows, INPUTS), choices(rows, 3, 1), torch.rand(rows, 3, device=DEVICE)
    layer, load = GroupedExperts(first, reference.silu_mul, second, EXPERTS), torch.ones(EXPERTS, dtype=torch.int64)
    layer.count(load := load.to(DEVICE))
    found = layer(x.half(), chosen, shares).float()
    assert (load - 1 == chosen.flatten().bincount(minlength=EXPERTS + 1)[:EXPERTS]).all()
    products = [[reference.linear(weight, None) for weight in each] for each in (up, down)]
    expected = reference.experts(x, chosen, shares, products[0], reference.silu_mul, products[1])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="weight has 70 outputs; allowed: a multiple of 6, the number of experts"):
        GroupedMatmul(normal(70, 64), None, 6, 1)
    product = GroupedMatmul(normal(60, 64, dtype=torch.float16), None, 6, 1)
    pairs = Pairs.of(choices(4, 2, 0), EXPERTS)
    with pytest.raises(ValueError, match=r"x is \[4, 63\]; allowed: \[4, 64\]"):
        product(normal(4, 63, dtype=torch.float16), pairs, gathered=False)


def multiply(name: str, block: int) -> None:
    """A layer of 64 experts [2048, 2048] of zeros."""
    rows, experts = 64 * 2048, 64
    dense = name == "dense"
    weight = torch.zeros(rows, 2048, dtype=torch.bfloat16) if dense else blank(name, rows, 2048)
    tokens = 8 if block == FEW else 512
    pairs = Pairs.of(torch.zeros(tokens, 8, dtype=torch.int64), experts)
    assert pairs.block == block
    product = GroupedMatmul(weight, None, experts, 132)
    product(torch.zeros(tokens, 2048, dtype=torch.bfloat16), pairs, gathered=False)


@pytest.mark.parametrize("block", [FEW, MANY])
@pytest.mark.parametrize("name", ["dense", "int4", "int8", "fp8", "blocks"])
@each_architecture
def test_compiled(compiler: Compiler, architecture: int, name: str, block: int) -> None:
    (kernel,) = compiler.compile(architecture, multiply, name, block)
    kernel.check_fits()
    assert kernel.tensor_cores
