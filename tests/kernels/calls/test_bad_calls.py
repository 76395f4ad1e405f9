"""A wrong call returns a status and a sentence, and writes nothing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gdn_calls import GDN_WRONG

from appliance.nvfp4 import abi, gdn
from appliance.nvfp4.abi import Status

HUGE = 2**40
ODD = "odd"  # the address plus one byte
SMALL = "small"  # one byte or element too few

_WEIGHT = (
    ("weight", None, Status.ENULL),
    ("weight", ODD, Status.EALIGN),
    ("weight.struct_size", 0, Status.EVERSION),
    ("weight.magic", 0, Status.EHANDLE),
    ("weight.layout", 2, Status.EHANDLE),
    ("weight.layout_version", 99, Status.EVERSION),
    ("weight.n", 1, Status.EHANDLE),
    ("weight.buffer", None, Status.EHANDLE),
)
_DESC = (
    ("desc", None, Status.ENULL),
    ("desc.struct_size", 8, Status.EVERSION),
    ("desc.kind", 3, Status.ETYPE),
    ("desc.reserved", 1, Status.ETYPE),
    ("desc.experts", 0, Status.ESHAPE),
    ("desc.experts", 5000, Status.ESHAPE),
    ("desc.n", 0, Status.ESHAPE),
    ("desc.n", -1, Status.ESHAPE),
    ("desc.n", HUGE, Status.ESHAPE),
    ("desc.k", 0, Status.ESHAPE),
    ("desc.k", 24, Status.ESHAPE),
    ("desc.k", HUGE, Status.ESHAPE),
    ("desc.group", 0, Status.EGROUP),
    ("desc.group", 48, Status.EGROUP),
    ("desc.group", 128, Status.EGROUP),
    ("desc.scale_type", 0, Status.ETYPE),
    ("desc.global_kind", 0, Status.ETYPE),
)
_SOURCE = (
    ("source", None, Status.ENULL),
    ("source.struct_size", 0, Status.EVERSION),
    ("source.n", 0, Status.ESHAPE),
    ("source.k", 24, Status.ESHAPE),
    ("source.group", 20, Status.EGROUP),
    ("source.scale_type", 9, Status.ETYPE),
    ("source.global_kind", 9, Status.ETYPE),
    ("source.codes", None, Status.ENULL),
    ("source.codes_stride", 15, Status.ESTRIDE),
    ("source.codes_stride", 2**62, Status.ESTRIDE),
    ("source.scales", None, Status.ENULL),
    ("source.scales_stride", 1, Status.ESTRIDE),
    ("source.globals", None, Status.ENULL),
    ("source.globals", ODD, Status.EALIGN),
)
_X_AND_Y = (
    ("io_type", 3, Status.ETYPE),
    ("io_type", 0, Status.ETYPE),
    ("x", None, Status.ENULL),
    ("x", ODD, Status.EALIGN),
    ("x_stride", 8, Status.ESTRIDE),
    ("x_stride", 33, Status.EALIGN),
    ("x_stride", -32, Status.ESTRIDE),
    ("y", None, Status.ENULL),
    ("y", ODD, Status.EALIGN),
    ("y_stride", 1, Status.ESTRIDE),
)
_WORKSPACE = (
    ("workspace", None, Status.ENULL),
    ("workspace", ODD, Status.EALIGN),
    ("workspace_bytes", SMALL, Status.EWORKSPACE),
    ("workspace_bytes", -1, Status.EWORKSPACE),
)
_PLAN = (
    ("plan", None, Status.ENULL),
    ("plan", ODD, Status.EALIGN),
    ("plan_bytes", SMALL, Status.EBUFFER),
    ("top_k", 0, Status.ESHAPE),
    ("top_k", 65, Status.ESHAPE),
    ("m", 0, Status.ESHAPE),
    ("m", HUGE, Status.ESHAPE),
)
_GROUPED = (
    *_WEIGHT,
    *_PLAN,
    *_X_AND_Y,
    *_WORKSPACE,
    ("m", 2, Status.EHANDLE),  # the plan is for another m
)

WRONG: dict[str, tuple[tuple[str, object, Status], ...]] = {
    "nvfp4_weight_bytes": (*_DESC, ("bytes", None, Status.ENULL)),
    "nvfp4_weight_create": (
        *_DESC,
        ("buffer", None, Status.ENULL),
        ("buffer", ODD, Status.EALIGN),
        ("buffer_bytes", SMALL, Status.EBUFFER),
        ("weight", None, Status.ENULL),
    ),
    "nvfp4_weight_check": _WEIGHT,
    "nvfp4_report_reset": (("report", None, Status.ENULL), ("report", ODD, Status.EALIGN)),
    "nvfp4_repack": (
        *_WEIGHT,
        *_SOURCE,
        ("source.codes", ODD, Status.EALIGN),
        ("source.codes_stride", 17, Status.EALIGN),
        ("source.k", 16, Status.ESHAPE),
        ("source.group", 32, Status.EGROUP),
        ("source.scale_type", abi.Type.F32, Status.ETYPE),
        ("source.global_kind", abi.GlobalKind.DIVISOR, Status.ETYPE),
        ("expert", 1, Status.ERANGE),
        ("expert", -1, Status.ERANGE),
        ("row_begin", -1, Status.ERANGE),
        ("row_begin", 1, Status.ERANGE),
        ("row_begin", 2**63 - 1, Status.ERANGE),
        ("report", None, Status.ENULL),
        ("report.magic", 1, Status.EREPORT),
    ),
    "nvfp4_report_status": (
        *_WEIGHT,
        ("report", None, Status.ENULL),
        ("report.magic", 0, Status.EREPORT),
    ),
    "nvfp4_dequantize": (
        *_WEIGHT,
        ("expert", 1, Status.ERANGE),
        ("row_begin", -1, Status.ERANGE),
        ("row_begin", 7, Status.ERANGE),
        ("rows", 0, Status.ESHAPE),
        ("rows", 8, Status.ERANGE),
        ("flags", 2, Status.ETYPE),
        ("out_type", abi.Type.E4M3, Status.ETYPE),
        ("out", None, Status.ENULL),
        ("out", ODD, Status.EALIGN),
        ("out_stride", 31, Status.ESTRIDE),
    ),
    "nvfp4_matmul_workspace_bytes": (
        *_WEIGHT,
        ("m_max", 0, Status.ESHAPE),
        ("bytes", None, Status.ENULL),
    ),
    "nvfp4_matmul": (
        *_WEIGHT,
        *_X_AND_Y,
        *_WORKSPACE,
        ("m", 0, Status.ESHAPE),
        ("m", -5, Status.ESHAPE),
        ("bias", ODD, Status.EALIGN),
        ("y", "x", Status.EALIGN),
        ("weight", "gate_up", Status.ESHAPE),
    ),
    "nvfp4_choose": (
        ("problem", None, Status.ENULL),
        ("choice", None, Status.ENULL),
        ("problem.struct_size", 0, Status.EVERSION),
        ("choice.struct_size", 0, Status.EVERSION),
        ("problem.m", 0, Status.ESHAPE),
        ("problem.n", 0, Status.ESHAPE),
        ("problem.k", 8, Status.ESHAPE),
        ("problem.group", 8, Status.EGROUP),
        ("problem.experts", 0, Status.ESHAPE),
        ("problem.top_k", 0, Status.ESHAPE),
    ),
    "nvfp4_moe_plan_bytes": (
        ("m_max", 0, Status.ESHAPE),
        ("m_max", 2**29, Status.ESHAPE),  # with top_k 2
        ("top_k", 0, Status.ESHAPE),
        ("experts", 0, Status.ESHAPE),
        ("bytes", None, Status.ENULL),
    ),
    "nvfp4_moe_plan": (
        *_PLAN,
        ("topk_ids", None, Status.ENULL),
        ("topk_ids", ODD, Status.EALIGN),
        ("experts", 0, Status.ESHAPE),
        ("expert_map", ODD, Status.EALIGN),
        ("map_size", 0, Status.ESHAPE),
    ),
    "nvfp4_moe_workspace_bytes": (
        ("gate_up", "down", Status.ESHAPE),
        ("down", "gate_up", Status.ESHAPE),
        ("m_max", 0, Status.ESHAPE),
        ("m_max", 2**29, Status.ESHAPE),  # with top_k 2
        ("top_k", 0, Status.ESHAPE),
        ("bytes", None, Status.ENULL),
    ),
    "nvfp4_moe_gate_up": (*_GROUPED, ("weight", "down", Status.ESHAPE)),
    "nvfp4_moe_down": (
        *_GROUPED,
        ("weight", "gate_up", Status.ESHAPE),
        ("topk_weights", None, Status.ENULL),
        ("topk_weights", ODD, Status.EALIGN),
    ),
    "nvfp4_topk_softmax": (
        ("logits_type", 7, Status.ETYPE),
        ("m", 0, Status.ESHAPE),
        ("experts", 0, Status.ESHAPE),
        ("top_k", 5, Status.ESHAPE),
        ("logits", None, Status.ENULL),
        ("logits_stride", 3, Status.ESTRIDE),
        ("ids", None, Status.ENULL),
        ("weights", None, Status.ENULL),
    ),
    "nvfp4_rms_norm": (
        ("norm", None, Status.ENULL),
        ("norm.struct_size", 0, Status.EVERSION),
        ("norm.io_type", 3, Status.ETYPE),
        ("norm.weight_type", 3, Status.ETYPE),
        ("norm.eps", float("nan"), Status.ESHAPE),
        ("norm.eps", -1.0, Status.ESHAPE),
        ("norm.rows", 0, Status.ESHAPE),
        ("norm.hidden", 0, Status.ESHAPE),
        ("norm.hidden", 65537, Status.ESHAPE),
        ("norm.weight", None, Status.ENULL),
        ("norm.x", None, Status.ENULL),
        ("norm.x_stride", 3, Status.ESTRIDE),
        ("norm.y", ODD, Status.EALIGN),
        ("norm.residual", ODD, Status.EALIGN),
    ),
    "nvfp4_silu_mul": (
        ("io_type", 3, Status.ETYPE),
        ("rows", 0, Status.ESHAPE),
        ("width", 0, Status.ESHAPE),
        ("x", None, Status.ENULL),
        ("x_stride", 15, Status.ESTRIDE),
        ("y", None, Status.ENULL),
    ),
    "nvfp4_rotary_write_kv": (
        ("rotary", None, Status.ENULL),
        ("rotary.struct_size", 0, Status.EVERSION),
        ("rotary.io_type", 3, Status.ETYPE),
        ("rotary.tokens", 0, Status.ESHAPE),
        ("rotary.q_heads", 0, Status.ESHAPE),
        ("rotary.kv_heads", 0, Status.ESHAPE),
        ("rotary.head_dim", 15, Status.ESHAPE),
        ("rotary.head_dim", 514, Status.ESHAPE),
        ("rotary.rotary_dim", 18, Status.ESHAPE),
        ("rotary.rotary_dim", 3, Status.ESHAPE),
        ("rotary.is_neox", 2, Status.ETYPE),
        ("rotary.cos_sin_type", 3, Status.ETYPE),
        ("rotary.positions", None, Status.ENULL),
        ("rotary.max_position", 0, Status.ESHAPE),
        ("rotary.k", None, Status.ENULL),
        ("rotary.k_stride", 1, Status.ESTRIDE),
        ("rotary.q_stride", 1, Status.ESTRIDE),
        ("rotary.v", None, Status.ENULL),
        ("rotary.v_cache", None, Status.ENULL),
        ("rotary.slots", None, Status.ENULL),
        ("rotary.blocks", 0, Status.ESHAPE),
        ("rotary.block_size", 0, Status.ESHAPE),
        ("rotary.cache_head_stride", 8, Status.ESTRIDE),
    ),
    "nvfp4_self_test": (("device", 3, Status.ESHAPE), ("result.struct_size", 0, Status.EVERSION)),
    "nvfp4_dequantize_source": (
        *_SOURCE,
        ("flags", 4, Status.ETYPE),
        ("out_type", 3, Status.ETYPE),
        ("out", None, Status.ENULL),
        ("out_stride", 5, Status.ESTRIDE),
    ),
    "nvfp4_set_threads": (("threads", -1, Status.ESHAPE), ("threads", 65, Status.ESHAPE)),
    **GDN_WRONG,
}
CASES = [(name, *case) for name, cases in WRONG.items() for case in cases]


def test_every_call_of_the_abi_has_wrong_cases() -> None:
    assert WRONG.keys() == abi.SIGNATURES.keys() | gdn.SIGNATURES.keys()


@pytest.mark.parametrize("name", sorted(WRONG))
def test_right_call_is_taken(name: str, scene: Any) -> None:
    assert scene.call(name, scene.arguments(name)) == Status.OK


@pytest.mark.parametrize(("name", "argument", "value", "status"), CASES)
def test_wrong_call_is_refused_with_a_sentence_and_writes_nothing(
    name: str, argument: str, value: Any, status: Status, *, scene: Any
) -> None:
    arguments = scene.arguments(name)
    _spoil(arguments, argument, value, scene)
    structs = {key: bytes(each) for key, each in arguments.items() if _is_struct(each)}
    before = scene.snapshot()

    found = scene.call(name, arguments)

    sentence = scene.last_error()
    assert Status(found) == status, sentence
    assert sentence.endswith(".")
    assert len(sentence) > 15
    assert scene.snapshot() == before
    assert structs == {key: bytes(each) for key, each in arguments.items() if _is_struct(each)}


def _is_struct(value: Any) -> bool:
    return isinstance(value, (ctypes.Structure, ctypes.c_int64))


def _spoil(arguments: dict[str, Any], argument: str, value: Any, scene: Any) -> None:
    name, _, field = argument.partition(".")
    if field:
        target = arguments[name]
        setattr(target, field, getattr(target, field) + 1 if value == ODD else value)
    elif value == ODD:
        old = arguments[name]
        arguments[name] = (ctypes.addressof(old) if _is_struct(old) else old) + 1
    elif value == SMALL:
        arguments[name] -= 1
    elif value == "x":
        arguments[name] = arguments["x"]
    elif isinstance(value, str):
        arguments[name] = scene.handle(value)
    else:
        arguments[name] = value
