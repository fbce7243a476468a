"""Large requests are read in other processes: in turns of their holders, and without harm to the router."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvrelay.internal.v1.worker_pb2 import ModelInfo
from kvrelay.router.errors import InvalidArgument, RequestError
from kvrelay.router.faces.readers import chats_of, reading
from kvrelay.router.request import lanes
from kvrelay.router.request.lanes import Lanes
from kvrelay.router.request.reading import Asking, PackedRequest, Reading
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.request.validation import check
from kvrelay.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, Resume, SamplingParams, TokenIds
from support.router_fakes import fake, until
from support.scenes import Serve
from support.tokenizers import model_folder

SECONDS = 60.0
PATH = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
CONTEXT = 64 * 1024
JSON = {"Content-Type": "application/json"}
MODEL = ModelInfo(name="fake", vocab_size=400, max_context=CONTEXT, eos_token_ids=[1], fingerprint="f" * 64)


def children() -> list[psutil.Process]:
    """Templates of lanes, and the lanes, of this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any(name in " ".join(child.cmdline()) for name in ("lane_program", "router.readers")):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def made(stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch) -> Lanes:
    """Two lanes that do what their messages say."""
    monkeypatch.setattr(lanes, "PROGRAM", "support.lane_program")
    monkeypatch.setattr(lanes, "MOST_LANES", 2)
    monkeypatch.setenv("PYTHONPATH", PATH)
    made = Lanes({})
    stack.push_async_callback(made.close)
    return made


async def test_what_ends_or_holds_a_lane_is_refused_and_others_are_read(
    made: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LIMIT_SECONDS", 0.2)

    async def refused(do: str, text: str) -> None:
        with pytest.raises(InvalidArgument, match=text):
            await made.run("bad", {"do": do}, b"x")
        answer, data = await made.run("good", {"do": "echo"}, b"y" * 3 * 2**20)
        assert data == b"y" * 3 * 2**20
        assert answer["nice"] >= 3

    await refused("end", "the request ends the process that reads it")
    await refused("compute", "the request takes more than 0 s to be read")
    monkeypatch.setattr(lanes, "BUSY", 2.0)
    await refused("sleep", "the request takes more than 0 s to be read")
    with pytest.raises(InvalidArgument, match="the request ends the process that reads it"):
        await made.run("bad", {"do": "allocate"}, b"x")


async def test_a_lane_that_is_killed_costs_no_request(made: Lanes) -> None:
    first, _ = await made.run("a", {"do": "echo"}, b"")
    stopped = psutil.Process(first["pid"])
    stopped.suspend()
    asked = asyncio.create_task(made.run("a", {"do": "echo"}, b"z"))
    await asyncio.sleep(0)
    stopped.kill()
    again, data = await asked
    assert data == b"z"
    assert again["pid"] != first["pid"]
    for each in children():  # the template too
        each.kill()
    assert (await made.run("a", {"do": "echo"}, b"z"))[1] == b"z"
    await made.close()
    _, left = psutil.wait_procs(children(), SECONDS)  # the kernel ends a lane when its template has ended
    assert not left


def test_nothing_is_left_of_a_router_that_was_killed() -> None:
    """A lane ends with its template, and that with its router."""
    script = (
        "import asyncio\nfrom kvrelay.router.request import lanes\nlanes.PROGRAM = 'support.lane_program'\n"
        "async def main():\n    made = lanes.Lanes({})\n"
        "    print((await made.run('a', {'do': 'echo'}, b''))[0]['pid'])\n"
        "    await asyncio.sleep(3600)\nasyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": PATH}
    ) as router:
        assert router.stdout is not None
        lane = psutil.Process(int(router.stdout.readline()))
        template = lane.parent()
        router.kill()
    assert template is not None
    psutil.wait_procs([lane, template], SECONDS)
    assert not lane.is_running()
    assert not template.is_running()


async def test_requests_of_one_holder_wait_behind_each_other(made: Lanes, tmp_path: Path) -> None:
    ended: list[str] = []

    async def ask(holder: str, name: str) -> None:
        await made.run(holder, {"do": "wait", "file": str(tmp_path / name)}, b"")
        ended.append(name)

    many = [asyncio.create_task(ask("many", f"many {at}")) for at in range(20)]
    await until(lambda: len(made) == 19, "one of them has a lane")
    few = asyncio.create_task(ask("few", "few"))
    (tmp_path / "few").touch()
    await few  # it has a lane at once
    assert ended == ["few"]
    gone = many.pop()
    gone.cancel()
    await until(lambda: len(made) == 18, "nobody waits for it")
    for at in range(19):
        (tmp_path / f"many {at}").touch()
    await asyncio.gather(*many)
    assert ended[1:] == [f"many {at}" for at in range(19)]


