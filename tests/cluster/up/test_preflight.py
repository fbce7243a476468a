"""Mistakes that are found before Ray is started."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from kvrelay.cluster.config.file import load
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import UsageError
from kvrelay.cluster.up.preflight import check, check_checkpoint, check_port
from kvrelay.models import resolve


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("pico"), tmp_path / "model"))


def config(**sections: dict[str, object]) -> ClusterConfig:
    return ClusterConfig.model_validate({"router": {"grpc_port": 0, "http_port": None}, **sections})


def test_a_bundled_model_is_found_by_name() -> None:
    assert check(config()).model.path == str(resolve("pico"))


def test_a_relative_folder_becomes_absolute(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert check(config(model={"path": "./model"})).model.path == str(checkpoint)


def test_an_instruction_set_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_INSTRUCTION_SET", "sse2")
    with pytest.raises(UsageError, match=r"KVRELAY_INSTRUCTION_SET is 'sse2'; allowed here:"):
        check(config())


@pytest.mark.parametrize("path", ["/nope", "", "pico2"])
def test_a_model_that_is_not_there(path: str) -> None:
    with pytest.raises(UsageError, match=f"{path!r}.*neither a folder nor a bundled model"):
        check(config(model={"path": path}))


def test_an_unknown_architecture_names_itself_and_the_known_ones(checkpoint: Path) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mamba"}))
    with pytest.raises(UsageError, match=r"model_type.*'mamba'.*llama") as caught:
        check_checkpoint(checkpoint)
    assert len(caught.value.lines) == 1


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
        check_checkpoint(checkpoint)


def test_a_pickle_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin.*pickle"):
        check_checkpoint(checkpoint)


def test_a_mis_shaped_tensor_is_named_with_both_shapes(checkpoint: Path) -> None:
    file = checkpoint / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"intermediate_size": values["intermediate_size"] * 2}))
    with pytest.raises(UsageError, match=r"tensor model\.layers\.0\.mlp.*shape.*expected"):
        check_checkpoint(checkpoint)


def test_a_file_that_was_cut_short_is_named(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        check_checkpoint(checkpoint)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            check(config(router={"grpc_port": port, "http_port": None}))
        assert caught.value.lines == [f"grpc_port {port}: already in use on 127.0.0.1"]
        assert caught.value.code == 2
        with pytest.raises(UsageError, match=f"http_port {port}: already in use"):
            check(config(router={"grpc_port": 0, "http_port": port}))
        with pytest.raises(UsageError, match=f"grpc_port {port}: already in use"):
            check(config(router={"grpc_port": port - 1, "http_port": None, "replicas": 2}))
    check_port("grpc_port", "127.0.0.1", port)


def test_a_host_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(UsageError, match=r"grpc_port 0: .* on 203\.0\.113\.1"):
        check_port("grpc_port", "203.0.113.1", 0)
    with pytest.raises(UsageError, match=r"host no such host"):
        check_port("grpc_port", "no such host", 0)


def test_folders_and_ports_of_other_machines_are_not_checked() -> None:
    joined = config(ray={"address": "auto"}, model={"path": "/there"})
    assert check(joined) == joined


def test_the_defaults_pass() -> None:
    assert load().model.path == "pico"


@pytest.mark.parametrize(
    ("section", "options", "said"),
    [
        ("router", {"api_keys": "missing"}, "router: api_keys missing: No such file"),
        ("router", {"tls_certificate": "missing", "tls_key": "k"}, "router: certificate: missing: No such file"),
        ("security", {"join_token_path": "missing"}, "security: join_token_path missing: No such file"),
        ("security", {"tls": "mutual", "certificates": "nowhere"}, "security: certificate: nowhere/supervisor.crt"),
    ],
)
def test_a_missing_secret_is_named_before_ray_starts(section: str, options: dict[str, str], said: str) -> None:
    router = {"grpc_port": 0, "http_port": None, **(options if section == "router" else {})}
    security = options if section == "security" else {}
    with pytest.raises(UsageError, match=said):
        check(config(router=router, security=security))


def test_the_routers_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text(f"a {'0' * 64}\n")
    assert check(config(router={"grpc_port": 0, "http_port": None, "api_keys": "keys"})).router.api_keys == str(
        tmp_path / "keys"
    )
