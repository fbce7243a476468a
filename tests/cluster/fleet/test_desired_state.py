"""The desired state and the way to it, against a simulated cluster: any commands, at any moment, with any luck."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.cluster.fleet import desired as changes
from kvrelay.cluster.fleet import room
from kvrelay.cluster.fleet.desired import (
    Desired,
    MemberRole,
    Refused,
    Rolling,
    Seen,
    Stage,
    Wanted,
    able,
    serving,
)
from kvrelay.cluster.fleet.reconcile import advance, reconcile, settled
from kvrelay.cluster.fleet.replacement import LONG_LIFE_SECONDS, MOST_SECONDS, Backoff
from kvrelay.engine.config import EngineConfig
from kvrelay.internal.v1.supervisor_pb2 import Refusal
from kvrelay.rpc.identity import ROLES, WORKER_ROLES
from kvrelay.worker.config import WorkerConfig

STEPS_TO_SETTLE = 400


@dataclass
class Process:
    """A member's process as it would behave."""

    role: MemberRole
    config: int
    ready: bool = False
    ending: bool = False


@dataclass
class World:
    """Processes that do what the actions say, in an order that a test chooses."""

    desired: Desired
    processes: dict[str, Process] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    """Compatibility digests of workers by their configuration; "same" where none is given."""
    broken: set[int] = field(default_factory=set)
    """Configurations with which nobody comes up."""

    def seen(self) -> dict[str, Seen]:
        return {
            name: Seen(
                kept=True,
                ending=process.ending,
                ready=process.ready and not process.ending,
                role=process.role if process.ready else None,
                digest=self.digests.get(process.config, "same") if process.role != "router" else "",
                trouble="exit code 1" if process.config in self.broken else "",
            )
            for name, process in self.processes.items()
        }

    def step(self) -> None:
        """Takes one turn of the supervisor: observes, and does the actions that follow."""
        self.desired = advance(self.desired, self.seen())
        starts, ends = reconcile(self.desired, self.seen())
        for name in starts:
            assert name not in self.processes
            wanted = self.desired.members[name]
            self.processes[name] = Process(wanted.role, wanted.config)
        for name in ends:
            self.processes[name].ending = True

    def live(self, name: str) -> None:
        """Takes one process a step further: it comes up, takes the role that the membership gives it, or ends if asked
        to."""
        process = self.processes[name]
        wanted = self.desired.members.get(name)
        if process.ending:
            del self.processes[name]
        elif process.ready and wanted is not None and not wanted.stage.ends and process.role != wanted.role:
            process.role, process.ready = wanted.role, False
        elif process.config not in self.broken:
            process.ready = True

    def settle(self) -> None:
        for _ in range(STEPS_TO_SETTLE):
            self.step()
            for name in list(self.processes):
                self.live(name)
            if settled(self.desired, self.seen()) or self.desired.halted:
                return
        raise AssertionError(f"does not settle: {self.desired} {self.seen()}")

    @property
    def serves(self) -> bool:
        """Whether a request can be computed: a pair that is to go on, or one that still drains doesn't count."""
        return serving(able(self.desired, self.seen()))

    @property
    def routes(self) -> bool:
        return any(process.role == "router" and process.ready for process in self.processes.values())


def world(prefill: int = 2, decode: int = 2, routers: int = 2, colocated: int = 0) -> World:
    members: dict[str, Wanted] = {}
    counts: dict[MemberRole, int] = {"prefill": prefill, "decode": decode, "colocated": colocated, "router": routers}
    for role, count in counts.items():
        for _ in range(count):
            members[changes.new_name(members, role)] = Wanted(role, 1)
    it = World(Desired(members, configs={1: "one"}))
    it.settle()
    return it


def up(it: World, digest: str = "same", in_place: bool = False) -> None:
    text = f"config {it.desired.config + 1}"
    cycled: frozenset[MemberRole] = frozenset(ROLES if in_place else ("router",))
    it.desired = changes.upgraded(it.desired, text, {}, Rolling(cycled, gaps=in_place))
    it.digests[it.desired.config] = digest


