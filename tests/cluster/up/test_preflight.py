"""Mistakes that are found before Ray is started."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import UsageError
from kvrelay.cluster.up.preflight import check, check_checkpoint, check_port
from kvrelay.engine.config import SpeculationConfig
from kvrelay.models import resolve
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("pico"), tmp_path / "model"))


def config(**sections: dict[str, object]) -> ClusterConfig:
    return ClusterConfig.model_validate({"router": {"grpc_port": 0, "http_port": None}, **sections})


def test_a_model_is_found_by_name_or_folder_and_files_become_absolute(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(config()).model.path == str(resolve("pico"))
    monkeypatch.chdir(checkpoint.parent)
    Path("keys").write_text(f"a {'0' * 64}\n")
    router = {"grpc_port": 0, "http_port": None, "api_keys": "keys"}
    checked = check(config(model={"path": "./model"}, router=router))
    assert checked.model.path == str(checkpoint)
    assert checked.router.api_keys == str(checkpoint.parent / "keys")
    joined = config(ray={"address": "auto"}, model={"path": "/there"})
    assert check(joined) == joined, "folders and ports of other machines are not checked"


def test_draft_models_are_found_before_the_start(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    own = {"engine": {"speculation": {"method": "eagle3", "draft_model": "model"}}}
    checked = check(config(engine={"speculation": {"method": "draft", "draft_model": "pico-draft"}}, decode=own))
    prefill, decode = checked.worker_config("worker-0", "prefill"), checked.worker_config("worker-1", "decode")
    assert prefill.engine.speculation.draft_model == str(resolve("pico-draft"))
    assert decode.engine.speculation == SpeculationConfig("eagle3", str(checkpoint))
    for sections, key in (
        ({"engine": {"speculation": {"method": "draft", "draft_model": "nope"}}}, "engine"),
        ({"decode": {"engine": {"speculation": {"method": "medusa", "draft_model": "nope"}}}}, "decode.engine"),
    ):
        with pytest.raises(UsageError, match=rf"^{key}\.speculation\.draft_model: 'nope' is neither a folder nor"):
            check(config(**sections))


def changed(folder: Path, **values: object) -> None:
    """Changes the model's configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: changed(folder, model_type="nothing"), r"model_type.*'nothing'"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"pytorch_model\.bin.*pickle",
        ),
        (lambda folder: changed(folder, intermediate_size=1408), r"tensor model\.layers\.0\.mlp.*shape.*expected"),
        (lambda folder: os.truncate(folder / "model.safetensors", 100), r"model\.safetensors"),
    ],
    ids=["an unknown architecture", "a missing file", "a pickle", "another shape", "a file cut short"],
)
def test_a_checkpoint_that_cannot_be_loaded_is_refused_with_what_is_wrong(
    checkpoint: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(checkpoint)
    with pytest.raises(UsageError, match=said) as caught:
        check_checkpoint(checkpoint)
    assert len(caught.value.lines) == 1


PARALLEL = "tensor_parallel"


def reshaped(folder: Path, heads: int, kv_heads: int, **fields: object) -> Path:
    """A checkpoint in `folder` with so many heads, of 16 numbers each."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "hidden_size": 16 * heads}
    return make_checkpoint(folder, "llama", **sizes, **fields)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"decode": {"engine": {PARALLEL: 2}}},
            r"^decode\.engine\.tensor_parallel is 2; allowed: 1, 3, 9, for 9 query",
        ),
        (
            {"engine": {PARALLEL: 6}},
            r"^prefill\.engine\.tensor_parallel is 6; allowed: 1, 3, 9, for 9 query heads and 3",
        ),
        ({"engine": {PARALLEL: 3, "quantization": "int4"}}, r"tensor_parallel is 3; allowed: 1, for 9 query"),
        (
            {"prefill": {"engine": {"pipeline_parallel": 4}}},
            r"prefill\.engine\.pipeline_parallel is 4; allowed: 1 to 3, of",
        ),
        (
            {"engine": {PARALLEL: 2, "model_path": "general"}},
            r"prefill\.engine\.tensor_parallel is 2; allowed: 1, 3, 9, for 9 query heads and 3 KV heads",
        ),
        (
            {"engine": {"pipeline_parallel": 2, "model_path": "general"}},
            r"pipeline_parallel is 2; allowed for a model that transformers' code runs: 1",
        ),
        (
            {"decode": {"engine": {PARALLEL: 3, "device": "cuda", "model_path": "general"}}},
            r"decode\.engine\.device is 'cuda'; allowed: cpu for 3 ranks of a model that transformers' code runs",
        ),
    ],
    ids=str,
)
def test_degrees_that_a_model_cant_have_are_refused(
    tmp_path: Path, sections: dict[str, dict[str, object]], said: str
) -> None:
    model = {"path": str(reshaped(tmp_path / "model", 9, 3))}
    with pytest.raises(UsageError, match=said):
        check(config(model=model, **sections))
    assert check(config(model=model, engine={PARALLEL: 3}, decode={"engine": {PARALLEL: 9}}))
    assert check(config(model=model, engine={PARALLEL: 3, "model_path": "general"}))
    idle = {"replicas": 0, "engine": {PARALLEL: 2}}
    assert check(config(model=model, colocated={"replicas": 1}, decode=idle)), "no such worker is started"


def test_what_ranks_pad_is_never_refused(tmp_path: Path) -> None:
    """Vocabulary and widths that no degree divides."""
    folder = reshaped(tmp_path / "model", 8, 2, vocab_size=331, intermediate_size=107)
    for tensor in (2, 4, 8):
        assert check(config(model={"path": str(folder)}, engine={PARALLEL: tensor}))


def test_degrees_that_would_cut_blocks_of_a_gguf_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    plain = reshaped(tmp_path / "plain", 8, 8, intermediate_size=128, rope_parameters=rope)
    path = write_gguf(plain, tmp_path / "model.gguf", lambda name: "Q8_0")
    sections = {"model": {"path": str(path)}}
    assert check(config(**sections, engine={PARALLEL: 4}))
    with pytest.raises(UsageError, match=r"tensor_parallel is 8; allowed: 1, 2, 4, for 8 query heads and 8 KV heads"):
        check(config(**sections, engine={PARALLEL: 8}))


def test_kv_that_cant_be_handed_over_between_the_ranks_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "cohere2")
    for role in ("prefill", "decode"):
        stages = {role: {"engine": {"pipeline_parallel": 2}}}
        with pytest.raises(UsageError, match=r"KV can't be handed over: layers: \[1, 2\] in the tracks"):
            check(config(model={"path": str(folder)}, **stages))
        # No context is longer than the window.
        assert check(config(model={"path": str(folder)}, engine={"max_context": 40}, **stages))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            check(config(router={"grpc_port": port, "http_port": None}))
        assert caught.value.lines == [f"grpc_port {port}: already in use on 127.0.0.1"]
        assert caught.value.code == 2
        with pytest.raises(UsageError, match=f"http_port {port}: already in use"):
            check(config(router={"grpc_port": 0, "http_port": port}))
        # Another process may have taken the first replica's port.
        with pytest.raises(UsageError, match=f"grpc_port ({port}|{port - 1}): already in use"):
            check(config(router={"grpc_port": port - 1, "http_port": None, "replicas": 2}))
    check_port("grpc_port", "127.0.0.1", port)


def test_a_host_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(UsageError, match=r"grpc_port 0: .* on 203\.0\.113\.1"):
        check_port("grpc_port", "203.0.113.1", 0)
    with pytest.raises(UsageError, match=r"host no such host"):
        check_port("grpc_port", "no such host", 0)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"path": "/nope"}}, "'/nope'.*neither a folder nor a GGUF file nor a bundled model"),
        ({"model": {"path": ""}}, "''.*neither a folder nor a GGUF file nor a bundled model"),
        ({"model": {"path": "pico2"}}, "'pico2'.*neither a folder nor a GGUF file nor a bundled model"),
        ({"router": {"api_keys": "missing"}}, "router: api_keys missing: No such file"),
        (
            {"router": {"tls_certificate": "missing", "tls_key": "k"}},
            "router: certificate: missing: No such file",
        ),
        ({"security": {"join_token_path": "missing"}}, "security: join_token_path missing: No such file"),
        (
            {"security": {"tls": "mutual", "certificates": "nowhere"}},
            "security: certificate: nowhere/supervisor.crt",
        ),
    ],
)
def test_what_is_missing_is_named(sections: dict[str, dict[str, object]], said: str) -> None:
    router = {"grpc_port": 0, "http_port": None, **sections.get("router", {})}
    with pytest.raises(UsageError, match=said):
        check(config(**{**sections, "router": router}))


def test_an_instruction_set_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_INSTRUCTION_SET", "sse2")
    with pytest.raises(UsageError, match=r"KVRELAY_INSTRUCTION_SET is 'sse2'; allowed here:"):
        check(config())
