"""The packages: what is built of the tree, stubs that equal their sources, import contracts that see every module."""

import filecmp
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from support.router_fakes import background

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "src" / "kvrelay"
NOT_PACKAGED = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "docs", "tests", "benchmarks", "helm")

PREPARE = """
import sys
paths = [sys.argv.pop(1), *sys.argv.pop(1).split(":")]
sys.path[:0] = paths
"""
IMPORT = """
import kvrelay.client, kvrelay.cli.main, kvrelay.kernels.cpu.library, kvrelay.models, kvrelay.router.server
import kvrelay.decode_worker.role, kvrelay.internal.v1.worker_pb2, kvrelay.prefill_worker.role
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("kvrelay.")]
assert all(file is None or file.startswith(paths[0]) for file in files), files
print(*kvrelay.models.names())
"""
LIGHT_CLIENT = """
import asyncio, sys
from kvrelay.client import AsyncClient, Client

async def stream():
    async with AsyncClient(sys.argv[1], timeout=30) as client:
        return [token async for chunk in client.generate("hello", max_tokens=3) for token in chunk.token_ids]

with Client(sys.argv[1], timeout=30) as client:
    print([token for chunk in client.generate("hello", max_tokens=3) for token in chunk.token_ids])
print(asyncio.run(stream()))
assert not {"torch", "ray", "numpy", "kvrelay.router"} & set(sys.modules)
"""
PROJECTS = ("pyproject.toml", "packaging/client/pyproject.toml")
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def run_alone(code: str, kvrelay: Path, *arguments: str, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    """Runs `code` where the only kvrelay is that below `kvrelay`: -S leaves out the editable install's own path."""
    others = [path for path in sys.path if not Path(path, "kvrelay").exists()]
    command = [sys.executable, "-I", "-S", "-c", PREPARE + code, kvrelay, ":".join(others), *arguments]
    return subprocess.run(command, cwd=cwd, timeout=120, capture_output=True, text=True)


def files_below(folder: Path) -> set[str]:
    """The files that the links in `folder` lead to."""
    return {
        str(Path(parent, name).relative_to(folder))
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if "__pycache__" not in parent
    }


def build(tree: Path, kind: str, out: Path) -> Path:
    """Builds the `kind` of distribution ("sdist" or "wheel") of `tree`, as pip does."""
    code = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, out], cwd=tree, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, links as links."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "tree", symlinks=True, ignore=NOT_PACKAGED))


def distribution(tree: Path, out: Path) -> tuple[Path, list[str]]:
    """Builds the wheel of `tree` from its sdist, so what is in the one can't come from beside the other.

    Returns:
        The wheel, and its files below `kvrelay/`.
    """
    with tarfile.open(build(tree, "sdist", out)) as sdist:
        members = [member for member in sdist.getmembers() if "/src/kvrelay/" in member.name and not member.isdir()]
        assert all(member.isfile() for member in members), "links in an sdist lead nowhere"
        packed = [member.name.partition("/src/")[2] for member in members]
        sdist.extractall(out, filter="data")
    (unpacked,) = (path for path in out.iterdir() if path.is_dir())
    wheel = build(unpacked, "wheel", out)
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if name.startswith("kvrelay/") and not name.endswith("/")]
    assert sorted(files) == sorted(packed)
    return wheel, files


def borrow(name: str, site: Path) -> None:
    """Makes a distribution of this environment appear in another one, as links to its files."""
    for file in metadata.files(name) or ():
        if ".." not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file.locate())


@pytest.fixture(scope="module")
def client_wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    return distribution(tree / "packaging" / "client", tmp_path_factory.mktemp("client"))


