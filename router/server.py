"""A router process: identity, membership, workers, public face, health."""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    ROLE_ROUTER,
    Member,
    MemberState,
)
from kvrelay.internal.v1.worker_pb2 import Load, Requests
from kvrelay.models import resolve
from kvrelay.router.budget import RetryBudget
from kvrelay.router.config import RouterConfig
from kvrelay.router.grpc_face import SERVICE, InferenceFace
from kvrelay.router.placement import LeastLoaded, Policy
from kvrelay.router.queue import PlacementQueue
from kvrelay.router.records import Observer
from kvrelay.router.registry import WorkerRegistry
from kvrelay.router.session import Dispatch
from kvrelay.router.tokenizer import Tokenizer
from kvrelay.rpc.address import bind, join
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.options import server_options

logger = logging.getLogger(__name__)


class RouterServer:
    """Serves one router: `start`, then until `stop` or `failed`.

    Its health, for the whole server and for the service, is SERVING while a request can be placed.
    """

    def __init__(
        self,
        config: RouterConfig,
        observer: Observer | None = None,
        policy: Policy | None = None,
        load_observer: Callable[[Load], None] | None = None,
    ) -> None:
        """
        Args:
            observer: is given the record of every request when it is over, on the event loop; must not raise or block.
            policy: decides which workers take a request; the least loaded if None.
            load_observer: is given the requests that wait and run here at every heartbeat.
        """
        self.config = config
        self.incarnation = uuid.uuid4().hex
        self._observer = observer
        self._load_observer = load_observer
        self._policy = LeastLoaded(config.backlog_share) if policy is None else policy
        self._state: MemberState = MEMBER_STATE_STARTING
        self._port = 0
        self._tokenizer: Tokenizer | None = None
        self._pool: WorkerRegistry | None = None
        self._queue: PlacementQueue | None = None
        self._face: InferenceFace | None = None
        self._attendance: HeartbeatClient | None = None
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the type stubs
        self._serving: bool | None = None
        self._setting: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[BaseException] | None = None

    @property
    def address(self) -> str:
        """host:port of the public gRPC."""
        return join(self.config.host, self._port)

    @property
    def pool(self) -> WorkerRegistry:
        """The workers that this router knows, once it has started."""
        if self._pool is None:
            raise RuntimeError("the router has not started")
        return self._pool

    @property
    def waiting(self) -> int:
        """Requests in the queue for room on a decode worker."""
        return 0 if self._queue is None else len(self._queue)

    async def start(self) -> int:
        """Reads the tokenizer, binds, attends the supervisor; returns the port.

        Raises:
            OSError: the port is in use.
            ValueError: the model folder can't be used; the text says why.
        """
        self._failure = asyncio.get_running_loop().create_future()
        folder = resolve(self.config.model)
        self._tokenizer = tokenizer = await asyncio.to_thread(Tokenizer, folder)
        self._pool = pool = WorkerRegistry(self.config.name, self.incarnation, self._on_change, self._on_room)
        self._queue = queue = PlacementQueue(self._policy, pool.view, self.config.max_queue)
        dispatch = Dispatch(self.config, pool, queue, RetryBudget(), tokenizer.token_bytes)
        self._face = face = InferenceFace(dispatch, tokenizer, self._observer)
        self._server = server = grpc.aio.server(options=server_options(self.config.max_message_bytes))
        server.add_generic_rpc_handlers((face.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._set_health(serving=False)
        self._port = bind(server, self.config.host, self.config.grpc_port, "grpc_port")
        await server.start()
        if self.config.supervisor:
            self._attendance = HeartbeatClient(self.config.supervisor, self._describe, pool.update, self._on_fenced)
            self._attendance.start()
        logger.info("listening", extra={"address": self.address, "incarnation": self.incarnation})
        return self._port

    async def stop(self, grace: float) -> None:
        """Takes no new requests, gives those in flight `grace` seconds, then cancels them on their workers."""
        self._state = MEMBER_STATE_DRAINING
        if self._attendance is not None:
            self._attendance.beat()
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace)
        if self._pool is not None:
            await self._pool.close()
        if self._attendance is not None:
            await self._attendance.stop()
        if self._setting is not None:
            await self._setting
        if self._tokenizer is not None:
            self._tokenizer.close()

    async def failed(self) -> BaseException:
        """Returns when the router can't go on, with the reason."""
        if self._failure is None:
            raise RuntimeError("the router has not started")
        return await self._failure

    def _describe(self) -> tuple[Member, Load]:
        member = Member(
            name=self.config.name,
            role=ROLE_ROUTER,
            incarnation=self.incarnation,
            address=self.address,
            pid=os.getpid(),
            state=self._state,
        )
        running = 0 if self._face is None else self._face.running - self.waiting
        load = Load(requests=Requests(waiting=self.waiting, running=max(0, running)))
        if self._load_observer is not None:
            self._load_observer(load)
        return member, load

    def _on_room(self) -> None:
        if self._queue is not None:
            self._queue.blocks_freed()

    def _on_fenced(self) -> None:
        if self._failure is not None and not self._failure.done():
            reason = f"{self.config.name} {self.incarnation} was declared dead by the supervisor"
            self._failure.set_result(RuntimeError(reason))

    # Health.

    def _on_change(self) -> None:
        """One task at a time sets the health, so that the last change wins."""
        if self._setting is None or self._setting.done():
            self._setting = asyncio.create_task(self._follow_health(), name="health")

    async def _follow_health(self) -> None:
        while self._pool is not None and self._pool.complete != self._serving:
            await self._set_health(serving=self._pool.complete)

    async def _set_health(self, *, serving: bool) -> None:
        if self._serving is not None:
            logger.info("health", extra={"serving": serving})
        self._serving = serving
        if self._state != MEMBER_STATE_DRAINING:
            # Ready means that a request sent now finds workers: what `kvrelay status` and the supervisor go by.
            self._state = MEMBER_STATE_READY if serving else MEMBER_STATE_STARTING
        if self._attendance is not None:
            self._attendance.beat()
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)
