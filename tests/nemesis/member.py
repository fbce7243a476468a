"""A member that takes orders to fall ill: a worker on the hash model, or the router.

    python -m nemesis.member --config FOLDER/NAME.json

It listens at the Unix socket FOLDER/NAME.orders; an order is one datagram:

    hang        the next step of the engine lasts for ever
    raise       the next step of the engine raises
    disk full   nothing can be written to the log any more, as on a full disk
    disk free   it can again

A prompt that begins with POISON kills the worker that computes it. The process's wall clock is ahead by the seconds
(int64) in FOLDER/NAME.clock, if CLOCK_LIBRARY names the library of `clock.c`.
"""

import json
import os
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

CLOCK_LIBRARY = "NEMESIS_CLOCK_LIBRARY"
POISON = (250,) * 8
REMOTE = ("decode-1",)
"""Workers that are on a machine of their own, as far as their links know."""


def set_clock(folder: Path, name: str, ahead: int) -> None:
    """Moves a member's wall clock to so many seconds ahead of the machine's."""
    with (folder / f"{name}.clock").open("r+b") as clock:
        clock.write(struct.pack("=q", ahead))


def under_own_clock(config: Path) -> None:
    """Starts this process again with a wall clock of its own."""
    library = os.environ.get(CLOCK_LIBRARY)
    if library and "LD_PRELOAD" not in os.environ:
        clock = config.with_suffix(".clock")
        clock.write_bytes(struct.pack("=q", 0))
        variables = {"LD_PRELOAD": library, "NEMESIS_CLOCK": str(clock)}
        os.execve(sys.executable, [sys.executable, "-m", "nemesis.member", *sys.argv[1:]], os.environ | variables)


class Orders:
    """Reads orders in a thread of its own. The next step of the engine obeys `step`."""

    def __init__(self, path: Path) -> None:
        self.step = ""
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._log = os.dup(2)
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        while True:
            order = self._socket.recv(64).decode()
            match order:
                case "disk full":
                    full = os.open("/dev/full", os.O_WRONLY)
                    os.dup2(full, 2)
                    os.close(full)
                case "disk free":
                    os.dup2(self._log, 2)
                case _:
                    self.step = order

    def obey(self) -> None:
        """Does what was ordered; called on the engine thread, at each step."""
        match self.step:
            case "hang":
                threading.Event().wait()
            case "raise":
                raise RuntimeError("ordered by the nemesis")


def give(folder: Path, name: str, order: str) -> None:
    """Gives a member an order; one that has just ended gets none."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        suppress(FileNotFoundError, ConnectionRefusedError),
    ):
        sender.sendto(order.encode(), str(folder / f"{name}.orders"))


def main(config: Path) -> int:
    """Runs the worker or the router of this configuration."""
    under_own_clock(config)
    orders = Orders(config.with_suffix(".orders"))
    # Imported here: the process may have to start again before.
    from kvrelay.router.config import RouterConfig
    from kvrelay.router.server import RouterServer
    from kvrelay.rpc import serve

    if "role" not in json.loads(config.read_text()):
        return serve.main(RouterConfig, RouterServer, "A router that takes orders.")

    from kvrelay.engine.plan import StepOutput, StepPlan
    from kvrelay.transfer.links.endpoint_loop import HandoffSetup
    from kvrelay.worker.config import WorkerConfig
    from kvrelay.worker.server import WorkerServer
    from support import detours, hash_worker

    class OrderedRunner(hash_worker.SlowHashRunner):
        def run(self, plan: StepPlan) -> StepOutput:
            orders.obey()
            first = 0
            for start, length in zip(plan.starts, plan.lengths, strict=True):
                if start == 0 and tuple(plan.tokens[first : first + len(POISON)]) == POISON:
                    os.kill(os.getpid(), signal.SIGKILL)
                first += length
            return super().run(plan)

    hash_worker.SlowHashRunner = OrderedRunner  # type: ignore[misc]  # what `build` makes

    def apart(setup: HandoffSetup, name: str) -> HandoffSetup:
        shared = {kind: each for kind, each in setup.transports.items() if name not in REMOTE or kind != "shm"}
        return detours.detoured(replace(setup, transports=shared), name)

    def server(worker: WorkerConfig) -> WorkerServer:
        roles = {name: hash_worker.changed(role, apart) for name, role in hash_worker.ROLES.items()}
        return WorkerServer(worker, roles, build=hash_worker.build)

    return serve.main(WorkerConfig, server, "A worker on the hash model that takes orders.")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2])))
