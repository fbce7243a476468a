"""Swaps a model's RMS norms, which transformers computes in half a dozen operations, for native ones, or torch's own.

A module is swapped if it gives the same numbers: some add 1 to the weight, some scale before they round.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from kvrelay.kernels.cpu.packed import PackedNorm
from kvrelay.kernels.cpu.program import Team

CLASS_END = "RMSNorm"
EPSILONS = ("variance_epsilon", "eps", "epsilon")
ROWS = 3


class Norm(nn.Module):
    """`rms_norm` with the weight that a module has."""

    def __init__(self, original: nn.Module, weight: Tensor, eps: float, scale: Tensor) -> None:
        """
        Args:
            original: the module.
            weight: as the module holds it.
            scale: what it multiplies by.
        """
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps
        self._scale, self._shape = scale, scale.shape
        self._original = (original,)  # in a tuple, so that it is no part of this module
        self.native: PackedNorm | None = None
        """The native kernel; None if there is none."""

    def use(self, team: Team) -> None:
        """Uses native kernels for inputs of the weight's type from now on."""
        if self._scale.dtype in (torch.float32, torch.bfloat16):
            self.native = PackedNorm(team, self._scale, self.variance_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[-1:] != self._shape:
            # Some modules normalize a part of the numbers that their weight covers, and don't multiply by the weight
            # then.
            other: Tensor = self._original[0](hidden_states)
            return other
        if self.native is not None and hidden_states.dtype == self._scale.dtype:
            return self.native(hidden_states)
        return rms_norm(hidden_states, self._shape, self._scale, self.variance_epsilon)


def swap_norms(model: nn.Module, team: Team | None = None) -> int:
    """Swaps the norms that give the same numbers; returns how many.

    Args:
        team: threads of the native kernels, where those may be used.
    """
    swapped = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            norm = _same(child)
            if norm is not None:
                if team is not None:
                    norm.use(team)
                setattr(parent, name, norm)
                swapped += 1
    return swapped


def _same(module: nn.Module) -> Norm | None:
    """The `Norm` that gives the same numbers as the module; None if there is none."""
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    if not type(module).__name__.endswith(CLASS_END) or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or module._forward_hooks or module._forward_pre_hooks:  # noqa: SLF001  # torch has no other name
        return None
    generator = torch.Generator().manual_seed(0)
    given = 2 * torch.randn((1, ROWS, len(weight)), generator=generator)
    given = given.to(weight.device, weight.dtype)
    with torch.inference_mode():
        try:
            expected = module(given)
        except Exception:  # noqa: BLE001  # it takes other arguments
            return None
        rounding = 2 * torch.finfo(weight.dtype).eps
        for scale in (weight.detach(), (1.0 + weight.float()).to(weight.dtype)):
            norm = Norm(module, weight.detach(), eps, scale)
            found = norm(given)
            same = found.shape == expected.shape and found.dtype == expected.dtype
            if same and torch.allclose(found.float(), expected.float(), rtol=rounding, atol=rounding):
                return norm
    return None
