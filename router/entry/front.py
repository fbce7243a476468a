"""The work around a request that all faces share, whatever their transport is: the way from a caller to the sessions.

    face     reads the caller's identity and the size of its request, then, inside of `Front.call`, the request itself
    Front    refuses while draining, authenticates, admits
    Call     checks, runs one session per completion, hands their messages to the face, notes how each ended

A face turns the one kind of exception that is left, `RequestError`, into its own kind of answer.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from kvrelay.internal.v1.worker_pb2 import ModelInfo
from kvrelay.router.addresses import Addresses
from kvrelay.router.config import DEFAULT_CLASS, RouterOptions
from kvrelay.router.entry.admission import Admission, Place, Ticket
from kvrelay.router.entry.callers import Callers, Grant, Identity, claim_of
from kvrelay.router.entry.limits import KeyLimits, Meter
from kvrelay.router.errors import (
    DeadlineExceeded,
    Exhausted,
    InternalError,
    QueueOverflow,
    RequestError,
    Unavailable,
)
from kvrelay.router.records.requests import Requests
from kvrelay.router.records.spans import RequestFacts, SpanExport
from kvrelay.router.records.traffic import TrafficMeter
from kvrelay.router.request.reading import Asking, PackedRequest, Plan, Reading
from kvrelay.router.request.validation import CheckedRequest, check, completions
from kvrelay.router.session.dispatch import Dispatch
from kvrelay.router.session.output import FirstSink, Sink
from kvrelay.router.session.session import Session
from kvrelay.router.trace import Outcome, RequestTrace
from kvrelay.rpc.tracing import TraceContext
from kvrelay.v1.inference_pb2 import FinishReason, GenerateRequest

logger = logging.getLogger(__name__)

ENDED_AT_ONCE = 2
"""Completions of a call that end together when one of them has failed, or the client is gone: each takes the event loop
for some tenths of a millisecond."""
END_SECONDS = 1.0
"""Seconds for calls to end on their workers when the router is to end."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a call."""

    identity: Identity
    host: str
    """The client's address, as limits by address count it."""
    context: TraceContext = field(default_factory=TraceContext.new)
    """Context of the trace that the client has begun; else of a new trace."""


