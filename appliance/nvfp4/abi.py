"""The C ABI of kernels/include/nvfp4.h in ctypes: the same names, numbers and structs."""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag

ABI_VERSION = 0x00010000
"""Major in the upper, minor in the lower 16 bits."""

BUFFER_ALIGNMENT = 256
"""Bytes; of packed buffers, plans and workspaces."""

WORKSPACE_LIMIT_BYTES = 96 << 20

_INT = ctypes.c_int32
_UINT = ctypes.c_uint32
_LONG = ctypes.c_int64
_ULONG = ctypes.c_uint64
_POINTER = ctypes.c_void_p


class Status(IntEnum):
    """Why a call was refused; the text of each is in the header."""

    OK = 0
    ENULL = 1
    EALIGN = 2
    ESHAPE = 3
    EGROUP = 4
    ESTRIDE = 5
    ETYPE = 6
    EVERSION = 7
    EHANDLE = 8
    EBUFFER = 9
    EWORKSPACE = 10
    ERANGE = 11
    EUNSUPPORTED = 12
    ESCALE_NAN = 13
    ESCALE_NEGATIVE = 14
    EGLOBAL = 15
    EREPORT = 16
    ESELFTEST = 17
    EDEVICE = 18
    ENOMEM = 19


class Type(IntEnum):
    """Element types of activations, outputs and block scales."""

    F16 = 1
    F32 = 2
    E4M3 = 3


class GlobalKind(IntEnum):
    """What the FP32 global of a row does to its weights."""

    MULTIPLIER = 1  # ModelOpt weight_scale_2
    DIVISOR = 2  # compressed-tensors weight_global_scale


class WeightKind(IntEnum):
    """What the rows of a weight are."""

    LINEAR = 1
    GATE_UP = 2  # the first half of the rows are gate, the second up


class Dequantize(IntFlag):
    """Flags of a dequantization."""

    NONE = 0
    UNSCALED = 1  # leaves the globals out


class Kernel(IntEnum):
    """What the chooser can choose."""

    HOST = 1
    SKINNY = 2
    TENSOR = 3
    DEQUANTIZE = 4
    GROUPED_SKINNY = 5
    GROUPED_TENSOR = 6


class Sized(ctypes.Structure):
    """A struct that begins with its own size in bytes; the constructor sets it."""

    struct_size: int

    def __init__(self, **fields: float | None) -> None:
        """Set the size and the fields; pointers are addresses or None.

        Raises:
            TypeError: If there is no such field; ctypes itself would keep it as a plain attribute.
        """
        unknown = fields.keys() - {field[0] for field in self._fields_}
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__(**fields)
        self.struct_size = ctypes.sizeof(type(self))


class WeightDesc(Sized):
    """nvfp4_weight_desc: what a packed weight is going to hold."""

    kind: int
    experts: int
    n: int
    k: int
    group: int
    scale_type: int
    global_kind: int
    _fields_ = (
        ("struct_size", _UINT),
        ("kind", _INT),
        ("experts", _LONG),
        ("n", _LONG),
        ("k", _LONG),
        ("group", _INT),
        ("scale_type", _INT),
        ("global_kind", _INT),
        ("reserved", _INT),
    )


class Weight(Sized):
    """nvfp4_weight: a packed weight; it owns nothing, its buffer must outlive it."""

    magic: int
    layout: int
    layout_version: int
    kind: int
    group: int
    scale_type: int
    global_kind: int
    experts: int
    n: int
    k: int
    n_padded: int
    k_padded: int
    buffer_bytes: int
    buffer: int | None
    checksum: int
    _fields_ = (
        ("struct_size", _UINT),
        ("magic", _UINT),
        ("layout", _UINT),
        ("layout_version", _UINT),
        ("kind", _INT),
        ("group", _INT),
        ("scale_type", _INT),
        ("global_kind", _INT),
        ("experts", _LONG),
        ("n", _LONG),
        ("k", _LONG),
        ("n_padded", _LONG),
        ("k_padded", _LONG),
        ("buffer_bytes", _LONG),
        ("buffer", _POINTER),
        ("codes", _POINTER),
        ("scales", _POINTER),
        ("globals", _POINTER),
        ("codes_expert_bytes", _LONG),
        ("scales_expert_bytes", _LONG),
        ("globals_expert_bytes", _LONG),
        ("checksum", _ULONG),
    )


class Source(Sized):
    """nvfp4_source: canonical tensors of consecutive rows; strides in elements."""

    group: int
    scale_type: int
    global_kind: int
    n: int
    k: int
    codes: int | None
    codes_stride: int
    scales: int | None
    scales_stride: int
    globals: int | None
    _fields_ = (
        ("struct_size", _UINT),
        ("group", _INT),
        ("scale_type", _INT),
        ("global_kind", _INT),
        ("n", _LONG),
        ("k", _LONG),
        ("codes", _POINTER),
        ("codes_stride", _LONG),
        ("scales", _POINTER),
        ("scales_stride", _LONG),
        ("globals", _POINTER),
    )


class Report(ctypes.Structure):
    """nvfp4_report: what repacks found wrong; lives in device memory, is read from a host copy."""

    nan_count: int
    negative_count: int
    global_count: int
    _fields_ = (
        ("magic", _ULONG),
        ("nan_count", _ULONG),
        ("nan_first", _ULONG),
        ("negative_count", _ULONG),
        ("negative_first", _ULONG),
        ("global_count", _ULONG),
        ("global_first", _ULONG),
        ("reserved", _ULONG),
    )


