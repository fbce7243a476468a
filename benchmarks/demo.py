"""`make demo`: runs a new user's first commands: a local cluster up, three prompts with timelines, down."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KVRELAY = Path(sys.executable).parent / "kvrelay"
SAMPLING = ("--max-tokens", "64", "--temperature", "0.5", "--seed", "1")
PROMPTS = (
    "def __init__(self, ",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "class Queue:\n    '''Create a queue object with a given maximum size.",
)


def kvrelay(*arguments: str) -> int:
    print(f"\n$ {shlex.join(('kvrelay', *arguments))}", flush=True)
    return subprocess.run([KVRELAY, *arguments], stdin=subprocess.DEVNULL, timeout=180).returncode


def main() -> int:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvrelay-demo-") as state:
        # A state folder of its own, because a cluster of the user's may be up.
        os.environ["KVRELAY_STATE_DIR"] = state
        failed = kvrelay("up", "--detach", "--grpc-port", "0", "--http-port", "0")
        if failed:
            return failed
        try:
            for prompt in PROMPTS:
                failed |= kvrelay("generate", prompt, *SAMPLING, "--timeline")
            failed |= kvrelay("status")
        finally:
            failed |= kvrelay("down")
    print(f"\nthe demo took {time.perf_counter() - start:.1f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
