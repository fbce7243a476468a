"""A worker that dies at any step of a hand-off costs time and no token, and no block stays held."""

import signal
from collections.abc import Iterator

import pytest

from support.faults import ALL_TRANSPORTS, Scene, over, scene
from support.processes import wait_until

FREE_SECONDS = 3.0
KILLS = {
    "prefill.before_offer": 1,
    "prefill.after_chunk,chunk=0": 1,
    "prefill.after_chunk,chunk=1": 1,
    "prefill.after_chunk,chunk=2": 1,
    "prefill.after_finish": 1,
    "sent,index=0": 1,
    "sent,index=3": 1,
    "prefill.after_ack": 0,
    "decode.after_reserve": 1,
    "decode.after_frame,index=0": 1,
    "decode.after_frame,index=3": 1,
    "decode.before_commit": 1,
}
"""Retries that a death costs, by its place: none once decode has all of the KV and the router has the first token. At
`sent` the prefill worker has announced the frame, and sent none of its bytes."""
EXITS = {"prefill.after_chunk,chunk=1": 1, "decode.after_frame,index=1": 1}


def rule(place: str, action: str) -> str:
    return f"{place},request={name_of(place, action)},attempt=1:{action}"


def name_of(place: str, action: str) -> str:
    return f"{action} {place}".replace(",", " ").replace("=", " ")


@pytest.fixture(
    scope="module",
    params=[*ALL_TRANSPORTS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "states"))],
)
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    rules = [rule(place, "kill") for place in KILLS] + [rule(place, "exit(3)") for place in EXITS]
    # The first token is on its way to the router when the acknowledgement comes; here it has the time to get there.
    rules.append(f"decode.before_commit,request={name_of('prefill.after_ack', 'kill')},attempt=1:sleep(0.3)")
    with scene(tmp_path_factory.mktemp("kills"), rules, losses=True, **over(request.param)) as it:
        yield it


DEATHS = [(place, "kill", retries) for place, retries in KILLS.items()]
DEATHS += [(place, "exit(3)", retries) for place, retries in EXITS.items()]


@pytest.mark.in_turn("death")
@pytest.mark.parametrize("death", DEATHS, ids=lambda death: name_of(*death[:2]))
def test_a_death_in_the_hand_off_changes_no_token(it: Scene, death: tuple[str, str, int]) -> None:
    place, action, retries = death
    try:
        completion = it.ask_in_company(name_of(place, action))
        (dead,) = wait_until(it.ended, "one worker has ended", seconds=5)
        it.settle(FREE_SECONDS, but=[dead])
        assert completion.timeline.retries == retries
        assert it.cluster.processes[dead].popen.wait(1) == (3 if action.startswith("exit") else -signal.SIGKILL)
    finally:
        # The next death finds all workers, whatever this one has shown.
        for name in it.ended():
            it.replace(name)


@pytest.mark.in_turn
def test_a_kill_of_decode_in_mid_stream_changes_no_token(it: Scene) -> None:
    request = it.begin("mid-stream", count=200)
    wait_until(lambda: request.tokens >= 5, "it decodes")
    (serving,) = wait_until(lambda: [name for name in it.decodes if it.held(name)], "one decodes")
    it.signal(serving, signal.SIGKILL)
    request.result()
    wait_until(lambda: it.ended() == [serving], "it has ended")
    it.settle(FREE_SECONDS, but=[serving])
    it.replace(serving)
