"""The HTTP face over scripted workers: errors, limits, closed connections, drains and keys."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.http_calls import CHAT, HELLO
from support.router_fakes import Job, colocated_of, fake, key_file, pair, silent, until, within
from support.scenes import Serve

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "secret"}}
CONSTRAINTS = {"guided_regex": "a", "response_format": {"type": "json_object"}}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"temperature": "x"}, "temperature is 'x'; allowed: number", "invalid_type"),
    (COMPLETIONS, {"temperature": 101.5}, "temperature is 101.5; allowed: less than or", "decimal_above_max_value"),
    (COMPLETIONS, {"best_of": 3}, "best_of is 3; allowed: null or 1; not served otherwise", "unsupported_value"),
    (COMPLETIONS, {"suffix": "x"}, "suffix is 'x'; allowed: null or \"\"; not served otherwise", "unsupported_value"),
    (COMPLETIONS, {"foo": 1}, "foo is not a field that this server knows", "unknown_parameter"),
    (COMPLETIONS, {"n": 0}, "n is 0; allowed: greater than or equal to 1", "integer_below_min_value"),
    (COMPLETIONS, {"n": 129}, "n is 129; allowed: less than or equal to 128", "integer_above_max_value"),
    (COMPLETIONS, {"stop": ["a", 1]}, "stop[1] is 1; allowed: string", "invalid_type"),
    (COMPLETIONS, {"stop": "x" * 300}, "stop is ", "string_above_max_length"),
    (COMPLETIONS, {"prompt": []}, "prompt is an array; allowed: a string, a list of token ids, or", "invalid_value"),
    (COMPLETIONS, {"prompt": [5, 4000]}, "prompt[1] is 4000; allowed: 0 to 399, the model's", "invalid_value"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt is an array; allowed: a string, a list of token ids", "invalid_value"),
    (COMPLETIONS, {"prompt": [5] * 64}, "prompt: number of tokens is 64", "context_length_exceeded"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens is 0; allowed: 1 or more, or 0 with echo", "invalid_value"),
    (COMPLETIONS, {"max_tokens": 61}, "max_tokens is 61; allowed: up to 60: the prompt", "context_length_exceeded"),
    (COMPLETIONS, {"min_tokens": 9}, "min_tokens is 9; allowed: 0 to max_tokens, 4 here", "invalid_value"),
    (COMPLETIONS, {"stream_options": {}}, "stream_options is an object; allowed: with stream", "invalid_value"),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias.1 is 101; allowed: less than or", "integer_above_max_value"),
    (COMPLETIONS, CONSTRAINTS, "structured_outputs is an object; allowed: one constraint", "invalid_value"),
    (
        COMPLETIONS,
        {"slo_class": "x"},
        "slo_class is 'x'; allowed: 'default', 'interactive', 'batch', or",
        "invalid_value",
    ),
    (
        COMPLETIONS,
        {"service_tier": "fast"},
        "service_tier is 'fast'; allowed: 'auto', 'default', 'scale', ",
        "invalid_value",
    ),
    (
        CHATS,
        {"service_tier": "flex", "slo_class": "default"},
        "service_tier is 'flex'; allowed: null, auto, or the tier of the class that slo_class names",
        "invalid_value",
    ),
    (CHATS, {"messages": []}, "messages is an array; allowed: at least 1 item", "array_below_min_length"),
    (CHATS, {"messages": "secret"}, "messages is a string; allowed: array", "invalid_type"),
    (CHATS, {"messages": [{"content": "x"}]}, "messages[0].role ", "missing_required_parameter"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0] is an object; allowed: a part of the type 'text': this server takes text only",
        "invalid_value",
    ),
    (CHATS, {"functions": []}, "functions is an array; allowed: null; not served", "unsupported_value"),
    (CHATS, {"modalities": ["audio"]}, "modalities is an array; allowed: null or", "unsupported_value"),
    (CHATS, {"store": True}, "store is true; allowed: null or", "unsupported_value"),
    (CHATS, {"top_logprobs": 2}, "top_logprobs is 2; allowed: with logprobs only", "invalid_value"),
    (CHATS, {"tool_choice": "required"}, "tool_choice is 'required'; allowed: null or", "invalid_value"),
    (
        CHATS,
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tool_choice is 'auto'; allowed: none, required or a named function: this model has no format",
        "invalid_value",
    ),
    (
        "/tokenize",
        {"prompt": None},
        "prompt is null; allowed: a text exactly if there are no messages",
        "invalid_value",
    ),
    ("/detokenize", {"tokens": [400]}, "tokens[0] is 400; allowed: 0 to 399", "invalid_value"),
]
"""Bad requests: path, fields beside those of a good one, the message, whose first word is `param`, and the code."""


async def test_an_error_names_field_value_and_what_is_allowed_and_nothing_of_a_prompt(serve: Serve) -> None:
    cluster = await serve(*pair())
    http = cluster.http
    for path, change, message, code in REFUSED:
        status, answer = await http.post(path, {**{COMPLETIONS: HELLO, CHATS: CHAT}.get(path, {}), **change})
        error, param = answer["error"], re.split("[ :]", message)[0]
        assert error["message"].startswith(message), error["message"]
        expected = (400, "invalid_request_error", param, code)
        assert (status, error["type"], error["param"], error["code"]) == expected, answer
        assert "secret" not in error["message"]
    for body, text in ((b"{secret", "not valid JSON"), (b'{"prompt": "\xff"}', "not valid JSON"), (b"[1]", "body")):
        headers = {"Content-Type": "application/json"}
        async with http.session.post(COMPLETIONS, data=body, headers=headers) as response:
            error = (await response.json())["error"]
            assert response.status == 400
            assert text in error["message"]
            assert "secret" not in error["message"]
    for name, value in (("Content-Encoding", "gzip"), ("X-Request-Id", "x" * 129)):
        status, answer = await http.post(COMPLETIONS, HELLO, headers={name: value})
        assert (status, answer["error"]["param"]) == (400, f"header {name}")
    async with http.session.post(COMPLETIONS, data=b"{}") as response:
        assert "Content-Type" in (await response.json())["error"]["message"]
    assert (await http.get("/v1/nothing"))[0] == 404
    status, answer = await http.get(COMPLETIONS)
    assert (status, answer["error"]["message"]) == (405, "GET /v1/completions: Method Not Allowed; allowed: POST")
    assert cluster.calls == 0


async def test_a_request_names_the_model_or_an_alias(serve: Serve) -> None:
    http = (await serve(*pair(), served_model_name=("gpt-4o", "org/model"))).http
    _, models = await http.get("/v1/models")
    assert [model["id"] for model in models["data"]] == ["gpt-4o", "org/model"]
    assert (await http.get("/v1/models/org/model"))[1]["root"] == "fake"
    status, answer = await http.post("/v1/completions", {**HELLO, "model": "org/model"})
    assert (status, answer["model"]) == (200, "gpt-4o")
    for path, body in (("/v1/completions", HELLO), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"})):
        status, answer = await http.post(path, {**body, "model": "fake"})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert (await http.get("/v1/models/fake"))[0] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, HELLO), (COMPLETIONS, {**HELLO, "stream": True})],
)
@pytest.mark.parametrize("answered", [False, True])
async def test_a_client_that_closes_its_connection_frees_both_workers(
    serve: Serve, path: str, body: dict[str, Any], answered: bool
) -> None:
    """Before the router answers, or, if it answers with a stream, after the first token."""

    async def prefill(job: Job) -> None:
        if answered:
            job.send(job.base, (40,))

    cluster = await serve(fake("prefill-0", prefill), fake("decode-0", silent))
    task = asyncio.create_task(cluster.http.session.post(path, json=body).__aenter__())
    jobs = [await cluster.job(name) for name in ("prefill-0", "decode-0")]
    if answered and body != HELLO:
        (await task).close()
    else:
        task.cancel()
    for job in jobs:
        await within(0.5, job.cancelled, "it is cancelled")
    await cluster.idle()
    assert cluster.outcomes == ["cancelled"]


async def test_limits_and_states_have_their_status(serve: Serve) -> None:
    cluster = await serve(
        fake("colocated-0", silent),
        max_requests=1,
        max_message_bytes=2000,
        worker_wait_seconds=0.0,
        request_timeout_seconds=1.0,
    )
    http = cluster.http
    url = "/v1/completions"
    running = asyncio.create_task(http.post("/v1/completions", HELLO))
    job = await cluster.job("colocated-0")
    async with http.session.post(url, json=HELLO) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
    # A busy router can still be watched.
    for path in ("/health", "/ready", "/v1/models"):
        assert (await http.get(path))[0] == 200
    async with http.session.get("/metrics") as response:
        refused = r'{class="none",model_name="[^"]*",outcome="exhausted",router="router-0"} 1.0'
        assert re.search(refused, await response.text())
    await colocated_of()(job)
    assert (await running)[0] == 200
    status, _ = await http.post("/v1/completions", {**HELLO, "prompt": "x" * 2000})
    assert status == 413
    status, answer = await http.post("/v1/completions", HELLO, headers={"X-Request-Timeout": "0.2"})
    assert (status, answer["error"]["message"]) == (504, "the client's deadline has passed")
    status, _ = await http.post("/v1/completions", HELLO, headers={"X-Request-Timeout": "never"})
    assert status == 400

    async def slow_body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    headers = {"Content-Type": "application/json"}
    async with http.session.post(url, data=slow_body(), headers=headers) as response:
        assert response.status == 408
    cluster.announce(colocated_0=MEMBER_STATE_DEAD)
    await until(lambda: not cluster.router.registry.complete, "the worker is lost")
    assert (await http.get("/ready"))[0] == 503
    assert (await http.get("/health"))[0] == 200
    assert (await http.post("/v1/completions", HELLO))[0] == 503
    assert cluster.calls == 0


async def test_a_drain_ends_streams_with_an_error_after_the_grace_and_takes_no_new_ones(
    serve: Serve, stack: AsyncExitStack
) -> None:
    async def some(job: Job) -> None:
        job.send(job.base, (40, 41))

    cluster = await serve(fake("colocated-0", some))
    http = cluster.http
    response = await stack.enter_async_context(http.session.post("/v1/completions", json={**HELLO, "stream": True}))
    await response.content.readuntil(b"\n\n")
    stopping = asyncio.create_task(cluster.router.stop(0.3))
    await asyncio.sleep(0)
    status, answer = await http.post("/v1/completions", HELLO)
    assert (status, answer["error"]["message"]) == (503, "router-0 is shutting down")
    assert (await http.get("/ready"))[0] == 503
    rest = (await response.text()).strip().removeprefix("data: ")
    assert json.loads(rest)["error"]["message"] == "router-0 is shutting down"
    await stopping


async def test_an_api_key_is_asked_for_as_openai_asks(serve: Serve, tmp_path: Path) -> None:
    cluster = await serve(*pair(), api_keys=key_file(tmp_path, acme=""))
    http = cluster.http
    for path in ("/v1/models", "/metrics"):
        assert (await http.get(path))[0] == 401
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic acme"}):
        status, answer = await http.post("/v1/completions", HELLO, headers=headers)
        error = answer["error"]
        assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
        assert "wrong" not in answer["error"]["message"]
    right = {"Authorization": "Bearer acme"}
    assert (await http.post("/v1/completions", HELLO, headers=right))[0] == 200
    assert (await cluster.job("prefill-0")).submit.tenant == "acme"
    assert (await http.get("/v1/models", headers=right))[0] == 200
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        assert (await http.get(path))[0] == 200
