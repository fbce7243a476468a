"""Every protection of the hand-off is needed: without its line in the product code, a named test fails.

Each case replaces one line, in this process and during the test only. Then a named test must fail, and in the seeded
worlds of `support.simulation` the guarantee must break at some seed, at which it holds with the line in its place.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import test_transfer_control as control
import test_transfer_corruption as corruption
import test_transfer_frames as frames
import test_transfer_handoff as handoff
import test_transfer_membership as membership
import test_transfer_protocol as protocol

from kvrelay.decode_worker.kv_receiver import KVReceiver
from kvrelay.prefill_worker.kv_sender import KVSender
from kvrelay.transfer.frames.frames import ReceiveJob
from kvrelay.transfer.protocol.endpoint import Endpoint
from kvrelay.transfer.protocol.events import State
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.peers import PeerTable
from kvrelay.transfer.protocol.ports import BlockClaim
from kvrelay.transfer.protocol.table import ReceiveAttempt, SendAttempt
from support import raw_peer
from support.handoff import Ends
from support.mutation import mutant, weaken
from support.simulated_workers import DecodeProcess
from support.simulation import Violation, World, run_world

SEEDS = 2000
"""A weakness must show within this many worlds."""


@dataclass(frozen=True)
class Weakness:
    """One line of protection, and what breaks without it."""

    name: str
    kind: type
    line: str
    instead: str
    breaks: str
    """The kind of violation in the simulation; empty if it can't show there."""
    test: Callable[..., None] | None = None
    arguments: tuple[object, ...] = ()


