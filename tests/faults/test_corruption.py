"""Frames that arrive wrong, twice, or not at all: none of their bytes becomes a token."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.client import Client
from support.faults import CHUNK, ask, ask_in_company, hash_cluster
from support.processes import ProcessCluster

RETRIED = {
    "one bit": "transfer.frame_bytes,index=0:corrupt(1)",
    "many bits": "transfer.frame_bytes,index=1:corrupt(5000)",
    "later frame": "transfer.frame_bytes,index=3:corrupt(1)",
    "cut short": "transfer.frame_bytes,index=2:truncate(100)",
    "on arrival": "decode.after_frame,index=1:corrupt(1)",
    "gap": "transfer.frame,index=1:drop",
}
"""What decode must refuse: the attempt fails and is placed anew."""

SURVIVED = {
    "twice": "transfer.frame,index=1:duplicate",
    "later twice": "transfer.frame,index=3:duplicate",
    "thread fails": "transfer.frame,index=2:raise",
}
"""What the attempt itself gets over: a replayed frame is dropped, a broken link is dialled anew."""

ALONE = {
    "another in its place": ("transfer.frame_announced,index=1:drop", 1),
    "neither announced nor sent": ("transfer.frame,index=3:drop", 1),
    "never sent": ("transfer.frame_announced,index=3:drop", 0),
}
"""A frame whose bytes stay out, and the attempts that it costs. What is sent next is taken for one that was announced;
of a last one that wasn't, only the deadline of the transfer tells."""

COMPANY = 6
"""Requests beside each one that fails: the router tries again for one in five."""
REQUESTS = 200
AT_ONCE = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    rules = []
    alone = {name: text for name, (text, _) in ALONE.items()}
    for name, text in (RETRIED | SURVIVED | alone).items():
        place, action = text.split(":")
        rules.append(f"{place},request={name},attempt=1,times=1:{action}")
    with hash_cluster(tmp_path_factory.mktemp("corruption"), rules) as cluster:
        yield cluster


@pytest.mark.parametrize("name", RETRIED)
def test_a_wrong_frame_is_rejected(cluster: ProcessCluster, name: str) -> None:
    with Client(cluster.router) as client:
        assert ask_in_company(client, name, COMPANY).timeline.retries == 1
    cluster.wait_idle(3)


@pytest.mark.parametrize("name", SURVIVED)
def test_a_frame_that_comes_twice_or_never_costs_no_attempt(cluster: ProcessCluster, name: str) -> None:
    with Client(cluster.router) as client:
        assert ask_in_company(client, name, COMPANY).timeline.retries == 0
    cluster.wait_idle(4)


@pytest.mark.parametrize("name", ALONE)
def test_a_frame_that_stays_out_is_noticed_and_the_link_made_anew(cluster: ProcessCluster, name: str) -> None:
    with Client(cluster.router) as client:
        assert ask(client, name).timeline.retries == ALONE[name][1]
        for number in range(4):
            assert ask(client, f"after {name} {number}").timeline.retries == 0
    cluster.wait_idle(3)


def test_no_client_sees_that_one_transfer_in_twenty_fails(tmp_path: Path) -> None:
    rule = "transfer.frame_bytes,index=0,share=0.05,seed=5:corrupt(1)"
    with hash_cluster(tmp_path, [rule], step_seconds=0.0) as cluster, Client(cluster.router) as client:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            names = [f"request {number}" for number in range(REQUESTS)]
            retries = [done.timeline.retries for done in pool.map(lambda name: ask(client, name, 2 * CHUNK, 8), names)]
        assert sum(retries) >= 3, "the failpoint was armed"
        cluster.wait_idle(3)
