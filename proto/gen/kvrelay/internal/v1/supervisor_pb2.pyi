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

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_SERVE: _ClassVar[Stage]
    STAGE_REPLACE: _ClassVar[Stage]
    STAGE_CYCLE: _ClassVar[Stage]
    STAGE_LEAVE: _ClassVar[Stage]
    STAGE_RETURN: _ClassVar[Stage]
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
STAGE_SERVE: Stage
STAGE_REPLACE: Stage
STAGE_CYCLE: Stage
STAGE_LEAVE: Stage
STAGE_RETURN: Stage

class Member(_message.Message):
    __slots__ = ("name", "role", "incarnation", "address", "pid", "state", "transports", "loaded", "compatibility", "generation", "step_age_seconds", "slow_step_seconds", "failed", "http_address", "max_context", "context_limit", "roles", "weights", "kv_dtype", "metrics_address", "states", "prefill_attention", "tensor_ranks", "pipeline_stages", "rank_pids")
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
    ROLES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_RANKS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_STAGES_FIELD_NUMBER: _ClassVar[int]
    RANK_PIDS_FIELD_NUMBER: _ClassVar[int]
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
    roles: _containers.RepeatedScalarFieldContainer[Role]
    weights: str
    kv_dtype: str
    metrics_address: str
    states: HiddenStates
    prefill_attention: str
    tensor_ranks: int
    pipeline_stages: int
    rank_pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[MemberState, str]] = ..., transports: _Optional[_Iterable[str]] = ..., loaded: _Optional[float] = ..., compatibility: _Optional[str] = ..., generation: _Optional[int] = ..., step_age_seconds: _Optional[float] = ..., slow_step_seconds: _Optional[float] = ..., failed: _Optional[bool] = ..., http_address: _Optional[str] = ..., max_context: _Optional[int] = ..., context_limit: _Optional[_Union[_worker_pb2.ContextLimit, str]] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., weights: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., metrics_address: _Optional[str] = ..., states: _Optional[_Union[HiddenStates, _Mapping]] = ..., prefill_attention: _Optional[str] = ..., tensor_ranks: _Optional[int] = ..., pipeline_stages: _Optional[int] = ..., rank_pids: _Optional[_Iterable[int]] = ...) -> None: ...

class HiddenStates(_message.Message):
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
    __slots__ = ("version", "members", "fenced", "generation", "complete", "role", "ask")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    fenced: bool
    generation: int
    complete: bool
    role: Role
    ask: int
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., fenced: _Optional[bool] = ..., generation: _Optional[int] = ..., complete: _Optional[bool] = ..., role: _Optional[_Union[Role, str]] = ..., ask: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("ready", "members", "desired", "settled", "troubles", "waits", "scaling", "metrics_address")
    class TroublesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class WaitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    READY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    desired: Desired
    settled: bool
    troubles: _containers.ScalarMap[str, str]
    waits: _containers.ScalarMap[str, str]
    scaling: Scaling
    metrics_address: str
    def __init__(self, ready: _Optional[bool] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., desired: _Optional[_Union[Desired, _Mapping]] = ..., settled: _Optional[bool] = ..., troubles: _Optional[_Mapping[str, str]] = ..., waits: _Optional[_Mapping[str, str]] = ..., scaling: _Optional[_Union[Scaling, _Mapping]] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class Scaling(_message.Message):
    __slots__ = ("enabled", "ttft_target_seconds", "tpot_target_seconds", "ttft_attained", "tpot_attained", "prefill_pressure", "decode_pressure", "prefill_queue", "decode_queue", "prefill_queue_seconds", "decode_queue_seconds", "decisions")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTFT_ATTAINED_FIELD_NUMBER: _ClassVar[int]
    TPOT_ATTAINED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    ttft_target_seconds: float
    tpot_target_seconds: float
    ttft_attained: float
    tpot_attained: float
    prefill_pressure: float
    decode_pressure: float
    prefill_queue: int
    decode_queue: int
    prefill_queue_seconds: float
    decode_queue_seconds: float
    decisions: _containers.RepeatedCompositeFieldContainer[ScalingDecision]
    def __init__(self, enabled: _Optional[bool] = ..., ttft_target_seconds: _Optional[float] = ..., tpot_target_seconds: _Optional[float] = ..., ttft_attained: _Optional[float] = ..., tpot_attained: _Optional[float] = ..., prefill_pressure: _Optional[float] = ..., decode_pressure: _Optional[float] = ..., prefill_queue: _Optional[int] = ..., decode_queue: _Optional[int] = ..., prefill_queue_seconds: _Optional[float] = ..., decode_queue_seconds: _Optional[float] = ..., decisions: _Optional[_Iterable[_Union[ScalingDecision, _Mapping]]] = ...) -> None: ...

class ScalingDecision(_message.Message):
    __slots__ = ("time", "reason", "moves", "pools", "refused")
    class MovesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Role
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Role, str]] = ...) -> None: ...
    TIME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    time: float
    reason: str
    moves: _containers.ScalarMap[str, Role]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSize]
    refused: str
    def __init__(self, time: _Optional[float] = ..., reason: _Optional[str] = ..., moves: _Optional[_Mapping[str, Role]] = ..., pools: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ..., refused: _Optional[str] = ...) -> None: ...

