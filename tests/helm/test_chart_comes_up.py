"""The chart comes up: its containers' commands as processes, with the rendered configuration and environment.

Each pod is a Ray node with an address of its own. What is not tried here is what Kubernetes and KubeRay do.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chart_rendering import EXAMPLES, container

SCRIPT = Path(__file__).parent / "chart_scene.py"
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
LOCAL = EXAMPLES["values-local"]
RAY_TOKEN = "a-token-of-ray-for-this-test-only"

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path, since Ray puts the names of sockets below it."""
    path = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def found(render, folder: Path) -> dict[str, Any]:
    """Results of the scene, which runs once for all tests."""
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for this user: unshare --user --net --pid")
    rendered = render(LOCAL)
    mounts = {
        "/etc/kvrelay-secrets": "secrets",
        "/etc/kvrelay": "etc",
        "/tmp/ray": "ray",
        "/tmp/kvrelay-drain": "kvrelay-drain",
    }
    config = rendered.named("ConfigMap", rendered.name)["data"]
    (folder / "etc").mkdir()
    for name, text in config.items():
        for path, below in mounts.items():
            text = text.replace(path, str(folder / below))
        (folder / "etc" / name).write_text(text)
    join = folder / "secrets" / "join"
    join.mkdir(parents=True)
    (join / "join_token").write_bytes(base64.b64decode(rendered.one("Secret")["data"]["join_token"]))
    spec = rendered.cluster["spec"]
    groups = {"headgroup": spec["headGroupSpec"], **rendered.groups}
    scene = {
        "mounts": mounts,
        "secrets": {f"{rendered.name}/auth_token": RAY_TOKEN},
        "pods": {
            name: {
                "index": index,
                "address": f"127.0.0.{index + 2}",
                "parameters": group["rayStartParams"],
                "labels": ",".join(f"{label}={value}" for label, value in group.get("labels", {}).items()),
                "ray": group["template"]["spec"]["containers"][0],
            }
            for index, (name, group) in enumerate(groups.items())
        },
        "launcher": container(rendered.head, "launcher"),
        "logs": container(rendered.templates["decode"], "logs"),
        "test": rendered.one("Pod")["spec"]["containers"][0],
        "service": rendered.name,
        "head": "127.0.0.2",
    }
    (folder / "scene.json").write_text(json.dumps(scene))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    known = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "KVRELAY_"))}
    done = subprocess.run(
        [*UNSHARE, sys.executable, SCRIPT, folder],
        env=known | {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_completion_comes_through_the_service(found: dict[str, Any]) -> None:
    assert found["answer"]["usage"]["completion_tokens"] == 8


def test_each_member_runs_in_its_own_pod(found: dict[str, Any]) -> None:
    assert found["status"]["ready"] is True
    (router,) = found["status"]["routers"]
    assert (router["address"], router["state"]) == ("127.0.0.3:50051", "ready")
    assert {worker["name"]: worker["state"] for worker in found["status"]["workers"]} == {
        "worker-0": "ready",
        "worker-1": "ready",
    }
    # The supervisor stays on the head, where its members look for it again.
    assert found["state"]["supervisor"].startswith("127.0.0.2:")


def test_the_launcher_waited_for_nobody_in_vain(found: dict[str, Any]) -> None:
    assert found["launcher"].count("starting kvrelay") == 1
    assert "did not come up" not in found["launcher"]


def test_what_actors_log_is_printed_in_their_pod(found: dict[str, Any]) -> None:
    names = {
        pod: {json.loads(line)["name"] for line in lines if line.startswith("{")}
        for pod, lines in found["logs"].items()
    }
    assert names == {
        "headgroup": {"supervisor"},
        "router": {"router-0"},
        "prefill": {"worker-0"},
        "decode": {"worker-1"},
    }
