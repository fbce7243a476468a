"""The Ray actors: each hosts one plain server, the same that `python -m kvrelay.<part>` runs in the foreground.

An actor places, starts and watches; requests and tokens go through the servers' own gRPC. `serve` is one long call on a
thread of its own, whose result (or whose actor's death) tells the supervisor at once that the process has ended; `stop`
and `address` run beside it, so an actor needs CONCURRENCY threads.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import ray
import ray.util

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.replacement import Ended
from kvrelay.cluster.supervisor import Startup, SupervisorConfig, SupervisorServer
from kvrelay.router.config import RouterConfig
from kvrelay.rpc import log
from kvrelay.rpc.serve import Server
from kvrelay.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

CONCURRENCY = 4
STOP_SECONDS = 10.0
FAILED_GRACE_SECONDS = 0.5
LOOPBACK = "127.0.0.1"


class Hosted:
    """One server on an event loop of its own, run by one thread and asked by others.

    Apart from the actors' classes, which must have no coroutines: Ray would run their methods on a loop of its own.
    """

    def __init__(self, make: Callable[[], Server]) -> None:
        """`make` gives the server to host; it raises ValueError for a mistake in what it was told."""
        self._make = make
        self.address: Future[str] = Future()
        self._stopping: Future[float] = Future()
        self._ended = threading.Event()

    def serve(self) -> Ended:
        """Serves until stopped or failed."""
        ended = Ended("it failed; its log has the reason")
        try:
            ended = asyncio.run(self._serve())
        finally:
            if not self.address.done():
                self.address.set_exception(RuntimeError(ended.reason))
            self._ended.set()
        return ended

    def stop(self, grace: float) -> None:
        """Gives what runs `grace` seconds to finish and ends the server; returns when it has ended."""
        if not self._stopping.done():
            self._stopping.set_result(grace)
        self._ended.wait(grace + STOP_SECONDS)

    async def _serve(self) -> Ended:
        try:
            server = self._make()
        except ValueError as error:
            return Ended(str(error), mistake=True)
        stopping = asyncio.wrap_future(self._stopping)
        running = asyncio.create_task(self._run(server))
        try:
            done, _ = await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running in done else Ended()
        finally:
            running.cancel()
            await server.stop(stopping.result() if stopping.done() else FAILED_GRACE_SECONDS)

    async def _run(self, server: Server) -> Ended:
        try:
            await server.start()
        except (ValueError, OSError) as error:
            return Ended(str(error), mistake=True)
        self.address.set_result(server.address)
        return Ended(str(await server.failed()))


class ServerActor:
    """Hosts one server."""

    def __init__(self, part: str, name: str) -> None:
        log.configure(part=part, name=name)
        self._hosted = Hosted(self.make)

    def make(self) -> Server:
        """The server to host."""
        raise NotImplementedError

    def serve(self) -> Ended:
        """Serves until stopped or failed; a failed server's process exits soon after by itself."""
        try:
            ended = self._hosted.serve()
        except BaseException:
            _exit_later()
            raise
        if ended.reason:
            _exit_later()
        return ended

    def address(self) -> str:
        """host:port of the server, once it has started."""
        return self._hosted.address.result()

    def stop(self, grace: float) -> None:
        """Gives what runs `grace` seconds to finish and ends the server; returns when it has ended."""
        self._hosted.stop(grace)


def _exit_later() -> None:
    """Leaves time for the call's result to get out. A process that was cut off may have nobody else to end it."""
    timer = threading.Timer(STOP_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


class WorkerActor(ServerActor):
    """One worker; `prefill-0 (prefill, rank 0, gpu 0)` on the dashboard."""

    def __init__(self, config: WorkerConfig, local: bool) -> None:
        super().__init__("worker", config.name)
        self._config = replace(config, host=_own_host(local))
        # Ray sets it to 1, or to the CPUs reserved; libraries that the engine loads read it when they are imported.
        os.environ["OMP_NUM_THREADS"] = str(config.engine.threads)

    def __repr__(self) -> str:
        gpus = ",".join(str(gpu) for gpu in ray.get_gpu_ids()) or "none"
        return f"{self._config.name} ({self._config.role}, rank 0, gpu {gpus})"

    def make(self) -> Server:
        from kvrelay.cluster.metrics import WorkerMetrics

        if ray.get_gpu_ids() and self._config.engine.device == "cpu":
            logger.warning("engine.device is cpu; the GPUs reserved for this worker stay idle")
        observer = WorkerMetrics(self._config.name, self._config.role)
        if self._config.role == "prefill":
            from kvrelay.prefill_worker.server import prefill_server

            return prefill_server(self._config, observer)
        if self._config.role == "decode":
            from kvrelay.decode_worker.server import decode_server

            return decode_server(self._config, observer)
        from kvrelay.worker.server import WorkerServer

        return WorkerServer(self._config, observer=observer)


class RouterActor(ServerActor):
    """One router; `router-0 (router)` on the dashboard."""

    def __init__(self, config: RouterConfig, local: bool) -> None:
        super().__init__("router", config.name)
        self._config = replace(config, host=_own_host(local)) if config.host == LOOPBACK else config

    def __repr__(self) -> str:
        return f"{self._config.name} (router)"

    def make(self) -> Server:
        from kvrelay.cluster.metrics import RouterMetrics
        from kvrelay.router.server import RouterServer

        metrics = RouterMetrics(self._config.name)
        return RouterServer(self._config, metrics, load_observer=metrics.observe_load)


class SupervisorActor(ServerActor):
    """The supervisor, which starts, watches and replaces all the others."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__("supervisor", "supervisor")
        self._config = config
        self._server: SupervisorServer | None = None

    def __repr__(self) -> str:
        return "kvrelay-supervisor"

    def make(self) -> Server:
        from kvrelay.cluster.ray_launcher import RayLauncher

        heartbeat = self._config.heartbeat
        config = SupervisorConfig(
            host=_own_host(self._config.local),
            suspect_seconds=heartbeat.suspect_seconds,
            dead_seconds=heartbeat.dead_seconds,
        )
        launcher = RayLauncher(self._config)
        self._server = SupervisorServer(config, launcher, launcher.names)
        return self._server

    def startup(self) -> Startup:
        """How far every member is, for `kvrelay up`."""
        self.address()
        if self._server is None:
            raise RuntimeError("the supervisor has an address but no server")
        return self._server.startup()


def _own_host(local: bool) -> str:
    """The address at which the others of the cluster reach this machine."""
    # Typed as returning nothing by Ray.
    return LOOPBACK if local else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
