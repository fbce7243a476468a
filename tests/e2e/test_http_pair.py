"""The OpenAI-compatible HTTP face of a real pair, against gRPC."""

import json
from typing import Any

import pytest
from openai import OpenAI

from kvrelay.client import Client
from support.http_calls import fetched
from support.processes import ProcessCluster, wait_until

PROMPT = [7, 11, 300, 5, 42, 8, 9, 120] * 5
OUT = 24
CLOSE = 1e-4
GREEDY = {"prompt": PROMPT, "max_tokens": OUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def url(pair: ProcessCluster) -> str:
    return f"http://{pair.member('router-0').member.http_address}/v1"


def test_several_completions_compute_and_ship_their_prompt_once(pair: ProcessCluster, url: str) -> None:
    pair.wait_idle()
    # The last block has two tokens. The last one is always computed, and one of two is too little to take a block over.
    prompt = [token + 1 for token in PROMPT[:34]]
    computed = pair.member("prefill-0").load.computed_tokens
    body = {**GREEDY, "prompt": prompt, "temperature": 1.0, "seed": 3, "n": 4, "timeline": True}
    answer = json.loads(fetched(f"{url}/completions", body))
    tokens = [tuple(choice["token_ids"]) for choice in answer["choices"]]
    assert len(set(tokens)) == 4, "each completion has its own seed"
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 4 * OUT
    # What crosses the link for a later completion is the last, partial block.
    sent = [int(choice["timeline"]["transfer_bytes"]) for choice in answer["choices"]]
    per_token = sent[0] // len(prompt)
    assert sent == [len(prompt) * per_token] + [len(prompt) % 16 * per_token] * 3
    pair.wait_idle()
    left = len(prompt) + 3 * (len(prompt) % 16)
    wait_until(
        lambda: pair.member("prefill-0").load.computed_tokens - computed == left,
        "prefill computed the full blocks once",
    )
    # A completion alone with its seed has the same tokens.
    (alone,) = json.loads(fetched(f"{url}/completions", {**body, "n": 1}))["choices"]
    assert tuple(alone["token_ids"]) == tokens[0]
    pair.wait_idle()


def test_log_probabilities_are_those_of_grpc(pair: ProcessCluster, url: str) -> None:
    """Log probabilities of the completion and, with `echo`, of the prompt, as lm-eval's loglikelihood tasks ask for
    them. `test_sampling.py` compares gRPC's with those of transformers."""
    with Client(pair.router, timeout=60) as ours:
        asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        done = ours.complete(PROMPT, logprobs=2, prompt_logprobs=2, **asked)
    expected = [*done.prompt_logprobs, *done.logprobs]
    with OpenAI(base_url=url, api_key="none", timeout=60) as client:
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
