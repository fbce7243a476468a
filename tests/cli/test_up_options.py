"""The options of `kvrelay up`: each gives the configuration that the YAML file gives which says the same."""

import re
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml
from command import call, fails

from kvrelay.cli.commands.up import SETTINGS, configuration, up
from kvrelay.cluster.config.file import load
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import UsageError
from kvrelay.engine.config import MODEL_METHODS, CacheDtype, Dtype, Quantization, SpeculationMethod
from kvrelay.transfer.config import Transport

SCALING = ("min_prefill", "max_prefill", "min_decode", "max_decode", "min_workers", "max_workers")

EXAMPLES: list[tuple[list[str], str]] = [
    (["--model", "org/name"], "model: {path: org/name}"),
    *((["--dtype", word], f"model: {{dtype: {word}}}") for word in get_args(Dtype)),
    *((["--quantization", word], f"engine: {{quantization: {word}}}") for word in get_args(Quantization)),
    *((["--kv-dtype", word], f"engine: {{kv_dtype: {word}}}") for word in get_args(CacheDtype)),
    *(
        (["--kv-memory", size], f"engine: {{kv_memory_bytes: {size}}}")
        for size in ("auto", "8GiB", "8589934592", "0.5 GiB")
    ),
    (["--max-context", "4096"], "engine: {max_context: 4096}"),
    (["--threads", "3"], "engine: {threads: 3}"),
    *(
        (["--speculate", f"{method}={method}-model"], f"engine: {{speculation: {{method: {method}, {model}}}}}")
        for method in MODEL_METHODS
        for model in (f"draft_model: {method}-model",)
    ),
    *(
        (["--speculate", method], f"engine: {{speculation: {{method: '{method}'}}}}")
        for method in get_args(SpeculationMethod)
        if method not in MODEL_METHODS
    ),
    (
        ["--speculate", "draft=a=b", "--speculate-tokens", "4"],
        "engine: {speculation: {method: draft, draft_model: a=b, max_tokens: 4}}",
    ),
    (["--speculate-tokens", "3"], "engine: {speculation: {max_tokens: 3}}"),
    (["--prefill", "2"], "prefill: {replicas: 2}"),
    (["--decode", "2"], "decode: {replicas: 2}"),
    (["--colocated", "2"], "colocated: {replicas: 2}"),
    (["--prefill-tp", "2"], "prefill: {engine: {tensor_parallel: 2}}"),
    (["--prefill-pp", "2"], "prefill: {engine: {pipeline_parallel: 2}}"),
    (["--decode-tp", "2"], "decode: {engine: {tensor_parallel: 2}}"),
    (["--decode-pp", "2"], "decode: {engine: {pipeline_parallel: 2}}"),
    (["--gpus", "0"], "ray: {gpus: 0}"),
    *((["--transport", word], f"transfer: {{transport: {word}}}") for word in get_args(Transport)),
    (["--address", "auto"], "ray: {address: auto}"),
    (["--scaling"], "scaling: {enabled: true}"),
    (["--ttft-target", "0.5"], "router: {classes: {interactive: {ttft_target_seconds: 0.5}}}"),
    (["--tpot-target", "0.05"], "router: {classes: {interactive: {tpot_target_seconds: 0.05}}}"),
    *(
        ([f"--{bound.replace('_', '-')}", "2"], f"scaling: {{enabled: true, {bound}: 2}}")
        for bound in SCALING
        if bound != "min_workers"
    ),
    (["--min-workers", "2", "--max-workers", "3"], "scaling: {enabled: true, min_workers: 2, max_workers: 3}"),
    (["--routers", "2"], "router: {replicas: 2}"),
    (["--share-port"], "router: {port_step: 0}"),
    (["--host", "0.0.0.0"], "router: {host: 0.0.0.0}"),
    (["--grpc-port", "0"], "router: {grpc_port: 0}"),
    (["--http-port", "0"], "router: {http_port: 0}"),
    (["--served-model-name", "a", "--served-model-name", "b"], "router: {served_model_name: [a, b]}"),
    (["--chat-template", "t.jinja"], "router: {chat_template: t.jinja}"),
    (["--drain-seconds", "5"], "drain_seconds: 5"),
    (["--set", "engine.prefix_cache=false"], "engine: {prefix_cache: false}"),
    (["--set", "router.http_port=null"], "router: {http_port: null}"),
    (["--set", "decode.engine.max_sequences=8"], "decode: {engine: {max_sequences: 8}}"),
    (
        ["--set", "router.cors_origins=['*']", "--set", "router.host=::1"],
        "router: {cors_origins: ['*'], host: '::1'}",
    ),
    (["--set", "engine.quantization=int8", "--quantization", "int4"], "engine: {quantization: int4}"),
]
"""Options, and the YAML that says the same."""

BASES = (
    "",
    "engine: {block_size: 32, speculation: {max_tokens: 2}}\nrouter: {replicas: 3}\n",
    "engine: {quantization: fp8, kv_dtype: int8, speculation: {method: draft, draft_model: pico-draft}}\n"
    "prefill: {replicas: 3, engine: {block_size: 8}}\ndecode: {replicas: 3}\n"
    "scaling: {enabled: false, max_workers: 9}\nmodel: {path: other}\n",
)
"""Files that the options are put on top of."""


def given(path: Path | None, arguments: list[str]) -> ClusterConfig:
    """The configuration of `kvrelay up ARGUMENTS` on top of a file."""
    parameters = up.make_context("up", list(arguments)).params
    return configuration(path, parameters)


