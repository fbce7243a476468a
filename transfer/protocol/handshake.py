"""The introduction of two workers on a control stream, and the check whether they can hand KV over."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout, LayerPart
from kvrelay.engine.states import StatesLayout, StatesShape
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.events import Track
from kvrelay.transfer.protocol.messages import VERSION, Code, Hello
from kvrelay.transfer.protocol.routes import Route, routes_of, unroutable, unsuited


@dataclass(frozen=True, slots=True)
class FrameCut:
    """Size of frames: as many whole blocks as fit; or, where not even one fits, a part of a block's layers."""

    tokens: int
    """Largest number of tokens of a frame: a multiple of the block size."""
    parts: int
    """Number of frames in which the same tokens are sent."""
    nbytes: int
    """KV bytes of the largest frame."""

    @classmethod
    def of(cls, layout: KVLayout, frame_bytes: int) -> "FrameCut":
        """The cut for frames of at most `frame_bytes`; one layer of a block is a frame even if it is larger."""
        blocks = max(1, frame_bytes // layout.block_bytes)
        layers = max(1, min(layout.layers, frame_bytes * layout.layers // layout.block_bytes))
        parts = -(-layout.layers // layers)
        tokens = blocks * layout.block_size
        return cls(tokens, parts, max(layout.nbytes(tokens, LayerPart(index, parts)) for index in range(parts)))


def cuts_of(routes: Sequence[Route], frame_bytes: int) -> tuple[FrameCut, ...]:
    """The cut of each route."""
    return tuple(FrameCut.of(route.layout, frame_bytes) for route in routes)


def largest(cuts: tuple[FrameCut, ...]) -> int:
    """Bytes of the largest frame."""
    return max(cut.nbytes for cut in cuts)


def tracks_of(
    cache: CacheLayout, routes: Sequence[Route], tokens: int, cuts: tuple[FrameCut, ...] | None = None
) -> tuple[Track, ...]:
    """The tracks of an attempt with so many tokens, one for each route of a model of this `cache`.

    Args:
        cuts: of the sender; a receiver takes any.
    """
    found = []
    for number, route in enumerate(routes):
        group, layout = cache.groups[route.group], route.layout
        late = group.kind == "state"
        frame_tokens, parts = layout.block_size, 1
        if cuts is not None:
            frame_tokens, parts = cuts[number].tokens, cuts[number].parts
        end, first = (1, 0) if late else (tokens, group.first_needed(tokens))
        cut = frame_tokens, layout.layers, parts
        found.append(Track(end, layout.token_bytes, layout.block_size, *cut, first, late, route.link))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """This worker, as it introduces itself to its peers."""

    id: WorkerId
    cache: CacheLayout
    fingerprint: str
    """Fingerprint of the model."""
    gpu: bool = False
    """Whether the KV pool is in GPU memory."""
    states: StatesLayout | None = None
    """Hidden states of prompts that this worker wants beside their KV; None if it wants none."""
    states_shape: StatesShape | None = None
    """Shape of the hidden states that its steps can keep for others; None if they can keep nothing."""
    degree: Degree = ONE
    """Ranks that hold `cache`, which is that of the whole model."""

    def __post_init__(self) -> None:
        if (reason := unsuited(self.cache, self.degree)) is not None:
            raise ValueError(f"this worker's KV can't be handed over: {reason}")

    def hello(self, peer: WorkerId, config: TransferConfig, cuts: tuple[FrameCut, ...] = ()) -> Hello:
        """The first message of this worker on a stream to `peer`; `cuts` are those of the frames it sends, if it
        does."""
        return Hello(
            version=VERSION,
            worker=self.id.name,
            incarnation=self.id.incarnation,
            peer_incarnation=peer.incarnation,
            fingerprint=self.fingerprint,
            cache=self.cache,
            checksum=config.checksum,
            encrypt=config.encrypt,
            gpu=self.gpu,
            frame_bytes=largest(cuts or cuts_of(routes_of(self.cache, ONE, ONE), config.frame_bytes)),
            states=self.states,
            degree=self.degree,
        )

    def digest(self, config: TransferConfig) -> str:
        """A text that is equal for two workers that have no `objection` to each other: what can't be converted must be
        equal. Hidden states aren't in it: only one of the two needs them. Nor are numbers of ranks.
        """

        def common_form(layout: KVLayout) -> KVLayout:
            dtype = "float32" if config.convert_dtype and layout.dtype != "raw" else layout.dtype
            return replace(layout, order="NHD", dtype=dtype)

        cache = self.cache.with_block_size(1)
        groups = tuple(replace(group, tracks=tuple(map(common_form, group.tracks))) for group in cache.groups)
        common = f"{VERSION} {self.fingerprint} {groups} {config.checksum} {config.encrypt} {config.convert_dtype}"
        return hashlib.sha256(common.encode()).hexdigest()[:16]

    def objection(self, hello: Hello, config: TransferConfig) -> tuple[Code, str] | None:
        """The reason why this worker and the author of `hello` can't hand KV over, with the name of the field.

        None if they can.
        """
        incarnation = self.id.incarnation
        if hello.peer_incarnation != incarnation:
            return Code.UNKNOWN_PEER, f"incarnation: {hello.peer_incarnation} was meant, this is {incarnation}"
        differing = self.cache.mismatch(hello.cache)
        if differing is not None:
            return Code.INCOMPATIBLE, f"layout.{differing}"
        for (_, mine), (_, theirs) in zip(self.cache.tracks, hello.cache.tracks, strict=True):
            if mine.dtype != theirs.dtype and (not config.convert_dtype or "raw" in (mine.dtype, theirs.dtype)):
                dtypes = f"{mine.dtype} here, {theirs.dtype} there"
                return Code.INCOMPATIBLE, f"layout.dtype: {dtypes}; transfer.convert_dtype is off"
        for name, here, there in (
            ("version", VERSION, hello.version),
            ("fingerprint", self.fingerprint, hello.fingerprint),
            ("checksum", config.checksum, hello.checksum),
            ("encrypt", config.encrypt, hello.encrypt),
        ):
            if here != there:
                return Code.INCOMPATIBLE, f"{name}: {here} here, {there} there"
        misfit = unroutable(self.cache, self.degree, hello.degree)
        if misfit is None and hello.states is not None:
            misfit = hello.states.misfit(self.states_shape)
            if self.degree.pipeline > 1:
                misfit = f"states: a worker of {self.degree.pipeline} pipeline stages can't send hidden states yet"
        return None if misfit is None else (Code.INCOMPATIBLE, misfit)
