"""Placement of members: each role is spread over the nodes, and workers are near those that they hand KV over to."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.fleet.nodes import Node, PlacementRequest, preferred
from kvrelay.rpc.identity import MemberRole
from support.ray_commands import ENVIRONMENT

GPU = {"GPU": 1.0}
RACK = "kvrelay.io/rack"
MOVED_SECONDS = 120.0
"""Seconds until a lost node's member serves elsewhere, on a busy machine; Ray takes 15 s to give the node up."""
ENDED_SECONDS = 4.0
"""Longest time from the loss of a node until no rank is left of a worker that had some there."""


def placed(order: list[MemberRole], nodes: Mapping[str, Mapping[str, str]], gpus: int = 8) -> dict[str, str | None]:
    """The nodes of members that come in this order; nodes are given by their labels."""
    roles: dict[str, MemberRole] = {f"worker-{number}": role for number, role in enumerate(order)}
    places: dict[str, str | None] = {}
    for name, role in roles.items():
        taken = Counter(places.values())
        present = [Node(node, labels, {"GPU": gpus - taken[node]}) for node, labels in nodes.items()]
        known = {other: node for other, node in places.items() if node is not None}
        places[name] = preferred(PlacementRequest(role, GPU, roles, (RACK,)), present, known)
    return places


@given(st.lists(st.sampled_from(["prefill", "decode"]), min_size=1, max_size=16), st.integers(1, 4))
def test_each_role_is_spread_over_the_nodes(order: list[MemberRole], count: int) -> None:
    places = placed(order, {f"node-{number}": {} for number in range(count)}, gpus=16)
    for role in set(order):
        used = Counter(places[f"worker-{number}"] for number, each in enumerate(order) if each == role)
        assert None not in used
        assert max(used.values()) - min((used[f"node-{number}"] for number in range(count)), default=0) <= 1


def test_partners_share_a_node_or_a_rack() -> None:
    two = placed(["prefill", "prefill", "decode", "decode"], {"a": {}, "b": {}})
    assert sorted(map(str, two.values())) == ["a", "a", "b", "b"]
    racks = {"a": {RACK: "1"}, "b": {RACK: "2"}, "c": {RACK: "2"}, "d": {RACK: "1"}}
    one_each = placed(["prefill", "decode", "prefill", "decode"], racks, gpus=1)
    rack = {name: racks[str(node)][RACK] for name, node in one_each.items()}
    assert rack["worker-0"] == rack["worker-1"] != rack["worker-2"] == rack["worker-3"]


def test_without_room_there_is_no_preference() -> None:
    assert placed(["prefill"], {"a": {}}, gpus=0) == {"worker-0": None}


NODES = """
import asyncio, json
from kvrelay.cluster.ray import environment as rayenv
rayenv.prepare()
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from kvrelay.cluster.fleet.nodes import PlacementRequest
from kvrelay.cluster.ray import placement_groups as module
from kvrelay.cluster.ray.placement_groups import PlacementGroups

module.OWN_SECONDS = 3
RACK = "kvrelay.io/rack"
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
racks = {cluster.add_node(num_cpus=2, labels={RACK: rack}).node_id: rack for rack in ("one", "two")}
ray.init(cluster.address, log_to_driver=False, configure_logging=False)
cluster.wait_for_nodes()
roles = {"worker-0": "prefill", "worker-1": "prefill", "worker-2": "decode", "worker-3": "decode", "worker-4": "decode"}

async def main():
    groups = PlacementGroups("test")
    requests = {name: PlacementRequest(role, {"CPU": 1.0}, roles, (RACK,)) for name, role in roles.items()}
    four = [name for name in roles if name != "worker-4"]
    await asyncio.gather(*(groups.reserve(name, requests[name], lambda: True) for name in four))
    tables = placement_group_table().values()
    found = {table["name"].removeprefix("test/"): racks[table["bundles_to_node_id"][0]] for table in tables}
    waiting = asyncio.create_task(groups.reserve("worker-4", requests["worker-4"], lambda: True))
    while not (waits := groups.waits_for("worker-4")):
        await asyncio.sleep(0.1)
    await asyncio.to_thread(groups.release, "worker-3")
    await waiting
    after = groups.waits_for("worker-4")
    # No rack is named as the role: after a while it takes any.
    other = PlacementRequest("prefill", {"CPU": 1.0}, roles, (), RACK)
    await asyncio.to_thread(groups.release, "worker-0")
    taken = await groups.reserve("worker-0", other, lambda: True)
    print(json.dumps({"racks": found, "waits": waits, "after": after, "taken": taken is not None}))

asyncio.run(main())
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.more
@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_on_a_ray_cluster_of_several_nodes() -> None:
    output = subprocess.check_output([sys.executable, "-c", NODES], env=ENVIRONMENT, text=True, timeout=360)
    found = json.loads(output.splitlines()[-1])
    for role in (("worker-0", "worker-1"), ("worker-2", "worker-3")):
        assert {found["racks"][name] for name in role} == {"one", "two"}
    assert found["waits"] == "a node of the Ray cluster with 1 CPU free"
    assert found["after"] == ""
    assert found["taken"]


LOST_NODES = """
import json, sys, time
from pathlib import Path
from kvrelay.cluster.ray import environment as rayenv
rayenv.prepare()
import psutil, ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from kvrelay.client import Client
from kvrelay.cluster.processes.processes import alive, title
from support.ray_commands import World

