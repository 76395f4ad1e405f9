"""Charts: a picture of the right size that shows its lines, and none without a point."""

from __future__ import annotations

import io
import sys

import pytest
from PIL import Image

from appliance.chart import Line, Panel, draw


def panel(*lines: Line) -> Panel:
    return Panel("title", "layer", "error", lines)


def test_chart_with_two_panels_is_a_png_that_holds_both_lines_colours() -> None:
    first = panel(Line("a", ((0, 1.0), (1, 2.0))), Line("b", ((0, 0.0), (1, 0.5))))

    made = draw([first, panel(Line("c", ((0, 1e-9), (5, 1e-8))))])

    assert made is not None
    image = Image.open(io.BytesIO(made))
    colours = {colour for _, colour in image.getcolors(1 << 20) or []}
    assert image.size == (960, 840)
    assert {(0, 114, 178), (213, 94, 0)} <= colours


def test_chart_of_one_value_or_of_what_is_not_finite_is_drawn() -> None:
    assert draw([panel(Line("a", ((3, 0.0),)))])
    assert draw([panel(Line("a", ((0, 1.0), (1, 1.0))))])


def test_chart_without_a_point_or_without_pillow_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line("a", ((0, 1.0), (1, 2.0)))
    assert draw([panel()]) is None

    monkeypatch.setitem(sys.modules, "PIL", None)

    assert draw([panel(line)]) is None