def requests() -> list[tuple[str, bytes]]:
    """Requests of all kinds, right and wrong, each with its kind."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    chat = {"messages": [{"role": "user", "content": "hi <s>"}], "stream": True, "n": 2, "seed": 7, "user": "u"}
    bodies: list[tuple[str, Any]] = [
        ("chat", chat),
        ("chat", chat | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}),
        ("chat", chat | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "logprobs": True}),
        ("chat", chat | {"messages": []}),
        ("chat", chat | {"model": "another"}),
        ("chat", chat | {"request_id": "\n"}),
        ("chat", chat | {"surprise": 1}),
        ("chat", []),
        ("completion", {"prompt": ["a", "bb"], "max_tokens": 3, "request_id": "mine", "logit_bias": {"5": 1}}),
        ("completion", {"prompt": [[5, 6], [300]], "echo": True, "logprobs": 2, "max_tokens": 0, "stop": ["x", "y"]}),
        ("completion", {"prompt": [401]}),
        ("completion", {"prompt": [5] * CONTEXT}),
        ("completion", {"prompt": "a", "temperature": -1}),
        ("tokenize", {"prompt": "abc", "return_token_strs": True}),
        ("tokenize", {"prompt": ""}),
        ("detokenize", {"tokens": [40, 41]}),
        ("detokenize", {"tokens": [4000]}),
    ]
    resume = Resume(key=bytes(16), call=2, token_ids=[50, 51], others=[TokenIds(ids=[60])])
    sampling = SamplingParams(seed=1, max_tokens=9, bad_words=["no"], temperature=0.5)
    messages = ChatMessages(messages=[ChatMessage(role="user", content="hi")])
    calls = [
        GenerateRequest(token_ids=TokenIds(ids=range(40, 300)), n=3, sampling=sampling, resume=resume, priority=-2),
        GenerateRequest(messages=messages, request_id="r", slo_class="fast", tenant="t", cache_salt="s", session="q"),
        GenerateRequest(text="", request_id="r"),
    ]
    return [(kind, json.dumps(body).encode()) for kind, body in bodies] + [
        *(("Generate", call.SerializeToString()) for call in calls),
        ("Generate", b"\xff\xff"),
        ("Tokenize", b"\x0a\x03abc"),
        ("Detokenize", b"\x0a\x02\x28\x29"),
    ]


async def test_a_lane_reads_what_the_router_itself_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path)

    options: dict[str, Any] = {"folder": str(folder), "max_message_bytes": 2**22, "chat_template": ""}
    made = Lanes(options | {"tool_parser": "hermes", "reasoning_parser": "auto"})
    tokenizer = Tokenizer(folder)
    both = [reading(folder, tokenizer, chats_of(tokenizer, "hermes", "auto"), each) for each in (None, made)]
    monkeypatch.setattr("kvrelay.router.request.wire.INLINE_BYTES", 0)
    try:
        for kind, data in requests():
            asking = Asking(kind, "t", MODEL, ("fake", "alias"), "named", "")
            here, there = [await result(each, data, asking) for each in both]
            assert there == here, (kind, data)
    finally:
        await made.close()
        tokenizer.close()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"prompt": "def __init__(self, name):\n" * 20_000, "max_tokens": 1}, id="text"),
        pytest.param({"messages": [{"role": "user", "content": "<s> a" * 60_000}]}, id="chat"),
    ],
)
@pytest.mark.some(1)
async def test_a_large_body_costs_the_router_itself_little(serve: Serve, body: dict[str, Any]) -> None:
    """The cost is CPU time of this process, which includes the client; other processes don't change it much."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"

    worker = fake("colocated-0", max_context=4 * CONTEXT)
    cluster = await serve(worker)
    data, folder = json.dumps(body).encode(), Path(cluster.router.config.model)
    tokenizer = Tokenizer(folder, threads=False)
    alone = reading(folder, tokenizer, chats_of(tokenizer, "none", "none"), None)
    asking = Asking("completion" if "prompt" in body else "chat", "t", worker.model)
    began = time.process_time()
    await alone.read_all(data, asking)
    itself = time.process_time() - began
    seconds = []
    for _ in range(3):
        began = time.process_time()
        async with cluster.http.session.post(path, data=data, headers=JSON) as response:
            await response.read()
        seconds.append(time.process_time() - began)
    assert response.status in (200, 400), await response.text()
    assert min(seconds) < itself / 2, (seconds, itself)


async def result(reading: Reading, data: bytes, asking: Asking) -> object:
    """The outcome of reading a request, without the names and seeds that are drawn."""
    try:
        found = await reading.read(data, asking, "holder")
        if isinstance(found, bytes):
            return found
        shown = []
        for request in found.requests:
            if isinstance(request, GenerateRequest):
                checked = await check(request, asking.tenant, asking.model, reading.tokenizer, reading.defaults)
                request = PackedRequest.of(request, checked)
            head, checked = request.open()
            sampling = checked.sampling
            if "seed" not in str(data):
                sampling.ClearField("seed")
            prompt = list(checked.prompt.submit(()).token_ids)
            resumed = [list(each.tokens) for each in (checked.resumed, *checked.others_resumed)]
            more = checked.namespace, list(checked.chain), checked.key, checked.tail, checked.stop, checked.client_call
            shown.append((head, checked.tenant, sampling, prompt, resumed, more))
        return found.name, found.form, shown
    except RequestError as error:
        return type(error), str(error), error.field, getattr(error, "name", None)
