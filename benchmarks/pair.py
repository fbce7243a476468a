"""kvrelay's pair (one prefill, one decode worker) and vLLM's (NIXL), in turn: time to first token and per output token.

    python benchmarks/pair.py MODEL --peers PEERS --out benchmarks/results/pair-2-cores.json --markdown
    python benchmarks/pair.py MODEL --alone           # kvrelay only; one JSON line per cell

Each worker computes in one thread. Prompts are random and cold, one at a time, through each system's own front door:
kvrelay's router (gRPC, where workers hand over by themselves), vLLM's two HTTP servers (`peers/pair.py`). Cells are
seconds: `ttft_N` and `tpot_N` with N tokens in and 32 out, medians of each run's prompts. `start` is the time until the
pair takes requests.
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from local_cluster import local_cluster
from turns import OWN, Engine, end_on_signal, in_turn, markdown, save, setting, summary

HERE = Path(__file__).parent
LENGTHS = (128, 512, 2048)
OUT = 32
PROMPTS = 3
CONFIG = """\
model: {{path: {model}, dtype: bfloat16}}
prefill: {{replicas: 1, threads: 1}}
decode: {{replicas: 1, threads: 1}}
"""


def alone(model: Path) -> None:
    """Times kvrelay's pair once."""
    from kvrelay.client import Client

    random.seed(0)
    start = time.perf_counter()
    with ExitStack() as stack:
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "pair.yaml"
        config.write_text(CONFIG.format(model=json.dumps(str(model.resolve()))))
        cluster = stack.enter_context(local_cluster("--config", str(config)))
        client = stack.enter_context(Client(cluster.router))
        report("start", time.perf_counter() - start)

        def seconds(length: int, out: int) -> tuple[float, float]:
            prompt = random.choices(range(2, 8000), k=length)
            begun = time.perf_counter()
            chunks = client.generate(prompt, max_tokens=out, temperature=0.0, ignore_eos=True, timeout=120)
            times = [time.perf_counter() for chunk in chunks for _ in chunk.token_ids]
            return times[0] - begun, (times[-1] - times[0]) / (len(times) - 1)

        seconds(64, 8)
        for length in LENGTHS:
            first, following = zip(*(seconds(length, OUT) for _ in range(PROMPTS)), strict=True)
            report(f"ttft_{length}", statistics.median(first))
            report(f"tpot_{length}", statistics.median(following))


def report(cell: str, seconds: float) -> None:
    print(json.dumps({"engine": OWN, "cell": cell, "seconds": round(seconds, 5)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--alone", action="store_true", help="time kvrelay once")
    parser.add_argument("--peers", type=Path, help="folder that peers/setup.sh made")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--under", default="", help="command that each system's process is run under")
    parser.add_argument("--timeout", type=float, default=1800.0, help="of one system's run, in seconds")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    args = parser.parse_args()
    end_on_signal()
    if args.alone:
        alone(args.model)
        return
    if args.peers is None:
        parser.error("--peers is needed, or --alone")
    own, vllm = Path(sys.executable), args.peers / "vllm" / "bin" / "python"
    pairs = {
        OWN: Engine((str(own), __file__, str(args.model), "--alone"), own, ("kvrelay", "torch", "ray", "grpcio")),
        "vllm": Engine((str(vllm), str(HERE / "peers" / "pair.py"), str(args.model)), vllm, ("vllm", "torch", "nixl")),
    }
    result = setting(pairs) | {"model": args.model.resolve().name, "threads per worker": 1, "dtype": "bfloat16"}
    runs = in_turn(pairs, "seconds", args.repeats, shlex.split(args.under), args.timeout)
    result["cells"] = summary(runs, larger_is_better=False)
    if args.out is not None:
        save(args.out, result)
    if args.markdown:
        print(markdown(result["cells"], "seconds", 3))


if __name__ == "__main__":
    main()
