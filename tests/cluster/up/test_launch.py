"""A Ray that hangs, or a member that can't start, ends the start of a cluster in time, and nothing is left."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cluster.errors import UsageError
from kvrelay.cluster.processes import processes
from kvrelay.cluster.supervisor.supervisor import Progress, Startup
from kvrelay.cluster.up.launch import check_failures
from support.processes import wait_until

SECONDS = 60.0
STUCK = """
import ctypes, subprocess, sys
import ray
from kvrelay.cluster.ray import supervisor_actor
from kvrelay.cluster.up import launch
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cli.commands.common import console
from kvrelay.cluster.up.report import Report
from kvrelay.cluster.secrets import Secured
from kvrelay.cluster.signals import Signals

def stuck(*args, **options):
    # In C code no signal handler of Python's runs.
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

launch.STALL_SECONDS = launch.END_SECONDS = 1.0
supervisor_actor.connect = supervisor_actor.end = stuck
config = ClusterConfig(drain_seconds=0.0)
cluster = launch.Cluster(Secured(config, "", ""), Report(console()), Signals(), lambda state: None)
if sys.argv[1] == "stop":
    ray.is_initialized = lambda: True
    cluster._supervisor = object()
getattr(cluster, sys.argv[1])()
"""


@pytest.mark.parametrize(
    ("step", "said"),
    [("start", "Ray did not answer within 1 s"), ("stop", "the cluster did not end within 1 s")],
)
def test_a_ray_that_hangs_ends_the_step_in_time(
    step: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_STATE_DIR", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, step], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert f"kvrelay: {said}\n" in err
    child = processes.find(int(out.split()[-1]))
    wait_until(lambda: child is None or not processes.alive(child), "its child has ended")


def test_a_hopeless_member_ends_the_start_with_its_reason() -> None:
    members = [Progress("router-0"), Progress("prefill-0", failures=1, reason="kv_memory_bytes is 1000", hopeless=True)]
    with pytest.raises(UsageError) as caught:
        check_failures(Startup(False, (), (), members))
    assert caught.value.lines == ["prefill-0: kv_memory_bytes is 1000"]
    check_failures(Startup(False, (), (), [Progress("prefill-0", failures=2, reason="killed")]))
