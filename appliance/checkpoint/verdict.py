"""Sets what the configuration says against what the tensors are, module by module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.checkpoint.linears import text
from appliance.checkpoint.rules import Form, Grain, Rules

if TYPE_CHECKING:
    from appliance.checkpoint.faults import FaultList
    from appliance.checkpoint.inventory import Inventory
    from appliance.checkpoint.linears import Tally
    from appliance.checkpoint.outline import Outline

_METADATA = (
    "add the quantization metadata of its exporter, or state"
    ' "quantization_config": {"quant_method": "nvfp4"} to let the tensors decide'
)
_LAYOUT_OF = {"modelopt": "modelopt", "compressed-tensors": "compressed-tensors", "fp8": "fp8"}


@dataclass(frozen=True)
class Verdict:
    """What the checkpoint is.

    Attributes:
        format: `nvfp4`, `fp8`, `mixed` or `dense`.
        producer: `modelopt`, `compressed-tensors`, `fp8`, `quasar-st` or `none`.
        group_size: Weights per block scale, 0 without NVFP4.
        widths: Module and K of row-parallel NVFP4 linears, one a width.
        kv_fp8: The configuration asks for an FP8 KV cache.
        overruled: Packed modules that the configuration excludes and that are read all the same.
        excluded_by: File and key of that list.
    """

    format: str
    producer: str
    group_size: int
    widths: tuple[tuple[str, int], ...]
    kv_fp8: bool
    overruled: tuple[str, ...] = ()
    excluded_by: str = ""


def judge(
    rules: Rules,
    inventory: Inventory,
    outline: Outline,
    tallies: dict[int | None, Tally],
    faults: FaultList,
) -> Verdict:
    """Add every disagreement to the faults and return what the checkpoint is."""
    for layer, tally in tallies.items():
        prefix = "" if layer is None else inventory.layer_name(layer)
        for finding in tally.findings:
            where = f"{prefix}{finding.module}"
            faults.add(finding.code, where, finding.what, finding.value, finding.fix)
    producer = _producer(rules, inventory, tallies, faults)
    group = _group(rules, inventory, tallies, faults)
    overruled: list[str] = []
    if not faults.faults:
        overruled = _compare(rules, inventory, outline, tallies, faults)
    forms = {form for tally in tallies.values() for form in tally.forms.values()}
    named = rules.producer in ("none", "") or Form.NVFP4 in forms or Form.FP8 in forms
    if rules.producer == "" and forms == {Form.DENSE}:
        what = "packed weights; a scheme applied while loading is not served"
        fix = "quantize the checkpoint with `appliance quantize`"
        faults.add("E_CONFIG_TENSOR_MISMATCH", rules.where, what, "dense weights only", fix)
    elif not named and not faults.faults:
        fix = "remove the statement, or export the checkpoint again"
        what = f"tensors of {rules.stated}"
        faults.add("E_CONFIG_TENSOR_MISMATCH", rules.where, what, "dense weights only", fix)
    return Verdict(
        format=_format(forms),
        producer=producer,
        group_size=group if Form.NVFP4 in forms else 0,
        widths=_widths(inventory, tallies),
        kv_fp8=rules.kv_fp8,
        overruled=tuple(overruled),
        excluded_by=rules.where,
    )


def _format(forms: set[Form]) -> str:
    if Form.NVFP4 in forms:
        return "mixed" if Form.FP8 in forms else "nvfp4"
    return "fp8" if Form.FP8 in forms else "dense"


def _producer(
    rules: Rules, inventory: Inventory, tallies: dict[int | None, Tally], faults: FaultList
) -> str:
    """Return who wrote the tensors; names and configuration must agree on it."""
    layouts: dict[str, str] = {}
    for layer, tally in tallies.items():
        prefix = "" if layer is None else inventory.layer_name(layer)
        for layout, module in tally.layouts.items():
            layouts.setdefault(layout, f"{prefix}{module}")
    if rules.producer == "none" and layouts:
        where = next(iter(layouts.values()))
        fix = _METADATA
        what = f"{rules.stated} in {rules.where}"
        faults.add("E_NO_QUANT_METADATA", where, what, "packed weights", fix)
    elif len(layouts) > 1:
        (first, one), (second, other) = list(layouts.items())[:2]
        value = f"{first} in {one} and {second} in {other}"
        faults.add("E_CONFIG_TENSOR_MISMATCH", rules.where, "one layout", value, "export it again")
    elif rules.producer in _LAYOUT_OF and layouts and _LAYOUT_OF[rules.producer] not in layouts:
        (layout, where) = next(iter(layouts.items()))
        what = f"tensors of {rules.producer} ({rules.where})"
        value = f"those of {layout}"
        faults.add("E_CONFIG_TENSOR_MISMATCH", where, what, value, "repair quant_method")
    return rules.producer or next(iter(layouts), "none")


_SCALE_TYPES = {"float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}


def _group(
    rules: Rules, inventory: Inventory, tallies: dict[int | None, Tally], faults: FaultList
) -> int:
    """Return the weights per block scale that the tensors have; the configuration must agree."""
    found: dict[int, str] = {}
    for layer, tally in tallies.items():
        prefix = "" if layer is None else inventory.layer_name(layer)
        for group, (where, scales) in tally.groups.items():
            found.setdefault(group, f"{prefix}{where}")
            wanted = _SCALE_TYPES.get(rules.scale_dtype)
            if rules.group_size and group != rules.group_size:
                what = f"scales of {rules.group_size} weights each ({rules.where} group_size)"
                value = f"{text(scales)}, one for {group}"
                faults.add("E_SCALE_SHAPE", f"{prefix}{where}", what, value, "repair group_size")
            elif rules.scale_dtype and wanted != scales[0]:
                what = f"{rules.scale_dtype}, as {rules.where} says"
                fix = "repair scale_dtype"
                faults.add("E_SCALE_DTYPE", f"{prefix}{where}", what, text(scales), fix)
    if len(found) > 1 and not faults.faults:
        value = " and ".join(f"{group} in {where}" for group, where in sorted(found.items()))
        faults.add("E_GROUP_SIZE", rules.where, "one group size", value, "export it again")
    return min(found, default=rules.group_size)


def _compare(
    rules: Rules,
    inventory: Inventory,
    outline: Outline,
    tallies: dict[int | None, Tally],
    faults: FaultList,
) -> list[str]:
    """Add every module whose tensors are not as stated; return those whose tensors win."""
    alike = not rules.tells_layers_apart
    settled: set[tuple[int, int]] = set()
    overruled: list[str] = []
    for layer, tally in tallies.items():
        # Layers that look alike and cannot be told apart by a pattern agree or disagree together.
        same = (id(tally), len(str(layer)))
        if alike and same in settled:
            continue
        prefix = "" if layer is None else inventory.layer_name(layer)
        before, won = len(faults.faults), len(overruled)
        for module, form in tally.forms.items():
            name = f"{prefix}{module}"
            expected = rules.expected(name)
            if rules.overruled(expected, form):
                overruled.append(name)
            elif expected is not form and expected is not None:
                _disagree(rules, name, expected, form, faults)
            elif rules.partly_ignored(name):
                what = f"an exclude list ({rules.where}) that names all parts of it, or none"
                value, fix = "some of them", "exclude all parts or none"
                faults.add("E_CONFIG_CONFLICT", name, what, value, fix)
            elif form is Form.FP8:
                _check_grain(rules, tally, prefix, module, faults)
        if layer is not None and len(faults.faults) == before:
            _check_sites(tally, outline, layer, prefix, faults)
        if len(faults.faults) == before and len(overruled) == won:
            settled.add(same)
    return overruled


def _check_grain(rules: Rules, tally: Tally, prefix: str, module: str, faults: FaultList) -> None:
    """Add FP8 scales that are for more or fewer weights than the configuration says."""
    scheme = rules.scheme(f"{prefix}{module}")
    where, scale, grains = tally.fp8_scales[module]
    if scheme.grains and not scheme.grains & grains:
        what = f"{_any(scheme.grains)}, since {rules.where} says {scheme.name}"
        value, fix = f"{text(scale)}, {_any(grains)}", "repair the statement, or export it again"
        faults.add("E_SCALE_SHAPE", f"{prefix}{where}", what, value, fix)


def _any(grains: frozenset[Grain]) -> str:
    return f"a scale, {' or '.join(grain for grain in Grain if grain in grains)}"


def _disagree(rules: Rules, name: str, expected: Form, form: Form, faults: FaultList) -> None:
    said = f"{rules.where} says {rules.stated}"
    if form is Form.DENSE:
        if rules.mentioned(name):
            return
        fix = f"add {name} to the exclude list, or export it quantized"
        what = f"{expected} weights, since {said} and no exclude entry names it"
        faults.add("E_UNQUANTIZED_NOT_EXCLUDED", name, what, "dense weights", fix)
    elif expected is Form.DENSE and rules.producer == "none":
        fix = _METADATA
        faults.add("E_NO_QUANT_METADATA", name, said, f"{form} weights", fix)
    elif expected is Form.DENSE:
        fix = f"remove {name} from the exclude list, or let the tensors win (model.lenient)"
        what = f"dense weights, since {rules.where} excludes it"
        faults.add("E_EXCLUDED_BUT_QUANTIZED", name, what, f"{form} weights", fix)
    else:
        fix = "export the checkpoint again"
        what = f"{expected} weights, since {said}"
        faults.add("E_CONFIG_TENSOR_MISMATCH", name, what, f"{form} weights", fix)


def _check_sites(
    tally: Tally, outline: Outline, layer: int, prefix: str, faults: FaultList
) -> None:
    """Linears that the engine fuses must share one form; so must all experts of a layer."""
    kind = outline.layers[outline.kinds[layer]]
    sites: dict[str, set[Form]] = {}
    for module, linear in kind.linears.items():
        if linear.site and module in tally.forms:
            sites.setdefault(linear.site, set()).add(tally.forms[module])
    if kind.experts is not None:
        inside = f"{kind.experts.prefix}."
        sites[kind.experts.prefix] = {
            form for module, form in tally.forms.items() if module.startswith(inside)
        }
    for site, forms in sites.items():
        if len(forms) > 1:
            value = " and ".join(sorted(forms))
            fix = "export the parts in one format"
            faults.add("E_FUSED_MIXED", f"{prefix}{site}", "one format for all parts", value, fix)


def _widths(inventory: Inventory, tallies: dict[int | None, Tally]) -> tuple[tuple[str, int], ...]:
    widths: dict[int, str] = {}
    for layer, tally in tallies.items():
        if layer is not None:
            for columns, module in tally.widths.items():
                widths.setdefault(columns, f"{inventory.layer_name(layer)}{module}")
    return tuple((module, columns) for columns, module in widths.items())
