"""The Ray actors of workers and routers. Each hosts the plain server that `python -m kvrelay.<part>` runs.

An actor is placed, started and watched by Ray; requests and tokens go through the server's own gRPC. `serve` is one
long call in a thread of its own: its result, or its actor's death, reports the end of the process at once. `stop` and
`address` run beside it, so an actor needs CONCURRENCY threads.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import ray
import ray.util

from kvrelay.cluster.replacement import Ended
from kvrelay.router.config import RouterConfig
from kvrelay.rpc import log
from kvrelay.rpc.serve import Server
from kvrelay.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

CONCURRENCY = 4
STOP_SECONDS = 10.0
FAILED_GRACE_SECONDS = 0.5
LOOPBACK = "127.0.0.1"
ServerT = TypeVar("ServerT", bound=Server)


class ServerActor(Generic[ServerT]):
    """Hosts one server. It has no coroutines: Ray would run them on an event loop of its own."""

    def __init__(self, part: str, name: str, title: str, make: Callable[[], ServerT]) -> None:
        """`title` names the actor on Ray's dashboard; `make` raises ValueError for a mistake in the configuration."""
        log.configure(part=part, name=name)
        self._title = title
        self._make = make
        self._started: Future[ServerT] = Future()
        self._stopping: Future[float] = Future()
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return self._title

    def serve(self) -> Ended:
        """Serves until stopped or failed; the process of a failed server exits soon after by itself."""
        ended = Ended("it failed; its log has the reason")
        try:
            ended = asyncio.run(_serve(self._make, self._started, self._stopping))
            return ended
        finally:
            if not self._started.done():
                self._started.set_exception(RuntimeError(ended.reason))
            self._ended.set()
            if ended.reason:
                _exit_later()

    def address(self) -> str:
        """host:port of the server; waits until it has started."""
        return self._started.result().address

    def stop(self, grace: float) -> None:
        """Gives running requests `grace` seconds to finish and ends the server; returns when it has ended."""
        if not self._stopping.done():
            self._stopping.set_result(grace)
        self._ended.wait(grace + STOP_SECONDS)


class WorkerActor(ServerActor[Server]):
    """One worker; `prefill-0 (prefill, rank 0, gpu 0)` on the dashboard."""

    def __init__(self, config: WorkerConfig, local: bool) -> None:
        # Ray sets it to 1, or to the CPUs reserved; libraries that the engine loads read it when they are imported.
        os.environ["OMP_NUM_THREADS"] = str(config.engine.threads)
        gpus = ",".join(str(gpu) for gpu in ray.get_gpu_ids())
        config = replace(config, host=own_host(local))
        title = f"{config.name} ({config.role}, rank 0, gpu {gpus or 'none'})"
        super().__init__("worker", config.name, title, partial(_worker, config))
        if gpus and config.engine.device == "cpu":
            logger.warning("engine.device is cpu; the GPUs reserved for this worker stay idle")


class RouterActor(ServerActor[Server]):
    """One router; `router-0 (router)` on the dashboard."""

    def __init__(self, config: RouterConfig, local: bool) -> None:
        if config.host == LOOPBACK:
            config = replace(config, host=own_host(local))
        super().__init__("router", config.name, f"{config.name} (router)", partial(_router, config))


def own_host(local: bool) -> str:
    """The address at which the other members of the cluster reach this machine."""
    # Typed as returning nothing by Ray.
    return LOOPBACK if local else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _worker(config: WorkerConfig) -> Server:
    from kvrelay.cluster.metrics import WorkerMetrics

    observer = WorkerMetrics(config.name, config.role)
    if config.role == "prefill":
        from kvrelay.prefill_worker.server import prefill_server

        return prefill_server(config, observer)
    if config.role == "decode":
        from kvrelay.decode_worker.server import decode_server

        return decode_server(config, observer)
    from kvrelay.worker.server import WorkerServer

    return WorkerServer(config, observer=observer)


def _router(config: RouterConfig) -> Server:
    from kvrelay.cluster.metrics import RouterMetrics
    from kvrelay.router.server import RouterServer

    metrics = RouterMetrics(config.name)
    return RouterServer(config, metrics, load_observer=metrics.observe_load)


async def _serve(make: Callable[[], ServerT], started: "Future[ServerT]", stopping: "Future[float]") -> Ended:
    try:
        server = make()
    except ValueError as error:
        return Ended(str(error), mistake=True)
    running = asyncio.create_task(_run(server, started))
    try:
        await asyncio.wait((running, asyncio.wrap_future(stopping)), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else Ended()
    finally:
        running.cancel()
        await server.stop(stopping.result() if stopping.done() else FAILED_GRACE_SECONDS)


async def _run(server: ServerT, started: "Future[ServerT]") -> Ended:
    try:
        await server.start()
    except (ValueError, OSError) as error:
        return Ended(str(error), mistake=True)
    started.set_result(server)
    return Ended(str(await server.failed()))


def _exit_later() -> None:
    """Ends the process after time for the call's result to leave: a process that was cut off has nobody to end it."""
    timer = threading.Timer(STOP_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()
