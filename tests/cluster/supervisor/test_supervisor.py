"""The supervisor over real gRPC, with members that only send heartbeats."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from test_record import BadStore

from kvrelay.cluster.asking.status import as_json, get_status, progress
from kvrelay.cluster.fleet import replacement
from kvrelay.cluster.fleet.desired import Refused
from kvrelay.cluster.fleet.fleet import to_record
from kvrelay.cluster.fleet.replacement import Plan, ProcessEnd
from kvrelay.cluster.membership import inquiry
from kvrelay.cluster.membership.membership import DRAIN_MARGIN_SECONDS
from kvrelay.cluster.state import ClusterState
from kvrelay.cluster.supervisor import record as record_module
from kvrelay.cluster.supervisor.record import Store
from kvrelay.cluster.supervisor.supervisor import SupervisorConfig, SupervisorServer
from kvrelay.internal.v1.describe_pb2 import Description
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    MEMBER_STATE_UNSPECIFIED,
    ROLE_COLOCATED,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    AttendRequest,
    DescribeRequest,
    GetStatusRequest,
    Member,
    Role,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.internal.v1.worker_pb2 import Blocks, Load, Requests
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.identity import ROLES, MemberRole
from kvrelay.rpc.options import channel_options
from support.router_fakes import until
from support.secrets import METADATA, credentials

SECONDS = 30.0


class FakeMember:
    """A process as the supervisor sees it."""

    def __init__(self, supervisor: str, name: str, role: Role, incarnation: str) -> None:
        self.member = Member(
            name=name, role=role, incarnation=incarnation, address=f"127.0.0.1:{role}", pid=7, state=MEMBER_STATE_READY
        )
        self.load = Load(blocks=Blocks(total=9, free=4, cached=3, held=2), requests=Requests(waiting=1, running=2))
        self.seen: dict[str, Member] = {}
        self.roles: list[Role] = []
        """Roles that it was given, in order."""
        self.fenced = asyncio.Event()
        self.attendance = HeartbeatClient(
            supervisor,
            credentials("worker"),
            self._describe,
            self._learn,
            self.fenced.set,
            self.roles.append,
            interval=0.1,
        )

    def _describe(self) -> tuple[Member, Load]:
        return self.member, self.load

    def _learn(self, members: Sequence[Member]) -> None:
        self.seen = {entry.name: entry for entry in members}

    def state_of(self, name: str) -> int:
        return self.seen[name].state if name in self.seen else MEMBER_STATE_UNSPECIFIED


@asynccontextmanager
async def supervisor(
    launcher: "FakeLauncher | None" = None, store: Store | None = None, **options: float
) -> AsyncIterator[SupervisorServer]:
    server = SupervisorServer(SupervisorConfig(**options), launcher, store)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.5)


@asynccontextmanager
async def members(server: SupervisorServer, *given: tuple[str, Role]) -> AsyncIterator[list[FakeMember]]:
    fakes = [FakeMember(server.address, name, role, f"{name}#1") for name, role in given]
    for fake in fakes:
        fake.attendance.start()
    try:
        yield fakes
    finally:
        for fake in fakes:
            await fake.attendance.stop()


def state_of(address: str) -> ClusterState:
    return ClusterState(None, "kvrelay", supervisor=address)


PAIR = (("router-0", ROLE_ROUTER), ("prefill-0", ROLE_PREFILL), ("decode-0", ROLE_DECODE))


async def test_everyone_and_the_operator_learn_of_everyone_and_of_every_change() -> None:
    async with supervisor() as server, members(server, *PAIR) as fakes:
        names = {name for name, _ in PAIR}
        for fake in fakes:
            await until(lambda fake=fake: fake.seen.keys() == names, "everyone is known")
            assert fake.member.name in fake.seen
        assert server.membership.ready
        status = await asyncio.to_thread(get_status, state_of(server.address))
        assert status is not None
        shown = as_json(status)
        assert shown["ready"] is True
        assert shown["router"] == f"127.0.0.1:{ROLE_ROUTER}"
        assert sorted(worker["name"] for worker in shown["workers"]) == ["decode-0", "prefill-0"]
        assert shown["supervised"] is True
        assert shown["incompatible"] == []
        assert sorted(worker.pop("generation") for worker in shown["workers"] + shown["routers"]) == [1, 2, 3]
        assert {
            "name": "prefill-0",
            "role": "prefill",
            "metrics": None,
            "pid": 7,
            "incarnation": "prefill-0#1",
            "state": "ready",
            "ranks": {"tensor": 1, "pipeline": 1, "pids": [7]},
            "compatibility": "",
            "blocks": {"total": 9, "free": 4, "cached": 3, "held": 2},
            "requests": {"waiting": 1, "running": 2},
            "context": {"tokens": 0, "limit": "model", "reason": "the model isn't loaded yet"},
            "weights": None,
            "kv_dtype": None,
            "prefill_attention": None,
        } in shown["workers"]
        assert all(0 <= entry.heartbeat_age_seconds < SECONDS for entry in status.members)
        fakes[1].member.address = "127.0.0.1:5"
        fakes[1].attendance.beat()
        await until(lambda: fakes[0].seen["prefill-0"].address == "127.0.0.1:5", "the change is known")


async def test_the_others_learn_of_silence_and_the_dead_are_fenced() -> None:
    """When silence makes a member suspect and dead, `test_membership.py` shows by a clock of its own."""
    async with supervisor() as server, members(server, *PAIR) as (router, prefill, decode):
        await until(lambda: server.membership.ready, "ready")
        await prefill.attendance.stop()
        await until(lambda: router.state_of("prefill-0") == MEMBER_STATE_SUSPECT, "suspected")
        assert not server.membership.ready
        await until(lambda: decode.state_of("prefill-0") == MEMBER_STATE_DEAD, "dead")
        prefill.attendance.start()
        await asyncio.wait_for(prefill.fenced.wait(), SECONDS)
        assert decode.state_of("prefill-0") == MEMBER_STATE_DEAD
        replacement = FakeMember(server.address, "prefill-0", ROLE_PREFILL, "prefill-0#2")
        replacement.attendance.start()
        await until(lambda: router.state_of("prefill-0") == MEMBER_STATE_READY, "replaced")
        assert router.seen["prefill-0"].incarnation == "prefill-0#2"
        await replacement.attendance.stop()


async def test_an_empty_cluster_answers_and_a_member_finds_itself_at_once_unless_it_has_no_name() -> None:
    async with (
        supervisor() as server,
        grpc.aio.insecure_channel(server.address, options=channel_options()) as channel,
    ):
        stub: Any = SupervisorServiceStub(channel)
        assert not (await stub.GetStatus(GetStatusRequest(), metadata=METADATA)).ready
        call = stub.Attend(metadata=METADATA)
        await call.write(AttendRequest(member=Member(name="a", incarnation="1", role=ROLE_DECODE, state=1)))
        first = await asyncio.wait_for(call.read(), SECONDS)
        assert [entry.name for entry in first.members] == ["a"]
        call.cancel()
        call = stub.Attend(metadata=METADATA)
        await call.write(AttendRequest(member=Member(incarnation="1", role=ROLE_DECODE, state=1)))
        with pytest.raises(grpc.aio.AioRpcError, match=r"member\.name is empty") as caught:
            await asyncio.wait_for(call.read(), SECONDS)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_port_in_use_is_an_os_error_that_names_it() -> None:
    async with supervisor() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(OSError, match=f"port {port}: already in use"):
            async with supervisor(port=port):
                raise AssertionError("two servers on one port")


NAMES = tuple(name for name, _ in PAIR)


class FakeLauncher:
    """Processes that live until a test ends them; each sends heartbeats as a new incarnation."""

    config = ""

    def __init__(self, hopeless: str = "") -> None:
        self.hopeless = hopeless
        self.calls: list[str] = []
        self.lives: dict[str, asyncio.Future[ProcessEnd]] = {}
        self.fakes: dict[str, FakeMember] = {}
        self.count = 0
        self.waits: dict[str, str] = {}
        self.graces: list[float] = []
        self.broken = ""
        """The member whose process can't be started."""

    def members(self, config: str) -> dict[str, MemberRole]:
        roles: tuple[MemberRole, ...] = ("prefill", "decode", "router")
        return {name: role for name in NAMES for role in roles if name.startswith(role)}

    async def upgrade(self, present: str, config: str) -> str:
        return config

    def startable(self, config: str, role: MemberRole, others: int) -> str:
        return ""

    def lacks_room(self, config: str, present: Mapping[MemberRole, int], wanted: Mapping[MemberRole, int]) -> str:
        return ""

    def cycled(self, config: str) -> frozenset[MemberRole]:
        return frozenset({"router"})

    def unchanged(self, present: str, config: str) -> frozenset[MemberRole]:
        return frozenset()

    async def adopt(self, name: str) -> bool:
        return False

    async def run(self, name: str, plan: Plan, supervisor: str) -> ProcessEnd:
        if name in self.waits:
            await until(lambda: name not in self.waits, "its resources are free")
        self.count += 1
        self.calls.append(f"run {name}")
        if name == self.broken:
            raise RuntimeError("a defect")
        if name == self.hopeless:
            return ProcessEnd("model /nope: no such folder", mistake=True)
        assert name not in self.lives, "two processes of one name"
        life = self.lives[name] = asyncio.get_running_loop().create_future()
        fake = self.fakes[name] = FakeMember(supervisor, name, ROLES[plan.role], f"{name}#{self.count}")
        fake.attendance.start()
        try:
            return await life
        finally:
            del self.lives[name]
            await fake.attendance.stop()

    def waits_for(self, name: str) -> str:
        return self.waits.get(name, "")

    async def stop(self, name: str, grace: float) -> None:
        self.calls.append(f"stop {name}")
        self.graces.append(grace)
        await self._end(name, ProcessEnd())

    async def kill(self, name: str) -> None:
        self.calls.append(f"kill {name}")
        await self._end(name, ProcessEnd("killed"))

    async def _end(self, name: str, ended: ProcessEnd) -> None:
        if name in self.lives:
            self.lives[name].set_result(ended)
            await until(lambda: name not in self.lives, f"{name} has ended")


