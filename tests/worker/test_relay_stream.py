"""The relay stream: a router gets each request's messages in order, however slowly it reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.internal.v1.worker_pb2 import Load, RelayResponse, RequestEvent
from kvrelay.worker.relay import stream as relay_stream
from kvrelay.worker.relay.events import PlainToken
from kvrelay.worker.relay.stream import RelayStream

pytestmark = pytest.mark.anyio

REQUESTS = 3


def contents(message: RelayResponse) -> list[tuple[int, int]]:
    """(slot, index) of all tokens in the order in which a router takes them."""
    plain = zip(message.slots, message.indices, message.token_ids, strict=True)
    events = ((int(event.request_id), event.first_index) for event in message.events)
    return [*((slot, index) for slot, index, _ in plain), *events]


@settings(max_examples=150)
@given(st.lists(st.one_of(st.tuples(st.integers(0, REQUESTS - 1), st.booleans()), st.none()), max_size=60))
async def test_each_requests_tokens_come_in_order_whatever_form_they_have(
    course: list[tuple[int, bool] | None],
) -> None:
    """A step of the course is a token of a request, by itself or in an event, or None: a message is written."""

    stream = RelayStream("router-0", Load)
    messages = stream.messages()
    sent = [0] * REQUESTS
    got: list[tuple[int, int]] = []
    for step in course:
        if step is None:
            if sum(sent) > len(got):
                got += contents(await anext(messages))
            continue
        slot, plain = step
        if plain:
            stream.push_token(slot, PlainToken((str(slot), 1), sent[slot], 7))
        else:
            stream.push(RequestEvent(request_id=str(slot), attempt=1, first_index=sent[slot], token_ids=[7]))
        sent[slot] += 1
    while len(got) < sum(sent):
        got += contents(await anext(messages))
    for slot in range(REQUESTS):
        assert [index for other, index in got if other == slot] == list(range(sent[slot]))


async def test_a_step_is_one_message_for_a_router_that_keeps_up() -> None:
    stream = RelayStream("router-0", Load)
    messages = stream.messages()
    for index in range(5):
        for slot in range(100):
            stream.push_token(slot, PlainToken((str(slot), 1), index, 7))
        assert len((await anext(messages)).token_ids) == 100
    stream.close()
    assert [message async for message in messages] == []


async def test_a_router_that_reads_nothing_is_given_up() -> None:
    stream = RelayStream("router-0", Load)
    for index in range(relay_stream.MAX_PENDING_EVENTS + 1):
        stream.push_token(0, PlainToken(("0", 1), index, 7))

    assert [message async for message in stream.messages()] == []
