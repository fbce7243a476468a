"""Prompts are attended by what was asked for, or it is refused by name; auto takes the fastest that there is."""

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from kvrelay.engine.attention import flashinfer, varlen
from kvrelay.engine.attention.base import AttentionInputs
from kvrelay.engine.attention.choice import choose_prefill, fastest
from kvrelay.engine.attention.prefill import Shapes
from kvrelay.engine.attention.triton import architecture_of
from kvrelay.engine.build import draft_options
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.kernels.reference import paged_attention
from kvrelay.kernels.triton.paged import PagedKV
from support.attention_packages import BatchPrefillWithPagedKVCacheWrapper, install, varlen_attn_out

CPU = torch.device("cpu")
PACKAGES = ("varlen_attn", "flashinfer")


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
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes both packages importable; returns what PyTorch was told to activate."""
    return install(monkeypatch)


@pytest.mark.parametrize(
    ("wanted", "asked", "reason"),
    [
        ("varlen_attn", shapes(architecture=80), "architecture 80"),
        ("varlen_attn", shapes(architecture=120), "architecture 120"),
        ("varlen_attn", shapes(layout(dtype="fp8")), "PyTorch's varlen_attn doesn't take .* KV of fp8"),
        ("varlen_attn", shapes(layout(20)), "heads of 20"),
        ("varlen_attn", shapes(layout(256), architecture=100), "heads of 256"),
        ("flashinfer", shapes(layout(96)), "FlashInfer doesn't take .* heads of 96"),
        ("flashinfer", shapes(layout(dtype="float32"), torch.float32), "float32"),
    ],
)
def test_what_can_not_be_is_refused_by_name(wanted: Any, asked: Shapes, reason: str, installed: list[str]) -> None:
    with pytest.raises(ValueError, match=f"prefill_attention is '{wanted}', but .*{reason}.*; allowed: auto, triton"):
        choose_prefill(wanted, asked)


@pytest.mark.parametrize(("architecture", "package"), [(90, "FA3"), (100, "FA4"), (103, "FA4")])
def test_pytorch_activates_the_package_for_the_gpu_once(architecture: int, package: str, installed: list[str]) -> None:
    for _ in range(2):
        (chosen,) = choose_prefill("varlen_attn", shapes(architecture=architecture))
        assert chosen.name == "varlen_attn"
    assert installed == [package]


def absent(patch: pytest.MonkeyPatch) -> None:
    """Makes neither FlashInfer nor FlashAttention importable."""
    for name in ("flashinfer", "flash_attn_interface", "flash_attn"):
        patch.setitem(sys.modules, name, None)


def pytorch_has_block_tables() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen_attn_out).parameters


needs_block_tables = pytest.mark.skipif(not pytorch_has_block_tables(), reason="needs PyTorch 2.13 or newer")


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        pytest.param("varlen_attn", "PyTorch's varlen_attn can't activate FA3", marks=needs_block_tables),
        ("flashinfer", "FlashInfer can't be imported"),
    ],
)
def test_a_package_that_is_not_there_is_refused(wanted: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    with pytest.raises(ValueError, match=f"prefill_attention is '{wanted}', but {reason} .*import of"):
        choose_prefill(wanted, shapes())
    assert [one.name for one in choose_prefill("auto", shapes())] == ["triton"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('its parts are of versions 1 and 2')", "its parts are of versions"),
        ("", "has no BatchPrefillWithPagedKVCacheWrapper|does not expose FA3|has no block_table|has no varlen_attn"),
    ],
)
def test_auto_goes_on_without_a_package_that_is_broken(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flashinfer", "flash_attn_interface"):
        (tmp_path / f"{name}.py").write_text(text)
        # So that what is imported here is forgotten afterwards.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    assert [one.name for one in choose_prefill("auto", shapes())] == ["triton"]
    for wanted in PACKAGES if pytorch_has_block_tables() else PACKAGES[1:]:
        with pytest.raises(ValueError, match=reason):
            choose_prefill(wanted, shapes())


def test_an_older_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch, installed: list[str]) -> None:
    def older(query: Any, key: Any, value: Any, cu_seq_q: Any, scale: Any, window_size: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(sys.modules["torch.nn.attention.varlen"], "varlen_attn_out", older)
    with pytest.raises(ValueError, match=r"varlen_attn has no block_table, .* in older; PyTorch 2\.13 has"):
        choose_prefill("varlen_attn", shapes())
    monkeypatch.delattr(sys.modules["torch.nn.attention.varlen"], "varlen_attn_out")
    with pytest.raises(ValueError, match="varlen_attn has no varlen_attn_out"):
        choose_prefill("varlen_attn", shapes())
    assert installed == [], "nothing is activated in vain"


def test_a_draft_model_has_triton() -> None:
    """The draft's heads may have another size than those of the served model, which was asked for another kernel."""
    assert draft_options(EngineConfig(prefill_attention="flashinfer").on("cuda")).prefill_attention == "triton"