class Front:
    """The state that all faces of a router share. Nothing that a client sends ends the router."""

    def __init__(
        self,
        dispatch: Dispatch,
        callers: Callers,
        reading: Reading,
        traffic: TrafficMeter,
        spans: SpanExport | None = None,
    ) -> None:
        self.tokenizer = reading.tokenizer
        self.reading = reading
        self.requests = Requests()
        self.traffic = traffic
        self.dispatch = dispatch
        self.callers = callers
        self._spans = spans
        self.limits = KeyLimits(dispatch.clock)
        self.addresses = Addresses(self.config.trusted_proxies)
        self._admission = Admission(self.config.max_requests, self.config.max_queued_bytes)
        self._calls: set[asyncio.Task[Any]] = set()
        self.draining = False
        """Whether the router is to end."""
        self.ending = False

    @property
    def config(self) -> RouterOptions:
        return self.dispatch.config

    @property
    def running(self) -> int:
        """Completions and other calls that were admitted and have not ended."""
        return self._admission.calls

    @property
    def ready(self) -> bool:
        """Whether a request that is sent now finds workers."""
        return not self.draining and self.dispatch.placing.registry.complete

    @property
    def model(self) -> ModelInfo:
        """
        Raises:
            Unavailable: no worker has told it yet.
        """
        model = self.dispatch.placing.registry.model
        if model is None:
            raise Unavailable("no worker is ready yet")
        return model

    def tenant(self, caller: Caller) -> str:
        """The tenant of a caller whose request needs no place, because it is answered at once.

        Raises:
            Unauthenticated: it has not shown who it is.
        """
        return self.callers.grant(caller.identity).tenant

    def holder(self, caller: Caller) -> str:
        """The holder that the caller counts as for all limits: its tenant, or its address where nobody is
        authenticated.

        Raises:
            Unauthenticated: it has not shown who it is.
        """
        grant = self.callers.grant(caller.identity)
        return f"tenant {grant.tenant}" if self.callers.authenticated else caller.host

    async def stop(self, grace: float) -> None:
        """Refuses new calls, gives the running ones `grace` seconds, then ends them with Unavailable."""
        self.draining = True
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)
        self.ending = True
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=END_SECONDS)

    def asking(self, kind: str = "", tenant: str = "", name: str = "", session: str = "") -> Asking:
        """The facts, besides its bytes, that are needed to read a request.

        Args:
            kind: name of its reader.
            tenant: the caller's tenant.
            name: name of the request, unless its body has one.
            session: session key in place of the request's own.
        """
        return Asking(kind, tenant, self.dispatch.placing.registry.model, self.config.served_model_name, name, session)

    @contextmanager
    def call(self, caller: Caller, size: int, deadline: float = math.inf) -> Iterator["Call"]:
        """Admits one call, which the current task serves in the body of a `with`.

        Args:
            size: of the request as it came, in bytes.
            deadline: the client's, on the monotonic clock.

        Raises:
            RequestError: the call ended without an answer; also in place of any other exception.
        """
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._calls.add(task)
        ticket: Ticket | None = None
        try:
            if self.draining:
                raise self._shutting_down()
            grant = self.callers.grant(caller.identity)
            admit = self._admission.admit(self.holder(caller), size, task.cancel, grant.key, grant.limits.concurrent)
            with admit as ticket:
                yield Call(self, grant, ticket, deadline, caller.context)
        except RequestError:
            raise
        except asyncio.CancelledError:
            # `stop` has cancelled this task, or the call gave way, unless another cancellation came as well.
            if ticket is not None and ticket.displaced and not task.uncancel():
                text = "the request gave way to another client's; the router's max_requests, or max_queued_bytes, is"
                raise Exhausted(f"{text} used up, and this client has most of it") from None
            if self.ending and not task.uncancel():
                raise self._shutting_down() from None
            raise
        except Exception:
            logger.exception("call failed because of a defect")
            raise InternalError("a defect in the router") from None
        finally:
            self._calls.discard(task)

    @contextmanager
    def generation(self, caller: Caller, size: int, deadline: float = math.inf) -> Iterator["Call"]:
        """The same as `call`, for a call that generates: it is noted in log, metrics and traces even if it ends before
        its first completion."""
        received = self.dispatch.clock()
        call: Call | None = None
        ended: list[RequestTrace] = []
        try:
            with self.call(caller, size, deadline) as call:
                ended = call.ended
                yield call
        except RequestError as error:
            if not ended:
                ended.append(RequestTrace(received, context=caller.context, clock=self.dispatch.clock))
                self.note_end(ended[0], error.outcome, str(error))
            raise
        finally:
            if self._spans is not None:
                facts = None if call is None else call.facts
                self._spans.add(caller.context, received, facts, ended)

    def note_end(self, trace: RequestTrace, outcome: Outcome, failure: str = "") -> None:
        """Notes how a completion ended, as `RequestTrace.end` says; in log and metrics, too."""
        trace.end(outcome, failure)
        self.requests.end(trace)
        self.traffic.end(trace)
        fields = trace.log_fields | {
            "outcome": outcome,
            "prompt_tokens": trace.usage().prompt_tokens,
            "completion_tokens": trace.completion_tokens,
            "seconds": round(trace.total_seconds, 4),
        }
        if failure:
            fields["reason"] = failure
        logger.info("request ended", extra=fields)
        self.dispatch.metrics.ended(trace)

    def _shutting_down(self) -> Unavailable:
        return Unavailable(f"{self.dispatch.config.name} is shutting down")


