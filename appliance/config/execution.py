"""Section `execution`: the engine's device and its switches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.base import Auto, Section, Whole

ExtraArgument = bool | int | float | str


class ExecutionSection(Section):
    """The engine's device and its switches."""

    device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto",
        description="`auto` means `cuda`. The CPU engine must be asked for and is never fallen "
        "into.",
    )
    weights: Literal["fused", "dequantized"] = Field(
        default="fused",
        description="`fused` keeps 4-bit weights and decodes inside the kernels; `dequantized` is"
        " a debug route at 2 bytes a weight.",
    )
    enforce_eager: Auto | bool = Field(
        default="auto",
        description="`true` turns CUDA graphs off. `auto` keeps them where the start-up canary "
        "passes with them.",
    )
    custom_all_reduce: Auto | bool = Field(
        default="auto",
        description="vLLM's own all-reduce, known to hang two V100s. `auto` is off; `true` is "
        "taken up only once a self-test of this machine has passed.",
    )
    chunked_prefill: bool = Field(
        default=True,
        description="Cut long prompts into steps of `memory.max_num_batched_tokens`.",
    )
    prefix_caching: bool = Field(
        default=True,
        description="Reuse the KV cache of equal prompt beginnings.",
    )
    block_size: Annotated[Literal[16, 32, 64, 128], Whole] = Field(
        default=16,
        description="Tokens of one KV-cache block.",
    )
    allow_unvalidated: bool = Field(
        default=False,
        description="Start a combination of GPU, checkpoint format and attention that was never "
        "run (docs/gpu-engine.md); the start-up canary is then forced.",
    )
    extra_args: dict[str, ExtraArgument] = Field(
        default_factory=dict,
        max_length=64,
        description="Further vLLM flags by name without the dashes. Flags that another key of "
        "this file owns, and flags this vLLM does not know, are refused.",
    )
