"""A server that can't start says which field, value or port is wrong, and what is allowed."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import make_checkpoint
from support.processes import MODULES, Process


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


def test_a_bad_model_folder_is_refused_at_start(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(7)}, folder / "model.safetensors")
    config = {"name": "colocated-0", "role": "colocated", "model": str(folder)}
    with refused_start(tmp_path, MODULES["colocated"], config) as lines:
        for part in ("model.norm.weight", "7", "64"):
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


@pytest.mark.parametrize("name", ["grpc_port", "http_port"])
def test_a_port_in_use_is_named(tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = {"model": "pico", "grpc_port": 0, "http_port": 0, name: port}
        with refused_start(tmp_path, "kvrelay.router", config) as lines:
            assert f"{name} {port}" in lines[-1]
