"""Safer settings for a start that failed: a pure function from plan and cause to the next plan.

Each cause has its own short list of steps, tried in order, each at most once. Causes that no
setting of the engine can cure (a broken checkpoint, an unknown argument, a full disk) have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.plan.launch_plan import Decision, LaunchPlan

if TYPE_CHECKING:
    from appliance.plan.adjustments import Adjustments
    from appliance.serve.diagnose import Diagnosis

SAFER_UTILIZATION = (0.90, 0.88, 0.85, 0.80)
SHORTEST_CONTEXT = 1024
FEWEST_BATCHED_TOKENS = 512
FEWEST_SEQUENCES = 2


@dataclass(frozen=True)
class Settings:
    """What a start of the engine is rendered from."""

    plan: LaunchPlan
    adjustments: Adjustments


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: `key=value` of the setting that changes.
        settings: What the next start is rendered from.
        reason: Cause that asked for it.
    """

    name: str
    settings: Settings
    reason: str


Step = Callable[[Settings, Mapping[str, str]], tuple[str, Settings] | None]


def next_rung(settings: Settings, cause: Diagnosis, taken: tuple[str, ...]) -> Rung | None:
    """Return the next safer settings for a cause, None when there are none left.

    Args:
        settings: What the failed start was rendered from.
        cause: Why it failed.
        taken: Names of the rungs tried so far; none is tried twice.
    """
    for step in _STEPS.get(cause.code, ()):
        change = step(settings, cause.facts)
        if change is not None and change[0] not in taken:
            name, changed = change
            key, _, value = name.partition("=")
            decision = Decision(key, value, f"safer start after {cause.code}: {cause.what}")
            plan = replace(changed.plan, decisions=(*changed.plan.decisions, decision))
            return Rung(name, replace(changed, plan=plan), cause.code)
    return None


def _eager(settings: Settings, _facts: Mapping[str, str]) -> tuple[str, Settings] | None:
    if settings.plan.execution.enforce_eager:
        return None
    plan = settings.plan
    execution = replace(plan.execution, enforce_eager=True)
    return "execution.enforce_eager=true", replace(
        settings, plan=replace(plan, execution=execution)
    )


def _lower_utilization(settings: Settings, facts: Mapping[str, str]) -> tuple[str, Settings] | None:
    plan = settings.plan
    if plan.execution.device != "cuda":
        return None
    bound = plan.memory.gpu_memory_utilization
    if "free_gib" in facts:
        bound = min(bound, float(facts["free_gib"]) / float(facts["total_gib"]))
    lower = next((u for u in SAFER_UTILIZATION if u < bound - 1e-6), None)
    if lower is None:
        return None
    memory = replace(plan.memory, gpu_memory_utilization=lower)
    name = f"memory.gpu_memory_utilization={lower:g}"
    return name, replace(settings, plan=replace(plan, memory=memory))


def _shorter_context(settings: Settings, facts: Mapping[str, str]) -> tuple[str, Settings] | None:
    model, block = settings.plan.model, settings.plan.execution.block_size
    wanted = model.max_model_len // 2
    if "estimated_max_model_len" in facts:
        wanted = min(int(facts["estimated_max_model_len"]), model.max_model_len - 1)
    length = wanted // block * block
    if length < min(SHORTEST_CONTEXT, model.max_model_len):
        return None
    shorter = replace(settings.plan, model=replace(model, max_model_len=length))
    return f"model.max_model_len={length}", replace(settings, plan=shorter)


def _fewer_tokens(settings: Settings, _facts: Mapping[str, str]) -> tuple[str, Settings] | None:
    memory = settings.plan.memory
    tokens = memory.max_num_batched_tokens // 2
    # Without chunked prefill a prompt must fit one step.
    least = FEWEST_BATCHED_TOKENS
    if not settings.plan.execution.chunked_prefill:
        least = max(least, settings.plan.model.max_model_len)
    if tokens < least:
        return None
    fewer = replace(settings.plan, memory=replace(memory, max_num_batched_tokens=tokens))
    return f"memory.max_num_batched_tokens={tokens}", replace(settings, plan=fewer)


def _fewer_sequences(settings: Settings, _facts: Mapping[str, str]) -> tuple[str, Settings] | None:
    memory = settings.plan.memory
    sequences = memory.max_num_seqs // 2
    if sequences < FEWEST_SEQUENCES:
        return None
    fewer = replace(settings.plan, memory=replace(memory, max_num_seqs=sequences))
    return f"memory.max_num_seqs={sequences}", replace(settings, plan=fewer)


def _no_peer_access(settings: Settings, _facts: Mapping[str, str]) -> tuple[str, Settings] | None:
    plan, adjustments = settings.plan, settings.adjustments
    if plan.parallel.ranks == 1 or plan.execution.device != "cuda":
        return None
    if adjustments.env.get("NCCL_P2P_DISABLE") == "1" and not plan.execution.custom_all_reduce:
        return None
    reasons = (*adjustments.reasons, "safer start: no peer access between the GPUs")
    env = {**adjustments.env, "NCCL_P2P_DISABLE": "1"}
    execution = replace(plan.execution, custom_all_reduce=False)
    changed = Settings(
        replace(plan, execution=execution), replace(adjustments, env=env, reasons=reasons)
    )
    return "gate.p2p.policy=off", changed


_MEMORY: tuple[Step, ...] = (
    _lower_utilization,
    _eager,
    _fewer_tokens,
    _fewer_sequences,
    _shorter_context,
)
_TALK: tuple[Step, ...] = (_no_peer_access, _eager)
_STEPS: dict[str, tuple[Step, ...]] = {
    "GRAPH_OOM": (_eager, _lower_utilization),
    "GRAPH_CAPTURE": (_eager,),
    "CUDA_OOM": _MEMORY,
    "GPU_BUSY": (_lower_utilization,),
    "NO_KV_MEMORY": (_eager, _fewer_tokens, _fewer_sequences),
    "KV_TOO_SMALL": (_shorter_context,),
    "NCCL": _TALK,
    "NCCL_SEGFAULT": _TALK,
    "STALLED_COLLECTIVE": _TALK,
    "STUCK_KERNEL": _TALK,
    "ILLEGAL_ACCESS": (_eager,),
    "ENGINE_FAILED": (_eager,),
    "WORKER_DEAD": (_eager,),
    "NUMERIC_NAN": (_eager,),
    "DEGENERATE_OUTPUT": (_eager,),
    "CANARY_FAILED": (_eager, _fewer_tokens),
    "CANARY_TIMEOUT": (_eager,),
}
