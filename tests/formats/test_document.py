"""docs/format.md says what the code does: its examples are run, its codes and names exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from appliance.checkpoint import metadata, stored


@pytest.fixture(scope="module")
def document(repository: Path) -> Path:
    return repository / "docs" / "format.md"


def test_every_example_of_the_document_is_right(document: Path) -> None:
    found = doctest.testfile(str(document), module_relative=False, verbose=False)

    assert found.failed == 0
    assert found.attempted > 30


def test_every_code_of_the_document_is_explained(document: Path, repository: Path) -> None:
    text = document.read_text()
    headings = (repository / "docs" / "operations.md").read_text()

    codes = set(re.findall(r"`([EW]_[A-Z0-9_]+)`", text))

    assert len(codes) > 8
    assert [code for code in sorted(codes) if f"### {code}\n" not in headings] == []


def test_every_algorithm_that_is_served_is_in_the_document(document: Path) -> None:
    row = next(
        line for line in document.read_text().splitlines() if line.startswith("| ModelOpt |")
    )

    assert [name for name in metadata._MODELOPT if name not in row] == []


def test_every_unread_suffix_is_in_the_document(document: Path) -> None:
    text = document.read_text()

    rare = {"q_scale", "prob_output_scale"}
    assert [name for name in sorted(stored.UNREAD - rare) if f"{name}`" not in text] == []
