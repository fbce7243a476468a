"""gpt-oss checkpoints in MXFP4: read in their 4 bits, with the logits of transformers' dequantized weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvrelay.engine.config import Quantization
from kvrelay.engine.models.general.experts import ATTRIBUTE, experts_of
from kvrelay.engine.models.general.mxfp4 import GROUP, StoredExperts
from kvrelay.engine.runner.general import GeneralRunner, build_general_runner
from kvrelay.kernels.codes import NUMBERS, CodeType
from support.general import Driver, greedy
from support.general_table import OPTIONS
from support.stored_layouts import write_in_mxfp4
from support.tiny_models import save

PROMPTS = [[5, 9, 7, 11, 200], list(range(3, 26))]
COMPLETION = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny checkpoint with experts in MXFP4, and one with the same numbers in float32."""
    plain = save("gpt_oss", tmp_path_factory.mktemp("plain"))
    coded = tmp_path_factory.mktemp("mxfp4")
    write_in_mxfp4(plain, coded, plain)
    return coded, plain


def build(folder: Path, quantization: Quantization = "none") -> GeneralRunner:
    torch.manual_seed(0)
    return build_general_runner(folder, "float32", replace(OPTIONS, quantization=quantization))


@pytest.mark.parametrize("quantization", ["none", "dense"])
@pytest.mark.some(1)
def test_tokens_are_those_of_the_dequantized_weights(folders: tuple[Path, Path], quantization: Quantization) -> None:
    """Exactly with `dense`; in 4 bits, products round their inputs to 8."""
    coded, plain = folders
    runner = build(coded, quantization)
    assert runner.spec.weights == ("float32" if quantization == "dense" else "mxfp4")
    driver = Driver(runner, PROMPTS, COMPLETION)
    driver.serve(16)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    if quantization == "dense":
        driver.check(model)
    for served, prompt in zip(driver.sequences, PROMPTS, strict=True):
        _, (expected,) = greedy(model, prompt, 1)
        scores = served.logprobs[0]
        assert scores.top_logprobs == pytest.approx(expected[list(scores.top_ids)].tolist(), abs=0.3)


def test_weights_stay_in_four_bits(folders: tuple[Path, Path]) -> None:
    """Codes take half a byte for each number, and scales four bytes for each group."""
    runner = build(folders[0])
    model = runner.way.model
    layers = [module.__dict__[ATTRIBUTE].layer for module in experts_of(model)]
    assert layers
    for layer in layers:
        for linear in (layer.up, layer.down):
            numbers = linear.outputs * linear.inputs
            assert linear.packed.nbytes <= numbers // 2 * max(1.0, 64 / linear.inputs)
            assert linear.scales.nbytes == numbers // GROUP * 4


def test_all_codes(folders: tuple[Path, Path]) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    scales = torch.arange(120, 136, dtype=torch.uint8).view(1, 16, 1)
    weight = StoredExperts(1, lambda name: (blocks, scales)).weight("down_proj").dequantize()
    numbers = NUMBERS[CodeType.FP4]()
    for output in range(16):
        codes = torch.stack((blocks[0, output, 0] & 15, blocks[0, output, 0] >> 4), -1).flatten().long()
        assert torch.equal(weight[output], numbers[codes] * 2.0 ** (120 + output - 127))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "gate_up_proj_scales is missing"),
        ("shape", r"gate_up_proj_scales is U8 \[4, 64, 1\]; allowed: U8 \[4, 256, 2\]"),
        ("dtype", r"gate_up_proj_scales is I8 \[4, 256, 2\]; allowed: U8 \[4, 256, 2\]"),
    ],
)
def test_damaged_checkpoints_are_refused(folders: tuple[Path, Path], damage: str, message: str, tmp_path: Path) -> None:
    weights = load_file(folders[0] / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    whole = weights.pop(name)
    if damage == "shape":
        weights[name] = whole[:, :64, :1].contiguous()
    if damage == "dtype":
        weights[name] = whole.view(torch.int8)
    (tmp_path / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        build(tmp_path)


def test_they_are_not_quantized_again(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="quantization is 'int8'; allowed: none, dense; the checkpoint is in mxfp4"):
        build(folders[0], "int8")
