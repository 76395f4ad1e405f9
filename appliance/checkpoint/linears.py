"""Holds the stored parts of one linear against what its format needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.checkpoint.header import DTYPE_BITS
from appliance.checkpoint.rules import Form, Grain
from appliance.checkpoint.stored import FP8_BLOCK, NVFP4_GROUP, QUASAR_GROUP
from appliance.checkpoint.summary import Cut, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.checkpoint.outline import Linear

Shape = tuple[int, ...]
Entry = tuple[str, Shape]
"""dtype and shape of one stored tensor."""

DENSE_TYPES = ("BF16", "F16", "F32")
KV_PARTS = frozenset({"k_scale", "v_scale", "q_scale", "k_bias", "v_bias", "prob_output_scale"})
ACTIVATION_PARTS = frozenset({"input_scale", "input_global_scale"})
WEIGHT_PARTS = frozenset(
    {
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_scale_2",
        "weight_global_scale",
        "qweight",
        "weight_scales",
        "weight_shape",
        "weight_zero_point",
        "weight_scale_inv",
        "pre_quant_scale",
        "svdquant_lora_a",
        "svdquant_lora_b",
        "forward_hadamard_matrix",
        "backward_hadamard_matrix",
        "scales",
        "act_global_scale",
    }
)
PARTS = WEIGHT_PARTS | ACTIVATION_PARTS | KV_PARTS
_UNSERVED_PARTS = {
    "pre_quant_scale": "AWQ channel scales",
    "svdquant_lora_a": "an SVD branch",
    "svdquant_lora_b": "an SVD branch",
    "forward_hadamard_matrix": "a rotation of activations",
    "backward_hadamard_matrix": "a rotation of activations",
    "scales": "FP-Quant scales",
    "act_global_scale": "FP-Quant scales",
}
"""Parts that change what the weights mean; a product without them is silently wrong."""

_AGAIN = "export the checkpoint again"


@dataclass
class Share:
    """Sums over tensors of one kind and cut: bytes in the files, weights, output features."""

    stored: int = 0
    elements: int = 0
    rows: int = 0
    fp32: int = 0


@dataclass
class Finding:
    """One fault, with the module relative to its layer."""

    code: str
    module: str
    what: str
    value: str
    fix: str = _AGAIN


@dataclass
class Tally:
    """What the tensors of one layer (or of the top) add up to.

    Attributes:
        forms: Module to form.
        layouts: Layout to the first module that has it.
        groups: Weights per block scale to the first module that has it, and its scales.
        shares: Sums by kind and cut.
        widths: K to a row-parallel NVFP4 module that has it.
        fp8_scales: FP8 module to the name of its scales, these, and what their shape may mean.
        findings: Faults.
        activation_scales: Scales of activations are there.
        kv_scales: Scales of the KV cache are there.
    """

    forms: dict[str, Form] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    groups: dict[int, tuple[str, Entry]] = field(default_factory=dict)
    shares: dict[tuple[Kind, Cut], Share] = field(default_factory=dict)
    widths: dict[int, str] = field(default_factory=dict)
    fp8_scales: dict[str, tuple[str, Entry, frozenset[Grain]]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    activation_scales: bool = False
    kv_scales: bool = False

    def add(self, kind: Kind, cut: Cut, entry: Entry, *, elements: int = 0, rows: int = 0) -> None:
        """Count one tensor."""
        share = self.shares.setdefault((kind, cut), Share())
        share.stored += stored_bytes(entry)
        share.elements += elements
        share.rows += rows

    def note_fp8(
        self, module: str, where: str, scale: Entry, shapes: Mapping[Grain, tuple[Shape, ...]]
    ) -> bool:
        """Note what the scales of one FP8 module may mean; tell whether they mean anything."""
        grains = frozenset(grain for grain, known in shapes.items() if scale[1] in known)
        self.fp8_scales[module] = (where, scale, grains)
        return bool(grains)

    def fault(self, code: str, module: str, what: str, value: str, fix: str = _AGAIN) -> None:
        """Note one fault."""
        self.findings.append(Finding(code, module, what, value, fix))


def stored_bytes(entry: Entry) -> int:
    """Return the bytes a tensor takes in its file."""
    return DTYPE_BITS[entry[0]] * math.prod(entry[1]) // 8


def text(entry: Entry) -> str:
    """Return dtype and shape for a message."""
    return f"{entry[0]} {list(entry[1])}"


def take_linear(
    tally: Tally,
    module: str,
    linear: Linear,
    parts: dict[str, Entry],
    dense_kind: Kind = Kind.DENSE,
) -> None:
    """Check the parts of one linear, count them, and note its form.

    Args:
        tally: Where sums, form and faults go.
        module: Name, relative to the layer.
        linear: What it must be.
        parts: Part name (`weight`, `weight_scale`, ...) to dtype and shape; emptied.
        dense_kind: What the bytes of a weight outside the layers are for.
    """
    unserved = [part for part in _UNSERVED_PARTS if parts.pop(part, None) is not None]
    if unserved:
        fix = "serve a checkpoint without it"
        found = ", ".join(f"{part} ({_UNSERVED_PARTS[part]})" for part in unserved)
        tally.fault("E_UNSUPPORTED_ALGO", module, "plain scales", found, fix)
        if "qweight" in parts and "weight_scales" not in parts:
            tally.forms[module] = Form.NVFP4
            parts.clear()
            return
    _take_unread(tally, parts)
    if _is_mxfp4(parts):
        _refuse_mxfp4(tally, module, parts)
    elif "weight_packed" in parts or "weight_global_scale" in parts:
        producer, kind = "compressed-tensors", dense_kind
        _take_nvfp4(tally, module, linear, parts, producer=producer, dense_kind=kind)
    elif "qweight" in parts or "weight_scales" in parts:
        _take_quasar(tally, module, linear, parts, dense_kind)
    elif "weight_scale_2" in parts or parts.get("weight", ("",))[0] == "U8":
        producer, kind = "modelopt", dense_kind
        _take_nvfp4(tally, module, linear, parts, producer=producer, dense_kind=kind)
    elif parts.get("weight", ("",))[0] == "F8_E4M3":
        _take_fp8(tally, module, linear, parts, dense_kind)
    elif "weight" in parts:
        _take_dense(tally, module, linear, parts, dense_kind)
    elif parts:
        what = f"a weight beside {', '.join(sorted(parts))}"
        tally.fault("E_MISSING_COMPANION", module, what, "none")
        parts.clear()
    else:
        tally.fault("E_MISSING_TENSOR", module, "a weight", "none")


def _take_unread(tally: Tally, parts: dict[str, Entry]) -> None:
    """Scales of activations and of the KV cache: legal, and read by no path on Volta."""
    for part in [part for part in parts if part in ACTIVATION_PARTS or part in KV_PARTS]:
        tally.add(Kind.ACTIVATION_SCALES, Cut.WHOLE, parts.pop(part))
        tally.activation_scales |= part in ACTIVATION_PARTS
        tally.kv_scales |= part in KV_PARTS
    for part in ("weight_shape", "weight_zero_point"):
        if part in parts:
            tally.add(Kind.OTHER, Cut.WHOLE, parts.pop(part))


def _is_mxfp4(parts: dict[str, Entry]) -> bool:
    """Tell the scales of MXFP4: a power of two in 8 bits for 32 weights, and no global."""
    has_codes = parts.get("weight", parts.get("weight_packed", ("",)))[0] == "U8"
    scales = parts.get("weight_scale", ("",))[0]
    return has_codes and scales in ("U8", "F8_E8M0") and "weight_scale_2" not in parts


def _refuse_mxfp4(tally: Tally, module: str, parts: dict[str, Entry]) -> None:
    tally.forms[module] = Form.NVFP4
    value = f"{text(parts['weight_scale'])}: MXFP4, E8M0 scales of 32 weights each"
    fix = "quantize the original with `appliance quantize`: MXFP4 has twice the error of NVFP4"
    tally.fault("E_CODEBOOK", f"{module}.weight_scale", "E4M3 scales of NVFP4", value, fix)
    parts.clear()


def _take_nvfp4(
    tally: Tally,
    module: str,
    linear: Linear,
    parts: dict[str, Entry],
    *,
    producer: str,
    dense_kind: Kind,
) -> None:
    names = ("weight", "weight_scale", "weight_scale_2")
    if producer == "compressed-tensors":
        names = ("weight_packed", "weight_scale", "weight_global_scale")
    codes, scales, factor = (parts.pop(name, None) for name in names)
    tally.forms[module] = Form.NVFP4
    tally.layouts.setdefault(producer, module)
    if codes is None or scales is None or factor is None:
        found = _present(names, codes, scales, factor)
        value = f"only {', '.join(found)}"
        tally.fault("E_MISSING_COMPANION", module, ", ".join(names), value)
        return
    columns = linear.columns
    if producer == "modelopt":  # its export fills the last block of a row with zeros
        columns = -(-columns // NVFP4_GROUP) * NVFP4_GROUP
    packed = ("U8", (linear.rows, columns // 2))
    if columns % NVFP4_GROUP or codes != packed:
        tally.fault("E_SHAPE", f"{module}.{names[0]}", text(packed), text(codes))
        return
    _check_scales(tally, f"{module}.weight_scale", (linear.rows, columns), scales)
    tally.groups.setdefault(NVFP4_GROUP, (f"{module}.weight_scale", scales))
    if math.prod(factor[1]) != 1 or len(factor[1]) > 1:
        tally.fault("E_SCALE_SHAPE", f"{module}.{names[2]}", "one number", text(factor))
    if factor[0] != "F32":
        tally.fault("E_SCALE_DTYPE", f"{module}.{names[2]}", "F32", text(factor))
    _count_packed(tally, module, linear, (codes, scales, factor), dense_kind)


def _present(names: tuple[str, ...], *entries: Entry | None) -> list[str]:
    return [name for name, entry in zip(names, entries, strict=True) if entry is not None]


def _check_scales(tally: Tally, where: str, size: tuple[int, int], scales: Entry) -> None:
    wanted = ("F8_E4M3", (size[0], size[1] // NVFP4_GROUP))
    if scales[0] in ("U8", "F8_E8M0"):
        tally.fault("E_CODEBOOK", where, text(wanted), f"{text(scales)} (MXFP4)")
    elif scales[1] != wanted[1]:
        tally.fault("E_SCALE_SHAPE", where, text(wanted), text(scales))
    elif scales[0] != wanted[0]:
        tally.fault("E_SCALE_DTYPE", where, text(wanted), text(scales))


def _take_quasar(
    tally: Tally, module: str, linear: Linear, parts: dict[str, Entry], dense_kind: Kind
) -> None:
    codes, scales = parts.pop("qweight", None), parts.pop("weight_scales", None)
    factor = parts.pop("weight_scale_2", None)
    tally.forms[module] = Form.NVFP4
    tally.layouts.setdefault("quasar-st", module)
    if codes is None or scales is None:
        found = "qweight" if codes else "weight_scales"
        tally.fault("E_MISSING_COMPANION", module, "qweight, weight_scales", f"only {found}")
        return
    group = _quasar_group(linear, scales)
    packed = ("I32", (linear.rows, linear.columns // 8))
    if linear.columns % group or codes != packed:
        tally.fault("E_SHAPE", f"{module}.qweight", text(packed), text(codes))
        return
    where = f"{module}.weight_scales"
    types = ("F8_E4M3",) if group == NVFP4_GROUP else ("F16", "F32")
    wanted = (linear.rows, linear.columns // group)
    if scales[1] != wanted:
        what = f"F16 or F32 {list(wanted)}, or F8_E4M3 of 16 columns each"
        tally.fault("E_SCALE_SHAPE", where, what, text(scales))
    elif scales[0] not in types:
        tally.fault("E_SCALE_DTYPE", where, " or ".join(types), text(scales))
    if factor is not None and (factor[0] != "F32" or math.prod(factor[1]) != 1):
        tally.fault("E_SCALE_SHAPE", f"{module}.weight_scale_2", "F32 []", text(factor))
    tally.groups.setdefault(group, (where, scales))
    present = (codes, scales) if factor is None else (codes, scales, factor)
    _count_packed(tally, module, linear, present, dense_kind)


def _quasar_group(linear: Linear, scales: Entry) -> int:
    """Return the group of one matrix: E4M3 scales are of 16 weights, wider ones of 128."""
    is_narrow = scales == ("F8_E4M3", (linear.rows, linear.columns // NVFP4_GROUP))
    return NVFP4_GROUP if is_narrow else QUASAR_GROUP


def _count_packed(
    tally: Tally, module: str, linear: Linear, entries: tuple[Entry, ...], dense_kind: Kind
) -> None:
    elements = linear.rows * linear.columns
    if dense_kind is not Kind.DENSE:
        # The engine has no packed head: it is decoded after loading, so weights are what counts.
        tally.add(dense_kind, linear.cut, entries[0], elements=elements)
        for entry in entries[1:]:
            tally.add(dense_kind, linear.cut, entry)
        return
    tally.add(Kind.CODES, linear.cut, entries[0], elements=elements, rows=linear.rows)
    scale_count = math.prod(entries[1][1])
    tally.add(Kind.BLOCK_SCALES, linear.cut, entries[1], elements=scale_count)
    for entry in entries[2:]:
        tally.add(Kind.GLOBALS, Cut.WHOLE, entry, elements=1)
    if linear.cut is Cut.COLUMNS:
        tally.widths.setdefault(linear.columns, module)


def _take_fp8(
    tally: Tally, module: str, linear: Linear, parts: dict[str, Entry], dense_kind: Kind
) -> None:
    weight = parts.pop("weight")
    # The second name is older, and multiplies all the same; a module with both is left with one.
    scale = parts.pop("weight_scale", None) or parts.pop("weight_scale_inv", None)
    tally.forms[module] = Form.FP8
    wanted = ("F8_E4M3", (linear.rows, linear.columns))
    if scale is None:
        tally.fault("E_MISSING_COMPANION", module, "weight, weight_scale", "only weight")
        return
    if weight != wanted:
        tally.fault("E_SHAPE", f"{module}.weight", text(wanted), text(weight))
        return
    blocks = (-(-linear.rows // FP8_BLOCK), -(-linear.columns // FP8_BLOCK))
    shapes = {
        Grain.TENSOR: ((), (1,), (1, 1)),
        Grain.CHANNEL: ((linear.rows,), (linear.rows, 1)),
        Grain.BLOCK: (blocks, (blocks[0], 1, blocks[1], 1)),
    }
    if not tally.note_fp8(module, f"{module}.weight_scale", scale, shapes):
        what = f"one number, one for each of {linear.rows} rows, or {list(blocks)} for blocks"
        tally.fault("E_SCALE_SHAPE", f"{module}.weight_scale", what, text(scale))
    elif scale[0] not in DENSE_TYPES:
        what = "F32, BF16 or F16"
        tally.fault("E_SCALE_DTYPE", f"{module}.weight_scale", what, text(scale))
    kind = Kind.FP8 if dense_kind is Kind.DENSE else dense_kind
    elements = linear.rows * linear.columns
    tally.add(kind, linear.cut, weight, elements=elements, rows=linear.rows)
    tally.add(kind, linear.cut, scale)


def _take_dense(
    tally: Tally, module: str, linear: Linear, parts: dict[str, Entry], dense_kind: Kind
) -> None:
    weight = parts.pop("weight")
    tally.forms[module] = Form.DENSE
    wanted = (linear.rows, linear.columns)
    if weight[0] not in DENSE_TYPES:
        tally.fault("E_CONFIG_TENSOR_MISMATCH", module, "BF16, F16 or F32", text(weight))
    elif weight[1] != wanted:
        tally.fault("E_SHAPE", f"{module}.weight", str(list(wanted)), text(weight))
    elif "weight_scale" in parts:
        what = "packed codes beside the block scales"
        value = f"a {weight[0]} weight with weight_scale"
        tally.fault("E_CONFIG_TENSOR_MISMATCH", module, what, value)
        parts.pop("weight_scale")
    tally.add(dense_kind, linear.cut, weight, elements=linear.rows * linear.columns)
