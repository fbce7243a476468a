"""Ships the last chunk of a prompt by groups of layers, while its later layers compute. All on the engine thread."""

import time
from collections.abc import Callable

import numpy as np

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.sequence import Sequence
from kvrelay.transfer.messages import Key
from kvrelay.transfer.overlap import ComputeCost, Overlap, borders


class LayerGroups:
    """The `LayerWatch` of a prefill worker's runner."""

    def __init__(
        self,
        groups: int,
        layout: KVLayout,
        threads: int,
        frame_cost: Callable[[Key], tuple[float, float] | None],
        ship: Callable[[Sequence, int], None],
    ) -> None:
        """
        Args:
            groups: how many; 0 chooses for each step by cost.
            threads: of the computation, which the link's work takes cores from.
            frame_cost: `KVSender.frame_cost`.
            ship: gives the exporter what a sequence's step has computed in its first layers.
        """
        self._groups = groups
        self._layout = layout
        # The link's thread here, and the other end's, which may be on this machine too.
        self._contention = min(1.0, 2 / threads)
        self._frame_cost = frame_cost
        self._ship = ship
        self._compute = ComputeCost()
        self._began: tuple[float, int] | None = None
        self._watched: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}
        """Those that compute and are handed over, by handle."""

    def borders(self, plan: StepPlan) -> tuple[int, ...]:
        self._began = time.monotonic(), plan.num_tokens
        last = [(self.sequences.get(plan.handles[row]), int(plan.lengths[row])) for row in np.flatnonzero(plan.sample)]
        chunks = [(sequence, length) for sequence, length in last if sequence is not None]
        self._watched = [sequence for sequence, _ in chunks]
        groups = max((self._choose(sequence, length, plan.num_tokens) for sequence, length in chunks), default=1)
        return borders(self._layout.layers, groups)

    def passed(self, plan: StepPlan, layers: int) -> None:
        for sequence in self._watched:
            self._ship(sequence, layers)

    def forget(self, key: Key) -> None:
        """A sequence is over."""
        self.sequences = {handle: each for handle, each in self.sequences.items() if each.request.key != key}

    def ended(self) -> None:
        """The step is over."""
        if self._began is not None:
            began, tokens = self._began
            self._compute.observe(tokens, time.monotonic() - began)
            self._began = None

    def _choose(self, sequence: Sequence, length: int, step_tokens: int) -> int:
        if self._groups:
            return min(self._groups, self._layout.layers)
        cost, per_token = self._frame_cost(sequence.request.key), self._compute.per_token
        if cost is None or per_token is None:
            return 1
        overlap = Overlap(per_token * step_tokens, length * self._layout.token_bytes, *cost, self._contention)
        return overlap.groups(self._layout.layers)
