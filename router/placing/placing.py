"""The placing of a router's requests: the workers it knows, the policy that chooses among them, and the queues.

placed at once, if the policy finds a place
else waits in `queue` (a suspect in `trials`) until `wake`: workers report, requests end, members change
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from kvrelay.internal.v1.worker_pb2 import ForeignPrompt
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import Exhausted
from kvrelay.router.placing.health import FleetHealth
from kvrelay.router.placing.placement import Demand, NoPlace, Placement, why_waiting
from kvrelay.router.placing.predicted import policy_of
from kvrelay.router.placing.prefixes import PrefixIndex
from kvrelay.router.placing.prospects import Prospects
from kvrelay.router.placing.queue import PlacementQueue
from kvrelay.router.placing.registry import StreamMaker, WorkerRegistry
from kvrelay.router.placing.usual import CompletionRate, UsualLengths
from kvrelay.router.placing.worker_stream import WorkerStream
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.identity import WorkerId

WAKE_SECONDS = 0.005
"""Seconds between two looks of the queues at the workers, each of which takes up to some milliseconds."""


class Placing:
    """Belongs to the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        credentials: Credentials,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        stream: StreamMaker = WorkerStream,
    ) -> None:
        """Knows no workers yet: `registry.update` tells the membership.

        Args:
            on_change: called when a worker comes, goes or changes its state.
            clock: time in seconds.
            stream: makes the streams to workers.
        """
        self._config = config
        self.policy = policy_of(
            config.placement,
            PrefixIndex(config.prefix_index_tokens),
            config.backlog_share,
            config.prefill_ahead_tokens,
        )
        self.health = FleetHealth(clock)
        self.lengths = UsualLengths()
        """Usual lengths of completions."""
        self.rate = CompletionRate(clock)
        # No more requests than max_requests can wait.
        most = config.max_requests if config.admission == "none" else config.max_queue
        self.queue = PlacementQueue(self._place, most, clock)
        self.trials = PlacementQueue(self._place, config.max_requests, clock)
        """Queue of suspects that wait for workers without another suspect (`router/session/suspects.py`)."""
        self.registry = WorkerRegistry(
            config.name, credentials, self.health, on_change, self.wake, self._learn, clock, stream
        )
        self.prospects = Prospects(self.queue, self.policy, self.registry.view, self.rate, clock)
        self._waking: asyncio.TimerHandle | None = None
        self._woken = 0.0
        """Time of the queues' last look at the workers, on the loop's clock."""

    @property
    def waiting(self) -> int:
        """Requests in the queues for capacity on a decode worker, or for workers without another suspect."""
        return len(self.queue) + len(self.trials)

    def wake(self) -> None:
        """Lets the queues look at the workers: soon, since workers report with every step."""
        if self._waking is None and self.waiting:
            loop = asyncio.get_running_loop()
            self._waking = loop.call_at(max(loop.time(), self._woken + WAKE_SECONDS), self._look_again)

    def full(self, text: str, kind: type[Exhausted] = Exhausted) -> Exhausted:
        """The error of a request that found no room: it says when there may be some."""
        return kind(text, self.rate.retry_seconds(len(self.queue), self.prospects.room_seconds()))

    def why_waiting(self, demand: Demand) -> str:
        """The reason, in words, why a request can't be placed now."""
        return why_waiting(demand, self.registry.view(), self._config.prefill_ahead_tokens)

    def _place(self, demand: Demand) -> Placement | NoPlace:
        # What is usual may have changed since the request came.
        if demand.expected_tokens and not demand.begun:
            expected = self.lengths.expected(demand.holder, demand.decode_tokens + 1)
            demand = replace(demand, expected_tokens=expected)
        return self.policy.place(demand, self.registry.view(), self.queue.rivals(demand))

    def _learn(self, worker: WorkerId, prompt: ForeignPrompt, block_size: int) -> None:
        cached = prompt.cached_tokens if prompt.HasField("cached_tokens") else None
        self.policy.learn(worker, prompt.chain, cached, block_size, self.registry.view)

    def _look_again(self) -> None:
        self._waking, self._woken = None, asyncio.get_running_loop().time()
        self.trials.wake()
        self.queue.wake()
