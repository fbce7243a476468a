"""A rank other than 0: `python -m kvrelay.worker.ranks STEPS CONTROL`, two sockets. With `--join HOST:PORT --host N`
the agent of a machine with such ranks (`hosts.py`).

The main thread runs rank 0's plans. The process ends with code 0 when rank 0 closes the socket for plans, and at once
when rank 0 is gone, silent, or has closed the control channel.
The kernel kills it with rank 0, even if it is frozen.
"""

import argparse
import asyncio
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from psutil import Process
from pydantic import TypeAdapter

from kvrelay.engine.degree import Degree
from kvrelay.engine.kv.writes import RankWrites
from kvrelay.engine.ranks.collective import CollectiveError
from kvrelay.engine.ranks.meet import Meeting, meet
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.runner.leading import follow
from kvrelay.machine.forks import end_with_parent
from kvrelay.rpc import log
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.security import TOKEN_VARIABLE, SecurityConfig
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.links import LinkLimits, LinkManager, LinkTimeouts
from kvrelay.transfer.links.rank_transfers import RankTransfers
from kvrelay.transfer.protocol.ports import LoopRuntime
from kvrelay.transfer.transports.base import Transport
from kvrelay.transfer.transports.registry import available_transports
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.ranks.channel import BEAT_SECONDS, SILENT_SECONDS, Channel, LinkChannel, receive_bytes
from kvrelay.worker.ranks.hosts import join

logger = logging.getLogger(__name__)


def main(steps: int, control: int) -> int:
    """Runs the rank; returns its exit code."""
    # Rank 0 ends this process: a signal to all processes of a terminal, or of a control group, is rank 0's to follow.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    channel = Channel(socket.socket(fileno=control), "rank 0", Process(os.getppid()))
    first: queue.SimpleQueue[Any] = queue.SimpleQueue()
    links = LinkChannel(channel.send)

    def hear(message: Any) -> None:
        if "start" in message:
            first.put(message["start"])
        elif "do" in message:
            links.take(message)

    channel.start(hear, lambda: _end("rank 0 has ended"))
    options = first.get(timeout=SILENT_SECONDS)
    log.configure(part="worker", rank=str(options["rank"]))
    threading.Thread(target=_live, args=(channel,), name="life", daemon=True).start()
    try:
        degree = Degree(options["tensor"], options["pipeline"])
        config, host = TypeAdapter(WorkerConfig).validate_json(options["config"]), options.get("host", "")
        if host:  # on another machine than rank 0
            config = replace(config, host=host)
        meeting = Meeting.named(options["meeting"], config.host)
        place = meet(meeting, degree, options["rank"], config.engine.threads, config.engine.hosts)
        channel.send({"arrived": "met"})
        module, _, name = options["build"].partition(":")
        build = getattr(importlib.import_module(module), name)
        runner = build(Path(options["folder"]), config.dtype, config.engine, place)
        writes, listening = RankWrites(), threading.Event()
        # Made on this thread: they may change the environment, which native code of other threads reads.
        transports = _transports(config, runner)
        given = links, config, runner, place.rank, transports, writes, listening
        threading.Thread(target=_run_links, args=given, name="links", daemon=True).start()
        connection = socket.socket(fileno=steps)

        def on_warm() -> None:
            listening.wait()
            channel.send({"arrived": "ready"})

        follow(runner, lambda: receive_bytes(connection), on_warm, writes.launched)
    except CollectiveError as error:
        _end(str(error))
    except BaseException as error:  # rank 0 must learn of it, whatever it was
        logger.exception("the rank failed")
        channel.send({"failed": (type(error).__name__, str(error) or type(error).__name__)})
        time.sleep(SILENT_SECONDS)  # rank 0 ends this process when it has read the message
        return 1
    return 0


def _transports(config: WorkerConfig, runner: Runner) -> dict[str, Transport]:
    """The transports of this rank's links, as of `available_transports`."""
    transfer, gpu = config.transfer, runner.pools[0].bytes.is_cuda
    certificates = Credentials.of("worker", config.security).certificates
    return available_transports(
        config.host, transfer.transport, gpu, transfer.encrypt, certificates, config.engine.hosts
    )


def _run_links(
    channel: LinkChannel,
    config: WorkerConfig,
    runner: Runner,
    rank: int,
    transports: dict[str, Transport],
    writes: RankWrites,
    listening: threading.Event,
) -> None:
    """Runs this rank's links, as rank 0 says; sets `listening` when it can."""

    async def run() -> None:
        runtime, transfer = LoopRuntime(), config.transfer
        limits = LinkLimits(transfer.max_links, transfer.gpu_buffer_bytes)
        timeouts = LinkTimeouts(transfer.frame_timeout_seconds, transfer.dial_timeout_seconds)
        manager = LinkManager(transports, limits, timeouts, transfer.transport, runtime, rank)
        RankTransfers(channel, manager, PoolFrames(runner.pools, transfer.checksum), runtime, writes)
        listening.set()
        await asyncio.Event().wait()

    try:
        asyncio.run(run())
    except BaseException:  # without links the worker can't go on
        logger.exception("the links failed")
        _end("its links failed")


def _live(channel: Channel) -> None:
    """Sends signs of life, and ends the process without those of rank 0."""
    while True:
        channel.send({"alive": True})
        if verdict := channel.silence.verdict():
            _end(f"rank 0 {verdict}")
        time.sleep(BEAT_SECONDS)


def _end(why: str) -> NoReturn:
    """Ends the process at once: its threads may wait in native code."""
    logger.warning("the rank ends: %s", why)
    os._exit(1)


def main_of_agent(arguments: list[str]) -> int:
    """Runs the agent of a machine; returns its exit code."""
    parser = argparse.ArgumentParser("python -m kvrelay.worker.ranks", description="Runs the ranks of one machine.")
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="rank 0's port for agents (ranks_port)")
    parser.add_argument("--host", required=True, type=int, metavar="NUMBER", help="number of this machine, from 1")
    parser.add_argument("--join-token-path", default="", metavar="FILE", help=f"else {TOKEN_VARIABLE} is the token")
    options = parser.parse_args(arguments)
    log.configure(part="worker", host=str(options.host))
    try:
        return join(options.join, options.host, SecurityConfig(join_token_path=options.join_token_path).token())
    except (ConnectionError, ValueError) as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--join"]:
        sys.exit(main_of_agent(sys.argv[1:]))
    sys.exit(main(*map(int, sys.argv[1:])))
