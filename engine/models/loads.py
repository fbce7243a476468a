"""Counts of the tokens that each expert of a model has computed."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.ranks.collective import NO_GROUP, Collective

STEPS = 32
"""Number of steps between two exchanges of the experts' loads among the ranks."""
Counts = NDArray[np.int64]


class ExpertLoads:
    """Tokens that each expert of each layer was chosen for, since start. Kernels count; one thread at a time makes
    calls, and any thread reads `totals` and `rank_totals`.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        held: int | None = None,
        group: Collective = NO_GROUP,
        parts: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            layers: with experts, that are here.
            experts: of a layer, on all ranks together.
            held: slots for experts whose tokens this rank counts, its own experts first; None for all experts.
            group: ranks that count the others, in order of the experts.
            parts: ranks with different experts; the others count what one of these does.
            device: of the kernels that count.
        """
        self._group, self._copies = (NO_GROUP, 1) if held is None else (group, group.size // parts)
        self.ranks = parts if held is not None else 1
        """Number of parts that the experts are divided into, whole ones, on different ranks."""
        self._steps = 0
        self._counts = torch.zeros((layers, held or experts), dtype=torch.int64, device=device)
        own = np.arange(experts).reshape(self.ranks, -1)
        slots = np.pad(own, ((0, 0), (0, self._counts.shape[1] - own.shape[1])), constant_values=-1)
        self.slots = np.repeat(slots[None], layers, 0)
        """[layers, ranks, slots] the expert in each slot; -1 without. It may change when `stepped` has returned True,
        before the next step."""
        self._experts = experts
        self._begin()

    def _begin(self) -> None:
        layers, ranks, _ = self.slots.shape
        self.recent: Counts = np.zeros((layers, self._experts), np.int64)
        """[layers, experts] tokens between the last two times that ranks told each other."""
        self._known = np.zeros_like(self.recent)
        self._of_ranks = np.zeros((layers, ranks), np.int64)

    def of(self, layer: int) -> Tensor:
        """int64 [held] counts of one layer, which kernels add to."""
        return self._counts[layer]

    def stepped(self) -> bool:
        """Counts a step. With each STEPS-th one, the ranks learn each other's counts; whether it was such a step.

        Raises:
            CollectiveError: another rank is lost.
        """
        self._steps += 1
        if self.ranks == 1 or self._steps % STEPS:
            return False
        # Converted to a type that every collective carries.
        found = self._group.gather(self._counts.cpu().view(torch.int32)).numpy().view(np.int64)
        counts = found[:: self._copies].swapaxes(0, 1)
        self._clear()
        # One column more, for slots without an expert.
        recent = np.zeros((len(counts), self._experts + 1), np.int64)
        np.add.at(recent, (np.arange(len(counts))[:, None, None], self.slots), counts)
        self.recent = recent[:, :-1]
        self._known = self._known + self.recent
        self._of_ranks = self._of_ranks + counts.sum(2)
        return True

    def _clear(self) -> None:
        with torch.inference_mode():  # the counts may have been made in it
            self._counts.zero_()

    def forget(self) -> None:
        """Resets the counts. All ranks make this call between the same two steps."""
        self._clear()
        self._steps = 0
        self._begin()

    @property
    def totals(self) -> Counts:
        """[layers, experts]; where ranks have whole experts, as of the last time that they told each other."""
        # A rank that counts all experts knows what it counts at once.
        known: Counts = self._counts.cpu().numpy() if self.ranks == 1 else self._known
        return known.copy()

    @property
    def rank_totals(self) -> Counts:
        """[layers, ranks] tokens of the experts that each rank has computed, as of the same time."""
        return self.totals.sum(1, keepdims=True) if self.ranks == 1 else self._of_ranks
