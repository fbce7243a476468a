"""Prompts are attended by what was asked for, or it is refused by name; auto takes the fastest that there is."""

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.attention.base import AttentionInputs
from kvrelay.engine.attention.choice import choose_prefill, fastest
from kvrelay.engine.attention.prefill import Shapes
from kvrelay.engine.attention.tiles import TilePrefill
from kvrelay.engine.attention.triton import architecture_of
from kvrelay.engine.build import draft_options
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.kernels.reference import paged_attention
from kvrelay.kernels.triton.paged import PagedKV
from support.attention_packages import modules

CPU = torch.device("cpu")
PACKAGES = ("flash_attn", "flashinfer")


def layout(head_dim: int = 128, block_size: int = 64, dtype: Any = "bfloat16", kv_heads: int = 2) -> KVLayout:
    return KVLayout(2, kv_heads, head_dim, block_size, dtype, "HND")


def shapes(
    kv: KVLayout | None = None,
    dtype: torch.dtype = torch.bfloat16,
    architecture: int = 90,
    windows: tuple[int, ...] = (0,),
    heads: int = 8,
    device: torch.device = CPU,
) -> Shapes:
    return Shapes(kv or layout(), dtype, heads, windows, architecture, device)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages can be imported."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("architecture", "rows"), [(90, 128), (100, 256), (103, 256)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [64, 128])
def test_gluon_is_for_hopper_and_blackwell(head_dim: int, block_size: int, architecture: int, rows: int) -> None:
    asked = shapes(layout(head_dim, block_size), architecture=architecture)
    (chosen,) = choose_prefill("gluon", asked)
    assert isinstance(chosen, TilePrefill)
    assert (chosen.name, chosen.tile_tokens) == ("gluon", rows // asked.group)


@pytest.mark.parametrize(
    ("wanted", "asked", "reason"),
    [
        ("gluon", shapes(architecture=80), "architecture 80"),
        ("gluon", shapes(architecture=120), "architecture 120"),
        ("gluon", shapes(layout(96)), "heads of 96"),
        ("gluon", shapes(layout(block_size=16)), "blocks of 16"),
        ("gluon", shapes(layout(dtype="int8")), "KV of int8"),
        ("gluon", shapes(layout(dtype="float32"), torch.float32), "float32"),
        ("flash_attn", shapes(architecture=100), "architecture 100"),
        ("flash_attn", shapes(layout(dtype="fp8")), "FlashAttention 3 doesn't take .* KV of fp8"),
        ("flash_attn", shapes(layout(20)), "heads of 20"),
        ("flashinfer", shapes(layout(96)), "FlashInfer doesn't take .* heads of 96"),
        ("flashinfer", shapes(layout(dtype="float32"), torch.float32), "float32"),
    ],
)
def test_what_can_not_be_is_refused_by_name(wanted: Any, asked: Shapes, reason: str, installed: None) -> None:
    with pytest.raises(ValueError, match=f"prefill_attention is '{wanted}', but .*{reason}.*; allowed: auto, triton"):
        choose_prefill(wanted, asked)


@pytest.mark.parametrize(("wanted", "package"), list(zip(PACKAGES, ("FlashAttention 3", "FlashInfer"), strict=True)))
def test_a_package_that_is_not_there_is_refused(wanted: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in modules():
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"prefill_attention is '{wanted}', but {package} can't be imported"):
        choose_prefill(wanted, shapes())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('its parts are of versions 1 and 2')", "can't be imported .*its parts are of versions"),
        ("", "has no (flash_attn_with_kvcache|BatchPrefillWithPagedKVCacheWrapper)"),
    ],
)
def test_auto_goes_on_without_a_package_that_is_broken(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in modules():
        (tmp_path / f"{name}.py").write_text(text)
        # So that what is imported here is forgotten afterwards.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    assert [one.name for one in choose_prefill("auto", shapes())] == ["triton", "gluon"]
    for wanted in PACKAGES:
        with pytest.raises(ValueError, match=reason):
            choose_prefill(wanted, shapes())  # type: ignore[arg-type]  # both are names of kernels


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = modules()

    def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any) -> None:
        raise AssertionError

    fakes["flash_attn_interface"].flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]  # a fake
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fakes["flash_attn_interface"])
    with pytest.raises(ValueError, match=r"FlashAttention 3 has no causal, .* page_table.*; 3\.0\.0 has"):
        choose_prefill("flash_attn", shapes())


