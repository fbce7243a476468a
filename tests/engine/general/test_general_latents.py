"""Layers that keep latents attend as transformers' own code does: absorbed, expanded, and with latents in 8 bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.engine.models.general import flat as flat_module
from kvrelay.engine.models.general.flat import FlatWay
from kvrelay.engine.models.general.latents.absorbed import Absorbed, PlainLatents
from kvrelay.engine.models.general.latents.layers import Latents
from kvrelay.engine.models.general.latents.native import NativeLatents
from kvrelay.engine.models.general.latents.triton import TritonLatents
from kvrelay.engine.models.general.places import LayerCache, arrange
from kvrelay.engine.models.general.step import Step, UnfitError
from kvrelay.engine.models.general.store import Store, scratch_pools
from kvrelay.engine.runner.general import build_general_runner
from support.general import Driver
from support.general_table import OPTIONS
from support.tiny_models import save, tiny_model

WIDE = {"kv_lora_rank": 64}
"""Latents so wide that rows of more than 21 tokens are expanded."""
PROMPTS = [[5, 9, 7, 11, 200], [3 + (7 * n) % 251 for n in range(90)], list(range(3, 40))]
MOST = 8


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize("model_type", ["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.more)])
@pytest.mark.some(1)
def test_rows_of_any_length_get_the_tokens_of_whole_passes(
    model_type: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded: list[int] = []
    original = Latents._expanded

    def note(self: Latents, *args: object) -> torch.Tensor:
        expanded.append(1)
        return original(self, *args)

    monkeypatch.setattr(Latents, "_expanded", note)
    torch.manual_seed(0)
    runner = build_general_runner(save(model_type, tmp_path, **WIDE), "float32", OPTIONS)
    assert runner.choice.name == "flat"
    expanded.clear()
    driver = Driver(runner, PROMPTS, MOST)
    driver.serve(chunk)
    assert bool(expanded) == (chunk > 21)
    driver.check(tiny_model(model_type, **WIDE))


def test_kernels_and_plain_operations_read_the_same_latents_of_8_bits(tmp_path: Path) -> None:
    folder, options = save("deepseek_v3", tmp_path, **WIDE), replace(OPTIONS, kv_dtype="int8")
    found = []
    for native in (True, False):
        runner = build_general_runner(folder, "float32", options)
        assert isinstance(runner.way, FlatWay)
        assert runner.cache_layout.dtype == "int8"
        if not native:
            runner.way._latents._native = False
        found.append(Driver(runner, PROMPTS, MOST).serve(64))
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-3)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("kernels", ["native", "triton"])
@pytest.mark.some(2)
def test_kernels_attend_as_plain_operations(kernels: str, kv_dtype: str, request: pytest.FixtureRequest) -> None:
    """Some rows have several tokens; Triton's pools are in a GPU's order."""
    torch.manual_seed(0)
    heads, plain, rotated, latent, width = 6, 16, 8, 32, 12
    weight = torch.randn(heads, plain + width, latent)

    def expand(latents: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.einsum("btc,hdc->bhtd", latents[:, 0], weight)
        keys = torch.cat((both[..., :plain], turned.expand(-1, heads, -1, -1)), -1)
        return keys, both[..., plain:]

    weights = Absorbed(expand, latent, rotated, torch.zeros(1))
    layers = (LayerCache((1, latent), (1, rotated)),) * 2
    order = "NHD" if kernels == "native" else "HND"
    placing = arrange(layers, "float32", kv_dtype, 16, order)
    places, found = placing.layers[1], []
    for own in (True, False):
        torch.manual_seed(1)
        store = Store(placing, scratch_pools(placing.layout, 12, 1, "cpu"))
        attending: NativeLatents | TritonLatents | PlainLatents = PlainLatents(store)
        if own and kernels == "triton":
            attending = TritonLatents(store, places, weights)
        elif own:
            attending = NativeLatents(store, places, weights, request.getfixturevalue("team"))
        for starts, lengths in (([0, 0], [40, 7]), ([40, 7], [1, 3])):
            total = sum(lengths)
            tables = np.array([[3, 1, 7, 0], [2, 5, 0, 0]])
            step = Step(np.zeros(total, np.int64), np.array(starts), np.array(lengths), (tables,) * 2)
            given = torch.randn(total, latent), torch.randn(total, rotated)
            attending.plan(step)
            out = attending.run(places, weights, torch.randn(total, heads, plain + rotated), *given, 0.3)
        found.append(out.clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken", ["bias", "scaled", "mixed"])
def test_other_maps_are_refused(broken: str) -> None:
    weight = torch.randn(2, 12, 16)

    def expand(latents: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.einsum("btc,hdc->bhtd", latents[:, 0], weight) + (broken == "bias")
        turned = turned * (2 if broken == "scaled" else 1)
        if broken == "mixed":
            turned = turned + both[:, :1, :, :4]
        return torch.cat((both[..., :8], turned.expand(-1, 2, -1, -1)), -1), both[..., 8:]

    with pytest.raises(UnfitError, match="keys aren't products of latents"):
        Absorbed(expand, 16, 4, torch.zeros(1))


def test_modules_outside_of_the_flat_way_expand_as_before(tmp_path: Path) -> None:
    """The model's own passes, which a check compares with, go on after the way has been set up."""
    model = tiny_model("deepseek_v3")
    tokens = torch.tensor([[5, 9, 7, 11]])
    with torch.inference_mode():
        before = model(tokens).logits
        flat_module.intercept(model, lambda latents: hasattr(latents, flat_module.MARK))
        assert torch.equal(model(tokens).logits, before)
