"""The ownership protocol, row by row; `test_simulation.py` has its interleavings, with stale and foreign messages, and
`test_control_stream.py` has messages that are wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvrelay.engine.kv.layout import LayerPart
from kvrelay.transfer.protocol.events import (
    BlocksFreed,
    Cancel,
    Commit,
    Committed,
    Computed,
    Expected,
    Failed,
    Finished,
    Frame,
    FrameEnded,
    LinkLost,
    LinkUp,
    Manifest,
    Outcome,
    PeerLost,
    ReceiveFrame,
    ReleaseHold,
    Renewed,
    Reserve,
    Reserved,
    SendFinish,
    SendFrame,
    State,
    StopFrames,
    Tell,
    Timeouts,
)
from kvrelay.transfer.protocol.messages import Abort, Ack, Code, Finish, Grant, Nack, Offer, Push, Wait
from kvrelay.transfer.protocol.table import MAX_LINK_LOSSES, ReceiveAttempt, SendAttempt

KEY = ("request", 2)
TIMEOUTS = Timeouts(lease=5, grant=30, prefill=120, transfer=60)
BLOCK = 4
SHAPE = Manifest(tokens=10, digest=b"d" * 16, token_bytes=3, block_size=BLOCK, frame_tokens=BLOCK)
OFFER = Offer(*KEY, 10, b"d" * 16)
FRAMES = [Frame(1, 0, 0, 4, 12), Frame(1, 1, 4, 4, 12), Frame(1, 2, 8, 2, 6)]


@dataclass(eq=False)
class Held:
    """Stands for a hold or a reservation."""

    name: str


A, B, ALL = Held("a"), Held("b"), Held("all")
Step = tuple[Any, Any]
"""An event, and what it must lead to: actions, or the code of a failure, or `...` for anything."""


def walk(machine: Any, steps: Sequence[Step], dropped: int = 0) -> Any:
    """Feeds the events at time 0, and checks what each leads to, and how many messages were dropped."""
    for event, expected in steps:
        actions = machine.on(event, 0.0)
        if isinstance(expected, Code):
            assert [action.code for action in actions if isinstance(action, Failed)] == [expected], event
        elif expected is not ...:
            assert actions == expected, event
    assert machine.dropped == dropped
    return machine


def push(frame: Frame) -> Push:
    return Push(*KEY, frame.epoch, frame.index, frame.first, frame.tokens, frame.nbytes, *frame.part)


# The sender.

GRANT, FINISH = Grant(*KEY, 1, 0), SendFinish(Finish(*KEY, 1, 7, 3, 30))
FINISHED = Finished(7, ALL)
SENT = [*map(SendFrame, FRAMES), FINISH]
SENDER: dict[str, tuple[list[Step], State, int]] = {
    "frames leave as soon as they are computed and granted": (
        [(GRANT, []), (Computed(8, A), SENT[:2]), (FINISHED, SENT[2:])],
        State.TRANSFERRING,
        0,
    ),
    "nothing leaves without a grant, and each frame once": (
        [(Computed(4, A), []), (FINISHED, []), (GRANT, SENT), (GRANT, [])],
        State.TRANSFERRING,
        1,
    ),
    "nothing leaves on a link that is lost": (
        [(GRANT, []), (Computed(4, A), ...), (LinkLost(1), []), (Computed(8, B), []), (FINISHED, [])],
        State.EXPORTED,
        0,
    ),
    "what the receiver has is left out": (
        [
            (FINISHED, []),
            (Grant(*KEY, 1, 8), [SendFrame(Frame(1, 0, 8, 2, 6)), SendFinish(Finish(*KEY, 1, 7, 1, 6))]),
        ],
        State.TRANSFERRING,
        0,
    ),
    "all of it": (
        [(FINISHED, []), (Grant(*KEY, 1, 10), [SendFinish(Finish(*KEY, 1, 7, 0, 0))])],
        State.TRANSFERRING,
        0,
    ),
    "an acknowledgement releases all but what is still read": (
        [
            (FINISHED, []),
            (GRANT, SENT),
            (FrameEnded(FRAMES[0]), []),
            (FrameEnded(FRAMES[1]), []),
            (Ack(*KEY, 1), [Committed(), StopFrames((FRAMES[2],))]),
            (FrameEnded(FRAMES[2]), [ReleaseHold(ALL)]),
        ],
        State.COMMITTED,
        0,
    ),
    "the next link begins at the granted token": (
        [
            (FINISHED, []),
            (GRANT, SENT),
            (LinkLost(1), []),
            (GRANT, []),  # of the lost link's epoch
            (
                Grant(*KEY, 2, 4),
                [
                    SendFrame(Frame(2, 0, 4, 4, 12)),
                    SendFrame(Frame(2, 1, 8, 2, 6)),
                    SendFinish(Finish(*KEY, 2, 7, 2, 18)),
                ],
            ),
        ],
        State.TRANSFERRING,
        1,
    ),
    "too many links": (
        [
            (FINISHED, []),
            *((LinkLost(epoch), []) for epoch in range(1, MAX_LINK_LOSSES + 1)),
            (LinkLost(MAX_LINK_LOSSES + 1), Code.LINK),
        ],
        State.FAILED,
        0,
    ),
} | {
    f"a grant from token {have} on": ([(FINISHED, []), (Grant(*KEY, 1, have), Code.PROTOCOL)], State.FAILED, 0)
    for have in (1, 5, 11, 12)  # inside a block, or past the end
}


@pytest.mark.parametrize("name", SENDER)
def test_sender(name: str) -> None:
    steps, state, dropped = SENDER[name]
    assert walk(SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0), steps, dropped).state is state


def ends(machine: Any, end: str) -> tuple[list[Any], float]:
    """The actions that end an attempt, and when."""
    at, actions = 0.0, []
    match end:
        case "cancel":
            actions = machine.on(Cancel(), at)
        case "refused":
            refusal = Nack if isinstance(machine, SendAttempt) else Abort
            actions = machine.on(refusal(*KEY, Code.NO_CAPACITY, "full"), at)
        case "peer lost":
            actions = machine.on(PeerLost(Code.CLOSED, "gone"), at)
        case "lease":
            actions = machine.poll(TIMEOUTS.lease)
        case "late":
            while at < TIMEOUTS.prefill + TIMEOUTS.lease and not machine.state.over:
                at += TIMEOUTS.lease / 2
                actions += machine.on(Renewed(), at)
    assert machine.state is (State.CANCELLED if end == "cancel" else State.FAILED)
    assert (end == "cancel") == (not any(isinstance(action, Failed) for action in actions))
    return actions, at


ENDS = pytest.mark.parametrize("end", ["cancel", "refused", "peer lost", "lease", "late"])


@pytest.mark.parametrize("state", [State.ADMITTED, State.PREFILLING, State.EXPORTED, State.TRANSFERRING])
@ENDS
def test_sender_ends_in_every_state_and_releases_all(state: State, end: str) -> None:
    steps: list[Step] = [(GRANT, ...)] if state in (State.PREFILLING, State.TRANSFERRING) else []
    steps += [(FINISHED, ...)] if state in (State.EXPORTED, State.TRANSFERRING) else []
    sender = walk(SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0), steps)
    assert sender.state is state
    actions, at = ends(sender, end)
    assert end != "cancel" or isinstance(actions[0].message, Abort)
    for action in list(actions):
        if isinstance(action, StopFrames):
            for frame in action.frames:
                actions += sender.on(FrameEnded(frame), at)
    holds = [ALL] if (FINISHED, ...) in steps else []
    assert [action.hold for action in actions if isinstance(action, ReleaseHold)] == holds
    assert sender.over
    assert sender.on(Computed(8, A), at) == [ReleaseHold(A)]
    assert sender.on(Grant(*KEY, 9, 0), at) == []


# The receiver.

GRANTED = Tell(Grant(*KEY, 1, 0))
COMMIT = [Commit(ALL, 7), Tell(Ack(*KEY, 1))]
READY: list[Step] = [(Expected(SHAPE), []), (OFFER, [Reserve()]), (LinkUp(1), []), (Reserved(ALL, 0), [GRANTED])]
PUSHED: list[Step] = [(push(frame), [ReceiveFrame(frame)]) for frame in FRAMES]
RECEIVER: dict[str, tuple[list[Step], State, int]] = {
    "blocks are reserved once announcement and offer are known": (
        [(Expected(SHAPE), []), (OFFER, [Reserve()])],
        State.WAITING,
        0,
    ),
    "in any order": ([(OFFER, []), (Expected(SHAPE), [Reserve()])], State.WAITING, 0),
    "a frame announced twice is received once": ([*READY, PUSHED[0], (PUSHED[0][0], [])], State.TRANSFERRING, 1),
    "without free blocks it waits, which it says once": (
        [
            *READY[:3],
            (Reserved(None), [Tell(Wait(*KEY))]),
            (BlocksFreed(), [Reserve()]),
            (BlocksFreed(), []),  # asked already
            (Reserved(None), [Reserve()]),  # blocks were freed meanwhile
            (Reserved(None), []),
        ],
        State.WAITING,
        0,
    ),
    "it commits when all frames have verified, and only then": (
        [
            *READY,
            *PUSHED,
            (Finish(*KEY, 1, 7, 3, 30), []),
            (FrameEnded(FRAMES[0]), []),
            (FrameEnded(FRAMES[1]), []),
            (FrameEnded(FRAMES[2]), COMMIT),
        ],
        State.COMMITTED,
        0,
    ),
    "one that has all tokens commits without a frame": (
        [*READY[:3], (Reserved(ALL, 10), [Tell(Grant(*KEY, 1, 10))]), (Finish(*KEY, 1, 7, 0, 0), COMMIT)],
        State.COMMITTED,
        0,
    ),
    "a corrupt frame fails it, and blocks stay until the others have ended": (
        [
            *READY,
            *PUSHED[:2],
            (FrameEnded(FRAMES[0], Outcome.CORRUPT), Code.CORRUPT),
            (FrameEnded(FRAMES[1]), [ReleaseHold(ALL)]),
        ],
        State.FAILED,
        0,
    ),
    "the next link is granted what has not verified, once the older one writes nothing": (
        [
            *READY,
            *PUSHED[:2],
            (FrameEnded(FRAMES[0]), []),
            (LinkUp(2), []),
            (FrameEnded(FRAMES[1], Outcome.LOST), [Tell(Grant(*KEY, 2, 4))]),
        ],
        State.TRANSFERRING,
        0,
    ),
}


@pytest.mark.parametrize("name", RECEIVER)
def test_receiver(name: str) -> None:
    steps, state, dropped = RECEIVER[name]
    assert walk(ReceiveAttempt(KEY, TIMEOUTS, 0.0), steps, dropped).state is state


def test_receiver_waits_for_free_blocks_until_its_deadline() -> None:
    receiver = walk(ReceiveAttempt(KEY, TIMEOUTS, 0.0), [*READY[:3], (Reserved(None), ...)])
    for at in range(2, int(TIMEOUTS.grant), 2):
        receiver.on(Renewed(), float(at))
    assert [action.code for action in receiver.poll(TIMEOUTS.grant) if isinstance(action, Failed)] == [Code.NO_CAPACITY]


@pytest.mark.parametrize("state", [State.ADMITTED, State.WAITING, State.TRANSFERRING])
@ENDS
def test_receiver_ends_in_every_state_and_releases_all(state: State, end: str) -> None:
    steps: list[Step] = [(OFFER, ...), (LinkUp(1), ...)]
    steps += [] if state is State.ADMITTED else [(Expected(SHAPE), ...)]
    steps += [(Reserved(ALL), ...), PUSHED[0]] if state is State.TRANSFERRING else []
    receiver = walk(ReceiveAttempt(KEY, TIMEOUTS, 0.0), steps)
    assert receiver.state is state
    actions, at = ends(receiver, end)
    if state is State.WAITING:
        assert not receiver.over
        actions += receiver.on(Reserved(ALL), at)
    if state is State.TRANSFERRING:
        assert ReleaseHold(ALL) not in actions, "the frame in transit may still be written"
        actions += receiver.on(FrameEnded(FRAMES[0], Outcome.LOST), at)
    assert actions.count(ReleaseHold(ALL)) == (state is not State.ADMITTED)
    assert receiver.over


def test_a_machine_that_missed_its_deadline_ignores_queued_messages() -> None:
    verified = [(FrameEnded(frame), ...) for frame in FRAMES]
    receiver = walk(ReceiveAttempt(KEY, TIMEOUTS, 0.0), [*READY, *PUSHED, *verified])
    actions = receiver.on(Finish(*KEY, 1, 7, 3, 30), TIMEOUTS.lease + 1)
    assert not any(isinstance(action, Commit) for action in actions)
    assert ReleaseHold(ALL) in actions
    sender = walk(SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0), [(FINISHED, []), (GRANT, SENT)])
    assert Committed() not in sender.on(Ack(*KEY, 1), TIMEOUTS.lease + 1)
    assert sender.state is State.FAILED


def test_tokens_count_once_all_of_their_parts_have_verified() -> None:
    first, second = Frame(1, 0, 0, 4, 8, LayerPart(0, 2)), Frame(1, 1, 0, 4, 16, LayerPart(1, 2))
    again = replace(first, epoch=2)
    walk(
        ReceiveAttempt(KEY, TIMEOUTS, 0.0),
        [
            (LinkUp(1), ...),
            (Expected(replace(SHAPE, token_bytes=6, layers=3)), ...),
            (OFFER, ...),
            (Reserved(ALL), ...),
            *((push(frame), [ReceiveFrame(frame)]) for frame in (first, second)),
            (FrameEnded(first), ...),
            (FrameEnded(second, Outcome.LOST), ...),
            (LinkUp(2), [Tell(Grant(*KEY, 2, 0))]),  # half of the layers are no tokens
            (push(again), [ReceiveFrame(again)]),
            (push(replace(again, index=1, part=LayerPart(1, 3))), Code.PROTOCOL),
        ],
    )
