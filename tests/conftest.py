"""Runs before every import of Triton and torch, and says which tests share a process under `pytest -n`."""

import glob
import os

import pytest

# Triton decides as a kernel's module is imported whether the kernel will be interpreted. Without a GPU all are, in this
# process and its children; what needs the compiler asks `support.triton_compile`.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# OpenMP's threads would spin for work on cores that other test processes need.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`: a file whose tests share a fixture is run by one process, and Ray clusters too.

    The other tests go one by one to whichever process is free.
    """
    for item in items:
        if item.get_closest_marker("cluster") is not None:
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif _shares_fixtures(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


CHEAP = {"device", "gpu"}
"""Shared fixtures that cost nothing to make again."""


def _shares_fixtures(item: pytest.Item) -> bool:
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and any(
        definition.scope in ("module", "session") and definition.baseid
        for name, definitions in info.name2fixturedefs.items()
        for definition in definitions
        if name not in CHEAP
    )
