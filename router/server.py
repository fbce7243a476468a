"""A router process: membership, streams to workers, public gRPC and HTTP, health."""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    ROLE_ROUTER,
    Member,
    MemberState,
)
from kvrelay.internal.v1.worker_pb2 import Load, Requests
from kvrelay.models import model_name, resolve
from kvrelay.router.config import INTERACTIVE, RouterConfig
from kvrelay.router.doors.doors import Doors
from kvrelay.router.entry.callers import Callers, public_certificates
from kvrelay.router.entry.front import Front
from kvrelay.router.errors import Unavailable
from kvrelay.router.faces import reflection
from kvrelay.router.faces.grpc_face import SERVICE, GrpcFace
from kvrelay.router.faces.http.face import HttpFace
from kvrelay.router.faces.page.page import Page
from kvrelay.router.faces.readers import chats_of, reading
from kvrelay.router.placing.placing import Placing
from kvrelay.router.placing.registry import StreamMaker
from kvrelay.router.placing.worker_stream import WorkerStream
from kvrelay.router.records.metrics import RouterMetrics
from kvrelay.router.records.requests import Requests as KnownRequests
from kvrelay.router.records.spans import SpanExport
from kvrelay.router.records.traffic import TrafficMeter
from kvrelay.router.request.lanes import Lanes
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.session.budget import RetryBudget
from kvrelay.router.session.dispatch import Dispatch
from kvrelay.router.session.pacer import Pacer
from kvrelay.rpc.certificates import server_context
from kvrelay.rpc.credentials import Credentials, bind
from kvrelay.rpc.description import describe
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.identity import join
from kvrelay.rpc.metrics.exposition import MetricsPort
from kvrelay.rpc.options import connection_options, public_server_options

logger = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
"""Longest time in seconds that a router that shares its port waits for workers before it binds it in any case."""
LINGER_SECONDS = 0.3
"""Seconds for requests that were sent before their client learned that this router listens no more."""
CALLS_SECONDS = 0.5
"""Seconds for calls without a stream to end when the router is to end."""
WARM_SECONDS = 5.0
"""Delay of the process for large requests after the router's start, in seconds. Its imports take a second of CPU time,
which a cluster that is just starting needs itself."""


