"""Facts that a worker tells beyond `kvrelay.rpc.description`: GPUs, RDMA, KV pool, transports."""

import subprocess
from pathlib import Path

import torch

from kvrelay.internal.v1.describe_pb2 import Description, Gpu, RdmaPort
from kvrelay.kernels.cpu import library
from kvrelay.rpc.description import describe
from kvrelay.transfer.transports.registry import reasons
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.worker import Worker

DRIVER_SECONDS = 5.0
COLUMNS = (
    "uuid",
    "driver_version",
    "memory.used",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)
INFINIBAND = Path("/sys/class/infiniband")
PEERMEM = Path("/sys/module/nvidia_peermem")
MIB = 2**20


def describe_worker(config: WorkerConfig, worker: Worker | None) -> Description:
    """A worker and its machine; `worker` is None while its model loads. Blocks up to some seconds."""
    found = describe((None if worker is None else worker.credentials.certificates,))
    found.checksum, found.encrypt, found.tls = config.transfer.checksum, config.transfer.encrypt, config.security.tls
    found.rdma_ports.extend(rdma_ports(INFINIBAND))
    found.nvidia_peermem = PEERMEM.exists()
    if torch.cuda.is_available():
        found.gpus.extend(gpus())
        if torch.distributed.is_nccl_available():
            found.versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if worker is not None:
        memory, model = worker.pools[0].bytes, worker.hello().model
        found.kv_bytes, found.device = sum(pool.nbytes for pool in worker.pools), memory.device.type
        found.kernels_missing = library.missing()
        if worker.role.endpoint is not None:
            usable = reasons(config.transfer.transport, memory.is_cuda, config.transfer.encrypt, config.engine.hosts)
            for name, missing in usable.items():
                found.transports.add(name=name, missing=missing or "")
        found.max_context, found.context_limit = model.max_context, model.context_limit
    return found


def gpus() -> list[Gpu]:
    """The GPUs of this process, with what the driver's own tool says about them.

    Asking CUDA for free memory would begin a context on every GPU, also on those that other processes compute on.
    """
    told = driver_rows(_ask_driver())
    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        row = told.get(f"GPU-{properties.uuid}", {})
        used = _count(row.get("memory.used", ""))
        others = [other for other in range(count) if other != index]
        found.append(
            Gpu(
                index=index,
                name=properties.name,
                driver=row.get("driver_version", ""),
                memory_bytes=properties.total_memory,
                used_bytes=used * MIB if used >= 0 else used,
                mig=row.get("mig.mode.current", ""),
                ecc_errors=_count(row.get(COLUMNS[-1], "")),
                unreachable=[other for other in others if not torch.cuda.can_device_access_peer(index, other)],
            )
        )
    return found


def driver_rows(table: str) -> dict[str, dict[str, str]]:
    """The rows of the driver's table, by the GPU's UUID.

    Args:
        table: lines of COLUMNS with commas between.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows if len(row) == len(COLUMNS)}


def _ask_driver() -> str:
    command = ["nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # a container may have no nvidia-smi; torch's own figures are there


def _count(text: str) -> int:
    return int(text) if text.isdigit() else -1


def rdma_ports(folder: Path) -> list[RdmaPort]:
    """The ports of the machine's RDMA devices.

    Args:
        folder: /sys/class/infiniband, or another folder of its form.
    """
    return [
        RdmaPort(
            name=f"{port.parent.parent.name}/{port.name}",
            state=_text(port / "state").rpartition(": ")[2],
            link_layer=_text(port / "link_layer"),
            gid=_gid(port / "gids"),
        )
        for port in sorted(folder.glob("*/ports/*"))
    ]


def _gid(folder: Path) -> str:
    entries = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    return next((gid for path in entries if (gid := _text(path)).strip("0:")), "")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # entries of unused GIDs can't be read
