"""The values that a placement is decided from, and the decision. No I/O: a simulator can make them too."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.costs.predict import Decision, Pace, WorkerLoad
from kvrelay.costs.worker import WorkerCosts
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, MemberState
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.identity import WorkerId, WorkerRole

RUNNING_TOKENS = 64
"""Tokens of prefill that a running request counts as: each step computes a token of it, and reads its KV."""
AHEAD_PROMPTS = 16
"""Prompts, however short, that a prefill worker has to compute from which on it gets no other one: each is also work
for those that hand its KV over, in the order in which prompts were placed."""
RESERVE_SHARE = 8
"""A worker keeps its blocks divided by this for holders of little (`engine/scheduling/room.py`)."""


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """The KV memory of a worker that decodes: its latest report, and the requests that this router has sent since."""

    block_size: int
    """Number of tokens in a block."""
    total: int
    """Number of blocks in the worker's pool."""
    free: int
    """Blocks that a reservation may take; blocks used by the prefix cache only are among them."""
    free_slots: int
    """Number of further requests that the worker can admit."""
    promised_requests: int = 0
    """Requests on their way to the worker that have no blocks there yet, from all routers."""
    promised_blocks: int = 0
    """Blocks that those requests are expected to need in the end."""
    growth_blocks: int = 0
    """Blocks that the requests there are expected to need beyond those that they hold, and that `free` leaves out."""
    ending_requests: int = 0
    """Requests that are expected to end soon."""
    ending_blocks: int = 0
    """Blocks that these requests hold."""
    yielding_requests: int = 0
    """Requests of classes less urgent than `interactive`: the worker preempts them for more urgent ones."""
    yielding_blocks: int = 0
    """Blocks that these requests hold."""
    yielding_growth_blocks: int = 0
    """Blocks among `growth_blocks` of these requests."""
    holdings: Mapping[int, int] = field(default_factory=dict)
    """Blocks that the requests of each holder are expected to have in the end; without holders of few."""

    @property
    def reserve(self) -> int:
        """Blocks that are kept for holders of little."""
        return self.total // RESERVE_SHARE

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` and one more needs, at most the whole pool."""
        return min(self.total, -(-(tokens + 1) // self.block_size))

    @property
    def sure_tokens(self) -> int:
        """Tokens that a request may be expected to have in the end for which `fits` is surely true, whoever asks."""
        if self.promised_requests >= self.free_slots:
            return -1
        return (self.free - self.promised_blocks - self.growth_blocks - 2 * self.reserve) * self.block_size - 1

    def fits(self, demand: "Demand", *, soon: bool = False) -> bool:
        """Whether there is capacity for a request to its expected end, after all that was admitted, up to its own
        expected end. A request whose client has tokens only needs room for what it has. One that doesn't yield has the
        room of those that do.

        Args:
            soon: when the requests that are expected to end soon have ended.
        """
        if self.free == self.total and not self.promised_requests:
            # An empty worker can't free more blocks: let it accept or refuse.
            return True
        # Requests that end soon may be among those that yield: the larger number counts, not the sum.
        slots, more, growth = soon * self.ending_requests, soon * self.ending_blocks, self.growth_blocks
        if not demand.yields:
            slots, more = max(slots, self.yielding_requests), max(more, self.yielding_blocks)
            growth = max(0, growth - self.yielding_growth_blocks)
        if self.promised_requests >= self.free_slots + slots:
            return False
        free = self.free - self.promised_blocks + more
        if demand.begun:
            return self.blocks_for(demand.prompt_tokens) <= free
        need, kept = self.blocks_for(demand.most_expected), 0
        if need + 2 * self.reserve <= free - growth:
            return True  # whoever asks
        if min(need, self.total - 2 * self.reserve) > free:
            return False  # whoever asks: the queue asks often while workers are full
        if demand.holder and self.passes(demand):
            # The growth of others leaves the reserve alone.
            return need <= free
        if demand.holder and not self.little(demand):
            need = min(need, self.total - self.reserve)
            kept = max(0, self.reserve - self._little)
        if demand.yields:
            kept += self.reserve
            need = min(need, self.total - kept)
        return need + kept <= free - growth

    def little(self, demand: "Demand") -> bool:
        """Whether the holder of a request takes little, with the request: it may use the reserve."""
        holds = self.holdings.get(demand.holder, 0) + self.blocks_for(demand.most_expected)
        return demand.holder != 0 and holds <= self.reserve

    def passes(self, demand: "Demand") -> bool:
        """Whether a request takes no more than what is left of the reserve, so that it delays nobody who takes more."""
        if demand.yields or not demand.holder:
            return False
        own = self.holdings.get(demand.holder, 0)
        others = self._little - (own if own <= self.reserve else 0)
        fits = others + own + self.blocks_for(demand.most_expected) <= self.reserve
        return fits and self.little(demand)

    @property
    def _little(self) -> int:
        return sum([blocks for blocks in self.holdings.values() if blocks <= self.reserve])


Degree = tuple[int, int]
"""Numbers of a worker's ranks: those that share each layer, and the stages of layers. Other numbers round otherwise."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as a policy sees it."""

    id: WorkerId
    role: WorkerRole
    ready: bool
    """Takes new requests: in state ready, connected, and with the cluster's model."""
    state: MemberState = MEMBER_STATE_READY
    """By the membership."""
    report: Load = field(default_factory=Load, repr=False, compare=False)
    """The worker's latest report of its load, empty before the first one. Not to be changed."""
    outstanding_tokens: int = 0
    """Tokens to compute of the requests from this router that the worker's report doesn't account for."""
    pending_tokens: int = 0
    """Tokens that the worker has yet to compute for all routers, by its own report."""
    yielding_tokens: int = 0
    """Tokens among both that belong to requests of classes less urgent than `interactive`: they let others pass."""
    running: int = 0
    """Requests there from all routers, waiting ones too."""
    kv_tokens: int = 0
    """Tokens that its KV pool holds; 0 before its first report."""
    capacity: DecodeCapacity | None = None
    """Capacity of a decode or co-located worker; None before its first report, and for prefill."""
    compatibility: str = ""
    """Digest of what two workers must have in common; only equal ones are paired."""
    degree: Degree = (1, 1)
    """Tensor and pipeline parallel degree of the worker."""
    avoided: bool = False
    """Whether attempts fail on it: used only if no other worker of its role is left."""
    bad_peers: frozenset[WorkerId] = frozenset()
    """Decode workers to which hand-offs from this prefill worker fail; such a pair is used only if there's no other."""
    requests: int = 0
    """Attempts of this router that the worker works on."""
    suspects: int = 0
    """Attempts among `requests` that are suspects there (`router/session/suspects.py`)."""
    costs: WorkerCosts | None = field(default=None, repr=False, compare=False)
    """Costs of its steps and hand-offs, as it reports them; None before it has."""
    pace: Pace | None = field(default=None, init=False, repr=False, compare=False)
    """Speed of the worker with what it has to do; None without `costs`."""
    urgent_pace: Pace | None = field(default=None, init=False, repr=False, compare=False)
    """Speed that a request finds which passes the prompts of less urgent ones."""

    def __post_init__(self) -> None:
        if self.costs is not None:
            pace = Pace.of(self.costs, load := self._load())
            passing = min(self.yielding_tokens, load.prompt_tokens)
            urgent = load._replace(prompt_tokens=load.prompt_tokens - passing, passed_tokens=passing)
            object.__setattr__(self, "pace", pace)
            object.__setattr__(self, "urgent_pace", Pace.of(self.costs, urgent) if passing else pace)

    def _load(self) -> WorkerLoad:
        """Work that it has, for predictions."""
        capacity, pending = self.capacity, self.outstanding_tokens + self.pending_tokens
        if self.role == "prefill":
            return WorkerLoad(pending, self.running)
        # Each sequence that decodes has a token pending in its next step.
        tokens = max(0, pending - self.report.requests.running)
        context = 0
        if capacity is not None:
            context = (max(0, capacity.total - capacity.free) + capacity.promised_blocks) * capacity.block_size
        return WorkerLoad(tokens, max(1, self.report.requests.waiting), self.running, context)

    @property
    def work(self) -> int:
        """Tokens of work before a new request, in tokens of prefill. What requests may yet generate doesn't count: few
        get as far as their `max_tokens`."""
        return self.outstanding_tokens + self.pending_tokens + RUNNING_TOKENS * self.running

    def backlog(self, *, yields: bool) -> int:
        """Tokens to compute before those of a new request, which may yield to others or pass those that do."""
        return self.outstanding_tokens + self.pending_tokens - (0 if yields else self.yielding_tokens)

    def busy(self, ahead_tokens: float, *, yields: bool = False) -> bool:
        """Whether it has enough prompts to compute: so many tokens, or AHEAD_PROMPTS; half of that for a request that
        yields to others."""
        share = 1 / 2 if yields else 1
        if self.role == "prefill" and self.running >= share * AHEAD_PROMPTS:
            return True
        return self.backlog(yields=yields) >= share * ahead_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """Needs of a request that its workers must meet."""

    prompt_tokens: int
    """Tokens to prefill: the prompt and, on a later attempt, the tokens that the client has."""
    decode_tokens: int
    """Most tokens to generate after the first one; 0 needs no decode worker."""
    avoid: frozenset[WorkerId] = frozenset()
    """Workers to use only if there are no others."""
    on_trial: bool = False
    """Whether it may share no worker with another suspect."""
    chain: Sequence[int] = ()
    """The prompt's digests (`router/placing/prefixes.py`)."""
    key: int = 0
    """Requests with equal keys prefer the same one of equally good workers, at every router; 0: workers take turns."""
    expected_tokens: int = 0
    """Tokens that it is expected to generate from here on, at most `decode_tokens` and one; 0: none that count."""
    holder: int = 0
    """Holder of the request: a digest of the tenant or the client's address; 0: unknown."""
    begun: bool = False
    """Whether its client has tokens already."""
    yields: bool = False
    """Whether its class is less urgent than `interactive`: it leaves a part of each worker's memory and of the prompts
    that a worker gets ahead, so that an urgent request finds room at once."""
    degrees: Mapping[WorkerRole, Degree] = field(default_factory=dict)
    """Degrees at which the client's tokens were computed, by role, as far as known. Workers of these go first."""

    @property
    def most_expected(self) -> int:
        """Tokens that it is expected to have in the end, less the last one, whose KV nobody needs."""
        return self.prompt_tokens + max(0, self.expected_tokens - 1)


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of a request: the same worker twice if it is co-located; no decode worker for a single token."""

    prefill: WorkerId
    decode: WorkerId | None
    passes: bool = field(default=False, compare=False)
    """Whether the request may pass those that wait for room: it takes a part of a reserve that they don't get."""
    why: Decision | None = field(default=None, compare=False)

    @property
    def each(self) -> tuple[WorkerId, ...]:
        """The one or two workers, the one that computes the prompt first."""
        return (self.prefill,) if self.decode in (None, self.prefill) else (self.prefill, self.decode)

    @property
    def workers(self) -> frozenset[WorkerId]:
        return frozenset(self.each)


class NoPlace(enum.Enum):
    """Reason why a request can't be placed now."""

    NO_WORKERS = "no workers"
    """The workers that are ready can't serve a request."""
    NO_CAPACITY = "no capacity"
    """No decode worker is expected to have capacity at the end of the prompt's prefill: the request has to wait."""


def complete(workers: Sequence[WorkerView]) -> bool:
    """Whether any request can be placed: all but prefill workers can compute one to its end."""
    return any(worker.ready and worker.role != "prefill" for worker in workers)


def why_waiting(demand: Demand, workers: Sequence[WorkerView], ahead_tokens: float) -> str:
    """The reason why the request can't be placed now.

    Args:
        ahead_tokens: when a worker has this many tokens to compute, it gets no other prompt.
    """
    ready = [worker for worker in workers if worker.ready]
    if not any(worker.role != "prefill" for worker in ready):
        return "no worker that decodes was ready"
    computing = [worker for worker in ready if worker.role != "decode"] or ready
    if all(worker.busy(ahead_tokens, yields=demand.yields) for worker in computing):
        names = ", ".join(worker.id.name for worker in computing)
        return f"{names} had {ahead_tokens:g} tokens or more of other prompts to compute, or {AHEAD_PROMPTS} prompts"
    capacities = [worker.capacity for worker in ready if worker.role == "decode" and worker.capacity is not None]
    if capacities and not any(capacity.fits(demand) for capacity in capacities):
        if all(capacity.promised_requests >= capacity.free_slots for capacity in capacities):
            return "all decode slots were taken"
        return f"no decode worker had KV blocks free for {demand.most_expected} tokens, beside what it has to grow"
    return "other requests were before it"
