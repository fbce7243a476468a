"""Frames that arrive wrong, twice, or not at all: no token comes from their bytes."""

import random

import pytest

from support.faults import CHUNK, FRAME_SECONDS, Scene
from support.hash_worker import STEP_SECONDS

RETRIED = {
    "one bit": "sent,index=0:corrupt(1)",
    "many bits": "sent,index=1:corrupt(5000)",
    "later frame": "sent,index=3:corrupt(1)",
    "cut short": "sent,index=2:truncate(100)",
    "on arrival": "arrived,index=1:corrupt(1)",
    "gap": "sent,index=1:skip",
}
"""Faults that decode must notice: it rejects the frame, the attempt fails, and the request is placed anew."""

SURVIVED = {
    "twice": "sent,index=1:duplicate",
    "later twice": "sent,index=3:duplicate",
    "thread fails": "transfer.frame,index=2:raise",
}
"""Faults that the attempt survives: a replayed frame is dropped, a broken link is dialled again."""

ALONE = {
    "another in its place": "sent,index=1:lose",
    "neither announced nor sent": "sent,index=3:skip",
    "never sent": "sent,index=3:lose",
}
"""Faults in which a frame's bytes never arrive. If it was announced, the next frame is taken for it, or its timeout
ends the wait. If it was not announced, the count of frames shows it."""

BUSY_SECONDS = 2.0
"""Seconds that a request may take besides a frame's limit."""
EVERYWHERE = pytest.mark.also_over(more=["tcp", "int8", "states", "groups", "ranks"], slow=["gloo"])
COMPANY = 19
"""Requests beside each one that fails. The budget of each of the two routers is one retry for five requests of the last
ten seconds; the requests that fail in several tests may all be those of one router, and few of the others."""

FAILING = {
    "sent,index=0,share=0.02": "corrupt(3)",
    "sent,index=0,share=0.0102": "skip",
    "sent,index=0,share=0.0103": "lose",
    "arrived,index=0,share=0.0104": "corrupt(1)",
}
"""Faults of one transfer in twenty, in four ways. The shares differ slightly, since a rule is tried only if those
before it did not act."""
FIRST = 30
"""Transfers of each worker that succeed, so that the router's retry budget covers those that fail after them."""
TRIES = 3
"""Attempts of a request that may fail; the fourth one is its last and is spared: one request in 160,000 would see four
that fail."""
AT_ONCE = 12


FEW = ("one bit", "gap", "thread fails", "another in its place")
"""Faults in `make test`."""


@pytest.fixture(autouse=True)
def patient(it: Scene) -> None:
    """Workers that get no CPU for a while are no part of this: their requests would be retried, too."""
    it.restart("supervisor", suspect_seconds=30.0, dead_seconds=60.0)


def named(faults: dict[str, str]) -> pytest.MarkDecorator:
    marks = {name: () if name in FEW else pytest.mark.more for name in faults}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def order(it: Scene, name: str) -> None:
    """Has the fault hit one frame of the first attempt of the request of its name; at the last rank, if it can."""
    place, action = {**RETRIED, **SURVIVED, **ALONE}[name].split(":")
    ranks = it.cluster.member(it.prefills[0]).member.rank_pids
    rank = 0 if action == "duplicate" else max(len(ranks) - 1, 0)
    it.order(f"{place},request={name},attempt=1,rank={rank},times=1:{action}")


def check_fault(it: Scene, name: str) -> None:
    """The fault has hit the request, once."""
    lines = it.faults()
    assert len(lines) == 1, f"{lines}; attempts failed: {reasons(it)}"
    assert name in (lines[0].get("request", "").partition("/")[0], "thread fails"), lines[0]


def reasons(it: Scene) -> str:
    """Why attempts failed since the test began, in the words of the routers' logs."""
    return "\n".join(f"{line['request']}: {line['reason']}" for router in it.routers for line in it.failures(router))


@EVERYWHERE
@named(RETRIED | SURVIVED)
def test_a_wrong_frame_costs_its_attempt_and_one_that_comes_twice_or_never_costs_none(it: Scene, name: str) -> None:
    order(it, name)
    done = it.ask_in_company(name, COMPANY)
    assert done.timeline.retries == (name in RETRIED), reasons(it)
    check_fault(it, name)
    it.settle(4)


@EVERYWHERE
@named(ALONE)
def test_a_frame_that_stays_out_is_noticed_and_the_link_made_anew(it: Scene, name: str) -> None:
    order(it, name)
    done = it.ask(name)
    assert done.timeline.retries == 1
    check_fault(it, name)
    limit = FRAME_SECONDS + BUSY_SECONDS
    assert done.timeline.total_seconds < limit, "noticed by what came after it, or by the frame's own limit"
    for number in range(4):
        assert it.ask(f"after {name} {number}").timeline.retries == 0
    it.settle(3)


@pytest.mark.parametrize("requests", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_client_sees_that_one_transfer_in_twenty_fails(it: Scene, requests: int) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rules = [f"{place},seed={seed},after={FIRST},tries={TRIES}:{action}" for place, action in FAILING.items()]
    it.order(*rules, **{STEP_SECONDS: 0.0})
    names = [f"{seed} {number}" for number in range(requests)]
    retries = sum(done.timeline.retries for done in it.ask_all(names, 2 * CHUNK, 8, AT_ONCE))
    # One that is lost may take others on its link along.
    expected = requests * 0.047
    assert abs(retries - expected) < 4 * (2 * expected) ** 0.5, f"{retries} transfers failed"
    it.settle(3)
