"""Two workers' events, in any order between them, make one sequence without a gap or a duplicate."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.internal.v1.worker_pb2 import Failure, RequestEvent, RouterHello, Sampling, Submit, TransferReport, Urgency
from kvrelay.router.placing.worker_stream import Listener, WorkerStream
from kvrelay.router.request.prompt import Prompt
from kvrelay.router.request.validation import CheckedRequest
from kvrelay.router.session.attempt import Attempt
from kvrelay.router.trace import RequestTrace
from kvrelay.rpc.identity import WorkerId
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, TokenLogprobs
from support.router_fakes import length_if
from support.secrets import credentials

PROMPT = Prompt((5, 6, 7))


class ScriptedStream(WorkerStream):
    """A stream without a connection: keeps what was cancelled, and delivers the events that a test makes."""

    listener: Listener

    def __init__(self, name: str) -> None:
        super().__init__(WorkerId(name, "i"), "", credentials("router"), RouterHello(), lambda: None)
        self.cancelled: list[tuple[str, int]] = []

    def submit(self, submit: Submit, listener: Listener, *, cached_tokens: int = 0) -> None:
        self.listener = listener

    def on_event(self, event: RequestEvent) -> None:
        self.listener.on_event(self, event)

    def cancel(self, key: tuple[str, int]) -> None:
        self.cancelled.append(key)


def attempt_of(
    total: int, generated: int, logprobs: int | None = None
) -> tuple[Attempt, ScriptedStream, ScriptedStream]:
    sampling = Sampling(max_tokens=total, logprobs=logprobs, prompt_logprobs=logprobs)
    request = CheckedRequest("r", "r/1", PROMPT, sampling, (), "")
    prefill, decode = ScriptedStream("prefill-0"), ScriptedStream("decode-0")
    attempt = Attempt(request, RequestTrace(0.0, attempts=2), tuple(range(100, 100 + generated)), prefill, decode)
    attempt.submit(1.0, 1.0, Urgency())
    return attempt, prefill, decode


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, int, int]]]:
    """(max_tokens, generated before, events): an event is (worker, first index, end index)."""
    generated = draw(st.integers(0, 5))
    total = generated + draw(st.integers(2, 12))
    at = generated + 1
    decode: list[tuple[str, int, int]] = []
    while at < total:
        end = draw(st.integers(at + 1, total))
        back = draw(st.integers(max(0, generated - 1), at))  # some are sent again
        decode.append(("decode", back, end))
        at = end
    events = list(decode)
    events.insert(draw(st.integers(0, len(events))), ("prefill", generated, generated + 1))
    return total, generated, events


@settings(max_examples=120)
@given(interleavings(), st.booleans(), st.data())
async def test_every_index_comes_once_and_in_order(
    case: tuple[int, int, list[tuple[str, int, int]]], scored: bool, data: st.DataObject
) -> None:
    """The tokens come in events or by themselves."""
    total, generated, events = case

    attempt, prefill, decode = attempt_of(total, generated, logprobs=0 if scored else None)
    taken: list[int] = []
    scores: list[TokenLogprobs] = []
    prompt_scores: list[Sequence[TokenLogprobs]] = []
    finish = FINISH_REASON_UNSPECIFIED
    if scored and not generated:
        for place in range(1, len(PROMPT)):
            score = TokenLogprobs(rank=place)
            prefill.on_event(RequestEvent(prompt_logprobs=[score], prompt_logprobs_first=place))
    for worker, first, end in events:
        last = worker == "decode" and end == total
        stream = prefill if worker == "prefill" else decode
        if not (scored or last) and data.draw(st.booleans()):
            for index in range(first, end):
                stream.listener.on_token(stream, index, 100 + index, 0.0)
        else:
            event = RequestEvent(
                first_index=first,
                token_ids=[100 + index for index in range(first, end)],
                logprobs=[TokenLogprobs(rank=1 + index) for index in range(first, end) if scored],
                finish_reason=length_if(last),
            )
            stream.on_event(event)
        if data.draw(st.booleans()):
            tokens, finish, logprobs, prompt_logprobs = attempt.tokens.take()
            taken, scores, prompt_scores = taken + tokens, scores + logprobs, prompt_scores + prompt_logprobs
            assert not finish or len(taken) == total - generated
    tokens, ended, logprobs, prompt_logprobs = attempt.tokens.take()
    taken, scores, prompt_scores = taken + tokens, scores + logprobs, prompt_scores + prompt_logprobs
    assert [score.rank for score in scores] == [1 + index for index in range(generated, total) if scored]
    # A client that has tokens has the prompt's log-probabilities.
    assert [score.rank for part in prompt_scores for score in part] == (
        [] if generated or not scored else list(range(1, len(PROMPT)))
    )
    assert taken == [100 + index for index in range(generated, total)]
    assert FINISH_REASON_LENGTH in (finish, ended)
    assert attempt.failure is None
    prefill.on_event(RequestEvent(transfer=TransferReport(transfer_bytes=1)))
    assert not attempt.transferring
    attempt.close()
    assert prefill.outstanding_tokens == decode.outstanding_tokens == 0
    assert not prefill.cancelled
    assert not decode.cancelled


@settings(max_examples=120)
@given(interleavings(), st.data())
async def test_an_unfinished_attempt_is_cancelled_on_its_workers_and_claims_no_tokens(
    case: tuple[int, int, list[tuple[str, int, int]]], data: st.DataObject
) -> None:
    total, generated, events = case

    attempt, prefill, decode = attempt_of(total, generated)
    streams = {"prefill": prefill, "decode": decode}
    over: set[str] = set()
    for worker, first, end in events[: data.draw(st.integers(0, len(events)))]:
        last = worker == "decode" and end == total
        tokens = [100 + index for index in range(first, end)]
        finish = length_if(last)
        streams[worker].on_event(RequestEvent(first_index=first, token_ids=tokens, finish_reason=finish))
        over |= {worker} if last else set()
    for worker in data.draw(st.lists(st.sampled_from(["prefill", "decode"]), unique=True)):
        if data.draw(st.booleans()):
            streams[worker].on_event(RequestEvent(failure=Failure(code=Failure.CODE_RETRY)))
        else:
            streams[worker].lost = "killed"
            streams[worker].listener.on_lost(streams[worker])
        over.add(worker)
    attempt.close()
    attempt.close()
    for worker, stream in streams.items():
        assert len(stream.cancelled) == (worker not in over)
        assert stream.outstanding_tokens == 0
