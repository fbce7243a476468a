"""Time vLLM's disaggregated pair on CPU (KV through NIXL); prints one JSON line per cell, as `benchmarks/pair.py` does.

    DIR/vllm/bin/python benchmarks/peers/pair.py MODEL

A prefill and a decode server, the forward pass of each bound to a core of its own. A request goes to the first for one
token, and with what that says of its KV to the second for the rest. Imports nothing but the standard library.
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LENGTHS = (128, 512, 2048)
OUT = 32
PROMPTS = 3
START_SECONDS = 300
KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(model: str, core: int, log: Path) -> Iterator[int]:
    """A vLLM server computing on `core`; gives its port, at once."""
    port = free_port()
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,shm,cma,self",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(Path(sys.executable).parent / "vllm"), "serve", model, "--served-model-name", "peer"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "4096"]
    command += ["--kv-transfer-config", json.dumps(KV_TRANSFER)]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield port
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(ports: tuple[int, ...], logs: tuple[Path, ...]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for port, log in zip(ports, logs, strict=True):
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"vLLM did not start: {log.read_text()[-2000:]}") from None
                time.sleep(0.5)


def post(port: int, body: dict[str, Any]) -> Any:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, headers)
    return urllib.request.urlopen(request, timeout=120)


def seconds(prefill: int, decode: int, length: int, out: int) -> tuple[float, float]:
    """Seconds to the first token, and seconds per token after it."""
    prompt = random.choices(range(2, 8000), k=length)
    body = {"model": "peer", "prompt": prompt, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    with post(prefill, body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}) as response:
        handover = json.load(response)["kv_transfer_params"]
    with post(decode, body | {"max_tokens": out, "stream": True, "kv_transfer_params": handover}) as stream:
        times = [time.perf_counter() for line in stream if line.startswith(b"data: {")]
    return times[0] - start, (times[-1] - times[0]) / (len(times) - 1)


def report(cell: str, figure: float) -> None:
    print(json.dumps({"engine": "vllm", "cell": cell, "seconds": round(figure, 5)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    args = parser.parse_args()
    # The servers are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    random.seed(0)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vllm-pair-") as folder:
        logs = Path(folder) / "prefill.log", Path(folder) / "decode.log"
        with server(args.model, 0, logs[0]) as prefill, server(args.model, 1, logs[1]) as decode:
            wait_until_ready((prefill, decode), logs)
            report("start", time.perf_counter() - start)
            seconds(prefill, decode, 64, 8)
            for length in LENGTHS:
                first, following = zip(*(seconds(prefill, decode, length, OUT) for _ in range(PROMPTS)), strict=True)
                report(f"ttft_{length}", statistics.median(first))
                report(f"tpot_{length}", statistics.median(following))


if __name__ == "__main__":
    main()
