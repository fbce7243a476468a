"""`kvrelay status` and its exit codes: with a supervisor, without one, and with workers that can't be paired."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from command import call
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.cluster.state import ClusterState, save
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    ROLE_COLOCATED,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    GetStatusRequest,
    GetStatusResponse,
    Member,
    MemberStatus,
    Role,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceServicer, add_SupervisorServiceServicer_to_server
from kvrelay.internal.v1.worker_pb2 import CONTEXT_LIMIT_POOL, Blocks, Load, Requests
from kvrelay.rpc.identity import role_name
from support.terminal import Terminal


@contextmanager
def listening(add: Callable[[grpc.Server], None]) -> Iterator[str]:
    """The address of a server with what `add` adds to it."""
    server = grpc.server(ThreadPoolExecutor(2))
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a router with this health."""
    servicer = health.HealthServicer()
    servicer.set("", request.param)
    with listening(partial(health_pb2_grpc.add_HealthServicer_to_server, servicer)) as address:
        yield address


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("router", "addresses", "code"),
    [
        (SERVING, "{router}", 3),
        (SERVING, "{nobody},{router}", 3),
        (NOT_SERVING, "{router}", 1),
        (SERVING, "{nobody}", 1),
    ],
    indirect=["router"],
)
def test_a_cluster_without_its_supervisor_is_no_dead_one_while_a_router_serves(
    nobody: str, router: str, addresses: str, code: int
) -> None:
    routers = addresses.format(nobody=nobody, router=router)
    save(ClusterState(None, "kvrelay", supervisor=nobody, router=routers))
    status, shown = call("status"), json.loads(call("status", "--json").stdout)
    said = f"the supervisor is down; the router {routers} serves" if code == 3 else "a cluster is starting, or does not"
    assert status.exit_code == code
    assert status.stdout.startswith(said)
    assert (shown["supervised"], shown["ready"]) == (False, code == 3)
    assert code == 1 or shown["router"] == routers
    up = call("up", "--address", nobody)
    assert up.exit_code == 1
    assert ("already running" in up.stderr) or code == 1


LOAD = Load(blocks=Blocks(total=128_000, free=1, held=127_999), requests=Requests(running=4321, waiting=1234))


class FakeSupervisor(SupervisorServiceServicer):
    def __init__(self, members: list[Member]) -> None:
        self._members = members

    def GetStatus(self, request: GetStatusRequest, context: grpc.ServicerContext) -> GetStatusResponse:
        return GetStatusResponse(ready=True, members=[MemberStatus(member=each, load=LOAD) for each in self._members])


def member(name: str, role: Role, compatibility: str = "") -> Member:
    return Member(name=name, role=role, state=MEMBER_STATE_READY, incarnation="i", compatibility=compatibility)


@contextmanager
def supervised(members: list[Member]) -> Iterator[None]:
    """A cluster whose supervisor tells of these members."""
    with listening(partial(add_SupervisorServiceServicer_to_server, FakeSupervisor(members))) as address:
        save(ClusterState(pid=None, namespace="kvrelay", supervisor=address))
        yield


def told_of(members: list[Member]) -> tuple[str, Any]:
    """What people are told of a cluster of these members, in one line, and its status as JSON."""
    with supervised(members):
        people, programs = call("status", "--wide"), call("status", "--json")
    assert (people.exit_code, programs.exit_code) == (0, 0)
    return " ".join(people.stdout.split()), json.loads(programs.stdout)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.some(3)
def test_what_matters_most_of_each_member_is_whole_on_a_terminal(columns: int, wide: bool) -> None:
    members = [member("worker-1023", ROLE_DECODE), member("a-process-of-mine-0", ROLE_COLOCATED)]
    for each in members:
        each.max_context, each.weights, each.kv_dtype = 131072, "bfloat16", "bfloat16"
    command = [sys.executable, "-m", "kvrelay.cli", "status", *(["--wide"] if wide else [])]
    with supervised(members), Terminal(command, os.environ, columns) as terminal:
        assert terminal.end() == 0
        text = " ".join(terminal.lines)
        for each in members:
            (row,) = [line.split() for line in terminal.lines if line.startswith(each.name)]
            words = [each.name, role_name(each.role), "ready", "4321", "1234", "127999", "of", "128000", "(100%)"]
            assert row[: len(words)] == words
        assert "incarnation" not in text or wide
        if wide and columns == 120:
            assert text.count("131072 (model)") == 2


