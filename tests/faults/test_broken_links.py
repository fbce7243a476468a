"""A network that resets, swallows, holds back or slows what a link carries, and a worker that is frozen in a hand-off.

All links run through proxies (`support.chaos`), and the limits of hand-offs are the default ones. Shared memory has no
such faults: no network carries it.
"""

import itertools
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvrelay.engine.config import CPU_DEFAULTS
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_SUSPECT
from support.chaos import CLEAR, HELD, SWALLOWED, Weather
from support.faults import OUT, PROMPT, Running, Scene, scene, until
from support.hash_worker import WORKER_LAYOUT
from support.processes import wait_until

RESET_SECONDS = 0.5
"""Seconds until a reset is noticed: far less than a frame may take, and more than it takes on a busy machine."""
SLOW = Weather(rate=100e3)
SILENCE = {"suspect_seconds": 1.5, "dead_seconds": 3.0}
"""Limits of silence that are measured: the default ones."""
DETECT_SECONDS = 3.0
COMPANY = 5
FRAME_SECONDS = 3.0
"""Seconds that a frame may take: the default of `transfer.frame_timeout_seconds`."""
SLACK_SECONDS = 1.5
"""Seconds for delays after a detection: the supervisor's tick, the polls here, and other work on the machine."""
SILENCES = {
    "black hole": (SWALLOWED, SWALLOWED),
    "nothing gets there": (SWALLOWED, CLEAR),
    "nothing comes back": (CLEAR, SWALLOWED),
    "held back": (HELD, HELD),
}


@pytest.fixture
def it(network: Scene) -> Iterator[Scene]:
    """The network; every pair has a link."""

    def dialled() -> bool:
        network.ask_all(unique("dial", 4), count=2)
        return all(moved(network).values())

    wait_until(dialled, "every pair has a link")
    yield network
    network.heal()


def unique(name: str, count: int) -> list[str]:
    return [f"{name} {number} at {time.monotonic():.3f}" for number in range(count)]


def moved(it: Scene) -> dict[tuple[str, str], int]:
    """Bytes that have gone over the links of each pair."""
    return {pair: it.link(*pair).passed for pair in itertools.product(it.prefills, it.decodes)}


def weather(it: Scene, forward: Weather) -> None:
    for pair in moved(it):
        it.link(*pair).set(forward=forward)


def lost(it: Scene, since: float) -> list[float]:
    """Times of the lost links in prefill's log."""
    return [line["at"] for line in it.log("prefill-0") if line["message"] == "link lost" and line["at"] >= since]


def in_a_transfer(it: Scene, name: str, slow: Weather = SLOW) -> tuple[Running, tuple[str, str]]:
    """A request whose slow transfer is under way, and the pair that it is between."""
    weather(it, CLEAR)
    # The router avoids a way for a while after a failure there. Each case begins when both are in use.
    before = moved(it)
    until(
        lambda: it.ask_all(unique("all ways", 4), 16, 2) and all(now > before[pair] for pair, now in moved(it).items()),
        "all ways are used again",
        40,
    )
    weather(it, slow)
    before = moved(it)
    request = it.begin(name)
    until(lambda: any(now > before[pair] + 10_000 for pair, now in moved(it).items()), f"{name}: bytes move")
    return request, max(before, key=lambda pair: moved(it)[pair] - before[pair])


def usual(it: Scene, count: int = 1, length: int = PROMPT, tokens: int = OUT) -> float:
    """Seconds that so many requests take now without a fault: a busy machine is no fault of the link."""
    weather(it, CLEAR)
    started = time.monotonic()
    it.ask_all(unique("usual", count), length, tokens)
    return time.monotonic() - started


def test_all_bytes_of_a_transfer_go_through_the_proxy(it: Scene) -> None:
    before = sum(moved(it).values())
    it.ask_all(unique("counted", 4))
    assert sum(moved(it).values()) - before >= 4 * PROMPT * WORKER_LAYOUT.token_bytes
    it.settle(3)


def test_a_reset_is_known_at_once_and_costs_no_attempt(it: Scene) -> None:
    took, whole = [], []
    for number in range(3):
        request, pair = in_a_transfer(it, f"reset {number} at {time.monotonic()}")
        others = [it.begin(name) for name in unique("beside", 2)]
        started = time.monotonic()
        it.link(*pair).reset()
        weather(it, CLEAR)
        until(lambda since=started: lost(it, since - 0.002), "the loss was noticed")
        took.append(lost(it, started - 0.002)[0] - started)
        assert [running.result().timeline.retries for running in (request, *others)] == [0] * 3
        whole.append(max(running.ended for running in (request, *others)) - started)
    it.settle(3)
    print(f"noticed after {', '.join(f'{seconds:.3f}' for seconds in took)} s")
    assert statistics.median(took) < RESET_SECONDS
    assert max(whole) < FRAME_SECONDS, "and the next link was dialled at once"


LASTING = [(name, False) for name in SILENCES] + [("black hole", True), ("held back", True)]
IN_TURN = (("black hole", False),)
"""Silences in `make test`, and whether they last."""


