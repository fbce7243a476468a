"""Reads requests: from the bytes of a body or a message to checked requests, or to a finished answer.

A small request is read on the event loop, and checked when its turn comes. A large one is read and checked in another
process (`router/request/lanes.py`): a call of a library that parses it would hold the interpreter for up to 20 ms.
Both use the same readers, one for each kind of request (`router/faces/readers.py`).
"""

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no types

from kvrelay.internal.v1.worker_pb2 import ClientCall, ModelInfo, Sampling
from kvrelay.router.errors import (
    BadField,
    InvalidArgument,
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    RequestError,
    Unavailable,
    shorten,
)
from kvrelay.router.request.lanes import Lanes
from kvrelay.router.request.prompt import Prompt
from kvrelay.router.request.sampling import Defaults
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.request.validation import CheckedRequest, Resumed, check
from kvrelay.router.shares import Turns
from kvrelay.v1.inference_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True)
class Asking:
    """Facts about a request, besides its bytes, that are needed to read it."""

    kind: str
    """Name of its reader."""
    tenant: str
    """Tenant of the caller."""
    loaded: ModelInfo | None
    """The workers' model; None before the first of them was met."""
    served: tuple[str, ...] = ()
    """Names of the model by the router's options."""
    name: str = ""
    """Name of the request, unless its body has one."""
    session: str = ""
    """Session of the request, in place of that of its body."""

    @property
    def model(self) -> ModelInfo:
        """
        Raises:
            Unavailable: no worker has told it yet.
        """
        if self.loaded is None:
            raise Unavailable("no worker is ready yet")
        return self.loaded

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that requests may give the model, the first of which is its name in answers."""
        return self.served or (self.model.name,)

    def check_model(self, name: str) -> None:
        """Checks the model that a request names; empty is the served one.

        Raises:
            ModelNotFound: it is another one.
            Unavailable: no worker is ready yet.
        """
        if name and name not in self.served_names:
            known = ", ".join(map(repr, self.served_names))
            raise ModelNotFound(f"model is {shorten(name)}; allowed: {known}, or empty")

    def message(self) -> dict[str, Any]:
        """The same facts as JSON."""
        model = None if self.loaded is None else self.loaded.SerializeToString().hex()
        return {name: getattr(self, name) for name in ("kind", "tenant", "served", "name", "session")} | {
            "loaded": model
        }

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Asking":
        """The opposite of `message`."""
        given = {name: message[name] for name in ("kind", "tenant", "name", "session")}
        model = message["loaded"]
        loaded = None if model is None else ModelInfo.FromString(bytes.fromhex(model))
        return cls(**given, served=tuple(message["served"]), loaded=loaded)


@dataclass(frozen=True, slots=True)
class Form:
    """Form of the answer that the client of an HTTP request wants, as needed once the prompts are known."""

    n: int = 1
    """Completions of each prompt."""
    stream: bool = False
    usage_chunk: bool = False
    """Whether a last chunk has the usage."""
    usage_in_chunks: bool = False
    """Whether every chunk has the usage up to it."""
    logprobs: bool = False
    """Whether the answer has log-probabilities."""
    token_ids: bool = False
    """Whether choices have the ids of their tokens."""
    timeline: bool = False
    """Whether choices have a timeline at their end."""
    service_tier: str = ""
    """Class of service that the answer names, in OpenAI's words; empty if the request names none."""
    echo: bool = False
    """Whether a text begins with the prompt."""
    alone: bool = False
    """Whether a text is the prompt alone."""
    reasoning: bool = True
    """Whether an answer has what the model thought."""
    tools: tuple[str, ...] = ()
    """Names of the functions that the model may call."""
    forced: bool = False
    """Whether it has to call one."""
    named: str | None = None
    """The function that it has to call."""
    one_call: bool = False
    """Whether it may call no more than one."""


