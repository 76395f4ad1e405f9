"""Section `parallel`: which GPUs are used and how the model is cut."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.base import Section, Written

GpuIndex = Annotated[int, Field(ge=0, le=63)]
GpuUuid = Annotated[
    str, Field(pattern=r"^GPU-[0-9A-Za-z-]{4,64}$"), Written("a UUID such as GPU-8c1f...")
]


class ParallelSection(Section):
    """Which GPUs are used and how the model is cut over them."""

    mode: Literal["auto", "single", "tensor", "pipeline"] = Field(
        default="auto",
        description="`single` one GPU, `tensor` every layer cut over the GPUs, `pipeline` layers "
        "dealt out to the GPUs. `auto` takes one GPU where the model fits on it.",
    )
    gpus: Literal["all"] | list[GpuIndex] | list[GpuUuid] = Field(
        default="all",
        description="`all`, a list of indexes, or a list of UUIDs. The only place where GPUs are "
        "chosen. Indexes may change over a reboot, UUIDs do not.",
    )
    cpu_ranks: int = Field(
        default=1,
        ge=1,
        le=8,
        description="Ranks of the CPU engine; more than 1 needs `execution.device: cpu`.",
    )
