"""The HTTP server of a router: OpenAI's API, health and metrics, in the router's own event loop."""

import asyncio
import hashlib
import math
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import aiohttp_cors
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler
from pydantic_core import to_json

from kvrelay.machine import VERSION
from kvrelay.router.doors.connections import Connection, Connections, peer_of
from kvrelay.router.entry.admission import Place
from kvrelay.router.entry.front import Call, Front, together
from kvrelay.router.errors import InvalidRequest, RequestError, SlowReader
from kvrelay.router.faces.http import openapi
from kvrelay.router.faces.http.body import declared_size, read
from kvrelay.router.faces.http.chat import Chats
from kvrelay.router.faces.http.completions import TextChoice
from kvrelay.router.faces.http.connection import BEGUN, READ_BYTES, REQUEST_ID, HttpRunner, Listener
from kvrelay.router.faces.http.errors import UNKNOWN_URL, body_of, error_json, headers_of, status_of
from kvrelay.router.faces.http.exchange import ADDRESSES, JSON, Events, caller_of, check_type
from kvrelay.router.faces.http.reply import Reply
from kvrelay.router.request.reading import Plan
from kvrelay.router.request.validation import CheckedRequest, check_name, is_name
from kvrelay.v1.inference_pb2 import GenerateResponse

PREFLIGHT_SECONDS = 600
"""Seconds for which a browser may remember what it was allowed."""


def _allow_origins(app: web.Application, origins: Iterable[str]) -> None:
    """Allows `origins` every route that the application has so far. No cookies: an API key is a header."""
    options = aiohttp_cors.ResourceOptions(  # type: ignore[no-untyped-call]  # its signature has no types
        allow_headers="*", expose_headers="*", max_age=PREFLIGHT_SECONDS
    )
    allowed = aiohttp_cors.setup(app, defaults=dict.fromkeys(origins, options))
    for route in list(app.router.routes()):
        allowed.add(route)


NAME = web.RequestKey("name", str)
"""The request's name, which the header of its answer has."""
SESSION = "X-Session-Id"
"""Header with `GenerateRequest.session`."""
TIMEOUT = "X-Request-Timeout"
"""Header with the client's deadline, in seconds from receipt."""
MAX_TIMEOUT_SECONDS = 86400.0
CHECKED_AT_ONCE = 16
"""Prompts of one body that are tokenized and checked at a time: the event loop goes through all tasks that can go on
before it looks at other requests."""
CLOSE_SECONDS = 0.5
"""Seconds for answers that are no completions to end when the router is to end."""


@dataclass(frozen=True, slots=True)
class HttpSink:
    """The messages about one prompt of a body."""

    _prompt: int
    _reply: Reply
    _events: Events | None
    """Stream of server-sent events; None for a single answer."""

    @property
    def ready(self) -> bool:
        return self._events is None or self._events.ready

    def write_now(self, message: GenerateResponse) -> None:
        made = self._reply.add_more(self._prompt, message)
        if self._events is not None and made:
            self._events.write_now(made)

    async def write(self, message: GenerateResponse) -> None:
        made = await self._reply.add(self._prompt, message)
        if self._events is not None and made:
            await self._events.write(made)


