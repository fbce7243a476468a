"""The command line: the output of each command, and the exit code and one line for each mistake."""

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from command import LISTENING_TO_CTRL_C, call, fails, run
from rich.console import Console

from kvrelay.cli.bench.figures import figures
from kvrelay.cli.bench.load import Request
from kvrelay.cli.bench.output import show
from kvrelay.cli.bench.result import Result, Run, this_machine
from kvrelay.cli.commands.up import _print_ready
from kvrelay.cli.doctor import request as stories
from kvrelay.cluster.state import ClusterState, owned, save

SECONDS = 30.0
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", [(), ("config",)])
def test_a_group_alone_shows_its_help_in_lines(command: tuple[str, ...]) -> None:
    result = call(*command)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == call(*command, "--help").stdout.splitlines()
    words = ("show", "validate", "schema") if command else ("up", "status", "generate", "down", "config")
    assert all(word in result.stderr for word in words)
    assert len(result.stderr.splitlines()) > 5


@pytest.mark.parametrize(
    "text",
    [
        "colocated: {replicas: 1}\nprefill: {replicas: 1}",  # nobody takes the prefill worker's KV
        "model: {dtype: int8}",
        "prefill: {gpus: 2}",
        "engine: {device: cuda}\nprefill: {gpus: 0}",
        "transfer: {encrypt: full}",
        "engine: {block_sizes: 8}",
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
        (r"--dtype is 'int8'; allowed: 'auto', 'float32', 'bfloat16' or 'float16'", ["up", "--dtype", "int8"]),
        (r"--decode is 0; allowed: at least 1", ["up", "--decode", "0"]),
        (r"--colocated is -1; allowed: ", ["up", "--colocated", "-1"]),
        (r"--address is 'here'; allowed: local, auto or HOST:PORT", ["up", "--address", "here"]),
        (r"model: '/nope' is neither a folder nor a GGUF file nor a bundled model", ["up", "--model", "/nope"]),
        (r"/nope\.yaml: No such file", ["up", "--config", "/nope.yaml"]),
        (r"Missing argument 'PROMPT'", ["generate"]),
        (r"'--max-tokens': -1 is not in the range", ["generate", "x", "--max-tokens", "-1"]),
        (r"'--seed': 18446744073709551616 is not in the range", ["generate", "x", "--seed", str(2**64)]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(pattern: str, arguments: list[str]) -> None:
    fails(2, pattern, *arguments)


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


@pytest.mark.parametrize(
    "arguments",
    [("generate", "x"), ("chat",), ("top", "--once"), ("doctor",), ("doctor", "x"), ("scale", "prefill=1"), ("logs",)],
)
def test_without_a_cluster_the_error_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, nobody: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("kvrelay.cluster.state.DEFAULT_TARGET", nobody)
    monkeypatch.setattr("kvrelay.cluster.asking.routers.DEFAULT_URL", f"http://{nobody}")
    fails(1, r"^kvrelay: no cluster is running; `kvrelay up` starts one", *arguments)


def test_an_error_names_the_router_that_was_asked(nobody: str) -> None:
    for more in ((), ("--json",)):
        fails(1, f"--target {nobody}: ", "generate", "x", "--target", nobody, *more)
    save(ClusterState(pid=None, namespace="kvrelay"))
    fails(1, "the cluster is starting; try again when it is ready", "generate", "x")
    save(ClusterState(pid=None, namespace="kvrelay", router=nobody))
    fails(1, f"^kvrelay: router {nobody}: ", "generate", "x")


@pytest.mark.more
def test_the_record_of_a_cluster_that_has_ended_is_no_obstacle(state_folder: Path, nobody: str) -> None:
    """The record is of a cluster that ran on a shared Ray cluster, which is gone."""
    save(ClusterState(pid=None, namespace="kvrelay", ray_address=nobody, supervisor=nobody))
    # Not in this process: Ray kills its process's children when it shuts down.
    ended = run("up", "--address", nobody)
    assert ended.returncode == 1
    assert ended.stderr.decode() == f"kvrelay: --address {nobody}: Connection refused\n"
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


def test_brackets_in_addresses_and_reasons_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPv6 address and a part of a reason look like the marks by which rich styles text."""
    out = Console(record=True, width=120)
    state = ClusterState(
        1, "kvrelay", router="[fd00::1]:5", http="[fd00::1]:6", page=True, dashboard="http://[fd00::1]:7"
    )
    _print_ready(out, state, "Ctrl-C")
    assert out.export_text().count("[fd00::1]:") == 4
    request = Request(0, 0, 1, None, None, [], 0, 0, 0, 1, ok=False, error="400: no [/INST] here", stages=None)
    found = Run(None, 0, figures([request], 1.0, {}, ()), [request])
    shown = Result("", "", "", "", {}, {}, this_machine(), {}, [found])
    show(shown, (), out)
    assert "1 x 400: no [/INST] here" in out.export_text()

    async def find(routers: object, request_id: str) -> list[dict[str, object]]:
        return [{}]

    text = "[worker-0] [/a]"
    told = stories.Story("[/id]", text, text, (stories.Part("queue", 1.0, text),), (text,))
    monkeypatch.setattr(stories, "find", find)
    monkeypatch.setattr(stories, "story", lambda life: told)
    answer = call("doctor", "[/id]", "--target", "http://127.0.0.1:1")
    assert answer.exit_code == 0
    assert answer.stdout.count(text) == 4
    assert "[/id]" in answer.stdout
