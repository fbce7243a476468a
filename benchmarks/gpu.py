"""Checks and measures what runs on a GPU: kernels, attention of prompts, a whole engine, links.

    python benchmarks/gpu.py [--only SECTION,...] [--seconds 540] [--out FILE] [--dry-run]

    environment  the machine, versions and tools; wrong without a GPU
    kernels      each kernel beside the limit of the device
    attention    what `engine.prefill_attention` may be here, each on the same prompts
    engine       an 8B Llama with random weights of 16, 8 and 4 bits through scheduler and runner: seconds to the first
                 token (TTFT) by length of the prompt, per output token (TPOT) by batch and context; 16 bits beside
                 transformers
    links        GB/s of an NCCL link between two processes, on two GPUs if there are two

Runs from the source tree: no Ray, no network. Each kernel's result is compared with its plain definition before it is
timed. Times are CUDA events around the replay of one launch from a graph, with cold caches: the median of up to 40,
with the 10th and 90th percentile. A share is the rate of bytes that must move, or of operations that must be done,
divided by the rate that a copy of 1 GiB (bytes read and written) or an 8192-cubed bfloat16 product by cuBLAS reaches on
the same device.

Without a GPU, or with --dry-run, every case runs at a tiny size in Triton's interpreter and is checked, not timed. The
exit status is 1 if any result is wrong. Results are written after each section, so an interrupted run keeps them.
"""

import argparse
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "tests"))
# Triton reads this when the kernels' modules are imported.
os.environ["TRITON_INTERPRET"] = str(int("--dry-run" in sys.argv or not torch.cuda.is_available()))

from kvrelay.engine.attention.base import AttentionInputs
from kvrelay.engine.attention.choice import choose_prefill
from kvrelay.engine.attention.prefill import Prefill, Shapes
from kvrelay.engine.attention.triton import architecture_of
from kvrelay.engine.build import engine_on
from kvrelay.engine.config import GPU_DEFAULTS, EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.gpu import build_gpu_runner
from kvrelay.engine.sampling.noise import exponential
from kvrelay.kernels import codes, reference
from kvrelay.kernels.triton import kv_checksum, kv_frame, quant_gemv, sample
from kvrelay.kernels.triton.add_rmsnorm import Norms
from kvrelay.kernels.triton.decode_work import DecodeParts, DecodeWork, count_programs, plan_decode
from kvrelay.kernels.triton.flash_prefill import flops
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.paged_decode import bytes_moved, paged_decode
from kvrelay.kernels.triton.quant_linear import quantized
from kvrelay.kernels.triton.rope_kv_write import rope_kv_write
from kvrelay.kernels.triton.silu_mul import SiluMul
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.nccl import OLDEST_SHARED_GPU
from support.link_process import dial, transport_named

DRY = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = torch.device("cpu" if DRY else "cuda")
DTYPE = torch.float16 if DRY else torch.bfloat16
"""Type of the weights; float16 in the interpreter, whose bfloat16 isn't reliable."""
BLOCK = GPU_DEFAULTS.block_size
HIDDEN, INNER, HEADS, KV_HEADS, DIM = (64, 96, 4, 2, 16) if DRY else (4096, 14336, 32, 8, 128)
"""Sizes of an 8B Llama."""
BATCHES = ((1, 128), (1, 4096), (1, 32000), (16, 1024), (16, 4096), (64, 1024), (64, 4096), (256, 1024))
"""Batches of decode steps: the number of sequences, and the tokens in each."""
LINK_BYTES, LINK_FRAMES, LINK_SECONDS = (2**16, 5, 60.0) if DRY else (64 * 2**20, 65, 60.0)
Row = dict[str, Any]


@dataclass
class Case:
    """One kernel on one shape."""

    name: str
    shape: Row
    run: Callable[[], Tensor]
    exact: Callable[[], Tensor]
    """Function that computes the result, or its last rows, by the definition."""
    bytes: int = 0
    flops: int = 0
    """Operations that must be done, if arithmetic is the limit; otherwise `bytes` has the bytes that must move."""
    tolerance: float = 1.5e-2
    """Largest error, as a share of the largest exact value: bfloat16 has 8 bits."""


