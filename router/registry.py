"""The workers that a router knows, and its streams to them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    ROLE_COLOCATED,
    ROLE_DECODE,
    ROLE_PREFILL,
    Member,
    MemberState,
    Role,
)
from kvrelay.internal.v1.worker_pb2 import ModelInfo, RouterHello
from kvrelay.router.placement import DecodeCapacity, WorkerRole, WorkerView, complete
from kvrelay.router.worker_stream import WorkerStream
from kvrelay.rpc.identity import WorkerId

logger = logging.getLogger(__name__)

ROLES: dict[Role, WorkerRole] = {ROLE_PREFILL: "prefill", ROLE_DECODE: "decode", ROLE_COLOCATED: "colocated"}
REDIAL_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class _Worker:
    """One incarnation of a worker that is, or was, a member."""

    id: WorkerId
    role: WorkerRole
    address: str
    state: MemberState
    listed: bool = True
    """In the latest membership. A supervisor that has just started doesn't list every member yet."""
    stream: WorkerStream | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def wanted(self) -> bool:
        """Whether to connect again after the stream is lost."""
        return self.listed and self.state in (MEMBER_STATE_READY, MEMBER_STATE_SUSPECT)


class WorkerRegistry:
    """Follows the membership: keeps a stream to each worker that is ready, and connects again after a loss.

        listed READY                        the stream is kept
        SUSPECT, DRAINING                   gets no new requests; those placed there continue
        DEAD, or replaced under its name    the stream is closed at once, which fails every request on it
        not listed any more                 serves on until its stream ends

    The first worker reached determines the cluster's model; a worker with another model is not used.
    """

    def __init__(
        self, name: str, incarnation: str, on_change: Callable[[], None], on_load: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            name: the router's.
            incarnation: the router's.
            on_change: called whenever `complete` or `model` may have changed.
            on_load: called whenever `view` may have changed.
        """
        self._name = name
        self._incarnation = incarnation
        self._on_change = on_change
        self._on_load = on_load
        self._workers: dict[WorkerId, _Worker] = {}
        self._changed = asyncio.Event()
        self._model: ModelInfo | None = None

    @property
    def model(self) -> ModelInfo | None:
        """The cluster's model, with the smallest max_context of its workers; None until a worker was reached."""
        return self._model

    @property
    def complete(self) -> bool:
        """Whether a request can be placed."""
        return complete(self.view())

    def view(self) -> list[WorkerView]:
        """The workers as a placement policy sees them now."""
        return [self._view(worker) for worker in self._workers.values()]

    def stream(self, worker: WorkerId) -> WorkerStream:
        """The stream to a worker that `view` lists as ready.

        Raises:
            KeyError: there is none.
        """
        stream = self._workers[worker].stream
        if stream is None:
            raise KeyError(f"{worker} has no stream")
        return stream

    async def changed(self) -> None:
        """Returns at the next change of the membership, a stream or the model."""
        await self._changed.wait()

    def update(self, members: Sequence[Member]) -> None:
        """Takes a new membership."""
        listed = {WorkerId(member.name, member.incarnation): member for member in members if member.role in ROLES}
        names = {worker_id.name for worker_id, member in listed.items() if member.state != MEMBER_STATE_DEAD}
        for worker in list(self._workers.values()):
            member = listed.get(worker.id)
            worker.listed = member is not None
            if member is not None:
                worker.state = member.state
                if member.state == MEMBER_STATE_DEAD:
                    self._drop(worker, "declared dead")
            elif worker.id.name in names:
                self._drop(worker, "replaced by a new incarnation")
        for worker_id, member in listed.items():
            if member.state == MEMBER_STATE_READY and worker_id not in self._workers:
                worker = _Worker(worker_id, ROLES[member.role], member.address, member.state)
                self._workers[worker_id] = worker
                worker.task = asyncio.create_task(self._keep_stream(worker), name=f"stream to {worker_id.name}")
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
            hello = RouterHello(
                router=self._name,
                router_incarnation=self._incarnation,
                worker_incarnation=worker.id.incarnation,
            )
            worker.stream = stream = WorkerStream(worker.id, worker.address, hello, self._on_stream, self._on_load)
            await stream.run()
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

    def _on_stream(self) -> None:
        """A stream has come up or is lost."""
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
        same = [model for _, model in up if self._model is not None and model.fingerprint == self._model.fingerprint]
        if not same:
            same = [model for _, model in up if model.fingerprint == up[0][1].fingerprint]
        chosen = ModelInfo()
        chosen.CopyFrom(same[0])
        chosen.max_context = min(model.max_context for model in same)
        self._model = chosen
        for worker, model in up:
            if model.fingerprint != chosen.fingerprint:
                different = {"fingerprint": model.fingerprint, "cluster_fingerprint": chosen.fingerprint}
                logger.error("worker not used: it serves another model", extra=_log_fields(worker) | different)

    def _view(self, worker: _Worker) -> WorkerView:
        stream = worker.stream
        if stream is None:
            return WorkerView(worker.id, worker.role, ready=False)
        ours, theirs = self._model, stream.serving
        same = ours is not None and theirs is not None and ours.fingerprint == theirs.fingerprint
        blocks = None if stream.last_load is None else stream.last_load.blocks
        return WorkerView(
            worker.id,
            worker.role,
            ready=worker.state == MEMBER_STATE_READY and same,
            outstanding_tokens=stream.outstanding_tokens,
            pending_tokens=stream.pending_tokens,
            kv_tokens=0 if blocks is None else blocks.total * blocks.size,
            capacity=_capacity(stream) if worker.role == "decode" else None,
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()
        self._on_load()


def _capacity(stream: WorkerStream) -> DecodeCapacity | None:
    """The worker's latest report, with the submits that it doesn't account for."""
    load = stream.last_load
    if load is None or not load.blocks.size:
        return None
    size = load.blocks.size
    unseen = [-(-(tokens + 1) // size) for tokens in stream.unseen]
    # The worker's scheduler keeps one block in reserve for each running sequence.
    free = load.blocks.free + load.blocks.cached - load.requests.running
    return DecodeCapacity(
        block_size=size,
        total=load.blocks.total,
        free=max(0, free),
        free_slots=load.requests.free_slots,
        promised_requests=load.promised.requests + len(unseen),
        promised_blocks=load.promised.blocks + sum(unseen),
    )


def _log_fields(worker: _Worker) -> dict[str, object]:
    """The fields of every log line about a worker."""
    return {"worker": worker.id.name, "role": worker.role, "incarnation": worker.id.incarnation}