WEAKNESSES = [
    Weakness(
        "attempt id, at the sender",
        SendAttempt,
        "event.key != self.key",
        "False",
        "",
        protocol.test_sender_drops_other_attempts,
    ),
    Weakness(
        "attempt id, at the receiver",
        ReceiveAttempt,
        "event.key != self.key",
        "False",
        "",
        protocol.test_receiver_drops_other_attempts_and_epochs,
    ),
    Weakness(
        "epoch of a grant",
        SendAttempt,
        "if grant.epoch <= self._epoch:",
        "if grant.epoch < self._epoch:",
        "fence",
        protocol.test_sender_starts_again_on_the_next_link_at_the_granted_token,
    ),
    Weakness(
        "epoch of an ack",
        SendAttempt,
        " if epoch == self._finish_epoch",
        "",
        "",
        protocol.test_sender_accepts_no_ack_of_another_epoch_or_before_the_end,
    ),
    Weakness(
        "epoch of a frame",
        ReceiveAttempt,
        "push.epoch != self._granted_epoch or push.epoch != self._epoch or ",
        "",
        "",
        protocol.test_receiver_drops_other_attempts_and_epochs,
    ),
    Weakness(
        "epoch of a finish",
        ReceiveAttempt,
        "finish.epoch != self._granted_epoch or finish.epoch != self._epoch or ",
        "",
        "fence",
        protocol.test_receiver_drops_other_attempts_and_epochs,
    ),
    Weakness(
        "incarnation that a stream is meant for",
        LocalWorker,
        "hello.peer_incarnation != mine",
        "False",
        "",
        control.test_a_stream_for_another_incarnation_is_refused,
    ),
    Weakness(
        "incarnation of a member",
        PeerTable,
        "peer is not None and peer.incarnation == worker.incarnation",
        "peer is not None",
        "",
        membership.test_only_members_hand_over,
    ),
    Weakness(
        "lease of the receiver, at the sender",
        SendAttempt,
        "min(self._deadline, self._lease)",
        "self._deadline",
        "deadline",
        protocol.test_sender_ends_in_every_state_and_releases_all,
        (State.TRANSFERRING, "lease"),
    ),
    Weakness(
        "lease of the sender, at the receiver",
        ReceiveAttempt,
        "min(self._deadline, self._lease)",
        "self._deadline",
        "deadline",
        protocol.test_receiver_ends_in_every_state_and_releases_all,
        (State.TRANSFERRING, "lease"),
    ),
    Weakness(
        "a deadline beside the lease",
        ReceiveAttempt,
        "min(self._deadline, self._lease)",
        "self._lease",
        "deadline",
        protocol.test_receiver_ends_in_every_state_and_releases_all,
        (State.TRANSFERRING, "late"),
    ),
    Weakness(
        "no frame without a grant",
        SendAttempt,
        "if not self._granted:",
        "if False:",
        "credit",
        protocol.test_sender_sends_nothing_on_a_link_that_is_lost,
    ),
    Weakness(
        "quarantine of blocks that are read",
        SendAttempt,
        "self._quarantine.add(frame)",
        "pass",
        "owner",
        protocol.test_sender_releases_on_ack_but_not_what_is_still_read,
    ),
    Weakness(
        "quarantine of blocks that are written",
        ReceiveAttempt,
        "self._quarantine.add(frame)",
        "pass",
        "owner",
        protocol.test_receiver_ends_in_every_state_and_releases_all,
        (State.TRANSFERRING, "cancel"),
    ),
    Weakness(
        "tokens whose KV is there in all layers",
        ReceiveAttempt,
        "if self._verified_parts == frame.part.of:",
        "if True:",
        "token",
        protocol.test_tokens_count_once_all_of_their_parts_have_verified,
    ),
    Weakness(
        "no grant while an older link may write",
        ReceiveAttempt,
        "self._granted_epoch == self._epoch or self._quarantine",
        "self._granted_epoch == self._epoch",
        "owner",
        protocol.test_receiver_grants_on_the_next_link_what_has_not_verified,
    ),
    Weakness(
        "claim",
        BlockClaim,
        "self._entered = not self._closed",
        "self._entered = True",
        "owner",
        frames.test_a_claim_lets_one_thread_in_or_is_closed_first,
    ),
    Weakness(
        "deadlines before each event",
        ReceiveAttempt,
        "actions = self.poll(now)",
        "actions = []",
        "",
        protocol.test_a_machine_that_missed_its_deadline_ignores_queued_messages,
    ),
    Weakness(
        "checksum of a frame in the link's buffer",
        ReceiveJob,
        "FrameCheck.same(check.of(data), bytes(end.cpu().numpy().data))",
        "True",
        "",
        corruption.test_a_flipped_bit_is_never_committed,
        (0,),
    ),
    Weakness(
        "checksum of a frame that went straight into the blocks",
        ReceiveJob,
        "intact = FrameCheck.same(expected, end)",
        "intact = True",
        "",
        corruption.test_a_bit_flipped_in_place_fails_the_hand_off_and_harms_no_later_one,
        ("tcp", "sender"),
    ),
    Weakness(
        "end of the link after a corrupt frame",
        KVReceiver,
        'self.links.close(transfer.sender, "a frame failed its checksum")',
        "pass",
        "",
        corruption.test_a_flipped_bit_is_never_committed,
        (0,),
    ),
    Weakness(
        "a new epoch for each link",
        KVSender,
        "self._epochs.get(pair.incarnation, 0) + 1",
        "1",
        "protocol",
        handoff.test_after_a_lost_link_the_next_one_takes_over_all_but_the_stuck_hand_off,
        ("fail",),
    ),
    Weakness(
        "absence from a membership",
        PeerTable,
        "self._peers |= {",
        "self._peers = {",
        "",
        membership.test_a_membership_that_lacks_a_peer_says_nothing_of_it,
    ),
    Weakness(
        "no epoch twice",
        KVReceiver,
        "epoch <= self._epochs.get(pair.incarnation, 0)",
        "False",
        "",
        control.test_an_epoch_is_dialled_once,
    ),
    Weakness(
        "end of hand-offs with their stream",
        Endpoint,
        "            self._feed(transfer, PeerLost(code, message))",
        "            pass",
        "",
        membership.test_a_peer_that_is_dead_or_replaced_frees_everything,
        ("prefill",),
    ),
    Weakness(
        "an attempt that is over waits no more",
        KVReceiver,
        """        if transfer.machine.state.over:
            if self._waiting.leave(key):
                self.blocks_freed()""",
        "        if transfer.machine.state.over:",
        "crash",
        handoff.test_without_free_blocks_in_time_the_hand_off_fails_at_both_ends,
    ),
    Weakness(
        "a reservation that raised is answered",
        KVReceiver,
        """            self._feed(transfer, PeerLost(Code.CLOSED, f"reserving blocks: {answer}"))
            self._feed(transfer, Reserved(None))""",
        "            return",
        "leak",
        handoff.test_a_decode_worker_that_cannot_reserve_any_more_fails_the_hand_off_at_both_ends,
    ),
    Weakness(
        "end of frames that are stopped",
        Endpoint,
        """            if transfer.claims[frame].close():
                self._feed(transfer, FrameEnded(frame, Outcome.LOST))""",
        "            transfer.claims[frame].close()",
        "leak",
    ),
    Weakness(
        "frames that have begun are not stopped",
        Endpoint,
        "            if transfer.claims[frame].close():",
        "            if transfer.claims[frame].close() or True:",
        "owner",
        frames.test_blocks_under_a_copy_are_released_after_it_and_not_before,
        ("receiver",),
    ),
    Weakness(
        "holds that come after the end",
        KVSender,
        """            self._host.release(hold)
            return
        manifest = transfer""",
        """            return
        manifest = transfer""",
        "leak",
        handoff.test_a_cancel_frees_both_ends_at_once,
        ("prefill", "announced"),
    ),
    Weakness(
        "an offer that comes after the link",
        KVReceiver,
        "                self._feed(transfer, LinkUp(pair.epoch))",
        "                pass",
        "lost",
        handoff.test_many_at_once_in_any_order_of_announcement_and_offer,
    ),
    Weakness(
        "no finish before the announcements of its frames",
        KVSender,
        "self.links.after_frames(pair.incarnation, message.epoch, partial(pair.stream.put, message))",
        "pair.stream.put(message)",
        "protocol",
        handoff.test_kv_arrives_and_every_byte_is_counted,
        ("shm",),
    ),
    Weakness(
        "an engine that has ended still answers reservations",
        DecodeProcess,
        'answer(RuntimeError("the engine has ended"))',
        "pass",
        "leak",
    ),
]


