"""A worker of several ranks: rank 0 is the worker's own process, the others are started, watched and ended by it.

    rank 0 (worker process)                         rank r (`python -m kvrelay.worker.ranks`)
    engine thread   --- step plans (`steps`) --->   main thread runs its part of each step
    event loop      <-- signs of life, links -->    its own thread and event loop (`control`)

All ranks are one incarnation with one fate. A rank that has ended, has failed, or is frozen ends the others: rank 0
kills them and fails as a worker does; a rank that finds rank 0 frozen ends itself, and the kernel kills it with rank 0.
A silent rank is frozen unless it computes (`kvrelay.machine.silence`). SIGTERM is for rank 0 alone, which drains first.
Ranks of other machines (`engine.hosts`) are children of an agent there, which passes all of this on (`hosts.py`).
"""
