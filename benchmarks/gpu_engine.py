"""The whole engine on an 8B Llama shape with random weights, compared with transformers; see `gpu.py`."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from gpu_measure import Machine
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvrelay.engine.attention.base import HeadNorm
from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.pool import allocate_pool
from kvrelay.engine.models.fast.decoder import Decoder, Layer, Weights
from kvrelay.engine.models.reading.config import ModelConfig, RopeConfig
from kvrelay.engine.models.reading.families import Traits
from kvrelay.engine.models.reading.rope import frequencies
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.gpu import GpuRunner
from kvrelay.kernels.ops import Linear
from kvrelay.kernels.triton import gpu_ops, overlap

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_positions=131072,
    norm_eps=1e-5,
    rope=RopeConfig(500000.0),
    tie_embeddings=False,
    traits=Traits(windows=(0,) * 32),
    eos_token_ids=(),
    dtype="bfloat16",
)
TINY = replace(
    LLAMA_8B,
    layers=1,
    hidden_size=64,
    intermediate_size=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=160,
    max_positions=256,
    rope=RopeConfig(10000.0),
    traits=Traits(windows=(0,)),
    dtype="float16",
)
KV_BYTES = 72 * 2**30
"""Bytes of the pool on a GPU: 590k tokens of the 8B shape."""
STEPS = 32
"""Decode steps that are timed."""
WARM_STEPS = 3
"""Those before."""


class Bench:
    """A model with random weights, its runner and engine."""

    def __init__(self, machine: Machine, kv_bytes: int = KV_BYTES) -> None:
        """`kv_bytes`: of the pool on a GPU."""
        self.machine = machine
        self.config = self.model(machine)
        options = EngineConfig(
            block_size=16,
            kv_memory_bytes=2**18 if machine.dry else kv_bytes,
            max_batch_tokens=32 if machine.dry else 8192,
            max_sequences=2 if machine.dry else 256,
            max_context=64 if machine.dry else 32768 + 256,
            prefix_cache=False,
        ).on("cpu" if machine.dry else "cuda")
        layout = self.config.kv_layout(self.config.dtype, options.kv_dtype, options.block_size, "HND")
        pool = allocate_pool(layout, options.kv_memory_bytes, machine.device)
        pool.tensor.normal_()
        spec = ModelSpec(
            architecture=self.config.architecture,
            vocab_size=self.config.vocab_size,
            max_context=min(options.max_context, pool.num_tokens),
            eos_token_ids=(),
            dtype=self.config.dtype,
            fingerprint="random",
        )
        with torch.inference_mode():
            self._weights, self.weight_bytes = random_weights(self.config, pool.tensor.device)
            model = Decoder(self.config, self._weights, gpu_ops.GpuOps())
        self.runner = GpuRunner(spec, model, pool, options)
        self.options = options
        began = time.perf_counter()
        self.runner.warm_up()
        self.warm_up_s = time.perf_counter() - began

    @staticmethod
    def model(machine: Machine) -> ModelConfig:
        """The model's shape."""
        return TINY if machine.dry else LLAMA_8B

    def engine(self) -> Engine:
        return engine_on(self.runner, self.options)

    @property
    def pool_tokens(self) -> int:
        return self.runner.pool.num_blocks * self.options.block_size

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Steps of a full batch whose KV is in the pool from the start, as on a decode worker."""
        engine = self._decoding(batch, context, WARM_STEPS + steps + 1)
        for _ in range(WARM_STEPS):
            engine.step()
        self._synchronize()
        began = time.perf_counter()
        tokens_out = sum(report.token is not None for _ in range(steps) for report in engine.step())
        self._synchronize()
        seconds = (time.perf_counter() - began) / steps
        while engine.has_work:
            engine.step()
        kv_bytes = batch * (context + steps // 2) * self.runner.layout.token_bytes
        must_move = self.weight_bytes + kv_bytes
        return {
            "batch": batch,
            "context": context,
            "step_s": seconds,
            "tokens_per_s": tokens_out / steps / seconds,
            "gb_per_s": must_move / seconds / 1e9,
            "share": must_move / seconds / self.machine.limits.bytes_per_second,
        }

    def _decoding(self, batch: int, context: int, max_tokens: int) -> Engine:
        """An engine with `batch` sequences of `context` tokens, ready to decode."""
        engine = self.engine()
        for index in range(batch):
            request = self._request(index, context, max_tokens)
            reservation = engine.scheduler.reserve(request)
            if reservation is None:
                raise RuntimeError(f"too few free blocks for {batch} sequences of {context} tokens")
            engine.scheduler.resume(request, 1, reservation.hold)
        return engine

    def _request(self, index: int, length: int, max_tokens: int) -> Request:
        tokens = tuple((index * 31 + position) % self.config.vocab_size for position in range(length))
        return Request(f"r{index}", 1, tokens, length, SamplingParams(max_tokens=max_tokens, temperature=0.0))

    def check(self) -> dict[str, Any]:
        """Whether captured graphs give a batch the same tokens as kernels that are launched one by one, each of which
        begins when the one before it has ended.
        """
        rows = 2 if self.machine.dry else 8
        found = self._tokens(self.runner, rows)
        with mock.patch.object(overlap, "gdc_wait", None):
            model = Decoder(self.config, self._weights, gpu_ops.GpuOps())
            plain = GpuRunner(self.runner.spec, model, self.runner.pool, self.options)
            expected = self._tokens(plain, rows)
        return {"check": "graphs against single launches", "rows": rows, "sound": found == expected}

    def _tokens(self, runner: GpuRunner, rows: int) -> dict[str, list[int | None]]:
        """The completions of so many short prompts. Their step fills a size of graphs: products of other sizes may
        differ in their last bits.
        """
        engine = engine_on(runner, self.options)
        for index in range(rows):
            engine.scheduler.add(self._request(index, 16, 4))
        heard: dict[str, list[int | None]] = {}
        while engine.has_work:
            for report in engine.step():
                if report.error is not None:
                    raise RuntimeError(report.error)
                heard.setdefault(report.sequence.request.request_id, []).append(report.token)
        return heard

    def prefill(self, length: int, repeats: int = 3) -> dict[str, Any]:
        """One prompt, from its arrival to its first token."""
        engine = self.engine()
        seconds = []
        for attempt in range(1 if self.machine.dry else repeats):
            engine.scheduler.add(self._request(attempt, length, 1))
            self._synchronize()
            began = time.perf_counter()
            while engine.has_work:
                engine.step()
            seconds.append(time.perf_counter() - began)
        config = self.config
        attention = 2 * config.layers * config.heads * config.head_dim * length**2
        # Two operations for each weight, of 2 bytes; the head's product is for the last token only.
        head = config.vocab_size * config.hidden_size * 2
        work = (self.weight_bytes - head) * length + attention
        best = sorted(seconds)[len(seconds) // 2]
        return {
            "prompt": length,
            "ttft_s": best,
            "tokens_per_s": length / best,
            "tflop_per_s": work / best / 1e12,
            "share": work / best / self.machine.limits.flops_per_second,
        }

    def profile(self, batch: int, context: int) -> dict[str, Any]:
        """The kernels of a layer in a graph's replay, and how long the device idles between them."""
        engine = self._decoding(batch, context, 40)
        for _ in range(5):
            engine.step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(10):
                engine.step()
            self._synchronize()
        while engine.has_work:
            engine.step()
        kernels = [
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiled.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        ]
        kernels.sort()
        # A layer has one rotation; steps are counted by the sampler.
        rotations = sum("rope_kv_write" in name for _, _, name in kernels)
        samplers = [index for index, (_, _, name) in enumerate(kernels) if "choose_kernel" in name]
        between = [kernels[first + 1 : last + 1] for first, last in pairwise(samplers)]
        gaps = [sum(max(0.0, b[0] - a[1]) for a, b in pairwise(step)) for step in between if step]
        lengths = [step[-1][1] - step[0][0] for step in between if step]
        names: dict[str, float] = {}
        for begin, end, name in kernels:
            names[name[:60]] = names.get(name[:60], 0.0) + end - begin
        per_layer = [following - index for index, following in _rotation_intervals(kernels)]
        return {
            "batch": batch,
            "context": context,
            "kernels_per_layer": max(per_layer, default=0),
            "kernels_per_step": len(between[0]) if between else 0,
            "layers": rotations // max(len(samplers), 1),
            "gap_share": sum(gaps) / sum(lengths) if lengths else None,
            "longest_kernels_us": dict(sorted(names.items(), key=lambda entry: -entry[1])[:12]),
        }

    def _synchronize(self) -> None:
        if not self.machine.dry:
            torch.cuda.synchronize()


