"""A server that can't start says which field, value or port is wrong, and what is allowed."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import make_checkpoint
from support.processes import MODULES, Process

CONFIGS: dict[str, dict[str, Any]] = {
    "kvrelay.router": {"model": "pico", "grpc_port": 0, "http_port": 0},
    MODULES["colocated"]: {"name": "colocated-0", "role": "colocated", "model": "pico"},
    "kvrelay.cluster.supervisor": {},
}
"""Options of each kind of server with which it starts."""


def refusal(folder: Path, module: str, options: dict[str, Any], variables: dict[str, str] | None = None) -> str:
    """The last line of the log of a server that must end with status 2, and say nothing on its standard output."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[module] | options))
    process = Process(module, ["--config", str(path)], folder / "log", variables, forked=True)
    try:
        assert process.popen.wait(60) == 2, process.log.read_text()
        assert process.popen.stdout is not None
        assert process.popen.stdout.read() == b""
    finally:
        process.stop()
    return process.log.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("module", "options", "named"),
    [
        (MODULES["colocated"], {"engine": {"block_sizes": 16}}, ("engine.block_sizes",)),
        (MODULES["colocated"], {"engine": {"block_size": 17}}, ("block_size", "17", "power of two")),
        (MODULES["colocated"], {"role": "both"}, ("role",)),
        (MODULES["colocated"], {"model": "nowhere"}, ("nowhere", "pico")),
        ("kvrelay.router", {"grpc_prt": 1}, ("grpc_prt",)),
        ("kvrelay.router", {"max_attempts": 0}, ("max_attempts is 0; allowed: at least 1",)),
        ("kvrelay.router", {"model": "nowhere"}, ("nowhere",)),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_at_start(
    tmp_path: Path, module: str, options: dict[str, Any], named: tuple[str, ...]
) -> None:
    line = refusal(tmp_path, module, options)
    assert all(part in line for part in named), line


def test_a_bad_model_folder_is_refused_at_start(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(7)}, folder / "model.safetensors")
    line = refusal(tmp_path, MODULES["colocated"], {"model": str(folder)})
    assert all(part in line for part in ("model.norm.weight", "7", "64")), line


@pytest.mark.parametrize("name", ["grpc_port", "http_port"])
def test_a_port_in_use_is_named(tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"{name} {port}" in refusal(tmp_path, "kvrelay.router", {name: port})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("KVRELAY_JOIN_TOKEN", "", ""), ("KVRELAY_PING_SECONDS", "soon", " is 'soon'; allowed: 0.1 to 60 seconds")],
)
def test_an_environment_that_cannot_be_used_is_a_users_mistake(
    tmp_path: Path, name: str, value: str, text: str
) -> None:
    assert name + text in refusal(tmp_path, "kvrelay.router", {"supervisor": "127.0.0.1:1"}, {name: value})
