"""The blocking client."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar, Unpack

import grpc

from kvrelay.client import messages
from kvrelay.client.errors import from_grpc
from kvrelay.client.messages import CHANNEL_OPTIONS, Chunk, Completion, GenerateOptions, ModelInfo, Prompt
from kvrelay.client.security import Tls, metadata
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub

ResponseT = TypeVar("ResponseT")


class ChunkStream(Iterator[Chunk], AbstractContextManager["ChunkStream"]):
    """The chunks of one request, as they come.

    Ending it early cancels the request on every worker: by `close`, by leaving a `with`, or by dropping the last
    reference to it, as a `break` out of `for` may do.
    """

    def __init__(self, call: "grpc.CallIterator[pb.GenerateResponse]") -> None:
        self._call = call
        self._responses = iter(call)

    def __next__(self) -> Chunk:
        """
        Raises:
            KvrelayError: the request failed.
        """
        try:
            return messages.chunk(next(self._responses))
        except grpc.RpcError as error:
            raise from_grpc(error) from None

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        self._call.cancel()  # type: ignore[no-untyped-call]  # by grpc-stubs

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client(AbstractContextManager["Client"]):
    """Calls a router. Threads may share it.

    >>> with Client("localhost:50051") as client:
    ...     for chunk in client.generate("def __init__(self,", max_tokens=64, temperature=0):
    ...         print(chunk.text, end="", flush=True)
    ...     client.complete([1, 2, 3], seed=7).text
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
            grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options=tls.options)
        )
        self._stub = InferenceServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> ChunkStream:
        """Starts a request and returns its stream; `GenerateOptions` describes the options.

        Raises:
            InvalidRequest: an option can't be sent. What the router refuses is raised by the stream.
        """
        request = messages.generate_request(prompt, options)
        timeout = options.get("timeout")
        limit = self._timeout if timeout is None else timeout
        return ChunkStream(self._stub.Generate(request, timeout=limit, metadata=self._metadata))

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Like `generate`, but returns the whole completion.

        Raises:
            KvrelayError: the request failed.
        """
        with self.generate(prompt, **options) as stream:
            return messages.completion(list(stream))

    def model_info(self) -> ModelInfo:
        """The served model.

        Raises:
            KvrelayError: there is no router, or it has no worker yet.
        """
        return messages.model_info(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a text, or of chat messages through the model's chat template."""
        response: pb.TokenizeResponse = self._call(self._stub.Tokenize, messages.tokenize_request(prompt))
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        response: pb.DetokenizeResponse = self._call(self._stub.Detokenize, messages.detokenize_request(token_ids))
        return response.text

    def close(self) -> None:
        """Ends every running call."""
        self._channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Callable[..., ResponseT], request: object) -> ResponseT:
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_grpc(error) from None
