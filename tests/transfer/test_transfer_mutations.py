"""Every protection of the hand-off is needed: with its line taken out of the production code, a named test fails.

Each case takes one line out, in this process and for the length of the test only, and then runs a test that has to
notice; and the seeded worlds of `support.simulation`, in which its guarantee has to break at some seed, and at that
seed doesn't break with the line in its place.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import test_transfer_control as control
import test_transfer_frames as frames
import test_transfer_handoff as handoff
import test_transfer_protocol as protocol

from kvrelay.transfer.control import LocalWorker
from kvrelay.transfer.events import State
from kvrelay.transfer.frames import BlockClaim, ReceiveJob
from kvrelay.transfer.peers import PeerTable
from kvrelay.transfer.protocol import ReceiveAttempt, SendAttempt
from support import raw_peer
from support.handoff import Ends
from support.mutation import mutant, weaken
from support.simulation import Violation, World, run_world

SEEDS = 10_000
"""Worlds at most until a weakness must have shown."""


@dataclass(frozen=True)
class Weakness:
    """One line of protection, and who notices that it is gone."""

    name: str
    kind: type
    line: str
    instead: str
    breaks: str
    """The kind of violation in the simulation; empty where it can't show there."""
    test: Callable[..., None]
    arguments: tuple[object, ...] = ()


WEAKNESSES = [
    Weakness(
        "attempt id, at the sender",
        SendAttempt,
        "event.key != self.key",
        "False",
        "fence",
        protocol.test_sender_drops_other_attempts,
    ),
    Weakness(
        "attempt id, at the receiver",
        ReceiveAttempt,
        "event.key != self.key",
        "False",
        "fence",
        protocol.test_receiver_drops_other_attempts_and_epochs,
    ),
    Weakness(
        "epoch of a grant",
        SendAttempt,
        "fresh = grant.epoch > self._epoch",
        "fresh = grant.epoch >= self._epoch",
        "fence",
        protocol.test_sender_starts_anew_on_the_next_link_where_the_receiver_says,
    ),
    Weakness(
        "epoch of an ack",
        SendAttempt,
        " if epoch == self._finish_epoch",
        "",
        "",
        protocol.test_sender_believes_no_ack_of_another_epoch_or_before_the_end,
    ),
    Weakness(
        "epoch of a frame",
        ReceiveAttempt,
        "push.epoch != self._granted_epoch or push.epoch != self._epoch or ",
        "",
        "fence",
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
        "hello.peer_incarnation != self.incarnation",
        "False",
        "",
        control.test_who_means_another_incarnation_is_refused,
    ),
    Weakness(
        "incarnation of a member",
        PeerTable,
        "peer is not None and peer.incarnation == incarnation",
        "peer is not None",
        "",
        handoff.test_only_members_are_spoken_to,
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
        "nothing without credit",
        SendAttempt,
        "if not self._granted:",
        "if False:",
        "credit",
        protocol.test_sender_sends_nothing_on_a_link_that_is_lost,
    ),
    Weakness(
        "no more than the credit",
        SendAttempt,
        "end = min(computed, self._limit)",
        "end = computed",
        "credit",
        protocol.test_sender_sends_nothing_without_credit,
    ),
    Weakness(
        "quarantine of what is read",
        SendAttempt,
        "self._quarantine.add(frame)",
        "pass",
        "owner",
        protocol.test_sender_releases_on_ack_but_not_what_is_still_read,
    ),
    Weakness(
        "quarantine of what is written",
        ReceiveAttempt,
        "self._quarantine.add(frame)",
        "pass",
        "owner",
        protocol.test_receiver_ends_in_every_state_and_releases_all,
        (State.TRANSFERRING, "cancel"),
    ),
    Weakness(
        "no grant while an older link may write",
        ReceiveAttempt,
        "self._granted_epoch == self._epoch or self._quarantine",
        "self._granted_epoch == self._epoch",
        "owner",
        protocol.test_receiver_asks_the_next_link_for_what_has_not_verified,
    ),
    Weakness(
        "guard",
        BlockClaim,
        "self._entered = not self._closed",
        "self._entered = True",
        "owner",
        frames.test_a_guard_lets_one_in_or_is_closed_first,
    ),
    Weakness(
        "a look at the clock before each event",
        ReceiveAttempt,
        "actions = self.poll(now)",
        "actions = []",
        "",
        protocol.test_who_was_frozen_past_a_deadline_acts_on_nothing_that_queued_up,
    ),
    Weakness(
        "checksum",
        ReceiveJob,
        "            intact = bytes(said.cpu().numpy().data) == trailer(value)",
        "            intact = True",
        "",
        handoff.test_a_flipped_bit_is_never_committed,
        (0,),
    ),
]


def broken(checksums: bool = True) -> tuple[int, Violation]:
    """The first seed at which the simulation breaks, and what breaks there."""
    for seed in range(SEEDS):
        try:
            World(random.Random(seed), checksums).run()
        except Violation as violation:
            return seed, violation
    return pytest.fail(f"{SEEDS} worlds did not notice")


@pytest.mark.parametrize("weakness", WEAKNESSES, ids=lambda weakness: weakness.name)
def test_a_named_test_fails_without(weakness: Weakness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ends.until, "__defaults__", (2.0,))
    monkeypatch.setattr(raw_peer, "PATIENCE_SECONDS", 2.0)
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


def test_a_simulated_world_takes_wrong_tokens_without_checksums() -> None:
    seed, violation = broken(checksums=False)
    assert violation.kind == "token"
    run_world(seed)


def test_a_line_that_is_gone_is_told() -> None:
    with pytest.raises(LookupError, match="say which line"):
        mutant(protocol, "no such " + "line", "")
