"""Special tokens in chats: the template's are control tokens, those in clients' texts are plain text."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvrelay.router.errors import InvalidRequest
from kvrelay.router.request.chat import Conversation, TemplateFailed
from kvrelay.router.request.conversation import conversation
from kvrelay.router.request.tokenizer import Tokenizer as Router
from kvrelay.v1.inference_pb2 import ChatMessage, ChatMessages
from support.router_fakes import pair
from support.scenes import Serve
from support.tokenizers import CORPUS, TEMPLATE, byte_level_tokenizer

CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(ensure_ascii=True) }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.name or '') + content }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
ROLE_TOKENS = """\
{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] | trim }}
{{- '<|end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ mood }}
{% endif %}"""
INST = """\
{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]
{%- else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
DEEP = "{{ bos_token }}{% for message in messages %}<｜User｜>{{ message.content }}{% endfor %}<｜Assistant｜>"


def byte_level() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


def stripping() -> Tokenizer:
    """Special tokens that take the white space behind them, and no pre-tokenizer that keeps lines apart."""
    tokenizer = byte_level_tokenizer()
    names = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|tool|>"]
    tokenizer.add_special_tokens([AddedToken(name, rstrip=True, normalized=False) for name in names])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def metaspace() -> Tokenizer:
    """Llama 2's kind: a sign in front of the first word only, pieces of bytes, and special tokens in the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([text + " [INST] a [/INST]" for text in CORPUS], trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """A vocabulary whose pieces may be the names of special tokens: the model itself finds `</s>` in a text."""
    letters = [(chr(code), -9.0) for code in range(33, 127)] + [("▁", -3.0), ("\n", -5.0)]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", -1.0), ("</s>", -1.0), *letters], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n"), "isolated"), pre_tokenizers.Metaspace(prepend_scheme="never")]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def deep() -> Tokenizer:
    """Role tokens that the tokenizer's file doesn't call special."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<｜begin▁of▁sentence｜>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<｜User｜>", normalized=False), AddedToken("<｜Assistant｜>", normalized=False)])
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Tokenizer], str, dict[str, str]]] = {
    "byte level": (byte_level, CHATML, {}),
    "roles": (stripping, ROLE_TOKENS, {"bos_token": "<s>"}),
    "metaspace": (metaspace, INST, {"bos_token": "<s>", "eos_token": "</s>"}),
    "unigram": (unigram, INST, {"bos_token": "<s>", "eos_token": "</s>"}),
    "not called special": (deep, DEEP, {"bos_token": "<｜begin▁of▁sentence｜>"}),
    "plain": (byte_level_tokenizer, TEMPLATE, {}),
}
CONTROL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|end|>", "<|system|>")
CONTROL += ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<|assistant|>")
ROLES = ["user", "assistant", "system", "tool"]


@contextmanager
def router_of(tmp_path: Path, kind: str) -> Iterator[tuple[Router, Any]]:
    """A router's tokenizer, and transformers' over the same files."""
    make, template, config = KINDS[kind]
    make().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    router = Router(tmp_path)
    try:
        yield (
            router,
            PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=template, **config),
        )
    finally:
        router.close()


def ids_of(router: Router, asked: Conversation) -> list[int]:
    return list(asyncio.run(router.encode_chat(lambda: asked, 10**6)))


def reference(hugging_face: Any, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    found: list[int] = hugging_face.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **more
    )
    return found


plain = st.text(st.sampled_from("ab <>|/[]INST_{}\"'\\\n\té日\ue000\U000f0000") | st.characters(codec="utf-8"))
marks = st.sampled_from((*CONTROL, "</think>", "<think>", "[INST]", "<|", "|>", "<", "im_end"))
texts = st.lists(marks | plain, max_size=5).map("".join)


def conversations(text: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    call = st.fixed_dictionaries({"name": text, "arguments": st.dictionaries(text, text, max_size=2)})
    calls = st.lists(call.map(lambda function: {"type": "function", "id": "1", "function": function}), max_size=2)
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES), "content": text}, optional={"name": text, "tool_calls": calls}
    )
    tool = st.fixed_dictionaries(
        {"name": text, "description": text, "parameters": st.dictionaries(text, text, max_size=2)}
    )
    tools = st.lists(tool.map(lambda function: {"type": "function", "function": function}), max_size=1)
    return st.tuples(st.lists(message, min_size=1, max_size=3), tools)


EXAMPLES = pytest.mark.parametrize("examples", [20, pytest.param(120, marks=pytest.mark.more)])


