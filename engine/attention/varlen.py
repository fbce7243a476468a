"""Rows of several tokens by PyTorch's `torch.nn.attention.varlen`, which reads the pool's pages where they are.

PyTorch has its block table from 2.13 on. Its own kernels (FlashAttention 2) take pages of multiples of 256 slots only,
and blocks have 128 at most. So it computes by a package that PyTorch activates for the whole process: FlashAttention 3
(`flash_attn_interface`) on Hopper, FlashAttention 4 (`flash_attn.cute`) on Blackwell.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, to_device
from kvrelay.engine.attention.prefill import PlannedPrefill, Shapes, bounds, check_shapes
from kvrelay.engine.config import PrefillKernel
from kvrelay.engine.packages import Unavailable, check_parameters, imported
from kvrelay.kernels.triton.paged import PagedKV

PACKAGE = "PyTorch's varlen_attn"
PARAMETERS = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
IMPLEMENTATIONS = {9: ("FA3", range(8, 257, 8)), 10: ("FA4", range(8, 129, 8))}
"""PyTorch's name of the package, and the head sizes that it takes with a block table, by the GPU's generation (the
first number of its compute capability)."""


@dataclass(frozen=True, slots=True, eq=False)
class VarlenStep:
    """Implements `PlannedPrefill`."""

    attend: Callable[..., object]
    """`varlen_attn_out`."""
    tokens: slice
    """Tokens of these rows."""
    offsets: Tensor
    """int32 [R + 1]: where each row's tokens begin within `tokens`, and the end of all."""
    longest: tuple[int, int]
    """Tokens of the row with most in this step, and of the row with most in its sequence."""
    contexts: Tensor
    """int32 [R]."""
    tables: Mapping[int, Tensor]
    """int32 [R, W] by window."""

    def launch(self, query: Tensor, kv: PagedKV, window: int, out: Tensor) -> None:
        """See `PlannedPrefill.launch`."""
        keys, values = (kv.pool[:, kv.layer, kind].transpose(1, 2) for kind in (0, 1))
        self.attend(
            out[self.tokens],
            query[self.tokens],
            keys,
            values,
            self.offsets,
            None,
            *self.longest,
            scale=query.shape[-1] ** -0.5,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=True,
            seqused_k=self.contexts,
            block_table=self.tables[window],
            # Parts of a row's keys would be added up in an order that depends on the batch.
            num_splits=1,
        )


class VarlenPrefill:
    """Implements `Prefill`."""

    name: PrefillKernel = "varlen_attn"

    def __init__(self, shapes: Shapes) -> None:
        """
        Raises:
            Unavailable: PyTorch lacks it or can't activate the package for this GPU, or that doesn't take these shapes.
        """
        found = IMPLEMENTATIONS.get(shapes.architecture // 10)
        if found is None:
            raise Unavailable(f"the GPU is of architecture {shapes.architecture}, and {PACKAGE} is for 90 and 100")
        implementation, dims = found
        check_shapes(shapes, PACKAGE, dims)
        self._attend = imported("torch.nn.attention.varlen", "varlen_attn_out", PACKAGE)
        check_parameters(self._attend, PARAMETERS, PACKAGE, "PyTorch 2.13")
        activate = imported("torch.nn.attention", "activate_flash_attention_impl", PACKAGE)
        if imported("torch.nn.attention", "current_flash_attention_impl", PACKAGE)() != implementation:
            try:
                activate(implementation)
            except Exception as error:  # the package is imported, which may raise anything
                raise Unavailable(f"{PACKAGE} can't activate {implementation} ({error})") from error
        self._device, self._windows = shapes.device, shapes.windows

    def plan(self, inputs: AttentionInputs, first: int) -> PlannedPrefill:
        """See `Prefill.plan`."""
        lengths = inputs.lengths[first:]
        return VarlenStep(
            self._attend,
            slice(int(inputs.lengths[:first].sum()), int(inputs.lengths.sum())),
            to_device(bounds(lengths), self._device),
            (int(lengths.max()), int((inputs.starts[first:] + lengths).max())),
            inputs.contexts[first:],
            {window: inputs.of(window).block_tables[first:] for window in self._windows},
        )
