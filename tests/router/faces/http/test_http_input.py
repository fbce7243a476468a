"""Bad input over HTTP: no request ends a router, gets a 500, or holds the event loop."""

import asyncio
import json
import logging
import ssl
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.cluster import certificates
from kvrelay.router.errors import InvalidRequest, RequestError
from kvrelay.router.faces.http import openapi
from kvrelay.router.faces.http.body import parse
from kvrelay.router.faces.http.chat import ChatRequest
from kvrelay.router.faces.http.completions import CompletionRequest, read_completion
from kvrelay.router.faces.http.connection import HEADERS, LOOK_SECONDS
from kvrelay.router.faces.http.errors import body_of, error_json
from kvrelay.router.faces.http.readers import DetokenizeRequest, TokenizeRequest
from kvrelay.router.request.wire import SMALL_BYTES
from support.http_calls import CHAT, HELLO, check_answers, exchange
from support.router_fakes import FakeCluster, Job, fake, key_file, length_if, pair, token_at
from support.scenes import Serve

T = TypeVar("T")
DOCUMENT = json.loads(openapi.document())
KINDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
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


def examples_of(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    """Examples that hypothesis draws, for a test that is a coroutine function."""
    drawn: list[T] = []

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def draw(example: T) -> None:
        drawn.append(example)

    draw()
    return drawn


async def test_any_body_is_answered_or_refused(serve: Serve) -> None:
    cluster = await serve(fake("colocated-0"), tool_parser="hermes", reasoning_parser="think")
    http = cluster.http
    statuses = set()
    for path, body in examples_of(bodies(), 100):
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with http.session.post(path, data=data, headers=headers) as response:
            text = await response.text()
            statuses.add(response.status)
            assert response.status in (200, 400, 404), (path, body, text)
            if response.status != 200:
                assert json.loads(text)["error"]["message"], (path, body)
            else:
                assert "server_error" not in text, (path, body, text)
    assert {200, 400} <= statuses <= {200, 400, 404}
    assert cluster.calls == 0
    assert (await http.post("/v1/completions", HELLO))[0] == 200


HELLO_BODY = json.dumps(HELLO).encode()
BROKEN = [
    b"\x00" * 100,
    b"GET",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz",
    POST + b"Content-Length: 99\r\n\r\n{}",
    b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xed\xa0\x80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"x" * 4_000_000 + b": a\r\n\r\n",
    b"GET / HTTP/1.1\r\nx: " + b"\xff" * 4_000_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
    b"GET / HTTP/1.1\r\n: a\r\n\r\n",
    b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    POST + b"Expect: tea\r\nContent-Length: 2\r\n\r\n{}",
    POST + b'Content-Length: 4000018\r\n\r\n{"' + b"y" * 4_000_000 + b'": 0}' + b" " * 11,
]


async def test_broken_http_ends_its_connection_only(serve: Serve) -> None:
    cluster = await serve(*pair(), cors_origins=("*",))
    for request in BROKEN:
        answers = await exchange(str(cluster.router.http_address), request, half_close=True)
        check_answers(answers)
        assert answers or request == b"GET", "what is more than the beginning of a request gets an answer"
        assert all(status >= 400 for status, _, _ in answers), request[:200]
        assert (await cluster.http.post("/v1/completions", HELLO))[0] == 200
        assert cluster.calls == 0, request[:200]


names = st.sampled_from([*HEADERS, "Cookie", "User-Agent", "Range", "If-Match", "Forwarded", "x"])
likely = st.sampled_from([b"Bearer k", b"bearer k", b"basic", b"1", b"nan", b"*", b"gzip", b"100-continue"])
octets = st.binary(max_size=30).map(lambda value: bytes(octet for octet in value if octet >= 32 and octet != 127))
given_headers = st.lists(st.tuples(names, likely | octets), max_size=4)
posts = st.sampled_from(["POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize"])
others = st.sampled_from(["GET /v1/models", "GET /metrics", "GET /ready", "OPTIONS /v1/completions", "GET /page/about"])
paths = st.binary(max_size=20).map(
    lambda path: "GET /" + bytes(octet for octet in path if octet > 32 and octet != 127).decode("latin1")
)
sent = st.sampled_from([HELLO_BODY, b"{}", b'{"prompt": "a"', b"\xff", b'{"tokens": [5]}', b'{"\xff": 1}'])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A whole request, right in its outline, in whose headers, path and body there may be any bytes."""
    target, given = draw(posts | others | paths), draw(given_headers)
    body = draw(sent | st.binary(min_size=1)) if target.startswith("POST") else b""
    lines = [target.encode("latin1") + b" HTTP/1." + draw(st.sampled_from([b"0", b"1"]))]
    lines += [b"Host: x", b"Connection: close"]
    lines += [name.encode() + b": " + value for name, value in given]
    lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)] if body else []
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_any_bytes_in_headers_and_bodies_are_answered(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half-closed or not, with and without keys."""
    drawn = examples_of(st.tuples(requests(), st.booleans()), 400)
    statuses = set()
    for number, options in enumerate(({"cors_origins": ("*",)}, {"api_keys": key_file(tmp_path, k="")})):
        cluster = await serve(fake("colocated-0"), **options)
        for request, half_close in drawn[number::2]:
            answers = await exchange(str(cluster.router.http_address), request, half_close=half_close)
            assert len(answers) == 1, request
            check_answers(answers)
            statuses.add(answers[0][0])
        await cluster.idle()
    assert {200, 400, 401, 404} <= statuses
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_ends_its_side_gets_its_answer(serve: Serve, version: bytes, stream: bool) -> None:
    async def slow(job: Job) -> None:
        end = job.submit.sampling.max_tokens
        for index in range(end):
            await asyncio.sleep(2 * LOOK_SECONDS)  # the router looks for the client meanwhile
            job.send(index, (token_at(index),), length_if(index == end - 1))

    cluster = await serve(fake("colocated-0", slow))
    body = json.dumps({**HELLO, "stream": stream}).encode()
    request = POST.replace(b"1.1", version) + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for copies in (1, 3) if version == b"1.1" and not stream else (1,):
        answers = await exchange(str(cluster.router.http_address), request * copies, half_close=True)
        assert [status for status, _, _ in answers] == [200] * copies
        assert all((b"[DONE]" in answer) == stream for _, _, answer in answers)
    await cluster.idle()


@settings(max_examples=50, deadline=None, database=None)
@given(
    st.builds(lambda text, times: text * times, st.text(max_size=9), st.sampled_from([1, 100, 10**6])), st.booleans()
)
def test_an_error_is_short(text: str, named: bool) -> None:
    for wide in (text, f"{text}\udcff"):
        error = InvalidRequest(wide, wide, wide)
        assert len(quote(str(error))) <= 4096
        for body in (body_of(error), error_json(400, wide, param=wide if named else None)):
            assert len(body) <= 2048
            assert json.loads(body)["error"]["type"] == "invalid_request_error"


PROMPTS = [[7] * (40 * 1024), [[5] * 20_000, [6, 7] * 10_000, [8]], ["a"] * 1000, [5] * (2**18)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} prompts")
@pytest.mark.parametrize("separators", [(",", ":"), (" ,  ", " :\n")])
@pytest.mark.some(3)
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
    "/v1/completions": {
        "prompt": [[5, 6], [7]],
        "max_tokens": 4,
        "n": 2,
        "seed": -7,
        "top_k": -1,
        "best_of": 1,
        "logprobs": 1,
    }
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
    for prompts in ([5.5], [[5], [6.5]], [5, True], [1e400]) if path == "/v1/completions" else ():
        with pytest.raises(RequestError, match="prompt"):
            parsed({"prompt": prompts})


async def test_the_document_describes_every_path_and_what_it_says_is_served(serve: Serve) -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    for path, kind in KINDS.items():
        schema = DOCUMENT["components"]["schemas"][kind.__name__]
        assert set(schema["properties"]) == set(fields(path))
        assert schema["additionalProperties"] is False
        nameless = [name for name, field in schema["properties"].items() if not field.get("description")]
        assert nameless == [name for name in nameless if "$ref" in json.dumps(schema["properties"][name])]

    cluster = await serve(*pair())
    for path, methods in DOCUMENT["paths"].items():
        for method in methods:
            url = cluster.http.base + path.replace("{name}", "fake")
            async with cluster.http.session.request(method, url, json={} if method == "post" else None) as response:
                assert response.status in (200, 400), path


async def test_tls_and_client_certificates_on_http(serve: Serve, tmp_path: Path) -> None:
    folder, other = tmp_path / "certificates", tmp_path / "others"
    for each in (folder, other):
        certificates.make(each, 30, keep_authority=False)
    files = {"tls_certificate": str(folder / "router.crt"), "tls_key": str(folder / "router.key")}

    async def status(cluster: FakeCluster, shown: Path | None = None) -> int:
        """The status of a request over TLS, with a worker's certificate of the folder that is shown."""
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        if shown is not None:
            context.load_cert_chain(shown / "worker.crt", shown / "worker.key")
        url = f"https://{cluster.router.http_address}/v1/completions"
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
            session.post(url, json=HELLO, server_hostname="router.kvrelay.internal") as response,
        ):
            return response.status

    cluster = await serve(*pair(), **files)
    assert await status(cluster) == 200
    with pytest.raises(aiohttp.ClientError):
        await cluster.http.post("/v1/completions", HELLO)
    # New certificates hold for the next connections.
    certificates.make(folder, 30, keep_authority=False)
    assert await status(cluster) == 200
    mutual = await serve(*pair(), **files, tls_client_ca=str(folder / "ca.crt"))
    assert await status(mutual, folder) == 200
    assert (await mutual.job("prefill-0")).submit.tenant
    for shown in (None, other):
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await status(mutual, shown)
    assert len(mutual.workers["prefill-0"].jobs) == 1
