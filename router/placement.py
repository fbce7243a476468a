"""Which workers take a request. Policies decide from values alone, so that a simulator can run the very same ones."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

WorkerRole = Literal["prefill", "decode", "colocated"]


class WorkerKey(NamedTuple):
    """One life of one worker."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Room:
    """Where a decode worker's KV memory stands: as it last said, and with what this router has sent it since."""

    block_size: int
    """Tokens of a block."""
    total: int
    """Blocks of its pool."""
    free: int
    """Blocks that a reservation may take; those that only a prefix cache keeps among them."""
    free_slots: int
    """How many more requests it would give blocks to."""
    promised_requests: int = 0
    """Requests on their way to it that have no blocks there yet: of all routers."""
    promised_blocks: int = 0
    """Blocks that those will need."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a prompt of `tokens` needs to begin to decode; no more than there are."""
        return min(self.total, -(-(tokens + 1) // self.block_size))

    def fits(self, tokens: int) -> bool:
        """Whether it has room for such a prompt behind all that is promised."""
        within = (
            self.promised_blocks + self.blocks_for(tokens) <= self.free and self.promised_requests < self.free_slots
        )
        # Nothing more will come free on one that has nothing: it must take what comes, or refuse it by itself.
        return within or (self.free == self.total and not self.promised_requests)


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
    kv_tokens: int = 0
    """Tokens that its KV pool holds; 0 where it has not said yet."""
    room: Room | None = None
    """Of a decode worker; None where it has not said yet."""

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


class NoPlace(enum.Enum):
    """Why a request is not placed now."""

    NO_WORKERS = "no workers"
    """The ready workers can't serve a request."""
    NO_ROOM = "no room"
    """They can, but no decode worker would have room by the end of the prompt's prefill: the request is to wait."""


class Policy(Protocol):
    """Decides where a request goes, and whether it goes yet."""

    def place(self, demand: Demand, workers: Sequence[WorkerView]) -> Placement | NoPlace: ...


class LeastLoaded:
    """The prefill and the decode worker with the least work ahead, or a co-located one where that has less than both.

    Equally loaded workers are taken in turn. A decode worker is taken only where it has room, or where what waits for
    room there leaves most of prefill's memory to prompts that are being computed.
    """

    def __init__(self, backlog_share: float = 0.0) -> None:
        """`backlog_share`: how much of prefill's KV memory computed prompts may keep while they wait for room."""
        self._backlog_share = backlog_share
        self._turn = 0
        self._taken: dict[WorkerKey, int] = {}

    def place(self, demand: Demand, workers: Sequence[WorkerView]) -> Placement | NoPlace:
        ready = [worker for worker in workers if worker.ready]
        open_ = [worker for worker in ready if worker.role != "decode" or self._takes(demand, worker, ready)]
        options = [
            option
            for option in (self._pair(demand, open_), self._alone(demand, "colocated", open_))
            if option is not None
        ]
        if not options:
            return NoPlace.NO_WORKERS if self._pair(demand, ready) is None else NoPlace.NO_ROOM
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

    def _takes(self, demand: Demand, decode: WorkerView, ready: Sequence[WorkerView]) -> bool:
        """Whether the KV of such a prompt may be sent on its way to `decode`."""
        room = decode.room
        if room is None or room.fits(demand.prompt_tokens):
            return True
        decodes = sum(worker.role == "decode" for worker in ready)
        memory = sum(worker.kv_tokens for worker in ready if worker.role == "prefill") / decodes
        waiting = (room.promised_blocks + room.blocks_for(demand.prompt_tokens)) * room.block_size
        return waiting <= self._backlog_share * memory

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
