"""The launcher's script, with fake `ray`, `kvrelay` and `sleep` commands that record their calls.

The fakes use files in one folder: `gcs` exists while Ray's GCS answers, `running` while kvrelay runs; `broken` and
`flaky` have one line for each call of `up` and `status` that is to fail; `unsupervised` exists while kvrelay serves
without its supervisor; `calls` has a line for each call.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chart_rendering import CHART

from support.processes import wait_until

SCRIPT = CHART / "files" / "launch.sh"
FAKES = {
    "ray": '[ "$*" = "health-check --address 127.0.0.1:6379" ] && [ -e "$WORLD/gcs" ]',
    "kvrelay": """
        case "$1" in
          status)
            if [ -s "$WORLD/flaky" ]; then sed -i 1d "$WORLD/flaky"; exit 1; fi
            if [ -e "$WORLD/unsupervised" ]; then exit 3; fi
            [ -e "$WORLD/running" ] ;;
          down) echo down >> "$WORLD/calls"; rm -f "$WORLD/running" ;;
          up)
            echo "$*" >> "$WORLD/calls"
            if [ -s "$WORLD/broken" ]; then sed -i 1d "$WORLD/broken"; exit 1; fi
            touch "$WORLD/running" ;;
          *) exit 2 ;;
        esac""",
    "sleep": 'echo "sleep $1" >> "$WORLD/calls"; exec /bin/sleep 0.02',
}
DEADLINE_SECONDS = 30


class World:
    """The script's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def clear(self, name: str) -> None:
        (self.folder / name).unlink()

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def starts(self) -> list[str]:
        return [call for call in self.calls if call.startswith("up ")]

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: str(self.calls), DEADLINE_SECONDS)


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "bin").mkdir()
    for name, body in FAKES.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    return World(tmp_path)


@pytest.fixture
def launcher(world: World) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        "PATH": f"{world.folder / 'bin'}:{os.environ['PATH']}",
        "WORLD": str(world.folder),
        "KVRELAY_CHECK_SECONDS": "30",
    }
    process = subprocess.Popen(
        ["/bin/bash", str(SCRIPT)], env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_SECONDS)


def test_it_waits_for_ray_and_starts_kvrelay_once(world, launcher):
    world.wait(lambda: world.calls.count("sleep 5") >= 3)
    assert world.starts == []
    world.set("gcs")
    world.wait(lambda: world.calls.count("sleep 30") >= 5)
    assert world.starts == ["up --config /etc/kvrelay/config.yaml --address auto --detach"]


def test_it_leaves_a_kvrelay_alone_that_runs_that_is_slow_to_answer_or_serves_without_its_supervisor(world, launcher):
    def checks(count: int) -> None:
        before = world.calls.count("sleep 30")
        world.wait(lambda: world.calls.count("sleep 30") >= before + count)

    world.set("running")
    world.set("gcs")
    checks(5)
    world.set("flaky", "\n" * 2)
    world.wait(lambda: (world.folder / "flaky").read_text() == "")
    checks(1)
    world.set("unsupervised")
    world.clear("running")
    checks(5)
    assert "down" not in world.calls
    assert world.starts == []
    world.clear("unsupervised")
    world.wait(lambda: len(world.starts) == 1)


def test_it_ends_what_a_lost_one_left_before_it_starts_anew_also_on_a_new_cluster(world, launcher):
    world.set("gcs")
    world.wait(lambda: world.calls[-1:] == ["sleep 30"])
    assert world.calls[world.calls.index(world.starts[0]) - 1] == "down"
    world.clear("running")
    world.wait(lambda: len(world.starts) == 2)
    assert world.calls.count("down") == 2
    world.wait(lambda: (world.folder / "running").exists())
    world.clear("gcs")
    world.clear("running")
    world.wait(lambda: "sleep 5" in world.calls[-2:])
    world.set("gcs")
    world.wait(lambda: len(world.starts) == 3)
    world.wait(lambda: world.calls[-1] == "sleep 30")


def test_it_waits_longer_after_each_failed_start_and_never_ends(world, launcher):
    world.set("broken", "\n" * 6)
    world.set("gcs")
    world.wait(lambda: (world.folder / "running").exists())
    after = [world.calls[index + 1] for index, call in enumerate(world.calls[:-1]) if call.startswith("up ")]
    assert after[:6] == [f"sleep {wait}" for wait in (5, 10, 20, 40, 60, 60)]
    assert launcher.poll() is None
    # A kvrelay that ran forgets the failures before it.
    world.wait(lambda: world.calls[-1] == "sleep 30")
    world.set("broken", "\n")
    world.clear("running")
    world.wait(lambda: len(world.starts) == 9)
    last = max(index for index, call in enumerate(world.calls) if call == world.starts[0])
    failed = [index for index, call in enumerate(world.calls[:last]) if call.startswith("up ")][-1]
    assert world.calls[failed + 1] == "sleep 5"


def test_a_signal_ends_it(world, launcher):
    world.set("gcs")
    world.wait(lambda: bool(world.starts))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(DEADLINE_SECONDS) == -signal.SIGTERM


def test_the_chart_ships_this_very_script(render):
    assert render().one("ConfigMap")["data"]["launch.sh"].strip() == SCRIPT.read_text().strip()
