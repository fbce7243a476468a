"""Time an engine alone (no router, no hand-off) on a grid; prints one JSON line per cell.

    python benchmarks/offline.py MODEL [--dtype bfloat16] [--quantization int8] [--threads 2] [--cells prefill_512]
    python benchmarks/offline.py MODEL --ranks 2 --cells prefill_512,decode_8
    PEERS/vllm/bin/python benchmarks/offline.py MODEL --engine vllm
    PEERS/other/bin/python benchmarks/offline.py MODEL.gguf --engine llama_cpp

Rates are tokens/s of wall time, or with `--cpu` of the process's CPU time; then one thread computes. The grid is what
other engines are commonly timed on: prefill of one request; decode of a batch with 128 tokens in and 64 out, greedy,
end of sequence ignored, over the decode steps alone. llama.cpp's Python binding evaluates one sequence, so it has no
batches. Imports only what the engine brings. A figure of kvrelay's alone:

    outside_forward   share of the stepping thread's CPU time in decode steps that isn't the forward pass: scheduler,
                      runner, and the sampler unless one native call computes a step and chooses its tokens

With `--ranks N`, kvrelay as one process and as N ranks with as many threads together, in turns: rates of both, and
their ratio, each the median of the rounds with the lower and the upper quartile.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

PREFILLS = (512, 2048)
BATCHES = (1, 8, 32)
PROMPT = 128
OUT = 64
TRIES = 3
Clock = Callable[[], float]


class Engine(Protocol):
    def seconds(self, batch: int, length: int, out: int) -> tuple[float, ...]:
        """A batch of requests with `length` tokens in and `out` tokens out: seconds by the clock; of kvrelay also the
        stepping thread's CPU time, and how much of that was the forward pass."""


def prompts(batch: int, length: int) -> list[list[int]]:
    return [random.choices(range(2, 8000), k=length) for _ in range(batch)]


class Vllm:
    def __init__(self, args: argparse.Namespace, clock: Clock) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{args.threads - 1}"
        from vllm import LLM, SamplingParams

        self._clock, self._sampling = clock, SamplingParams
        self._llm = LLM(args.model, dtype=args.dtype, max_model_len=4096, enable_prefix_caching=False, max_num_seqs=64)

    def seconds(self, batch: int, length: int, out: int) -> tuple[float, ...]:
        sampling = self._sampling(max_tokens=out, ignore_eos=True, temperature=0)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts(batch, length)]
        start = self._clock()
        self._llm.generate(inputs, sampling, use_tqdm=False)
        return (self._clock() - start,)


class LlamaCpp:
    def __init__(self, args: argparse.Namespace, clock: Clock) -> None:
        from llama_cpp import Llama

        self._clock = clock
        threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
        self._model = Llama(
            args.model, n_ctx=4096, n_batch=2048, n_ubatch=512, flash_attn=True, verbose=False, **threads
        )

    def seconds(self, batch: int, length: int, out: int) -> tuple[float, ...]:
        (prompt,) = prompts(batch, length)
        following = random.choices(range(2, 8000), k=out - 1)
        self._model.reset()
        start = self._clock()
        self._model.eval(prompt)
        for token in following:
            self._model.eval([token])
        return (self._clock() - start,)