def command(it: World, draw: random.Random) -> bool:
    """Gives some command, which may be refused; returns whether a role was changed."""
    name, seen, desired = draw.choice(sorted(it.desired.members)), it.seen(), it.desired
    role, flag = draw.choice(WORKER_ROLES), draw.random() < 0.5
    kind = draw.choice(["scale", "role", "drain", "upgrade", "restart", "rollback"])
    try:
        match kind:
            case "scale":
                it.desired = changes.scaled(desired, seen, {role: draw.randint(1, 4)})
            case "role":
                it.desired = changes.with_role(desired, seen, name, role, force=False)
            case "drain":
                it.desired = changes.drained(desired, seen, name, replaced=flag, force=False)
            case "upgrade":
                up(it, draw.choice(["same", "other"]))
            case "restart":
                it.desired = changes.restarted(desired, [], Rolling({"router"}), str(draw.random()))
            case "rollback":
                it.desired = changes.rolled_back(desired, Rolling({"router"}))
    except Refused as refused:
        if refused.code not in (Refusal.CODE_UNSAFE, Refusal.CODE_BUSY, Refusal.CODE_INVALID):
            raise
        assert it.desired is desired
    return kind == "role" and it.desired is not desired


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_no_command_ever_leaves_requests_without_workers_and_all_are_followed(seed: int) -> None:
    it, draw, switched = world(), random.Random(seed), 0
    for _ in range(draw.randint(1, 8)):
        switched += command(it, draw)
        for _ in range(draw.randint(0, 12)):
            served, before = it.serves, it.seen()
            it.step()
            assert it.serves or not served, (before, it.desired)
            assert it.routes or it.desired.count("router") == 1, "one with a port of its own leaves a gap"
            successors = [wanted for wanted in it.desired.members.values() if wanted.replaces]
            assert len(successors) <= 2 + switched, "a successor that gets another role may need another one beside it"
            for name in list(it.processes):
                if draw.random() < 0.5:
                    it.live(name)
    counts = {role: it.desired.count(role) for role in ROLES}
    it.settle()
    assert not it.desired.halted
    assert it.serves
    assert {role: it.desired.count(role) for role in ROLES} == counts
    assert {name: process.role for name, process in it.processes.items()} == {
        name: wanted.role for name, wanted in it.desired.members.items()
    }
    assert {wanted.config for wanted in it.desired.members.values()} == {it.desired.config}
    assert advance(it.desired, it.seen()) is it.desired
    assert reconcile(it.desired, it.seen()) == ([], [])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("digest", ["same", "other"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (3, 3), (1, 4)])
def test_an_upgrade_reaches_everybody_one_at_a_time(prefill: int, decode: int, digest: str, in_place: bool) -> None:
    it = world(prefill, decode)
    up(it, digest, in_place)
    most = 0
    alone = in_place and min(prefill, decode) == 1
    for _ in range(STEPS_TO_SETTLE):
        it.step()
        most = max(most, len(it.processes))
        assert it.serves or alone
        assert it.routes
        for name in list(it.processes):
            it.live(name)
        if settled(it.desired, it.seen()):
            break
    assert settled(it.desired, it.seen())
    assert {process.config for process in it.processes.values()} == {2}
    surge = 0 if in_place else 1 if digest == "same" else 2
    assert most == prefill + decode + 2 + surge
    assert it.desired.configs.keys() == {1, 2}, "the one before, for a rollback"


def test_a_successor_that_does_not_come_up_halts_the_upgrade_and_a_rollback_undoes_it() -> None:
    it = world()
    before = dict(it.processes)
    it.broken.add(2)
    up(it)
    it.settle()
    assert "does not come up: exit code 1" in it.desired.halted
    it.settle()
    for _ in range(5):
        it.step()
        for name in list(it.processes):
            it.live(name)
    assert it.processes == before, "the old ones serve on"
    with pytest.raises(Refused) as refused:
        changes.restarted(it.desired, [], Rolling(), "again")
    assert refused.value.code == Refusal.CODE_BUSY
    added = changes.scaled(it.desired, it.seen(), {"decode": 3})
    assert [wanted.config for wanted in added.members.values() if wanted.stage is Stage.SERVE] == [1]
    it.desired = changes.rolled_back(it.desired, Rolling({"router"}))
    assert not it.desired.halted
    it.settle()
    assert it.processes == before
    assert it.desired.config == 1
    assert changes.upgraded(it.desired, "three", {}, Rolling()).config == 3, "a number is never given twice"


