"""Checkpoints on disk: what loads, what is refused with which words, and what tells two of them apart."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrelay.engine.attention.torch import TorchAttention
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.fast.decoder import Decoder
from kvrelay.engine.models.fast.loader import load_weights
from kvrelay.engine.models.reading import checkpoint, hashes
from kvrelay.engine.models.reading.checkpoint import Checkpoint, expected_tensors
from kvrelay.engine.models.reading.config import read_config
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from kvrelay.kernels import reference
from kvrelay.kernels.cpu import ops
from kvrelay.kernels.cpu.library import library
from support.checkpoints import make_checkpoint
from support.paged import PagedSequences

OPTIONS = EngineConfig(kv_memory_bytes=2**20, threads=1)
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original"), "llama")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(runner: CpuRunner) -> Tensor:
    sequences = PagedSequences(runner)
    sequence = sequences.add(range(20))
    sequences.compute((sequence, 20))
    return sequence.logits[0]


def test_expected_tensors_are_what_transformers_writes(tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    variants = [
        ("llama", biases),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {}),
    ]
    for index, (architecture, overrides) in enumerate(variants):
        folder = make_checkpoint(tmp_path / str(index), architecture, **overrides)
        found = {name: entry.shape for name, entry in Checkpoint(folder).tensors.items()}
        assert expected_tensors(read_config(folder)) == found


def test_shards_load_as_one_file_does(original: Path, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    expected = logits(build_cpu_runner(original, "float32", OPTIONS))
    assert torch.equal(logits(build_cpu_runner(sharded, "float32", OPTIONS)), expected)


def test_every_weight_type_loads_into_every_run_type(tmp_path: Path) -> None:
    expected = None
    for stored in ("float16", "bfloat16", "float32"):
        checkpoint = make_checkpoint(tmp_path / stored, "llama", dtype=stored)
        for run in ("float32", "bfloat16", "float16"):
            runner = build_cpu_runner(checkpoint, run, OPTIONS)
            assert runner.pool.tensor.dtype == getattr(torch, run)
            found = logits(runner)
            expected = found if expected is None else expected
            assert (found - expected).std() < 0.05 * expected.std()


def test_auto_takes_the_checkpoints_type_but_not_float16(tmp_path: Path) -> None:
    for stored, run in (("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        checkpoint = make_checkpoint(tmp_path / stored, "llama", dtype=stored)
        assert build_cpu_runner(checkpoint, "auto", OPTIONS).spec.dtype == run


def test_progress_grows_to_one(original: Path) -> None:
    shares: list[float] = []
    build_cpu_runner(original, "float32", OPTIONS, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 10


def test_the_models_operations_on_cpu_are_the_reference_ones(original: Path) -> None:
    """The same model in plain torch yields the same logits."""
    config, checkpoint = read_config(original), Checkpoint(original)
    runner = build_cpu_runner(original, "float32", OPTIONS)
    fast = logits(runner)
    runner.attention = TorchAttention(runner.pool, config.traits.windows)
    for backend in (reference, ops):
        runner.model = Decoder(config, load_weights(checkpoint, config, torch.float32, backend.linear), backend)
        torch.testing.assert_close(fast, logits(runner), atol=1e-4, rtol=0)


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    spoil(folder, lambda tensors: tensors.pop(GATE))
    with pytest.raises(ValueError, match=rf"tensor {GATE} \[112, 64\] is missing"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_a_misshaped_tensor_is_named_with_both_shapes(folder: Path) -> None:
    spoil(folder, lambda tensors: tensors.update({GATE: torch.zeros(112, 63)}))
    with pytest.raises(ValueError, match=rf"tensor {GATE} has shape \[112, 63\]; expected: \[112, 64\]"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_a_tensor_of_integers_is_named(folder: Path) -> None:
    spoil(folder, lambda tensors: tensors.update({GATE: torch.zeros(112, 64, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=rf"tensor {GATE} has dtype I8; allowed: F32, F16, BF16"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_tensors_of_another_architecture_are_named(folder: Path) -> None:
    spoil(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(ValueError, match=r"doesn't have: model\.layers\.0\.self_attn\.q_norm\.weight"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_leftovers_of_old_exporters_do_no_harm(folder: Path) -> None:
    expected = logits(build_cpu_runner(folder, "float32", OPTIONS))
    spoil(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(build_cpu_runner(folder, "float32", OPTIONS)), expected)


def test_a_tied_model_may_carry_its_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    expected = logits(build_cpu_runner(folder, "float32", OPTIONS))
    spoil(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(build_cpu_runner(folder, "float32", OPTIONS)), expected)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_a_pickled_checkpoint_is_refused_unread(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ValueError, match=f"{name}: a pickled checkpoint"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        build_cpu_runner(folder, "float32", OPTIONS)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
        struct.pack("<Q", 9) + b'{"a": {}}',
    ],
)
def test_a_file_that_is_no_safetensors_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a safetensors file"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_a_file_cut_short_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a safetensors file, or cut short"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_tensors_that_overlap_in_the_file_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[GATE] |= {"data_offsets": header[GATE.replace("gate", "up")]["data_offsets"]}
    path.write_bytes(data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a safetensors file"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}: no such file"):
        build_cpu_runner(folder, "float32", OPTIONS)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "weight_map is {}"),
        (["model.safetensors"], "weight_map is"),
        ({GATE: "../model.safetensors"}, "allowed: files in the same folder"),
        ({"model.layers.9.x": "model.safetensors"}, r"tensor model\.layers\.9\.x is missing"),
    ],
)
def test_an_index_that_does_not_match_its_files_is_refused(folder: Path, weight_map: object, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=message):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    tensors = load_file(second)
    save_file(tensors | {name: load_file(first)[name]}, second)
    with pytest.raises(ValueError, match=f"tensor {name} is in {first.name} too"):
        Checkpoint(folder)


def test_the_fingerprint_is_the_files_not_the_folders(original: Path, folder: Path) -> None:
    assert Checkpoint(folder).fingerprint() == Checkpoint(original).fingerprint()


def test_the_fingerprint_tells_types_and_configs_apart(original: Path, folder: Path, tmp_path: Path) -> None:
    prints = {Checkpoint(original).fingerprint()}
    prints.add(Checkpoint(make_checkpoint(tmp_path / "dtype", "llama", dtype="bfloat16")).fingerprint())
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    prints.add(Checkpoint(folder).fingerprint())
    assert len(prints) == 3


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which hashes are kept, which begins empty; files that were just written count as old."""
    monkeypatch.setattr(hashes, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(hashes, "FRESH_SECONDS", 0.0)
    return tmp_path / "cache" / "hashes"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_of_any_tensor_changes_the_fingerprint(folder: Path, kept: Path, data: st.DataObject) -> None:
    """The hashes may have been kept or not, and the weights be loaded or only hashed."""
    before = Checkpoint(folder).fingerprint()
    entries = Checkpoint(folder).tensors
    entry = entries[data.draw(st.sampled_from(sorted(entries)))]
    changed = bytearray(entry.path.read_bytes())
    changed[data.draw(st.integers(entry.begin, entry.end - 1))] ^= 1
    with entry.path.open("r+b") as file:  # in place: the same inode and size
        file.write(changed)
    loaded = build_cpu_runner(folder, "float32", OPTIONS).spec.fingerprint
    assert loaded != before
    assert loaded == Checkpoint(folder).fingerprint()
    shutil.rmtree(kept)
    assert loaded == Checkpoint(folder).fingerprint()


def test_a_second_start_reads_only_what_changed(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_cpu_runner(folder, "float32", OPTIONS).spec.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "hash_range", lambda *_: pytest.fail("read again"))
        patch.setattr(checkpoint, "hash_bytes", lambda *_: pytest.fail("hashed again"))
        assert build_cpu_runner(folder, "float32", OPTIONS).spec.fingerprint == first
        assert Checkpoint(folder).fingerprint() == first
    (record,) = kept.iterdir()
    for damage in (b"", b"[]", b"{", record.read_bytes()[:-2], b'{"state": [], "hashes": {}}'):
        record.write_bytes(damage)
        assert Checkpoint(folder).fingerprint() == first
    shutil.rmtree(kept)
    kept.parent.rmdir()
    kept.parent.write_text("no folder")
    assert Checkpoint(folder).fingerprint() == first


PEAK = """
import sys
from pathlib import Path
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.kernels.cpu.library import library

def resident(field):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024

library()
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
runner = build_cpu_runner(Path(sys.argv[1]), "auto", EngineConfig(kv_memory_bytes=2**20, threads=1))
print(resident("VmHWM") - before, resident("VmRSS") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no native kernels here")
@pytest.mark.parametrize("architecture", ["llama", "qwen2"], ids=["untied", "tied"])
def test_loading_peaks_a_little_above_the_checkpoint_and_keeps_its_size(architecture: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 32768}
    folder = make_checkpoint(tmp_path, architecture, dtype="bfloat16", **shape)
    size = (folder / "model.safetensors").stat().st_size
    result = subprocess.run(
        [sys.executable, "-c", PEAK, folder], capture_output=True, text=True, check=True, timeout=120
    )
    peak, kept = (int(number) / size for number in result.stdout.split())
    assert peak < 1.3
    assert kept < 1.2
