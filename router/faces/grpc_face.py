"""The public gRPC face: `kvrelay.v1.InferenceService`."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message

from kvrelay.router.addresses import FORWARDED_FOR
from kvrelay.router.config import RouterOptions
from kvrelay.router.doors.connections import Connections, Peer, peer_of
from kvrelay.router.entry.callers import AUTHORIZATION, Identity
from kvrelay.router.entry.front import Call, Caller, Front
from kvrelay.router.errors import InvalidArgument, InvalidRequest, RequestError
from kvrelay.router.faces.arrivals import Arrivals, Gate
from kvrelay.router.faces.writer import Writer
from kvrelay.router.placing.shares import Seats
from kvrelay.router.request.prompt import PART_TOKENS
from kvrelay.router.request.validation import DETOKENIZE_IDS, TOKENIZE_BYTES, TOKENIZE_WHY, checked_ids, text_tokens
from kvrelay.router.request.wire import BadOutline, check_outline
from kvrelay.router.session.output import AwaitedSink
from kvrelay.rpc.options import public_receive_bytes
from kvrelay.rpc.tracing import HEADER, STATE_HEADER, TraceContext
from kvrelay.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

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


class GrpcFace:
    """Answers the public calls of gRPC. A client's mistake becomes a status."""

    def __init__(self, front: Front, connections: Connections) -> None:
        self._front = front
        self._connections = connections
        self._tokenizer = front.tokenizer
        places = front.config.max_arriving_bytes // public_receive_bytes(front.config.max_message_bytes)
        self._arrivals = Arrivals(max(1, places), front.config.request_timeout_seconds)

    def gate(self) -> Gate:
        """Bounds the requests of the other services of the same server."""

        async def receive(context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
            data = await self._arrivals.receive(self._caller(context).host, context.read)
            self._served(context)
            return data

        streams = Seats(self._front.config.max_requests, "health checks and reflections")
        return Gate(receive, SERVICE, lambda context: streams.seat(self._caller(context).host))

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The service's methods. Each gets its request unparsed, and reads it itself: a handler of a stream begins
        before gRPC has read a message. On the wire, there is no difference."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.stream_stream_rpc_method_handler(
                    self._generate, None, pb.GenerateResponse.SerializeToString
                ),
                "GetModelInfo": self._unary(self._get_model_info),
                "Tokenize": self._unary(self._tokenize),
                "Detokenize": self._unary(self._detokenize),
            },
        )

    async def _generate(
        self,
        _: object,
        context: "grpc.aio.ServicerContext[bytes, pb.GenerateResponse]",
    ) -> None:
        now = time.monotonic()
        # None if there is no deadline; the type stubs don't say so.
        remaining = cast("float | None", context.time_remaining())
        deadline = math.inf if remaining is None else now + remaining
        front = self._front
        # A client that dies during a write shows as a BaseError, not as a cancellation.
        writer = Writer(context.write, front.config.idle_timeout_seconds, (grpc.aio.BaseError,))
        try:
            with front.generation(self._caller(context), 0, deadline) as call:
                received = await self._receive(call, context)
                kind, max_numbers = pb.GenerateRequest, front.model.max_context
                await call.generate(received.take(kind, front.config, max_numbers), AwaitedSink(writer.write))
            return
        except RequestError as error:
            failure = error
        finally:
            writer.close()
        await context.abort(failure.code, str(failure), failure.metadata)

    async def _get_model_info(self, _: Received) -> pb.GetModelInfoResponse:
        model = self._front.model
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
        request = received.take(pb.TokenizeRequest, self._front.config, 0)
        tokens = await text_tokens(request, self._tokenizer, TOKENIZE_BYTES, TOKENIZE_WHY)
        response = pb.TokenizeResponse()
        for start in range(0, len(tokens), PART_TOKENS):
            response.token_ids.extend(tokens[start : start + PART_TOKENS])
            await asyncio.sleep(0)
        return response

    async def _detokenize(self, received: Received) -> pb.DetokenizeResponse:
        model = self._front.model
        request = received.take(pb.DetokenizeRequest, self._front.config, DETOKENIZE_IDS)
        if len(request.token_ids) > DETOKENIZE_IDS:
            limit = f"up to {DETOKENIZE_IDS}, send more in parts"
            raise InvalidRequest("token_ids: number of ids", len(request.token_ids), limit)
        tokens = await checked_ids("token_ids", request.token_ids, model.vocab_size)
        return pb.DetokenizeResponse(text=await self._tokenizer.decode(tokens))

    def _unary(self, answer: Callable[[Received], Awaitable[ResponseT]]) -> "grpc.RpcMethodHandler[bytes, ResponseT]":
        """The handler of a call with one request and one response: counts it, and turns errors into statuses."""

        async def handle(_: object, context: "grpc.aio.ServicerContext[bytes, ResponseT]") -> None:
            try:
                with self._front.call(self._caller(context), 0) as call:
                    received = await self._receive(call, context)
                    call.ticket.begun = True
                    response = await answer(received)
                await context.write(response)
                return
            except RequestError as error:
                failure = error
            await context.abort(failure.code, str(failure), failure.metadata)

        return grpc.stream_stream_rpc_method_handler(handle, None, lambda response: response.SerializeToString())

    async def _receive(self, call: Call, context: "grpc.aio.ServicerContext[Any, Any]") -> Received:
        """The request of a call that was admitted.

        Raises:
            RequestError: it doesn't come, comes too slowly, or is more than the router can hold now.
        """
        data = await self._arrivals.receive(call.ticket.holder, context.read)
        self._served(context)
        call.ticket.resize(len(data))
        return Received(data)

    def _served(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """A connection has sent a whole request, which it has until the end of the call."""
        peer = _peer(context)
        if peer is None:
            return
        connection = self._connections.of(peer) or self._connections.add(peer, None)
        if connection is not None:
            connection.begin()
            done: Any = lambda _: connection.end()  # noqa: E731  # the type stubs want one of an internal class
            context.add_done_callback(done)

    def _caller(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Caller:
        metadata = context.invocation_metadata() or ()
        given = [str(value) for key, value in metadata if key == AUTHORIZATION]
        forwarded = [str(value) for key, value in metadata if key == FORWARDED_FOR]
        sent = {key: str(value) for key, value in metadata if key in (HEADER, STATE_HEADER)}
        names = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", ())]
        peer = _peer(context)
        if peer is not None:
            self._connections.check(peer)
        host = self._front.addresses.client(peer[0] if peer else context.peer(), forwarded)
        return Caller(Identity(given, names), host, TraceContext.read(sent.get(HEADER), sent.get(STATE_HEADER)))


def _peer(context: "grpc.aio.ServicerContext[Any, Any]") -> Peer | None:
    """The other end of a call's connection: gRPC's `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; None for others."""
    kind, _, rest = unquote(context.peer()).partition(":")
    host, _, port = rest.rpartition(":")
    return peer_of(host, int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None
