"""Placement by predicted costs: whatever these say, and whoever dies, no token is lost, doubled or another one."""

import signal
import time
from collections.abc import Iterator

import pytest

from kvrelay.client import Client
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.faults import PROMPT, Scene, over, prompt_of, scene, until
from support.hash_worker import STEP_SECONDS

STREAMS = 16
DEAD_SECONDS = 30.0
SETTLE_SECONDS, TOLD_SECONDS = 3.0, 1.0
ANSWER, NEXT = 120, 40
"""Tokens of an answer, and of the next turn's prompt behind it."""
FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "drain": signal.SIGTERM}


@pytest.fixture(scope="module", params=["turns", pytest.param("drawn", marks=pytest.mark.more)])
def costly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    options = over(request.param)
    options["engine"] = {"kv_memory_bytes": 16 * 2**20}
    with scene(tmp_path_factory.mktemp("costly"), routers=2, worker={"drain_seconds": 0.5}, **options) as it:
        yield it


@pytest.fixture
def it(costly: Scene) -> Iterator[Scene]:
    yield costly
    costly.heal()


def strike(it: Scene, worker: str, fault: str) -> None:
    """Ends a worker in one of the ways; a frozen one has been given up when this returns."""
    it.signal(worker, FAULTS[fault])
    if fault == "freeze":
        until(
            lambda: it.cluster.member(worker).member.state == MEMBER_STATE_DEAD, f"{worker} is given up", DEAD_SECONDS
        )


ONCE = ("decode", "kill")
TURNS_ONLY = pytest.mark.parametrize("costly", ["turns"], indirect=True)
STRIKES = [
    pytest.param(role, fault, marks=() if (role, fault) == ONCE else pytest.mark.more)
    for role in ("prefill", "decode")
    for fault in FAULTS
]


@pytest.mark.more
@pytest.mark.parametrize(("role", "fault"), STRIKES)
def test_a_fault_under_load_costs_no_token(it: Scene, role: str, fault: str) -> None:
    it.order(**{STEP_SECONDS: 0.01})
    running = [it.begin(f"stream {number}", 20 + 40 * (number % 8), 80) for number in range(STREAMS)]
    until(lambda: sum(stream.tokens >= 3 for stream in running) >= STREAMS // 2, "half of them decode", 20)
    strike(it, f"{role}-0", fault)
    ways = {stream.result().timeline.way for stream in running}
    print(f"ways: {sorted(ways)}")
    assert ways <= {"pair", "in place"}
    it.settle(SETTLE_SECONDS, but=[f"{role}-0"])


@TURNS_ONLY
@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=() if each == "kill" else pytest.mark.more) for each in FAULTS]
)
def test_the_next_turn_outlives_the_worker_that_it_extends_on(it: Scene, fault: str) -> None:
    first = it.ask("first turn", count=ANSWER)
    before = [*prompt_of(f"first turn of test {it.turn}"), *first.token_ids]
    it.order(**{STEP_SECONDS: 0.02})
    turn, serving = it.decoding("second turn", 100, length=NEXT, before=before)
    strike(it, serving, fault)
    again = turn.result().timeline
    assert again.retries == (fault != "drain")
    assert again.migrations == (fault == "drain")
    it.settle(SETTLE_SECONDS, but=[serving])


@TURNS_ONLY
@pytest.mark.parametrize("others", [False, True], ids=["one router", "both in turn"])
def test_no_token_of_an_answer_is_computed_twice(it: Scene, others: bool) -> None:
    """Nor where the next turn comes to another router, which workers tell of answers."""
    before: list[int] = []
    with Client(it.cluster.addresses["router-0"]) as one, Client(it.cluster.addresses["router-1"]) as other:
        for number in range(4):
            name, length = f"turn {number}", NEXT if number else PROMPT
            done = it.begin(name, length, ANSWER, other if others and number % 2 else one, before).result()
            if number:
                assert done.timeline.way == "in place"
                # But for the last token of the answer, which nobody had to compute.
                assert done.usage.cached_tokens == len(before) - 1
            before += [*prompt_of(f"{name} of test {it.turn}", length), *done.token_ids]
            time.sleep(TOLD_SECONDS)
    it.settle(SETTLE_SECONDS)
