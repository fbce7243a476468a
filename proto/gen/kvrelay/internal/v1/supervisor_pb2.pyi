from kvrelay.internal.v1 import describe_pb2 as _describe_pb2
from kvrelay.internal.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_COLOCATED: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_STARTING: _ClassVar[MemberState]
    MEMBER_STATE_READY: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
    MEMBER_STATE_SUSPECT: _ClassVar[MemberState]
    MEMBER_STATE_DEAD: _ClassVar[MemberState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_COLOCATED: Role
ROLE_ROUTER: Role
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_STARTING: MemberState
MEMBER_STATE_READY: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_SUSPECT: MemberState
MEMBER_STATE_DEAD: MemberState

class Member(_message.Message):
    __slots__ = ("name", "role", "incarnation", "address", "pid", "state", "transports", "loaded", "compatibility", "generation", "step_age_seconds", "slow_step_seconds", "failed", "http_address", "max_context", "context_limit", "metrics_address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLOW_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    incarnation: str
    address: str
    pid: int
    state: MemberState
    transports: _containers.RepeatedScalarFieldContainer[str]
    loaded: float
    compatibility: str
    generation: int
    step_age_seconds: float
    slow_step_seconds: float
    failed: bool
    http_address: str
    max_context: int
    context_limit: _worker_pb2.ContextLimit
    metrics_address: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[MemberState, str]] = ..., transports: _Optional[_Iterable[str]] = ..., loaded: _Optional[float] = ..., compatibility: _Optional[str] = ..., generation: _Optional[int] = ..., step_age_seconds: _Optional[float] = ..., slow_step_seconds: _Optional[float] = ..., failed: _Optional[bool] = ..., http_address: _Optional[str] = ..., max_context: _Optional[int] = ..., context_limit: _Optional[_Union[_worker_pb2.ContextLimit, str]] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("member", "load", "description")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    member: Member
    load: _worker_pb2.Load
    description: _describe_pb2.Description
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., description: _Optional[_Union[_describe_pb2.Description, _Mapping]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("version", "members", "fenced", "generation", "complete", "ask")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    fenced: bool
    generation: int
    complete: bool
    ask: int
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., fenced: _Optional[bool] = ..., generation: _Optional[int] = ..., complete: _Optional[bool] = ..., ask: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberDescription(_message.Message):
    __slots__ = ("name", "description", "asked_unix", "answered_unix")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ASKED_UNIX_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_UNIX_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: _describe_pb2.Description
    asked_unix: float
    answered_unix: float
    def __init__(self, name: _Optional[str] = ..., description: _Optional[_Union[_describe_pb2.Description, _Mapping]] = ..., asked_unix: _Optional[float] = ..., answered_unix: _Optional[float] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("members", "supervisor")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberDescription]
    supervisor: _describe_pb2.Description
    def __init__(self, members: _Optional[_Iterable[_Union[MemberDescription, _Mapping]]] = ..., supervisor: _Optional[_Union[_describe_pb2.Description, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member", "load", "heartbeat_age_seconds", "restored")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    member: Member
    load: _worker_pb2.Load
    heartbeat_age_seconds: float
    restored: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., heartbeat_age_seconds: _Optional[float] = ..., restored: _Optional[bool] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("ready", "members", "metrics_address")
    READY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    metrics_address: str
    def __init__(self, ready: _Optional[bool] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class NameRecord(_message.Message):
    __slots__ = ("name", "generation", "member", "acknowledged", "fenced")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    member: Member
    acknowledged: bool
    fenced: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., acknowledged: _Optional[bool] = ..., fenced: _Optional[_Iterable[str]] = ...) -> None: ...

class MembershipRecord(_message.Message):
    __slots__ = ("generation", "names")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    names: _containers.RepeatedCompositeFieldContainer[NameRecord]
    def __init__(self, generation: _Optional[int] = ..., names: _Optional[_Iterable[_Union[NameRecord, _Mapping]]] = ...) -> None: ...

class SupervisorRecord(_message.Message):
    __slots__ = ("membership", "address")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    membership: MembershipRecord
    address: str
    def __init__(self, membership: _Optional[_Union[MembershipRecord, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...