def test_a_triton_without_gluon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvrelay.kernels

    monkeypatch.delattr(kvrelay.kernels, "flash_prefill_hopper", raising=False)
    monkeypatch.delitem(sys.modules, "kvrelay.kernels.flash_prefill_hopper", raising=False)
    monkeypatch.delitem(sys.modules, "kvrelay.kernels.gluon_prefill", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    with pytest.raises(ValueError, match="Triton hasn't what it needs"):
        choose_prefill("gluon", shapes())


def test_triton_is_the_default() -> None:
    assert [one.name for one in choose_prefill(EngineConfig().prefill_attention, shapes())] == ["triton"]


def test_a_draft_model_has_triton(tmp_path: Path) -> None:
    """Its heads may be of another size than those of the served model, which was asked for gluon."""
    assert draft_options(tmp_path, EngineConfig(prefill_attention="gluon").on("cuda")).prefill_attention == "triton"


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill_attention is 'cudnn'; allowed: auto, triton, gluon, flash_attn"):
        EngineConfig(prefill_attention="cudnn")  # type: ignore[arg-type]  # that is the point


def test_auto_considers_what_can_be_had(installed: None) -> None:
    names = [one.name for one in choose_prefill("auto", shapes())]
    assert names == ["triton", "gluon", "flash_attn", "flashinfer"]
    assert [one.name for one in choose_prefill("auto", shapes(architecture=80))] == ["triton", "flashinfer"]
    assert [one.name for one in choose_prefill("auto", shapes(layout(dtype="int8")))] == ["triton"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"triton": 1.0, "gluon": 0.6, "flash_attn": 0.5, "flashinfer": 0.7}, "flash_attn"),
        ({"triton": 1.0, "gluon": 0.99, "flash_attn": 0.98, "flashinfer": 1.2}, "triton"),
        ({"triton": 1.0, "gluon": 0.8, "flashinfer": 0.9}, "gluon"),
        ({"triton": 1.0}, "triton"),
    ],
)
def test_auto_takes_the_fastest(
    times: dict[str, float], expected: str, installed: None, caplog: pytest.LogCaptureFixture
) -> None:
    def seconds(candidate: Any) -> float:
        if candidate.name not in times:
            raise RuntimeError("no kernel image")
        return times[candidate.name]

    with caplog.at_level(logging.INFO):
        assert fastest(choose_prefill("auto", shapes()), seconds).name == expected
    account = caplog.messages[-1]
    assert f"prefill attention: {expected}" in account
    assert all(f"{name} {1e3 * time:.2f} ms" in account for name, time in times.items())
    failed = [message for message in caplog.messages if "no kernel image" in message]
    assert len(failed) == 4 - len(times)


@pytest.mark.parametrize("wanted", PACKAGES)
@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(2, 40)), min_size=1, max_size=3),
    decodes=st.integers(0, 2),
    block_size=st.sampled_from([8, 16, 64]),
    window=st.sampled_from([0, 1, 7, 60]),
    seed=st.integers(0, 99),
)
def test_packages_are_asked_for_the_same_attention(
    wanted: Any, rows: list[tuple[int, int]], decodes: int, block_size: int, window: int, seed: int
) -> None:
    """To the bit: the stand-ins compute the definition from what they are given, in the layout that they are given."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        check_package(wanted, [(5, 1)] * decodes + rows, decodes, (block_size, window, seed), CPU)


def check_package(
    wanted: Any, rows: list[tuple[int, int]], first: int, case: tuple[int, int, int], device: torch.device
) -> None:
    """Two layers, of which the second has no window, in two steps. Slots that no row has written hold NaN."""
    block_size, window, seed = case
    generator = torch.Generator().manual_seed(seed)
    starts, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    contexts = starts + lengths
    kv = layout(64, block_size, "float16")
    counts = -(-contexts // block_size)
    blocks = int(counts.sum()) + 3
    tables = torch.randint(blocks, (len(rows), int(counts.max()) + 2), generator=generator, dtype=torch.int32)
    order = torch.randperm(blocks, generator=generator, dtype=torch.int32)
    written = torch.zeros(blocks, block_size, dtype=torch.bool)
    for row, mine, context in zip(tables, order.split([*counts.tolist(), 3]), contexts.tolist(), strict=False):
        row[: len(mine)] = mine
        written[mine.long()] = (torch.arange(len(mine) * block_size) < context).view(-1, block_size)
    pool = torch.randn(*kv.shape(blocks), generator=generator)
    pool.masked_fill_(~written[:, None, None, None, :, None], torch.nan)
    pool = pool.to(device, torch.float16)
    query = torch.randn(int(lengths.sum()), 8, 64, generator=generator).to(device, torch.float16)
    (prefill,) = choose_prefill(
        wanted,
        shapes(kv, torch.float16, architecture_of(device), windows=tuple(sorted({0, window})), device=device),
    )
    nothing = torch.empty(0)
    inputs = AttentionInputs(
        nothing, nothing, tables.to(device), torch.from_numpy(contexts.astype(np.int32)).to(device), starts, lengths
    )
    for _ in range(2):
        step = prefill.plan(inputs, first)
        for layer, seen in enumerate((window, 0)):
            out = torch.full_like(query, -7.0)
            assert step.launch(query, PagedKV(pool, layer), seen, out) is None
            held = pool.transpose(3, 4)
            expected = [
                torch.full_like(part, -7.0)
                if row < first
                else paged_attention(part, held, layer, tables[row].tolist(), int(contexts[row]), seen, torch.float64)
                for row, part in enumerate(query.split(lengths.tolist()))
            ]
            if device.type == "cpu":
                assert torch.equal(out, torch.cat([part.to(torch.float16) for part in expected]))
            else:
                torch.testing.assert_close(out.double(), torch.cat(expected).double(), atol=4e-3, rtol=6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("wanted", "module"), [("flash_attn", "flash_attn_interface"), ("flashinfer", "flashinfer")])
@pytest.mark.parametrize("window", [0, 60])
def test_on_a_gpu_the_packages_compute_it(wanted: Any, module: str, window: int) -> None:
    pytest.importorskip(module)
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    device = torch.device("cuda")
    if wanted == "flash_attn" and architecture_of(device) != 90:
        pytest.skip("needs a GPU of compute capability 9.0")
    check_package(wanted, [(5, 1), (70, 40), (0, 200)], 1, (64, window, 3), device)


def test_the_stand_ins_have_the_parameters_that_are_checked(installed: None) -> None:
    from kvrelay.engine.attention import flash_attention, flashinfer

    wrapper = modules()["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    assert set(inspect.signature(wrapper.plan).parameters) >= flashinfer.PARAMETERS
    called = modules()["flash_attn_interface"].flash_attn_with_kvcache
    assert set(inspect.signature(called).parameters) >= flash_attention.PARAMETERS
