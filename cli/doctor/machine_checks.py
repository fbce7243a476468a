"""Checks of the members' machines: limits, disks, certificates, GPUs, RDMA."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

from kvrelay.cli.doctor.finding import Examined, Finding, size
from kvrelay.internal.v1.describe_pb2 import Amount, Description
from kvrelay.rpc.certificates import WARN_DAYS

LEAST_FILES = 4096
"""Open files that a member may need: connections of clients, peers and links."""
FULL_SHARE = 0.9
"""Used share of a limited resource from which on it counts as nearly exhausted."""
LEAST_DISK_BYTES = 2**30
LEAST_SHARED_BYTES = 64 * 2**20
"""Shared memory that a few links take."""
DAY_SECONDS = 86400.0


def limits(cluster: Examined) -> Iterator[Finding]:
    """Checks the limits of the members' processes, such as open files and memory."""
    for name, description in sorted(cluster.descriptions.items()):
        amounts = {amount.name: amount for amount in description.amounts}
        troubles = list(_troubles(name, description, amounts))
        yield from troubles
        if not troubles:
            yield Finding("ok", name, _shown(amounts))


def _shown(amounts: dict[str, Amount]) -> str:
    files, memory = amounts.get("open files"), amounts.get("memory")
    parts = []
    if files is not None:
        parts.append(f"{files.used:.0f} of {'unlimited' if files.limit < 0 else f'{files.limit:.0f}'} open files")
    if memory is not None:
        parts.append(f"{size(memory.used)} of {'unlimited' if memory.limit < 0 else size(memory.limit)} of memory")
    return ", ".join(parts) or "nothing is limited"


def _troubles(name: str, description: Description, amounts: dict[str, Amount]) -> Iterator[Finding]:
    """Limits that are used up, or lower than a member may need. A limit below 0 is none."""
    files, memory = amounts.get("open files"), amounts.get("memory")
    shared, locked = amounts.get("shared memory"), amounts.get("locked memory")
    advice = "raise the soft limit (ulimit -n, LimitNOFILE=) to 65536"
    if files is not None and files.used >= FULL_SHARE * files.limit >= 0:
        yield Finding("error", name, f"{files.used:.0f} of {files.limit:.0f} open files are in use", advice)
    elif files is not None and 0 <= files.limit < LEAST_FILES:
        text = f"may open {files.limit:.0f} files; each client, peer and link takes one"
        yield Finding("warning", name, text, advice)
    if memory is not None and memory.used >= FULL_SHARE * memory.limit >= 0:
        text = f"{size(memory.used)} of the {size(memory.limit)} of its control group are in use"
        yield Finding("warning", name, text, "the kernel ends it when the rest is used: give it more memory")
    if description.device and shared is None:
        yield Finding("warning", name, "has no /dev/shm, so the shm transport can't be used")
    elif description.device and shared is not None and shared.limit - shared.used < LEAST_SHARED_BYTES:
        text = f"{size(shared.limit - shared.used)} of /dev/shm are free"
        yield Finding("warning", name, text, "mount a larger /dev/shm (in Kubernetes an emptyDir of medium Memory)")
    if description.rdma_ports and locked is not None and locked.limit >= 0:
        text = f"may lock {size(locked.limit)} of memory, but RDMA has to lock its buffers"
        yield Finding("warning", name, text, "ulimit -l unlimited; in Kubernetes the capability IPC_LOCK")


def disks(cluster: Examined) -> Iterator[Finding]:
    """Checks the free space for records, logs and Ray's files, on each host."""
    seen = set()
    for description in cluster.descriptions.values():
        for amount in description.amounts:
            if not amount.name.startswith("disk ") or (description.host, amount.limit) in seen:
                continue
            seen.add((description.host, amount.limit))
            free = amount.limit - amount.used
            subject, text = f"{description.host} {amount.name}", f"{size(free)} of {size(amount.limit)} are free"
            if free < LEAST_DISK_BYTES:
                yield Finding("error", subject, text, "records and logs need room: clean up, or move Ray's folder")
            else:
                yield Finding("ok", subject, text)


