"""The engine that a worker of either role runs: requests, scheduler, paged KV, runner, attention, models, sampling."""
