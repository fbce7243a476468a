from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Description(_message.Message):
    __slots__ = ("ask", "heard_unix", "told_unix", "host", "versions", "amounts", "certificates", "gpus", "rdma_ports", "nvidia_peermem", "transports", "pairs", "checksum", "encrypt", "tls", "kv_bytes", "max_context", "context_limit", "device", "kernels_missing")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ASK_FIELD_NUMBER: _ClassVar[int]
    HEARD_UNIX_FIELD_NUMBER: _ClassVar[int]
    TOLD_UNIX_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    AMOUNTS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    RDMA_PORTS_FIELD_NUMBER: _ClassVar[int]
    NVIDIA_PEERMEM_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ENCRYPT_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_MISSING_FIELD_NUMBER: _ClassVar[int]
    ask: int
    heard_unix: float
    told_unix: float
    host: str
    versions: _containers.ScalarMap[str, str]
    amounts: _containers.RepeatedCompositeFieldContainer[Amount]
    certificates: _containers.RepeatedCompositeFieldContainer[CertificateEnd]
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    rdma_ports: _containers.RepeatedCompositeFieldContainer[RdmaPort]
    nvidia_peermem: bool
    transports: _containers.RepeatedCompositeFieldContainer[TransportState]
    pairs: _containers.RepeatedCompositeFieldContainer[PairState]
    checksum: bool
    encrypt: str
    tls: str
    kv_bytes: int
    max_context: int
    context_limit: int
    device: str
    kernels_missing: str
    def __init__(self, ask: _Optional[int] = ..., heard_unix: _Optional[float] = ..., told_unix: _Optional[float] = ..., host: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., amounts: _Optional[_Iterable[_Union[Amount, _Mapping]]] = ..., certificates: _Optional[_Iterable[_Union[CertificateEnd, _Mapping]]] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., rdma_ports: _Optional[_Iterable[_Union[RdmaPort, _Mapping]]] = ..., nvidia_peermem: _Optional[bool] = ..., transports: _Optional[_Iterable[_Union[TransportState, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[PairState, _Mapping]]] = ..., checksum: _Optional[bool] = ..., encrypt: _Optional[str] = ..., tls: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., max_context: _Optional[int] = ..., context_limit: _Optional[int] = ..., device: _Optional[str] = ..., kernels_missing: _Optional[str] = ...) -> None: ...

class Amount(_message.Message):
    __slots__ = ("name", "used", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    used: float
    limit: float
    def __init__(self, name: _Optional[str] = ..., used: _Optional[float] = ..., limit: _Optional[float] = ...) -> None: ...

class CertificateEnd(_message.Message):
    __slots__ = ("file", "expires_unix")
    FILE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_FIELD_NUMBER: _ClassVar[int]
    file: str
    expires_unix: float
    def __init__(self, file: _Optional[str] = ..., expires_unix: _Optional[float] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("index", "name", "driver", "memory_bytes", "used_bytes", "mig", "ecc_errors", "unreachable")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIG_FIELD_NUMBER: _ClassVar[int]
    ECC_ERRORS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    index: int
    name: str
    driver: str
    memory_bytes: int
    used_bytes: int
    mig: str
    ecc_errors: int
    unreachable: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., name: _Optional[str] = ..., driver: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., mig: _Optional[str] = ..., ecc_errors: _Optional[int] = ..., unreachable: _Optional[_Iterable[int]] = ...) -> None: ...

class RdmaPort(_message.Message):
    __slots__ = ("name", "state", "link_layer", "gid")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LINK_LAYER_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    link_layer: str
    gid: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., link_layer: _Optional[str] = ..., gid: _Optional[str] = ...) -> None: ...

class TransportState(_message.Message):
    __slots__ = ("name", "missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    missing: str
    def __init__(self, name: _Optional[str] = ..., missing: _Optional[str] = ...) -> None: ...

class PairState(_message.Message):
    __slots__ = ("peer", "transport", "missing", "epoch")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    peer: str
    transport: str
    missing: str
    epoch: int
    def __init__(self, peer: _Optional[str] = ..., transport: _Optional[str] = ..., missing: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