def broken(checksums: bool = True) -> tuple[int, Violation]:
    """The first seed at which a guarantee breaks, and how."""
    for seed in range(SEEDS):
        try:
            World(random.Random(seed), checksums).run()
        except Violation as violation:
            return seed, violation
    return pytest.fail(f"nothing broke in {SEEDS} worlds")


@pytest.mark.parametrize(
    "weakness", [weakness for weakness in WEAKNESSES if weakness.test], ids=lambda weakness: weakness.name
)
def test_a_named_test_fails_without(weakness: Weakness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ends.until, "__defaults__", (2.0,))
    monkeypatch.setattr(raw_peer, "PATIENCE_SECONDS", 2.0)
    assert weakness.test is not None
    weakness.test(*weakness.arguments)
    weaken(monkeypatch, weakness.kind, weakness.line, weakness.instead)
    with pytest.raises((AssertionError, TimeoutError, ValueError)):
        weakness.test(*weakness.arguments)


@pytest.mark.parametrize(
    "weakness", [weakness for weakness in WEAKNESSES if weakness.breaks], ids=lambda weakness: weakness.name
)
def test_a_simulated_world_breaks_without(weakness: Weakness, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        weaken(patch, weakness.kind, weakness.line, weakness.instead)
        seed, violation = broken()
    assert violation.kind == weakness.breaks, f"seed {seed}: {violation}"
    run_world(seed)


def test_a_simulated_world_commits_wrong_kv_without_checksums() -> None:
    seed, violation = broken(checksums=False)
    assert violation.kind == "token"
    run_world(seed)


def test_a_line_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LookupError, match="is 0 times"):
        mutant(protocol, "no such " + "line", "")
