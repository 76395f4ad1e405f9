"""Every reported fault has a test that carries its id: nobody has to take the list on trust."""

from __future__ import annotations

import re
from pathlib import Path

CASES = 66


def test_every_reported_fault_has_a_test_of_its_id(repository: Path) -> None:
    found: set[int] = set()
    for path in (repository / "tests").rglob("test_*.py"):
        for line in path.read_text().splitlines():
            if line.lstrip().startswith(("def test_", "async def test_")):
                found |= {int(number) for number in re.findall(r"rc_(\d{3})", line)}

    assert sorted(set(range(1, CASES + 1)) - found) == []
    assert max(found) == CASES