class HttpFace:
    """Answers HTTP. A client's mistake becomes an error in OpenAI's form; a closed connection cancels its requests."""

    def __init__(self, front: Front, metrics: CollectorRegistry, chats: Chats, connections: Connections) -> None:
        self._front = front
        self._connections = connections
        self._metrics = make_aiohttp_handler(metrics)
        self._chats = chats
        self._created = int(time.time())
        self.app = web.Application(client_max_size=front.config.max_message_bytes, middlewares=[self._answer_errors])
        self.app[ADDRESSES] = front.addresses
        self.app.on_response_prepare.append(_show_name)
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", partial(self._generate, kind="chat")),
                web.post("/v1/completions", partial(self._generate, kind="completion")),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._one_model),
                web.post("/tokenize", partial(self._answer, kind="tokenize")),
                web.post("/detokenize", partial(self._answer, kind="detokenize")),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/version", self._version),
                web.get("/metrics", self._expose_metrics),
                web.get("/openapi.json", self._openapi),
            ]
        )
        if front.config.cors_origins:
            _allow_origins(self.app, front.config.cors_origins)
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None, *, share_port: bool = False) -> int:
        """Binds and serves; returns the port.

        Args:
            share_port: whether other processes serve the same port.

        Raises:
            OSError: the port can't be bound; the text names the option.
        """
        # A connection that its client closes cancels the handler at once.
        config = self._front.config
        runner = HttpRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=CLOSE_SECONDS,
            read_bufsize=READ_BYTES,
            # The deadline is that of `Doors`; without one, aiohttp's own is an hour.
            keepalive_timeout=2 * config.http_idle_seconds,
        )
        await runner.setup()
        self._runner = runner
        make = cast("Callable[[], asyncio.Protocol]", runner.server)
        self._listener = Listener(make, self._connections, tls, config.header_timeout_seconds)
        try:
            return await self._listener.start(host, port, share_port=share_port)
        except OSError as error:
            raise OSError(f"http_port {port}: already in use, or not to be bound, on {host}") from error

    def close_port(self) -> None:
        """Takes no new connections."""
        if self._listener is not None:
            self._listener.close()

    async def stop(self) -> None:
        """Closes all connections; `Front.stop` has ended the calls."""
        self.close_port()
        if self._runner is not None:
            await self._runner.cleanup()

    # Generation.

    async def _generate(self, request: web.Request, kind: Literal["chat", "completion"]) -> web.StreamResponse:
        """Runs the requests of a body, and answers with a stream or with one JSON object."""
        config = self._front.config
        check_name(f"header {REQUEST_ID}", request.headers.get(REQUEST_ID, ""))
        deadline, session = _deadline(request, self._front.dispatch.clock()), request.headers.get(SESSION, "")
        check_type(request)
        size = declared_size(request, config.max_message_bytes)
        events = Events(request, config.idle_timeout_seconds)
        try:
            with self._front.generation(caller_of(request), size, deadline) as call:
                check_name(f"header {SESSION}", session)
                data = await self._read(request, call)
                plan = cast(Plan, await call.read(kind, data, request[NAME], session))
                del data
                request[NAME], form, count = plan.name, plan.form, len(plan.requests)
                requests = list(plan.requests)
                call.chat = kind == "chat"
                if call.chat:
                    head, shown = self._head(f"chatcmpl-{plan.name}"), self._chats.shown(form)
                    reply = Reply(form, "chat.completion", head, partial(self._chats.choice, form))
                else:
                    head, shown = self._head(f"cmpl-{plan.name}"), frozenset()
                    reply = Reply(form, "text_completion", head, partial(TextChoice, form, self._front.tokenizer))
                del plan
                if count > CHECKED_AT_ONCE:
                    await asyncio.sleep(0)

                turns = asyncio.Semaphore(CHECKED_AT_ONCE)

                def begin(at: int, checked: CheckedRequest) -> None:
                    reply.begin(at, checked)
                    turns.release()

                def answer(at: int, place: Place) -> Coroutine[Any, Any, None]:
                    sink = HttpSink(at, reply, events if form.stream else None)
                    return call.generate(requests.pop(), sink, partial(begin, at), shown, place)

                async def each() -> AsyncIterator[Coroutine[Any, Any, None]]:
                    # The last prompt is the first to be taken off the list, which keeps no reference to it.
                    for at in reversed(range(count)):
                        await turns.acquire()  # none is given back by a prompt that fails, which ends the others
                        yield answer(at, await call.place())

                await (answer(0, await call.place()) if count == 1 else together(each()))
                if not form.stream:
                    return _json(reply.whole())
                return await events.end(reply.end())
        except SlowReader:
            raise asyncio.CancelledError from None  # nobody reads an error either
        except RequestError as error:
            if events.begun:
                return await events.end(b"data: " + body_of(error) + b"\n\n")
            raise
        finally:
            events.close()

    def _head(self, id_: str) -> dict[str, str]:
        """The first fields of each answer."""
        model = self._front.model.fingerprint
        digest = hashlib.blake2b(f"{VERSION} {model}".encode(), digest_size=5).hexdigest()
        return {"id": id_, "model": self._front.asking().served_names[0], "system_fingerprint": f"fp_{digest}"}

    async def _read(self, request: web.Request, call: Call) -> bytes:
        config = self._front.config
        data = await read(request, config.max_message_bytes, config.request_timeout_seconds)
        call.ticket.resize(len(data))
        return data

    # Text and tokens.

    async def _answer(self, request: web.Request, kind: Literal["tokenize", "detokenize"]) -> web.Response:
        check_type(request)
        size = declared_size(request, self._front.config.max_message_bytes)
        with self._front.call(caller_of(request), size) as call:
            data = await self._read(request, call)
            call.ticket.begun = True
            return _json(cast(bytes, await call.read(kind, data)))

    # The server.

    async def _models(self, request: web.Request) -> web.Response:
        front = self._front
        front.tenant(caller_of(request))
        return _json(to_json({"object": "list", "data": [self._model(name) for name in front.asking().served_names]}))

    async def _one_model(self, request: web.Request) -> web.Response:
        self._front.tenant(caller_of(request))
        name = request.match_info["name"]
        self._front.asking().check_model(name)
        return _json(to_json(self._model(name)))

    def _model(self, name: str) -> dict[str, Any]:
        model = self._front.model
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvrelay",
            "root": model.name,
            "max_model_len": model.max_context,
        }

    async def _health(self, _: web.Request) -> web.Response:
        return _json(to_json({"status": "alive"}))

    async def _ready(self, _: web.Request) -> web.Response:
        ready = self._front.ready
        return _json(to_json({"ready": ready}), status=200 if ready else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return _json(to_json({"version": VERSION}))

    async def _expose_metrics(self, request: web.Request) -> web.StreamResponse:
        self._front.tenant(caller_of(request))
        return await self._metrics(request)

    async def _openapi(self, _: web.Request) -> web.Response:
        return _json(openapi.document())

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get(REQUEST_ID, "")
        request[NAME] = given if given and is_name(given) else uuid.uuid4().hex
        connection = self._connection(request)
        if connection is not None:
            connection.begin(request.content.is_eof)
        try:
            return await handler(request)
        except RequestError as error:
            return _json(body_of(error), headers_of(error), status_of(error))
        except web.HTTPNotFound:
            text = f"Invalid URL ({request.method} {request.path[:64]}); this server has {openapi.SERVED}"
            return _json(error_json(404, text, code=UNKNOWN_URL), status=404)
        except web.HTTPException as error:
            # The path has another method, or a browser's page may not send this.
            allow = error.headers.get("Allow")
            reason = f"{error.reason}; allowed: {allow}" if allow else error.text
            text = f"{request.method} {request.path[:64]}: {reason}"
            return _json(error_json(error.status, text), {"Allow": allow} if allow else {}, error.status)
        finally:
            if connection is not None:
                connection.end()

    def _connection(self, request: web.Request) -> Connection | None:
        """A request's connection; None if its client has gone."""
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        return self._connections.of(peer_of(*peer[:2])) if peer else None


def _json(body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type=JSON)


async def _show_name(request: web.Request, response: web.StreamResponse) -> None:
    request[BEGUN] = response
    if NAME in request:
        response.headers[REQUEST_ID] = request[NAME]


def _deadline(request: web.Request, now: float) -> float:
    """The client's, on the router's clock, which shows `now`; infinite for none."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return math.inf
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise InvalidRequest(f"header {TIMEOUT}", given, f"seconds, above 0, up to {MAX_TIMEOUT_SECONDS:g}")
    return now + seconds
