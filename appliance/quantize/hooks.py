"""Sums the products of what goes into a layer's matrices while the layer runs.

Linear layers are watched as they are. Experts are one module with all their weights in
transformers; there the tokens of each expert are picked as the module does it, and what its second
matrix gets is computed beside it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from appliance.quantize.gptq import Moments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|down_proj)")


class InputSums:
    """The sums of one layer, by the keys that its inputs are asked under.

    Attributes:
        sums: Key to moments; a key whose matrix no token reached is missing.
        is_held_out: Whether the tokens that run now are held out.
    """

    def __init__(self, layer: torch.nn.Module, inputs: Mapping[str, str]) -> None:
        """Watch modules.

        Args:
            layer: The decoder layer.
            inputs: Key to module name inside the layer.

        Raises:
            AttributeError: If the layer has no such module.
        """
        self.sums: dict[str, Moments] = {}
        self.is_held_out = False
        self._handles: list[Any] = []
        experts: dict[str, dict[tuple[int, str], str]] = {}
        for key, name in inputs.items():
            match = _EXPERT.fullmatch(name)
            if match is not None and _is_stacked(layer.get_submodule(match[1])):
                experts.setdefault(match[1], {})[int(match[2]), match[3]] = key
            else:
                self._watch(layer.get_submodule(name), key)
        for name, keys in experts.items():
            self._watch_experts(layer.get_submodule(name), keys)

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: torch.nn.Module, key: str) -> None:
        def hook(_: object, words: tuple[torch.Tensor, ...]) -> None:
            self._add(key, words[0].reshape(-1, words[0].shape[-1]))

        self._handles.append(module.register_forward_pre_hook(hook))

    def _watch_experts(self, module: torch.nn.Module, keys: Mapping[tuple[int, str], str]) -> None:
        def hook(experts: Any, words: tuple[torch.Tensor, ...]) -> None:  # noqa: ANN401 - by duck
            hidden, chosen = words[0], words[1]
            for expert in range(len(experts.gate_up_proj)):
                rows = hidden[(chosen == expert).any(-1)]
                if not len(rows):
                    continue
                self._add(keys[expert, "gate_proj"], rows)
                gate, up = (rows @ experts.gate_up_proj[expert].t()).chunk(2, -1)
                self._add(keys[expert, "down_proj"], experts.act_fn(gate) * up)

        self._handles.append(module.register_forward_pre_hook(hook))

    def _add(self, key: str, rows: torch.Tensor) -> None:
        if key not in self.sums:
            empty = torch.zeros(rows.shape[1], rows.shape[1])
            self.sums[key] = Moments(empty, empty.clone())
        into = self.sums[key].held_out if self.is_held_out else self.sums[key].calibration
        into.addmm_(rows.t(), rows)


def stacked_parts(name: str, experts: int) -> Iterator[tuple[str, ...]]:
    """Name the matrices, expert by expert, that a stacked parameter is made of, rows in order.

    Args:
        name: `mlp.experts.gate_up_proj` or `mlp.experts.down_proj`.
        experts: Their number.
    """
    base, _, leaf = name.rpartition(".")
    leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    for expert in range(experts):
        yield tuple(f"{base}.{expert}.{each}.weight" for each in leaves)


def _is_stacked(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter)
