"""`kvrelay up --detach` on this machine: the same foreground process, in the background, watched until it is ready."""

import os
import subprocess
import sys
from pathlib import Path

from kvrelay.cluster import configfile, state
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.report import Report, follow
from kvrelay.cluster.state import ClusterState

REPORT_FD = "KVRELAY_REPORT_FD"
"""Environment variable with the pipe on which a background process tells how it gets on."""
EXIT_SECONDS = 60.0


def start(config: ClusterConfig, report: Report) -> ClusterState:
    """Starts the cluster in a session of its own and returns when it is ready.

    Its log goes to `up.log` in the state folder. Ending the wait (Ctrl-C) ends the cluster as well.

    Raises:
        ClusterError: it can't be started; nothing of it is left.
    """
    written = state.folder() / "up.yaml"
    written.write_text(configfile.dump(config))
    reading, writing = os.pipe()
    with log_path().open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvrelay.cluster.cli", "up", "--config", str(written)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {REPORT_FD: str(writing)},
            pass_fds=(writing,),
            start_new_session=True,
        )
    os.close(writing)
    try:
        with os.fdopen(reading) as lines:
            return follow(lines, report, log_path())
    except BaseException:
        process.terminate()
        try:
            process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def report_descriptor() -> int | None:
    """The pipe that this process was given to report on; kept from its own children."""
    given = os.environ.pop(REPORT_FD, None)
    if given is None:
        return None
    descriptor = int(given)
    os.set_inheritable(descriptor, False)
    return descriptor


def log_path() -> Path:
    """Where a background cluster's own output is."""
    return state.folder() / "up.log"
