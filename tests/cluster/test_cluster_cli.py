"""The command line: the output of each command, and the exit code and one line for each mistake."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from kvrelay.cli.main import OPTIONS, main, up
from kvrelay.cluster.config import file as configfile
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import UsageError
from kvrelay.cluster.state import ClusterState, owned, save
from kvrelay.cluster.supervisor.supervisor import Progress, Startup
from kvrelay.engine.config import Dtype
from support.background import Background
from support.capital_router import CapitalRouter, serving
from support.secrets import self_signed

KVRELAY = str(Path(sys.executable).parent / "kvrelay")
SECONDS = 30.0
ROOT = Path(__file__).parents[2]
LISTENING_TO_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a background job ignores, and so would its children
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def fails(code: int, pattern: str, *arguments: str) -> None:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert re.search(pattern, result.stderr), result.stderr


def test_help_names_every_command() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("up", "status", "generate", "down", "config"))


@pytest.mark.parametrize("command", [(), ("config",)])
def test_a_group_alone_shows_its_help_in_lines(command: tuple[str, ...]) -> None:
    result = call(*command)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == call(*command, "--help").stdout.splitlines()
    assert len(result.stderr.splitlines()) > 5


def test_every_option_of_up_is_a_key_of_the_configuration() -> None:
    names = {parameter.name for parameter in up.params} - {"config", "detach", "unattended"}
    assert names == OPTIONS.keys()
    for key in OPTIONS.values():
        options = ClusterConfig().model_dump()
        for part in key.split("."):
            options = options[part]
    (dtype,) = [parameter for parameter in up.params if parameter.name == "dtype"]
    assert isinstance(dtype.type, click.Choice)
    assert tuple(dtype.type.choices) == get_args(Dtype)


def test_routers_share_ports_if_asked_to() -> None:
    for flags, ports in ((["--share-port"], {(50051, 8000, True)}), ([], {(50051, 8000, False), (50052, 8001, False)})):
        given = up.make_context("up", ["--routers", "2", *flags]).params
        options = {OPTIONS[name]: configfile.Override(name, given[name]) for name in ("routers", "share_port")}
        options = {key: override for key, override in options.items() if override.value is not None}
        routers = configfile.load(None, options).router_configs()
        assert {(router.grpc_port, router.http_port, router.share_port) for router in routers} == ports


@pytest.mark.parametrize(
    "text",
    [
        "colocated: {replicas: 1}\nprefill: {replicas: 1}",  # nobody takes the prefill worker's KV
        "model: {dtype: int8}",
        "prefill: {gpus: 2}",
        "engine: {device: cuda}\nprefill: {gpus: 0}",
        "transfer: {encrypt: full}",
    ],
)
def test_what_cannot_serve_is_refused_by_validate_and_up_alike(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text(text)
    validated, started = call("config", "validate", "--config", path), call("up", "--config", path)
    assert validated.exit_code == started.exit_code == 2
    assert validated.stderr == started.stderr != ""


@pytest.mark.parametrize(
    ("pattern", "arguments"),
    [
        (r"No such command 'ups'", ["ups"]),
        (r"No such option '--modle'.*--model", ["up", "--modle", "x"]),
        (r"'--prefill': 'x' is not a valid integer", ["up", "--prefill", "x"]),
        (r"'--dtype': 'int8' is not one of 'auto', 'float32', 'bfloat16'", ["up", "--dtype", "int8"]),
        (r"--decode is 0; allowed: at least 1", ["up", "--decode", "0"]),
        (r"--colocated is -1; allowed: ", ["up", "--colocated", "-1"]),
        (r"--grpc-port is 65536; allowed: at most 65535", ["up", "--grpc-port", "65536"]),
        (r"--address is 'here'; allowed: local, auto or HOST:PORT", ["up", "--address", "here"]),
        (r"model: '/nope' is neither a folder nor a bundled model", ["up", "--model", "/nope"]),
        (r"/nope\.yaml: No such file", ["up", "--config", "/nope.yaml"]),
        (r"Missing argument 'PROMPT'", ["generate"]),
        (r"'--max-tokens': -1 is not in the range", ["generate", "x", "--max-tokens", "-1"]),
        (r"'--seed': 18446744073709551616 is not in the range", ["generate", "x", "--seed", str(2**64)]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(pattern: str, arguments: list[str]) -> None:
    fails(2, pattern, *arguments)


def test_an_unknown_key_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engine: {block_sizes: 8}\n")
    for command in (["up"], ["config", "validate"], ["config", "show"]):
        fails(2, r"engine\.block_sizes: unknown key; did you mean block_size\?", *command, "--config", str(file))


def test_a_port_in_use_is_found_before_ray_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        start = time.monotonic()
        result = run("up", "--grpc-port", str(port), "--http-port", "0")
        assert time.monotonic() - start < 10
    assert result.returncode == 2
    assert result.stderr == f"kvrelay: grpc_port {port}: already in use on 127.0.0.1\n".encode()


def test_a_second_cluster_is_refused_before_its_ports_are_found_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, owned():
        save(ClusterState(pid=os.getpid(), namespace="kvrelay"))
        result = run("up", "--grpc-port", str(server.getsockname()[1]), "--http-port", "0")
    assert result.returncode == 1
    assert result.stderr.decode() == (
        f"kvrelay: a cluster is already running (pid {os.getpid()}); `kvrelay down` ends it\n"
    )


def test_a_cluster_that_is_starting_keeps_a_second_one_out() -> None:
    """The first cluster has no record yet, so the second one's background process finds it by its lock."""
    with owned():
        result = run("up", "--detach", "--grpc-port", "0", "--http-port", "0")
    assert result.returncode == 1
    assert result.stderr == b"kvrelay: a cluster is already running; `kvrelay down` ends it\n"


