"""What the format of a checkpoint means for the engine: its method, and what nobody ran yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from appliance.errors import Fault

if TYPE_CHECKING:
    from appliance.checkpoint.summary import CheckpointSummary
    from appliance.config.load import LoadedConfig

_STATED = {"nvfp4": ("nvfp4", "mixed"), "fp8": ("fp8",), "dense": ("dense",)}
"""Value of `model.format` to the formats of checkpoints that it covers."""

WIDE_GROUP = 128


def format_faults(loaded: LoadedConfig, checkpoint: CheckpointSummary) -> list[Fault]:
    """Return the fault of a checkpoint of another format than `model.format` states, if any."""
    stated = loaded.config.model.format
    if stated == "auto" or checkpoint.format in _STATED[stated]:
        return []
    where, fix = loaded.where("model.format"), "set it to auto, or name another checkpoint"
    return [Fault("E_FORMAT", where, stated, checkpoint.format, fix)]


def quantization(checkpoint: CheckpointSummary, device: str) -> Literal["nvfp4", "none"]:
    """Return the engine's method: the plugin's, which has every product that sm_70 lacks.

    vLLM's own experts of 16 bits are a Triton kernel or need its CUDA extension.
    """
    if checkpoint.format != "dense":
        return "nvfp4"
    return "nvfp4" if device != "cpu" and checkpoint.geometry.num_experts else "none"


def weights_reason(checkpoint: CheckpointSummary, device: str) -> str | None:
    """Return what becomes of weights that are not held as they are stored; None if there are none.

    `execution.weights` is about NVFP4 alone.
    """
    reasons: list[str] = []
    if device == "cpu":
        reasons.append("the CPU engine decodes packed weights once, after loading")
    if checkpoint.format in ("fp8", "mixed"):
        kind, size = ("FP32", 4) if device == "cpu" else ("FP16", 2)
        reasons.append(f"FP8 is decoded to {kind} while loading, {size} bytes a weight")
    return "; ".join(reasons) or None


def unproved_formats(checkpoint: CheckpointSummary, device: str) -> list[str]:
    """Return a sentence for each way of computing that ran on the CPU only so far."""
    if device == "cpu":
        return []
    found: list[str] = []
    if checkpoint.geometry.num_experts and checkpoint.format in ("fp8", "dense"):
        found.append("experts of 8 or 16 bits on a GPU ran on the CPU only so far, in torch")
    if checkpoint.group_size == WIDE_GROUP:
        what = "the engine with groups of 128 ran on the CPU only so far, by the same C interface"
        found.append(f"{what}; the kernels alone ran on a modelled V100")
    return found
