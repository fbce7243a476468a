"""The asyncio client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Unpack

import grpc

from kvrelay.client import messages
from kvrelay.client.course import RESUME_SECONDS, Course, Routers
from kvrelay.client.errors import Cancelled, KvrelayError, Unavailable, from_grpc
from kvrelay.client.messages import Chunk, Completion, GenerateOptions, ModelInfo, Prompt, channel_options
from kvrelay.client.security import Tls, metadata
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub

ResponseT = TypeVar("ResponseT")
if TYPE_CHECKING:
    Call: TypeAlias = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncChunkStream(AsyncIterator[Chunk], AbstractAsyncContextManager["AsyncChunkStream"]):
    """The chunks of one request, as they come, whichever router sends them.

    Ending it early cancels the request on every worker: by `aclose`, by leaving an `async with`, by cancelling the task
    that reads it, or by dropping the last reference to it, as a `break` out of `async for` may do.
    """

    def __init__(self, course: Course, call: "Call", begin: Callable[[Course], "Call"]) -> None:
        """
        Args:
            call: the first one of the course.
            begin: starts the next one.
        """
        self._course = course
        self._call = call
        self._begin = begin
        self._responses = call.__aiter__()
        self._closed = asyncio.Event()

    async def __anext__(self) -> Chunk:
        """
        Raises:
            KvrelayError: the request failed.
        """
        while True:
            try:
                response = await _result(anext(self._responses))
            except KvrelayError as error:
                await self._resume(error)
            except asyncio.CancelledError:
                # gRPC doesn't cancel the call if its request has just been sent when the reader is cancelled.
                self._call.cancel()
                raise
            else:
                if self._course.received(response):
                    return messages.chunk(response)

    async def aclose(self) -> None:
        """Cancels the request unless it has ended."""
        self._closed.set()
        self._call.cancel()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._call.cancel()

    async def _resume(self, error: KvrelayError) -> None:
        """Begins the next call, after a pause.

        Raises:
            KvrelayError: the request is over.
        """
        if self._closed.is_set():
            # The connection may have been lost just before.
            raise Cancelled("the call was cancelled", grpc.StatusCode.CANCELLED) from error
        pause = self._course.failed(error)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), pause)
            raise Cancelled("the call was cancelled", grpc.StatusCode.CANCELLED)
        self._call = self._begin(self._course)
        self._responses = self._call.__aiter__()


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """Calls the routers of a cluster from one event loop.

    >>> async with AsyncClient("localhost:50051") as client:
    ...     async for chunk in client.generate("def __init__(self,", max_tokens=64, temperature=0):
    ...         print(chunk.text, end="", flush=True)
    ...     (await client.complete([1, 2, 3], seed=7)).text
    """

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        timeout: float | None = None,
        resume_seconds: float = RESUME_SECONDS,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Takes the same arguments as `Client`."""
        self._timeout = timeout
        self._resume_seconds = resume_seconds
        self._routers = Routers(target)
        options = channel_options(len(self._routers.addresses))
        self._metadata = metadata(api_key)
        self._channels = [
            grpc.aio.insecure_channel(address, options=options)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials(), options=tls.options(options))
            for address in self._routers.addresses
        ]
        self._stubs = [InferenceServiceStub(channel) for channel in self._channels]
        self._closed = False

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncChunkStream:
        """Starts a request and returns its stream; `GenerateOptions` describes the options.

        Raises:
            InvalidRequest: an option can't be sent. What the router refuses is raised by the stream.
        """
        request = messages.generate_request(prompt, options)
        timeout = options.get("timeout")
        timeout = self._timeout if timeout is None else timeout
        course = Course(request, self._routers, timeout, self._resume_seconds)
        return AsyncChunkStream(course, self._begin(course), self._begin)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Like `generate`, but returns the whole completion.

        Raises:
            KvrelayError: the request failed.
        """
        messages.check_single(options)
        async with self.generate(prompt, **options) as stream:
            return messages.completion([chunk async for chunk in stream])

    async def completions(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Like `complete`, but returns all of the `n` completions.

        Raises:
            KvrelayError: the request failed.
        """
        async with self.generate(prompt, **options) as stream:
            return messages.completions([chunk async for chunk in stream], options.get("n") or 1)

    async def model_info(self) -> ModelInfo:
        """The served model.

        Raises:
            KvrelayError: there is no router, or it has no worker yet.
        """
        return messages.model_info(await self._unary(lambda stub: stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def tokenize(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a text, or of chat messages through the model's chat template."""
        request = messages.tokenize_request(prompt)
        response: pb.TokenizeResponse = await self._unary(lambda stub: stub.Tokenize, request)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        request = messages.detokenize_request(token_ids)
        response: pb.DetokenizeResponse = await self._unary(lambda stub: stub.Detokenize, request)
        return response.text

    async def close(self) -> None:
        """Ends every running call."""
        self._closed = True
        for channel in self._channels:
            await channel.close(None)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _begin(self, course: Course) -> "Call":
        if self._closed:
            raise Cancelled("the client is closed", grpc.StatusCode.CANCELLED)
        call: Call = self._stubs[course.router].Generate(course.call(), timeout=course.timeout, metadata=self._metadata)
        return call

    async def _unary(
        self, method: Callable[[InferenceServiceStub], Callable[..., Awaitable[ResponseT]]], request: object
    ) -> ResponseT:
        """The answer of the first router that can be reached."""
        routers = self._routers
        router = routers.first()
        for _ in routers.addresses[1:]:
            try:
                return await _result(
                    method(self._stubs[router])(request, timeout=self._timeout, metadata=self._metadata)
                )
            except Unavailable:
                router = routers.after(router)
        return await _result(method(self._stubs[router])(request, timeout=self._timeout, metadata=self._metadata))


async def _result(call: Awaitable[ResponseT]) -> ResponseT:
    """The result of `call`; its errors become this package's."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_grpc(error) from None
    except asyncio.CancelledError:
        # grpc.aio also raises it for a call that the other side or `aclose` has cancelled.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled("the call was cancelled", grpc.StatusCode.CANCELLED) from None
