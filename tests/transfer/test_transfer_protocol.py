"""The ownership protocol, row by row; `test_transfer_simulation` has its interleavings."""

from dataclasses import dataclass, replace

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


@dataclass(eq=False)
class Held:
    """Stands for a hold or a reservation."""

    name: str


SHAPE = Manifest(tokens=10, digest=b"d" * 16, token_bytes=3, block_size=BLOCK, frame_tokens=BLOCK)
OFFER = Offer(*KEY, 10, b"d" * 16)
FRAMES = [Frame(1, 0, 0, 4, 12), Frame(1, 1, 4, 4, 12), Frame(1, 2, 8, 2, 6)]


# The sender's rows.


def granted(now: float = 0.0) -> SendAttempt:
    sender = SendAttempt(KEY, SHAPE, TIMEOUTS, now)
    sender.on(Grant(*KEY, 1, 0), now)
    return sender


def exporting(state: State) -> tuple[SendAttempt, list[Held]]:
    """A sender in `state`, with the holds that it has."""
    sender = SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0)
    holds: list[Held] = []
    if state in (State.PREFILLING, State.TRANSFERRING):
        sender.on(Grant(*KEY, 1, 0), 0.0)
    if state in (State.EXPORTED, State.TRANSFERRING):
        holds.append(Held("all"))
        sender.on(Finished(7, holds[0]), 0.0)
    assert sender.state is state
    return sender, holds


def test_sender_sends_frames_as_soon_as_they_are_computed_and_granted() -> None:
    sender = granted()
    assert sender.state is State.PREFILLING
    assert sender.on(Computed(8, Held("a")), 1.0) == [SendFrame(FRAMES[0]), SendFrame(FRAMES[1])]
    assert sender.on(Finished(7, Held("b")), 2.0) == [SendFrame(FRAMES[2]), SendFinish(Finish(*KEY, 1, 7, 3, 30))]
    assert sender.state is State.TRANSFERRING


def test_sender_sends_nothing_without_a_grant_and_each_frame_once() -> None:
    sender = SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0)
    assert sender.on(Computed(4, Held("a")), 0.0) == []
    assert sender.on(Finished(7, Held("b")), 0.0) == []
    assert sender.state is State.EXPORTED
    finish = SendFinish(Finish(*KEY, 1, 7, 3, 30))
    assert sender.on(Grant(*KEY, 1, 0), 0.0) == [*map(SendFrame, FRAMES), finish]
    assert sender.on(Grant(*KEY, 1, 0), 0.0) == []
    assert sender.dropped == 1


def test_sender_sends_nothing_on_a_link_that_is_lost() -> None:
    sender = granted()
    sender.on(Computed(4, Held("a")), 0.0)
    sender.on(LinkLost(1), 0.0)
    assert sender.on(Computed(8, Held("b")), 0.0) == []
    assert sender.on(Finished(7, Held("c")), 0.0) == []


def test_sender_skips_what_the_receiver_has() -> None:
    sender = SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0)
    sender.on(Finished(7, Held("a")), 0.0)
    assert sender.on(Grant(*KEY, 1, 8), 0.0) == [
        SendFrame(Frame(1, 0, 8, 2, 6)),
        SendFinish(Finish(*KEY, 1, 7, 1, 6)),
    ]
    everything = SendAttempt(KEY, SHAPE, TIMEOUTS, 0.0)
    everything.on(Finished(7, Held("a")), 0.0)
    assert everything.on(Grant(*KEY, 1, 10), 0.0) == [SendFinish(Finish(*KEY, 1, 7, 0, 0))]


def test_sender_releases_on_ack_but_not_what_is_still_read() -> None:
    sender, holds = exporting(State.TRANSFERRING)
    for frame in FRAMES[:2]:
        sender.on(FrameEnded(frame), 0.0)
    assert sender.on(Ack(*KEY, 1), 0.0) == [Committed(), StopFrames((FRAMES[2],))]
    assert not sender.over
    assert sender.on(FrameEnded(FRAMES[2]), 0.0) == [ReleaseHold(holds[0])]
    assert sender.over


