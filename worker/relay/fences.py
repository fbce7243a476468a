"""The latest call of each request that its client has continued by another call."""

from collections import OrderedDict

from kvrelay.internal.v1.worker_pb2 import ClientCall

MAX_FENCES = 65536
"""Limit of remembered requests; the oldest are forgotten. Then a request may be computed twice; the client reads one of
the two."""


class Fences:
    """Latest calls of requests, before which a router may no longer submit: it may have been frozen while its client
    went on with another one.
    """

    def __init__(self) -> None:
        self._latest: OrderedDict[bytes, int] = OrderedDict()

    def add(self, fence: ClientCall) -> None:
        """Fences the calls before this one."""
        self._latest[fence.key] = max(fence.call, self._latest.pop(fence.key, 0))
        if len(self._latest) > MAX_FENCES:
            self._latest.popitem(last=False)

    def passed(self, call: ClientCall) -> bool:
        """Whether this call is fenced, because a later one is known."""
        return call.call < self._latest.get(call.key, 0)
