"""Coverage-guided fuzzing of what reads foreign bytes, in one process.

    python -m guided.targets TARGET [libFuzzer option...]

A target returns, or raises: then what reads these bytes in a router, a worker or the supervisor would have failed, too.
"""

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvrelay"], exclude=["kvrelay.v1", "kvrelay.internal"]):
    from kvrelay.cluster.membership.membership import InvalidMember, Membership
    from kvrelay.engine.config import EngineConfig
    from kvrelay.engine.engine import Engine
    from kvrelay.engine.kv.blocks import BlockPool
    from kvrelay.engine.kv.prefix import PrefixIndex
    from kvrelay.engine.scheduling.scheduler import Scheduler
    from kvrelay.models import resolve
    from kvrelay.router.errors import InvalidRequest
    from kvrelay.router.request import wire
    from kvrelay.router.request.sampling import NO_EFFECT
    from kvrelay.router.request.tokenizer import Tokenizer
    from kvrelay.router.request.validation import check
    from kvrelay.router.request.wire import BadOutline, check_outline
    from kvrelay.transfer.protocol import messages
    from kvrelay.transfer.protocol.packing import WireError
    from kvrelay.worker.relay.requests import request_of

from google.protobuf.message import DecodeError

from kvrelay.internal.v1.supervisor_pb2 import ROLE_DECODE, AttendRequest, Member
from kvrelay.internal.v1.worker_pb2 import ModelInfo, Sampling, Submit
from kvrelay.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, SamplingParams, TokenIds
from support.hash_runner import LAYOUT, HashRunner, hash_spec

BLOCKS = 24
NUMBERS = 64
"""Entries of a list of numbers that the target `outline` lets pass, at most."""
MODEL = ModelInfo(vocab_size=512, max_context=256, eos_token_ids=[0])

Target = Callable[[bytes], None]

wire.SMALL_BYTES = 0  # what is checked of large messages only, is checked of all
wire.MAX_FIELDS = 16


def control(data: bytes) -> None:
    """The control stream between two workers: a batch is refused, or is what its messages make again."""
    try:
        found = messages.decode(data)
    except WireError:
        return
    if messages.decode(messages.encode(found)) != found:
        raise AssertionError("a batch changes when it is encoded again")


def outline(data: bytes) -> None:
    """The outline of a public request: what it lets pass has no long list of numbers, and few fields."""
    request = GenerateRequest()
    try:
        check_outline(data, GenerateRequest.DESCRIPTOR, NUMBERS)
        request.ParseFromString(data)
    except (BadOutline, DecodeError):
        return
    most = NUMBERS * wire.VARINT_BYTES
    if len(request.sampling.stop) > wire.MAX_FIELDS or len(request.token_ids.ids) > most + wire.MAX_FIELDS:
        raise AssertionError("a long list passed")


def public() -> Target:
    """A public request: refused with the name of a field, or within the model's limits."""
    tokenizer = Tokenizer(resolve("pico"))
    loop = asyncio.new_event_loop()

    def target(data: bytes) -> None:
        request = GenerateRequest()
        try:
            request.ParseFromString(data)
        except DecodeError:
            return
        try:
            checked = loop.run_until_complete(check(request, "tenant", MODEL, tokenizer, NO_EFFECT))
        except InvalidRequest:
            return
        if not 0 < len(checked.prompt) < len(checked.prompt) + checked.sampling.max_tokens <= MODEL.max_context:
            raise AssertionError("a request beyond the model's context passed")

    return target


def submit() -> Target:
    """A worker's engine: a request is refused, or runs to its end or its cancel; no block is lost."""
    spec = hash_spec()
    runner = HashRunner(BLOCKS, LAYOUT)
    config = EngineConfig(block_size=LAYOUT.block_size, max_batch_tokens=32, max_sequences=4)
    prefix = PrefixIndex(BlockPool(BLOCKS), LAYOUT.block_size, b"hash", enabled=True)
    engine = Engine(Scheduler(config, prefix, spec), runner)
    attempts = itertools.count(1)

    def target(data: bytes) -> None:
        message = Submit()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return
        message.attempt = next(attempts) % 2**31
        try:
            sequence = engine.scheduler.add(request_of(message, spec, 0.0))
        except ValueError:
            return
        for _ in range(8):
            engine.step()
        engine.scheduler.cancel(sequence.request.key)
        engine.step()
        engine.scheduler.check_integrity(idle=True)

    return target


def heartbeat() -> Target:
    """The supervisor's membership: a heartbeat is refused, or the member is one of its name and incarnation."""
    membership = Membership()

    def target(data: bytes) -> None:
        request = AttendRequest()
        try:
            request.ParseFromString(data)
        except DecodeError:
            return
        # A membership keeps each name for good.
        request.member.name = request.member.name[:1]
        try:
            known = membership.attend(request.member, request.load)
        except InvalidMember:
            return
        names = [member.incarnation for member in membership.members() if member.name == request.member.name]
        if known and names != [request.member.incarnation]:
            raise AssertionError("an accepted member isn't in the membership")

    return target


KEY = ("request", 1)
TARGETS: dict[str, tuple[Callable[[], Target], list[bytes]]] = {
    "control": (
        lambda: control,
        [
            messages.encode([messages.Renew((KEY,))]),
            messages.encode([messages.Offer(*KEY, 40, b"d" * 16)]),
            messages.encode([messages.Push(*KEY, 1, 0, 0, 8, 4096), messages.Finish(*KEY, 1, 8, 1, 4096)]),
            messages.encode([messages.Abort(*KEY, messages.Code.CANCELLED, "reason"), messages.CloseLink(1, "reason")]),
        ],
    ),
    "outline": (
        lambda: outline,
        [
            GenerateRequest(text="text", sampling=SamplingParams(max_tokens=4)).SerializeToString(),
            GenerateRequest(token_ids=TokenIds(ids=range(40))).SerializeToString(),
        ],
    ),
    "public": (
        public,
        [
            GenerateRequest(text="text", sampling=SamplingParams(seed=7, stop=["s"])).SerializeToString(),
            GenerateRequest(token_ids=TokenIds(ids=[1, 2]), request_id="r").SerializeToString(),
            GenerateRequest(
                messages=ChatMessages(messages=[ChatMessage(role="user", content="c")])
            ).SerializeToString(),
        ],
    ),
    "submit": (
        submit,
        [
            Submit(
                request_id="r",
                phase=3,
                token_ids=[1, 2, 3],
                prompt_tokens=3,
                sampling=Sampling(max_tokens=4, temperature=1.0, top_p=1.0, seed=7),
            ).SerializeToString()
        ],
    ),
    "heartbeat": (
        heartbeat,
        [
            AttendRequest(
                member=Member(name="d", role=ROLE_DECODE, incarnation="i", address="127.0.0.1:1")
            ).SerializeToString()
        ],
    ),
}


def main() -> None:
    name = sys.argv[1]
    make, seeds = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            (Path(folder) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[2:], folder], make())
        atheris.Fuzz()


if __name__ == "__main__":
    main()
