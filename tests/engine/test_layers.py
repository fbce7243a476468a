"""A step that is watched: what it tells of is in the pool, and it computes what it would have computed anyway."""

import random
from pathlib import Path

import pytest
import torch

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.native import NativeDecoder
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.runner import CpuRunner, build_runner
from support.checkpoints import ARCHITECTURES, VOCAB_SIZE, make_checkpoint
from support.paged import GREEDY, PagedSequences, make_plan

OPTIONS = EngineConfig(kv_memory_bytes=2**20, threads=1)


class Watch:
    """Keeps what the pool holds in each layer when that is told of."""

    def __init__(self, runner: CpuRunner, *borders: int) -> None:
        self.runner = runner
        self.wanted = borders
        self.seen: dict[int, torch.Tensor] = {}

    def borders(self, plan: StepPlan) -> tuple[int, ...]:
        return self.wanted

    def passed(self, plan: StepPlan, layers: int) -> None:
        self.seen[layers] = self.runner.pool.tensor[:, :layers].clone()


@pytest.mark.parametrize("plain", [False, True], ids=["as built", "layer by layer"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_are_told_of_when_their_kv_is_there(
    architecture: str, plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain:
        monkeypatch.setattr("kvrelay.engine.runner.fits", lambda config: False)
    folder = make_checkpoint(tmp_path / architecture, architecture)
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=37)
    answers = []
    for watched in (False, True):
        runner = build_runner(folder, "float32", OPTIONS)
        assert not (plain and isinstance(runner.model, NativeDecoder))
        layers = runner.layout.layers
        watch = Watch(runner, *range(1, layers))
        runner.watch = watch if watched else None
        sequence = PagedSequences(runner).add(prompt, room=2)
        out = runner.run(make_plan([(sequence, sequence.left, GREEDY)], None))
        answers.append(out.tokens)
        assert list(watch.seen) == (list(range(1, layers)) if watched else [])
        for count, seen in watch.seen.items():
            assert torch.equal(seen, runner.pool.tensor[:, :count]), f"of {count} layers"
    assert answers[0] == answers[1]
