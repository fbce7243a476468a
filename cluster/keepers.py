"""Keeps one process running for each name: starts it or finds it running, watches it, and starts another one."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvrelay.cluster.membership import Membership
from kvrelay.cluster.replacement import Backoff, Ended, Launcher
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, MEMBER_STATE_UNSPECIFIED, Member, MemberState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one expected member is."""

    name: str
    state: MemberState = MEMBER_STATE_UNSPECIFIED
    """Unspecified before its first heartbeat."""
    loaded: float = 0.0
    """Share of the weights, 0 to 1."""
    failures: int = 0
    """Processes of this member that ended so far without a request to stop."""
    reason: str = ""
    """Why the last of them did."""
    hopeless: bool = False
    """It isn't started again: its configuration is the reason."""


class Keepers:
    """One task for each member of a launcher. What fails for one member is that member's failure only."""

    def __init__(self, launcher: Launcher, membership: Membership, changed: Callable[[], None]) -> None:
        """`changed` is called when the membership may have changed."""
        self._launcher = launcher
        self._membership = membership
        self._changed = changed
        self._progress = {name: Progress(name) for name in launcher.names}
        self._served: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def start(self, address: str) -> None:
        """Starts a process for each name, or watches the one that an earlier supervisor started.

        Args:
            address: host:port of this supervisor.
        """
        for name in self._progress:
            self._run(self._keep(name, address), name)

    async def stop(self, grace: float) -> None:
        """Ends every member; the routers first, so that no new request comes in.

        Args:
            grace: seconds for the members to finish what they have, all together.
        """
        self._stopping = True
        end = time.monotonic() + grace
        routers = {name for name in self._progress if name.startswith("router-")}
        for group in (routers, self._progress.keys() - routers):
            left = max(0.0, end - time.monotonic())
            await asyncio.gather(*(self._end(name, left) for name in group))

    async def close(self) -> None:
        """Watches no more; the members run on."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self, name: str) -> None:
        """Ends a member that was declared dead; its keeper sees the end and starts the next process."""
        if name in self._progress and not self._stopping:
            self._run(self._kill(name), f"kill {name}")

    def note_served(self) -> None:
        """Remembers who was ready: what ends later is no mistake of the configuration."""
        self._served |= {member.name for member in self._membership.members() if member.state == MEMBER_STATE_READY}

    def progress(self) -> list[Progress]:
        """How far every expected member is."""
        members = {member.name: member for member in self._membership.members()}
        return [
            replace(progress, state=(member := members.get(name, Member())).state, loaded=member.loaded)
            for name, progress in self._progress.items()
        ]

    async def _keep(self, name: str, address: str) -> None:
        """Runs one process of this name after another."""
        backoff = Backoff()
        adopted: bool | None = None
        while not self._stopping:
            started = time.monotonic()
            try:
                if adopted is None:
                    adopted = await self._launcher.adopt(name)
                    logger.info("found running" if adopted else "starting", extra={"member": name})
                    if not adopted:
                        self._lost(name)  # the record may know an earlier process
                ended = await self._launcher.run(name, address)
            except Exception as error:
                logger.exception("can't be kept running", extra={"member": name})
                ended = Ended(f"{type(error).__name__}: {error}")
            else:
                self._lost(name)
            if self._stopping:
                return
            hopeless = ended.mistake and name not in self._served
            failures = self._progress[name].failures + 1
            self._progress[name] = Progress(name, failures=failures, reason=ended.reason, hopeless=hopeless)
            if hopeless:
                logger.error("cannot start", extra={"member": name, "reason": ended.reason})
                return
            wait = backoff.after(time.monotonic() - started)
            logger.warning("ended; will be replaced", extra={"member": name, "reason": ended.reason, "wait": wait})
            await asyncio.sleep(wait)

    def _lost(self, name: str) -> None:
        worker = self._membership.present(name)
        if worker is not None:
            self._membership.gone(worker)
        self._changed()

    async def _kill(self, name: str) -> None:
        try:
            await self._launcher.kill(name)
        except Exception:
            logger.exception("can't be killed", extra={"member": name})

    async def _end(self, name: str, grace: float) -> None:
        self._membership.leave(name)
        try:
            await self._launcher.stop(name, grace)
        except Exception:
            logger.exception("can't be stopped", extra={"member": name})
        self._membership.remove(name)
        self._changed()

    def _run(self, work: "asyncio._CoroutineLike[None]", name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