@pytest.mark.parametrize(
    ("name", "lasting"),
    [pytest.param(*case, marks=() if case in IN_TURN else pytest.mark.more) for case in LASTING],
    ids=lambda value: value if isinstance(value, str) else "for good" if value else "this connection",
)
def test_silence_on_a_link(it: Scene, name: str, lasting: bool) -> None:
    """The request whose frame is stuck is placed elsewhere. The others on the link continue over the next connection;
    if none can be made, they are placed elsewhere too."""
    limit = FRAME_SECONDS + SLACK_SECONDS + 2 * usual(it, COMPANY + 1)
    request, pair = in_a_transfer(it, f"{name} {lasting}")
    link = it.link(*pair)
    started = time.monotonic()
    link.set(*SILENCES[name])
    for other in moved(it).keys() - {pair}:
        it.link(*other).set(forward=CLEAR)
    if not lasting:
        link.set(CLEAR, CLEAR, now=False)
    others = [it.begin(other) for other in unique(f"beside {name}", COMPANY)]
    retries = [running.result().timeline.retries for running in (request, *others)]
    took = request.ended - started
    last = max(running.ended for running in others) - started
    print(f"{name}: it ended after {took:.2f} s, others after {last:.2f} s of {limit:.2f} s; retries {retries}")
    link.clear()
    assert max(retries) <= 1
    assert took < limit
    assert last < limit + (FRAME_SECONDS if lasting else 0)
    it.settle(4)


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.more)])
def test_a_worker_is_frozen_in_a_hand_off(it: Scene, role: str) -> None:
    """By SIGSTOP in mid-frame. Measured from the signal on: suspected, the supervisor takes it out of placement; given
    up, the router knows that the hand-off failed; dead, the supervisor has fenced that incarnation. Then it wakes."""
    with it.cluster.more("prefill") if role == "prefill" else nullcontext():
        freeze(it, role)


def freeze(it: Scene, role: str) -> None:
    it.restart("supervisor", **SILENCE)
    request, pair = in_a_transfer(it, f"frozen {role}", Weather(rate=60e3))
    frozen = pair[role == "decode"]
    it.signal(frozen, signal.SIGSTOP)
    stopped = time.monotonic()
    gone = MEMBER_STATE_SUSPECT, MEMBER_STATE_DEAD
    suspected = until(lambda: it.cluster.member(frozen).member.state in gone, "suspected")
    until(lambda: any(line["at"] > stopped for line in it.failures()), "the hand-off was given up")
    given_up = next(line["at"] for line in it.failures() if line["at"] > stopped) - stopped
    until(lambda: it.cluster.member(frozen).member.state == MEMBER_STATE_DEAD, "declared dead")
    dead = time.monotonic() - stopped
    weather(it, CLEAR)
    done = request.result()
    print(f"{frozen}: suspected {suspected:.2f} s, given up {given_up:.2f} s, dead {dead:.2f} s after the signal")
    assert done.timeline.retries == 1
    assert frozen not in (done.timeline.prefill_worker, done.timeline.decode_worker)
    it.settle(3, but=[frozen])
    it.signal(frozen, signal.SIGCONT)
    # Messages that the zombie has queued must not change the requests that run now.
    for number in range(4):
        it.ask_in_company(f"while {frozen} wakes {number}")
    wait_until(lambda: it.ended() == [frozen], "the fenced incarnation has ended")
    it.settle(3, but=[frozen])
    it.replace(frozen)
    assert suspected < DETECT_SECONDS
    assert given_up < DETECT_SECONDS + SLACK_SECONDS
    assert dead < DETECT_SECONDS + SLACK_SECONDS


def test_a_prompt_of_several_steps_of_the_default_size_is_handed_over(it: Scene) -> None:
    done = it.ask("long", length=2 * CPU_DEFAULTS.max_batch_tokens + 50)
    assert done.timeline.retries == 0
    assert done.timeline.transfer_bytes > 0


def test_a_megabyte_a_second_is_slow_and_no_error(it: Scene) -> None:
    weather(it, Weather(rate=1e6))
    done = it.ask_all(unique("slow", COMPANY))
    weather(it, CLEAR)
    assert [answer.timeline.retries for answer in done] == [0] * COMPANY
    assert sum(answer.timeline.transfer_seconds for answer in done) > PROMPT * WORKER_LAYOUT.token_bytes / 1e6
    it.settle(3)


@pytest.mark.more
def test_a_frame_too_large_for_half_a_megabyte_a_second_is_given_up(tmp_path: Path) -> None:
    """Four megabytes in one frame, for which a link has three seconds: it is placed elsewhere, and only once."""
    tokens = 4000
    with scene(
        tmp_path,
        losses=True,
        prefill=1,
        chaos=True,
        engine={"max_batch_tokens": 4096, "kv_memory_bytes": 8 * 2**20},
        transfer={"transport": "tcp", "frame_bytes": 2**22},
    ) as it:
        until(lambda: it.ask_all(unique("dial", 4), count=2) and all(moved(it).values()), "every pair has a link")
        limit = FRAME_SECONDS + SLACK_SECONDS + 2 * usual(it, 1, tokens, 4)
        weather(it, Weather(rate=5e5))
        before = moved(it)
        request = it.begin("large", tokens, 4)
        until(lambda: moved(it) != before, "it is under way")
        started = time.monotonic()
        (slow,) = [pair for pair, now in moved(it).items() if now > before[pair]]
        for other in before.keys() - {slow}:
            it.link(*other).set(forward=CLEAR)
        done = request.result()
        took = time.monotonic() - started
        assert done.timeline.transfer_bytes > 2 * FRAME_SECONDS * 5e5, "more than twice what the limit allows"
        assert done.timeline.retries == 1
        assert done.timeline.decode_worker != slow[1]
        assert took < limit
        it.settle(3)