def _rotation_intervals(kernels: list[tuple[float, float, str]]) -> Iterator[tuple[int, int]]:
    """Index of each rotation's kernel and of the next one's, within a step."""
    places = [index for index, (_, _, name) in enumerate(kernels) if "rope_kv_write" in name]
    for first, second in pairwise(places):
        if not any("choose_kernel" in name for _, _, name in kernels[first:second]):
            yield first, second


def random_weights(config: ModelConfig, device: torch.device) -> tuple[Weights, int]:
    """Random weights on the device, and the bytes of those that a decode step reads."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[config.dtype]
    read = 0

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)

    def linear(outputs: int, inputs: int) -> Linear:
        nonlocal read
        read += outputs * inputs * dtype.itemsize
        return gpu_ops.linear(random(outputs, inputs), None)

    def norm() -> Tensor:
        return torch.ones(config.hidden_size, dtype=dtype, device=device)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    no_norm: HeadNorm | None = None
    layers = tuple(
        Layer(
            input_norm=norm(),
            qkv=linear((config.heads + 2 * config.kv_heads) * dim, hidden),
            qk_norm=no_norm,
            output=linear(hidden, config.heads * dim),
            mlp_norm=norm(),
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
        )
        for _ in range(config.layers)
    )
    weights = Weights(
        embedding=random(config.vocab_size, hidden),
        layers=layers,
        norm=norm(),
        head=linear(config.vocab_size, hidden),
        frequencies=frequencies(config.rope, dim).to(device),
    )
    return weights, read


class Transformers:
    """The same shape in transformers, with its own cache."""

    def __init__(self, machine: Machine, config: ModelConfig) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.machine = machine
        self.config = config
        shape = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            attn_implementation="sdpa",
        )
        self.dtype = torch.bfloat16 if not machine.dry else torch.float32
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(machine.device):
                self.model = LlamaForCausalLM(shape).eval()
        finally:
            torch.set_default_dtype(before)

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Times decode steps on a cache that is full from the start."""
        from transformers import DynamicCache

        config, device = self.config, self.machine.device
        cache = DynamicCache()
        shape = (batch, config.kv_heads, context, config.head_dim)
        for layer in range(config.layers):
            keys, values = (torch.randn(shape, dtype=self.dtype, device=device) for _ in range(2))
            cache.update(keys, values, layer)
        token = torch.ones(batch, 1, dtype=torch.int64, device=device)

        def step() -> None:
            nonlocal token
            logits = self.model(token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)

        for _ in range(2):
            step()
        if not self.machine.dry:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        token.tolist()
        seconds = (time.perf_counter() - began) / steps
        return {"step_s": seconds, "tokens_per_s": batch / seconds}