def test_other_names_are_refused_and_removed_ones_with_what_to_write() -> None:
    with pytest.raises(ValueError, match="is 'cudnn'; allowed: auto, triton, varlen_attn, flashinfer"):
        EngineConfig(prefill_attention="cudnn")
    for option, instead in (("gluon", "varlen_attn, flashinfer or auto"), ("flash_attn", "varlen_attn")):
        with pytest.raises(ValidationError, match=f"Input should be {instead}; {option} was removed"):
            TypeAdapter(EngineConfig).validate_python({"prefill_attention": option})


def test_auto_considers_what_can_be_had(installed: list[str]) -> None:
    names = [one.name for one in choose_prefill("auto", shapes())]
    assert names == ["triton", "varlen_attn", "flashinfer"]
    assert [one.name for one in choose_prefill("auto", shapes(architecture=80))] == ["triton", "flashinfer"]
    assert [one.name for one in choose_prefill("auto", shapes(layout(dtype="int8")))] == ["triton"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"triton": 1.0, "varlen_attn": 0.5, "flashinfer": 0.7}, "varlen_attn"),
        ({"triton": 1.0, "varlen_attn": 0.98, "flashinfer": 1.2}, "triton"),
        ({"triton": 1.0, "flashinfer": 0.9}, "flashinfer"),
        ({"triton": 1.0}, "triton"),
    ],
)
def test_auto_takes_the_fastest_of_those_that_run(times: dict[str, float], expected: str, installed: list[str]) -> None:
    def seconds(candidate: Any) -> float:
        if candidate.name not in times:
            raise RuntimeError("no kernel image")
        return times[candidate.name]

    assert fastest(choose_prefill("auto", shapes()), seconds).name == expected


@pytest.mark.more
@pytest.mark.parametrize("wanted", PACKAGES)
@settings(max_examples=10, deadline=None)
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
    """The results are equal to the bit: the stand-ins compute the definition from their arguments, in the given
    layout."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
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
@pytest.mark.parametrize(
    ("wanted", "module"),
    [pytest.param("varlen_attn", "flash_attn_interface", marks=needs_block_tables), ("flashinfer", "flashinfer")],
)
@pytest.mark.parametrize("window", [0, 60])
def test_on_a_gpu_the_packages_compute_it(wanted: Any, module: str, window: int) -> None:
    pytest.importorskip(module)
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    device = torch.device("cuda")
    if wanted == "varlen_attn" and architecture_of(device) != 90:
        pytest.skip("needs a GPU of compute capability 9.0")
    check_package(wanted, [(5, 1), (70, 40), (0, 200)], 1, (64, window, 3), device)


def test_the_stand_ins_have_the_parameters_that_are_checked() -> None:
    assert set(inspect.signature(BatchPrefillWithPagedKVCacheWrapper.plan).parameters) >= flashinfer.PARAMETERS
    assert set(inspect.signature(varlen_attn_out).parameters) >= varlen.PARAMETERS


@needs_block_tables
@pytest.mark.parametrize("window", [0, 60])
def test_pytorch_takes_what_it_is_given(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own function has the stand-in's parameters and takes our tensors; these have no memory, so no GPU is
    needed."""
    from torch.nn.attention.varlen import varlen_attn_out as real

    assert list(inspect.signature(real).parameters) == list(inspect.signature(varlen_attn_out).parameters)
    for name in ("activate_flash_attention_impl", "current_flash_attention_impl"):
        monkeypatch.setattr(torch.nn.attention, name, lambda *_: "FA3")
    kv, device = layout(64), torch.device("meta")
    (prefill,) = choose_prefill("varlen_attn", shapes(kv, windows=(window,), device=device))
    starts, lengths = np.array([5, 70, 0]), np.array([1, 40, 200])
    places = torch.empty(241, dtype=torch.int64, device=device)
    tables, contexts = (torch.empty(*shape, dtype=torch.int32, device=device) for shape in ((3, 4), (3,)))
    step = prefill.plan(AttentionInputs(places, places, tables, contexts, starts, lengths), 1)
    query, pool = (torch.empty(*shape, dtype=torch.bfloat16, device=device) for shape in ((241, 8, 64), kv.shape(9)))
    out = torch.empty_like(query)
    step.launch(query, PagedKV(pool, 1), window, out)
    assert out._version > 0, "it is written in place"