class Machine:
    """The device's best rates, measured with simple code; 1 in a dry run."""

    def __init__(self) -> None:
        # Written between two runs: more bytes than any L2 holds.
        self._flush = torch.empty(1 if DRY else 256 * 2**20, dtype=torch.uint8, device=DEVICE)
        self.bytes_per_second = self.flops_per_second = 1.0
        self.processors = 132 if DRY else torch.cuda.get_device_properties(0).multi_processor_count
        if not DRY:
            source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE).random_()
            a, b, target = normal(8192, 8192), normal(8192, 8192), torch.empty_like(source)
            # Launched without a graph: in a graph, slower units make the copy.
            self.bytes_per_second = 2 * 2**30 / self.time(lambda: target.copy_(source), graph=False)["median_s"]
            self.flops_per_second = 2 * 8192**3 / self.time(lambda: a @ b)["median_s"]

    def time(self, run: Callable[[], object], graph: bool = True) -> dict[str, float]:
        """Median and percentiles, in seconds, of up to 40 runs within about a second, behind 3 that warm up. With
        `graph`, the work is replayed from a graph, as the engine's decode steps are, without Python's launches."""
        if graph:
            run()
            torch.cuda.synchronize()
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                run()
            run = recorded.replay
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        deadline = time.monotonic() + 1.0
        while len(events) < 43 and (len(events) < 8 or time.monotonic() < deadline):
            events.append(tuple(torch.cuda.Event(enable_timing=True) for _ in "ab"))
            self._flush.zero_()
            events[-1][0].record()
            run()
            events[-1][1].record()
            if len(events) % 10 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) / 1e3 for begin, end in events[3:])
        tenth = len(times) // 10
        return {"median_s": statistics.median(times), "p10_s": times[tenth], "p90_s": times[-1 - tenth]}

    def measure(self, case: Case) -> Row:
        """Checks and times a case; returns its row of the results."""
        exact = case.exact().double()
        found = case.run()[-len(exact) :].double()
        error = float((found - exact).abs().max()) / (float(exact.abs().max()) or 1.0)
        row: Row = {"case": case.name, **case.shape, "error": error, "sound": error <= case.tolerance}
        if DRY:
            return row
        row |= self.time(case.run)
        if case.bytes:
            rate, limit, unit = case.bytes / row["median_s"], self.bytes_per_second, 1e9
        else:
            rate, limit, unit = case.flops / row["median_s"], self.flops_per_second, 1e12
        return row | {"gb_per_s" if case.bytes else "tflop_per_s": rate / unit, "share": rate / limit}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def filling(out: Tensor, fill: Callable[..., object], *arguments: object) -> Callable[[], Tensor]:
    """A call that fills `out`, and returns it."""

    def run() -> Tensor:
        fill(*arguments)
        return out

    return run


def measured(**figures: float) -> dict[str, float]:
    """The figures; none in a dry run, where times mean nothing."""
    return {} if DRY else figures


