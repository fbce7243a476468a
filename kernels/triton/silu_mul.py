"""The gate of a gated MLP.

    out[t, i] = act(gate_up[t, i]) * gate_up[t, I + i]    (in float32)
    act(x)    = x / (1 + exp(-x)), silu, or
                x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3): gelu, approximated by tanh

    gate_up  [T, 2 I] contiguous, gate first
    out      [T, I]

Grid: (T, ceil(I / BLOCK)). Limit: memory: 3 T I numbers, gate and up read and their product written.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.triton.launch import Repeat, launch
from kvrelay.kernels.triton.overlap import begin_after_inputs, overlapping

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, inner, GELU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin_after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    source = gate_up + row * 2 * inner + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        slope = gate * (1.5957691216 + 0.0713548163 * gate * gate)
    tl.store(out + row * inner + column, (gate / (1.0 + tl.exp(-slope)) * up).to(out.dtype.element_ty), mask=inside)


class SiluMul:
    """The product, prepared: a call with a tensor like that of a call before repeats its launch."""

    def __init__(self, gelu: bool = False) -> None:
        self._gelu = gelu
        self._known: dict[object, Repeat] = {}

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, I] of gate_up [T, 2 I].

        Raises:
            ValueError: the tensor has another shape than it should.
        """
        like = gate_up.shape[1:], gate_up.dtype
        known = self._known.get(like)
        if known is None or not gate_up.is_contiguous():
            _check(gate_up)
        rows, columns = gate_up.shape
        inner = columns // 2
        out = gate_up.new_empty((rows, inner))
        grid = (rows, -(-inner // BLOCK), 1)
        if not rows:
            return out
        if known is None:
            made = launch(
                silu_mul_kernel, grid, gate_up, out, inner, GELU=self._gelu, BLOCK=BLOCK, num_warps=4, **overlapping()
            )
            self._known[like] = made.repeating("gate_up", "out")
        else:
            known(grid, gate_up, out)
        return out


def _check(gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.shape[1] or not gate_up.is_contiguous():
        raise ValueError(f"gate_up is {list(gate_up.shape)}, strides {gate_up.stride()}; allowed: [T, 2 I], contiguous")
