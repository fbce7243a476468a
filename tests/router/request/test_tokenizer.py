"""The tokenizer's files, and chat templates; what holds the event loop is in test_held_loop.py."""

import asyncio
import json
import time
from functools import partial
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from kvrelay.router.request import chat
from kvrelay.router.request.chat import ChatTemplate, Conversation, TemplateFailed
from kvrelay.router.request.conversation import conversation
from kvrelay.router.request.tokenizer import INLINE_CHARACTERS, Tokenizer
from kvrelay.v1.inference_pb2 import ChatMessage, ChatMessages, ToolCall
from support.tokenizers import byte_level_tokenizer

MESSAGES = [{"role": "user", "content": "<b>hi</b>"}]


def folder_with(path: Path, **config: object) -> Path:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def said(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}])


async def test_a_prompt_gets_the_special_tokens_and_a_rendered_chat_does_not(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    tokenizer = Tokenizer(folder_with(tmp_path, **config))
    plain = byte_level_tokenizer()
    for text in ("def x", "def x" * INLINE_CHARACTERS):
        assert list(await tokenizer.encode(text)) == [0, *plain.encode(text).ids]
        rendered = await tokenizer.encode_chat(partial(said, text), 100 + len(text))
        assert list(rendered) == [0, *plain.encode(text).ids, 1]
        assert await tokenizer.decode(plain.encode(text).ids) == text
    tokenizer.close()


@pytest.mark.parametrize("where", ["arguments", "tool", "variable"])
async def test_half_of_a_surrogate_pair_in_a_chats_json_is_a_replacement_character(tmp_path: Path, where: str) -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ tools | tojson }}{{ x }}"
    tokenizer = Tokenizer(folder_with(tmp_path, chat_template=template))
    text = {where: r'{"x": "a\ud83d"}'}
    call = ToolCall(name="f", arguments=text.get("arguments", "{}"))
    asked = ChatMessages(
        messages=[ChatMessage(role="assistant", tool_calls=[call])],
        tools=[text.get("tool", "{}")],
        template_kwargs=text.get("variable", "{}"),
    )
    tokens = await tokenizer.encode_chat(partial(conversation, asked), 1000)
    assert "a\ufffd" in await tokenizer.decode(tokens)
    tokenizer.close()


@pytest.mark.parametrize(
    ("config", "has"),
    [
        ({}, False),
        ({"chat_template": None}, False),
        ({"chat_template": [{"name": "tool_use", "template": "x"}]}, False),
        ({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]}, True),
    ],
)
def test_where_a_template_may_be(tmp_path: Path, config: dict[str, object], has: bool) -> None:
    assert Tokenizer(folder_with(tmp_path, **config)).has_chat_template == has
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    tokens = asyncio.run(tokenizer.encode_chat(partial(said, "abc"), 100))
    assert list(tokens) == byte_level_tokenizer().encode("abc").ids


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: missing"):
        Tokenizer(tmp_path)
    folder_with(tmp_path)
    for name, text, said in (
        ("tokenizer_config.json", "{", r"tokenizer_config\.json"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "chat template, line 1"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is int"),
        ("tokenizer.json", '{"model": 1}', r"tokenizer\.json"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=said):
            Tokenizer(tmp_path)


def test_templates_can_do_what_models_templates_do() -> None:
    source = """\
{%- if not add_generation_prompt %}{{ raise_exception("no") }}{% endif -%}
{%- for message in messages %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {%- generation %}[{{ message | tojson }}]{% endgeneration %}
{%- endfor %}
{{- strftime_now("%Y") | length }}{{ tools is none }}"""
    assert ChatTemplate(source, {}).render(Conversation(MESSAGES)) == '[{"role": "user", "content": "<b>hi</b>"}]4True'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ nothing.at_all }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_a_template_refuses_says_nothing_of_the_messages(source: str, message: str) -> None:
    with pytest.raises(TemplateFailed, match=message) as caught:
        ChatTemplate(source, {}).render(Conversation(MESSAGES))
    assert "hi" not in str(caught.value)


def test_the_last_message_is_continued_where_its_content_ends() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %} end", {})
    for content, expected in (("so far", "[a][so far"), (" so far ", "[a][so far"), ("a", "[a][a")):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        assert template.render(Conversation(messages, continue_final_message=True)) == expected
    with pytest.raises(TemplateFailed, match="can't be continued"):
        template.render(Conversation([{"role": "assistant", "content": " "}], continue_final_message=True))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{{ i }}{% endfor %}{% endfor %}", "took more than"),
        ("{% for i in range(90000) %}{% for j in range(9) %}{% set x = messages[0] %}{% endfor %}{% endfor %}", "took"),
        ("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}", "renders more than 1000 characters"),
        ("{{ messages[0].content * 10000000 }}", "repeats a text"),
        ("{{ [1] * 10000000 }}", "repeats a text"),
        ("{{ 9 ** 999 }}", "takes a power"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_has_limits_of_time_and_size(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TemplateFailed, match=message):
        ChatTemplate(source, {}).render(Conversation(MESSAGES), max_characters=1000 if "1000" in message else 10**9)
    assert time.monotonic() - start < 60
