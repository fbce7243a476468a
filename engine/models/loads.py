"""How many tokens each expert of a model has computed."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.ranks.collective import NO_GROUP, Collective

STEPS = 32
"""Steps from one time that ranks tell each other the loads of their experts to the next."""


class ExpertLoads:
    """Tokens that each expert of each layer was chosen for, since start. Kernels count; one thread at a time makes
    calls, and any thread reads `totals`.
    """

    def __init__(self, layers: int, experts: int, held: range | None = None, group: Collective = NO_GROUP) -> None:
        """
        Args:
            layers: with experts, that are here.
            experts: of a layer, on all ranks together.
            held: experts whose tokens this rank counts; None for all of them.
            group: ranks that hold the others.
        """
        self.held = held or range(experts)
        self._group, self._steps = (NO_GROUP if held is None else group), 0
        self._counts = torch.zeros(layers, len(self.held), dtype=torch.int64)
        whole = torch.zeros(layers, experts, dtype=torch.int64)
        self._known = self._counts if self._group.size == 1 else whole

    @property
    def ranks(self) -> int:
        """Number of ranks that hold whole experts, each as many: those with the lowest numbers are rank 0's."""
        return self._group.size

    def of(self, layer: int) -> Tensor:
        """int64 [held] counts of one layer, which kernels add to."""
        return self._counts[layer]

    def stepped(self) -> None:
        """Counts a step. With each STEPS-th one, the ranks learn each other's counts.

        Raises:
            CollectiveError: another rank is lost.
        """
        self._steps += 1
        if self._group.size > 1 and self._steps % STEPS == 0:
            # As numbers that every collective carries.
            parts = self._group.gather(self._counts.view(torch.int32)).view(torch.int64)
            self._known = torch.cat(tuple(parts), 1)

    def forget(self) -> None:
        """Begins anew. All ranks make this call between the same two steps."""
        self._counts.zero_()
        self._steps = 0
        if self._known is not self._counts:
            self._known = torch.zeros_like(self._known)

    @property
    def totals(self) -> NDArray[np.int64]:
        """[layers, experts]; of several ranks with whole experts, as of the last time that they told each other."""
        found: NDArray[np.int64] = self._known.numpy().copy()
        return found
