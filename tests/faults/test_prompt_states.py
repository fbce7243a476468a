"""Hidden states of prompts between processes: they are there for the first guess, wherever the request goes on.

A worker of these scenes guesses only behind a prompt of which it has hidden states, and ends if one of them is wrong.
"""

import signal
from collections.abc import Iterator

import pytest

from support.faults import OUT, PROMPT, Scene, oracle, over, prompt_of, scene
from support.hash_worker import FETCH_SECONDS, LAG, WORKER_LAYOUT
from support.processes import wait_until

BLOCK = WORKER_LAYOUT.block_size


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("states"), prefill=1, losses=True, **over("states")) as it:
        yield it


def test_the_first_request_of_a_pair_has_them(it: Scene) -> None:
    """Later requests have them too, at any length."""
    for name, length in (("first", PROMPT), ("second", PROMPT), ("short", 1), ("long", 1500)):
        done = it.ask(name, length)
        assert done.timeline.retries == 0
        assert done.timeline.proposed_tokens > 0, name
    it.settle(3)


def test_a_prompt_that_prefill_has_in_its_cache_has_those_of_its_end(it: Scene) -> None:
    prompt = prompt_of("cached", PROMPT)
    for cached in (0, PROMPT - PROMPT % BLOCK):
        done = it.client.complete(prompt, max_tokens=OUT, temperature=0.0, ignore_eos=True)
        assert list(done.token_ids) == oracle(prompt, OUT)
        assert done.usage.cached_tokens == cached
        assert done.timeline.proposed_tokens > 0


def test_a_stream_that_moves_to_another_decode_worker_has_them_there(it: Scene) -> None:
    """The states are those of tokens that prefill computes for the stream; tokens in prefill's cache have none."""
    request = it.begin("moves", count=200)
    wait_until(lambda: request.tokens >= 20, "it decodes")
    (serving,) = wait_until(lambda: [name for name in it.decodes if it.held(name)], "one decodes")
    it.signal(serving, signal.SIGKILL)
    done = request.result()
    assert done.timeline.proposed_tokens > 0
    it.settle(3, but=[serving])


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Workers that copy hidden states for a while after their step, as on a GPU."""
    chosen = over("states")
    variables = {**chosen.pop("variables"), LAG: 1, FETCH_SECONDS: 0.3}
    with scene(tmp_path_factory.mktemp("late"), prefill=1, variables=variables, **chosen) as it:
        yield it


def test_states_that_come_after_the_prompts_end_are_there_for_the_first_guess(late: Scene) -> None:
    for name, length in (("late", PROMPT), ("late and long", 100)):
        done = late.ask(name, length)
        assert done.timeline.retries == 0
        assert done.timeline.proposed_tokens > 0
    late.settle(3)


def test_a_cancel_before_the_states_have_come_frees_everything(late: Scene) -> None:
    """The prompt's blocks wait for them, and meanwhile the worker doesn't take itself for idle."""
    request = late.begin("cancelled", count=200)
    wait_until(lambda: request.tokens >= 1, "its first token has come")
    request.cancel()
    assert late.ask("after the cancel").timeline.retries == 0
    late.settle(3)