def test_sender_drops_other_attempts() -> None:
    sender, _ = exporting(State.TRANSFERRING)
    for message in (Nack("request", 1, Code.NO_CAPACITY, ""), Ack("request", 1, 1), Grant("request", 1, 2, 0)):
        assert sender.on(message, 0.0) == []
    assert sender.dropped == 3
    assert sender.state is State.TRANSFERRING


def test_sender_accepts_no_ack_of_another_epoch_or_before_the_end() -> None:
    sender = granted()
    sender.on(Computed(8, Held("a")), 0.0)
    assert sender.on(Ack(*KEY, 1), 0.0) == []
    sender.on(Finished(7, Held("b")), 0.0)
    assert sender.on(Ack(*KEY, 2), 0.0) == []
    assert sender.dropped == 2
    assert sender.state is State.TRANSFERRING


def test_sender_starts_again_on_the_next_link_at_the_granted_token() -> None:
    sender, _ = exporting(State.TRANSFERRING)
    assert sender.on(LinkLost(1), 0.0) == []
    assert sender.state is State.EXPORTED
    assert sender.on(Grant(*KEY, 1, 0), 0.0) == [], "a grant of the lost link's epoch"
    assert sender.on(Grant(*KEY, 2, 4), 0.0) == [
        SendFrame(Frame(2, 0, 4, 4, 12)),
        SendFrame(Frame(2, 1, 8, 2, 6)),
        SendFinish(Finish(*KEY, 2, 7, 2, 18)),
    ]
    assert sender.have == 0


def test_sender_gives_up_after_too_many_links() -> None:
    sender, _ = exporting(State.EXPORTED)
    for epoch in range(1, MAX_LINK_LOSSES + 1):
        assert sender.on(LinkLost(epoch), 0.0) == []
    actions = sender.on(LinkLost(MAX_LINK_LOSSES + 1), 0.0)
    assert any(isinstance(action, Failed) and action.code is Code.LINK for action in actions)
    assert sender.over


@pytest.mark.parametrize("state", [State.ADMITTED, State.PREFILLING, State.EXPORTED, State.TRANSFERRING])
@pytest.mark.parametrize("end", ["cancel", "nack", "peer lost", "lease", "late"])
def test_sender_ends_in_every_state_and_releases_all(state: State, end: str) -> None:
    sender, holds = exporting(state)
    at = 0.0
    match end:
        case "cancel":
            actions = sender.on(Cancel(), at)
            assert isinstance(actions[0], Tell)
            assert isinstance(actions[0].message, Abort)
        case "nack":
            actions = sender.on(Nack(*KEY, Code.NO_CAPACITY, "full"), at)
        case "peer lost":
            actions = sender.on(PeerLost(Code.CLOSED, "gone"), at)
        case "lease":
            actions = sender.poll(TIMEOUTS.lease)
        case "late":
            while at < TIMEOUTS.prefill + TIMEOUTS.lease and not sender.state.over:
                at += TIMEOUTS.lease / 2
                actions = sender.on(Renewed(), at)
    assert sender.state is (State.CANCELLED if end == "cancel" else State.FAILED)
    assert (end == "cancel") == (not any(isinstance(action, Failed) for action in actions))
    for action in list(actions):
        if isinstance(action, StopFrames):
            for frame in action.frames:
                actions += sender.on(FrameEnded(frame), at)
    assert [action.hold for action in actions if isinstance(action, ReleaseHold)] == holds
    assert sender.over
    late = Held("late")
    assert sender.on(Computed(8, late), at) == [ReleaseHold(late)]
    assert sender.on(Grant(*KEY, 9, 0), at) == []


@pytest.mark.parametrize("have", [1, 5, 11, 12])
def test_sender_refuses_a_grant_inside_a_block_or_past_the_end(have: int) -> None:
    sender, _ = exporting(State.EXPORTED)
    actions = sender.on(Grant(*KEY, 1, have), 0.0)
    assert any(isinstance(action, Failed) and action.code is Code.PROTOCOL for action in actions)


