"""Which attention kernels an engine on GPUs gets, by head size, query heads a KV head and cache.

The library's kernels take any number of query heads for a KV head and a cache in FP16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from appliance.checkpoint.summary import Geometry

OURS, UPSTREAM = "CUSTOM", "TRITON_ATTN"
"""vLLM's names: the place that its registry keeps for a plugin's backend, and its own in Triton."""

HEAD_SIZES = (64, 128, 256)
"""Sizes of a head that the library's attention is compiled for."""

CACHE = "float16"
"""Type of the KV cache: Volta has no FP8, in no kernel."""

RECURRENT_SIZES = (64, 128)
"""Elements of a key or value head that the library's gated delta rule is compiled for."""

CONV_WIDTHS = (2, 3, 4)
"""Inputs that the library's causal convolution sums."""

LEAST_HEAD_SIZE = 32
"""Smallest head of vLLM's own."""

REASONS = {
    OURS: "the appliance's own kernels for sm_70",
    UPSTREAM: "vLLM's own in Triton, without tensor cores on sm_70: the appliance's kernels have "
    f"heads of {', '.join(map(str, HEAD_SIZES))} only",
}


def attention_backend(geometry: Geometry) -> str:
    """Return the backend's name for the heads of a model.

    Raises:
        ApplianceError: NO_KERNEL (exit 30) if no backend has such heads, or the library no such
            recurrent layers.
    """
    size, heads, groups = geometry.head_dim, geometry.num_heads, geometry.num_kv_heads
    if heads % groups:
        what = "a whole number of query heads for a KV head"
        raise _no_kernel("num_key_value_heads", what, f"d={size} gs={heads}/{groups} kv={CACHE}")
    if geometry.recurrent_layers:
        _check_recurrent(geometry)
    if size in HEAD_SIZES:
        return OURS
    if size >= LEAST_HEAD_SIZE:
        return UPSTREAM
    what = f"a head needs at least {LEAST_HEAD_SIZE} elements"
    raise _no_kernel("head_dim", what, f"d={size} gs={heads // groups} kv={CACHE}")


def _check_recurrent(geometry: Geometry) -> None:
    key, value, width = geometry.recurrent_sizes
    if not {key, value} <= set(RECURRENT_SIZES):
        sizes = " or ".join(map(str, RECURRENT_SIZES))
        what = f"heads of {sizes} elements in recurrent layers"
        raise _no_kernel("linear_key_head_dim", what, f"k={key} v={value}")
    if width not in CONV_WIDTHS:
        what = f"a convolution of {CONV_WIDTHS[0]} to {CONV_WIDTHS[-1]} inputs"
        raise _no_kernel("linear_conv_kernel_dim", what, str(width))


def _no_kernel(where: str, what: str, value: str) -> ApplianceError:
    fix = "serve another model, or set execution.device: cpu"
    fault = Fault("NO_KERNEL", where, what, value, fix)
    return ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)


def unproved(recurrent_layers: int, device: str) -> list[str]:
    """Return a sentence for layers of an engine on GPUs that no GPU has run, none otherwise."""
    if not recurrent_layers or device == "cpu":
        return []
    sentence = (
        f"{recurrent_layers} recurrent layers run on the appliance's own kernels, which ran on a "
        "modelled V100; the engine was run with them on the CPU, and on no GPU"
    )
    return [sentence]
