"""The ownership protocol of the hand-off: who owns the KV of one request attempt, as two state machines without I/O.

    ADMITTED -> PREFILLING -> EXPORTED(lease) -> TRANSFERRING -> COMMITTED -> (DECODING -> DONE) | FAILED | CANCELLED

Both ends pass through these states together: `SendAttempt` on the prefill worker owns the holds on the computed
blocks, and `ReceiveAttempt` on the decode worker owns the reservation, until COMMITTED. From then on the receiver's
engine owns the KV (DECODING and DONE are states of its `Sequence`) and the sender's blocks are released. A machine
takes an event and returns actions; it never waits, reads no clock and starts nothing, so any interleaving can be
replayed.

Sender          | event                             | next state    | actions
----------------|-----------------------------------|---------------|-------------------------------------------------
ADMITTED        | Computed                          | same          | (keeps the hold)
 offered, no    | Grant                             | PREFILLING    | SendFrame, of what is computed
 credit         | Finished                          | EXPORTED      |
                | LinkLost                          | same          | (a grant of the next epoch will come)
PREFILLING      | Computed                          | same          | SendFrame
 has credit     | Grant of a later epoch            | same          | SendFrame; again from where the receiver says
                | Finished                          | TRANSFERRING  | SendFrame, SendFinish after the last
                | LinkLost                          | ADMITTED      |
EXPORTED        | Grant                             | TRANSFERRING  | SendFrame, SendFinish
 computed, no   | LinkLost                          | same          |
 credit         | Ack, sent before the link was lost| COMMITTED     | Committed, StopFrames, ReleaseHold of all
TRANSFERRING    | Grant of a later epoch            | same          | SendFrame, SendFinish
 computed, has  | LinkLost                          | EXPORTED      |
 credit         | Ack                               | COMMITTED     | Committed, StopFrames, ReleaseHold of all
any of these    | Wait, Renewed                     | same          | (the lease is renewed)
                | FrameEnded                        | same          |
                | Nack                              | FAILED        | Failed, StopFrames, ReleaseHold
                | Deadline, PeerLost,               | FAILED        | Abort, Failed, StopFrames, ReleaseHold
                | LinkLost: the 4th                 | FAILED        | Abort, Failed, StopFrames, ReleaseHold
                | Cancel                            | CANCELLED     | Abort, StopFrames, ReleaseHold
                | Grant that is invalid             | FAILED        | Abort, Failed, StopFrames, ReleaseHold
ended           | Computed, Finished                | same          | ReleaseHold of that hold
                | FrameEnded: the last              | same          | ReleaseHold of all

Receiver        | event                             | next state    | actions
----------------|-----------------------------------|---------------|-------------------------------------------------
ADMITTED        | Expected, Offer: the first        | same          |
 knows one of   | Expected, Offer: the second       | WAITING       | Reserve
 the two        | Expected, Offer: they differ      | FAILED        | Nack, Failed
WAITING         | Reserved: no free blocks          | same          | Wait, once; Reserve if blocks were freed meanwhile
 for blocks     | BlocksFreed                       | same          | Reserve
                | Reserved                          | TRANSFERRING  | Grant, if there is a link
TRANSFERRING    | LinkUp                            | same          | Grant, once the older link's frames have ended
 blocks are     | Push: the next                    | same          | ReceiveFrame
 reserved       | FrameEnded                        | same          | Grant, if it was the older link's last
                | Finish                            | same          |
                | Finish, FrameEnded: all verified  | COMMITTED     | Commit, Ack
                | FrameEnded: corrupt               | FAILED        | Nack, Failed, StopFrames, ReleaseHold
                | Push, Finish that is invalid      | FAILED        | Nack, Failed, StopFrames, ReleaseHold
any of these    | Renewed                           | same          | (the lease is renewed)
                | Abort                             | FAILED        | Failed, StopFrames, ReleaseHold
                | Deadline, PeerLost                | FAILED        | Nack, Failed, StopFrames, ReleaseHold
                | Cancel                            | CANCELLED     | Nack, StopFrames, ReleaseHold
ended           | Reserved                          | same          | ReleaseHold
                | FrameEnded: the last              | same          | ReleaseHold

COMMITTED, FAILED and CANCELLED are the states after the end. The event Deadline comes from `poll`. The action Tell
sends a message (Abort, Nack, Wait, Grant, Ack). An event that has no row in a state changes nothing; neither does a
Push that has come before. Invalid are: a gap between frames, or between the parts (by layers) in
which the KV of the same tokens is sent, lengths that don't add up, a Finish before all frames are
announced or with another count of frames, and a grant that begins inside a block.

Between workers of several ranks there is a link for each pair of ranks that share a route, and frames are numbered by
link: announcements of different links come in any order. All links of an epoch are lost together.

Frames of a prompt's hidden states, for a receiver that asked for them, are sent and counted among those of KV. They
begin where the grant says or behind that, and behind a gap they begin anew. The commit waits for all that were
announced; those that don't reach the prompt's end are dropped then.

Rules for all states:

* A message of another attempt or epoch changes nothing; it is counted in `dropped`. A message of another incarnation
  never arrives here: a control stream belongs to one incarnation of either end and ends with it.
* Every event first checks the clock. So a process that was frozen past a deadline ends the attempt before it acts on
  messages that queued up meanwhile.
* Finish follows the announcement of the last frame, so its count shows at once that a frame was left out.
* While the link may still read (sender) or write (receiver) the blocks of a frame, the frame is in quarantine. After
  the end, blocks are released only when FrameEnded has come for every frame in quarantine. It always comes, because
  every wait of a link has a timeout, and a worker whose step doesn't end is replaced.
* Each hold is released exactly once, by ReleaseHold, or given away exactly once, by Commit.

Deadlines (`Timeouts`, in seconds). Any state: `lease` without a message of the other end. ADMITTED (offered) and
WAITING: `grant`; the sender adds one lease, so that the receiver's own answer comes first. PREFILLING, and a receiver
that expects an offer or receives an unfinished prompt: `prefill`. EXPORTED: `grant` plus one lease. TRANSFERRING after
Finish: `transfer`.
"""

from kvrelay.transfer.protocol.receive_attempt import ReceiveAttempt
from kvrelay.transfer.protocol.send_attempt import MAX_LINK_LOSSES, SendAttempt

__all__ = ["MAX_LINK_LOSSES", "ReceiveAttempt", "SendAttempt"]