def test_a_hopeless_member_ends_the_start_with_its_reason() -> None:
    from kvrelay.cluster.up import launch

    members = [Progress("router-0"), Progress("prefill-0", failures=1, reason="kv_memory_bytes is 1000", hopeless=True)]
    with pytest.raises(UsageError) as caught:
        launch._check_failures(Startup(False, (), (), members))
    assert caught.value.lines == ["prefill-0: kv_memory_bytes is 1000"]
    launch._check_failures(Startup(False, (), (), [Progress("prefill-0", failures=2, reason="killed")]))


def run(*arguments: str | bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([KVRELAY, *arguments], capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)


def test_a_prompt_that_is_not_utf8() -> None:
    result = run("generate", b"caf\xe9")
    assert result.returncode == 2
    assert result.stderr == b"kvrelay: Invalid value for PROMPT: character 3 is the byte 0xe9, not UTF-8\n"


def test_nothing_is_running() -> None:
    status = call("status")
    assert (status.exit_code, status.stdout) == (1, "no cluster is running; `kvrelay up` starts one\n")
    status = call("status", "--json")
    assert (status.exit_code, json.loads(status.stdout)) == (
        1,
        {
            "supervised": False,
            "ready": False,
            "metrics": None,
            "router": None,
            "routers": [],
            "workers": [],
            "scaling": None,
            "desired": None,
            "incompatible": [],
            "trouble": None,
        },
    )
    down = call("down")
    assert (down.exit_code, down.stdout) == (0, "no cluster is running\n")


def test_a_lost_cluster_says_why_it_is_being_started_anew() -> None:
    reason = "the raylet (pid 5) has ended"
    with owned():
        save(ClusterState(pid=os.getpid(), namespace="kvrelay", trouble=reason))
        status, known = call("status"), call("status", "--json")
        doctor = call("doctor", "--json")
    assert (status.exit_code, status.stdout) == (1, f"the cluster is lost and being started anew: {reason}\n")
    assert (known.exit_code, json.loads(known.stdout)["trouble"]) == (1, reason)
    (finding,) = json.loads(doctor.stdout)["checks"]["members"]
    assert (doctor.exit_code, finding["found"]) == (1, f"is being started anew: {reason}")


def test_a_router_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
    fails(1, f"--target {target}: ", "generate", "x", "--target", target)
    fails(1, f"--target {target}: ", "generate", "x", "--target", target, "--json")


@pytest.mark.parametrize(
    "arguments",
    [("generate", "x"), ("chat",), ("top", "--once"), ("doctor",), ("doctor", "x"), ("scale", "prefill=1"), ("logs",)],
)
def test_without_a_cluster_the_error_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr("kvrelay.cluster.state.DEFAULT_TARGET", nobody)
    monkeypatch.setattr("kvrelay.cluster.asking.routers.DEFAULT_URL", f"http://{nobody}")
    fails(1, r"^kvrelay: no cluster is running; `kvrelay up` starts one", *arguments)


def test_a_cluster_that_starts_has_no_router_yet() -> None:
    save(ClusterState(pid=None, namespace="kvrelay"))
    fails(1, "the cluster is starting; try again when it is ready", "generate", "x")


def test_an_error_names_the_router_of_the_running_cluster_not_an_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    save(ClusterState(pid=None, namespace="kvrelay", router=nobody))
    fails(1, f"^kvrelay: router {nobody}: ", "generate", "x")


def test_the_record_of_a_cluster_that_has_ended_is_no_obstacle(state_folder: Path) -> None:
    """The record is of a cluster that ran on a shared Ray cluster, which is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    save(ClusterState(pid=None, namespace="kvrelay", ray_address=address, supervisor=address))
    # Not in this process: Ray kills its process's children when it shuts down.
    ended = subprocess.run([KVRELAY, "up", "--address", address], capture_output=True, text=True, timeout=2 * SECONDS)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"--address {address}: Connection refused" in ended.stderr
    assert not (state_folder / "cluster.json").exists()


def test_the_configuration_is_shown_checked_and_described(tmp_path: Path) -> None:
    shown = call("config", "show")
    assert shown.exit_code == 0
    file = tmp_path / "c.yaml"
    file.write_text(shown.stdout)
    assert call("config", "validate", "--config", str(file)).stdout == f"{file}: ok\n"
    assert yaml.safe_load(shown.stdout)["prefill"]["replicas"] == 1
    schema = json.loads(call("config", "schema").stdout)
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() == yaml.safe_load(shown.stdout).keys()


@pytest.fixture
def router() -> CapitalRouter:
    return CapitalRouter()


@pytest.fixture
def target(router: CapitalRouter) -> Iterator[str]:
    with serving(router) as address:
        yield address


def test_generate_prints_the_text_and_leaves_missing_options_to_the_router(router: CapitalRouter, target: str) -> None:
    result = call("generate", "héllo", "--target", target)
    assert (result.exit_code, result.stdout) == (0, "HÉLLO\n")
    (request,) = router.requests
    assert request.text == "héllo"
    assert not any(request.sampling.HasField(name) for name in ("max_tokens", "temperature", "top_p"))
    assert not request.sampling.ignore_eos


def test_generate_passes_its_options_on(router: CapitalRouter, target: str) -> None:
    options = ["--max-tokens", "7", "--temperature", "0", "--seed", str(2**64 - 1), "--ignore-eos"]
    assert call("generate", "x", "--target", target, *options).exit_code == 0
    sampling = router.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.0, 2**64 - 1)
    assert sampling.HasField("temperature")
    assert sampling.ignore_eos


def test_generate_finds_the_running_clusters_router(router: CapitalRouter, target: str) -> None:
    save(ClusterState(pid=None, namespace="kvrelay", router=target))
    assert call("generate", "found").stdout == "FOUND\n"


def test_generate_as_json(target: str) -> None:
    result = call("generate", "abc", "--target", target, "--json")
    answer = json.loads(result.stdout)
    figures = {"request_id", "finish_reason", "usage", "timeline", "logprobs", "prompt_logprobs", "seed"}
    assert answer.keys() == {"text", "token_ids", *figures}
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("ABC", [97, 98, 99], "length")
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1}
    assert answer["timeline"]["queue_seconds"] == 0.001
    assert answer["timeline"]["transfer_bytes"] == 4_000_000


@pytest.mark.parametrize(("given", "prompt"), [("héllo\n", "héllo"), ("a\n\n", "a\n"), ("a\nb", "a\nb")])
def test_generate_takes_its_prompt_from_stdin(router: CapitalRouter, target: str, given: str, prompt: str) -> None:
    result = CliRunner().invoke(main, ("generate", "-", "--target", target), input=given)
    assert (result.exit_code, router.requests[0].text) == (0, prompt)
    result = CliRunner().invoke(main, ("generate", "-", "--target", target), input=b"caf\xe9")
    assert (result.exit_code, result.stderr) == (2, "kvrelay: stdin: byte 3 is not UTF-8\n")


def test_generate_names_the_request_for_doctor(tmp_path: Path) -> None:
    with Background(tmp_path, lambda index: 40 + index, http_port=0) as background:
        router = background.cluster.router
        generate = ("generate", "hello", "--target", router.address, "--max-tokens", "2")
        names = {each["request_id"] for each in json.loads(call(*generate, "--json", "--n", "2").stdout)["completions"]}
        (name,) = names
        (last,) = re.findall(r"^request (\w+)$", call(*generate, "--timeline").stdout, re.MULTILINE)
        for found, count in ((name, 2), (last, 1)):
            told = call("doctor", found, "--target", f"http://{router.http_address}", "--json")
            assert told.exit_code == 0, told.stderr
            assert len(json.loads(told.stdout)) == count


def test_generate_prints_several_completions_in_their_order(router: CapitalRouter, target: str) -> None:
    result = call("generate", "abc", "--target", target, "--n", "3")
    assert result.stdout == "ABC\n--- 2 of 3\nabc 1\n--- 3 of 3\nabc 2\n"
    assert router.requests[0].n == 3
    answer = json.loads(call("generate", "abc", "--target", target, "--n", "3", "--json").stdout)
    assert [each["text"] for each in answer["completions"]] == ["ABC", "abc 1", "abc 2"]
    assert call("generate", "abc", "--target", target, "--n", "2", "--timeline").stdout.count("hand-off") == 2


def test_generate_shows_where_the_time_went(target: str) -> None:
    result = call("generate", "abc", "--target", target, "--timeline")
    assert result.stdout.startswith("ABC\n")
    for column in ("queue", "prefill", "transfer", "GB/s", "hand-off", "first token", "decode"):
        assert column in result.stdout
    assert "2.00" in result.stdout, "4 MB in 2 ms are 2 GB/s"


def test_generate_distinguishes_a_refusal_from_a_failure(target: str) -> None:
    fails(2, r"text is ''; allowed: at least 1 character", "generate", "", "--target", target)
    fails(1, r"1024 requests are in flight", "generate", "full", "--target", target)


def test_generate_reaches_a_router_with_tls_and_api_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    keys = tmp_path / "api_keys"
    keys.write_text(f"team-a {hashlib.sha256(b'secret').hexdigest()}\n")
    options = {"tls_certificate": str(certificate), "tls_key": str(key), "api_keys": str(keys)}
    with Background(tmp_path, lambda index: 40 + index, **options) as background:
        target = background.cluster.router.address
        asked = ("generate", "hello", "--target", target, "--max-tokens", "2", "--json")
        trusted = (*asked, "--ca", str(certificate))
        assert json.loads(call(*trusted, "--api-key", "secret").stdout)["token_ids"] == [40, 41]
        monkeypatch.setenv("KVRELAY_API_KEY", "secret")
        assert json.loads(call(*trusted).stdout)["token_ids"] == [40, 41]
        fails(1, "the API key is not known", *trusted, "--api-key", "wrong")
        monkeypatch.delenv("KVRELAY_API_KEY")
        fails(1, "no API key; this router asks for one", *trusted)
        fails(1, "CERTIFICATE_VERIFY_FAILED|certificate", *asked, "--tls", "--api-key", "secret")
    fails(2, r"--ca nowhere: No such file", *asked, "--ca", "nowhere")


def test_ctrl_c_cancels_the_request(router: CapitalRouter, target: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING_TO_CTRL_C, KVRELAY, "generate", "wait", "--target", target],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1) == b"W"
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert router.ended.wait(SECONDS)
        assert process.stderr is not None
        assert process.stderr.read().strip() == b""
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_goes_away_is_no_traceback(target: str) -> None:
    command = f"{KVRELAY} generate {'x' * 5000} --target {target} | head -c 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, timeout=SECONDS)
    assert result.stdout == b"X"
    assert b"Traceback" not in result.stderr


def test_ctrl_c_leaves_no_trace_while_a_command_is_imported(tmp_path: Path) -> None:
    """Ctrl-C comes during the import of a package that the command line needs."""
    (tmp_path / "click.py").write_text("import signal; print('begun', flush=True); signal.pause()")
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["kvrelay"]
    module, _, function = entry.partition(":")
    code = f"from {module} import {function}; {function}()"
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING_TO_CTRL_C, sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=SECONDS) == (b"", b"")
    assert process.returncode == 130


def test_commands_start_at_once() -> None:
    """Help and generate import neither Ray nor torch, which are slow to import."""
    code = (
        "import sys; import kvrelay.cli.main, kvrelay.cli.generate, kvrelay.cluster.asking.status;"
        "print([name for name in ('ray', 'torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=SECONDS, cwd="/", text=True)
    assert loaded.stdout == "[]\n"
