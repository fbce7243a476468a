"""The public gRPC face: `kvrelay.v1.InferenceService`."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from kvrelay.internal.v1.worker_pb2 import ModelInfo
from kvrelay.router.alarm import Alarm
from kvrelay.router.completion import Finish
from kvrelay.router.errors import Exhausted, InternalError, InvalidPayload, RequestError, SlowReader, Unavailable
from kvrelay.router.payload import BadPayload, Parser
from kvrelay.router.records import Observer, Outcome, RequestRecord, RequestTrace
from kvrelay.router.session import RETRY_DELAY_SECONDS, Dispatch, Session
from kvrelay.router.tokenizer import Tokenizer
from kvrelay.router.validation import CheckedRequest, check, check_ids, prompt_tokens
from kvrelay.v1 import inference_pb2
from kvrelay.v1.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    TokenizeRequest,
    TokenizeResponse,
)

logger = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

OUTCOMES: dict[Finish, Outcome] = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Writer:
    """Writes one request's messages, with a limit: a client that reads no more blocks a write for ever."""

    def __init__(self, context: "grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]", limit: float) -> None:
        """`limit`: seconds that a write may take."""
        self._context = context
        self._limit = limit
        self._alarm = Alarm(self._give_up)
        self._writing: asyncio.Task[None] | None = None
        self._late = False

    async def write(self, message: GenerateResponse) -> None:
        """
        Raises:
            SlowReader: it took longer than the limit.
            asyncio.CancelledError: the client is gone.
        """
        self._writing = asyncio.current_task()
        self._alarm.set(time.monotonic() + self._limit)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            # Its own cancellation, unless somebody else's came too.
            if self._late and self._writing is not None and not self._writing.uncancel():
                raise SlowReader(f"no message was read for {self._limit:g} s") from None
            raise
        except grpc.aio.BaseError as error:
            # A client that dies during a write shows as this, not as a cancellation.
            raise asyncio.CancelledError from error
        finally:
            self._alarm.set(math.inf)

    def close(self) -> None:
        """Nothing is written any more."""
        self._alarm.close()

    def _give_up(self) -> None:
        if self._writing is not None:
            self._late = True
            self._writing.cancel()


class InferenceFace:
    """Answers the public calls. A mistake of the client's is a status; nothing that it sends ends the router."""

    def __init__(self, dispatch: Dispatch, tokenizer: Tokenizer, observer: Observer | None) -> None:
        self._dispatch = dispatch
        self._tokenizer = tokenizer
        self._observer = observer
        self._running = 0

    @property
    def running(self) -> int:
        """Requests that have come and are not over."""
        return self._running

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The service's methods, with parsers that return what they can't parse."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self._generate, Parser(GenerateRequest), GenerateResponse.SerializeToString
                ),
                "GetModelInfo": unary(
                    self._answering(self._get_model_info),
                    Parser(GetModelInfoRequest),
                    GetModelInfoResponse.SerializeToString,
                ),
                "Tokenize": unary(
                    self._answering(self._tokenize), Parser(TokenizeRequest), TokenizeResponse.SerializeToString
                ),
                "Detokenize": unary(
                    self._answering(self._detokenize), Parser(DetokenizeRequest), DetokenizeResponse.SerializeToString
                ),
            },
        )

    # Generate.

    async def _generate(
        self,
        request: GenerateRequest | BadPayload,
        context: "grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]",
    ) -> None:
        journal = RequestTrace(time.monotonic())
        # No deadline is None, whatever the type stubs say.
        remaining = cast("float | None", context.time_remaining())
        deadline = math.inf if remaining is None else journal.received + remaining
        name = request.request_id if isinstance(request, GenerateRequest) else ""
        checked: CheckedRequest | None = None
        session: Session | None = None
        writer: Writer | None = None
        outcome: Outcome = "cancelled"
        failure: RequestError | None = None
        self._running += 1
        try:
            checked = await self._check(request)
            session = Session(checked, self._dispatch, journal, deadline)
            writer = Writer(context, self._dispatch.config.idle_timeout_seconds)
            finish = await session.run(writer.write)
            outcome = OUTCOMES[finish]
        except RequestError as error:
            failure, outcome = error, error.outcome
        except asyncio.CancelledError:
            outcome = "deadline" if time.monotonic() >= deadline else "cancelled"
            raise
        except Exception:
            logger.exception("request failed by a defect", extra={"request": name})
            failure, outcome = InternalError("a defect in the router"), "internal"
        finally:
            self._running -= 1
            if writer is not None:
                writer.close()
            record = journal.record(
                name if checked is None else checked.request_id,
                outcome,
                0 if checked is None else len(checked.tokens),
                0 if session is None else session.completion_tokens,
                time.monotonic(),
            )
            self._note(record, checked, failure)
        if failure is not None:
            await context.abort(failure.code, str(failure), failure.metadata)

    async def _check(self, request: GenerateRequest | BadPayload) -> CheckedRequest:
        if isinstance(request, BadPayload):
            raise InvalidPayload(request.problem)
        limit = self._dispatch.config.max_requests
        if self._running > limit:
            raise Exhausted(f"{limit} requests are in flight, the router's max_requests", RETRY_DELAY_SECONDS)
        return await check(request, self._model(), self._tokenizer)

    def _note(self, record: RequestRecord, checked: CheckedRequest | None, failure: RequestError | None) -> None:
        fields: dict[str, object] = {
            "request": record.request_id if checked is None else checked.wire_id,
            "outcome": record.outcome,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "seconds": round(record.total_seconds, 4),
        }
        if failure is not None:
            fields["reason"] = str(failure)
        logger.info("request over", extra=fields)
        if self._observer is not None:
            self._observer(record)

    # The others.

    def _answering(
        self, answer: Callable[[RequestT], Awaitable[ResponseT]]
    ) -> Callable[[RequestT | BadPayload, "grpc.aio.ServicerContext[RequestT, ResponseT]"], Awaitable[ResponseT]]:
        """A handler of a unary call: errors become statuses."""

        async def handle(
            request: RequestT | BadPayload, context: "grpc.aio.ServicerContext[RequestT, ResponseT]"
        ) -> ResponseT:
            try:
                if isinstance(request, BadPayload):
                    raise InvalidPayload(request.problem)
                return await answer(request)
            except RequestError as error:
                failure = error
            except Exception:
                logger.exception("call failed by a defect")
                failure = InternalError("a defect in the router")
            return await context.abort(failure.code, str(failure), failure.metadata)

        return handle

    async def _get_model_info(self, request: GetModelInfoRequest) -> GetModelInfoResponse:
        model = self._model()
        return GetModelInfoResponse(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            has_chat_template=self._tokenizer.has_chat_template,
            version=version("kvrelay"),
        )

    async def _tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        return TokenizeResponse(token_ids=await prompt_tokens(request, self._tokenizer))

    async def _detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        check_ids("token_ids", request.token_ids, self._model().vocab_size)
        return DetokenizeResponse(text=await self._tokenizer.decode(request.token_ids))

    def _model(self) -> ModelInfo:
        model = self._dispatch.pool.model
        if model is None:
            raise Unavailable("no worker is ready yet")
        return model
