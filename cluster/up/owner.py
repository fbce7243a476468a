"""The process of `kvrelay up`: owns a cluster, and starts it anew when its Ray is lost.

    owner -- driver (driver.py) -- Ray's GCS, dashboard, raylet -- Ray's agents, and all actors

Ray ends its drivers when it is lost, or lets them wait without end. So the driver is a process of its own; the owner
imports nothing of Ray. It adopts the driver's orphans, and before each start no process of the cluster is left.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from kvrelay.cluster import secrets, state
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import ERROR_PREFIX, ClusterError, RunError, UsageError
from kvrelay.cluster.fleet.keepers import MemberStart
from kvrelay.cluster.fleet.replacement import Backoff
from kvrelay.cluster.processes import processes
from kvrelay.cluster.ray.watch import Addresses, JoinedWatch, LocalWatch
from kvrelay.cluster.secrets import Secured
from kvrelay.cluster.signals import Interrupted, Signals
from kvrelay.cluster.state import ClusterState
from kvrelay.cluster.up.driver import Event, Orders
from kvrelay.cluster.up.report import Report
from kvrelay.machine.silence import Silence

logger = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "kvrelay.cluster.up.driver"]
POLL_SECONDS = 0.1
READ_SECONDS = 1.0
START_SILENT_SECONDS = 20.0
"""Seconds without a sign of life after which a driver that starts its cluster is frozen: Ray's core holds the Python
interpreter while it waits for Ray's processes, which takes long on a busy machine."""
END_SECONDS = 55.0
"""Seconds for the driver to end, beyond the time for requests: longer than the driver's own deadline, and less than
`kvrelay down` waits."""
MOST_FAILURES = 3
"""Starts in a row that may fail after a loss, where somebody else can start `kvrelay up` again."""


def run(
    config: ClusterConfig, report: Report, on_ready: Callable[[ClusterState], None], *, unattended: bool = False
) -> None:
    """Owns a cluster: starts it, calls `on_ready`, keeps it running until a signal comes, and ends it.

    Args:
        unattended: whether nobody starts this process again, so that it goes on after any number of failed starts.

    Raises:
        ClusterError: it can't be started, or was lost and can't be started anew; nothing of it is left.
        Interrupted: a signal came before it was ready; nothing of it is left.
    """
    signals = Signals()
    with state.owned():
        signals.install()
        processes.adopt_orphans()
        state.record().unlink(missing_ok=True)  # of an earlier cluster
        owner = Owner(secrets.prepare(config), report, signals, unattended=unattended)
        try:
            owner.start()
            on_ready(owner.state)
            owner.keep()
        finally:
            owner.end()