class Call:
    """One admitted call."""

    def __init__(self, front: Front, grant: Grant, ticket: Ticket, deadline: float, context: TraceContext) -> None:
        self.ticket = ticket
        self.ended: list[RequestTrace] = []
        """The completions that have ended, in that order."""
        self.chat = False
        """Whether the prompt was made of a chat's messages."""
        self.facts: RequestFacts | None = None
        """Model and options that the call asked for; None until they are known."""
        self._context = context
        self._front = front
        self._grant = grant
        self._deadline = deadline
        self._clock = front.dispatch.clock
        self._received = self._clock()
        self._first_token_seconds = front.config.first_token_timeout_seconds
        """Most seconds from receipt to a first token; those of the call's class, once that is known."""

    async def read(self, kind: str, data: bytes, name: str = "", session: str = "") -> Plan | bytes:
        """The plan of what the call's request generates; or the answer, if nothing has to be generated.

        Args:
            kind: name of its reader.
            name: name of the request, unless its body has one.
            session: session key in place of the request's own.

        Raises:
            RequestError: it is wrong, or can't be read, or has waited too long for others to be read.
        """
        front = self._front
        asking = front.asking(kind, self._grant.tenant, name, session)
        async with self._in_time(self._first_token_seconds):
            found = await front.reading.read(data, asking, self.ticket.holder)
        if isinstance(found, Plan):
            service = front.dispatch.services.get(found.slo_class or DEFAULT_CLASS)
            if service is not None:  # `generate` refuses other names
                self._first_token_seconds = service.first_token_timeout_seconds
        return found

    async def generate(
        self,
        request: GenerateRequest | PackedRequest,
        sink: Sink,
        begin: Callable[[CheckedRequest], object] | None = None,
        shown: frozenset[int] = frozenset(),
        place: Place | None = None,
    ) -> None:
        """Runs one request to its end.

        Args:
            request: as it was read; the caller should keep no reference to it.
            sink: takes each message; one at a time for each completion.
            begin: called before the first message with the first completion's checked request.
            shown: special tokens whose names are part of the text.
            place: for its first completion, of a call with several requests; its others wait for theirs.

        Raises:
            RequestError: it ended without all of its completions.
        """
        place = place or await self.place()
        await self._turn()
        checked: CheckedRequest | None = None
        if isinstance(request, PackedRequest):
            request, checked = request.open()
        trace = RequestTrace(self._received, wire_id=request.request_id, context=self._context, clock=self._clock)
        front, grant = self._front, self._grant
        meter = front.limits.request(grant.key, grant.limits)
        trace.tenant = grant.tenant
        async with self._noting_failure(trace):
            asking = front.asking(tenant=grant.tenant)
            asking.check_model(request.model)
            front.callers.check_tenant(request.tenant, grant.tenant)
            holder, services = self.ticket.holder, front.dispatch.services
            claim = claim_of(request.slo_class, request.priority, grant, holder, services, self._received)
            if checked is None:
                checked = await check(request, grant.tenant, asking.model, front.tokenizer, front.reading.defaults)
            trace.service = claim.service.name
            seconds = claim.service.first_token_timeout_seconds
            checked = replace(checked, claim=claim, first_token_seconds=seconds, shown=shown)
            _describe(checked, trace)
            chat = self.chat or request.HasField("messages")
            self.facts = RequestFacts(asking.served_names[0], chat, checked.sampling, request.n or 1)
            meter.prompt(len(checked.prompt))
            if begin is not None:
                begin(checked)
        self.ticket.hold(checked.prompt.nbytes)
        count = request.n or 1
        del request  # it is several times as large as the packed prompt, and the session may wait long
        if count == 1:
            await self._complete(checked, trace, sink, meter, place)
        else:
            await self._complete_all(completions(checked, count), trace, sink, meter, place)

    async def place(self) -> Place:
        """A place for a completion, as soon as the call has one for it.

        Raises:
            DeadlineExceeded: that took longer than its first token may take.
        """
        async with self._in_time(self._first_token_seconds):
            return await self.ticket.place()

    async def _turn(self) -> None:
        """Returns when the event loop has time for the call: to check a prompt and begin a completion takes about a
        millisecond, and so does to end one."""
        await self._front.dispatch.turns.take(self.ticket.holder)

    @asynccontextmanager
    async def _in_time(self, seconds: float) -> AsyncIterator[None]:
        """Limits a wait for others of the client: it ends so many seconds from the receipt of the call.

        Raises:
            DeadlineExceeded: it took longer.
        """
        try:
            async with asyncio.timeout(min(self._received + seconds, self._deadline) - self._clock()):
                yield
        except TimeoutError:
            raise DeadlineExceeded("the request waited too long for others of its client to end") from None

    async def _complete_all(
        self, requests: list[CheckedRequest], trace: RequestTrace, sink: Sink, meter: Meter, place: Place
    ) -> None:
        """Runs the first completion, and the others from the moment on when both of its workers have the prompt's
        KV in their prefix caches: from its second token on, which decode has generated, or at its end."""
        cached = asyncio.Event()

        async def first() -> None:
            await self._complete(requests[0], trace, FirstSink(sink, trace, cached), meter, place)
            cached.set()

        async def later(request: CheckedRequest, place: Place) -> None:
            service, context = request.claim.service.name, self._context
            trace = RequestTrace(self._received, service=service, context=context, clock=self._clock)
            _describe(request, trace)
            await self._complete(request, trace, sink, meter, place)

        async def all_() -> AsyncIterator[Coroutine[Any, Any, None]]:
            yield first()
            await cached.wait()
            for request in requests[1:]:
                place = await self.place()
                await self._turn()
                yield later(request, place)

        await together(all_())

    async def _complete(
        self, request: CheckedRequest, trace: RequestTrace, sink: Sink, meter: Meter, place: Place
    ) -> None:
        """Runs a session; again if it had to give way before it began, and its call goes on."""

        def begun() -> bool:
            return trace.submitted is not None or trace.resumed_tokens > 0

        async with self._counted(trace, meter, place):
            while True:
                alone = len(self.ticket.places) == 1 and not self.ticket.begun
                session = Session(request, self._front.dispatch, trace, sink, self._deadline, refusable=alone)
                try:
                    async with asyncio.timeout(None) as scope:
                        with place.work(scope, begun):
                            finish_reason = await session.run()
                    break
                except TimeoutError:
                    if not scope.expired():
                        raise
                except QueueOverflow:
                    if begun() or (len(self.ticket.places) == 1 and not self.ticket.begun):
                        raise
                finally:
                    del scope  # it has a reference to this task, whose exception has one to this frame
                async with self._in_time(request.first_token_seconds):
                    await self.ticket.again(place)
                await self._turn()  # many may get places at once
        del session  # its attempt and its output aren't kept while the call waits for its turn
        outcome = FinishReason.Name(finish_reason).removeprefix("FINISH_REASON_").lower()
        try:
            await self._turn()  # many may end with one step of a worker
        finally:
            self._note_end(trace, cast(Outcome, outcome))

    @asynccontextmanager
    async def _counted(self, trace: RequestTrace, meter: Meter, place: Place) -> AsyncIterator[None]:
        """Counts a completion, and takes its place back when it has ended."""
        self._front.requests.begin(trace)
        self._front.traffic.begin(trace)
        try:
            async with self._noting_failure(trace):
                with self.ticket.lent(place):
                    yield
        finally:
            meter.generated(trace.generated_tokens)

    @asynccontextmanager
    async def _noting_failure(self, trace: RequestTrace) -> AsyncIterator[None]:
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            outcome = self._outcome_of(error)
            try:
                await self._turn()  # many may fail at once, or be left by their client
            finally:
                self._note_end(trace, outcome, str(error) if isinstance(error, RequestError) else "")
            raise

    def _outcome_of(self, error: Exception | asyncio.CancelledError) -> Outcome:
        if isinstance(error, RequestError):
            return error.outcome
        if not isinstance(error, asyncio.CancelledError):
            return "internal"
        if self.ticket.displaced:
            return "exhausted"
        if self._clock() >= self._deadline:
            return "deadline"
        return "unavailable" if self._front.ending else "cancelled"

    def _note_end(self, trace: RequestTrace, outcome: Outcome, failure: str = "") -> None:
        self.ended.append(trace)
        self._front.note_end(trace, outcome, failure)


