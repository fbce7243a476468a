"""The client for ordinary, blocking code."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from kvrelay.client import messages
from kvrelay.client.errors import from_grpc
from kvrelay.client.messages import Chunk, Completion, GenerateOptions, ModelInfo, Prompt
from kvrelay.client.options import CHANNEL_OPTIONS
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub

ResponseT = TypeVar("ResponseT")


class Call(Protocol):
    """A streaming call, as grpc makes it."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> object: ...


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request, as they come.

    Ending it early (`close`, leaving a `with`, or letting go of it, as a `break` out of `for` does when nothing else
    refers to it) cancels the request on every worker.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def __next__(self) -> Chunk:
        """
        Raises:
            KvrelayError: the request failed.
        """
        try:
            return messages.chunk(next(self._call))
        except grpc.RpcError as error:
            raise from_grpc(error) from None

    def close(self) -> None:
        """Cancels the request unless it is over."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """Calls a router. Safe to share between threads.

    >>> with Client("localhost:50051") as client:
    ...     for chunk in client.generate("def __init__(self,", max_tokens=64, temperature=0):
    ...         print(chunk.text, end="", flush=True)
    ...     client.complete([1, 2, 3], seed=7).text
    """

    def __init__(self, target: str, *, timeout: float | None = None) -> None:
        """
        Args:
            target: host:port of a router.
            timeout: seconds that a call may take, unless the call says otherwise; None for no limit.
        """
        self._timeout = timeout
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = InferenceServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> ChunkStream:
        """Starts a request and returns its stream; `GenerateOptions` says what the options are.

        Raises:
            InvalidRequest: an option can't be sent; what the router refuses is raised by the stream.
        """
        request = messages.generate_request(prompt, options)
        timeout = options.get("timeout")
        return ChunkStream(self._stub.Generate(request, timeout=self._timeout if timeout is None else timeout))

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """As `generate`, collected.

        Raises:
            KvrelayError: the request failed.
        """
        with self.generate(prompt, **options) as stream:
            return messages.completion(list(stream))

    def model_info(self) -> ModelInfo:
        """What is served.

        Raises:
            KvrelayError: no router, or no worker yet.
        """
        response: pb.GetModelInfoResponse = self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        return messages.model_info(response)

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a text, or of chat messages through the model's chat template."""
        response: pb.TokenizeResponse = self._call(self._stub.Tokenize, messages.tokenize_request(prompt))
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        response: pb.DetokenizeResponse = self._call(self._stub.Detokenize, messages.detokenize_request(token_ids))
        return response.text

    def close(self) -> None:
        """Ends every call that is under way."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Callable[..., ResponseT], request: object) -> ResponseT:
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise from_grpc(error) from None
