"""A worker that dies or freezes, at each step of a hand-off, costs time and no token; nothing stays held for it."""

import itertools
import time
from collections.abc import Iterator

import pytest

from kvrelay.client import Client
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.faults import ask_in_company, hash_cluster, prompt_of, replace, wake, workers_in
from support.hash_runner import expected_tokens
from support.hash_worker import WORKER_LAYOUT
from support.processes import ProcessCluster, wait_until

FREE_SECONDS = 3.0
KILLS = [
    "prefill.before_offer",
    "prefill.after_chunk,chunk=0",
    "prefill.after_chunk,chunk=1",
    "prefill.after_chunk,chunk=2",
    "prefill.after_finish",
    "prefill.after_ack",
    "decode.after_reserve",
    "decode.after_frame,index=3",
    "decode.before_commit",
]
STOPS = ["transfer.frame_announced,index=1", "decode.after_frame,index=1"]


def rule(place: str, action: str) -> str:
    return f"{place},request={name_of(place, action)},attempt=1:{action}"


def name_of(place: str, action: str) -> str:
    return f"{action} {place}".replace(",", " ").replace("=", " ")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    rules = [rule(place, "kill") for place in KILLS] + [rule(place, "stop") for place in STOPS]
    with hash_cluster(tmp_path_factory.mktemp("kills"), rules) as cluster:
        yield cluster


@pytest.mark.parametrize("place", KILLS)
def test_a_kill_in_the_hand_off_changes_no_token(cluster: ProcessCluster, place: str) -> None:
    with Client(cluster.router) as client:
        completion = ask_in_company(client, name_of(place, "kill"))
    (killed,) = wait_until(lambda: workers_in(cluster, "Z"), "one worker has ended", seconds=3)
    cluster.wait_idle(FREE_SECONDS, but=[killed])
    # Once decode has all of the KV, its sender's death is nobody's loss.
    assert completion.timeline.retries == (0 if place == "prefill.after_ack" else 1)
    replace(cluster, killed)


def test_a_kill_of_decode_in_mid_stream_changes_no_token(cluster: ProcessCluster) -> None:
    prompt = prompt_of("mid-stream")
    with Client(cluster.router) as client:
        stream = client.generate(prompt, max_tokens=200, temperature=0, ignore_eos=True, timeout=30)
        chunks = list(itertools.islice(stream, 5))
        names = ("decode-0", "decode-1")
        (serving,) = wait_until(
            lambda: [name for name in names if cluster.member(name).load.requests.running], "one decodes", seconds=2
        )
        cluster.processes[serving].popen.kill()
        chunks += list(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens(prompt, 200, WORKER_LAYOUT)
    cluster.wait_idle(FREE_SECONDS, but=[serving])
    replace(cluster, serving)


@pytest.mark.parametrize("place", STOPS)
def test_a_frozen_worker_is_given_up_and_fenced_when_it_wakes(cluster: ProcessCluster, place: str) -> None:
    started = time.monotonic()
    with Client(cluster.router) as client:
        ask_in_company(client, name_of(place, "stop"))
        seconds = time.monotonic() - started
        (frozen,) = wait_until(lambda: workers_in(cluster, "T"), "one worker is frozen", seconds=1)
        wait_until(lambda: cluster.member(frozen).member.state == MEMBER_STATE_DEAD, "declared dead", seconds=4)
        cluster.wait_idle(FREE_SECONDS)
        wake(cluster, frozen)
        # What the zombie has queued up must change nothing of what runs meanwhile.
        ask_in_company(client, f"after {place}")
    wait_until(lambda: workers_in(cluster, "Z") == [frozen], "the fenced incarnation has ended", seconds=10)
    cluster.wait_idle(FREE_SECONDS)
    replace(cluster, frozen)
    assert seconds < 5, "completed elsewhere, once it was detected"
