"""From the engine's module names back to the checkpoint's, in which excludes are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from appliance.vllm_plugin.compat import NameMapper

_PROBE = ".weight"
_WRAPPERS = ("language_model.", "model.")


class NameSpace:
    """Maps names of the engine to names of the checkpoint.

    Engines rename: a prefix moves, a wrapper appears. The engine's own mapper says how, in the
    other direction, so it is applied to every module that the checkpoint has.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        """Start with the checkpoint's names, which are the engine's unless a mapper differs."""
        self._modules = frozenset(modules)
        self._known: dict[str, str] = {module: module for module in self._modules}
        self._bare: dict[str, str | None] = {}
        for module in self._modules:
            bare = _bare(module)
            # Two modules that differ in wrappers only cannot be told apart without a mapper.
            self._bare[bare] = None if bare in self._bare else module

    def add_mapper(self, mapper: NameMapper) -> None:
        """Take in one mapper of the engine; nested model classes bring several."""
        for name, module in list(self._known.items()):
            for mapped in mapper.apply_list([name + _PROBE]):
                self._known.setdefault(mapped.removesuffix(_PROBE), module)

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of a module; the name itself if the checkpoint has none."""
        return self._known.get(name) or self._bare.get(_bare(name)) or name

    def leaves(self, site: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the checkpoint's names of the parts of a module, fused by the engine or not.

        Args:
            site: The engine's name of the module.
            packed: Last component of a fused module to the last components of its parts.
        """
        parent, _, last = site.rpartition(".")
        parts = packed.get(last, ())
        leaves = [self.checkpoint_name(f"{parent}.{part}" if parent else part) for part in parts]
        if any(leaf in self._modules for leaf in leaves):
            return leaves
        fused = self.checkpoint_name(site)
        return [fused] if fused in self._modules or not leaves else leaves

    def parent_name(self, site: str) -> str:
        """Return the checkpoint's name of a module without a tensor of its own: one of experts."""
        for known, module in self._known.items():
            if known.startswith(f"{site}."):
                return module.removesuffix(known.removeprefix(site))
        return self.checkpoint_name(site)


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = f".{name}".replace(f".{wrapper}", ".").removeprefix(".")
    return name