def timed(run: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    synchronize = (lambda: None) if DRY else torch.cuda.synchronize
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def environment(machine: Machine) -> Iterator[Row]:
    tools = [tool for tool in ("nvidia-smi", "compute-sanitizer", "ncu") if shutil.which(tool)]
    yield {"tools": tools, "gpus": torch.cuda.device_count(), "sound": "--dry-run" in sys.argv or not DRY}
    if not DRY:
        yield {"nccl": torch.cuda.nccl.version(), "capability": torch.cuda.get_device_capability()}
        yield {"copy_gb_per_s": machine.bytes_per_second / 1e9, "bf16_tflop_per_s": machine.flops_per_second / 1e12}


def elementwise(rows: int) -> Iterator[Case]:
    """Norms, gate and rotation of so many tokens."""
    x, residual, weight = normal(rows, HIDDEN), normal(rows, HIDDEN), normal(HIDDEN)
    exact = partial(reference.rms_norm, (x + residual).float(), weight, 1e-5)
    moved = 4 * x.nbytes + weight.nbytes
    norm = Norms().add_rms_norm
    yield Case("add_rmsnorm", {"rows": rows}, lambda: norm(x, residual.clone(), weight, 1e-5)[0], exact, moved)
    gates = normal(rows, 2 * INNER)
    exact = partial(reference.silu_mul, gates.float())
    yield Case("silu_mul", {"rows": rows}, partial(SiluMul(), gates), exact, gates.nbytes * 3 // 2)
    qkv, blocks = normal(rows, HEADS + 2 * KV_HEADS, DIM), rows // BLOCK + 1
    angles = torch.rand(rows, 1, DIM // 2, device=DEVICE)
    angles = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    kv = PagedKV(torch.zeros(blocks, 1, 2, KV_HEADS, BLOCK, DIM, dtype=DTYPE, device=DEVICE), 0)
    slots = torch.randperm(blocks * BLOCK, device=DEVICE)[:rows]
    exact = partial(reference.rope, qkv[:, :HEADS].float(), *angles)
    run = partial(rope_kv_write, qkv, angles, slots, kv, None)
    yield Case("rope_kv_write", {"rows": rows}, run, exact, 2 * qkv.nbytes)


def product(machine: Machine, rows: int, outputs: int, inputs: int, bits: int) -> Case:
    """Weights of 8 or 4 bits."""
    coded = (codes.int8 if bits == 8 else codes.int4)(normal(outputs, inputs) / inputs**0.5)
    coded = replace(coded, scales=coded.scales.to(DTYPE).float())
    held = quantized(coded, DTYPE)
    x, multiply = normal(rows, inputs), quant_gemv.QuantGemv(held, None, machine.processors)
    exact = partial(functional.linear, x.double(), coded.dequantize().double())
    shape, moved = {"rows": rows, "weight": (outputs, inputs)}, quant_gemv.bytes_moved(rows, held, DTYPE.itemsize)
    return Case(f"w{bits}_gemv", shape, partial(multiply, x), exact, bytes=moved)


def choice(rows: int, how: tuple[float, int, float, float]) -> Case:
    """Choices of tokens by temperature, top_k, top_p, min_p; 500 are possible, as the definition compares all pairs."""
    vocabulary = 500 if DRY else 128256
    logits = torch.full((rows, vocabulary), -torch.inf, device=DEVICE)
    places = torch.randperm(vocabulary, device=DEVICE)[:500].sort().values
    logits[:, places] = 2 * torch.randn(rows, 500, device=DEVICE)
    asked, workspace = sample.Choices.empty(rows, 1, DEVICE), sample.Workspace.empty(rows, vocabulary, DEVICE)
    for column, value in zip((asked.temperature, asked.top_k, asked.top_p, asked.min_p), how, strict=True):
        column.fill_(value)
    asked.keys.random_(-(2**31), 2**31 - 1)
    chosen = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    run = filling(chosen, sample.sample, logits, asked, workspace, chosen)

    def exact() -> Tensor:
        if not how[0]:
            return logits.argmax(-1)
        noise = exponential(asked.keys.cpu().numpy(), places.cpu().numpy().astype(np.int32)).to(DEVICE)
        found = [reference.token_probabilities(row[places], *how) for row in logits]
        return places[(torch.stack(found) / noise.double()).argmax(-1)]

    return Case("sample", {"rows": rows, "how": how}, run, exact, bytes=logits.nbytes, tolerance=0.0)


class Paged:
    """R sequences of `context` tokens each on scattered blocks, with random KV."""

    def __init__(self, rows: int, context: int) -> None:
        width = -(-context // BLOCK)
        blocks = rows * width + 1
        self.kv = PagedKV(normal(blocks, 1, 2, KV_HEADS, BLOCK, DIM), 0)
        self.tables = torch.randperm(blocks, device=DEVICE)[: rows * width].view(rows, width).int()
        self._context = context

    def exact(self, query: Tensor, row: int) -> Tensor:
        """float64 [T, H, D]: the attention of the row's last T tokens, query [T, H, D]."""
        pool, table = self.kv.pool.transpose(3, 4), self.tables[row].tolist()
        return reference.paged_attention(query, pool, 0, table, self._context, 0, torch.float64)


def decoding(machine: Machine, rows: int, context: int) -> Case:
    paged, query = Paged(rows, context), normal(rows, HEADS, DIM)
    out, programs = torch.empty_like(query), count_programs(KV_HEADS, machine.processors)
    words = torch.zeros(sum(DecodeWork.sizes(rows, programs)), dtype=torch.int32)
    plan_decode(np.full(rows, context), 0, DecodeWork.view(words, rows, programs))
    work = DecodeWork.view(words.to(DEVICE), rows, programs)
    parts = DecodeParts.empty(programs, HEADS, KV_HEADS, DIM, DEVICE)
    run = filling(out, paged_decode, query, paged.kv, paged.tables, work, parts, out)

    def exact() -> Tensor:
        return torch.cat([paged.exact(each[None], row) for row, each in enumerate(query)])

    moved = bytes_moved([context] * rows, HEADS, KV_HEADS, DIM, DTYPE.itemsize, DTYPE.itemsize)
    return Case("paged_decode", {"rows": rows, "context": context}, run, exact, bytes=moved)


def moving(count: int) -> Iterator[Case]:
    """Reads, writes and checksums of frames of an 8B Llama's KV, of so many blocks."""
    pool = normal(count + 3, 2 if DRY else 32, 2, KV_HEADS, BLOCK, DIM)
    blocks, planes = torch.randperm(count + 3, device=DEVICE)[:count], pool.view(torch.uint8).flatten(3)
    frame, total = planes[blocks].flatten(), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out, target, written = torch.zeros_like(frame), torch.zeros_like(planes), torch.zeros_like(planes)
    written[blocks] = planes[blocks]
    checksum = reference.kv_checksum(frame.cpu().numpy().data)
    number = torch.from_numpy(np.array([checksum], np.uint64).view(np.int64)).to(DEVICE)

    def summed(way: kv_frame.Way) -> Tensor:
        total.fill_(kv_checksum.of_length(len(frame)))
        kv_frame.kv_frame(way, planes, blocks, out, total)
        return total - number

    for name, passes, run, exact in (
        ("kv_frame_write", 2, filling(target, kv_frame.kv_frame, "write", target, blocks, frame, total), written),
        ("kv_checksum", 1, lambda: kv_checksum.kv_checksum(frame) - number, torch.zeros_like(total)),
        ("kv_frame_read", 2, partial(summed, "read"), torch.zeros_like(total)),
        ("kv_frame_sum", 1, partial(summed, "sum"), torch.zeros_like(total)),
    ):
        yield Case(name, {"mb": len(frame) / 1e6}, run, partial(torch.clone, exact), passes * len(frame), tolerance=0.0)


def kernel_cases(machine: Machine) -> Iterator[Case]:
    for rows in (1, 3) if DRY else (1, 16, 64, 256, 8192):
        yield from elementwise(rows)
    for weight in ((70, 256),) if DRY else ((6144, 4096), (28672, 4096), (4096, 14336)):
        for rows in (1, 5 if DRY else 16):
            yield from (product(machine, rows, *weight, bits) for bits in (8, 4))
    hows = ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 50, 1.0, 0.0), (1.0, 200, 0.95, 0.0), (1.0, 0, 1.0, 0.05))
    for rows in (2,) if DRY else (1, 16, 64, 256):
        yield from (choice(rows, how) for how in hows)
    for batch in ((1, 20), (3, 300)) if DRY else BATCHES:
        yield decoding(machine, *batch)
    for count in (1, 3) if DRY else (4, 64):
        yield from moving(count)


def kernels(machine: Machine) -> Iterator[Row]:
    return map(machine.measure, kernel_cases(machine))


def attention(machine: Machine) -> Iterator[Row]:
    """Times attention: one long prompt, several short ones, and a chunk after a context."""
    layout = KVLayout(1, KV_HEADS, DIM, BLOCK, "float16" if DRY else "bfloat16", "HND")
    shapes = Shapes(layout, DTYPE, HEADS, (0,), architecture_of(DEVICE), DEVICE)
    prompts = ((1, 0, 1024), (1, 0, 4096), (1, 0, 16384), (1, 0, 32768), (16, 0, 1024), (1, 30720, 2048))
    for prompt in ((1, 0, 40), (2, 24, 17)) if DRY else prompts:
        # Each repeats its launches on the same pool, so another pool needs another one.
        for chosen in choose_prefill("auto", shapes):
            yield machine.measure(attending(chosen, *prompt))


def attending(prefill: Prefill, rows: int, start: int, length: int) -> Case:
    paged, query = Paged(rows, start + length), normal(rows * length, HEADS, DIM)
    starts, lengths, out = np.full(rows, start), np.full(rows, length), torch.empty_like(query)
    contexts = torch.full((rows,), start + length, dtype=torch.int32, device=DEVICE)
    planned = prefill.plan(AttentionInputs(contexts, contexts, paged.tables, contexts, starts, lengths), 0)
    run = filling(out, planned.launch, query, paged.kv, 0, out)
    # Only the last queries of a long prompt are checked, because they see the most keys.
    exact = partial(paged.exact, query[-min(64, length) :], rows - 1)
    work = flops(starts.tolist(), lengths.tolist(), HEADS, DIM)
    return Case(prefill.name, {"rows": rows, "start": start, "length": length}, run, exact, flops=work)


def request(index: int, length: int, max_tokens: int) -> Request:
    prompt = tuple((index * 31 + position) % 150 for position in range(length))
    return Request(f"r{index}", 1, prompt, length, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def drain(serving: Engine) -> None:
    while serving.has_work:
        serving.step()


def first_token(serving: Engine, length: int) -> float:
    """Seconds from a prompt's arrival to its first token: the median of three."""
    seconds = []
    for attempt in range(1 if DRY else 3):
        serving.scheduler.add(request(attempt, length, 1))
        seconds.append(timed(partial(drain, serving)))
    return statistics.median(seconds)


def next_token(serving: Engine, batch: int, context: int, steps: int) -> float:
    """Seconds of a step of a full batch whose KV is in the pool from the start, as on a decode worker."""
    for index in range(batch):
        asked = request(index, context, steps + 8)
        serving.scheduler.resume(asked, 1, serving.scheduler.reserve(asked).hold)
    for _ in range(3):
        serving.step()
    seconds = timed(lambda: [serving.step() for _ in range(steps)])
    drain(serving)
    return seconds / steps


@torch.inference_mode()
def engine(machine: Machine) -> Iterator[Row]:
    # They import Triton, which must not come before TRITON_INTERPRET is set.
    from checkpoint import write
    from transformers import LlamaForCausalLM

    steps = 2 if DRY else 32
    sizes = {"kv_memory_bytes": 2**20, "max_batch_tokens": 64, "max_sequences": 2}
    given = EngineConfig(**(sizes if DRY else {"kv_memory_bytes": 40 * 2**30}), prefix_cache=False)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "tiny" if DRY else "8b", 64 if DRY else 33024, DEVICE)
        for quantization, bits in (("none", 8 * DTYPE.itemsize), ("int8", 8), ("int4", 4)):
            options = replace(given, quantization=quantization).on("cuda", 2**37)
            runner = build_gpu_runner(Path(folder), "float16" if DRY else "bfloat16", options, device=DEVICE)
            runner.warm_up()
            serving, config = engine_on(runner, options), runner.model.config
            layers = config.layers * HIDDEN * ((2 * HEADS + 2 * KV_HEADS) * DIM + 3 * INNER)
            head = HIDDEN * config.vocab_size
            for length in (16, 40) if DRY else (128, 1024, 4096, 16384, 32768)[: 5 if quantization == "none" else 3]:
                ttft = first_token(serving, length)
                # The head's product is for the last token only.
                work = 2 * layers * length + 2 * head + config.layers * flops([0], [length], HEADS, DIM)
                share = work / ttft / machine.flops_per_second
                yield {"weights": bits, "prompt": length} | measured(ttft_s=ttft, share=share)
            for batch, context in ((1, 20), (2, 20)) if DRY else BATCHES:
                tpot = next_token(serving, batch, context, steps)
                # The head has 8 bits where the layers have 4.
                moved = (layers * bits + head * max(bits, 8)) / 8
                moved += batch * (context + steps // 2) * runner.layout.token_bytes
                share = moved / tpot / machine.bytes_per_second
                yield {"weights": bits, "batch": batch, "context": context} | measured(tpot_s=tpot, share=share)
            del runner, serving
            gc.collect()
            torch.cuda.empty_cache()
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32 if DRY else DTYPE).to(DEVICE)
    for batch, context in ((1, 20), (2, 20)) if DRY else BATCHES:
        if batch * context <= 2**17:
            prompts, seconds = torch.full((batch, context), 7, device=DEVICE), []
            for count in (1, 1, 1 + steps):  # the first one warms up
                generate = partial(model.generate, prompts, min_new_tokens=count, max_new_tokens=count, do_sample=False)
                seconds.append(timed(generate))
            took = {"ttft_s": seconds[1], "tpot_s": (seconds[2] - seconds[1]) / steps}
            yield {"transformers": 16, "batch": batch, "context": context} | measured(**took)


def links(machine: Machine) -> Iterator[Row]:
    """Frames from this process to another one, two in transit as a link's thread has them; over shm in a dry run."""
    if torch.cuda.device_count() == 1 and torch.cuda.nccl.version() < OLDEST_SHARED_GPU:
        return (yield {"skipped": "one GPU, and this NCCL does not let two ranks share it"})
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=link_end, args=(there, SENDER), daemon=True)
    other.start()
    there.close()
    seconds, sound = link_end(here, RECEIVER)
    other.kill()
    yield {"mb": LINK_BYTES / 1e6, "sound": sound} | measured(gb_per_s=LINK_BYTES * (LINK_FRAMES - 1) / seconds / 1e9)


def link_end(pipe: Connection, rank: int) -> tuple[float, bool]:
    """One end of a link: its seconds for all frames but the first, which connects, and whether all bytes arrived."""
    if not DRY:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    link = dial(pipe, transport_named("shm" if DRY else "nccl"), rank, LINK_SECONDS)
    move = link.send if rank == SENDER else link.recv
    buffers = [link.buffer(LINK_BYTES) for _ in range(2)]
    for number, buffer in enumerate(buffers):
        buffer.fill_(7 + number if rank == SENDER else 0)
    move(buffers[0]).wait(LINK_SECONDS)
    began = time.perf_counter()
    pending = move(buffers[1])
    for number in range(2, LINK_FRAMES):
        done, pending = pending, move(buffers[number % 2])
        done.wait(LINK_SECONDS)
    pending.wait(LINK_SECONDS)
    seconds = time.perf_counter() - began
    sound = all(bool((each == 7 + number).all()) for number, each in enumerate(buffers))
    if rank == SENDER:
        time.sleep(LINK_SECONDS)  # until the receiver, which has all then, ends this process
    link.close()
    return seconds, sound


SECTIONS = {each.__name__: each for each in (environment, kernels, attention, engine, links)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}; all unless given")
    parser.add_argument("--seconds", type=float, default=540.0, help="when to start no further case")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes in the interpreter, checked and not timed")
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in SECTIONS]:
        parser.error(f"--only has {', '.join(unknown)}; allowed: {', '.join(SECTIONS)}")
    gpu = None if DRY else torch.cuda.get_device_name()
    results: Row = {"gpu": gpu, "dry_run": DRY, "cuda": torch.version.cuda, "python": platform.python_version()}
    results |= {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers", "numpy")}
    print(json.dumps(results) + ("\na dry run, in which nothing is timed" if DRY else ""), flush=True)
    machine, deadline = Machine(), time.monotonic() + options.seconds
    for name in options.only.split(","):
        print(f"-- {name}", flush=True)
        rows: list[Row] = results.setdefault(name, [])
        try:
            for row in SECTIONS[name](machine):
                rows.append(row)
                print(json.dumps(row), flush=True)
                if time.monotonic() > deadline:
                    print("out of time", flush=True)
                    break
        except Exception as error:  # noqa: BLE001  # the other sections' figures are still useful
            rows.append({"error": f"{type(error).__name__}: {error}", "sound": False})
            print(json.dumps(rows[-1]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    sound = all(row.get("sound", True) for name in options.only.split(",") for row in results[name])
    print("all results are sound" if sound else "SOMETHING IS WRONG, see above", flush=True)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
