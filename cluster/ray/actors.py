"""The Ray actors of workers and routers. Each hosts the plain server that `python -m kvrelay.<part>` runs.

An actor is placed, started and watched by Ray; requests and tokens go through the server's own gRPC. Its server starts
with it, in a thread of its own. `watch` returns when the server has ended: that call, or the actor's death, reports the
end of the process at once. An actor needs CONCURRENCY threads for it and the other calls, and for the last `watch` of a
supervisor that was killed.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import ray
import ray.util

from kvrelay.cluster.fleet.replacement import ProcessEnd
from kvrelay.cluster.ray import metrics as ray_metrics
from kvrelay.cluster.ray.node_drain import Registration
from kvrelay.machine.options import AUTO
from kvrelay.router.config import RouterConfig
from kvrelay.rpc import log
from kvrelay.rpc.security import TOKEN_VARIABLE, SecurityConfig
from kvrelay.rpc.serve import EXIT_SECONDS, FAILED_CODE, FAILED_GRACE_SECONDS, STOP_SECONDS, ExitDeadline, Server
from kvrelay.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

CONCURRENCY = 8
WATCH_SECONDS = 2.0
"""Longest time of one call of `watch`."""
REPORT_SECONDS = 10.0
"""Seconds for the result of `watch` to leave a process whose server has failed."""
LOOPBACK = "127.0.0.1"
LEAVING = "its node is about to stop"
WILDCARDS = ("0.0.0.0", "::", "[::]")
ServerT = TypeVar("ServerT", bound=Server)


class ServerActor(Generic[ServerT]):
    """Hosts one server. It has no coroutines: Ray would run them on an event loop of its own."""

    stop_seconds = STOP_SECONDS
    """Seconds for the server to stop, beyond the time for its requests."""
    drain_seconds = 0.0
    """Seconds for its requests to finish when its node is about to stop."""

    def __init__(self, part: str, name: str, title: str, make: Callable[[], ServerT], token: str) -> None:
        """
        Args:
            title: names the actor on Ray's dashboard.
            make: raises ValueError for a mistake in the configuration.
            token: the join token, unless the configuration names a file with it. It comes as an argument, because Ray
                shows and logs an actor's environment.
        """
        log.configure(part=part, name=name)
        if token:
            os.environ[TOKEN_VARIABLE] = token
        self._title = title
        self._make = make
        self._node = Registration(name)
        self._started: Future[ServerT] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the server; None before it has one."""
        self._stopping: Future[float] = Future()
        self._ended: Future[ProcessEnd] = Future()
        self._deadline = ExitDeadline()
        threading.Thread(target=self._run, name="server", daemon=True).start()

    def __repr__(self) -> str:
        return self._title

    def _run(self) -> None:
        """Serves until stopped or failed; the process of a failed server exits soon after by itself."""
        try:
            ended = asyncio.run(self._serve())
        except Exception as error:
            logger.exception("server failed")
            ended = ProcessEnd(f"{type(error).__name__}: {error}")
        if not self._started.done():
            self._started.set_exception(RuntimeError(ended.reason or "it was stopped"))
        self._ended.set_result(ended)
        if ended.reason:
            # If this process is cut off from the cluster, nobody else can end it.
            self._deadline.set(REPORT_SECONDS, FAILED_CODE)

    async def _serve(self) -> ProcessEnd:
        """Runs the server until it is asked to stop, fails, or its node is about to stop (`node_drain`)."""
        self._loop = asyncio.get_running_loop()
        if self._node.requested:
            return ProcessEnd(LEAVING)
        try:
            server = self._make()
        except ValueError as error:
            return ProcessEnd(str(error), mistake=True)
        exporting = asyncio.create_task(ray_metrics.export(server.metrics))
        running = asyncio.create_task(_run(server, self._started))
        stopping, leaving = asyncio.wrap_future(self._stopping), asyncio.create_task(self._node.wait())
        grace = FAILED_GRACE_SECONDS
        try:
            await asyncio.wait((running, stopping, leaving), return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                grace = stopping.result()
                return ProcessEnd()
            if leaving.done():
                grace = self.drain_seconds
                return ProcessEnd(LEAVING)
            return running.result()
        finally:
            running.cancel()
            leaving.cancel()
            await server.stop(grace)
            exporting.cancel()
            self._node.done()

    def watch(self, seconds: float) -> ProcessEnd | None:
        """The way in which the server has ended; None if it hasn't within `seconds`."""
        try:
            return self._ended.result(seconds)
        except TimeoutError:
            return None

    def address(self) -> str:
        """host:port of the server; waits until it has started."""
        return self._started.result().address

    def leave(self) -> None:
        """Drains the server as if its own node were about to stop."""
        self._node.ask()

    def stop(self, grace: float) -> None:
        """Gives running requests `grace` seconds to finish and ends the server; returns when it has ended.

        The process ends by itself if that takes longer than `grace` + `stop_seconds` + EXIT_SECONDS.
        """
        if not self._stopping.done():
            self._deadline.set(grace + self.stop_seconds + EXIT_SECONDS, FAILED_CODE, "did not stop in time")
            self._stopping.set_result(grace)
        self._ended.result()


class WorkerActor(ServerActor[Server]):
    """One worker; `worker-0 (begun as prefill, rank 0, gpu 0)` on the dashboard."""

    def __init__(self, config: WorkerConfig, local: bool, token: str) -> None:
        # Ray sets it to 1, or to the CPUs reserved; libraries that the engine loads read it when they are imported.
        os.environ["OMP_NUM_THREADS"] = str(config.engine.threads)
        gpus = ",".join(str(gpu) for gpu in ray.get_gpu_ids())
        engine = config.engine
        if engine.memory_part == AUTO and not gpus:
            engine = replace(engine, memory_part=_part_of_node())
        config = replace(config, host=own_host(local), engine=engine)
        # Ray keeps the text of the actor's start, and the worker may take another role.
        title = f"{config.name} (begun as {config.role}, rank 0, gpu {gpus or 'none'})"
        self.drain_seconds = config.drain_seconds
        self._ranks: Future[str] = Future()
        super().__init__("worker", config.name, title, partial(_worker, config, self._ranks.set_result), token)
        if gpus and config.engine.device == "cpu":
            logger.warning("engine.device is cpu; the GPUs reserved for this worker stay idle")

    def ranks_address(self, seconds: float) -> str | None:
        """host:port for the agents of the worker's other machines; None if it isn't open within `seconds`."""
        try:
            return self._ranks.result(seconds)
        except TimeoutError:
            return None


class RankHostActor:
    """The agent of a machine with ranks of a worker but rank 0; `worker-0 (host 1, gpu 0,1)` on the dashboard.

    Its process ends with the worker.
    """

    def __init__(self, worker: str, number: int, join_token_path: str, token: str) -> None:
        """
        Args:
            worker: name of the worker.
            number: of this machine, from 1.
            token: the join token, unless it is in a file.
        """
        log.configure(part="worker", name=worker, host=str(number))
        if token:
            os.environ[TOKEN_VARIABLE] = token
        self._number, self._token = number, SecurityConfig(join_token_path=join_token_path).token()
        gpus = ",".join(str(gpu) for gpu in ray.get_gpu_ids())
        self._title = f"{worker} (host {number}, gpu {gpus or 'none'})"
        self._node = Registration(f"{worker} host {number}")

    def __repr__(self) -> str:
        return self._title

    def begin(self, address: str, leader: Any) -> None:
        """Starts to run the ranks that rank 0 asks for, at host:port; the process exits when they have ended.

        Args:
            leader: the worker's actor. It drains when this node is about to stop, too.
        """
        threading.Thread(target=self._run, args=(address,), name="ranks", daemon=True).start()
        threading.Thread(target=self._leave, args=(leader,), name="leave", daemon=True).start()

    def _leave(self, leader: Any) -> None:
        asyncio.run(self._node.wait())
        leader.leave.remote()

    def _run(self, address: str) -> None:
        from kvrelay.worker.ranks.hosts import join

        code = FAILED_CODE
        try:
            code = join(address, self._number, self._token)
        except ConnectionError as error:
            logger.error("%s", error)
        finally:
            self._node.done()
            os._exit(code)  # Ray's own threads would keep it


class RouterActor(ServerActor[Server]):
    """One router; `router-0 (router)` on the dashboard."""

    def __init__(self, config: RouterConfig, local: bool, token: str) -> None:
        config = reachable(config, local)
        self.drain_seconds = config.drain_seconds
        super().__init__("router", config.name, f"{config.name} (router)", partial(_router, config), token)


def reachable(config: RouterConfig, local: bool) -> RouterConfig:
    """The options of a router that others reach at the address that it tells them."""
    if config.host == LOOPBACK:
        return replace(config, host=own_host(local))
    return replace(config, advertised_host=own_host(local)) if config.host in WILDCARDS else config


def own_host(local: bool) -> str:
    """The address at which the other members of the cluster reach this machine."""
    return LOOPBACK if local else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # untyped in Ray


def _part_of_node() -> float:
    """This actor's part of its node, by the CPUs that Ray has reserved for it."""
    context = ray.get_runtime_context()
    # Both calls are untyped in Ray.
    own = float(context.get_assigned_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
    node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())  # type: ignore[no-untyped-call]
    return min(1.0, own / node["Resources"]["CPU"]) if own else 1.0


def _worker(config: WorkerConfig, on_ranks: Callable[[str], None]) -> Server:
    from kvrelay.cluster.processes.worker import FACTORIES
    from kvrelay.worker.server import WorkerServer

    return WorkerServer(config, FACTORIES, on_ranks=on_ranks)


def _router(config: RouterConfig) -> Server:
    from kvrelay.router.server import RouterServer

    return RouterServer(config)


async def _run(server: ServerT, started: "Future[ServerT]") -> ProcessEnd:
    try:
        await server.start()
    except (ValueError, OSError) as error:
        return ProcessEnd(str(error), mistake=True)
    started.set_result(server)
    return ProcessEnd(str(await server.failed()))
