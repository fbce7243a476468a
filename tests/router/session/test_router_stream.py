"""A request without faults: order, text, stop strings, the end."""

import asyncio

import pytest

from kvrelay.cli.generate import placement_line
from kvrelay.costs.step import StepCost
from kvrelay.costs.worker import WorkerCosts
from kvrelay.internal.v1.worker_pb2 import Blocks, Load, Requests, TransferReport
from kvrelay.rpc.costs import costs_message
from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP
from support.router_fakes import Job, fake, pair, silent, tokens, until, usual, within
from support.scenes import Serve
from support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


async def test_a_stream_has_every_token_once_and_its_figures(serve: Serve) -> None:
    cluster = await serve(*pair())
    completion = await cluster.ask(count=8)
    assert completion.text == TOKENIZER.decode(tokens(8))
    assert completion.finish_reason == "length"
    assert (completion.usage.completion_tokens, completion.usage.cached_tokens) == (8, 1)
    assert completion.usage.prompt_tokens == len(TOKENIZER.encode("hello").ids)
    line = completion.timeline
    assert (line.prefill_worker, line.decode_worker, line.retries) == ("prefill-0", "decode-0", 0)
    assert (line.queue_seconds, line.prefill_seconds, line.decode_queue_seconds) == (0.001, 0.002, 0.004)
    assert (line.transfer_seconds, line.handoff_seconds, line.transfer_bytes) == (0.003, 0.001, 640)
    assert 0 < line.route_seconds < line.first_token_seconds < line.total_seconds
    (record,) = cluster.records
    assert (record.outcome, record.completion_tokens, record.transfer_bytes) == ("length", 8, 640)
    assert record.ttft_seconds == line.first_token_seconds


async def test_the_workers_get_the_same_request_and_each_other(serve: Serve) -> None:
    cluster = await serve(*pair())
    await cluster.client.complete([5, 6, 7], max_tokens=4, seed=11, temperature=0.5, request_id="mine")
    prefill, decode = (await cluster.job("prefill-0")).submit, (await cluster.job("decode-0")).submit
    assert prefill.request_id == decode.request_id
    assert prefill.request_id.startswith("mine/")
    assert prefill.token_ids == decode.token_ids == [5, 6, 7]
    assert prefill.sampling == decode.sampling
    assert (prefill.sampling.seed, prefill.sampling.temperature, prefill.sampling.top_p) == (11, 0.5, 1.0)
    assert (prefill.prompt_tokens, prefill.attempt, prefill.tenant) == (3, 1, "")
    assert prefill.peer.incarnation == cluster.workers["decode-0"].incarnation
    assert decode.peer.incarnation == cluster.workers["prefill-0"].incarnation
    assert 0 < prefill.timeout_seconds < decode.timeout_seconds


async def test_a_single_token_needs_no_decode_worker(serve: Serve) -> None:
    cluster = await serve(*pair())
    completion = await cluster.ask(count=1)
    assert completion.timeline.decode_worker == ""
    assert not cluster.workers["decode-0"].jobs
    assert not cluster.workers["prefill-0"].jobs[0].submit.HasField("peer")


async def test_a_stop_string_or_a_first_token_that_ends_the_request_cancels_decode_at_once(serve: Serve) -> None:
    async def decode(job: Job) -> None:
        job.send(1, tokens(4)[1:])

    async def end(job: Job) -> None:
        job.send(0, (1,), FINISH_REASON_STOP)

    cluster = await serve(fake("prefill-0"), fake("decode-0", decode))
    stop = TOKENIZER.decode(tokens(4)[2:])
    completion = await cluster.client.complete("hello", max_tokens=40, stop=stop)
    assert (completion.text, completion.finish_reason) == (TOKENIZER.decode(tokens(2)), "stop")
    assert completion.timeline.transfer_bytes == 640
    cluster.workers["prefill-0"].script, cluster.workers["decode-0"].script = end, silent
    completion = await cluster.client.complete("hello", max_tokens=5)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (1,), "stop")
    for at in range(2):
        await within(0.5, (await cluster.job("decode-0", at)).cancelled, "it is cancelled")


async def test_the_last_message_waits_a_moment_for_the_transfer_report_and_tokens_do_not(serve: Serve) -> None:
    release = asyncio.Event()

    async def prefill(job: Job) -> None:
        job.send(0, tokens(1))
        await release.wait()
        job.send(transfer=TransferReport(transfer_bytes=77))

    cluster = await serve(fake("prefill-0", prefill), fake("decode-0"))
    stream = cluster.client.generate("hello", max_tokens=3, timeout=10)
    got: list[int] = []
    while len(got) < 3:
        chunk = await anext(stream)
        got += chunk.token_ids
        assert chunk.finish_reason is None
    release.set()
    last = await anext(stream)
    assert (last.token_ids, last.finish_reason) == ((), "length")
    assert last.timeline is not None
    assert last.timeline.transfer_bytes == 77
    # A missing report delays the end by a quarter of a second only.
    release.clear()
    clock = asyncio.get_running_loop().time
    start = clock()
    completion = await cluster.client.complete("hello", max_tokens=3, timeout=10)
    assert completion.timeline.transfer_bytes == 0
    assert clock() - start > 0.2
    await within(0.5, (await cluster.job("prefill-0", 1)).cancelled, "it is cancelled")


async def test_the_next_turn_goes_where_the_answer_is_and_the_timeline_says_why(serve: Serve) -> None:
    decodes = [fake(name, usual("colocated"), max_context=512) for name in ("decode-0", "decode-1")]
    cluster = await serve(fake("prefill-0", max_context=512), *decodes, placement="predicted")
    costs = costs_message(WorkerCosts(StepCost(1e-3, 1e-4, 0.0, 0.0, 2e-3, 1e-3), chunk=64))
    for worker in cluster.workers.values():
        blocks = Blocks(total=64, free=64, size=16)
        worker.report_load(Load(blocks=blocks, requests=Requests(free_slots=9), costs=costs))
    await until(lambda: all(view.costs is not None for view in cluster.router.registry.view()))
    prompt = list(range(5, 45))
    first = await cluster.ask(prompt, count=40)
    again = await cluster.ask([*prompt, *first.token_ids, 5, 6, 7], count=4)
    assert first.timeline.way == again.timeline.way == "in place"
    assert again.timeline.decode_worker == again.timeline.prefill_worker == first.timeline.decode_worker
    # 40 tokens of the prompt and 39 of the answer, whose last one has no KV.
    assert cluster.records[-1].latest.expected_tokens == 64
    line = again.timeline
    assert line.predicted_first_token_seconds == pytest.approx(2e-3 + 19e-3)
    assert line.predicted_token_seconds == pytest.approx(1.1e-3)
    assert line.runner_up.startswith(("pair", "in place"))
    assert f"in place: {line.decode_worker}; first token" in placement_line(line)