# The receiver's rows.


def receiving(have: int = 0) -> tuple[ReceiveAttempt, Held]:
    receiver = ReceiveAttempt(KEY, TIMEOUTS, 0.0)
    receiver.on(Expected(SHAPE), 0.0)
    assert receiver.on(OFFER, 0.0) == [Reserve()]
    receiver.on(LinkUp(1), 0.0)
    reservation = Held("reservation")
    assert receiver.on(Reserved(reservation, have), 0.0) == [Tell(Grant(*KEY, 1, have))]
    assert receiver.state is State.TRANSFERRING
    return receiver, reservation


def push(frame: Frame) -> Push:
    return Push(*KEY, frame.epoch, frame.index, frame.first, frame.tokens, frame.nbytes)


@pytest.mark.parametrize("first", [Expected(SHAPE), OFFER], ids=["expected first", "offered first"])
def test_receiver_reserves_once_it_knows_announcement_and_offer(first: Expected | Offer) -> None:
    receiver = ReceiveAttempt(KEY, TIMEOUTS, 0.0)
    second = OFFER if isinstance(first, Expected) else Expected(SHAPE)
    assert receiver.on(first, 0.0) == []
    assert receiver.state is State.ADMITTED
    assert receiver.on(second, 0.0) == [Reserve()]
    assert receiver.state is State.WAITING


@pytest.mark.parametrize(
    ("offer", "field"), [(Offer(*KEY, 11, b"d" * 16), "tokens"), (Offer(*KEY, 10, b"e" * 16), "digest")]
)
def test_receiver_refuses_a_manifest_that_was_not_announced(offer: Offer, field: str) -> None:
    receiver = ReceiveAttempt(KEY, TIMEOUTS, 0.0)
    receiver.on(Expected(SHAPE), 0.0)
    nack, failed = receiver.on(offer, 0.0)
    assert isinstance(nack, Tell)
    assert isinstance(nack.message, Nack)
    assert nack.message.message.startswith(field)
    assert isinstance(failed, Failed)
    assert failed.code is Code.MANIFEST


def test_receiver_waits_for_free_blocks_and_reports_it_once() -> None:
    receiver = ReceiveAttempt(KEY, TIMEOUTS, 0.0)
    receiver.on(Expected(SHAPE), 0.0)
    receiver.on(OFFER, 0.0)
    receiver.on(LinkUp(1), 0.0)
    assert receiver.on(Reserved(None), 0.0) == [Tell(Wait(*KEY))]
    assert receiver.on(BlocksFreed(), 0.0) == [Reserve()]
    assert receiver.on(BlocksFreed(), 0.0) == [], "asked already"
    assert receiver.on(Reserved(None), 0.0) == [Reserve()], "blocks were freed meanwhile"
    assert receiver.on(Reserved(None), 0.0) == []
    for at in range(2, int(TIMEOUTS.grant), 2):
        receiver.on(Renewed(), float(at))
    actions = receiver.poll(TIMEOUTS.grant)
    assert any(isinstance(action, Failed) and action.code is Code.NO_CAPACITY for action in actions)


def test_receiver_commits_when_all_frames_have_verified_and_only_then() -> None:
    receiver, reservation = receiving()
    for frame in FRAMES:
        assert receiver.on(push(frame), 0.0) == [ReceiveFrame(frame)]
    assert receiver.on(Finish(*KEY, 1, 7, 3, 30), 0.0) == []
    assert receiver.on(FrameEnded(FRAMES[0]), 0.0) == []
    assert receiver.on(FrameEnded(FRAMES[1]), 0.0) == []
    assert receiver.on(FrameEnded(FRAMES[2]), 0.0) == [Commit(reservation, 7), Tell(Ack(*KEY, 1))]
    assert receiver.over


def test_receiver_that_has_all_tokens_commits_without_a_frame() -> None:
    receiver, reservation = receiving(have=10)
    assert receiver.on(Finish(*KEY, 1, 7, 0, 0), 0.0) == [Commit(reservation, 7), Tell(Ack(*KEY, 1))]


