"""`kvrelay generate`: what it asks a router for, and what it prints."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from capital_router import CapitalRouter
from command import KVRELAY, LISTENING_TO_CTRL_C, call, fails, run

from kvrelay.cluster.state import ClusterState, save
from support.router_fakes import background, key_file
from support.secrets import self_signed

SECONDS = 30.0


def test_the_text_is_printed_and_missing_options_are_left_to_the_router(router: CapitalRouter, target: str) -> None:
    save(ClusterState(pid=None, namespace="kvrelay", router=target))
    options = f"--max-tokens 7 --temperature 0 --seed {2**64 - 1} --ignore-eos --slo-class batch"
    for given in ([], options.split()):
        result = call("generate", "héllo", *given)
        assert (result.exit_code, result.stdout) == (0, "HÉLLO\n")
    plain, given = (request.sampling for request in router.requests)
    assert router.requests[0].text == "héllo"
    assert not any(plain.HasField(name) for name in ("max_tokens", "temperature", "top_p"))
    assert not plain.ignore_eos
    assert (given.max_tokens, given.temperature, given.seed) == (7, 0.0, 2**64 - 1)
    assert given.HasField("temperature")
    assert [request.slo_class for request in router.requests] == ["", "batch"]
    assert given.ignore_eos


def test_generate_as_json(target: str) -> None:
    result = call("generate", "abc", "--target", target, "--json")
    answer = json.loads(result.stdout)
    figures = {"request_id", "finish_reason", "usage", "timeline", "logprobs", "prompt_logprobs", "seed"}
    assert answer.keys() == {"text", "token_ids", *figures}
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("ABC", [97, 98, 99], "length")
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1}
    assert answer["timeline"]["queue_seconds"] == 0.001
    assert answer["timeline"]["transfer_bytes"] == 4_000_000


@pytest.mark.parametrize(("given", "prompt"), [("héllo\n", "héllo"), ("a\n\n", "a\n"), ("a\nb", "a\nb")])
def test_generate_takes_its_prompt_from_stdin(router: CapitalRouter, target: str, given: str, prompt: str) -> None:
    result = call("generate", "-", "--target", target, said=given)
    assert (result.exit_code, router.requests[0].text) == (0, prompt)
    result = call("generate", "-", "--target", target, said=b"caf\xe9")
    assert (result.exit_code, result.stderr) == (2, "kvrelay: stdin: byte 3 is not UTF-8\n")


def test_generate_names_the_request_for_doctor(tmp_path: Path) -> None:
    with background(tmp_path, lambda index: 40 + index, http_port=0) as cluster:
        router = cluster.router
        generate = ("generate", "hello", "--target", router.address, "--max-tokens", "2")
        names = {each["request_id"] for each in json.loads(call(*generate, "--json", "--n", "2").stdout)["completions"]}
        (name,) = names
        (last,) = re.findall(r"^request (\w+)$", call(*generate, "--timeline").stdout, re.MULTILINE)
        for found, count in ((name, 2), (last, 1)):
            told = call("doctor", found, "--target", f"http://{router.http_address}", "--json")
            assert told.exit_code == 0, told.stderr
            assert len(json.loads(told.stdout)) == count


def test_generate_prints_several_completions_in_their_order(router: CapitalRouter, target: str) -> None:
    result = call("generate", "abc", "--target", target, "--n", "3")
    assert result.stdout == "ABC\n--- 2 of 3\nabc 1\n--- 3 of 3\nabc 2\n"
    assert router.requests[0].n == 3
    answer = json.loads(call("generate", "abc", "--target", target, "--n", "3", "--json").stdout)
    assert [each["text"] for each in answer["completions"]] == ["ABC", "abc 1", "abc 2"]
    assert call("generate", "abc", "--target", target, "--n", "2", "--timeline").stdout.count("hand-off") == 2


def test_generate_shows_where_the_time_went(target: str) -> None:
    result = call("generate", "abc", "--target", target, "--timeline")
    assert result.stdout.startswith("ABC\n")
    for column in ("queue", "prefill", "transfer", "GB/s", "hand-off", "first token", "decode"):
        assert column in result.stdout
    assert "2.00" in result.stdout, "4 MB in 2 ms are 2 GB/s"


def test_generate_distinguishes_a_refusal_from_a_failure(target: str) -> None:
    fails(2, r"text is ''; allowed: at least 1 character", "generate", "", "--target", target)
    fails(1, r"1024 requests are in flight", "generate", "full", "--target", target)


def test_generate_reaches_a_router_with_tls_and_api_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    keys = key_file(tmp_path, secret="")
    options = {"tls_certificate": str(certificate), "tls_key": str(key), "api_keys": keys}
    with background(tmp_path, lambda index: 40 + index, **options) as cluster:
        target = cluster.router.address
        asked = ("generate", "hello", "--target", target, "--max-tokens", "2", "--json")
        trusted = (*asked, "--ca", str(certificate))
        assert json.loads(call(*trusted, "--api-key", "secret").stdout)["token_ids"] == [40, 41]
        monkeypatch.setenv("KVRELAY_API_KEY", "secret")
        assert json.loads(call(*trusted).stdout)["token_ids"] == [40, 41]
        fails(1, "the API key is not known", *trusted, "--api-key", "wrong")
        monkeypatch.delenv("KVRELAY_API_KEY")
        fails(1, "no API key; this router asks for one", *trusted)
        fails(1, "CERTIFICATE_VERIFY_FAILED|certificate", *asked, "--tls", "--api-key", "secret")
    fails(2, r"--ca nowhere: No such file", *asked, "--ca", "nowhere")


def test_ctrl_c_cancels_the_request(router: CapitalRouter, target: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING_TO_CTRL_C, KVRELAY, "generate", "wait", "--target", target],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1) == b"W"
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert router.ended.wait(SECONDS)
        assert process.stderr is not None
        assert process.stderr.read().strip() == b""
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_goes_away_is_no_traceback(target: str) -> None:
    command = f"{KVRELAY} generate {'x' * 5000} --target {target} | head -c 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, timeout=SECONDS)
    assert result.stdout == b"X"
    assert b"Traceback" not in result.stderr


def test_a_prompt_that_is_not_utf8() -> None:
    result = run("generate", b"caf\xe9")
    assert result.returncode == 2
    assert result.stderr == b"kvrelay: Invalid value for PROMPT: character 3 is the byte 0xe9, not UTF-8\n"
