"""The supervisor asks its members to describe themselves, on the streams that their heartbeats come on.

A question goes to each member at once and is numbered; the answer carries the number. Four times, two by each clock,
tell how far the clocks are apart (as NTP does), with an error of at most half of the way there and back:

    supervisor   asked ------------------------------ answered
                      \\                              /
    member             heard -- collects -- told ---+
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from kvrelay.internal.v1.describe_pb2 import Description
from kvrelay.internal.v1.supervisor_pb2 import DescribeResponse, MemberDescription
from kvrelay.rpc.identity import WorkerId

ANSWER_SECONDS = 8.0
"""Time limit in seconds for all members to answer: a worker may have to ask its GPU's driver."""


class Inquiry:
    """Questions and answers, one question at a time. On the event loop."""

    def __init__(self, wake: Callable[[], object]) -> None:
        """`wake`: called when the members' streams have a question to pass on."""
        self.number = 0
        """Number of the latest question. A stream that has not passed it on does so."""
        self._wake = wake
        self._asked: dict[WorkerId, float] = {}
        self._answers: dict[WorkerId, MemberDescription] = {}
        self._changed = asyncio.Event()
        self._one = asyncio.Lock()

    async def ask(self, members: set[WorkerId]) -> DescribeResponse:
        """The answers, when all of `members` have answered or ANSWER_SECONDS have passed; by name."""
        async with self._one:
            self.number += 1
            self._asked.clear()
            self._answers.clear()
            self._wake()
            with suppress(TimeoutError):  # those that are missing are named, without a description
                async with asyncio.timeout(ANSWER_SECONDS):
                    while not members <= self._answers.keys():
                        self._changed.clear()
                        await self._changed.wait()
            ordered = sorted(members, key=lambda member: member.name)
            found = [self._answers.get(member, MemberDescription(name=member.name)) for member in ordered]
            return DescribeResponse(members=found)

    def passed_on(self, member: WorkerId) -> None:
        """Notes that the latest question is sent to a member."""
        self._asked[member] = time.time()

    def answered(self, member: WorkerId, description: Description) -> None:
        """Takes a member's answer; drops an answer to an earlier question."""
        asked = self._asked.get(member)
        if asked is not None and description.ask == self.number:
            self._answers[member] = MemberDescription(
                name=member.name, description=description, asked_unix=asked, answered_unix=time.time()
            )
            self._changed.set()
