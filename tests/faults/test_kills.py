"""A worker that dies at any step of a request costs time and no token, and no block stays held."""

import itertools
import signal
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvrelay.client import Chunk, Completion
from kvrelay.client.messages import chunk, completion, completions
from kvrelay.engine.request import SamplingParams
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.faults import CHUNK, CLIENT_SECONDS, OUT, Scene, prompt_of
from support.hash_runner import expected_tokens
from support.hash_worker import STEP_SECONDS, WORKER_LAYOUT
from support.history import BIAS, PENALTIES
from support.processes import wait_until

FREE_SECONDS = 3.0
ENDED_SECONDS = 5.0
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
ONCE = ("prefill.after_chunk,chunk=1", "prefill.after_ack", "decode.before_commit")
"""Places of the kills in `make test`."""
DEATHS = [
    pytest.param(place, action, retries, marks=() if action == "kill" and place in ONCE else pytest.mark.more)
    for action, places in (("kill", KILLS), ("exit(3)", EXITS))
    for place, retries in places.items()
]
OPTIONS: dict[str, Any] = {"seed": 11, "ignore_eos": True, "logprobs": 2, **PENALTIES, "logit_bias": BIAS}
COUNT = 6
"""Completions of one prompt."""


@pytest.mark.also_over(more=["tcp"], slow=["gloo", "groups", "int8", "states", "ranks", "predicted"])
@pytest.mark.parametrize(("place", "action", "retries"), DEATHS)
def test_a_death_in_the_hand_off_changes_no_token(it: Scene, place: str, action: str, retries: int) -> None:
    # The first token is on its way to the router when the acknowledgement comes; here it has the time to get there.
    late = ["decode.before_commit,request=dies,attempt=1:sleep(0.3)"] if place == "prefill.after_ack" else []
    it.order(f"{place},request=dies,attempt=1:{action}", *late)
    done = it.ask_in_company("dies")
    dead = it.lost()
    it.settle(FREE_SECONDS, but=[dead])
    assert done.timeline.retries == retries
    assert it.cluster.processes[dead].popen.wait(1) == (3 if action.startswith("exit") else -signal.SIGKILL)
    it.replace(dead)


@pytest.mark.also_over(more=["tcp", "groups", "ranks", "predicted"], slow=["gloo", "int8", "states"])
def test_a_kill_of_decode_in_mid_stream_changes_no_token(it: Scene) -> None:
    request, serving = it.decoding("mid-stream")
    it.signal(serving, signal.SIGKILL)
    request.result()
    wait_until(lambda: it.ended() == [serving], "it has ended")
    it.settle(FREE_SECONDS, but=[serving])


@pytest.mark.parametrize(
    "place", ["decode.after_commit", pytest.param("prefill.after_chunk,chunk=1", marks=pytest.mark.more)]
)
def test_an_engine_that_raises_ends_its_process(it: Scene, place: str) -> None:
    """Decode's pools are so small that offers wait: their reservations fail with the engine thread, and nothing keeps
    the process alive."""
    if place.startswith("decode"):
        _, config, _ = it.cluster.started["decode-0"]
        it.restart(*it.decodes, engine={**config["engine"], "kv_memory_bytes": 2**20})
    it.order(f"{place},request=trigger,attempt=1:raise")
    names = [*(f"beside {number}" for number in range(12)), "trigger"]
    it.ask_all(names, at_once=len(names))
    dead = it.lost(ENDED_SECONDS)
    assert dead in (it.decodes if place.startswith("decode") else it.prefills)
    it.settle(FREE_SECONDS, but=[dead])


# Several completions of one prompt.


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


def test_all_go_on_at_the_other_router(it: Scene) -> None:
    def running() -> dict[str, int]:
        return {name: it.cluster.member(name).load.requests.running for name in it.routers}

    def theirs() -> str:
        """The router that has them all. A heartbeat may still tell of earlier requests, at the other one."""
        return wait_until(lambda: [name for name, count in running().items() if count == COUNT], "one has them")[0]

    wait_until(lambda: not any(running().values()), "heartbeats tell of no earlier request")
    killed, done = complete(it, "several again", theirs)
    resumes = [completion.timeline.resumes for completion in done]
    print(f"{killed} was killed; resumes {resumes}")
    assert 1 in resumes
    it.cluster.wait_idle(5, but=[killed])


