"""LaunchPlan to the engine's environment; what is inherited and would steer it is dropped."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.plan.adjustments import NO_ADJUSTMENTS, Adjustments
from appliance.render.origin import Origins
from appliance.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from appliance.plan.launch_plan import LaunchPlan

DROPPED_PREFIXES = (
    "CUDA_",
    "GLOO_",
    "HF_",
    "HUGGINGFACE_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTHON",
    "PYTORCH_",
    "RAY_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "VLLM_",
)
"""Inherited variables that would change what the engine does; the file is the only source."""

KEPT = frozenset(
    {
        "CUDA_CACHE_PATH",
        "HF_HOME",
        "PYTHONHASHSEED",
        "PYTHONPYCACHEPREFIX",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "VLLM_CACHE_ROOT",
    }
)
"""Places of caches, which the image chooses, and the two that do not steer the engine."""


LOOK_LIKE_SETTINGS = frozenset(
    {
        "DTYPE",
        "GPU_MEMORY_UTILIZATION",
        "MAX_MODEL_LEN",
        "MODEL",
        "MODEL_ID",
        "MODEL_NAME",
        "MODEL_PATH",
        "PIPELINE_PARALLEL_SIZE",
        "PP",
        "QUANTIZATION",
        "SERVED_MODEL_NAME",
        "TENSOR_PARALLEL_SIZE",
        "TP",
    }
)
"""What other images take their settings from; here they say nothing, which deserves a word."""


@dataclass(frozen=True)
class Variable:
    """One variable of the engine's environment.

    Attributes:
        name: Its name.
        value: Its value.
        origin: `config KEY`, `plan KEY: reason`, `policy: reason` or `gate: measurement`.
    """

    name: str
    value: str
    origin: str


def environment(
    plan: LaunchPlan,
    adjustments: Adjustments = NO_ADJUSTMENTS,
    *,
    cpus: Sequence[int] | None = None,
) -> tuple[Variable, ...]:
    """Return the variables of the engine, in a stable order.

    Args:
        plan: What to launch.
        adjustments: What the gate measured; its value of a variable wins.
        cpus: Cores that the ranks of the CPU engine share, by default those of this process.
    """
    origins = Origins(plan)
    if plan.execution.device == "cuda":
        device = _cuda(plan, origins)
    else:
        device = _cpu(plan, origins, sorted(os.sched_getaffinity(0)) if cpus is None else cpus)
    variables = {v.name: v for v in (*_common(plan, origins), *device)}
    origin = origins.gate(adjustments)
    for name, value in adjustments.env.items():
        variables[name] = Variable(name, value, origin)
    return tuple(variables.values())


def is_dropped(name: str) -> bool:
    """Tell whether an inherited variable of this name is kept from the engine."""
    return name.startswith(DROPPED_PREFIXES) and name not in KEPT


def ignored_settings(inherited: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of inherited variables that look like settings and are none."""
    return tuple(sorted(LOOK_LIKE_SETTINGS & inherited.keys()))


def child_environment(
    variables: Sequence[Variable], inherited: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the engine's whole environment and the names that were dropped from the inherited one.

    Args:
        variables: What `environment` returned.
        inherited: Environment of this process.
    """
    rendered = {variable.name: variable.value for variable in variables}
    kept = {name: value for name, value in inherited.items() if not is_dropped(name)}
    dropped = (name for name in inherited if is_dropped(name) and name not in rendered)
    return {**kept, **rendered}, tuple(sorted(dropped))


def _common(plan: LaunchPlan, origins: Origins) -> Iterator[Variable]:
    offline = origins.policy("nothing is downloaded")
    private = origins.policy("no telemetry")
    one_machine = origins.policy("ranks meet on this machine's loopback")
    level = origins.key("logging.level")
    stderr = origins.policy("stdout carries results only")
    yield Variable("HF_HUB_OFFLINE", "1", offline)
    yield Variable("TRANSFORMERS_OFFLINE", "1", offline)
    yield Variable("HF_HUB_DISABLE_TELEMETRY", "1", private)
    yield Variable("VLLM_NO_USAGE_STATS", "1", private)
    yield Variable("VLLM_DO_NOT_TRACK", "1", private)
    yield Variable("DO_NOT_TRACK", "1", private)
    yield Variable("VLLM_PLUGINS", "nvfp4", origins.policy("only the appliance's own plugin"))
    timeout = str(math.ceil(plan.run.startup_timeout_s))
    yield Variable("VLLM_ENGINE_READY_TIMEOUT_S", timeout, origins.key("startup.timeout"))
    yield Variable("VLLM_LOGGING_LEVEL", plan.run.log_level.upper(), level)
    yield Variable("VLLM_LOGGING_STREAM", "ext://sys.stderr", stderr)
    yield Variable("VLLM_LOGGING_COLOR", "0", origins.policy("the log is read by machines"))
    yield Variable("VLLM_HOST_IP", "127.0.0.1", one_machine)
    yield Variable("GLOO_SOCKET_IFNAME", "lo", one_machine)
    yield Variable("PYTHONSAFEPATH", "1", origins.policy("no import from the working directory"))
    yield Variable("PYTHONUNBUFFERED", "1", origins.policy("the last line of a crash is not lost"))
    if plan.execution.enforce_eager or plan.execution.device == "cuda":
        no_compiler = origins.policy("torch.compile is off: nothing is compiled while serving")
        yield Variable("TORCHDYNAMO_DISABLE", "1", no_compiler)


def _cuda(plan: LaunchPlan, origins: Origins) -> Iterator[Variable]:
    bus_order = origins.policy("GPUs are counted as NVML counts them")
    yield Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", bus_order)
    gpus = ",".join(plan.parallel.gpus)
    yield Variable("CUDA_VISIBLE_DEVICES", gpus, origins.key("parallel.gpus"))
    fresh = origins.policy("a CUDA context does not survive a fork")
    yield Variable("VLLM_WORKER_MULTIPROC_METHOD", "spawn", fresh)
    no_extension = origins.policy("the other runner needs vLLM's own CUDA extension")
    yield Variable("VLLM_USE_V2_MODEL_RUNNER", "0", no_extension)
    torch_samples = origins.policy("flashinfer has no kernels for sm_70 and is not installed")
    yield Variable("VLLM_USE_FLASHINFER_SAMPLER", "0", torch_samples)
    if plan.execution.custom_all_reduce:
        tested = origins.policy("custom all-reduce only after a copy that was compared")
        yield Variable("VLLM_SKIP_P2P_CHECK", "0", tested)


def _cpu(plan: LaunchPlan, origins: Origins, cpus: Sequence[int]) -> Iterator[Variable]:
    ranks = plan.parallel.ranks
    whole = max(1, plan.memory.kv_cache_bytes // ranks // GIB)
    yield Variable("VLLM_CPU_KVCACHE_SPACE", str(whole), origins.key("memory.kv_cache_size"))
    if ranks > 1:
        shared = origins.policy("ranks share the allowed cores out")
        yield Variable("VLLM_CPU_OMP_THREADS_BIND", _split(cpus, ranks), shared)


def _split(cpus: Sequence[int], ranks: int) -> str:
    """Deal cores out in runs, `0,1|2,3`; with fewer cores than ranks some serve two."""
    share = len(cpus) // ranks
    if share == 0:
        return "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks))
    runs = [cpus[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return "|".join(",".join(map(str, run)) for run in runs)
