"""The client for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from kvrelay.client import messages
from kvrelay.client.errors import Cancelled, from_grpc
from kvrelay.client.messages import Chunk, Completion, GenerateOptions, ModelInfo, Prompt
from kvrelay.client.options import CHANNEL_OPTIONS
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub

ResponseT = TypeVar("ResponseT")


class AsyncChunkStream(AsyncIterator[Chunk]):
    """The chunks of one request, as they come.

    Ending it early (`aclose`, leaving an `async with`, cancelling the task that reads it, or letting go of it, as a
    `break` out of `async for` does when nothing else refers to it) cancels the request on every worker.
    """

    def __init__(self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> None:
        self._call = call
        self._responses = call.__aiter__()

    async def __anext__(self) -> Chunk:
        """
        Raises:
            KvrelayError: the request failed.
        """
        return messages.chunk(await _result(anext(self._responses)))

    async def aclose(self) -> None:
        """Cancels the request unless it is over."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncClient:
    """Calls a router from one event loop.

    >>> async with AsyncClient("localhost:50051") as client:
    ...     async for chunk in client.generate("def __init__(self,", max_tokens=64, temperature=0):
    ...         print(chunk.text, end="", flush=True)
    ...     (await client.complete([1, 2, 3], seed=7)).text
    """

    def __init__(self, target: str, *, timeout: float | None = None) -> None:
        """
        Args:
            target: host:port of a router.
            timeout: seconds that a call may take, unless the call says otherwise; None for no limit.
        """
        self._timeout = timeout
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = InferenceServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncChunkStream:
        """Starts a request and returns its stream; `GenerateOptions` says what the options are.

        Raises:
            InvalidRequest: an option can't be sent; what the router refuses is raised by the stream.
        """
        request = messages.generate_request(prompt, options)
        timeout = options.get("timeout")
        return AsyncChunkStream(self._stub.Generate(request, timeout=self._timeout if timeout is None else timeout))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """As `generate`, collected.

        Raises:
            KvrelayError: the request failed.
        """
        async with self.generate(prompt, **options) as stream:
            return messages.completion([chunk async for chunk in stream])

    async def model_info(self) -> ModelInfo:
        """What is served.

        Raises:
            KvrelayError: no router, or no worker yet.
        """
        response: pb.GetModelInfoResponse = await self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        return messages.model_info(response)

    async def tokenize(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a text, or of chat messages through the model's chat template."""
        response: pb.TokenizeResponse = await self._unary(self._stub.Tokenize, messages.tokenize_request(prompt))
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        request = messages.detokenize_request(token_ids)
        response: pb.DetokenizeResponse = await self._unary(self._stub.Detokenize, request)
        return response.text

    async def close(self) -> None:
        """Ends every call that is under way."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, method: Callable[..., Awaitable[ResponseT]], request: object) -> ResponseT:
        return await _result(method(request, timeout=self._timeout))


async def _result(call: Awaitable[ResponseT]) -> ResponseT:
    """What `call` yields, its errors as this package's."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_grpc(error) from None
    except asyncio.CancelledError:
        # grpc.aio raises it as well for a call that was cancelled by the other side, or by `aclose`.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled("the call was cancelled", grpc.StatusCode.CANCELLED) from None
