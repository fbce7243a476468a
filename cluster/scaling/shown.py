"""The part of `kvrelay status` about scaling: the latencies against their targets, and the latest decisions."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from kvrelay.internal.v1.supervisor_pb2 import Scaling, ScalingDecision
from kvrelay.rpc.identity import role_name

SHOWN = 3
"""Number of decisions in the text; the JSON has all."""

Figure = Literal["ttft_attained", "tpot_attained", "prefill_pressure", "decode_pressure"]
"""Names of the figures that may be unknown."""


def scaling_json(scaling: Scaling) -> dict[str, Any]:
    """The JSON for `kvrelay status --json`."""
    return {
        "enabled": scaling.enabled,
        "ttft": {
            "target_seconds": scaling.ttft_target_seconds,
            "attained": _optional(scaling, "ttft_attained"),
        },
        "tpot": {
            "target_seconds": scaling.tpot_target_seconds,
            "attained": _optional(scaling, "tpot_attained"),
        },
        "prefill": {
            "pressure": _optional(scaling, "prefill_pressure"),
            "queue": scaling.prefill_queue,
            "queue_seconds": round(scaling.prefill_queue_seconds, 3),
        },
        "decode": {
            "pressure": _optional(scaling, "decode_pressure"),
            "queue": scaling.decode_queue,
            "queue_seconds": round(scaling.decode_queue_seconds, 3),
        },
        "decisions": [_decision(decision) for decision in scaling.decisions],
    }


def scaling_lines(scaling: Scaling) -> Iterator[str]:
    """The lines for `kvrelay status`; none if the supervisor tells nothing about scaling."""
    if not scaling.ttft_target_seconds:
        return
    prefill, decode = _pressure(scaling, "prefill_pressure"), _pressure(scaling, "decode_pressure")
    yield (
        f"scaling {'on' if scaling.enabled else 'off'}   "
        f"TTFT within {scaling.ttft_target_seconds:g} s: {_share(scaling, 'ttft_attained')}   "
        f"TPOT within {1000 * scaling.tpot_target_seconds:g} ms: {_share(scaling, 'tpot_attained')}   "
        f"predicted/target: prefill {prefill}, decode {decode}   "
        f"waiting: prefill {scaling.prefill_queue}, decode {scaling.decode_queue}"
    )
    for decision in scaling.decisions[-SHOWN:]:
        refused = f"; refused: {decision.refused}" if decision.refused else ""
        yield f"  {_clock(decision)}   {decision.reason}{refused}"


def _decision(decision: ScalingDecision) -> dict[str, Any]:
    return {
        "time": _clock(decision),
        "reason": decision.reason,
        "roles": {worker: role_name(role) for worker, role in sorted(decision.moves.items())},
        "workers": {role_name(pool.role): pool.count for pool in decision.pools},
        "refused": decision.refused or None,
    }


def _clock(decision: ScalingDecision) -> str:
    return datetime.fromtimestamp(decision.time, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _optional(scaling: Scaling, name: Figure) -> float | None:
    return round(getattr(scaling, name), 3) if scaling.HasField(name) else None


def _share(scaling: Scaling, name: Figure) -> str:
    return f"{100 * getattr(scaling, name):.0f} %" if scaling.HasField(name) else "-"


def _pressure(scaling: Scaling, name: Figure) -> str:
    return f"{getattr(scaling, name):.2f}" if scaling.HasField(name) else "-"
