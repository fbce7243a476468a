"""What a first hour on a GPU finds: the machine, versions, and what this process misses. Exit status 1 without a GPU.

python benchmarks/gpu_environment.py
"""

import importlib.util
import json
import shutil
import subprocess
import sys

import torch
from gpu import describe_machine

NEEDED = (
    "aiohttp",
    "aiohttp_cors",
    "cryptography",
    "google.protobuf",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "hypothesis",
    "jinja2",
    "msgpack",
    "numpy",
    "prometheus_client",
    "pydantic",
    "pytest",
    "pytest_timeout",
    "safetensors",
    "tokenizers",
    "transformers",
    "triton",
    "xxhash",
    "yaml",
)
"""What the steps of `first_gpu_hour.sh` import: all of the project's dependencies but Ray and the command line's."""
TOOLS = ("nvidia-smi", "compute-sanitizer", "ncu")


def missing(names: tuple[str, ...]) -> list[str]:
    """The modules that can't be imported."""
    found = []
    for name in names:
        try:
            if importlib.util.find_spec(name) is None:
                found.append(name)
        except ModuleNotFoundError:
            found.append(name)
    return found


def main() -> int:
    there = torch.cuda.is_available()
    found = describe_machine(dry=not there)
    found["missing_modules"] = missing(NEEDED)
    found["missing_tools"] = [tool for tool in TOOLS if shutil.which(tool) is None]
    if there:
        free, total = torch.cuda.mem_get_info()
        found["free_bytes"], found["total_bytes"] = free, total
        found["capability"] = list(torch.cuda.get_device_capability())
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    print(json.dumps(found, indent=1))
    if not there:
        print("there is no GPU here")
    return 0 if there and not found["missing_modules"] else 1


if __name__ == "__main__":
    sys.exit(main())
