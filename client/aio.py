"""The asyncio client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar, Unpack

import grpc

from kvrelay.client import messages
from kvrelay.client.errors import Cancelled, from_grpc
from kvrelay.client.messages import CHANNEL_OPTIONS, Chunk, Completion, GenerateOptions, ModelInfo, Prompt
from kvrelay.client.security import Tls, metadata
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub

ResponseT = TypeVar("ResponseT")


class AsyncChunkStream(AsyncIterator[Chunk], AbstractAsyncContextManager["AsyncChunkStream"]):
    """The chunks of one request, as they come.

    Ending it early cancels the request on every worker: by `aclose`, by leaving an `async with`, by cancelling the task
    that reads it, or by dropping the last reference to it, as a `break` out of `async for` may do.
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
        """Cancels the request unless it has ended."""
        self._call.cancel()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """Calls a router from one event loop.

    >>> async with AsyncClient("localhost:50051") as client:
    ...     async for chunk in client.generate("def __init__(self,", max_tokens=64, temperature=0):
    ...         print(chunk.text, end="", flush=True)
    ...     (await client.complete([1, 2, 3], seed=7)).text
    """

    def __init__(
        self, target: str, *, timeout: float | None = None, api_key: str | None = None, tls: Tls | None = None
    ) -> None:
        """
        Args:
            target: host:port of a router.
            timeout: time limit in seconds of each call that has none of its own; None for no limit.
            api_key: for a router that asks for one; without `tls` it travels in plaintext.
            tls: None for a router without TLS.

        Raises:
            OSError: a file of `tls` can't be read.
        """
        self._timeout = timeout
        self._metadata = metadata(api_key)
        self._channel = (
            grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(target, tls.credentials(), options=tls.options)
        )
        self._stub = InferenceServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncChunkStream:
        """Starts a request and returns its stream; `GenerateOptions` describes the options.

        Raises:
            InvalidRequest: an option can't be sent. What the router refuses is raised by the stream.
        """
        request = messages.generate_request(prompt, options)
        timeout = options.get("timeout")
        limit = self._timeout if timeout is None else timeout
        return AsyncChunkStream(self._stub.Generate(request, timeout=limit, metadata=self._metadata))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Like `generate`, but returns the whole completion.

        Raises:
            KvrelayError: the request failed.
        """
        async with self.generate(prompt, **options) as stream:
            return messages.completion([chunk async for chunk in stream])

    async def model_info(self) -> ModelInfo:
        """The served model.

        Raises:
            KvrelayError: there is no router, or it has no worker yet.
        """
        return messages.model_info(await self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

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
        """Ends every running call."""
        await self._channel.close(None)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unary(self, method: Callable[..., Awaitable[ResponseT]], request: object) -> ResponseT:
        return await _result(method(request, timeout=self._timeout, metadata=self._metadata))


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
