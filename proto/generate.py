"""Generates the committed stubs under proto/gen from the .proto files: `python proto/generate.py [OUT]`."""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` below `out`.

    Raises:
        RuntimeError: protoc refused a file.
    """
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path.relative_to(HERE)) for path in (HERE / "kvrelay").rglob("*.proto"))
    include = [f"-I{HERE}", f"-I{files('grpc_tools') / '_proto'}"]
    outputs = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *include, *outputs, *sources]) != 0:
        raise RuntimeError("protoc failed")
    for package in ("kvrelay/v1", "kvrelay/internal/v1"):
        (out / package / "__init__.py").touch()
        (out / package / "py.typed").touch()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "gen")
