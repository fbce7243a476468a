from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[HandoffMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[HandoffMessage, _Mapping]]] = ...) -> None: ...

class HandoffMessage(_message.Message):
    __slots__ = ("hello", "refuse", "dial", "meet", "close_link", "offer", "wait", "grant", "push", "finish", "ack", "nack", "abort", "renew")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[HandoffMessage.Code]
        CODE_CANCELLED: _ClassVar[HandoffMessage.Code]
        CODE_CLOSED: _ClassVar[HandoffMessage.Code]
        CODE_CORRUPT: _ClassVar[HandoffMessage.Code]
        CODE_DRAINING: _ClassVar[HandoffMessage.Code]
        CODE_INCOMPATIBLE: _ClassVar[HandoffMessage.Code]
        CODE_INTERNAL: _ClassVar[HandoffMessage.Code]
        CODE_LINK: _ClassVar[HandoffMessage.Code]
        CODE_MANIFEST: _ClassVar[HandoffMessage.Code]
        CODE_NO_CAPACITY: _ClassVar[HandoffMessage.Code]
        CODE_PROTOCOL: _ClassVar[HandoffMessage.Code]
        CODE_TIMEOUT: _ClassVar[HandoffMessage.Code]
        CODE_UNKNOWN_PEER: _ClassVar[HandoffMessage.Code]
    CODE_UNSPECIFIED: HandoffMessage.Code
    CODE_CANCELLED: HandoffMessage.Code
    CODE_CLOSED: HandoffMessage.Code
    CODE_CORRUPT: HandoffMessage.Code
    CODE_DRAINING: HandoffMessage.Code
    CODE_INCOMPATIBLE: HandoffMessage.Code
    CODE_INTERNAL: HandoffMessage.Code
    CODE_LINK: HandoffMessage.Code
    CODE_MANIFEST: HandoffMessage.Code
    CODE_NO_CAPACITY: HandoffMessage.Code
    CODE_PROTOCOL: HandoffMessage.Code
    CODE_TIMEOUT: HandoffMessage.Code
    CODE_UNKNOWN_PEER: HandoffMessage.Code
    class Layout(_message.Message):
        __slots__ = ("layers", "kv_heads", "head_dim", "block_size", "dtype", "order", "planes", "replicated")
        LAYERS_FIELD_NUMBER: _ClassVar[int]
        KV_HEADS_FIELD_NUMBER: _ClassVar[int]
        HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
        BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        ORDER_FIELD_NUMBER: _ClassVar[int]
        PLANES_FIELD_NUMBER: _ClassVar[int]
        REPLICATED_FIELD_NUMBER: _ClassVar[int]
        layers: int
        kv_heads: int
        head_dim: int
        block_size: int
        dtype: str
        order: str
        planes: int
        replicated: bool
        def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., order: _Optional[str] = ..., planes: _Optional[int] = ..., replicated: _Optional[bool] = ...) -> None: ...
    class Group(_message.Message):
        __slots__ = ("kind", "tracks", "window")
        KIND_FIELD_NUMBER: _ClassVar[int]
        TRACKS_FIELD_NUMBER: _ClassVar[int]
        WINDOW_FIELD_NUMBER: _ClassVar[int]
        kind: str
        tracks: _containers.RepeatedCompositeFieldContainer[HandoffMessage.Layout]
        window: int
        def __init__(self, kind: _Optional[str] = ..., tracks: _Optional[_Iterable[_Union[HandoffMessage.Layout, _Mapping]]] = ..., window: _Optional[int] = ...) -> None: ...
    class Cache(_message.Message):
        __slots__ = ("groups", "block_size")
        GROUPS_FIELD_NUMBER: _ClassVar[int]
        BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
        groups: _containers.RepeatedCompositeFieldContainer[HandoffMessage.Group]
        block_size: int
        def __init__(self, groups: _Optional[_Iterable[_Union[HandoffMessage.Group, _Mapping]]] = ..., block_size: _Optional[int] = ...) -> None: ...
    class Degree(_message.Message):
        __slots__ = ("tensor", "pipeline")
        TENSOR_FIELD_NUMBER: _ClassVar[int]
        PIPELINE_FIELD_NUMBER: _ClassVar[int]
        tensor: int
        pipeline: int
        def __init__(self, tensor: _Optional[int] = ..., pipeline: _Optional[int] = ...) -> None: ...
    class States(_message.Message):
        __slots__ = ("layers", "hidden_size", "dtype", "last")
        LAYERS_FIELD_NUMBER: _ClassVar[int]
        HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        layers: _containers.RepeatedScalarFieldContainer[int]
        hidden_size: int
        dtype: str
        last: bool
        def __init__(self, layers: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[str] = ..., last: _Optional[bool] = ...) -> None: ...
    class Hello(_message.Message):
        __slots__ = ("version", "worker", "incarnation", "peer_incarnation", "fingerprint", "cache", "checksum", "encrypt", "gpu", "frame_bytes", "states", "degree")
        VERSION_FIELD_NUMBER: _ClassVar[int]
        WORKER_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
        FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
        CACHE_FIELD_NUMBER: _ClassVar[int]
        CHECKSUM_FIELD_NUMBER: _ClassVar[int]
        ENCRYPT_FIELD_NUMBER: _ClassVar[int]
        GPU_FIELD_NUMBER: _ClassVar[int]
        FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
        STATES_FIELD_NUMBER: _ClassVar[int]
        DEGREE_FIELD_NUMBER: _ClassVar[int]
        version: int
        worker: str
        incarnation: str
        peer_incarnation: str
        fingerprint: str
        cache: HandoffMessage.Cache
        checksum: bool
        encrypt: str
        gpu: bool
        frame_bytes: int
        states: HandoffMessage.States
        degree: HandoffMessage.Degree
        def __init__(self, version: _Optional[int] = ..., worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., peer_incarnation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., cache: _Optional[_Union[HandoffMessage.Cache, _Mapping]] = ..., checksum: _Optional[bool] = ..., encrypt: _Optional[str] = ..., gpu: _Optional[bool] = ..., frame_bytes: _Optional[int] = ..., states: _Optional[_Union[HandoffMessage.States, _Mapping]] = ..., degree: _Optional[_Union[HandoffMessage.Degree, _Mapping]] = ...) -> None: ...
    class Refuse(_message.Message):
        __slots__ = ("code", "message")
        CODE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        code: HandoffMessage.Code
        message: str
        def __init__(self, code: _Optional[_Union[HandoffMessage.Code, str]] = ..., message: _Optional[str] = ...) -> None: ...
    class Dial(_message.Message):
        __slots__ = ("epoch", "transport")
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        TRANSPORT_FIELD_NUMBER: _ClassVar[int]
        epoch: int
        transport: str
        def __init__(self, epoch: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...
    class Meet(_message.Message):
        __slots__ = ("epoch", "entry", "value", "sender", "receiver")
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        ENTRY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        SENDER_FIELD_NUMBER: _ClassVar[int]
        RECEIVER_FIELD_NUMBER: _ClassVar[int]
        epoch: int
        entry: str
        value: bytes
        sender: int
        receiver: int
        def __init__(self, epoch: _Optional[int] = ..., entry: _Optional[str] = ..., value: _Optional[bytes] = ..., sender: _Optional[int] = ..., receiver: _Optional[int] = ...) -> None: ...
    class CloseLink(_message.Message):
        __slots__ = ("epoch", "message")
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        epoch: int
        message: str
        def __init__(self, epoch: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
    class Offer(_message.Message):
        __slots__ = ("request", "attempt", "tokens", "digest")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        request: str
        attempt: int
        tokens: int
        digest: bytes
        def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., tokens: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...
    class Wait(_message.Message):
        __slots__ = ("request", "attempt")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        request: str
        attempt: int
        def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...
    class Grant(_message.Message):
        __slots__ = ("request", "attempt", "epoch", "have", "states")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        HAVE_FIELD_NUMBER: _ClassVar[int]
        STATES_FIELD_NUMBER: _ClassVar[int]
        request: str
        attempt: int
        epoch: int
        have: _containers.RepeatedScalarFieldContainer[int]
        states: int
        def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., have: _Optional[_Iterable[int]] = ..., states: _Optional[int] = ...) -> None: ...
    class Push(_message.Message):
        __slots__ = ("request", "attempt", "epoch", "index", "first", "tokens", "nbytes", "part", "parts", "states", "track")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        INDEX_FIELD_NUMBER: _ClassVar[int]
        FIRST_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        NBYTES_FIELD_NUMBER: _ClassVar[int]
        PART_FIELD_NUMBER: _ClassVar[int]
        PARTS_FIELD_NUMBER: _ClassVar[int]
        STATES_FIELD_NUMBER: _ClassVar[int]
        TRACK_FIELD_NUMBER: _ClassVar[int]
        request: str
        attempt: int
        epoch: int
        index: int
        first: int
        tokens: int
        nbytes: int
        part: int
        parts: int
        states: bool
        track: int
        def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ..., first: _Optional[int] = ..., tokens: _Optional[int] = ..., nbytes: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., states: _Optional[bool] = ..., track: _Optional[int] = ...) -> None: ...
    class Finish(_message.Message):
        __slots__ = ("request", "attempt", "epoch", "first_token", "frames", "nbytes")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
        FRAMES_FIELD_NUMBER: _ClassVar[int]
        NBYTES_FIELD_NUMBER: _ClassVar[int]
        request: str
        attempt: int
        epoch: int
        first_token: int
        frames: int
        nbytes: int
        def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., first_token: _Optional[int] = ..., frames: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...
    class Ack(_message.Message):
        __slots__ = ("request", "attempt", "epoch")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        request: str
        attempt: int
        epoch: int
        def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...
    class Nack(_message.Message):
        __slots__ = ("request", "attempt", "code", "message")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        CODE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        request: str
        attempt: int
        code: HandoffMessage.Code
        message: str
        def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[_Union[HandoffMessage.Code, str]] = ..., message: _Optional[str] = ...) -> None: ...
    class Abort(_message.Message):
        __slots__ = ("request", "attempt", "code", "message")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        CODE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        request: str
        attempt: int
        code: HandoffMessage.Code
        message: str
        def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[_Union[HandoffMessage.Code, str]] = ..., message: _Optional[str] = ...) -> None: ...
    class Renew(_message.Message):
        __slots__ = ("keys",)
        class Key(_message.Message):
            __slots__ = ("request", "attempt")
            REQUEST_FIELD_NUMBER: _ClassVar[int]
            ATTEMPT_FIELD_NUMBER: _ClassVar[int]
            request: str
            attempt: int
            def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...
        KEYS_FIELD_NUMBER: _ClassVar[int]
        keys: _containers.RepeatedCompositeFieldContainer[HandoffMessage.Renew.Key]
        def __init__(self, keys: _Optional[_Iterable[_Union[HandoffMessage.Renew.Key, _Mapping]]] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    DIAL_FIELD_NUMBER: _ClassVar[int]
    MEET_FIELD_NUMBER: _ClassVar[int]
    CLOSE_LINK_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    hello: HandoffMessage.Hello
    refuse: HandoffMessage.Refuse
    dial: HandoffMessage.Dial
    meet: HandoffMessage.Meet
    close_link: HandoffMessage.CloseLink
    offer: HandoffMessage.Offer
    wait: HandoffMessage.Wait
    grant: HandoffMessage.Grant
    push: HandoffMessage.Push
    finish: HandoffMessage.Finish
    ack: HandoffMessage.Ack
    nack: HandoffMessage.Nack
    abort: HandoffMessage.Abort
    renew: HandoffMessage.Renew
    def __init__(self, hello: _Optional[_Union[HandoffMessage.Hello, _Mapping]] = ..., refuse: _Optional[_Union[HandoffMessage.Refuse, _Mapping]] = ..., dial: _Optional[_Union[HandoffMessage.Dial, _Mapping]] = ..., meet: _Optional[_Union[HandoffMessage.Meet, _Mapping]] = ..., close_link: _Optional[_Union[HandoffMessage.CloseLink, _Mapping]] = ..., offer: _Optional[_Union[HandoffMessage.Offer, _Mapping]] = ..., wait: _Optional[_Union[HandoffMessage.Wait, _Mapping]] = ..., grant: _Optional[_Union[HandoffMessage.Grant, _Mapping]] = ..., push: _Optional[_Union[HandoffMessage.Push, _Mapping]] = ..., finish: _Optional[_Union[HandoffMessage.Finish, _Mapping]] = ..., ack: _Optional[_Union[HandoffMessage.Ack, _Mapping]] = ..., nack: _Optional[_Union[HandoffMessage.Nack, _Mapping]] = ..., abort: _Optional[_Union[HandoffMessage.Abort, _Mapping]] = ..., renew: _Optional[_Union[HandoffMessage.Renew, _Mapping]] = ...) -> None: ...
