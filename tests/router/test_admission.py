"""What a router takes at once, in calls and in bytes, and what it refuses before it parses it."""

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.internal.v1.worker_pb2 import Submit
from kvrelay.router.admission import CHARGE, PEER_SHARE, TOKEN_BYTES, Admission
from kvrelay.router.errors import Exhausted
from kvrelay.router.prompt import Prompt
from kvrelay.router.wire import MAX_FIELDS, SMALL_BYTES, BadOutline, check_outline
from kvrelay.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, SamplingParams, TokenIds

MAX_CALLS, MAX_BYTES = 5, 1000


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 300), st.booleans()), max_size=40))
def test_calls_and_bytes_stay_within_their_bounds_and_come_back(steps: list[tuple[str, int, int, bool]]) -> None:
    admission = Admission(MAX_CALLS, MAX_BYTES)
    open_ = []
    held = {"a": 0, "b": 0}
    for peer, size, later, ends in steps:
        call = admission.admit(peer, size)
        charge = CHARGE * size
        fits = (
            len(open_) < MAX_CALLS
            and sum(held.values()) + charge <= MAX_BYTES
            and held[peer] + charge <= MAX_BYTES // PEER_SHARE
        )
        if fits:
            ticket = call.__enter__()
            prompt = min(TOKEN_BYTES * size, later)
            ticket.hold(prompt)
            now = size + prompt
            held[peer] += now
            open_.append((call, peer, now))
        else:
            with pytest.raises(Exhausted):
                call.__enter__()
        if ends and open_:
            call, peer, now = open_.pop(0)
            call.__exit__(None, None, None)
            held[peer] -= now
        assert admission.calls == len(open_)
        assert admission.nbytes == sum(held.values()) <= MAX_BYTES
    for call, _, _ in open_:
        call.__exit__(None, None, None)
    assert admission.calls == admission.nbytes == 0
    assert not admission._by_peer


def test_the_completions_of_one_call_count_as_calls() -> None:
    admission = Admission(MAX_CALLS, MAX_BYTES)
    with admission.admit("a", 1) as ticket:
        with pytest.raises(Exhausted, match="max_requests"), ticket.more_calls(MAX_CALLS):
            pass
        with ticket.more_calls(MAX_CALLS - 1), pytest.raises(Exhausted, match="max_requests"):
            admission.admit("b", 1).__enter__()
    assert admission.calls == admission.nbytes == 0


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


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_bytes_make_the_outline_raise_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    request = GenerateRequest(request_id="r", sampling=SamplingParams(stop=["ä"], seed=1), text="x" * SMALL_BYTES)
    data = bytearray(request.SerializeToString())
    for _ in range(rng.randrange(1, 20)):
        data[rng.randrange(40) - rng.randrange(20)] = rng.randrange(256)
    with suppress(BadOutline):
        check_outline(bytes(data[: rng.randrange(SMALL_BYTES, len(data) + 1)]), GenerateRequest.DESCRIPTOR, 10)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.lists(st.integers(0, 2**32 - 1), max_size=5))
def test_a_packed_prompt_is_the_same_prompt(ids: list[int], generated: list[int]) -> None:
    whole = asyncio.run(Prompt.of(ids))
    for prompt in (whole, Prompt(ids), Prompt(ids[:3], ids[3:])):
        assert len(prompt) == len(ids)
        assert prompt.submit(generated) == Submit(token_ids=ids + generated)
    assert whole.nbytes <= 5 * len(ids) + 8
