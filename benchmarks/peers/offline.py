"""Time another engine on the grid of `benchmarks/offline.py`; prints one JSON line per cell, as that does.

    DIR/vllm/bin/python  benchmarks/peers/offline.py vllm      MODEL
    DIR/other/bin/python benchmarks/peers/offline.py llama_cpp MODEL.gguf

Every engine gets the same prompts, in bfloat16 (llama.cpp in what its file has), and the best of as many tries as
kvrelay: three of a prefill, two of a batch. llama.cpp's Python binding evaluates one sequence, so it has no batches.
Rates are tokens a second of wall time, or with `--cpu` of the process's CPU time; then one thread computes. Imports
only what its engine brings.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable

PREFILLS = (512, 2048)
BATCHES = (1, 8, 32)
PROMPT = 128
OUT = 64

Seconds = Callable[[int, int, int], float]
"""Function from (batch, tokens in, tokens out) to the seconds that a batch of requests takes, by the clock."""
Clock = Callable[[], float]


def prompts(batch: int, length: int) -> list[list[int]]:
    return [random.choices(range(2, 8000), k=length) for _ in range(batch)]


def vllm(path: str, threads: int, clock: Clock) -> Seconds:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    from vllm import LLM, SamplingParams

    llm = LLM(path, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False, max_num_seqs=64)

    def seconds(batch: int, length: int, out: int) -> float:
        params = SamplingParams(max_tokens=out, ignore_eos=True, temperature=0)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts(batch, length)]
        start = clock()
        llm.generate(inputs, params, use_tqdm=False)
        return clock() - start

    return seconds


def llama_cpp(path: str, threads: int, clock: Clock) -> Seconds:
    from llama_cpp import Llama

    model = Llama(
        path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, n_batch=2048, n_ubatch=512, verbose=False
    )

    def seconds(batch: int, length: int, out: int) -> float:
        (prompt,) = prompts(batch, length)
        following = random.choices(range(2, 8000), k=out - 1)
        model.reset()
        start = clock()
        model.eval(prompt)
        for token in following:
            model.eval([token])
        return clock() - start

    return seconds


ENGINES = {"vllm": vllm, "llama_cpp": llama_cpp}


def rate(seconds: Seconds, cell: str) -> float:
    """Tokens a second."""
    kind, count = cell.split("_")
    if kind == "prefill":
        return int(count) / min(seconds(1, int(count), 1) for _ in range(3))
    batch = int(count)
    whole = min(seconds(batch, PROMPT, OUT + 1) for _ in range(2))
    first = min(seconds(batch, PROMPT, 1) for _ in range(2))
    return batch * OUT / (whole - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="rates by CPU time; with --threads 1")
    parser.add_argument("--cells", help="all that the engine can, unless given")
    args = parser.parse_args()
    random.seed(0)
    batches = BATCHES[:1] if args.engine == "llama_cpp" else BATCHES
    grid = [f"prefill_{length}" for length in PREFILLS] + [f"decode_{batch}" for batch in batches]
    clock = time.process_time if args.cpu else time.perf_counter
    seconds = ENGINES[args.engine](args.model, args.threads, clock)
    seconds(1, 64, 4)
    for cell in grid if args.cells is None else args.cells.split(","):
        figures = {"engine": args.engine, "cell": cell, "tokens_per_s": round(rate(seconds, cell), 1)}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
