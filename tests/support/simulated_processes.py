"""The processes of a simulated hand-off: what stands in for a prefill and a decode worker."""

from typing import Any

from kvrelay.decode_worker.reservation_queue import ReservationQueue
from kvrelay.transfer.events import (
    BlocksFreed,
    Cancel,
    Computed,
    Expected,
    Finished,
    LayersComputed,
    LinkLost,
    LinkUp,
    PeerLost,
    Renewed,
    Reserved,
)
from kvrelay.transfer.messages import Code, Grant, Key, Nack, Offer, Push, ToAttempt
from kvrelay.transfer.protocol import ReceiveAttempt, SendAttempt
from support.simulated_blocks import BLOCK, LAYERS, Blocks, Hold, Violation
from support.simulated_ends import FIRST_TOKEN, TIMEOUTS, ReceivingEnd, SendingEnd
from support.simulated_links import Job, Link, Stream

BEAT = 1.2


class Process:
    """One incarnation of a worker."""

    def __init__(self, world: Any, name: str, incarnation: int, blocks: int) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.blocks = Blocks(f"{name}#{incarnation}", blocks)
        self.dead = False
        self.frozen = 0.0
        self.skew = 0.0
        self.attempts: dict[Key, Any] = {}
        self.ends: list[Any] = []
        """All that there ever were."""
        self.streams: dict[Process, Stream] = {}
        self.epochs: dict[Process, int] = {}

    def __repr__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    def clock(self) -> float:
        return self.world.now + self.skew

    def addressed(self, key: Key, stream: Stream) -> list[Any]:
        """Who is told of a message: its attempt, and sometimes, by mistake, another one of the same request."""
        found = self.attempts.get(key)
        if found is not None and self.world.random() > 0.05:
            return [found] if found.stream is stream else []
        return [end for end in self.attempts.values() if end.key[0] == key[0] and end.stream is stream]

    def on_stream(self, stream: Stream) -> list[Any]:
        return [end for end in self.attempts.values() if end.stream is stream]

    def forget(self, end: Any) -> None:
        if end.machine.over and self.attempts.get(end.key) is end:
            del self.attempts[end.key]

    def cancel(self, key: Key) -> None:
        end = self.attempts.get(key)
        if end is not None:
            end.feed(Cancel())

    def beat(self, stream: Stream, forward: bool) -> None:
        """Signs of life, for as long as the world isn't quiet."""
        world = self.world
        if world.quiet or not stream.open[not forward]:
            return
        keys = [end.key for end in self.on_stream(stream) if not end.machine.state.over]
        if keys:
            stream.send(forward, keys)
        world.post(BEAT * (0.7 + 0.3 * world.random()), self, self.beat, stream, forward)

    def on_renewal(self, stream: Stream, keys: list[Key]) -> None:
        for key in keys:
            end = self.attempts.get(key)
            if end is not None and end.stream is stream:
                end.feed(Renewed())

    def on_stream_end(self, stream: Stream) -> None:
        forward = stream.right is self
        if not stream.open[forward]:
            return
        stream.open[forward] = False
        other = stream.left if forward else stream.right
        if self.streams.get(other) is stream:
            del self.streams[other]
        link = stream.right_link if forward else stream.left_link
        if link is not None:
            link.break_()
        for end in self.on_stream(stream):
            end.feed(PeerLost(Code.CLOSED, "the stream has ended"))


