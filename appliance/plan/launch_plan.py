"""The plan: the only thing that crosses from control to run time."""

from __future__ import annotations

import json
from collections.abc import Mapping  # noqa: TC003 - `from_json` reads the annotations
from dataclasses import asdict, dataclass
from typing import Any, Literal

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.decode import DecodeError, decode

PLAN_VERSION: Literal[1] = 1
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - bound only where a container's engine decides who gets in

Device = Literal["cuda", "cpu"]
ParallelKind = Literal["single", "tensor", "pipeline"]
Scalar = bool | int | float | str


@dataclass(frozen=True)
class Decision:
    """What one `auto` of the configuration became, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True)
class Alternative:
    """Another way to cut the model over the same devices.

    Attributes:
        split: `single`, `tensor=2`, `pipeline=2`.
        max_model_len: Longest sequence it serves in tokens, 0 if it does not fit.
        kv_capacity_tokens: Tokens of all sequences together, 0 if it does not fit.
        missing_bytes: What the tightest device lacks, 0 if it fits.
    """

    split: str
    max_model_len: int
    kv_capacity_tokens: int
    missing_bytes: int


@dataclass(frozen=True)
class Item:
    """One share of a card's memory: bytes, their formula, and where the rule comes from."""

    name: str
    bytes: int
    formula: str
    source: str


@dataclass(frozen=True)
class RankBudget:
    """Memory of one rank.

    Attributes:
        rank: Index of the rank.
        device: UUID of its GPU, or `cpu`.
        total_bytes: Memory of the device.
        usable_bytes: What the engine may hold: utilization times total.
        items: Shares, weights first; the KV cache is what remains.
        layers: First and last-plus-one layer on this rank.
    """

    rank: int
    device: str
    total_bytes: int
    usable_bytes: int
    items: tuple[Item, ...]
    layers: tuple[int, int]

    def bytes_of(self, name: str) -> int:
        """Return the bytes of one share, 0 if the rank has none of that name."""
        return sum(item.bytes for item in self.items if item.name == name)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters of the loaded model on this rank."""
        return sum(item.bytes for item in self.items if item.name.startswith("weights."))

    @property
    def used_bytes(self) -> int:
        """Bytes of all shares."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True)
class ModelPlan:
    """Which checkpoint is served.

    Attributes:
        path: Directory, as the process that serves it sees it.
        served_name: Name clients put in a request.
        format: `nvfp4`, `fp8`, `mixed` or `dense`.
        producer: Who wrote the checkpoint.
        quantization: Method that the engine is told.
        architecture: First entry of `architectures`.
        max_model_len: Longest prompt plus answer in tokens.
        trust_remote_code: Run Python code that ships inside the checkpoint.
        chat_template: Path of a template that replaces the checkpoint's own.
        integrity: How files are checked before loading.
        digest: SHA-256 over configuration, headers and sizes of the checkpoint.
        text_only: Towers for images and sound exist and are left out.
        recurrent: The model keeps a recurrent state, to be held in FP32.
        has_chat_template: Chat is served; a template is in the checkpoint, or configured.
        lenient: What the engine does with modules that are excluded and packed all the same.
    """

    path: str
    served_name: str
    format: str
    producer: str
    quantization: Literal["nvfp4", "none"]
    architecture: str
    max_model_len: int
    trust_remote_code: bool
    chat_template: str | None
    integrity: str
    digest: str
    text_only: bool = False
    recurrent: bool = False
    has_chat_template: bool = True
    lenient: Literal["none", "tensors-win"] = "none"


