"""Messages before they are parsed: what is refused by its outline; and prompts in the compact form of the router."""

import asyncio
import random
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.internal.v1.worker_pb2 import Submit
from kvrelay.router.request.prompt import Prompt
from kvrelay.router.request.wire import MAX_FIELDS, SMALL_BYTES, BadOutline, check_outline
from kvrelay.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, SamplingParams, TokenIds


def refused(request: GenerateRequest, numbers: int) -> bool:
    try:
        check_outline(request.SerializeToString(), GenerateRequest.DESCRIPTOR, numbers)
    except BadOutline:
        return True
    return False


def test_the_outline_tells_cheap_from_costly_messages() -> None:
    assert not refused(GenerateRequest(text="x" * 10**7), 0)
    assert not refused(GenerateRequest(token_ids=TokenIds(ids=[5] * SMALL_BYTES)), SMALL_BYTES)
    assert not refused(GenerateRequest(token_ids=TokenIds(ids=[2**32 - 1] * SMALL_BYTES)), SMALL_BYTES)
    assert refused(GenerateRequest(token_ids=TokenIds(ids=[5] * (6 * SMALL_BYTES))), SMALL_BYTES)
    long = ChatMessage(role="user", content="x" * SMALL_BYTES)
    assert not refused(GenerateRequest(messages=ChatMessages(messages=[long] * 100)), 0)
    assert refused(GenerateRequest(messages=ChatMessages(messages=[ChatMessage()] * SMALL_BYTES)), 0)
    assert refused(GenerateRequest(sampling=SamplingParams(stop=[""] * SMALL_BYTES)), 0)
    assert MAX_FIELDS < SMALL_BYTES / 2


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_no_bytes_make_the_outline_raise_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    request = GenerateRequest(request_id="r", sampling=SamplingParams(stop=["ä"], seed=1), text="x" * SMALL_BYTES)
    data = bytearray(request.SerializeToString())
    for _ in range(rng.randrange(1, 20)):
        data[rng.randrange(40) - rng.randrange(20)] = rng.randrange(256)
    with suppress(BadOutline):
        check_outline(bytes(data[: rng.randrange(SMALL_BYTES, len(data) + 1)]), GenerateRequest.DESCRIPTOR, 10)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.lists(st.integers(0, 2**32 - 1), max_size=5))
def test_a_packed_prompt_is_the_same_prompt(ids: list[int], generated: list[int]) -> None:
    whole = asyncio.run(Prompt.of(ids))
    for prompt in (whole, Prompt(ids), Prompt(ids[:3], ids[3:])):
        assert len(prompt) == len(ids)
        assert prompt.submit(generated) == Submit(token_ids=ids + generated)
    assert whole.nbytes <= 5 * len(ids) + 8