async def together(works: AsyncIterator[Coroutine[Any, Any, None]]) -> None:
    """Runs all works to their ends, each as soon as it is there; the first one that fails ends the others, and its
    exception is raised. They are ended a few at a time, since there may be a thousand."""
    running: dict[asyncio.Task[None], None] = {}
    failures: list[BaseException] = []
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="completion")
        running[task] = None
        task.add_done_callback(ended)

    def ended(task: asyncio.Task[None]) -> None:
        del running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)
        if not over.done() and (failures or not running):
            over.set_result(None)

    async def begin_all() -> None:
        async for work in works:
            begin(work)

    begin(begin_all())
    try:
        await over
    finally:
        await _end(running)
    if failures:
        raise failures.pop(0)  # no variable keeps it: it has a reference to this frame


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels tasks, which leave the collection at their end, ENDED_AT_ONCE at a time; all at once if the caller itself
    is cancelled."""
    at_once = ENDED_AT_ONCE
    cancelled: list[asyncio.CancelledError] = []
    while tasks:
        ending = list(itertools.islice(tasks, at_once))
        for task in ending:
            task.cancel()
        try:
            await asyncio.wait(ending)
        except asyncio.CancelledError as error:
            cancelled.append(error)
            at_once = len(tasks)
    if cancelled:
        raise cancelled.pop()


def _describe(request: CheckedRequest, trace: RequestTrace) -> None:
    trace.wire_id, trace.index = request.wire_id, request.index
    trace.prompt_tokens, trace.resumes, trace.tenant = len(request.prompt), request.resumes, request.tenant
