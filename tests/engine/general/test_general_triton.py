"""The flat way with Triton's attention, interpreted on a CPU, has the logits of torch's over the same pages."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.engine.models.general import flat
from kvrelay.engine.models.general.flat import FlatWay
from kvrelay.engine.models.general.observe import observe
from kvrelay.engine.models.general.places import arrange
from kvrelay.engine.models.general.step import Step
from kvrelay.engine.models.general.store import Store, scratch_pools
from kvrelay.engine.models.general.triton import TritonTrack
from kvrelay.engine.runner.general import build_general_runner
from support.general_table import OPTIONS
from support.tiny_models import save, tiny_model

STEPS = [([0, 0], [40, 3]), ([40, 3], [1, 5]), ([41, 8], [1, 1]), ([42, 9], [6, 1])]
"""Tokens of two sequences before each step, and in it."""


@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("int8", marks=pytest.mark.more)])
@pytest.mark.parametrize(
    "model_type",
    ["gpt_oss", pytest.param("gemma2", marks=pytest.mark.more), pytest.param("qwen2", marks=pytest.mark.more)],
)
def test_kernels_attend_as_torch(model_type: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has sinks, Gemma 2 soft caps, and both have windows on every other layer, shorter than the longer row."""
    monkeypatch.setattr(flat, "kernels_of", lambda store, team, track, calls: TritonTrack(store, track, calls))
    torch.manual_seed(0)
    # Small weights have small scores, which a large soft cap or sink doesn't change.
    model = tiny_model(model_type, **({"attn_logit_softcapping": 0.02} if model_type == "gemma2" else {}))
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.data = torch.linspace(-2.0, 3.0, len(weight))
    placing = arrange(observe(model), "float32", kv_dtype, 16, "HND")  # type: ignore[arg-type]
    tables = np.array([[3, 1, 7, 0], [2, 5, 0, 0]])
    found: dict[bool, list[torch.Tensor]] = {}
    for kernels in (False, True):
        way = FlatWay(model, Store(placing, scratch_pools(placing.layout, 12, 1, "cpu")))
        logits = found[kernels] = []
        for number, (starts, lengths) in enumerate(STEPS):
            tokens = np.arange(sum(lengths)) * 7 % 250 + 3
            step = Step(tokens, np.array(starts), np.array(lengths), (tables,) * len(placing.layout.groups))
            with torch.inference_mode():
                logits.append(way.run(step, np.arange(len(tokens))))
                if kernels and not number:
                    assert way.use_kernels()
                    logits[0] = way.run(step, np.arange(len(tokens)))
    for expected, given in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)


def test_torch_attends_where_the_kernels_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(flat, "kernels_of", fail)
    runner = build_general_runner(save("llama", tmp_path), "float32", OPTIONS)
    assert runner.choice.name == "flat"
    assert "attention" not in runner.native
    assert "so torch attends: RuntimeError: no such device" in caplog.text
