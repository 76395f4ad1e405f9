"""A page of memory shared by the supervisor and the gateway inside the engine's API server.

It carries the traffic state one way and counts the other way, so that neither side ever waits for
the other: the supervisor sees the requests in flight even while the engine's event loop hangs.
Standard library only, because the gateway imports it inside vLLM.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = 0x0001_4452_414F_4256  # "VBOARD" and the layout's version
_SLOTS = 16
_BYTES = _SLOTS * 8


class Traffic(IntEnum):
    """What the gateway does with a request."""

    CLOSED = 0
    OPEN = 1
    DRAINING = 2


class Slot(IntEnum):
    """Index of each 8-byte number; the supervisor writes TRAFFIC, the gateway the others."""

    MAGIC = 0
    TRAFFIC = 1
    IN_FLIGHT = 2
    ACCEPTED = 3
    UNAUTHORIZED = 4
    TOO_LARGE = 5
    TOO_MANY = 6
    TURNED_AWAY = 7
    TOO_SLOW = 8
    CLOSED_ROUTE = 9


class Board:
    """The shared page; each slot has one writer, and 8-byte stores are whole on x86-64."""

    def __init__(self, page: mmap.mmap) -> None:
        """Wrap a mapped page."""
        self._page = page
        self._view = memoryview(page).cast("Q")

    @classmethod
    def create(cls, path: Path) -> Board:
        """Make a fresh page with traffic closed, readable by its owner only."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Written, not only sized: on a full disk this fails here and not with SIGBUS later.
            os.write(descriptor, bytes(_BYTES))
            board = cls(mmap.mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)
        board._view[Slot.MAGIC] = _MAGIC
        return board

    @classmethod
    def attach(cls, path: Path) -> Board:
        """Map the page another process made.

        Raises:
            OSError: If it cannot be opened.
            ValueError: If it is not a page of this version.
        """
        with path.open("r+b") as file:
            board = cls(mmap.mmap(file.fileno(), _BYTES))
        if board._view[Slot.MAGIC] != _MAGIC:
            raise ValueError(f"{path} is not a board of this version")
        return board

    @property
    def traffic(self) -> Traffic:
        """What the gateway does with new requests."""
        return Traffic(self._view[Slot.TRAFFIC])

    @traffic.setter
    def traffic(self, value: Traffic) -> None:
        self._view[Slot.TRAFFIC] = value

    def read(self, slot: Slot) -> int:
        """Return one number."""
        return self._view[slot]

    def add(self, slot: Slot, amount: int = 1) -> None:
        """Change one number; only its one writer may call this."""
        self._view[slot] += amount

    def zero(self, slot: Slot) -> None:
        """Set one number to 0, as after the death of its writer."""
        self._view[slot] = 0

    def close(self) -> None:
        """Unmap the page."""
        self._view.release()
        self._page.close()
