"""Rules of the repository itself: sizes, headings for every code, locks without addresses."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

LONGEST_FILE = 400
SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".c", ".sh"}


@pytest.fixture(scope="module")
def tracked(repository: Path) -> list[Path]:
    listed = subprocess.run(
        ("git", "ls-files", "-z"), cwd=repository, capture_output=True, check=True, text=True
    ).stdout
    return [repository / name for name in listed.split("\0") if name]


@pytest.fixture(scope="module")
def shipped_text(tracked: list[Path], repository: Path) -> dict[Path, str]:
    shipped = [
        p for p in tracked if p.suffix == ".py" and "tests" not in p.relative_to(repository).parts
    ]
    return {path: path.read_text(encoding="utf-8") for path in shipped}


def test_source_files_stay_under_400_lines(tracked: list[Path]) -> None:
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked
        if path.suffix in SOURCE_SUFFIXES and path.exists()
    }

    too_long = {name: length for name, length in lengths.items() if length > LONGEST_FILE}

    assert too_long == {}


def test_every_fault_code_has_a_heading_in_operations(
    shipped_text: dict[Path, str], repository: Path
) -> None:
    codes = {
        code
        for text in shipped_text.values()
        for code in re.findall(r'\bFault\(\s*(?:code=)?"([A-Z][A-Z0-9_]+)"', text)
    }
    headings = set(
        re.findall(
            r"^#+ ([A-Z][A-Z0-9_]+)$", (repository / "docs/operations.md").read_text(), re.MULTILINE
        )
    )

    assert codes, "the pattern finds no code at all"
    assert codes - headings == set()


def test_locks_and_tree_name_no_package_index(tracked: list[Path]) -> None:
    pattern = re.compile(r"(extra-)?index-url\s*[=:]?\s*https?://|https?://\S+/simple/")
    hits = [
        path.name
        for path in tracked
        if path.suffix not in {".png", ".npz", ".safetensors", ".bin"}
        and path.exists()
        and path.name != "test_repository.py"
        and pattern.search(path.read_text(encoding="utf-8", errors="replace"))
    ]

    assert hits == []


def test_runtime_requirements_equal_the_projects_dependencies(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = set(project["dependencies"]) | set(project["optional-dependencies"]["weights"])
    listed = {
        line
        for line in (repository / "requirements/runtime.in").read_text().splitlines()
        if line and not line.startswith("#")
    }

    assert listed == wanted


def test_every_lock_entry_carries_a_hash(repository: Path) -> None:
    for lock in sorted((repository / "requirements").glob("*.lock")):
        entries = re.split(r"\n(?=\S)", lock.read_text().strip())

        assert all("--hash=sha256:" in entry for entry in entries), lock.name


def test_kernels_folder_holds_no_package(repository: Path) -> None:
    assert list((repository / "kernels").rglob("__init__.py")) == []


def test_every_adr_is_short_and_has_its_sections(repository: Path) -> None:
    for record in (repository / "docs/adr").glob("[0-9]*.md"):
        text = record.read_text()

        assert len(text.splitlines()) <= 60, record.name
        for section in (
            "Status",
            "Context",
            "Decision",
            "Consequences",
            "Rejected",
            "Revisit when",
        ):
            assert f"## {section}" in text, f"{record.name} lacks {section}"
