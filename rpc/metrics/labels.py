"""Labels that several families or other code share, and the values that they can have."""

from kvrelay.internal.v1.supervisor_pb2 import MemberState
from kvrelay.rpc.identity import ROLES
from kvrelay.rpc.metrics.family import Label

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