async def test_a_process_that_ended_is_replaced_by_a_new_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "FIRST_SECONDS", 0.05)
    launcher = FakeLauncher()
    async with supervisor(launcher) as server:
        for lives in range(1, 5):
            await until(lambda: server.membership.ready, "ready")
            before = server.membership.present("decode-0")
            assert before is not None
            launcher.lives["decode-0"].set_result(ProcessEnd("killed by signal 9"))
            await until(lambda b=before: server.membership.present("decode-0") != b, "replaced")
            assert launcher.calls.count("run decode-0") == lives + 1
        (progress,) = [entry for entry in server.startup().members if entry.name == "decode-0"]
        assert (progress.failures, progress.reason, progress.hopeless) == (4, "killed by signal 9", False)
    assert launcher.lives == {}


async def test_what_a_member_waits_for_is_told() -> None:
    launcher = FakeLauncher()
    async with supervisor(launcher) as server:
        await until(lambda: server.membership.ready, "ready")
        launcher.waits["decode-0"] = "a node with 1 GPU free"
        launcher.lives["decode-0"].set_result(ProcessEnd("killed by signal 9"))
        await until(lambda: any(each.waits_for for each in server.startup().members), "told")
        status = await server.GetStatus(GetStatusRequest(), None)  # type: ignore[arg-type]  # its context isn't used
        words = {member.name: member.text for member in progress(status)}
        assert "waits for a node with 1 GPU free" in words["decode-0"]
        members = {member["name"]: member for member in as_json(status)["desired"]["members"]}
        assert members["decode-0"]["waits_for"] == "a node with 1 GPU free"
        assert members["router-0"]["waits_for"] is None
        launcher.waits.clear()
        await until(lambda: launcher.calls.count("run decode-0") == 2, "it was started")


