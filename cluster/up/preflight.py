"""Checks before Ray is started, so that a mistake doesn't cost ten seconds."""

import errno
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import ERROR_PREFIX, UsageError
from kvrelay.engine.config import CPU_DEFAULTS, ModelPath, SpeculationConfig
from kvrelay.engine.degree import ONE
from kvrelay.engine.models.choice import check_ranks, is_fast
from kvrelay.engine.models.reading.checkpoint import Checkpoint, expected_tensors, optional_tensors
from kvrelay.engine.models.reading.config import read_config
from kvrelay.kernels.cpu.library import named_set
from kvrelay.models import packages, resolve
from kvrelay.router.entry.callers import Callers, public_certificates
from kvrelay.rpc.certificates import part_files
from kvrelay.rpc.identity import WORKER_ROLES
from kvrelay.rpc.security import PARTS
from kvrelay.transfer.protocol.routes import unroutable

DEFAULT_MODEL = "pico"
ROUTER_FILES = ("chat_template", "api_keys", "tls_certificate", "tls_key", "tls_client_ca")


def with_model(config: ClusterConfig) -> ClusterConfig:
    """The configuration, with the model `pico` if its own is one of the package index that can't be had; a line on
    stderr says so."""
    if not config.local or config.model.path not in packages.MODELS:
        return config
    try:
        resolve(config.model.path)
    except ValueError as error:
        print(f"{ERROR_PREFIX}{error}; {DEFAULT_MODEL} is served instead", file=sys.stderr)
        return config.model_copy(update={"model": config.model.model_copy(update={"path": DEFAULT_MODEL})})
    return config


def check(config: ClusterConfig) -> ClusterConfig:
    """Returns the configuration with absolute paths. Files and ports of other machines aren't checked.

    Raises:
        UsageError: the model or another file is missing or can't be used, or a port is in use.
    """
    if not config.local:
        return config
    checked = check_files(config)
    for each in config.router_configs():
        check_port("grpc_port", each.host, each.grpc_port)
        if each.http_port is not None:
            check_port("http_port", each.host, each.http_port)
    check_port("ray.dashboard_port", config.ray.dashboard_host, config.ray.dashboard_port)
    return checked


def check_files(config: ClusterConfig) -> ClusterConfig:
    """As `check`, without the ports: for a configuration that follows that of a running cluster.

    Raises:
        UsageError: a model or another file is missing or can't be used, or the environment names an instruction set
            that this CPU doesn't have.
    """
    if not config.local:
        return config
    try:
        named_set()
        folder = resolve(config.model.path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    check_checkpoint(folder, config.engine.model_path)
    check_degrees(folder, config)
    config = _with_draft_models(config)
    check_access(config)
    given = {name: getattr(config.router, name) for name in ROUTER_FILES}
    files: dict[str, Any] = {name: str(Path(path).absolute()) for name, path in given.items() if path}
    router = replace(config.router, **files)
    model = config.model.model_copy(update={"path": str(folder.absolute())})
    return config.model_copy(update={"model": model, "router": router})


def _with_draft_models(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the absolute folders of draft models and speculative heads.

    Raises:
        UsageError: one is missing, or can't be downloaded.
    """
    speculation = _with_folder(config.engine.speculation, "engine")
    changes: dict[str, Any] = {"engine": replace(config.engine, speculation=speculation)}
    for role in WORKER_ROLES:
        section = config.role(role)
        if (own := section.engine.get("speculation")) is not None:
            engine = {**section.engine, "speculation": _with_folder(own, f"{role}.engine")}
            changes[role] = section.model_copy(update={"engine": engine})
    return config.model_copy(update=changes)


def _with_folder(speculation: SpeculationConfig, section: str) -> SpeculationConfig:
    if not speculation.draft_model:
        return speculation
    try:
        folder = resolve(speculation.draft_model)
    except ValueError as error:
        reason = str(error).removeprefix("model: ")
        raise UsageError(f"{section}.speculation.draft_model: {reason}") from None
    return replace(speculation, draft_model=str(folder.absolute()))


def check_access(config: ClusterConfig) -> None:
    """Checks the files by which the cluster's parts and its clients prove who they are.

    Raises:
        UsageError: one is missing or can't be used.
    """
    section, security = "router", config.security
    try:
        Callers(config.router)
        public_certificates(config.router)
        section = "security"
        if security.join_token_path:
            security.token()
        if security.tls == "mutual" and security.certificates:
            for part in PARTS:
                part_files(Path(security.certificates), part)
    except ValueError as error:
        raise UsageError(f"{section}: {error}") from None


def check_checkpoint(folder: Path, path: ModelPath = "auto") -> None:
    """Checks the files' headers; the workers check the weights.

    Args:
        path: the option `engine.model_path`.

    Raises:
        UsageError: a file is missing, pickled or broken, or its tensors don't match the architecture.
    """
    try:
        checkpoint = Checkpoint(folder)
        if is_fast(folder, path):
            config = read_config(folder)
            checkpoint.verify(expected_tensors(config), optional_tensors(checkpoint, config))
    except ValueError as error:
        raise UsageError(f"model: {error}") from None
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"model: {folder / 'tokenizer.json'} is missing")


def check_degrees(folder: Path, config: ClusterConfig) -> None:
    """Checks that the model can be divided over the ranks of each role's workers, and its KV handed over between them.

    Raises:
        UsageError: it can't; the text names the option and the degrees that can be had.
    """
    engines = {role: config.engine_of(role) for role in WORKER_ROLES if config.role(role).replicas}
    for role, engine in engines.items():
        try:
            check_ranks(folder, engine)
        except ValueError as error:
            raise UsageError(f"{role}.engine.{error}") from None
    pair = [engines[role] for role in ("prefill", "decode") if role in engines]
    several = len(pair) == 2 and any(engine.degree != ONE for engine in pair)
    if several and all(
        is_fast(folder, each.model_path, each) for each in pair
    ):  # of others, only the loaded model tells
        model, engine = read_config(folder), pair[0]
        layout = model.kv_layout("float32", engine.kv_dtype, engine.block_size or CPU_DEFAULTS.block_size, "NHD")
        longest = min(engine.max_context or model.max_positions, model.max_positions)
        reason = unroutable(model.cache_layout(layout, longest), pair[0].degree, pair[1].degree)
        if reason is not None:
            raise UsageError(f"prefill.engine and decode.engine: KV can't be handed over: {reason}")


def check_port(name: str, host: str, port: int) -> None:
    """Raises UsageError naming the option if this machine can't listen on host:port; port 0 means any free port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # SO_REUSEADDR, as servers set it: a port whose old connections are in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        raise UsageError(f"host {host}: {error.strerror}") from None
    except OSError as error:
        reason = "already in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise UsageError(f"{name} {port}: {reason} on {host}") from None
