"""Chunks and hidden states of prompts that are there only after their step was launched, as on a GPU.

Chunks are given to the hand-off at the launch; the hash runner with a lag of 1 writes their KV when the step's result
is asked for, long after it. No token comes from unwritten KV. Hidden states go with the KV: a worker here guesses only
behind a prompt of which it has hidden states, and ends if one of them is wrong.
"""

import signal
from collections.abc import Iterator

import pytest

from support.faults import ALL_TRANSPORTS, OUT, PROMPT, Scene, oracle, over, prompt_of, scene
from support.hash_worker import FETCH_SECONDS, LAG, STATES, STEP_SECONDS, WORKER_LAYOUT
from support.processes import wait_until

FREE_SECONDS = 3.0
BLOCK = WORKER_LAYOUT.block_size
KILLS = {"prefill.after_chunk,chunk=1": 1, "sent,index=0": 1, "decode.after_frame,index=1": 1}


@pytest.fixture(scope="module", params=[*ALL_TRANSPORTS, pytest.param("without a lag", marks=pytest.mark.more)])
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    kind = request.param if request.param != "without a lag" else "auto"
    times = {LAG: int(request.param == kind), STATES: 1, STEP_SECONDS: 0.005}
    options = over(kind)
    with scene(tmp_path_factory.mktemp("chunks"), losses=True, variables=times, **options) as it:
        yield it


@pytest.fixture
def it(launched: Scene) -> Iterator[Scene]:
    yield launched
    launched.heal()


@pytest.mark.parametrize("length", [1, 65, *(pytest.param(length, marks=pytest.mark.more) for length in (63, 64, 200))])
def test_prompts_of_every_length_get_their_tokens(it: Scene, length: int) -> None:
    it.ask_all([f"{length} tokens, {number}" for number in range(6)], length=length, count=6)
    it.settle(FREE_SECONDS)


def test_a_cancel_while_its_step_runs_frees_everything(it: Scene) -> None:
    running = [it.begin(f"cancelled {number}", 200, 20) for number in range(8)]
    kept = it.begin("kept", 200, 20)
    for request in running:
        request.cancel()
    kept.result()
    it.settle(FREE_SECONDS)


@pytest.mark.parametrize("place", KILLS)
@pytest.mark.some(1)
def test_a_death_changes_no_token(it: Scene, place: str) -> None:
    it.order(f"{place},request=dies,attempt=1:kill")
    completion = it.ask_in_company("dies")
    dead = it.lost()
    it.settle(FREE_SECONDS, but=[dead])
    assert completion.timeline.retries == KILLS[place]
    assert it.cluster.processes[dead].popen.wait(1) == -signal.SIGKILL


def test_hidden_states_are_there_for_the_first_guess(it: Scene) -> None:
    """Also where they come after the end of the prompt, and at any length. A worker takes some time to copy them."""
    for name, length, seconds in (
        ("late", PROMPT, 0.3),
        ("in time", PROMPT, 0.0),
        ("short", 1, 0.3),
        ("long", 1500, 0.0),
    ):
        it.order(**{FETCH_SECONDS: seconds})
        done = it.ask(name, length)
        assert done.timeline.retries == 0
        assert done.timeline.proposed_tokens > 0, name
    it.settle(3)


def test_a_prompt_that_prefill_has_in_its_cache_has_the_hidden_states_of_its_end(it: Scene) -> None:
    prompt = prompt_of("cached", PROMPT)
    for cached in (0, PROMPT - PROMPT % BLOCK):
        done = it.client.complete(prompt, max_tokens=OUT, temperature=0.0, ignore_eos=True)
        assert list(done.token_ids) == oracle(prompt, OUT)
        assert done.usage.cached_tokens == cached
        assert done.timeline.proposed_tokens > 0


def test_a_stream_that_moves_to_another_decode_worker_has_hidden_states_there(it: Scene) -> None:
    """The states are those of tokens that prefill computes for the stream; tokens in prefill's cache have none."""
    request, serving = it.decoding("moves")
    it.signal(serving, signal.SIGKILL)
    done = request.result()
    assert done.timeline.proposed_tokens > 0
    it.settle(3, but=[serving])


def test_a_cancel_before_the_hidden_states_have_come_frees_everything(it: Scene) -> None:
    """The prompt's blocks wait for them, and meanwhile the worker doesn't take itself for idle."""
    it.order(**{FETCH_SECONDS: 0.3})
    request = it.begin("cancelled", count=200)
    wait_until(lambda: request.tokens >= 1, "its first token has come")
    request.cancel()
    assert it.ask("after the cancel").timeline.retries == 0
    it.settle(3)
