"""The house holds: the package map equals the tree, stubs equal their sources, arrows point down."""

import ast
import filecmp
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
OUTSIDE_THE_WHEEL = {"benchmarks", "build", "docs", "helm", "tests"}


def test_package_list_equals_the_tree() -> None:
    tree = {
        path.parent.relative_to(ROOT)
        for path in ROOT.rglob("__init__.py")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    }
    expected = {path for path in tree if path.parts[0] not in OUTSIDE_THE_WHEEL}
    listed = {Path(SETUPTOOLS["package-dir"][name]) for name in SETUPTOOLS["packages"]}
    assert listed == expected


def test_every_package_is_mapped_to_its_own_name() -> None:
    for name in SETUPTOOLS["packages"]:
        folder = Path(SETUPTOOLS["package-dir"][name])
        below = folder.relative_to("proto/gen/kvrelay") if folder.parts[0] == "proto" else folder
        assert name == ".".join(("kvrelay", *below.parts))
        assert (ROOT / folder / "py.typed").exists()


def test_stubs_are_what_their_sources_generate(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "proto" / "generate.py", tmp_path], check=True, timeout=60)
    fresh = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    committed_root = ROOT / "proto" / "gen"
    committed = {
        path.relative_to(committed_root)
        for path in committed_root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert fresh == committed
    different = filecmp.cmpfiles(tmp_path, committed_root, [str(path) for path in fresh], shallow=False)[1:]
    assert different == ([], []), "run `make proto`"


# Modules that decide, and the modules that no decision may need.
CONTROL = (
    "kvrelay.client",
    "kvrelay.cluster.cli",
    "kvrelay.cluster.config",
    "kvrelay.cluster.membership",
    "kvrelay.cluster.supervisor",
    "kvrelay.engine.kv.blocks",
    "kvrelay.engine.kv.prefix",
    "kvrelay.engine.scheduler",
    "kvrelay.models",
    "kvrelay.router.placement",
    "kvrelay.router.server",
    "kvrelay.transfer.control",
    "kvrelay.transfer.events",
    "kvrelay.transfer.packing",
    "kvrelay.transfer.peers",
    "kvrelay.transfer.protocol",
    "kvrelay.decode_worker.reservation_queue",
    "kvrelay.transfer.messages",
)


@pytest.mark.parametrize("module", CONTROL)
def test_control_code_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd="/").returncode == 0


# What each package may import of kvrelay's; `kvrelay.internal` and `kvrelay.v1` (the contracts) are open to all above
# the engine.
MAY_IMPORT = {
    "kernels": set(),
    "models": set(),
    "rpc": {"internal"},
    "client": {"v1"},
    "engine": {"kernels"},
    "transfer": {"engine", "rpc", "internal"},
    "worker": {"engine", "transfer", "rpc", "internal", "models"},
    "prefill_worker": {"worker", "engine", "transfer", "rpc", "internal"},
    "decode_worker": {"worker", "engine", "transfer", "rpc", "internal"},
    "router": {"rpc", "internal", "v1", "models"},
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_arrows_point_down(package: str) -> None:
    """Read from the sources' import statements, so that an import inside a function counts as well."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("kvrelay."):
                    target = name.split(".")[1]
                    assert target in MAY_IMPORT[package] | {package}, f"{path.relative_to(ROOT)} imports {name}"
