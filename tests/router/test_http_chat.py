"""Tools, reasoning and templates through HTTP, over a scripted worker that writes what a model would."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.http_calls import CHAT, serving, usage_of, writer_of
from support.router_fakes import FakeWorker, run
from support.tokenizers import byte_level_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    for name in ("add", "sub")
]
CALLED = 'I\'ll add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
"""Text with a tool call in Hermes' form."""


def arguments(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"]["tool_calls"]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def merged(chunks: list[Any]) -> dict[str, Any]:
    """The message of a stream, as OpenAI's client puts it together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                known = message["tool_calls"][call["index"]]
                known["function"]["arguments"] += call["function"]["arguments"]
    return message


def colocated(text: str, sizes: int = 1) -> FakeWorker:
    return FakeWorker("colocated-0", "colocated", writer_of(text, sizes), max_context=1024)


def test_a_call_is_read_whole_and_streamed(tmp_path: Path) -> None:
    async def test() -> None:
        body = {"messages": MESSAGES, "tools": TOOLS}
        async with serving(tmp_path, colocated(CALLED), tool_parser="hermes") as (_, http):
            status, answer = await http.post("/v1/chat/completions", body)
            assert status == 200, answer
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "I'll add."
            assert arguments(choice) == [("add", {"a": 1})]
            chunks = await http.stream("/v1/chat/completions", body)
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
            message = merged(chunks)
            assert message["content"] == "I'll add."
            assert arguments({"message": message}) == [("add", {"a": 1})]
            assert sum(bool(chunk["choices"][0]["delta"].get("tool_calls")) for chunk in chunks) > 1
            # Without tools, or with none of them to be called, the text is the model's own.
            for change in ({"tool_choice": "none"}, {"tools": None}):
                _, answer = await http.post("/v1/chat/completions", {**body, **change})
                assert answer["choices"][0]["message"]["content"] == CALLED
                assert answer["choices"][0]["finish_reason"] == "stop"

    run(test)


@pytest.mark.parametrize(
    ("change", "text", "calls", "reason"),
    [
        (
            {"tool_choice": "required"},
            '[{"name": "add", "parameters": {"a": 1}}, {"name": "sub", "parameters": {}}]',
            [("add", {"a": 1}), ("sub", {})],
            "tool_calls",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
            '{"a": 2}',
            [("sub", {"a": 2})],
            "stop",
        ),
        (
            {"parallel_tool_calls": False},
            '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "sub"}</tool_call>',
            [("add", {})],
            "tool_calls",
        ),
    ],
)
def test_a_choice_of_tools_binds_the_model(
    tmp_path: Path, change: dict[str, Any], text: str, calls: list[Any], reason: str
) -> None:
    async def test() -> None:
        body = {"messages": MESSAGES, "tools": TOOLS, **change}
        async with serving(tmp_path, colocated(text), tool_parser="hermes") as (cluster, http):
            status, answer = await http.post("/v1/chat/completions", body)
            assert status == 200, answer
            assert arguments(answer["choices"][0]) == calls
            assert answer["choices"][0]["finish_reason"] == reason
            assert arguments({"message": merged(await http.stream("/v1/chat/completions", body))}) == calls
            constraint = (await cluster.job("colocated-0")).submit.sampling.constraint
            if "tool_choice" in change:
                schema = json.loads(constraint.json_schema)
                assert schema["type"] == ("array" if change["tool_choice"] == "required" else "object")
            else:
                assert constraint.WhichOneof("kind") is None

    run(test)


def test_special_tokens_of_a_format_are_read_and_shown_to_nobody_else(tmp_path: Path) -> None:
    """The fakes' tokenizer has <s> as a special token; here it stands for [TOOL_CALLS]."""
    text = '[{"name": "add", "arguments": {"a": 1}}]'

    async def test() -> None:
        async with serving(tmp_path, colocated(f"<s>{text}"), tool_parser="mistral") as (cluster, http):
            chats = cluster.router._http._chats  # type: ignore[union-attr]
            chats.special = frozenset((0,))
            _, plain = await http.post("/v1/chat/completions", {"messages": MESSAGES})
            assert plain["choices"][0]["message"]["content"] == text
            _, shown = await http.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
            assert shown["choices"][0]["message"]["content"] == f"<s>{text}"

    run(test)


def test_reasoning_is_apart_and_counted(tmp_path: Path) -> None:
    thought, answer = "I think so.", "Yes."
    text = f"<think>\n{thought}\n</think>\n\n{answer}"

    async def test() -> None:
        async with serving(tmp_path, colocated(text), reasoning_parser="think") as (_, http):
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
            assert (
                hidden["choices"][0]["message"]["reasoning_content"],
                hidden["choices"][0]["message"]["content"],
            ) == (
                None,
                answer,
            )
            # The prompt has the tag already.
            _, begun = await http.post(
                "/v1/chat/completions",
                {"messages": [*MESSAGES, {"role": "assistant", "content": "<think>"}], "continue_final_message": True},
            )
            assert begun["choices"][0]["message"]["content"] == answer

    run(test)


def test_the_template_of_the_configuration_gets_tools_and_variables(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools | length if tools else 0 }}|{{ mood }}|{{ messages | tojson }}")

    async def prompt(http: Any, body: dict[str, Any]) -> str:
        status, answer = await http.post("/tokenize", body)
        assert status == 200, answer
        return str((await http.post("/detokenize", {"tokens": answer["tokens"]}))[1]["prompt"])

    async def test() -> None:
        async with serving(tmp_path / "model", colocated("x"), chat_template=str(template)) as (_, http):
            history = [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    ],
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
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
                    ],
                },
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
            ]
            history[1]["tool_calls"][0]["function"]["arguments"] = "secret"  # type: ignore[index]
            status, answer = await http.post("/v1/chat/completions", {**CHAT, "messages": history})
            assert status == 400
            assert answer["error"]["message"].startswith(
                "messages[1].tool_calls[0].arguments: number of characters is 6"
            )

    run(test)
