"""The HTTP server of a router: OpenAI's API, health and metrics, in the router's own event loop."""

import asyncio
import logging
import math
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from kvrelay.router.errors import InvalidRequest, RequestError, SlowReader
from kvrelay.router.front import Call, Front, together
from kvrelay.router.http import openapi
from kvrelay.router.http.body import declared_size, parse, read
from kvrelay.router.http.chat import ChatRequest, Chats
from kvrelay.router.http.completions import CompletionRequest, TextChoice
from kvrelay.router.http.errors import body_of, error_json, headers_of, status_of
from kvrelay.router.http.exchange import JSON, Events, caller_of, check_type
from kvrelay.router.http.reply import Reply
from kvrelay.router.http.texts import DetokenizeRequest, TokenizeRequest
from kvrelay.router.metrics import CONTENT_TYPE, PrometheusMetrics
from kvrelay.router.validation import TOKENIZE_BYTES
from kvrelay.v1.inference_pb2 import GenerateRequest, GenerateResponse

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
SESSION = "X-Session-Id"
"""Header with `GenerateRequest.session`."""
TIMEOUT = "X-Request-Timeout"
"""Header with the client's deadline, in seconds from receipt."""
MAX_TIMEOUT_SECONDS = 86400.0
CLOSE_SECONDS = 0.5
"""For answers that are no completions to end when the router is to end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done for one HTTP request."""

    requests: list[GenerateRequest]
    reply: Reply
    stream: bool
    shown: frozenset[int] = frozenset()
    """Special tokens whose names are part of the text."""


