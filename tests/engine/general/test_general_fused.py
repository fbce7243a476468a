"""Modules of products with operations between them compute natively what transformers' own code does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrelay.engine.models.general.fused import NativeMlp, fuse
from kvrelay.engine.models.general.linears import swap, watching
from kvrelay.engine.models.general.narrow import Narrowing, mix, narrowed
from kvrelay.engine.models.general.norms import swap_norms
from kvrelay.engine.models.general.step import UnfitError
from kvrelay.kernels.cpu.packed import Epilogue, PackedMlp, packer
from kvrelay.kernels.cpu.program import Team
from support.general import Driver, logits
from support.general_table import build
from support.tiny_models import LAYERS, save, tiny_model

MLPS: dict[str, tuple[Epilogue | None, dict[str, Any]]] = {
    "llama": (Epilogue.SILU_MUL, {}),
    "gemma3_text": (Epilogue.GELU_MUL, {}),
    "deepseek_v2": (Epilogue.SILU_MUL, {"first_k_dense_replace": LAYERS}),
    "qwen2": (Epilogue.SILU_MUL, {}),
    "phi3": (Epilogue.SILU_MUL, {}),
    "starcoder2": (Epilogue.GELU, {}),
    "granitemoehybrid": (Epilogue.SILU_MUL, {}),
    "lfm2": (Epilogue.SILU_MUL, {}),
    "falcon_h1": (None, {}),  # factors of its products' results
    "gpt_neox": (None, {}),  # GELU as it is, which the kernels don't compute
}
"""The gate of a model type's MLPs, and fields of its config; None where their own code computes them."""


@pytest.mark.parametrize("model_type", MLPS)
def test_logits_are_those_of_transformers(model_type: str, team: Team) -> None:
    gate, fields = MLPS[model_type]
    model = tiny_model(model_type, **fields)
    with watching(model) as uses:
        expected = logits(model)
    pack = packer(team)
    swap_norms(model, team)
    swap(model, uses, pack, pack, ())
    fused = fuse(model, team)
    mlps = [each for module in model.modules() if isinstance(each := module.__dict__.get("forward"), NativeMlp)]
    assert {mlp.native.gate for mlp in mlps} == ({gate} if gate is not None else set())
    assert len(mlps) == (LAYERS if gate is not None else 0)
    # A layer with a convolution, which is native too, is native as a whole.
    convs = model.config.layer_types.count("conv") if model_type == "lfm2" else 0
    assert fused == len(mlps) + 2 * convs
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_behind_the_last_attention_only_wanted_tokens_are_computed(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer with attention is the last one. What the steps yield, `test_every_architecture.py` compares."""
    runner = build(save("lfm2", tmp_path))
    seen: list[int] = []
    run = PackedMlp.__call__
    monkeypatch.setattr(PackedMlp, "__call__", lambda mlp, x: (seen.append(x.shape[1]), run(mlp, x))[1])
    runner.warm_up()
    driver = Driver(runner, [list(range(3, 40)), list(range(5, 18))], 1)
    found = []
    for _ in range(4):
        seen.clear()
        driver.step(16)
        found.append(list(seen))
    assert found == [[29, 1], [17, 1], [6, 2], [2, 2]]


@pytest.mark.parametrize("wanted", [[], [5], [0, 2, 5], None])
def test_only_rows_that_are_read_are_computed_behind_the_last_attention(wanted: list[int] | None) -> None:
    narrowing, x, computed = Narrowing(), torch.rand(1, 6, 4), []

    def double(part: Tensor) -> Tensor:
        computed.append(part.shape[1])
        return 2 * part

    def step(attentions: int) -> list[Tensor]:
        rows = None if wanted is None else torch.tensor(wanted, dtype=torch.long)
        found = []
        with narrowing.running(x.shape[1], rows):
            for _ in range(attentions):
                mix()
                found.append(narrowed(double, x))
        return found

    assert all(each.equal(2 * x) for each in step(2)), "the first step shows how many attentions there are"
    computed.clear()
    first, last = step(2)
    assert first.equal(2 * x)
    rows = list(range(6)) if wanted is None else wanted
    assert last[:, rows].equal(2 * x[:, rows])
    assert computed == [6, max(1, len(rows))]
    if wanted is not None:
        with pytest.raises(UnfitError, match="more than 2 times"):
            step(3)
