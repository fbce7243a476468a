"""The tensors in the safetensors or GGUF files of a Hugging Face folder, without reading the weights. No torch."""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.models.reading.fields import Fields, read_json
from kvrelay.engine.models.reading.hashes import State, hash_bytes, hash_range, recall, remember, state_of
from kvrelay.engine.models.reading.stored import HEAD, StoredTensor, joined_tensors
from kvrelay.machine import gguf

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
SIZES = {**FLOATS, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
"""Size in bytes of the types of numbers that can be read."""
EMBEDDING = "model.embed_tokens"
Expected = tuple[int, ...] | StoredTensor
"""Expected form of a tensor: its shape if it has floats, or a `StoredTensor` if its layer is quantized."""
PICKLED = (".bin", ".pt", ".pth")
"""Ends of the names of pickled weights."""
MAX_HEADER_BYTES = 100 * 2**20
MAX_DIMENSIONS = 8
# Written by old exporters; their values follow from the config.
HARMLESS = (".rotary_emb.inv_freq", ".attention.masked_bias")
SHOWN = 4


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file."""

    path: Path
    dtype: str
    """Dtype as safetensors names it, e.g. `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """Offset in bytes of the tensor's data from the start of the file."""
    end: int
    interleaved_heads: int = 0
    """Number of heads whose rows take turns between their two halves, as GGUF has queries and keys; 0 if none do."""


class Checkpoint:
    """The tensors of one folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers of the folder's safetensors files, or the index of its GGUF files.

        Raises:
            ValueError: neither, pickled files only, or a broken one; the text names the file.
        """
        self.folder = folder
        self.tensors: dict[str, TensorEntry] = {}
        self._hashes: dict[str, str] = {}
        self._unkept: dict[Path, State] = {}
        """States of files whose hashes aren't kept yet, from before their tensors were read."""
        placed = _placed(folder)
        for path in placed or _files(folder):
            state, kept = state_of(path), recall(path)
            entries = placed[path] if path in placed else _read_header(path)
            for name, entry in entries.items():
                if name in self.tensors:
                    raise ValueError(f"{path}: tensor {name} is in {self.tensors[name].path.name} too")
                self.tensors[name] = entry
            if kept.keys() == entries.keys():
                self._hashes.update(kept)
            else:
                self._unkept[path] = state
        self._check_index()

    def verify(self, expected: Mapping[str, Expected], optional: frozenset[str] = frozenset()) -> None:
        """Checks that the files hold the `expected` tensors, given by shape, and besides them only `optional` ones.

        Raises:
            ValueError: they don't; the text names the tensor, the shape found and the shape expected.
        """
        for name, stored in expected.items():
            if not isinstance(stored, StoredTensor):
                stored = StoredTensor(tuple(FLOATS), (stored,))
            entry, shapes = self.tensors.get(name), " or ".join(str(list(shape)) for shape in stored.shapes)
            if entry is None:
                if stored.optional:
                    continue
                raise ValueError(f"{self.folder}: tensor {name} {shapes} is missing")
            if entry.shape not in stored.shapes:
                raise ValueError(f"{entry.path}: tensor {name} has shape {list(entry.shape)}; expected: {shapes}")
            if entry.dtype not in stored.dtypes:
                allowed = ", ".join(stored.dtypes)
                raise ValueError(f"{entry.path}: tensor {name} has dtype {entry.dtype}; allowed: {allowed}")
        extra = [name for name in self.tensors if name not in expected and name not in optional]
        extra = sorted(name for name in extra if not name.endswith(HARMLESS))
        if extra:
            names = ", ".join(extra[:SHOWN]) + (f" and {len(extra) - SHOWN} more" if len(extra) > SHOWN else "")
            raise ValueError(f"{self.folder}: tensors that this architecture doesn't have: {names}")

    def block_of(self, layer: str) -> int:
        """Number of inputs in a block of GGUF's types, the largest of those that a kind of layer has, such as
        `self_attn.o_proj`; 1 if it has none of them."""
        kinds = {entry.dtype for name, entry in self.tensors.items() if name.endswith(f".{layer}.weight")}
        return max([gguf.QUANTIZED[kind].weights for kind in kinds & gguf.QUANTIZED.keys()], default=1)

    def note(self, name: str, data: memoryview) -> None:
        """Takes the bytes of a tensor, all of them, so that `fingerprint` needn't read them."""
        if name not in self._hashes:
            self._hashes[name] = hash_bytes(data)

    def hash_of(self, name: str) -> str:
        """The hash of all bytes of a tensor, which is read unless its hash is known.

        Raises:
            ValueError: the file is cut short.
            OSError: it is gone.
        """
        if name not in self._hashes:
            entry = self.tensors[name]
            self._hashes[name] = hash_range(entry.path, entry.begin, entry.end)
        return self._hashes[name]

    def learn(self, name: str, value: str) -> None:
        """Takes the hash of a tensor that another rank has read."""
        self._hashes.setdefault(name, value)

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over config.json and every tensor's name, dtype, shape and hash of all bytes.

        Reads the tensors whose hashes are neither kept from an earlier start nor noted as they were loaded.

        Raises:
            ValueError: a file is cut short.
            OSError: a file is gone.
        """
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for name, entry in sorted(self.tensors.items()):
            digest.update(json.dumps([name, entry.dtype, entry.shape, self.hash_of(name)]).encode())
        for path, state in self._unkept.items():
            remember(path, state, {name: self._hashes[name] for name, e in self.tensors.items() if e.path == path})
        self._unkept.clear()
        return digest.hexdigest()

    def _check_index(self) -> None:
        index = self.folder / INDEX
        if not index.exists():
            return
        for name, file in read_json(index)["weight_map"].items():
            if name not in self.tensors or self.tensors[name].path.name != file:
                raise ValueError(f"{self.folder / file}: tensor {name} is missing, though {INDEX} says it is there")


class Projection(NamedTuple):
    """A linear layer that is computed as one, of one or several in the checkpoint."""

    outputs: Mapping[str, int]
    """Number of outputs of each part, by its name within the decoder layer, in the order of the joined outputs."""
    inputs: int
    bias: bool


def projections(config: ModelConfig, layer: int = 0) -> dict[str, Projection]:
    """Projections of a decoder layer: `qkv`, `output`, `gate_up` and `down`. In a layer with experts, the last two are
    those of all experts, one below the other, and there are `router`, and `shared_gate_up` and `shared_down` if an MLP
    computes all rows too.
    """
    hidden, inner, traits = config.hidden_size, config.intermediate_size, config.traits
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    if "qkv" in traits.joined:
        qkv = {"self_attn.qkv_proj": queries + 2 * keys}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    if "gate_up" in traits.joined:
        gate_up = {"mlp.gate_up_proj": 2 * inner}
    if not traits.gated:
        gate_up = {"mlp.c_fc": inner}
    attention = {
        "qkv": Projection(qkv, hidden, traits.qkv_bias),
        "output": Projection({"self_attn.o_proj": hidden}, queries, traits.output_bias),
    }
    experts = traits.experts
    if experts is not None and experts.in_layer(layer):
        width, shared = experts.width, experts.shared
        if experts.joined:
            count, name = experts.routing.experts, experts.joined
            return attention | {
                "router": Projection({experts.router: count}, hidden, True),
                "gate_up": Projection({f"{name}.gate_up_proj": count * 2 * width}, hidden, True),
                "down": Projection({f"{name}.down_proj": count * hidden}, width, True),
            }
        found = {
            "router": Projection({experts.router: experts.routing.experts}, hidden, False),
            "gate_up": Projection(dict.fromkeys(experts.names(experts.gate, experts.up), width), hidden, False),
            "down": Projection(dict.fromkeys(experts.names(experts.down), hidden), width, False),
        }
        if shared:
            name = f"{experts.module}.shared_experts"
            both = {f"{name}.gate_proj": shared, f"{name}.up_proj": shared}
            found["shared_gate_up"] = Projection(both, hidden, False)
            found["shared_down"] = Projection({f"{name}.down_proj": hidden}, shared, False)
        return attention | found
    return attention | {
        "gate_up": Projection(gate_up, hidden, traits.mlp_bias),
        "down": Projection({"mlp.down_proj" if traits.gated else "mlp.c_proj": hidden}, inner, traits.mlp_bias),
    }


def expected_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Every tensor of such a model by name; weights are [out, in].

    Raises:
        ValueError: a layer's shape doesn't go with how it is quantized.
    """
    hidden, traits, experts = config.hidden_size, config.traits, config.traits.experts
    shapes: dict[str, Expected] = {}

    def linear(name: str, out: int, inputs: int, bias: bool) -> None:
        if config.stored is not None and config.stored.covers(name):
            shapes.update({f"{name}.{end}": stored for end, stored in config.stored.tensors(out, inputs).items()})
        else:
            shapes[f"{name}.weight"] = (out, inputs)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (hidden,)
        if traits.norm_bias:
            shapes[f"{name}.bias"] = (hidden,)

    if config.is_gguf:
        linear(EMBEDDING, config.vocab_size, hidden, bias=False)
    else:
        shapes[f"{EMBEDDING}.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        base = f"model.layers.{layer}"
        for part, projection in projections(config, layer).items():
            for name, outputs in projection.outputs.items():
                if experts is not None and experts.joins(part, layer):
                    count = experts.routing.experts
                    shapes |= joined_tensors(
                        config.stored, f"{base}.{name}", (count, outputs // count, projection.inputs)
                    )
                    continue
                linear(f"{base}.{name}", outputs, projection.inputs, projection.bias)
        for name in filter(None, traits.norms):
            norm(f"{base}.{name}")
        if experts is not None and experts.bias and experts.in_layer(layer):
            shapes[f"{base}.{experts.bias}"] = (experts.routing.experts,)
        if traits.sinks:
            shapes[f"{base}.self_attn.sinks"] = (config.heads,)
        if traits.qk_norm or traits.joint_qk_norm:
            counts = (1, 1) if traits.qk_norm else (config.heads, config.kv_heads)
            for name, count in zip("qk", counts, strict=True):
                shapes[f"{base}.self_attn.{name}_norm.weight"] = (count * config.head_dim,)
    norm("model.norm")
    if not config.tie_embeddings:
        linear(HEAD, config.vocab_size, hidden, bias=False)
    return shapes


def optional_tensors(checkpoint: Checkpoint, config: ModelConfig) -> frozenset[str]:
    """Tensors that a checkpoint of such a model may have besides the expected ones: a head that is the embedding, and,
    of models with experts, layers behind the last one, which predict further tokens."""
    found = {f"{HEAD}.weight"} if config.tie_embeddings else set()
    if config.traits.experts is not None:
        layers = [name.split(".") for name in checkpoint.tensors if name.startswith("model.layers.")]
        found.update(".".join(parts) for parts in layers if parts[2].isdigit() and int(parts[2]) >= config.layers)
    return frozenset(found)


def _placed(folder: Path) -> dict[Path, dict[str, TensorEntry]]:
    """The tensors of each GGUF file, by the folder's index of them; empty if it has none."""
    index = folder / gguf.INDEX
    if not index.exists():
        return {}
    found: dict[Path, dict[str, TensorEntry]] = {}
    for name, place in read_json(index)["tensors"].items():
        path = Path(place["path"])
        shape = tuple(place["shape"])
        entry = TensorEntry(path, place["dtype"], shape, place["begin"], place["end"], place["interleaved_heads"])
        found.setdefault(path, {})[name] = entry
    for path, entries in found.items():
        if not path.is_file():
            raise ValueError(f"{path}: no such file, though {index} names it")
        size, end = path.stat().st_size, max(entry.end for entry in entries.values())
        if end > size:
            raise ValueError(f"{path}: cut short: {size} bytes; its tensors end at {end}")
    return found


def _files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint."""
    index = folder / INDEX
    if index.exists():
        shards = Fields(INDEX, read_json(index)).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{index}: weight_map is {shards!r}; allowed: an object from tensor to file")
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{index}: weight_map names {name!r}; allowed: files in the same folder")
            if not (folder / name).is_file():
                raise ValueError(f"{folder / name}: no such file, though {INDEX} names it")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    refuse_pickled(folder, f"{SINGLE}, or shards with {INDEX}")
    raise ValueError(f"{folder}: has neither {SINGLE} nor {INDEX}")


def refuse_pickled(folder: Path, allowed: str) -> None:
    """Raises ValueError, naming the file, if the folder has pickled weights.

    Args:
        allowed: the files that are read.
    """
    for suffix in PICKLED:
        for path in sorted(folder.glob(f"*{suffix}")):
            raise ValueError(
                f"{path}: a pickled checkpoint, which can run code when read; allowed: {allowed}. Convert it: "
                f"safetensors.torch.save_file(torch.load(FILE, weights_only=True), NAME)"
            )


def _read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file: 8 bytes of header length, the header as JSON, then the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: not a safetensors file: {size} bytes, header of {length}")
        try:
            header = json.loads(file.read(length))
            start = 8 + length
            entries = {name: _entry(path, start, fields) for name, fields in header.items() if name != "__metadata__"}
            _check_gapless(entries.values(), start)
            return entries
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not a safetensors file, or cut short: {error}") from error


def _check_gapless(entries: Iterable[TensorEntry], start: int) -> None:
    """Raises ValueError unless each tensor begins where another ends, the first of them at `start`."""
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != start:
            raise ValueError(f"a tensor's bytes begin at {entry.begin}; those before it end at {start}")
        start = entry.end


def _entry(path: Path, start: int, fields: Mapping[str, Any]) -> TensorEntry:
    (begin, end), shape = fields["data_offsets"], tuple(fields["shape"])
    # Products of many large numbers would take hours.
    if len(shape) > MAX_DIMENSIONS or not all(type(each) is int and 0 <= each < 2**63 for each in (*shape, begin, end)):
        raise ValueError(f"a shape or an offset isn't of up to {MAX_DIMENSIONS} integers from 0 to 2**63 - 1")
    entry = TensorEntry(path, str(fields["dtype"]), shape, start + begin, start + end)
    if not start <= entry.begin <= entry.end <= path.stat().st_size:
        raise ValueError(f"a tensor's bytes end at {entry.end}, the file at {path.stat().st_size}")
    if entry.dtype in SIZES and entry.end - entry.begin != math.prod(entry.shape) * SIZES[entry.dtype]:
        raise ValueError(f"{entry.end - entry.begin} bytes for {entry.dtype} {list(entry.shape)}")
    return entry