@pytest.mark.more
def test_two_wheels_hold_each_file_once_and_import_together_and_the_page_has_links_that_hold(
    tree: Path, client_wheel: tuple[Path, list[str]], tmp_path: Path
) -> None:
    expected = {f"kvrelay/{name}" for name in files_below(LINKS)}
    for needed in ("kernels/cpu/native/linear.cpp", "kernels/cpu/native/team.h", "v1/inference_pb2.pyi"):
        assert f"kvrelay/{needed}" in expected
    # The marker of a package counts for all below it; `kvrelay` and `internal` are namespaces, which have none.
    for init in expected:
        parts = init.split("/")
        if parts[-1] == "__init__.py":
            above = ("/".join(parts[:depth]) for depth in range(2, len(parts)))
            assert any(f"{package}/py.typed" in expected for package in above), init
    (tmp_path / "server").mkdir()
    wheel, files = distribution(tree, tmp_path / "server")
    client, client_files = client_wheel
    assert sorted(files + client_files) == sorted(expected), "a file in both wheels, or in none"
    for archive in (wheel, client):
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(tmp_path / "target")
    done = run_alone(IMPORT, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    assert "pico" in done.stdout.split()

    # The page of a package index shows the README, whose links have to hold there.
    (metadata_file,) = (tmp_path / "target").glob("kvrelay-*.dist-info/METADATA")
    page = metadata_file.read_text()
    (source,) = re.findall(r"^Project-URL: Source, (.*)$", page, re.MULTILINE)
    links = re.findall(r"\]\(([^)#]+)", page)
    assert len(links) > 20
    for link in links:
        if link.startswith(source):
            kind, branch, path = link.removeprefix(f"{source}/").split("/", 2)
            assert (kind, branch) == ("raw" if path.endswith((".png", ".svg")) else "blob", "main")
            assert (ROOT / path).exists(), link
        else:
            assert link.startswith("https://"), link


@pytest.mark.parametrize(
    "shell", ["bash", pytest.param("zsh", marks=pytest.mark.more), pytest.param("fish", marks=pytest.mark.more)]
)
def test_the_command_line_completes(shell: str) -> None:
    def run(instruction: str, **environment: str) -> str:
        return subprocess.run(
            [Path(sysconfig.get_path("scripts"), "kvrelay")],
            env={**os.environ, "_KVRELAY_COMPLETE": f"{shell}_{instruction}", **environment},
            timeout=60, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert f"_KVRELAY_COMPLETE={shell}_complete" in run("source")
    word = "sta" if shell == "fish" else "1"
    assert "status" in run("complete", COMP_WORDS="kvrelay sta", COMP_CWORD=word)
    assert f"_KVRELAY_COMPLETE={shell}_source kvrelay" in (ROOT / "docs" / "start.md").read_text()


def test_the_server_needs_the_client_of_its_version() -> None:
    server, client = (tomllib.loads((ROOT / part).read_text())["project"] for part in PROJECTS)
    assert f"{client['name']}=={client['version']}" in server["dependencies"]
    assert client["version"] == server["version"]
    assert set(client["dependencies"]) <= set(server["dependencies"])


@pytest.mark.more
def test_the_light_client_streams_with_grpcio_and_protobuf_only(
    client_wheel: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The wheel is installed by pip in an environment of its own, and pip finds every requirement met."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    for name in ("grpcio", "protobuf", "typing_extensions"):
        borrow(name, site)
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", client_wheel[0]], check=True, timeout=120, cwd="/"
    )
    subprocess.run([*pip, "check"], check=True, timeout=60, cwd="/")
    with background(tmp_path, lambda index: 40 + index) as cluster:
        address = cluster.router.address
        done = subprocess.run(
            [python, "-I", "-c", LIGHT_CLIENT, address], timeout=60, capture_output=True, text=True, cwd="/"
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[40,", "41,", "42]"] * 2


def test_stubs_are_what_their_sources_generate(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "proto" / "generate.py", tmp_path], check=True, timeout=60)
    committed = ROOT / "proto" / "gen"
    fresh = files_below(tmp_path)
    assert fresh == files_below(committed)
    assert filecmp.cmpfiles(tmp_path, committed, fresh, shallow=False)[1:] == ([], []), "run `make proto`"


# One import for each contract of pyproject.toml that it must break.
FORBIDDEN_IMPORTS = {
    "Arrows point down": ("engine/plan.py", "kvrelay.worker.config"),
    "The router and the client know workers by their messages only": ("router/errors.py", "kvrelay.engine.plan"),
    "The public wire contract belongs to the router and its callers": ("worker/config.py", "kvrelay.v1.inference_pb2"),
    "The internal wire contract belongs to the servers": ("client/options.py", "kvrelay.rpc.identity"),
    "A model's name is resolved by servers only": ("engine/config.py", "kvrelay.models"),
    "No import cycle": ("rpc/log.py", "kvrelay.rpc.serve"),
    "Deciding code imports no torch": ("rpc/identity.py", "torch"),
}


def test_each_import_contract_follows_the_links_and_catches_what_breaks_it(tree: Path) -> None:
    def broken() -> set[str]:
        done = run_alone(LINT_IMPORTS, tree / "src", "--no-cache", "--no-logo", cwd=tree)
        assert "Contracts: " in done.stdout, done.stderr
        verdicts = re.findall(r"^(.+) (BROKEN|KEPT)\b", done.stdout, re.MULTILINE)
        return {name for name, verdict in verdicts if verdict == "BROKEN"}

    assert broken() == set()
    for file, module in FORBIDDEN_IMPORTS.values():
        with (tree / file).open("a") as source:
            source.write(f"\n\ndef late() -> None:\n    import {module}\n")
    assert broken() == set(FORBIDDEN_IMPORTS)