async def test_a_mistake_at_the_first_start_is_reported_and_not_tried_again() -> None:
    launcher = FakeLauncher(hopeless="prefill-0")
    async with supervisor(launcher) as server:
        await until(lambda: {"router-0", "decode-0"} <= launcher.lives.keys(), "the others have started")
        (progress,) = [entry for entry in server.startup().members if entry.hopeless]
        assert (progress.name, progress.reason) == ("prefill-0", "model /nope: no such folder")
        assert launcher.calls.count("run prefill-0") == 1
        assert not server.startup().ready


async def test_stopping_ends_the_routers_first_and_replaces_nobody() -> None:
    launcher = FakeLauncher()
    async with supervisor(launcher) as server:
        await until(lambda: server.membership.ready, "ready")
    stops = [call for call in launcher.calls if call.startswith("stop")]
    assert stops[0] == "stop router-0"
    assert sorted(stops[1:]) == ["stop decode-0", "stop prefill-0"]
    assert launcher.count == len(NAMES)
    assert launcher.lives == {}
    assert server.membership.members() == []


async def test_a_supervisor_that_fails_leaves_the_members_running() -> None:
    launcher = FakeLauncher()
    async with supervisor(launcher) as server:
        await until(lambda: server.membership.ready, "ready")
        server.membership.tick = fail  # type: ignore[method-assign]
        assert str(await asyncio.wait_for(server.failed(), SECONDS)) == "a defect"
    assert [call for call in launcher.calls if call.startswith(("stop", "kill"))] == []


def fail() -> list[Any]:
    raise RuntimeError("a defect")