@pytest.mark.parametrize("mixed", [False, True])
def test_workers_that_cannot_be_paired_are_named(mixed: bool) -> None:
    members = [
        member("router-0", ROLE_ROUTER),
        member("prefill-0", ROLE_PREFILL, "a"),
        member("decode-0", ROLE_DECODE, "a"),
        member("decode-1", ROLE_DECODE, "b" if mixed else "a"),
    ]
    told, shown = told_of(members)
    assert ("decode-1 (digest b) can't be paired with decode-0, prefill-0 (digest a)" in told) is mixed
    assert shown["incompatible"] == ([["decode-0", "prefill-0"], ["decode-1"]] if mixed else [])
    assert [worker["compatibility"] for worker in shown["workers"]] == ["a", "a", "b" if mixed else "a"]


def test_formats_are_shown_and_named_where_they_may_part_workers() -> None:
    members = [
        member("prefill-0", ROLE_PREFILL, "a"),
        member("decode-0", ROLE_DECODE, "a"),
        member("decode-1", ROLE_DECODE, "b"),
        member("decode-2", ROLE_DECODE, "a"),
    ]
    for each in members[:3]:
        each.weights, each.kv_dtype = "int4", "int8" if each.name == "decode-1" else "bfloat16"
    members[0].prefill_attention = "flashinfer"
    told, shown = told_of(members)
    workers = [(worker["weights"], worker["kv_dtype"]) for worker in shown["workers"]]
    assert workers == [("int4", "bfloat16"), ("int4", "bfloat16"), ("int4", "int8"), (None, None)]
    assert [worker["prefill_attention"] for worker in shown["workers"]] == ["flashinfer", None, None, None]
    assert told.count("flashinfer") == 1
    assert "KV is int8 and bfloat16: converted only where transfer.convert_dtype is on" in told


def test_the_processes_of_a_worker_of_several_ranks_are_shown() -> None:
    members = [member("prefill-0", ROLE_PREFILL), member("decode-0", ROLE_DECODE)]
    members[0].pid = 4711
    members[0].tensor_ranks, members[0].pipeline_stages = 2, 1
    members[0].rank_pids.extend([4711, 4712])
    told, shown = told_of(members)
    assert "4711, 4712 2 x 1" in told
    ranks = [worker["ranks"] for worker in shown["workers"]]
    assert ranks[0] == {"tensor": 2, "pipeline": 1, "pids": [4711, 4712]}
    assert ranks[1] == {"tensor": 1, "pipeline": 1, "pids": [members[1].pid]}


def test_the_longest_context_is_shown_with_its_reason() -> None:
    members = [member("prefill-0", ROLE_PREFILL), member("decode-0", ROLE_DECODE), member("decode-1", ROLE_DECODE)]
    members[0].max_context = 4096
    members[1].max_context, members[1].context_limit = 2336, CONTEXT_LIMIT_POOL
    told, shown = told_of(members)
    assert "4096 (model)" in told
    assert "2336 (pool)" in told
    reason = "the KV pool of a worker (engine.kv_memory_bytes) holds 2336 tokens"
    assert f"decode-0: prompt plus completion are at most 2336 tokens: {reason}" in told
    contexts = [worker["context"] for worker in shown["workers"]]
    assert [(context["tokens"], context["limit"]) for context in contexts] == [
        (4096, "model"),
        (2336, "pool"),
        (0, "model"),
    ]
    assert "engine.kv_memory_bytes" in contexts[1]["reason"]
    assert contexts[2]["reason"] == "the model isn't loaded yet"
