"""The workers that a router knows, and its streams to them."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    Member,
    MemberState,
)
from kvrelay.internal.v1.worker_pb2 import ClientCall, Load, ModelInfo, RouterHello
from kvrelay.router.placing.health import FleetHealth
from kvrelay.router.placing.placement import DecodeCapacity, Degree, WorkerView, complete
from kvrelay.router.placing.worker_stream import OnForeign, WorkerStream
from kvrelay.rpc.compatibility import rank, unpaired
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.identity import WORKERS, WorkerId, WorkerRole

logger = logging.getLogger(__name__)

REDIAL_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)


StreamMaker = Callable[..., WorkerStream]
"""Makes a stream of the arguments of `WorkerStream`."""


@dataclass(slots=True)
class _Worker:
    """One incarnation of a worker that is, or was, a member."""

    id: WorkerId
    role: WorkerRole
    address: str
    state: MemberState
    compatibility: str
    degree: Degree
    draining: bool = False
    """Whether it has returned a request because it drains; the membership may say so later."""
    listed: bool = True
    """Whether it is in the latest membership. A supervisor that has just started doesn't list every member yet."""
    stream: WorkerStream | None = None
    dialed: bool = False
    """Whether an attempt to connect has ended."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    view: WorkerView | None = field(default=None, repr=False)
    """The latest view of it, made of `facts`."""
    facts: tuple[object, ...] = field(default=(), repr=False)
    seen: tuple[int, ...] | None = field(default=None, repr=False)
    """Evidence that `view` is still right, while nothing is to be avoided; None if there is none."""

    @property
    def takes_requests(self) -> bool:
        """Whether the membership and the worker itself allow new requests."""
        return self.state == MEMBER_STATE_READY and not self.draining

    @property
    def wanted(self) -> bool:
        """Whether to connect again after the stream is lost."""
        return self.listed and self.state in (MEMBER_STATE_READY, MEMBER_STATE_SUSPECT)


class WorkerRegistry:
    """Follows the membership: keeps a stream to each worker that is ready, and connects again after a loss.

        listed READY                        the stream is kept
        SUSPECT                             gets no new requests; those placed there leave it if it sends nothing
        DRAINING                            gets no new requests; those placed there continue
        DEAD, or replaced under its name    the stream is closed at once, which fails every request on it
        not listed any more                 serves on until its stream ends

    The cluster's model is that of the first worker reached, until only workers with another model can serve a new
    request. A worker with another model is not used.
    """

    def __init__(
        self,
        name: str,
        credentials: Credentials,
        health: FleetHealth,
        on_change: Callable[[], None],
        on_load: Callable[[], None] = lambda: None,
        on_foreign: OnForeign = lambda worker, prompt, block_size: None,
        clock: Callable[[], float] = time.monotonic,
        stream: StreamMaker = WorkerStream,
    ) -> None:
        """
        Args:
            name: the router's.
            credentials: the router's.
            health: what attempts have shown of the workers; this class forgets those that are gone.
            on_change: called whenever `complete` or `model` may have changed.
            on_load: called whenever `view` may have changed.
            on_foreign: called with each prompt of another router whose KV a worker has now.
            clock: the router's.
            stream: makes a stream to a worker.
        """
        self._name = name
        self._credentials = credentials
        self._health = health
        self._on_change = on_change
        self._on_load = on_load
        self._on_foreign = on_foreign
        self._clock = clock
        self._stream = stream
        self._unpaired: list[str] = []
        self._workers: dict[WorkerId, _Worker] = {}
        self._settled = False
        self._changed = asyncio.Event()
        self._version = 0
        """Number of changes of the membership, the streams and the model so far."""
        self._model: ModelInfo | None = None
        self._strangers: set[WorkerId] = set()
        """Workers with another model."""

    @property
    def model(self) -> ModelInfo | None:
        """The cluster's model, with the smallest max_context of its workers; None until a worker was reached."""
        return self._model

    @property
    def complete(self) -> bool:
        """Whether a request can be placed. A router that starts waits until each worker was dialed: the first requests
        would all go to the first workers reached.
        """
        return self._settled and complete(self.view())

    def view(self) -> list[WorkerView]:
        """The workers as a placement policy, or a person, sees them now."""
        calm, version, found = not self._health.troubled, self._version, []
        for worker in self._workers.values():
            stream, view = worker.stream, worker.view
            # Each placement looks at all workers, and changes one or two of them.
            seen = None if stream is None else (version, stream.changes, stream.requests, stream.suspects)
            if view is None or not calm or seen is None or worker.seen != seen:
                view = self._view(worker)
                worker.seen = seen if calm else None
            found.append(view)
        return found

    def doubts(self, workers: Iterable[WorkerId]) -> bool:
        """Whether one of the workers is gone, suspected or stops, by the membership or by its own word."""
        known = (self._workers.get(worker) for worker in workers)
        return any(worker is None or not worker.takes_requests for worker in known)

    def can_spare(self, workers: Iterable[WorkerId]) -> bool:
        """Whether each of these workers has another one of its role that takes requests."""
        spared = [self._workers.get(worker) for worker in workers]
        others = {
            worker.role for worker in self._workers.values() if worker.takes_requests and worker.stream is not None
        }
        return all(worker is None or worker.role in others for worker in spared)

    def drains(self, workers: Iterable[WorkerId]) -> None:
        """Takes these workers' own word that they stop: they get no new requests."""
        for worker in workers:
            if worker in self._workers:
                self._workers[worker].draining = True
        self._choose_model()
        self._notify()

    def stream(self, worker: WorkerId) -> WorkerStream:
        """The stream to a worker that `view` lists as ready.

        Raises:
            KeyError: there is none.
        """
        stream = self._workers[worker].stream
        if stream is None:
            raise KeyError(f"{worker} has no stream")
        return stream

    def degrees(self, workers: Iterable[WorkerId]) -> dict[WorkerRole, Degree]:
        """The degrees of these workers, by role."""
        known = (self._workers.get(worker) for worker in workers)
        return {worker.role: worker.degree for worker in known if worker is not None}

    def fence(self, call: ClientCall) -> None:
        """Ends on every worker what earlier calls of the client's request have submitted, through whichever router."""
        for worker in self._workers.values():
            if worker.stream is not None:
                worker.stream.fence(call)

    async def changed(self) -> None:
        """Returns at the next change of the membership, a stream or the model."""
        await self._changed.wait()

    def update(self, members: Sequence[Member]) -> None:
        """Takes a new membership."""
        listed = {WorkerId(member.name, member.incarnation): member for member in members if member.role in WORKERS}
        names = {worker_id.name for worker_id, member in listed.items() if member.state != MEMBER_STATE_DEAD}
        for worker in list(self._workers.values()):
            member = listed.get(worker.id)
            worker.listed = member is not None
            if member is not None:
                worker.state, worker.compatibility = member.state, member.compatibility
                worker.degree = _degree(member)
                if member.state == MEMBER_STATE_DEAD:
                    self._drop(worker, "declared dead")
                elif worker.stream is not None:
                    worker.stream.set_suspected(member.state == MEMBER_STATE_SUSPECT)
            elif worker.id.name in names:
                self._drop(worker, "replaced by a new incarnation")
        for worker_id, member in listed.items():
            if member.state == MEMBER_STATE_READY and worker_id not in self._workers:
                worker = _Worker(
                    worker_id,
                    WORKERS[member.role],
                    member.address,
                    member.state,
                    compatibility=member.compatibility,
                    degree=_degree(member),
                )
                self._workers[worker_id] = worker
                worker.task = asyncio.create_task(self._keep_stream(worker), name=f"stream to {worker_id.name}")
        self._health.keep(self._workers)
        self._note_unpaired(members)
        self._choose_model()
        self._notify()

    async def close(self) -> None:
        """Ends every stream."""
        tasks = [worker.task for worker in self._workers.values() if worker.task is not None]
        for worker in list(self._workers.values()):
            self._drop(worker, "the router is shutting down")
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_stream(self, worker: _Worker) -> None:
        """Connects, and connects again for as long as the worker is wanted."""
        failures = 0
        while worker.wanted:
            hello = RouterHello(router=self._name, worker_incarnation=worker.id.incarnation)
            on_change = partial(self._on_stream, worker)
            self._version += 1
            worker.stream = stream = self._stream(
                worker.id,
                worker.address,
                self._credentials,
                hello,
                on_change,
                self._on_load,
                self._on_foreign,
                self._clock,
            )
            await stream.run()
            worker.dialed = True
            self._notify()
            failures = 0 if stream.model is not None else failures + 1
            if failures <= 1:
                logger.warning("worker lost", extra=_log_fields(worker) | {"reason": stream.lost})
            await asyncio.sleep(REDIAL_SECONDS[min(failures, len(REDIAL_SECONDS) - 1)])
        self._workers.pop(worker.id, None)
        self._notify()

    def _drop(self, worker: _Worker, reason: str) -> None:
        self._workers.pop(worker.id, None)
        worker.listed = False
        if worker.stream is not None:
            worker.stream.close(reason)
        if worker.task is not None:
            worker.task.cancel()
        logger.info("worker dropped", extra=_log_fields(worker) | {"reason": reason})

    def _note_unpaired(self, members: Sequence[Member]) -> None:
        """Logs which workers can't be paired, once per change."""
        found = unpaired(members)
        for sentence in found:
            if sentence not in self._unpaired:
                logger.error("workers not paired", extra={"reason": sentence})
        self._unpaired = found

    def _on_stream(self, worker: _Worker) -> None:
        """A worker's stream has come up or is lost."""
        if worker.stream is not None and worker.stream.serving is not None:
            logger.info("worker reached", extra=_log_fields(worker))
        self._choose_model()
        self._notify()

    def _choose_model(self) -> None:
        up = [
            (worker, model)
            for worker in self._workers.values()
            if worker.stream is not None and (model := worker.stream.serving) is not None
        ]
        if not up:
            return  # requests are still checked by the last known model
        fingerprint = self._preferred_model(up)
        same = [model for _, model in up if model.fingerprint == fingerprint]
        chosen = ModelInfo()
        chosen.CopyFrom(same[0])
        smallest = min(same, key=lambda model: model.max_context)
        chosen.max_context, chosen.context_limit = smallest.max_context, smallest.context_limit
        self._model = chosen
        strangers = [(worker, model) for worker, model in up if model.fingerprint != chosen.fingerprint]
        for worker, model in strangers:
            if worker.id not in self._strangers:
                different = {"fingerprint": model.fingerprint, "cluster_fingerprint": chosen.fingerprint}
                logger.error("worker not used: it serves another model", extra=_log_fields(worker) | different)
        self._strangers = {worker.id for worker, _ in strangers}

    def _preferred_model(self, up: Sequence[tuple[_Worker, ModelInfo]]) -> str:
        """Fingerprint of the model to serve: the present one while its workers can serve a new request, or nobody else
        can; else that of the workers that can serve most requests."""
        up = [(worker, model) for worker, model in up if worker.takes_requests] or up

        def serves(fingerprint: str) -> bool:
            roles = {worker.role for worker, model in up if model.fingerprint == fingerprint}
            return "colocated" in roles or {"prefill", "decode"} <= roles

        ranked = rank((worker.role, model.fingerprint) for worker, model in up)
        present = "" if self._model is None else self._model.fingerprint
        if present in ranked and (serves(present) or not serves(ranked[0])):
            return present
        return ranked[0]

    def _view(self, worker: _Worker) -> WorkerView:
        stream = worker.stream
        if stream is None:
            return WorkerView(worker.id, worker.role, ready=False, state=worker.state)
        ours, theirs = self._model, stream.serving
        same = ours is not None and theirs is not None and ours.fingerprint == theirs.fingerprint
        ready = worker.takes_requests and same
        avoided = self._health.avoids(worker.id)
        bad_peers = self._health.bad_peers(worker.id) if worker.role == "prefill" else frozenset()
        counts = stream.changes, stream.requests, stream.suspects
        facts = stream, counts, worker.state, worker.compatibility, worker.degree, ready, avoided, bad_peers
        if worker.view is not None and worker.facts == facts:
            return worker.view
        worker.facts = facts
        report = stream.last_load or Load()
        worker.view = WorkerView(
            worker.id,
            worker.role,
            ready=ready,
            state=worker.state,
            report=report,
            outstanding_tokens=stream.outstanding_tokens,
            pending_tokens=stream.pending_tokens,
            yielding_tokens=stream.yielding_tokens,
            running=stream.running,
            kv_tokens=report.blocks.total * report.blocks.size,
            capacity=_capacity(stream, worker.role) if worker.role != "prefill" else None,
            compatibility=worker.compatibility,
            degree=worker.degree,
            avoided=avoided,
            bad_peers=bad_peers,
            requests=stream.requests,
            suspects=stream.suspects,
            costs=stream.costs,
        )
        return worker.view

    def _settles(self) -> bool:
        """Whether a worker is connected, and no attempt to connect to another one is the first one."""
        workers = [worker for worker in self._workers.values() if worker.takes_requests]
        connected = [worker for worker in workers if worker.stream is not None and worker.stream.serving is not None]
        return bool(connected) and all(worker.dialed or worker in connected for worker in workers)

    def _notify(self) -> None:
        self._version += 1
        self._settled = self._settled or self._settles()
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()
        self._on_load()


