"""The HTTP face over scripted workers: errors, limits, closed connections, drains and keys."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.http_calls import CHAT, HELLO, serving, token_at
from support.router_fakes import (
    FakeWorker,
    Job,
    colocated_of,
    run,
    silent,
    until,
    within,
)

REFUSED = [
    ("/v1/completions", {"temperature": "x"}, "temperature is 'x'; allowed: number", "temperature"),
    (
        "/v1/completions",
        {"temperature": 1000},
        "temperature is 1000; allowed: less than or equal to 100",
        "temperature",
    ),
    ("/v1/completions", {"best_of": 3}, "best_of is 3; allowed: null or 1; not served otherwise", "best_of"),
    ("/v1/completions", {"suffix": "x"}, "suffix is 'x'; allowed: null or \"\"; not served otherwise", "suffix"),
    ("/v1/completions", {"foo": 1}, "foo is not a field that this server knows", "foo"),
    ("/v1/completions", {"n": 129}, "n is 129; allowed: less than or equal to 128", "n"),
    ("/v1/completions", {"stop": ["a", 1]}, "stop[1] is 1; allowed: string", "stop[1]"),
    ("/v1/completions", {"prompt": []}, "prompt is an array; allowed: a string, a list of token ids, or", "prompt"),
    ("/v1/completions", {"prompt": [5, 4000]}, "prompt[1] is 4000; allowed: 0 to 399, the model's", "prompt[1]"),
    ("/v1/completions", {"prompt": [1.5]}, "prompt is an array; allowed: a string, a list of token ids", "prompt"),
    ("/v1/completions", {"max_tokens": 0}, "max_tokens is 0; allowed: 1 or more, or 0 with echo", "max_tokens"),
    ("/v1/completions", {"max_tokens": 61}, "max_tokens is 61; allowed: up to 60: the prompt has 4", "max_tokens"),
    ("/v1/completions", {"min_tokens": 9}, "min_tokens is 9; allowed: 0 to max_tokens, 4 here", "min_tokens"),
    ("/v1/completions", {"stream_options": {}}, "stream_options is an object; allowed: with stream", "stream_options"),
    ("/v1/completions", {"logit_bias": {"1": 101}}, "logit_bias.1 is 101; allowed: less than or", "logit_bias.1"),
    (
        "/v1/completions",
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "structured_outputs is an object; allowed: one constraint",
        "structured_outputs",
    ),
    ("/v1/chat/completions", {"messages": []}, "messages is an array; allowed: at least 1 item", "messages"),
    ("/v1/chat/completions", {"messages": "secret"}, "messages is a string; allowed: array", "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "secret"}}]}]},
        "messages[0].content[0] is an object; allowed: a part of the type 'text': this server takes text only",
        "messages[0].content[0]",
    ),
    ("/v1/chat/completions", {"functions": []}, "functions is an array; allowed: null; not served", "functions"),
    ("/v1/chat/completions", {"modalities": ["audio"]}, "modalities is an array; allowed: null or", "modalities"),
    ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs is 2; allowed: with logprobs only", "top_logprobs"),
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice is 'required'; allowed: null or", "tool_choice"),
    (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tool_choice is 'auto'; allowed: none, required or a named function: this model has no format",
        "tool_choice",
    ),
    ("/tokenize", {"prompt": None}, "prompt is null; allowed: a text exactly if there are no messages", "prompt"),
    ("/detokenize", {"tokens": [400]}, "tokens[0] is 400; allowed: 0 to 399", "tokens[0]"),
]


def test_an_error_names_field_value_and_what_is_allowed_and_nothing_of_a_prompt(tmp_path: Path) -> None:
    defaults: dict[str, dict[str, Any]] = {"/v1/completions": HELLO, "/v1/chat/completions": CHAT}

    async def test() -> None:
        async with serving(tmp_path) as (cluster, http):
            for path, change, message, param in REFUSED:
                status, answer = await http.post(path, {**defaults.get(path, {}), **change})
                error = answer["error"]
                assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), answer
                assert error["message"].startswith(message), error["message"]
                assert "secret" not in error["message"]
            status, answer = await http.post("/v1/completions", {**HELLO, "prompt": [5] * 64})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            for body, text in (
                (b"{secret", "not valid JSON"),
                (b'{"prompt": "\xff"}', "not valid JSON"),
                (b"[1]", "body"),
            ):
                async with http.session.post(
                    http.base + "/v1/completions", data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    error = (await response.json())["error"]
                    assert response.status == 400
                    assert text in error["message"]
                    assert "secret" not in error["message"]
            status, answer = await http.post("/v1/completions", HELLO, headers={"Content-Encoding": "gzip"})
            assert status == 400
            async with http.session.post(http.base + "/v1/completions", data=b"{}") as response:
                assert "Content-Type" in (await response.json())["error"]["message"]
            assert (await http.get("/v1/nothing"))[0] == 404
            status, answer = await http.get("/v1/completions")
            assert (status, answer["error"]["message"]) == (
                405,
                "GET /v1/completions: Method Not Allowed; allowed: POST",
            )
            assert cluster.router._front.running == 0

    run(test)


def test_a_request_names_the_model_or_an_alias(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, served_model_name=("gpt-4o", "org/model")) as (_, http):
            _, models = await http.get("/v1/models")
            assert [model["id"] for model in models["data"]] == ["gpt-4o", "org/model"]
            assert (await http.get("/v1/models/org/model"))[1]["root"] == "fake"
            status, answer = await http.post("/v1/completions", {**HELLO, "model": "org/model"})
            assert (status, answer["model"]) == (200, "gpt-4o")
            for path, body in (
                ("/v1/completions", HELLO),
                ("/v1/chat/completions", CHAT),
                ("/tokenize", {"prompt": "a"}),
            ):
                status, answer = await http.post(path, {**body, "model": "fake"})
                assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
            assert (await http.get("/v1/models/fake"))[0] == 404

    run(test)


def test_a_client_that_closes_its_connection_frees_both_workers(tmp_path: Path) -> None:
    async def test() -> None:
        async def endless(job: Job) -> None:
            job.send(job.base, (40,)) if job.submit.HasField("peer") and job.worker.role == "prefill" else None

        workers = [FakeWorker("prefill-0", "prefill", endless), FakeWorker("decode-0", "decode", endless)]
        async with serving(tmp_path, *workers) as (cluster, http):
            for at, stream in enumerate((True, False)):
                body = {**HELLO, "stream": stream}
                task = asyncio.create_task(http.session.post(http.base + "/v1/completions", json=body).__aenter__())
                jobs = [await cluster.job(name, at) for name in ("prefill-0", "decode-0")]
                if stream:
                    (await task).close()
                else:
                    task.cancel()
                for job in jobs:
                    await within(0.5, job.cancelled, "it is cancelled")
                await until(lambda: cluster.router._front.running == 0, "nothing runs")
            assert [record.outcome for record in cluster.records] == ["cancelled"] * 2

    run(test)


def test_limits_and_states_have_their_status(tmp_path: Path) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", silent)
        limits = {
            "max_requests": 1,
            "max_message_bytes": 2000,
            "worker_wait_seconds": 0.0,
            "request_timeout_seconds": 1.0,
        }
        async with serving(tmp_path, worker, **limits) as (cluster, http):
            url = http.base + "/v1/completions"
            running = asyncio.create_task(http.post("/v1/completions", HELLO))
            job = await cluster.job("colocated-0")
            async with http.session.post(url, json=HELLO) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "1"
                assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
            # A busy router can still be watched.
            for path in ("/health", "/ready", "/v1/models"):
                assert (await http.get(path))[0] == 200
            async with http.session.get(http.base + "/metrics") as response:
                refused = r'{class="none",model_name="[^"]*",outcome="exhausted",router="router-0"} 1.0'
                assert re.search(refused, await response.text())
            await colocated_of(token_at)(job)
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
            assert cluster.router._front.running == 0

    run(test)


def test_a_drain_ends_streams_with_an_error_after_the_grace_and_takes_no_new_ones(tmp_path: Path) -> None:
    async def test() -> None:
        async def some(job: Job) -> None:
            job.send(job.base, (40, 41))

        async with (
            serving(tmp_path, FakeWorker("colocated-0", "colocated", some)) as (cluster, http),
            http.session.post(http.base + "/v1/completions", json={**HELLO, "stream": True}) as response,
        ):
            await response.content.readuntil(b"\n\n")
            stopping = asyncio.create_task(cluster.router._front.stop(0.3))
            await asyncio.sleep(0)
            status, answer = await http.post("/v1/completions", HELLO)
            assert (status, answer["error"]["message"]) == (503, "router-0 is shutting down")
            assert (await http.get("/ready"))[0] == 503
            rest = (await response.text()).strip().removeprefix("data: ")
            assert json.loads(rest)["error"]["message"] == "router-0 is shutting down"
            await stopping

    run(test)


def test_an_api_key_is_asked_for_as_openai_asks(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"acme {sha256(b'right').hexdigest()}\n")

    async def test() -> None:
        async with serving(tmp_path / "model", api_keys=str(keys)) as (cluster, http):
            for path in ("/v1/models", "/metrics"):
                assert (await http.get(path))[0] == 401
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
                status, answer = await http.post("/v1/completions", HELLO, headers=headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert "wrong" not in answer["error"]["message"]
            right = {"Authorization": "Bearer right"}
            assert (await http.post("/v1/completions", HELLO, headers=right))[0] == 200
            assert (await cluster.job("prefill-0")).submit.tenant == "acme"
            assert (await http.get("/v1/models", headers=right))[0] == 200
            for path in ("/health", "/ready", "/version", "/openapi.json"):
                assert (await http.get(path))[0] == 200

    run(test)
