"""`appliance schema`: the files in the repository are what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_schema_prints_the_schema_of_the_repository(
    appliance: Callable[..., Any], repository: Path
) -> None:
    ended = appliance("schema")

    assert ended.code == 0
    assert ended.out == (repository / "config/appliance.schema.json").read_text()


def test_schema_markdown_is_the_reference_page(
    appliance: Callable[..., Any], repository: Path
) -> None:
    ended = appliance("schema", "--format", "markdown")

    assert ended.out == (repository / "docs/config.md").read_text()
