"""Routers on one machine share a port: the kernel gives each of them some of the connections, and all after a loss."""

import signal
from pathlib import Path

import grpc

from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.faults import Scene, oracle, prompt_of, scene
from support.processes import free_port

CONNECTIONS = 16
"""Connections, of which all reach one router once in 32,768 times."""
OUT = 5


def ask(it: Scene, name: str) -> None:
    """A request on a connection of its own."""
    prompt = prompt_of(name)
    sampling = SamplingParams(max_tokens=OUT, temperature=0, ignore_eos=True)
    request = GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling)
    own = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(it.cluster.router.split(",")[0], options=own) as channel:
        answers = list(InferenceServiceStub(channel).Generate(request, timeout=60, wait_for_ready=True))
    assert [token for answer in answers for token in answer.token_ids] == oracle(prompt, OUT)


def served(it: Scene, router: str) -> int:
    return sum(line["message"] == "request ended" for line in it.log(router))


def test_routers_share_a_port(tmp_path: Path) -> None:
    router = {"share_port": True, "grpc_port": free_port(), "http_port": None}
    with scene(tmp_path, prefill=1, decode=1, routers=2, losses=True, router=router) as it:
        for number in range(CONNECTIONS):
            ask(it, f"together {number}")
        counts = [served(it, name) for name in it.routers]
        assert sum(counts) == CONNECTIONS
        assert min(counts) > 0
        it.signal("router-0", signal.SIGKILL)
        it.cluster.processes["router-0"].popen.wait(10)
        for number in range(CONNECTIONS):
            ask(it, f"alone {number}")
        assert served(it, "router-1") == counts[1] + CONNECTIONS
        it.cluster.wait_idle(10)
