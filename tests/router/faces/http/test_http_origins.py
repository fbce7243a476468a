"""Web pages of other origins, and the names of requests, over scripted workers."""

from typing import Any

from support.http_calls import CHAT, HELLO
from support.router_fakes import pair
from support.scenes import Serve

ORIGIN = "https://chat.example.org"
ASK = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


async def test_a_page_of_a_named_origin_may_call(serve: Serve) -> None:
    http = (await serve(*pair(), cors_origins=(ORIGIN,))).http
    url = "/v1/chat/completions"
    async with http.session.options(url, headers=ASK) as allowed:
        assert allowed.status == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "POST" in allowed.headers["Access-Control-Allow-Methods"]
        assert "authorization" in allowed.headers["Access-Control-Allow-Headers"].lower()
        assert "Access-Control-Allow-Credentials" not in allowed.headers
    for body, status in (({**CHAT, "stream": True}, 200), (CHAT, 200), ({**CHAT, "foo": 1}, 400)):
        async with http.session.post(url, json=body, headers={"Origin": ORIGIN}) as answer:
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
            assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
    async with http.session.options(url, headers={**ASK, "Origin": "https://else.example.org"}) as refused:
        assert refused.status == 403
        assert "origin" in (await refused.json())["error"]["message"].lower()
    # The router's own page is nobody else's.
    async with http.session.get("/page/about", headers={"Origin": ORIGIN}) as page:
        assert "Access-Control-Allow-Origin" not in page.headers


async def test_without_the_option_no_other_page_may_call(serve: Serve) -> None:
    http = (await serve(*pair())).http
    async with http.session.options("/v1/completions", headers=ASK) as refused:
        assert refused.status == 405
    async with http.session.post("/v1/completions", json=HELLO, headers={"Origin": ORIGIN}) as answer:
        assert not any(name.startswith("Access-Control") for name in answer.headers)


async def test_every_answer_has_its_requests_name(serve: Serve) -> None:
    cluster = await serve(*pair())
    http = cluster.http
    calls: list[tuple[str, str, Any, int]] = [
        ("GET", "/health", None, 200),
        ("GET", "/v1/models/other", None, 404),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", HELLO, 200),
        ("POST", "/v1/completions", {**HELLO, "stream": True}, 200),
        ("POST", "/v1/completions", {"foo": 1}, 400),
        ("POST", "/tokenize", {"prompt": "a"}, 200),
    ]
    for method, path, body, status in calls:
        for given in ("mine", None):
            headers = {} if given is None else {"X-Request-Id": given}
            async with http.session.request(method, path, json=body, headers=headers) as answer:
                await answer.read()
                assert answer.status == status
                name = answer.headers["X-Request-Id"]
                assert name == (given or name) != ""
    # What can't be a name isn't repeated; the body's name wins.
    for name in ("x" * 129, "ü"):
        async with http.session.get("/health", headers={"X-Request-Id": name}) as answer:
            assert answer.headers["X-Request-Id"] != name
    for name, status in (("other", 200), ("two\r\nlines: 1", 400), ("ü", 400)):
        body = {**HELLO, "request_id": name}
        url = "/v1/completions"
        async with http.session.post(url, json=body, headers={"X-Request-Id": "mine"}) as answer:
            assert answer.status == status
            assert answer.headers["X-Request-Id"] == ("other" if status == 200 else "mine")
    assert {record.outcome for record in cluster.records} == {"length", "invalid"}
