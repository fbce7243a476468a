"""Log-probabilities through the death of a worker: each comes once, and is what an undisturbed run gives."""

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvrelay.client import Chunk, Client, Completion
from kvrelay.client.messages import chunk, completion
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.drawn import BIAS, PENALTIES
from support.faults import CHUNK, Scene, prompt_of, scene
from support.processes import wait_until

OPTIONS: dict[str, Any] = {"seed": 11, "ignore_eos": True, "logprobs": 2, **PENALTIES, "logit_bias": BIAS}
IN_PREFILL = "in prefill"


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    rule = f"prefill.after_chunk,chunk=1,request={IN_PREFILL},attempt=1:kill"
    with scene(tmp_path_factory.mktemp("logprobs"), [rule], losses=True) as it:
        yield it


def test_a_kill_of_decode_in_mid_stream(it: Scene) -> None:
    prompt = prompt_of("logprobs")
    with Client(it.cluster.router, timeout=60) as client:
        undisturbed = client.complete(prompt, max_tokens=200, prompt_logprobs=1, **OPTIONS)
        assert len(undisturbed.prompt_logprobs) == len(prompt) - 1
        stream = client.generate(prompt, max_tokens=200, prompt_logprobs=1, **OPTIONS)
        chunks: list[Chunk] = list(itertools.islice(stream, 5))
        (serving,) = wait_until(lambda: [name for name in it.decodes if it.held(name)], "one decodes")
        it.signal(serving, signal.SIGKILL)
        chunks += stream
    assert chunks[-1].timeline is not None
    assert chunks[-1].timeline.retries == 1
    assert [token for chunk in chunks for token in chunk.token_ids] == list(undisturbed.token_ids)
    assert [score for chunk in chunks for score in chunk.logprobs] == list(undisturbed.logprobs)
    assert [score for chunk in chunks for score in chunk.prompt_logprobs] == list(undisturbed.prompt_logprobs)
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    it.replace(serving)


def test_a_kill_of_prefill_between_two_chunks(it: Scene) -> None:
    prompt = prompt_of("chunks", 3 * CHUNK)
    with Client(it.cluster.router, timeout=60) as client:
        undisturbed = client.complete(prompt, max_tokens=5, prompt_logprobs=0, **OPTIONS)
        done = client.complete(prompt, max_tokens=5, prompt_logprobs=0, request_id=IN_PREFILL, **OPTIONS)
    assert done.timeline.retries == 1
    assert done.prompt_logprobs == undisturbed.prompt_logprobs
    assert done.logprobs == undisturbed.logprobs
    (dead,) = wait_until(it.ended, "one worker has ended", seconds=5)
    it.cluster.wait_idle(but=[dead])


def test_a_call_that_continues_a_lost_one_sends_what_its_client_lacks(it: Scene) -> None:
    prompt = prompt_of("continued")
    sampling = pb.SamplingParams(max_tokens=12, prompt_logprobs=1, **OPTIONS)

    def call(number: int, have: tuple[int, ...]) -> Completion:
        resume = pb.Resume(key=b"a key of 16 bytes", call=number, token_ids=have)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling, resume=resume)
        with grpc.insecure_channel(it.cluster.router) as channel:
            return completion(
                [chunk(message) for message in InferenceServiceStub(channel).Generate(request, timeout=60)]
            )

    first = call(1, ())
    later = call(2, first.token_ids[:5])
    assert first.prompt_logprobs
    assert not later.prompt_logprobs
    assert (later.token_ids, later.logprobs) == (first.token_ids[5:], first.logprobs[5:])
