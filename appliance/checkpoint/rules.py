"""What a checkpoint's configuration says of each module: quantized, how, or left alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from appliance.checkpoint.patterns import Matcher, canonical

if TYPE_CHECKING:
    from collections.abc import Mapping


FUSED: Mapping[str, tuple[str, ...]] = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that some checkpoints store fused and some by parts; lists name either."""

_WHOLE = {part: fused for fused, parts in FUSED.items() for part in parts}


def aliases(module: str) -> tuple[str, ...]:
    """Return the names that a list may use for a module instead: its parts, or the fused one."""
    parent, dot, last = module.rpartition(".")
    others = FUSED.get(last) or ((_WHOLE[last],) if last in _WHOLE else ())
    return tuple(f"{parent}{dot}{other}" for other in others)


def is_part(name: str, fused: str) -> bool:
    """Tell whether a name is a part of a module stored fused."""
    return name.rpartition(".")[2] in FUSED.get(fused.rpartition(".")[2], ())


class Form(StrEnum):
    """How the weights of one linear are stored."""

    DENSE = "dense"
    NVFP4 = "nvfp4"
    FP8 = "fp8"


class Grain(StrEnum):
    """How many FP8 weights share a scale."""

    TENSOR = "one for the matrix"
    CHANNEL = "one for each row"
    BLOCK = "one for each block of 128 x 128"


@dataclass(frozen=True)
class Scheme:
    """How a configuration says that weights are stored.

    Attributes:
        form: None if the tensors alone say which.
        grains: Those that the scales of FP8 weights may have; empty if nothing says so.
        name: What the configuration calls it, for messages.
    """

    form: Form | None
    grains: frozenset[Grain] = frozenset()
    name: str = ""


_DENSE = Scheme(Form.DENSE)


class Lenient(StrEnum):
    """What is done where an exclude list and the tensors contradict each other."""

    NONE = "none"
    TENSORS_WIN = "tensors-win"


@dataclass(frozen=True)
class Group:
    """Modules that share one scheme."""

    targets: Matcher
    scheme: Scheme


@dataclass(frozen=True)
class Rules:
    """The quantization metadata of one checkpoint.

    Attributes:
        producer: `modelopt`, `compressed-tensors`, `fp8`, `quasar-st`, or `none`.
        where: File and key that said so, for messages.
        stated: The statement, for messages.
        group_size: Weights per block scale, 0 for dense.
        ignore: Modules that are left alone; None if the configuration does not say which.
        groups: Schemes by target, first match wins.
        by_name: Schemes by module name (MIXED_PRECISION); unlisted modules are dense.
        kv_fp8: The exporter meant the KV cache to be FP8.
        scale_dtype: Type of the block scales where the configuration names one.
        lenient: What is done with an excluded module that is packed all the same.
    """

    producer: str
    where: str
    stated: str
    group_size: int = 0
    ignore: Matcher | None = None
    groups: tuple[Group, ...] = ()
    by_name: Mapping[str, Scheme] | None = None
    kv_fp8: bool = False
    scale_dtype: str = ""
    lenient: Lenient = Lenient.NONE

    def overruled(self, stated: Form | None, stored: Form) -> bool:
        """Tell whether tensors win over a statement: one that leaves packed weights alone."""
        is_excluded = stated is Form.DENSE and stored is not Form.DENSE
        return is_excluded and self.producer != "none" and self.lenient is Lenient.TENSORS_WIN

    def expected(self, module: str) -> Form | None:
        """Return the form that the configuration states for a linear, None if it does not say."""
        return self.scheme(module).form

    def scheme(self, module: str) -> Scheme:
        """Return what the configuration states for a linear."""
        if self.by_name is not None:
            return self._listed(canonical(module))
        if self.ignore is None and not self.groups:
            return Scheme(None) if self.producer != "none" else _DENSE
        if self.ignore is not None and self._ignored(module, self.ignore):
            return _DENSE
        for group in self.groups:
            if group.targets.matches(module):
                return group.scheme
        return _DENSE

    def _listed(self, module: str) -> Scheme:
        """Return the scheme of a module or of the nearest one above it; unlisted is dense."""
        listed: Mapping[str, Scheme] = self.by_name or {}
        names = [module, *aliases(module)]
        while module and not any(name in listed for name in names):
            module = module.rpartition(".")[0]
            names = [module]
        return next((listed[name] for name in names if name in listed), _DENSE)

    def _ignored(self, module: str, ignore: Matcher) -> bool:
        return ignore.matches(module) or any(ignore.matches(each) for each in aliases(module))

    def partly_ignored(self, module: str) -> bool:
        """Tell whether the ignore list names some, not all, parts of a module fused on disk."""
        parts = [each for each in aliases(module) if is_part(each, module)]
        if self.ignore is None or not parts or self.ignore.matches(module):
            return False
        return len({self.ignore.matches(part) for part in parts}) > 1

    @property
    def tells_layers_apart(self) -> bool:
        """Whether two layers with indexes of equal length may be stated differently."""
        matchers = [group.targets for group in self.groups]
        matchers += [] if self.ignore is None else [self.ignore]
        return self.by_name is not None or any(each.tells_layers_apart for each in matchers)

    def mentioned(self, module: str) -> bool:
        """Tell whether the ignore list names a part of the module's name."""
        return self.ignore is not None and self.ignore.mentions(canonical(module))
