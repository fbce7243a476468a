"""Chooses the workers of a request. The policy decides from values and does no I/O: a simulator can run it too."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from kvrelay.costs.predict import Predicted
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, MemberState
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.router.placing.prefixes import Expectation, PrefixIndex
from kvrelay.rpc.compatibility import rank
from kvrelay.rpc.identity import WorkerId, WorkerRole

WORK_WEIGHT = 4
"""Weight of a request's own work against the load that it finds. Tokens that are computed again delay not only this
request but also later ones; `benchmarks/placement.py` measures it."""
RUNNING_TOKENS = 64
"""Tokens of prefill that a running request counts as: each step computes a token of it, and reads its KV."""
TRANSFER_SHARE = 16
"""Number of tokens whose transfer as KV counts as computing one token."""


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
    holdings: Mapping[int, int] = field(default_factory=dict)
    """Blocks that the requests of each holder are expected to have in the end; without holders of few."""

    @property
    def reserve(self) -> int:
        """Blocks that are kept for holders of little."""
        return self.total // RESERVE_SHARE

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` and one more needs, at most the whole pool."""
        return min(self.total, -(-(tokens + 1) // self.block_size))

    def fits(self, demand: "Demand", *, soon: bool = False) -> bool:
        """Whether there is capacity for a request to its expected end, after all that was admitted, up to its own
        expected end. A request whose client has tokens only needs room for what it has.

        Args:
            soon: when the requests that are expected to end soon have ended.
        """
        if self.free == self.total and not self.promised_requests:
            # An empty worker can't free more blocks: let it accept or refuse.
            return True
        if self.promised_requests >= self.free_slots + soon * self.ending_requests:
            return False
        free = self.free - self.promised_blocks + soon * self.ending_blocks
        if demand.begun:
            return self.blocks_for(demand.prompt_tokens) <= free
        need, kept = self.blocks_for(demand.most_expected), 0
        if self.passes(demand):
            # The growth of others leaves the reserve alone.
            return need <= free
        if demand.holder and not self.little(demand):
            need = min(need, self.total - self.reserve)
            kept = max(0, self.reserve - self._little)
        return need + kept <= free - self.growth_blocks

    def little(self, demand: "Demand") -> bool:
        """Whether the holder of a request takes little, with the request: it may use the reserve."""
        holds = self.holdings.get(demand.holder, 0) + self.blocks_for(demand.most_expected)
        return demand.holder != 0 and holds <= self.reserve

    def passes(self, demand: "Demand") -> bool:
        """Whether a request takes no more than what is left of the reserve, so that it delays nobody who takes more."""
        own = self.holdings.get(demand.holder, 0)
        others = self._little - (own if own <= self.reserve else 0)
        return self.little(demand) and others + own + self.blocks_for(demand.most_expected) <= self.reserve

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
    """Its latest report of its load, empty before the first one. Not to be changed."""
    outstanding_tokens: int = 0
    """Tokens to compute of the requests from this router that the worker's report doesn't account for."""
    pending_tokens: int = 0
    """Tokens that the worker has yet to compute for all routers, by its own report."""
    running: int = 0
    """Requests there from all routers, waiting ones too."""
    kv_tokens: int = 0
    """Tokens that its KV pool holds; 0 before its first report."""
    capacity: DecodeCapacity | None = None
    """Capacity of a decode or co-located worker; None before its first report, and for prefill."""
    compatibility: str = ""
    """Digest of what two workers must have in common; only equal ones are paired."""
    degree: Degree = (1, 1)
    """Its ranks."""
    avoided: bool = False
    """Whether attempts fail on it: used only if no other worker of its role is left."""
    bad_peers: frozenset[WorkerId] = frozenset()
    """Decode workers to which hand-offs from this prefill worker fail; such a pair is used only if there's no other."""
    requests: int = 0
    """Attempts of this router that the worker works on."""
    suspects: int = 0
    """Attempts among `requests` that are suspects there (`router/session/suspects.py`)."""

    @property
    def work(self) -> int:
        """Tokens of work before a new request, in tokens of prefill. What requests may yet generate doesn't count: few
        get as far as their `max_tokens`."""
        return self.outstanding_tokens + self.pending_tokens + RUNNING_TOKENS * self.running

    def busy(self, ahead_tokens: float) -> bool:
        """Whether it has enough prompts to compute: so many tokens, or AHEAD_PROMPTS."""
        many = self.role == "prefill" and self.running >= AHEAD_PROMPTS
        return many or self.outstanding_tokens + self.pending_tokens >= ahead_tokens


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


class LeastWork:
    """Chooses the workers that would be done with the request first: those with the least load and work together.

    The work of a prompt is the tokens that a worker doesn't have in its cache. Its transfer is little work, for the
    tokens that the decode worker doesn't have. A co-located worker is chosen if it has less of both than a pair; a
    decode worker computes the prompt itself if there is no prefill worker. Of equally good workers, requests with the
    same key go to the same one, the others take turns.

    Only workers with equal digests are paired; the group of equal digests that can serve most requests comes first.
    Workers and pairs to avoid are used only if there are no others. A decode worker is chosen if it has capacity for
    the prompt and for what the request is expected to generate, beside the expected growth of all that it has. A
    limited backlog of prompts may also be computed ahead for capacity that is expected soon: their KV waits in prefill
    memory.
    """

    def __init__(self, index: PrefixIndex, backlog_share: float = 0.0, ahead_tokens: float = math.inf) -> None:
        """
        Args:
            index: tells what workers have in their caches. This class forgets workers that are gone.
            backlog_share: largest share of the prefill workers' KV memory that may hold prompts waiting for decode.
            ahead_tokens: when a worker has this many tokens to compute, it gets no other prompt.
        """
        self._index = index
        self._backlog_share = backlog_share
        self._ahead_tokens = ahead_tokens
        self._turn = 0
        self._last_turn: dict[WorkerId, int] = {}
        self._known: list[tuple[WorkerId, int]] = []
        """The workers that were seen last, each with the tokens that its KV pool holds."""

    def place(self, demand: Demand, workers: Sequence[WorkerView]) -> Placement | NoPlace:
        """Decides by the workers' state now. Who follows the decision calls `take`."""
        if (known := [(worker.id, worker.kv_tokens) for worker in workers]) != self._known:
            self._known = known
            self._last_turn = {each: self._last_turn[each] for each, _ in known if each in self._last_turn}
            self._index.keep(known)
        groups = _preferred(demand, workers)
        for group in groups:
            chosen = self._choose(demand, group)
            if chosen is not None:
                last = chosen[-1]
                decode = last.id if demand.decode_tokens or last.role != "prefill" else None
                passes = decode is not None and last.capacity is not None and last.capacity.passes(demand)
                return Placement(chosen[0].id, decode, passes)
        return NoPlace.NO_CAPACITY if groups else NoPlace.NO_WORKERS

    def predict(self, demand: Demand, workers: Sequence[WorkerView]) -> Predicted | None:
        """Latencies that the request would have if it were placed now; None, as this policy knows no costs."""
        return None

    def waits_for(self, demand: Demand, workers: Sequence[WorkerView]) -> WorkerRole:
        """The role whose workers a request waits for that finds no capacity now."""
        groups = _preferred(demand, workers)
        accepted = any(self._accepts(demand, decode, group) for group in groups for decode in group.decodes)
        decodes = any(group.decodes for group in groups)
        return "decode" if decodes and not accepted else "prefill"

    def take(self, placement: Placement, chain: Sequence[int]) -> list[Expectation]:
        """Notes that a request with this chain is placed.

        Returns:
            What is expected of each of `placement.each`; to be ended when the placement is over.
        """
        self._turn += 1
        self._last_turn |= dict.fromkeys(placement.each, self._turn)
        return [self._index.expect(worker, chain) for worker in placement.each]

    def learn(self, worker: WorkerId, chain: Sequence[int], cached_tokens: int | None, block_size: int) -> None:
        """Notes that a worker has computed a prompt that another router has placed there.

        Args:
            cached_tokens: how much of it was there before; None if the KV came from elsewhere.
            block_size: of the worker.
        """
        expected = self._index.expect(worker, chain)
        expected.reported(expected.tokens if cached_tokens is None else cached_tokens, block_size)

    def _choose(self, demand: Demand, group: "_Group") -> list[WorkerView] | None:
        """The best option of a group among those with capacity."""
        costs = self._costs(demand, group)

        def best_first(workers: Sequence[WorkerView]) -> list[WorkerView]:
            allowed = [worker for worker in workers if not (demand.on_trial and worker.suspects)]
            return sorted(allowed, key=lambda worker: costs[worker.id])

        def cost(option: Sequence[WorkerView]) -> tuple[int, ...]:
            return tuple(map(sum, zip(*(costs[worker.id] for worker in option), strict=True)))

        prefills = best_first(group.prefills)
        colocated = best_first([worker for worker in group.colocated if self._holds(demand, worker)])
        decodes = best_first([worker for worker in group.decodes if self._accepts(demand, worker, group)])
        options = [[worker] for worker in colocated[:1]]
        if group.alone:
            options += [[worker] for worker in decodes[:1]]
        elif not demand.decode_tokens:
            options += [[worker] for worker in prefills[:1]]
        elif prefills and decodes:
            best = [prefills[0], decodes[0]]
            if not group.allows(*best):
                pairs = [
                    [prefill, decode] for prefill in prefills for decode in decodes if group.allows(prefill, decode)
                ]
                best = min(pairs, key=cost, default=[])
            options += [best] if best else []
        chosen = min(options, key=cost, default=None)
        if chosen is None or chosen[0].busy(self._ahead_tokens):
            return None
        return chosen

    @staticmethod
    def _holds(demand: Demand, worker: WorkerView) -> bool:
        """Whether a co-located worker has room for the request. One that ends with its first token soon makes room."""
        return worker.capacity is None or not demand.decode_tokens or worker.capacity.fits(demand)

    def _accepts(self, demand: Demand, decode: WorkerView, group: "_Group") -> bool:
        """Whether such a prompt may be computed for `decode` now: there is room, or will be soon, and the KV may wait
        for it in prefill memory until then."""
        capacity = decode.capacity
        if capacity is None or capacity.fits(demand):
            return True
        if not capacity.fits(demand, soon=True):
            return False
        prefill_tokens = sum(worker.kv_tokens for worker in group.prefills) / len(group.decodes)
        backlog = (capacity.promised_blocks + capacity.blocks_for(demand.prompt_tokens)) * capacity.block_size
        return backlog <= self._backlog_share * prefill_tokens

    def _costs(self, demand: Demand, group: "_Group") -> dict[WorkerId, tuple[int, int, int, int, int]]:
        """Each worker's cost: a worker to avoid, company that a trial puts at risk, another degree, load and work, then
        what decides between equals. Costs add up over the workers of an option, so the best pair consists of the best
        of each role.
        """
        handed = demand.decode_tokens > 0 and not group.alone
        costs = {}
        for worker in (*group.prefills, *group.decodes, *group.colocated):
            new = max(1, demand.prompt_tokens - self._index.find(worker.id, demand.chain))
            own = new // TRANSFER_SHARE if handed and worker.role == "decode" else new
            costs[worker.id] = (
                int(worker.id in demand.avoid),
                int((worker.requests if demand.on_trial else worker.suspects) > 0),
                int(worker.degree != demand.degrees.get(worker.role, worker.degree)),
                worker.work + WORK_WEIGHT * own,
                self._order(demand.key, worker.id),
            )
        return costs

    def _order(self, key: int, worker: WorkerId) -> int:
        """The smallest goes first of equals: by rendezvous hashing, which gives each key one order of the workers'
        names that all routers find and that a lost worker doesn't change for the others; or by the latest turn."""
        return xxh3_64_intdigest(worker.name.encode(), key) if key else self._last_turn.get(worker, 0)


@dataclass(frozen=True, slots=True)
class _Group:
    """The workers of one digest that a request may use: without those to avoid, unless nothing else is left."""

    prefills: list[WorkerView]
    decodes: list[WorkerView]
    colocated: list[WorkerView]
    alone: bool
    """Whether the decode workers compute prompts themselves, since nobody else is there."""
    any_pair: bool
    """Whether to use the pairs to avoid as well, since there are no others."""
    troubled: bool
    """Whether every option has a worker or a pair to avoid."""

    @classmethod
    def of(cls, workers: Sequence[WorkerView], demand: Demand) -> "_Group | None":
        """None if the workers can't serve the request."""
        prefills, prefills_bad = _usable(workers, "prefill")
        decodes, decodes_bad = _usable(workers, "decode")
        colocated, colocated_bad = _usable(workers, "colocated")
        alone = bool(decodes) and not prefills and not colocated
        if alone:
            any_pair, paired, prefills_bad = False, True, False
        elif not demand.decode_tokens:
            decodes, decodes_bad, any_pair, paired = [], False, True, bool(prefills)
        else:
            any_pair = not any(decode.id not in prefill.bad_peers for prefill in prefills for decode in decodes)
            paired = bool(prefills and decodes)
        if not paired and not colocated:
            return None
        pair_bad = not paired or prefills_bad or decodes_bad or (bool(demand.decode_tokens) and any_pair)
        alone_bad = not colocated or colocated_bad
        if pair_bad and not alone_bad:
            prefills, decodes = [], []
        elif alone_bad and not pair_bad:
            colocated = []
        return cls(prefills, decodes, colocated, alone, any_pair, pair_bad and alone_bad)

    def allows(self, prefill: WorkerView, decode: WorkerView) -> bool:
        return self.any_pair or decode.id not in prefill.bad_peers


def _preferred(demand: Demand, workers: Sequence[WorkerView]) -> list[_Group]:
    """The groups that can serve a request, the preferred one first; those with trouble only if there are no others."""
    found = [_Group.of(group, demand) for group in _groups([worker for worker in workers if worker.ready])]
    able = [group for group in found if group is not None]
    able = [group for group in able if not group.alone] or able
    return [group for group in able if not group.troubled] or able


def _usable(workers: Sequence[WorkerView], role: WorkerRole) -> tuple[list[WorkerView], bool]:
    """The workers of a role that need not be avoided, or all of them and True if each has to be."""
    all_ = [worker for worker in workers if worker.role == role]
    good = [worker for worker in all_ if not worker.avoided]
    return (good, False) if good else (all_, bool(all_))


def _groups(ready: Sequence[WorkerView]) -> list[list[WorkerView]]:
    """The workers by digest, the preferred digest first."""
    digests = {worker.compatibility for worker in ready}
    if len(digests) <= 1:
        return [list(ready)] if ready else []
    ranked = rank((worker.role, worker.compatibility) for worker in ready)
    return [[worker for worker in ready if worker.compatibility == digest] for digest in ranked]


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
    if all(worker.busy(ahead_tokens) for worker in computing):
        names = ", ".join(worker.id.name for worker in computing)
        return f"{names} had {ahead_tokens:g} tokens or more of other prompts to compute, or {AHEAD_PROMPTS} prompts"
    capacities = [worker.capacity for worker in ready if worker.role == "decode" and worker.capacity is not None]
    if capacities and not any(capacity.fits(demand) for capacity in capacities):
        if all(capacity.promised_requests >= capacity.free_slots for capacity in capacities):
            return "all decode slots were taken"
        return f"no decode worker had KV blocks free for {demand.most_expected} tokens, beside what it has to grow"
    return "other requests were before it"