class Problem(Sized):
    """nvfp4_problem: what the chooser is asked about."""

    kind: int
    m: int
    n: int
    k: int
    experts: int
    top_k: int
    group: int
    scale_type: int
    _fields_ = (
        ("struct_size", _UINT),
        ("kind", _INT),
        ("m", _LONG),
        ("n", _LONG),
        ("k", _LONG),
        ("experts", _LONG),
        ("top_k", _LONG),
        ("group", _INT),
        ("scale_type", _INT),
    )


class Choice(Sized):
    """nvfp4_choice: the kernel and tile that would run."""

    kernel: int
    tile_m: int
    tile_n: int
    tile_k: int
    warps: int
    split_k: int
    ctas: int
    slice_rows: int
    workspace_bytes: int
    _fields_ = (
        ("struct_size", _UINT),
        ("kernel", _INT),
        ("tile_m", _INT),
        ("tile_n", _INT),
        ("tile_k", _INT),
        ("warps", _INT),
        ("split_k", _INT),
        ("reserved", _INT),
        ("ctas", _LONG),
        ("slice_rows", _LONG),
        ("workspace_bytes", _LONG),
    )


class Norm(Sized):
    """nvfp4_norm: the arguments of an RMSNorm with or without a residual."""

    _fields_ = (
        ("struct_size", _UINT),
        ("io_type", _INT),
        ("weight_type", _INT),
        ("eps", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
        ("reserved", _INT),
        ("rows", _LONG),
        ("hidden", _LONG),
        ("weight", _POINTER),
        ("x", _POINTER),
        ("x_stride", _LONG),
        ("y", _POINTER),
        ("y_stride", _LONG),
        ("residual", _POINTER),
        ("residual_stride", _LONG),
    )


class Rotary(Sized):
    """nvfp4_rotary: the arguments of the rotation and of the KV-cache write."""

    _fields_ = (
        ("struct_size", _UINT),
        ("io_type", _INT),
        ("tokens", _LONG),
        ("q_heads", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("rotary_dim", _LONG),
        ("is_neox", _INT),
        ("cos_sin_type", _INT),
        ("cos_sin", _POINTER),
        ("max_position", _LONG),
        ("positions", _POINTER),
        ("q", _POINTER),
        ("q_stride", _LONG),
        ("k", _POINTER),
        ("k_stride", _LONG),
        ("v", _POINTER),
        ("v_stride", _LONG),
        ("slots", _POINTER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("blocks", _LONG),
        ("block_size", _LONG),
        ("cache_block_stride", _LONG),
        ("cache_token_stride", _LONG),
        ("cache_head_stride", _LONG),
    )


class SelfTestResult(Sized):
    """nvfp4_self_test_result: checksums, time and the first wrong coordinate."""

    device: int
    checksum: int
    expected: int
    elapsed_s: float
    problems: int
    bad_problem: int
    bad_row: int
    bad_column: int
    bad_value: float
    good_value: float
    _fields_ = (
        ("struct_size", _UINT),
        ("device", _INT),
        ("checksum", _ULONG),
        ("expected", _ULONG),
        ("elapsed_s", ctypes.c_double),
        ("problems", _INT),
        ("bad_problem", _INT),
        ("bad_row", _LONG),
        ("bad_column", _LONG),
        ("bad_value", ctypes.c_double),
        ("good_value", ctypes.c_double),
    )


_OUT = _POINTER  # of an int64, or of a struct passed by reference

SIGNATURES: dict[str, tuple[type[object], ...]] = {
    "nvfp4_weight_bytes": (_POINTER, _OUT),
    "nvfp4_weight_create": (_POINTER, _POINTER, _LONG, _OUT, _POINTER),
    "nvfp4_weight_check": (_POINTER,),
    "nvfp4_report_reset": (_POINTER, _POINTER),
    "nvfp4_repack": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER),
    "nvfp4_report_status": (_POINTER, _POINTER),
    "nvfp4_dequantize": (
        *(_POINTER, _LONG, _LONG, _LONG, _UINT, _INT),
        *(_POINTER, _LONG, _POINTER),
    ),
    "nvfp4_matmul_workspace_bytes": (_POINTER, _LONG, _OUT),
    "nvfp4_matmul": (
        *(_POINTER, _INT, _LONG, _POINTER, _LONG, _POINTER, _LONG),
        *(_POINTER, _POINTER, _LONG, _POINTER),
    ),
    "nvfp4_choose": (_POINTER, _OUT),
    "nvfp4_moe_plan_bytes": (_LONG, _LONG, _LONG, _OUT),
    "nvfp4_moe_plan": (
        *(_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG),
        *(_POINTER, _LONG, _POINTER),
    ),
    "nvfp4_moe_workspace_bytes": (_POINTER, _POINTER, _LONG, _LONG, _OUT),
    "nvfp4_moe_gate_up": (
        *(_POINTER, _POINTER, _LONG, _INT, _LONG, _LONG, _POINTER, _LONG),
        *(_POINTER, _LONG, _POINTER, _LONG, _POINTER),
    ),
    "nvfp4_moe_down": (
        *(_POINTER, _POINTER, _LONG, _INT, _LONG, _LONG, _POINTER, _LONG, _POINTER),
        *(_POINTER, _LONG, _POINTER, _LONG, _POINTER),
    ),
    "nvfp4_topk_softmax": (
        *(_INT, _LONG, _LONG, _LONG, _POINTER, _LONG, _INT),
        *(_POINTER, _POINTER, _POINTER),
    ),
    "nvfp4_rms_norm": (_POINTER, _POINTER),
    "nvfp4_silu_mul": (_INT, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER),
    "nvfp4_rotary_write_kv": (_POINTER, _POINTER),
    "nvfp4_self_test": (_INT, _OUT),
    "nvfp4_dequantize_source": (_POINTER, _UINT, _INT, _POINTER, _LONG),
    "nvfp4_set_threads": (_INT,),
}
"""Argument types of every call that returns a status, in the order of the header."""