class DesiredMember(_message.Message):
    __slots__ = ("name", "role", "config", "stage", "replaces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    config: int
    stage: Stage
    replaces: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., config: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ..., replaces: _Optional[str] = ...) -> None: ...

class Desired(_message.Message):
    __slots__ = ("revision", "config", "previous", "members", "halted", "restart_id")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HALTED_FIELD_NUMBER: _ClassVar[int]
    RESTART_ID_FIELD_NUMBER: _ClassVar[int]
    revision: int
    config: int
    previous: int
    members: _containers.RepeatedCompositeFieldContainer[DesiredMember]
    halted: str
    restart_id: str
    def __init__(self, revision: _Optional[int] = ..., config: _Optional[int] = ..., previous: _Optional[int] = ..., members: _Optional[_Iterable[_Union[DesiredMember, _Mapping]]] = ..., halted: _Optional[str] = ..., restart_id: _Optional[str] = ...) -> None: ...

class ConfigRecord(_message.Message):
    __slots__ = ("generation", "text")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    text: str
    def __init__(self, generation: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class PoolSize(_message.Message):
    __slots__ = ("role", "count")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    role: Role
    count: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., count: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSize]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("member", "replace", "force")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    member: str
    replace: bool
    force: bool
    def __init__(self, member: _Optional[str] = ..., replace: _Optional[bool] = ..., force: _Optional[bool] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("member", "role", "force")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    member: str
    role: Role
    force: bool
    def __init__(self, member: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., force: _Optional[bool] = ...) -> None: ...

class UpgradeRequest(_message.Message):
    __slots__ = ("config", "rollback", "in_place")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    config: str
    rollback: bool
    in_place: bool
    def __init__(self, config: _Optional[str] = ..., rollback: _Optional[bool] = ..., in_place: _Optional[bool] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("id", "members", "in_place")
    ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    id: str
    members: _containers.RepeatedScalarFieldContainer[str]
    in_place: bool
    def __init__(self, id: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ..., in_place: _Optional[bool] = ...) -> None: ...

class CommandResponse(_message.Message):
    __slots__ = ("revision", "refusal")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    revision: int
    refusal: Refusal
    def __init__(self, revision: _Optional[int] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Refusal.Code]
        CODE_INVALID: _ClassVar[Refusal.Code]
        CODE_UNKNOWN_MEMBER: _ClassVar[Refusal.Code]
        CODE_UNSAFE: _ClassVar[Refusal.Code]
        CODE_BUSY: _ClassVar[Refusal.Code]
        CODE_NOT_RECORDED: _ClassVar[Refusal.Code]
        CODE_UNSUPPORTED: _ClassVar[Refusal.Code]
    CODE_UNSPECIFIED: Refusal.Code
    CODE_INVALID: Refusal.Code
    CODE_UNKNOWN_MEMBER: Refusal.Code
    CODE_UNSAFE: Refusal.Code
    CODE_BUSY: Refusal.Code
    CODE_NOT_RECORDED: Refusal.Code
    CODE_UNSUPPORTED: Refusal.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: Refusal.Code
    message: str
    def __init__(self, code: _Optional[_Union[Refusal.Code, str]] = ..., message: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("membership", "address", "desired", "configs")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    CONFIGS_FIELD_NUMBER: _ClassVar[int]
    membership: MembershipRecord
    address: str
    desired: Desired
    configs: _containers.RepeatedCompositeFieldContainer[ConfigRecord]
    def __init__(self, membership: _Optional[_Union[MembershipRecord, _Mapping]] = ..., address: _Optional[str] = ..., desired: _Optional[_Union[Desired, _Mapping]] = ..., configs: _Optional[_Iterable[_Union[ConfigRecord, _Mapping]]] = ...) -> None: ...
