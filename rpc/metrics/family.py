"""The description of a metric: its name, type, labels, meaning and buckets; and labels that several families share."""

from dataclasses import dataclass
from typing import Literal

from kvrelay.internal.v1.supervisor_pb2 import MemberState
from kvrelay.rpc.identity import ROLES

Part = Literal["router", "worker", "supervisor"]
"""The kind of process that records a metric."""
Kind = Literal["counter", "gauge", "histogram"]

COMMON: dict[Part, tuple[str, ...]] = {
    "router": ("router", "model_name"),
    "worker": ("worker", "role", "model_name"),
    "supervisor": (),
}
"""Labels that every metric of a part has, with the same values for the whole process."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Buckets from a millisecond to 100 seconds, for stages of a request."""
SHORT_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
"""Buckets for times once per token or per step, in seconds."""
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


@dataclass(frozen=True, slots=True)
class Label:
    """A label beside the common ones."""

    name: str
    values: tuple[str, ...] = ()
    """All possible values, each exported from the start; empty if they are known only at run time."""
    bound: str = ""
    """Bound on the number of its values, in words, if they are known only at run time."""


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric, with all of its series."""

    part: Part
    name: str
    """Name in the form kvrelay_<part>_<what>_<unit>; a counter has `_total` behind it."""
    kind: Kind
    help: str
    unit: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of the buckets; empty unless it is a histogram."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all labels, the common ones first."""
        return (*COMMON[self.part], *(label.name for label in self.labels))


OUTCOMES = ("stop", "length", "cancelled", "invalid", "exhausted", "unavailable", "deadline", "internal")
OUTCOME = Label("outcome", OUTCOMES)
CLASS = Label(
    "class",
    bound="default, interactive, batch and the classes of router.classes; `none` for requests that failed before",
)
TENANT = Label("tenant", bound="the first 50 tenants that come, `anonymous`, and `other` for all later ones")
ATTEMPT_REASON = Label(
    "reason", ("lost", "silent", "peer_lost", "draining", "link", "refused", "trial", "full", "internal", "other")
)
HANDOFF_REASON = Label(
    "reason",
    (
        "cancelled",
        "closed",
        "corrupt",
        "draining",
        "incompatible",
        "internal",
        "link",
        "manifest",
        "no_capacity",
        "protocol",
        "timeout",
        "unknown_peer",
    ),
)
FACE = Label("face", ("http", "grpc"))
STEP = Label("kind", ("prefill", "decode", "mixed"))
STATES = tuple(name.removeprefix("MEMBER_STATE_").lower() for name, number in MemberState.items() if number)
MEMBER_ROLE = Label("role", tuple(ROLES))
POOL = Label("role", ("prefill", "decode"))
