"""The public gRPC face: `kvrelay.v1.InferenceService`."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from kvrelay.internal.v1.worker_pb2 import ModelInfo
from kvrelay.router.alarm import Alarm
from kvrelay.router.errors import Exhausted, InternalError, InvalidArgument, RequestError, SlowReader, Unavailable
from kvrelay.router.session import Dispatch, Session
from kvrelay.router.tokenizer import Tokenizer
from kvrelay.router.trace import Observer, Outcome, RequestTrace
from kvrelay.router.validation import CheckedRequest, check, check_ids, prompt_tokens
from kvrelay.v1 import inference_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


def parser(kind: type[RequestT]) -> Callable[[bytes], RequestT | InvalidArgument]:
    """A gRPC request deserializer that returns its error: gRPC would send the text of an exception to the client."""

    def parse(data: bytes) -> RequestT | InvalidArgument:
        try:
            return kind.FromString(data)
        except DecodeError:
            return InvalidArgument(f"not a valid {kind.DESCRIPTOR.full_name}: malformed, or a string is not UTF-8")

    return parse


class Writer:
    """Writes one request's messages, each within a time limit: a client that stops reading blocks a write for ever."""

    def __init__(
        self, context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]", limit: float
    ) -> None:
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

    def __init__(self, dispatch: Dispatch, tokenizer: Tokenizer, observer: Observer | None) -> None:
        self._dispatch = dispatch
        self._tokenizer = tokenizer
        self._observer = observer
        self._running = 0

    @property
    def running(self) -> int:
        """Requests that were received and have not ended."""
        return self._running

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The service's methods. Each gets a request, or the error of one that can't be parsed."""
        generate = grpc.unary_stream_rpc_method_handler(
            self._generate, parser(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": generate,
                "GetModelInfo": _unary(pb.GetModelInfoRequest, self._get_model_info),
                "Tokenize": _unary(pb.TokenizeRequest, self._tokenize),
                "Detokenize": _unary(pb.DetokenizeRequest, self._detokenize),
            },
        )

    async def _generate(
        self,
        request: pb.GenerateRequest | InvalidArgument,
        context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]",
    ) -> None:
        trace = RequestTrace(time.monotonic())
        # None if there is no deadline; the type stubs don't say so.
        remaining = cast("float | None", context.time_remaining())
        deadline = math.inf if remaining is None else trace.received + remaining
        writer = Writer(context, self._dispatch.config.idle_timeout_seconds)
        outcome: Outcome = "cancelled"
        failure: RequestError | None = None
        self._running += 1
        try:
            checked = await self._check(request, trace)
            finish_reason = await Session(checked, self._dispatch, trace, deadline).run(writer.write)
            outcome = cast(Outcome, pb.FinishReason.Name(finish_reason).removeprefix("FINISH_REASON_").lower())
        except RequestError as error:
            failure, outcome = error, error.outcome
        except asyncio.CancelledError:
            outcome = "deadline" if time.monotonic() >= deadline else "cancelled"
            raise
        except Exception:
            logger.exception("request failed because of a defect", extra={"request": trace.wire_id})
            failure, outcome = InternalError("a defect in the router"), "internal"
        finally:
            self._running -= 1
            writer.close()
            self._note_end(trace, outcome, failure)
        if failure is not None:
            await context.abort(failure.code, str(failure), failure.metadata)

    async def _check(self, request: pb.GenerateRequest | InvalidArgument, trace: RequestTrace) -> CheckedRequest:
        if isinstance(request, InvalidArgument):
            raise request
        trace.wire_id = request.request_id
        limit = self._dispatch.config.max_requests
        if self._running > limit:
            raise Exhausted(f"{limit} requests are in flight, the router's max_requests")
        checked = await check(request, self._model(), self._tokenizer)
        trace.wire_id, trace.prompt_tokens = checked.wire_id, len(checked.tokens)
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

    async def _get_model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
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

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=await prompt_tokens(request, self._tokenizer))

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        check_ids("token_ids", request.token_ids, self._model().vocab_size)
        return pb.DetokenizeResponse(text=await self._tokenizer.decode(request.token_ids))

    def _model(self) -> ModelInfo:
        model = self._dispatch.registry.model
        if model is None:
            raise Unavailable("no worker is ready yet")
        return model


def _unary(
    kind: type[RequestT], answer: Callable[[RequestT], Awaitable[ResponseT]]
) -> "grpc.RpcMethodHandler[RequestT, ResponseT]":
    """The handler of a call with one request and one response: turns errors into statuses."""

    async def handle(
        request: RequestT | InvalidArgument, context: "grpc.aio.ServicerContext[RequestT, ResponseT]"
    ) -> ResponseT:
        try:
            if isinstance(request, InvalidArgument):
                raise request
            return await answer(request)
        except RequestError as error:
            failure = error
        except Exception:
            logger.exception("call failed because of a defect")
            failure = InternalError("a defect in the router")
        return await context.abort(failure.code, str(failure), failure.metadata)

    return grpc.unary_unary_rpc_method_handler(handle, parser(kind), lambda response: response.SerializeToString())
