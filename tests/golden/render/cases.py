"""The cases of the rendered golden files: a configuration, a plan built by hand, adjustments.

The plans are written down here and not made by the planner, so that a change of its decisions does
not change these files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import yaml

from appliance.config.schema import Config
from appliance.plan.adjustments import NO_ADJUSTMENTS, Adjustments
from appliance.plan.launch_plan import (
    Decision,
    ExecutionPlan,
    LaunchPlan,
    MemoryPlan,
    ModelPlan,
    ParallelPlan,
    RunPlan,
    ServerPlan,
)
from appliance.render.argv import vllm_argv
from appliance.render.compose import FILE_NAME, compose_override
from appliance.render.environ import environment
from appliance.render.kubernetes import kubernetes_patch
from appliance.render.text import argv_text, environment_text
from appliance.units import GIB

GPUS = (
    "GPU-11111111-1111-1111-1111-111111111111",
    "GPU-22222222-2222-2222-2222-222222222222",
)
CPUS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Case:
    """One folder of golden files."""

    text: str
    plan: LaunchPlan
    adjustments: Adjustments = NO_ADJUSTMENTS
    config: Config = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", Config.model_validate(yaml.safe_load(self.text)))


def plan_of(
    text: str,
    *,
    kind: Literal["single", "tensor", "pipeline"],
    ranks: int = 2,
    eager: bool = False,
    backend: str | None = "CUSTOM",
    decisions: Mapping[str, tuple[str, str]] | None = None,
) -> LaunchPlan:
    """Return the plan of a configuration text, every `auto` decided by hand."""
    config = Config.model_validate(yaml.safe_load(text))
    cpu = config.execution.device == "cpu"
    gpus = () if cpu else GPUS[:ranks] if config.parallel.gpus == "all" else GPUS[-ranks:]
    model, server, run = config.model, config.server, config.runtime
    length = 8192 if model.max_model_len == "auto" else model.max_model_len
    utilization = config.memory.gpu_memory_utilization
    return LaunchPlan(
        config_path="config/appliance.yaml",
        config_sha256=hashlib.sha256(text.encode()).hexdigest(),
        model=ModelPlan(
            path=model.path,
            served_name=model.served_name,
            format="nvfp4" if model.format == "auto" else model.format,
            producer="none" if model.format == "dense" else "compressed-tensors",
            quantization="none" if model.format == "dense" else "nvfp4",
            architecture="Qwen3ForCausalLM",
            max_model_len=length,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.chat_template,
            integrity=model.integrity,
            digest="",
        ),
        parallel=ParallelPlan(
            kind=kind,
            tensor_parallel=ranks if kind == "tensor" else 1,
            pipeline_parallel=ranks if kind == "pipeline" else 1,
            gpus=gpus,
            gpu_indexes=tuple(range(len(gpus))),
        ),
        memory=MemoryPlan(
            gpu_memory_utilization=0.9 if utilization == "auto" else utilization,
            shm_bytes=config.memory.shm_size,
            max_num_seqs=config.memory.max_num_seqs,
            max_num_batched_tokens=config.memory.max_num_batched_tokens,
            kv_cache_dtype=config.memory.kv_cache_dtype,
            kv_bytes_per_token=131072,
            kv_cache_bytes=2 * ranks * GIB,
            kv_capacity_tokens=16384 * ranks,
            ranks=(),
        ),
        execution=ExecutionPlan(
            device="cpu" if cpu else "cuda",
            dtype="float32" if cpu else "float16",
            weights=config.execution.weights,
            enforce_eager=eager,
            custom_all_reduce=config.execution.custom_all_reduce is True,
            chunked_prefill=config.execution.chunked_prefill,
            prefix_caching=config.execution.prefix_caching,
            block_size=config.execution.block_size,
            attention_backend=None if cpu else backend,
            extra_args=config.execution.extra_args,
        ),
        server=ServerPlan(
            host=server.host,
            port=server.port,
            admin_host=server.admin_host,
            admin_port=server.admin_port,
            api_keys_file=server.api_keys_file,
            max_request_bytes=server.limits.max_request_size,
            max_concurrent_requests=server.limits.max_concurrent_requests,
            requests_per_minute_per_key=server.limits.requests_per_minute_per_key,
            drain_timeout_s=server.drain_timeout,
        ),
        run=RunPlan(
            startup_timeout_s=config.startup.timeout,
            canary=config.startup.canary,
            ladder=config.startup.ladder,
            on_gpu_fault=run.on_gpu_fault,
            stall_s=run.stall,
            sample_interval_s=run.thermal.sample_interval,
            restart_count=run.restart_budget.count,
            restart_per_s=run.restart_budget.per,
            log_format=config.logging.format,
            log_level=config.logging.level,
        ),
        gate={},
        decisions=tuple(Decision(k, v, why) for k, (v, why) in (decisions or {}).items()),
        warnings=(),
    )


def outputs(case: Case) -> dict[str, str]:
    """Return the files of one case."""
    variables = environment(case.plan, case.adjustments, cpus=CPUS)
    return {
        "appliance.yaml": case.text,
        "argv.txt": argv_text(vllm_argv(case.plan, case.adjustments), explain=True),
        "environment.txt": environment_text(variables, explain=True),
        FILE_NAME: compose_override(case.plan, case.config),
        "kubernetes.yaml": kubernetes_patch(case.plan),
    }


DEFAULT = "version: 1\nmodel: {path: /models/quasar}\n"

PIPELINE = f"""\
version: 1
model: {{path: /models/quasar, served_name: acme/quasar-27b, max_model_len: 4096}}
parallel: {{mode: pipeline, gpus: [{GPUS[0]}, {GPUS[1]}]}}
memory: {{shm_size: 2GiB, max_num_seqs: 4, gpu_memory_utilization: 0.85}}
execution: {{enforce_eager: true, prefix_caching: false, chunked_prefill: false}}
server:
  host: 0.0.0.0
  port: 8080
  admin_host: 10.0.0.5
  api_keys_file: /run/secrets/api_keys
  drain_timeout: 2m
