"""`kvrelay up --detach` on this machine: the same foreground process in the background, watched until it is ready.

Nobody restarts it, so it tries to start a lost cluster anew for ever (`--unattended`).
"""

import subprocess
import sys
from pathlib import Path

from kvrelay.cluster import state
from kvrelay.cluster.config import file as configfile
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import ERROR_PREFIX, RunError, UsageError
from kvrelay.cluster.processes import processes
from kvrelay.cluster.signals import Signals
from kvrelay.cluster.up.report import Report

POLL_SECONDS = 0.1
EXIT_SECONDS = 60.0


def start(config: ClusterConfig, report: Report) -> state.ClusterState:
    """Starts the cluster in a session of its own and returns when it is ready.

    Its progress goes to `up.out` in the state folder, its log to `up.log`.

    Raises:
        ClusterError: it can't be started; nothing of it is left.
        Interrupted: a signal came before it was ready; nothing of it is left.
    """
    signals = Signals()
    signals.install()
    written, output, log = (state.folder() / f"up.{suffix}" for suffix in ("yaml", "out", "log"))
    written.write_text(configfile.dump(config))
    command = [sys.executable, "-m", "kvrelay.cli", "up", "--unattended", "--config", str(written)]
    with output.open("w") as out, log.open("w") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
    try:
        with output.open() as lines:
            while process.poll() is None:
                fresh = lines.readlines()
                current = state.current()
                if current is not None and current.pid == process.pid and current.router:
                    return current
                for line in fresh:
                    report.phase(line.rstrip())
                signals.wait(POLL_SECONDS)
                signals.check()
        raise _error(process.returncode, log)
    except BaseException:
        process.terminate()
        if (running := processes.find(process.pid)) is not None:
            processes.end([running], EXIT_SECONDS)
        raise


def _error(code: int, log: Path) -> RunError | UsageError:
    """The error that the process printed before it ended."""
    lines = [line.removeprefix(ERROR_PREFIX) for line in log.read_text().splitlines() if line.startswith(ERROR_PREFIX)]
    if not lines:
        return RunError(f"the cluster's process ended while it was starting; see {log}")
    return UsageError(*lines) if code == UsageError.code else RunError(*lines)
