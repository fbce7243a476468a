"""Workers whose costs are wrong: what they report to routers, and what their schedulers go by.

The environment variable HASH_COSTS says how. With 0 costs are measured, as in the product. With -1 (PAIRS) prompts are
so dear on decode workers that each request goes to a pair. With -2 (TURNS) a token of a prompt takes 1 ms on prefill
workers and 2 ms on decode workers: long prompts go to a pair, and the next turn where the answer is. A positive number
is a seed: all costs are drawn, and drawn anew at each look.

`python -m support.wrong_costs --config FILE` is such a worker on the product's own engine; that of the hash model obeys
the variable, too.
"""

import os
import random
import sys

from kvrelay.costs.step import StepCost, StepFit
from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.scheduling import scheduler
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.rpc.serve import main
from kvrelay.worker import load
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer

MODULE = "support.wrong_costs"
COSTS = "HASH_COSTS"
PAIRS, TURNS = -1.0, -2.0
DEAR = {(PAIRS, "prefill"): 1e-3, (PAIRS, "decode"): 10.0, (TURNS, "prefill"): 1e-3, (TURNS, "decode"): 2e-3}
"""Seconds of a prompt's token."""


class ToldCosts(StepFit):
    """Routers are told the same costs at any time, whatever is measured."""

    token_seconds = 0.0

    @property
    def latest(self) -> StepCost:
        return StepCost(fixed=1e-3, sequence=1e-4, prompt_fixed=1e-3, token=self.token_seconds)


class DrawnCosts(StepFit):
    """Costs that have nothing to do with the steps, and are others each time."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(f"{os.environ[COSTS]} {os.getpid()}")

    def cost(self) -> StepCost:
        return StepCost(*(10.0 ** self._rng.uniform(-9, 0) for _ in range(7)))

    @property
    def latest(self) -> StepCost:
        return self.cost()


def mislead(config: WorkerConfig) -> None:
    """Lets the worker that is built next in this process have such costs."""
    how = float(os.environ.get(COSTS, "0"))
    if how > 0:
        scheduler.StepFit = DrawnCosts  # type: ignore[misc]  # a class
        load.COSTS_SECONDS = 0.0
    elif (how, config.role) in DEAR:
        scheduler.StepFit = ToldCosts  # type: ignore[misc]  # a class
        ToldCosts.token_seconds = DEAR[how, config.role]


def misled(config: WorkerConfig) -> WorkerServer:
    mislead(config)
    return WorkerServer(config, {"prefill": PrefillRole, "decode": DecodeRole})


if __name__ == "__main__":
    sys.exit(main(WorkerConfig, misled, "A kvrelay worker whose costs are wrong."))