startup: {{timeout: 45m}}
logging: {{level: warning}}
"""

SINGLE = """\
version: 1
model: {path: /models/quasar}
parallel: {mode: single, gpus: [1]}
server: {host: "::1"}
"""

AWKWARD = """\
version: 1
model:
  path: /models/Größe mit Leer zeichen.v1
  format: dense
  trust_remote_code: true
  chat_template: /models/chat's template.jinja
execution:
  custom_all_reduce: true
  extra_args:
    max_logprobs: -1
    enable-mfu-metrics: true
    async_scheduling: false
    model-impl: vllm
"""

CPU = """\
version: 1
model: {path: /models/small}
memory: {kv_cache_size: 2GiB, max_num_seqs: 4}
execution: {device: cpu, weights: dequantized}
logging: {level: debug, format: text}
"""

CPU_TWO = """\
version: 1
model: {path: /models/small}
parallel: {mode: tensor, cpu_ranks: 2}
execution: {device: cpu}
"""

_TENSOR = plan_of(
    DEFAULT,
    kind="tensor",
    decisions={
        "model.format": ("nvfp4", "the tensors are packed E2M1 with E4M3 block scales"),
        "model.max_model_len": ("8192", "what the KV cache of both cards holds"),
        "parallel.mode": ("tensor", "17.9 GiB of weights do not fit one card"),
        "parallel.gpus": ("0, 1", "all GPUs of this machine"),
        "memory.gpu_memory_utilization": ("0.9", "0.5 GiB are left to the driver"),
        "execution.enforce_eager": ("false", "the start-up canary decides"),
        "execution.custom_all_reduce": ("false", "known to hang on sm_70"),
        "execution.attention_backend": ("CUSTOM", "the appliance's own backend on sm_70"),
    },
)

CASES: dict[str, Case] = {
    "default_tensor": Case(DEFAULT, _TENSOR),
    "default_p2p_broken": Case(
        DEFAULT,
        _TENSOR,
        Adjustments(
            env={"NCCL_P2P_DISABLE": "1", "VLLM_SKIP_P2P_CHECK": "0"},
            args=("--disable-custom-all-reduce",),
            reasons=("a copy from GPU 0 to GPU 1 did not arrive within 15 s",),
        ),
    ),
    "pipeline_remote": Case(PIPELINE, plan_of(PIPELINE, kind="pipeline", eager=True)),
    "single_by_index": Case(SINGLE, plan_of(SINGLE, kind="single", ranks=1, backend="TRITON_ATTN")),
    "awkward_words": Case(AWKWARD, plan_of(AWKWARD, kind="tensor")),
    "cpu_single": Case(CPU, plan_of(CPU, kind="single", ranks=1, eager=True)),
    "cpu_two_ranks": Case(CPU_TWO, plan_of(CPU_TWO, kind="tensor", eager=True)),
    "cpu_compiled": Case(CPU_TWO, replace(plan_of(CPU_TWO, kind="tensor"), config_sha256="0" * 64)),
}