def test_a_restart_that_is_halted_leaves_the_present_configuration_in_force() -> None:
    it = world()
    up(it)
    it.settle()
    it.desired = changes.restarted(it.desired, [], Rolling({"router"}), "first")
    it.broken.add(2)  # such as a full disk
    it.settle()
    assert it.desired.halted
    assert it.desired.fresh_config == it.desired.config == 2
    it.broken.clear()
    up(it)
    it.settle()
    assert it.desired.previous == 2, "what a rollback goes back to"


def test_members_that_are_started_as_before_stay() -> None:
    it = world()
    it.settle()
    before = dict(it.processes)
    workers = frozenset(WORKER_ROLES)
    it.desired = changes.upgraded(it.desired, "other routers", {}, Rolling({"router"}, kept=workers))
    it.settle()
    assert {name for name in before if it.processes[name] is before[name]} == {f"worker-{n}" for n in range(4)}
    assert {wanted.config for wanted in it.desired.members.values()} == {2}
    it.desired = changes.rolled_back(it.desired, Rolling(kept=frozenset(ROLES)))
    assert not it.desired.rolling
    assert {wanted.config for wanted in it.desired.members.values()} == {1}


def test_members_that_a_change_has_not_reached_yet_do_not_stay() -> None:
    it = world()
    it.settle()
    half = changes.upgraded(it.desired, "two", {}, Rolling())
    after = changes.upgraded(half, "three", {}, Rolling(kept=frozenset(ROLES)))
    assert {wanted.stage for wanted in after.members.values()} == {Stage.REPLACE}


def test_the_only_member_at_an_address_ends_only_if_that_is_wanted() -> None:
    it = world(routers=1)
    it.settle()
    with pytest.raises(Refused, match=r"router-0 is the only router member .* `scale router=2` first") as refused:
        changes.upgraded(it.desired, "two", {}, Rolling({"router"}))
    assert refused.value.code == Refusal.CODE_UNSAFE
    for how, counts in ((Rolling({"router"}, gaps=True), {}), (Rolling(), {}), (Rolling({"router"}), {"router": 2})):
        assert changes.upgraded(it.desired, "two", counts, how).rolling  # type: ignore[arg-type]  # literals


def test_commands_that_are_repeated_change_nothing_more() -> None:
    it = world()
    for command in (
        lambda desired: changes.scaled(desired, it.seen(), {"prefill": 3, "decode": 1}),
        lambda desired: changes.drained(desired, it.seen(), "worker-0", replaced=False, force=False),
        lambda desired: changes.drained(desired, it.seen(), "worker-0", replaced=True, force=False),
        lambda desired: changes.with_role(desired, it.seen(), "worker-0", "decode", force=False),
        lambda desired: changes.upgraded(desired, "two", {}, Rolling()),
        lambda desired: changes.restarted(desired, [], Rolling(), "id"),
    ):
        once = command(it.desired)
        assert once is not it.desired
        assert command(once) is once
    back = changes.rolled_back(changes.upgraded(it.desired, "two", {}, Rolling()), Rolling())
    assert back.config == 1
    assert changes.rolled_back(back, Rolling()) is back


