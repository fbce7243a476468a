"""Tools, reasoning and templates through HTTP, over a scripted worker that writes what a model would."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP
from support.http_calls import CHAT, usage_of, writer_of
from support.router_fakes import FakeWorker, Job, fake
from support.scenes import Serve
from support.tokenizers import byte_level_tokenizer, model_folder

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    for name in ("add", "sub")
]


def arguments(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"]["tool_calls"]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def merged(chunks: list[Any]) -> dict[str, Any]:
    """The message of a stream, with its parts put together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def colocated(text: str, sizes: int = 1) -> FakeWorker:
    return fake("colocated-0", writer_of(text, sizes), max_context=1024)


@pytest.mark.parametrize(
    ("change", "text", "calls", "reason"),
    [
        (
            {"tool_choice": "required"},
            '[{"name": "add", "parameters": {"a": 1}}, {"name": "sub", "parameters": {}}]',
            [("add", {"a": 1}), ("sub", {})],
            "tool_calls",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, '{"a": 2}', [("sub", {"a": 2})], "stop"),
        (
            {"parallel_tool_calls": False},
            '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "sub"}</tool_call>',
            [("add", {})],
            "tool_calls",
        ),
    ],
)
async def test_a_choice_of_tools_binds_the_model(
    serve: Serve, change: dict[str, Any], text: str, calls: list[Any], reason: str
) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, **change}
    cluster = await serve(colocated(text), tool_parser="hermes")
    status, answer = await cluster.http.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert arguments(answer["choices"][0]) == calls
    assert answer["choices"][0]["finish_reason"] == reason
    assert arguments({"message": merged(await cluster.http.stream("/v1/chat/completions", body))}) == calls
    constraint = (await cluster.job("colocated-0")).submit.sampling.constraint
    if "tool_choice" in change:
        schema = json.loads(constraint.json_schema)
        assert schema["type"] == ("array" if change["tool_choice"] == "required" else "object")
    else:
        assert constraint.WhichOneof("kind") is None


async def test_special_tokens_of_a_format_are_read_and_shown_to_nobody_else(serve: Serve, tmp_path: Path) -> None:
    text = '[{"name": "add", "arguments": {"a": 1}}]'
    folder, tokenizer = model_folder(tmp_path / "special"), byte_level_tokenizer()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    written = tuple(tokenizer.encode(f"[TOOL_CALLS]{text}").ids)

    async def script(job: Job) -> None:
        job.send(0, (*written, 1), FINISH_REASON_STOP)

    http = (
        await serve(
            fake("colocated-0", script, max_context=1024, vocab_size=tokenizer.get_vocab_size()),
            tool_parser="mistral",
            model=str(folder),
        )
    ).http
    _, plain = await http.post("/v1/chat/completions", {"messages": MESSAGES})
    assert plain["choices"][0]["message"]["content"] == text
    _, called = await http.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})


async def test_reasoning_is_apart_and_counted(serve: Serve) -> None:
    thought, answer = "I think so.", "Yes."
    text = f"<think>\n{thought}\n</think>\n\n{answer}"

    http = (await serve(colocated(text), reasoning_parser="think")).http
    body = {"messages": MESSAGES}
    _, whole = await http.post("/v1/chat/completions", body)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, answer)
    tokens = len(byte_level_tokenizer().encode(text).ids) + 1
    reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    rest = len(byte_level_tokenizer().encode(f"\n\n{answer}").ids) + 1
    # Here the tags are several tokens, so the border is that of a message.
    assert tokens - rest - 1 <= reasoning <= tokens
    assert whole["usage"] == usage_of(whole["usage"]["prompt_tokens"], tokens, 2, reasoning)
    streamed = merged(await http.stream("/v1/chat/completions", body))
    assert (streamed["reasoning_content"], streamed["content"]) == (thought, answer)
    _, hidden = await http.post("/v1/chat/completions", {**body, "include_reasoning": False})
    message = hidden["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, answer)
    # The prompt has the tag already.
    begun_messages = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    asked = {"messages": begun_messages, "continue_final_message": True}
    _, begun = await http.post("/v1/chat/completions", asked)
    assert begun["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize("constraint", [{"response_format": {"type": "json_object"}}, {"guided_choice": ["[1]", "2"]}])
async def test_a_constrained_answer_is_no_reasoning_where_the_prompt_has_the_opening_tag(
    serve: Serve, constraint: dict[str, Any]
) -> None:
    http = (await serve(colocated('{"a": 1}'), reasoning_parser="think")).http
    begun = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    body = {"messages": begun, "continue_final_message": True, **constraint}
    status, answer = await http.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert merged(await http.stream("/v1/chat/completions", body))["content"] == '{"a": 1}'


async def test_the_template_of_the_configuration_gets_tools_and_variables(serve: Serve, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools | length if tools else 0 }}|{{ mood }}|{{ messages | tojson }}")

    async def prompt(http: Any, body: dict[str, Any]) -> str:
        status, answer = await http.post("/tokenize", body)
        assert status == 200, answer
        return str((await http.post("/detokenize", {"tokens": answer["tokens"]}))[1]["prompt"])

    http = (await serve(colocated("x"), chat_template=str(template))).http
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    body = {"messages": history, "tools": TOOLS, "chat_template_kwargs": {"mood": "good"}}
    count, mood, messages = (await prompt(http, body)).split("|", 2)
    assert (count, mood) == ("2", "good")
    assert json.loads(messages) == [
        {"role": "system", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    history[1]["tool_calls"][0]["function"]["arguments"] = "secret"  # type: ignore[index]
    status, answer = await http.post("/v1/chat/completions", {**CHAT, "messages": history})
    assert status == 400
    assert answer["error"]["message"].startswith("messages[1].tool_calls[0].arguments: number of characters is 6")
