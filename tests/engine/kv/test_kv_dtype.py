"""KV of 8 bits in an engine: the bundled model's logits stay as they are, and blocks are about half as long."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from kvrelay.engine.config import CacheDtype, EngineConfig
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.runner import threads
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from kvrelay.models import resolve
from kvrelay.transfer.frames.frames import ConvertedFrame, NarrowedFrame, PoolFrame
from kvrelay.transfer.protocol.events import Frame
from support.paged import PagedSequence, PagedSequences, logits_by

COSINE = 0.999
LENGTH = 400
PICO = resolve("pico")


def make_runner(kv_dtype: CacheDtype, dtype: str = "float32") -> CpuRunner:
    options = EngineConfig(kv_memory_bytes=2**24, threads=1, kv_dtype=kv_dtype)
    return build_cpu_runner(PICO, dtype, options)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    text = Path(__file__).read_text()
    ids = Tokenizer.from_file(str(PICO / "tokenizer.json")).encode(text).ids
    return list(ids[:LENGTH])


@pytest.fixture(scope="module")
def expected(tokens: list[int]) -> torch.Tensor:
    """[LENGTH, vocabulary] with KV in float32."""
    return logits(make_runner("auto"), tokens)


def logits(runner: CpuRunner, tokens: list[int]) -> torch.Tensor:
    """Logits of two chunks and of single tokens after them."""
    return logits_by(runner, tokens, 130, LENGTH - 130 - 30, *[1] * 30)


def check_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.nn.functional.cosine_similarity(found, expected, -1).min() >= COSINE


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_logits_with_int8_are_nearly_those_without(
    native: bool, tokens: list[int], expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(threads, "library", lambda: None)
    runner = make_runner("int8")
    assert runner.pool.tensor.dtype == torch.int8
    runner.pool.bytes.fill_(255)  # what was in the pool before must not show
    check_alike(logits(runner, tokens), expected)


@pytest.mark.parametrize("kinds", [("auto", "auto"), ("auto", "int8"), ("int8", "auto"), ("int8", "int8")], ids=str)
@pytest.mark.some(1)
def test_one_worker_goes_on_where_another_ended(
    kinds: tuple[CacheDtype, CacheDtype], tokens: list[int], expected: torch.Tensor
) -> None:
    prefill, decode = map(make_runner, kinds)
    done = LENGTH - 30
    sent, received = PagedSequences(prefill, 1).add(tokens), PagedSequences(decode, 2).add(tokens)
    PagedSequences(prefill).compute((sent, done))
    hand_over(prefill, sent, decode, received, done)
    for _ in range(30):
        PagedSequences(decode).compute((received, 1))
    check_alike(torch.cat(received.logits), expected[done:])
    if kinds == ("auto", "auto"):
        assert torch.equal(torch.cat(received.logits), expected[done:]), "as if computed here"


def hand_over(prefill: CpuRunner, sent: PagedSequence, decode: CpuRunner, received: PagedSequence, count: int) -> None:
    """Hands KV over in one frame, as two workers do."""
    wire = prefill.layout.sent_to(decode.layout)
    assert wire.scaled == ("int8" in (prefill.layout.dtype, decode.layout.dtype))
    frame = Frame(1, 0, 0, count, count * wire.token_bytes)
    data = torch.empty(frame.nbytes, dtype=torch.uint8)
    whole = PoolFrame(prefill.pool, sent.blocks, frame)
    (whole if wire == prefill.layout else NarrowedFrame(prefill.pool, wire, sent.blocks, frame)).read(data)
    place = PoolFrame(decode.pool, received.blocks, frame)
    if decode.layout.conversion(wire) is None:
        place.write(data)
    else:
        ConvertedFrame(decode.pool, wire, received.blocks, frame, 0).write(data)
    received.computed = count


def test_a_number_that_is_not_finite_fails_its_sequence_only(tokens: list[int]) -> None:
    runner = make_runner("int8")
    sequences = PagedSequences(runner)
    spoiled, other = sequences.add(tokens[:50]), sequences.add(tokens[:50])
    sequences.compute((spoiled, 49), (other, 49))
    scales = runner.pool.scales
    scales[spoiled.blocks[0], 3, 1, 5] = torch.nan
    sequences.compute((spoiled, 1), (other, 1))
    assert spoiled.logits[-1].isnan().all()
    assert other.logits[-1].isfinite().all()


def test_a_token_takes_about_half_the_bytes() -> None:
    for dim in (64, 96, 128):
        wide = KVLayout(30, 3, dim, 16, "bfloat16")
        for dtype in ("int8", "fp8"):
            assert KVLayout(30, 3, dim, 16, dtype).block_bytes <= 0.52 * wide.block_bytes


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_dtype is 'fp8'; allowed: auto, or int8 on a CPU"):
        EngineConfig(kv_dtype="fp8").on("cpu")
    with pytest.raises(ValueError, match="kv_dtype is 'int4'; allowed: auto, int8, fp8"):
        EngineConfig(kv_dtype="int4")
    with pytest.raises(ValueError, match=r"head_dim is 15; with dtype 'int8' it must be even"):
        KVLayout(2, 2, 15, 8, "int8")
    assert EngineConfig(kv_dtype="fp8").on("cuda").kv_dtype == "fp8"


def test_fp8_is_refused_by_a_gpu_that_cannot_convert_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pytest.importorskip("kvrelay.engine.runner.gpu")
    monkeypatch.setattr(gpu, "architecture_of", lambda device: 80)
    with pytest.raises(ValueError, match=r"kv_dtype is 'fp8'; allowed: auto, or int8 on a GPU of .* below 8\.9"):
        gpu.build_gpu_runner(PICO, "float32", EngineConfig(kv_dtype="fp8", kv_memory_bytes=2**24), device="cpu")
