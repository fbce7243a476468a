"""Failpoints: named places in the hand-off where a test makes a worker fail, armed by an environment variable only.

    KVRELAY_FAILPOINTS="prefill.after_chunk,chunk=1,attempt=1:kill;transfer.frame_bytes,share=0.05:corrupt(3)"

Each rule is `place[,condition...]:action`. A condition `name=value` compares what the place tells (`request` is what
the client called it); `share=0.05` lets the rule act with that probability (drawn by `seed`, 0 unless given), and
`times=2` no more often than that. The first rule that applies acts. Unarmed, a failpoint is one comparison.

place                     in                  tells (besides request and attempt)    may, besides exit .. sleep
------------------------- ------------------- -------------------------------------- ------------------------------
prefill.before_offer      event loop
prefill.after_chunk       engine thread       chunk, from 0: it is computed, and
                                              not yet given to the link
prefill.after_finish      engine thread       (token 0 is sampled)
prefill.after_ack         event loop          (the receiver has committed)
transfer.queued           event loop          index                                  reorder
transfer.read             sending link        index, before the blocks are read
transfer.frame            sending link        index                                  drop, duplicate
transfer.frame_announced  sending link        index                                  drop
transfer.frame_bytes      sending link        index                                  corrupt(bytes), truncate(bytes)
decode.after_reserve      event loop
decode.after_frame        receiving link      index, before it is verified           corrupt(bytes)
decode.before_commit      event loop          (every frame has verified)
decode.after_commit       engine thread

action        does
------------- ----------------------------------------------------------------------------------------------------------
exit(status)  ends the process at once; status 1 unless given
kill, stop    SIGKILL or SIGSTOP to this process
raise         raises `Injected`
sleep(s)      blocks the thread for that many seconds
drop          transfer.frame: neither announced nor sent; transfer.frame_announced: announced, never sent
duplicate     the frame is announced and sent twice
reorder       the frame is announced and sent after the next one; the last one of a prompt goes as it would
corrupt(n)    flips a bit in n of the bytes, after they were hashed; 1 unless given
truncate(n)   the last n bytes aren't those that were hashed, as of a write that was cut short; 1 unless given
"""

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

VARIABLE = "KVRELAY_FAILPOINTS"

Action = Literal["exit", "kill", "stop", "raise", "sleep", "drop", "duplicate", "reorder", "corrupt", "truncate"]

_PLACES: dict[str, tuple[str, tuple[Action, ...]]] = {
    "prefill.before_offer": ("", ()),
    "prefill.after_chunk": ("chunk", ()),
    "prefill.after_finish": ("", ()),
    "prefill.after_ack": ("", ()),
    "transfer.queued": ("index", ("reorder",)),
    "transfer.read": ("index", ()),
    "transfer.frame": ("index", ("drop", "duplicate")),
    "transfer.frame_announced": ("index", ("drop",)),
    "transfer.frame_bytes": ("index", ("corrupt", "truncate")),
    "decode.after_reserve": ("", ()),
    "decode.after_frame": ("index", ("corrupt",)),
    "decode.before_commit": ("", ()),
    "decode.after_commit": ("", ()),
}
"""What each place tells besides request and attempt, and what only it may do."""

_ANYWHERE: tuple[Action, ...] = ("exit", "kill", "stop", "raise", "sleep")
_ARGUMENT: dict[str, float] = {"exit": 1, "sleep": 1, "corrupt": 1, "truncate": 1}
"""Actions that take an argument, and what it is unless given."""

_RULE = re.compile(
    r"(?P<place>[a-z_.]+)(?P<conditions>(,[a-z]+=[^,:;]+)*):(?P<action>[a-z]+)(\((?P<argument>[0-9.]+)\))?"
)


class FailpointError(ValueError):
    """The environment variable can't be understood; the text says which rule and why."""