class PrefillProcess(Process):
    """Stands in for an engine and an `KVSender`."""

    def begin(self, key: Key, right: "DecodeProcess", tokens: int) -> None:
        world = self.world
        stream = self.streams.get(right)
        if stream is None:
            stream = self.streams[right] = Stream(world, self, right)
            if right.dead or right.streams.get(self) is not None:
                world.post(0.05, self, self.on_stream_end, stream)
            else:
                right.streams[self] = stream
                right.beat(stream, False)
            self.beat(stream, True)
        if stream.left_link is None:
            self._dial(stream)
        machine = SendAttempt(key, world.shape(key, tokens), TIMEOUTS, self.clock())
        end = self.attempts[key] = SendingEnd(self, machine, stream)
        self.ends.append(end)
        stream.send(True, machine.offer)
        self._start(end, tokens, 0)

    def _start(self, end: SendingEnd, tokens: int, tries: int) -> None:
        """The engine finds blocks for the prompt, or the request is given up."""
        world = self.world
        if end.machine.state.over:
            return
        hold = self.blocks.take(end.key, -(-tokens // BLOCK))
        if hold is not None:
            end.table = hold.blocks
            world.post(world.random() * 0.2, self, self._compute, end, hold, tokens, 0)
        elif tries < 6:
            world.post(0.3, self, self._start, end, tokens, tries + 1)
        else:
            end.feed(Cancel())
            world.router.report(end.key, "failed")

    def _compute(self, end: SendingEnd, hold: Hold, tokens: int, done: int) -> None:
        world, blocks, key = self.world, self.blocks, end.key
        random = world.random
        if end.machine.state.over and random() < 0.7:
            blocks.release(hold)
            return
        left = len(hold.blocks) - done
        chunk = 1 + int(random() * left)
        new = hold.blocks[done : done + chunk]
        if chunk < left or (random() < 0.3 and tokens > done * BLOCK + BLOCK):
            chunk = min(chunk, left - 1)
            new = new[:chunk]
            self._fill(key, new, done, range(LAYERS))
            if new:
                end.feed(Computed((done + chunk) * BLOCK, blocks.hold(key, new)))
            world.post(random() * 0.2, self, self._compute, end, hold, tokens, done + chunk)
        elif random() < 0.5:
            self._fill(key, new, done, range(1))
            end.feed(LayersComputed(1, blocks.hold(key, new)))
            world.post(random() * 0.1, self, self._finish, end, hold, done, range(1, LAYERS))
        else:
            self._finish(end, hold, done, range(LAYERS))

    def _finish(self, end: SendingEnd, hold: Hold, done: int, layers: range) -> None:
        self._fill(end.key, hold.blocks[done:], done, layers)
        end.feed(Finished(FIRST_TOKEN, self.blocks.hold(end.key, hold.blocks)))
        self.blocks.release(hold)

    def _fill(self, key: Key, blocks: list[int], first: int, layers: range) -> None:
        for number, block in enumerate(blocks, first):
            for layer in layers:
                self.blocks.write(block, layer, (key, number, layer))

    def on_message(self, stream: Stream, message: Any) -> None:
        match message:
            case Grant(limit=limit) if self.world.hostile and self.world.random() < 0.3:
                # The same credit in two parts, or one that can't be.
                first = message.have if self.world.random() < 0.9 else limit + 1
                for end in self.addressed(message.key, stream):
                    end.feed(Grant(*message.key, message.epoch, message.have, first))
                    end.feed(message)
            case ToAttempt():
                for end in self.addressed(message.key, stream):
                    end.feed(message)
            case list():
                self.on_renewal(stream, message)

    def _dial(self, stream: Stream) -> None:
        epoch = self.epochs[stream.right] = self.epochs.get(stream.right, 0) + 1
        stream.left_link = Link(stream, epoch)
        stream.send(True, stream.left_link)

    def on_link_end(self, link: Link) -> None:
        stream = link.stream
        if stream.left_link is link:
            stream.left_link = None
        if self.streams.get(stream.right) is not stream:
            return
        for end in self.on_stream(stream):
            end.feed(LinkLost(link.epoch))
        if stream.left_link is None and any(not end.machine.state.over for end in self.on_stream(stream)):
            self._dial(stream)


class DecodeProcess(Process):
    """Stands in for an engine and an `KVReceiver`."""

    def __init__(self, world: Any, name: str, incarnation: int, blocks: int) -> None:
        super().__init__(world, name, incarnation, blocks)
        self.room = ReservationQueue()
        self.over: set[Key] = set()

    def _end(self, key: Key, left: Process) -> ReceivingEnd:
        end = ReceivingEnd(self, ReceiveAttempt(key, TIMEOUTS, self.clock()), left)
        self.attempts[key] = end
        self.ends.append(end)
        return end

    def expect(self, key: Key, left: Process, tokens: int) -> None:
        end = self.attempts.get(key)
        if end is None and key in self.over:
            self.world.router.report(key, "failed")
            return
        end = end or self._end(key, left)
        end.expected = True
        end.feed(Expected(self.world.shape(key, tokens)))

    def cancel(self, key: Key) -> None:
        super().cancel(key)
        self.over.add(key)

    def forget(self, end: Any) -> None:
        if self.room.leave(end.key):
            self.blocks_freed()
        super().forget(end)
        if end.key not in self.attempts:
            self.over.add(end.key)

    def on_message(self, stream: Stream, message: Any) -> None:
        match message:
            case Offer():
                self._on_offer(stream, message)
            case Push():
                self._on_push(stream, message)
            case ToAttempt():
                for end in self.addressed(message.key, stream):
                    end.feed(message)
            case list():
                self.on_renewal(stream, message)
            case Link():
                self._on_dial(stream, message)

    def _on_offer(self, stream: Stream, offer: Offer) -> None:
        end = self.attempts.get(offer.key)
        if end is None and offer.key in self.over:
            stream.send(False, Nack(*offer.key, Code.CANCELLED, "over"))
            return
        end = end or self._end(offer.key, stream.left)
        end.stream = end.stream or stream
        end.feed(offer)
        if stream.right_link is not None:
            end.feed(LinkUp(stream.right_link.epoch))

    def _on_push(self, stream: Stream, push: Push) -> None:
        link = stream.right_link
        known = self.attempts.get(push.key)
        before = 0 if known is None else len(known.guards)
        for end in self.addressed(push.key, stream):
            end.feed(push)
        taken = known is not None and len(known.guards) > before
        if link is not None and link.epoch == push.epoch and not taken:
            link.receive(Job(None, None, None, push.nbytes))

    def _on_dial(self, stream: Stream, link: Link) -> None:
        if link.epoch <= self.epochs.get(link.left, 0):
            return
        self.epochs[link.left] = link.epoch
        older, stream.right_link = stream.right_link, link
        if older is not None:
            older.end_right()
        if link.broken:
            self.world.post(0.01, self, link.end_right)
        link.join()
        for end in self.on_stream(stream):
            end.feed(LinkUp(link.epoch))

    # Room.

    def reserve(self, end: ReceivingEnd) -> None:
        if self.room.must_wait(end.key):
            end.feed(Reserved(None))
            return
        self.world.post(self.world.random() * 0.05, self, self._answer, end)

    def _answer(self, end: ReceivingEnd) -> None:
        world = self.world
        tokens = world.tokens[end.key[0]]
        hold = self.blocks.take(end.key, -(-tokens // BLOCK))
        if hold is None:
            if not end.machine.state.over:
                self.room.wait(end.key)
            end.feed(Reserved(None))
            return
        cached = int(world.random() * (tokens // BLOCK + 1)) if world.random() < 0.2 else 0
        hold.have = cached * BLOCK
        for number, block in enumerate(hold.blocks):
            for layer in range(LAYERS):
                self.blocks.write(block, layer, (end.key, number, layer) if number < cached else ("stale",))
        end.table = hold.blocks
        end.reservation = hold
        end.feed(Reserved(hold, hold.have))
        if self.room.leave(end.key):
            self.blocks_freed()

    def blocks_freed(self) -> None:
        first = self.room.first
        if first is not None:
            self.attempts[first].feed(BlocksFreed())

    def release(self, hold: Hold) -> None:
        self.blocks.release(hold)
        self.world.post(0.0, self, self.blocks_freed)

    # What the engine reads.

    def check_tokens(self, hold: Hold) -> None:
        """Every block holds what this very attempt's sender computed for this very place."""
        for number, block in enumerate(hold.blocks):
            for layer in range(LAYERS):
                stamp = self.blocks.read([block], range(layer, layer + 1))[0]
                if stamp != (hold.owner, number, layer):
                    raise Violation("token", f"{hold.owner}: block {number}, layer {layer} holds {stamp}")

    def decoded(self, hold: Hold) -> None:
        self.check_tokens(hold)
        self.release(hold)
