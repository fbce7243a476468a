"""Keeps one process running for each name: starts it or finds it running, watches it, and starts another one."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from kvrelay.cluster.fleet.desired import Seen
from kvrelay.cluster.fleet.replacement import Backoff, Launcher, Plan, ProcessEnd
from kvrelay.cluster.membership.membership import Membership
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, MEMBER_STATE_UNSPECIFIED, Member, MemberState

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Processes of one member that may end before it has served."""
STALL_SECONDS = 180.0
"""Longest time in seconds that a start may go on without progress."""
RESOURCE_SECONDS = 600.0
"""Longest time in seconds that a start may wait for resources: Ray's autoscaler may have to add a machine."""
END_SECONDS = 1.0
"""Longest time in seconds to notice that a process has ended, before it is ended again."""


@dataclass(frozen=True, slots=True)
class MemberStart:
    """How far the start of an expected member is."""

    name: str
    state: MemberState = MEMBER_STATE_UNSPECIFIED
    """Unspecified before its first heartbeat."""
    loaded: float = 0.0
    """Share of the weights, 0 to 1."""
    failures: int = 0
    """Processes of this member that ended so far without a request to stop."""
    reason: str = ""
    """Reason why the last of these processes ended."""
    hopeless: bool = False
    """Whether it isn't started again, since its configuration is the reason."""
    waits_for: str = ""
    """Resource or other reason that its next process waits for; empty if for none."""


class _Keeper:
    """State of one name that is kept running."""

    def __init__(self, name: str) -> None:
        self.progress = MemberStart(name)
        self.served = False
        """Whether it was ready once: if it ends later, the configuration is not the reason."""
        self.leaving = asyncio.Event()
        """Set when it was asked to end."""
        self.task: asyncio.Task[None] | None = None
        self._moved_at = time.monotonic()

    def note(self, member: Member, waits_for: str) -> None:
        """Takes what the membership and the launcher know of it."""
        self.served |= member.state == MEMBER_STATE_READY
        if (member.state, member.loaded) != (self.progress.state, self.progress.loaded):
            self.progress = replace(self.progress, state=member.state, loaded=member.loaded)
            self._moved_at = time.monotonic()
        if waits_for != self.progress.waits_for:
            if not (waits_for and self.progress.waits_for):
                self._moved_at = time.monotonic()
            self.progress = replace(self.progress, waits_for=waits_for)

    @property
    def trouble(self) -> str:
        """The reason why it can't be expected to serve without help; empty if it can."""
        progress = self.progress
        if progress.hopeless or (progress.failures >= MOST_FAILURES and not self.served):
            return progress.reason
        allowed = RESOURCE_SECONDS if progress.waits_for else STALL_SECONDS
        if progress.state == MEMBER_STATE_READY or time.monotonic() - self._moved_at <= allowed:
            return ""
        if progress.waits_for:
            return f"for {allowed:g} s it waits for {progress.waits_for}"
        return progress.reason or f"no progress in {allowed:g} s"