def complete(it: Scene, name: str, victim: Callable[[], str]) -> tuple[str, list[Completion]]:
    """Kills `victim()` once all completions have begun; its name, and the completions, each with its seed's tokens.
    Steps are slow until then, so that no completion has ended when a heartbeat tells who has them."""
    it.order(**{STEP_SECONDS: 0.02})
    prompt, count = prompt_of(name), 6 * OUT
    chunks: list[Chunk] = []
    killed = ""
    options = {"max_tokens": count, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    with it.client.generate(prompt, n=COUNT, timeout=CLIENT_SECONDS, **options) as stream:  # type: ignore[arg-type]  # mixed values
        for received in stream:
            chunks.append(received)
            if not killed and {each.index for each in chunks} == set(range(COUNT)):
                killed = victim()
                it.signal(killed, signal.SIGKILL)
                it.order()
    done = completions(chunks, COUNT)
    for each in done:
        sampling = SamplingParams(temperature=1.0, seed=each.seed)
        assert list(each.token_ids) == expected_tokens(prompt, count, WORKER_LAYOUT, sampling=sampling)
        assert each.finish_reason == "length"
    assert len({each.token_ids for each in done}) == COUNT
    return killed, done


# Log-probabilities: each comes once, and is what an undisturbed run gives.


def test_log_probabilities_through_a_kill_of_decode_in_mid_stream(it: Scene) -> None:
    prompt = prompt_of("logprobs")
    asked: dict[str, Any] = {"max_tokens": 200, "prompt_logprobs": 1, "timeout": CLIENT_SECONDS, **OPTIONS}
    undisturbed = it.client.complete(prompt, **asked)
    assert len(undisturbed.prompt_logprobs) == len(prompt) - 1
    stream = it.client.generate(prompt, **asked)
    chunks: list[Chunk] = list(itertools.islice(stream, 5))
    it.signal(it.serving(), signal.SIGKILL)
    chunks += stream
    assert chunks[-1].timeline is not None
    assert chunks[-1].timeline.retries == 1
    assert [token for chunk in chunks for token in chunk.token_ids] == list(undisturbed.token_ids)
    assert [score for chunk in chunks for score in chunk.logprobs] == list(undisturbed.logprobs)
    assert [score for chunk in chunks for score in chunk.prompt_logprobs] == list(undisturbed.prompt_logprobs)
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)


def test_log_probabilities_through_a_kill_of_prefill_between_two_chunks(it: Scene) -> None:
    it.order("prefill.after_chunk,chunk=1,request=in prefill,attempt=1:kill")
    prompt = prompt_of("chunks", 3 * CHUNK)
    asked: dict[str, Any] = {"max_tokens": 5, "prompt_logprobs": 0, "timeout": CLIENT_SECONDS, **OPTIONS}
    undisturbed = it.client.complete(prompt, **asked)
    done = it.client.complete(prompt, request_id="in prefill", **asked)
    assert done.timeline.retries == 1
    assert done.prompt_logprobs == undisturbed.prompt_logprobs
    assert done.logprobs == undisturbed.logprobs
    dead = it.lost()
    it.cluster.wait_idle(but=[dead])


def test_a_call_that_continues_a_lost_one_sends_the_log_probabilities_that_its_client_lacks(it: Scene) -> None:
    prompt = prompt_of("continued")
    sampling = pb.SamplingParams(max_tokens=12, prompt_logprobs=1, **OPTIONS)

    def call(number: int, have: tuple[int, ...]) -> Completion:
        resume = pb.Resume(key=b"a key of 16 bytes", call=number, token_ids=have)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling, resume=resume)
        with grpc.insecure_channel(it.cluster.addresses["router-0"]) as channel:
            return completion(
                [chunk(message) for message in InferenceServiceStub(channel).Generate(request, timeout=60)]
            )

    first = call(1, ())
    later = call(2, first.token_ids[:5])
    assert first.prompt_logprobs
    assert not later.prompt_logprobs
    assert (later.token_ids, later.logprobs) == (first.token_ids[5:], first.logprobs[5:])
