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

    def __init__(
        self, layers: int, experts: int, held: int | None = None, group: Collective = NO_GROUP, parts: int = 1
    ) -> None:
        """
        Args:
            layers: with experts, that are here.
            experts: of a layer, on all ranks together.
            held: experts whose tokens this rank counts; None for all of them.
            group: ranks that count the others, in order of the experts.
            parts: ranks with different experts; the others count what one of these does.
        """
        self._group, self._copies = (NO_GROUP, 1) if held is None else (group, group.size // parts)
        self.ranks = parts if held is not None else 1
        """Number of parts that the experts are divided into, whole ones, on different ranks."""
        self._steps = 0
        self._counts = np.zeros((layers, experts if held is None else held), np.int64)
        self._known = self._counts if self.ranks == 1 else np.zeros((layers, experts), np.int64)

    def of(self, layer: int) -> Tensor:
        """int64 [held] counts of one layer, which kernels add to."""
        return torch.from_numpy(self._counts[layer])

    def stepped(self) -> None:
        """Counts a step. With each STEPS-th one, the ranks learn each other's counts.

        Raises:
            CollectiveError: another rank is lost.
        """
        self._steps += 1
        if self.ranks > 1 and self._steps % STEPS == 0:
            # As numbers that every collective carries.
            found = self._group.gather(torch.from_numpy(self._counts.view(np.int32))).numpy().view(np.int64)
            self._known = np.concatenate(found[:: self._copies], 1)

    def forget(self) -> None:
        """Begins anew. All ranks make this call between the same two steps."""
        self._counts[...] = self._steps = 0
        if self.ranks > 1:
            self._known = np.zeros_like(self._known)

    @property
    def totals(self) -> NDArray[np.int64]:
        """[layers, experts]; of several ranks with whole experts, as of the last time that they told each other."""
        return self._known.copy()
