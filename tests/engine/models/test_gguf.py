"""Models of GGUF files: they compute what transformers computes from the same file, and keep their bits."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.reading import hashes, packed_cache
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.gguf import KEPT, coded, dequantized
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.kernels.codes import CodeType
from kvrelay.kernels.cpu.packed import PackedLinear
from kvrelay.machine.gguf import QUANTIZED, TYPES
from kvrelay.models import resolve
from kvrelay.models.gguf import folder
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf
from support.paged import logits_of

TOKENS = [3, 5, 9, 100, 77, 54, 32, 88, 120, 311, 4, 8, 9, 22, 0, 7]
SIZES: dict[str, Any] = {"intermediate_size": 128}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "qwen2": {"use_sliding_window": False},
    # transformers takes no other size of heads from GGUF.
    "qwen3": {"head_dim": 128},
}
OPTIONS = EngineConfig(kv_memory_bytes=2**22, packed_cache_bytes=2**26)
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}
"""Places in a block of its float16, where there is another one than the first two bytes."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (folder, hashes, packed_cache):
        monkeypatch.setattr(module, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(path / name, name, **SIZES, **own) for name, own in OWN.items()}


def mixed(name: str) -> str:
    """A type of each kind, and other ones for layers that are multiplied together."""
    if name == "token_embd.weight":
        return "Q8_0"
    types = {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q4_1", "ffn_up": "F16", "ffn_gate": "Q4_0"}
    return next((kind for part, kind in types.items() if f".{part}." in name), "Q4_1")


def transformers_logits(file: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize("architecture", OWN)
@pytest.mark.parametrize("kind", ["F32", "mixed"])
@pytest.mark.some(3)
def test_logits_are_those_of_transformers(
    checkpoints: dict[str, Path], tmp_path: Path, architecture: str, kind: str
) -> None:
    """And weights that keep their bits are as far from them as rounding inputs to 8 bits takes them."""
    dtype_of = mixed if kind == "mixed" else lambda name: kind
    file = write_gguf(checkpoints[architecture], tmp_path / "tiny.gguf", dtype_of)
    made, expected = resolve(str(file)), transformers_logits(file)
    dense = logits_of(made, TOKENS, quantization="dense" if kind == "mixed" else "none")
    torch.testing.assert_close(dense, expected, atol=1e-3, rtol=1e-4)
    if kind == "mixed":
        kept = logits_of(made, TOKENS)
        assert 1e-5 < (kept - expected).norm() / expected.norm() < 0.15


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """Random bytes [rows, bytes] of a type, whose scales are finite."""
    size = TYPES[kind].size
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        raw[..., at + 1] &= 0x3B
    return torch.from_numpy(raw.reshape(rows, -1))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_each_type_has_the_values_that_the_package_gguf_gives_it(kind: str) -> None:
    raw = random_blocks(kind, 16, 2)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.numpy(), GGMLQuantizationType[kind])
        found = dequantized(kind, raw)
    assert np.array_equal(found.numpy(), expected, equal_nan=True)
    weight = coded(kind, raw)
    assert (weight is not None) == (kind in KEPT)
    if weight is not None:
        assert weight.type is (CodeType.INT4 if kind in ("Q4_0", "Q4_1", "Q4_K") else CodeType.INT8)


def test_types_are_numbered_and_sized_as_in_the_package_gguf() -> None:
    for name, kind in TYPES.items():
        number = GGMLQuantizationType[name]
        assert (number, *gguf.GGML_QUANT_SIZES[number]) == kind


def test_splits_are_one_model(checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for part in ("one", "several"):
        (tmp_path / part).mkdir()
    whole = write_gguf(checkpoints["llama"], tmp_path / "one" / "tiny.gguf", mixed)
    first = write_gguf(checkpoints["llama"], tmp_path / "several" / "tiny.gguf", mixed, splits=3)
    assert first.name == "tiny-00001-of-00003.gguf"
    expected = logits_of(resolve(str(whole)), TOKENS)
    for model in (first, first.with_name("tiny-00002-of-00003.gguf"), first.parent):
        made = resolve(str(model))
        assert made.name == "tiny"
        assert torch.equal(logits_of(made, TOKENS), expected)
    assert Checkpoint(resolve(str(whole))).fingerprint() == Checkpoint(resolve(str(first))).fingerprint()
    with caplog.at_level(logging.INFO):
        spec = build_cpu_runner(resolve(str(first)), "auto", OPTIONS).spec
    assert "GGUF: weights kept as they are stored: " in caplog.text
    assert "held as bfloat16: " in caplog.text
    assert spec.weights == "gguf Q4_1"


def test_the_fingerprint_covers_every_byte(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(checkpoints["llama"], tmp_path / "tiny.gguf", mixed)
    before = Checkpoint(resolve(str(file))).fingerprint()
    copy = tmp_path / "elsewhere" / "copy.gguf"
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    assert Checkpoint(resolve(str(copy))).fingerprint() == before
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    copy.write_bytes(data)
    assert Checkpoint(resolve(str(copy))).fingerprint() != before


def test_a_restart_takes_packed_weights_from_the_cache(
    checkpoints: dict[str, Path], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolve(str(write_gguf(checkpoints["llama"], tmp_path / "tiny.gguf", mixed)))
    first = build_cpu_runner(made, "float32", OPTIONS)
    assert list((cache / "packed").glob(f"*{packed_cache.SUFFIX}"))

    def never(*_: object) -> None:
        raise AssertionError("a weight was packed again")

    monkeypatch.setattr(PackedLinear, "pack", never)
    again = build_cpu_runner(made, "float32", OPTIONS)

    def parts(runner: Any) -> list[torch.Tensor]:
        return [part for linear in runner.model.linears() for part in linear.parts().values()]

    assert len(parts(first)) == len(parts(again))
    assert all(map(torch.equal, parts(first), parts(again)))
    assert any("minima" in linear.parts() for linear in again.model.linears())


def test_linear_rope_and_llama_3s_factors_are_read(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def llama3(writer: GGUFWriter) -> None:
        theta, size = 20000.0, 16
        waves = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
        blend = np.clip((64 / waves - 1) / 3, 0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / ((1 - blend) / 8 + blend)).astype(np.float32))
        writer.add_rope_scaling_orig_ctx_len(64)

    def linear(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    config = json.loads((checkpoints["llama"] / "config.json").read_text())
    for edit, scaling in (
        (linear, {"rope_type": "linear", "factor": 4.0}),
        (
            llama3,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ):
        file = write_gguf(checkpoints["llama"], tmp_path / f"{edit.__name__}.gguf", edit=edit)
        other = tmp_path / edit.__name__
        other.mkdir()
        for part in checkpoints["llama"].iterdir():
            (other / part.name).symlink_to(part)
        (other / "config.json").unlink()
        changed = config | {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 20000.0}
        (other / "config.json").write_text(json.dumps(changed))
        torch.testing.assert_close(logits_of(resolve(str(file)), TOKENS), logits_of(other, TOKENS))


@pytest.mark.parametrize("place", ["a scale", "a norm", "a float"])
def test_numbers_that_are_not_finite_are_refused(checkpoints: dict[str, Path], tmp_path: Path, place: str) -> None:
    name = {"a scale": "blk.1.ffn_down.weight", "a norm": "output_norm.weight", "a float": "blk.0.ffn_up.weight"}[place]
    file = write_gguf(checkpoints["llama"], tmp_path / "tiny.gguf", mixed)
    tensor = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name)
    data = bytearray(file.read_bytes())
    at = tensor.data_offset
    bad = np.array([np.nan], np.float32 if place == "a norm" else np.float16).tobytes()
    data[at : at + len(bad)] = bad
    file.write_bytes(data)
    theirs = {"a scale": "layers.1.mlp.down_proj", "a norm": "model.norm", "a float": "layers.0.mlp.up_proj"}[place]
    with pytest.raises(ValueError, match=f"tiny.gguf: tensor .*{theirs}.* (infinite|NaN)"):
        build_cpu_runner(resolve(str(file)), "float32", dataclasses.replace(OPTIONS, packed_cache_bytes=0))
