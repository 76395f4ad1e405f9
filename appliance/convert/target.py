"""What a quantized matrix becomes in each form that can be written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.checkpoint.stored import NVFP4_GROUP, QUASAR_GROUP, Layout
from appliance.convert.factor import reciprocal_of
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.quantize.native import BLOCK
from appliance.quantize.scheme import quantization_config, quasar_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from appliance.checkpoint.decode import Matrix

_FP16_MAX = 65504.0
_ONE = 0x38  # 1.0 in E4M3
_MATRIX_AXES = 2


class Target(StrEnum):
    """What `--to` names."""

    FP16 = "fp16"  # dense, every matrix decoded
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    QUASAR_ST = "quasar-st"
    CONTAINER = "container"


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix in its new form: name, safetensors type, content."""

    name: str
    dtype: str
    array: NDArray[Any]


@dataclass(frozen=True)
class Converted:
    """A matrix in its new form.

    Attributes:
        parts: Codes, scales and maybe a global, in this order; or the dense tensor alone.
        group: Weights of a scale, 0 for a dense tensor.
        is_offset: Codes are `int4_offset8`.
        difference: Largest relative difference of a weight that a turned global makes.
    """

    parts: tuple[Part, ...]
    group: int = 0
    is_offset: bool = False
    difference: float = 0.0


def convert_matrix(matrix: Matrix, target: Target) -> Converted:
    """Convert one matrix; arrays stay views wherever the bytes stay.

    For FP16 the array is a placeholder of the right shape: `decode_dense` gives its values.

    Raises:
        ApplianceError: CONVERT_UNSUPPORTED (exit 30) if the target has no place for it, and what
            `Matrix.slabs` raises for scales and globals.
    """
    if target is Target.FP16:
        is_stack = matrix.stored.codes == matrix.stored.module
        name = matrix.stored.module if is_stack else f"{matrix.stored.module}.weight"
        return Converted((Part(name, "F16", np.broadcast_to(np.float16(0), matrix.shape)),))
    group = _group_of(matrix)
    _require_fit(matrix, target, group)
    codes, scales, factor, difference = _with_factor(matrix, is_divisor=target is _DIVIDES)
    module = matrix.stored.module
    words = np.ascontiguousarray(codes).view("<i4" if target is Target.QUASAR_ST else "<u4")
    scale_type = _TYPES[scales.dtype.name]
    if target is Target.COMPRESSED_TENSORS:
        parts = [
            Part(f"{module}.weight_packed", "U8", codes),
            Part(f"{module}.weight_scale", scale_type, scales),
            Part(f"{module}.weight_global_scale", "F32", _array(factor, (1,))),
        ]
    elif target is Target.MODELOPT:
        parts = [
            Part(f"{module}.weight", "U8", codes),
            Part(f"{module}.weight_scale", scale_type, scales),
            Part(f"{module}.weight_scale_2", "F32", _array(factor, ())),
        ]
    else:
        names = _NAMES[target]
        parts = [
            Part(f"{module}.{names[0]}", "I32" if target is Target.QUASAR_ST else "U32", words),
            Part(f"{module}.{names[1]}", scale_type, scales),
        ]
        if factor is not None:
            parts.append(Part(f"{module}.{names[2]}", "F32", _array(factor, ())))
    return Converted(tuple(parts), group, matrix.offset_codes, difference)


_DIVIDES = Target.COMPRESSED_TENSORS
_TYPES: Mapping[str, str] = {"uint8": "F8_E4M3", "float16": "F16", "float32": "F32"}
_NAMES: Mapping[Target, tuple[str, str, str]] = {
    Target.QUASAR_ST: ("qweight", "weight_scales", "weight_scale_2"),
    Target.CONTAINER: ("qweight", "scales", "global"),
}


def config_of(
    target: Target, ignore: Sequence[str], converted: Sequence[Converted]
) -> dict[str, Any] | None:
    """Return the quantization_config that states what was written; None for a dense checkpoint."""
    if target is Target.COMPRESSED_TENSORS:
        return quantization_config(ignore)
    if target is Target.MODELOPT:
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": BLOCK,
            "ignore": list(ignore),
            "kv_cache_quant_algo": None,
        }
    if target is Target.QUASAR_ST and converted:
        scales = {part.dtype for each in converted for part in each.parts[1:2]}
        names = {"F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
        stated = quasar_config(ignore)
        stated["group_size"] = converted[0].group
        stated["scale_dtype"] = names[min(scales)]
        return stated
    return None


def decode_dense(matrix: Matrix) -> NDArray[np.float16]:
    """Return the FP16 numbers nearest to a matrix's canonical FP32 values, in its shape.

    Raises:
        ApplianceError: E_FP16_RANGE (exit 30) if FP16 cannot hold a weight, and what
            `Matrix.slabs` raises.
    """
    values = np.empty((int(np.prod(matrix.shape[:-1])), matrix.columns), np.float16)
    at = 0
    for slab in matrix.slabs():
        largest = float(np.abs(slab).max(initial=0.0))
        if largest > _FP16_MAX:
            fault = Fault(
                "E_FP16_RANGE",
                matrix.stored.module,
                "FP16 ends at 65504",
                f"magnitude {largest:.6g}",
                "serve this checkpoint as it is",
            )
            raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)
        values[at : at + len(slab)] = slab
        at += len(slab)
    return values.reshape(matrix.shape)


def _group_of(matrix: Matrix) -> int:
    return NVFP4_GROUP if matrix.scales.dtype == np.uint8 else QUASAR_GROUP


def _require_fit(matrix: Matrix, target: Target, group: int) -> None:
    """Refuse what the target cannot say."""
    stored = matrix.stored
    value = ""
    if stored.layout in (Layout.FP8, Layout.MXFP4):
        value = f"{stored.layout} weights"
    elif matrix.codes.ndim != _MATRIX_AXES:
        value = "experts in one tensor"
    elif matrix.codes.shape[1] * 2 != matrix.columns:
        value = f"K {matrix.columns} padded to {matrix.codes.shape[1] * 2}"
    elif matrix.offset_codes and target is not Target.CONTAINER:
        value = "int4_offset8 codes"
    elif group != NVFP4_GROUP and target in (Target.COMPRESSED_TENSORS, Target.MODELOPT):
        value = f"groups of {group}"
    elif matrix.columns % 8:
        value = f"K {matrix.columns}"
    if value:
        fault = Fault(
            "CONVERT_UNSUPPORTED",
            stored.module,
            f"a matrix that the form {target} can hold",
            value,
            "use --to fp16, which decodes it",
        )
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)


def _with_factor(
    matrix: Matrix, *, is_divisor: bool
) -> tuple[NDArray[np.uint8], NDArray[Any], np.float32 | None, float]:
    """Codes, scales and the global as the target means it, and what turning it costs."""
    codes, scales = matrix.codes, matrix.scales
    if matrix.zeros:  # ModelOpt's form of a zero matrix: NaN scales under a global of 0
        return np.zeros_like(codes), np.full_like(scales, _ONE), np.float32(1.0), 0.0
    if matrix.factors is None:
        return codes, scales, np.float32(1.0) if is_divisor else None, 0.0
    factor = np.float32(matrix.factors[0])
    if matrix.stored.is_divisor == is_divisor:
        return codes, scales, factor, 0.0
    turned = reciprocal_of(factor, scales, is_divisor=matrix.stored.is_divisor)
    return codes, scales, turned.value, turned.difference


def _array(factor: np.float32 | None, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.full(shape, 1.0 if factor is None else factor, np.float32)
