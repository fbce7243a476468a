"""Classes of service: what a request of each may wait for, and who may ask for it."""

from collections.abc import Mapping

from xxhash import xxh3_64_intdigest

from kvrelay.router.callers import Grant
from kvrelay.router.config import ServiceClass
from kvrelay.router.errors import Forbidden, InvalidRequest, shorten
from kvrelay.router.queue import Claim

DEFAULT = "default"
"""The class of requests that name none."""


def claim_of(
    name: str, priority: int, grant: Grant, holder: str, classes: Mapping[str, ServiceClass]
) -> tuple[Claim, ServiceClass]:
    """The claim of a request, and its class.

    Args:
        holder: the tenant, or the client's address where nobody is authenticated; each has its share of the workers.
        name: of the class, as the request has it; empty for DEFAULT, which need not be configured.
        classes: those that are configured.

    Raises:
        InvalidRequest: there is no such class.
        Forbidden: the caller may not use it.
    """
    name = name or DEFAULT
    known = {DEFAULT: ServiceClass(), **classes}
    if name not in known:
        raise InvalidRequest("slo_class", name, f"{', '.join(map(repr, known))}, or empty; see router.classes")
    if grant.classes is not None and name not in grant.classes:
        allowed = ", ".join(map(repr, sorted(grant.classes)))
        raise Forbidden(f"slo_class is {shorten(name)}; allowed for this API key: {allowed}")
    digest = xxh3_64_intdigest(holder.encode())
    return Claim(holder, grant.weight, name, known[name].weight, priority, digest), known[name]