world, moved = World(Path(sys.argv[1])), float(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2), *(cluster.add_node(num_cpus=0, num_gpus=1) for _ in range(2))]
ray.init(cluster.address, log_to_driver=False, configure_logging=False)
cluster.wait_for_nodes()
world.up("--address", cluster.address, "--config", str(world.folder / "kvrelay.yaml"))

def workers():
    return {worker["role"]: worker for worker in world.status()["workers"]}

def places(name):
    (found,) = (table for table in placement_group_table().values() if table["name"] == f"kvrelay/{name}")
    return found["bundles_to_node_id"]

def seconds_until(condition, limit):
    begun = time.monotonic()
    while not condition() and time.monotonic() - begun < limit:
        time.sleep(0.1)
    return time.monotonic() - begun

def replaced(role):
    now = workers().get(role, {})
    return now.get("state") == "ready" and now["incarnation"] != before[role]["incarnation"]

def lose(node_id):
    (node,) = (node for node in nodes if node.node_id == node_id)
    cluster.remove_node(node, allow_graceful=False)

before = workers()
name = before["decode"]["name"]
first = places(name)
(agent,) = (each for each in world.processes() if title(each).startswith("ray::RankHostActor"))
ranks = [psutil.Process(before["decode"]["pid"]), agent, *agent.children()]
with Client(world.status()["router"], timeout=moved) as client:
    asked = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}
    expected = client.complete("def __init__(self, ", **asked).token_ids
    stream = client.generate("def __init__(self, ", **asked)
    found = list(next(stream).token_ids)
    lose(first[1])
    ended = seconds_until(lambda: not any(map(alive, ranks)), 60)
    cluster.wait_for_nodes()  # Ray has given the node up
    without = workers()["decode"]["state"]
    nodes.append(cluster.add_node(num_cpus=2, num_gpus=1))
    back = seconds_until(lambda: replaced("decode"), moved)
    for chunk in stream:
        found += chunk.token_ids
second = places(name)
lose(places(before["prefill"]["name"])[0])
print(json.dumps({
    "nodes": [len({*first.values()}), len({*second.values()})],
    "ranks": len(ranks),
    "ended": ended,
    "without": without,
    "back": back,
    "tokens": found == list(expected),
    "moved": seconds_until(lambda: replaced("prefill"), moved),
}))
assert world.call("down", seconds=moved).returncode == 0
ray.shutdown()
cluster.shutdown()
"""
TWO_NODES = f"""
model: {{dtype: float32}}
router: {{idle_timeout_seconds: {MOVED_SECONDS}}}
prefill: {{gpus: 0}}
decode: {{gpus: 1, cpus: 0, engine: {{tensor_parallel: 2, device: cpu, kv_memory_bytes: 16777216}}}}
drain_seconds: 1
"""
"""No node has the two GPUs of the decode worker's ranks, so they are divided over two nodes. The stream of the lost
worker waits for the one that replaces it as long as the test does."""


@pytest.mark.more
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_worker_lies_on_two_nodes_and_the_members_of_a_lost_node_are_started_on_another(tmp_path: Path) -> None:
    (tmp_path / "kvrelay.yaml").write_text(TWO_NODES)
    command = [sys.executable, "-c", LOST_NODES, str(tmp_path), str(MOVED_SECONDS)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = ENVIRONMENT | {"PYTHONPATH": path, "KVRELAY_STATE_DIR": str(tmp_path / "state")}
    output = subprocess.check_output(command, env=environment, text=True, timeout=500)
    found = json.loads(output.splitlines()[-1])
    print(found)
    assert found["nodes"] == [2, 2], "before the loss of the further node, and with another one in its place"
    assert found["ended"] < ENDED_SECONDS
    assert found["without"] != "ready"
    assert found["tokens"], "of a stream that the loss has cut off"
    assert max(found["back"], found["moved"]) < MOVED_SECONDS
