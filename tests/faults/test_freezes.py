"""A worker that is frozen in a hand-off for ten seconds (SIGSTOP) and then goes on, with default options.

Measured from the signal on:
    suspected    the supervisor takes it out of placement
    given up     the router knows that the hand-off under way failed, and places the request again
    dead         the supervisor has fenced that incarnation
"""

import itertools
import signal
import time
from collections.abc import Iterator

import pytest

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_SUSPECT
from support.chaos import CLEAR, Weather
from support.faults import ALL_TRANSPORTS, Scene, scene, until
from support.hash_worker import WORKER_LAYOUT
from support.processes import wait_until

FROZEN_SECONDS = 10.0
DETECT_SECONDS = 3.0
SLACK_SECONDS = 0.5
"""Seconds for delays after the detection: the supervisor's tick, and the polls here."""
ROLES = ("prefill", "decode")
# Either makes a transfer take some four seconds, so that the signal falls into it: on a link of bytes, mid-frame.
SLOW = Weather(rate=60e3)
SLOW_READS = [f"transfer.read,request=frozen {role},attempt=1:sleep(1)" for role in ROLES]


@pytest.fixture(scope="module", params=ALL_TRANSPORTS)
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    transfer = {"transport": request.param, "frame_bytes": 64 * WORKER_LAYOUT.token_bytes}
    by_shm = request.param == "shm"
    rules = SLOW_READS if by_shm else []
    folder = tmp_path_factory.mktemp("freezes")
    with scene(folder, rules, chaos=not by_shm, losses=True, transfer=transfer) as it:
        yield it


def dial_every_pair(it: Scene) -> None:
    """Asks until each pair has its link."""

    def dialled() -> bool:
        it.ask_all([f"dial {time.monotonic()} {number}" for number in range(8)], count=2)
        return it.chaos is None or all(it.link(*pair).passed for pair in pairs(it))

    wait_until(dialled, "every pair has a link", seconds=20)


def pairs(it: Scene) -> list[tuple[str, str]]:
    return list(itertools.product(it.prefills, it.decodes))


def weather(it: Scene, forward: Weather) -> None:
    for proxy in it.chaos.links() if it.chaos is not None else ():
        proxy.set(forward=forward)


@pytest.mark.in_turn("role")
@pytest.mark.parametrize("role", ROLES)
def test_a_worker_frozen_for_ten_seconds(it: Scene, role: str) -> None:
    dial_every_pair(it)
    it.settle(3)
    weather(it, SLOW)
    before = {pair: it.link(*pair).passed for pair in pairs(it)} if it.chaos is not None else {}
    request = it.begin(f"frozen {role}")

    def moving() -> list[tuple[str, str]]:
        if it.chaos is None:
            return [pair for pair in pairs(it) if request.tokens and all(map(it.held, pair))]
        return [pair for pair, nbytes in before.items() if it.link(*pair).passed > nbytes + 20_000]

    (pair,) = wait_until(moving, "its transfer is under way", seconds=5)
    frozen = pair[0] if role == "prefill" else pair[1]
    it.signal(frozen, signal.SIGSTOP)
    stopped = time.monotonic()
    suspected = until(
        lambda: it.cluster.member(frozen).member.state in (MEMBER_STATE_SUSPECT, MEMBER_STATE_DEAD), "suspected"
    )
    until(lambda: any(line["at"] > stopped for line in it.failures()), "the hand-off was given up", 8)
    given_up = next(line["at"] for line in it.failures() if line["at"] > stopped) - stopped
    until(lambda: it.cluster.member(frozen).member.state == MEMBER_STATE_DEAD, "declared dead", 5)
    dead = time.monotonic() - stopped
    weather(it, CLEAR)
    done = request.result()
    print(f"{frozen}: suspected {suspected:.2f} s, given up {given_up:.2f} s, dead {dead:.2f} s after the signal")
    assert done.timeline.retries == 1
    assert frozen not in (done.timeline.prefill_worker, done.timeline.decode_worker)
    it.settle(3, but=[frozen])
    time.sleep(max(0.0, stopped + FROZEN_SECONDS - time.monotonic()))
    it.signal(frozen, signal.SIGCONT)
    # Messages that the zombie has queued must not change the requests that run now.
    for number in range(4):
        it.ask_in_company(f"while {frozen} wakes {number}")
    wait_until(lambda: it.ended() == [frozen], "the fenced incarnation has ended", seconds=10)
    it.settle(3, but=[frozen])
    it.replace(frozen)
    assert suspected < DETECT_SECONDS
    assert given_up < DETECT_SECONDS + SLACK_SECONDS
    assert dead < DETECT_SECONDS + SLACK_SECONDS
