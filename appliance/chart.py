"""Draws line charts as PNG files with Pillow; without it there is no chart.

Pillow is in the engine's lock. What a chart shows always stands in a JSON report beside it too.
"""

from __future__ import annotations

import importlib.util
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import ImageDraw, ImageFont

    _Font = ImageFont.ImageFont | ImageFont.FreeTypeFont

_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 190, 44, 56
_INK, _GRID, _PAPER = (40, 40, 40), (225, 225, 225), (255, 255, 255)
_COLOURS = (  # Okabe and Ito's, told apart by the colour-blind too
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (0, 0, 0),
    (130, 130, 130),
)
_TICKS = 5
_SMALL, _LARGE = 13, 16


@dataclass(frozen=True)
class Line:
    """One line of a panel: label and points, x ascending."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: Above it.
        x_label: Below it.
        y_label: What the values are, written beside the title.
        lines: What it shows; at most eight have colours of their own.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


def draw(panels: Sequence[Panel]) -> bytes | None:
    """Return a PNG with the panels below each other; None without Pillow or without a point."""
    shown = [panel for panel in panels if any(line.points for line in panel.lines)]
    if not shown or importlib.util.find_spec("PIL") is None:
        return None
    from PIL import Image, ImageDraw  # noqa: PLC0415 - a chart is optional, and so is Pillow

    image = Image.new("RGB", (_WIDTH, _HEIGHT * len(shown)), _PAPER)
    pen = ImageDraw.Draw(image)
    for number, panel in enumerate(shown):
        _Frame(pen, panel, _HEIGHT * number).draw()
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


class _Frame:
    """One panel on the canvas."""

    def __init__(self, pen: ImageDraw.ImageDraw, panel: Panel, top: int) -> None:
        from PIL import ImageFont  # noqa: PLC0415 - as in `draw`

        self._pen = pen
        self._panel = panel
        self._small = ImageFont.load_default(_SMALL)
        self._large = ImageFont.load_default(_LARGE)
        self._box = (_LEFT, top + _TOP, _WIDTH - _RIGHT, top + _HEIGHT - _BOTTOM)
        points = [point for line in panel.lines for point in line.points]
        self._x = _span([x for x, _ in points])
        self._y = _span([0.0, *(y for _, y in points)])

    def draw(self) -> None:
        """Draw everything."""
        left, top, right, bottom = self._box
        self._text((left, top - 32), f"{self._panel.title} - {self._panel.y_label}", self._large)
        for value in _ticks(*self._y):
            height = self._place(self._x[0], value)[1]
            self._pen.line((left, height, right, height), _GRID)
            self._text((left - 8, height), f"{value:.3g}", self._small, anchor="rm")
        for value in _ticks(*self._x):
            at = self._place(value, self._y[0])[0]
            self._pen.line((at, bottom, at, bottom + 4), _INK)
            self._text((at, bottom + 8), f"{value:.4g}", self._small, anchor="ma")
        self._pen.rectangle(self._box, outline=_INK)
        self._text(((left + right) / 2, bottom + 28), self._panel.x_label, self._small, anchor="ma")
        for number, line in enumerate(self._panel.lines):
            self._line(number, line)

    def _line(self, number: int, line: Line) -> None:
        colour = _COLOURS[number % len(_COLOURS)]
        places = [self._place(x, y) for x, y in line.points]
        if len(places) > 1:
            self._pen.line(places, colour, 2)
        for x, y in places:
            self._pen.ellipse((x - 2, y - 2, x + 2, y + 2), colour)
        at = (self._box[2] + 14, self._box[1] + 10 + 20 * number)
        self._pen.line((at[0], at[1], at[0] + 22, at[1]), colour, 3)
        self._text((at[0] + 30, at[1]), line.label, self._small, anchor="lm")

    def _place(self, x: float, y: float) -> tuple[float, float]:
        left, top, right, bottom = self._box
        across = (x - self._x[0]) / (self._x[1] - self._x[0])
        up = (y - self._y[0]) / (self._y[1] - self._y[0])
        return (left + across * (right - left), bottom - up * (bottom - top))

    def _text(self, at: tuple[float, float], text: str, font: _Font, *, anchor: str = "la") -> None:
        self._pen.text(at, text, _INK, font, anchor=anchor)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Limits of an axis that holds all finite values and is not empty."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    return (low, high + 0.05 * (high - low)) if high > low else (low, low + 1.0)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two limits, about five."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
