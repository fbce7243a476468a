"""Models that transformers' code runs, and models of the fast path with windows, through a router and a pair of workers
whose blocks have other sizes.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvrelay.client.aio import AsyncClient
from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.config import EngineConfig
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer
from support.general import greedy
from support.router_fakes import FakeSupervisor, until
from support.tiny_models import classes, save, tiny_model
from support.tokenizers import byte_level_tokenizer

PROMPTS = [[5, 9, 7, 11, 200], list(range(3, 26)), [3 + (7 * n) % 251 for n in range(41)]]
COMPLETION = 12
COVERING = (
    "BambaForCausalLM",
    "Cohere2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "MistralForCausalLM",
)
MORE = (
    "DeepseekV32ForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma3nForCausalLM",
    "GptOssForCausalLM",
    "Lfm2ForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "Qwen3NextForCausalLM",
    "RwkvForCausalLM",
)
"""Classes that have all kinds of groups and ways between them."""


async def tokens_through_a_pair(folder: Path) -> list[list[int]]:
    """The prompts' greedy tokens, all asked for at once, twice: the second time with prefixes that are known."""
    async with AsyncExitStack() as stack:
        supervisor = FakeSupervisor()
        await supervisor.start()
        stack.push_async_callback(supervisor.stop)
        address = f"127.0.0.1:{supervisor.port}"
        router = RouterServer(RouterConfig(model=str(folder), grpc_port=0, http_port=0, supervisor=address))
        servers = [router]
        for name, role, size in (("prefill-0", PrefillRole, 16), ("decode-0", DecodeRole, 8)):
            kind = name.partition("-")[0]
            engine = EngineConfig(
                kv_memory_bytes=24 * 2**20,
                threads=1,
                block_size=size,
                max_batch_tokens=16,
                max_sequences=4,
                device="cpu",
                model_path="auto",
            )
            config = WorkerConfig(name, kind, str(folder), supervisor=address, engine=engine, dtype="float32")  # type: ignore[arg-type]
            servers.append(WorkerServer(config, {kind: role}))  # type: ignore[dict-item]
        for server in servers[1:] + servers[:1]:
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
        heard = supervisor.heard.values
        await until(lambda: sum(member.state == MEMBER_STATE_READY for member in heard()) == 2, "both are ready")
        supervisor.announce(*heard())
        await until(lambda: sum(view.ready for view in router.registry.view()) == 2, "the router reaches both")
        async with AsyncClient(router.address) as client:
            found = []
            for _ in range(2):
                asked = [
                    client.complete(prompt, temperature=0.0, max_tokens=COMPLETION, ignore_eos=True)
                    for prompt in PROMPTS
                ]
                found += [list(answer.token_ids) for answer in await asyncio.gather(*asked)]
            return found


@pytest.mark.parametrize("name", [*COVERING, *[pytest.param(name, marks=pytest.mark.more) for name in MORE]])
def test_a_pair_yields_the_tokens_of_whole_passes(name: str, tmp_path: Path) -> None:
    model_type = classes()[name]
    folder = save(model_type, tmp_path)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    found = asyncio.run(tokens_through_a_pair(folder))
    model = tiny_model(model_type)
    expected = [greedy(model, prompt, COMPLETION)[0] for prompt in PROMPTS]
    assert found == 2 * expected
