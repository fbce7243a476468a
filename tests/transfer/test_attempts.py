"""The ownership protocol, row by row; `test_simulation.py` has its interleavings, with stale and foreign messages, and
`test_control_stream.py` has messages that are wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvrelay.engine.kv.layout import LayerPart
from kvrelay.transfer.protocol.events import (
    BlocksFreed,
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
    Track,
)
from kvrelay.transfer.protocol.messages import Ack, Code, Finish, Grant, Offer, Push, Wait
from kvrelay.transfer.protocol.table import MAX_LINK_LOSSES, ReceiveAttempt, SendAttempt

KEY = ("request", 2)
TIMEOUTS = Timeouts(lease=5, grant=30, prefill=120, transfer=60)
BLOCK = 4
TRACK = Track(tokens=10, token_bytes=3, block_size=BLOCK, frame_tokens=BLOCK)
SHAPE = Manifest(tokens=10, digest=b"d" * 16, tracks=(TRACK,))
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

GRANT, FINISH = Grant(*KEY, 1, (0,)), SendFinish(Finish(*KEY, 1, 7, 3, 30))
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
                Grant(*KEY, 2, (4,)),
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
    f"a grant from token {have} on": ([(FINISHED, []), (Grant(*KEY, 1, (have,)), Code.PROTOCOL)], State.FAILED, 0)
    for have in (1, 5, 11, 12)  # inside a block, or past the end
}


@pytest.mark.parametrize("name", SENDER)
def test_sender(name: str) -> None:
    steps, state, dropped = SENDER[name]
    assert walk(SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0), steps, dropped).state is state


# The receiver.

GRANTED = Tell(Grant(*KEY, 1, (0,)))
COMMIT = [Commit(ALL, 7), Tell(Ack(*KEY, 1))]
READY: list[Step] = [(Expected(SHAPE), []), (OFFER, [Reserve()]), (LinkUp(1), []), (Reserved(ALL, (0,)), [GRANTED])]
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
    "the next link is granted what has not verified, once the older one writes nothing": (
        [
            *READY,
            *PUSHED[:2],
            (FrameEnded(FRAMES[0]), []),
            (LinkUp(2), []),
            (FrameEnded(FRAMES[1], Outcome.LOST), [Tell(Grant(*KEY, 2, (4,)))]),
        ],
        State.TRANSFERRING,
        0,
    ),
}


@pytest.mark.parametrize("name", RECEIVER)
def test_receiver(name: str) -> None:
    steps, state, dropped = RECEIVER[name]
    assert walk(ReceiveAttempt(KEY, TIMEOUTS, 0.0), steps, dropped).state is state


GRANT_FIRST, EXPECTED = [(GRANT, ...)], [(OFFER, ...), (LinkUp(1), ...), (Expected(SHAPE), ...)]


@pytest.mark.parametrize(
    ("role", "steps", "state"),
    [
        ("sender", [], State.ADMITTED),
        ("sender", GRANT_FIRST, State.PREFILLING),
        ("sender", [(FINISHED, ...)], State.EXPORTED),
        ("sender", [*GRANT_FIRST, (FINISHED, ...)], State.TRANSFERRING),
        ("receiver", EXPECTED[:2], State.ADMITTED),
        ("receiver", EXPECTED, State.WAITING),
        ("receiver", [*EXPECTED, (Reserved(ALL, (0,)), ...), PUSHED[0]], State.TRANSFERRING),
    ],
)
def test_renewals_keep_no_attempt_past_its_deadline(role: str, steps: list[Step], state: State) -> None:
    attempt = SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0) if role == "sender" else ReceiveAttempt(KEY, TIMEOUTS, 0.0)
    machine, at = walk(attempt, steps), 0.0
    assert machine.state is state
    while at < TIMEOUTS.prefill + TIMEOUTS.lease and not machine.state.over:
        at += TIMEOUTS.lease / 2
        machine.on(Renewed(), at)
    assert machine.state is State.FAILED


def test_receiver_waits_for_free_blocks_until_its_deadline() -> None:
    receiver = walk(ReceiveAttempt(KEY, TIMEOUTS, 0.0), [*READY[:3], (Reserved(None), ...)])
    for at in range(2, int(TIMEOUTS.grant), 2):
        receiver.on(Renewed(), float(at))
    assert [action.code for action in receiver.poll(TIMEOUTS.grant) if isinstance(action, Failed)] == [Code.NO_CAPACITY]


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
            (Expected(replace(SHAPE, tracks=(replace(TRACK, token_bytes=6, layers=3),))), ...),
            (OFFER, ...),
            (Reserved(ALL, (0,)), ...),
            *((push(frame), [ReceiveFrame(frame)]) for frame in (first, second)),
            (FrameEnded(first), ...),
            (FrameEnded(second, Outcome.LOST), ...),
            (LinkUp(2), [Tell(Grant(*KEY, 2, (0,)))]),  # half of the layers are no tokens
            (push(again), [ReceiveFrame(again)]),
            (push(replace(again, index=1, part=LayerPart(1, 3))), Code.PROTOCOL),
        ],
    )


def test_frames_are_numbered_by_link_and_a_route_that_is_left_out_fails() -> None:
    """Announcements of several links come in any order; those of one link only in theirs."""
    tracks = replace(TRACK, link=0), replace(TRACK, link=1)
    both = replace(SHAPE, tracks=tracks)
    grant = Grant(*KEY, 1, (0, 0))
    sent = SendAttempt(KEY, both, TIMEOUTS, 0.0)
    walk(sent, [(Finished(7, ALL), [])])
    *frames, finish = sent.on(grant, 0.0)
    first, second = ([each.frame for each in frames if each.frame.track == track] for track in (0, 1))
    assert [frame.index for frame in first] == [frame.index for frame in second] == [0, 1, 2]
    assert finish == SendFinish(Finish(*KEY, 1, 7, 6, 60))
    ready = [(LinkUp(1), ...), (Expected(both), ...), (OFFER, ...), (Reserved(ALL, (0, 0)), [Tell(grant)])]

    def told(frame: Frame) -> Push:
        return replace(push(frame), track=frame.track)

    any_order = [second[0], first[0], first[1], second[1], second[2], first[2]]
    pushed = [(told(frame), [ReceiveFrame(frame)]) for frame in any_order]
    ended = [(FrameEnded(frame), []) for frame in (*second, *first)]
    walk(
        ReceiveAttempt(KEY, TIMEOUTS, 0.0),
        [*ready, *pushed, *ended, (finish.message, [Commit(ALL, 7), Tell(Ack(*KEY, 1))])],
    )
    walk(ReceiveAttempt(KEY, TIMEOUTS, 0.0), [*ready, pushed[0], (told(second[2]), Code.PROTOCOL)])
    alone = [(told(frame), ...) for frame in first]
    walk(ReceiveAttempt(KEY, TIMEOUTS, 0.0), [*ready, *alone, (Finish(*KEY, 1, 7, 3, 30), Code.PROTOCOL)])
