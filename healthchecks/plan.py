"""What the checks need to know of the launch plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from healthchecks.policy import Policy, policy_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["single", "pp2", "tp2"]
KINDS: Mapping[str, Kind] = {"single": "single", "pipeline": "pp2", "tensor": "tp2"}


@dataclass(frozen=True)
class GatePlan:
    """The parts of a launch plan that a judgement depends on.

    Attributes:
        kind: `single`, `tp2` for every tensor-parallel plan, `pp2` for every pipeline.
        uuids: GPUs of the plan in rank order, empty on the CPU engine.
        policy: Thresholds.
        config_sha256: Hash of the configuration file.
        uses_gpu: False on the CPU engine.
        utilization: Share of each GPU's memory that the engine may hold, None when no plan says so.
        shm_bytes: Shared memory that the container should have, None when no plan says so.
        custom_all_reduce: Whether vLLM's own all-reduce was asked for.
        model_path: Folder of the checkpoint, empty when no plan says so.
        driver_min: Oldest driver that the engine's own CUDA libraries accept, None when no engine
            is named.
    """

    kind: Kind
    uuids: tuple[str, ...]
    policy: Policy
    config_sha256: str = ""
    uses_gpu: bool = True
    utilization: float | None = None
    shm_bytes: int | None = None
    custom_all_reduce: bool = False
    model_path: str = ""
    driver_min: tuple[int, ...] | None = None


class PlanError(ValueError):
    """The file is no launch plan."""


def plan_of(plain: Mapping[str, Any]) -> GatePlan:
    """Read a launch plan in its JSON form.

    Raises:
        PlanError: If a part that the checks need is absent.
        PolicyError: If the section `gate` is not whole.
    """
    try:
        parallel, memory, execution = plain["parallel"], plain["memory"], plain["execution"]
        uses_gpu = execution["device"] == "cuda"
        return GatePlan(
            kind=KINDS[parallel["kind"]],
            uuids=tuple(cast("Sequence[str]", parallel["gpus"])) if uses_gpu else (),
            policy=policy_of(plain["gate"]),
            config_sha256=str(plain["config_sha256"]),
            uses_gpu=uses_gpu,
            utilization=float(memory["gpu_memory_utilization"]),
            shm_bytes=int(memory["shm_bytes"]),
            custom_all_reduce=bool(execution["custom_all_reduce"]),
            model_path=str(plain["model"]["path"]),
        )
    except (KeyError, TypeError) as error:
        raise PlanError(f"not a launch plan: {error}") from error
