"""Completions that obey a constraint, end to end, on the bundled model."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from kvrelay.client import Client, InvalidRequest
from support.processes import ProcessCluster, process_cluster
from support.schemas import random_schema

ENGINE = {"max_batch_tokens": 64, "kv_memory_bytes": 8 * 2**20, "threads": 1}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with process_cluster(tmp_path_factory.mktemp("structured"), "pico", worker={"engine": ENGINE}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ProcessCluster) -> Iterator[Client]:
    with Client(cluster.router, timeout=60) as client:
        yield client


@pytest.mark.parametrize("seed", range(8))
def test_json_obeys_its_schema(client: Client, seed: int) -> None:
    schema = random_schema(random.Random(seed))
    done = client.complete("value = ", json_schema=schema, seed=seed)
    assert done.finish_reason == "stop"
    jsonschema.validate(json.loads(done.text), schema)


def test_an_object_is_json(client: Client) -> None:
    done = client.complete("value = {", json_object=True, seed=3, repetition_penalty=1.3)
    assert isinstance(json.loads(done.text), dict) or done.finish_reason == "length"


def test_a_regex_matches_the_whole_text(client: Client) -> None:
    pattern = r"[A-Z][a-z]{2,8}-\d{3}(é|ö)"
    for seed in range(4):
        assert re.fullmatch(pattern, client.complete("x = ", regex=pattern, seed=seed).text)


def test_a_choice_is_one_of_its_texts(client: Client) -> None:
    texts = ['a "quoted"\ntext', "ünïcode 😀", "a", "ab"]
    found = {client.complete("x = ", choice=texts, seed=seed, temperature=5.0).text for seed in range(12)}
    assert found <= set(texts)
    assert len(found) > 1


def test_a_grammar_is_followed(client: Client) -> None:
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]{0,2}/'
    for seed in range(4):
        assert re.fullmatch(
            r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}", client.complete("x=", grammar=grammar, seed=seed).text
        )


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"json_schema": "{"}, ("sampling.constraint.json_schema", "JSON")),
    ({"json_schema": "[1]"}, ("sampling.constraint.json_schema", "JSON object")),
    ({"json_schema": "[" * 30_000}, ("sampling.constraint.json_schema",)),
    ({"json_schema": {"type": "obj"}}, ("json_schema", "Invalid type: obj")),
    ({"json_schema": {"not": {}}}, ("json_schema", "not")),
    ({"json_schema": {"title": "x" * 70_000}}, ("json_schema", "65536")),
    ({"regex": "(a"}, ("regex", "unclosed group")),
    ({"regex": "a(?=b)"}, ("regex", "look-around")),
    ({"regex": " "}, ("sampling.constraint.regex",)),
    ({"choice": []}, ("sampling.constraint.choice.texts", "1 to 1024")),
    ({"choice": ["a", ""]}, ("sampling.constraint.choice.texts[1]",)),
    ({"grammar": "start: x"}, ("grammar", "unknown name")),
    ({"regex": "a", "ignore_eos": True}, ("sampling.constraint", "ignore_eos")),
    ({"regex": "a", "min_tokens": 2}, ("sampling.min_tokens", "constraint")),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_obeyed_is_refused(client: Client, options: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.complete("x", max_tokens=4, **options)
    for name in named:
        assert name in str(refused.value)


def test_a_constraint_that_bad_words_exclude_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="no token is left"):
        client.complete("x", choice=["a"], bad_words=["a"])
    assert client.complete("x", choice=["a"]).text == "a"
