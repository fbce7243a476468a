"""A network that resets, swallows, holds back or slows what a link carries.

All links run through proxies (`support.chaos`). Shared memory has no such faults: no network carries it.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chaos import CLEAR, HELD, SWALLOWED, Proxy, Weather
from support.faults import OUT, PROMPT, SLOW_GLOO, TRANSFER, Running, Scene, scene, until
from support.hash_worker import WORKER_LAYOUT

RESET_SECONDS = 0.1
COMPANY = 5
FRAME_SECONDS = 3.0
"""Seconds that a frame may take: the default of `transfer.frame_timeout_seconds`."""
SLACK_SECONDS = 0.5
SILENCES = {
    "black hole": (SWALLOWED, SWALLOWED),
    "nothing gets there": (SWALLOWED, CLEAR),
    "nothing comes back": (CLEAR, SWALLOWED),
    "held back": (HELD, HELD),
}


@pytest.fixture(scope="module", params=["tcp", SLOW_GLOO])
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One prefill worker and two decode workers, with the default limits."""
    transfer = {"transport": request.param, "frame_bytes": TRANSFER["frame_bytes"]}
    # Retries that a broken link causes are outside the router's budget, so the judge must not count them against it.
    with scene(tmp_path_factory.mktemp("links"), prefill=1, chaos=True, losses=True, transfer=transfer) as it:
        until(lambda: it.ask_all(unique("dial", 4), count=2) and all(moved(it).values()), "every pair has a link")
        yield it
        it.chaos.clear()


def unique(name: str, count: int) -> list[str]:
    return [f"{name} {number} at {time.monotonic():.3f}" for number in range(count)]


def moved(it: Scene) -> dict[str, int]:
    """Bytes that have gone to each decode worker."""
    return {decode: it.link("prefill-0", decode).passed for decode in it.decodes}


def lost(it: Scene, since: float) -> list[dict[str, object]]:
    """The lost links in prefill's log."""
    return [line for line in it.log("prefill-0") if line["message"] == "link lost" and line["at"] >= since]


def in_a_transfer(it: Scene, name: str) -> tuple[Running, Proxy]:
    """A request whose slow transfer is under way, and the link that carries it."""
    it.chaos.clear()
    # The router avoids a way for a while after a failure there. Each case begins when both are in use.
    before = moved(it)
    until(
        lambda: it.ask_all(unique("both ways", 4), 16, 2) and all(moved(it)[name] > before[name] for name in before),
        "both ways are used again",
        40,
    )
    for decode in it.decodes:
        it.link("prefill-0", decode).set(forward=Weather(rate=100e3))
    before = moved(it)
    request = it.begin(name)
    until(lambda: any(now > before[decode] + 10_000 for decode, now in moved(it).items()), f"{name}: bytes move")
    decode = max(it.decodes, key=lambda decode: moved(it)[decode] - before[decode])
    return request, it.link("prefill-0", decode)


def usual(it: Scene, count: int = 1, length: int = PROMPT, tokens: int = OUT) -> float:
    """Seconds that so many requests take now without a fault: a busy machine is no fault of the link."""
    it.chaos.clear()
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
    for number in range(5):
        request, link = in_a_transfer(it, f"reset {number} at {time.monotonic()}")
        others = [it.begin(name) for name in unique("beside", 2)]
        started = time.monotonic()
        link.reset()
        for decode in it.decodes:
            it.link("prefill-0", decode).set(forward=CLEAR)
        until(lambda since=started: lost(it, since - 0.002), "the loss was noticed", 3)
        took.append(float(lost(it, started - 0.002)[0]["at"]) - started)  # type: ignore[arg-type]  # of a log line
        assert [running.result().timeline.retries for running in (request, *others)] == [0] * 3
        whole.append(max(running.ended for running in (request, *others)) - started)
    it.settle(3)
    print(f"noticed after {', '.join(f'{seconds:.3f}' for seconds in took)} s")
    assert statistics.median(took) < RESET_SECONDS
    assert max(whole) < FRAME_SECONDS / 2, "and the next link was dialled at once"


@pytest.mark.parametrize(
    ("name", "lasting"),
    [(name, False) for name in SILENCES] + [("black hole", True), ("held back", True)],
    ids=lambda value: value if isinstance(value, str) else "for good" if value else "this connection",
)
def test_silence_on_a_link(it: Scene, name: str, lasting: bool) -> None:
    """The request whose frame is stuck is placed elsewhere. The others on the link continue over the next connection;
    if none can be made, they are placed elsewhere too."""
    limit = FRAME_SECONDS + SLACK_SECONDS + 2 * usual(it, COMPANY + 1)
    request, link = in_a_transfer(it, f"{name} {lasting}")
    started = time.monotonic()
    link.set(*SILENCES[name])
    for decode in it.decodes:
        if it.link("prefill-0", decode) is not link:
            it.link("prefill-0", decode).set(forward=CLEAR)
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


def test_a_megabyte_a_second_is_slow_and_no_error(it: Scene) -> None:
    for decode in it.decodes:
        it.link("prefill-0", decode).set(forward=Weather(rate=1e6))
    done = it.ask_all(unique("slow", COMPANY))
    it.chaos.clear()
    assert [answer.timeline.retries for answer in done] == [0] * COMPANY
    assert sum(answer.timeline.transfer_seconds for answer in done) > PROMPT * WORKER_LAYOUT.token_bytes / 1e6
    it.settle(3)


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
        for decode in it.decodes:
            it.link("prefill-0", decode).set(forward=Weather(rate=5e5))
        before = moved(it)
        request = it.begin("large", tokens, 4)
        until(lambda: moved(it) != before, "it is under way")
        started = time.monotonic()
        (slow,) = [decode for decode, now in moved(it).items() if now > before[decode]]
        for decode in it.decodes:
            if decode != slow:
                it.link("prefill-0", decode).set(forward=CLEAR)
        done = request.result()
        took = time.monotonic() - started
        assert done.timeline.transfer_bytes > 2 * FRAME_SECONDS * 5e5, "more than twice what the limit allows"
        assert done.timeline.retries == 1
        assert done.timeline.decode_worker != slow
        assert took < limit
        it.settle(3)
