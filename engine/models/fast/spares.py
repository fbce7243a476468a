"""Where experts are whose ranks hold whole ones: each rank has its own, and may have room for a few copies of others',
those that are asked most.

A rank's slots are its own experts, in order, and behind them its spare ones. The tokens of an expert with several
copies take turns: token t of a step goes to copy t % PHASES % copies, so that all ranks know which one computes it.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.models.loads import ExpertLoads
from kvrelay.engine.models.reading.experts import ExpertsTraits
from kvrelay.engine.ranks.collective import Collective
from kvrelay.kernels.cpu.packed import PackedLinear

logger = logging.getLogger(__name__)

CHECKED = 8
"""Layers that are looked at together, for which copies may move; they take turns."""
GAIN = 1.1
"""How many times less the busiest rank must have to do before copies of a layer's experts are moved."""
LEAST_TOKENS = 16
"""Tokens of an expert, on average, without which a load says nothing."""
KEPT = 0.5
"""Share of the load of before that counts beside the newest."""

MOST_COPIES = 4
PHASES = 12
"""Multiple of all numbers of copies, up to MOST_COPIES."""
EMPTY = -1

Slots = NDArray[np.int32]
"""[ranks, slots] the expert in each slot; EMPTY in a spare one without."""


def placed(loads: NDArray[np.float64], ranks: int, spares: int) -> Slots:
    """The slots that suit the loads [experts]: one copy after the other, of the expert with the most tokens for a copy,
    on the rank with the least to do, as long as that rank doesn't become the busiest one by it."""
    own = len(loads) // ranks
    slots = np.full((ranks, own + spares), EMPTY, np.int32)
    slots[:, :own] = np.arange(len(loads)).reshape(ranks, own)
    copies = np.ones(len(loads), np.int64)
    for _ in range(ranks * spares):
        work = rank_loads(slots, loads)
        for expert in np.argsort(-loads / copies, kind="stable").tolist():
            share = loads[expert] / (copies[expert] + 1)
            # The last spare slot is the last one to be filled.
            free = (slots[:, -1] == EMPTY) & ~(slots == expert).any(1) & (work + share < work.max())
            if spares and free.any() and copies[expert] < MOST_COPIES:
                rank = int(np.where(free, work, np.inf).argmin())
                slots[rank, own + int((slots[rank, own:] != EMPTY).sum())] = expert
                copies[expert] += 1
                break
        else:
            break
    return slots


def rank_loads(slots: Slots, loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """[ranks] tokens of each rank's experts, if those of an expert are divided evenly among its copies."""
    filled = slots != EMPTY
    copies = np.bincount(slots[filled], minlength=len(loads))
    shares = loads / np.maximum(copies, 1)
    found: NDArray[np.float64] = np.where(filled, shares[slots], 0.0).sum(1)
    return found


def homes(slots: Slots, experts: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[PHASES, experts] the rank and the slot that compute the tokens of each expert, by the token's phase."""
    ranks, places = np.empty((PHASES, experts), np.int32), np.empty((PHASES, experts), np.int32)
    for expert in range(experts):
        on, at = np.nonzero(slots == expert)
        turn = np.arange(PHASES) % len(on)
        ranks[:, expert], places[:, expert] = on[turn], at[turn]
    return ranks, places


class SpareExperts:
    """The places of all layers' experts on the ranks of a group, which make the same calls between the same steps."""

    def __init__(
        self,
        group: Collective,
        experts: ExpertsTraits,
        weights: Sequence[Sequence[PackedLinear]],
        loads: ExpertLoads,
    ) -> None:
        """
        Args:
            weights: of each layer with experts, both of which have a part for each slot, one behind the other.
            loads: whose `slots` are kept.
        """
        self._group, self._experts, self._weights = group, experts, weights
        self._slots = loads.slots
        self._loads = np.zeros(loads.recent.shape)
        self._next = 0
        """Number of the layer that is looked at next."""
        shape = len(weights), PHASES if experts.spares else 1, experts.routing.experts
        self._ranks, self._places, self._here = (np.zeros(shape, np.int32) for _ in range(3))
        for layer in range(len(weights)):
            self._set(layer, self._slots[layer])

    def _set(self, layer: int, slots: Slots) -> None:
        phases = self._ranks.shape[1]
        ranks, places = homes(slots, self._experts.routing.experts)
        self._slots[layer], self._ranks[layer], self._places[layer] = slots, ranks[:phases], places[:phases]
        self._here[layer] = np.where(ranks == self._group.place, places, EMPTY)[:phases]

    def slots_of(self, layer: int) -> Tensor:
        """int32 [phases, experts] this rank's slot that computes an expert's rows, by their phase; -1 if none does. The
        same memory in each call."""
        return torch.from_numpy(self._here[layer])

    def homes_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """int32 [phases, experts] the rank, and the slot there, that computes an expert's rows, by their phase."""
        return torch.from_numpy(self._ranks[layer]), torch.from_numpy(self._places[layer])

    def follow(self, loads: ExpertLoads) -> None:
        """Moves the copies of one of the next layers, of that which gains most, if one gains enough.

        Raises:
            CollectiveError: another rank is lost.
        """
        spares, ranks = self._experts.spares, self._group.size
        self._loads = self._loads * KEPT + loads.recent
        if not spares:
            return
        best, layer, chosen = GAIN, -1, self._slots[0]
        layers = len(self._loads)
        turn = [(self._next + number) % layers for number in range(min(CHECKED, layers))]
        self._next += len(turn)
        for number in turn:
            load = self._loads[number]
            if load.mean() < LEAST_TOKENS:
                continue
            slots = placed(load, ranks, spares)
            gain = rank_loads(self._slots[number], load).max() / rank_loads(slots, load).max()
            if gain > best:
                best, layer, chosen = gain, number, slots
        if layer >= 0:
            self._move(layer, chosen)
            logger.info("copies of experts of layer %d moved: the busiest rank has %.2f times less to do", layer, best)

    def _move(self, layer: int, slots: Slots) -> None:
        """Sends each rank the weights of the copies that it gets, from the ranks whose own experts they are."""
        ranks, place, own = self._group.size, self._group.place, len(self._experts.own)
        parts = [
            tensor.view(-1).view(torch.uint8).view(self._experts.slots, -1)
            for linear in self._weights[layer]
            for tensor in linear.parts().values()
        ]
        fresh = [
            [
                (int(slots[rank, slot]), slot)
                for slot in range(own, slots.shape[1])
                if slots[rank, slot] not in (EMPTY, self._slots[layer, rank, slot])
            ]
            for rank in range(ranks)
        ]
        sent = [[expert % own for expert, _ in fresh[rank] if expert // own == place] for rank in range(ranks)]
        given = [torch.cat([part[slot] for part in parts]) for slots_of in sent for slot in slots_of]
        width = sum(part.shape[1] for part in parts)
        rows = torch.stack(given) if given else torch.empty(0, width, dtype=torch.uint8)
        mine = [[slot for expert, slot in fresh[place] if expert // own == rank] for rank in range(ranks)]
        found, _ = self._group.exchange(rows, [len(each) for each in sent], [len(each) for each in mine])
        for row, slot in zip(found, (slot for each in mine for slot in each), strict=True):
            for part, new in zip(parts, row.split([part.shape[1] for part in parts]), strict=True):
                part[slot] = new
        self._set(layer, slots)
