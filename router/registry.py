"""The workers that a router knows, and its links to them."""

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
from kvrelay.router.placement import Room, WorkerKey, WorkerRole, WorkerView, complete
from kvrelay.router.worker_stream import WorkerStream

logger = logging.getLogger(__name__)

ROLES: dict[Role, WorkerRole] = {ROLE_PREFILL: "prefill", ROLE_DECODE: "decode", ROLE_COLOCATED: "colocated"}
REDIAL_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class _Worker:
    """One life of a worker that is, or was, a member."""

    key: WorkerKey
    role: WorkerRole
    address: str
    state: MemberState
    listed: bool = True
    """In the supervisor's latest membership. A supervisor that has just started doesn't know every member yet."""
    link: WorkerStream | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def wanted(self) -> bool:
        """Whether a lost link is to be made again."""
        return self.listed and self.state in (MEMBER_STATE_READY, MEMBER_STATE_SUSPECT)


class WorkerRegistry:
    """Follows the membership: a link to each worker that is ready, made again when it breaks.

        listed READY                       a link is kept
        SUSPECT, DRAINING                  gets nothing new; what runs there goes on
        DEAD, or replaced under its name   the link is lost at once, and every request on it told
        not listed any more                serves on for as long as its link holds

    The first worker reached says which model the cluster serves; one that differs is not used.
    """

    def __init__(
        self, name: str, incarnation: str, on_change: Callable[[], None], on_room: Callable[[], None] = lambda: None
    ) -> None:
        """`on_change` is called whenever `complete` or `model` may have changed, `on_room` when `view` may have."""
        self._name = name
        self._incarnation = incarnation
        self._on_change = on_change
        self._on_room = on_room
        self._workers: dict[WorkerKey, _Worker] = {}
        self._changed = asyncio.Event()
        self._model: ModelInfo | None = None

    @property
    def model(self) -> ModelInfo | None:
        """What the cluster serves, its context the least of the workers'; None until a worker was reached."""
        return self._model

    @property
    def complete(self) -> bool:
        """Whether a request can be placed."""
        return complete(self.view())

    def view(self) -> list[WorkerView]:
        """What a policy chooses from."""
        return [self._view(worker) for worker in self._workers.values()]

    def link(self, key: WorkerKey) -> WorkerStream:
        """The link to a worker that `view` called ready."""
        link = self._workers[key].link
        if link is None:
            raise KeyError(f"{key} has no link")
        return link

    async def changed(self) -> None:
        """Returns at the next change."""
        await self._changed.wait()

    def update(self, members: Sequence[Member]) -> None:
        """Takes a new membership."""
        listed = {WorkerKey(member.name, member.incarnation): member for member in members if member.role in ROLES}
        names = {key.name for key, member in listed.items() if member.state != MEMBER_STATE_DEAD}
        for key, worker in list(self._workers.items()):
            member = listed.get(key)
            worker.listed = member is not None
            if member is not None:
                worker.state = member.state
            if (member is not None and member.state == MEMBER_STATE_DEAD) or (member is None and key.name in names):
                self._drop(worker, "declared dead" if member is not None else "replaced by a new incarnation")
        for key, member in listed.items():
            if member.state == MEMBER_STATE_READY and key not in self._workers:
                worker = _Worker(key, ROLES[member.role], member.address, member.state)
                self._workers[key] = worker
                worker.task = asyncio.create_task(self._keep(worker), name=f"link to {key.name}")
        self._notify()

    async def close(self) -> None:
        """Ends every link."""
        tasks = [worker.task for worker in self._workers.values() if worker.task is not None]
        for worker in list(self._workers.values()):
            self._drop(worker, "the router is shutting down")
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, worker: _Worker) -> None:
        """Links, and links anew for as long as the worker is listed."""
        failures = 0
        while worker.wanted:
            hello = RouterHello(
                router=self._name,
                router_incarnation=self._incarnation,
                worker_incarnation=worker.key.incarnation,
            )
            worker.link = link = WorkerStream(worker.key, worker.address, hello, self._on_link, self._on_room)
            await link.run()
            failures = 0 if link.model is not None else failures + 1
            if failures <= 1:
                logger.warning("worker lost", extra=_fields(worker) | {"reason": link.lost})
            await asyncio.sleep(REDIAL_SECONDS[min(failures, len(REDIAL_SECONDS) - 1)])
        self._workers.pop(worker.key, None)
        self._notify()

    def _drop(self, worker: _Worker, reason: str) -> None:
        self._workers.pop(worker.key, None)
        worker.listed = False
        if worker.link is not None:
            worker.link.close(reason)
        if worker.task is not None:
            worker.task.cancel()
        logger.info("worker dropped", extra=_fields(worker) | {"reason": reason})

    def _on_link(self) -> None:
        self._settle_model()
        self._notify()

    def _settle_model(self) -> None:
        up = [
            (worker, worker.link.model)
            for worker in self._workers.values()
            if worker.link is not None and worker.link.up and worker.link.model is not None
        ]
        if not up:
            return  # the last known one stays, to check requests by
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
                logger.error("worker not used: it serves another model", extra=_fields(worker) | different)

    def _view(self, worker: _Worker) -> WorkerView:
        link = worker.link
        if link is None:
            return WorkerView(worker.key, worker.role, ready=False)
        same = link.model is not None and self._model is not None and link.model.fingerprint == self._model.fingerprint
        return WorkerView(
            worker.key,
            worker.role,
            ready=worker.state == MEMBER_STATE_READY and link.up and same,
            outstanding_tokens=link.outstanding_tokens,
            pending_tokens=link.load.pending_tokens,
            kv_tokens=0 if link.room is None else link.room.blocks.total * link.room.blocks.size,
            room=_room(link) if worker.role == "decode" else None,
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()
        self._on_room()


def _room(link: WorkerStream) -> Room | None:
    """What the worker has said, and what was sent to it since."""
    load = link.room
    if load is None or not load.blocks.size:
        return None
    size = load.blocks.size
    unseen = [-(-(tokens + 1) // size) for tokens in link.unseen]
    # Its scheduler keeps a block back for each sequence that runs.
    free = load.blocks.free + load.blocks.cached - load.requests.running
    return Room(
        block_size=size,
        total=load.blocks.total,
        free=max(0, free),
        free_slots=load.requests.free_slots,
        promised_requests=load.promised.requests + len(unseen),
        promised_blocks=load.promised.blocks + sum(unseen),
    )


def _fields(worker: _Worker) -> dict[str, object]:
    """What every log line about a worker carries."""
    return {"worker": worker.key.name, "role": worker.role, "incarnation": worker.key.incarnation}
