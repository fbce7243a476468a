"""The policy in the simulated cluster of `benchmarks/ratio.py`: it follows the traffic, and leaves it alone."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from ratio_simulator import A100_OPT_66B, Phase, Simulation, traffic

from kvrelay.cluster.scaling.config import ScalingConfig

CONFIG = ScalingConfig(enabled=True, ttft_target_seconds=2.0, tpot_target_seconds=0.1)
LONG_PROMPTS, LONG_COMPLETIONS = (14.0, 640, 32), (12.0, 32, 128)


def test_the_split_follows_traffic_that_flips() -> None:
    parts = [Phase(15.0, *LONG_PROMPTS), Phase(35.0, *LONG_COMPLETIONS), Phase(30.0, *LONG_PROMPTS)]
    jobs = traffic(parts, seed=3)
    run = Simulation(jobs, A100_OPT_66B, (4, 4), CONFIG, 100.0).run()
    assert run.attained(CONFIG, 0, 15) > 0.95
    assert run.attained(CONFIG, 30, 50) > 0.9, "within 15 s of the flip to long completions"
    assert run.attained(CONFIG, 65, 80) > 0.9, "within 15 s of the flip back"
    assert all(job.last is not None for job in jobs), "every request ends"
    decode_heavy = next(sample for sample in run.samples if sample.time >= 45)
    prefill_heavy = next(sample for sample in run.samples if sample.time >= 75)
    assert decode_heavy.decode > 4 >= prefill_heavy.decode
    assert len(run.decisions) <= 5
    static = Simulation(traffic(parts, seed=3), A100_OPT_66B, (4, 4), replace(CONFIG, enabled=False), 100.0).run()
    assert not static.decisions
    assert run.goodput(CONFIG, 80) > static.goodput(CONFIG, 80)


def test_steady_traffic_changes_nothing() -> None:
    parts = [Phase(60.0, *LONG_PROMPTS)]
    run = Simulation(traffic(parts, seed=4), A100_OPT_66B, (5, 3), CONFIG, 60.0).run()
    assert len(run.decisions) <= 1, [decision.reason for _, decision in run.decisions]
    assert run.attained(CONFIG, 0, 50) > 0.95
