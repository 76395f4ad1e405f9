"""How the modules that the engine asks for are stored, and whether the config agrees.

Everything here comes from headers, so a checkpoint that contradicts itself is refused before any
memory of a device is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from appliance.checkpoint.rules import Form, Rules
from appliance.checkpoint.stored import NVFP4_GROUP, QUASAR_GROUP, split_name
from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Names:
    """How a producer calls the tensors of one quantized matrix.

    Attributes:
        codes: Packed E2M1 codes.
        scales: Block scales.
        globals: FP32 global scale of the matrix.
        activations: Activation scales, which no weight-only path reads.
        divisor: The stored global divides; else it multiplies. The name decides, never magnitude.
        group: Columns that share a block scale.
        scale_dtype: Type of the block scales, as headers name it.
        has_words: Codes are I32 words of eight instead of bytes of two; the bytes are the same.
        has_global: The matrix has a global scale; without one it counts as 1.
    """

    codes: str
    scales: str
    globals: str
    activations: tuple[str, ...]
    divisor: bool
    group: int = NVFP4_GROUP
    scale_dtype: str = "F8_E4M3"
    has_words: bool = False
    has_global: bool = True

    @property
    def loaded(self) -> tuple[str, ...]:
        """Every parameter that exists while loading only."""
        return (self.codes, self.scales, self.globals, *self.activations)


MODELOPT_NAMES = Names("weight", "weight_scale", "weight_scale_2", ("input_scale",), divisor=False)
COMPRESSED_TENSORS_NAMES = Names(
    "weight_packed", "weight_scale", "weight_global_scale", ("input_global_scale",), divisor=True
)
QUASAR_NAMES = Names(
    "qweight",
    "weight_scales",
    "weight_scale_2",
    (),
    divisor=False,
    group=QUASAR_GROUP,
    scale_dtype="F16",
    has_words=True,
)
_DENSE_DTYPES = ("F16", "BF16", "F32")
_UNSERVED = {
    "pre_quant_scale": "AWQ channel scales",
    "svdquant_lora_a": "an SVD branch",
    "forward_hadamard_matrix": "a rotation of activations",
}


@dataclass(frozen=True)
class Found:
    """One tensor as its header gives it."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    def __str__(self) -> str:
        """Return dtype, shape and file, as messages name them."""
        return f"{self.dtype} {list(self.shape)} in {self.file}"


@dataclass(frozen=True)
class Resolution:
    """How one module of the engine is stored: the same for all its parts.

    Attributes:
        form: NVFP4, FP8 or dense.
        names: Names of the tensors of NVFP4, else None.
        leaves: Names of the parts in the checkpoint, in order; fewer than the engine's parts if one
            tensor holds several.
        overruled: Parts that the config excludes and that are packed all the same.
    """

    form: Form
    names: Names | None
    leaves: tuple[str, ...]
    overruled: tuple[str, ...] = ()


Modules = dict[str, dict[str, Found]]
"""Module name to suffix (`weight`, `weight_scale`) to tensor."""


def modules_of(tensors: Iterable[tuple[str, Found]]) -> Modules:
    """Sort tensors by the module that owns them; stacked experts are modules of their own."""
    modules: Modules = {}
    for name, found in tensors:
        module, suffix = split_name(name)
        modules.setdefault(module, {})[suffix] = found
    return modules


def is_packed(tensors: Mapping[str, Found]) -> bool:
    """Say if a module holds packed codes instead of weights."""
    weight = tensors.get("weight")
    has_codes = "weight_packed" in tensors or "qweight" in tensors
    return has_codes or (weight is not None and weight.dtype == "U8")


def resolve(
    leaves: Sequence[str], site: str, modules: Mapping[str, Mapping[str, Found]], rules: Rules
) -> Resolution:
    """Decide how the parts of one module are stored.

    Args:
        leaves: Checkpoint names of the parts.
        site: Name of the whole module in the engine, for messages.
        modules: Every module of the checkpoint.
        rules: What the config states.

    Raises:
        ApplianceError: Exit code 30, if tensors and config disagree, parts differ from each other,
            or a tensor is missing.
    """
    missing = [leaf for leaf in leaves if leaf not in modules]
    if missing:
        code = _missing_code(missing, leaves)
        value = f"no tensor for {len(missing)} of {len(leaves)} parts"
        _refuse(code, missing[0], f"{site} needs it", value, "fetch or export the checkpoint again")
    found = {leaf: _resolve_leaf(leaf, modules[leaf], rules) for leaf in leaves}
    if len({form for form, _ in found.values()}) > 1:
        text = ", ".join(f"{leaf}: {form}" for leaf, (form, _) in found.items())
        _refuse(
            "E_FUSED_MIXED", site, "all parts must be stored alike", text, "requantize them alike"
        )
    form, names = found[leaves[0]]
    if any(other != names for _, other in found.values()):
        text = ", ".join(f"{leaf}: {names}" for leaf, (_, names) in found.items())
        _refuse(
            "E_FUSED_MIXED", site, "all parts must be laid out alike", text, "requantize them alike"
        )
    overruled = [leaf for leaf in leaves if rules.overruled(rules.expected(leaf), form)]
    return Resolution(form, names, tuple(leaves), tuple(overruled))


def _missing_code(missing: Sequence[str], leaves: Sequence[str]) -> str:
    is_expert = ".experts." in missing[0] and len(missing) < len(leaves)
    return "E_MISSING_EXPERT" if is_expert else "E_MISSING_TENSOR"


