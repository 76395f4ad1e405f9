"""What of the engine's run needs no engine."""

from __future__ import annotations

import pytest

from appliance.serve.engine import line_level


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("(EngineCore pid=71) ERROR 11-29 19:22:33 [core.py:866] ValueError: x", "error"),
        ("(Worker_TP0 pid=80) WARNING 11-29 19:22:33 [x.py:1] slow", "warning"),
        ("INFO 11-29 19:22:33 [api_server.py:1] ERROR in the text", "info"),
        ("DEBUG 11-29 x", "debug"),
        ("CRITICAL: worker died", "error"),
        ("ERRORS are rare", "info"),
        ("Loading safetensors checkpoint shards: 100%", "info"),
    ],
)
def test_line_keeps_the_level_it_was_written_with(line: str, level: str) -> None:
    assert line_level(line) == level
