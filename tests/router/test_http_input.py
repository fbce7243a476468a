"""No HTTP request ends a router, gets a 500, or holds the event loop."""

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.cluster import certificates
from kvrelay.router.errors import RequestError
from kvrelay.router.http import openapi
from kvrelay.router.http.body import parse
from kvrelay.router.http.chat import ChatRequest
from kvrelay.router.http.completions import CompletionRequest, read_completion
from kvrelay.router.http.texts import DetokenizeRequest, TokenizeRequest
from kvrelay.router.wire import SMALL_BYTES
from support.http_calls import CHAT, HELLO, Http, serving, token_at
from support.router_fakes import FakeWorker, colocated_of, run

DOCUMENT = json.loads(openapi.document())
KINDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
LAG_SECONDS = 0.02
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CONTEXT = 4096

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def fields(path: str) -> list[str]:
    return list(KINDS[path].model_fields)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A request that is nearly right: some of its fields have any value."""
    path = draw(st.sampled_from(list(KINDS)))
    good: dict[str, Any] = {"/v1/completions": HELLO, "/v1/chat/completions": CHAT, "/tokenize": {"prompt": "a"}}.get(
        path, {"tokens": [5]}
    )
    names = st.sampled_from([*fields(path), "other"])
    likely = st.sampled_from([0, 1, -1, 0.5, True, "auto", "required", [], {}, [5], "x", 2**40, [{}], [[5]], "\ud800"])
    changed = draw(st.dictionaries(names, likely | values, max_size=4))
    return path, {**good, **changed}


def test_any_body_is_answered_or_refused(tmp_path: Path) -> None:
    drawn: list[tuple[str, Any]] = []

    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def draw(body: tuple[str, Any]) -> None:
        drawn.append(body)

    draw()

    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", colocated_of(token_at))
        async with serving(tmp_path, worker, tool_parser="hermes", reasoning_parser="think") as (cluster, http):
            statuses = set()
            for path, body in drawn:
                data = json.dumps(body).encode()
                headers = {"Content-Type": "application/json"}
                async with http.session.post(http.base + path, data=data, headers=headers) as response:
                    text = await response.text()
                    statuses.add(response.status)
                    assert response.status in (200, 400, 404), (path, body, text)
                    if response.status != 200:
                        assert json.loads(text)["error"]["message"], (path, body)
                    else:
                        assert "server_error" not in text, (path, body, text)
            assert {200, 400} <= statuses <= {200, 400, 404}
            assert cluster.router._front.running == 0
            assert (await http.post("/v1/completions", HELLO))[0] == 200

    run(test, 120)


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"\x00" * 100,
        b"GET",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz",
        POST + b"Content-Length: 99\r\n\r\n{}",
        b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_broken_http_ends_its_connection_only(tmp_path: Path, request_: bytes) -> None:
    async def test() -> None:
        async with serving(tmp_path) as (cluster, http):
            reader, writer = await asyncio.open_connection(*str(cluster.router.http_address).split(":"))
            writer.write(request_)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert not answer.startswith(b"HTTP/1.1 5")
            assert (await http.post("/v1/completions", HELLO))[0] == 200
            assert cluster.router._front.running == 0

    run(test)


PROMPTS = [
    [7] * (40 * 1024),
    [[5] * 20_000, [6, 7] * 10_000, [8]],
    ["a"] * 1000,
    [5] * (2**18),
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} prompts")
@pytest.mark.parametrize("separators", [(",", ":"), (" ,  ", " :\n")])
def test_a_large_prompt_is_read_as_it_is(prompt: list[Any], separators: tuple[str, str]) -> None:
    for more in ({}, {"user": '[1, "prompt": [2]]', "stop_token_ids": [3]}, {"metadata": {"prompt": [3]}}):
        for body in ({**more, "prompt": prompt, "max_tokens": 3}, {"prompt": prompt, **more}):
            data = json.dumps(body, separators=separators).encode() + b" " * SMALL_BYTES
            if "metadata" in more:
                with pytest.raises(RequestError, match=r"metadata|number of values"):
                    read_completion(data, 2**20)
                continue
            read = read_completion(data, 2**20)
            given = prompt if isinstance(prompt[0], (list, str)) else [prompt]
            assert [each if isinstance(each, str) else list(each) for each in read.prompt] == given
            assert (read.user, read.stop_token_ids) == (more.get("user"), more.get("stop_token_ids"))


@pytest.mark.parametrize(
    "wrong",
    [
        *("[1,]", "[,1]", "[1,,2]", "[1 2]", "[-1]", "[4294967296]", "[01]", "[]", "[1" + ",1" * 20_000 + ", ,1]"),
        *("[[1][2]]", "[[1],,[2]]", "[[1],[]]", "[[1],[2]", "[[[1]]]", "[[1]],[2]", "[[1],2]", "[1,[2]]"),
    ],
)
def test_a_large_prompt_that_is_wrong_is_refused(wrong: str) -> None:
    with pytest.raises(RequestError, match=r"body|prompt"):
        read_completion(b'{"prompt": %b%b}' % (wrong.encode(), b" " * SMALL_BYTES), 2**20)


NUMBERS = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 4, "n": 2, "seed": -7, "top_k": -1, "best_of": 1, "logprobs": 1}
    | {"min_tokens": 2, "priority": 3, "stop_token_ids": [9, 10], "logit_bias": {"7": 1}, "length_penalty": 1},
    "/v1/chat/completions": CHAT | {"max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2},
    "/detokenize": {"tokens": [40, 41]},
}


def spelled(value: Any) -> Any:
    """The value with each integer written as `4.0`."""
    if isinstance(value, dict):
        return {key: spelled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [spelled(each) for each in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("path", NUMBERS)
def test_an_integer_may_be_written_with_a_fraction_of_zero(path: str) -> None:
    def parsed(body: dict[str, Any]) -> Any:
        return parse(KINDS[path], json.dumps(body).encode(), CONTEXT)

    body = NUMBERS[path]
    assert ".0" in json.dumps(spelled(body))
    assert parsed(spelled(body)) == parsed(body)
    for name, value in body.items():
        if type(value) is int and name != "logit_bias":
            with pytest.raises(RequestError, match=name):
                parsed(body | {name: value + 0.5})


def test_prompts_of_ids_may_be_written_with_a_fraction_of_zero() -> None:
    prompts = [[5, 6], [7]]
    body = json.dumps({"prompt": spelled(prompts)}).encode()
    assert parse(CompletionRequest, body, CONTEXT).prompt == prompts
    for wrong in ([5.5], [[5], [6.5]], [5, True], [1e400]):
        with pytest.raises(RequestError, match="prompt"):
            parse(CompletionRequest, json.dumps({"prompt": wrong}).encode(), CONTEXT)


def test_the_document_describes_every_path_and_what_it_says_is_served(tmp_path: Path) -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    for path, kind in KINDS.items():
        schema = DOCUMENT["components"]["schemas"][kind.__name__]
        assert set(schema["properties"]) == set(fields(path))
        assert schema["additionalProperties"] is False
        nameless = [name for name, field in schema["properties"].items() if not field.get("description")]
        assert nameless == [name for name in nameless if "$ref" in json.dumps(schema["properties"][name])]

    async def test() -> None:
        async with serving(tmp_path) as (cluster, http):
            for path, methods in DOCUMENT["paths"].items():
                for method in methods:
                    url = http.base + path.replace("{name}", "fake")
                    async with http.session.request(method, url, json={} if method == "post" else None) as response:
                        assert response.status in (200, 400), path
            served = {resource.canonical for resource in cluster.router._http.app.router.resources()}  # type: ignore[union-attr]
            assert set(DOCUMENT["paths"]) <= served

    run(test)


def test_tls_and_client_certificates_on_http(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    certificates.make(folder, 30, keep_authority=False)
    files = {"tls_certificate": str(folder / "router.crt"), "tls_key": str(folder / "router.key")}

    def context(part: str | None) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        if part is not None:
            made.load_cert_chain(folder / f"{part}.crt", folder / f"{part}.key")
        return made

    async def status(http: Http, part: str | None) -> int:
        connector = aiohttp.TCPConnector(ssl=context(part))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"https://{http.base.removeprefix('http://')}/v1/completions"
            async with session.post(url, json=HELLO, server_hostname="router.kvrelay.internal") as response:
                return response.status

    async def test() -> None:
        async with serving(tmp_path / "a", **files) as (_, http):
            assert await status(http, None) == 200
            with pytest.raises(aiohttp.ClientError):
                await http.post("/v1/completions", HELLO)
            # New certificates hold for the next connections.
            certificates.make(folder, 30, keep_authority=False)
            assert await status(http, None) == 200
        async with serving(tmp_path / "b", **files, tls_client_ca=str(folder / "ca.crt")) as (cluster, http):
            assert await status(http, "worker") == 200
            assert (await cluster.job("prefill-0")).submit.tenant
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await status(http, None)

    run(test)