def _capacity(stream: WorkerStream, role: WorkerRole) -> DecodeCapacity | None:
    """The worker's latest report, with the submits that it doesn't account for."""
    load = stream.last_load
    if load is None or not load.blocks.size:
        return None
    holdings = stream.unseen_blocks.copy()
    for each in (*load.holdings, *load.promised.holdings):
        holdings[each.holder] += each.blocks
    # The worker's scheduler keeps one block in reserve for each running sequence: the growth of many of them is more.
    running = load.requests.running
    free = max(0, load.blocks.free + load.blocks.cached - running)
    # Requests may wait on a co-located worker for a row.
    slots = load.requests.free_slots if role == "decode" else sys.maxsize
    return DecodeCapacity(
        block_size=load.blocks.size,
        total=load.blocks.total,
        free=free,
        free_slots=slots,
        promised_requests=load.promised.requests + stream.unseen_requests,
        promised_blocks=load.promised.blocks + stream.unseen_blocks.total(),
        growth_blocks=max(0, load.growth_blocks - running),
        ending_requests=load.ending.requests,
        ending_blocks=load.ending.blocks,
        yielding_requests=load.yielding.requests,
        yielding_blocks=load.yielding.blocks,
        yielding_growth_blocks=load.yielding_growth_blocks,
        holdings=holdings,
    )


def _degree(member: Member) -> Degree:
    return max(1, member.tensor_ranks), max(1, member.pipeline_stages)


def _log_fields(worker: _Worker) -> dict[str, object]:
    """The fields of every log line about a worker."""
    return {"worker": worker.id.name, "role": worker.role, "incarnation": worker.id.incarnation}
