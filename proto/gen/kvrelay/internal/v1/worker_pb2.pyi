from kvrelay.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_COLOCATED: _ClassVar[Phase]

class ContextLimit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_LIMIT_UNSPECIFIED: _ClassVar[ContextLimit]
    CONTEXT_LIMIT_OPTION: _ClassVar[ContextLimit]
    CONTEXT_LIMIT_POOL: _ClassVar[ContextLimit]

class Wait(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_UNSPECIFIED: _ClassVar[Wait]
    WAIT_TURN: _ClassVar[Wait]
    WAIT_BLOCKS: _ClassVar[Wait]
    WAIT_ROW: _ClassVar[Wait]
    WAIT_PREEMPTED: _ClassVar[Wait]
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
PHASE_COLOCATED: Phase
CONTEXT_LIMIT_UNSPECIFIED: ContextLimit
CONTEXT_LIMIT_OPTION: ContextLimit
CONTEXT_LIMIT_POOL: ContextLimit
WAIT_UNSPECIFIED: Wait
WAIT_TURN: Wait
WAIT_BLOCKS: Wait
WAIT_ROW: Wait
WAIT_PREEMPTED: Wait

class RelayRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "fence", "begin", "answered")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    fence: ClientCall
    begin: Begin
    answered: Answered
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., fence: _Optional[_Union[ClientCall, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., answered: _Optional[_Union[Answered, _Mapping]] = ...) -> None: ...

class ClientCall(_message.Message):
    __slots__ = ("key", "call")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    call: int
    def __init__(self, key: _Optional[bytes] = ..., call: _Optional[int] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router", "worker_incarnation")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    router: str
    worker_incarnation: str
    def __init__(self, router: _Optional[str] = ..., worker_incarnation: _Optional[str] = ...) -> None: ...

class PeerRef(_message.Message):
    __slots__ = ("name", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "logprobs", "prompt_logprobs", "constraint")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    logprobs: int
    prompt_logprobs: int
    constraint: _inference_pb2.Constraint
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., constraint: _Optional[_Union[_inference_pb2.Constraint, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "phase", "token_ids", "prompt_tokens", "sampling", "tenant", "peer", "timeout_seconds", "client_call", "suspect_tokens", "on_trial", "slot", "holder", "expected_tokens", "chain", "trace_id", "urgency")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_CALL_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ON_TRIAL_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    URGENCY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    phase: Phase
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: Sampling
    tenant: str
    peer: PeerRef
    timeout_seconds: float
    client_call: ClientCall
    suspect_tokens: int
    on_trial: bool
    slot: int
    holder: int
    expected_tokens: int
    chain: _containers.RepeatedScalarFieldContainer[int]
    trace_id: str
    urgency: Urgency
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., tenant: _Optional[str] = ..., peer: _Optional[_Union[PeerRef, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., client_call: _Optional[_Union[ClientCall, _Mapping]] = ..., suspect_tokens: _Optional[int] = ..., on_trial: _Optional[bool] = ..., slot: _Optional[int] = ..., holder: _Optional[int] = ..., expected_tokens: _Optional[int] = ..., chain: _Optional[_Iterable[int]] = ..., trace_id: _Optional[str] = ..., urgency: _Optional[_Union[Urgency, _Mapping]] = ...) -> None: ...

class Urgency(_message.Message):
    __slots__ = ("rank", "priority", "first_token_seconds", "yields")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    YIELDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    priority: int
    first_token_seconds: float
    yields: bool
    def __init__(self, rank: _Optional[int] = ..., priority: _Optional[int] = ..., first_token_seconds: _Optional[float] = ..., yields: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Answered(_message.Message):
    __slots__ = ("chain",)
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    chain: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, chain: _Optional[_Iterable[int]] = ...) -> None: ...

class RelayResponse(_message.Message):
    __slots__ = ("hello", "events", "load", "submits_seen", "slots", "indices", "token_ids", "foreign")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_SEEN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    load: Load
    submits_seen: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    foreign: _containers.RepeatedCompositeFieldContainer[ForeignPrompt]
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., submits_seen: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., foreign: _Optional[_Iterable[_Union[ForeignPrompt, _Mapping]]] = ...) -> None: ...

class ForeignPrompt(_message.Message):
    __slots__ = ("chain", "cached_tokens")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    chain: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    def __init__(self, chain: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("name", "incarnation", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    model: ModelInfo
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_context", "eos_token_ids", "dtype", "fingerprint", "context_limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    fingerprint: str
    context_limit: ContextLimit
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., fingerprint: _Optional[str] = ..., context_limit: _Optional[_Union[ContextLimit, str]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "cause", "blamed")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Failure.Code]
        CODE_INVALID: _ClassVar[Failure.Code]
        CODE_RETRY: _ClassVar[Failure.Code]
        CODE_INTERNAL: _ClassVar[Failure.Code]
        CODE_FULL: _ClassVar[Failure.Code]
        CODE_FENCED: _ClassVar[Failure.Code]
    CODE_UNSPECIFIED: Failure.Code
    CODE_INVALID: Failure.Code
    CODE_RETRY: Failure.Code
    CODE_INTERNAL: Failure.Code
    CODE_FULL: Failure.Code
    CODE_FENCED: Failure.Code
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[Failure.Cause]
        CAUSE_PEER_LOST: _ClassVar[Failure.Cause]
        CAUSE_DRAINING: _ClassVar[Failure.Cause]
        CAUSE_LINK: _ClassVar[Failure.Cause]
        CAUSE_REFUSED: _ClassVar[Failure.Cause]
        CAUSE_TRIAL: _ClassVar[Failure.Cause]
    CAUSE_UNSPECIFIED: Failure.Cause
    CAUSE_PEER_LOST: Failure.Cause
    CAUSE_DRAINING: Failure.Cause
    CAUSE_LINK: Failure.Cause
    CAUSE_REFUSED: Failure.Cause
    CAUSE_TRIAL: Failure.Cause
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BLAMED_FIELD_NUMBER: _ClassVar[int]
    code: Failure.Code
    message: str
    cause: Failure.Cause
    blamed: _containers.RepeatedCompositeFieldContainer[PeerRef]
    def __init__(self, code: _Optional[_Union[Failure.Code, str]] = ..., message: _Optional[str] = ..., cause: _Optional[_Union[Failure.Cause, str]] = ..., blamed: _Optional[_Iterable[_Union[PeerRef, _Mapping]]] = ...) -> None: ...

class PrefillReport(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "cached_tokens")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    cached_tokens: int
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class TransferReport(_message.Message):
    __slots__ = ("transfer_seconds", "handoff_seconds", "transfer_bytes", "grant_seconds")
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    transfer_seconds: float
    handoff_seconds: float
    transfer_bytes: int
    grant_seconds: float
    def __init__(self, transfer_seconds: _Optional[float] = ..., handoff_seconds: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., grant_seconds: _Optional[float] = ...) -> None: ...

class DecodeReport(_message.Message):
    __slots__ = ("queue_seconds", "recomputed_tokens")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    recomputed_tokens: int
    def __init__(self, queue_seconds: _Optional[float] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "first_index", "token_ids", "finish_reason", "failure", "prefill", "transfer", "decode", "logprobs", "prompt_logprobs", "prompt_logprobs_first", "computed_tokens", "proposed_tokens", "accepted_tokens", "taken", "waits")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIRST_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _inference_pb2.FinishReason
    failure: Failure
    prefill: PrefillReport
    transfer: TransferReport
    decode: DecodeReport
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    prompt_logprobs_first: int
    computed_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    taken: bool
    waits: Wait
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., prefill: _Optional[_Union[PrefillReport, _Mapping]] = ..., transfer: _Optional[_Union[TransferReport, _Mapping]] = ..., decode: _Optional[_Union[DecodeReport, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs_first: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., taken: _Optional[bool] = ..., waits: _Optional[_Union[Wait, str]] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("total", "free", "cached", "held", "size")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    held: int
    size: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Requests(_message.Message):
    __slots__ = ("waiting", "running", "free_slots")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    free_slots: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., free_slots: _Optional[int] = ...) -> None: ...

class Promised(_message.Message):
    __slots__ = ("requests", "blocks", "holdings")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    blocks: int
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    def __init__(self, requests: _Optional[int] = ..., blocks: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("blocks", "requests", "pending_tokens", "computed_tokens", "prompt_tokens", "promised", "steps", "step_seconds", "traffic", "growth_blocks", "ending", "holdings", "costs", "yielding_tokens", "yielding", "yielding_growth_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    GROWTH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    YIELDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    YIELDING_FIELD_NUMBER: _ClassVar[int]
    YIELDING_GROWTH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: Blocks
    requests: Requests
    pending_tokens: int
    computed_tokens: int
    prompt_tokens: int
    promised: Promised
    steps: int
    step_seconds: float
    traffic: Traffic
    growth_blocks: int
    ending: Promised
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    costs: Costs
    yielding_tokens: int
    yielding: Promised
    yielding_growth_blocks: int
    def __init__(self, blocks: _Optional[_Union[Blocks, _Mapping]] = ..., requests: _Optional[_Union[Requests, _Mapping]] = ..., pending_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., promised: _Optional[_Union[Promised, _Mapping]] = ..., steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., growth_blocks: _Optional[int] = ..., ending: _Optional[_Union[Promised, _Mapping]] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., costs: _Optional[_Union[Costs, _Mapping]] = ..., yielding_tokens: _Optional[int] = ..., yielding: _Optional[_Union[Promised, _Mapping]] = ..., yielding_growth_blocks: _Optional[int] = ...) -> None: ...

class Costs(_message.Message):
    __slots__ = ("fixed", "sequence", "context", "guess", "prompt_fixed", "token", "pair", "chunk", "step_seconds", "decode_error", "prompt_error", "kv_token", "kv_fixed", "kv_windows", "links", "extra")
    FIXED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    GUESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIXED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ERROR_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_FIXED_FIELD_NUMBER: _ClassVar[int]
    KV_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    fixed: float
    sequence: float
    context: float
    guess: float
    prompt_fixed: float
    token: float
    pair: float
    chunk: int
    step_seconds: float
    decode_error: float
    prompt_error: float
    kv_token: float
    kv_fixed: float
    kv_windows: _containers.RepeatedCompositeFieldContainer[KvWindow]
    links: _containers.RepeatedCompositeFieldContainer[Link]
    extra: float
    def __init__(self, fixed: _Optional[float] = ..., sequence: _Optional[float] = ..., context: _Optional[float] = ..., guess: _Optional[float] = ..., prompt_fixed: _Optional[float] = ..., token: _Optional[float] = ..., pair: _Optional[float] = ..., chunk: _Optional[int] = ..., step_seconds: _Optional[float] = ..., decode_error: _Optional[float] = ..., prompt_error: _Optional[float] = ..., kv_token: _Optional[float] = ..., kv_fixed: _Optional[float] = ..., kv_windows: _Optional[_Iterable[_Union[KvWindow, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., extra: _Optional[float] = ...) -> None: ...

class KvWindow(_message.Message):
    __slots__ = ("token", "tokens")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    token: float
    tokens: int
    def __init__(self, token: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("worker", "fixed", "byte")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    BYTE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    fixed: float
    byte: float
    def __init__(self, worker: _Optional[str] = ..., fixed: _Optional[float] = ..., byte: _Optional[float] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("holder", "blocks")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    holder: int
    blocks: int
    def __init__(self, holder: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "first_tokens", "ttft_attained", "unqueued_seconds", "streams", "tpot_attained", "prefill_queue_seconds", "decode_queue_seconds", "young_tokens", "young_ended", "queued_prompts", "queued_streams", "queued_tokens")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_ATTAINED_FIELD_NUMBER: _ClassVar[int]
    UNQUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    TPOT_ATTAINED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    YOUNG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    YOUNG_ENDED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_STREAMS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_tokens: int
    ttft_attained: int
    unqueued_seconds: float
    streams: int
    tpot_attained: int
    prefill_queue_seconds: float
    decode_queue_seconds: float
    young_tokens: int
    young_ended: int
    queued_prompts: int
    queued_streams: int
    queued_tokens: int
    def __init__(self, requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., first_tokens: _Optional[int] = ..., ttft_attained: _Optional[int] = ..., unqueued_seconds: _Optional[float] = ..., streams: _Optional[int] = ..., tpot_attained: _Optional[int] = ..., prefill_queue_seconds: _Optional[float] = ..., decode_queue_seconds: _Optional[float] = ..., young_tokens: _Optional[int] = ..., young_ended: _Optional[int] = ..., queued_prompts: _Optional[int] = ..., queued_streams: _Optional[int] = ..., queued_tokens: _Optional[int] = ...) -> None: ...
