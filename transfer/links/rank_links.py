"""The links of a worker of several ranks, as its rank 0 sees them.

Rank 0 has the coordinator of the hand-offs. The links of the other ranks, and the blocks that their frames read and
write, are in other processes: commands go there over a channel, and reports come back (`RankTransfers` is that end).

    command     open, meet, close       the links of an epoch, as `Links` says
                send, receive, drain    a frame, by a number
                stop                    closes the frame's claim: it ends as LOST unless a thread has the blocks already
                after                   a number that comes back behind the announcements of a hand-off's frames
    report      tell, up, gone          an entry of a link's rendezvous; the first bytes and the end of an epoch's links
                announced, ended        of a frame, by its number
                after                   the number

Ranks compute a step at different times. So the command that sends a frame names the step that computes the frame's KV,
and each rank waits until it has computed its own part of that step. Rank 0 gives the command when it launches the step,
so a pipeline stage sends a chunk when the chunk has left the stage. For KV of an earlier step the command names the
last step whose result rank 0 has.

A channel keeps the order of its messages, so announcements leave rank 0 in the order in which their frames are on their
link. If a channel is lost, its frames never end, because nobody knows whether their blocks are still in use: the worker
as a whole is lost then, and has to be replaced.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kvrelay.engine.kv.layout import KVLayout, LayerPart
from kvrelay.engine.kv.writes import StepWrites
from kvrelay.transfer.frames.frames import PoolFrames, announce
from kvrelay.transfer.links.links import LinkManager, countdown
from kvrelay.transfer.protocol.events import Frame, Outcome
from kvrelay.transfer.protocol.messages import Key, Push
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.protocol.ports import BlockClaim, FrameTask, LinkEnd, LinkSpec, Runtime
from kvrelay.transfer.protocol.routes import RankPair, Route, Slice

logger = logging.getLogger(__name__)

COMMITTED = -1
"""Number in place of a step whose result rank 0 has. Other ranks may still compute that step."""
Command = dict[str, Any]
"""A message of a channel in either direction: numbers, texts, bytes, and lists of them, by name. `do` is its kind."""


class RankChannel(Protocol):
    """One end of the connection between rank 0 and another rank. Used on the event loop."""

    @property
    def committed_step(self) -> int:
        """At rank 0's end: number of the last step whose result rank 0 has; COMMITTED before the first one."""
        ...

    def listen(self, on_message: Callable[[Command], None], on_lost: Callable[[str], None]) -> None:
        """Passes each message of the other end on, in order, and the reason when the connection is lost, once. Both on
        the event loop. Called once; what has come before is passed on then."""

    def send(self, message: Command) -> None:
        """Queues a message, behind those before it; drops it once the connection is lost."""


@dataclass(slots=True, eq=False)
class RankJob:
    """A frame on a link of another rank."""

    command: Command
    claim: BlockClaim = field(default_factory=BlockClaim)
    announced: Callable[[], object] | None = None
    ended: Callable[[Outcome], object] | None = None
    """Called once; the rank doesn't touch the blocks after that."""
    on_stop: Callable[[], object] | None = None

    def stop(self) -> None:
        """Stops the frame, which isn't wanted any more."""
        if self.on_stop is not None:
            self.on_stop()

    def end(self, outcome: Outcome) -> None:
        """Notes that the rank is done with the frame."""
        ended, self.ended = self.ended, None
        self.on_stop = None
        if ended is not None:
            ended(outcome)

    def fail(self, message: str) -> None:
        """Fails the frame, because the link ended before its command was sent."""
        self.end(Outcome.LOST)


class RankFrames:
    """Makes the jobs of a worker of several ranks; implements `SendJobs` and `ReceiveJobs`."""

    def __init__(self, own: PoolFrames) -> None:
        """`own` makes those of rank 0."""
        self._own = own
        self.make_states = own.make_states

    def send(self, task: FrameTask, announced: Callable[[Push], None], on_read: Callable[[], None]) -> Any:
        if task.frame.states or not task.route.ranks.sender:
            if isinstance(task.claim.written, StepWrites):
                task.claim.written = task.claim.written.own
            return self._own.send(task, announced, on_read)
        job = self._job("send", task)
        job.announced, job.ended = partial(announced, announce(task.key, task.frame)), lambda outcome: on_read()
        return job

    def receive(self, task: FrameTask, keep: int, on_end: Callable[[Outcome], None]) -> Any:
        if task.frame.states or not task.route.ranks.receiver:
            return self._own.receive(task, keep, on_end)
        job = self._job("receive", task)
        job.command["keep"], job.ended = keep, on_end
        return job

    def drain(self, nbytes: int, route: Route) -> Any:
        if not route.ranks.receiver:
            return self._own.drain(nbytes, route)
        return RankJob({"do": "drain", "nbytes": nbytes, "route": packed_route(route)})

    def _job(self, what: str, task: FrameTask) -> RankJob:
        frame, claim = task.frame, task.claim
        size = self._own.block_size(task.route.track)
        first, end = frame.first // size, -(-(frame.first + frame.tokens) // size)
        command = {
            "do": what,
            "key": list(task.key),
            "frame": packed_frame(frame),
            "first_block": first,
            "blocks": list(task.place[first:end]),
            "route": packed_route(task.route),
            "step": claim.written.step if isinstance(claim.written, StepWrites) else COMMITTED,
        }
        job = RankJob(command, claim)
        claim.give(job.stop)
        return job