class Injected(RuntimeError):
    """Raised by a failpoint."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What the place itself is to do."""

    action: Action
    amount: int = 0

    def spoil(self, data: Any) -> None:
        """Does `corrupt` or `truncate` to the bytes of a frame, a uint8 tensor or array."""
        amount = min(self.amount, len(data))
        where = range(len(data) - amount, len(data)) if self.action == "truncate" else _spread(amount, len(data))
        for position in where:
            data[position] ^= 1 << (position % 8)


@dataclass(slots=True)
class Rule:
    """One armed failpoint."""

    place: str
    conditions: dict[str, str]
    action: Action
    argument: float = 0
    share: float = 1.0
    times: int = 2**31
    chance: random.Random = field(default_factory=random.Random)

    def applies(self, place: str, where: dict[str, object]) -> bool:
        """Whether it acts now; counts it if so."""
        if place != self.place or self.times <= 0:
            return False
        if any(str(where[name]) != value for name, value in self.conditions.items()):
            return False
        if self.share < 1 and self.chance.random() >= self.share:
            return False
        self.times -= 1
        return True

    def act(self) -> Fault | None:
        """Does what a process can do to itself; returns what the place is to do."""
        match self.action:
            case "exit":
                os._exit(int(self.argument))
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise Injected(f"failpoint {self.place}")
            case "sleep":
                time.sleep(self.argument)
            case _:
                return Fault(self.action, int(self.argument))
        return None


def parse(text: str) -> tuple[Rule, ...]:
    """The rules of `VARIABLE`'s value.

    Raises:
        FailpointError: naming the rule, what is wrong with it, and what is allowed.
    """
    return tuple(_rule(part.strip()) for part in text.split(";") if part.strip())


def _rule(text: str) -> Rule:
    match = _RULE.fullmatch(text)
    if match is None:
        raise FailpointError(f"{VARIABLE}: {text!r} is not of the form place[,name=value...]:action[(number)]")
    place, action, argument = match["place"], match["action"], match["argument"]
    if place not in _PLACES:
        raise FailpointError(f"{VARIABLE}: {text!r}: no place {place!r}; there are {', '.join(_PLACES)}")
    tells, own = _PLACES[place]
    if action not in _ANYWHERE + own:
        raise FailpointError(f"{VARIABLE}: {text!r}: {place} can't {action}; it can {', '.join(_ANYWHERE + own)}")
    if argument is not None and action not in _ARGUMENT:
        raise FailpointError(f"{VARIABLE}: {text!r}: {action} takes no argument")
    conditions = dict(part.split("=", 1) for part in match["conditions"].split(",")[1:])
    try:
        number = _ARGUMENT.get(action, 0) if argument is None else float(argument)
        share, times = float(conditions.pop("share", "1")), int(conditions.pop("times", str(2**31)))
        # Rules of one seed draw apart from each other.
        chance = random.Random(f"{int(conditions.pop('seed', '0'))} {text}")
    except ValueError as error:
        raise FailpointError(f"{VARIABLE}: {text!r}: {error}") from None
    known = {"request", "attempt", tells} - {""}
    if not conditions.keys() <= known:
        unknown = ", ".join(sorted(conditions.keys() - known))
        allowed = ", ".join(sorted(known | {"share", "seed", "times"}))
        raise FailpointError(f"{VARIABLE}: {text!r}: {place} doesn't tell {unknown}; conditions: {allowed}")
    return Rule(place, conditions, cast(Action, action), number, share, times, chance)


def _spread(amount: int, length: int) -> Sequence[int]:
    return [length * number // amount for number in range(amount)]


_armed = parse(os.environ.get(VARIABLE, ""))


def failpoint(place: str, key: tuple[str, int], **tells: object) -> Fault | None:
    """A named place in the life of the attempt `key`; what an armed rule asks this place to do.

    Raises:
        Injected: where a rule says `raise`.
    """
    if not _armed:
        return None
    where = {"request": key[0].partition("/")[0], "attempt": key[1], **tells}
    for rule in _armed:
        if rule.applies(place, where):
            return rule.act()
    return None
