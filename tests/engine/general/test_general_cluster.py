"""Models that transformers' code runs, and models of the fast path with windows, through a router, and workers of both
roles with blocks of different sizes.

All are in one event loop. The same with processes: `tests/e2e/test_general_processes.py`.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client.aio import AsyncClient
from kvrelay.client.messages import Completion
from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig, ModelPath
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.runner.base import Runner, StepHandle
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer
from support.general import greedy
from support.general_table import lines
from support.router_fakes import FakeSupervisor, until
from support.tiny_models import classes, save, tiny_config, tiny_model
from support.tokenizers import byte_level_tokenizer

PROMPTS = [[5, 9, 7, 11, 200], list(range(3, 26)), [3 + (7 * n) % 251 for n in range(41)]]
COMPLETION = 12
FATAL = 5
"""The step in which a decode worker is killed; each sequence in it has `COMPLETION` - `FATAL` tokens or more to go."""
HELD_SECONDS = 60.0
COVERING = (
    "BambaForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "MambaForCausalLM",
    "RoFormerForCausalLM",
)
ONCE = ("BambaForCausalLM", "DeepseekV3ForCausalLM")
"""Classes in `make test`: states and full attention, latents."""

MORE = (
    "BartForCausalLM",
    "BloomForCausalLM",
    "DeepseekV32ForCausalLM",
    "DiffLlamaForCausalLM",
    "Dots3NoteForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma3nForCausalLM",
    "GptOssForCausalLM",
    "InklingForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm3ForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MistralForCausalLM",
    "OpenAIGPTLMHeadModel",
    "Qwen3NextForCausalLM",
    "RwkvForCausalLM",
    "Zamba2ForCausalLM",
    "ZayaForCausalLM",
)
ROLES = {"prefill": PrefillRole, "decode": DecodeRole}


class Fate:
    """Kills the decode worker that comes to its step `FATAL` first: its engine stands still until it is dead."""

    def __init__(self) -> None:
        self.due: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Name of the worker."""
        self.armed = False
        self.dead = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._steps: Counter[str] = Counter()

    def build(self, name: str, *given: Any) -> tuple[Engine, Runner]:
        """`build_engine`, for the worker of this name."""
        engine, runner = build_engine(*given)
        launch = runner.launch

        def watched(plan: StepPlan) -> StepHandle:
            self._steps[name] += self.armed
            if self.armed and self._steps[name] == FATAL:
                self.armed = False
                self._loop.call_soon_threadsafe(self.due.set_result, name)
                self.dead.wait(HELD_SECONDS)
            return launch(plan)

        runner.launch = watched
        return engine, runner


@dataclass
class Cluster:
    """A router, a prefill worker and decode workers."""

    client: AsyncClient
    servers: dict[str, WorkerServer]
    supervisor: FakeSupervisor

    async def ask(self, prompt: list[int], most: int = COMPLETION) -> Completion:
        return await self.client.complete(prompt, temperature=0.0, max_tokens=most, ignore_eos=True, timeout=60)

    async def kill(self, name: str) -> None:
        """Ends all connections of a worker at once, as the end of its process does."""
        await self.servers[name]._bound._server.stop(None)
        self.supervisor.announce(*[member for member in self.supervisor.members if member.name != name])

    @property
    def layout(self) -> CacheLayout:
        """All that the prefill worker keeps of a sequence."""
        return self.servers["prefill-0"].worker.cache


@asynccontextmanager
async def cluster(
    model: Path, build: Callable[..., tuple[Engine, Runner]] | None = None, decodes: int = 2, **engine: Any
) -> AsyncIterator[Cluster]:
    """
    Args:
        model: folder that gets a tokenizer, or a GGUF file, which has its own.
        build: given a decode worker's name, and what `build_engine` is given.
        engine: further options of the engines.
    """
    if model.suffix != ".gguf":
        byte_level_tokenizer().save(str(model / "tokenizer.json"))
    async with AsyncExitStack() as stack:
        supervisor = FakeSupervisor()
        await supervisor.start()
        stack.push_async_callback(supervisor.stop)
        address = f"127.0.0.1:{supervisor.port}"
        router = RouterServer(RouterConfig(model=str(model), grpc_port=0, http_port=0, supervisor=address))
        servers: dict[str, WorkerServer] = {}
        for name in ("prefill-0", *(f"decode-{number}" for number in range(decodes))):
            kind = name.partition("-")[0]
            options = {
                "kv_memory_bytes": 24 * 2**20,
                "max_batch_tokens": 16,
                "max_sequences": 4,
                "model_path": "general",
                **engine,
            }
            size = 16 if kind == "prefill" else 8
            own = EngineConfig(threads=1, block_size=size, device="cpu", **options)
            config = WorkerConfig(name, kind, str(model), supervisor=address, engine=own, dtype="float32")
            made = build_engine if build is None or kind == "prefill" else partial(build, name)
            servers[name] = WorkerServer(config, {kind: ROLES[kind]}, made)
        for server in servers.values():
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
        await router.start()
        stack.push_async_callback(router.stop, 0.0)
        heard = supervisor.heard.values
        ready = len(servers)
        await until(lambda: sum(member.state == MEMBER_STATE_READY for member in heard()) == ready, "all are ready")
        supervisor.announce(*heard())
        await until(lambda: sum(view.ready for view in router.registry.view()) == ready, "the router reaches all")
        client = await stack.enter_async_context(AsyncClient(router.address))
        yield Cluster(client, servers, supervisor)


