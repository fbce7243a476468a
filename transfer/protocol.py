"""Who owns the KV of one request attempt, at every moment of its hand-off: two state machines without I/O.

    ADMITTED -> PREFILLING -> EXPORTED(lease) -> TRANSFERRING -> COMMITTED -> (DECODING -> DONE) | FAILED | CANCELLED

Both ends walk this road together: `SendAttempt` on the prefill worker owns the holds on the computed blocks, and
`ReceiveAttempt` on the decode worker owns the reservation, until COMMITTED. From then on the receiver's engine owns
the KV (DECODING and DONE are states of its `Sequence`) and the sender's blocks are released. A machine is told events
and answers actions; it never waits, reads no clock and starts nothing, so any interleaving can be replayed.

Sender          | told                              | becomes       | asks for
----------------|-----------------------------------|---------------|-------------------------------------------------
ADMITTED        | Computed, LayersComputed          | same          | (keeps the hold)
 offered, no    | Grant                             | PREFILLING    | SendFrame, of what is computed
 credit         | Finished                          | EXPORTED      |
                | LinkLost                          | same          | (a grant of the next epoch will come)
PREFILLING      | Computed, LayersComputed          | same          | SendFrame
 has credit     | Grant: more, or of a later epoch  | same          | SendFrame; anew from what the receiver has
                | Finished                          | TRANSFERRING  | SendFrame, SendFinish after the last
                | LinkLost                          | ADMITTED      |
EXPORTED        | Grant                             | TRANSFERRING  | SendFrame, SendFinish
 computed, no   | LinkLost                          | same          |
 credit         | Ack of the link lost since        | COMMITTED     | Committed, StopFrames, ReleaseHold of all
TRANSFERRING    | Grant: more, or of a later epoch  | same          | SendFrame, SendFinish
 computed, has  | LinkLost                          | EXPORTED      |
 credit         | Ack                               | COMMITTED     | Committed, StopFrames, ReleaseHold of all
any of these    | Wait, Renewed                     | same          | (the lease is renewed)
                | FrameEnded                        | same          |
                | Nack                              | FAILED        | Failed, StopFrames, ReleaseHold
                | Deadline, PeerLost,               | FAILED        | Abort, Failed, StopFrames, ReleaseHold
                | LinkLost: the 4th                 | FAILED        | Abort, Failed, StopFrames, ReleaseHold
                | Cancel                            | CANCELLED     | Abort, StopFrames, ReleaseHold
                | Grant that can't be               | FAILED        | Abort, Failed, StopFrames, ReleaseHold
once over       | Computed, LayersComputed,         | same          | ReleaseHold of that
                | Finished                          | same          | ReleaseHold of that
                | FrameEnded: the last              | same          | ReleaseHold of all

Receiver        | told                              | becomes       | asks for
----------------|-----------------------------------|---------------|-------------------------------------------------
ADMITTED        | Expected, Offer: the first        | same          |
 knows one of   | Expected, Offer: the second       | WAITING       | Reserve
 the two        | Expected, Offer: they differ      | FAILED        | Nack, Failed
WAITING         | Reserved: no room                 | same          | Wait, once; Reserve where room changed meanwhile
 for room       | BlocksFreed                       | same          | Reserve
                | Reserved                          | TRANSFERRING  | Grant, if there is a link
TRANSFERRING    | LinkUp                            | same          | Grant, once the older link's frames have ended
 blocks are     | Push: the next                    | same          | ReceiveFrame
 reserved       | FrameEnded                        | same          | Grant, if it was the older link's last
                | Finish                            | same          |
                | Finish, FrameEnded: all verified  | COMMITTED     | Commit, Ack
                | FrameEnded: corrupt               | FAILED        | Nack, Failed, StopFrames, ReleaseHold
                | Push, Finish that can't be        | FAILED        | Nack, Failed, StopFrames, ReleaseHold
any of these    | Renewed                           | same          | (the lease is renewed)
                | Abort                             | FAILED        | Failed, StopFrames, ReleaseHold
                | Deadline, PeerLost                | FAILED        | Nack, Failed, StopFrames, ReleaseHold
                | Cancel                            | CANCELLED     | Nack, StopFrames, ReleaseHold
once over       | Reserved                          | same          | ReleaseHold
                | FrameEnded: the last              | same          | ReleaseHold

Over are COMMITTED, FAILED and CANCELLED. Deadline is what `poll` finds; messages (Abort, Nack, Wait, Grant, Ack) are
asked for by Tell. What a state has no row for changes nothing, nor does a Push that was seen before. What can't be: a
gap between frames, lengths that don't add up, a Finish before all is announced or that counts other frames, credit for
half a block.

Rules that hold everywhere:

* A message of another attempt or epoch changes nothing; it is counted in `dropped`. (Another incarnation's never gets
  here: a stream belongs to one incarnation of either end, and dies with it.)
* Every event is preceded by a look at the clock, so a process that was frozen past a deadline finds that out before it
  acts on what had queued up meanwhile.
* Finish follows the announcement of the last frame, so its count shows at once that one was left out.
* Blocks of a frame that the link may still be reading (sender) or writing (receiver) are in quarantine: after the end
  they are released only when FrameEnded has come for the last of those. The transport guarantees that it comes: every
  wait of a link has a timeout.
* Each hold is released exactly once, by ReleaseHold, or given away exactly once, by Commit.

Bounds (`Timeouts`, in seconds): without a sign of life from the other end, `lease`; ADMITTED (offered) and WAITING,
`grant`, to which the sender adds one lease, so that the receiver's own answer comes first; PREFILLING, and a receiver
that expects an offer or receives an unfinished prompt, `prefill`; EXPORTED, `grant` plus one lease; TRANSFERRING after
Finish, `transfer`.
"""

from kvrelay.transfer.receive_attempt import ReceiveAttempt
from kvrelay.transfer.send_attempt import MAX_LINK_LOSSES, SendAttempt

__all__ = ["MAX_LINK_LOSSES", "ReceiveAttempt", "SendAttempt"]
