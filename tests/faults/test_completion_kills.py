"""A decode worker or the router dies under n completions of one prompt: each has the tokens that it would have had."""

import signal
from collections.abc import Callable, Iterator

import pytest

from kvrelay.client import Chunk, Completion
from kvrelay.client.messages import completions
from kvrelay.engine.request import SamplingParams
from support.faults import CLIENT_SECONDS, OUT, Scene, prompt_of, scene
from support.hash_runner import expected_tokens
from support.hash_worker import WORKER_LAYOUT
from support.processes import wait_until

COUNT = 6


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("completions"), losses=True, routers=2) as it:
        yield it


def test_a_kill_moves_the_completions_of_one_worker_and_leaves_the_others(it: Scene) -> None:
    def fewer() -> str:
        """The worker that holds fewer of them."""
        holding = wait_until(lambda: [name for name in it.decodes if it.held(name)], "they decode")
        return min(holding, key=it.held)

    killed, done = complete(it, "several", fewer)
    retries = [completion.timeline.retries for completion in done]
    print(f"{killed} was killed; retries {retries}")
    assert set(retries) <= {0, 1}
    assert 1 in retries
    assert all(completion.timeline.decode_worker != killed for completion in done if completion.timeline.retries)
    prompt = len(prompt_of("several"))
    assert [completion.usage.prompt_tokens for completion in done] == [prompt] + [0] * (COUNT - 1)
    wait_until(lambda: it.ended() == [killed], "it has ended")
    it.cluster.wait_idle(5, but=[killed])
    it.replace(killed)


def test_all_go_on_at_the_other_router(it: Scene) -> None:
    def theirs() -> str:
        """The router that has them. Heartbeats tell; an earlier one may still name the other."""
        return str(wait_until(lambda: sole(running(it)), "one router has them")[0])

    killed, done = complete(it, "several again", theirs)
    resumes = [completion.timeline.resumes for completion in done]
    print(f"{killed} was killed; resumes {resumes}")
    assert 1 in resumes
    it.cluster.wait_idle(5, but=[killed])


def complete(it: Scene, name: str, victim: Callable[[], str]) -> tuple[str, list[Completion]]:
    """Kills `victim()` once all completions have begun; its name, and the completions, each with its seed's tokens."""
    prompt, count = prompt_of(name), 6 * OUT
    chunks: list[Chunk] = []
    killed = ""
    options = {"max_tokens": count, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    with it.client.generate(prompt, n=COUNT, timeout=CLIENT_SECONDS, **options) as stream:  # type: ignore[arg-type]  # mixed values
        for chunk in stream:
            chunks.append(chunk)
            if not killed and {each.index for each in chunks} == set(range(COUNT)):
                killed = victim()
                it.signal(killed, signal.SIGKILL)
    done = completions(chunks, COUNT)
    for completion in done:
        sampling = SamplingParams(temperature=1.0, seed=completion.seed)
        assert list(completion.token_ids) == expected_tokens(prompt, count, WORKER_LAYOUT, sampling=sampling)
        assert completion.finish_reason == "length"
    assert len({completion.token_ids for completion in done}) == COUNT
    return killed, done


def running(it: Scene) -> list[str]:
    """The routers that have requests."""
    return [name for name in it.routers if it.cluster.member(name).load.requests.running]


def sole(names: list[str]) -> list[str]:
    """The name, if there is one only."""
    return names if len(names) == 1 else []
