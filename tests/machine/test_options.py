"""Limits of options: the same for a class that is made in code, for a file, and in the JSON schema."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from annotated_types import Interval
from pydantic import TypeAdapter, ValidationError

from kvrelay.machine.options import AUTO, Automatic, Mistake, Options, Port


@dataclass(frozen=True, slots=True)
class Small(Options):
    """Options with each kind of limit."""

    port: Port | None = None
    share: Annotated[float, Interval(ge=0, le=1)] = 0.5
    seconds: Annotated[float, Interval(gt=0)] = 1.0
    waiting: Annotated[int, Interval(ge=1)] = 1
    size: Annotated[int, Automatic("auto, or 8 to 128", 8, 128)] = AUTO
    mode: Literal["off", "on"] = "off"


ADAPTER = TypeAdapter(Small)
REFUSED = [
    ("port", 65536, "0 to 65535, or null", "at most 65535"),
    ("port", -1, "0 to 65535, or null", "at least 0"),
    ("share", 1.5, "0 to 1", "at most 1"),
    ("share", float("nan"), "0 to 1", "at most 1|at least 0"),
    ("seconds", 0.0, "more than 0", "greater than 0"),
    ("waiting", 0, "1 or more", "at least 1"),
    ("size", 7, "auto, or 8 to 128", "auto, or 8 to 128"),
    ("size", 129, "auto, or 8 to 128", "auto, or 8 to 128"),
    ("mode", "of", "off, on", "'off' or 'on'"),
]


@pytest.mark.parametrize(("name", "value", "allowed", "in_file"), REFUSED)
def test_a_value_outside_its_limits_is_refused_with_name_value_and_limits(
    name: str, value: object, allowed: str, in_file: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}; allowed: {allowed}"):
        Small(**{name: value})
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_json(json.dumps({name: value}))
    (problem,) = caught.value.errors()
    text = str(Mistake.of(problem))
    assert any(text == f"{name} is {value!r}; allowed: {words}" for words in in_file.split("|")), text


def test_the_limits_themselves_are_allowed_and_in_the_schema() -> None:
    Small(port=65535, share=1, seconds=1e-9, waiting=1, size=128, mode="on")
    Small(port=0, share=0, size=8)
    properties = ADAPTER.json_schema()["properties"]
    assert properties["port"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 65535}
    assert properties["share"]["maximum"] == 1
    assert properties["seconds"]["exclusiveMinimum"] == 0
    assert properties["size"]["anyOf"][1] == {"type": "integer", "minimum": 8, "maximum": 128}


def test_every_mistake_of_a_file_is_told() -> None:
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python({"port": -1, "waiting": 0, "wating": 1})
    assert [str(Mistake.of(each)) for each in caught.value.errors()] == [
        "port is -1; allowed: at least 0",
        "waiting is 0; allowed: at least 1",
        "wating: unknown key",
    ]
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_json("{")
    assert str(Mistake.of(caught.value.errors()[0])).startswith("Invalid JSON: ")
