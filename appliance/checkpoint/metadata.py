"""Reads quantization metadata: `quantization_config` and `hf_quant_config.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.checkpoint.document import as_object, as_texts, is_named, read_document
from appliance.checkpoint.faults import refuse
from appliance.checkpoint.patterns import (
    Matcher,
    PatternError,
    canonical,
    expression_matcher,
    shell_matcher,
)
from appliance.checkpoint.rules import Form, Grain, Group, Rules, Scheme
from appliance.checkpoint.stored import FP8_BLOCK, NVFP4_GROUP, QUASAR_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.checkpoint.config import ModelConfig

__all__ = ["KEYS", "LEGACY_NAME", "NVFP4_GROUP", "QUASAR_GROUP", "read_rules"]

KEYS = ("quantization_config", "compression_config")
LEGACY_NAME = "hf_quant_config.json"

_NVFP4 = Scheme(Form.NVFP4)
_MODELOPT = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": _NVFP4,  # the weights are NVFP4, FP8 are the activations
} | {
    name: Scheme(Form.FP8, frozenset({grain}), name)
    for name, grain in (
        ("FP8", Grain.TENSOR),
        ("FP8_PER_CHANNEL_PER_TOKEN", Grain.CHANNEL),
        ("FP8_PB_WO", Grain.BLOCK),
    )
}
_STRATEGIES = {grain.name.lower(): grain for grain in Grain}
_REASONS = {
    "NVFP4_AWQ": "its channel scales change the input of every product",
    "NVFP4_SVD": "a low-rank branch is added to every product",
    "NVFP4_SVDQUANT": "a low-rank branch is added to every product",
    "MXFP4": "E8M0 scales of 32 weights, which no kernel here reads",
    "W4A8_MXFP4_FP8": "E8M0 scales of 32 weights, which no kernel here reads",
    "MXFP8": "E8M0 scales of 32 weights, which no kernel here reads",
    "INT8": "integer weights",
    "W8A8_SQ_PER_CHANNEL": "integer weights",
    "INT4_AWQ": "integer weights",
    "W4A16_AWQ": "integer weights",
    "W4A8_AWQ": "integer weights",
}
"""Algorithms of ModelOpt that are known and refused, and why."""

_MIXED = "MIXED_PRECISION"
_SERVED = "NVFP4 or FP8 of ModelOpt or compressed-tensors, or MIXED_PRECISION of both"
_FP8_METHODS = ("fp8", "fbgemm_fp8")
_BLOCKS = [FP8_BLOCK, FP8_BLOCK]
_OTHER_METHODS = {"awq", "gptq", "bitsandbytes", "gguf", "mxfp4", "quark"}
_FIX = "serve a checkpoint of that kind, or quantize the original with `appliance quantize`"
_REPAIR = "repair the checkpoint's configuration, or fetch it again"


def read_rules(config: ModelConfig) -> Rules:
    """Return what the configuration says of the checkpoint's quantization.

    Raises:
        ApplianceError: Exit 30 if the method is unknown, the scheme is not served, or two files
            contradict each other.
    """
    key, block = next(
        # An empty object says nothing: some exporters write one beside hf_quant_config.json.
        ((key, block) for key in KEYS if (block := as_object(config.get(key)))),
        (KEYS[0], None),
    )
    legacy_path = config.path.parent / LEGACY_NAME
    legacy = _legacy(config) if is_named(legacy_path) else None
    if block is None:
        if legacy is None:
            empty = as_object(config.get(KEYS[0])) is not None
            return Rules("none", str(config.path), f"{'an empty' if empty else 'no'} {KEYS[0]}")
        return _modelopt(legacy, str(legacy_path))
    where = f"{config.path} {key}"
    method = block.get("quant_method")
    rules = _by_method(method, block, where, fallback=legacy is not None)
    if rules.producer == "modelopt" and legacy is not None:
        _compare(block, legacy, where, str(legacy_path))
    return rules


def _by_method(method: object, block: dict[str, Any], where: str, *, fallback: bool) -> Rules:
    name = method.lower() if isinstance(method, str) else ""
    if name.startswith("modelopt") or (not name and fallback):
        return _modelopt(block, where)
    if name == "compressed-tensors":
        return _compressed_tensors(block, where)
    if name in ("nvfp4", "fp4"):
        return _by_tensors(name, block, where)
    if name in _FP8_METHODS:
        return _fp8(name, block, where)
    if name in _OTHER_METHODS:
        raise refuse("E_UNSUPPORTED_ALGO", f"{where}.quant_method", _SERVED, name, _FIX)
    what = "modelopt, compressed-tensors, fp8 or nvfp4"
    value = repr(method)[:80] if method else "an empty text" if method == "" else "nothing"
    raise refuse("E_UNKNOWN_METHOD", f"{where}.quant_method", what, value, _FIX)


def _legacy(config: ModelConfig) -> dict[str, Any]:
    path = config.path.parent / LEGACY_NAME
    block = as_object(read_document(path).get("quantization"))
    if block is None:
        raise refuse("E_CONFIG", f"{path} quantization", "an object", "none", _REPAIR)
    return block


def _modelopt(block: dict[str, Any], where: str) -> Rules:
    algorithm = _algorithm(block)
    kv_fp8 = _kv_fp8(block)
    if algorithm == _MIXED:
        layers = _layers(block, where)
        group = NVFP4_GROUP if _NVFP4 in layers.values() else 0
        ignore = _matcher(shell_matcher, _excludes(block) or [], where)
        return Rules("modelopt", where, _MIXED, group, ignore, by_name=layers, kv_fp8=kv_fp8)
    scheme = _served(algorithm, f"{where}.quant_algo")
    if block.get("pre_quant_scale") is True:
        what = "weights without a pre-quantization scale"
        raise refuse("E_UNSUPPORTED_ALGO", f"{where}.pre_quant_scale", what, "true", _FIX)
    group = _group_size(block, where) if scheme is _NVFP4 else 0
    everything = Group(expression_matcher(["Linear"]), scheme)
    ignore = _matcher(shell_matcher, _excludes(block) or [], where)
    return Rules("modelopt", where, algorithm, group, ignore, (everything,), kv_fp8=kv_fp8)


def _algorithm(block: dict[str, Any]) -> str:
    value = block.get("quant_algo")
    return value.upper() if isinstance(value, str) else ""


def _served(algorithm: str, where: str) -> Scheme:
    scheme = _MODELOPT.get(algorithm)
    if scheme is None:
        reason = _REASONS.get(algorithm)
        found = f"{algorithm} ({reason})" if reason else algorithm or "nothing"
        raise refuse("E_UNSUPPORTED_ALGO", where, _SERVED, found[:160], _FIX)
    return scheme


def _kv_fp8(block: dict[str, Any]) -> bool:
    return bool(block.get("kv_cache_quant_algo") or block.get("kv_cache_scheme"))


def _excludes(block: dict[str, Any]) -> list[str] | None:
    listed = as_texts(block.get("exclude_modules"))
    return as_texts(block.get("ignore")) if listed is None else listed


def _group_size(block: dict[str, Any], where: str) -> int:
    sizes: list[object] = [block["group_size"]] if block.get("group_size") is not None else []
    for group in (as_object(block.get("config_groups")) or {}).values():
        weights = as_object((as_object(group) or {}).get("weights")) or {}
        if weights.get("group_size") is not None:
            sizes.append(weights["group_size"])
    _check_group(sizes, where)
    return NVFP4_GROUP


def _check_group(sizes: list[object], where: str) -> None:
    wrong = [size for size in sizes if size != NVFP4_GROUP]
    if wrong:
        value = ", ".join(repr(size)[:40] for size in wrong[:3])
        raise refuse("E_GROUP_SIZE", f"{where} group_size", f"{NVFP4_GROUP}", value, _FIX)


def _layers(block: dict[str, Any], where: str) -> dict[str, Scheme]:
    layers = as_object(block.get("quantized_layers"))
    if not layers:
        what = "module names with their algorithm"
        raise refuse("E_CONFIG", f"{where}.quantized_layers", what, "nothing", _REPAIR)
    schemes: dict[str, Scheme] = {}
    for name, entry in layers.items():
        stated = as_object(entry) or {}
        scheme = _served(_algorithm(stated), f"{where}.quantized_layers {name}")
        if scheme is _NVFP4 and stated.get("group_size") is not None:
            _check_group([stated["group_size"]], f"{where}.quantized_layers {name}")
        schemes[canonical(name)] = scheme
    return schemes


def _compare(block: dict[str, Any], legacy: dict[str, Any], where: str, other: str) -> None:
    """Two files that both describe the checkpoint must say the same."""
    claims = [("quant_algo", _algorithm(block), _algorithm(legacy))]
    here, there = _excludes(block), _excludes(legacy)
    if here is not None and there is not None:
        claims.append(("excluded modules", repr(sorted(here)), repr(sorted(there))))
    if _algorithm(legacy) != _MIXED and legacy.get("group_size") is not None:
        _group_size(legacy, other)
    if _algorithm(block) == _algorithm(legacy) == _MIXED:
        listed, others = _layers(block, where), _layers(legacy, other)
        names = (name for name in listed | others if listed.get(name) != others.get(name))
        if (name := next(names, None)) is not None:
            claims.append((f"scheme of {name}", _called(listed, name), _called(others, name)))
    for name, first, second in claims:
        if first != second:
            value = f"{first[:160]} and {second[:160]}"
            raise refuse("E_CONFIG_CONFLICT", f"{where} and {other}", f"one {name}", value, _REPAIR)


def _called(layers: dict[str, Scheme], name: str) -> str:
    scheme = layers.get(name)
    return "none" if scheme is None else scheme.name or str(scheme.form)


def _compressed_tensors(block: dict[str, Any], where: str) -> Rules:
    _check_plain(block, where)
    groups = as_object(block.get("config_groups"))
    if not groups:
        what = "at least one group"
        raise refuse("E_CONFIG", f"{where}.config_groups", what, "nothing", _REPAIR)
    found: list[Group] = []
    for name, entry in groups.items():
        place = f"{where}.config_groups.{name}"
        stated = as_object(entry) or {}
        scheme = _scheme(as_object(stated.get("weights")) or {}, place)
        targets = as_texts(stated.get("targets")) or ["Linear"]
        found.append(Group(_matcher(expression_matcher, targets, place), scheme))
    # A group that names modules is more particular than one that names a class.
    found.sort(key=lambda group: group.targets.everything)
    ignore = _matcher(expression_matcher, as_texts(block.get("ignore")) or [], where)
    has_fp4 = any(group.scheme is _NVFP4 for group in found)
    return Rules(
        "compressed-tensors",
        where,
        f"format {block.get('format')}",
        NVFP4_GROUP if has_fp4 else 0,
        ignore,
        tuple(found),
        kv_fp8=_kv_fp8(block),
    )


def _check_plain(block: dict[str, Any], where: str) -> None:
    """Rotations and sparsity change what the stored weights mean."""
    transform = as_object(block.get("transform_config"))
    sparsity = as_object(block.get("sparsity_config")) or {}
    sparse = None if sparsity.get("format") in (None, "dense") else sparsity
    for key, value in (("transform_config", transform), ("sparsity_config", sparse)):
        if value:
            text = repr(value)[:120]
            raise refuse("E_UNSUPPORTED_ALGO", f"{where}.{key}", "none of it", text, _FIX)


def _scheme(weights: dict[str, Any], where: str) -> Scheme:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    stated = f"{bits} bit {kind}, strategy {strategy}"
    if kind != "float" or weights.get("symmetric") is False:
        raise refuse("E_UNSUPPORTED_ALGO", f"{where}.weights", _SERVED, stated, _FIX)
    grain = _STRATEGIES.get(strategy) if isinstance(strategy, str) else None
    if bits == 8 and grain is not None:  # noqa: PLR2004 - FP8
        size = weights.get("block_structure")
        if grain is Grain.BLOCK and size not in (None, _BLOCKS, f"{FP8_BLOCK}x{FP8_BLOCK}"):
            place, what = f"{where}.weights.block_structure", f"blocks of {FP8_BLOCK} x {FP8_BLOCK}"
            raise refuse("E_GROUP_SIZE", place, what, repr(size)[:80], _FIX)
        return Scheme(Form.FP8, frozenset({grain}), f"strategy {strategy}")
    if bits != 4 or strategy != "tensor_group":  # noqa: PLR2004 - FP4
        raise refuse("E_UNSUPPORTED_ALGO", f"{where}.weights", _SERVED, stated, _FIX)
    _check_group([weights.get("group_size")], f"{where}.weights")
    return _NVFP4


def _fp8(name: str, block: dict[str, Any], where: str) -> Rules:
    """`fp8` lists what must stay dense, if at all; embedding, head and router it never names."""
    size, kind = block.get("weight_block_size"), block.get("fmt")
    if kind not in (None, "e4m3", "e4m3fn", "float8_e4m3fn"):
        raise refuse("E_UNSUPPORTED_ALGO", f"{where}.fmt", "e4m3", repr(kind)[:80], _FIX)
    if size not in (None, _BLOCKS):
        what = f"blocks of {FP8_BLOCK} x {FP8_BLOCK}"
        raise refuse("E_GROUP_SIZE", f"{where}.weight_block_size", what, repr(size)[:80], _FIX)
    listed = as_texts(block.get("modules_to_not_convert")) or as_texts(block.get("ignored_layers"))
    stated = f"quant_method {name}"
    blocks = frozenset({Grain.BLOCK})
    grains, of = (blocks, "of") if size is not None else (frozenset(Grain) - blocks, "without")
    scheme = Scheme(None, grains, f"{stated} {of} blocks")
    everything = Group(expression_matcher(["Linear"]), scheme)
    ignore = _matcher(shell_matcher, listed or [], where)
    return Rules("fp8", where, stated, 0, ignore, (everything,))


def _by_tensors(name: str, block: dict[str, Any], where: str) -> Rules:
    """`nvfp4` names no exporter: the tensors say which of three layouts it is."""
    _check_profile(block, where)
    ignore = as_texts(block.get("ignore"))
    size = block.get("group_size")
    if size is not None and (type(size) is not int or size not in (NVFP4_GROUP, QUASAR_GROUP)):
        raise refuse("E_GROUP_SIZE", f"{where} group_size", "16 or 128", repr(size)[:80], _FIX)
    stated = f"quant_method {name}"
    scale_dtype = block.get("scale_dtype")
    group = size or 0  # without one the tensors alone say it
    types = str(scale_dtype) if scale_dtype is not None else ""
    if ignore is None:
        return Rules("", where, stated, group, scale_dtype=types)
    everything = Group(expression_matcher(["Linear"]), _NVFP4)
    matcher = _matcher(expression_matcher, ignore, where)
    return Rules("", where, stated, group, matcher, (everything,), scale_dtype=types)


def _check_profile(block: dict[str, Any], where: str) -> None:
    """Check what the safetensors profile of QUASAR states of itself, where it does."""
    codebook = block.get("codebook", "e2m1")
    if codebook != "e2m1":
        raise refuse("E_CODEBOOK", f"{where}.codebook", "e2m1", repr(codebook)[:80], _FIX)
    version = block.get("version")
    if block.get("format") == "quasar" and version is not None and str(version)[:2] != "1.":
        raise refuse("E_VERSION", f"{where}.version", "1.x", repr(version)[:80], _FIX)


def _matcher(build: Callable[[list[str]], Matcher], patterns: list[str], where: str) -> Matcher:
    try:
        return build(patterns)
    except PatternError as error:
        what = "patterns that compile"
        raise refuse("E_CONFIG", where, what, str(error), _REPAIR) from None
