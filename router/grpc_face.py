"""The public gRPC face: `kvrelay.v1.InferenceService`."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from kvrelay.internal.v1.worker_pb2 import ModelInfo
from kvrelay.router.admission import Admission
from kvrelay.router.alarm import Alarm
from kvrelay.router.answer import Answer
from kvrelay.router.callers import Callers
from kvrelay.router.config import RouterOptions
from kvrelay.router.errors import (
    InternalError,
    InvalidArgument,
    InvalidRequest,
    RequestError,
    SlowReader,
    Unavailable,
)
from kvrelay.router.prompt import PART_TOKENS
from kvrelay.router.session import Dispatch, Session
from kvrelay.router.tokenizer import Tokenizer
from kvrelay.router.trace import Observer, Outcome, RequestTrace
from kvrelay.router.validation import CheckedRequest, check, checked_ids, text_tokens
from kvrelay.router.wire import BadOutline, check_outline
from kvrelay.v1 import inference_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

END_SECONDS = 1.0
"""For streams to end on their workers when the router is to end."""

TOKENIZE_BYTES = 512 * 1024
"""Largest text of Tokenize, and most ids of Detokenize: what the event loop can send in some milliseconds."""

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


def parser(kind: type[RequestT]) -> Callable[[bytes], RequestT | InvalidArgument]:
    """Parses a request, or returns its error: the text of protobuf's own exceptions may contain the data."""

    def parse(data: bytes) -> RequestT | InvalidArgument:
        try:
            return kind.FromString(data)
        except DecodeError:
            return InvalidArgument(f"not a valid {kind.DESCRIPTOR.full_name}: malformed, or a string is not UTF-8")

    return parse


@dataclass(slots=True)
class Received:
    """A request as it came. `take` parses it once, and doesn't keep the result: a request waits long, and parsed it is
    several times as large."""

    data: bytes

    def take(self, kind: type[RequestT], config: RouterOptions, max_numbers: int) -> RequestT:
        """
        Args:
            max_numbers: most entries of a list of numbers.

        Raises:
            InvalidArgument: it is too large, or malformed.
        """
        size = len(self.data)
        if size > config.max_message_bytes:
            raise InvalidRequest("request: number of bytes", size, f"up to {config.max_message_bytes}")
        try:
            check_outline(self.data, kind.DESCRIPTOR, max_numbers)
        except BadOutline as error:
            raise InvalidArgument(f"not a valid {kind.DESCRIPTOR.full_name}: {error}") from None
        request = parser(kind)(self.data)
        if isinstance(request, InvalidArgument):
            raise request
        return request


class Writer:
    """Writes one request's messages, each within a time limit: a client that stops reading blocks a write for ever."""

    def __init__(self, context: "grpc.aio.ServicerContext[Received, pb.GenerateResponse]", limit: float) -> None:
        """
        Args:
            limit: seconds that one write may take.
        """
        self._context = context
        self._limit = limit
        self._alarm = Alarm(self._cancel_write)
        self._writing: asyncio.Task[None] | None = None
        self._late = False

    async def write(self, message: pb.GenerateResponse) -> None:
        """
        Raises:
            SlowReader: the write took longer than the limit.
            asyncio.CancelledError: the client is gone.
        """
        self._writing = asyncio.current_task()
        self._alarm.set(time.monotonic() + self._limit)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            # `_cancel_write` has cancelled this task, unless another cancellation came as well.
            if self._late and self._writing is not None and not self._writing.uncancel():
                raise SlowReader(f"no message was read for {self._limit:g} s") from None
            raise
        except grpc.aio.BaseError as error:
            # A client that dies during a write shows as this, not as a cancellation.
            raise asyncio.CancelledError from error
        finally:
            self._alarm.set(math.inf)

    def close(self) -> None:
        self._alarm.close()

    def _cancel_write(self) -> None:
        if self._writing is not None:
            self._late = True
            self._writing.cancel()


