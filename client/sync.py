"""The blocking client."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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
    Call: TypeAlias = grpc.CallIterator[pb.GenerateResponse]


class ChunkStream(Iterator[Chunk], AbstractContextManager["ChunkStream"]):
    """The chunks of one request, as they come, whichever router sends them.

    Ending it early cancels the request on every worker: by `close`, by leaving a `with`, or by dropping the last
    reference to it, as a `break` out of `for` may do.
    """

    def __init__(self, course: Course, call: "Call", begin: Callable[[Course], "Call"]) -> None:
        """
        Args:
            call: the first one of the course.
            begin: starts the next one.
        """
        self._course = course
        self._call = call
        self._responses = iter(call)
        self._begin = begin
        self._closed = threading.Event()

    def __next__(self) -> Chunk:
        """
        Raises:
            KvrelayError: the request failed.
        """
        while True:
            try:
                response = next(self._responses)
            except grpc.RpcError as error:
                self._resume(from_grpc(error))
            else:
                if self._course.received(response):
                    return messages.chunk(response)

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        self._closed.set()
        self._call.cancel()  # type: ignore[no-untyped-call]  # by grpc-stubs

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _resume(self, error: KvrelayError) -> None:
        """Begins the next call, after a pause.

        Raises:
            KvrelayError: the request is over.
        """
        if self._closed.is_set():
            # The connection may have been lost just before.
            raise Cancelled("the call was cancelled", grpc.StatusCode.CANCELLED) from error
        if self._closed.wait(self._course.failed(error)):
            raise Cancelled("the call was cancelled", grpc.StatusCode.CANCELLED)
        self._call = self._begin(self._course)
        self._responses = iter(self._call)
        if self._closed.is_set():
            self.close()  # it was closed meanwhile, without this call


class Client(AbstractContextManager["Client"]):
    """Calls the routers of a cluster. Threads may share it.

    >>> with Client("localhost:50051") as client:
    ...     for chunk in client.generate("def __init__(self,", max_tokens=64, temperature=0):
    ...         print(chunk.text, end="", flush=True)
    ...     client.complete([1, 2, 3], seed=7).text
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
        """
        Args:
            target: host:port of a router, or of several, as a sequence or with commas between. Requests take turns, and
                go on at another router if theirs is lost.
            timeout: time limit in seconds of each call that has none of its own; None for no limit.
            resume_seconds: how long a stream that has begun may be without a router, within its timeout; 0 ends it with
                the connection.
            api_key: for a router that asks for one; without `tls` it travels in plaintext.
            tls: None for a router without TLS.

        Raises:
            InvalidRequest: an address is empty.
            OSError: a file of `tls` can't be read.
        """
        self._timeout = timeout
        self._resume_seconds = resume_seconds
        self._routers = Routers(target)
        options = channel_options(len(self._routers.addresses))
        self._metadata = metadata(api_key)
        self._channels = [
            grpc.insecure_channel(address, options=options)
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), options=tls.options(options))
            for address in self._routers.addresses
        ]
        self._stubs = [InferenceServiceStub(channel) for channel in self._channels]
        self._closed = False

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> ChunkStream:
        """Starts a request and returns its stream; `GenerateOptions` describes the options.

        Raises:
            InvalidRequest: an option can't be sent. What the router refuses is raised by the stream.
        """
        request = messages.generate_request(prompt, options)
        timeout = options.get("timeout")
        timeout = self._timeout if timeout is None else timeout
        course = Course(request, self._routers, timeout, self._resume_seconds)
        return ChunkStream(course, self._begin(course), self._begin)

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Like `generate`, but returns the whole completion.

        Raises:
            KvrelayError: the request failed.
        """
        messages.check_single(options)
        with self.generate(prompt, **options) as stream:
            return messages.completion(list(stream))

    def completions(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Like `complete`, but returns all of the `n` completions.

        Raises:
            KvrelayError: the request failed.
        """
        with self.generate(prompt, **options) as stream:
            return messages.completions(list(stream), options.get("n") or 1)

    def model_info(self) -> ModelInfo:
        """The served model.

        Raises:
            KvrelayError: there is no router, or it has no worker yet.
        """
        return messages.model_info(self._unary(lambda stub: stub.GetModelInfo, pb.GetModelInfoRequest()))

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a text, or of chat messages through the model's chat template."""
        response: pb.TokenizeResponse = self._unary(lambda stub: stub.Tokenize, messages.tokenize_request(prompt))
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        request = messages.detokenize_request(token_ids)
        response: pb.DetokenizeResponse = self._unary(lambda stub: stub.Detokenize, request)
        return response.text

    def close(self) -> None:
        """Ends every running call."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, course: Course) -> "Call":
        if self._closed:
            raise Cancelled("the client is closed", grpc.StatusCode.CANCELLED)
        call: Call = self._stubs[course.router].Generate(course.call(), timeout=course.timeout, metadata=self._metadata)
        return call

    def _unary(self, method: Callable[[InferenceServiceStub], Callable[..., ResponseT]], request: object) -> ResponseT:
        """The answer of the first router that can be reached."""
        routers = self._routers
        router = routers.first()
        for _ in routers.addresses[1:]:
            try:
                return self._ask(method(self._stubs[router]), request)
            except Unavailable:
                router = routers.after(router)
        return self._ask(method(self._stubs[router]), request)

    def _ask(self, method: Callable[..., ResponseT], request: object) -> ResponseT:
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_grpc(error) from None
