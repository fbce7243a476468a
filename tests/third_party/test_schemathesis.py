"""Schemathesis draws requests from the OpenAPI document: valid ones, broken ones, other methods and types."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from kvrelay.v1.inference_pb2 import TokenLogprobs
from support.http_calls import HELLO
from support.router_fakes import Job, fake, length_if, token_at
from support.scenes import Serve

EXAMPLES = 25
"""Examples of each operation in the fuzzing phase."""
SECONDS = 900.0
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
"""Checks of the answers. The check that all allowed data are accepted is not among them: the document doesn't say which
fields exclude each other, nor the size of the vocabulary and the context."""


async def answer(job: Job) -> None:
    """Tokens up to the limit, with the log-probabilities that were asked for.

    The first one, then all others together: a body may have 1,024 prompts.
    """
    sampling, end = job.submit.sampling, job.submit.sampling.max_tokens
    value = TokenLogprobs(
        logprob=-0.5, top_ids=[7] * sampling.logprobs, top_logprobs=[-0.5] * sampling.logprobs, rank=1
    )
    for tokens in (range(job.base, job.base + 1), range(job.base + 1, end)):
        more = {"logprobs": [value] * len(tokens)} if sampling.HasField("logprobs") else {}
        if tokens.start == 0 and sampling.HasField("prompt_logprobs"):
            more["prompt_logprobs"] = [value] * (job.submit.prompt_tokens - 1)
        if tokens:
            sent = tuple(map(token_at, tokens))
            job.send(tokens.start, sent, length_if(tokens.stop == end), **more, prompt_logprobs_first=1)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
async def test_every_answer_is_as_the_document_says(serve: Serve, tmp_path: Path) -> None:
    cluster = await serve(fake("colocated-0", answer), tool_parser="hermes", reasoning_parser="think")
    options = {
        "phases": "coverage,fuzzing",
        "max-examples": EXAMPLES,
        "seed": 1,
        "checks": ",".join(CHECKS),
        "generation-database": "none",
        "suppress-health-check": "all",
        "request-timeout": 120,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{cluster.http.base}/openapi.json"),
        *(f"--{name}={value}" for name, value in options.items()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report = output.decode()
    assert process.returncode == 0, report
    (tested,) = re.findall(r"Tested: (\d+)", report)
    (generated,) = re.findall(r"([\d,]+) generated", report)
    print(f"{generated} cases for {tested} operations")
    assert int(generated.replace(",", "")) > 4 * EXAMPLES
    assert (await cluster.http.post("/v1/completions", HELLO))[0] == 200
    assert cluster.calls == 0