class Kvrelay:
    """The engine of kvrelay: scheduler, runner and sampler."""

    def __init__(self, args: argparse.Namespace, clock: Clock, ranks: int = 1) -> None:
        """Loads the model, and prints how long that took. Ranks other than 0 end with this process."""
        from kvrelay.engine.config import EngineConfig
        from kvrelay.engine.request import Request, SamplingParams
        from kvrelay.models import resolve
        from kvrelay.worker.config import WorkerConfig
        from kvrelay.worker.server import WorkerServer

        options = {"threads": args.threads, "quantization": args.quantization, "tensor_parallel": ranks}
        config = EngineConfig(**options, kv_memory_bytes=2**30 // ranks, prefix_cache=False)
        os.environ.setdefault("KVRELAY_JOIN_TOKEN", "0" * 64)  # no worker is without one
        start = time.perf_counter()
        self._server = WorkerServer(WorkerConfig("offline", "colocated", args.model, args.dtype, engine=config))
        # All that a worker starts for its engine, the other ranks among it; neither ports nor heartbeats.
        self._engine, runner = self._server._make_engine(resolve(args.model), config, lambda share: None)
        load = time.perf_counter() - start
        print(json.dumps({"engine": "kvrelay", "load_s": round(load, 2)}), flush=True)
        self._clock, self._request, self._sampling = clock, Request, SamplingParams
        self._requests, self._vocabulary = 0, runner.spec.vocab_size
        self._forward = 0.0
        """CPU seconds of the forward pass so far."""
        # Only the native decoder can choose tokens itself; transformers' code is the way's.
        steps = getattr(runner, "model", None) or runner.way
        for name in ("forward", "logits", "choose", "run"):
            if hasattr(steps, name):
                setattr(steps, name, self._timed(getattr(steps, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **options)
            self._forward += time.thread_time() - start
            return result

        return call

    def seconds(self, batch: int, length: int, out: int) -> tuple[float, ...]:
        sampling = self._sampling(max_tokens=out, temperature=0.0)
        for _ in range(batch):
            self._requests += 1
            tokens = tuple(random.choices(range(2, self._vocabulary), k=length))
            self._engine.scheduler.add(self._request(str(self._requests), 0, tokens, length, sampling))
        before = self._forward
        start, start_cpu = self._clock(), time.thread_time()
        while self._engine.has_work:
            self._engine.step()
        elapsed, cpu = self._clock() - start, time.thread_time() - start_cpu
        return elapsed, cpu, self._forward - before


ENGINES: dict[str, Callable[[argparse.Namespace, Clock], Engine]] = {
    "kvrelay": Kvrelay,
    "vllm": Vllm,
    "llama_cpp": LlamaCpp,
}


def figures(engine: Engine, cell: str, tries: int = TRIES) -> dict[str, float]:
    """The figures of one cell: the best of some tries."""
    kind, count = cell.split("_")
    if kind == "prefill":
        return {"tokens_per_s": int(count) / min(engine.seconds(1, int(count), 1)[0] for _ in range(tries))}
    whole = min(engine.seconds(int(count), PROMPT, OUT + 1) for _ in range(tries))
    first = min(engine.seconds(int(count), PROMPT, 1) for _ in range(tries))
    elapsed, *times = (a - b for a, b in zip(whole, first, strict=True))
    return {"tokens_per_s": int(count) * OUT / elapsed} | (
        {"outside_forward": 1 - times[1] / times[0]} if times else {}
    )


def in_turns(args: argparse.Namespace, cells: list[str]) -> Iterator[dict[str, Any]]:
    """The figures of each cell, of one process and of ranks: [lower quartile, median, upper quartile]."""
    engines = [Kvrelay(args, time.perf_counter, ranks) for ranks in (1, args.ranks)]
    for cell in cells:
        pairs = []
        for number in range(args.rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            rates = {index: figures(engines[index], cell, 1)["tokens_per_s"] for index in order}
            if number:  # the first one warms up
                pairs.append((rates[0], rates[1]))
        one, several = zip(*pairs, strict=True)
        ratios = [there / here for here, there in pairs]
        found = {"one_process": one, "ranks": several, "ratio": ratios}
        yield {"engine": "kvrelay", "cell": cell, "degree": args.ranks} | {
            name: [round(each, 3) for each in statistics.quantiles(of, n=4, method="inclusive")]
            for name, of in found.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, or a GGUF file")
    parser.add_argument("--engine", choices=ENGINES, default="kvrelay")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of kvrelay and vLLM")
    parser.add_argument("--quantization", default="none", help="of kvrelay's weights, see docs/quantization.md")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="rates by CPU time; with --threads 1")
    grid = [f"prefill_{length}" for length in PREFILLS] + [f"decode_{batch}" for batch in BATCHES]
    parser.add_argument("--cells", help="all that the engine can, unless given: " + ", ".join(grid))
    parser.add_argument("--ranks", type=int, help="compare kvrelay with itself over so many tensor-parallel ranks")
    parser.add_argument("--rounds", type=int, default=20, help="with --ranks")
    args = parser.parse_args()
    random.seed(0)
    if args.ranks:
        for found in in_turns(args, args.cells.split(",") if args.cells else grid):
            print(json.dumps(found), flush=True)
        return
    engine = ENGINES[args.engine](args, time.process_time if args.cpu else time.perf_counter)
    engine.seconds(1, 64, 4)
    for cell in args.cells.split(",") if args.cells else grid[: -2 if args.engine == "llama_cpp" else None]:
        found: dict[str, Any] = {
            name: round(value, 1 if name == "tokens_per_s" else 3) for name, value in figures(engine, cell).items()
        }
        print(json.dumps({"engine": args.engine, "cell": cell} | found), flush=True)


if __name__ == "__main__":
    main()
