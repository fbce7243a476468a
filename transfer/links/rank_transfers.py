"""The links of one rank of a worker, in the rank's own process: does what rank 0 says, and reports (`rank_links`)."""

from functools import partial
from typing import Any

from kvrelay.engine.kv.writes import RankWrites
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.links import LinkManager
from kvrelay.transfer.links.rank_links import Command, RankChannel, unpacked_frame, unpacked_route
from kvrelay.transfer.protocol.events import Outcome
from kvrelay.transfer.protocol.messages import Push
from kvrelay.transfer.protocol.ports import BlockClaim, FrameTask, LinkEnd, LinkSpec, NoTransportError, Runtime
from kvrelay.transfer.protocol.routes import RankPair


class RankTransfers:
    """The hand-off's part of one rank. Runs on the rank's event loop."""

    def __init__(
        self,
        channel: RankChannel,
        links: LinkManager,
        frames: PoolFrames,
        runtime: Runtime,
        writes: RankWrites,
    ) -> None:
        """
        Args:
            channel: to rank 0, which this listens to.
            links: of this rank.
            frames: makes jobs on this rank's pools.
            writes: of this rank's steps, for which frames wait.
        """
        self._channel = channel
        self._links = links
        self._frames = frames
        self._runtime = runtime
        self._writes = writes
        self._claims: dict[int, BlockClaim] = {}
        channel.listen(self._on_command, self._on_lost)

    @property
    def active(self) -> int:
        """Frames whose blocks are in use, or may still be."""
        return len(self._claims)

    def _on_command(self, command: Command) -> None:
        match command:
            case {"do": "open"}:
                self._open(command)
            case {"do": "meet", "peer": peer, "epoch": epoch, "ranks": ranks, "entry": entry, "value": value}:
                self._links.meet(peer, epoch, RankPair(*ranks), entry, value)
            case {"do": "close", "peer": peer, "epoch": epoch, "reason": reason}:
                if self._links.epoch(peer) == epoch:
                    self._links.close(peer, reason)
            case {"do": "after", "peer": peer, "epoch": epoch, "key": [request, attempt]}:
                self._links.after_frames(peer, epoch, (request, attempt), partial(self._channel.send, command))
            case {"do": "send" | "receive" | "drain", "peer": peer, "epoch": epoch, "ranks": ranks}:
                self._links.submit(peer, epoch, RankPair(*ranks), self._job(command))
            case {"do": "stop", "number": number}:
                claim = self._claims.get(number)
                if claim is not None and claim.close():
                    self._ended(number, Outcome.LOST)
            case _:
                raise ValueError(f"rank 0 says {str(command)[:200]}, which no rank knows")

    def _open(self, command: Command) -> None:
        peer, epoch = command["peer"], command["epoch"]

        def tell(ranks: RankPair, entry: str, value: bytes) -> None:
            self._report("tell", peer=peer, epoch=epoch, ranks=list(ranks), entry=entry, value=value)

        def on_end(end: LinkEnd) -> None:
            stuck = None if end.stuck is None else list(end.stuck)
            self._report("gone", peer=peer, epoch=epoch, reason=end.reason, up=end.up, stuck=stuck)

        spec = LinkSpec(
            local=command["local"],
            peer=peer,
            epoch=epoch,
            transport=command["transport"],
            rank=command["rank"],
            frame_bytes=command["frame_bytes"],
            tell=tell,
            on_up=lambda: self._report("up", peer=peer, epoch=epoch),
            on_end=on_end,
            idle=lambda: False,  # rank 0 says which links are to be closed
            links=tuple(RankPair(*ranks) for ranks in command["links"]),
        )
        try:
            reason = None if self._links.open(spec) else "in use (transfer.max_links, transfer.gpu_buffer_bytes)"
        except NoTransportError as error:
            reason = str(error)
        if reason is not None:
            on_end(LinkEnd(epoch, f"the links of a rank can't be opened: {reason}", up=False, stuck=None))

    def _job(self, command: Command) -> Any:
        route = unpacked_route(command["route"])
        if command["do"] == "drain":
            return self._frames.drain(command["nbytes"], route)
        (request, attempt), frame, number = command["key"], unpacked_frame(command["frame"]), command["number"]
        table = [-1] * command["first_block"] + command["blocks"]
        key, post = (request, attempt), self._runtime.post
        if command["do"] == "receive":
            claim = self._claims[number] = BlockClaim()
            on_end = partial(post, self._ended, number)
            return self._frames.receive(FrameTask(key, frame, claim, table, route), command["keep"], on_end)
        claim = self._claims[number] = BlockClaim(self._writes.of(command["step"]))
        announced, on_read = partial(post, self._announced, command), partial(post, self._ended, number)
        return self._frames.send(FrameTask(key, frame, claim, table, route), announced, on_read)

    def _announced(self, command: Command, push: Push) -> None:
        self._report("announced", **{name: command[name] for name in ("peer", "epoch", "number")})

    def _ended(self, number: int, outcome: Outcome = Outcome.VERIFIED) -> None:
        claim = self._claims.pop(number)
        self._report("ended", number=number, outcome=outcome.value, in_place=claim.in_place)

    def _report(self, what: str, **facts: Any) -> None:
        self._channel.send({"do": what} | facts)

    def _on_lost(self, reason: str) -> None:
        """Ends all links: rank 0 is lost, and with it the worker."""
        for claim in self._claims.values():
            claim.close()
        for peer in self._links.peers:
            self._links.close(peer, f"rank 0 is lost: {reason}")
