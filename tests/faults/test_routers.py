"""One of two routers is lost under load: no client sees an error, and every stream goes on with equal tokens."""

import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvrelay.client import Client
from kvrelay.client.messages import PING_OTHERS_SECONDS
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from kvrelay.router.placing.placement import AHEAD_PROMPTS
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.faults import AT_ONCE, Scene, asking, oracle, prompt_of, until
from support.hash_worker import STEP_SECONDS
from support.processes import START_SECONDS, free_port

CLIENTS = 40
CONNECTIONS = 16
"""Connections, of which all reach one router once in 32,768 times."""
BUSY_SECONDS = 6.0
"""Seconds for the other router and the workers, which serve twenty streams at a time, on a busy machine."""


def working(it: Scene, router: str) -> bool:
    """Whether requests run on this router."""
    return it.cluster.member(router).load.requests.running >= AT_ONCE // 4


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.more),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.more),
    ],
)
def test_one_of_two_routers_is_lost_under_load(it: Scene, how: signal.Signals, code: int) -> None:
    """The router is lost by a signal; `code` is the exit code of its process."""
    it.restart("router-1", drain_seconds=0.1)
    it.order(**{STEP_SECONDS: 0.01})
    with asking(it, how.name, CLIENTS) as done:
        until(lambda: working(it, "router-1"), "requests run on both")
        it.signal("router-1", how)
        if how == signal.SIGSTOP:
            it.frozen.add("router-1")
    resumes = sum(completion.timeline.resumes for completion in done)
    silence = it.history.longest_silence()
    print(f"{how.name}: {resumes} of {CLIENTS} requests went on elsewhere, after {silence:.1f} s at most")
    assert resumes > 0
    assert silence < 2 * PING_OTHERS_SECONDS + BUSY_SECONDS
    assert not any(completion.timeline.retries for completion in done)
    it.settle(10)
    if how == signal.SIGSTOP:
        until(lambda: it.cluster.member("router-1").member.state == MEMBER_STATE_DEAD, "declared dead")
    # One that wakes up finds that it was declared dead, and none of its requests.
    it.signal("router-1", signal.SIGCONT)
    assert it.cluster.processes["router-1"].popen.wait(START_SECONDS) == code
    it.replace("router-1")
    it.settle(5)


# Routers on one machine share a port: the kernel gives each of them some of the connections, and all after a loss.


def ask_alone(it: Scene, address: str, name: str) -> None:
    """A request on a connection of its own."""
    prompt = prompt_of(name)
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    request = GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling)
    own = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(address, options=own) as channel:
        answers = list(InferenceServiceStub(channel).Generate(request, timeout=60, wait_for_ready=True))
    assert [token for answer in answers for token in answer.token_ids] == oracle(prompt, 5)


@pytest.mark.more
def test_routers_share_a_port(it: Scene) -> None:
    def served(router: str) -> int:
        return sum(line["message"] == "request ended" for line in it.log(router))

    with it.cluster.more("router", 2, share_port=True, grpc_port=free_port()) as (first, second):
        address = it.cluster.addresses[first]
        for number in range(CONNECTIONS):
            ask_alone(it, address, f"together {number}")
        counts = served(first), served(second)
        assert sum(counts) == CONNECTIONS
        assert min(counts) > 0
        it.signal(first, signal.SIGKILL)
        it.cluster.processes[first].popen.wait(10)
        for number in range(CONNECTIONS):
            ask_alone(it, address, f"alone {number}")
        assert served(second) == counts[1] + CONNECTIONS


def test_no_request_waits_while_workers_have_room(it: Scene) -> None:
    """A request that would have to wait is refused by a router at which none may. More than AHEAD_PROMPTS at a prefill
    worker would wait."""
    with it.cluster.more("router", max_queue=0) as (name,), Client(it.cluster.addresses[name]) as client:

        def ask(number: int) -> None:
            prompt = prompt_of(f"at once {number}", 90)
            done = client.complete(prompt, max_tokens=4, temperature=0, ignore_eos=True, timeout=60)
            assert list(done.token_ids) == oracle(prompt, 4)

        with ThreadPoolExecutor(AHEAD_PROMPTS) as pool:
            list(pool.map(ask, range(AHEAD_PROMPTS)))