def drawn(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def has_control(value: Any, control: list[str]) -> bool:
    text = json.dumps(value, ensure_ascii=False).replace("\\\\", "\\")
    return any(name in text for name in control)


@EXAMPLES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.some(5)
def test_the_ids_are_transformers_without_special_tokens_in_texts_or_if_they_are_asked_for(
    tmp_path: Path, kind: str, parse_special: bool, examples: int
) -> None:
    with router_of(tmp_path, kind) as (router, hugging_face):
        control = list(hugging_face.backend_tokenizer.get_added_tokens_decoder().values())
        names = [token.content for token in control]

        @drawn(examples)
        @given(conversations(texts if parse_special else plain))
        def check(given: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
            messages, tools = given
            if parse_special or not has_control(given, names):
                expected = reference(hugging_face, messages, tools=tools or None)
                assert ids_of(router, Conversation(messages, tools, parse_special=parse_special)) == expected

        check()


@EXAMPLES
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_texts_are_plain_text(tmp_path: Path, kind: str, examples: int) -> None:
    """The special tokens are as many and in the same order as with other texts; the prompt as a text is unchanged."""
    with router_of(tmp_path, kind) as (router, hugging_face):
        tokenizer = hugging_face.backend_tokenizer
        added = tokenizer.get_added_tokens_decoder()
        template = KINDS[kind][1]
        named = {at for at, token in added.items() if token.content in template and "｜" in token.content}
        unknown = {tokenizer.token_to_id("<unk>")}
        control = named | {at for at, token in added.items() if token.special} - unknown

        @drawn(examples)
        @example(([{"role": "user", "content": "<|im_</think>end|></s>[INST]<s>"}], []))
        @example(([{"role": "user", "name": "<|im_", "content": "end|><|end|>"}], []))
        @given(conversations(texts))
        def check(given: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
            messages, tools = given
            ids = ids_of(router, Conversation(messages, tools))
            empty = [{"role": message["role"], "content": "x"} for message in messages]
            # The same tools and calls, without a text.
            bare = ids_of(router, Conversation(empty, tools and [{"type": "function"}]))
            assert [at for at in ids if at in control] == [at for at in bare if at in control]
            if kind in ("byte level", "not called special", "plain"):
                more = {"tools": tools or None, "add_generation_prompt": True, "tokenize": False}
                rendered = hugging_face.apply_chat_template(messages, **more)
                assert tokenizer.decode(ids, skip_special_tokens=False) == rendered

        check()


async def test_chats_over_http_have_plain_text_and_completions_special_tokens(serve: Serve) -> None:
    cluster = await serve(*pair())
    http = cluster.http
    messages = [{"role": "user", "content": "a </s> b"}]
    for more, count in (({}, 0), ({"parse_special": False}, 0), ({"parse_special": True}, 1)):
        for path in ("/tokenize", "/v1/chat/completions"):
            status, answer = await http.post(path, {"messages": messages, **more})
            assert status == 200, answer
            tokens = answer.get("tokens") or cluster.workers["prefill-0"].jobs[-1].submit.token_ids
            assert list(tokens).count(1) == count, (path, more)
    for path in ("/tokenize", "/v1/completions"):
        status, answer = await http.post(path, {"prompt": "a </s> b"})
        tokens = answer.get("tokens") or cluster.workers["prefill-0"].jobs[-1].submit.token_ids
        assert list(tokens).count(1) == 1, path
    body = {"messages": messages, "chat_template_kwargs": {"eos_token": "x"}}
    status, answer = await http.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_role_is_no_special_token(tmp_path: Path) -> None:
    with router_of(tmp_path, "roles") as (router, _):
        with pytest.raises(TemplateFailed, match=r"role of messages\[1\]"):
            ids_of(router, Conversation([{"role": "user", "content": "a"}, {"role": "end", "content": "a"}]))
        assert ids_of(router, Conversation([{"role": "end|><|end", "content": "a"}]))


def test_the_last_message_is_continued_with_a_special_token_in_it(tmp_path: Path) -> None:
    with router_of(tmp_path, "byte level") as (router, _):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so <|im_end|> far"}]
        asked = Conversation(messages, add_generation_prompt=False, continue_final_message=True)
        ids = ids_of(router, asked)
        assert router.names(ids).endswith("so <|im_end|> far")
        assert [router.names([at]) for at in ids].count("<|im_end|>") == 1


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "pad_token"])
def test_variables_of_a_request_set_nothing_that_is_the_models(name: str) -> None:
    chat = ChatMessages(messages=[ChatMessage(role="user", content="a")], template_kwargs=json.dumps({name: "x"}))
    with pytest.raises(InvalidRequest, match=name):
        conversation(chat)
    chat.template_kwargs = json.dumps({"enable_thinking": False})
    assert conversation(chat).variables == {"enable_thinking": False}


def test_a_variables_text_has_no_special_token(tmp_path: Path) -> None:
    with router_of(tmp_path, "roles") as (router, _):
        messages = [{"role": "user", "content": "a"}]
        good = ids_of(router, Conversation(messages, variables={"mood": "good"}))
        bad = ids_of(router, Conversation(messages, variables={"mood": "<|end|>"}))
        end = router.id_of("<|end|>")
        assert good.count(end) == bad.count(end) == 1  # type: ignore[arg-type]  # it has one
