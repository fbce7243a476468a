"""Chunks that are given to the hand-off when their step is launched, as on a GPU: no token comes from unwritten KV.

The hash runner with a lag of 1 writes a step's KV when its result is asked for, long after the launch.
"""

import signal
from collections.abc import Iterator

import pytest

from support.faults import ALL_TRANSPORTS, Scene, over, scene
from support.hash_worker import LAG, STEP_SECONDS
from support.processes import wait_until

FREE_SECONDS = 3.0
KILLS = {"prefill.after_chunk,chunk=1": 1, "sent,index=0": 1, "decode.after_frame,index=1": 1}
FLIPPED = "sent,index=1,request=flipped,attempt=1:corrupt(1)"


def name_of(place: str) -> str:
    return place.replace(",", " ").replace("=", " ")


@pytest.fixture(scope="module", params=ALL_TRANSPORTS)
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    rules = [f"{place},request={name_of(place)},attempt=1:kill" for place in KILLS]
    times = {LAG: 1, STEP_SECONDS: 0.005}
    with scene(
        tmp_path_factory.mktemp("chunks"), [*rules, FLIPPED], losses=True, variables=times, **over(request.param)
    ) as it:
        yield it


@pytest.mark.in_turn("length")
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_prompts_of_every_length_get_their_tokens(it: Scene, length: int) -> None:
    it.ask_all([f"{length} tokens, {number}" for number in range(6)], length=length, count=6)
    it.settle(FREE_SECONDS)


@pytest.mark.in_turn
def test_a_cancel_while_its_step_runs_frees_everything(it: Scene) -> None:
    running = [it.begin(f"cancelled {number}", 200, 20) for number in range(8)]
    kept = it.begin("kept", 200, 20)
    for request in running:
        request.cancel()
    kept.result()
    it.settle(FREE_SECONDS)


@pytest.mark.in_turn
def test_a_flipped_bit_costs_a_retry_and_no_token(it: Scene) -> None:
    assert it.ask_in_company("flipped", 6).timeline.retries == 1
    it.settle(FREE_SECONDS)


@pytest.mark.in_turn("place")
@pytest.mark.parametrize("place", KILLS)
def test_a_death_changes_no_token(it: Scene, place: str) -> None:
    completion = it.ask_in_company(name_of(place))
    (dead,) = wait_until(it.ended, "one worker has ended", seconds=5)
    it.settle(FREE_SECONDS, but=[dead])
    assert completion.timeline.retries == KILLS[place]
    assert it.cluster.processes[dead].popen.wait(1) == -signal.SIGKILL
    it.replace(dead)
