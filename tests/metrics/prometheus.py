"""The programs of Prometheus, where they are: in the folder that PROMETHEUS_BIN names, or on the PATH.

Debian has them: `apt-get download prometheus && dpkg -x prometheus_*.deb FOLDER`, then PROMETHEUS_BIN=FOLDER/usr/bin.
"""

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.processes import free_port, wait_until

SECONDS = 60.0
START_SECONDS = 90.0


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test without it."""
    found = shutil.which(name, path=os.environ.get("PROMETHEUS_BIN")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here; tests/metrics/prometheus.py says how to get it")
    return found


def values(page: str, name: str, labels: Mapping[str, str]) -> list[float]:
    """Values of a scraped page: of the series of this name that have these labels."""
    return [
        sample.value
        for metric in text_string_to_metric_families(page)
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def promtool(*arguments: str, stdin: bytes | None = None, folder: Path | None = None) -> str:
    """Runs promtool, which must find no mistake; returns what it says."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=SECONDS, cwd=folder, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        arguments = urllib.parse.urlencode({"query": expression}).encode()
        with urllib.request.urlopen(f"{self.base}/api/v1/query", arguments, timeout=SECONDS) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def healthy(self) -> bool:
        """Whether it listens."""
        try:
            with urllib.request.urlopen(f"{self.base}/-/ready", timeout=SECONDS) as response:
                return bool(response.status == 200)
        except OSError:
            return False


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[Prometheus]:
    """A server with this configuration; its data and log are in `folder`."""
    command = program("prometheus")
    port = free_port()
    (folder / "prometheus.yaml").write_text(config)
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                command,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            server = Prometheus(port)
            wait_until(server.healthy, lambda: (folder / "prometheus.log").read_text()[-2000:], START_SECONDS)
            yield server
        finally:
            process.terminate()
            process.wait(SECONDS)