@dataclass(slots=True, eq=False)
class _Epoch:
    """The links of one epoch to one peer."""

    spec: LinkSpec
    ranks: frozenset[int]
    """Ranks of this worker, besides rank 0, that have some of them."""
    up: bool = False
    """Whether a link of any rank has carried its first bytes."""
    over: bool = False
    behind: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Functions that are called when a rank returns the number of an `after`."""
    announcing: dict[int, Callable[[], object]] = field(default_factory=dict)
    """Functions that announce a frame, by its number. A frame that is copied before it is sent ends before that."""


class RankLinks:
    """Implements `Links`: rank 0's own links, and those of the other ranks over their channels."""

    def __init__(self, own: LinkManager, channels: Mapping[int, RankChannel], runtime: Runtime) -> None:
        """`channels` are those to the other ranks of this worker, by rank."""
        self._own = own
        self._channels = channels
        self._runtime = runtime
        self._epochs: dict[str, _Epoch] = {}
        self._jobs: dict[int, RankJob] = {}
        self._numbers = itertools.count(1)
        self.transport_for: Callable[[Peer], str] = own.transport_for
        self.epoch: Callable[[str], int] = own.epoch
        for rank, channel in channels.items():
            channel.listen(self._on_report, partial(self._on_lost, rank))

    def open(self, spec: LinkSpec) -> bool:
        ranks = frozenset(pair[spec.rank] for pair in spec.links) - {0}
        epoch = _Epoch(spec, ranks)
        on_up, on_end = partial(self._is_up, epoch), partial(self._gone, epoch)
        if not self._own.open(dataclasses.replace(spec, on_up=on_up, on_end=on_end)):
            return False
        # Rank 0 has a link in each epoch, so where it has closed an idle one, the others' must go, too.
        for peer in [peer for peer, each in self._epochs.items() if self.epoch(peer) != each.spec.epoch]:
            self._close_others(self._epochs.pop(peer), "closed by rank 0")
        self._epochs[spec.peer] = epoch
        command = {
            "do": "open",
            "local": spec.local,
            "peer": spec.peer,
            "epoch": spec.epoch,
            "transport": spec.transport,
            "rank": spec.rank,
            "frame_bytes": spec.frame_bytes,
            "links": [list(pair) for pair in spec.links],
        }
        self._tell_all(ranks, command)
        return True

    def meet(self, peer: str, epoch: int, ranks: RankPair, entry: str, value: bytes) -> None:
        links = self._of(peer, epoch)
        if links is None or ranks not in links.spec.links:
            return
        rank = ranks[links.spec.rank]
        if rank:
            command = {"do": "meet", "peer": peer, "epoch": epoch, "ranks": list(ranks), "entry": entry, "value": value}
            self._channels[rank].send(command)
        else:
            self._own.meet(peer, epoch, ranks, entry, value)

    def submit(self, peer: str, epoch: int, ranks: RankPair, job: Any) -> None:
        if not isinstance(job, RankJob):
            self._own.submit(peer, epoch, ranks, job)
            return
        links = self._of(peer, epoch)
        if links is None:
            job.fail("the link of this epoch has ended")
            return
        number = next(self._numbers)
        job.command |= {"peer": peer, "epoch": epoch, "ranks": list(ranks), "number": number}
        channel = self._channels[ranks[links.spec.rank]]
        if job.command.get("step") == COMMITTED:
            job.command["step"] = channel.committed_step
        if job.announced is not None:
            links.announcing[number] = job.announced
        if job.ended is not None:
            self._jobs[number] = job
            job.on_stop = partial(channel.send, {"do": "stop", "number": number})
        channel.send(job.command)

    def after_frames(self, peer: str, epoch: int, key: Key, call: Callable[[], object]) -> None:
        links = self._of(peer, epoch)
        if links is None:
            return
        number = next(self._numbers)

        def last() -> None:
            links.behind.pop(number, None)
            call()

        links.behind[number] = behind = countdown(1 + len(links.ranks), last)
        self._own.after_frames(peer, epoch, key, behind)
        self._tell_all(links.ranks, {"do": "after", "peer": peer, "epoch": epoch, "key": list(key), "number": number})

    def close(self, peer: str, reason: str) -> None:
        links = self._epochs.pop(peer, None)
        self._own.close(peer, reason)
        if links is not None:
            self._close_others(links, reason)

    async def shut_down(self) -> None:
        """Ends all links, and waits for those of this process."""
        for peer in list(self._epochs):
            self.close(peer, "this worker is shutting down")
        await self._own.shut_down()

    def _of(self, peer: str, epoch: int) -> _Epoch | None:
        links = self._epochs.get(peer)
        return links if links is not None and links.spec.epoch == epoch else None

    def _tell_all(self, ranks: Iterable[int], command: Command) -> None:
        for rank in sorted(ranks):
            self._channels[rank].send(command)

    def _close_others(self, links: _Epoch, reason: str) -> None:
        """Ends the other ranks' links of an epoch."""
        spec = links.spec
        self._tell_all(links.ranks, {"do": "close", "peer": spec.peer, "epoch": spec.epoch, "reason": reason})
        links.behind.clear()

    def _is_up(self, links: _Epoch) -> None:
        links.up = True

    def _gone(self, links: _Epoch, end: LinkEnd) -> None:
        """The links of this or another rank have ended; those of some rank may have been up, though these weren't."""
        self._ended(links, dataclasses.replace(end, up=end.up or links.up))

    def _ended(self, links: _Epoch, end: LinkEnd) -> None:
        """Ends all links of an epoch, because a link of this or another rank has ended."""
        if links.over:
            return
        links.over = True
        if self._epochs.get(links.spec.peer) is links:
            self.close(links.spec.peer, f"a link of the same epoch has ended: {end.reason}")
        links.spec.on_end(end)

    def _on_report(self, report: Command) -> None:
        match report:
            case {"do": "tell", "peer": peer, "epoch": epoch, "ranks": ranks, "entry": entry, "value": value}:
                if (links := self._of(peer, epoch)) is not None:
                    links.spec.tell(RankPair(*ranks), entry, value)
            case {"do": "up", "peer": peer, "epoch": epoch}:
                if (links := self._of(peer, epoch)) is not None:
                    self._is_up(links)
            case {"do": "gone", "peer": peer, "epoch": epoch, "reason": reason, "up": up, "stuck": stuck}:
                if (links := self._of(peer, epoch)) is not None:
                    self._gone(links, LinkEnd(epoch, reason, up, None if stuck is None else (stuck[0], stuck[1])))
            case {"do": "announced", "peer": peer, "epoch": epoch, "number": number}:
                if (links := self._of(peer, epoch)) is not None and number in links.announcing:
                    links.announcing.pop(number)()
            case {"do": "ended", "number": number, "outcome": outcome, "in_place": in_place}:
                if (job := self._jobs.pop(number, None)) is not None:
                    if Outcome(outcome) is Outcome.LOST:  # it isn't announced any more
                        self._forget(job.command["peer"], job.command["epoch"], number)
                    job.claim.in_place = in_place
                    job.end(Outcome(outcome))
            case {"do": "after", "peer": peer, "epoch": epoch, "number": number}:
                if (links := self._of(peer, epoch)) is not None and number in links.behind:
                    self._runtime.post(links.behind[number])  # as the announcements are
            case _:
                logger.error("a rank reports what nobody knows", extra={"report": str(report)[:200]})

    def _forget(self, peer: str, epoch: int, number: int) -> None:
        """Drops the function that would announce a frame."""
        if (links := self._of(peer, epoch)) is not None:
            links.announcing.pop(number, None)

    def _on_lost(self, rank: int, reason: str) -> None:
        """Ends all links, because the process of a rank is lost or can't be reached."""
        logger.error("a rank is lost", extra={"rank": rank, "reason": reason})
        for links in [each for each in self._epochs.values() if rank in each.ranks]:
            end = LinkEnd(links.spec.epoch, f"rank {rank} is lost: {reason}", up=False, stuck=None, worker_lost=True)
            self._ended(links, end)


def packed_frame(frame: Frame) -> list[Any]:
    """A frame of KV as numbers."""
    return [frame.epoch, frame.index, frame.first, frame.tokens, frame.nbytes, *frame.part, frame.track]


def unpacked_frame(packed: Sequence[Any]) -> Frame:
    """The frame that `packed_frame` took."""
    epoch, index, first, tokens, nbytes, number, of, track = packed
    return Frame(epoch, index, first, tokens, nbytes, LayerPart(number, of), track=track)


def packed_route(route: Route) -> list[Any]:
    """A route as numbers and texts."""
    slices = [[part.layers.start, part.layers.stop, part.heads.start, part.heads.stop] for part in route.places]
    return [route.track, route.group, list(dataclasses.astuple(route.layout)), *route.ranks, slices, route.on_gpus]


def unpacked_route(packed: Sequence[Any]) -> Route:
    """The route that `packed_route` took; its `part` is that of the sender's rank."""
    track, group, layout, sender, receiver, slices, on_gpus = packed
    here, there = (Slice(range(a, b), range(c, d)) for a, b, c, d in slices)
    return Route(track, group, here, KVLayout(*layout), RankPair(sender, receiver), 0, (here, there), on_gpus)
