"""The OpenAI-compatible HTTP face of a real pair, against gRPC."""

import http.client
import json
import re
import socket
from typing import Any

import pytest
from openai import OpenAI

from kvrelay.client import Client
from support.processes import ProcessCluster, wait_until

PROMPT = [7, 11, 300, 5, 42, 8, 9, 120] * 5
OUT = 24
CLOSE = 1e-4
GREEDY = {"prompt": PROMPT, "max_tokens": OUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def port(pair: ProcessCluster) -> int:
    """Of the pair's HTTP."""
    return int(pair.member("router-0").member.http_address.rpartition(":")[2])


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()


def test_greedy_tokens_equal_grpcs(pair: ProcessCluster, port: int) -> None:
    """`test_road.py` has those of gRPC and of transformers."""
    with Client(pair.router) as client:
        ours = client.complete(PROMPT, max_tokens=OUT, temperature=0, ignore_eos=True, timeout=60)
    answer = post(port, "/v1/completions", GREEDY)
    choice = answer["choices"][0]
    assert choice["token_ids"] == list(ours.token_ids)
    assert (choice["text"], choice["finish_reason"]) == (ours.text, "length")
    # The second request found the first one's blocks, also the last one, which isn't full.
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == OUT
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
    pair.wait_idle()


def test_several_completions_compute_and_ship_their_prompt_once(pair: ProcessCluster, port: int) -> None:
    pair.wait_idle()
    # The last block has two tokens. The last one is always computed, and one of two is too little to take a block over.
    prompt = [token + 1 for token in PROMPT[:34]]
    computed = {name: pair.member(name).load.computed_tokens for name in ("prefill-0", "decode-0")}
    body = {**GREEDY, "prompt": prompt, "temperature": 1.0, "seed": 3, "n": 4, "timeline": True}
    answer = post(port, "/v1/completions", body)
    tokens = [tuple(choice["token_ids"]) for choice in answer["choices"]]
    assert len(set(tokens)) == 4, "each completion has its own seed"
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 4 * OUT
    # What crosses the link for a later completion is the last, partial block.
    sent = [choice["timeline"]["transfer_bytes"] for choice in answer["choices"]]
    sent = [int(bytes_) for bytes_ in sent]
    per_token = sent[0] // len(prompt)
    assert sent == [len(prompt) * per_token] + [len(prompt) % 16 * per_token] * 3
    pair.wait_idle()
    left = len(prompt) + 3 * (len(prompt) % 16)
    wait_until(
        lambda: pair.member("prefill-0").load.computed_tokens - computed["prefill-0"] == left,
        "prefill computed the full blocks once",
    )
    # A completion alone with its seed has the same tokens.
    assert tuple(post(port, "/v1/completions", {**body, "n": 1})["choices"][0]["token_ids"]) == tokens[0]
    pair.wait_idle()


def test_log_probabilities_are_those_of_grpc(pair: ProcessCluster, port: int) -> None:
    """Log probabilities of the completion and, with `echo`, of the prompt, as lm-eval's loglikelihood tasks ask for
    them. `test_sampling.py` compares gRPC's with those of transformers."""
    with Client(pair.router, timeout=60) as ours:
        asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        done = ours.complete(PROMPT, logprobs=2, prompt_logprobs=2, **asked)
    expected = [*done.prompt_logprobs, *done.logprobs]
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60) as client:
        asked = {"model": "llama", "prompt": PROMPT, "temperature": 0, "logprobs": 2, "echo": True}
        whole = client.completions.create(**asked, max_tokens=6, extra_body={"ignore_eos": True}).choices[0].logprobs
        alone = client.completions.create(**asked, max_tokens=0).choices[0].logprobs
    for found, count in ((whole, len(PROMPT) + 6), (alone, len(PROMPT))):
        assert found is not None
        assert found.token_logprobs is not None
        assert len(found.token_logprobs) == count
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:] == pytest.approx([each.logprob for each in expected[: count - 1]], abs=CLOSE)
        assert found.top_logprobs is not None
        for top, each in zip(found.top_logprobs[1:], expected, strict=False):
            # The token itself is among them, and two tokens may have one name.
            assert max(top.values()) == pytest.approx(each.top_logprobs[0], abs=CLOSE)


def test_a_routers_log_has_short_lines_of_json(pair: ProcessCluster, port: int) -> None:
    """The lines are short whatever a client sends; aiohttp would write the whole of a field's name, as text."""
    for request in (
        b"\x16\x03\x01" * 100,
        b"GET / HTTP/1.1\r\n" + b"x" * 4_000_000 + b": a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 4000006\r\n\r\n"
        + b'{"'
        + b"y" * 4_000_000
        + b'":0}',
    ):
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.settimeout(10)
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(2**16):
                answer += part
            assert re.search(rb"^HTTP/1.[01] 400 ", answer, re.MULTILINE)
    lines = pair.processes["router-0"].log.read_bytes().splitlines()
    assert len(lines) > 1
    for line in lines:
        assert len(line) <= 4096
        assert json.loads(line)
