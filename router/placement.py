"""Which workers take a request. Policies decide from values alone, so that a simulator can run the very same ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

WorkerRole = Literal["prefill", "decode", "colocated"]


class WorkerKey(NamedTuple):
    """One life of one worker."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a policy knows of a worker."""

    key: WorkerKey
    role: WorkerRole
    ready: bool
    """Takes new requests: listed as ready, reached, of the cluster's model."""
    outstanding_tokens: int = 0
    """Tokens that this router has given it to compute and that are not known to be done."""
    pending_tokens: int = 0
    """As the worker itself reports, for all routers."""

    @property
    def load(self) -> int:
        """Tokens of work ahead of a new request. The worker's report lags behind what this router has just sent."""
        return self.outstanding_tokens + self.pending_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """What a placement needs to know of a request."""

    prompt_tokens: int
    """To prefill: the prompt and, on a later attempt, the tokens that the client has."""
    decode_tokens: int
    """To generate after the first one, at most; 0 needs no decode worker."""
    avoid: frozenset[WorkerKey] = frozenset()
    """Taken only where there is no other."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who prefills and who decodes: the same worker when it is co-located; no one decodes a single token."""

    prefill: WorkerKey
    decode: WorkerKey | None

    @property
    def workers(self) -> frozenset[WorkerKey]:
        return frozenset((self.prefill,) if self.decode is None else (self.prefill, self.decode))


class Policy(Protocol):
    """Decides where a request goes."""

    def place(self, demand: Demand, workers: Sequence[WorkerView]) -> Placement | None:
        """None: the ready workers can't serve a request."""


class LeastLoaded:
    """The prefill and the decode worker with the least work ahead, or a co-located one where that has less than both.

    Equally loaded workers are taken in turn.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._taken: dict[WorkerKey, int] = {}

    def place(self, demand: Demand, workers: Sequence[WorkerView]) -> Placement | None:
        ready = [worker for worker in workers if worker.ready]
        options = [
            option
            for option in (self._pair(demand, ready), self._alone(demand, "colocated", ready))
            if option is not None
        ]
        if not options:
            return None
        chosen = min(options, key=lambda option: self._cost(demand, option))
        self._turn += 1
        self._taken = {worker.key: self._taken[worker.key] for worker in workers if worker.key in self._taken}
        self._taken |= {worker.key: self._turn for worker in chosen}
        decode = chosen[-1].key if demand.decode_tokens or chosen[-1].role == "colocated" else None
        return Placement(chosen[0].key, decode)

    def _pair(self, demand: Demand, ready: Sequence[WorkerView]) -> tuple[WorkerView, ...] | None:
        prefill = self._alone(demand, "prefill", ready)
        if prefill is None or not demand.decode_tokens:
            return prefill
        decode = self._alone(demand, "decode", ready)
        return None if decode is None else prefill + decode

    def _alone(self, demand: Demand, role: WorkerRole, ready: Sequence[WorkerView]) -> tuple[WorkerView, ...] | None:
        candidates = [worker for worker in ready if worker.role == role]
        if not candidates:
            return None
        return (min(candidates, key=lambda worker: self._cost(demand, (worker,))),)

    def _cost(self, demand: Demand, option: tuple[WorkerView, ...]) -> tuple[int, int, int]:
        """Workers to avoid first, then load, then whose turn it is."""
        return (
            sum(worker.key in demand.avoid for worker in option),
            sum(worker.load for worker in option),
            max(self._taken.get(worker.key, 0) for worker in option),
        )


def complete(workers: Sequence[WorkerView]) -> bool:
    """Whether any request can be placed: a pair or a co-located worker is ready."""
    roles = {worker.role for worker in workers if worker.ready}
    return "colocated" in roles or {"prefill", "decode"} <= roles