class RouterServer:
    """Serves one router: `start`, then until `stop` or `failed`.

    Its health, for the whole server and for the service, is SERVING while a request can be placed.
    """

    def __init__(
        self, config: RouterConfig, clock: Callable[[], float] = time.monotonic, stream: StreamMaker = WorkerStream
    ) -> None:
        """Reads the tokenizer and the defaults of sampling.

        Args:
            clock: time in seconds for all parts of the router; the event loop's timers run at the same rate.
            stream: makes the streams to workers.

        Raises:
            ValueError: the model folder, the join token, the API keys or a certificate can't be used.
        """
        self.config = config
        credentials = Credentials.of("router", config.security)
        self.incarnation = uuid.uuid4().hex
        template = Path(config.chat_template) if config.chat_template else None
        folder = resolve(config.model, weights=False)
        self._tokenizer = Tokenizer(folder, template)
        self._placing = Placing(config, credentials, self._on_change, clock, stream)
        self.registry = self._placing.registry
        """The workers that the router knows."""
        budget, token_bytes = RetryBudget(clock), self._tokenizer.token_bytes
        pacer = Pacer(config.coalesce_ms / 1000, clock)
        self._services = services = config.services()
        metrics = RouterMetrics(config.name, model_name(config.model), services)
        options = {name: getattr(config, name) for name in ("tool_parser", "reasoning_parser", "chat_template")}
        self._lanes = Lanes({"folder": str(folder), "max_message_bytes": config.max_message_bytes, **options})
        chats = chats_of(self._tokenizer, config.tool_parser, config.reasoning_parser)
        read = reading(folder, self._tokenizer, chats, self._lanes)
        dispatch = Dispatch(config, services, self._placing, pacer, budget, token_bytes, metrics, read.turns, clock)
        self._spans = (
            SpanExport(config.name, config.otlp_endpoint, config.trace_share, clock) if config.otlp_endpoint else None
        )
        traffic = TrafficMeter(services, clock)
        self._callers = Callers(config)
        self._watching: asyncio.Task[None] | None = None
        self.front = Front(dispatch, self._callers, read, traffic, self._spans)
        """State of the router's faces: through it, calls can come without a port."""
        self._doors = Doors(config, self.front.addresses, metrics)
        metrics.watch(
            lambda: (len(self._placing.queue), len(self._placing.trials)),
            lambda: self.running,
            self.registry.view,
            lambda: self._callers.mistakes,
            lambda: (len(self._doors.http), len(self._doors.grpc)),
        )
        self.metrics = metrics.metrics
        """The router's metrics."""
        self._metrics_port = MetricsPort(self.metrics)
        self._metrics_address = ""
        self._certificates = public_certificates(config)
        self._http: HttpFace | None = None
        if config.http_port is not None:
            self._http = HttpFace(self.front, self.metrics.registry, chats, self._doors.http)
            if config.page:
                self._http.app.add_routes(Page(self.front, self.registry, config.name).routes())
        self._fenced = asyncio.Event()
        self._heartbeat: HeartbeatClient | None = None
        if config.supervisor:
            self._heartbeat = HeartbeatClient(
                config.supervisor,
                credentials,
                self._describe,
                self.registry.update,
                self._fenced.set,
                tell=partial(asyncio.to_thread, describe, (credentials.certificates, self._certificates)),
            )
        self._state: MemberState = MEMBER_STATE_STARTING
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the type stubs
        self._serving: bool | None = None
        self._setting_health: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None  # belongs to the running event loop, so `start` makes it
        self._port = self._http_port = 0
        self._listening = False

    @property
    def http_address(self) -> str | None:
        """host:port of the HTTP API; None without it."""
        if self._http is None:
            return None
        return join(self.config.advertised_host or self.config.host, self._http_port)

    @property
    def address(self) -> str:
        """host:port of the public gRPC."""
        return join(self.config.advertised_host or self.config.host, self._port)

    @property
    def waiting(self) -> int:
        """Requests in the queues for capacity on a decode worker, or for workers without another suspect."""
        return self._placing.waiting

    @property
    def running(self) -> int:
        """Calls that don't wait in the queues."""
        return max(0, self.front.running - self.waiting)

    @property
    def requests(self) -> KnownRequests:
        """The requests that run, and the latest that have ended."""
        return self.front.requests

    async def start(self) -> int:
        """Binds, serves and joins the membership; returns the port.

        Raises:
            OSError: the port is in use.
        """
        face, config = GrpcFace(self.front, self._doors.grpc), self.config
        self._server = server = grpc.aio.server(
            interceptors=[face.gate()],
            options=(
                *public_server_options(config.max_message_bytes, config.max_requests, share_port=config.share_port),
                *connection_options(config.header_timeout_seconds, config.grpc_idle_seconds, self._doors.grpc.most),
            ),
        )
        server.add_generic_rpc_handlers((face.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers(reflection.handlers((SERVICE, health.SERVICE_NAME)))
        await self._set_health(serving=False)
        if self.config.share_port:
            await self._join_first()
        clients: Literal["none", "required"] = "required" if self.config.tls_client_ca else "none"
        self._port = bind(server, self.config.host, self.config.grpc_port, "grpc_port", self._certificates, clients)
        if self._http is not None and self.config.http_port is not None:
            tls = None
            if self._certificates is not None:
                tls = server_context(self._certificates, clients_required=clients == "required")
            self._http_port = await self._http.start(
                self.config.host, self.config.http_port, tls, share_port=self.config.share_port
            )
        await server.start()
        self._doors.start(self._port)
        if self.config.metrics_port is not None:
            port = await self._metrics_port.start(self.config.host, self.config.metrics_port)
            self._metrics_address = join(self.config.advertised_host or self.config.host, port)
        self._watching = asyncio.create_task(self._callers.watch(), name="api keys")
        self._listening = True
        if self.config.share_port:
            await self._set_health(serving=self.registry.complete)
        elif self._heartbeat is not None:
            self._heartbeat.start()
        fields = {"address": self.address, "http": self.http_address, "incarnation": self.incarnation}
        logger.info("listening", extra=fields)
        return self._port

    async def warm(self) -> None:
        """Begins a process for large requests before one comes, but after the first small ones."""
        await asyncio.sleep(WARM_SECONDS)
        with suppress(Unavailable):  # it is logged, and tried again
            await self._lanes.start()

    async def _join_first(self) -> None:
        """Meets the workers before the port is bound: until then, connections find another router."""
        self._port, self._http_port = self.config.grpc_port, self.config.http_port or 0
        if self._heartbeat is not None:
            self._heartbeat.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(JOIN_SECONDS):
                while not self.registry.complete:
                    await self.registry.changed()

    async def stop(self, grace: float) -> None:
        """Takes no new requests, gives the running ones `grace` seconds, then ends them with UNAVAILABLE.

        A router that shares its port first closes it, and takes what is still on its way: the others get the rest.
        """
        self._state = MEMBER_STATE_DRAINING
        if self._heartbeat is not None:
            self._heartbeat.beat()
        await self._health.enter_graceful_shutdown()
        closing = None
        if self._server is not None and self.config.share_port:
            closing = asyncio.create_task(self._server.stop(grace + LINGER_SECONDS + CALLS_SECONDS), name="closing")
            if self._http is not None:
                self._http.close_port()
            await asyncio.sleep(min(grace, LINGER_SECONDS))
        await self.front.stop(grace)
        if self._server is not None:
            await self._server.stop(CALLS_SECONDS)
        if closing is not None:
            await closing
        if self._http is not None:
            await self._http.stop()
        await self._doors.stop()
        await self._metrics_port.stop()
        await self.registry.close()
        if self._heartbeat is not None:
            await self._heartbeat.stop()
        if self._setting_health is not None:
            await self._setting_health
        if self._watching is not None:
            self._watching.cancel()
        await self._lanes.close()
        self._tokenizer.close()
        if self._spans is not None:
            await self._spans.close()

    async def failed(self) -> BaseException:
        """Returns when the router can't continue, with the reason."""
        await self._fenced.wait()
        return RuntimeError(f"{self.config.name} {self.incarnation} was declared dead by the supervisor")

    def _describe(self) -> tuple[Member, Load]:
        if self._certificates is not None:
            self._certificates.check()
        member = Member(
            name=self.config.name,
            role=ROLE_ROUTER,
            incarnation=self.incarnation,
            address=self.address,
            http_address=self.http_address or "",
            metrics_address=self._metrics_address,
            pid=os.getpid(),
            state=self._state,
        )
        view = self.registry.view()
        queued = self._placing.queue.demands(self._services[INTERACTIVE].rank)
        traffic = self.front.traffic.report(queued, lambda demand: self._placing.policy.waits_for(demand, view))
        return member, Load(requests=Requests(waiting=self.waiting, running=self.running), traffic=traffic)

    # Health.

    def _on_change(self) -> None:
        """Starts the task that sets the health. There is one at a time, so that the latest change wins."""
        if self._setting_health is None or self._setting_health.done():
            self._setting_health = asyncio.create_task(self._follow_health(), name="health")

    async def _follow_health(self) -> None:
        while self.registry.complete != self._serving:
            await self._set_health(serving=self.registry.complete)

    async def _set_health(self, *, serving: bool) -> None:
        if self._serving is not None:
            logger.info("health", extra={"serving": serving})
        self._serving = serving
        if self._state != MEMBER_STATE_DRAINING:
            # `kvrelay status` and the supervisor rely on it: READY means that a request sent now finds workers.
            self._state = MEMBER_STATE_READY if serving and self._listening else MEMBER_STATE_STARTING
        if self._heartbeat is not None:
            self._heartbeat.beat()
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)
