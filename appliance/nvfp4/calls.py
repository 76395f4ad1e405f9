"""What the modules that describe parts of the C ABI ask of a kernel library."""

from __future__ import annotations

from typing import Protocol


class Calls(Protocol):
    """A kernel library; it loads those modules itself, so they know it by this only."""

    def query(self, name: str, *arguments: object) -> int:
        """Call a function that gives a number of bytes."""
        ...

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that gives nothing."""
        ...
