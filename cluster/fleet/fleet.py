"""Keeps a cluster in its desired state: takes the commands, records the state, and does what `reconcile` asks for."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from kvrelay.cluster.fleet import desired as changes
from kvrelay.cluster.fleet.desired import Desired, Refused, Rolling, Seen, Stage, Wanted
from kvrelay.cluster.fleet.keepers import Keepers
from kvrelay.cluster.fleet.reconcile import advance, reconcile, settled
from kvrelay.cluster.fleet.replacement import Launcher, Plan
from kvrelay.cluster.membership.membership import Membership
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    ROLE_ROUTER,
    ROLE_UNSPECIFIED,
    ConfigRecord,
    DesiredMember,
    Refusal,
    Role,
    SupervisorRecord,
)
from kvrelay.internal.v1.supervisor_pb2 import Desired as DesiredRecord
from kvrelay.internal.v1.supervisor_pb2 import Stage as StageNumber
from kvrelay.rpc.identity import ROLES, WORKER_ROLES, MemberRole, role_of

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1


class Fleet:
    """The members of one supervisor. Its commands may also be called by a policy in the supervisor's process."""

    def __init__(
        self,
        launcher: Launcher,
        membership: Membership,
        record: SupervisorRecord | None,
        drain_seconds: Callable[[], float],
        save: Callable[[], Awaitable[bool]],
        changed: Callable[[], None],
    ) -> None:
        """
        Args:
            record: what an earlier supervisor has left.
            drain_seconds: present time for a member that leaves to finish its requests.
            save: writes the record of supervisor and fleet; whether it is written.
            changed: called when the membership or the desired state may have changed.
        """
        self._launcher = launcher
        self._membership = membership
        self._drain_seconds = drain_seconds
        self._save = save
        self._changed = changed
        if record is None or not record.HasField("desired"):
            begin = {name: Wanted(role, 1) for name, role in launcher.members(launcher.config).items()}
            self.desired = Desired(begin, configs={1: launcher.config})
        else:
            self.desired = of_record(record)
        self.keepers = Keepers(launcher, membership, self._plan, self._on_change)
        self._proposed: Desired | None = None
        """Desired state that is being recorded, and counts when that is done."""
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()

    def start(self, address: str) -> None:
        """Starts the members, or finds them running.

        Args:
            address: host:port of the supervisor.
        """
        self.keepers.address = address
        for name, wanted in self.desired.members.items():
            self.keepers.keep(name, start=not wanted.stage.ends)

    async def run(self) -> None:
        """Works towards the desired state, for ever."""
        while True:
            self._wake.clear()
            async with self._lock:
                await self._step()
            try:
                await asyncio.wait_for(self._wake.wait(), TICK_SECONDS)
            except TimeoutError:
                continue

    async def stop(self, grace: float) -> None:
        """Ends every member; the routers first, so that no new request comes in.

        Args:
            grace: seconds for the members to finish what they have, all together.
        """
        routers = [name for name, wanted in self.desired.members.items() if wanted.role == "router"]
        await self.keepers.stop(routers, grace)

    # Commands. Each returns the revision of the desired state that has the change, when that is recorded.

    async def scale(self, counts: Mapping[MemberRole, int]) -> int:
        """Sets the number of members of these roles.

        Raises:
            Refused: nothing has changed; the text says why. So for all commands.
        """
        present = {role: self.desired.count(role) for role in ROLES}
        try:
            why = await asyncio.to_thread(self._launcher.lacks_room, self._text(self.desired), present, counts)
        except (OSError, ValueError) as error:
            raise Refused(Refusal.CODE_INVALID, str(error)) from None
        if why:
            raise Refused(Refusal.CODE_INVALID, why)

        def change(desired: Desired) -> Desired:
            for role, count in counts.items():
                kind: tuple[MemberRole, ...] = ("router",) if role == "router" else WORKER_ROLES
                others = sum(counts.get(each, desired.count(each)) for each in kind) - 1
                why = self._launcher.startable(self._text(desired), role, others)
                if count > desired.count(role) and why:
                    raise Refused(Refusal.CODE_INVALID, why)
            return changes.scaled(desired, self.seen(), counts)

        return await self._change("scale", change)

    async def drain(self, name: str, *, replaced: bool = False, force: bool = False) -> int:
        """Ends one member when its requests are done or have moved; with `replaced`, when another one serves."""
        return await self._change(
            "drain", lambda desired: changes.drained(desired, self.seen(), name, replaced=replaced, force=force)
        )

    async def set_role(self, name: str, role: MemberRole, *, force: bool = False) -> int:
        """Gives a worker another role."""
        return await self._change(
            "role", lambda desired: changes.with_role(desired, self.seen(), name, role, force=force)
        )

    async def upgrade(self, config: str, *, in_place: bool = False) -> int:
        """Replaces every member by one with another configuration, one after another."""
        try:
            # The keys that are taken from the present configuration are equal in all of the cluster's configurations.
            text = await self._launcher.upgrade(self._text(self.desired), config)
        except ValueError as error:
            raise Refused(Refusal.CODE_INVALID, str(error)) from None

        def change(desired: Desired) -> Desired:
            present = self._text(desired)
            how = self._rolling(present, text, in_place)
            return changes.upgraded(desired, text, self._counts(present, text), how)

        return await self._change("upgrade", change)

    async def roll_back(self, *, in_place: bool = False) -> int:
        """Goes back to the configuration before."""

        def change(desired: Desired) -> Desired:
            present, target = desired.configs[desired.config], desired.configs.get(desired.previous, "")
            # Refused below if there is no target.
            return changes.rolled_back(desired, self._rolling(present, target, in_place) if target else Rolling())

        return await self._change("rollback", change)

    async def restart(self, names: Sequence[str], restart_id: str, *, in_place: bool = False) -> int:
        """Replaces these members, or all, by ones of the same configuration."""

        def change(desired: Desired) -> Desired:
            text = self._text(desired)
            return changes.restarted(desired, names, self._rolling(text, text, in_place), restart_id)

        return await self._change("restart", change)

    # What is known.

    def seen(self) -> dict[str, Seen]:
        """The state of each member that is kept.

        A router is ready without workers, too, if there are none: it says so itself only when it can place a request.
        """
        found = self.keepers.seen()
        idle = not self._membership.paired
        for status in self._membership.statuses():
            member, requests = status.member, status.load.requests
            if member.name in found:
                found[member.name] = replace(
                    found[member.name],
                    ready=member.state == MEMBER_STATE_READY
                    or (idle and member.role == ROLE_ROUTER and member.state == MEMBER_STATE_STARTING),
                    role=role_of(member.role),
                    roles=frozenset(filter(None, map(role_of, member.roles))),
                    digest=member.compatibility,
                    requests=requests.waiting + requests.running,
                )
        return found

    def role(self, name: str) -> Role:
        """The role that a member is to have; unspecified if it isn't desired."""
        wanted = self.desired.members.get(name)
        return ROLE_UNSPECIFIED if wanted is None else ROLES[wanted.role]

    @property
    def config(self) -> str:
        """Text of the present configuration."""
        return self._text(self.desired)

    @property
    def settled(self) -> bool:
        """Whether every member serves as desired, and nothing is to change any more."""
        return settled(self.desired, self.seen())

    def add_to(self, record: SupervisorRecord) -> None:
        """Adds the desired state to a supervisor's record."""
        desired = self._proposed or self.desired
        record.desired.CopyFrom(to_record(desired))
        for generation, text in desired.configs.items():
            record.configs.append(ConfigRecord(generation=generation, text=text))

    async def _step(self) -> None:
        self.keepers.note()
        before = self.desired
        self.desired = advance(before, self.seen())
        if self.desired != before:
            _log(before, self.desired)
            await self._save()  # if that fails, it is tried again with the next membership
            self._changed()
        starts, ends = reconcile(self.desired, self.seen())
        for name in starts:
            self.keepers.keep(name)
        for name in ends:
            self.keepers.end(name, self._drain_seconds())

    async def _change(self, command: str, change: Callable[[Desired], Desired]) -> int:
        """Changes the desired state if the change can be recorded."""
        async with self._lock:
            before, after = self.desired, change(self.desired)
            if after is before:
                return before.revision
            self._proposed, recorded = after, False
            try:
                recorded = await self._save()
            finally:
                # A change that isn't recorded in time may be written later. The next revision replaces it there.
                self._proposed = None
                self.desired = after if recorded else replace(before, revision=after.revision)
                self._on_change()
            if not recorded:
                raise Refused(Refusal.CODE_NOT_RECORDED, "the supervisor's record can't be written now; see its log")
            logger.info("desired state changed", extra={"command": command, "revision": after.revision})
        return after.revision

    def _plan(self, name: str) -> Plan:
        wanted = self.desired.members[name]
        roles = {other: each.role for other, each in self.desired.members.items()}
        return Plan(wanted.role, self.desired.configs[wanted.config], roles)

    def _text(self, desired: Desired) -> str:
        return desired.configs[desired.fresh_config]

    def _rolling(self, present: str, text: str, in_place: bool) -> Rolling:
        cycled = frozenset(ROLES) if in_place else self._launcher.cycled(text)
        return Rolling(cycled, self._launcher.unchanged(present, text), gaps=in_place)

    def _counts(self, present: str, text: str) -> dict[MemberRole, int]:
        """The numbers of members that differ between two configurations."""
        before, after = (list(self._launcher.members(each).values()) for each in (present, text))
        return {role: after.count(role) for role in ROLES if after.count(role) != before.count(role)}

    def _on_change(self) -> None:
        self._wake.set()
        self._changed()


