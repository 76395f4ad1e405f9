"""The picture of a report: error by layer, one line for every kind of matrix."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from appliance.chart import Line, Panel, draw

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAYER = re.compile(r".*layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_PANELS = (
    ("relative_mse", "Weights", "squared error / squared weight"),
    ("output_error", "Layer output on held-out text", "squared error / squared output"),
    ("output_error_rtn", "The same, rounded to nearest", "squared error / squared output"),
)


def draw_report(report: Mapping[str, Any]) -> bytes | None:
    """Return a PNG of quantize_report.json's errors, None without Pillow."""
    return draw([_panel(report, *texts) for texts in _PANELS])


def _panel(report: Mapping[str, Any], key: str, title: str, unit: str) -> Panel:
    found: dict[str, dict[int, list[float]]] = {}
    for name, tensor in report["tensors"].items():
        match = _LAYER.fullmatch(name)
        if match is None or tensor.get(key) is None:
            continue
        # All experts of a layer are one point, their mean: a line for each says nothing.
        kind = _EXPERT.sub(".experts.", f".{match[2]}").rpartition(".")[2]
        found.setdefault(kind, {}).setdefault(int(match[1]), []).append(tensor[key])
    lines = tuple(
        Line(kind, tuple((layer, sum(v) / len(v)) for layer, v in sorted(by_layer.items())))
        for kind, by_layer in found.items()
    )
    return Panel(f"{title}, mode {report['mode']}", "layer", unit, lines)