async def asked_twice(folder: Path, path: ModelPath) -> list[list[Completion]]:
    """The prompts' completions, all asked for at once, twice: a decode worker is killed under the first ones, and the
    second time prefixes are known."""
    fate = Fate()
    async with cluster(folder, fate.build, model_path=path) as it:
        fate.armed = True
        first = asyncio.gather(*[it.ask(prompt) for prompt in PROMPTS])
        try:
            await it.kill(await asyncio.wait_for(fate.due, HELD_SECONDS))
        finally:
            fate.dead.set()
        return [await first, await asyncio.gather(*[it.ask(prompt) for prompt in PROMPTS])]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *[(name, "general") for name in ONCE],
        *[pytest.param(name, "general", marks=pytest.mark.more) for name in COVERING if name not in ONCE],
        *[pytest.param(name, "general", marks=pytest.mark.slow) for name in MORE],
        ("MistralForCausalLM", "fast"),
        *[
            pytest.param(name, "fast", marks=pytest.mark.more)
            for name in (
                "Cohere2ForCausalLM",
                "Qwen3MoeForCausalLM",
                "MixtralForCausalLM",
                "Glm4MoeForCausalLM",
                "MiniMaxM2ForCausalLM",
            )
        ],
    ],
)
@pytest.mark.some(1)
def test_a_cluster_yields_the_tokens_of_whole_passes_through_a_kill_of_decode(
    name: str, path: ModelPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_type = classes()[name]
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    expected = [greedy(model, prompt, COMPLETION)[0] for prompt in PROMPTS]
    first, second = asyncio.run(asked_twice(tmp_path, path))
    for found in (first, second):
        assert [list(answer.token_ids) for answer in found] == expected
    assert sum(answer.timeline.retries for answer in first) >= 1
    reasons = [vars(record)["reason"] for record in caplog.records if record.message == "attempt failed"]
    assert sum(answer.timeline.retries for answer in second) == 0, reasons
    assert sum(answer.usage.cached_tokens for answer in second) >= 16


def test_they_have_every_way_with_every_kind_of_group_that_it_serves() -> None:
    kinds = {name: tuple(line.split("|")[2:4]) for name, line in lines().items() if " | - | " not in line}
    assert {kinds[name] for name in (*COVERING, *MORE)} == set(kinds.values())
    assert len({*COVERING, *MORE}) == 27


async def handed_over(folder: Path, tokens: int, **engine: Any) -> tuple[int, CacheLayout]:
    """Bytes that were sent over the link for a prompt of so many tokens, and what the prefill worker keeps of it."""
    async with cluster(folder, decodes=1, **engine) as it:
        found = await it.ask([3 + (7 * n) % 251 for n in range(tokens)], 2)
        assert len(found.token_ids) == 2
        return found.timeline.transfer_bytes, it.layout


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("BambaForCausalLM", ["full", "state"]),
        ("DeepseekV3ForCausalLM", ["latent"]),
        ("Gemma2ForCausalLM", ["full", "window"]),
        pytest.param("KimiLinearForCausalLM", ["latent", "state"], marks=pytest.mark.more),
        pytest.param("Mamba2ForCausalLM", ["full", "state"], marks=pytest.mark.more),
    ],
)
def test_what_the_groups_keep_is_sent_and_nothing_else(name: str, kinds: list[str], tmp_path: Path) -> None:
    """The KV of all tokens, or their latents, each once; of a window, its last blocks; one state."""
    tokens = 41
    sent, layout = asyncio.run(handed_over(save(classes()[name], tmp_path), tokens))
    assert [group.kind for group in layout.groups] == kinds
    expected = 0
    for group in layout.groups:
        for track in group.tracks:
            held = tokens - group.first_needed(tokens)
            expected += track.block_bytes if group.kind == "state" else held * track.token_bytes
    assert sent == expected
    config = tiny_config(classes()[name])
    if kinds == ["latent"]:
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        assert sent == tokens * config.num_hidden_layers * latent * 4