def test_receiver_drops_other_attempts_and_epochs() -> None:
    receiver, _ = receiving()
    old = Push("request", 1, 1, 0, 0, 4, 12)
    assert receiver.on(old, 0.0) == []
    assert receiver.on(push(Frame(2, 0, 0, 4, 12)), 0.0) == []
    assert receiver.on(Finish(*KEY, 2, 7, 3, 30), 0.0) == []
    assert receiver.on(Abort("request", 1, Code.CANCELLED, ""), 0.0) == []
    receiver.on(push(FRAMES[0]), 0.0)
    assert receiver.on(push(FRAMES[0]), 0.0) == [], "a frame announced twice"
    assert receiver.dropped == 5
    assert receiver.state is State.TRANSFERRING


@pytest.mark.parametrize(
    "frame",
    [
        Frame(1, 1, 4, 4, 12),
        Frame(1, 0, 4, 4, 12),
        Frame(1, 0, 0, 3, 9),
        Frame(1, 0, 0, 4, 13),
        Frame(1, 0, 0, 12, 36),
    ],
    ids=["gap", "wrong tokens", "not whole blocks", "wrong length", "past the end"],
)
def test_receiver_refuses_a_frame_that_does_not_follow(frame: Frame) -> None:
    receiver, reservation = receiving()
    actions = receiver.on(push(frame), 0.0)
    assert any(isinstance(action, Failed) and action.code is Code.PROTOCOL for action in actions)
    assert actions[-1] == ReleaseHold(reservation)


@pytest.mark.parametrize("finish", [Finish(*KEY, 1, 7, 3, 29), Finish(*KEY, 1, 7, 4, 30), Finish(*KEY, 1, 7, 2, 30)])
def test_receiver_refuses_a_finish_that_does_not_add_up(finish: Finish) -> None:
    receiver, _ = receiving()
    for frame in FRAMES:
        receiver.on(push(frame), 0.0)
    actions = receiver.on(finish, 0.0)
    for frame in FRAMES:
        actions += receiver.on(FrameEnded(frame), 0.0)
    assert not any(isinstance(action, Commit) for action in actions)
    assert receiver.state is State.FAILED


@pytest.mark.parametrize("announced", range(len(FRAMES)))
def test_receiver_refuses_a_finish_before_all_is_announced(announced: int) -> None:
    receiver, _ = receiving()
    for frame in FRAMES[:announced]:
        receiver.on(push(frame), 0.0)
    actions = receiver.on(Finish(*KEY, 1, 7, announced, 30), 0.0)
    assert any(isinstance(action, Failed) and action.code is Code.PROTOCOL for action in actions)


def test_receiver_never_commits_a_corrupt_frame() -> None:
    receiver, reservation = receiving()
    receiver.on(push(FRAMES[0]), 0.0)
    receiver.on(push(FRAMES[1]), 0.0)
    actions = receiver.on(FrameEnded(FRAMES[0], Outcome.CORRUPT), 0.0)
    assert isinstance(actions[0], Tell)
    assert isinstance(actions[0].message, Nack)
    assert actions[0].message.code is Code.CORRUPT
    assert actions[-1] == StopFrames((FRAMES[1],))
    assert receiver.on(FrameEnded(FRAMES[1]), 0.0) == [ReleaseHold(reservation)]


def test_receiver_grants_on_the_next_link_what_has_not_verified() -> None:
    receiver, _ = receiving()
    receiver.on(push(FRAMES[0]), 0.0)
    receiver.on(push(FRAMES[1]), 0.0)
    receiver.on(FrameEnded(FRAMES[0]), 0.0)
    assert receiver.on(LinkUp(2), 0.0) == [], "the old link may still be writing"
    assert receiver.on(FrameEnded(FRAMES[1], Outcome.LOST), 0.0) == [Tell(Grant(*KEY, 2, 4))]


