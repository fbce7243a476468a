"""Rows of a step on their way to the experts of other ranks, and back (`expert_exchange`: all_to_all).

Each rank computes a layer of experts for its own part of the step's rows, and asks the ranks whose experts these have
chosen:

    scatter   each rank gets all ranks' parts of the attention's result of its own rows, and adds them up
              norm, router, experts' numbers and shares of own rows: native kernels
    send      own rows go to the ranks that hold experts of theirs, each row once to a rank
              the rank's experts, for all rows that came: native kernels
    collect   sums of each rank's experts come back, and are added up in order of the ranks; then each rank gets all
              ranks' rows

All parts are added in the order in which a sum over all ranks adds them, so that both ways compute the same bits.
"""

import ctypes

import torch
from torch import Tensor

from kvrelay.engine.ranks.collective import Collective
from kvrelay.kernels.cpu.experts import Pairs
from kvrelay.kernels.cpu.packed import Arena, rows_of
from kvrelay.kernels.routing import Routing


class Dispatch:
    """The buffers of layers of experts whose rows are exchanged, one layer after the other, and the exchanges."""

    def __init__(self, group: Collective, routing: Routing, hidden: int, capacity: int, workspace_bytes: int) -> None:
        """
        Args:
            hidden: width of the rows.
            capacity: largest number of rows of all ranks together.
            workspace_bytes: of the router's kernel.
        """
        self._group, self._hidden, self._top = group, hidden, routing.top
        arena, own = Arena(), -(-capacity // group.size)
        self.residual, self.normed = rows_of(arena, own, hidden), rows_of(arena, own, hidden)
        """float32 [own rows, hidden]."""
        self.scores = rows_of(arena, own, routing.experts)
        self.chosen = Pairs(own * routing.top, 0, 0, 0, workspace_bytes)
        """Buffers of the own rows' experts and shares."""
        self.came = rows_of(arena, capacity, hidden + 2 * routing.top)
        """float32 [rows that came, hidden]; behind each row are its experts' numbers and its shares."""
        self.results = rows_of(arena, capacity, hidden)
        self._own_rows, self._came_rows = ctypes.c_int64(), ctypes.c_int64()
        self._ends = [0]
        self._sources = torch.empty(0, dtype=torch.int64)
        self._sent: list[int] = []
        self._received: list[int] = []

    @property
    def own_rows(self) -> int:
        """Address of the number of own rows."""
        return ctypes.addressof(self._own_rows)

    @property
    def came_rows(self) -> int:
        """Address of the number of rows that came."""
        return ctypes.addressof(self._came_rows)

    def begin(self, rows: int) -> None:
        """Divides a step's rows among the ranks."""
        size, place = self._group.size, self._group.place
        self._ends = [rows * rank // size for rank in range(size + 1)]
        self._own_rows.value = self._ends[place + 1] - self._ends[place]

    def scatter(self, update: Tensor, residual: Tensor) -> None:
        """Adds up the own rows of all ranks' `update`, and the residual, both [rows, hidden or more].

        Raises:
            CollectiveError: another rank is lost.
        """
        size, place, own = self._group.size, self._group.place, self._own_rows.value
        sent = [end - begin for begin, end in zip(self._ends[:-1], self._ends[1:], strict=True)]
        given = update[: self._ends[-1], : self._hidden].contiguous()
        found, _ = self._group.exchange(given, sent, [own] * size)
        total, *others = found.view(size, own, self._hidden)
        for other in others:
            total += other
        first = self._ends[place]
        torch.add(residual[first : first + own, : self._hidden], total, out=self.residual[:own, : self._hidden])

    def send(self, pairs: Pairs, ranks: Tensor, slots: Tensor) -> None:
        """Sends the own rows to the ranks of their experts, and fills `came` and the experts and shares of `pairs`.

        Args:
            ranks, slots: int32 [phases, experts] the rank, and the slot there, that computes an expert's rows; row r of
                the step is in phase r % phases.

        Raises:
            CollectiveError: another rank is lost.
        """
        own, top, size = self._own_rows.value, self._top, self._group.size
        chosen = self.chosen.chosen[: own * top].view(own, top)
        shares = self.chosen.shares[: own * top].view(own, top)
        first = self._ends[self._group.place]
        phases, experts = (torch.arange(first, first + own) % len(ranks))[:, None], chosen.long()
        homes = ranks[phases, experts]
        asked = torch.zeros(own, size, dtype=torch.bool).scatter_(1, homes.long(), True)
        # In order of the ranks, and for each of them in that of the rows.
        targets, self._sources = asked.T.nonzero().unbind(1)
        self._sent = asked.sum(0).tolist()
        sources = self._sources
        # A rank gets the slots of its own experts only.
        wanted = torch.where(homes[sources] == targets[:, None], slots[phases, experts][sources], -1)
        rows = torch.cat((self.normed[sources, : self._hidden], wanted.view(torch.float32), shares[sources]), 1)
        found, self._received = self._group.exchange(rows, self._sent, None, self._ends[-1])
        count = self._came_rows.value = len(found)
        self.came[:count, : found.shape[1]] = found
        numbers, last = found[:, self._hidden : self._hidden + top], found[:, self._hidden + top :]
        pairs.chosen[: count * top].view(count, top).copy_(numbers.view(torch.int32))
        pairs.shares[: count * top].view(count, top).copy_(last)

    def collect(self, residual: Tensor) -> None:
        """Adds what all ranks' experts have computed for the own rows, and gives all ranks' rows to `residual`.

        Raises:
            CollectiveError: another rank is lost.
        """
        own, hidden = self._own_rows.value, self._hidden
        given = self.results[: self._came_rows.value, :hidden].contiguous()
        found, _ = self._group.exchange(given, self._received, self._sent)
        total = torch.zeros(own, hidden)
        for rows, part in zip(torch.split(self._sources, self._sent), torch.split(found, self._sent), strict=True):
            total[rows] += part
        self.residual[:own, :hidden] += total
        most = max(end - begin for begin, end in zip(self._ends[:-1], self._ends[1:], strict=True))
        everyone = self._group.gather(self.residual[:most, :hidden].contiguous())
        for begin, end, part in zip(self._ends[:-1], self._ends[1:], everyone, strict=True):
            residual[begin:end, :hidden] = part[: end - begin]
