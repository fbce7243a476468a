"""Offers that wait for free blocks."""

from kvrelay.transfer.protocol.messages import Key


class ReservationQueue:
    """Offers that found no free blocks, in the order in which they came.

    While one waits, later ones ask once, and say that they would pass it: small prompts could overtake a large one for
    ever otherwise.
    """

    def __init__(self) -> None:
        self._waiting: dict[Key, None] = {}

    @property
    def first(self) -> Key | None:
        """The attempt that asks first when there may be room."""
        return next(iter(self._waiting), None)

    def passing(self, key: Key) -> bool:
        """Whether others that wait have come before `key`."""
        first = self.first
        return first is not None and first != key

    def wait(self, key: Key) -> None:
        """`key` was told that there is no room; it keeps its place if it has one."""
        self._waiting.setdefault(key, None)

    def leave(self, key: Key) -> bool:
        """Takes `key` from the queue, because it has its room or wants none any more. Returns whether it was waiting,
        so that another may have its turn.
        """
        if key in self._waiting:
            del self._waiting[key]
            return True
        return False
