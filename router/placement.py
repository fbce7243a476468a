"""Chooses the workers of a request. The policy decides from values and does no I/O: a simulator can run it too."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvrelay.rpc.identity import WorkerId

WorkerRole = Literal["prefill", "decode", "colocated"]


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """A decode worker's KV memory: its latest report, and the requests that this router has sent since."""

    block_size: int
    """Tokens per block."""
    total: int
    """Blocks of its pool."""
    free: int
    """Blocks that a reservation may take; blocks used by the prefix cache only are among them."""
    free_slots: int
    """How many more requests the worker can admit."""
    promised_requests: int = 0
    """Requests on their way to the worker that have no blocks there yet, from all routers."""
    promised_blocks: int = 0
    """Blocks that those requests will need."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a prompt of `tokens` needs to start decoding, at most the whole pool."""
        return min(self.total, -(-(tokens + 1) // self.block_size))

    def fits(self, tokens: int) -> bool:
        """Whether there is capacity for a prompt of `tokens` after all promised requests."""
        enough_blocks = self.promised_blocks + self.blocks_for(tokens) <= self.free
        if enough_blocks and self.promised_requests < self.free_slots:
            return True
        # An empty worker can't free more blocks: let it accept or refuse.
        return self.free == self.total and not self.promised_requests


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as a policy sees it."""

    id: WorkerId
    role: WorkerRole
    ready: bool
    """Takes new requests: in state ready, connected, and with the cluster's model."""
    outstanding_tokens: int = 0
    """Tokens that this router has submitted to the worker and that are not known to be computed."""
    pending_tokens: int = 0
    """Tokens that the worker has yet to compute for all routers, by its own report."""
    kv_tokens: int = 0
    """Tokens that its KV pool holds; 0 before its first report."""
    capacity: DecodeCapacity | None = None
    """Of a decode worker; None before its first report."""

    @property
    def load(self) -> int:
        """Tokens of work before a new request. Both terms count: a report lags behind what was just submitted."""
        return self.outstanding_tokens + self.pending_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of its workers."""

    prompt_tokens: int
    """Tokens to prefill: the prompt and, on a later attempt, the tokens that the client has."""
    decode_tokens: int
    """Most tokens to generate after the first one; 0 needs no decode worker."""
    avoid: frozenset[WorkerId] = frozenset()
    """Workers to use only if there are no others."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of a request: the same worker twice if it is co-located; no decode worker for a single token."""

    prefill: WorkerId
    decode: WorkerId | None

    @property
    def workers(self) -> frozenset[WorkerId]:
        return frozenset((self.prefill,) if self.decode is None else (self.prefill, self.decode))


class NoPlace(enum.Enum):
    """Why a request can't be placed now."""

    NO_WORKERS = "no workers"
    """The workers that are ready can't serve a request."""
    NO_CAPACITY = "no capacity"
    """No decode worker is expected to have capacity at the end of the prompt's prefill: the request has to wait."""


class LeastLoaded:
    """Chooses the prefill and the decode worker with the least load, or a co-located one with less than both together.

    Equally loaded workers take turns. A decode worker is chosen if it has capacity for the prompt. A limited backlog of
    prompts may also be computed ahead for a worker without: their KV waits in prefill memory.
    """

    def __init__(self, backlog_share: float = 0.0) -> None:
        """
        Args:
            backlog_share: largest share of the prefill workers' KV memory that may hold prompts waiting for decode.
        """
        self._backlog_share = backlog_share
        self._turn = 0
        self._last_turn: dict[WorkerId, int] = {}

    def place(self, demand: Demand, workers: Sequence[WorkerView]) -> Placement | NoPlace:
        ready = [worker for worker in workers if worker.ready]
        open_ = [worker for worker in ready if worker.role != "decode" or self._accepts(demand, worker, ready)]
        options = self._options(demand, open_)
        if not options:
            return NoPlace.NO_CAPACITY if self._options(demand, ready) else NoPlace.NO_WORKERS
        chosen = min(options, key=lambda option: self._cost(demand, option))
        self._turn += 1
        self._last_turn = {worker.id: self._last_turn[worker.id] for worker in workers if worker.id in self._last_turn}
        self._last_turn |= {worker.id: self._turn for worker in chosen}
        decode = chosen[-1].id if demand.decode_tokens or chosen[-1].role == "colocated" else None
        return Placement(chosen[0].id, decode)

    def _options(self, demand: Demand, workers: Sequence[WorkerView]) -> list[list[WorkerView]]:
        """The best pair of workers and the best co-located worker, if there are any. A single token needs no pair."""
        best: dict[WorkerRole, WorkerView] = {}
        for worker in sorted(workers, key=lambda worker: self._cost(demand, [worker])):
            best.setdefault(worker.role, worker)
        pair: tuple[WorkerRole, ...] = ("prefill", "decode") if demand.decode_tokens else ("prefill",)
        alone: tuple[WorkerRole, ...] = ("colocated",)
        return [[best[role] for role in roles] for roles in (pair, alone) if best.keys() >= set(roles)]

    def _accepts(self, demand: Demand, decode: WorkerView, ready: Sequence[WorkerView]) -> bool:
        """Whether such a prompt may be computed for `decode` now."""
        capacity = decode.capacity
        if capacity is None or capacity.fits(demand.prompt_tokens):
            return True
        decode_workers = sum(worker.role == "decode" for worker in ready)
        prefill_tokens = sum(worker.kv_tokens for worker in ready if worker.role == "prefill") / decode_workers
        backlog = (capacity.promised_blocks + capacity.blocks_for(demand.prompt_tokens)) * capacity.block_size
        return backlog <= self._backlog_share * prefill_tokens

    def _cost(self, demand: Demand, option: Sequence[WorkerView]) -> tuple[int, int, int]:
        """Sort key: workers to avoid, then load, then the latest turn."""
        return (
            sum(worker.id in demand.avoid for worker in option),
            sum(worker.load for worker in option),
            max(self._last_turn.get(worker.id, 0) for worker in option),
        )


def complete(workers: Sequence[WorkerView]) -> bool:
    """Whether any request can be placed: a prefill and a decode worker, or a co-located one, are ready."""
    roles = {worker.role for worker in workers if worker.ready}
    return "colocated" in roles or {"prefill", "decode"} <= roles
