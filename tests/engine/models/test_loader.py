"""Checkpoints on disk: what loads, what is refused with which words, and what tells two of them apart."""

import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.fast.native import NativeDecoder
from kvrelay.engine.models.reading import checkpoint, hashes
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.report import report_on
from kvrelay.engine.runner.cpu import build_cpu_runner
from support.checkpoints import change_tensors, make_checkpoint
from support.paged import logits_by, logits_of

OPTIONS = EngineConfig(kv_memory_bytes=2**20, threads=1)
TOKENS = range(20)
GATE = "model.layers.1.mlp.gate_proj.weight"
Damage = Callable[[Path], object]


@pytest.fixture
def sharded(model_of: Callable[..., Path]) -> Path:
    return model_of("llama", max_shard_size="100KB")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def test_shards_load_as_one_file_does(llama: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    expected = logits_of(llama, TOKENS)
    assert torch.equal(logits_of(sharded, TOKENS), expected)


def test_every_weight_type_loads_into_every_run_type(model_of: Callable[..., Path]) -> None:
    """`auto` is the checkpoint's type, but not float16."""
    expected = None
    for stored, auto in (("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        checkpoint = model_of("llama", dtype=stored)
        for run in ("float32", "bfloat16", "float16", "auto"):
            runner = build_cpu_runner(checkpoint, run, OPTIONS)
            assert runner.spec.dtype == (auto if run == "auto" else run)
            assert runner.pool.tensor.dtype == getattr(torch, runner.spec.dtype)
            found = logits_by(runner, TOKENS)
            expected = found if expected is None else expected
            assert (found - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"intermediate_size": 40}])
def test_a_model_is_reported_as_it_runs(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A width of 40 is none that the native kernels take."""
    folder = make_checkpoint(tmp_path, "llama", **changes)
    report, runner = report_on(folder, "auto", EngineConfig()), build_cpu_runner(folder, "auto", OPTIONS)
    assert (report.dtype, report.token_bytes) == (runner.spec.dtype, runner.layout.token_bytes)
    assert bool(report.native) == isinstance(runner.model, NativeDecoder)


def test_longrope_is_stretched_for_longer_contexts_only(model_of: Callable[..., Path]) -> None:
    """All sequences of a worker have the same frequencies, and workers with others don't pair."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    folder = model_of("phi3", original_max_position_embeddings=64, rope_parameters=rope)
    found = []
    for most, context in ((0, 64), (64, 64), (65, 65), (4096, 1024)):
        runner = build_cpu_runner(folder, "float32", replace(OPTIONS, max_context=most))
        assert runner.spec.max_context == context
        found.append((runner.spec.fingerprint, logits_by(runner, TOKENS)))
    (plain, short), (same, _), (stretched, long), (same_stretched, _) = found
    assert plain == same != stretched == same_stretched
    assert (short - long).std() > 0.01 * short.std()


def test_progress_grows_to_one(llama: Path) -> None:
    shares: list[float] = []
    build_cpu_runner(llama, "float32", OPTIONS, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 10


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"), ("qwen2", "lm_head.weight")],
    ids=["leftover of an old exporter", "head of a tied model"],
)
def test_tensors_that_change_nothing_do_no_harm(tmp_path: Path, architecture: str, extra: str) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    expected = logits_of(folder, TOKENS)
    change_tensors(folder, lambda tensors: tensors.update({extra: tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits_of(folder, TOKENS), expected)


def changed(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    """Damage to the tensors of the only file."""
    return lambda folder: change_tensors(folder, change)


def with_content(content: bytes) -> Damage:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def with_header(fields: dict[str, object]) -> Damage:
    """One tensor of 4 bytes."""
    header = json.dumps({GATE: {"dtype": "F32"} | fields}).encode()
    return with_content(struct.pack("<Q", len(header)) + header + bytes(4))


def with_index(weight_map: object) -> Damage:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def with_name(name: str) -> Damage:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def with_overlapping_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[GATE] |= {"data_offsets": header[GATE.replace("gate", "up")]["data_offsets"]}
    path.write_bytes(data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :])


def with_a_tensor_in_two_shards(folder: Path) -> None:
    first, second = map(load_file, shards := sorted(folder.glob("*.safetensors"))[:2])
    name = next(iter(first))
    save_file(second | {name: first[name]}, shards[1])


FOREIGN = "model.layers.0.self_attn.q_norm.weight"
NO_FILE = r"model\.safetensors: not a safetensors file"
REFUSED: dict[str, tuple[Damage, str]] = {
    "missing tensor": (changed(lambda found: found.pop(GATE)), rf"tensor {GATE} \[112, 64\] is missing"),
    "other shape": (
        changed(lambda found: found.update({GATE: torch.zeros(112, 63)})),
        rf"tensor {GATE} has shape \[112, 63\]; expected: \[112, 64\]",
    ),
    "integers": (
        changed(lambda found: found.update({GATE: torch.zeros(112, 64, dtype=torch.int8)})),
        rf"tensor {GATE} has dtype I8; allowed: F32, F16, BF16",
    ),
    "another architecture's tensor": (
        changed(lambda found: found.update({FOREIGN: torch.ones(16)})),
        rf"doesn't have: {FOREIGN}",
    ),
    "pickled": (with_name("pytorch_model.bin"), r"pytorch_model\.bin: a pickled checkpoint"),
    "pickled, of Meta": (with_name("consolidated.00.pth"), r"consolidated\.00\.pth: a pickled checkpoint"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"has neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "empty": (with_content(b""), NO_FILE),
    "no header": (with_content(b"short"), NO_FILE),
    "long header": (with_content(struct.pack("<Q", 2**40) + b"{}"), NO_FILE),
    "list as header": (with_content(struct.pack("<Q", 2) + b"[]"), NO_FILE),
    "header of no text": (with_content(struct.pack("<Q", 4) + b"\xff\xff\xff\xff"), NO_FILE),
    "deep header": (with_content(struct.pack("<Q", 10**6) + b"[" * 10**6), NO_FILE),
    "endless shape": (with_header({"shape": [math.inf], "data_offsets": [0, 4]}), NO_FILE),
    "endless offset": (with_header({"shape": [1], "data_offsets": [0, math.inf]}), NO_FILE),
    "negative shape": (with_header({"shape": [-1, -1], "data_offsets": [0, 4]}), NO_FILE),
    "many dimensions": (with_header({"shape": [10**4000] * 1000, "data_offsets": [0, 4]}), NO_FILE),
    "tensor without fields": (with_content(struct.pack("<Q", 9) + b'{"a": {}}'), NO_FILE),
    "cut short": (cut_short, NO_FILE + ", or cut short"),
    "overlap": (with_overlapping_tensors, NO_FILE),
    "empty index": (with_index({}), "weight_map is {}"),
    "list as index": (with_index(["model.safetensors"]), "weight_map is"),
    "index of another folder": (with_index({GATE: "../model.safetensors"}), "allowed: files in the same folder"),
    "index of a missing tensor": (
        with_index({"model.layers.9.x": "model.safetensors"}),
        r"tensor model\.layers\.9\.x is missing",
    ),
}
"""Damage to a checkpoint of one file, and what its refusal says."""


@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_loaded_is_refused_with_the_reason(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_shards_that_are_missing_or_overlap_are_refused(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    with_a_tensor_in_two_shards(folder)
    with pytest.raises(ValueError, match=r"tensor \S+ is in model-00001-of-\d+\.safetensors too"):
        build_cpu_runner(folder, "float32", OPTIONS)
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}: no such file"):
        build_cpu_runner(folder, "float32", OPTIONS)


def test_the_fingerprint_tells_types_and_configs_apart_and_not_folders(
    llama: Path, folder: Path, model_of: Callable[..., Path]
) -> None:
    own = Checkpoint(llama).fingerprint()
    assert Checkpoint(folder).fingerprint() == own
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    other_type = model_of("llama", dtype="bfloat16")
    assert len({own, Checkpoint(folder).fingerprint(), Checkpoint(other_type).fingerprint()}) == 3


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