def certificates(cluster: Examined) -> Iterator[Finding]:
    """Checks when certificates end."""
    for name, description in sorted(cluster.descriptions.items()):
        for each in description.certificates:
            days = (each.expires_unix - time.time()) / DAY_SECONDS
            end = datetime.fromtimestamp(each.expires_unix, UTC).strftime("%Y-%m-%d")
            advice = "`kvrelay certificates FOLDER` makes new ones; members read them without a restart"
            if days <= 0:
                yield Finding("error", name, f"{each.file} ended on {end}", advice)
            elif days < WARN_DAYS:
                yield Finding("warning", name, f"{each.file} ends on {end}, in {days:.0f} days", advice)
            else:
                yield Finding("ok", name, f"{each.file} is valid until {end}")


def gpus(cluster: Examined) -> Iterator[Finding]:
    """Checks the workers' GPUs."""
    drivers = set()
    for name, description in sorted(cluster.descriptions.items()):
        for gpu in description.gpus:
            drivers.add(gpu.driver)
            subject = f"{name} gpu {gpu.index}"
            if gpu.ecc_errors > 0:
                text = f"{gpu.ecc_errors} uncorrected memory errors since the driver was loaded"
                yield Finding("error", subject, text, "drain the worker and have the GPU reset or replaced")
            if gpu.unreachable:
                others = ", ".join(map(str, gpu.unreachable))
                text = f"can't reach the memory of GPU {others} directly"
                yield Finding(
                    "note",
                    subject,
                    text,
                    "NCCL copies KV between them through host memory; see `nvidia-smi topo -m`",
                )
            if gpu.mig == "Enabled":
                yield Finding("note", subject, "MIG is on: its parts can't reach one another's memory")
            used = "" if gpu.used_bytes < 0 else f", {size(gpu.used_bytes)} in use"
            text = f"{gpu.name}, driver {gpu.driver or 'unknown'}, {size(gpu.memory_bytes)}{used}"
            yield Finding("ok", subject, text)
    if len(drivers) > 1:
        yield Finding("warning", "driver", f"differs: {', '.join(sorted(drivers))}", "use one driver on all nodes")
    workers = [name for name, each in cluster.descriptions.items() if each.device == "cpu" and each.gpus]
    for name in sorted(workers):
        yield Finding("warning", name, "computes on the CPU, though it has a GPU", "set engine.device to auto")


def kernels(cluster: Examined) -> Iterator[Finding]:
    """Checks that models on CPUs are computed by the native kernels."""
    for name, description in sorted(cluster.descriptions.items()):
        if description.device == "cpu" and description.kernels_missing:
            text = f"computes with torch, which is slower; no native kernels: {description.kernels_missing}"
            yield Finding("warning", name, text, "mend that and restart the worker, or use an image with kernels in it")


def rdma(cluster: Examined) -> Iterator[Finding]:
    """Checks the RDMA devices."""
    hosts = set()
    for _, description in sorted(cluster.descriptions.items()):
        if description.host in hosts or not description.rdma_ports:
            continue
        hosts.add(description.host)
        for port in description.rdma_ports:
            subject, text = f"{description.host} {port.name}", f"{port.link_layer}, {port.state}"
            if port.state != "ACTIVE":
                yield Finding("warning", subject, text, "check the cable, the switch and the subnet manager")
            elif not port.gid:
                yield Finding("warning", subject, f"{text}, without a GID", "give the interface an IP address")
            else:
                yield Finding("ok", subject, f"{text}, GID {port.gid}")
        if description.gpus and not description.nvidia_peermem:
            yield Finding(
                "warning",
                description.host,
                "the kernel module nvidia_peermem is not loaded: RDMA can't reach GPU memory",
                "modprobe nvidia_peermem (or a kernel and driver with dma-buf)",
            )
