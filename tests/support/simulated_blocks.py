"""Pools of blocks for the simulated hand-off: who owns each block, who is at it, and what was last written to it."""

from typing import Any

BLOCK = 4
"""Tokens of a block."""
LAYERS = 2

Stamp = tuple[object, ...]
"""What stands for the KV of one block in one layer: who computed it, for which place."""


class Violation(AssertionError):
    """A guarantee is broken. `kind` says which: owner, leak, deadline, token, commit, credit, fence,
    report, lost."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Hold:
    """Keeps blocks of one attempt alive: a sender's hold, or a receiver's reservation."""

    __slots__ = ("blocks", "have", "owner", "released")

    def __init__(self, owner: Any, blocks: list[int], have: int = 0) -> None:
        self.owner = owner
        self.blocks = blocks
        self.have = have
        self.released = False

    def __repr__(self) -> str:
        return f"Hold({self.blocks})"


class Blocks:
    """One worker's pool. Every method that breaks ownership raises `Violation`."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self.free = list(range(count))
        self.owner: list[Any] = [None] * count
        self._holds = [0] * count
        self._touched = [0] * count
        self._content: list[list[Stamp]] = [[("nothing",)] * LAYERS for _ in range(count)]

    def take(self, owner: Any, count: int) -> Hold | None:
        """A hold on `count` free blocks; None where there are fewer."""
        if len(self.free) < count:
            return None
        blocks, self.free = self.free[:count], self.free[count:]
        for block in blocks:
            if self._touched[block]:
                raise Violation("owner", f"{self.name}: block {block} is given to {owner} with a link still at it")
            self.owner[block] = owner
        return self.hold(owner, blocks)

    def hold(self, owner: Any, blocks: list[int]) -> Hold:
        """One more hold on blocks that `owner` has already."""
        for block in blocks:
            if self.owner[block] != owner:
                raise Violation("owner", f"{self.name}: {owner} holds block {block} of {self.owner[block]}")
            self._holds[block] += 1
        return Hold(owner, blocks)

    def release(self, hold: Hold) -> None:
        """A block that nobody holds any more is free at once, and the next one's."""
        if hold.released:
            raise Violation("owner", f"{self.name}: a hold of {hold.owner} is released twice")
        hold.released = True
        for block in hold.blocks:
            self._holds[block] -= 1
            if not self._holds[block]:
                if self._touched[block]:
                    raise Violation("owner", f"{self.name}: block {block} of {hold.owner} is freed with a link at it")
                self.owner[block] = None
                self.free.append(block)

    def touch(self, owner: Any, blocks: list[int], writing: bool = False) -> None:
        """A link begins to read, or to write: that it may do alone only."""
        for block in blocks:
            if self.owner[block] != owner:
                raise Violation("owner", f"{self.name}: a link is at block {block} of {self.owner[block]} for {owner}")
            if writing and self._touched[block]:
                raise Violation("owner", f"{self.name}: two links write block {block} of {owner}")
            self._touched[block] += 1

    def let_go(self, blocks: list[int]) -> None:
        """The link is done."""
        for block in blocks:
            self._touched[block] -= 1

    def write(self, block: int, layer: int, stamp: Stamp) -> None:
        self._content[block][layer] = stamp

    def read(self, blocks: list[int], layers: range) -> tuple[Stamp, ...]:
        return tuple([self._content[block][layer] for block in blocks for layer in layers])

    def check_all_free(self) -> None:
        if len(self.free) != self.count or len(set(self.free)) != self.count:
            held = {block: self.owner[block] for block in range(self.count) if block not in self.free}
            raise Violation("leak", f"{self.name}: still held: {held}")
