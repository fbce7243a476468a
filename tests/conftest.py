"""Runs before every import of Triton and torch; orders the test files for several processes."""

import atexit
import datetime
import gc
import glob
import os
import random
import re
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from support.forks import share

# Triton decides as a kernel's module is imported whether the kernel will be interpreted. Without a GPU all are, in this
# process and its children; what needs the compiler asks `tests/kernels/triton_compile.py`.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# OpenMP's threads would spin for work on cores that other test processes need.
if "PYTEST_XDIST_WORKER" in os.environ or any(word.startswith("-n") for word in sys.argv):
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# What imports and the collection of the tests make stays until the end: the garbage collector need never look at it.
gc.disable()

pytest_plugins = ["support.scenes"]

# Every process of the tests has it: internal calls need one.
os.environ["KVRELAY_JOIN_TOKEN"] = "the-join-token-of-the-tests"

# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a machine that others use too, an input's time says nothing about a test. Few examples keep `make test` short; each
# run draws others.
settings.register_profile("shared", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests that are coroutines, which have the marker `anyio`."""
    return "asyncio"


def pytest_configure(config: pytest.Config) -> None:
    """Has the processes of a whole suite share a server of forks."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        share()


LONGEST = (
    "tests/faults/test_kills.py",
    "tests/cluster/ray/test_ray_cluster.py",
    "tests/kernels/test_paged_attention.py",
    "tests/kernels/test_sample_kernel.py",
    "tests/router/request/test_held_loop.py",
    "tests/engine/models/test_models_logits.py",
    "tests/engine/runner/test_gpu_heads.py",
    "tests/router/request/test_special.py",
    "tests/engine/general/test_every_architecture.py",
    "tests/benchmarks/test_benchmarks.py",
    "tests/faults/test_launched_chunks.py",
    "tests/engine/runner/test_gpu_runner.py",
    "tests/router/entry/test_shares.py",
    "tests/engine/models/test_quantized_models.py",
    "tests/transfer/test_simulation.py",
    "tests/faults/test_broken_links.py",
    "tests/faults/test_rank_faults.py",
    "tests/engine/general/test_general_cluster.py",
    "tests/kernels/test_cpu_attention.py",
    "tests/kernels/test_state_kernels.py",
    "tests/guided/test_guided.py",
    "tests/nemesis/test_nemesis.py",
    "tests/engine/runner/test_gpu_engine.py",
    "tests/engine/runner/test_step_pieces.py",
    "tests/faults/test_hostile_clients.py",
    "tests/e2e/test_road.py",
    "tests/helm/test_chart.py",
    "tests/faults/test_router_streams.py",
    "tests/e2e/test_structured.py",
)
"""Files that take longest in `make test` or `make test-all`: begun first, so that none is left for the end."""

TOGETHER = {
    "clusters": (
        "tests/benchmarks/test_siege.py",
        "tests/cluster/fleet/test_nodes.py",
        "tests/cluster/ray/test_ray_cluster.py",
        "tests/faults/test_supervised.py",
    ),
    "pair": ("tests/e2e/test_http_pair.py", "tests/e2e/test_sampling.py"),
    "pairs": (
        "tests/faults/test_corruption.py",
        "tests/faults/test_fuzz.py",
        "tests/faults/test_kills.py",
        "tests/faults/test_near_cache.py",
        "tests/faults/test_routers.py",
        "tests/faults/test_supervisor_kills.py",
        "tests/faults/test_worker_faults.py",
    ),
}
"""Files whose tests run one after another, by the group: `clusters` keep a dozen processes each, and Ray gives up if
its own processes don't start within 30 s; the others share the fixture of that name."""
GROUPS = {file: group for group, files in TOGETHER.items() for file in files}


class FileScheduling(LoadScopeScheduling):
    """A process runs the tests of a file, or of a group of files; of `pairs`, those over one kind of links."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        group = GROUPS.get(file, file)
        return group + "".join(re.findall(r"\[\w+", test)[:1]) if group == "pairs" else group


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FileScheduling:
    """Distributes the tests to the processes."""
    return FileScheduling(config, log)


QUARANTINE = Path(__file__).with_name("quarantine.txt")


def quarantined(today: datetime.date) -> dict[str, str]:
    """The tests that may fail for a while, with the reason for each.

    Raises:
        pytest.UsageError: a line is not `NODE_ID | YYYY-MM-DD | REASON`, or its day has passed.
    """
    found = {}
    for line in QUARANTINE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        node, end, reason = (part.strip() for part in line.split("|", 2))
        if datetime.date.fromisoformat(end) < today:
            raise pytest.UsageError(f"{QUARANTINE.name}: {node} was quarantined until {end}: {reason}")
        found[node] = reason
    return found


def leave_some(items: list[pytest.Item]) -> None:
    """Marks the cases that `some(n, more=m)` leaves out, always the same ones: m of them, or all if no m is given, are
    `more`, the others `slow`."""
    cases = defaultdict[tuple[str, int, int], list[pytest.Item]](list)
    for item in items:
        marker = item.get_closest_marker("some")
        if marker is not None and not any(item.iter_markers("more")) and not any(item.iter_markers("slow")):
            cases[item.nodeid.partition("[")[0], marker.args[0], marker.kwargs.get("more", len(items))].append(item)
    for (name, count, more), found in cases.items():
        for place, item in enumerate(random.Random(name).sample(found, len(found))):
            if place >= count:
                item.add_marker("more" if place < count + more else "slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files, leaves cases to `make test-all`, and lets quarantined tests fail."""
    leave_some(items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    reasons = quarantined(datetime.datetime.now(datetime.UTC).date())
    for item in items:
        if item.nodeid in reasons:
            item.add_marker(pytest.mark.xfail(reason=reasons[item.nodeid], strict=False))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """Ends a cluster that many files share behind the last test that uses it: an idle one takes CPU time, too."""
    for name in ("pair", "pairs"):
        if name in item.fixturenames and (nextitem is None or name not in nextitem.fixturenames):
            for definition in item._fixtureinfo.name2fixturedefs.get(name, ()):
                definition.finish(item._request)


def pytest_collection_finish() -> None:
    """Lets the garbage collector run again, for all that comes from now on."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # what Triton's extension holds is looked for then
    gc.enable()