def test_a_member_that_is_about_to_return_is_not_started_as_before_by_another_command() -> None:
    it = world()
    up(it, in_place=True)
    it.step()
    (name,) = [name for name, wanted in it.desired.members.items() if wanted.stage is Stage.RETURN]
    it.desired = changes.drained(it.desired, it.seen(), name, replaced=True, force=False)
    it.live(name)
    it.step()
    assert it.processes[name].config == 2
    it.settle()
    assert {process.config for process in it.processes.values()} == {2}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda it: changes.drained(it.desired, it.seen(), "worker-9", replaced=False, force=False), "UNKNOWN_MEMBER"),
        (lambda it: changes.drained(it.desired, it.seen(), "worker-1", replaced=False, force=False), "UNSAFE"),
        (lambda it: changes.drained(it.desired, it.seen(), "router-0", replaced=False, force=False), "UNSAFE"),
        (lambda it: changes.with_role(it.desired, it.seen(), "worker-0", "decode", force=False), "UNSAFE"),
        (lambda it: changes.with_role(it.desired, it.seen(), "router-0", "decode", force=True), "INVALID"),
        (lambda it: changes.scaled(it.desired, it.seen(), {"router": 0}), "INVALID"),
        (lambda it: changes.scaled(it.desired, it.seen(), {"decode": 1025}), "INVALID"),
        (lambda it: changes.rolled_back(it.desired, Rolling()), "INVALID"),
        (lambda it: changes.restarted(it.desired, ["worker-9"], Rolling(), "id"), "UNKNOWN_MEMBER"),
    ],
)
def test_what_cannot_be_done_is_refused(change: Callable[[World], Desired], code: str) -> None:
    it = world(1, 1, 1)
    with pytest.raises(Refused) as refused:
        change(it)
    assert refused.value.code == Refusal.Code.Value(f"CODE_{code}")


def test_a_pool_scales_to_zero_and_back() -> None:
    it = world()
    it.desired = changes.scaled(it.desired, it.seen(), {"prefill": 0, "decode": 0})
    it.settle()
    assert {process.role for process in it.processes.values()} == {"router"}
    it.desired = changes.scaled(it.desired, it.seen(), {"prefill": 2, "decode": 1})
    it.settle()
    assert it.serves
    assert sorted(it.processes) == ["router-0", "router-1", "worker-0", "worker-1", "worker-2"], "names are free again"


def test_those_that_serve_least_leave_first() -> None:
    it = world(prefill=4, decode=1)
    seen = it.seen()
    seen["worker-0"] = replace(seen["worker-0"], requests=5)
    seen["worker-1"] = replace(seen["worker-1"], requests=0)
    seen["worker-2"] = replace(seen["worker-2"], requests=3)
    seen["worker-3"] = replace(seen["worker-3"], ready=False)
    left = changes.scaled(it.desired, seen, {"prefill": 2})
    assert {name for name, wanted in left.members.items() if wanted.stage is Stage.LEAVE} == {"worker-3", "worker-1"}


@given(
    free=st.integers(0, 10**9),
    present=st.integers(0, 5),
    wanted=st.integers(0, 50),
    each=st.integers(1, 10**8),
)
def test_what_is_refused_for_lack_of_memory_names_the_number_that_fits(
    free: int, present: int, wanted: int, each: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "free_memory", lambda: free)

        def why(count: int) -> str:
            return room.lacks_memory({"prefill": 1, "decode": present}, {"decode": count}, {"decode": each})

        if found := why(wanted):
            most = int(found.partition("at most ")[2].partition(".")[0])
            assert present <= most < wanted
            assert why(most) == ""
            assert why(most + 1)


def test_each_rank_of_a_worker_takes_a_process_and_a_pool() -> None:
    def needs(ranks: int) -> int:
        engine = EngineConfig(kv_memory_bytes=2**30, tensor_parallel=ranks)
        return room.worker_bytes(WorkerConfig(name="w", role="decode", model="pico", engine=engine))

    assert needs(2) - needs(1) == needs(4) - needs(3) == room.PROCESS_BYTES + 2**30


def test_reservations_fit_where_each_node_has_all_that_they_need() -> None:
    nodes = [{"GPU": 4.0, "CPU": 10.0}, {"GPU": 1.5, "CPU": 100.0}, {"CPU": 8.0}]
    assert room.fitting({"GPU": 1.0, "CPU": 3.0}, nodes) == 4
    assert room.fitting({"GPU": 0.3333}, [{"GPU": 1.0}]) == 3
    assert room.fitting({"GPU": 1.0}, [{"GPU": -0.5}]) == 0


def test_the_wait_before_a_replacement_doubles_until_one_lives_long() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(9)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert backoff.after(LONG_LIFE_SECONDS) == 0.0
    assert backoff.after(1.0) == 0.5


@given(st.lists(st.floats(0, 200), max_size=50))
def test_the_wait_before_a_replacement_is_bounded(lives: list[float]) -> None:
    backoff = Backoff()
    assert all(0.0 <= backoff.after(life) <= MOST_SECONDS for life in lives)
