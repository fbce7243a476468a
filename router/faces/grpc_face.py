"""The public gRPC face: `kvrelay.v1.InferenceService`."""

import math
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message

from kvrelay.machine import VERSION
from kvrelay.router.addresses import FORWARDED_FOR
from kvrelay.router.doors.connections import Connections, Peer, peer_of
from kvrelay.router.entry.callers import AUTHORIZATION, Identity
from kvrelay.router.entry.front import Call, Caller, Front
from kvrelay.router.errors import InvalidArgument, InvalidRequest, RequestError
from kvrelay.router.faces.arrivals import Arrivals, Gate
from kvrelay.router.faces.writer import Writer
from kvrelay.router.request.reading import Asking, Plan, Reader
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.request.validation import DETOKENIZE_IDS, TOKENIZE_BYTES, TOKENIZE_WHY, checked_ids, text_tokens
from kvrelay.router.request.wire import BadOutline, check_outline, is_light_message
from kvrelay.router.session.output import AwaitedSink
from kvrelay.router.shares import Seats
from kvrelay.rpc.options import public_receive_bytes
from kvrelay.rpc.tracing import HEADER, STATE_HEADER, TraceContext
from kvrelay.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

RequestT = TypeVar("RequestT", bound=Message)


def parse(kind: type[RequestT], data: bytes, max_numbers: int) -> RequestT:
    """The request in a message.

    Args:
        max_numbers: most entries of a list of numbers.

    Raises:
        InvalidArgument: it is malformed, or too costly to be parsed.
    """
    try:
        check_outline(data, kind.DESCRIPTOR, max_numbers)
        return kind.FromString(data)
    except BadOutline as error:
        raise InvalidArgument(f"not a valid {kind.DESCRIPTOR.full_name}: {error}") from None
    except DecodeError:  # its text may contain the data
        what = "malformed, or a string is not UTF-8"
        raise InvalidArgument(f"not a valid {kind.DESCRIPTOR.full_name}: {what}") from None


def readers(tokenizer: Tokenizer) -> dict[str, Reader]:
    """The readers of the calls' messages, by the names of the calls."""

    async def generate(data: bytes, asking: Asking) -> Plan:
        return Plan([parse(pb.GenerateRequest, data, asking.model.max_context)])

    async def tokenize(data: bytes, _: Asking) -> bytes:
        request = parse(pb.TokenizeRequest, data, 0)
        tokens = await text_tokens(request, tokenizer, TOKENIZE_BYTES, TOKENIZE_WHY)
        return pb.TokenizeResponse(token_ids=tokens).SerializeToString()

    async def detokenize(data: bytes, asking: Asking) -> bytes:
        vocab_size = asking.model.vocab_size
        request = parse(pb.DetokenizeRequest, data, DETOKENIZE_IDS)
        if len(request.token_ids) > DETOKENIZE_IDS:
            limit = f"up to {DETOKENIZE_IDS}, send more in parts"
            raise InvalidRequest("token_ids: number of ids", len(request.token_ids), limit)
        tokens = await checked_ids("token_ids", request.token_ids, vocab_size)
        return pb.DetokenizeResponse(text=await tokenizer.decode(tokens)).SerializeToString()

    def reader(kind: type[Message], read: Callable[[bytes, Asking], Awaitable[Plan | bytes]]) -> Reader:
        return Reader(read, partial(is_light_message, kind=kind.DESCRIPTOR))

    return {
        "Generate": reader(pb.GenerateRequest, generate),
        "Tokenize": reader(pb.TokenizeRequest, tokenize),
        "Detokenize": reader(pb.DetokenizeRequest, detokenize),
    }


class GrpcFace:
    """Answers the public calls of gRPC. A client's mistake becomes a status."""

    def __init__(self, front: Front, connections: Connections) -> None:
        self._front = front
        self._connections = connections
        places = front.config.max_arriving_bytes // public_receive_bytes(front.config.max_message_bytes)
        self._arrivals = Arrivals(max(1, places), front.config.request_timeout_seconds)

    def gate(self) -> Gate:
        """Bounds the requests of the other services of the same server."""

        async def receive(context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
            data = await self._arrivals.receive(self._caller(context).host, context.read)
            self._served(context)
            return data

        streams = Seats(self._front.config.max_requests, "health checks and reflections")
        return Gate(receive, SERVICE, lambda context: streams.seat(self._caller(context).host), self._writer)

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
                "Tokenize": self._unary(partial(self._answer, "Tokenize")),
                "Detokenize": self._unary(partial(self._answer, "Detokenize")),
            },
        )

    async def _generate(
        self,
        _: object,
        context: "grpc.aio.ServicerContext[bytes, pb.GenerateResponse]",
    ) -> None:
        front = self._front
        # None if there is no deadline; the type stubs don't say so.
        remaining = cast("float | None", context.time_remaining())
        deadline = math.inf if remaining is None else front.dispatch.clock() + remaining
        writer = self._writer(context)
        try:
            with front.generation(self._caller(context), 0, deadline) as call:
                plan = cast(Plan, await call.read("Generate", await self._receive(call, context)))
                await call.generate(plan.requests.pop(), AwaitedSink(writer.write))
            return
        except RequestError as error:
            failure = error
        finally:
            writer.close()
        await context.abort(failure.code, str(failure), failure.metadata)

    async def _get_model_info(self, _: Call, __: bytes) -> bytes:
        model = self._front.model
        return pb.GetModelInfoResponse(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            has_chat_template=self._front.tokenizer.has_chat_template,
            version=VERSION,
        ).SerializeToString()

    async def _answer(self, kind: str, call: Call, data: bytes) -> bytes:
        return cast(bytes, await call.read(kind, data))

    def _unary(self, answer: Callable[[Call, bytes], Awaitable[bytes]]) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """The handler of a call with one request and one response: counts it, and turns errors into statuses."""

        async def handle(_: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
            try:
                with closing(self._writer(context)) as writer, self._front.call(self._caller(context), 0) as call:
                    data = await self._receive(call, context)
                    call.ticket.begun = True
                    await writer.write(await answer(call, data))
                return
            except RequestError as error:
                failure = error
            await context.abort(failure.code, str(failure), failure.metadata)

        return grpc.stream_stream_rpc_method_handler(handle, None, None)

    def _writer(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Writer[Any]:
        # A client that dies during a write raises a BaseError, not a cancellation.
        return Writer(context.write, self._front.config.idle_timeout_seconds, (grpc.aio.BaseError,))

    async def _receive(self, call: Call, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        """The request of a call that was admitted.

        Raises:
            RequestError: it doesn't come, comes too slowly, is too large, or is more than the router can hold now.
        """
        data = await self._arrivals.receive(call.ticket.holder, context.read)
        self._served(context)
        call.ticket.resize(len(data))
        if len(data) > (most := self._front.config.max_message_bytes):
            raise InvalidRequest("request: number of bytes", len(data), f"up to {most}")
        return data

    def _served(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Counts a whole request on its connection until the end of the call."""
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