def to_record(desired: Desired) -> DesiredRecord:
    """The desired state as a message, without the configurations' texts."""
    return DesiredRecord(
        revision=desired.revision,
        config=desired.config,
        previous=desired.previous,
        halted=desired.halted,
        restart_id=desired.restart_id,
        members=[
            DesiredMember(
                name=name,
                role=ROLES[wanted.role],
                config=wanted.config,
                stage=f"STAGE_{wanted.stage.name}",
                replaces=wanted.replaces,
            )
            for name, wanted in desired.members.items()
        ],
    )


def of_record(record: SupervisorRecord) -> Desired:
    """The desired state in a supervisor's record.

    Raises:
        ValueError: it has a role or a stage that this version doesn't know, or lacks a configuration.
    """
    kept = record.desired
    members = {}
    configs = {entry.generation: entry.text for entry in record.configs}
    for member in kept.members:
        role = role_of(member.role)
        if role is None or member.config not in configs:
            raise ValueError(f"the supervisor's record: {member.name} has an unknown role or configuration")
        stage = Stage[StageNumber.Name(member.stage).removeprefix("STAGE_")]
        members[member.name] = Wanted(role, member.config, stage, member.replaces)
    desired = Desired(members, kept.config, kept.previous, kept.revision, configs=configs)
    return replace(desired, halted=kept.halted, restart_id=kept.restart_id)


def _log(before: Desired, after: Desired) -> None:
    """Logs what a rolling change has done by itself."""
    for name in after.members.keys() | before.members.keys():
        was, now = before.members.get(name), after.members.get(name)
        if was != now:
            fields = {"member": name, "was": was and was.stage.value, "stage": now and now.stage.value}
            logger.info("rolling" if after.rolling else "desired", extra=fields)
    if after.halted and not before.halted:
        logger.error("a rolling change has stopped", extra={"reason": after.halted})
