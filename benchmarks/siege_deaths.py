"""The row of deaths: each process of `kvrelay up`, Ray's own too, is killed, or frozen, one at a time."""

from typing import Any

from siege_up import EXIT_SECONDS, FREEZE_SECONDS, SERVING_SECONDS, Fate, Foreground, foreground
from siege_witness import Given, Measure, Witness, none_of

KILL, FREEZE = "kill", "freeze"


class RayPlace:
    """A Ray cluster as the witness needs it: only the way to reach its router."""

    def __init__(self, cluster: Foreground) -> None:
        self._router = cluster.router

    @property
    def reach(self) -> dict[str, Any]:
        return {"grpc": self._router, "http": "", "authority": None}


def deaths(given: Given) -> list[Measure]:
    """`given.only` is a piece of "kill NAME" or "freeze NAME"."""
    fates: dict[tuple[str, str], Fate] = {}
    lost: list[str] = []
    with foreground(given.folder) as cluster:
        names = [*cluster.kinds]
        witness = Witness(RayPlace(cluster), model="pico", rate=1.0)
        witness.alone(given.seconds)
        turns = [(how, name) for how in (KILL, FREEZE) for name in names if given.only in f"{how} {name}"]
        with witness.beside() as seen:
            for how, name in turns:
                if how == FREEZE and name == "up":
                    continue
                cluster.made_whole(name)
                if name not in cluster.kinds:
                    lost.append(f"{how} {name}")
                    continue
                fates[how, name] = cluster.kill(name) if how == KILL else cluster.freeze(name)
                print(f"  {how} {name}: {fates[how, name]}", flush=True)
    asked = f"serves within {SERVING_SECONDS:g} s, or ends within {EXIT_SECONDS:g} s"
    measures = [
        Measure(f"{how} {name}", asked, str(fate), fate.holds(), vars(fate)) for (how, name), fate in fates.items()
    ]
    for (how, name), fate in fates.items():
        killed = fates.get((KILL, name))
        if how == FREEZE and killed is not None and fate.exited is None and killed.exited is None:
            more = fate.outage - killed.outage
            measures.append(
                Measure(
                    f"freeze {name} against kill",
                    f"{FREEZE_SECONDS:g} s longer at most",
                    f"{more:.1f} s",
                    more <= FREEZE_SECONDS,
                )
            )
    failed = [stream["error"] for stream in seen if stream["error"]]
    return [
        *measures,
        none_of("processes that were not found again", lost),
        none_of("wrong tokens", witness.wrong(seen), streams=len(seen), failed=len(failed), errors=failed[:10]),
    ]