async def test_the_failure_of_one_members_keeper_is_that_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "FIRST_SECONDS", 0.05)
    launcher = FakeLauncher()
    launcher.broken = "prefill-0"
    async with supervisor(launcher) as server:
        await until(lambda: launcher.calls.count("run prefill-0") >= 3, "tried again")
        await until(lambda: {"router-0", "decode-0"} <= launcher.lives.keys(), "the others run")
        (progress,) = [entry for entry in server.startup().members if entry.failures]
        assert (progress.name, progress.reason, progress.hopeless) == ("prefill-0", "RuntimeError: a defect", False)
        launcher.broken = ""
        await until(lambda: server.membership.ready, "the member is back")
        assert [launcher.calls.count(f"run {name}") for name in ("router-0", "decode-0")] == [1, 1]


async def test_a_command_that_cannot_be_recorded_changes_nothing_and_holds_up_no_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_module, "SAVE_SECONDS", 0.5)
    launcher, disk = FakeLauncher(), BadStore()
    async with supervisor(launcher, disk) as server:
        fleet = server.fleet
        assert fleet is not None
        await until(lambda: server.membership.ready and fleet.settled, "ready")
        router, prefill = launcher.fakes["router-0"], launcher.fakes["prefill-0"]
        await until(lambda: "prefill-0" in router.seen, "the router knows the member")
        disk.free.clear()
        with pytest.raises(Refused, match="can't be written"):
            await fleet.set_role("prefill-0", "colocated", force=True)
        assert fleet.desired.members["prefill-0"].role == "prefill"
        given_up = asyncio.create_task(fleet.set_role("prefill-0", "colocated", force=True))
        await until(lambda: fleet._proposed, "it waits for the disk")
        given_up.cancel()  # as gRPC does when the caller has gone
        await asyncio.wait([given_up])
        for port in (5, 6):  # without a record, and with one
            prefill.member.address = f"127.0.0.1:{port}"
            prefill.attendance.beat()
            await until(lambda: router.seen["prefill-0"].address == prefill.member.address, "the change is known")
            disk.free.set()
        assert ROLE_COLOCATED not in prefill.roles
        await until(lambda: disk.saved[-1].desired == to_record(fleet.desired), "the present state is recorded")
        assert fleet.desired.members["prefill-0"].role == "prefill"


async def test_an_upgrade_changes_the_time_that_members_get_to_finish_their_requests() -> None:
    launcher = FakeLauncher()
    launcher.config = "5"
    server = SupervisorServer(SupervisorConfig(drain_seconds=5.0), launcher, drain_seconds=float)
    await server.start()
    try:
        fleet = server.fleet
        assert fleet is not None
        await until(lambda: server.membership.ready and fleet.settled, "ready")
        await fleet.upgrade("70", in_place=True)
        await until(lambda: fleet.settled and launcher.count == 2 * len(NAMES), "upgraded")
        assert launcher.graces == [70.0] * len(NAMES)
        router = launcher.fakes["router-0"]
        router.member.state = MEMBER_STATE_DRAINING
        router.attendance.beat()
        await until(lambda: server.membership.counts.drains.total() == 1, "it drains by itself")
        server.membership._now += 5.0 + DRAIN_MARGIN_SECONDS  # nobody waits so long
        server.membership.tick()
        (present,) = [each for each in server.membership.members() if each.name == "router-0"]
        assert (present.incarnation, present.state) != (router.member.incarnation, MEMBER_STATE_DEAD)
    finally:
        await server.stop(0.5)


async def test_a_member_that_describes_itself_slowly_answers_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = asyncio.Event()

    async def tell() -> Description:
        await slow.wait()
        return Description(host="here")

    async with supervisor() as server:
        fake = FakeMember(server.address, "decode-0", ROLE_DECODE, "decode-0#1")
        fake.attendance._tell = tell  # as a worker's, which asks its GPU's driver
        fake.attendance.start()
        await until(lambda: fake.seen.keys() == {"decode-0"}, "it is known")
        monkeypatch.setattr(inquiry, "ANSWER_SECONDS", 0.5)
        first = await server.Describe(DescribeRequest(), None)  # type: ignore[arg-type]  # its context isn't used
        assert not first.members[0].HasField("description")
        monkeypatch.setattr(inquiry, "ANSWER_SECONDS", SECONDS)
        asyncio.get_running_loop().call_later(0.2, slow.set)
        second = await server.Describe(DescribeRequest(), None)  # type: ignore[arg-type]
        assert second.members[0].description.host == "here"
        await fake.attendance.stop()
