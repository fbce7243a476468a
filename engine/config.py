"""The options of an engine.

These are plain frozen dataclasses, so that an engine runs without pydantic.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from annotated_types import Interval

from kvrelay.engine.degree import MAX_RANKS, Degree
from kvrelay.machine.options import AUTO, Automatic, Options, Removed, require

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["none", "dense", "int8", "int4", "fp8", "w8a8"]
SpeculationMethod = Literal["off", "ngram", "suffix", "draft", "medusa", "eagle3", "mtp"]
CacheDtype = Literal["auto", "int8", "fp8"]
PrefillKernel = Literal["triton", "varlen_attn", "flashinfer"]
PrefillAttention = Literal["auto", "triton", "varlen_attn", "flashinfer"]
ModelPath = Literal["auto", "fast", "general"]
ExpertExchange = Literal["auto", "all_reduce", "all_to_all"]
ExpertKernel = Literal["auto", "builtin", "flashinfer"]

MODEL_METHODS: tuple[SpeculationMethod, ...] = ("draft", "medusa", "eagle3")
"""Methods with a checkpoint of their own."""
STATE_METHODS: tuple[SpeculationMethod, ...] = ("medusa", "eagle3", "mtp")
"""Methods that guess from the served model's hidden states."""


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Values of the options that are `auto`, for one kind of device."""

    block_size: int
    max_batch_tokens: int
    max_sequences: int
    memory_share: float
    pool_contexts: int
    """Largest size of a KV pool of `auto`, in contexts of the greatest length; more would hardly be used."""


CPU_DEFAULTS = DeviceDefaults(16, 512, 64, memory_share=0.5, pool_contexts=16)
GPU_DEFAULTS = DeviceDefaults(64, 2048, 256, memory_share=0.9, pool_contexts=256)
LARGE_GPU_BYTES = 70 * 2**30
LARGE_GPU_BATCH_TOKENS = 8192
"""Token budget of one step on a GPU with LARGE_GPU_BYTES or more. A step's intermediate tensors take memory from the KV
pool."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig(Options):
    """How an engine guesses tokens, to check several in one step. The tokens are the same with and without."""

    method: SpeculationMethod = "off"
    """Method that guesses: ngram looks up what followed the last tokens when the request had them before; suffix does
    so for as many last tokens as it can, and guesses the more, the more there are; draft asks a small model; medusa and
    eagle3 ask heads that were trained for the served model and read its hidden states; mtp asks the layer for
    multi-token prediction that the served checkpoint brings along, on the general path."""

    draft_model: str = ""
    """Folder of a Hugging Face checkpoint with the vocabulary of the served model, ORG/NAME[@REVISION] of the Hugging
    Face hub, or the name of a bundled one (`pico-draft`, for `pico`). For draft, whose KV takes memory beside
    `kv_memory_bytes`: as many tokens as the served model's; with `auto`, a tenth of the share. For medusa and eagle3,
    the folder of the heads, or ORG/NAME. The KV of eagle3 and mtp takes memory beside `kv_memory_bytes`, that of one
    layer."""

    max_tokens: Annotated[int, Interval(ge=1, le=64)] = 8
    """Tokens that are guessed for one sequence in one step at most; 1 to 64."""

    adaptive: bool = True
    """Guess one token more than were kept last, and none while steps with guesses cost more than they win. Off: always
    max_tokens, as far as the step has room."""

    shortest_match: Annotated[int, Interval(ge=1, le=64)] = 2
    """Tokens that must be alike for a look-up, at least; 1 to 64. For ngram and suffix."""

    longest_match: Annotated[int, Interval(ge=1, le=64)] = 4
    """Tokens that are compared, at most; shortest_match to 64. For ngram."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        named = bool(self.draft_model) == (self.method in MODEL_METHODS)
        allowed = f"a model with method {', '.join(MODEL_METHODS)}, and only then"
        require(named, "draft_model", self.draft_model, allowed)
        shortest, longest = self.shortest_match, self.longest_match
        require(shortest <= longest, "longest_match", longest, f"shortest_match ({shortest}) to 64")


@dataclass(frozen=True, slots=True)
class EngineConfig(Options):
    """Options of one worker's engine."""

    block_size: Annotated[int, Automatic("auto, or a power of two from 8 to 128", 8, 128)] = AUTO
    """Tokens per KV block; a power of two, 8 to 128. auto: 16 on CPU, 64 on GPU."""

    kv_memory_bytes: Annotated[int, Automatic("auto, 1 or more bytes, or text such as 8GiB", sizes=True)] = AUTO
    """Bytes of a rank's KV pool, allocated at start, as a number or as text such as `8GiB`: as many blocks as fit.
    auto: the share `memory_share` of what is left of the worker's memory when its weights are loaded and, on a GPU,
    its workspaces and graphs were made once to measure them. On CPU at most 16 contexts of the greatest length."""

    kv_dtype: CacheDtype = "auto"
    """Numbers that KV is stored and handed over in. auto: the model's dtype. int8, and fp8 (E4M3, on GPU only), have a
    scale for each token and head: they take about half the memory of bfloat16, and half the time on a link."""

    memory_share: Annotated[float, Automatic("auto, or a number from 0.01 to 1", 0.01, 1.0)] = AUTO
    """Share of the memory left for it that a KV pool of `auto` takes; links and temporary tensors need the rest.
    auto: 0.9 on GPU, 0.5 on CPU."""

    memory_part: Annotated[float, Automatic("auto, or a number from 0.0001 to 1", 0.0001, 1.0)] = AUTO
    """The worker's part of the memory of its GPU, or of its machine if it computes on CPUs, for a KV pool of `auto`.
    auto divides it among the workers there; a worker that was started alone has all of it."""

    max_batch_tokens: Annotated[int, Automatic("auto, or 8 or more", 8)] = AUTO
    """Token budget of one step. Decode takes from it first, chunks of prompts get the rest. auto: 512 on CPU, 2048 on
    GPU, 8192 on a GPU with 70 GiB or more."""

    step_seconds: Annotated[float, Interval(ge=0, le=60)] = 0.1
    """Longest time of a step that computes a part of a prompt beside tokens of other requests, or while the KV of
    another request is on its way to the worker. The part is as large as fits by what the worker has measured, and a
    block at least. 0: no bound."""

    max_sequences: Annotated[int, Automatic("auto, or 1 to 4096", 1, 4096)] = AUTO
    """Sequences in one step at most. auto: 64 on CPU, 256 on GPU."""

    max_context: Annotated[int, Interval(ge=0)] = 0
    """Prompt plus completion, in tokens, at most; 0 takes the model's own limit, for longrope the original context."""

    prefix_cache: bool = True
    """Keep computed blocks and reuse them for prompts of the same tenant with the same prefix."""

    quantization: Quantization = "none"
    """Format that weights are converted to when they are loaded. int8 and fp8 (E4M3) have a scale for each output; int4
    has one for each 64 inputs, and an int8 head. w8a8 is int8 whose products round their inputs to int8 too, each token
    by its largest; on GPUs it is int8. KV keeps the model's dtype. none leaves weights as the checkpoint has them,
    quantized or not; dense holds those that it has quantized in the model's dtype."""

    packed_cache_bytes: Annotated[int, Interval(ge=0)] = 0
    """Bytes on disk, at most, for weights that were quantized at load and laid out for this CPU, so that a restart
    needn't do that again: in `$XDG_CACHE_HOME/kvrelay/packed`, one file a model, about as large as the weights in
    memory. The models used least recently are removed first. 0 keeps none."""

    device: Device = "auto"
    """Device that holds the model and the KV pool; auto takes a GPU if the worker has one."""

    prefill_attention: Annotated[
        PrefillAttention, Removed("gluon", "varlen_attn, flashinfer or auto"), Removed("flash_attn", "varlen_attn")
    ] = "triton"
    """Kernel that attends for prompts on a GPU. triton: kvrelay's kernel for all GPUs, whose results don't depend on
    where a prompt is cut into chunks; those of the others may, in their last bits. varlen_attn: PyTorch's, from 2.13
    on, by FlashAttention 3 on Hopper or FlashAttention 4 on Blackwell, installed by you. flashinfer: FlashInfer, the
    extra kvrelay[flashinfer]. Both take KV of 16 bits. auto: times those that can be had when the worker starts, and
    takes the fastest."""

    expert_kernel: ExpertKernel = "builtin"
    """Kernels that compute layers of experts on a GPU. builtin: PyTorch's, or for quantized weights kvrelay's in
    Triton. flashinfer: FlashInfer's, the extra kvrelay[flashinfer], for weights of 16 bits and experts with SwiGLU or
    gpt-oss's form of it; each layer is compared with its definition when the worker starts. auto: flashinfer where it
    is installed and computes the model's experts, else builtin."""

    graph_tokens: Annotated[int, Interval(ge=0, le=8192)] = 512
    """Size in tokens of the largest step with chunks of prompts that a GPU runs as captured graphs, in pieces with
    attention between them: the host then takes a fraction of the time for it. There are graphs for a few sizes, and
    padding fills a step up to the next. Larger steps keep the GPU busy for longer than the host takes to launch each
    kernel. 0 captures none, which takes less memory and a shorter start. Decode steps are captured in any case."""

    constraint_seconds: Annotated[float, Interval(ge=0.01, le=86400)] = 2.0
    """CPU seconds that following the constraint of one request (a schema, a regular expression, a grammar) may take,
    beside 5 ms a token; then the request ends as `INVALID_ARGUMENT`. The work is done in processes of its own."""

    constraint_bytes: Annotated[int, Interval(ge=2**20)] = 256 * 2**20
    """Memory limit in bytes of all compiled constraints and their followers. Constraints beyond it are forgotten, and
    compiled again when they are needed."""

    model_path: ModelPath = "auto"
    """Code that runs the model. fast: kvrelay's own, for its families. general: transformers' modelling code over
    kvrelay's KV, for every architecture that it has; the checkpoint's own code never runs. auto: fast where the model
    is of one of the families, else general."""

    threads: Annotated[int, Interval(ge=0, le=1024)] = 0
    """CPU threads of the forward pass, of all ranks on a machine together; 0 divides the machine's cores among its
    workers."""

    tensor_parallel: Annotated[int, Interval(ge=1, le=64)] = 1
    """Ranks that share each layer: each holds a part of the heads, of the MLP and of the vocabulary, in a process, and
    on a GPU, of its own. It must divide the query heads, and divide the KV heads or be a multiple of them."""

    expert_parallel: Annotated[int, Interval(ge=1, le=64)] = 1
    """Parts that the experts of each layer are divided into, whole ones; a divisor of `tensor_parallel` and of the
    number of experts. Each part is on `tensor_parallel` / `expert_parallel` ranks, which divide each of its experts. 1:
    all ranks divide all experts. For models with experts."""

    expert_exchange: ExpertExchange = "auto"
    """How ranks with whole experts exchange tokens. all_reduce: each rank's experts compute all tokens that chose them,
    and what all ranks have is added up. all_to_all: each rank computes the layer for its part of the step's tokens, and
    sends each to the ranks of its experts. auto: what is cheaper for each step, as measured at start. Results are the
    same. all_to_all needs `expert_parallel` to be `tensor_parallel`, above 1, and a model on the fast path."""

    spare_experts: Annotated[int, Interval(ge=0, le=64)] = 0
    """Experts of each layer that a rank has room for beside its own: copies of those that are asked most, so that no
    rank has much more to do than others. Which they are follows the load: each 32 steps, one layer's copies may move
    from rank to rank between two steps. They take memory, and need `expert_parallel` to be `tensor_parallel`, above 1,
    and a model on the fast path."""

    pipeline_parallel: Annotated[int, Interval(ge=1, le=64)] = 1
    """Stages of layers, one behind the other, each of `tensor_parallel` ranks: while one computes a chunk of a prompt,
    the stage before computes the next chunk. On CPU only. A worker of several stages can't have medusa, eagle3 or mtp,
    nor one of several ranks mtp."""

    hosts: Annotated[int, Interval(ge=1, le=64)] = 1
    """Machines over which the ranks of a worker are divided in equal parts; a divisor of their number. Each is a bundle
    of the worker's placement group on Ray, which may put several on one node. Sums between them go over the network, by
    NCCL or Gloo."""

    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Options of speculation: tokens that are guessed, and checked several in one step."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        size, tokens = self.block_size, self.max_batch_tokens
        require(size & (size - 1) == 0, "block_size", size, "auto, or a power of two from 8 to 128")
        require(self.device != "cpu" or self.kv_dtype != "fp8", "kv_dtype", self.kv_dtype, "auto, or int8 on a CPU")
        require(tokens == AUTO or tokens >= size, "max_batch_tokens", tokens, f"at least block_size ({size})")
        whole = self.tensor_parallel % self.expert_parallel == 0
        require(
            whole, "expert_parallel", self.expert_parallel, f"a divisor of tensor_parallel ({self.tensor_parallel})"
        )
        whole = self.expert_exchange != "all_to_all" or 1 < self.expert_parallel == self.tensor_parallel
        allowed = f"auto, all_reduce, because expert_parallel isn't tensor_parallel ({self.tensor_parallel}), above 1"
        require(whole, "expert_exchange", self.expert_exchange, allowed)
        whole = not self.spare_experts or 1 < self.expert_parallel == self.tensor_parallel
        allowed = f"0, because expert_parallel isn't tensor_parallel ({self.tensor_parallel}), above 1"
        require(whole, "spare_experts", self.spare_experts, allowed)
        kernel, other = self.expert_kernel, "auto, builtin"
        require(kernel != "flashinfer" or self.device != "cpu", "expert_kernel", kernel, f"{other} on a CPU")
        whole = kernel != "flashinfer" or self.quantization in ("none", "dense")
        require(whole, "expert_kernel", kernel, f"{other}, because quantization is {self.quantization!r}")
        stages = self.pipeline_parallel
        require(self.device != "cuda" or stages == 1, "pipeline_parallel", stages, "1 on a GPU")
        ranks = self.tensor_parallel * stages
        require(ranks <= MAX_RANKS, "pipeline_parallel", stages, f"up to {MAX_RANKS} ranks together")
        require(ranks % self.hosts == 0, "hosts", self.hosts, f"a divisor of the number of ranks ({ranks})")
        # Heads beside the model are rank 0's alone, and they need hidden states of all layers.
        method = self.speculation.method
        free = ", ".join(name for name in get_args(SpeculationMethod) if name not in STATE_METHODS)
        whole = stages == 1 or method not in STATE_METHODS
        require(whole, "speculation.method", method, f"{free}, for a worker of several pipeline stages")

    @property
    def degree(self) -> Degree:
        """How the model is divided over ranks."""
        return Degree(self.tensor_parallel, self.pipeline_parallel)

    def on(self, device: Device, device_bytes: int = 0) -> "EngineConfig":
        """These options on a device, with a number for each `auto` but that of `kv_memory_bytes`.

        Args:
            device: "cpu" or "cuda".
            device_bytes: memory of the GPU.

        Raises:
            ValueError: an option doesn't go with the default of another one.
        """
        defaults = GPU_DEFAULTS if device == "cuda" else CPU_DEFAULTS
        large = device == "cuda" and device_bytes >= LARGE_GPU_BYTES
        tokens = LARGE_GPU_BATCH_TOKENS if large else defaults.max_batch_tokens
        return replace(
            self,
            device=device,
            block_size=self.block_size or defaults.block_size,
            max_batch_tokens=self.max_batch_tokens or tokens,
            max_sequences=self.max_sequences or defaults.max_sequences,
            memory_share=self.memory_share or defaults.memory_share,
            memory_part=self.memory_part or 1.0,
        )
