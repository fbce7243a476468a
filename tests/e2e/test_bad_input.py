"""Bad input gets an error that names the field, the value and the limit; the servers serve on."""

import json
import math
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.client import Client, InvalidRequest
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.processes import MODULES, Process, ProcessCluster

CONTEXT = 1024
NAN = float("nan")

REQUESTS: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    ("", {}, ("text", "at least 1")),
    ([], {}, ("token_ids", "at least 1")),
    ([1] * CONTEXT, {}, (str(CONTEXT),)),
    ([1] * 1000, {"max_tokens": 100}, ("max_tokens", "100", "24", str(CONTEXT))),
    ([1, VOCAB_SIZE], {}, ("token_ids", str(VOCAB_SIZE), str(VOCAB_SIZE - 1))),
    ([1], {"temperature": NAN}, ("temperature", "nan")),
    ([1], {"temperature": -0.5}, ("temperature", "-0.5", "0")),
    ([1], {"temperature": math.inf}, ("temperature", "inf", "100")),
    ([1], {"top_p": 0.0}, ("top_p", "0", "1")),
    ([1], {"top_p": 1.5}, ("top_p", "1.5", "1")),
    ([1], {"min_p": 2.0}, ("min_p", "2", "1")),
    ([1], {"stop": [str(number) for number in range(17)]}, ("stop", "17", "16")),
    ([1], {"stop": [""]}, ("stop", "1")),
    ([1], {"stop": ["x" * 257]}, ("stop", "257", "256")),
    ([1], {"stop_token_ids": list(range(65))}, ("stop_token_ids", "65", "64")),
    ([1], {"max_tokens": 4, "min_tokens": 5}, ("min_tokens", "5", "4")),
    ([1], {"max_tokens": 0}, ("max_tokens", "0", "1")),
    ([1], {"request_id": "line\nbreak"}, ("request_id",)),
]


@pytest.mark.parametrize(("prompt", "options", "named"), REQUESTS, ids=lambda value: str(value)[:40])
def test_a_bad_request_is_refused_with_the_reason(
    pair: ProcessCluster, prompt: Any, options: dict[str, Any], named: tuple[str, ...]
) -> None:
    with Client(pair.router) as client:
        with pytest.raises(InvalidRequest) as refused:
            client.complete(prompt, **options, timeout=10)
        for part in named:
            assert part in str(refused.value)
        assert client.complete([1, 2, 3], max_tokens=2, ignore_eos=True, timeout=10).usage.completion_tokens == 2


def test_invalid_utf8_is_named(pair: ProcessCluster) -> None:
    text = b"caf\xe9"
    payload = b"\x12" + struct.pack("B", len(text)) + text  # field 2, `text`
    with grpc.insecure_channel(pair.router) as channel:
        call = channel.unary_stream("/kvrelay.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(payload, timeout=10))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "kvrelay.v1.GenerateRequest" in refused.value.details()
    assert "UTF-8" in refused.value.details()


@contextmanager
def refused_start(tmp_path: Path, module: str, config: dict[str, Any]) -> Iterator[list[str]]:
    """A server that must end with status 2; yields its log, whose last line has the reason."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    process = Process(module, ["--config", str(path)], tmp_path / "log", forked=True)
    try:
        assert process.popen.wait(60) == 2, process.log.read_text()
    finally:
        process.stop()
    yield process.log.read_text().splitlines()


def missing_tensor(folder: Path) -> tuple[str, ...]:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    return ("model.layers.1.mlp.up_proj.weight",)


def mis_shaped_tensor(folder: Path) -> tuple[str, ...]:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors")
    return "model.norm.weight", "7", "64"


def pickle_checkpoint(folder: Path) -> tuple[str, ...]:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return "pytorch_model.bin", "safetensors"


def unknown_architecture(folder: Path) -> tuple[str, ...]:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    return "model_type", "mamba", "llama"


@pytest.mark.parametrize("spoil", [missing_tensor, mis_shaped_tensor, pickle_checkpoint, unknown_architecture])
def test_a_bad_model_folder_is_refused_at_start(tmp_path: Path, spoil: Any) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    named = spoil(folder)
    config = {"name": "colocated-0", "role": "colocated", "model": str(folder)}
    with refused_start(tmp_path, MODULES["colocated"], config) as lines:
        for part in named:
            assert part in lines[-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": {"block_sizes": 16}}, ("engine.block_sizes",)),
        ({"engine": {"block_size": 17}}, ("block_size", "17", "power of two")),
        ({"role": "both"}, ("role",)),
        ({"model": "nowhere"}, ("nowhere", "pico")),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_at_start(tmp_path: Path, options: dict[str, Any], named: tuple[str, ...]) -> None:
    config = {"name": "colocated-0", "role": "colocated", "model": "pico"}
    with refused_start(tmp_path, MODULES["colocated"], config | options) as lines:
        for part in named:
            assert part in lines[-1]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, other in (("grpc_port", "http_port"), ("http_port", "grpc_port")):
            with refused_start(tmp_path, "kvrelay.router", {"model": "pico", name: port, other: 0}) as lines:
                assert f"{name} {port}" in lines[-1]
