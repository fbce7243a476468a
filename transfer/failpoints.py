"""Failpoints: named places in the hand-off where a test makes a worker fail, armed by an environment variable only.

    KVRELAY_FAILPOINTS="prefill.after_chunk,chunk=1,attempt=1:kill;transfer.read,share=0.05:sleep(2)"

Each rule is `place[,condition...]:action`. A condition `name=value` compares a value of the place (`request` is the
client's request id). `share=0.05` lets the rule act with that probability (drawn by `seed`, default 0), and `times=2`
at most that often. The first rule that applies acts. Without rules a failpoint costs one comparison.

place                     thread              values (besides request and attempt)
------------------------- ------------------- -----------------------------------------------------------
prefill.before_offer      event loop
prefill.after_chunk       engine thread       chunk, from 0: it is computed, and not yet given to the link
prefill.after_finish      engine thread       (token 0 is sampled)
prefill.after_ack         event loop          (the receiver has committed)
transfer.read             sending link        index; the blocks of the frame are not yet read
transfer.frame            sending link        index; the frame is not yet announced
decode.after_reserve      event loop
decode.after_frame        receiving link      index; the frame has arrived and is not yet verified
decode.before_commit      event loop          (every frame has verified)
decode.after_commit       engine thread

action        effect
------------- ------------------------------------------------------------------
exit(status)  ends the process at once; status 1 by default
kill, stop    SIGKILL or SIGSTOP to this process
raise         raises `Injected`
sleep(s)      blocks the thread for that many seconds; 1 by default
"""

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

VARIABLE = "KVRELAY_FAILPOINTS"

Action = Literal["exit", "kill", "stop", "raise", "sleep"]

_PLACES = {
    "prefill.before_offer": "",
    "prefill.after_chunk": "chunk",
    "prefill.after_finish": "",
    "prefill.after_ack": "",
    "transfer.read": "index",
    "transfer.frame": "index",
    "decode.after_reserve": "",
    "decode.after_frame": "index",
    "decode.before_commit": "",
    "decode.after_commit": "",
}
"""Value of each place besides request and attempt."""

_ACTIONS: dict[str, float | None] = {"exit": 1, "kill": None, "stop": None, "raise": None, "sleep": 1}
"""Default argument of each action; None if it takes none."""

_RULE = re.compile(
    r"(?P<place>[a-z_.]+)(?P<conditions>(,[a-z]+=[^,:;]+)*):(?P<action>[a-z]+)(\((?P<argument>[0-9.]+)\))?"
)


class FailpointError(ValueError):
    """The environment variable is invalid; the text says which rule and why."""


class Injected(RuntimeError):
    """Raised by a failpoint with the action `raise`."""


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
        """Whether the rule acts now; if so, counts it."""
        if place != self.place or self.times <= 0:
            return False
        if any(str(where[name]) != value for name, value in self.conditions.items()):
            return False
        if self.share < 1 and self.chance.random() >= self.share:
            return False
        self.times -= 1
        return True

    def act(self) -> None:
        """Performs the action on this process or thread."""
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
    if action not in _ACTIONS:
        raise FailpointError(f"{VARIABLE}: {text!r}: no action {action!r}; there are {', '.join(_ACTIONS)}")
    default = _ACTIONS[action]
    if argument is not None and default is None:
        raise FailpointError(f"{VARIABLE}: {text!r}: {action} takes no argument")
    conditions = dict(part.split("=", 1) for part in match["conditions"].split(",")[1:])
    try:
        number = default or 0.0 if argument is None else float(argument)
        share, times = float(conditions.pop("share", "1")), int(conditions.pop("times", str(2**31)))
        # Rules with the same seed draw independently of each other.
        chance = random.Random(f"{int(conditions.pop('seed', '0'))} {text}")
    except ValueError as error:
        raise FailpointError(f"{VARIABLE}: {text!r}: {error}") from None
    known = {"request", "attempt", _PLACES[place]} - {""}
    if not conditions.keys() <= known:
        unknown = ", ".join(sorted(conditions.keys() - known))
        allowed = ", ".join(sorted(known | {"share", "seed", "times"}))
        raise FailpointError(f"{VARIABLE}: {text!r}: {place} has no {unknown}; conditions: {allowed}")
    return Rule(place, conditions, cast(Action, action), number, share, times, chance)


_armed: Sequence[Rule] = parse(os.environ.get(VARIABLE, ""))


def arm(rules: Sequence[Rule]) -> None:
    """Replaces the armed rules."""
    global _armed
    _armed = rules


def failpoint(place: str, key: tuple[str, int], **values: object) -> None:
    """A named place in the life of the attempt `key`, at which the first armed rule that applies acts.

    Raises:
        Injected: the rule says `raise`.
    """
    if not _armed:
        return
    where = {"request": key[0].partition("/")[0], "attempt": key[1], **values}
    for rule in _armed:
        if rule.applies(place, where):
            rule.act()
            return
