"""The chart's containers as processes of one machine: `python chart_scene.py FOLDER`, in namespaces of its own.

FOLDER has `scene.json`: the rendered pods, each with an address of the loopback network, and what they are to find
where Kubernetes mounts it. The files of the pods lie below FOLDER; nothing else differs from the rendered commands,
parameters and environments. The last line that it prints is what it has found, as JSON.

The processes end with this one: it is the first of a PID namespace, and its ports are those of a network namespace.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
SCENE: dict[str, Any] = json.loads((FOLDER / "scene.json").read_text())
SECONDS = 600.0
RUNNING: dict[str, "subprocess.Popen[bytes]"] = {}


def bring_up_loopback() -> None:
    """A new network namespace has the loopback device, but down. SIOCSIFFLAGS with IFF_UP and IFF_RUNNING."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x41))


def here(text: str) -> str:
    """A path of a pod as it is below FOLDER."""
    for path, name in SCENE["mounts"].items():
        text = text.replace(path, str(FOLDER / name))
    return text


def environment(container: dict[str, Any], pod: str) -> dict[str, str]:
    """A container's variables, those of Secrets too."""
    found = dict(os.environ)
    for entry in container.get("env", []):
        if "value" in entry:
            found[entry["name"]] = here(entry["value"]).replace("kvrelay-drain", f"drain-{pod}")
        else:
            reference = entry["valueFrom"]["secretKeyRef"]
            found[entry["name"]] = SCENE["secrets"][f"{reference['name']}/{reference['key']}"]
    return found


def start(name: str, command: list[str], variables: dict[str, str]) -> None:
    """A process that must not end; its output goes to FOLDER/NAME.log."""
    with (FOLDER / f"{name}.log").open("wb") as log:
        RUNNING[name] = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def ray_start(name: str, pod: dict[str, Any]) -> None:
    """The command that KubeRay makes of a group's parameters, and ports that pods wouldn't share.

    Each pod has a /tmp/ray of its own, by a mount namespace; the head's is the one that the launcher sees.
    """
    own = {
        "node-ip-address": pod["address"],
        "metrics-export-port": str(20080 + pod["index"]),
        "dashboard-agent-listen-port": str(52365 + pod["index"]),
    }
    ray = FOLDER / "ray"
    labels = {"labels": pod["labels"]} if pod["labels"] else {}
    given = " ".join(f"--{key}={value}" for key, value in {**own, **labels, **pod["parameters"]}.items())
    if name == "headgroup":
        start(
            name,
            ["bash", "-c", f"ray start --head --port=6379 --temp-dir={ray} {given} --block"],
            environment(pod["ray"], name),
        )
        return
    files_of(name).mkdir()
    command = f"mount --bind {files_of(name)} {ray} && ray start --address={SCENE['head']}:6379 {given} --block"
    start(name, ["unshare", "--mount", "bash", "-c", command], environment(pod["ray"], name))


def files_of(pod: str) -> Path:
    """A pod's /tmp/ray."""
    return FOLDER / ("ray" if pod == "headgroup" else f"ray-{pod}")


def wait(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        ended = [name for name, process in RUNNING.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = {path.name: path.read_text(errors="replace")[-1500:] for path in FOLDER.glob("*.log")}
            sys.exit(f"not within {SECONDS:g} s: {what}; ended: {ended}\n{json.dumps(logs, indent=1)}")
        time.sleep(0.5)
    return value


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def head_is_ready() -> bool:
    """Answers as the readiness probe of the head's pod would."""
    pod = SCENE["pods"]["headgroup"]
    probe = pod["ray"]["readinessProbe"]["httpGet"]
    return answers(f"http://{pod['address']}:{probe['port']}{probe['path']}")


def call(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def main() -> None:
    bring_up_loopback()
    pods = SCENE["pods"]
    files_of("headgroup").mkdir()
    for name, pod in pods.items():
        ray_start(name, pod)
        follow = [part.replace("/tmp/ray", str(files_of(name))) for part in SCENE["logs"]["command"]]
        start(f"logs-{name}", follow, dict(os.environ))
        if name == "headgroup":
            wait(
                head_is_ready, "the head's pod is ready"
            )  # KubeRay's init container of the other pods waits for it too
    variables = environment(SCENE["launcher"], "headgroup") | {"KVRELAY_CONFIG": str(FOLDER / "etc" / "config.yaml")}
    start("launcher", [here(part) for part in SCENE["launcher"]["command"]], variables)
    launched = FOLDER / "launcher.log"
    wait(lambda: "kvrelay is up" in launched.read_text(), "the launcher says that kvrelay is up")
    ready = pods["router"]["ray"]["readinessProbe"]["httpGet"]
    address = pods["router"]["address"]
    wait(lambda: answers(f"http://{address}:{ready['port']}{ready['path']}"), "the router's pod is ready")

    test = [part.replace(SCENE["service"], address) for part in SCENE["test"]["command"]]
    found: dict[str, Any] = {"answer": json.loads(call(test, dict(os.environ)))}
    found["status"] = json.loads(call(["kvrelay", "status", "--json"], variables))
    found["state"] = json.loads((FOLDER / "ray" / "kvrelay" / "cluster.json").read_text())
    found["launcher"] = launched.read_text()
    decode = pods["decode"]["ray"]
    call(decode["lifecycle"]["preStop"]["exec"]["command"], environment(decode, "decode"))
    logs = {name: FOLDER / f"logs-{name}.log" for name in pods}
    wait(lambda: "its node is about to stop" in logs["headgroup"].read_text(), "the supervisor logs the drained worker")
    found["logs"] = {name: path.read_text().splitlines() for name, path in logs.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