class HttpFace:
    """Answers HTTP. A client's mistake becomes an error in OpenAI's form; a closed connection cancels its requests."""

    def __init__(self, front: Front, metrics: PrometheusMetrics, chats: Chats) -> None:
        self._front = front
        self._metrics = metrics
        self._chats = chats
        self._created = int(time.time())
        self.app = web.Application(client_max_size=front.config.max_message_bytes, middlewares=[self._answer_errors])
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._one_model),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/version", self._version),
                web.get("/metrics", self._expose_metrics),
                web.get("/openapi.json", self._openapi),
            ]
        )
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None, *, share_port: bool = False) -> int:
        """Binds and serves; returns the port.

        Args:
            share_port: whether other processes serve the same port.

        Raises:
            OSError: the port can't be bound; the text names the option.
        """
        # A connection that its client closes cancels the handler at once.
        runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=CLOSE_SECONDS,
        )
        await runner.setup()
        self._runner = runner
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls, reuse_port=share_port).start()
        except OSError as error:
            raise OSError(f"http_port {port}: already in use, or not to be bound, on {host}") from error
        return int(runner.addresses[0][1])

    async def stop(self) -> None:
        """Closes all connections; `Front.stop` has ended the calls."""
        if self._runner is not None:
            await self._runner.cleanup()

    # Generation.

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async def plan(data: bytes, request_id: str) -> Plan:
            body = await parse(ChatRequest, data, self._front.model.max_context)
            self._front.check_model(body.model or "")
            chat = self._chats.plan(body)
            request_id = body.request_id or request_id
            head = {"id": f"chatcmpl-{request_id}", "model": self._front.served_names[0]}
            reply = Reply(body, "chat.completion", head, chat.choice)
            return Plan([chat.request(request_id)], reply, bool(body.stream), chat.shown)

        return await self._generate(request, plan)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        async def plan(data: bytes, request_id: str) -> Plan:
            body = await parse(CompletionRequest, data, self._front.model.max_context)
            self._front.check_model(body.model or "")
            request_id = body.request_id or request_id
            head = {"id": f"cmpl-{request_id}", "model": self._front.served_names[0]}
            reply = Reply(body, "text_completion", head, partial(TextChoice, body, self._front.tokenizer))
            return Plan(body.requests(request_id), reply, bool(body.stream))

        return await self._generate(request, plan)

    async def _generate(
        self, request: web.Request, make_plan: Callable[[bytes, str], Awaitable["Plan"]]
    ) -> web.StreamResponse:
        """Runs the requests of a body, and answers with a stream or with one JSON object."""
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        config = self._front.config
        deadline = _deadline(request)
        check_type(request)
        size = declared_size(request, config.max_message_bytes)
        events = Events(request, config.idle_timeout_seconds, {REQUEST_ID: request_id})
        try:
            with self._front.generation(caller_of(request), size, deadline) as call:
                plan = await make_plan(await self._read(request, call), request_id)
                count = len(plan.requests)
                _set_session(request, plan.requests)

                async def run(at: int) -> None:
                    async def write(message: GenerateResponse) -> None:
                        made = await plan.reply.add(at, message)
                        if plan.stream and made:
                            await events.write(made)

                    begin = partial(plan.reply.begin, at)
                    await call.generate(plan.requests.pop(), write, begin, plan.shown)

                # The last prompt is the first to be taken off the list, which keeps no reference to it.
                with call.ticket.more_calls(count - 1):
                    await together([run(at) for at in reversed(range(count))])
                if not plan.stream:
                    return _json(plan.reply.whole(), {REQUEST_ID: request_id})
                return await events.end(plan.reply.end())
        except SlowReader:
            raise asyncio.CancelledError from None  # nobody reads an error either
        except RequestError as error:
            if events.begun:
                return await events.end(b"data: " + body_of(error) + b"\n\n")
            raise
        finally:
            events.close()

    async def _read(self, request: web.Request, call: Call) -> bytes:
        config = self._front.config
        data = await read(request, config.max_message_bytes, config.idle_timeout_seconds)
        call.ticket.resize(len(data))
        return data

    # Text and tokens.

    async def _tokenize(self, request: web.Request) -> web.Response:
        check_type(request)
        size = declared_size(request, self._front.config.max_message_bytes)
        with self._front.call(caller_of(request), size) as call:
            body = await parse(TokenizeRequest, await self._read(request, call), 0)
            self._front.check_model(body.model or "")
            return _json(await body.answer(self._front.model, self._front.tokenizer))

    async def _detokenize(self, request: web.Request) -> web.Response:
        check_type(request)
        size = declared_size(request, self._front.config.max_message_bytes)
        with self._front.call(caller_of(request), size) as call:
            body = await parse(DetokenizeRequest, await self._read(request, call), TOKENIZE_BYTES)
            self._front.check_model(body.model or "")
            return _json(await body.answer(self._front.model, self._front.tokenizer))

    # The server.

    async def _models(self, request: web.Request) -> web.Response:
        front = self._front
        front.tenant(caller_of(request))
        return _json(to_json({"object": "list", "data": [self._model(name) for name in front.served_names]}))

    async def _one_model(self, request: web.Request) -> web.Response:
        self._front.tenant(caller_of(request))
        name = request.match_info["name"]
        self._front.check_model(name)
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
        return _json(to_json({"version": version("kvrelay")}))

    async def _expose_metrics(self, request: web.Request) -> web.Response:
        self._front.tenant(caller_of(request))
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, _: web.Request) -> web.Response:
        return _json(openapi.document())

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestError as error:
            return _json(body_of(error), headers_of(error), status_of(error))
        except web.HTTPException as error:
            # The path is unknown, or its method is another one.
            allow = error.headers.get("Allow")
            text = f"{request.method} {request.path[:64]}: {error.reason}" + (f"; allowed: {allow}" if allow else "")
            return _json(error_json(error.status, text), {"Allow": allow} if allow else {}, error.status)


def _json(body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type=JSON)


def _set_session(request: web.Request, requests: Sequence[GenerateRequest]) -> None:
    """The header wins over the body."""
    if SESSION in request.headers:
        for each in requests:
            each.session = request.headers[SESSION]


def _deadline(request: web.Request) -> float:
    """The client's, on the monotonic clock; infinite for none."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return math.inf
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise InvalidRequest(f"header {TIMEOUT}", given, f"seconds, above 0, up to {MAX_TIMEOUT_SECONDS:g}")
    return time.monotonic() + seconds
