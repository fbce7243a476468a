"""The introduction of two workers on a control stream, and the check whether they can hand KV over."""

import hashlib
from dataclasses import dataclass, replace

from kvrelay.engine.kv.layout import KVLayout, LayerPart
from kvrelay.engine.states import StatesLayout, StatesShape
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.messages import VERSION, Code, Hello


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


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """This worker, as it introduces itself to its peers."""

    id: WorkerId
    layout: KVLayout
    fingerprint: str
    """Fingerprint of the model."""
    gpu: bool = False
    """Whether the KV pool is in GPU memory."""
    states: StatesLayout | None = None
    """Hidden states of prompts that this worker wants beside their KV; None if it wants none."""
    states_shape: StatesShape | None = None
    """Shape of the hidden states that its steps can keep for others; None if they can keep nothing."""

    def hello(self, peer: WorkerId, config: TransferConfig, cut: FrameCut | None = None) -> Hello:
        """The first message of this worker on a stream to `peer`; `cut` is that of the frames it sends, if it does."""
        return Hello(
            version=VERSION,
            worker=self.id.name,
            incarnation=self.id.incarnation,
            peer_incarnation=peer.incarnation,
            fingerprint=self.fingerprint,
            layout=self.layout,
            checksum=config.checksum,
            encrypt=config.encrypt,
            gpu=self.gpu,
            frame_bytes=(cut or FrameCut.of(self.layout, config.frame_bytes)).nbytes,
            states=self.states,
        )

    def digest(self, config: TransferConfig) -> str:
        """A text that is equal for two workers that have no `objection` to each other: what can't be converted must be
        equal. Hidden states aren't in it: only one of the two needs them.
        """
        layout = replace(self.layout, order="NHD", block_size=1)
        if config.convert_dtype:
            layout = replace(layout, dtype="float32")
        common = f"{VERSION} {self.fingerprint} {layout} {config.checksum} {config.encrypt} {config.convert_dtype}"
        return hashlib.sha256(common.encode()).hexdigest()[:16]

    def objection(self, hello: Hello, config: TransferConfig) -> tuple[Code, str] | None:
        """The reason why this worker and the author of `hello` can't hand KV over, with the name of the field.

        None if they can.
        """
        mine = self.id.incarnation
        if hello.peer_incarnation != mine:
            return Code.UNKNOWN_PEER, f"incarnation: {hello.peer_incarnation} was meant, this is {mine}"
        differing = self.layout.mismatch(hello.layout)
        if differing is not None:
            return Code.INCOMPATIBLE, f"layout.{differing}"
        if self.layout.dtype != hello.layout.dtype and not config.convert_dtype:
            dtypes = f"{self.layout.dtype} here, {hello.layout.dtype} there"
            return Code.INCOMPATIBLE, f"layout.dtype: {dtypes}; transfer.convert_dtype is off"
        for name, here, there in (
            ("version", VERSION, hello.version),
            ("fingerprint", self.fingerprint, hello.fingerprint),
            ("checksum", config.checksum, hello.checksum),
            ("encrypt", config.encrypt, hello.encrypt),
        ):
            if here != there:
                return Code.INCOMPATIBLE, f"{name}: {here} here, {there} there"
        misfit = None if hello.states is None else hello.states.misfit(self.states_shape)
        return None if misfit is None else (Code.INCOMPATIBLE, misfit)