class PackedRequest:
    """A checked request, as it came from another process."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    @classmethod
    def of(cls, request: GenerateRequest, checked: CheckedRequest) -> "PackedRequest":
        """
        Args:
            request: what `checked` was made of.
        """
        head = GenerateRequest(
            request_id=request.request_id,
            model=request.model,
            tenant=request.tenant,
            slo_class=request.slo_class,
            priority=request.priority,
            n=request.n if request.HasField("n") else None,
        )
        if request.HasField("messages"):
            head.messages.SetInParent()
        call = checked.client_call
        resumed = (checked.resumed, *checked.others_resumed)
        return cls(
            msgpack.packb(
                (
                    head.SerializeToString(),
                    (checked.request_id, checked.wire_id, checked.tenant, checked.namespace, checked.key),
                    (checked.prompt.packed, len(checked.prompt), checked.tail, array("Q", checked.chain).tobytes()),
                    checked.sampling.SerializeToString(),
                    checked.stop,
                    None if call is None else call.SerializeToString(),
                    [(array("I", each.tokens).tobytes(), each.finish_reason, each.field) for each in resumed],
                )
            )
        )

    @property
    def data(self) -> bytes:
        """The request as bytes."""
        return self._data

    def open(self) -> tuple[GenerateRequest, CheckedRequest]:
        """The message without its prompt and all that has been checked, and the checked request."""
        head, names, prompt, sampling, stop, call, resumed = msgpack.unpackb(self._data, use_list=False)
        request_id, wire_id, tenant, namespace, key = names
        first, *others = (Resumed(array("I", tokens), reason, field) for tokens, reason, field in resumed)
        checked = CheckedRequest(
            request_id,
            wire_id,
            Prompt.of_packed(prompt[0], prompt[1]),
            Sampling.FromString(sampling),
            stop,
            tenant,
            prompt[2],
            namespace=namespace,
            chain=array("Q", prompt[3]),
            key=key,
            client_call=None if call is None else ClientCall.FromString(call),
            resumed=first,
            others_resumed=tuple(others),
        )
        return GenerateRequest.FromString(head), checked


@dataclass(slots=True)
class Plan:
    """The requests to generate that a body or a message holds."""

    requests: list[GenerateRequest | PackedRequest]
    """Requests, one for each prompt; those of a small body are checked later."""
    name: str = ""
    """Name of the request."""
    form: Form = Form()

    @property
    def slo_class(self) -> str:
        """Class of service of its requests; empty if they name none."""
        first = self.requests[0]
        return (first.open()[0] if isinstance(first, PackedRequest) else first).slo_class


@dataclass(frozen=True, slots=True)
class Reader:
    """Reader of the requests of one kind."""

    read: Callable[[bytes, Asking], Awaitable[Plan | bytes]]
    """Reads a body; returns the plan of what is generated, or the answer. Raises RequestError."""
    is_light: Callable[[bytes], bool]
    """Says whether a request may be read on the event loop."""


_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind
    for kind in (InvalidArgument, InvalidRequest, PromptTooLong, BadField, ModelNotFound, Unavailable)
}
"""Errors of requests that can't be read, by their names."""


class Reading:
    """Reader of a router's requests; used on the event loop, and in each lane."""

    def __init__(
        self, tokenizer: Tokenizer, defaults: Defaults, readers: Mapping[str, Reader], lanes: Lanes | None
    ) -> None:
        """
        Args:
            readers: by the kinds of requests.
            lanes: None in a lane itself.
        """
        self.tokenizer = tokenizer
        self.defaults = defaults
        """Defaults of the fields that a request leaves out."""
        self._readers = readers
        self._lanes = lanes
        self.turns = Turns()
        """Turns of work that takes the event loop for a millisecond or more, by holder."""

    async def read(self, data: bytes, asking: Asking, holder: str) -> Plan | bytes:
        """
        Args:
            holder: whose requests wait behind each other.

        Raises:
            RequestError: the request is wrong, or can't be read.
        """
        if self._lanes is not None and not self._readers[asking.kind].is_light(data):
            return _result(*await self._lanes.run(holder, asking.message(), data))
        await self.turns.take(holder)
        return await self._readers[asking.kind].read(data, asking)

    async def read_all(self, data: bytes, asking: Asking) -> tuple[dict[str, Any], bytes]:
        """Reads a request and checks all of its prompts; the result, or the error, as a message and bytes."""
        try:
            found = await self._readers[asking.kind].read(data, asking)
            if isinstance(found, bytes):
                return {}, found
            parts = []
            for request in found.requests:
                if not isinstance(request, PackedRequest):
                    checked = await check(request, asking.tenant, asking.model, self.tokenizer, self.defaults)
                    request = PackedRequest.of(request, checked)
                parts.append(request.data)
        except RequestError as error:
            name = error.name if isinstance(error, BadField) else None
            return {"error": type(error).__name__, "text": str(error), "field": error.field, "name": name}, b""
        return {"sizes": list(map(len, parts)), "name": found.name, "form": asdict(found.form)}, b"".join(parts)


def _result(message: Mapping[str, Any], data: bytes) -> Plan | bytes:
    """The plan or the answer that `Reading.read_all` has read.

    Raises:
        RequestError: the request is wrong.
    """
    if "error" in message:
        kind = _ERRORS[message["error"]]
        error = kind.__new__(kind, message["text"])
        error.field = message["field"]
        if isinstance(error, BadField):
            error.name = message["name"]
        raise error
    if "sizes" not in message:
        return data
    requests: list[GenerateRequest | PackedRequest] = []
    at = 0
    for size in message["sizes"]:
        requests.append(PackedRequest(data[at : at + size]))
        at += size
    form = message["form"] | {"tools": tuple(message["form"]["tools"])}
    return Plan(requests, message["name"], Form(**form))
