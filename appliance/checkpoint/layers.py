"""Holds the tensors of one layer against its outline; layers that look alike are judged once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from appliance.checkpoint.linears import (
    DENSE_TYPES,
    KV_PARTS,
    PARTS,
    Entry,
    Tally,
    take_linear,
    text,
)
from appliance.checkpoint.outline import Linear
from appliance.checkpoint.rules import Form, Grain
from appliance.checkpoint.stacks import lies_turned, stack_sizes
from appliance.checkpoint.stored import FP8_BLOCK, NVFP4_GROUP, STACKED, STACKED_PARTS
from appliance.checkpoint.summary import Cut, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.checkpoint.outline import Experts, LayerOutline, Other

Signature = dict[str, Entry]
"""Name relative to the layer, to dtype and shape; equal for layers that look alike."""

IGNORED = frozenset({"self_attn.rotary_emb.inv_freq"})
"""Written by old exporters, computed by every engine."""


def tally_layer(signature: Signature, outline: LayerOutline) -> Tally:
    """Return sums, forms and faults of one layer.

    Args:
        signature: Every tensor of the layer.
        outline: What the layer must consist of.
    """
    tally = Tally()
    modules, loose = _split(signature, outline)
    for module, linear in outline.linears.items():
        take_linear(tally, module, linear, modules.get(module, {}))
    if outline.experts is not None:
        _take_experts(tally, outline.experts, modules)
    take_others(tally, outline.others, loose)
    leave_unknown(tally, modules, loose)
    return tally


def _split(
    signature: Signature, outline: LayerOutline
) -> tuple[dict[str, dict[str, Entry]], Signature]:
    """Return parts by module for names that end in a known part, and all other tensors by name."""
    stacked = _stacked_names(outline.experts)
    modules: dict[str, dict[str, Entry]] = {}
    loose: Signature = {}
    for name, entry in signature.items():
        module, _, part = name.rpartition(".")
        if part in PARTS and name not in outline.others:
            modules.setdefault(module, {})[part] = entry
        elif name in stacked:
            module, part = stacked[name]
            modules.setdefault(module, {})[part] = entry
        else:
            loose[name] = entry
    return modules, loose


def _stacked_names(experts: Experts | None) -> dict[str, tuple[str, str]]:
    """Stacked experts join the part with an underscore: `experts.down_proj_weight_scale`."""
    if experts is None:
        return {}
    names: dict[str, tuple[str, str]] = {}
    for leaf in STACKED:
        module = f"{experts.prefix}.{leaf}"
        names[module] = (module, "weight")
        names.update({f"{module}_{part}": (module, part) for part in STACKED_PARTS})
    return names


def take_others(tally: Tally, others: Mapping[str, Other], loose: Signature) -> None:
    """Check and count norms, biases and gate state."""
    for name, other in others.items():
        entry = loose.pop(name, None)
        if entry is None:
            if other.required:
                tally.fault("E_MISSING_TENSOR", name, f"{list(other.shape)}", "none")
            continue
        if entry[1] != other.shape:
            tally.fault("E_SHAPE", name, str(list(other.shape)), text(entry))
        elif entry[0] not in DENSE_TYPES:
            tally.fault("E_CONFIG_TENSOR_MISMATCH", name, "BF16, F16 or F32", text(entry))
        elements = math.prod(other.shape)
        tally.add(Kind.DENSE, other.cut, entry, elements=elements)
        if other.keep_fp32:
            tally.shares[Kind.DENSE, other.cut].fp32 += elements


def leave_unknown(tally: Tally, modules: dict[str, dict[str, Entry]], loose: Signature) -> None:
    """Count what is known to be unused, and name everything else."""
    for module, parts in modules.items():
        for part, entry in parts.items():
            if part in KV_PARTS:
                tally.add(Kind.ACTIVATION_SCALES, Cut.WHOLE, entry)
                tally.kv_scales = True
            else:
                fix = "serve a checkpoint of a supported model, or report the name"
                where = f"{module}.{part}"
                tally.fault("E_UNKNOWN_TENSOR", where, "a tensor of this model", text(entry), fix)
    for name, entry in loose.items():
        if name in IGNORED:
            tally.add(Kind.OTHER, Cut.WHOLE, entry)
        else:
            fix = "serve a checkpoint of a supported model, or report the name"
            tally.fault("E_UNKNOWN_TENSOR", name, "a tensor of this model", text(entry), fix)


def _take_experts(tally: Tally, experts: Experts, modules: dict[str, dict[str, Entry]]) -> None:
    if any(f"{experts.prefix}.{leaf}" in modules for leaf in STACKED):
        _take_stacked(tally, experts, modules)
        return
    site = f"{experts.prefix}.w13"
    kinds = {
        "gate_proj": Linear(experts.intermediate, experts.hidden, Cut.ROWS, site),
        "up_proj": Linear(experts.intermediate, experts.hidden, Cut.ROWS, site),
        "down_proj": Linear(experts.hidden, experts.intermediate, Cut.COLUMNS),
    }
    for expert in range(experts.count):
        for leaf, linear in kinds.items():
            module = f"{experts.prefix}.{expert}.{leaf}"
            parts = modules.get(module)
            if parts is None:
                what = f"{leaf} of expert {expert} of {experts.count}"
                tally.fault("E_MISSING_EXPERT", module, what, "no tensor of it")
            else:
                take_linear(tally, module, linear, parts)


def _take_stacked(tally: Tally, experts: Experts, modules: dict[str, dict[str, Entry]]) -> None:
    """Experts in one tensor: `gate_up_proj` [E, 2I, H], gate rows first; `down_proj` [E, H, I]."""
    turned = turned_stacks(experts, modules)
    for leaf, (rows, columns) in stack_sizes(experts.hidden, experts.intermediate).items():
        cut = Cut.COLUMNS if leaf == "down_proj" else Cut.ROWS
        shape = (experts.count, rows, columns)
        module = f"{experts.prefix}.{leaf}"
        parts = modules.get(module, {})
        weight = parts.pop("weight", None)
        unread = parts.pop("input_scale", None)
        if unread is not None:
            tally.add(Kind.ACTIVATION_SCALES, Cut.WHOLE, unread)
            tally.activation_scales = True
        if weight is None:
            tally.fault("E_MISSING_TENSOR", module, "a weight", "none")
        elif weight[0] == "U8":
            _take_stacked_nvfp4(tally, module, shape, weight, parts, cut=cut)
        elif weight[0] == "F8_E4M3":
            is_turned = leaf in turned
            _take_stacked_fp8(tally, module, shape, weight, parts, cut=cut, is_turned=is_turned)
        else:
            _take_stacked_dense(tally, module, shape, weight, cut=cut, is_turned=leaf in turned)


def turned_stacks(experts: Experts, modules: Mapping[str, Mapping[str, Entry]]) -> frozenset[str]:
    """Return which stacks of whole weights, FP8 or dense, lie turned.

    Args:
        experts: The experts of one layer.
        modules: Module name relative to the layer, to its tensors by part.
    """
    weights = {
        leaf: modules.get(f"{experts.prefix}.{leaf}", {}).get("weight", ("", ()))
        for leaf in STACKED
    }
    shapes = {leaf: shape for leaf, (dtype, shape) in weights.items() if dtype not in ("", "U8")}
    sizes = stack_sizes(experts.hidden, experts.intermediate)
    return frozenset(leaf for leaf in shapes if lies_turned(leaf, shapes, sizes))


def _take_stacked_nvfp4(
    tally: Tally,
    module: str,
    shape: tuple[int, int, int],
    codes: Entry,
    parts: dict[str, Entry],
    *,
    cut: Cut,
) -> None:
    count, rows, columns = shape
    tally.forms[module] = Form.NVFP4
    tally.layouts.setdefault("modelopt", module)
    scales, factor = parts.pop("weight_scale", None), parts.pop("weight_scale_2", None)
    if scales is None or factor is None:
        names = ("weight_scale", "weight_scale_2")
        missing = [name for name, found in zip(names, (scales, factor), strict=True) if not found]
        what = f"the stack with {' and '.join(f'{module}_{name}' for name in names)}"
        tally.fault("E_MISSING_COMPANION", module, what, f"no {' and no '.join(missing)}")
        return
    # Older exports keep input features before output features, codes and scales alike.
    upright = (count, rows, columns // 2), (count, rows, columns // NVFP4_GROUP)
    turned = (count, columns // 2, rows), (count, columns // NVFP4_GROUP, rows)
    if columns % NVFP4_GROUP or codes[1] not in (upright[0], turned[0]):
        tally.fault("E_SHAPE", module, f"U8 {list(upright[0])}", text(codes))
        return
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (turned, upright)
    wanted: dict[tuple[int, ...], tuple[int, ...]] = {
        packed: scale for packed, scale in pairs if packed == codes[1]
    }
    if scales[1] not in wanted.values() and (codes[1], scales[1]) != turned:
        what = f"F8_E4M3 {list(wanted[codes[1]])}"
        tally.fault("E_SCALE_SHAPE", f"{module}_weight_scale", what, text(scales))
    elif scales[0] != "F8_E4M3":
        tally.fault("E_SCALE_DTYPE", f"{module}_weight_scale", "F8_E4M3", text(scales))
    if factor[1] not in ((count,), (count, 1, 1), (count, 1)):
        what = f"one number for each of {count} experts"
        tally.fault("E_SCALE_SHAPE", f"{module}_weight_scale_2", what, text(factor))
    elif factor[0] != "F32":
        tally.fault("E_SCALE_DTYPE", f"{module}_weight_scale_2", "F32", text(factor))
    tally.groups.setdefault(NVFP4_GROUP, (f"{module}_weight_scale", scales))
    elements = count * rows * columns
    tally.add(Kind.CODES, cut, codes, elements=elements, rows=count * rows)
    tally.add(Kind.BLOCK_SCALES, cut, scales, elements=elements // NVFP4_GROUP)
    tally.add(Kind.GLOBALS, Cut.WHOLE, factor, elements=count)
    if cut is Cut.COLUMNS:
        tally.widths.setdefault(columns, module)


def _take_stacked_fp8(
    tally: Tally,
    module: str,
    shape: tuple[int, int, int],
    weight: Entry,
    parts: dict[str, Entry],
    *,
    cut: Cut,
    is_turned: bool,
) -> None:
    count, rows, columns = shape
    tally.forms[module] = Form.FP8
    # The second name is older, and multiplies all the same; a stack with both is left with one.
    scale = parts.pop("weight_scale", None) or parts.pop("weight_scale_inv", None)
    if scale is None:
        tally.fault("E_MISSING_COMPANION", module, f"{module}_weight_scale", "only the stack")
        return
    blocks = (count, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    shapes = {
        Grain.TENSOR: ((count,), (count, 1), (count, 1, 1)),
        Grain.CHANNEL: ((count, rows, 1),),
        Grain.BLOCK: (blocks,),
    }
    is_known = tally.note_fp8(module, f"{module}_weight_scale", scale, shapes)
    if weight[1] != ((count, columns, rows) if is_turned else shape):
        tally.fault("E_SHAPE", module, str(list(shape)), text(weight))
    elif is_turned and scale[1] == blocks and blocks[1] == blocks[2] > 1:
        what = "scales that show which way round they lie, as the stack beside them is turned"
        fix = "export it with output features before input features"
        tally.fault("E_SCALE_SHAPE", f"{module}_weight_scale", what, text(scale), fix)
    elif not is_known:
        what = f"one number for each of {count} experts, their rows or blocks"
        tally.fault("E_SCALE_SHAPE", f"{module}_weight_scale", what, text(scale))
    elif scale[0] not in DENSE_TYPES:
        tally.fault("E_SCALE_DTYPE", f"{module}_weight_scale", "F32, BF16 or F16", text(scale))
    tally.add(Kind.FP8, cut, weight, elements=count * rows * columns, rows=count * rows)
    tally.add(Kind.FP8, cut, scale)


def _take_stacked_dense(
    tally: Tally,
    module: str,
    shape: tuple[int, int, int],
    weight: Entry,
    *,
    cut: Cut,
    is_turned: bool,
) -> None:
    count, rows, columns = shape
    tally.forms[module] = Form.DENSE
    # Older exports keep the experts transposed for a batched matrix product.
    if weight[1] != ((count, columns, rows) if is_turned else shape):
        tally.fault("E_SHAPE", module, str(list(shape)), text(weight))
    elif weight[0] not in DENSE_TYPES:
        tally.fault("E_CONFIG_TENSOR_MISMATCH", module, "BF16, F16 or F32", text(weight))
    tally.add(Kind.DENSE, cut, weight, elements=count * rows * columns)
