"""Receives the requests of gRPC calls, bounded in time and in the memory of those that are on their way.

gRPC tells the size of a message only when all of it is there, so each request on its way counts as the largest one. It
takes one of a few places for that time; without a place nothing of it is read, and flow control stalls its sender.

    receive   waits for a place, then for the request; both within one deadline
    fairness  a holder (a tenant or a client's address) never has the last places while others may come; of those that
              wait, the holder with the fewest places is next; and when all places are taken, the oldest request of the
              holder with most of them gives up its place after PATIENCE_SECONDS
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from kvrelay.router.errors import Exhausted, InvalidArgument, RequestError, SlowRequest
from kvrelay.router.faces.writer import Writer

EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the type stubs
PATIENCE_SECONDS = 1.0
"""Time that a request on its way has its place in any case."""
AGAIN_SECONDS = 0.05
"""Seconds between two requests that give up their places, if more than one waits."""
RESERVED_SHARE = 4
"""One holder has at most all but 1 / RESERVED_SHARE of the places."""

Handler = Any
"""A grpc.RpcMethodHandler; its type stubs know those of synchronous servers only."""
Read = Callable[[], Awaitable[Any]]
Receive = Callable[["grpc.aio.ServicerContext[Any, Any]"], Awaitable[bytes]]
Seat = Callable[["grpc.aio.ServicerContext[Any, Any]"], AbstractAsyncContextManager[None]]
MakeWriter = Callable[["grpc.aio.ServicerContext[Any, Any]"], Writer[Any]]


class NoRequest(InvalidArgument):
    """A client has ended its side of a call without a further request."""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of one request on its way."""

    holder: str
    limit: asyncio.Timeout
    """The deadline of its arrival."""
    since: float
    """Time at which it was taken, on the event loop's clock."""
    displaced: bool = False


class Arrivals:
    """The places for requests on their way. Used on the event loop only."""

    def __init__(self, places: int, seconds: float) -> None:
        """
        Args:
            places: requests that may be on their way at once.
            seconds: time for a request to arrive, from its headers on.
        """
        self._places = places
        self._most = max(1, places - max(1, places // RESERVED_SHARE))
        self._seconds = seconds
        self._taken: dict[_Place, None] = {}
        """The places that are taken, the oldest first."""
        self._counts: dict[str, int] = {}
        """Places of each holder that has some."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting requests by holder; the result of a future means that a place is reserved."""
        self._timer: asyncio.TimerHandle | None = None

    async def receive(self, holder: str, read: Read) -> bytes:
        """The next message of a call.

        Args:
            holder: the tenant, or the client's address where nobody is authenticated.
            read: returns the message, or grpc.aio.EOF.

        Raises:
            NoRequest: the client has ended its side without a message.
            SlowRequest: the message is late.
            Exhausted: others had to wait for its place.
        """
        place: _Place | None = None
        try:
            async with asyncio.timeout(self._seconds) as limit:
                await self._reserve(holder)
                place = _Place(holder, limit, asyncio.get_running_loop().time())
                self._taken[place] = None
                data = await read()
        except TimeoutError:
            if place is not None and place.displaced:
                raise Exhausted(
                    f"the request took longer than {PATIENCE_SECONDS:g} s to arrive while others waited to send theirs"
                ) from None
            raise SlowRequest(f"the request did not arrive within {self._seconds:g} s") from None
        finally:
            if place is not None:
                del self._taken[place]
                self._release(holder)
        if data is EOF:
            raise NoRequest("the call ended without a request")
        return bytes(data)

    async def _reserve(self, holder: str) -> None:
        if sum(self._counts.values()) < self._places and self._counts.get(holder, 0) < self._most:
            self._counts[holder] = self._counts.get(holder, 0) + 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        self._displace()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(holder)
            else:
                self._forget(holder, turn)
            raise

    def _release(self, holder: str) -> None:
        self._counts[holder] -= 1
        if not self._counts[holder]:
            del self._counts[holder]
        self._pass_on()

    def _pass_on(self) -> None:
        """Gives free places to those who wait."""
        while self._waiting and sum(self._counts.values()) < self._places:
            holder = min(self._waiting, key=lambda holder: self._counts.get(holder, 0))
            if self._counts.get(holder, 0) >= self._most:
                return
            turn = self._waiting[holder][0]
            self._forget(holder, turn)
            if not turn.done():
                self._counts[holder] = self._counts.get(holder, 0) + 1
                turn.set_result(None)

    def _forget(self, holder: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(holder, ())
        if isinstance(queue, deque) and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[holder]

    def _displace(self) -> None:
        """Has the oldest request of the largest holder give up its place, if others wait for one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting or sum(self._counts.values()) < self._places:
            return
        fewest = min(self._counts.get(holder, 0) for holder in self._waiting)
        most = max(self._counts.values())
        if most <= fewest or fewest >= self._most:
            return
        loop = asyncio.get_running_loop()
        for place in self._taken:
            if self._counts[place.holder] == most and not place.limit.expired():
                if (left := place.since + PATIENCE_SECONDS - loop.time()) > 0:
                    self._timer = loop.call_later(left, self._displace)
                else:
                    place.displaced = True
                    place.limit.reschedule(loop.time())
                    self._timer = loop.call_later(AGAIN_SECONDS, self._displace)
                return


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Has the requests of all services but one, such as health and reflection, arrive by way of `receive`.

    The server itself would hold the whole message of each call of one request before its handler runs, and so would the
    iterator of a stream.
    """

    def __init__(self, receive: Receive, spared: str, seat: Seat, writer: MakeWriter) -> None:
        """
        Args:
            receive: the next message of a call.
            spared: the service whose handlers do so themselves.
            seat: the place of a call with a stream of requests or responses.
            writer: makes the writer of a call's answers.
        """
        self._receive = receive
        self._writer = writer
        self._spared = f"/{spared}/"
        self._seat = seat

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(self._spared):
            return handler
        return self._gated(handler)

    def _gated(self, handler: Handler) -> Handler:
        streams = bool(handler.request_streaming or handler.response_streaming)

        async def serve(_: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            try:
                async with self._seat(context) if streams else nullcontext():
                    await self._answer(handler, context)
                return
            except RequestError as error:
                failure = error
            await context.abort(failure.code, str(failure), failure.metadata)

        # A handler of a stream is begun before a message is read. On the wire, there is no difference.
        return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)

    async def _answer(self, handler: Handler, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        with closing(self._writer(context)) as writer:
            if handler.stream_stream is not None:
                async for answer in handler.stream_stream(self._requests(handler, context), context):
                    await writer.write(answer)
                return
            request = self._parse(handler, await self._receive(context))
            if handler.unary_stream is not None:
                await handler.unary_stream(request, context)  # it writes itself, and may lose its seat
            else:
                await writer.write(await handler.unary_unary(request, context))

    async def _requests(self, handler: Handler, context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
        """The requests of a stream, which its client ends."""
        with suppress(NoRequest):
            while True:
                yield self._parse(handler, await self._receive(context))

    def _parse(self, handler: Handler, data: bytes) -> Any:
        """
        Raises:
            InvalidArgument: it is malformed.
        """
        try:
            return handler.request_deserializer(data) if handler.request_deserializer is not None else data
        except DecodeError:
            raise InvalidArgument("the request is malformed") from None
