"""kvrelay's pair (one prefill, one decode worker) and vLLM's (NIXL), in turn: time to first token and per output token.

    python benchmarks/pair.py MODEL --peers PEERS --out benchmarks/results/pair-2-cores.json
    python benchmarks/pair.py MODEL --alone kvrelay                      # one of them; one JSON line per cell
    PEERS/vllm/bin/python benchmarks/pair.py MODEL --alone vllm

Each worker computes in one thread. Prompts are random and cold, one at a time, through each system's own front door:
kvrelay's router (gRPC, where workers hand over by themselves); of vLLM's two HTTP servers, each bound to a core of its
own, the first for one token, and with what that says of its KV the second for the rest. Cells are seconds: `ttft_N` and
`tpot_N` with N tokens in and 32 out, medians of each run's prompts. `start` is the time until the pair takes requests.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from turns import OWN, Engine, add_options, compare, end_group, end_on_signal, setting

LENGTHS = (128, 512, 2048)
OUT = 32
PROMPTS = 3
START_SECONDS = 300
VLLM_PORTS = (28100, 28101), (28110, 28111)
"""Ports of each server: of HTTP, and the side channel of its NIXL."""
KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
NOWHERE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **NOWHERE}
Times = Callable[[list[int], int], list[float]]
"""Function that sends a prompt and the number of tokens to generate, and returns when each token came."""


@contextmanager
def kvrelay_pair(model: Path, folder: Path, dtype: str) -> Iterator[Times]:
    """A running pair of kvrelay's."""
    from clusters import local_pair

    with local_pair(model, folder, dtype) as client:

        def times(prompt: list[int], out: int) -> list[float]:
            chunks = client.generate(prompt, max_tokens=out, temperature=0.0, ignore_eos=True, timeout=120)
            return [time.perf_counter() for chunk in chunks for _ in chunk.token_ids]

        yield times


@contextmanager
def vllm_server(model: Path, core: int, log: Path, dtype: str) -> Iterator[int]:
    """A vLLM server computing on `core`; gives its port, at once."""
    port, side_port = VLLM_PORTS[core]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "UCX_TLS": "tcp,shm,cma,self",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--served-model-name", "peer"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-model-len", "4096"]
    command += ["--kv-transfer-config", json.dumps(KV_TRANSFER)]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield port
    finally:
        end_group(process)


def wait_until_ready(port: int, log: Path, deadline: float) -> None:
    while True:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM did not start: {log.read_text()[-2000:]}") from None
            time.sleep(0.5)


@contextmanager
def vllm_pair(model: Path, folder: Path, dtype: str) -> Iterator[Times]:
    """A running pair of vLLM's."""

    def post(port: int, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, headers)
        return urllib.request.urlopen(request, timeout=120)

    def times(prompt: list[int], out: int) -> list[float]:
        body = {"model": "peer", "prompt": prompt, "temperature": 0, "ignore_eos": True}
        with post(prefill, body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}) as response:
            handover = json.load(response)["kv_transfer_params"]
        with post(decode, body | {"max_tokens": out, "stream": True, "kv_transfer_params": handover}) as stream:
            return [time.perf_counter() for line in stream if line.startswith(b"data: {")]

    with ExitStack() as stack:
        logs = folder / "prefill.log", folder / "decode.log"
        ports = [stack.enter_context(vllm_server(model, core, log, dtype)) for core, log in enumerate(logs)]
        deadline = time.monotonic() + START_SECONDS
        for port, log in zip(ports, logs, strict=True):
            wait_until_ready(port, log, deadline)
        prefill, decode = ports
        yield times


Pair = Callable[[Path, Path, str], AbstractContextManager[Times]]
"""Function that runs a pair with a checkpoint, a folder for its files and a dtype, while it is a context."""
PAIRS: dict[str, Pair] = {OWN: kvrelay_pair, "vllm": vllm_pair}


def alone(name: str, model: Path, dtype: str) -> None:
    """Times one system's pair once."""

    def report(cell: str, seconds: float) -> None:
        print(json.dumps({"engine": name, "cell": cell, "seconds": round(seconds, 5)}), flush=True)

    random.seed(0)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="pair-") as folder, PAIRS[name](model, Path(folder), dtype) as times:
        report("start", time.perf_counter() - start)

        def seconds(length: int, out: int) -> tuple[float, float]:
            """Seconds to the first token, and seconds per token after it."""
            prompt = random.choices(range(2, 4000), k=length)
            begun = time.perf_counter()
            came = times(prompt, out)
            return came[0] - begun, (came[-1] - came[0]) / (len(came) - 1)

        seconds(64, 8)
        for length in LENGTHS:
            first, following = zip(*(seconds(length, OUT) for _ in range(PROMPTS)), strict=True)
            report(f"ttft_{length}", statistics.median(first))
            report(f"tpot_{length}", statistics.median(following))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--alone", choices=PAIRS, help="time one system once")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of both systems")
    add_options(parser)
    args = parser.parse_args()
    end_on_signal()
    if args.alone:
        return alone(args.alone, args.model, args.dtype)
    if args.peers is None:
        parser.error("--peers is needed, or --alone")
    own, vllm = Path(sys.executable), args.peers / "vllm" / "bin" / "python"
    packages = {OWN: (own, ("kvrelay", "torch", "ray", "grpcio")), "vllm": (vllm, ("vllm", "torch", "nixl"))}
    pairs = {
        name: Engine(
            (str(python), __file__, str(args.model), "--dtype", args.dtype, "--alone", name), python, distributions
        )
        for name, (python, distributions) in packages.items()
    }
    result = setting(pairs) | {"model": args.model.resolve().name, "threads per worker": 1, "dtype": args.dtype}
    return compare(pairs, args, result, "seconds", larger_is_better=False)


if __name__ == "__main__":
    main()