class InferenceFace:
    """Answers the public calls. A client's mistake becomes a status; nothing that a client sends ends the router."""

    def __init__(self, dispatch: Dispatch, tokenizer: Tokenizer, callers: Callers, observer: Observer | None) -> None:
        self._dispatch = dispatch
        self._callers = callers
        self._tokenizer = tokenizer
        self._observer = observer
        config = dispatch.config
        self._admission = Admission(config.max_requests, config.max_queued_bytes)
        self._streams: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._ending = False

    @property
    def running(self) -> int:
        """Calls that were admitted and have not ended."""
        return self._admission.calls

    async def stop(self, grace: float) -> None:
        """Refuses new streams, gives the running ones `grace` seconds, then ends them with UNAVAILABLE."""
        self._draining = True
        if self._streams:
            await asyncio.wait(self._streams, timeout=grace)
        self._ending = True
        for task in self._streams:
            task.cancel()
        if self._streams:
            await asyncio.wait(self._streams, timeout=END_SECONDS)

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The service's methods. Each gets its request unparsed."""
        generate = grpc.unary_stream_rpc_method_handler(self._generate, Received, pb.GenerateResponse.SerializeToString)
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": generate,
                "GetModelInfo": self._unary(self._get_model_info),
                "Tokenize": self._unary(self._tokenize),
                "Detokenize": self._unary(self._detokenize),
            },
        )

    async def _generate(
        self,
        received: Received,
        context: "grpc.aio.ServicerContext[Received, pb.GenerateResponse]",
    ) -> None:
        trace = RequestTrace(time.monotonic())
        # None if there is no deadline; the type stubs don't say so.
        remaining = cast("float | None", context.time_remaining())
        deadline = math.inf if remaining is None else trace.received + remaining
        writer = Writer(context, self._dispatch.config.idle_timeout_seconds)
        outcome: Outcome = "cancelled"
        failure: RequestError | None = None
        task = asyncio.current_task()
        if task is not None:
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
        try:
            if self._draining:
                raise self._shutting_down()
            tenant = self._callers.tenant(context)
            with self._admission.admit(self._share(tenant, context), len(received.data)) as ticket:
                checked = await self._check(received, tenant, trace)
                ticket.set(len(received.data) + checked.prompt.nbytes)
                answer = Answer(checked.request_id, trace, writer.write)
                finish_reason = await Session(checked, self._dispatch, trace, answer, deadline).run()
            outcome = cast(Outcome, pb.FinishReason.Name(finish_reason).removeprefix("FINISH_REASON_").lower())
        except RequestError as error:
            failure, outcome = error, error.outcome
        except asyncio.CancelledError:
            # `stop` has cancelled this task, unless another cancellation came as well.
            if not self._ending or task is None or task.uncancel():
                outcome = "deadline" if time.monotonic() >= deadline else "cancelled"
                raise
            failure = self._shutting_down()
            outcome = failure.outcome
        except Exception:
            logger.exception("request failed because of a defect", extra={"request": trace.wire_id})
            failure, outcome = InternalError("a defect in the router"), "internal"
        finally:
            writer.close()
            self._note_end(trace, outcome, failure)
        if failure is not None:
            await context.abort(failure.code, str(failure), failure.metadata)

    def _shutting_down(self) -> Unavailable:
        return Unavailable(f"{self._dispatch.config.name} is shutting down")

    def _share(self, tenant: str, context: "grpc.aio.ServicerContext[Any, Any]") -> str:
        """Whose share of the router's memory a call takes: its tenant's, or its host's if nobody is authenticated."""
        return f"tenant {tenant}" if self._callers.authenticated else _host(context.peer())

    async def _check(self, received: Received, tenant: str, trace: RequestTrace) -> CheckedRequest:
        model = self._model()
        request = received.take(pb.GenerateRequest, self._dispatch.config, model.max_context)
        trace.wire_id = request.request_id
        self._callers.check_claim(request.tenant, tenant)
        checked = await check(request, tenant, model, self._tokenizer)
        trace.wire_id, trace.prompt_tokens, trace.resumes = checked.wire_id, len(checked.prompt), checked.resumes
        return checked

    def _note_end(self, trace: RequestTrace, outcome: Outcome, failure: RequestError | None) -> None:
        record = trace.record(outcome, time.monotonic())
        fields: dict[str, object] = {
            "request": trace.wire_id,
            "outcome": outcome,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "seconds": round(record.total_seconds, 4),
        }
        if failure is not None:
            fields["reason"] = str(failure)
        logger.info("request ended", extra=fields)
        if self._observer is not None:
            self._observer(record)

    async def _get_model_info(self, _: Received) -> pb.GetModelInfoResponse:
        model = self._model()
        return pb.GetModelInfoResponse(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            has_chat_template=self._tokenizer.has_chat_template,
            version=version("kvrelay"),
        )

    async def _tokenize(self, received: Received) -> pb.TokenizeResponse:
        request = received.take(pb.TokenizeRequest, self._dispatch.config, 0)
        tokens = await text_tokens(request, self._tokenizer, TOKENIZE_BYTES, "send a longer text in parts")
        response = pb.TokenizeResponse()
        for start in range(0, len(tokens), PART_TOKENS):
            response.token_ids.extend(tokens[start : start + PART_TOKENS])
            await asyncio.sleep(0)
        return response

    async def _detokenize(self, received: Received) -> pb.DetokenizeResponse:
        model = self._model()
        request = received.take(pb.DetokenizeRequest, self._dispatch.config, TOKENIZE_BYTES)
        if len(request.token_ids) > TOKENIZE_BYTES:
            limit = f"up to {TOKENIZE_BYTES}, send more in parts"
            raise InvalidRequest("token_ids: number of ids", len(request.token_ids), limit)
        tokens = await checked_ids("token_ids", request.token_ids, model.vocab_size)
        return pb.DetokenizeResponse(text=await self._tokenizer.decode(tokens))

    def _model(self) -> ModelInfo:
        model = self._dispatch.registry.model
        if model is None:
            raise Unavailable("no worker is ready yet")
        return model

    def _unary(
        self, answer: Callable[[Received], Awaitable[ResponseT]]
    ) -> "grpc.RpcMethodHandler[Received, ResponseT]":
        """The handler of a call with one request and one response: counts it, and turns errors into statuses."""

        async def handle(received: Received, context: "grpc.aio.ServicerContext[Received, ResponseT]") -> ResponseT:
            try:
                tenant = self._callers.tenant(context)
                with self._admission.admit(self._share(tenant, context), len(received.data)):
                    return await answer(received)
            except RequestError as error:
                failure = error
            except Exception:
                logger.exception("call failed because of a defect")
                failure = InternalError("a defect in the router")
            return await context.abort(failure.code, str(failure), failure.metadata)

        return grpc.unary_unary_rpc_method_handler(handle, Received, lambda response: response.SerializeToString())


def _host(peer: str) -> str:
    """A client's address without its port: gRPC's `ipv4:10.0.0.1:5000`, `ipv6:[::1]:5000` or `unix:/path`."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer
