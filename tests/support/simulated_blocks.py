"""Pools of blocks for the simulated hand-off: who owns each block, who touches it, and what was last written to it."""

from typing import Any

from kvrelay.engine.states import StatesLayout

BLOCK = 4
"""Tokens of a block."""
LAYERS = 3

STATES = StatesLayout(layers=(1,), hidden_size=2**13, dtype="float32")
"""Layout of hidden states; a frame of one layer of a block has those of two tokens."""

Stamp = tuple[object, ...]
"""Stand-in for the KV of one layer of one block: who computed it, for which place."""


class Violation(AssertionError):
    """A guarantee is broken. `kind`: owner, leak, deadline, token, commit, credit, fence, report, lost,
    protocol or crash."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Hold:
    """Keeps blocks of one attempt allocated: a sender's hold, or a receiver's reservation (then it is its own hold)."""

    __slots__ = ("blocks", "have_tokens", "owner", "released")

    def __init__(self, owner: Any, blocks: list[int], have_tokens: int = 0) -> None:
        self.owner = owner
        self.blocks = blocks
        self.have_tokens = have_tokens
        self.released = False

    @property
    def hold(self) -> "Hold":
        return self

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
        self.content: list[list[Stamp]] = [[("nothing",)] * LAYERS for _ in range(count)]

    def take(self, owner: Any, count: int) -> Hold | None:
        """A hold on `count` free blocks; None if there are fewer."""
        if len(self.free) < count:
            return None
        blocks, self.free = self.free[:count], self.free[count:]
        for block in blocks:
            if self._touched[block]:
                raise Violation("owner", f"{self.name}: block {block} is given to {owner} while a link touches it")
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
        """A block without holds is free at once, and may get another owner."""
        if hold.released:
            raise Violation("owner", f"{self.name}: a hold of {hold.owner} is released twice")
        hold.released = True
        for block in hold.blocks:
            self._holds[block] -= 1
            if not self._holds[block]:
                if self._touched[block]:
                    raise Violation("owner", f"{self.name}: block {block} of {hold.owner} is freed under a link")
                self.owner[block] = None
                self.free.append(block)

    def touch(self, owner: Any, blocks: list[int], writing: bool = False) -> None:
        """A link begins to read or write; writing needs exclusive access."""
        for block in blocks:
            if self.owner[block] != owner:
                raise Violation(
                    "owner", f"{self.name}: a link touches block {block} of {self.owner[block]} for {owner}"
                )
            if writing and self._touched[block]:
                raise Violation("owner", f"{self.name}: two links write block {block} of {owner}")
            self._touched[block] += 1

    def let_go(self, blocks: list[int]) -> None:
        """The link no longer touches the blocks."""
        for block in blocks:
            self._touched[block] -= 1

    def fill(self, block: int, *stamp: object) -> None:
        """Writes all layers of a block."""
        self.content[block] = [stamp] * LAYERS

    def check_tokens(self, hold: Hold) -> None:
        """Every block holds what the sender of this very attempt computed for this very place."""
        for number, block in enumerate(hold.blocks):
            if self.content[block] != [(hold.owner, number)] * LAYERS:
                raise Violation("token", f"{hold.owner}: block {number} holds {self.content[block]}")

    def check_all_free(self) -> None:
        if len(self.free) != self.count or len(set(self.free)) != self.count:
            held = {block: self.owner[block] for block in range(self.count) if block not in self.free}
            raise Violation("leak", f"{self.name}: still held: {held}")