class Driver:
    """One driver's process."""

    def __init__(self, orders: Orders, log: Path) -> None:
        """
        Args:
            log: file of its stderr, which is written anew.
        """
        self.log = log
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._silence = Silence(START_SILENT_SECONDS)
        with log.open("wb") as stderr:
            self._popen = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # a terminal's Ctrl-C is the owner's
            )
        self._process = processes.find(self.pid)
        self._silence.answered(self._process)
        stdin = self._popen.stdin
        if stdin is None:
            raise RuntimeError("stdin is not piped")
        with suppress(BrokenPipeError):  # it has ended already, which `lost` tells
            stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
            stdin.flush()
        self._reader = threading.Thread(target=self._read, name="driver's events", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id of the driver."""
        return self._popen.pid

    def event(self) -> Event | None:
        """The next event, if one has come."""
        try:
            return self._events.get_nowait()
        except Empty:
            return None

    def lost(self) -> str:
        """Reason why the driver has ended, or can't go on; empty if it runs."""
        code = self._popen.poll()
        if code is None:
            verdict = self._silence.verdict()
            return verdict and f"the driver (pid {self.pid}) {verdict}"
        self._reader.join(READ_SECONDS)  # so that every event has come
        if code < 0:
            return f"the driver (pid {self.pid}) was killed by {signal.Signals(-code).name}"
        lines = self.log.read_text(errors="replace").splitlines()
        said = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
        return said[-1] if said else f"the driver (pid {self.pid}) ended with exit code {code}; see {self.log}"

    def stop(self, seconds: float) -> None:
        """Gives the driver `seconds` to end its cluster; kills it after that."""
        self._popen.terminate()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            logger.warning("the driver did not end the cluster within %g s and is killed", seconds)
        self.kill()

    def kill(self) -> None:
        """Kills the driver."""
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()

    def _read(self) -> None:
        stdout = self._popen.stdout
        if stdout is None:
            raise RuntimeError("stdout is not piped")
        with stdout:
            for line in stdout:
                self._silence.answered(self._process)
                event = Event(**json.loads(line))
                if event.ready is not None:
                    self._silence = Silence()
                    self._silence.answered(self._process)
                if event != Event():
                    self._events.put(event)


class Owner:
    """Keeps one cluster's driver running, and looks after its Ray."""

    def __init__(self, secured: Secured, report: Report, signals: Signals, *, unattended: bool) -> None:
        self._secured = secured
        self._config = secured.config
        self._report = report
        self._signals = signals
        self._unattended = unattended
        self._driver: Driver | None = None
        self._watch: LocalWatch | JoinedWatch | None = None
        self._error: ClusterError | None = None
        """Error that the present driver has reported."""
        self._resume = False
        self.state = ClusterState(pid=os.getpid(), namespace=self._config.ray.namespace)

    def start(self) -> None:
        """Starts a driver; returns when its cluster serves.

        Raises:
            ClusterError: it can't be started.
            Interrupted: a signal came.
        """
        config = self._config.model_dump(mode="json")
        orders = Orders(config, self._secured.token, self._secured.token_path, self._resume)
        self._error = None
        log = state.folder() / "driver.log"
        try:
            if log.exists():
                log.replace(log.with_name("driver.log.1"))  # may tell why the one before was lost
            driver = self._driver = Driver(orders, log)
        except OSError as error:
            raise RunError(f"the driver can't be started: {error}") from None
        while True:
            self._signals.check()
            ended = driver.lost()
            self._take_events()
            if self._error is not None:
                raise self._error
            if self._watch is not None:
                return
            if ended:
                raise RunError(ended)
            self._signals.wait(POLL_SECONDS)

    def keep(self) -> None:
        """Keeps the cluster running until a signal comes.

        Raises:
            ClusterError: it was lost, and can't be started anew.
        """
        while not self._signals.wait(POLL_SECONDS):
            if reason := self._lost():
                try:
                    self._start_anew(reason)
                except Interrupted:
                    return

    def end(self) -> None:
        """Ends the cluster, or what there is of it."""
        if self._watch is not None:
            self._watch.close()
        driver = self._driver
        # A cluster of this machine that does not serve yet has nothing to finish.
        if driver is not None and (self._watch is not None or not self._config.local) and not driver.lost():
            self._report.phase("stopping")
            driver.stop(self._config.drain_seconds + END_SECONDS)
        self._end_processes()
        state.record().unlink(missing_ok=True)

    def _lost(self) -> str:
        """The reason why the cluster is lost; empty if it isn't."""
        if self._driver is None or self._watch is None:
            return "it was not started"
        processes.reap(but=self._driver.pid)
        ended = self._driver.lost()
        self._take_events()
        if self._error is not None:
            return "; ".join(self._error.lines)
        if lost := ended or self._watch.lost():
            return lost
        if mended := self._watch.mend():
            self._report.phase(mended)
        routers: dict[str, Any] = self._watch.routers
        if routers and replace(self.state, **routers) != self.state:
            self._save(**routers)
        if (missing := self._watch.missing()) != self.state.missing:
            self._report.phase(f"{missing} ended; requests are served without it")
            self._save(missing=missing)
        return ""

    def _start_anew(self, reason: str) -> None:
        """Ends what is left of the cluster, and starts it again.

        Raises:
            ClusterError: several starts failed, or it isn't this process that starts its Ray.
            Interrupted: a signal came.
        """
        if isinstance(self._watch, JoinedWatch) and self._watch.lost():
            self._end_processes()
            raise RunError(reason)
        backoff, begun, failures = Backoff(), time.monotonic(), 0
        lost = reason
        while True:
            self._report.phase(f"lost: {lost}; starting anew")
            self._end_processes()
            self._save(trouble=reason, router="", http="", dashboard="", missing="")
            self._signals.wait(backoff.after(0.0))
            try:
                self.start()
            except ClusterError as error:
                failures += 1
                lost = "; ".join(error.lines)
                if failures >= MOST_FAILURES and not self._unattended:
                    raise RunError(reason, *(f"it can't be started anew: {line}" for line in error.lines)) from None
            else:
                self._report.phase(f"serves again after {time.monotonic() - begun:.0f} s: {self.state.router}")
                self._report.close()
                return

    def _take_events(self) -> None:
        while self._driver is not None and (event := self._driver.event()):
            if event.phase:
                self._report.phase(event.phase)
            if event.progress is not None:
                self._report.progress([MemberStart(**member) for member in event.progress])
            if event.state is not None:
                trouble = self.state.trouble
                self.state = ClusterState(**event.state)
                self._save(trouble="" if self.state.router else trouble)
            if event.ready is not None:
                self._resume = not self._config.local
                addresses = Addresses(**event.ready)
                self._watch = LocalWatch(addresses, self.state) if self._config.local else JoinedWatch(self.state)
            if event.error is not None:
                kind = UsageError if event.code == UsageError.code else RunError
                self._error = kind(*event.error)

    def _save(self, **fields: Any) -> None:
        self.state = replace(self.state, pid=os.getpid(), **fields)
        try:
            state.save(self.state)
        except OSError as error:  # the cluster serves all the same
            self._report.phase(f"the record of the cluster can't be written: {error}")

    def _end_processes(self) -> None:
        """Ends the driver, and with a Ray of this machine's own every process of it."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._driver is not None:
            processes.kill_descendants()  # all at once: none is overlooked while its parent ends
            self._driver.kill()
            processes.reap(but=0)
            self._driver = None
