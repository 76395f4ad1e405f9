"""Rows and columns of every matrix as the model has them, by its name in the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.checkpoint.layers import turned_stacks
from appliance.checkpoint.stacks import stack_sizes

if TYPE_CHECKING:
    from appliance.checkpoint.outline import Experts
    from appliance.checkpoint.read import Checkpoint


def model_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return module name to shape: [N, K], or [E, N, K] for stacked experts.

    Only modules of the layers and the head are there; towers and drafters have no outline.
    """
    outline, inventory = checkpoint.outline, checkpoint.inventory
    geometry = outline.geometry
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, kind in enumerate(outline.kinds):
        prefix = inventory.layer_name(layer)
        found = outline.layers[kind]
        for module, linear in found.linears.items():
            shapes[f"{prefix}{module}"] = (linear.rows, linear.columns)
        if found.experts is not None:
            shapes |= {f"{prefix}{name}": shape for name, shape in _experts(found.experts).items()}
    for name in inventory.top:
        module, _, part = name.rpartition(".")
        if module == "lm_head" and part != "bias":
            shapes[module] = (geometry.vocab_size, geometry.hidden_size)
    return shapes


def turned_modules(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the stacks of FP8 or dense experts that have input features before output features."""
    outline, inventory = checkpoint.outline, checkpoint.inventory
    found: set[str] = set()
    for layer, kind in enumerate(outline.kinds):
        experts = outline.layers[kind].experts
        if experts is not None:
            prefix = inventory.layer_name(layer)
            stored = {
                name: {"weight": entry} for name, entry in inventory.layers.get(layer, {}).items()
            }
            turned = turned_stacks(experts, stored)
            found |= {f"{prefix}{experts.prefix}.{leaf}" for leaf in turned}
    return frozenset(found)


def _experts(experts: Experts) -> dict[str, tuple[int, ...]]:
    gate_up = (experts.intermediate, experts.hidden)
    down = (experts.hidden, experts.intermediate)
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(experts.count):
        prefix = f"{experts.prefix}.{expert}"
        shapes |= {f"{prefix}.gate_proj": gate_up, f"{prefix}.up_proj": gate_up}
        shapes[f"{prefix}.down_proj"] = down
    for leaf, shape in stack_sizes(experts.hidden, experts.intermediate).items():
        shapes[f"{experts.prefix}.{leaf}"] = (experts.count, *shape)
    return shapes