class Keepers:
    """One task for each name. What fails for one member is that member's failure only."""

    def __init__(
        self,
        launcher: Launcher,
        membership: Membership,
        plan: Callable[[str], Plan],
        changed: Callable[[], None],
    ) -> None:
        """
        Args:
            plan: what a member's next process is started as.
            changed: called when the membership, or whether a name is kept, may have changed.
        """
        self._launcher = launcher
        self._membership = membership
        self._plan = plan
        self._changed = changed
        self.address = ""
        """host:port of the supervisor, to be set before a member is kept."""
        self._keepers: dict[str, _Keeper] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def keep(self, name: str, *, start: bool = True) -> None:
        """Watches the process under this name that an earlier supervisor started; with `start`, starts one if there is
        none."""
        if name not in self._keepers and not self._closed:
            keeper = self._keepers[name] = _Keeper(name)
            keeper.task = self._run(self._keep(keeper, name, start), name)

    def end(self, name: str, grace: float) -> None:
        """Begins to end a member.

        Args:
            grace: seconds for it to finish what it has.
        """
        keeper = self._keepers.get(name)
        if keeper is not None and not keeper.leaving.is_set():
            keeper.leaving.set()
            self._run(self._end(keeper, name, grace), f"end {name}")

    async def stop(self, first: list[str], grace: float) -> None:
        """Ends every member.

        Args:
            first: the names of those that end before the others.
            grace: seconds for the members to finish what they have, all together.
        """
        end = time.monotonic() + grace
        for group in (set(first), self._keepers.keys() - set(first)):
            left = max(0.0, end - time.monotonic())
            ending = [(keeper, name) for name, keeper in self._keepers.items() if name in group]
            await asyncio.gather(*(self._end(keeper, name, left) for keeper, name in ending))

    async def close(self) -> None:
        """Watches no more; the members run on."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self, name: str) -> None:
        """Ends a member that was declared dead; its keeper sees the end and starts the next process."""
        if name in self._keepers and not self._closed:
            self._run(self._kill(name), f"kill {name}")

    def note(self) -> None:
        """Takes what the membership knows of the members."""
        members = {member.name: member for member in self._membership.members()}
        for name, keeper in self._keepers.items():
            keeper.note(members.get(name, Member()), self._launcher.waits_for(name))

    def seen(self) -> dict[str, Seen]:
        """State of each name under which a process runs, or is about to."""
        return {
            name: Seen(kept=True, ending=keeper.leaving.is_set(), trouble=keeper.trouble)
            for name, keeper in self._keepers.items()
        }

    def progress(self) -> list[MemberStart]:
        """The progress of every member that is to stay."""
        self.note()
        return [keeper.progress for keeper in self._keepers.values() if not keeper.leaving.is_set()]

    async def _keep(self, keeper: _Keeper, name: str, start: bool) -> None:
        """Runs one process of this name after another."""
        backoff = Backoff()
        adopted: bool | None = None
        while True:
            started = time.monotonic()
            try:
                if adopted is None:
                    adopted = await self._launcher.adopt(name)
                    logger.info("found running" if adopted else "starting", extra={"member": name})
                    if not adopted:
                        self._lost(name)  # the record may know an earlier process
                    if not (adopted or start) or keeper.leaving.is_set():
                        break
                ended = await self._launcher.run(name, self._plan(name), self.address)
            except OSError as error:  # of the machine, such as a full disk: the line below says it
                ended = ProcessEnd(str(error))
            except Exception as error:
                logger.exception("can't be kept running", extra={"member": name})
                ended = ProcessEnd(f"{type(error).__name__}: {error}")
            else:
                self._lost(name)
            if keeper.leaving.is_set() or not start:
                break
            hopeless = ended.mistake and not keeper.served
            failures = keeper.progress.failures + 1
            keeper.progress = MemberStart(name, failures=failures, reason=ended.reason, hopeless=hopeless)
            if hopeless:
                logger.error("cannot start", extra={"member": name, "reason": ended.reason})
                self._changed()
                await keeper.leaving.wait()
                break
            wait = backoff.after(time.monotonic() - started)
            logger.warning("ended; will be replaced", extra={"member": name, "reason": ended.reason, "wait": wait})
            with suppress(TimeoutError):
                await asyncio.wait_for(keeper.leaving.wait(), wait)
                break
        if self._keepers.get(name) is keeper and not keeper.leaving.is_set():
            self._forget(name)

    def _lost(self, name: str) -> None:
        self._membership.gone(name)
        self._changed()

    def _forget(self, name: str) -> None:
        del self._keepers[name]
        self._membership.remove(name)
        self._changed()

    async def _kill(self, name: str) -> None:
        try:
            await self._launcher.kill(name)
        except Exception:
            logger.exception("can't be killed", extra={"member": name})

    async def _end(self, keeper: _Keeper, name: str, grace: float) -> None:
        """Returns when the member has ended and is forgotten."""
        keeper.leaving.set()
        self._membership.leave(name)
        self._changed()
        while True:
            try:
                await self._launcher.stop(name, grace)
            except Exception:
                logger.exception("can't be stopped", extra={"member": name})
            if keeper.task is None or (await asyncio.wait((keeper.task,), timeout=END_SECONDS))[0]:
                break
            grace = 0.0  # it was started in the meantime
        if self._keepers.get(name) is keeper:
            self._forget(name)

    def _run(self, work: "asyncio._CoroutineLike[None]", name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