@dataclass(frozen=True)
class ParallelPlan:
    """How the model is cut, and on which devices."""

    kind: ParallelKind
    tensor_parallel: int
    pipeline_parallel: int
    gpus: tuple[str, ...]
    gpu_indexes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Processes that hold a part of the model."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class MemoryPlan:
    """What is taken of each device and of the host.

    Attributes:
        gpu_memory_utilization: Share of a GPU that the engine may hold; 0 on the CPU engine.
        shm_bytes: Ceiling of /dev/shm in the container.
        max_num_seqs: Sequences decoded together.
        max_num_batched_tokens: Tokens of one engine step.
        kv_cache_dtype: `auto`, the compute type.
        kv_bytes_per_token: KV cache of one token over all ranks, in bytes.
        kv_cache_bytes: Cache of all ranks together, recurrent state included. On the CPU engine a
            whole number of GiB for each rank.
        kv_capacity_tokens: Tokens of all sequences together, as the engine reports them.
        ranks: Budget of each rank.
        kv_block_tokens: Tokens of one block of an attention layer, as the engine will lay it out.
    """

    gpu_memory_utilization: float
    shm_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    kv_cache_bytes: int
    kv_capacity_tokens: int
    ranks: tuple[RankBudget, ...]
    kv_block_tokens: int = 16


@dataclass(frozen=True)
class ExecutionPlan:
    """The engine's device and its switches."""

    device: Device
    dtype: Literal["float16", "float32"]
    weights: Literal["fused", "dequantized"]
    enforce_eager: bool
    custom_all_reduce: bool
    chunked_prefill: bool
    prefix_caching: bool
    block_size: int
    attention_backend: str | None
    extra_args: Mapping[str, Scalar]


@dataclass(frozen=True)
class ServerPlan:
    """Where it listens and how it stops; times in seconds.

    Attributes:
        host: Address under which clients reach the API.
        admin_host: Address under which probes and operators reach the admin port.
        published: Both ports are published on those addresses by the container's engine, so that
            inside the container the listeners take every address.
    """

    host: str
    port: int
    admin_host: str
    admin_port: int
    api_keys_file: str | None
    max_request_bytes: int
    max_concurrent_requests: int
    requests_per_minute_per_key: int
    drain_timeout_s: float
    published: bool = False

    @property
    def listen_host(self) -> str:
        """Address that the API's listener binds."""
        return EVERY_ADDRESS if self.published else self.host

    @property
    def listen_admin_host(self) -> str:
        """Address that the admin listener binds."""
        return EVERY_ADDRESS if self.published else self.admin_host


@dataclass(frozen=True)
class RunPlan:
    """How the engine is brought up and watched; times in seconds.

    Attributes:
        leave_gpu_c: Degrees Celsius at which a warm GPU counts as cool again.
        leave_hbm_margin_c: The same for its memory, as a distance to the memory's limit.
        min_decode_rate: Tokens a second of the canary below which it is reported, None for never.
    """

    startup_timeout_s: float
    canary: bool
    ladder: bool
    on_gpu_fault: Literal["drain_exit", "exit", "report"]
    stall_s: float
    sample_interval_s: float
    restart_count: int
    restart_per_s: float
    log_format: Literal["json", "text"]
    log_level: str
    leave_gpu_c: int = 80
    leave_hbm_margin_c: int = 10
    min_decode_rate: float | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """Everything the gate, the renderer and the supervisor need; written once, never edited.

    `gate` holds the section `gate` of the configuration as plain values (sizes in bytes, times in
    seconds), so that `healthchecks` can read it without the schema.
    """

    config_path: str
    config_sha256: str
    model: ModelPlan
    parallel: ParallelPlan
    memory: MemoryPlan
    execution: ExecutionPlan
    server: ServerPlan
    run: RunPlan
    gate: Mapping[str, Any]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()
    plan_version: Literal[1] = PLAN_VERSION

    def to_json(self) -> str:
        """Return the plan as JSON text with a stable key order."""
        return json.dumps(asdict(self), indent=2, sort_keys=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """Return the plan of a JSON text that `to_json` wrote.

        Raises:
            ApplianceError: Exit 10 if the text is not JSON, of another version, has a missing or
                unknown key, or a value of another type.
        """
        try:
            plan: LaunchPlan = decode(cls, json.loads(text))
        except DecodeError as error:
            raise _invalid(f"plan {error.where}", error.what, error.value) from None
        except (ValueError, RecursionError) as error:
            raise _invalid("plan", "JSON text", str(error)[:120]) from None
        return plan


def _invalid(where: str, what: str, value: str) -> ApplianceError:
    fix = "write the plan again with `appliance plan --output`"
    return ApplianceError(ExitCode.CONFIG, Fault("PLAN_INVALID", where, what, value, fix))