def _resolve_leaf(
    leaf: str, tensors: Mapping[str, Found], rules: Rules
) -> tuple[Form, Names | None]:
    form, names = _stored(leaf, tensors)
    # Without metadata the operator has named the method, and the tensors alone decide.
    stated = None if rules.producer == "none" else rules.expected(leaf)
    if (
        rules.overruled(stated, form)
        or stated in (None, form)
        or (form is Form.DENSE and rules.mentioned(leaf))
    ):
        return form, names
    weight = tensors.get("weight_packed") or tensors.get("qweight") or tensors["weight"]
    said = f"{rules.where} says {stated}"
    if form is Form.DENSE:
        value, fix = f"a dense tensor, {weight}", f"add {leaf} to the exclude list of the config"
        _refuse("E_UNQUANTIZED_NOT_EXCLUDED", f"{leaf}.weight", said, value, fix)
    if stated is Form.DENSE:
        value = f"{form}, {weight}"
        fix = f"take {leaf} off the exclude list of the config, or set model.lenient: tensors-win"
        _refuse("E_EXCLUDED_BUT_QUANTIZED", leaf, said, value, fix)
    return _refuse(
        "E_CONFIG_TENSOR_MISMATCH", leaf, said, f"{form}, {weight}", "correct the config"
    )


def _stored(leaf: str, tensors: Mapping[str, Found]) -> tuple[Form, Names | None]:
    for suffix, what in _UNSERVED.items():
        if suffix in tensors:
            fix = "serve a checkpoint without it"
            _refuse("E_UNSUPPORTED_ALGO", f"{leaf}.{suffix}", "must be plain NVFP4", what, fix)
    weight = tensors.get("weight")
    if "weight_packed" in tensors:
        names = COMPRESSED_TENSORS_NAMES
    elif "qweight" in tensors:
        names = _quasar_names(tensors)
    elif weight is None:
        fix = "fetch or export the checkpoint again"
        _refuse("E_MISSING_TENSOR", f"{leaf}.weight", "a weight is needed", "no tensor", fix)
    elif weight.dtype == "U8":
        names = MODELOPT_NAMES
    elif weight.dtype == "F8_E4M3":
        return Form.FP8, None
    elif weight.dtype in _DENSE_DTYPES:
        return Form.DENSE, None
    else:
        what, fix = "must be NVFP4, FP8 or dense", "requantize it"
        _refuse("E_UNSUPPORTED_ALGO", f"{leaf}.weight", what, str(weight), fix)
    _check_companions(leaf, tensors, names)
    return Form.NVFP4, names


def _quasar_names(tensors: Mapping[str, Found]) -> Names:
    """Return the names of QUASAR-ST with the group that the type of its scales stands for."""
    scales = tensors.get("weight_scales")
    dtype = "F16" if scales is None else scales.dtype
    return replace(
        QUASAR_NAMES,
        group=NVFP4_GROUP if dtype == "F8_E4M3" else QUASAR_GROUP,
        scale_dtype=dtype if dtype in ("F8_E4M3", "F32") else "F16",
        has_global="weight_scale_2" in tensors,
    )


def _check_companions(leaf: str, tensors: Mapping[str, Found], names: Names) -> None:
    for suffix in (names.scales, names.globals):
        if suffix not in tensors and (suffix != names.globals or names.has_global):
            what, fix = f"{names.codes} needs it", "fetch or export the checkpoint again"
            _refuse("E_MISSING_COMPANION", f"{leaf}.{suffix}", what, "no tensor", fix)
    codes, scales = tensors[names.codes], tensors[names.scales]
    where = f"{leaf}.{names.scales}"
    if scales.dtype != names.scale_dtype:
        what = f"block scales must be {names.scale_dtype}"
        _refuse("E_SCALE_DTYPE", where, what, str(scales), "requantize it")
    columns = codes.shape[-1] * (8 if names.has_words else 2)
    wanted = (*codes.shape[:-1], columns // names.group)
    if scales.shape not in (wanted, _turned_scales(codes)):
        what = f"must have the shape {list(wanted)}"
        _refuse("E_SCALE_SHAPE", where, what, str(scales), "requantize it")


def _turned_scales(codes: Found) -> tuple[int, ...]:
    """Return the shape of the scales of a stack that keeps input before output features."""
    if len(codes.shape) != 3:  # noqa: PLR2004 - experts first
        return ()
    experts, half, rows = codes.shape
    return (experts, half * 2 // NVFP4_GROUP, rows)


def fp8_scale_name(leaves: Sequence[str], modules: Mapping[str, Mapping[str, Found]]) -> str:
    """Return how the scales of one FP8 module are called: `weight_scale`, or `weight_scale_inv`.

    Both multiply. Parts may differ in what one scale is for, not in its name.

    Raises:
        ApplianceError: E_MISSING_COMPANION without scales, E_FUSED_MIXED if names differ.
    """
    names = {_fp8_scale_name(leaf, modules[leaf]) for leaf in leaves}
    if len(names) > 1:
        what, fix = "all parts must be stored alike", "requantize them alike"
        _refuse("E_FUSED_MIXED", leaves[0], what, " and ".join(sorted(names)), fix)
    return names.pop()


def _fp8_scale_name(leaf: str, tensors: Mapping[str, Found]) -> str:
    for name in ("weight_scale", "weight_scale_inv"):
        if name in tensors:
            return name
    fix = "fetch or export the checkpoint again"
    return _refuse("E_MISSING_COMPANION", f"{leaf}.weight_scale", "FP8 needs it", "no tensor", fix)


def _refuse(code: str, where: str, what: str, value: str, fix: str) -> NoReturn:
    raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, Fault(code, where, what, value, fix))
