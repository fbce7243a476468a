"""Options that are left to the worker serve as well as numbers do."""

from pathlib import Path

from kvrelay.engine.config import CPU_DEFAULTS
from support.faults import scene


def test_a_prompt_of_several_steps_is_handed_over(tmp_path: Path) -> None:
    with scene(tmp_path, engine={"max_batch_tokens": "auto"}) as it:
        completion = it.ask("long", length=2 * CPU_DEFAULTS.max_batch_tokens + 50)
        assert completion.timeline.retries == 0
        assert completion.timeline.transfer_bytes > 0
