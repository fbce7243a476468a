"""A cluster of `kvrelay up` for a benchmark, beside any other cluster of the user's."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KVRELAY = Path(sys.executable).parent / "kvrelay"
TIMEOUT_SECONDS = 300


class LocalCluster:
    """A cluster whose state is in a folder of its own."""

    def __init__(self, state: str) -> None:
        self._state = Path(state)
        self._environment = os.environ | {"KVRELAY_STATE_DIR": state}

    def run(self, *arguments: str) -> str:
        """Runs a kvrelay command and returns its output; CalledProcessError if it fails."""
        command = [KVRELAY, *arguments]
        done = subprocess.run(
            command, env=self._environment, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS
        )
        return done.stdout

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.run("status", "--json")))

    @property
    def router(self) -> str:
        """host:port of its router."""
        return str(self.status()["router"])

    @property
    def dashboard(self) -> str:
        """URL of Ray's dashboard."""
        return str(json.loads((self._state / "cluster.json").read_text())["dashboard"])


@contextmanager
def local_cluster(*options: str) -> Iterator[LocalCluster]:
    """A running cluster; `options` are further ones of `kvrelay up`."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-benchmark-") as state:
        cluster = LocalCluster(state)
        cluster.run("up", "--detach", "--grpc-port", "0", "--http-port", "0", *options)
        try:
            yield cluster
        finally:
            cluster.run("down")
