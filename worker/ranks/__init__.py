"""A worker of several ranks: rank 0 is the worker's own process, the others are started, watched and ended by it.

    rank 0 (worker process)                         rank r (`python -m kvrelay.worker.ranks`)
    engine thread   --- step plans (`steps`) --->   main thread runs its part of each step
    event loop      <-- signs of life, links -->    its own thread and event loop (`control`)

All ranks are one incarnation with one fate. A rank that has ended, has failed, or is silent for SILENT_SECONDS ends the
others: rank 0 kills them and fails as a worker does; a rank that hears nothing of rank 0 ends itself.
"""