def merged(below: object, above: object) -> object:
    """Two values of YAML, of which the second one wins."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}
    return above


@pytest.mark.parametrize(("arguments", "text"), EXAMPLES, ids=[" ".join(arguments) for arguments, _ in EXAMPLES])
def test_an_option_means_what_the_file_means_that_says_the_same(
    tmp_path: Path, arguments: list[str], text: str
) -> None:
    path = tmp_path / "kvrelay.yaml"
    for base in BASES:
        below, above = yaml.safe_load(base) or {}, yaml.safe_load(text)
        if "--speculate" in arguments:  # names the method with its model, or with none
            above["engine"]["speculation"] = {"draft_model": "", **above["engine"]["speculation"]}
        path.write_text(yaml.safe_dump(merged(below, above)))
        expected = load(path)
        path.write_text(base)
        assert given(path, arguments) == expected


def test_every_option_has_an_example_and_is_a_key_of_the_configuration() -> None:
    used = {word for arguments, _ in EXAMPLES for word in arguments if word.startswith("--")}
    assert used == {name for parameter in SETTINGS.values() for name in parameter.opts} | {"--set"}
    assert {parameter.name for parameter in up.params} - SETTINGS.keys() == {
        "config",
        "others",
        "detach",
        "unattended",
    }
    for setting in SETTINGS.values():
        options = ClusterConfig.model_validate({"router": {"classes": {"interactive": {}}}}).model_dump()
        # A role's engine has the options of the common engine, and only those that are given.
        for part in re.sub(r"^\w+\.engine\.", "engine.", setting.key).split("."):
            options = options[part]


@pytest.mark.parametrize(
    ("arguments", "text", "key", "flag"),
    [
        (["--dtype", "int8"], "model: {dtype: int8}", "model.dtype", "--dtype"),
        (
            ["--kv-dtype", "fp8", "--set", "engine.device=cpu"],
            "engine: {kv_dtype: fp8, device: cpu}",
            "engine.kv_dtype",
            "--kv-dtype",
        ),
        (["--kv-memory", "8 EiBs"], "engine: {kv_memory_bytes: 8 EiBs}", "engine.kv_memory_bytes", "--kv-memory"),
        (
            ["--speculate", "draft"],
            "engine: {speculation: {method: draft}}",
            "engine.speculation.draft_model",
            "--speculate draft_model",
        ),
        (
            ["--speculate", "ngram=x"],
            "engine: {speculation: {method: ngram, draft_model: x}}",
            "engine.speculation.draft_model",
            "--speculate draft_model",
        ),
        (
            ["--ttft-target", "-1.5"],
            "router: {classes: {interactive: {ttft_target_seconds: -1.5}}}",
            "router.classes.interactive.ttft_target_seconds",
            "--ttft-target",
        ),
        (
            ["--min-prefill", "3", "--max-prefill", "2"],
            "scaling: {min_prefill: 3, max_prefill: 2}",
            "scaling.max_prefill",
            "--max-prefill",
        ),
        (
            ["--set", "engine.block_sizes=8"],
            "engine: {block_sizes: 8}",
            "engine.block_sizes",
            "--set engine.block_sizes",
        ),
    ],
)
def test_a_value_is_refused_in_the_words_that_a_file_is_refused_in(
    tmp_path: Path, arguments: list[str], text: str, key: str, flag: str
) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as of_file:
        load(path)
    with pytest.raises(UsageError) as of_option:
        given(None, arguments)
    (line,) = (re.sub(r"^.*?: line \d+: ", "", each) for each in of_file.value.lines)
    assert line.startswith(key)
    assert list(of_option.value.lines) == [flag + line.removeprefix(key)]


@pytest.mark.parametrize("pair", ["x", "=1", "", "model.path=2024-13-45", "model.path=" + "[" * 5000])
def test_what_set_sets_has_a_key_and_a_value_in_yaml(pair: str) -> None:
    fails(2, r"--set( model.path)? is .*; allowed: (KEY=VALUE|a value in YAML)", "up", "--set", pair)


def test_what_set_sets_is_yaml() -> None:
    fails(2, r"--set engine is '\['; allowed: a value in YAML", "up", "--set", "engine=[")


def test_a_degree_that_the_model_cant_have_is_refused_before_anything_starts(tmp_path: Path) -> None:
    said = r"prefill\.engine\.tensor_parallel is 3; allowed: 1, 2, 4, 8, for 8 query heads and 4 KV heads"
    free = ("--grpc-port", 0, "--http-port", 0)
    fails(2, said, "up", "--model", "pico", "--prefill-tp", 3, *free)
    path = tmp_path / "kvrelay.yaml"
    path.write_text("prefill: {engine: {tensor_parallel: 3}}")
    fails(2, said, "up", "--config", path, *free)


def test_the_help_has_every_option_below_a_heading_and_every_word_of_a_choice() -> None:
    shown = call("up", "--help").stdout
    headings = [line for line in shown.splitlines() if re.fullmatch(r"\w.*:", line)]
    assert headings == ["The model:", "How workers compute:", "Workers:", "Scaling:", "Routers:", "The cluster:"]
    for parameter in up.params:
        assert isinstance(parameter, click.Option)
        assert (parameter.opts[0] in shown.split()) is not parameter.hidden
    words = [
        word for kind in (Dtype, Quantization, CacheDtype, SpeculationMethod, Transport) for word in get_args(kind)
    ]
    assert all(re.search(rf"\b{word}\b", shown) for word in words)


def test_the_shell_completes_the_words_of_a_choice() -> None:
    context = up.make_context("up", [])
    completed = {name: [item.value for item in SETTINGS[name].shell_complete(context, "")] for name in SETTINGS}
    assert completed["quantization"] == list(get_args(Quantization))
    assert [item.value for item in SETTINGS["transport"].shell_complete(context, "n")] == ["nccl", "nixl"]
