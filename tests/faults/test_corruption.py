"""Frames that arrive wrong, twice, or not at all: none of their bytes becomes a token."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults import ALL_TRANSPORTS, CHUNK, TRANSFER, Scene, scene
from support.hash_worker import STEP_SECONDS

RETRIED = {
    "one bit": "transfer.frame_bytes,index=0:corrupt(1)",
    "many bits": "transfer.frame_bytes,index=1:corrupt(5000)",
    "later frame": "transfer.frame_bytes,index=3:corrupt(1)",
    "cut short": "transfer.frame_bytes,index=2:truncate(100)",
    "on arrival": "decode.after_frame,index=1:corrupt(1)",
    "gap": "transfer.frame,index=1:drop",
}
"""What decode must refuse: the attempt fails and is placed anew."""

SURVIVED = {
    "twice": "transfer.frame,index=1:duplicate",
    "later twice": "transfer.frame,index=3:duplicate",
    "thread fails": "transfer.frame,index=2:raise",
}
"""What the attempt itself gets over: a replayed frame is dropped, a broken link is dialled anew."""

ALONE = {
    "another in its place": "transfer.frame_announced,index=1:drop",
    "neither announced nor sent": "transfer.frame,index=3:drop",
    "never sent": "transfer.frame_announced,index=3:drop",
}
"""A frame whose bytes stay out. What is sent next is taken for one that was announced; where nothing is, the frame's
time runs out; of one that wasn't announced, the count of the frames tells."""

COMPANY = 6
"""Requests beside each one that fails: the router tries again for one in five."""

FAILING = {
    "transfer.frame_bytes,index=0,share=0.02": "corrupt(3)",
    "transfer.frame,index=0,share=0.0102": "drop",
    "transfer.frame_announced,index=0,share=0.0103": "drop",
    "decode.after_frame,index=0,share=0.0104": "corrupt(1)",
}
"""One transfer in twenty, in four ways. (Each rule is asked only where those before it have let the transfer pass.)"""
REQUESTS = 1000
AT_ONCE = 12


@pytest.fixture(scope="module", params=ALL_TRANSPORTS)
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    rules = []
    for name, text in (RETRIED | SURVIVED | ALONE).items():
        place, action = text.split(":")
        rules.append(f"{place},request={name},attempt=1,times=1:{action}")
    transfer = {**TRANSFER, "transport": request.param}
    with scene(tmp_path_factory.mktemp("corruption"), rules, transfer=transfer) as it:
        yield it


@pytest.mark.parametrize("name", RETRIED)
def test_a_wrong_frame_is_rejected(it: Scene, name: str) -> None:
    assert it.ask_in_company(name, COMPANY).timeline.retries == 1
    it.settle(3)


@pytest.mark.parametrize("name", SURVIVED)
def test_a_frame_that_comes_twice_or_never_costs_no_attempt(it: Scene, name: str) -> None:
    done = it.ask_in_company(name, COMPANY)
    assert done.timeline.retries == 0, "\n".join(line["reason"] for line in it.failures())
    it.settle(4)


@pytest.mark.parametrize("name", ALONE)
def test_a_frame_that_stays_out_is_noticed_and_the_link_made_anew(it: Scene, name: str) -> None:
    done = it.ask(name)
    assert done.timeline.retries == 1
    assert done.timeline.total_seconds < 3, "noticed by what came after it, or by the frame's own limit"
    for number in range(4):
        assert it.ask(f"after {name} {number}").timeline.retries == 0
    it.settle(3)


def test_no_client_sees_that_one_transfer_in_twenty_fails(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rules = [f"{place},seed={seed}:{action}" for place, action in FAILING.items()]
    with scene(tmp_path, rules, variables={STEP_SECONDS: 0.0}) as it:
        names = [f"{seed} {number}" for number in range(REQUESTS)]
        retries = sum(done.timeline.retries for done in it.ask_all(names, 2 * CHUNK, 8, AT_ONCE))
        # 50 are due; workers of a role draw alike, so that four standard deviations are 40.
        assert 10 < retries < 90, f"the failpoints were armed, and {retries} transfers failed"
        it.settle(3)
