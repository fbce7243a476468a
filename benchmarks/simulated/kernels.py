"""Seconds of a model's steps on a GPU, composed from measured kernels.

    step = layers * (4 GEMMs + attention + elementwise kernels) + the head's GEMM + overhead

The folder of measurements has `aic_gemm_measured.csv`, `aic_context_attention_measured.csv` and
`aic_generation_attention_measured.csv`, with the columns that are read here. Sizes between measured ones are
interpolated between their logarithms; beyond the largest, time grows as the work does.
"""

import csv
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from simulated.worker import StepSeconds

STEP_OVERHEAD = 0.5e-3
"""Seconds of a step in which the GPU waits for its host: stated, not measured."""
LAYER_OVERHEAD = 8e-6
"""Seconds of a layer's small kernels (two norms, rotation, activation, writing KV), however few the tokens: stated."""
MEMORY_SECONDS = 1 / 2.7e12
"""Seconds for each byte that these kernels read or write: the H100's 3.35 TB/s at 80 %."""
MEASURED = Path(__file__).parents[1] / "results" / "gpu-h100.json"
"""Steps of LLAMA_3_1_8B that `gpu.py` has measured on an H100."""


class Curve:
    """A positive function of a positive number, given at some points: a line between their logarithms; beyond the last
    one, in proportion."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self._x = sorted(points)
        self._y = [points[x] for x in self._x]

    def __call__(self, x: float) -> float:
        xs, ys = self._x, self._y
        if x <= xs[0]:
            return ys[0]
        if x >= xs[-1]:
            return ys[-1] * x / xs[-1]
        at = bisect_right(xs, x)
        share = math.log(x / xs[at - 1]) / math.log(xs[at] / xs[at - 1])
        return ys[at - 1] * (ys[at] / ys[at - 1]) ** share


class Surface:
    """The same for two numbers: curves of the second one, between which the first one interpolates."""

    def __init__(self, points: Mapping[tuple[float, float], float]) -> None:
        self._firsts = sorted({first for first, _ in points})
        self._curves = [Curve({b: y for (a, b), y in points.items() if a == first}) for first in self._firsts]

    def __call__(self, first: float, second: float) -> float:
        firsts, curves = self._firsts, self._curves
        if first <= firsts[0]:
            return curves[0](second)
        if first >= firsts[-1]:
            return curves[-1](second) * first / firsts[-1]
        at = bisect_right(firsts, first)
        low, high = curves[at - 1](second), curves[at](second)
        share = math.log(first / firsts[at - 1]) / math.log(firsts[at] / firsts[at - 1])
        return low * (high / low) ** share


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    head_dim: int = 128

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(n, k) of a layer's products: query, key and value; output; gate and up; down."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (heads + 2 * kv, self.hidden),
            (self.hidden, heads),
            (2 * self.feed_forward, self.hidden),
            (self.hidden, self.feed_forward),
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's KV, in 16 bits."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


LLAMA_3_1_8B = Shape(32, 4096, 32, 8, 14336, 128256)


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open() as file:
        return [row for row in csv.DictReader(file) if row["system"] == "h100_sxm"]


class Kernels:
    """Steps of a model on H100s."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._shape = shape
        products: dict[tuple[int, int], dict[float, float]] = {}
        for row in _rows(folder, "aic_gemm_measured.csv"):
            if row["gemm_dtype"] == "bfloat16":
                at = products.setdefault((int(row["n"]), int(row["k"])), {})
                at[float(row["m"])] = float(row["latency_ms"]) / 1e3
        self._products = products
        self._context = Surface(
            {
                (float(row["batch_size"]), float(row["isl"])): float(row["latency_ms"]) / 1e3
                for row in _rows(folder, "aic_context_attention_measured.csv")
                if int(row["num_heads"]) == shape.heads
            }
        )
        self._generation = Surface(
            {
                (float(row["batch_size"]), float(row["step"])): float(row["latency_ms"]) / 1e3
                for row in _rows(folder, "aic_generation_attention_measured.csv")
                if int(row["num_heads"]) == shape.heads
            }
        )
        sizes = sorted({m for points in products.values() for m in points})
        self._linear = Curve({m: self._layer(m) for m in sizes})
        self._head = Curve({m: self._gemm(m, shape.vocabulary, shape.hidden) for m in sizes})
        self.attend = lru_cache(1 << 16)(self._attend)

    def seconds(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Seconds of a step, as `StepSeconds` has it. A chunk behind a prefix attends for as long as a whole prompt
        with as many pairs of tokens does."""
        tokens = sum([count for _, count in chunks]) + len(contexts)
        attention = sum([self._context(1.0, self._equal(start, count)) for start, count in chunks])
        if contexts:
            attention += self.attend(len(contexts), sum(contexts) // len(contexts) // 16)
        layers = self._shape.layers
        return STEP_OVERHEAD + layers * (self._linear(tokens) + attention) + self._head(len(chunks) + len(contexts))

    @staticmethod
    def _equal(start: int, count: int) -> float:
        """Tokens of a whole prompt that has as many pairs as `count` tokens behind `start` ones."""
        return math.sqrt(count * (2.0 * start + count))

    def _attend(self, sequences: int, sixteenths: int) -> float:
        """Seconds of attention for sequences that decode; the mean context is given in sixteens of tokens."""
        return self._generation(sequences, max(1, 16 * sixteenths + 8))

    def _layer(self, tokens: float) -> float:
        """Seconds of a layer without its attention."""
        shape = self._shape
        seconds = sum(self._gemm(tokens, n, k) for n, k in shape.gemms) + LAYER_OVERHEAD
        # Norms and residual read and write the hidden state four times each, the activation reads two numbers for one.
        wide = 8 * shape.hidden + 3 * shape.feed_forward + 3 * shape.heads * shape.head_dim
        return seconds + tokens * 2 * wide * MEMORY_SECONDS

    def _gemm(self, m: float, n: int, k: int) -> float:
        """Seconds of a product between the measured sizes around it."""
        measured = self._products
        column = {
            each: Curve({float(inner): Curve(measured[each, inner])(m) for a, inner in measured if a == each})(k)
            for each in sorted({a for a, _ in measured})
        }
        return Curve({float(each): seconds for each, seconds in column.items()})(n)


def checked(step: StepSeconds, chunk: int) -> list[dict[str, float]]:
    """Composed seconds of the steps in MEASURED, as multiples of the measured ones: of whole prompts, in chunks of so
    many tokens, and of steps in which `batch` sequences decode."""
    results = json.loads(MEASURED.read_text())
    found = {}
    # Of what was measured again after a change, the later figure counts.
    for row in results["engine_before"] + results["engine"]:
        if row.get("weights", 16) != 16:
            continue
        if "prompt" in row:
            size = {"prompt": row["prompt"]}
            starts = range(0, row["prompt"], chunk)
            seconds = sum(step([(start, min(chunk, row["prompt"] - start))], []) for start in starts)
        else:
            size = {"batch": row["batch"], "context": row["context"]}
            seconds = step([], [row["context"]] * row["batch"])
        ratio = seconds / row["ttft_s" if "prompt" in row else "tpot_s"]
        found[tuple(size.items())] = size | {"composed_to_measured": round(ratio, 2)}
    return list(found.values())
