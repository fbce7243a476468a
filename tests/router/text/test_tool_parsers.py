"""Tool calls and reasoning are read out of a text the same way, however the text is cut into pieces."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.errors import InvalidRequest
from kvrelay.router.text.tools.calls import NamedParser, ToolParser
from kvrelay.router.text.tools.formats import ArrayParser, HermesParser, Llama3Parser, MistralParser, tool_format
from kvrelay.router.text.tools.reasoning import Reasoning
from kvrelay.router.text.tools.schema import calls_schema

NAMES = ["get_weather", "add"]
PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3": lambda: Llama3Parser(NAMES),
    "mistral": MistralParser,
    "array": ArrayParser,
    "named": lambda: NamedParser("add"),
}
WEATHER = {"city": 'Köln "am" Rhein', "deep": {"list": [1, {"x": "}]"}], "no": None}}
W = json.dumps(WEATHER, ensure_ascii=False)


@dataclass
class Read:
    """The content and the tool calls that a parser made of a text."""

    content: str = ""
    names: dict[int, str] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, str] = field(default_factory=dict)

    @property
    def calls(self) -> list[tuple[str, object]]:
        return [(name, json.loads(self.arguments[at])) for at, name in sorted(self.names.items())]


def read(parser: ToolParser, pieces: list[str]) -> Read:
    found = Read()
    for step in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        found.content += step.content
        for call in step.calls:
            if call.name:
                assert call.index not in found.names
                assert call.id
                assert call.index == len(found.names)
                found.names[call.index], found.ids[call.index] = call.name, call.id
            assert call.index in found.names, "arguments before the name"
            found.arguments[call.index] = found.arguments.get(call.index, "") + call.arguments
    return found


def cuts(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    at, pieces = 0, []
    while at < len(text):
        size = draw.choice((1, 1, 2, 3, 7, 30))
        pieces.append(text[at : at + size])
        at += size
    return pieces


CALLS = [
    (
        "hermes",
        f'I look.\n\n<tool_call>{{"arguments": {W}, "name": "get_weather"}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "I look.",
        ["get_weather", "add"],
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", ["add"]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}", "n": 5 }</tool_call>', "", ["add"]),
    ("llama3", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {W}}}', "", ["get_weather"]),
    (
        "mistral",
        f'Yes. [TOOL_CALLS][{{"name": "get_weather", "arguments": {W}}}, {{"name": "add", "arguments": {{}}}}]',
        "Yes.",
        ["get_weather", "add"],
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]add[ARGS]{{}}", "", ["get_weather", "add"]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abc123456[ARGS]{W}", "", ["get_weather"]),
    # Closing tags may be missing, or come behind stray characters.
    (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {W}}}\nI called it.',
        "\nI called it.",
        ["get_weather"],
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {W}}}\n<tool_call>{{"name": "add"}}}}\n</tool_call> So.',
        " So.",
        ["get_weather", "add"],
    ),
    ("array", f'[ {{"name": "get_weather", "parameters": {W}}} , {{"name":"add"}}]', "", ["get_weather", "add"]),
    ("named", W, "", ["add"]),
]


@pytest.mark.parametrize(("kind", "text", "content", "names"), CALLS)
def test_calls_are_read_however_the_text_is_cut(kind: str, text: str, content: str, names: list[str]) -> None:
    for seed in range(30):
        found = read(PARSERS[kind](), [text] if not seed else cuts(text, seed))
        assert found.content == content
        assert [name for name, _ in found.calls] == names
        for name, arguments in found.calls:
            expected: object = WEATHER if name == "get_weather" or kind == "named" else {}
            assert arguments == ({"a": 1} if 'a\\"' in text and name == "add" else expected)
        if "abc123456" in text:
            assert found.ids == {0: "abc123456"}
        elif kind == "mistral":
            assert all(len(id_) == 9 and id_.isalnum() for id_ in found.ids.values())


CONTENTS = [
    ("hermes", "no call < tool_call> here <tool_"),
    ("hermes", "<tool_call>no object</tool_call> and more"),
    ("hermes", '<tool_call>{"title": "no name", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"na'),
    ("llama3", '{"name": "Ada", "born": 1815}'),
    ("llama3", "a text with {braces}"),
    ("llama3", '{"name": "get_weath'),
    ("llama3", "<|python_"),
    ("hermes", "no call <tool_call>here"),
    ("mistral", "no call [TOOL_CALL"),
    ("mistral", 'no name [TOOL_CALLS] {"name": "add", "arguments": {}} [TOOL_CALLS] [1, 2]'),
    ("mistral", "no call [TOOL_CALLS] here"),
    ("mistral", "  two spaces  "),
    ("array", "no array"),
    ("array", '[{"title": 1}]'),
    ("array", "[1, 2]"),
    ("array", "[]: no calls"),
]


@pytest.mark.parametrize(("kind", "text"), CONTENTS)
def test_what_is_no_call_is_content_and_nothing_of_it_is_lost(kind: str, text: str) -> None:
    for seed in range(30):
        found = read(PARSERS[kind](), [text] if not seed else cuts(text, seed))
        assert found.content == text
        assert not found.names


@settings(max_examples=100)
@given(
    st.sampled_from(["hermes", "llama3", "mistral", "array"]), st.lists(st.text('{}[]":,;\\ a<>tool_c/', max_size=9))
)
def test_any_text_is_read_without_an_error(kind: str, pieces: list[str]) -> None:
    found = read(PARSERS[kind](), pieces)
    assert found.names or found.content == "".join(pieces)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(
                st.text(),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                    max_leaves=5,
                ),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 1000),
    st.booleans(),
)
def test_what_a_model_writes_comes_back(calls: list[tuple[str, dict[str, object]]], seed: int, ascii_: bool) -> None:
    def objects(key: str) -> list[str]:
        return [json.dumps({"name": name, key: given}, ensure_ascii=ascii_) for name, given in calls]

    texts = {
        "hermes": "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects("arguments")),
        "llama3": "; ".join(objects("parameters")),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects('arguments'))}]",
        "array": f"[{', '.join(objects('parameters'))}]",
    }
    for kind, text in texts.items():
        assert read(PARSERS[kind](), cuts(text, seed)).calls == calls, kind


def test_a_call_is_given_on_before_it_is_complete() -> None:
    parser = HermesParser()
    begun = parser.push('<tool_call>{"name": "add", "arguments": {"a": ')
    assert [(call.name, call.arguments) for call in begun.calls] == [("add", '{"a": ')]
    assert [call.arguments for call in parser.push("1").calls] == ["1"]


@pytest.mark.parametrize(
    "call", [r'{"name": "add\ud83d", "arguments": {}}', r'{"name": "add", "arguments": "{\"a\": \"\ud83d\"}"}']
)
def test_a_call_with_half_of_a_surrogate_pair_can_be_encoded(call: str) -> None:
    found = read(HermesParser(), [f"<tool_call>{call}</tool_call>"])
    assert "\ufffd" in f"{found.names[0]}{found.arguments[0]}".encode().decode()


@pytest.mark.parametrize(
    ("begun", "text", "thought", "answer"),
    [
        (False, "<think>\nI see.\n</think>\n\nYes.", "I see.", "Yes."),
        (True, "I see.\n</think>\n\nYes.", "I see.", "Yes."),
        (False, "Yes, <think> is a tag.", "", "Yes, <think> is a tag."),
        (False, "<thi", "", "<thi"),
        (False, "<think>endless </thin", "endless </thin", ""),
        (True, "</think>Yes.", "", "Yes."),
        (False, "<think></think>\n\n<think>", "", "<think>"),
    ],
)
def test_reasoning_is_split_however_the_text_is_cut(begun: bool, text: str, thought: str, answer: str) -> None:
    for seed in range(30):
        splitter = Reasoning(begun, None)
        parts = [splitter.push(piece, [1]) for piece in ([text] if not seed else cuts(text, seed))]
        parts.append(splitter.finish())
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (thought, answer)


def test_reasoning_tokens_are_counted_by_the_tags_tokens() -> None:
    splitter = Reasoning(False, 8)
    splitter.push("<think>", [7])
    splitter.push("a b", [1, 2])
    splitter.push("c</think>d", [3, 8, 4])
    splitter.push("e", [5])
    assert splitter.tokens == 5


@pytest.mark.parametrize("text", ["abc", "\n\nYes.", "<table> of it", "  <thin", "\n", "No </think>"])
def test_an_answer_without_reasoning_has_no_reasoning_tokens(text: str) -> None:
    for seed in range(30):
        splitter = Reasoning(False, 8)
        for piece in [text] if not seed else cuts(text, seed):
            splitter.push(piece, [8] if "</think>" in piece else [1])
        splitter.finish()
        assert splitter.tokens == 0


def test_tokens_behind_the_closing_tag_are_no_reasoning_while_its_text_is_held_back() -> None:
    splitter = Reasoning(True, 8)
    splitter.push("a", [1])
    splitter.push("", [8])  # a stop string may begin with the tag
    splitter.push("", [2])
    splitter.push("</think>b c", [3])
    assert splitter.tokens == 2


def test_a_template_tells_the_format() -> None:
    assert [
        None if (found := tool_format("auto", template)) is None else found.name
        for template in ("a <tool_call> b", "[TOOL_CALLS]", "<|python_tag|>", "plain")
    ] == ["hermes", "mistral", "llama3", None]
    assert tool_format("none", "<tool_call>") is None


def test_the_definitions_of_several_functions_move_to_the_top_of_their_schema() -> None:
    point = {"$defs": {"P": {"type": "number"}}, "type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}}
    schema = json.loads(calls_schema({"a": point, "b": point, "c": None}, single=True))
    assert schema["$defs"] == point["$defs"]
    assert schema["maxItems"] == schema["minItems"] == 1
    assert [option["properties"]["name"]["const"] for option in schema["items"]["anyOf"]] == ["a", "b", "c"]
    other = point | {"$defs": {"P": {"type": "string"}}}
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.function\.parameters\.\$defs is 'P'"):
        calls_schema({"a": point, "b": other}, single=False)
