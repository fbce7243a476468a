"""Clusters for benchmarks, of plain processes or of `kvrelay up`.

Members of plain ones may be modules of this folder and of the tests'. Every process has a join token: internal calls
need one.
"""

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
PAIR = """\
model: {{path: {model}, dtype: {dtype}}}
prefill: {{replicas: 1, threads: {stages}, engine: {{pipeline_parallel: {stages}}}}}
decode: {{replicas: 1, threads: 1}}
"""
sys.path.append(str(HERE.parent / "tests"))
os.environ.setdefault("KVRELAY_JOIN_TOKEN", secrets.token_hex())

from kvrelay.client import Client, KvrelayError  # noqa: E402  # after the token
from support.processes import START_SECONDS, wait_until  # noqa: E402
from support.ray_commands import World  # noqa: E402
from support.supervised import Supervised, all_ready, supervised  # noqa: E402


@contextmanager
def plain_cluster(
    folder: Path, members: dict[str, dict[str, Any]], variables: Mapping[str, str] | None = None, **options: Any
) -> Iterator[Supervised]:
    """A ready cluster that a supervisor keeps, without Ray; nothing of it is left at the end.

    Args:
        folder: for configurations and logs.
        members: module and options of each, by name.
        variables: further environment variables of all processes.
        options: further ones of the supervisor.
    """
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    with (
        mock.patch.dict(os.environ, {"PYTHONPATH": path, **(variables or {})}),
        supervised(folder, members, **options) as cluster,
    ):
        all_ready(cluster)
        yield cluster


@contextmanager
def local_pair(model: Path, folder: Path, dtype: str, stages: int = 1) -> Iterator[Client]:
    """A client of a running `kvrelay up`, beside any other cluster of the user's: a prefill worker of so many pipeline
    stages, and a decode worker, with a thread for each stage."""
    world = World(folder / f"pair-{stages}")
    world.folder.mkdir()
    config = world.folder / "pair.yaml"
    config.write_text(PAIR.format(model=json.dumps(str(model.resolve())), dtype=dtype, stages=stages))
    world.up("--config", str(config))
    try:
        with Client(world.remembered()["router"]) as client:
            yield client
    finally:
        world.down()


def wait_answers(router: str, cluster: Supervised, api_key: str | None = None) -> None:
    """Waits until the router has reached the workers and serves."""

    def answers() -> bool:
        with Client(router, timeout=10.0, resume_seconds=0.0, api_key=api_key) as client:
            try:
                return bool(client.complete([5, 6, 7], max_tokens=2, ignore_eos=True).token_ids)
            except KvrelayError:
                return False

    wait_until(answers, lambda: f"the router answers: {cluster.log()[-4000:]}", START_SECONDS)
