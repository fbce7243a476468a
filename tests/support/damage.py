"""Damages frames in a worker of the hash model, as rules say.

    sent,index=0,request=one,attempt=1,times=1:corrupt(3);sent,share=0.01,seed=7:skip

place     side       action        effect
--------- ---------- ------------- ---------------------------------------------------------------------
sent      sender     corrupt(n)    flips one bit in n bytes, after they were hashed; 1 by default
sent      sender     truncate(n)   the last n bytes are not those that were hashed; 1 by default
sent      sender     duplicate     the frame is announced and sent twice; for frames of rank 0 only
sent      sender     lose          the frame is announced, and never sent
sent      sender     skip          the frame is neither announced nor sent
sent      sender     kill          the frame is announced, and SIGKILL ends this process before it is sent
arrived   receiver   corrupt(n)    flips one bit in n of the received bytes, before they are verified

Conditions: `request` (the client's request id), `attempt`, `index` (of the frame), `share` (a probability, drawn by
`seed` for each request and attempt), `tries` (only in that many first attempts), `times` (at most so often), `after`
(not the first so many times). The first rule that applies acts, and the process's log says so.

Each rank of a worker counts for itself, and rank 0 announces the frames of all: it takes no second announcement of
another rank's frame.
"""

import logging
import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.protocol.events import Frame, Outcome
from kvrelay.transfer.protocol.messages import Key, Push
from kvrelay.transfer.protocol.ports import FrameTask
from kvrelay.transfer.transports.base import Pending

logger = logging.getLogger("kvrelay.damage")

PLACES = ("sent,", "arrived,")
DAMAGED = "a frame is damaged"
"""Message of the log line about a frame that a rule acts on."""
_RULE = re.compile(r"(sent|arrived)((?:,[a-z]+=[^,:;]+)*):([a-z]+)(?:\(([0-9]+)\))?")


@dataclass
class Rule:
    place: str
    conditions: dict[str, str]
    action: str
    amount: int
    times: int
    share: float
    drawn: str
    """Text that the seed of each draw begins with."""
    tries: int = 2**31
    after: int = 0

    def applies(self, place: str, key: Key, index: int) -> bool:
        values = {"request": key[0].partition("/")[0], "attempt": str(key[1]), "index": str(index)}
        if (
            place != self.place
            or self.times <= 0
            or key[1] > self.tries
            or any(values[name] != want for name, want in self.conditions.items())
        ):
            return False
        self.after -= 1
        # Not by the order of frames, which another run doesn't have, and not alike in two attempts.
        draw = random.Random(f"{self.drawn} {values}").random()
        if self.after >= 0 or draw >= self.share:
            return False
        self.times -= 1
        return True


def parse(text: str) -> list[Rule]:
    rules = []
    for part in filter(None, text.split(";")):
        match = _RULE.fullmatch(part)
        assert match is not None, f"a rule of damage: {part!r}"
        conditions = dict(pair.split("=", 1) for pair in match[2].split(",")[1:])
        times, share = int(conditions.pop("times", "1000000")), float(conditions.pop("share", "1"))
        drawn = f"{conditions.pop('seed', '0')} {part}"
        tries, after = int(conditions.pop("tries", f"{2**31}")), int(conditions.pop("after", "0"))
        rules.append(Rule(match[1], conditions, match[3], int(match[4] or 1), times, share, drawn, tries, after))
    return rules


class DamagedFrames(PoolFrames):
    """The jobs of a worker, some of which go through a `DamagedLink`."""

    def __init__(self, inner: PoolFrames, rules: Sequence[Rule]) -> None:
        vars(self).update(vars(inner))
        self._rules = rules

    def _rule(self, place: str, key: Key, frame: Frame) -> Rule | None:
        return next((rule for rule in self._rules if rule.applies(place, key, frame.index)), None)

    def send(self, task: FrameTask, announce: Callable[[Push], None], on_read: Callable[[], None]) -> Any:
        rule = self._rule("sent", task.key, task.frame)
        if rule is None:
            return super().send(task, announce, on_read)
        twice = rule.action == "duplicate"

        def announce_twice(push: Push) -> None:
            announce(push)
            announce(push)

        job = super().send(task, announce_twice if twice else announce, on_read)
        return DamagedJob(job, rule, task.frame.nbytes)

    def receive(self, task: FrameTask, keep: int, on_end: Callable[[Outcome], None]) -> Any:
        rule = self._rule("arrived", task.key, task.frame)
        job = super().receive(task, keep, on_end)
        return job if rule is None else DamagedJob(job, rule, task.frame.nbytes)


class DamagedJob:
    """A job whose link damages its frame."""

    def __init__(self, job: Any, rule: Rule, nbytes: int) -> None:
        self.key = job.key
        self.written = job.written
        self.done = job.done
        self.fail = job.fail
        self._job = job
        self._rule = rule
        self._nbytes = nbytes

    def prepare(self, link: Any, buffer: Tensor) -> None:
        """Does nothing: the frame is read in `begin`."""

    def begin(self, link: Any, buffer: Tensor) -> Any:
        logger.warning(DAMAGED, extra={"request": self.key[0], "action": self._rule.action})
        if self._rule.action == "skip":
            self._job.fail("left out by a rule")
            return None
        return self._job.begin(DamagedLink(link, self._rule, self._nbytes), buffer)


class DamagedLink:
    """A link for one frame, which is damaged in its buffer: on the link its bytes are the same as out of a pool."""

    stream = None
    lender = None

    def __init__(self, link: Any, rule: Rule, nbytes: int) -> None:
        self.mac_key = link.mac_key
        self._link = link
        self._rule = rule
        self._nbytes = nbytes

    def send(self, data: Tensor) -> Pending:
        action = self._rule.action

        def begin() -> list[Pending]:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return [self._link.send(data) for _ in range({"lose": 0, "duplicate": 2}.get(action, 1))]

        self._spoil(data)
        # Where other frames are sent while they are waited for, this one must not overtake those before it.
        begun = begin() if self._link.stream is None else None

        def wait(timeout: float) -> None:
            for pending in begin() if begun is None else begun:
                pending.wait(timeout)

        return Pending(wait)

    def recv(self, into: Tensor) -> Pending:
        pending = self._link.recv(into)

        def wait(timeout: float) -> None:
            pending.wait(timeout)
            self._spoil(into)

        return Pending(wait)

    def _spoil(self, data: Tensor) -> None:
        amount, nbytes = min(self._rule.amount, self._nbytes), self._nbytes
        places = {
            "corrupt": [nbytes * number // amount for number in range(amount)],
            "truncate": range(nbytes - amount, nbytes),
        }
        for at in places.get(self._rule.action, ()):
            data[at] ^= 1 << (at % 8)