@pytest.mark.parametrize("state", [State.ADMITTED, State.WAITING, State.TRANSFERRING])
@pytest.mark.parametrize("end", ["cancel", "abort", "peer lost", "lease", "late"])
def test_receiver_ends_in_every_state_and_releases_all(state: State, end: str) -> None:
    receiver = ReceiveAttempt(KEY, TIMEOUTS, 0.0)
    reservation = Held("reservation")
    actions = receiver.on(OFFER, 0.0) + receiver.on(LinkUp(1), 0.0)
    if state is not State.ADMITTED:
        actions += receiver.on(Expected(SHAPE), 0.0)
    if state is State.TRANSFERRING:
        actions += receiver.on(Reserved(reservation), 0.0) + receiver.on(push(FRAMES[0]), 0.0)
    assert receiver.state is state
    at = 0.0
    match end:
        case "cancel":
            actions += receiver.on(Cancel(), at)
        case "abort":
            actions += receiver.on(Abort(*KEY, Code.CANCELLED, "gone"), at)
        case "peer lost":
            actions += receiver.on(PeerLost(Code.CLOSED, "gone"), at)
        case "lease":
            actions += receiver.poll(TIMEOUTS.lease)
        case "late":
            while at < TIMEOUTS.prefill + TIMEOUTS.lease and not receiver.state.over:
                at += TIMEOUTS.lease / 2
                actions += receiver.on(Renewed(), at)
    assert receiver.state is (State.CANCELLED if end == "cancel" else State.FAILED)
    if state is State.WAITING:
        assert not receiver.over
        actions += receiver.on(Reserved(reservation), at)
    if state is State.TRANSFERRING:
        assert ReleaseHold(reservation) not in actions, "the frame in transit may still be written"
        actions += receiver.on(FrameEnded(FRAMES[0], Outcome.LOST), at)
    assert actions.count(ReleaseHold(reservation)) == (state is not State.ADMITTED)
    assert receiver.over


def test_a_machine_that_missed_its_deadline_ignores_queued_messages() -> None:
    receiver, reservation = receiving()
    for frame in FRAMES:
        receiver.on(push(frame), 0.0)
        receiver.on(FrameEnded(frame), 0.0)
    actions = receiver.on(Finish(*KEY, 1, 7, 3, 30), TIMEOUTS.lease + 1)
    assert not any(isinstance(action, Commit) for action in actions)
    assert ReleaseHold(reservation) in actions
    sender, _ = exporting(State.TRANSFERRING)
    assert Committed() not in sender.on(Ack(*KEY, 1), TIMEOUTS.lease + 1)
    assert sender.state is State.FAILED


def test_tokens_count_once_all_of_their_parts_have_verified() -> None:
    shape = replace(SHAPE, token_bytes=6, layers=3)
    receiver = ReceiveAttempt(KEY, TIMEOUTS, 0.0)
    for event in (LinkUp(1), Expected(shape), OFFER, Reserved(Held("all"))):
        receiver.on(event, 0.0)
    first, second = Frame(1, 0, 0, 4, 8, LayerPart(0, 2)), Frame(1, 1, 0, 4, 16, LayerPart(1, 2))
    for frame in (first, second):
        pushed = receiver.on(Push(*KEY, 1, frame.index, frame.first, frame.tokens, frame.nbytes, *frame.part), 0.0)
        assert pushed == [ReceiveFrame(frame)]
    receiver.on(FrameEnded(first), 0.0)
    receiver.on(FrameEnded(second, Outcome.LOST), 0.0)
    assert receiver.on(LinkUp(2), 0.0) == [Tell(Grant(*KEY, 2, 0))], "half of the layers are no tokens"
    other = Push(*KEY, 2, 0, 0, 4, 8, 0, 2)
    receiver.on(other, 0.0)
    refused = receiver.on(replace(other, index=1, part=1, parts=3, nbytes=8), 0.0)
    assert any(isinstance(action, Tell) and isinstance(action.message, Nack) for action in refused)
    assert any(getattr(action, "code", None) is Code.PROTOCOL for action in refused)
