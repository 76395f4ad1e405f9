"""Section `memory`: what may be taken of each GPU and of the host."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.base import Auto, Section, Size
from appliance.units import GIB, MIB

TIB = 1024 * GIB
Utilization = Annotated[float, Field(ge=0.1, le=0.95)]
CacheSize = Annotated[Size, Field(ge=GIB, le=TIB)]


class MemorySection(Section):
    """What may be taken of each GPU and of the host."""

    gpu_memory_utilization: Auto | Utilization = Field(
        default="auto",
        description="Share of a GPU's whole memory the engine may hold. Above 0.95 what the "
        "driver itself needs no longer fits. Not read by the CPU engine.",
    )
    shm_size: Size = Field(
        default=16 * GIB,
        ge=64 * MIB,
        le=TIB,
        description="Ceiling of /dev/shm in the container. A limit, not a reservation: memory is "
        "taken only as it is used.",
    )
    max_num_seqs: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Sequences decoded together; further requests wait.",
    )
    max_num_batched_tokens: int = Field(
        default=2048,
        ge=64,
        le=131_072,
        description="Tokens of one engine step, prompt chunks included. Sets the peak of "
        "activations.",
    )
    kv_cache_dtype: Literal["auto"] = Field(
        default="auto",
        description="`auto` is FP16 on a GPU. Volta has no FP8, so there is no other value.",
    )
    kv_cache_size: Auto | CacheSize = Field(
        default="auto",
        description="KV cache over all ranks of the CPU engine, a whole number of GiB a rank. On "
        "a GPU it follows from the utilization.",
    )
